// 8-bit optimizer state in blocks of kQuantBlock with a float32 scale, the block's largest magnitude.
//
// First moment: e4m3 (largest code 448), rounded to nearest. Second moment: unsigned, 5 exponent and 3 mantissa bits, code c > 0 is
// 2^(c/8 - 31) * (1 + c%8 / 8), largest 1.875, zero is code 0; rounded stochastically, because to nearest it cannot decay, and never
// from above zero to zero, because the update divides by its root. A block with NaN or Inf has that as its scale and stays so. Blocks
// below the magnitudes here would need subnormal numbers and are zero.
constexpr float kLargestE4m3 = 448.0f, kLargestU5e3 = 1.875f;
constexpr float kSmallestE4m3Block = 0x1p-100f, kSmallestU5e3Block = 0x1p-90f;
constexpr uint32_t kU5e3Bias = 96u << 23;

template <class T>
ZOK_INLINE typename T::F e4m3_value(typename T::U code) {
    const typename T::U magnitude = code & T::setu(0x7fu), shifted = magnitude << 20;
    const typename T::F normal = T::from_bits(shifted + T::setu(120u << 23));
    const typename T::F small = T::from_bits(shifted + T::setu(121u << 23)) - T::set(0x1p-6f);
    const typename T::U value = T::pick(T::gt_u(T::setu(8u), magnitude), T::bits(small), T::bits(normal));
    return T::from_bits(value | (code & T::setu(0x80u)) << 24);
}

// Round to nearest even; |x| may exceed 448 by rounding error only.
template <class T>
ZOK_INLINE typename T::U e4m3_code(typename T::F x) {
    const typename T::U u = T::bits(x), a = u & T::setu(0x7fffffffu);
    const typename T::U normal = ((a + T::setu(0x7ffffu) + (a >> 20 & T::setu(1u))) >> 20) - T::setu(120u << 3);
    const typename T::U small = T::bits(T::from_bits(a) + T::set(16384.0f)) - T::setu(0x46800000u);
    const typename T::U code = T::min_u(T::pick(T::gt_u(T::setu(121u << 23), a), small, normal), T::setu(0x7eu));
    return code | (u >> 24 & T::setu(0x80u));
}

template <class T>
ZOK_INLINE typename T::F u5e3_value(typename T::U code) {
    const typename T::U value = (code << 20) + T::setu(kU5e3Bias);
    return T::from_bits(T::pick(T::eq_u(code, T::setu(0u)), T::setu(0u), value));
}

// `random` is uniform in [0, 2^20).
template <class T>
ZOK_INLINE typename T::U u5e3_code(typename T::F x, typename T::U random) {
    const typename T::U u = T::max_u(T::bits(x) + random, T::setu(kU5e3Bias + (1u << 20)));
    const typename T::U code = T::min_u((u >> 20) - T::setu(kU5e3Bias >> 20), T::setu(255u));
    return T::pick(T::eq_u(T::bits(x), T::setu(0u)), T::setu(0u), code);
}

struct DecodeE4m3 {
    const uint8_t* codes;
    float* out;
    float scale;
    template <class T>
    ZOK_MEMBER void at(int64_t i) { T::store(out + i, T::load_e4m3(codes + i, T::set(scale))); }
};
struct DecodeU5e3 {
    const uint8_t* codes;
    float* out;
    float scale;
    template <class T>
    ZOK_MEMBER void at(int64_t i) { T::store(out + i, u5e3_value<T>(T::load_u8(codes + i)) * T::set(scale)); }
};
struct EncodeE4m3 {
    const float* x;
    uint8_t* codes;
    float inverse;
    template <class T>
    ZOK_MEMBER void at(int64_t i) { T::store_u8(codes + i, e4m3_code<T>(T::load(x + i) * T::set(inverse))); }
};
struct EncodeU5e3 {
    const float* x;
    uint8_t* codes;
    float inverse;
    uint64_t key;
    uint32_t index;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        const typename T::U r = random_bits<T>(key, index + static_cast<uint32_t>(i)) >> 16 << 4;
        T::store_u8(codes + i, u5e3_code<T>(T::load(x + i) * T::set(inverse), r));
    }
};

// The largest magnitude as bits: NaN orders above Inf, Inf above every number.
static uint32_t largest_magnitude(const float* x, int64_t n) {
    Vector::U best = Vector::setu(0);
    int64_t i = 0;
    for (; i + Vector::W <= n; i += Vector::W) best = Vector::max_u(best, Vector::bits(Vector::load(x + i)) & Vector::setu(0x7fffffffu));
    uint32_t result = Vector::highest(best);
    for (; i < n; ++i) result = Scalar::max_u(result, Scalar::bits(x[i]) & 0x7fffffffu);
    return result;
}

template <bool kSecond>
static void decode_state(const uint8_t* codes, const float* scales, float* out, int64_t n) {
    for (int64_t begin = 0; begin < n; begin += kQuantBlock) {
        const int64_t length = n - begin < kQuantBlock ? n - begin : kQuantBlock;
        const float largest = scales[begin / kQuantBlock];
        if (kSecond) for_lanes(DecodeU5e3{codes + begin, out + begin, largest / kLargestU5e3}, length);
        else for_lanes(DecodeE4m3{codes + begin, out + begin, largest / kLargestE4m3}, length);
    }
}

template <bool kSecond>
static void encode_state(const float* x, uint8_t* codes, float* scales, int64_t n, uint64_t key, uint32_t index) {
    for (int64_t begin = 0; begin < n; begin += kQuantBlock) {
        const int64_t length = n - begin < kQuantBlock ? n - begin : kQuantBlock;
        const uint32_t bits = largest_magnitude(x + begin, length);
        const float largest = Scalar::from_bits(bits);
        const bool poisoned = bits >= 0x7f800000u;
        if (poisoned || largest < (kSecond ? kSmallestU5e3Block : kSmallestE4m3Block)) {
            scales[begin / kQuantBlock] = poisoned ? largest : 0.0f;
            __builtin_memset(codes + begin, poisoned ? 0x38 : 0, static_cast<size_t>(length));
            continue;
        }
        scales[begin / kQuantBlock] = largest;
        if (kSecond) for_lanes(EncodeU5e3{x + begin, codes + begin, kLargestU5e3 / largest, key, index + static_cast<uint32_t>(begin)}, length);
        else for_lanes(EncodeE4m3{x + begin, codes + begin, kLargestE4m3 / largest}, length);
    }
}
