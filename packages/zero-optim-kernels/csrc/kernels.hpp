// The table of functions that every instruction set provides.
#pragma once

#include "types.hpp"

namespace zok {

struct Kernels {
    const char* name;
    // Updates elements [begin, end) of `run`; `begin` is 0, or its global index a multiple of kTile. rows[0] is the row of `begin`. `norms`,
    // null except for LAMB, has an entry for that row and each later one.
    void (*step)(const Format&, const Run& run, const Row* rows, int64_t begin, int64_t end, const Ahead& ahead, RowNorms* norms);
    // param -= row.c[0] * update for elements [begin, end), then writes their copy.
    void (*apply)(const Format&, const Run& run, const Row* rows, int64_t begin, int64_t end);
    double (*sum_squares)(const char* x, Dtype dtype, int64_t n);   // n <= kNormChunk
    int64_t (*count_nonfinite)(const char* x, Dtype dtype, int64_t n);
    // `stream`: writes past the cache where the alignment allows it.
    void (*cast)(const char* x, Dtype from, char* out, Dtype to, int64_t n, bool stream);
    void (*scale)(char* x, Dtype dtype, int64_t n, double factor);
    void (*sum_slices)(const char* const* slices, int64_t count, int64_t begin, int64_t end, Dtype dtype, char* out, Dtype out_dtype,
                       double divisor);
    // Both work on blocks [first, last) of a buffer of n elements.
    void (*quantize)(const BlockFormat&, const char* x, uint8_t* payload, float* scales, int64_t n, int64_t first, int64_t last);
    void (*dequantize)(const BlockFormat&, const uint8_t* payload, const float* scales, char* out, int64_t n, int64_t first, int64_t last);
};

constexpr int64_t kNormChunk = 65536;  // part of the definition of the norm's order of summation

const Kernels* scalar_kernels();
#if defined(__x86_64__)
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
#elif defined(__aarch64__)
const Kernels* neon_kernels();
#endif

}  // namespace zok
