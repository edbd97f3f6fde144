#include <type_traits>

#include "inline.hpp"
#include "kernels.hpp"

#include <immintrin.h>

#define ZOK_TARGET_NAME "avx512"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")

namespace zok {
namespace target_avx512 {
namespace {

template <class T>
ZOK_INLINE typename T::F e4m3_value(typename T::U code);

#include "vec_scalar-inl.h"

#include "vec_avx512-inl.h"

#include "target-inl.h"

}  // namespace
}  // namespace target_avx512

#pragma GCC pop_options

const Kernels* avx512_kernels() { return &target_avx512::kTable; }

}  // namespace zok
