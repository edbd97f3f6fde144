// Four lanes; part of every 64-bit Arm processor.

struct Vector {
    using F = float32x4_t;
    using E = float;
    using U = uint32x4_t;
    using M = uint32x4_t;
    using H = uint16x4_t;
    struct Wide {
        float64x2_t low, high;
    };
    static constexpr int W = 4;
    static constexpr int kGroup = 4;  // vectors of one pass of an update loop

    ZOK_INLINE F load(const float* p) { return vld1q_f32(p); }
    ZOK_INLINE void store(float* p, F x) { vst1q_f32(p, x); }
    ZOK_INLINE F set(float x) { return vdupq_n_f32(x); }
    ZOK_INLINE U setu(uint32_t x) { return vdupq_n_u32(x); }
    ZOK_INLINE U iota() { return U{0, 1, 2, 3}; }
    ZOK_INLINE U bits(F x) { return vreinterpretq_u32_f32(x); }
    ZOK_INLINE F from_bits(U u) { return vreinterpretq_f32_u32(u); }
    ZOK_INLINE F sqrt(F x) { return vsqrtq_f32(x); }
    ZOK_INLINE F plus_product(F sum, F a, F b) { return vfmaq_f32(sum, a, b); }
    ZOK_INLINE void add_square(Wide& sum, F x) {
        const float64x2_t low = vcvt_f64_f32(vget_low_f32(x)), high = vcvt_high_f64_f32(x);
        sum.low = vaddq_f64(sum.low, vmulq_f64(low, low));
        sum.high = vaddq_f64(sum.high, vmulq_f64(high, high));
    }
    ZOK_INLINE U max_u(U a, U b) { return vmaxq_u32(a, b); }
    ZOK_INLINE U min_u(U a, U b) { return vminq_u32(a, b); }
    ZOK_INLINE M gt_u(U a, U b) { return vcgtq_u32(a, b); }
    ZOK_INLINE M eq_u(U a, U b) { return vceqq_u32(a, b); }
    ZOK_INLINE M differs_from_zero(F x) { return vorrq_u32(vcltzq_f32(x), vcgtzq_f32(x)); }
    ZOK_INLINE U pick(M m, U a, U b) { return vbslq_u32(m, a, b); }
    ZOK_INLINE U choose(U mask, U a, U b) { return vbslq_u32(mask, a, b); }
    ZOK_INLINE U with_sign(U code, U x) { return vaddq_u32(code, vandq_u32(vshrq_n_u32(x, 24), setu(0x80u))); }
    ZOK_INLINE uint32_t highest(U x) { return vmaxvq_u32(x); }
    ZOK_INLINE U load_u8(const uint8_t* p) { return U{p[0], p[1], p[2], p[3]}; }
    ZOK_INLINE void store_u8(uint8_t* p, U x) {
        for (int i = 0; i < W; ++i) p[i] = static_cast<uint8_t>(x[i]);
    }
    ZOK_INLINE U join_u8(U a, U b, U c, U d) {
        const uint16x8_t ab = vcombine_u16(vmovn_u32(a), vmovn_u32(b)), cd = vcombine_u16(vmovn_u32(c), vmovn_u32(d));
        return vreinterpretq_u32_u8(vcombine_u8(vmovn_u16(ab), vmovn_u16(cd)));
    }
    ZOK_INLINE U load_u16(const uint16_t* p) { return vmovl_u16(vld1_u16(p)); }
    ZOK_INLINE F load_i8(const uint8_t* p) {
        const int8_t* i = reinterpret_cast<const int8_t*>(p);
        return vcvtq_f32_s32(int32x4_t{i[0], i[1], i[2], i[3]});
    }
    ZOK_INLINE U load_pairs(const uint16_t* p) { return vreinterpretq_u32_u16(vld1q_u16(p)); }
    ZOK_INLINE void store_lanes(void* p, U x) { vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_u32(x)); }
    ZOK_INLINE void stream_lanes(void* p, U x) { store_lanes(p, x); }
    ZOK_INLINE U join_high(U first, U second) {
        return vreinterpretq_u32_u16(vuzp2q_u16(vreinterpretq_u16_u32(first), vreinterpretq_u16_u32(second)));
    }
    ZOK_INLINE U join_low(U first, U second) {
        return vreinterpretq_u32_u16(vuzp1q_u16(vreinterpretq_u16_u32(first), vreinterpretq_u16_u32(second)));
    }
    ZOK_INLINE U join_signs(U first, U second) {
        return vreinterpretq_u32_u8(vuzp2q_u8(vreinterpretq_u8_u32(first), vreinterpretq_u8_u32(second)));
    }
    ZOK_INLINE U look_up(const uint32_t* table, U index) {
        return U{table[index[0] & 0xf], table[index[1] & 0xf], table[index[2] & 0xf], table[index[3] & 0xf]};
    }
    static constexpr bool kLooksUpMagnitudes = false;
    ZOK_INLINE H narrow(U x) { return vmovn_u32(x); }
    ZOK_INLINE void store_h(uint16_t* p, H x) { vst1_u16(p, x); }
    ZOK_INLINE void stream_h(uint16_t* p, H x) { vst1_u16(p, x); }
    ZOK_INLINE F load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
    ZOK_INLINE H to_f16(F x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
    ZOK_INLINE F load_e4m3(const uint8_t* p, F scale) { return e4m3_value<Vector>(load_u8(p)) * scale; }
};
