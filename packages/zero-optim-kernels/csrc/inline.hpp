// Attributes of the functions in the -inl.h files: static members and free functions, and members of loop bodies.
#pragma once

#define ZOK_INLINE static inline __attribute__((always_inline))
#define ZOK_MEMBER inline __attribute__((always_inline))
// Unrolls the loop that follows it, over the vectors of a group, so that they stay in registers.
#define ZOK_UNROLL _Pragma("GCC unroll 8")
