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

// The code of the value nearest to a magnitude, ties to the even one, in the low 8 bits; `y` >= 0 is 2^7 times the magnitude, at most 1.75 * 2^15.
// With 2^e the power of two in y, but at least 2, the codes around y are 2^(e-3) apart. Adding y * 2^-20 to 2^e, whose last bit is 2^(e-23), rounds
// it to a number of them, 8 to 16 and below 8 for subnormal codes, at the end of the sum. The codes of 2^e begin at 8 (e - 1), which with that
// number makes the code, and are what its exponent field puts into the low 8 bits.
constexpr float kE4m3Up = 0x1p15f;

template <class T>
ZOK_INLINE typename T::U e4m3_magnitude(typename T::F y) {
    constexpr uint32_t kSmallest = 128u << 23;
    static_assert((kSmallest >> 20) % 256 == 0, "the bias of the exponent falls away with the bits above the code");
    const typename T::U power = T::max_u(T::bits(y), T::setu(kSmallest)) & T::setu(kInfinity);
    return T::bits(T::plus_product(T::from_bits(power), y, T::set(0x1p-20f))) + (power >> 20);
}

// The same with a sign.
template <class T>
ZOK_INLINE typename T::U e4m3_code(typename T::F y) {
    const typename T::U u = T::bits(y);
    return T::with_sign(e4m3_magnitude<T>(T::from_bits(u & T::setu(0x7fffffffu))), u);
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

// Codes of the j-th vector of elements from the i-th on, in the low 8 bits of its lanes.
template <class Load>
struct EncodeE4m3 {
    const char* x;
    float factor;
    template <class T>
    ZOK_MEMBER typename T::U codes(int64_t i, int j) const {
        return e4m3_code<T>(Load::template load<T>(x, i + j * T::W) * T::set(factor));
    }
};
template <class Load>
struct EncodeU5e3 {
    const char* x;
    float inverse;
    uint64_t key;
    uint32_t index;
    template <class T>
    ZOK_MEMBER typename T::U codes(int64_t i, int j) const {
        const typename T::U r = random_bits<T>(key, index + static_cast<uint32_t>(i), j) >> 12;
        return u5e3_code<T>(Load::template load<T>(x, i + j * T::W) * T::set(inverse), r);
    }
};

template <class Encode>
struct StoreCodes {
    Encode encode;
    uint8_t* out;
    template <class T, int kCount>
    ZOK_MEMBER void at(int64_t i) {
        typename T::U codes[kCount];
        ZOK_UNROLL for (int j = 0; j < kCount; ++j) codes[j] = encode.template codes<T>(i, j);
        if constexpr (kCount == 1) T::store_u8(out + i, codes[0]);
        else T::store_lanes(out + i, T::join_u8(codes[0], codes[1], codes[2], codes[3]));
    }
};

// The same, while memory is asked for what follows `next`, 4 bytes for each code. A block is encoded from the first-level cache: nothing else
// would ask for anything meanwhile.
template <class Encode>
struct StoreCodesAsking {
    StoreCodes<Encode> store;
    const char* next;
    template <class T, int kCount>
    ZOK_MEMBER void at(int64_t i) {
        ZOK_UNROLL for (int byte = 0; byte < 4 * kCount * T::W; byte += 64) __builtin_prefetch(next + 4 * i + byte);
        store.template at<T, kCount>(i);
    }
};

template <class Encode>
ZOK_INLINE void store_codes(Encode encode, uint8_t* out, int64_t n) {
    for_groups<4>(StoreCodes<Encode>{encode, out}, n);
}
template <class Encode>
ZOK_INLINE void store_codes_asking(Encode encode, uint8_t* out, int64_t n, const char* next) {
    for_groups<4>(StoreCodesAsking<Encode>{{encode, out}, next}, n);
}

// The largest magnitude so far, as bits: NaN orders above Inf, Inf above every number. What has no sign is its own magnitude.
struct Largest {
    Vector::U lanes;
    uint32_t rest;
    Largest() : lanes(Vector::setu(0)), rest(0) {}
    template <class T, bool kSigned>
    ZOK_MEMBER void note(typename T::F x) {
        const typename T::U magnitude = kSigned ? T::bits(x) & T::setu(0x7fffffffu) : T::bits(x);
        if constexpr (T::W == 1) rest = Scalar::max_u(rest, magnitude);
        else lanes = T::max_u(lanes, magnitude);
    }
    ZOK_MEMBER uint32_t bits() const { return Scalar::max_u(rest, Vector::highest(lanes)); }
};

// Writes the codes and the scale of one block, whose largest magnitude is known, and asks memory for as many float32 behind `next`.
template <bool kSecond>
ZOK_INLINE void encode_block(const float* x, uint8_t* codes, float* scale, int64_t n, uint32_t largest_bits, uint64_t key, uint32_t index,
                             const char* next) {
    const float largest = Scalar::from_bits(largest_bits);
    const bool poisoned = largest_bits >= kInfinity;
    if (poisoned || largest < (kSecond ? kSmallestU5e3Block : kSmallestE4m3Block)) {
        *scale = poisoned ? largest : 0.0f;
        __builtin_memset(codes, poisoned ? 0x38 : 0, static_cast<size_t>(n));
        return;
    }
    *scale = largest / (kSecond ? kLargestU5e3 : kLargestE4m3);
    const char* from = reinterpret_cast<const char*>(x);
    if constexpr (kSecond) store_codes_asking(EncodeU5e3<LoadF32>{from, kLargestU5e3 / largest, key, index}, codes, n, next);
    else store_codes_asking(EncodeE4m3<LoadF32>{from, kLargestE4m3 * 0x1p-8f * kE4m3Up / largest}, codes, n, next);
}
