#include "streams.h"

#include <pthread.h>

#include <array>
#include <map>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>

namespace sim {
namespace {

constexpr size_t kStopFrames = 12;
std::atomic<bool> ends{false};
std::atomic<bool> forked{false};
std::mutex moments;
std::condition_variable moment_came;

struct Registry {
  std::mutex lock;
  std::array<std::map<c10::StreamId, std::unique_ptr<Stream>>, 16> streams;
  std::array<c10::StreamId, 16> made{};
  std::array<c10::StreamId, 16> owned{};
  std::string failure;
  std::vector<Stop> stops;
};
Registry& registry() {
  static Registry* instance = new Registry();  // leaked: threads use it until the process ends
  return *instance;
}

thread_local bool of_stream = false;
thread_local c10::DeviceIndex device_now = 0;
thread_local std::array<c10::StreamId, 16> streams_now{};

}  // namespace

Options& options() {
  static Options* instance = new Options();
  return *instance;
}

Stream::Stream(c10::DeviceIndex device, c10::StreamId id)
    : device(device),
      id(id),
      actor(order().add_stream("stream " + std::to_string(id) + " of device " + std::to_string(device))) {}

void Stream::enqueue(const std::string& name, const std::vector<Range>& ranges, Task task) {
  raise_failure();
  order().enqueue(actor, name, ranges);
  push([name, task = std::move(task)] {
    try {
      task();
    } catch (const c10::Error& error) {
      fail(name + ": " + error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(name + ": " + error.what());
    }
  });
}

void Stream::enqueue_unseen(Task task) { push(std::move(task)); }

MomentPtr Stream::record() {
  auto moment = std::make_shared<Moment>();
  moment->clock = order().record(actor);
  moment->stream = actor;
  push([moment] {
    {
      std::lock_guard<std::mutex> guard(moments);
      moment->time = std::chrono::steady_clock::now();
      moment->done = true;
    }
    moment_came.notify_all();
  });
  return moment;
}

void Stream::wait(const MomentPtr& moment) {
  order().wait(actor, moment->clock);
  if (!moment->done) push([moment] { await(moment); });
}

bool await(const MomentPtr& moment) {
  std::unique_lock<std::mutex> guard(moments);
  moment_came.wait(guard, [&] { return moment->done.load() || ends.load(); });
  return moment->done;
}

bool Stream::idle() {
  std::lock_guard<std::mutex> guard(lock_);
  return queued_ == done_;
}

void Stream::drain() {
  const Clock clock = order().of(actor);
  std::unique_lock<std::mutex> guard(lock_);
  const uint64_t until = queued_;
  changed_.wait(guard, [&] { return done_ >= until || ends.load(); });
  guard.unlock();
  order().host_waited(clock);
  raise_failure();
}

void Stream::push(Task task) {
  TORCH_CHECK(!forked, "the simulated accelerator was used before this process was forked; start ranks by spawning");
  if (ends) return;
  {
    std::lock_guard<std::mutex> guard(lock_);
    queue_.push_back(std::move(task));
    ++queued_;
    if (!started_) {
      started_ = true;
      std::thread([this] { work(); }).detach();
    }
  }
  changed_.notify_all();
}

void Stream::work() {
  pthread_setname_np(pthread_self(), "simulated");
  of_stream = true;
  while (true) {
    Task task;
    {
      std::unique_lock<std::mutex> guard(lock_);
      changed_.wait(guard, [&] { return !queue_.empty() || ends.load(); });
      if (ends) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    delay();
    task();
    task = nullptr;  // what it holds is freed before anybody hears that it is done
    {
      std::lock_guard<std::mutex> guard(lock_);
      ++done_;
    }
    changed_.notify_all();
  }
}

// Every third operation or so is late; some are very late.
void Stream::delay() {
  const uint64_t seed = options().seed;
  if (seed == 0) return;
  if (seed != seed_) {
    seed_ = seed;
    random_.seed(seed * 1000003 + actor);
  }
  const uint64_t draw = random_();
  const int64_t longest = options().longest_delay;
  if (draw % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds((draw >> 8) % (longest / 8 + 1)));
  if (draw % 31 == 0) std::this_thread::sleep_for(std::chrono::microseconds((draw >> 16) % (longest + 1)));
}

bool in_stream() { return of_stream; }

Stream& stream_at(c10::DeviceIndex device, c10::StreamId id) {
  auto& all = registry();
  std::lock_guard<std::mutex> guard(all.lock);
  auto& stream = all.streams.at(device)[id];
  if (!stream) stream = std::make_unique<Stream>(device, id);
  return *stream;
}

Stream& stream_of(const c10::Stream& stream) { return stream_at(stream.device_index(), stream.id()); }

Stream& current_stream(c10::DeviceIndex device) { return stream_at(device, streams_now.at(device)); }

c10::StreamId exchange_current_stream(c10::DeviceIndex device, c10::StreamId id) {
  return std::exchange(streams_now.at(device), id);
}

// As CUDA's pool: after a number of streams the first ones are handed out again.
c10::StreamId new_stream(c10::DeviceIndex device) {
  auto& all = registry();
  std::lock_guard<std::mutex> guard(all.lock);
  return all.made.at(device)++ % kStreamsPerDevice + 1;
}

c10::StreamId own_stream(c10::DeviceIndex device) {
  auto& all = registry();
  std::lock_guard<std::mutex> guard(all.lock);
  return kStreamsPerDevice + ++all.owned.at(device);
}

c10::DeviceIndex current_device() { return device_now; }

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < options().devices, "there is no simulated device ", int(device), ": ",
              options().devices.load(), " in this process");
  device_now = device;
}

std::vector<Stream*> streams(c10::DeviceIndex device) {
  auto& all = registry();
  std::lock_guard<std::mutex> guard(all.lock);
  std::vector<Stream*> found;
  for (auto& item : all.streams.at(device)) found.push_back(item.second.get());
  return found;
}

void drain(c10::DeviceIndex device) {
  for (Stream* stream : streams(device)) stream->drain();
}

void close() {
  {
    std::lock_guard<std::mutex> guard(moments);
    ends = true;
  }
  moment_came.notify_all();
}

bool closing() { return ends; }

void fail(const std::string& what) {
  auto& all = registry();
  std::lock_guard<std::mutex> guard(all.lock);
  if (all.failure.empty()) all.failure = what;
}

void raise_failure() {
  auto& all = registry();
  std::lock_guard<std::mutex> guard(all.lock);
  TORCH_CHECK(all.failure.empty(), "an operation failed on the simulated accelerator, earlier than here: ", all.failure);
}

std::string take_failure() {
  auto& all = registry();
  std::lock_guard<std::mutex> guard(all.lock);
  return std::exchange(all.failure, {});
}

void host_stop(const std::string& what) {
  Stop stop{what, here(kStopFrames), node()};
  TORCH_CHECK(!options().raise_on_stop, "the host stops for the simulated accelerator: ", what);
  auto& all = registry();
  std::lock_guard<std::mutex> guard(all.lock);
  all.stops.push_back(std::move(stop));
}

std::vector<Stop> take_stops() {
  auto& all = registry();
  std::lock_guard<std::mutex> guard(all.lock);
  return std::exchange(all.stops, {});
}

// A forked child has none of the threads.
static const int at_fork = pthread_atfork(nullptr, nullptr, [] {
  auto& all = registry();
  for (auto& device : all.streams) {
    if (!device.empty()) forked = true;
  }
});

}  // namespace sim
