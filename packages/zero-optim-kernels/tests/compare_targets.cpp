// Runs every kernel of an instruction set and of the scalar target on the same memory and compares all of it, byte for byte. For processors
// on which the Python tests do not run; test_everywhere.py builds it for 64-bit Arm and runs it under emulation.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../csrc/kernels.hpp"

using namespace zok;
using Bytes = std::vector<char>;

static int failures = 0, comparisons = 0;

static void expect_equal(const Bytes& a, const Bytes& b, const std::string& what) {
    ++comparisons;
    if (a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0) return;
    if (++failures <= 20) std::printf("differs: %s\n", what.c_str());
}

static std::mt19937_64 generator(1);

static float normal(double spread) {
    std::normal_distribution<double> standard;
    return static_cast<float>(standard(generator) * std::exp(spread * standard(generator)));
}

// Numbers as stored in `dtype`; `sign` false takes magnitudes.
static Bytes numbers(Dtype dtype, int64_t n, bool sign = true, double spread = 3) {
    std::vector<float> single(static_cast<size_t>(n));
    for (float& x : single) x = sign ? normal(spread) : std::fabs(normal(spread));
    Bytes result(static_cast<size_t>(n * item_size(dtype)));
    scalar_kernels()->cast(reinterpret_cast<const char*>(single.data()), Dtype::f32, result.data(), dtype, n, false);
    return result;
}

static Bytes codes(int64_t n, int most) {
    Bytes result(static_cast<size_t>(n));
    for (char& code : result) code = static_cast<char>(generator() % static_cast<uint64_t>(most + 1));
    return result;
}

struct Memory {
    Bytes param, low, grad, state[2], scale[2], copy, update;
    std::vector<Bytes*> all() { return {&param, &low, &grad, &state[0], &state[1], &scale[0], &scale[1], &copy, &update}; }
};

static Memory memory_of(const Format& f, bool exact, bool momentum, int64_t n) {
    const bool first = f.rule != Rule::adagrad && (f.rule != Rule::sgd || momentum), second = f.rule != Rule::lion && f.rule != Rule::sgd;
    const int64_t blocks = (n + kQuantBlock - 1) / kQuantBlock;
    Memory m;
    m.param = numbers(f.param, n);
    m.grad = numbers(f.grad, n);
    if (exact) m.low = codes(2 * n, 255);
    for (int s = 0; s < 2; ++s) {
        if (s == 0 ? !first : !second) continue;
        m.state[s] = f.state == Dtype::int8 ? codes(n, s == 0 ? 126 : 255) : numbers(f.state, n, s == 0);
        if (f.state == Dtype::int8) m.scale[s] = numbers(Dtype::f32, blocks, false);
    }
    if (f.copy != Dtype::none) m.copy = Bytes(static_cast<size_t>(n * item_size(f.copy)));
    if (f.rule == Rule::lamb) m.update = Bytes(static_cast<size_t>(n * (f.param == Dtype::f64 ? 8 : 4)));
    return m;
}

static Run run_of(Memory& m, int64_t n, uint64_t offset) {
    const auto data = [](Bytes& bytes) { return bytes.empty() ? nullptr : bytes.data(); };
    return {data(m.param), reinterpret_cast<uint16_t*>(data(m.low)), data(m.grad), {data(m.state[0]), data(m.state[1])},
            {reinterpret_cast<float*>(data(m.scale[0])), reinterpret_cast<float*>(data(m.scale[1]))}, data(m.copy), data(m.update), n, offset, 0, {}};
}

// The step of `f` with results apart, which must be what the step in place has left in `inside`.
static void compare_apart(const Kernels& k, Format f, const Row* rows, const Memory& start, Memory& inside, const std::string& what) {
    const int64_t n = 2 * kTile + 77;
    Memory old = start, to = start;
    for (Bytes* bytes : to.all()) std::fill(bytes->begin(), bytes->end(), 0x5a);
    const Run into = run_of(to, n, 3 * kTile);
    Run run = run_of(old, n, 3 * kTile);
    run.to = {into.param, into.param_low, {into.state[0], into.state[1]}, {into.scale[0], into.scale[1]}};
    run.copy_out = into.copy_out;
    f.apart = true;
    k.step(f, run, rows, 0, n, Ahead{{}, n}, nullptr);
    to.grad = old.grad;
    for (size_t i = 0; i < to.all().size(); ++i) expect_equal(*to.all()[i], *inside.all()[i], what + " apart, memory " + std::to_string(i));
}

static void compare_step(const Kernels& k, Format f, bool exact, bool momentum, const std::string& what) {
    const int64_t n = 2 * kTile + 77;
    Row rows[2] = {{700, {}, {}}, {n, {}, {}}};
    const double sixth = f.rule == Rule::sgd ? 0.0 : 0.05;  // of momentum, whether this is the first step
    const double values[kCoefficients] = {0.7, 0.999, 0.01, 0.1, 0.9, 0.95, sixth, -0.01, 1.3, 1e-8, 0, 0};
    for (Row& row : rows)
        for (int i = 0; i < kCoefficients; ++i) row.f[i] = static_cast<float>(row.c[i] = values[i] * (row.end == n ? 1.0 : 0.5));
    const Memory start = memory_of(f, exact, momentum, n);
    Memory a = start, b = start;
    RowNorms norms[2][2] = {};
    const bool lamb = f.rule == Rule::lamb;
    const Run run[2] = {run_of(a, n, 3 * kTile), run_of(b, n, 3 * kTile)};
    const Ahead nothing{{}, n};
    k.step(f, run[0], rows, 0, n, nothing, lamb ? norms[0] : nullptr);
    scalar_kernels()->step(f, run[1], rows, 0, n, nothing, lamb ? norms[1] : nullptr);
    if (lamb) {
        k.apply(f, run[0], rows, 0, n);
        scalar_kernels()->apply(f, run[1], rows, 0, n);
    }
    for (size_t i = 0; i < a.all().size(); ++i) expect_equal(*a.all()[i], *b.all()[i], what + ", memory " + std::to_string(i));
    if (std::memcmp(norms[0], norms[1], sizeof(norms[0])) != 0) ++failures;
    if (!lamb) compare_apart(k, f, rows, start, b, what);
}

static void compare_steps(const Kernels& k) {
    const Dtype grads[] = {Dtype::f32, Dtype::bf16, Dtype::f16}, states[] = {Dtype::f32, Dtype::bf16, Dtype::int8};
    const Dtype copies[] = {Dtype::none, Dtype::f32, Dtype::bf16, Dtype::f16};
    for (int rule = 0; rule < 5; ++rule)
        for (int variant = 0; variant < 3; ++variant)
            for (Dtype grad : grads)
                for (Dtype state : states)
                    for (Dtype copy : copies)
                        for (bool momentum : {false, true}) {
                            const Format f{static_cast<Rule>(rule), variant == 0 ? Dtype::f32 : Dtype::bf16, grad, state, copy, false, false, 12345};
                            const int name[] = {rule, variant, static_cast<int>(grad), static_cast<int>(state), static_cast<int>(copy)};
                            std::string what = "step";
                            for (int part : name) what += " " + std::to_string(part);
                            compare_step(k, f, variant == 2, momentum, what);
                        }
    for (int rule = 0; rule < 5; ++rule)
        compare_step(k, {static_cast<Rule>(rule), Dtype::f64, Dtype::f64, Dtype::f64, Dtype::bf16, true, false, 1}, false, true, "float64 step");
}

static void compare_buffers(const Kernels& k) {
    const Dtype dtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::f64};
    const Kernels& s = *scalar_kernels();
    const int64_t n = 5003;
    for (Dtype from : dtypes) {
        const Bytes x = numbers(from, n), y = numbers(from, n);
        if (k.sum_squares(x.data(), from, n) != s.sum_squares(x.data(), from, n)) ++failures;
        if (k.count_nonfinite(x.data(), from, n) != s.count_nonfinite(x.data(), from, n)) ++failures;
        Bytes a = x, b = x;
        k.scale(a.data(), from, n, 0.3);
        s.scale(b.data(), from, n, 0.3);
        expect_equal(a, b, "scale");
        for (Dtype to : dtypes) {
            a.assign(static_cast<size_t>(n * item_size(to)), 0);
            b = a;
            k.cast(x.data(), from, a.data(), to, n, true);
            s.cast(x.data(), from, b.data(), to, n, true);
            expect_equal(a, b, "cast");
            const char* slices[] = {x.data(), y.data()};
            k.sum_slices(slices, 2, 0, n, from, a.data(), to, 3.0);
            s.sum_slices(slices, 2, 0, n, from, b.data(), to, 3.0);
            expect_equal(a, b, "sum of slices");
        }
    }
}

static void compare_blocks(const Kernels& k) {
    const Kernels& s = *scalar_kernels();
    const int64_t n = 5003, block = 64, blocks = (n + block - 1) / block;
    for (Code code : {Code::int8, Code::int4, Code::e4m3, Code::u5e3})
        for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
            for (bool stochastic : {false, true}) {
                const BlockFormat f{code, dtype, block, stochastic, 77, 1024};
                const Bytes x = numbers(dtype, n, code != Code::u5e3);
                Bytes payload[2], out[2];
                std::vector<float> scales(static_cast<size_t>(2 * blocks));
                for (int i = 0; i < 2; ++i) {
                    const Kernels& own = i == 0 ? k : s;
                    payload[i].assign(static_cast<size_t>(n), 0);
                    out[i].assign(static_cast<size_t>(n * item_size(dtype)), 0);
                    uint8_t* codes_ = reinterpret_cast<uint8_t*>(payload[i].data());
                    own.quantize(f, x.data(), codes_, scales.data() + i * blocks, n, 0, blocks);
                    own.dequantize(f, codes_, scales.data() + i * blocks, out[i].data(), n, 0, blocks);
                }
                expect_equal(payload[0], payload[1], "payload");
                expect_equal(out[0], out[1], "values");
            }
}

int main() {
#if defined(__aarch64__)
    const Kernels& kernels = *neon_kernels();
#else
    const Kernels& kernels = *avx2_kernels();
#endif
    compare_steps(kernels);
    compare_buffers(kernels);
    compare_blocks(kernels);
    std::printf("%s against scalar: %d comparisons, %d failures\n", kernels.name, comparisons, failures);
    return failures != 0;
}
