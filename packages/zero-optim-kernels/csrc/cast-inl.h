// Whole-buffer casts and scaling. Every 16-bit result is rounded to nearest even from float32; float64 goes through float32.

static void narrow_f64(const double* x, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(x[i]);
}
static void widen_f64(const float* x, double* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<double>(x[i]);
}

static void cast(const char* x, Dtype from, char* out, Dtype to, int64_t n, bool stream) {
    alignas(64) float single[kTile];
    for (int64_t begin = 0; begin < n; begin += kTile) {
        const int64_t length = n - begin < kTile ? n - begin : kTile;
        const char* source = x + begin * item_size(from);
        char* target = out + begin * item_size(to);
        if (from == to) {
            __builtin_memmove(target, source, static_cast<size_t>(length * item_size(to)));
            continue;
        }
        const float* middle = single;
        if (from == Dtype::f32) middle = reinterpret_cast<const float*>(source);
        else if (to == Dtype::f32) middle = reinterpret_cast<float*>(target);
        float* fill = const_cast<float*>(middle);
        if (from == Dtype::f64) narrow_f64(reinterpret_cast<const double*>(source), fill, length);
        else if (from != Dtype::f32) widen(source, from, fill, length);
        if (to == Dtype::f64) widen_f64(middle, reinterpret_cast<double*>(target), length);
        else if (to != Dtype::f32) narrow(middle, target, to, length, stream);
    }
}

struct ScaleF32 {
    float* x;
    float factor;
    template <class T>
    ZOK_MEMBER void at(int64_t i) { T::store(x + i, T::load(x + i) * T::set(factor)); }
};

static void scale(char* x, Dtype dtype, int64_t n, double factor) {
    if (dtype == Dtype::f64) {
        double* wide = reinterpret_cast<double*>(x);
        for (int64_t i = 0; i < n; ++i) wide[i] *= factor;
        return;
    }
    if (dtype == Dtype::f32) {
        for_lanes(ScaleF32{reinterpret_cast<float*>(x), static_cast<float>(factor)}, n);
        return;
    }
    alignas(64) float single[kTile];
    for (int64_t begin = 0; begin < n; begin += kTile) {
        const int64_t length = n - begin < kTile ? n - begin : kTile;
        widen(x + 2 * begin, dtype, single, length);
        for_lanes(ScaleF32{single, static_cast<float>(factor)}, length);
        narrow(single, x + 2 * begin, dtype, length, false);
    }
}
