// What no kernel of the CPU does: making tensors, views, copies between the host and the device.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "operators.h"

namespace sim {
namespace {

using Size = c10::IntArrayRef;
template <class T>
using Maybe = std::optional<T>;

c10::DeviceIndex index_of(Maybe<c10::Device> device) {
  return device && device->has_index() ? device->index() : current_device();
}

at::Tensor empty(Size size, Maybe<c10::ScalarType> dtype, Maybe<c10::Layout>, Maybe<c10::Device> device, Maybe<bool> pin,
                 Maybe<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only memory of the CPU can be pinned");
  c10::DeviceGuard guard({kDevice, index_of(device)});
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, allocator(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(Size size, Size stride, Maybe<c10::ScalarType> dtype, Maybe<c10::Layout>,
                         Maybe<c10::Device> device, Maybe<bool>) {
  return empty_on(index_of(device), size, stride, c10::dtype_or_default(dtype));
}

void copy_elements(const at::Tensor& to, const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(from);
}

// One side is the host's. As CUDA's driver: memory that is not pinned, or that has to be converted first, passes through
// staging memory, for which the host waits.
void copy_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool leaves = ours(from);
  const at::Tensor& host = leaves ? to : from;
  const void* address = host.unsafeGetTensorImpl()->data();
  const bool direct = from.scalar_type() == to.scalar_type() && from.is_non_overlapping_and_dense() &&
                      to.is_non_overlapping_and_dense() && from.strides() == to.strides();
  const bool staged = !is_pinned(address) || !direct;
  const std::string name = leaves ? "copy to the host" : "copy from the host";
  if (staged) {
    host_stop(name + (is_pinned(address) ? ", converted on the way" : ", not pinned"));
  } else if (!non_blocking) {
    host_stop(name + ", blocking");
  }
  Stream& stream = current_stream((leaves ? from : to).device().index());
  std::vector<Range> ranges;
  add_ranges(ranges, leaves ? from : to, !leaves);
  if (is_pinned(address)) add_ranges(ranges, host, leaves);
  const at::Tensor source = leaves ? seen(from) : staged ? from.clone() : seen_host(from);
  const at::Tensor target = leaves ? seen_host(to) : seen(to);
  stream.enqueue(name, ranges, [source, target] { copy_elements(target, source); });
  if (is_pinned(address)) use_pinned(address, stream);
  if (!non_blocking || (staged && leaves)) stream.drain();
}

// Between devices: on the stream of the source, with the target's stream ordered around it.
void copy_device(const at::Tensor& from, const at::Tensor& to) {
  std::vector<Range> ranges;
  add_ranges(ranges, from, false);
  add_ranges(ranges, to, true);
  Stream& stream = current_stream(from.device().index());
  Stream& other = current_stream(to.device().index());
  if (&other != &stream) stream.wait(other.record());
  stream.enqueue("copy", ranges, [source = seen(from), target = seen(to)] { copy_elements(target, source); });
  if (&other != &stream) other.wait(stream.record());
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0) return dst;
  const at::Tensor from = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
  if (ours(from) && ours(dst)) {
    copy_device(from, dst);
  } else {
    copy_host(from, dst, non_blocking);
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Tensor& set_storage_offset(at::Tensor& result, at::Storage storage, int64_t offset, Size size, Size stride) {
  return at::cpu::set_(result, std::move(storage), offset, size, stride);
}
at::Tensor& set_storage(at::Tensor& result, at::Storage storage) {
  const auto n = static_cast<int64_t>(storage.nbytes() / result.itemsize());
  return at::cpu::set_(result, std::move(storage), 0, {n}, {1});
}
at::Tensor& set_tensor(at::Tensor& result, const at::Tensor& source) {
  return at::cpu::set_(result, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_nothing(at::Tensor& result) {
  return at::cpu::set_(result, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator(), true), 0, {0}, {1});
}
bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
         self.strides() == other.strides();
}

const at::Tensor& resize(const at::Tensor& self, Size size, Maybe<c10::MemoryFormat> format) {
  TORCH_CHECK(!format || *format == c10::MemoryFormat::Contiguous, "resize_ to a memory format");
  auto* impl = self.unsafeGetTensorImpl();
  const auto needed =
      static_cast<size_t>(c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (c10::multiply_integers(size) > 0 && needed > impl->storage().nbytes()) resize_storage(impl->storage(), needed);
  impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor view(const at::Tensor& self, Size size) { return at::native::view(self, size); }
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
at::Tensor as_strided(const at::Tensor& self, Size size, Size stride, Maybe<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor reshape_alias(const at::Tensor& self, Size size, Size stride) {
  return at::native::_reshape_alias(self, size, stride);
}
void record_stream_of(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data(), stream_of(stream));
}

// The CPU's kernel would draw from the CPU's generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, Maybe<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, input.options().dtype(c10::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(c10::kBool)).bernoulli_(1 - p);
  return {at::mul(input, mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("is_set_to", is_set_to);
  m.impl("resize_", resize);
  m.impl("view", view);
  m.impl("unfold", unfold);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("record_stream", record_stream_of);
  m.impl("native_dropout", native_dropout);
}

}  // namespace

void resize_storage(const c10::Storage& storage, size_t size) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DeviceGuard guard(impl->device());
  auto fresh = allocator()->allocate(size);
  const size_t kept = std::min(size, impl->nbytes());
  if (kept > 0) allocator()->copy_data(fresh.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(size);
}

}  // namespace sim
