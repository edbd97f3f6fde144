// Sixteen lanes. The bf16 conversion instructions are not used: they flush subnormal numbers to zero, so results would depend on
// the machine, and the integer rounding below is never what a memory-bound step waits for.

struct Vector {
    using F = __m512;
    using E = float;
    typedef uint32_t U __attribute__((vector_size(64)));
    using M = __mmask16;
    using H = __m256i;
    struct Wide {
        __m512d low, high;
    };
    static constexpr int W = 16;
    static constexpr int kGroup = 1;  // vectors of one pass of an update loop

    ZOK_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
    ZOK_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    ZOK_INLINE F set(float x) { return _mm512_set1_ps(x); }
    ZOK_INLINE U setu(uint32_t x) { return (U)_mm512_set1_epi32(static_cast<int>(x)); }
    ZOK_INLINE U iota() { return U{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
    ZOK_INLINE U bits(F x) { return (U)x; }
    ZOK_INLINE F from_bits(U u) { return (F)u; }
    ZOK_INLINE F sqrt(F x) { return _mm512_sqrt_ps(x); }
    ZOK_INLINE F plus_product(F sum, F a, F b) { return _mm512_fmadd_ps(a, b, sum); }
    ZOK_INLINE void add_square(Wide& sum, F x) {
        const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
        sum.low += low * low;
        sum.high += high * high;
    }
    ZOK_INLINE U max_u(U a, U b) { return (U)_mm512_max_epu32((__m512i)a, (__m512i)b); }
    ZOK_INLINE U min_u(U a, U b) { return (U)_mm512_min_epu32((__m512i)a, (__m512i)b); }
    ZOK_INLINE M gt_u(U a, U b) { return _mm512_cmpgt_epu32_mask((__m512i)a, (__m512i)b); }
    ZOK_INLINE M eq_u(U a, U b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
    ZOK_INLINE M differs_from_zero(F x) { return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_OQ); }
    ZOK_INLINE U pick(M m, U a, U b) { return (U)_mm512_mask_blend_epi32(m, (__m512i)b, (__m512i)a); }
    ZOK_INLINE U choose(U mask, U a, U b) {  // bits of `a` where `mask` has ones, else of `b`
        return (U)_mm512_ternarylogic_epi32((__m512i)mask, (__m512i)a, (__m512i)b, 0xca);
    }
    ZOK_INLINE U with_sign(U code, U x) { return choose(setu(0x80u), x >> 24, code); }
    ZOK_INLINE uint32_t highest(U x) { return _mm512_reduce_max_epu32((__m512i)x); }
    ZOK_INLINE U load_u8(const uint8_t* p) { return (U)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    ZOK_INLINE void store_u8(uint8_t* p, U x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)x)); }
    ZOK_INLINE U join_u8(U a, U b, U c, U d) {
        const U low = setu(0xffu);
        const __m512i ab = _mm512_packus_epi32((__m512i)(a & low), (__m512i)(b & low));
        const __m512i cd = _mm512_packus_epi32((__m512i)(c & low), (__m512i)(d & low));
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return (U)_mm512_permutexvar_epi32(order, _mm512_packus_epi16(ab, cd));
    }
    ZOK_INLINE U load_u16(const uint16_t* p) { return (U)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    ZOK_INLINE F load_i8(const uint8_t* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }
    ZOK_INLINE U load_pairs(const uint16_t* p) { return (U)_mm512_loadu_si512(p); }
    ZOK_INLINE void store_lanes(void* p, U x) { _mm512_storeu_si512(p, (__m512i)x); }
    ZOK_INLINE void stream_lanes(void* p, U x) { _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)x); }
    ZOK_INLINE U join_high(U first, U second) {
        const U high_halves = iota() * setu(0x40004u) + setu(0x30001u);
        return (U)_mm512_permutex2var_epi16((__m512i)first, (__m512i)high_halves, (__m512i)second);
    }
    ZOK_INLINE U join_low(U first, U second) {
        const U low_halves = iota() * setu(0x40004u) + setu(0x20000u);
        return (U)_mm512_permutex2var_epi16((__m512i)first, (__m512i)low_halves, (__m512i)second);
    }
    ZOK_INLINE U join_signs(U first, U second) {
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        return (U)_mm512_permutexvar_epi64(order, _mm512_packs_epi16((__m512i)first, (__m512i)second));
    }
    ZOK_INLINE U look_up(const uint32_t* table, U index) {
        return (U)_mm512_permutexvar_epi32((__m512i)index, _mm512_load_si512(table));
    }
    static constexpr bool kLooksUpMagnitudes = true;
    ZOK_INLINE U look_up_magnitudes(const uint16_t* table, const uint8_t* codes) {
        const __m512i* quarters = reinterpret_cast<const __m512i*>(table);
        const __m512i index = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
        const __m512i low = _mm512_permutex2var_epi16(_mm512_load_si512(quarters), index, _mm512_load_si512(quarters + 1));
        const __m512i high = _mm512_permutex2var_epi16(_mm512_load_si512(quarters + 2), index, _mm512_load_si512(quarters + 3));
        const __m512i magnitude = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(index, _mm512_set1_epi16(0x40)), low, high);
        return choose(setu(0x80008000u), (U)_mm512_slli_epi16(index, 8), (U)magnitude);
    }
    ZOK_INLINE H narrow(U x) { return _mm512_cvtepi32_epi16((__m512i)x); }
    ZOK_INLINE void store_h(uint16_t* p, H x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
    ZOK_INLINE void stream_h(uint16_t* p, H x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x); }
    ZOK_INLINE F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    ZOK_INLINE H to_f16(F x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // e4m3 without its sign, shifted by 7, is a half of 2^-8 times its value, subnormal numbers included.
    ZOK_INLINE F load_e4m3(const uint8_t* p, F scale) {
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const __m256i h = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
        return _mm512_cvtph_ps(h) * (scale * set(256.0f));
    }
};
