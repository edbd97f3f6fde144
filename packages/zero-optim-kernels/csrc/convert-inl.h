// Conversions between float32 and what is stored: bf16, f16, 8-bit codes, and the random bits of stochastic rounding.

// Calls body.at<Vector>(i) for whole vectors and body.at<Scalar>(i) for the rest of [0, n).
template <class Body>
ZOK_INLINE Body for_lanes(Body body, int64_t n) {
    int64_t i = 0;
    for (; i + Vector::W <= n; i += Vector::W) body.template at<Vector>(i);
    for (; i < n; ++i) body.template at<Scalar>(i);
    return body;
}

// Calls body.at<Vector, kGroup>(i) for groups of vectors, and with a count of 1 for the rest of [0, n).
template <int kGroup, class Body>
ZOK_INLINE Body for_groups(Body body, int64_t n) {
    int64_t i = 0;
    for (; i + kGroup * Vector::W <= n; i += kGroup * Vector::W) body.template at<Vector, kGroup>(i);
    for (; i + Vector::W <= n; i += Vector::W) body.template at<Vector, 1>(i);
    for (; i < n; ++i) body.template at<Scalar, 1>(i);
    return body;
}

// Returns whether vectors can be written past the cache from this address on.
template <class V>
static bool streams(const void* out) { return reinterpret_cast<uintptr_t>(out) % sizeof(V) == 0; }

template <class T>
ZOK_INLINE typename T::M is_nan(typename T::U u) {
    return T::gt_u(u & T::setu(0x7fffffffu), T::setu(0x7f800000u));
}

// Rounds a number or infinity to the nearest bf16, in the high 16 bits of the result; the low ones are to be dropped.
template <class T>
ZOK_INLINE typename T::U bf16_rounded(typename T::F x) {
    const typename T::U u = T::bits(x);
    return u + T::setu(0x7fffu) + (u >> 16 & T::setu(1u));
}

template <class T>
ZOK_INLINE typename T::U bf16_nearest(typename T::F x) {
    const typename T::U u = T::bits(x);
    return T::pick(is_nan<T>(u), (u >> 16) | T::setu(0x40u), bf16_rounded<T>(x) >> 16);
}

// The same, rounded stochastically: `random` is uniform in [0, 2^16), and the expectation of the result is x.
template <class T>
ZOK_INLINE typename T::U bf16_stochastic(typename T::F x, typename T::U random) {
    const typename T::U u = T::bits(x);
    return T::pick(is_nan<T>(u), (u >> 16) | T::setu(0x40u), (u + random) >> 16);
}

// Random bits that depend on (seed, step) through `key` and on the global element index. The high bits are the most random ones.
// `vector` counts vectors from `index` on: a group of them shares the product of the index, the rest are constants.
template <class T>
ZOK_INLINE typename T::U random_bits(uint64_t key, uint32_t index, int vector = 0) {
    constexpr uint32_t kFirst = 0x9e3779b1u;
    const typename T::U lanes = (T::iota() + T::setu(static_cast<uint32_t>(vector * T::W))) * T::setu(kFirst);
    const typename T::U x = lanes + T::setu((index + static_cast<uint32_t>(key)) * kFirst);
    return (x ^ x >> 16 ^ T::setu(static_cast<uint32_t>(key >> 32))) * T::setu(0x85ebca6bu);
}

ZOK_INLINE uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// The kinds of values that are rounded stochastically; each has random numbers of its own.
enum class Stream : uint64_t { parameter, second_moment, payload };

// The key of the elements that share the high half of their index; a tile of a step never crosses a multiple of 2^32.
ZOK_INLINE uint64_t tile_key(uint64_t key, uint64_t index, Stream stream) {
    return mix(key + ((index >> 32) * 4 + static_cast<uint64_t>(stream)) * 0x9e3779b97f4a7c15u);
}

struct LoadF32 {
    static constexpr int64_t kItem = 4;  // bytes of an element
    template <class T>
    ZOK_INLINE typename T::F load(const char* p, int64_t i) { return T::load(reinterpret_cast<const float*>(p) + i); }
};
struct LoadBf16 {
    static constexpr int64_t kItem = 2;
    template <class T>
    ZOK_INLINE typename T::F load(const char* p, int64_t i) {
        return T::from_bits(T::load_u16(reinterpret_cast<const uint16_t*>(p) + i) << 16);
    }
};
struct LoadF16 {
    static constexpr int64_t kItem = 2;
    template <class T>
    ZOK_INLINE typename T::F load(const char* p, int64_t i) { return T::load_f16(reinterpret_cast<const uint16_t*>(p) + i); }
};

template <class Load>
struct Widen {
    const char* x;
    float* out;
    template <class T>
    ZOK_MEMBER void at(int64_t i) { T::store(out + i, Load::template load<T>(x, i)); }
};

template <bool kHalf, bool kStream>
struct Narrow {
    const float* x;
    uint16_t* out;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        const typename T::F v = T::load(x + i);
        typename T::H h;
        if (kHalf) h = T::to_f16(v);
        else h = T::narrow(bf16_nearest<T>(v));
        if (kStream) T::stream_h(out + i, h);
        else T::store_h(out + i, h);
    }
};

struct NarrowStochastic {
    const float* x;
    uint16_t* out;
    uint64_t key;
    uint32_t index;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        const typename T::U r = random_bits<T>(key, index + static_cast<uint32_t>(i)) >> 16;
        T::store_h(out + i, T::narrow(bf16_stochastic<T>(T::load(x + i), r)));
    }
};

static void widen(const char* x, Dtype dtype, float* out, int64_t n) {
    if (dtype == Dtype::bf16) for_lanes(Widen<LoadBf16>{x, out}, n);
    else if (dtype == Dtype::f16) for_lanes(Widen<LoadF16>{x, out}, n);
    else for_lanes(Widen<LoadF32>{x, out}, n);
}

template <bool kStream>
static void narrow_to(const float* x, uint16_t* out, Dtype dtype, int64_t n) {
    if (dtype == Dtype::bf16) for_lanes(Narrow<false, kStream>{x, out}, n);
    else for_lanes(Narrow<true, kStream>{x, out}, n);
}

// A stream that is only written costs no read of its old content with non-temporal stores, which need whole-vector alignment.
static void narrow(const float* x, char* out, Dtype dtype, int64_t n, bool stream) {
    uint16_t* p = reinterpret_cast<uint16_t*>(out);
    if (!stream) return narrow_to<false>(x, p, dtype, n);
    const int64_t unaligned = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(out) % sizeof(Vector::H) / 2);
    const int64_t head = n < unaligned ? n : unaligned;
    narrow_to<false>(x, p, dtype, head);
    narrow_to<true>(x + head, p + head, dtype, n - head);
}

// A float32 kept as bf16 plus 16 bits: the bf16 is the nearest one (ties away from zero), the low half its signed difference, so the
// pair is exact and the bf16 alone is what forward needs.
struct JoinLow {
    const uint16_t* high;
    const uint16_t* low;
    float* out;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        const typename T::U l = T::load_u16(low + i);
        const typename T::U h = (T::load_u16(high + i) - (l >> 15)) << 16;
        T::store(out + i, T::from_bits(h | l));
    }
};
struct SplitLow {
    const float* x;
    uint16_t* high;
    uint16_t* low;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        const typename T::U raw = T::bits(T::load(x + i));
        const typename T::U u = T::pick(is_nan<T>(raw), T::setu(0x7fc00000u), raw);
        T::store_h(high + i, T::narrow((u + T::setu(0x8000u)) >> 16));
        T::store_h(low + i, T::narrow(u & T::setu(0xffffu)));
    }
};
