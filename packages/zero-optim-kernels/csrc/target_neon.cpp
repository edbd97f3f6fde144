#include <type_traits>

#include "inline.hpp"
#include "kernels.hpp"

#include <arm_neon.h>

#define ZOK_TARGET_NAME "neon"

namespace zok {
namespace target_neon {
namespace {

template <class T>
ZOK_INLINE typename T::F e4m3_value(typename T::U code);

#include "vec_scalar-inl.h"

#include "vec_neon-inl.h"

#include "target-inl.h"

}  // namespace
}  // namespace target_neon

const Kernels* neon_kernels() { return &target_neon::kTable; }

}  // namespace zok
