// The device as torch knows it: guard, hooks, generators, accesses of the host.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "operators.h"

namespace sim {
namespace {

struct EventState {
  MomentPtr moment;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kDevice, current_device());
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, current_device()}; }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < options().devices) set_current_device(device.index());
  }
  c10::DeviceIndex index_of(c10::Device device) const { return device.has_index() ? device.index() : current_device(); }
  c10::Stream named(c10::DeviceIndex device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, {kDevice, device}, id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return named(index_of(device), current_stream(index_of(device)).id);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return named(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return named(index_of(device), new_stream(index_of(device))); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return named(stream.device_index(), exchange_current_stream(stream.device_index(), stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &stream_of(stream); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(options().devices); }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventState();
    static_cast<EventState*>(*event)->moment = stream_of(stream).record();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) stream_of(stream).wait(static_cast<EventState*>(event)->moment);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const auto& moment = static_cast<EventState*>(event)->moment;
    const bool done = moment->done;
    if (done) order().host_waited(moment->clock);
    return done;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    host_stop("synchronize an event");
    const auto& moment = static_cast<EventState*>(event)->moment;
    await(moment);
    order().host_waited(moment->clock);
    raise_failure();
  }
  bool queryStream(const c10::Stream& stream) const override {
    const Clock clock = order().of(stream_of(stream).actor);
    const bool idle = stream_of(stream).idle();
    if (idle) order().host_waited(clock);
    return idle;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_stop("synchronize a stream");
    stream_of(stream).drain();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    host_stop("synchronize the device");
    drain(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer.get(), stream_of(stream));
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    const auto& first = static_cast<EventState*>(begin)->moment;
    const auto& last = static_cast<EventState*>(end)->moment;
    TORCH_CHECK(first->done && last->done, "both events must be complete before their distance is asked for");
    return std::chrono::duration<double, std::milli>(last->time - first->time).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// A seed and a count of kernels, as the states of counter-based generators are.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl({kDevice, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.itemsize() == 1, "a state of this generator has 16 bytes");
    memcpy(&seed_, state.data(), 8);
    memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, c10::kByte);
    memcpy(state.mutable_data_ptr(), &seed_, 8);
    memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  uint64_t next() { return (seed_ + 0x9E3779B97F4A7C15ull * ++offset_) ^ (offset_ << 17); }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return options().devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(options().devices); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    if (device >= 0) set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override { return {kDevice, device_of(data)}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override { resize_storage(storage, size); }
};

at::CallbackHandle watching = 0;

// Kernels of the CPU on pinned memory: those that look at elements.
std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
  if (in_stream()) return nullptr;
  bool pinned = false;
  for (const auto& value : function.inputs()) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto& t = value.toTensor();
    if (ours(t)) return nullptr;
    if (t.device().is_cpu() && t.has_storage()) pinned = pinned || is_pinned(t.unsafeGetTensorImpl()->data());
  }
  const auto name = function.operator_name();
  if (!pinned || !name) return nullptr;
  auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op) return nullptr;
  const auto& schema = op->schema();
  const std::string& full = schema.name();
  const bool copies = full == "aten::copy_";
  if (!copies && !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return nullptr;
  for (const char* other : {"aten::empty", "aten::set_", "aten::resize_", "aten::record_stream", "aten::is_"}) {
    if (full.compare(0, strlen(other), other) == 0) return nullptr;
  }
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return nullptr;  // a view
  }
  std::vector<Range> ranges;
  for (size_t i = 0; i < function.inputs().size() && i < schema.arguments().size(); ++i) {
    const auto& value = function.inputs()[i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto* alias = schema.arguments()[i].alias_info();
    const bool write = alias != nullptr && alias->isWrite();
    if (is_pinned(value.toTensor().unsafeGetTensorImpl()->data())) add_ranges(ranges, value.toTensor(), write);
  }
  order().on_host(full, ranges);
  return nullptr;
}

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < 16; ++i) made->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
    return made;
  }();
  return generators->at(device < 0 ? current_device() : device);
}

at::Generator generator_for_kernel(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
  const at::Generator& from = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(from.device().type() == kDevice, "expected a generator of the simulated accelerator, got one of ",
              from.device());
  auto* state = static_cast<Generator*>(from.unsafeGetGeneratorImpl());
  std::lock_guard<std::mutex> guard(state->mutex_);
  return at::make_generator<at::CPUGeneratorImpl>(state->next());
}

void watch_host(bool enabled) {
  if (watching != 0) at::removeCallback(watching);
  watching = 0;
  if (!enabled) return;
  watching = at::addGlobalCallback(
      at::RecordFunctionCallback(&on_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

void register_device() {
  c10::SetAllocator(kDevice, allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

}  // namespace sim
