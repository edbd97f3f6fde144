#include <type_traits>

#include "inline.hpp"
#include "kernels.hpp"

#define ZOK_TARGET_NAME "scalar"

namespace zok {
namespace target_scalar {
namespace {

template <class T>
ZOK_INLINE typename T::F e4m3_value(typename T::U code);

#include "vec_scalar-inl.h"

using Vector = Scalar;

#include "target-inl.h"

}  // namespace
}  // namespace target_scalar

const Kernels* scalar_kernels() { return &target_scalar::kTable; }

}  // namespace zok
