// Products of few rows x (n, i) with matrices of 4 and 8 bits, for processors with AVX2, AVX-VNNI, AVX512-VNNI or ARM's
// dot products, with the same bits on all. `few_rows.py` has the layouts and the definitions, tests/native/few_rows.cpp the same sums
// written plainly. Each group of 32 values of x is rounded to 16 bits with a step of its own. Sums of a group are whole
// numbers; those of groups run in fp32, in an order that depends on neither the other rows nor the threads.
//
// IN_A_STEP: compiled into a step, as its operators.
// INCLUDED: for other C++, without functions to call from outside.

#ifdef __aarch64__
#include "neon.h"
#define WITH_NEON 1
#else
#include <immintrin.h>
#define WITH_NEON 0
#endif
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#ifndef WITH_VNNI
#define WITH_VNNI 0  // 32 products and their sums are one instruction
#endif
#ifndef WITH_512
#define WITH_512 0  // and 64 are
#endif
#ifndef WITH_I8MM
#define WITH_I8MM 0  // 32 products with two rows are, on ARM
#endif

extern "C++" {
namespace few_rows {

constexpr int64_t GROUP = 32;  // values that share a step of x, and a scale and a middle of a 4-bit matrix
constexpr int64_t BLOCK = 16;  // rows of a 4-bit matrix that lie together
constexpr int64_t ROWS = 64;   // of x that meet a block of the matrix while it is in the cache
constexpr int64_t AHEAD_4 = 2048, AHEAD_8 = 2048;  // bytes: asked for so early, memory gives twice as many a second
constexpr float MOST = 127 * 256;
constexpr float LEAST = 0x1p-80f;  // a group whose largest value is below is rounded as if this were the largest

inline __m256 from_bf16(const uint16_t* x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x)), 16));
}

inline __m256 load(const uint16_t* x) { return from_bf16(x); }
inline __m256 load(const float* x) { return _mm256_loadu_ps(x); }
inline __m256 load(const int8_t* x) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x)));
}

inline float number(const uint16_t* x) {
    const uint32_t bits = uint32_t(*x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float number(const int8_t* x) { return *x; }
inline float number(const float* x) { return *x; }

inline __m128i to_bf16(__m256 value) {  // to the nearest, ties to even
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

inline void store(uint16_t* y, __m256 value) { _mm_storeu_si128((__m128i*)y, to_bf16(value)); }
inline void store(float* y, __m256 value) { _mm256_storeu_ps(y, value); }
inline void store(uint16_t* y, float value) { *y = (uint16_t)_mm_cvtsi128_si32(to_bf16(_mm256_set1_ps(value))); }
inline void store(float* y, float value) { *y = value; }

// (a_0 + a_4 + (a_2 + a_6)) + (a_1 + a_5 + (a_3 + a_7))
inline float sum(__m256 a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float largest(__m256 a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline int32_t sum(__m256i a) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

// Rows of x: x ~ step_g q. Of 4 bits: q = 256 high + low, total_g the sum of the values, offset_g = 8 times that of q.
struct Rounded {
    int64_t rows, inner, groups;
    std::unique_ptr<int16_t[]> q;  // on ARM 32 bytes `high` and 32 bytes `low` of each group
    std::unique_ptr<int8_t[]> high, low;
    std::unique_ptr<float[]> step, total;
    std::unique_ptr<int32_t[]> offset;

    Rounded(int64_t rows, int64_t inner, bool halves)
        : rows(rows), inner(inner), groups(inner / GROUP),
          q(halves ? nullptr : new int16_t[rows * inner]),
          high(halves ? new int8_t[rows * inner] : nullptr),
          low(halves ? new int8_t[rows * inner] : nullptr),
          step(new float[rows * groups]), total(new float[rows * groups]), offset(new int32_t[rows * groups]) {}

    Rounded(const uint16_t* x, int64_t rows, int64_t inner, bool halves) : Rounded(rows, inner, halves) {
#pragma omp parallel for schedule(static) if (rows > 8)
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t g = row * groups; g < (row + 1) * groups; ++g) round(x + GROUP * g, g, halves);
    }

    template <typename X>
    void round(const X* x, int64_t g, bool halves) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        __m256 part[4], most = _mm256_setzero_ps();
        for (int k = 0; k < 4; ++k) {
            part[k] = load(x + 8 * k);
            most = _mm256_max_ps(_mm256_andnot_ps(sign, part[k]), most);
        }
        const float end = std::max(largest(most), LEAST), sums = sum(
            _mm256_add_ps(_mm256_add_ps(part[0], part[1]), _mm256_add_ps(part[2], part[3])));
        const __m256 over = _mm256_set1_ps(MOST / end);
        __m256i whole[4];
        for (int k = 0; k < 4; ++k) whole[k] = _mm256_cvtps_epi32(_mm256_mul_ps(part[k], over));
        const __m256i first = in_order(_mm256_packs_epi32(whole[0], whole[1]));
        const __m256i second = in_order(_mm256_packs_epi32(whole[2], whole[3]));
        if (halves || WITH_NEON) {
            const __m256i a = upper(first), b = upper(second), least = _mm256_set1_epi16(255);
            const __m256i c = _mm256_and_si256(first, least), d = _mm256_and_si256(second, least);
            int8_t* upper_bytes = halves ? high.get() + GROUP * g : (int8_t*)(q.get() + GROUP * g);
            int8_t* lower_bytes = halves ? low.get() + GROUP * g : upper_bytes + GROUP;
            _mm256_storeu_si256((__m256i*)upper_bytes, in_order(_mm256_packs_epi16(a, b)));
            _mm256_storeu_si256((__m256i*)lower_bytes, in_order(_mm256_packus_epi16(c, d)));
        } else {
            _mm256_storeu_si256((__m256i*)(q.get() + GROUP * g), first);
            _mm256_storeu_si256((__m256i*)(q.get() + GROUP * g + 16), second);
        }
        const __m256i one = _mm256_set1_epi16(1);
        offset[g] = 8 * sum(_mm256_add_epi32(_mm256_madd_epi16(first, one), _mm256_madd_epi16(second, one)));
        total[g] = sums;
        step[g] = end / MOST + 0 * sums;  // of what is no number, none
    }

    static __m256i in_order(__m256i packed) { return _mm256_permute4x64_epi64(packed, 0xd8); }
    // (q + 128) / 256, whole, without leaving 16 bits: the lower byte, read as a signed number, is what is left
    static __m256i upper(__m256i q) {
        return _mm256_add_epi16(
            _mm256_srai_epi16(q, 8), _mm256_and_si256(_mm256_srli_epi16(q, 7), _mm256_set1_epi16(1)));
    }
};

// Sums of products of numbers of 8 bits, w in 0..15: of eight calls, then `whole` gives eight sums of 32 bits.
inline __m256i add_products(__m256i sums, __m256i w, __m256i x) {
#if WITH_512
    return _mm256_dpbusd_epi32(sums, w, x);
#elif WITH_VNNI
    return _mm256_dpbusd_avx_epi32(sums, w, x);
#elif WITH_NEON
    return {vdotq_s32(sums.one, (int8x16_t)w.one, (int8x16_t)x.one),
            vdotq_s32(sums.other, (int8x16_t)w.other, (int8x16_t)x.other)};
#else
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(w, x));
    asm("" : "+x"(sums));  // one after the other: as a tree they would not fit into the registers
    return sums;
#endif
}

inline __m256i whole(__m256i sums) {
#if WITH_VNNI || WITH_512 || WITH_NEON
    return sums;
#else
    return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
#endif
}

inline void soon(const void* address) { __builtin_prefetch(address); }  // reads nothing

inline int32_t together(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return four;
}
inline __m256i four(const int8_t* x) { return _mm256_set1_epi32(together(x)); }

// Eight rows of a 4-bit matrix with the halves of a row of x.
#if WITH_I8MM
struct Dots {
    int32x4_t of[4];  // each of two rows: with high, with low

    Dots() {
        for (int32x4_t& two : of) two = vdupq_n_s32(0);
    }
    void add(__m256i a, __m256i b, const int8_t* high, const int8_t* low) {  // columns 0 to 3 and 4 to 7
        const int8x16_t x = vcombine_s8(vld1_s8(high), vld1_s8(low));
        of[0] = vmmlaq_s32(of[0], (int8x16_t)vzip1q_s32(a.one, b.one), x);
        of[1] = vmmlaq_s32(of[1], (int8x16_t)vzip2q_s32(a.one, b.one), x);
        of[2] = vmmlaq_s32(of[2], (int8x16_t)vzip1q_s32(a.other, b.other), x);
        of[3] = vmmlaq_s32(of[3], (int8x16_t)vzip2q_s32(a.other, b.other), x);
    }
    __m256i sums() const {
        return {vaddq_s32(vshlq_n_s32(vuzp1q_s32(of[0], of[1]), 8), vuzp2q_s32(of[0], of[1])),
                vaddq_s32(vshlq_n_s32(vuzp1q_s32(of[2], of[3]), 8), vuzp2q_s32(of[2], of[3]))};
    }
};
#else
struct Dots {
    __m256i high = _mm256_setzero_si256(), low = _mm256_setzero_si256();

    void add(__m256i a, __m256i b, const int8_t* x_high, const int8_t* x_low) {
        high = add_products(high, a, four(x_high));
        low = add_products(low, a, four(x_low));
        high = add_products(high, b, four(x_high + 4));
        low = add_products(low, b, four(x_low + 4));
    }
    __m256i sums() const { return _mm256_add_epi32(_mm256_slli_epi32(whole(high), 8), whole(low)); }
};
#endif

#if WITH_512
inline __m256i upper_half(__m512i a) { return _mm512_extracti64x4_epi64(a, 1); }

template <typename Y>
inline void store(Y* y, __m512i value) {
    store(y, _mm256_castsi256_ps(_mm512_castsi512_si256(value)));
    store(y + 8, _mm256_castsi256_ps(upper_half(value)));
}

// N rows of x from `row` on with one block of the matrix, whose 16 rows are one register.
template <int N, typename Y>
inline void block_of_4_bits(
    const Rounded& in, int64_t row, const uint8_t* w, const uint16_t* scales, Y* y, int64_t out
) {
    const __m512i nibble = _mm512_set1_epi8(15), left = _mm512_set1_epi32(0xffff0000);
    __m512 sums[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[n] = _mm512_setzero_ps();
    const int8_t *x_high = in.high.get() + row * in.inner, *x_low = in.low.get() + row * in.inner;
    for (int64_t g = 0; g < in.groups; ++g) {
        for (int k = 0; k < 4; ++k) soon(w + AHEAD_4 + 64 * k);
        soon(scales + AHEAD_4 / 8);
        __m512i high[N], low[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) high[n] = low[n] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            const __m512i both = _mm512_loadu_si512(w + 64 * k);
            const __m512i a = _mm512_and_si512(both, nibble);
            const __m512i b = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                const int64_t at = n * in.inner + GROUP * g + 8 * k;
                high[n] = _mm512_dpbusd_epi32(high[n], a, _mm512_set1_epi32(together(x_high + at)));
                low[n] = _mm512_dpbusd_epi32(low[n], a, _mm512_set1_epi32(together(x_low + at)));
                high[n] = _mm512_dpbusd_epi32(high[n], b, _mm512_set1_epi32(together(x_high + at + 4)));
                low[n] = _mm512_dpbusd_epi32(low[n], b, _mm512_set1_epi32(together(x_low + at + 4)));
            }
        }
        const __m512i both = _mm512_loadu_si512(scales);
        const __m512 s = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
        const __m512 z = _mm512_castsi512_ps(_mm512_and_si512(both, left));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const int64_t one = (row + n) * in.groups + g;
            const __m512i dot = _mm512_sub_epi32(
                _mm512_add_epi32(_mm512_slli_epi32(high[n], 8), low[n]), _mm512_set1_epi32(in.offset[one]));
            const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(in.step[one]));
            const __m512 before = _mm512_fmadd_ps(z, _mm512_set1_ps(in.total[one]), sums[n]);
            sums[n] = _mm512_fmadd_ps(s, product, before);
        }
        w += BLOCK * GROUP / 2;
        scales += 2 * BLOCK;
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(y + (row + n) * out, _mm512_castps_si512(sums[n]));
}
#else
// N rows of x from `row` on with one block of the matrix.
template <int N, typename Y>
inline void block_of_4_bits(
    const Rounded& in, int64_t row, const uint8_t* w, const uint16_t* scales, Y* y, int64_t out
) {
    const __m256i nibble = _mm256_set1_epi8(15), left = _mm256_set1_epi32(0xffff0000);
    __m256 sums[N][2];
    for (int n = 0; n < N; ++n) sums[n][0] = sums[n][1] = _mm256_setzero_ps();
    const int8_t *x_high = in.high.get() + row * in.inner, *x_low = in.low.get() + row * in.inner;
    for (int64_t g = 0; g < in.groups; ++g) {
        for (int k = 0; k < 4; ++k) soon(w + AHEAD_4 + 64 * k);
        soon(scales + AHEAD_4 / 8);
        for (int half = 0; half < 2; ++half) {
            Dots dots[N];
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                const __m256i both = _mm256_loadu_si256((const __m256i*)(w + 64 * k + 32 * half));
                const __m256i a = _mm256_and_si256(both, nibble);
                const __m256i b = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                    const int64_t at = n * in.inner + GROUP * g + 8 * k;
                    dots[n].add(a, b, x_high + at, x_low + at);
                }
            }
            const __m256i both = _mm256_loadu_si256((const __m256i*)(scales + 16 * half));
            const __m256 s = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
            const __m256 z = _mm256_castsi256_ps(_mm256_and_si256(both, left));
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                const int64_t one = (row + n) * in.groups + g;
                const __m256i dot = _mm256_sub_epi32(dots[n].sums(), _mm256_set1_epi32(in.offset[one]));
                const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(in.step[one]));
                const __m256 before = _mm256_fmadd_ps(z, _mm256_set1_ps(in.total[one]), sums[n][half]);
                sums[n][half] = _mm256_fmadd_ps(s, product, before);
            }
        }
        w += BLOCK * GROUP / 2;
        scales += 2 * BLOCK;
    }
    for (int n = 0; n < N; ++n)
        for (int half = 0; half < 2; ++half)
            store(y + (row + n) * out + 8 * half, sums[n][half]);
}

#endif

// Rows first .. end-1 of x with one block; `out` is the width of y.
template <typename Y>
inline void rows_of_4_bits(
    const Rounded& in, int64_t first, int64_t end, int64_t block, const void* packed, const uint16_t* scales, Y* y,
    int64_t out
) {
    const uint8_t* w = (const uint8_t*)packed + block * BLOCK * in.inner / 2;
    const uint16_t* s = scales + block * BLOCK * 2 * in.groups;
    int64_t row = first;
    for (; row + 4 <= end; row += 4) block_of_4_bits<4>(in, row, w, s, y + BLOCK * block, out);
    for (; row < end; ++row) block_of_4_bits<1>(in, row, w, s, y + BLOCK * block, out);
}

// packed (o/16, i/8, 16, 4): a byte holds column c (low) and c + 4 of eight. scales (o/16, groups, 16, 2) bf16: s and
// z; w = (q - 8) s + z.
inline void of_4_bits(
    const uint16_t* x, const void* packed, const uint16_t* scales, uint16_t* y, int64_t rows, int64_t inner, int64_t out
) {
    const Rounded in(x, rows, inner, true);
    for (int64_t first = 0; first < rows; first += ROWS) {
        const int64_t end = std::min(first + ROWS, rows);
#pragma omp parallel for schedule(static)
        for (int64_t block = 0; block < out / BLOCK; ++block) rows_of_4_bits(in, first, end, block, packed, scales, y, out);
    }
}

// A group of a row of x and one of a row of an 8-bit matrix, and sums of products: of k those of 2k, 2k + 1, 2k + 16
// and 2k + 17.
#if WITH_512
using Group = __m512i;
inline Group group_of_x(const int16_t* x) { return _mm512_loadu_si512(x); }
inline Group group_of_w(const int8_t* w) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)w)); }
inline __m256i dots(Group w, Group x) {
    const __m512i halves = _mm512_dpwssd_epi32(_mm512_setzero_si512(), w, x);
    return _mm256_add_epi32(_mm512_castsi512_si256(halves), upper_half(halves));
}
#elif WITH_NEON
struct Group {
    int8x16_t of[4];
};
inline void in_fours(const int8_t* x, int8x16_t* made) {  // 2k, 2k + 1, 2k + 16, 2k + 17 together
    const int16x8_t one = (int16x8_t)vld1q_s8(x), other = (int16x8_t)vld1q_s8(x + 16);
    made[0] = (int8x16_t)vzip1q_s16(one, other), made[1] = (int8x16_t)vzip2q_s16(one, other);
}
inline Group group_of_x(const int16_t* x) {
    Group made;
    in_fours((const int8_t*)x, made.of), in_fours((const int8_t*)x + GROUP, made.of + 2);
    return made;
}
inline Group group_of_w(const int8_t* w) {
    Group made;
    in_fours(w, made.of);
    return made;
}
inline __m128i dots(int8x16_t w, int8x16_t high, int8x16_t low) {
    return vdotq_s32(vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), w, high), 8), w, low);
}
inline __m256i dots(const Group& w, const Group& x) {
    return {dots(w.of[0], x.of[0], x.of[2]), dots(w.of[1], x.of[1], x.of[3])};
}
#else
struct Group {
    __m256i first, second;
};
inline Group group_of_x(const int16_t* x) {
    return {_mm256_loadu_si256((const __m256i*)x), _mm256_loadu_si256((const __m256i*)(x + 16))};
}
inline Group group_of_w(const int8_t* w) {
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)w)),
            _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(w + 16)))};
}
inline __m256i dots(const Group& w, const Group& x) {
    const __m256i sums = _mm256_madd_epi16(w.first, x.first);
#if WITH_VNNI
    return _mm256_dpwssd_avx_epi32(sums, w.second, x.second);
#else
    return _mm256_add_epi32(sums, _mm256_madd_epi16(w.second, x.second));
#endif
}
#endif

// N rows of x from `row` on with M rows of the matrix.
template <int N, int M, typename Y>
inline void block_of_8_bits(
    const Rounded& in, int64_t row, const int8_t* w, const uint16_t* scales, Y* y, int64_t out
) {
    __m256 sums[N][M];
    for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m) sums[n][m] = _mm256_setzero_ps();
    const int16_t* x = in.q.get() + row * in.inner;
    for (int64_t g = 0; g < in.groups; ++g) {
        Group of_x[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) of_x[n] = group_of_x(x + n * in.inner + GROUP * g);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
            const int8_t* here = w + m * in.inner + GROUP * g;
            if (g % 2 == 0) soon(here + AHEAD_8);
            const Group of_w = group_of_w(here);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                const __m256i dot = dots(of_w, of_x[n]);
                const __m256 step = _mm256_set1_ps(in.step[(row + n) * in.groups + g]);
                sums[n][m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), step, sums[n][m]);
            }
        }
    }
    for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m) store(y + (row + n) * out + m, sum(sums[n][m]) * number(scales + m));
}

// Rows first .. end-1 of x with two rows of the matrix, which has `o`, or with its last one; `out` is the width of y.
template <typename Y>
inline void rows_of_8_bits(
    const Rounded& in, int64_t first, int64_t end, int64_t pair, int64_t o, const void* packed, const uint16_t* scales,
    Y* y, int64_t out
) {
    const int64_t at = 2 * pair;
    const int8_t* w = (const int8_t*)packed + at * in.inner;
    int64_t row = first;
    if (at + 2 <= o) {
        for (; row + 2 <= end; row += 2) block_of_8_bits<2, 2>(in, row, w, scales + at, y + at, out);
        for (; row < end; ++row)  // one after the other, as they are stored: memory is read a third faster than in pairs
            for (int64_t m = 0; m < 2; ++m)
                block_of_8_bits<1, 1>(in, row, w + m * in.inner, scales + at + m, y + at + m, out);
    } else {
        for (; row < end; ++row) block_of_8_bits<1, 1>(in, row, w, scales + at, y + at, out);
    }
}

// packed (o, i) int8, scales (o,) bf16; w = q s.
inline void of_8_bits(
    const uint16_t* x, const void* packed, const uint16_t* scales, uint16_t* y, int64_t rows, int64_t inner, int64_t out
) {
    const Rounded in(x, rows, inner, false);
    const int64_t pairs = (out + 1) / 2;
    for (int64_t first = 0; first < rows; first += ROWS) {
        const int64_t end = std::min(first + ROWS, rows);
#pragma omp parallel for schedule(static)
        for (int64_t pair = 0; pair < pairs; ++pair) rows_of_8_bits(in, first, end, pair, out, packed, scales, y, out);
    }
}

#ifdef IN_A_STEP
using Product = void(const uint16_t*, const void*, const uint16_t*, uint16_t*, int64_t, int64_t, int64_t);

inline AOTITorchError into(
    Product product, AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle scales, bool blocks,
    AtenTensorHandle* made
) {
    void *in, *w, *s, *y;
    int64_t shape[2] = {0, 0}, inner;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(x, 0, &shape[0]));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(x, 1, &inner));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(packed, 0, &shape[1]));
    if (blocks) shape[1] *= BLOCK;
    const int64_t strides[2] = {shape[1], 1};
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        2, shape, strides, aoti_torch_dtype_bfloat16(), aoti_torch_device_type_cpu(), 0, made));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(x, &in));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(packed, &w));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(scales, &s));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(*made, &y));
    product((const uint16_t*)in, w, (const uint16_t*)s, (uint16_t*)y, shape[0], inner, shape[1]);
    return AOTI_TORCH_SUCCESS;
}
#endif

}  // namespace few_rows
}

#ifndef INCLUDED
extern "C" {
#ifdef IN_A_STEP
AOTITorchError aoti_torch_cpu_few_rows_of_4_bits(
    AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle scales, AtenTensorHandle* made
) {
    return few_rows::into(few_rows::of_4_bits, x, packed, scales, true, made);
}

AOTITorchError aoti_torch_cpu_few_rows_of_8_bits(
    AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle scales, AtenTensorHandle* made
) {
    return few_rows::into(few_rows::of_8_bits, x, packed, scales, false, made);
}
#else
void few_rows_of_4_bits(
    const uint16_t* x, const void* packed, const uint16_t* scales, uint16_t* y, int64_t rows, int64_t inner, int64_t out
) {
    few_rows::of_4_bits(x, packed, scales, y, rows, inner, out);
}

void few_rows_of_8_bits(
    const uint16_t* x, const void* packed, const uint16_t* scales, uint16_t* y, int64_t rows, int64_t inner, int64_t out
) {
    few_rows::of_8_bits(x, packed, scales, y, rows, inner, out);
}
#endif
}
#endif
