// Block quantisation of plain buffers, for collectives: one float32 scale per block, payload of one code per element (two for int4).
// value = code * scale. A block with NaN or Inf has that as its scale.

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
constexpr uint32_t kMagicBits = 0x4b400000u;

static float largest_code(Code code) {
    switch (code) {
        case Code::int8: return 127.0f;
        case Code::int4: return 7.0f;
        case Code::e4m3: return kLargestE4m3;
        case Code::u5e3: return kLargestU5e3;
    }
    return 0.0f;
}

// Integers in two's complement, at most `most` in magnitude; the low bits of the result are the code.
template <class Load, bool kStochastic>
struct EncodeInteger {
    const char* x;
    uint8_t* codes;
    float inverse;
    uint32_t most;
    uint64_t key;
    uint32_t index;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        typename T::F t = Load::template load<T>(x, i) * T::set(inverse);
        if constexpr (kStochastic) t = t + noise<T>(key, index + static_cast<uint32_t>(i));
        const typename T::U u = T::bits(t + T::set(kMagic));
        T::store_u8(codes + i, T::max_u(T::min_u(u, T::setu(kMagicBits + most)), T::setu(kMagicBits - most)));
    }
    // Uniform in (-1/2, 1/2), never an end: what is representable stays.
    template <class T>
    ZOK_INLINE typename T::F noise(uint64_t key, uint32_t index) {
        const typename T::U r = random_bits<T>(key, index) >> 16;
        return (T::from_bits(r + T::setu(kMagicBits)) - T::set(kMagic) - T::set(32767.5f)) * T::set(0x1p-16f);
    }
};

template <class Load, bool kStochastic>
struct EncodeFloat8 {
    const char* x;
    uint8_t* codes;
    float inverse;
    uint64_t key;
    uint32_t index;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        const typename T::F t = Load::template load<T>(x, i) * T::set(inverse);
        if constexpr (!kStochastic) T::store_u8(codes + i, e4m3_code<T>(t));
        else T::store_u8(codes + i, stochastic<T>(t, random_bits<T>(key, index + static_cast<uint32_t>(i)) >> 12));
    }
    // `t` is 2^-8 times the value, `random` uniform in [0, 2^20). Both ways `wide` has the code in front of 20 bits: as float32 has it, or
    // below the smallest normal number, where codes are multiples of 2^-17, as a multiple of 2^-37.
    template <class T>
    ZOK_INLINE typename T::U stochastic(typename T::F t, typename T::U random) {
        const typename T::U u = T::bits(t), a = u & T::setu(0x7fffffffu);
        const typename T::U normal = a - T::setu(112u << 23);
        const typename T::U small = T::bits(T::from_bits(a) * T::set(0x1p37f) + T::set(0x1p23f)) - T::setu(150u << 23);
        const typename T::U wide = T::pick(T::gt_u(T::setu(113u << 23), a), small, normal);
        return T::min_u((wide + random) >> 20, T::setu(0x7eu)) | (u >> 24 & T::setu(0x80u));
    }
};

template <class Load>
struct EncodeU5e3Nearest {
    const char* x;
    uint8_t* codes;
    float inverse;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        const typename T::U u = T::bits(Load::template load<T>(x, i) * T::set(inverse)) & T::setu(0x7fffffffu);
        T::store_u8(codes + i, u5e3_code<T>(T::from_bits(u), T::setu(0x7ffffu) + (u >> 20 & T::setu(1u))));
    }
};

struct DecodeInteger {
    const uint8_t* codes;
    float scale;
    template <class T>
    ZOK_MEMBER typename T::F value(int64_t i) const {
        const typename T::U u = (T::load_u8(codes + i) ^ T::setu(0x80u)) + T::setu(kMagicBits - 0x80u);
        return (T::from_bits(u) - T::set(kMagic)) * T::set(scale);
    }
};
struct DecodeU5e3 {
    const uint8_t* codes;
    float scale;
    template <class T>
    ZOK_MEMBER typename T::F value(int64_t i) const { return u5e3_value<T>(T::load_u8(codes + i)) * T::set(scale); }
};
struct DecodeFloat8 {
    const uint8_t* codes;
    float scale;
    template <class T>
    ZOK_MEMBER typename T::F value(int64_t i) const { return T::load_e4m3(codes + i, T::set(scale)); }
};

template <class Decode>
struct WriteSingle {
    Decode decode;
    float* out;
    template <class T>
    ZOK_MEMBER void at(int64_t i) { T::store(out + i, decode.template value<T>(i)); }
};
enum class Narrowed { half, bf16, bf16_without_nan };

template <class Decode, Narrowed kTo, bool kStream>
struct WriteNarrow {
    Decode decode;
    uint16_t* out;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        const typename T::F x = decode.template value<T>(i);
        typename T::H h;
        if constexpr (kTo == Narrowed::half) h = T::to_f16(x);
        else if constexpr (kTo == Narrowed::bf16) h = T::narrow(bf16_nearest<T>(x));
        else h = T::narrow(bf16_nearest_number<T>(x));
        if (kStream) T::stream_h(out + i, h);
        else T::store_h(out + i, h);
    }
};

template <class Decode, Narrowed kTo>
static void decode_narrow(const Decode& decode, char* to, int64_t n) {
    uint16_t* out = reinterpret_cast<uint16_t*>(to);
    if (reinterpret_cast<uintptr_t>(out) % sizeof(Vector::H) == 0) for_lanes(WriteNarrow<Decode, kTo, true>{decode, out}, n);
    else for_lanes(WriteNarrow<Decode, kTo, false>{decode, out}, n);
}

template <class Decode>
static void decode_codes(const Decode& decode, char* out, Dtype dtype, int64_t n) {
    const bool number = (Scalar::bits(decode.scale) & kInfinity) != kInfinity;  // then no code's value is NaN
    if (dtype == Dtype::f32) for_lanes(WriteSingle<Decode>{decode, reinterpret_cast<float*>(out)}, n);
    else if (dtype == Dtype::f16) decode_narrow<Decode, Narrowed::half>(decode, out, n);
    else if (number) decode_narrow<Decode, Narrowed::bf16_without_nan>(decode, out, n);
    else decode_narrow<Decode, Narrowed::bf16>(decode, out, n);
}

// The largest magnitude as bits of its own type, which order as the numbers do.
template <class U>
ZOK_INLINE U largest_bits(const char* x, U magnitude, int64_t n) {
    U largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        U u;
        __builtin_memcpy(&u, x + i * static_cast<int64_t>(sizeof(U)), sizeof(U));
        u = static_cast<U>(u & magnitude);
        largest = u > largest ? u : largest;
    }
    return largest;
}

static uint32_t largest_of_buffer(const char* x, Dtype dtype, int64_t n) {
    if (dtype == Dtype::f32) return largest_bits<uint32_t>(x, 0x7fffffffu, n);
    const uint16_t largest = largest_bits<uint16_t>(x, 0x7fffu, n);
    return dtype == Dtype::bf16 ? static_cast<uint32_t>(largest) << 16 : Scalar::bits(Scalar::load_f16(&largest));
}

// A block is read, then read again and encoded: nothing would ask memory for more meanwhile. Asks for the bytes that are as far ahead as
// the next block, or a page if that is further; blocks that do not stay in the first-level cache are left to the processor.
static void prefetch_ahead(const char* x, int64_t bytes, int64_t block_bytes) {
    constexpr int64_t kPage = 4096, kMost = 16384;
    if (block_bytes > kMost) return;
    x += block_bytes > kPage ? block_bytes : kPage;
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(x + b);
}

// Two's complement nibbles, the even element in the low half. Two codes are handled as one little-endian number.
static void pack_nibbles(const uint8_t* codes, uint8_t* payload, int64_t n) {
    for (int64_t j = 0; j < n / 2; ++j) {
        uint16_t pair;
        __builtin_memcpy(&pair, codes + 2 * j, 2);
        payload[j] = static_cast<uint8_t>((pair & 0xf) | (pair >> 4 & 0xf0));
    }
    if (n % 2) payload[n / 2] = codes[n - 1] & 0xf;
}
static void unpack_nibbles(const uint8_t* payload, uint8_t* codes, int64_t n) {
    for (int64_t j = 0; j < n / 2; ++j) {
        const unsigned apart = (payload[j] & 0xfu) | (payload[j] & 0xf0u) << 4;
        const uint16_t pair = static_cast<uint16_t>(apart | (apart & 0x0808u) * 0x1eu);  // the sign is copied to the left
        __builtin_memcpy(codes + 2 * j, &pair, 2);
    }
    if (n % 2) codes[n - 1] = static_cast<uint8_t>(static_cast<int8_t>(payload[n / 2] << 4) >> 4);
}

template <class Load>
static void encode_codes(const BlockFormat& f, const char* x, uint8_t* codes, float largest, int64_t n, uint64_t key, uint32_t index) {
    if (f.code == Code::e4m3) {
        const float inverse = kLargestE4m3 * 0x1p-8f / largest;
        if (f.stochastic) for_lanes(EncodeFloat8<Load, true>{x, codes, inverse, key, index}, n);
        else for_lanes(EncodeFloat8<Load, false>{x, codes, inverse, key, index}, n);
        return;
    }
    if (f.code == Code::u5e3) {
        const float inverse = kLargestU5e3 / largest;
        if (f.stochastic) for_lanes(EncodeU5e3<Load>{x, codes, inverse, key, index}, n);
        else for_lanes(EncodeU5e3Nearest<Load>{x, codes, inverse}, n);
        return;
    }
    const uint32_t most = f.code == Code::int8 ? 127 : 7;
    const float inverse = static_cast<float>(most) / largest;
    if (f.stochastic) for_lanes(EncodeInteger<Load, true>{x, codes, inverse, most, key, index}, n);
    else for_lanes(EncodeInteger<Load, false>{x, codes, inverse, most, key, index}, n);
}

// One block: elements [begin, begin + n) of the buffer, `begin` even.
static void quantize_block(const BlockFormat& f, const char* x, uint8_t* payload, float* scale, int64_t begin, int64_t n) {
    const char* source = x + begin * item_size(f.dtype);
    uint8_t* target = payload + (f.code == Code::int4 ? begin / 2 : begin);
    const uint32_t bits = largest_of_buffer(source, f.dtype, n);
    const float largest = Scalar::from_bits(bits);
    const bool poisoned = bits >= kInfinity;
    if (poisoned || largest < (f.code == Code::u5e3 ? kSmallestU5e3Block : kSmallestE4m3Block)) {
        *scale = poisoned ? largest : 0.0f;
        const int one = f.code == Code::int8 ? 0x01 : f.code == Code::int4 ? 0x11 : 0x38;
        __builtin_memset(target, poisoned ? one : 0, static_cast<size_t>(f.code == Code::int4 ? (n + 1) / 2 : n));
        return;
    }
    *scale = largest / largest_code(f.code);
    alignas(64) uint8_t codes[kTile];
    for (int64_t b = 0; b < n; b += kTile) {
        const int64_t length = n - b < kTile ? n - b : kTile;
        const uint64_t index = f.offset + static_cast<uint64_t>(begin + b), key = tile_key(f.key, index, Stream::payload);
        const char* from = source + b * item_size(f.dtype);
        const uint32_t low = static_cast<uint32_t>(index);
        uint8_t* to = f.code == Code::int4 ? codes : target + b;
        prefetch_ahead(from, length * item_size(f.dtype), f.block * item_size(f.dtype));
        if (f.dtype == Dtype::bf16) encode_codes<LoadBf16>(f, from, to, largest, length, key, low);
        else if (f.dtype == Dtype::f16) encode_codes<LoadF16>(f, from, to, largest, length, key, low);
        else encode_codes<LoadF32>(f, from, to, largest, length, key, low);
        if (f.code == Code::int4) pack_nibbles(codes, target + b / 2, length);
    }
}

static void dequantize_block(const BlockFormat& f, const uint8_t* payload, float scale, char* out, int64_t begin, int64_t n) {
    alignas(64) uint8_t unpacked[kTile];
    for (int64_t b = 0; b < n; b += kTile) {
        const int64_t length = n - b < kTile ? n - b : kTile;
        char* target = out + (begin + b) * item_size(f.dtype);
        const uint8_t* codes = payload + (f.code == Code::int4 ? (begin + b) / 2 : begin + b);
        prefetch_ahead(reinterpret_cast<const char*>(codes), f.code == Code::int4 ? length / 2 : length, 0);
        if (f.code == Code::int4) {
            unpack_nibbles(codes, unpacked, length);
            codes = unpacked;
        }
        if (f.code == Code::e4m3) decode_codes(DecodeFloat8{codes, scale}, target, f.dtype, length);
        else if (f.code == Code::u5e3) decode_codes(DecodeU5e3{codes, scale}, target, f.dtype, length);
        else decode_codes(DecodeInteger{codes, scale}, target, f.dtype, length);
    }
}

// Blocks [first, last) of a buffer of n elements.
static void quantize(const BlockFormat& f, const char* x, uint8_t* payload, float* scales, int64_t n, int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
        const int64_t begin = k * f.block, length = n - begin < f.block ? n - begin : f.block;
        quantize_block(f, x, payload, scales + k, begin, length);
    }
}

static void dequantize(const BlockFormat& f, const uint8_t* payload, const float* scales, char* out, int64_t n, int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
        const int64_t begin = k * f.block, length = n - begin < f.block ? n - begin : f.block;
        dequantize_block(f, payload, scales[k], out, begin, length);
    }
}
