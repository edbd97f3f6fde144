// Eight lanes.

struct Vector {
    using F = __m256;
    using E = float;
    typedef uint32_t U __attribute__((vector_size(32)));
    using M = __m256i;
    using H = __m128i;
    struct Wide {
        __m256d low, high;
    };
    static constexpr int W = 8;
    static constexpr int kGroup = 2;  // vectors of one pass of an update loop

    ZOK_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
    ZOK_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    ZOK_INLINE F set(float x) { return _mm256_set1_ps(x); }
    ZOK_INLINE U setu(uint32_t x) { return (U)_mm256_set1_epi32(static_cast<int>(x)); }
    ZOK_INLINE U iota() { return U{0, 1, 2, 3, 4, 5, 6, 7}; }
    ZOK_INLINE U bits(F x) { return (U)x; }
    ZOK_INLINE F from_bits(U u) { return (F)u; }
    ZOK_INLINE F sqrt(F x) { return _mm256_sqrt_ps(x); }
    ZOK_INLINE F plus_product(F sum, F a, F b) { return _mm256_fmadd_ps(a, b, sum); }
    ZOK_INLINE void add_square(Wide& sum, F x) {
        const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
        sum.low += low * low;
        sum.high += high * high;
    }
    ZOK_INLINE U max_u(U a, U b) { return (U)_mm256_max_epu32((__m256i)a, (__m256i)b); }
    ZOK_INLINE U min_u(U a, U b) { return (U)_mm256_min_epu32((__m256i)a, (__m256i)b); }
    ZOK_INLINE M gt_u(U a, U b) { return _mm256_cmpgt_epi32((__m256i)a, (__m256i)b); }
    ZOK_INLINE M eq_u(U a, U b) { return _mm256_cmpeq_epi32((__m256i)a, (__m256i)b); }
    ZOK_INLINE M differs_from_zero(F x) { return (__m256i)_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ); }
    ZOK_INLINE U pick(M m, U a, U b) { return (U)_mm256_blendv_epi8((__m256i)b, (__m256i)a, m); }
    ZOK_INLINE U choose(U mask, U a, U b) { return b ^ ((a ^ b) & mask); }
    ZOK_INLINE U with_sign(U code, U x) { return code + (x >> 24 & setu(0x80u)); }
    ZOK_INLINE uint32_t highest(U x) {
        const __m128i four = _mm_max_epu32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
        const __m128i two = _mm_max_epu32(four, _mm_unpackhi_epi64(four, four));
        return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 1))));
    }
    ZOK_INLINE U load_u8(const uint8_t* p) { return (U)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
    ZOK_INLINE void store_u8(uint8_t* p, U x) {
        const __m128i h = narrow(x & setu(0xffu));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(h, h));
    }
    ZOK_INLINE U join_u8(U a, U b, U c, U d) {
        const U low = setu(0xffu);
        const __m256i ab = _mm256_packus_epi32((__m256i)(a & low), (__m256i)(b & low));
        const __m256i cd = _mm256_packus_epi32((__m256i)(c & low), (__m256i)(d & low));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        return (U)_mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order);
    }
    ZOK_INLINE U load_u16(const uint16_t* p) { return (U)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    ZOK_INLINE F load_i8(const uint8_t* p) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
    }
    ZOK_INLINE U load_pairs(const uint16_t* p) { return (U)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    ZOK_INLINE void store_lanes(void* p, U x) { _mm256_storeu_si256(static_cast<__m256i*>(p), (__m256i)x); }
    ZOK_INLINE void stream_lanes(void* p, U x) { _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)x); }
    ZOK_INLINE U join_high(U first, U second) {
        return (U)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)(first >> 16), (__m256i)(second >> 16)), 0xd8);
    }
    ZOK_INLINE U join_low(U first, U second) {
        const U low = setu(0xffffu);
        return (U)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)(first & low), (__m256i)(second & low)), 0xd8);
    }
    ZOK_INLINE U join_signs(U first, U second) {
        return (U)_mm256_permute4x64_epi64(_mm256_packs_epi16((__m256i)first, (__m256i)second), 0xd8);
    }
    ZOK_INLINE U look_up(const uint32_t* table, U index) {
        const __m256i* halves = reinterpret_cast<const __m256i*>(table);
        const F low = (F)_mm256_permutevar8x32_epi32(_mm256_load_si256(halves), (__m256i)index);
        const F high = (F)_mm256_permutevar8x32_epi32(_mm256_load_si256(halves + 1), (__m256i)index);
        return (U)_mm256_blendv_ps(low, high, (F)(index << 28));
    }
    static constexpr bool kLooksUpMagnitudes = false;
    ZOK_INLINE H narrow(U x) {
        return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    }
    ZOK_INLINE void store_h(uint16_t* p, H x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }
    ZOK_INLINE void stream_h(uint16_t* p, H x) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), x); }
    ZOK_INLINE F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    ZOK_INLINE H to_f16(F x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // e4m3 without its sign, shifted by 7, is a half of 2^-8 times its value, subnormal numbers included.
    ZOK_INLINE F load_e4m3(const uint8_t* p, F scale) {
        const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        const __m128i h = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<short>(0xbf80)));
        return _mm256_cvtph_ps(h) * (scale * set(256.0f));
    }
};
