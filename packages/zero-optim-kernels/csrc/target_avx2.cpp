#include <type_traits>

#include "inline.hpp"
#include "kernels.hpp"

#include <immintrin.h>

#define ZOK_TARGET_NAME "avx2"

#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma")

namespace zok {
namespace target_avx2 {
namespace {

template <class T>
ZOK_INLINE typename T::F e4m3_value(typename T::U code);

#include "vec_scalar-inl.h"

#include "vec_avx2-inl.h"

#include "target-inl.h"

}  // namespace
}  // namespace target_avx2

#pragma GCC pop_options

const Kernels* avx2_kernels() { return &target_avx2::kTable; }

}  // namespace zok
