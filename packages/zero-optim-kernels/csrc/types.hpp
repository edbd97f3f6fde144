// Plain data that crosses from the bindings to the drivers and from there to the kernels of one instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zok {

enum class Dtype : int { f32, bf16, f16, f64, int8, none };

constexpr int64_t kQuantBlock = 256;  // elements that share one scale in an 8-bit state
constexpr int64_t kTile = 1024;       // elements that stay in the first-level cache between the phases of one step
constexpr int64_t kChunk = 32768;     // elements of one unit of work for a thread; anchored at multiples of itself
constexpr int64_t kAhead = 512;       // prefetch distance of an update in elements; the processor's own prefetching is not enough
static_assert(kTile % kQuantBlock == 0 && kChunk % kTile == 0, "a quantisation block never spans two chunks");

inline int64_t item_size(Dtype dtype) {
    switch (dtype) {
        case Dtype::f64: return 8;
        case Dtype::f32: return 4;
        case Dtype::bf16:
        case Dtype::f16: return 2;
        case Dtype::int8: return 1;
        case Dtype::none: return 0;
    }
    return 0;
}

enum class Rule : int { adam, adagrad, lion, sgd, lamb };
constexpr int kCoefficients = 12;

// The memory for a run's new parameters and states. Null where the run has no such operand.
struct Results {
    char* param;
    uint16_t* param_low;
    char* state[2];
    float* scale[2];
};

// One tensor, or one contiguous range of a shard. `offset` is the global index of element 0.
struct Run {
    char* param;
    uint16_t* param_low;   // the 16 bits that a bf16 parameter lacks, or null
    char* grad;
    char* state[2];        // first moment (exp_avg, momentum_buffer) and second (exp_avg_sq, sum), or null
    float* scale[2];       // scales of 8-bit state, one per quantisation block, or null
    char* copy_out;        // low-precision copy of the updated parameter, or null
    char* update;          // LAMB's update direction, or null
    int64_t n;
    uint64_t offset;
    int64_t row;           // index of its first row
    Results to;            // read only where the format says `apart`; each is the operand's own memory, or does not overlap it
};

// The memory that follows a chunk elsewhere: the streams of the next chunk. From element `from` of this run on, the update prefetches their
// elements 0, 1, ...
struct Ahead {
    const char* stream[4];  // param, grad and the states; null where there is none
    int64_t from;           // behind the chunk's end where nothing is to be prefetched
};

// Hyperparameters of the elements of a run before `end` (and after the previous row), as each rule reads them.
struct Row {
    int64_t end;
    double c[kCoefficients];
    float f[kCoefficients];  // the same, rounded to float32
};

struct Format {
    Rule rule;
    Dtype param, grad, state, copy;
    bool zero_grad;
    bool apart;            // new values go to `Run::to`, and the operands stay as they are
    uint64_t key;          // mixed from seed and step number
};

enum class Code : int { int8, int4, e4m3, u5e3 };

// The format of a plain buffer that is quantised in blocks.
struct BlockFormat {
    Code code;
    Dtype dtype;      // of the buffer before quantisation, or after dequantisation
    int64_t block;    // elements per scale; even
    bool stochastic;
    uint64_t key;
    uint64_t offset;  // global index of element 0, for the random numbers
};

// Squared norms of a row's elements, for LAMB: of the parameter and of its update direction.
struct RowNorms {
    double weight;
    double update;
};

}  // namespace zok
