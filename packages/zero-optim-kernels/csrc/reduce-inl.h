// Sums of squares, sums of slices and the non-finite scan. The order of every sum is part of its definition and the same for every
// instruction set: 32 interleaved float64 lanes, folded in halves.

constexpr int kLanes = 32;

// Adds the squares of n elements to kLanes sums, the first element to lane 0.
template <class Load>
ZOK_INLINE void add_squares(double* lanes, const char* x, int64_t n) {
    constexpr int kVectors = kLanes / Vector::W;
    typename Vector::Wide sums[kVectors];
    __builtin_memcpy(sums, lanes, sizeof(sums));
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        ZOK_UNROLL for (int r = 0; r < kVectors; ++r) Vector::add_square(sums[r], Load::template load<Vector>(x, i + r * Vector::W));
    }
    __builtin_memcpy(lanes, sums, sizeof(sums));
    for (int lane = 0; i < n; ++i, ++lane) Scalar::add_square(lanes[lane], Load::template load<Scalar>(x, i));
}

ZOK_INLINE void add_squares_f64(double* lanes, const double* x, int64_t n) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += x[i + lane] * x[i + lane];
    for (int lane = 0; i < n; ++i, ++lane) lanes[lane] += x[i] * x[i];
}

ZOK_INLINE double fold(double* lanes) {
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

static double sum_squares(const char* x, Dtype dtype, int64_t n) {
    alignas(64) double lanes[kLanes] = {};
    if (dtype == Dtype::f64) add_squares_f64(lanes, reinterpret_cast<const double*>(x), n);
    else if (dtype == Dtype::bf16) add_squares<LoadBf16>(lanes, x, n);
    else if (dtype == Dtype::f16) add_squares<LoadF16>(lanes, x, n);
    else add_squares<LoadF32>(lanes, x, n);
    return fold(lanes);
}

template <class E>
ZOK_INLINE int64_t count_exponent(const char* x, int64_t n, E mask) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; ++i) {
        E u;
        __builtin_memcpy(&u, x + i * static_cast<int64_t>(sizeof(E)), sizeof(E));
        found += static_cast<E>(u & mask) == mask;
    }
    return found;
}

static int64_t count_nonfinite(const char* x, Dtype dtype, int64_t n) {
    switch (dtype) {
        case Dtype::f64: return count_exponent<uint64_t>(x, n, 0x7ff0000000000000u);
        case Dtype::f32: return count_exponent<uint32_t>(x, n, 0x7f800000u);
        case Dtype::bf16: return count_exponent<uint16_t>(x, n, 0x7f80u);
        case Dtype::f16: return count_exponent<uint16_t>(x, n, 0x7c00u);
        default: return 0;
    }
}

template <class Load>
struct SumSlices {
    const char* const* slices;
    int64_t count;
    float* out;
    int64_t begin;
    float divisor;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        typename T::F sum = Load::template load<T>(slices[0], begin + i);
        for (int64_t k = 1; k < count; ++k) sum = sum + Load::template load<T>(slices[k], begin + i);
        T::store(out + i, sum / T::set(divisor));
    }
};

static void sum_slices_f64(const char* const* slices, int64_t count, int64_t begin, int64_t end, double* out, double divisor) {
    for (int64_t i = begin; i < end; ++i) {
        double sum = reinterpret_cast<const double*>(slices[0])[i];
        for (int64_t k = 1; k < count; ++k) sum += reinterpret_cast<const double*>(slices[k])[i];
        out[i - begin] = sum / divisor;
    }
}

// Float64 slices are summed in float64, all others in float32; one division at the end. `out` may be one of the slices.
static void sum_slices(const char* const* slices, int64_t count, int64_t begin, int64_t end, Dtype dtype, char* out, Dtype out_dtype,
                       double divisor) {
    alignas(64) float single[kTile];
    alignas(64) double wide[kTile];
    for (int64_t b = begin; b < end; b += kTile) {
        const int64_t e = b + kTile < end ? b + kTile : end, n = e - b;
        char* target = out + b * item_size(out_dtype);
        if (dtype == Dtype::f64) {
            double* to = out_dtype == Dtype::f64 ? reinterpret_cast<double*>(target) : wide;
            sum_slices_f64(slices, count, b, e, to, divisor);
            if (out_dtype != Dtype::f64) cast(reinterpret_cast<const char*>(wide), Dtype::f64, target, out_dtype, n, false);
            continue;
        }
        float* to = out_dtype == Dtype::f32 ? reinterpret_cast<float*>(target) : single;
        const float by = static_cast<float>(divisor);
        if (dtype == Dtype::bf16) for_lanes(SumSlices<LoadBf16>{slices, count, to, b, by}, n);
        else if (dtype == Dtype::f16) for_lanes(SumSlices<LoadF16>{slices, count, to, b, by}, n);
        else for_lanes(SumSlices<LoadF32>{slices, count, to, b, by}, n);
        if (out_dtype != Dtype::f32) cast(reinterpret_cast<const char*>(single), Dtype::f32, target, out_dtype, n, false);
    }
}
