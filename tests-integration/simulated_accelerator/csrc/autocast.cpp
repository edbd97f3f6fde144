// `torch.autocast` on the device: torch's own lists of operators.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace sim {
namespace autocasts {

using namespace at;  // torch's lists name its types without their namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SIMULATED_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIMULATED_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIMULATED_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIMULATED_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIMULATED_LOWER)
  AT_FORALL_FP32(SIMULATED_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIMULATED_FP32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIMULATED_PROMOTE)
}

}  // namespace autocasts
}  // namespace sim
