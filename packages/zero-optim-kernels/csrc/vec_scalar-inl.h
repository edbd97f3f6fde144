// Width one. Every target has it for tails; in the scalar target it is the whole story.
// Each operation gives the bits that the vector instruction gives.

struct Scalar {
    using F = float;
    using E = float;
    using U = uint32_t;
    using M = bool;
    using H = uint16_t;   // one 16-bit item
    using Wide = double;  // a sum for each lane
    static constexpr int W = 1;
    static constexpr int kGroup = 1;  // vectors of one pass of an update loop

    ZOK_INLINE F load(const float* p) { return *p; }
    ZOK_INLINE void store(float* p, F x) { *p = x; }
    ZOK_INLINE F set(float x) { return x; }
    ZOK_INLINE U setu(uint32_t x) { return x; }
    ZOK_INLINE U iota() { return 0; }
    ZOK_INLINE U bits(F x) { U u; __builtin_memcpy(&u, &x, 4); return u; }
    ZOK_INLINE F from_bits(U u) { F x; __builtin_memcpy(&x, &u, 4); return x; }
    ZOK_INLINE F sqrt(F x) { return __builtin_sqrtf(x); }
    ZOK_INLINE F plus_product(F sum, F a, F b) { return sum + a * b; }    // of a product that needs no rounding; it may be fused
    ZOK_INLINE void add_square(Wide& sum, F x) { sum += static_cast<double>(x) * static_cast<double>(x); }
    ZOK_INLINE U max_u(U a, U b) { return a > b ? a : b; }
    ZOK_INLINE U min_u(U a, U b) { return a < b ? a : b; }
    ZOK_INLINE M gt_u(U a, U b) { return a > b; }            // both below 2^31
    ZOK_INLINE M eq_u(U a, U b) { return a == b; }
    ZOK_INLINE M differs_from_zero(F x) { return x < 0.0f || x > 0.0f; }  // false for NaN
    ZOK_INLINE U pick(M m, U a, U b) { return m ? a : b; }   // m ? a : b
    ZOK_INLINE U choose(U mask, U a, U b) { return b ^ ((a ^ b) & mask); }
    ZOK_INLINE U with_sign(U code, U x) { return code + (x >> 24 & 0x80u); }  // the sign of `x` at bit 7 of a code, whatever is above it
    ZOK_INLINE uint32_t highest(U x) { return x; }
    ZOK_INLINE U load_u8(const uint8_t* p) { return *p; }
    ZOK_INLINE void store_u8(uint8_t* p, U x) { *p = static_cast<uint8_t>(x); }
    ZOK_INLINE U join_u8(U a, U b, U c, U d) { return (a & 0xffu) | (b & 0xffu) << 8 | (c & 0xffu) << 16 | d << 24; }  // low 8 bits
    ZOK_INLINE U load_u16(const uint16_t* p) { return *p; }
    ZOK_INLINE F load_i8(const uint8_t* p) { return static_cast<float>(static_cast<int8_t>(*p)); }
    // Two neighbours of 16 bits in a lane of 32.
    ZOK_INLINE U load_pairs(const uint16_t* p) { return p[0] | static_cast<uint32_t>(p[1]) << 16; }
    ZOK_INLINE void store_lanes(void* p, U x) { __builtin_memcpy(p, &x, 4); }
    ZOK_INLINE void stream_lanes(void* p, U x) { store_lanes(p, x); }
    ZOK_INLINE U join_high(U first, U second) { return first >> 16 | (second & 0xffff0000u); }    // those of `first`, then of `second`
    ZOK_INLINE U join_low(U first, U second) { return (first & 0xffffu) | second << 16; }
    ZOK_INLINE U join_signs(U first, U second) {  // bytes, each with the highest bit of one of those neighbours; the rest is anything
        return (first >> 8 & 0x80u) | (first >> 16 & 0x8000u) | (second << 8 & 0x800000u) | (second & 0x80000000u);
    }
    ZOK_INLINE U look_up(const uint32_t* table, U index) { return table[index & 0xfu]; }          // of 16, whatever is above the 4 bits
    // Of 128, for two codes whose highest bit is the sign.
    static constexpr bool kLooksUpMagnitudes = false;  // whether that is less work than computing the value
    ZOK_INLINE U look_up_magnitudes(const uint16_t* table, const uint8_t* codes) {
        const uint32_t even = table[codes[0] & 0x7f] | (codes[0] & 0x80u) << 8, odd = table[codes[1] & 0x7f] | (codes[1] & 0x80u) << 8;
        return even | odd << 16;
    }
    ZOK_INLINE H narrow(U x) { return static_cast<uint16_t>(x); }
    ZOK_INLINE void store_h(uint16_t* p, H x) { *p = x; }
    ZOK_INLINE void stream_h(uint16_t* p, H x) { *p = x; }
    ZOK_INLINE F load_e4m3(const uint8_t* p, F scale) { return e4m3_value<Scalar>(load_u8(p)) * scale; }

    ZOK_INLINE F load_f16(const uint16_t* p) {
        const uint32_t h = *p, sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
        if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | (magnitude > 0x7c00u ? 0x400000u : 0u));
        if (magnitude >= 0x400u) return from_bits(sign | ((magnitude << 13) + (112u << 23)));
        const float small = static_cast<float>(static_cast<int>(magnitude)) * 0x1p-24f;
        return from_bits(sign | bits(small));
    }
    ZOK_INLINE H to_f16(F x) {
        const uint32_t u = bits(x), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
        if (magnitude > 0x7f800000u) return static_cast<H>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
        if (magnitude >= 0x47800000u) return static_cast<H>(sign | 0x7c00u);
        if (magnitude < 0x38800000u)  // a subnormal half: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
            return static_cast<H>(sign | (bits(from_bits(magnitude) + 0.5f) - 0x3f000000u));
        return static_cast<H>(sign | ((magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
    }
};
