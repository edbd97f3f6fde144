// Operators run the CPU's kernels later, in a stream, on the same memory.
#pragma once

#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "memory.h"

namespace sim {

inline bool ours(const at::Tensor& t) { return t.defined() && t.device().type() == kDevice; }
// The same elements as a tensor of the CPU, for a stream's thread.
at::Tensor seen(const at::Tensor& t);
at::Tensor seen_host(const at::Tensor& t);  // without holding its memory, as a copy engine reads and writes it
// The addresses of a tensor's elements.
void add_ranges(std::vector<Range>& ranges, const at::Tensor& t, bool write);
at::Tensor empty_on(c10::DeviceIndex device, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype);

void run(const c10::OperatorHandle& op, c10::Stack* stack);
void fallback(const c10::OperatorHandle& op, c10::Stack* stack);

// A generator of the CPU for one kernel, from the state of the device's one, which moves on.
at::Generator generator_for_kernel(const std::optional<at::Generator>& given, c10::DeviceIndex device);
const at::Generator& default_generator(c10::DeviceIndex device);

void resize_storage(const c10::Storage& storage, size_t size);
void register_device();

// Accesses of the host's own operators to pinned memory count while this is on.
void watch_host(bool enabled);

}  // namespace sim
