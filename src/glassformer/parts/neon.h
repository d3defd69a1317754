// The instructions of AVX2 that this folder is written in, for ARM: a register of 256 bits is two of 128. They do what
// AVX2's do, but whole numbers of what is none: 0 or the nearest there is, where AVX2 has the least.

#include <arm_neon.h>
#include <cstdint>

using __m128 = float32x4_t;
using __m128i = int32x4_t;
struct __m256 {
    __m128 one, other;
};
struct __m256i {
    __m128i one, other;
};

#define _MM_FROUND_TO_NEAREST_INT 0
#define _MM_FROUND_NO_EXC 8
#define IN_HALVES_1(R, name, A, f) \
    inline R name(A a) { return {f(a.one), f(a.other)}; }
#define IN_HALVES_2(R, name, A, f) \
    inline R name(A a, A b) { return {f(a.one, b.one), f(a.other, b.other)}; }
#define IN_HALVES_3(name, f) \
    inline __m256 name(__m256 a, __m256 b, __m256 c) { return {f(a.one, b.one, c.one), f(a.other, b.other, c.other)}; }
#define SHIFTED(name, T, sign) \
    inline __m256i name(__m256i a, int n) { return {(__m128i)((T)a.one sign n), (__m128i)((T)a.other sign n)}; }

// Halves. Of what is no number, the second one.
inline __m128 _mm_max_ps(__m128 a, __m128 b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline __m128 lesser(__m128 a, __m128 b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline __m128 fma_of(__m128 a, __m128 b, __m128 c) { return vfmaq_f32(c, a, b); }
inline __m128 fms_of(__m128 a, __m128 b, __m128 c) { return vfmaq_f32(vnegq_f32(c), a, b); }
inline __m128 fnma_of(__m128 a, __m128 b, __m128 c) { return vfmsq_f32(c, a, b); }
inline __m128 without(__m128 a, __m128 b) { return (__m128)vbicq_s32((__m128i)b, (__m128i)a); }
inline __m128i added_16(__m128i a, __m128i b) { return (__m128i)vaddq_s16((int16x8_t)a, (int16x8_t)b); }
inline __m128i pairs(__m128i a, __m128i b) {
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
}
inline __m128i narrowed_32(__m128i a, __m128i b) { return (__m128i)vqmovn_high_s32(vqmovn_s32(a), b); }
inline __m128i narrowed_16(__m128i a, __m128i b) {
    return (__m128i)vqmovn_high_s16(vqmovn_s16((int16x8_t)a), (int16x8_t)b);
}
inline __m128i narrowed_16_unsigned(__m128i a, __m128i b) {
    return (__m128i)vqmovun_high_s16(vqmovun_s16((int16x8_t)a), (int16x8_t)b);
}
inline __m128i lower_halves(__m128i a, __m128i b) { return (__m128i)vzip1q_s64((int64x2_t)a, (int64x2_t)b); }
inline __m128i upper_halves(__m128i a, __m128i b) { return (__m128i)vzip2q_s64((int64x2_t)a, (int64x2_t)b); }

// 128 bits
inline __m128i _mm_loadu_si128(const __m128i* x) { return (__m128i)vld1q_u8((const uint8_t*)x); }
inline __m128i _mm_loadl_epi64(const __m128i* x) {
    return (__m128i)vcombine_u8(vld1_u8((const uint8_t*)x), vdup_n_u8(0));
}
inline void _mm_storeu_si128(__m128i* y, __m128i x) { vst1q_u8((uint8_t*)y, (uint8x16_t)x); }
inline __m128i _mm_packus_epi32(__m128i a, __m128i b) { return (__m128i)vqmovun_high_s32(vqmovun_s32(a), b); }
inline __m128i _mm_add_epi32(__m128i a, __m128i b) { return vaddq_s32(a, b); }
inline __m128i _mm_shuffle_epi32(__m128i a, int order) {  // 0x4e: halves change places; 0xb1: neighbours do
    return order == 0x4e ? vextq_s32(a, a, 2) : vrev64q_s32(a);
}
inline int32_t _mm_cvtsi128_si32(__m128i a) { return vgetq_lane_s32(a, 0); }
inline __m128 _mm_add_ps(__m128 a, __m128 b) { return vaddq_f32(a, b); }
inline __m128 _mm_add_ss(__m128 a, __m128 b) { return vaddq_f32(a, b); }  // of the first number, as the next
inline __m128 _mm_max_ss(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
inline __m128 _mm_movehl_ps(__m128 a, __m128 b) { return (__m128)upper_halves((__m128i)b, (__m128i)a); }
inline __m128 _mm_movehdup_ps(__m128 a) { return vtrn2q_f32(a, a); }
inline __m128 _mm_shuffle_ps(__m128 a, __m128 b, int order) {  // 0x88: of both, the first of each pair; 0xdd: the second
    return order == 0x88 ? vuzp1q_f32(a, b) : vuzp2q_f32(a, b);
}
inline void _mm_storeu_ps(float* y, __m128 x) { vst1q_f32(y, x); }
inline float _mm_cvtss_f32(__m128 a) { return vgetq_lane_f32(a, 0); }

// 256 bits, fp32
inline __m256 _mm256_loadu_ps(const float* x) { return {vld1q_f32(x), vld1q_f32(x + 4)}; }
inline __m256 _mm256_load_ps(const float* x) { return _mm256_loadu_ps(x); }
inline void _mm256_storeu_ps(float* y, __m256 x) { vst1q_f32(y, x.one), vst1q_f32(y + 4, x.other); }
inline void _mm256_store_ps(float* y, __m256 x) { _mm256_storeu_ps(y, x); }
inline __m256 _mm256_set1_ps(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline __m256 _mm256_broadcast_ss(const float* x) { return _mm256_set1_ps(*x); }
inline __m256 _mm256_setzero_ps() { return _mm256_set1_ps(0); }
inline __m128 _mm256_castps256_ps128(__m256 a) { return a.one; }
inline __m128 _mm256_extractf128_ps(__m256 a, int) { return a.other; }
inline __m256 _mm256_round_ps(__m256 a, int) { return {vrndnq_f32(a.one), vrndnq_f32(a.other)}; }
inline __m256i _mm256_castps_si256(__m256 a) { return {(__m128i)a.one, (__m128i)a.other}; }
inline __m256 _mm256_castsi256_ps(__m256i a) { return {(__m128)a.one, (__m128)a.other}; }
IN_HALVES_1(__m256, _mm256_cvtepi32_ps, __m256i, vcvtq_f32_s32)
IN_HALVES_1(__m256i, _mm256_cvtps_epi32, __m256, vcvtnq_s32_f32)
IN_HALVES_2(__m256, _mm256_add_ps, __m256, vaddq_f32)
IN_HALVES_2(__m256, _mm256_sub_ps, __m256, vsubq_f32)
IN_HALVES_2(__m256, _mm256_mul_ps, __m256, vmulq_f32)
IN_HALVES_2(__m256, _mm256_div_ps, __m256, vdivq_f32)
IN_HALVES_2(__m256, _mm256_max_ps, __m256, _mm_max_ps)
IN_HALVES_2(__m256, _mm256_min_ps, __m256, lesser)
IN_HALVES_2(__m256, _mm256_andnot_ps, __m256, without)
IN_HALVES_2(__m256, _mm256_unpacklo_ps, __m256, vzip1q_f32)
IN_HALVES_2(__m256, _mm256_unpackhi_ps, __m256, vzip2q_f32)
IN_HALVES_3(_mm256_fmadd_ps, fma_of)
IN_HALVES_3(_mm256_fmsub_ps, fms_of)
IN_HALVES_3(_mm256_fnmadd_ps, fnma_of)

inline __m256 _mm256_shuffle_ps(__m256 a, __m256 b, int order) {  // 0x44: of both, the lower halves; 0xee: the upper ones
    const __m256i x = _mm256_castps_si256(a), y = _mm256_castps_si256(b);
    if (order == 0x44) return _mm256_castsi256_ps({lower_halves(x.one, y.one), lower_halves(x.other, y.other)});
    return _mm256_castsi256_ps({upper_halves(x.one, y.one), upper_halves(x.other, y.other)});
}
inline __m256 _mm256_permute2f128_ps(__m256 a, __m256 b, int order) {  // 0x20 and 0x31, likewise
    return order == 0x20 ? __m256{a.one, b.one} : __m256{a.other, b.other};
}

// 256 bits, whole numbers
inline __m256i _mm256_loadu_si256(const __m256i* x) {
    return {_mm_loadu_si128((const __m128i*)x), _mm_loadu_si128((const __m128i*)x + 1)};
}
inline void _mm256_storeu_si256(__m256i* y, __m256i x) {
    _mm_storeu_si128((__m128i*)y, x.one), _mm_storeu_si128((__m128i*)y + 1, x.other);
}
inline __m256i _mm256_set1_epi32(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline __m256i _mm256_set1_epi16(int16_t x) { return _mm256_set1_epi32((x & 0xffff) * 0x10001); }
inline __m256i _mm256_set1_epi8(int8_t x) { return _mm256_set1_epi32((x & 0xff) * 0x1010101); }
inline __m256i _mm256_setzero_si256() { return _mm256_set1_epi32(0); }
inline __m128i _mm256_castsi256_si128(__m256i a) { return a.one; }
inline __m128i _mm256_extracti128_si256(__m256i a, int) { return a.other; }
IN_HALVES_2(__m256i, _mm256_and_si256, __m256i, vandq_s32)
IN_HALVES_2(__m256i, _mm256_add_epi32, __m256i, vaddq_s32)
IN_HALVES_2(__m256i, _mm256_sub_epi32, __m256i, vsubq_s32)
IN_HALVES_2(__m256i, _mm256_add_epi16, __m256i, added_16)
IN_HALVES_2(__m256i, _mm256_madd_epi16, __m256i, pairs)
IN_HALVES_2(__m256i, _mm256_packs_epi32, __m256i, narrowed_32)
IN_HALVES_2(__m256i, _mm256_packs_epi16, __m256i, narrowed_16)
IN_HALVES_2(__m256i, _mm256_packus_epi16, __m256i, narrowed_16_unsigned)
SHIFTED(_mm256_slli_epi32, uint32x4_t, <<)
SHIFTED(_mm256_srli_epi32, uint32x4_t, >>)
SHIFTED(_mm256_srai_epi32, int32x4_t, >>)
SHIFTED(_mm256_srli_epi16, uint16x8_t, >>)
SHIFTED(_mm256_srai_epi16, int16x8_t, >>)

inline __m256i _mm256_permute4x64_epi64(__m256i a, int) {  // 0xd8: of the two in the middle, each takes the other's place
    return {lower_halves(a.one, a.other), upper_halves(a.one, a.other)};
}
inline __m256i _mm256_cvtepu16_epi32(__m128i a) {
    const uint16x8_t x = (uint16x8_t)a;
    return {(__m128i)vmovl_u16(vget_low_u16(x)), (__m128i)vmovl_high_u16(x)};
}
inline __m256i _mm256_cvtepi8_epi32(__m128i a) {
    const int16x8_t x = vmovl_s8(vget_low_s8((int8x16_t)a));
    return {vmovl_s16(vget_low_s16(x)), vmovl_high_s16(x)};
}
