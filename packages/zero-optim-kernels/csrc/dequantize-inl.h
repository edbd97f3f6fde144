// The inverse of block quantisation: value = code * scale, written past the cache where the buffer's alignment allows it.

constexpr int64_t kPayloadAhead = 4096;  // prefetch distance in bytes of payload

struct DecodeInteger {
    const uint8_t* codes;
    float scale;
    template <class T>
    ZOK_MEMBER typename T::F value(int64_t i) const { return T::load_i8(codes + i) * T::set(scale); }
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
template <class Decode, bool kHalf, bool kStream>
struct WriteNarrow {
    Decode decode;
    uint16_t* out;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        const typename T::F x = decode.template value<T>(i);
        typename T::H h;
        if constexpr (kHalf) h = T::to_f16(x);
        else h = T::narrow(bf16_nearest<T>(x));
        if constexpr (kStream) T::stream_h(out + i, h);
        else T::store_h(out + i, h);
    }
};

// Numbers in bf16, of which `i` counts pairs.
template <class Decode, bool kStream>
struct WriteBf16 {
    Decode decode;
    uint16_t* out;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        if constexpr (T::W > 1) __builtin_prefetch(decode.codes + 2 * i + kPayloadAhead);
        const typename T::F first = decode.template value<T>(2 * i), second = decode.template value<T>(2 * i + T::W);
        const typename T::U pairs = T::join_high(bf16_rounded<T>(first), bf16_rounded<T>(second));
        if constexpr (kStream) T::stream_lanes(out + 2 * i, pairs);
        else T::store_lanes(out + 2 * i, pairs);
    }
};

// The sixteen values of int4 in 16 bits, in the low and in the high half of a lane. Looking them up is less work than computing them.
struct NibbleValues {
    alignas(64) uint32_t even[16], odd[16];
};

// `i` counts pairs, which are bytes of the payload.
template <bool kStream>
struct LookUpPairs {
    const uint8_t* payload;
    const NibbleValues& values;
    uint16_t* out;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        if constexpr (T::W > 1) __builtin_prefetch(payload + i + kPayloadAhead);
        const typename T::U codes = T::load_u8(payload + i);
        const typename T::U pairs = T::look_up(values.even, codes) | T::look_up(values.odd, codes >> 4);
        if constexpr (kStream) T::stream_lanes(out + 2 * i, pairs);
        else T::store_lanes(out + 2 * i, pairs);
    }
};

template <class Decode, bool kHalf>
static void decode_narrow(const Decode& decode, uint16_t* out, int64_t n) {
    if (streams<Vector::H>(out)) for_lanes(WriteNarrow<Decode, kHalf, true>{decode, out}, n);
    else for_lanes(WriteNarrow<Decode, kHalf, false>{decode, out}, n);
}

template <class Decode>
static void decode_bf16(const Decode& decode, uint16_t* out, int64_t n) {
    const bool number = (Scalar::bits(decode.scale) & kInfinity) != kInfinity;  // then no code's value is NaN
    if (!number || n % 2) decode_narrow<Decode, false>(decode, out, n);
    else if (streams<Vector::U>(out)) for_lanes(WriteBf16<Decode, true>{decode, out}, n / 2);
    else for_lanes(WriteBf16<Decode, false>{decode, out}, n / 2);
}

template <class Decode>
static void decode_codes(const Decode& decode, char* out, Dtype dtype, int64_t n) {
    if (dtype == Dtype::f32) for_lanes(WriteSingle<Decode>{decode, reinterpret_cast<float*>(out)}, n);
    else if (dtype == Dtype::f16) decode_narrow<Decode, true>(decode, reinterpret_cast<uint16_t*>(out), n);
    else decode_bf16(decode, reinterpret_cast<uint16_t*>(out), n);
}

// The values in 16 bits of the 128 magnitudes of e4m3.
struct MagnitudeValues {
    alignas(64) uint16_t of[128];
};

// `i` counts pairs.
template <bool kStream>
struct LookUpMagnitudes {
    const uint8_t* codes;
    const MagnitudeValues& values;
    uint16_t* out;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        if constexpr (T::W > 1) __builtin_prefetch(codes + 2 * i + kPayloadAhead);
        const typename T::U pairs = T::look_up_magnitudes(values.of, codes + 2 * i);
        if constexpr (kStream) T::stream_lanes(out + 2 * i, pairs);
        else T::store_lanes(out + 2 * i, pairs);
    }
};

template <bool kHalf>
static MagnitudeValues magnitude_values(float scale) {
    alignas(64) uint8_t codes[128];
    for (int code = 0; code < 128; ++code) codes[code] = static_cast<uint8_t>(code);
    MagnitudeValues values;
    WriteNarrow<DecodeFloat8, kHalf, false> write{{codes, scale}, values.of};
    for (int code = 0; code < 128; code += Vector::W) write.template at<Vector>(code);
    return values;
}

// Whether a table of magnitudes for the block pays for itself. The sign of NaN is not the code's.
template <class V>
static bool looks_up_magnitudes(float scale, Dtype dtype, int64_t n) {
    constexpr int64_t kLeast = 512;
    return V::kLooksUpMagnitudes && dtype != Dtype::f32 && n % 2 == 0 && n >= kLeast && (Scalar::bits(scale) & kInfinity) != kInfinity;
}

template <class V>
static void decode_magnitudes(const uint8_t* codes, float scale, uint16_t* out, Dtype dtype, int64_t n) {
    if constexpr (V::kLooksUpMagnitudes) {
        const MagnitudeValues values = dtype == Dtype::f16 ? magnitude_values<true>(scale) : magnitude_values<false>(scale);
        if (streams<typename V::U>(out)) for_lanes(LookUpMagnitudes<true>{codes, values, out}, n / 2);
        else for_lanes(LookUpMagnitudes<false>{codes, values, out}, n / 2);
    }
}

static void unpack_nibbles(const uint8_t* payload, uint8_t* codes, int64_t n) {
    for (int64_t j = 0; j < n / 2; ++j) {
        const unsigned apart = (payload[j] & 0xfu) | (payload[j] & 0xf0u) << 4;
        const uint16_t pair = static_cast<uint16_t>(apart | (apart & 0x0808u) * 0x1eu);  // the sign is copied to the left
        __builtin_memcpy(codes + 2 * j, &pair, 2);
    }
    if (n % 2) codes[n - 1] = static_cast<uint8_t>(static_cast<int8_t>(payload[n / 2] << 4) >> 4);
}


static NibbleValues nibble_values(Dtype dtype, float scale) {
    NibbleValues values;
    for (int code = 0; code < 16; ++code) {
        const float x = static_cast<float>(code < 8 ? code : code - 16) * scale;
        values.even[code] = dtype == Dtype::f16 ? Scalar::to_f16(x) : bf16_nearest<Scalar>(x);
        values.odd[code] = values.even[code] << 16;
    }
    return values;
}

static void look_up_nibbles(const uint8_t* payload, const NibbleValues& values, uint16_t* out, int64_t n) {
    if (streams<Vector::U>(out)) for_lanes(LookUpPairs<true>{payload, values, out}, n / 2);
    else for_lanes(LookUpPairs<false>{payload, values, out}, n / 2);
    if (n % 2) out[n - 1] = static_cast<uint16_t>(values.even[payload[n / 2] & 0xf]);
}

// One block: elements [begin, begin + n) of the buffer, `begin` even.
static void dequantize_block(const BlockFormat& f, const uint8_t* payload, float scale, char* out, int64_t begin, int64_t n) {
    char* target = out + begin * item_size(f.dtype);
    if (f.code == Code::e4m3 && looks_up_magnitudes<Vector>(scale, f.dtype, n))
        return decode_magnitudes<Vector>(payload + begin, scale, reinterpret_cast<uint16_t*>(target), f.dtype, n);
    if (f.code == Code::e4m3) return decode_codes(DecodeFloat8{payload + begin, scale}, target, f.dtype, n);
    if (f.code == Code::u5e3) return decode_codes(DecodeU5e3{payload + begin, scale}, target, f.dtype, n);
    if (f.code == Code::int8) return decode_codes(DecodeInteger{payload + begin, scale}, target, f.dtype, n);
    if (f.dtype != Dtype::f32) {
        look_up_nibbles(payload + begin / 2, nibble_values(f.dtype, scale), reinterpret_cast<uint16_t*>(target), n);
        return;
    }
    alignas(64) uint8_t codes[kTile];
    for (int64_t b = 0; b < n; b += kTile) {
        const int64_t length = n - b < kTile ? n - b : kTile;
        unpack_nibbles(payload + (begin + b) / 2, codes, length);
        decode_codes(DecodeInteger{codes, scale}, target + 4 * b, f.dtype, length);
    }
}

// Blocks [first, last) of a buffer of n elements.
static void dequantize(const BlockFormat& f, const uint8_t* payload, const float* scales, char* out, int64_t n, int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
        const int64_t begin = k * f.block, length = n - begin < f.block ? n - begin : f.block;
        dequantize_block(f, payload, scales[k], out, begin, length);
    }
}
