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

#include <omp.h>

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
constexpr int64_t BLOCK = 16;  // rows of a matrix that lie together
constexpr int64_t ROWS = 64;   // of x that meet a block of the matrix while it is in the cache
constexpr int64_t TILE = WITH_512 ? 12 : 6;  // of x that meet registers of the matrix, of many
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

// How rows of x are kept: as the halves of q, or as q, of each four columns in the order 0, 2, 1, 3: one row after the
// other, or TILE rows together, two columns of each and then the next two.
enum class Form { HALVES, ROWS, TILES };

// Rows of x: x ~ step_g q, q = 256 high + low; total_g is the sum of the values, offset_g 8 times that of q.
struct Rounded {
    int64_t rows, inner, groups;
    std::unique_ptr<int16_t[]> q;
    std::unique_ptr<int8_t[]> high, low;
    std::unique_ptr<float[]> step, total;
    std::unique_ptr<int32_t[]> offset;

    Rounded(int64_t rows, int64_t inner, Form form)
        : rows(rows), inner(inner), groups(inner / GROUP) {
        const int64_t room = (rows + TILE - 1) / TILE * TILE;
        if (form == Form::HALVES) high.reset(new int8_t[rows * inner]), low.reset(new int8_t[rows * inner]);
        else q.reset(new int16_t[room * inner]);
        step.reset(new float[room * groups]), total.reset(new float[room * groups]);
        offset.reset(new int32_t[rows * groups]);
    }

    Rounded(const uint16_t* x, int64_t rows, int64_t inner, Form form) : Rounded(rows, inner, form) {
#pragma omp parallel for schedule(static) if (rows > 8)
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t g = 0; g < groups; ++g) round(x + row * inner + GROUP * g, row, g, groups, form);
    }

    // Of the first of some rows in a tile: the place of its first two columns, and of its steps and totals.
    const int16_t* in_tile(int64_t row) const { return q.get() + at_tile(row, groups) * GROUP + row % TILE * 2; }
    int64_t of_tile(int64_t row) const { return at_tile(row, groups) + row % TILE; }
    static int64_t at_tile(int64_t row, int64_t groups) { return row / TILE * TILE * groups; }

    // `groups` of a row is given, because a thread of a step may come here before another has set ours.
    template <typename X>
    void round(const X* x, int64_t row, int64_t group, int64_t groups, Form form) {
        const bool tiles = form == Form::TILES;
        const int64_t g = row * groups + group, tile = at_tile(row, groups), at = tiles ? tile + row % TILE + group * TILE : g;
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
        const __m256i one = _mm256_set1_epi16(1);
        if (form == Form::HALVES) {
            const __m256i a = upper(first), b = upper(second), least = _mm256_set1_epi16(255);
            const __m256i c = _mm256_and_si256(first, least), d = _mm256_and_si256(second, least);
            _mm256_storeu_si256((__m256i*)(high.get() + GROUP * g), in_order(_mm256_packs_epi16(a, b)));
            _mm256_storeu_si256((__m256i*)(low.get() + GROUP * g), in_order(_mm256_packus_epi16(c, d)));
            offset[g] = 8 * sum(_mm256_add_epi32(_mm256_madd_epi16(first, one), _mm256_madd_epi16(second, one)));
        } else {
#if !WITH_NEON
            int16_t some[GROUP], *to = q.get() + (tiles ? (tile + TILE * group) * GROUP + row % TILE * 2 : GROUP * g);
            int16_t* in_row = tiles ? some : to;
            _mm256_storeu_si256((__m256i*)in_row, even_first(first));
            _mm256_storeu_si256((__m256i*)(in_row + 16), even_first(second));
            for (int64_t k = 0; tiles && k < GROUP; k += 2) std::memcpy(to + k * TILE, some + k, 4);
#endif
        }
        total[at] = sums;
        step[at] = end / MOST + 0 * sums;  // of what is no number, none
    }

#if !WITH_NEON
    static __m256i even_first(__m256i q) {
        return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(q, 0xd8), 0xd8);
    }
#endif
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

#if WITH_NEON
constexpr bool HALVES_8 = true;  // x of an 8-bit matrix is kept as its halves

// N rows of x from `row` on with one block of the matrix.
template <int N, typename Y>
inline void block_of_8_bits(
    const Rounded& in, int64_t row, const int8_t* w, const uint16_t* scales, Y* y, int64_t out
) {
    __m256 sums[N][2];
    for (int n = 0; n < N; ++n) sums[n][0] = sums[n][1] = _mm256_setzero_ps();
    const int8_t *x_high = in.high.get() + row * in.inner, *x_low = in.low.get() + row * in.inner;
    for (int64_t g = 0; g < in.groups; ++g, w += BLOCK * GROUP) {
        for (int k = 0; k < 8; ++k) soon(w + AHEAD_8 + 64 * k);
        for (int half = 0; half < 2; ++half) {
            Dots dots[N];
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                const __m256i a = _mm256_loadu_si256((const __m256i*)(w + 128 * k + 32 * half));
                const __m256i b = _mm256_loadu_si256((const __m256i*)(w + 128 * k + 64 + 32 * half));
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                    const int64_t at = n * in.inner + GROUP * g + 8 * k;
                    dots[n].add(a, b, x_high + at, x_low + at);
                }
            }
            for (int n = 0; n < N; ++n) {
                const __m256 step = _mm256_set1_ps(in.step[(row + n) * in.groups + g]);
                sums[n][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[n].sums()), step, sums[n][half]);
            }
        }
    }
    for (int n = 0; n < N; ++n)
        for (int half = 0; half < 2; ++half)
            store(y + (row + n) * out + 8 * half, _mm256_mul_ps(sums[n][half], from_bf16(scales + 8 * half)));
}
#else
constexpr bool HALVES_8 = false;

// Registers of 32-bit numbers, as wide as the processor has them, and PARTS of them for a block's 16 rows.
#if WITH_512
using Wide = __m512i;
using Reals = __m512;
inline Wide nothing() { return _mm512_setzero_si512(); }
inline Wide wide(const void* at) { return _mm512_loadu_si512(at); }
inline Wide every(int32_t a) { return _mm512_set1_epi32(a); }
inline Wide upper_bytes(Wide a) { return _mm512_srai_epi16(a, 8); }
inline Wide lower_bytes(Wide a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }
inline Reals reals(Wide a) { return _mm512_cvtepi32_ps(a); }
inline Reals zeros() { return _mm512_setzero_ps(); }
inline Reals every(float a) { return _mm512_set1_ps(a); }
inline Reals times(Reals a, Reals b) { return _mm512_mul_ps(a, b); }
inline Reals fused(Reals a, Reals b, Reals c) { return _mm512_fmadd_ps(a, b, c); }
inline Reals lower_16(Wide a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
inline Reals upper_16(Wide a) {
    return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(0xffff0000)));
}
inline Reals as_reals(Wide a) { return _mm512_castsi512_ps(a); }
inline void put(float* y, Reals a) { _mm512_storeu_ps(y, a); }
inline __m256 eight(Reals a, int64_t half) {
    const __m512i both = _mm512_castps_si512(a);
    return _mm256_castsi256_ps(half ? upper_half(both) : _mm512_castsi512_si256(both));
}
#else
using Wide = __m256i;
using Reals = __m256;
inline Wide nothing() { return _mm256_setzero_si256(); }
inline Wide wide(const void* at) { return _mm256_loadu_si256((const __m256i*)at); }
inline Wide every(int32_t a) { return _mm256_set1_epi32(a); }
inline Wide upper_bytes(Wide a) { return _mm256_srai_epi16(a, 8); }
inline Wide lower_bytes(Wide a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
inline Reals reals(Wide a) { return _mm256_cvtepi32_ps(a); }
inline Reals zeros() { return _mm256_setzero_ps(); }
inline Reals every(float a) { return _mm256_set1_ps(a); }
inline Reals times(Reals a, Reals b) { return _mm256_mul_ps(a, b); }
inline Reals fused(Reals a, Reals b, Reals c) { return _mm256_fmadd_ps(a, b, c); }
inline Reals lower_16(Wide a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
inline Reals upper_16(Wide a) {
    return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(0xffff0000)));
}
inline Reals as_reals(Wide a) { return _mm256_castsi256_ps(a); }
inline void put(float* y, Reals a) { _mm256_storeu_ps(y, a); }
inline __m256 eight(Reals a, int64_t) { return a; }
#endif
constexpr int64_t LANES = sizeof(Wide) / 4, PARTS = BLOCK / LANES;

// Two columns of a row of x for each lane, and sums of products with two of each row of the matrix, of 16 bits.
inline Wide pair(const int16_t* x) { return every(together((const int8_t*)x)); }
inline Wide add_pairs(Wide sums, Wide w, Wide x) {
#if WITH_512
    sums = _mm512_dpwssd_epi32(sums, w, x);
#elif WITH_VNNI
    sums = _mm256_dpwssd_avx_epi32(sums, w, x);
#else
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(w, x));
#endif
#ifndef IMAGINED
    asm("" : "+v"(sums));  // one after the other, each in the register of the one before
#endif
    return sums;
}

template <typename Y>
inline void store_all(Y* y, Reals sums, const uint16_t* scales) {
    for (int64_t at = 0; at < LANES; at += 8) {
        const __m256 some = eight(sums, at / 8);
        store(y + at, scales ? _mm256_mul_ps(some, from_bf16(scales + at)) : some);
    }
}

// N rows of x from `row` on with one block of the matrix.
template <int N, typename Y>
inline void block_of_8_bits(
    const Rounded& in, int64_t row, const int8_t* w, const uint16_t* scales, Y* y, int64_t out
) {
    Reals sums[N][PARTS];
    for (int n = 0; n < N; ++n)
        for (int64_t part = 0; part < PARTS; ++part) sums[n][part] = zeros();
    const int16_t* x = in.q.get() + row * in.inner;
    for (int64_t g = 0; g < in.groups; ++g, x += GROUP, w += BLOCK * GROUP) {
        for (int k = 0; k < 8; ++k) soon(w + AHEAD_8 + 64 * k);
        Wide dots[N][PARTS];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
            for (int64_t part = 0; part < PARTS; ++part) dots[n][part] = nothing();
#pragma GCC unroll 8
        for (int64_t k = 0; k < GROUP; k += 4)
#pragma GCC unroll 2
            for (int64_t part = 0; part < PARTS; ++part) {
                const Wide four = wide(w + BLOCK * k + 4 * LANES * part);
                const Wide even = lower_bytes(four), odd = upper_bytes(four);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                    dots[n][part] = add_pairs(dots[n][part], even, pair(x + n * in.inner + k));
                    dots[n][part] = add_pairs(dots[n][part], odd, pair(x + n * in.inner + k + 2));
                }
            }
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const Reals step = every(in.step[(row + n) * in.groups + g]);
#pragma GCC unroll 2
            for (int64_t part = 0; part < PARTS; ++part) sums[n][part] = fused(reals(dots[n][part]), step, sums[n][part]);
        }
    }
    for (int n = 0; n < N; ++n)
        for (int64_t part = 0; part < PARTS; ++part)
            store_all(y + (row + n) * out + LANES * part, sums[n][part], scales + LANES * part);
}

// Tiles: N rows of x with two registers of rows of the matrix, which are widened to 16 bits once for many rows. The
// same sums as those of blocks, in the same order.
constexpr int64_t SIDE = 2 * LANES;  // rows of the matrix in a tile

// Rows first .. first + SIDE of a 4-bit matrix, less 8, as (inner/2, SIDE, 2), of each four columns in the order 0, 2,
// 1, 3; zeros for rows that it lacks.
inline void widened_of_4_bits(const uint8_t* packed, int64_t first, int64_t o, int64_t inner, int16_t* made) {
    const __m256i nibble = _mm256_set1_epi8(15), least = _mm256_set1_epi16(255), eights = _mm256_set1_epi16(8);
    for (int64_t i = 0; i < inner; i += 8, made += 8 * SIDE)
        for (int64_t at = 0; at < SIDE; at += 8) {
            const int64_t row = first + at;
            const uint8_t* w = packed + (row / BLOCK * inner + i) * BLOCK / 2 + row % BLOCK * 4;
            const __m256i both = row < o ? _mm256_loadu_si256((const __m256i*)w) : _mm256_set1_epi8(-120);  // twice 8
            const __m256i a = _mm256_and_si256(both, nibble), b = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
            const __m256i pairs[4] = {
                _mm256_and_si256(a, least), _mm256_srli_epi16(a, 8), _mm256_and_si256(b, least), _mm256_srli_epi16(b, 8)};
            for (int64_t k = 0; k < 4; ++k)
                _mm256_storeu_si256((__m256i*)(made + (k * SIDE + at) * 2), _mm256_sub_epi16(pairs[k], eights));
        }
}

// Likewise of an 8-bit matrix.
inline void widened_of_8_bits(const int8_t* packed, int64_t first, int64_t o, int64_t inner, int16_t* made) {
    for (int64_t i = 0; i < inner; i += 4, made += 4 * SIDE)
        for (int64_t at = 0; at < SIDE; at += 8) {
            const int64_t row = first + at;
            const int8_t* w = packed + (row / BLOCK * inner + i) * BLOCK + row % BLOCK * 4;
            const __m256i four = row < o ? _mm256_loadu_si256((const __m256i*)w) : _mm256_setzero_si256();
            const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), odd = _mm256_srai_epi16(four, 8);
            _mm256_storeu_si256((__m256i*)(made + at * 2), even);
            _mm256_storeu_si256((__m256i*)(made + (SIDE + at) * 2), odd);
        }
}

// N rows of x from `row` on, all in a tile, with `filled` rows of the matrix, whose first scales are `scales`.
template <int BITS, int N, typename Y>
inline void tile(
    const Rounded& in, int64_t row, const int16_t* w, const uint16_t* scales, Y* y, int64_t out, int64_t filled
) {
    const int64_t known = filled / LANES, next = LANES == BLOCK ? 2 * BLOCK * in.groups : 2 * LANES;  // of 4 bits
    const int16_t* x = in.in_tile(row);
    const float *steps = in.step.get() + in.of_tile(row), *totals = in.total.get() + in.of_tile(row);
    alignas(64) float sums[N][2][LANES] = {};  // in memory: the registers are full
    for (int64_t g = 0; g < in.groups; ++g, x += GROUP * TILE, steps += TILE, totals += TILE) {
        Wide dots[N][2];
#pragma GCC unroll 12
        for (int n = 0; n < N; ++n) dots[n][0] = dots[n][1] = nothing();
#pragma GCC unroll 16
        for (int64_t k = 0; k < GROUP; k += 2, w += 2 * SIDE) {
            const Wide one = wide(w), other = wide(w + 2 * LANES);
#pragma GCC unroll 12
            for (int n = 0; n < N; ++n) {
                const Wide two = pair(x + k * TILE + 2 * n);
                dots[n][0] = add_pairs(dots[n][0], one, two);
                dots[n][1] = add_pairs(dots[n][1], other, two);
            }
        }
#pragma GCC unroll 2
        for (int64_t part = 0; part < 2; ++part) {
            const Wide both = BITS == 4 && part < known ? wide(scales + 2 * BLOCK * g + next * part) : nothing();
            const Reals s = lower_16(both), z = upper_16(both);
#pragma GCC unroll 12
            for (int n = 0; n < N; ++n) {
                const Reals dot = reals(dots[n][part]), step = every(steps[n]), before = as_reals(wide(sums[n][part]));
                if constexpr (BITS == 4)
                    put(sums[n][part], fused(s, times(dot, step), fused(z, every(totals[n]), before)));
                else
                    put(sums[n][part], fused(dot, step, before));
            }
        }
    }
    for (int n = 0; n < N; ++n)
        for (int64_t part = 0; part < known; ++part)
            store_all(y + (row + n) * out + LANES * part, as_reals(wide(sums[n][part])),
                      BITS == 8 ? scales + LANES * part : nullptr);
}

// The rows from `first` up to `end`, all in a tile.
template <int BITS, int N = TILE, typename Y>
inline void tiles(
    const Rounded& in, int64_t first, int64_t end, const int16_t* w, const uint16_t* scales, Y* y, int64_t out,
    int64_t filled
) {
    for (; first + N <= end; first += N) tile<BITS, N>(in, first, w, scales, y, out, filled);
    if constexpr (N > 1)
        if (first < end) tiles<BITS, N == 12 ? 8 : N == 6 ? 4 : N / 2>(in, first, end, w, scales, y, out, filled);
}
#endif

struct alignas(64) Line {  // of the cache
    int16_t of[32];
};

constexpr int64_t AT_ONCE = 128;  // rows of the matrix that are widened before the rows of x meet them

// How a product with a matrix of BITS bits is divided: into units of its rows, which any thread may compute.
template <int BITS>
struct Matrix {
    const void* packed;
    const uint16_t* scales;
    int64_t inner, out;
    // Rows of x from which on the matrix is widened for tiles.
    static constexpr int64_t MANY = WITH_NEON ? INT64_MAX : BITS == 8 ? (WITH_512 ? 20 : 32) : WITH_512 ? 24 : 16;

    static Form form(int64_t rows) {
        return rows >= MANY ? Form::TILES : BITS == 4 || HALVES_8 ? Form::HALVES : Form::ROWS;
    }
#if WITH_NEON
    static int64_t unit(int64_t) { return BLOCK; }
#else
    static int64_t unit(int64_t rows) { return rows < MANY ? BLOCK : SIDE; }
#endif
    static int64_t units(int64_t rows, int64_t out) { return (out + unit(rows) - 1) / unit(rows); }
    static int64_t room(int64_t rows, int64_t inner) { return rows < MANY ? 0 : AT_ONCE * inner / 32; }

    // The rows of x from `from` up to `to` with units first .. end-1; `width` is that of y, and `room` lines at `lines`
    // are there to be used.
    template <typename Y>
    void product(
        const Rounded& in, int64_t from, int64_t to, int64_t first, int64_t end, Y* y, int64_t width, Line* lines
    ) const {
        const int64_t of_row = BITS == 4 ? 2 * in.groups : 1;
        int16_t* wide = lines->of;
#if !WITH_NEON
        for (; in.rows >= MANY && first < end; first += AT_ONCE / SIDE) {
            const int64_t last = std::min(end, first + AT_ONCE / SIDE);
            for (int64_t at = first; at < last; ++at) {
                int16_t* made = wide + (at - first) * SIDE * inner;
                if constexpr (BITS == 4) widened_of_4_bits((const uint8_t*)packed, at * SIDE, out, inner, made);
                else widened_of_8_bits((const int8_t*)packed, at * SIDE, out, inner, made);
            }
            for (int64_t row = from, next; row < to; row = next) {
                next = std::min((row / TILE + 1) * TILE, to);
                for (int64_t at = first, of = at * SIDE; at < last; ++at, of += SIDE)
                    tiles<BITS>(in, row, next, wide + (at - first) * SIDE * inner, scales + of_row * of, y + of, width,
                                std::min(SIDE, out - of));
            }
        }
#endif
        for (int64_t some = from; some < to; some += ROWS)
            for (int64_t at = first; at < end; ++at) {
                const int64_t last = std::min(some + ROWS, to);
                const uint8_t* w = (const uint8_t*)packed + at * BLOCK * inner * BITS / 8;
                const uint16_t* s = scales + of_row * BLOCK * at;
                int64_t row = some;
                for (; row + 4 <= last; row += 4) block<4>(in, row, w, s, y + BLOCK * at, width);
                for (; row < last; ++row) block<1>(in, row, w, s, y + BLOCK * at, width);
            }
    }

    template <int N, typename Y>
    static void block(const Rounded& in, int64_t row, const uint8_t* w, const uint16_t* s, Y* y, int64_t width) {
        if constexpr (BITS == 4) block_of_4_bits<N>(in, row, w, s, y, width);
        else block_of_8_bits<N>(in, row, (const int8_t*)w, s, y, width);
    }
};

// Of 4 bits: packed (o/16, i/8, 16, 4), a byte holds column c (low) and c + 4 of eight; scales (o/16, groups, 16, 2)
// bf16, s and z; w = (q - 8) s + z. Of 8 bits: packed (o/16, i/4, 16, 4), scales (o,) bf16; w = q s.
template <int BITS>
inline void of_bits(
    const uint16_t* x, const void* packed, const uint16_t* scales, uint16_t* y, int64_t rows, int64_t inner, int64_t out
) {
    using Kind = Matrix<BITS>;
    const Kind matrix{packed, scales, inner, out};
    const Rounded in(x, rows, inner, Kind::form(rows));
    const int64_t threads = omp_get_max_threads(), room = Kind::room(rows, inner), units = Kind::units(rows, out);
    const std::unique_ptr<Line[]> lines(new Line[threads * room]);
#pragma omp parallel num_threads(threads)
    {
        const int64_t me = omp_get_thread_num(), of = omp_get_num_threads();
        matrix.product(in, 0, rows, units * me / of, units * (me + 1) / of, y, out, lines.get() + me * room);
    }
}

#ifdef IN_A_STEP
using Product = void(const uint16_t*, const void*, const uint16_t*, uint16_t*, int64_t, int64_t, int64_t);

inline AOTITorchError into(
    Product product, AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle scales, AtenTensorHandle* made
) {
    void *in, *w, *s, *y;
    int64_t shape[2] = {0, 0}, inner;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(x, 0, &shape[0]));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(x, 1, &inner));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(packed, 0, &shape[1]));
    shape[1] *= BLOCK;
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
    return few_rows::into(few_rows::of_bits<4>, x, packed, scales, made);
}

AOTITorchError aoti_torch_cpu_few_rows_of_8_bits(
    AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle scales, AtenTensorHandle* made
) {
    return few_rows::into(few_rows::of_bits<8>, x, packed, scales, made);
}
#else
void few_rows_of_4_bits(
    const uint16_t* x, const void* packed, const uint16_t* scales, uint16_t* y, int64_t rows, int64_t inner, int64_t out
) {
    few_rows::of_bits<4>(x, packed, scales, y, rows, inner, out);
}

void few_rows_of_8_bits(
    const uint16_t* x, const void* packed, const uint16_t* scales, uint16_t* y, int64_t rows, int64_t inner, int64_t out
) {
    few_rows::of_bits<8>(x, packed, scales, y, rows, inner, out);
}
#endif
}
#endif
