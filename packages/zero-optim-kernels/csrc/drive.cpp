#include "drive.hpp"

#include <algorithm>
#include <cstring>

#include "dispatch.hpp"
#include "pool.hpp"

namespace zok {
namespace {

struct Chunk {
    const Run* run;
    int64_t begin, end;
    const Row* rows;  // the first is that of `begin`
    size_t norms;     // where its partial norms are; the next chunk's are behind them
};

// Chunks end at global multiples of kChunk. Slabs are runs of consecutive chunks of about kChunk elements together, so that many small
// tensors cost a thread as little as one large one.
struct Plan {
    std::vector<Chunk> chunks;
    std::vector<size_t> slabs;  // first chunk of each slab, and the end
    size_t norms = 0;
};

// Its memory is kept between the calls of a thread, or thousands of tensors would cost page faults at each.
const Plan& plan(const std::vector<Run>& runs, const std::vector<Row>& rows) {
    static thread_local Plan result;
    result.chunks.clear();
    result.slabs.clear();
    result.norms = 0;
    int64_t elements = 0;
    result.slabs.push_back(0);
    for (const Run& run : runs) {
        const Row* row = rows.data() + run.row;
        for (int64_t begin = 0, end; begin < run.n; begin = end) {
            const uint64_t global = run.offset + static_cast<uint64_t>(begin);
            end = std::min(run.n, begin + kChunk - static_cast<int64_t>(global % kChunk));
            while (row->end <= begin) ++row;
            result.chunks.push_back({&run, begin, end, row, result.norms});
            while (row->end < end) ++row, ++result.norms;
            ++result.norms;
            elements += end - begin;
            if (elements >= kChunk) {
                result.slabs.push_back(result.chunks.size());
                elements = 0;
            }
        }
    }
    if (result.slabs.back() != result.chunks.size()) result.slabs.push_back(result.chunks.size());
    return result;
}

// What the update of a chunk asks for ahead. The processor's own prefetchers follow a stream, but small tensors that were allocated one by
// one break four of them every few kilobytes, so the end of each asks for the beginning of the next.
Ahead ahead_of(const Chunk& chunk, const Chunk& next, const Format& format) {
    const Dtype dtypes[4] = {format.param, format.grad, format.state, format.state};
    const char* const here[4] = {chunk.run->param, chunk.run->grad, chunk.run->state[0], chunk.run->state[1]};
    const char* const there[4] = {next.run->param, next.run->grad, next.run->state[0], next.run->state[1]};
    Ahead ahead{};
    bool apart = false;
    for (int s = 0; s < 4; ++s) {
        if (!there[s]) continue;
        ahead.stream[s] = there[s] + next.begin * item_size(dtypes[s]);
        apart = apart || (next.run != chunk.run && ahead.stream[s] != here[s] + chunk.end * item_size(dtypes[s]));
    }
    ahead.from = apart ? std::max(chunk.begin, chunk.end - kAhead) : chunk.end;
    return ahead;
}

template <class Body>
void for_slabs(const Plan& work, int threads, Body body) {
    auto slab = [&](int64_t s) {
        for (size_t c = work.slabs[s]; c < work.slabs[s + 1]; ++c) body(c);
    };
    parallel_for(threads, static_cast<int64_t>(work.slabs.size()) - 1, slab);
}

// Pieces of each span, none longer than `most`.
std::vector<Span> split(const std::vector<Span>& spans, Dtype dtype, int64_t most) {
    std::vector<Span> pieces;
    for (const Span& span : spans)
        for (int64_t begin = 0; begin < span.n; begin += most)
            pieces.push_back({span.data + begin * item_size(dtype), std::min(most, span.n - begin)});
    return pieces;
}

}  // namespace

void run_step(const Format& format, const std::vector<Run>& runs, const std::vector<Row>& rows, int threads, std::vector<RowNorms>* norms) {
    const Kernels& kernels = active();
    const Plan& work = plan(runs, rows);
    std::vector<RowNorms> partial(norms ? work.norms : 0);
    for_slabs(work, threads, [&](size_t c) {
        const Chunk& chunk = work.chunks[c];
        const Ahead ahead = ahead_of(chunk, work.chunks[std::min(c + 1, work.chunks.size() - 1)], format);
        kernels.step(format, *chunk.run, chunk.rows, chunk.begin, chunk.end, ahead, norms ? &partial[chunk.norms] : nullptr);
    });
    if (!norms) return;
    norms->assign(rows.size(), RowNorms{0, 0});
    for (size_t c = 0; c < work.chunks.size(); ++c) {
        const size_t end = c + 1 < work.chunks.size() ? work.chunks[c + 1].norms : work.norms;
        const size_t row = static_cast<size_t>(work.chunks[c].rows - rows.data());
        for (size_t i = work.chunks[c].norms; i < end; ++i) {
            (*norms)[row + i - work.chunks[c].norms].weight += partial[i].weight;
            (*norms)[row + i - work.chunks[c].norms].update += partial[i].update;
        }
    }
}

void run_apply(const Format& format, const std::vector<Run>& runs, const std::vector<Row>& rows, int threads) {
    const Kernels& kernels = active();
    const Plan& work = plan(runs, rows);
    for_slabs(work, threads, [&](size_t c) {
        const Chunk& chunk = work.chunks[c];
        kernels.apply(format, *chunk.run, chunk.rows, chunk.begin, chunk.end);
    });
}

double run_norm_squared(const std::vector<Span>& spans, Dtype dtype, int threads) {
    const Kernels& kernels = active();
    const std::vector<Span> pieces = split(spans, dtype, kNormChunk);
    std::vector<double> partial(pieces.size());
    auto sum = [&](int64_t i) { partial[i] = kernels.sum_squares(pieces[i].data, dtype, pieces[i].n); };
    parallel_for(threads, static_cast<int64_t>(pieces.size()), sum);
    double total = 0;
    for (double value : partial) total += value;
    return total;
}

void run_norms_squared(const char* x, Dtype dtype, int64_t n, int64_t block, double* out, int threads) {
    const Kernels& kernels = active();
    const int64_t blocks = (n + block - 1) / block, together = std::max<int64_t>(1, kNormChunk / block);
    auto sums = [&](int64_t i) {
        for (int64_t b = i * together, end = std::min(blocks, b + together); b < end; ++b)
            out[b] = kernels.sum_squares(x + b * block * item_size(dtype), dtype, std::min(block, n - b * block));
    };
    parallel_for(threads, (blocks + together - 1) / together, sums);
}

// Eight words side by side. Each step is one-to-one in its word and in what was there before, so a change of one word is never lost. The
// shift brings high bits, such as signs, to places from where the product spreads them: the product moves nothing downwards.
static uint64_t digest(const char* x, int64_t n) {
    constexpr uint64_t kFactor = 0x9e3779b97f4a7c15u;
    constexpr int kWords = 8;
    uint64_t state[kWords], words[kWords];
    for (int j = 0; j < kWords; ++j) state[j] = kFactor * static_cast<uint64_t>(j + 1);
    const auto add = [&] {
        for (int j = 0; j < kWords; ++j) {
            const uint64_t both = state[j] ^ words[j];
            state[j] = (both ^ both >> 29) * kFactor;
        }
    };
    for (; n >= static_cast<int64_t>(sizeof(words)); n -= sizeof(words), x += sizeof(words)) {
        std::memcpy(words, x, sizeof(words));
        add();
    }
    std::memset(words, 0, sizeof(words));
    std::memcpy(words, x, static_cast<size_t>(n));
    add();
    uint64_t total = static_cast<uint64_t>(n);
    for (const uint64_t word : state) {
        total = (total ^ word) * kFactor;
        total ^= total >> 32;
    }
    return total;
}

void run_digests(const char* x, int64_t n, int64_t block, uint64_t* out, int threads) {
    auto one = [&](int64_t i) { out[i] = digest(x + i * block, std::min(block, n - i * block)); };
    parallel_for(threads, (n + block - 1) / block, one);
}

int64_t run_count_nonfinite(const std::vector<Span>& spans, Dtype dtype, int threads) {
    const Kernels& kernels = active();
    const std::vector<Span> pieces = split(spans, dtype, kNormChunk);
    std::vector<int64_t> partial(pieces.size());
    auto count = [&](int64_t i) { partial[i] = kernels.count_nonfinite(pieces[i].data, dtype, pieces[i].n); };
    parallel_for(threads, static_cast<int64_t>(pieces.size()), count);
    int64_t total = 0;
    for (int64_t value : partial) total += value;
    return total;
}

void run_scale(const std::vector<Span>& spans, Dtype dtype, double factor, int threads) {
    const Kernels& kernels = active();
    const std::vector<Span> pieces = split(spans, dtype, kNormChunk);
    auto scale = [&](int64_t i) { kernels.scale(pieces[i].data, dtype, pieces[i].n, factor); };
    parallel_for(threads, static_cast<int64_t>(pieces.size()), scale);
}

void run_cast(const char* x, Dtype from, char* out, Dtype to, int64_t n, int threads) {
    const Kernels& kernels = active();
    auto cast = [&](int64_t i) {
        const int64_t begin = i * kNormChunk, length = std::min(kNormChunk, n - begin);
        kernels.cast(x + begin * item_size(from), from, out + begin * item_size(to), to, length, true);
    };
    parallel_for(threads, (n + kNormChunk - 1) / kNormChunk, cast);
}

void run_sum_slices(const std::vector<const char*>& slices, Dtype dtype, char* out, Dtype out_dtype, int64_t n, double divisor, int threads) {
    const Kernels& kernels = active();
    auto sum = [&](int64_t i) {
        const int64_t begin = i * kNormChunk, end = std::min(begin + kNormChunk, n);
        kernels.sum_slices(slices.data(), static_cast<int64_t>(slices.size()), begin, end, dtype, out, out_dtype, divisor);
    };
    parallel_for(threads, (n + kNormChunk - 1) / kNormChunk, sum);
}

// Calls body(first, last) over ranges of about kNormChunk elements of whole blocks.
template <class Body>
static void for_blocks(const BlockFormat& format, int64_t n, int threads, Body body) {
    const int64_t blocks = (n + format.block - 1) / format.block, together = std::max<int64_t>(1, kNormChunk / format.block);
    auto range = [&](int64_t i) { body(i * together, std::min(blocks, (i + 1) * together)); };
    parallel_for(threads, (blocks + together - 1) / together, range);
}

void run_quantize(const BlockFormat& format, const char* x, uint8_t* payload, float* scales, int64_t n, int threads) {
    const Kernels& kernels = active();
    for_blocks(format, n, threads, [&](int64_t first, int64_t last) { kernels.quantize(format, x, payload, scales, n, first, last); });
}

void run_dequantize(const BlockFormat& format, const uint8_t* payload, const float* scales, char* out, int64_t n, int threads) {
    const Kernels& kernels = active();
    for_blocks(format, n, threads, [&](int64_t first, int64_t last) { kernels.dequantize(format, payload, scales, out, n, first, last); });
}

}  // namespace zok
