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

// Codes to nearest, in the low bits of the result.
struct IntegerCoder {  // in two's complement; the largest magnitude of the block gives the largest code, so none is too large
    float inverse;
    template <class T>
    ZOK_MEMBER typename T::U of(typename T::F x) const { return T::bits(x * T::set(inverse) + T::set(kMagic)); }
    // Of two neighbours in bf16 that share a lane, in its low 16 bits; what is above them is to be dropped. The signs of sign-magnitude codes
    // are missing: `signed_codes` adds them to the codes of two such vectors.
    template <class T>
    ZOK_MEMBER typename T::U of_pair(typename T::U pair) const {
        const typename T::U even = of<T>(T::from_bits(pair << 16)), odd = of<T>(T::from_bits(pair & T::setu(0xffff0000u)));
        return T::choose(T::setu(0xffu), even, odd << 8);
    }
    template <class T>
    ZOK_MEMBER typename T::U signed_codes(typename T::U codes, typename T::U, typename T::U) const { return codes; }
};
struct E4m3Coder {
    float factor;
    template <class T>
    ZOK_MEMBER typename T::U of(typename T::F x) const { return e4m3_code<T>(x * T::set(factor)); }
    template <class T>
    ZOK_MEMBER typename T::U of_pair(typename T::U pair) const {
        const typename T::U magnitudes = pair & T::setu(0x7fff7fffu);
        const typename T::U even = e4m3_magnitude<T>(T::from_bits(magnitudes << 16) * T::set(factor));
        const typename T::U odd = e4m3_magnitude<T>(T::from_bits(magnitudes & T::setu(0xffff0000u)) * T::set(factor));
        return T::choose(T::setu(0xffu), even, odd << 8);
    }
    template <class T>
    ZOK_MEMBER typename T::U signed_codes(typename T::U magnitudes, typename T::U first, typename T::U second) const {
        return T::choose(T::setu(0x80808080u), T::join_signs(first, second), magnitudes);
    }
};
struct U5e3Coder {
    float inverse;
    template <class T>
    ZOK_MEMBER typename T::U of(typename T::F x) const {
        const typename T::U u = T::bits(x * T::set(inverse)) & T::setu(0x7fffffffu);
        return u5e3_code<T>(T::from_bits(u), T::setu(0x7ffffu) + (u >> 20 & T::setu(1u)));
    }
};

template <class Load, class Coder>
struct EncodeNearest {
    const char* x;
    Coder coder;
    template <class T>
    ZOK_MEMBER typename T::U codes(int64_t i, int j) const { return coder.template of<T>(Load::template load<T>(x, i + j * T::W)); }
};

// Of bf16. `i` counts fours of neighbours, which are two pairs; a pair shares a lane of 32 bits, and all four codes do.
template <class Coder, bool kStream>
struct EncodeFours {
    const char* x;
    uint8_t* payload;
    Coder coder;
    int64_t ahead;  // prefetch distance in bytes
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        const uint16_t* from = reinterpret_cast<const uint16_t*>(x) + 4 * i;
        if constexpr (T::W > 1) {
            for (int line = 0; line < 8 * T::W; line += 64) __builtin_prefetch(x + 8 * i + ahead + line);
        }
        const typename T::U first = T::load_pairs(from), second = T::load_pairs(from + 2 * T::W);
        const typename T::U codes = T::join_low(coder.template of_pair<T>(first), coder.template of_pair<T>(second));
        const typename T::U all = coder.template signed_codes<T>(codes, first, second);
        if constexpr (kStream) T::stream_lanes(payload + 4 * i, all);
        else T::store_lanes(payload + 4 * i, all);
    }
};

// Of bf16, to nibbles. `i` counts pairs of neighbours, which share a lane of 32 bits.
template <bool kStream>
struct EncodeNibbles {
    const char* x;
    uint8_t* payload;
    IntegerCoder coder;
    int64_t ahead;
    template <class T, int kCount>
    ZOK_MEMBER void at(int64_t i) {
        typename T::U codes[kCount];
        ZOK_UNROLL for (int j = 0; j < kCount; ++j) codes[j] = both<T>(i + j * T::W);
        if constexpr (kCount == 1) T::store_u8(payload + i, codes[0]);
        else if constexpr (kStream) T::stream_lanes(payload + i, T::join_u8(codes[0], codes[1], codes[2], codes[3]));
        else T::store_lanes(payload + i, T::join_u8(codes[0], codes[1], codes[2], codes[3]));
    }
    template <class T>
    ZOK_MEMBER typename T::U both(int64_t i) const {
        if constexpr (T::W > 1) __builtin_prefetch(x + 4 * i + ahead);
        const typename T::U pairs = T::load_pairs(reinterpret_cast<const uint16_t*>(x) + 2 * i);
        const typename T::U even = coder.template of<T>(T::from_bits(pairs << 16));
        const typename T::U odd = coder.template of<T>(T::from_bits(pairs & T::setu(0xffff0000u)));
        return T::choose(T::setu(0xfu), even, odd << 4);
    }
};

// Stochastically rounded integers in two's complement, at most `most` in magnitude.
template <class Load>
struct EncodeInteger {
    const char* x;
    float inverse;
    uint32_t most;
    uint64_t key;
    uint32_t index;
    template <class T>
    ZOK_MEMBER typename T::U codes(int64_t i, int j) const {
        const typename T::F t = Load::template load<T>(x, i + j * T::W) * T::set(inverse) + noise<T>(key, index + static_cast<uint32_t>(i), j);
        const typename T::U u = T::bits(t + T::set(kMagic));
        return T::max_u(T::min_u(u, T::setu(kMagicBits + most)), T::setu(kMagicBits - most));
    }
    // Uniform in (-1/2, 1/2), never an end: what is representable stays.
    template <class T>
    ZOK_INLINE typename T::F noise(uint64_t key, uint32_t index, int j) {
        const typename T::U r = random_bits<T>(key, index, j) >> 16;
        return (T::from_bits(r + T::setu(kMagicBits)) - T::set(kMagic) - T::set(32767.5f)) * T::set(0x1p-16f);
    }
};

// Stochastically rounded e4m3.
template <class Load>
struct EncodeFloat8 {
    const char* x;
    float inverse;
    uint64_t key;
    uint32_t index;
    // `t` is 2^-8 times the value, `random` uniform in [0, 2^20). Both ways `wide` has the code in front of 20 bits: as float32 has it, or
    // below the smallest normal number, where codes are multiples of 2^-17, as a multiple of 2^-37.
    template <class T>
    ZOK_MEMBER typename T::U codes(int64_t i, int j) const {
        const typename T::U random = random_bits<T>(key, index + static_cast<uint32_t>(i), j) >> 12;
        const typename T::U u = T::bits(Load::template load<T>(x, i + j * T::W) * T::set(inverse)), a = u & T::setu(0x7fffffffu);
        const typename T::U normal = a - T::setu(112u << 23);
        const typename T::U small = T::bits(T::from_bits(a) * T::set(0x1p37f) + T::set(0x1p23f)) - T::setu(150u << 23);
        const typename T::U wide = T::pick(T::gt_u(T::setu(113u << 23), a), small, normal);
        return T::min_u((wide + random) >> 20, T::setu(0x7eu)) | (u >> 24 & T::setu(0x80u));
    }
};

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

// The prefetch distance in bytes of the second pass, which reads a block again to encode it while nothing else fetches new memory: two
// blocks, or two pages if that is further; nothing new for blocks that do not stay in the first-level cache.
static int64_t bytes_ahead(int64_t block_bytes) {
    constexpr int64_t kPage = 4096, kMost = 16384;
    return block_bytes > kMost ? 0 : 2 * (block_bytes > kPage ? block_bytes : kPage);
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

// What the elements of a block are multiplied with before they are rounded to codes; for e4m3 times 2^15, without which
// it would be a denormal number, of few digits, for the largest blocks.
static float inverse_scale(Code code, float largest) {
    switch (code) {
        case Code::int8: return 127.0f / largest;
        case Code::int4: return 7.0f / largest;
        case Code::e4m3: return kLargestE4m3 * 0x1p-8f * kE4m3Up / largest;
        case Code::u5e3: return kLargestU5e3 / largest;
    }
    return 0.0f;
}

template <class Load>
static void encode_nearest(Code code, const char* x, uint8_t* codes, float inverse, int64_t n) {
    if (code == Code::e4m3) store_codes(EncodeNearest<Load, E4m3Coder>{x, {inverse}}, codes, n);
    else if (code == Code::u5e3) store_codes(EncodeNearest<Load, U5e3Coder>{x, {inverse}}, codes, n);
    else store_codes(EncodeNearest<Load, IntegerCoder>{x, {inverse}}, codes, n);
}

template <class Load>
static void encode_codes(const BlockFormat& f, const char* x, uint8_t* codes, float inverse, int64_t n, uint64_t index) {
    if (!f.stochastic) return encode_nearest<Load>(f.code, x, codes, inverse, n);
    const uint64_t key = tile_key(f.key, index, Stream::payload);
    const uint32_t low = static_cast<uint32_t>(index), most = f.code == Code::int8 ? 127 : 7;
    if (f.code == Code::e4m3) store_codes(EncodeFloat8<Load>{x, inverse / kE4m3Up, key, low}, codes, n);
    else if (f.code == Code::u5e3) store_codes(EncodeU5e3<Load>{x, inverse, key, low}, codes, n);
    else store_codes(EncodeInteger<Load>{x, inverse, most, key, low}, codes, n);
}

template <class Coder>
static void encode_fours(const char* x, uint8_t* payload, Coder coder, int64_t ahead, int64_t fours) {
    if (streams<Vector::U>(payload)) for_lanes(EncodeFours<Coder, true>{x, payload, coder, ahead}, fours);
    else for_lanes(EncodeFours<Coder, false>{x, payload, coder, ahead}, fours);
}

static void encode_nibbles(const char* x, uint8_t* payload, IntegerCoder coder, int64_t ahead, int64_t pairs) {
    if (streams<Vector::U>(payload)) for_groups<4>(EncodeNibbles<true>{x, payload, coder, ahead}, pairs);
    else for_groups<4>(EncodeNibbles<false>{x, payload, coder, ahead}, pairs);
}

// Whether a block has the fast way of `encode_together`.
static bool encodes_together(const BlockFormat& f, int64_t n) {
    const bool whole = n % (f.code == Code::int4 ? 2 : 4) == 0;
    return whole && f.dtype == Dtype::bf16 && !f.stochastic && f.code != Code::u5e3;
}

static void encode_together(const BlockFormat& f, const char* x, uint8_t* payload, float inverse, int64_t ahead, int64_t n) {
    if (f.code == Code::e4m3) encode_fours(x, payload, E4m3Coder{inverse}, ahead, n / 4);
    else if (f.code == Code::int8) encode_fours(x, payload, IntegerCoder{inverse}, ahead, n / 4);
    else encode_nibbles(x, payload, IntegerCoder{inverse}, ahead, n / 2);
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
    const float inverse = inverse_scale(f.code, largest);
    const int64_t ahead = bytes_ahead(f.block * item_size(f.dtype));
    if (encodes_together(f, n)) return encode_together(f, source, target, inverse, ahead, n);
    alignas(64) uint8_t codes[kTile];
    for (int64_t b = 0; b < n; b += kTile) {
        const int64_t length = n - b < kTile ? n - b : kTile;
        const uint64_t index = f.offset + static_cast<uint64_t>(begin + b);
        const char* from = source + b * item_size(f.dtype);
        uint8_t* to = f.code == Code::int4 ? codes : target + b;
        for (int64_t line = 0; line < length * item_size(f.dtype); line += 64) __builtin_prefetch(from + line + ahead);
        if (f.dtype == Dtype::bf16) encode_codes<LoadBf16>(f, from, to, inverse, length, index);
        else if (f.dtype == Dtype::f16) encode_codes<LoadF16>(f, from, to, inverse, length, index);
        else encode_codes<LoadF32>(f, from, to, inverse, length, index);
        if (f.code == Code::int4) pack_nibbles(codes, target + b / 2, length);
    }
}

// Blocks [first, last) of a buffer of n elements.
static void quantize(const BlockFormat& f, const char* x, uint8_t* payload, float* scales, int64_t n, int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
        const int64_t begin = k * f.block, length = n - begin < f.block ? n - begin : f.block;
        quantize_block(f, x, payload, scales + k, begin, length);
    }
}
