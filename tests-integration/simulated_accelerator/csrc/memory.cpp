#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include <c10/util/Exception.h>

namespace sim {
namespace {

constexpr size_t kArena = size_t(64) << 30;
constexpr size_t kGranule = 512;
constexpr int kFreed = 0xFF;  // NaN in every floating-point type

size_t rounded(size_t n) { return (n + kGranule - 1) / kGranule * kGranule; }

// One file in memory, mapped twice: where tensors say that they are, no access is allowed; streams use the other.
struct Arena {
  char* hidden = nullptr;
  char* seen = nullptr;
  size_t next = 0;

  void open() {
    const int file = memfd_create("simulated", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArena) == 0, "no memory for the simulated accelerator");
    const int flags = MAP_SHARED | MAP_NORESERVE;
    seen = static_cast<char*>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE, flags, file, 0));
    hidden = static_cast<char*>(mmap(nullptr, kArena, PROT_NONE, flags, file, 0));
    ::close(file);
    TORCH_CHECK(seen != MAP_FAILED && hidden != MAP_FAILED, "no addresses for the simulated accelerator");
  }
  bool holds(const void* address) const {
    return hidden != nullptr && address >= hidden && address < hidden + kArena;
  }
  char* take(size_t size) {
    TORCH_CHECK(next + size <= kArena, "the simulated accelerator's addresses are used up");
    char* address = hidden + next;
    next += size;
    return address;
  }
};

struct Block {
  size_t size;
  Stream* stream;  // that allocated it
  std::set<Stream*> recorded;
};
struct Leaving {  // freed, and streams of `record_stream` are not there yet
  uintptr_t address;
  Block block;
  std::vector<MomentPtr> moments;
};
using Pool = std::map<std::pair<Stream*, size_t>, std::vector<uintptr_t>>;

struct Memory {
  std::mutex lock;
  Arena arena;
  std::map<uintptr_t, Block> live;
  Pool pool;
  std::list<Leaving> leaving;
  std::map<int, c10::CachingDeviceAllocator::DeviceStats> stats;
};
Memory& memory() {
  static Memory* instance = new Memory();  // leaked: tensors are freed until the process ends
  return *instance;
}

void poison(Memory& all, uintptr_t address, size_t size) {
  char* seen = all.arena.seen + (reinterpret_cast<char*>(address) - all.arena.hidden);
  memset(seen, kFreed, size);
}

void collect(Memory& all) {
  for (auto it = all.leaving.begin(); it != all.leaving.end();) {
    bool done = true;
    for (const auto& moment : it->moments) done = done && moment->done;
    if (!done) {
      ++it;
      continue;
    }
    poison(all, it->address, it->block.size);
    all.pool[{it->block.stream, it->block.size}].push_back(it->address);
    it = all.leaving.erase(it);
  }
}

void release(void* pointer) {
  if (pointer == nullptr || closing()) return;
  auto& all = memory();
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  Block block;
  {
    std::lock_guard<std::mutex> guard(all.lock);
    auto found = all.live.find(address);
    if (found == all.live.end()) return;
    block = found->second;
    all.live.erase(found);
    all.stats[block.stream->device].allocated_bytes[0].decrease(block.size);
  }
  std::set<Actor> recorded;
  std::vector<MomentPtr> moments;
  for (Stream* stream : block.recorded) {
    recorded.insert(stream->actor);
    moments.push_back(stream->record());
  }
  order().release(block.stream->actor, address, block.size, recorded);
  if (moments.empty()) {
    block.stream->enqueue_unseen([&all, address, size = block.size] { poison(all, address, size); });
    std::lock_guard<std::mutex> guard(all.lock);
    all.pool[{block.stream, block.size}].push_back(address);
    return;
  }
  moments.push_back(block.stream->record());
  std::lock_guard<std::mutex> guard(all.lock);
  all.leaving.push_back(Leaving{address, block, std::move(moments)});
}

// As torch's caching allocators: memory that a stream's tensors left is given to the next one of that stream at once.
struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    const c10::Device device(kDevice, current_device());
    if (n == 0) return {nullptr, nullptr, &release, device};
    Stream& stream = current_stream(device.index());
    const size_t size = rounded(n);
    uintptr_t address = 0;
    {
      auto& all = memory();
      std::lock_guard<std::mutex> guard(all.lock);
      if (all.arena.hidden == nullptr) all.arena.open();
      collect(all);
      auto& stats = all.stats[device.index()];
      const int64_t used = stats.allocated_bytes[0].current;
      TORCH_CHECK_WITH(OutOfMemoryError, used + int64_t(size) <= options().capacity, "the simulated accelerator has ",
                       options().capacity.load(), " bytes, ", used, " are in use and ", size, " are asked for");
      auto& free = all.pool[{&stream, size}];
      if (free.empty()) {
        address = reinterpret_cast<uintptr_t>(all.arena.take(size));
        poison(all, address, size);
        stats.reserved_bytes[0].increase(size);
      } else {
        address = free.back();
        free.pop_back();
      }
      stats.allocated_bytes[0].increase(size);
      all.live[address] = Block{size, &stream, {}};
    }
    order().allocate(stream.actor, address, size);
    void* pointer = reinterpret_cast<void*>(address);
    return {pointer, pointer, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override {
    const auto t = reinterpret_cast<uintptr_t>(to), f = reinterpret_cast<uintptr_t>(from);
    current_stream(current_device())
        .enqueue("copy of memory", {{f, f + n, false}, {t, t + n, true}},
                 [to = visible(to), from = visible(from), n] { memcpy(to, from, n); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < options().devices; ++device) drain(static_cast<c10::DeviceIndex>(device));
    auto& all = memory();
    std::lock_guard<std::mutex> guard(all.lock);
    collect(all);
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_stream(pointer.get(), stream_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto& all = memory();
    std::lock_guard<std::mutex> guard(all.lock);
    return all.stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    auto& all = memory();
    std::lock_guard<std::mutex> guard(all.lock);
    all.stats[device].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    auto& all = memory();
    std::lock_guard<std::mutex> guard(all.lock);
    all.stats[device].allocated_bytes[0].reset_peak();
    all.stats[device].reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto& all = memory();
    std::lock_guard<std::mutex> guard(all.lock);
    const size_t capacity = options().capacity;
    return {capacity - size_t(all.stats[device].allocated_bytes[0].current), capacity};
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Pinned memory

struct PinnedBlock {
  size_t size;
  std::vector<MomentPtr> users;
};
struct Pinned {
  std::mutex lock;
  char* begin = nullptr;
  size_t next = 0;
  std::map<uintptr_t, PinnedBlock> live;
  std::list<std::pair<uintptr_t, PinnedBlock>> freed;
};
Pinned& pinned() {
  static Pinned* instance = new Pinned();
  return *instance;
}

void release_pinned(void* pointer) {
  if (pointer == nullptr || closing()) return;
  auto& all = pinned();
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> guard(all.lock);
  auto found = all.live.find(address);
  if (found == all.live.end()) return;
  order().forget(address, found->second.size);
  all.freed.emplace_back(address, std::move(found->second));
  all.live.erase(found);
}

// Freed memory is handed out again once the streams that copied it are there, as torch's allocators of pinned memory do.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &release_pinned, c10::Device(c10::kCPU)};
    auto& all = pinned();
    const size_t size = rounded(n);
    std::lock_guard<std::mutex> guard(all.lock);
    uintptr_t address = reuse(all, size);
    if (address == 0) {
      if (all.begin == nullptr) {
        void* begin = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        TORCH_CHECK(begin != MAP_FAILED, "no addresses for pinned memory");
        all.begin = static_cast<char*>(begin);
      }
      TORCH_CHECK(all.next + size <= kArena, "the addresses of pinned memory are used up");
      address = reinterpret_cast<uintptr_t>(all.begin + all.next);
      all.next += size;
    }
    all.live[address] = PinnedBlock{size, {}};
    void* pointer = reinterpret_cast<void*>(address);
    return {pointer, pointer, &release_pinned, c10::Device(c10::kCPU)};
  }
  static uintptr_t reuse(Pinned& all, size_t size) {
    for (auto it = all.freed.begin(); it != all.freed.end(); ++it) {
      bool done = it->second.size == size;
      for (const auto& user : it->second.users) done = done && user->done;
      if (!done) continue;
      const uintptr_t address = it->first;
      all.freed.erase(it);
      return address;
    }
    return 0;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};

}  // namespace

c10::DeviceAllocator* allocator() {
  static Allocator* instance = new Allocator();
  return instance;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator* instance = new PinnedAllocator();
  return instance;
}

bool is_pinned(const void* address) {
  auto& all = pinned();
  std::lock_guard<std::mutex> guard(all.lock);
  return all.begin != nullptr && address >= all.begin && address < all.begin + all.next;
}

void use_pinned(const void* address, Stream& stream) {
  auto& all = pinned();
  auto moment = stream.record();
  std::lock_guard<std::mutex> guard(all.lock);
  auto found = all.live.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (found == all.live.begin()) return;
  auto& users = std::prev(found)->second.users;
  users.erase(std::remove_if(users.begin(), users.end(), [](const auto& user) { return user->done.load(); }),
              users.end());
  users.push_back(std::move(moment));
}

char* visible(const void* address) {
  if (address == nullptr) return nullptr;
  auto& arena = memory().arena;
  TORCH_CHECK(arena.holds(address), "not memory of the simulated accelerator: ", address);
  return arena.seen + (static_cast<const char*>(address) - arena.hidden);
}

c10::DeviceIndex device_of(const void* address) {
  auto& all = memory();
  std::lock_guard<std::mutex> guard(all.lock);
  auto found = all.live.upper_bound(reinterpret_cast<uintptr_t>(address));
  TORCH_CHECK(found != all.live.begin(), "not memory of the simulated accelerator: ", address);
  return std::prev(found)->second.stream->device;
}

void record_stream(const void* address, Stream& stream) {
  auto& all = memory();
  std::lock_guard<std::mutex> guard(all.lock);
  auto found = all.live.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (address == nullptr || found == all.live.begin()) return;
  Block& block = std::prev(found)->second;
  if (block.stream != &stream) block.recorded.insert(&stream);
}

}  // namespace sim
