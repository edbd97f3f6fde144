// Splits a call into chunks and runs them on the pool. Knows nothing of instruction sets or of Python.
#pragma once

#include <vector>

#include "types.hpp"

namespace zok {

// One optimizer step. `norms`: null, or for LAMB receives one entry per row.
void run_step(const Format& format, const std::vector<Run>& runs, const std::vector<Row>& rows, int threads, std::vector<RowNorms>* norms);
// LAMB's second half: param -= factor * update, with the factor of each row.
void run_apply(const Format& format, const std::vector<Run>& runs, const std::vector<Row>& rows, int threads);

// One tensor of a call over plain buffers: `n` elements.
struct Span {
    char* data;
    int64_t n;
};
// The sum of squares of all spans, in order.
double run_norm_squared(const std::vector<Span>& spans, Dtype dtype, int threads);
// out[i]: the sum of squares of block i. Blocks have `block` elements, at most kNormChunk; the last one may be shorter.
void run_norms_squared(const char* x, Dtype dtype, int64_t n, int64_t block, double* out, int threads);
// out[i]: a digest of bytes [i * block, (i + 1) * block), or of those that are left.
void run_digests(const char* x, int64_t n, int64_t block, uint64_t* out, int threads);
int64_t run_count_nonfinite(const std::vector<Span>& spans, Dtype dtype, int threads);
void run_scale(const std::vector<Span>& spans, Dtype dtype, double factor, int threads);
void run_cast(const char* x, Dtype from, char* out, Dtype to, int64_t n, int threads);
void run_sum_slices(const std::vector<const char*>& slices, Dtype dtype, char* out, Dtype out_dtype, int64_t n, double divisor, int threads);
void run_quantize(const BlockFormat& format, const char* x, uint8_t* payload, float* scales, int64_t n, int threads);
void run_dequantize(const BlockFormat& format, const uint8_t* payload, const float* scales, char* out, int64_t n, int threads);

}  // namespace zok
