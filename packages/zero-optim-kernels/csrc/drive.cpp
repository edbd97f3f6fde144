#include "drive.hpp"

#include <algorithm>

#include "dispatch.hpp"
#include "pool.hpp"

namespace zok {
namespace {

struct Chunk {
    int64_t run, begin, end;
};

// Chunks end at global multiples of kChunk. Slabs are runs of consecutive chunks of about kChunk elements together, so that many small
// tensors cost a thread as little as one large one.
struct Plan {
    std::vector<Chunk> chunks;
    std::vector<size_t> slabs;  // first chunk of each slab, and the end
};

Plan plan(const std::vector<Run>& runs) {
    Plan result;
    int64_t elements = 0;
    result.slabs.push_back(0);
    for (size_t r = 0; r < runs.size(); ++r) {
        for (int64_t begin = 0, end; begin < runs[r].n; begin = end) {
            const uint64_t global = runs[r].offset + static_cast<uint64_t>(begin);
            end = std::min(runs[r].n, begin + kChunk - static_cast<int64_t>(global % kChunk));
            result.chunks.push_back({static_cast<int64_t>(r), begin, end});
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
    const Plan work = plan(runs);
    std::vector<RowNorms> partial(norms ? work.chunks.size() * rows.size() : 0);
    for_slabs(work, threads, [&](size_t c) {
        const Chunk& chunk = work.chunks[c];
        kernels.step(format, runs[chunk.run], rows.data(), chunk.begin, chunk.end, norms ? &partial[c * rows.size()] : nullptr);
    });
    if (!norms) return;
    norms->assign(rows.size(), RowNorms{0, 0});
    for (size_t i = 0; i < partial.size(); ++i) {
        (*norms)[i % rows.size()].weight += partial[i].weight;
        (*norms)[i % rows.size()].update += partial[i].update;
    }
}

void run_apply(const Format& format, const std::vector<Run>& runs, const std::vector<Row>& rows, int threads) {
    const Kernels& kernels = active();
    const Plan work = plan(runs);
    for_slabs(work, threads, [&](size_t c) {
        const Chunk& chunk = work.chunks[c];
        kernels.apply(format, runs[chunk.run], rows.data(), chunk.begin, chunk.end);
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

}  // namespace zok
