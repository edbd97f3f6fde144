#include "operators.h"

#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

namespace sim {
namespace {

constexpr size_t kRuns = 256;  // of contiguous bytes; a tensor with more counts as all bytes between its ends

bool is_list(const c10::IValue& value) { return value.isTensorList() || value.isOptionalTensorList(); }

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<at::Tensor> found;
  if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& item : value.toOptionalTensorVector()) found.push_back(item.value_or(at::Tensor()));
  }
  return found;
}

// ``value`` with every tensor replaced.
template <class F>
c10::IValue replaced(const c10::IValue& value, F&& other) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(other(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(other(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
      list.push_back(t && t->defined() ? std::optional<at::Tensor>(other(*t)) : t);
    }
    return list;
  }
  return value;
}

// A number from Python takes part in the promotion of types less than a tensor without dimensions.
at::Tensor as_wrapped(at::Tensor made, const at::Tensor& t) {
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

at::Tensor meta(const at::Tensor& t) {
  return as_wrapped(at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta)), t);
}

struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::vector<c10::IValue> arguments;
  c10::DeviceIndex device;
  std::vector<Range> ranges;
  std::string name;

  Call(const c10::OperatorHandle& op, c10::Stack* stack)
      : op(op), schema(op.schema()), device(current_device()), name(schema.name()) {
    const size_t count = schema.arguments().size();
    arguments.assign(std::make_move_iterator(stack->end() - count), std::make_move_iterator(stack->end()));
    stack->resize(stack->size() - count);
    if (!schema.overload_name().empty()) name += "." + schema.overload_name();
    find_device();
  }
  bool writes(size_t i) const {
    const auto* alias = schema.arguments()[i].alias_info();
    const bool statistics = schema.name() == "aten::native_batch_norm" && (i == 3 || i == 4);
    return statistics || (alias != nullptr && alias->isWrite());
  }
  void find_device() {
    for (const auto& value : arguments) {
      if (value.isDevice() && value.toDevice().type() == kDevice && value.toDevice().has_index()) {
        device = value.toDevice().index();
      }
      for (const auto& t : tensors_of(value)) {
        if (ours(t)) {
          device = t.device().index();
          return;
        }
      }
    }
  }
  void collect_ranges() {
    for (size_t i = 0; i < arguments.size(); ++i) {
      for (const auto& t : tensors_of(arguments[i])) {
        if (ours(t)) add_ranges(ranges, t, writes(i));
      }
    }
  }
  // The arguments as the CPU's kernel takes them. Numbers on the host are read now, as a launch does.
  c10::Stack on_cpu() {
    c10::Stack stack;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto& value = arguments[i];
      const bool listed = is_list(value);
      if (value.isDevice()) {
        stack.emplace_back(c10::Device(c10::kCPU));
      } else if (value.isGenerator() || schema.arguments()[i].name() == "generator") {
        std::optional<at::Generator> given;
        if (value.isGenerator()) given = value.toGenerator();
        stack.emplace_back(generator_for_kernel(given, device));
      } else {
        stack.push_back(replaced(value, [&](const at::Tensor& t) { return argument(t, listed, i); }));
      }
    }
    return stack;
  }
  at::Tensor argument(const at::Tensor& t, bool listed, size_t i) {
    if (ours(t)) return seen(t);
    const bool index = listed && schema.arguments()[i].name() == "indices";
    TORCH_CHECK(index || (t.dim() == 0 && !listed && !writes(i)), name,
                ": expected all tensors on the simulated accelerator, argument ", schema.arguments()[i].name(),
                " is on ", t.device());
    if (index) host_stop(name + " with indices on the host");
    return as_wrapped(t.clone(), t);
  }
  bool needs_values() const {
    if (op.hasTag(at::Tag::data_dependent_output)) return true;
    if (name == "aten::index.Tensor_out") return false;  // its caller has counted the elements
    if (schema.name() == "aten::index" || schema.name() == "aten::index_put_" ||
        schema.name() == "aten::_index_put_impl_" || schema.name() == "aten::_unsafe_index") {
      for (const auto& t : tensors_of(arguments[1])) {
        if (t.defined() && (t.scalar_type() == c10::kBool || t.scalar_type() == c10::kByte)) return true;
      }
      return false;
    }
    return op.hasTag(at::Tag::dynamic_output_shape);
  }
};

// The results that are arguments: of in-place operators and those with ``out``.
bool returns_arguments(const Call& call, c10::Stack& results) {
  for (const auto& result : call.schema.returns()) {
    const auto* alias = result.alias_info();
    if (alias == nullptr || !alias->isWrite()) return false;
    for (size_t i = 0; i < call.arguments.size(); ++i) {
      const auto* other = call.schema.arguments()[i].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) results.push_back(call.arguments[i]);
    }
  }
  return results.size() == call.schema.returns().size();
}

// What the sizes of an operator's results depend on, as text: the operator and its arguments, of tensors what their
// meta tensors have. None if an argument is of a kind that is not written here.
std::optional<std::string> key_of(const Call& call) {
  std::ostringstream key;
  const auto tensor = [&](const at::Tensor& t) {
    if (!t.defined()) return void(key << "-");
    key << t.scalar_type() << t.sizes() << t.strides() << t.unsafeGetTensorImpl()->is_wrapped_number();
  };
  key << call.name;
  for (const auto& value : call.arguments) {
    key << "; " << value.tagKind();
    if (value.isTensor() || is_list(value)) {
      for (const auto& t : tensors_of(value)) tensor(t);
    } else if (value.isInt() || value.isDouble() || value.isBool() || value.isString()) {
      key << value;
    } else if (value.isIntList() || value.isDoubleList() || value.isBoolList()) {
      for (const auto& item : value.toListRef()) key << item << ",";
    } else if (!value.isNone() && !value.isDevice() && !value.isGenerator()) {
      return std::nullopt;
    }
  }
  return key.str();
}

c10::Stack on_meta(const Call& call) {
  c10::Stack stack;
  for (const auto& value : call.arguments) {
    if (value.isDevice()) {
      stack.emplace_back(c10::Device(c10::kMeta));
    } else if (value.isGenerator()) {
      stack.emplace_back();
    } else {
      stack.push_back(replaced(value, [](const at::Tensor& t) { return meta(t); }));
    }
  }
  at::AutoDispatchBelowADInplaceOrView below;
  call.op.callBoxed(&stack);
  return stack;
}

// The CPU's norms keep statistics in the dtype of the input, unless the weight has a wider one; others always in fp32.
void correct_statistics(const Call& call, c10::Stack& shapes) {
  const auto& name = call.schema.name();
  if (name != "aten::native_layer_norm" && name != "aten::native_group_norm") return;
  const auto input = call.arguments[0].toTensor();
  const auto& weight = call.arguments[name == "aten::native_layer_norm" ? 2 : 1];
  const bool mixed = weight.isTensor() && weight.toTensor().defined() && weight.toTensor().scalar_type() == c10::kFloat;
  const auto dtype = mixed ? c10::kFloat : input.scalar_type();
  for (size_t i : {1, 2}) {
    const auto t = shapes[i].toTensor();
    shapes[i] = at::empty_strided(t.sizes(), t.strides(), t.options().dtype(dtype));
  }
}

// The results of ``on_meta``, kept: torch composes those of many operators in Python, which takes milliseconds.
c10::Stack shapes_of(const Call& call) {
  static std::mutex lock;
  static auto* known = new std::map<std::string, c10::Stack>();  // leaked: threads use it until the process ends
  const auto key = key_of(call);
  if (key) {
    std::lock_guard<std::mutex> guard(lock);
    const auto found = known->find(*key);
    if (found != known->end()) return found->second;
  }
  c10::Stack shapes = on_meta(call);
  correct_statistics(call, shapes);
  if (key) {
    std::lock_guard<std::mutex> guard(lock);
    known->emplace(*key, shapes);
  }
  return shapes;
}

// Give ``out`` arguments without elements the sizes that the kernel would resize them to.
void resize_results(const Call& call, const c10::Stack& results) {
  if (call.name == "aten::index.Tensor_out") return;  // its caller has made it as large as needed
  bool empty = false;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    if (!call.schema.arguments()[i].is_out()) continue;
    for (const auto& t : tensors_of(call.arguments[i])) empty = empty || t.numel() == 0;
  }
  if (!empty) return;
  const c10::Stack shapes = on_meta(call);
  for (size_t i = 0; i < results.size(); ++i) {
    const auto wanted = tensors_of(shapes[i]);
    auto found = tensors_of(results[i]);
    for (size_t k = 0; k < found.size(); ++k) {
      if (found[k].sizes() != wanted[k].sizes()) found[k].resize_(wanted[k].sizes());
    }
  }
}

void kernel(const c10::OperatorHandle& op, c10::Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(&stack);
}

// Tensors of the device for results whose sizes are known. ``sources`` are the kernel's results, when it has run.
c10::Stack results_on_device(Call& call, const c10::Stack& shapes, std::vector<at::Tensor>& targets) {
  c10::Stack results;
  for (const auto& value : shapes) {
    results.push_back(replaced(value, [&](const at::Tensor& t) {
      auto target = empty_on(call.device, t.sizes(), t.strides(), t.scalar_type());
      targets.push_back(seen(target));
      add_ranges(call.ranges, target, true);
      return target;
    }));
  }
  return results;
}

void copy_results(const c10::Stack& results, const std::vector<at::Tensor>& targets) {
  size_t next = 0;
  for (const auto& value : results) {
    for (const auto& t : tensors_of(value)) {
      if (t.defined()) targets[next++].copy_(t);
    }
  }
}

// The host needs the result: it waits for the stream.
void run_and_wait(Call& call, c10::Stack* stack, const std::string& why) {
  host_stop(why);
  call.collect_ranges();
  auto arguments = std::make_shared<c10::Stack>(call.on_cpu());
  Stream& stream = current_stream(call.device);
  stream.enqueue(call.name, call.ranges, [op = call.op, arguments] { kernel(op, *arguments); });
  stream.drain();
  c10::Stack results;
  if (returns_arguments(call, results)) {
    for (auto& value : results) stack->push_back(std::move(value));
    return;
  }
  call.ranges.clear();
  std::vector<at::Tensor> targets;
  for (auto& value : results_on_device(call, *arguments, targets)) stack->push_back(std::move(value));
  if (!targets.empty()) {
    stream.enqueue(call.name, call.ranges, [arguments, targets] { copy_results(*arguments, targets); });
  }
}

}  // namespace

at::Tensor seen(const at::Tensor& t) {
  if (!ours(t)) return t;
  const auto options = at::TensorOptions().dtype(t.scalar_type()).device(c10::kCPU);
  return at::from_blob(visible(t.unsafeGetTensorImpl()->data()), t.sizes(), t.strides(), options);
}

at::Tensor seen_host(const at::Tensor& t) {
  const auto options = at::TensorOptions().dtype(t.scalar_type()).device(c10::kCPU);
  return at::from_blob(t.unsafeGetTensorImpl()->mutable_data(), t.sizes(), t.strides(), options);
}

void add_ranges(std::vector<Range>& ranges, const at::Tensor& t, bool write) {
  if (t.numel() == 0) return;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size, the largest stride first
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) > 1 && t.stride(i) != 0) dims.emplace_back(t.stride(i), t.size(i));
  }
  std::sort(dims.rbegin(), dims.rend());
  int64_t run = 1;  // elements in one piece
  while (!dims.empty() && dims.back().first <= run) {
    run += dims.back().first * (dims.back().second - 1);
    dims.pop_back();
  }
  std::vector<int64_t> starts{0};
  for (const auto& [stride, size] : dims) {
    if (starts.size() * size > kRuns) {
      for (const auto& [s, n] : dims) run += s * (n - 1);
      starts.assign(1, 0);
      break;
    }
    std::vector<int64_t> more;
    for (int64_t start : starts) {
      for (int64_t i = 0; i < size; ++i) more.push_back(start + i * stride);
    }
    starts = std::move(more);
  }
  const auto base = reinterpret_cast<uintptr_t>(t.unsafeGetTensorImpl()->data());
  const auto item = static_cast<uintptr_t>(t.itemsize());
  for (int64_t start : starts) ranges.push_back({base + start * item, base + (start + run) * item, write});
}

at::Tensor empty_on(c10::DeviceIndex device, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  const auto before = current_device();
  set_current_device(device);
  auto made = at::detail::empty_strided_generic(sizes, strides, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
  set_current_device(before);
  return made;
}

// Run an operator: later, if the sizes of its results are known; with a stop of the host, if they depend on values.
void run(const c10::OperatorHandle& op, c10::Stack* stack) {
  Call call(op, stack);
  if (call.needs_values()) return run_and_wait(call, stack, call.name);
  c10::Stack results;
  std::vector<at::Tensor> targets;
  const bool in_place = returns_arguments(call, results);
  if (in_place) resize_results(call, results);
  call.collect_ranges();
  if (!in_place) {
    c10::Stack shapes;
    try {
      shapes = shapes_of(call);
    } catch (const c10::NotImplementedError&) {
      call.ranges.clear();
      return run_and_wait(call, stack, call.name + " (it has no kernel for meta tensors)");
    }
    results = results_on_device(call, shapes, targets);
  }
  auto arguments = std::make_shared<c10::Stack>(call.on_cpu());
  current_stream(call.device).enqueue(call.name, call.ranges, [op, arguments, targets] {
    kernel(op, *arguments);
    if (!targets.empty()) copy_results(*arguments, targets);
  });
  for (auto& value : results) stack->push_back(std::move(value));
}

// Convolutions of devices outside torch have names of their own.
void fallback(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto& name = op.schema().name();
  auto& dispatcher = c10::Dispatcher::singleton();
  if (name == "aten::convolution_overrideable") {
    return run(dispatcher.findSchemaOrThrow("aten::convolution", ""), stack);
  }
  if (name == "aten::convolution_backward_overrideable") {
    const auto weight = (*stack)[stack->size() - 8].toTensor();
    const bool transposed = (*stack)[stack->size() - 4].toBool();
    const int64_t groups = (*stack)[stack->size() - 2].toInt();
    const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
    stack->insert(stack->end() - 7, c10::IValue(std::vector<int64_t>{channels}));
    return run(dispatcher.findSchemaOrThrow("aten::convolution_backward", ""), stack);
  }
  run(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// The first three would be composed of others on a device; the CPU has kernels for them, with other roundings.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"native_layer_norm", "native_group_norm", "native_batch_norm", "convolution_overrideable",
                           "convolution_backward_overrideable"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace sim
