// 8-bit optimizer state in blocks of kQuantBlock with a float32 scale, the block's largest magnitude over the largest code's value.
//
// First moment: e4m3 (largest value 448), rounded to nearest, ties to even. Second moment: unsigned, 5 exponent and 3 mantissa bits, code c
// is 2^(c/8 - 31) * (1 + c%8 / 8), at most 1.875. It is rounded stochastically, because to nearest it cannot decay, and has no zero outside
// zero blocks, because the update divides by its root. A block with NaN or Inf has that as its scale and stays so. Blocks below the
// magnitudes here would need subnormal numbers and are zero.
constexpr float kLargestE4m3 = 448.0f;
constexpr float kLargestU5e3 = 1.875f * (1.0f - 0x1p-22f);  // a little below the last code, so that rounding errors do not pass it
constexpr float kSmallestE4m3Block = 0x1p-100f, kSmallestU5e3Block = 0x1p-90f;
constexpr uint32_t kU5e3Bias = 96u << 23, kInfinity = 0x7f800000u;

template <class T>
ZOK_INLINE typename T::F e4m3_value(typename T::U code) {
    const typename T::U magnitude = code & T::setu(0x7fu), shifted = magnitude << 20;
    const typename T::F normal = T::from_bits(shifted + T::setu(120u << 23));
    const typename T::F small = T::from_bits(shifted + T::setu(121u << 23)) - T::set(0x1p-6f);
    const typename T::U value = T::pick(T::gt_u(T::setu(8u), magnitude), T::bits(small), T::bits(normal));
    return T::from_bits(value | (code & T::setu(0x80u)) << 24);
}

// The code of the value nearest to a magnitude, ties to the even one, in the low 8 bits; `x` >= 0 is 2^-8 times the magnitude, at most 1.75.
// The codes around x are 2^(e-3) apart, e its exponent but at least -14. That is the last bit of 2^(e+20), so adding this rounds x to a number
// of them, 8 to 16 and below 8 for subnormal codes, at the end of the sum. The codes of an exponent begin at 8 (e + 14), which with that
// number makes the code; kOffset, which is even and changes no rounding, takes away what the exponents' biases bring into the low 8 bits.
template <class T>
ZOK_INLINE typename T::U e4m3_magnitude(typename T::F x) {
    constexpr uint32_t kSmallest = 113u << 23, kUp = 20u << 23, kOffset = (0u - ((kSmallest + kUp) >> 20)) % 256;
    const typename T::U exponent = T::max_u(T::bits(x) & T::setu(kInfinity), T::setu(kSmallest));
    const typename T::U magic = exponent + T::setu(kUp + kOffset);
    return T::bits(x + T::from_bits(magic)) + (magic >> 20);
}

// The same with a sign.
template <class T>
ZOK_INLINE typename T::U e4m3_code(typename T::F x) {
    const typename T::U u = T::bits(x);
    return e4m3_magnitude<T>(T::from_bits(u & T::setu(0x7fffffffu))) + (u >> 24 & T::setu(0x80u));
}

template <class T>
ZOK_INLINE typename T::F u5e3_value(typename T::U code) {
    return T::from_bits((code << 20) + T::setu(kU5e3Bias));
}

// In the low 8 bits, what is above them is to be dropped. `random` is uniform in [0, 2^20).
template <class T>
ZOK_INLINE typename T::U u5e3_code(typename T::F x, typename T::U random) {
    static_assert((kU5e3Bias >> 20) % 256 == 0, "the bias falls away with the bits above the code");
    return T::max_u(T::bits(x) + random, T::setu(kU5e3Bias)) >> 20;
}

struct EncodeE4m3 {
    const float* x;
    uint8_t* codes;
    float inverse;
    template <class T>
    ZOK_MEMBER void at(int64_t i) { T::store_u8(codes + i, e4m3_code<T>(T::load(x + i) * T::set(inverse))); }
};
template <class Load>
struct EncodeU5e3 {
    const char* x;
    uint8_t* codes;
    float inverse;
    uint64_t key;
    uint32_t index;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        const typename T::U r = random_bits<T>(key, index + static_cast<uint32_t>(i)) >> 12;
        T::store_u8(codes + i, u5e3_code<T>(Load::template load<T>(x, i) * T::set(inverse), r));
    }
};

// The largest magnitude so far, as bits: NaN orders above Inf, Inf above every number.
struct Largest {
    Vector::U lanes;
    uint32_t rest;
    Largest() : lanes(Vector::setu(0)), rest(0) {}
    template <class T>
    ZOK_MEMBER void note(typename T::F x) {
        const typename T::U magnitude = T::bits(x) & T::setu(0x7fffffffu);
        if constexpr (T::W == 1) rest = Scalar::max_u(rest, magnitude);
        else lanes = T::max_u(lanes, magnitude);
    }
    ZOK_MEMBER uint32_t bits() const { return Scalar::max_u(rest, Vector::highest(lanes)); }
};

// Writes the codes and the scale of one block, whose largest magnitude is known.
template <bool kSecond>
ZOK_INLINE void encode_block(const float* x, uint8_t* codes, float* scale, int64_t n, uint32_t largest_bits, uint64_t key, uint32_t index) {
    const float largest = Scalar::from_bits(largest_bits);
    const bool poisoned = largest_bits >= kInfinity;
    if (poisoned || largest < (kSecond ? kSmallestU5e3Block : kSmallestE4m3Block)) {
        *scale = poisoned ? largest : 0.0f;
        __builtin_memset(codes, poisoned ? 0x38 : 0, static_cast<size_t>(n));
        return;
    }
    *scale = largest / (kSecond ? kLargestU5e3 : kLargestE4m3);
    if constexpr (kSecond) for_lanes(EncodeU5e3<LoadF32>{reinterpret_cast<const char*>(x), codes, kLargestU5e3 / largest, key, index}, n);
    else for_lanes(EncodeE4m3{x, codes, kLargestE4m3 * 0x1p-8f / largest}, n);
}
