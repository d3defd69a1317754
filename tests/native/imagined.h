// Instructions of AVX-VNNI and AVX512-VNNI as functions, for processors that lack them: a register of 512 bits is two
// of 256.

#include <immintrin.h>
#include <cstdint>
#include <cstring>

namespace imagined {

[[gnu::noinline]] inline __m256i bytes(__m256i sums, __m256i w, __m256i x) {
    int32_t s[8];
    uint8_t a[32];
    int8_t b[32];
    std::memcpy(s, &sums, 32), std::memcpy(a, &w, 32), std::memcpy(b, &x, 32);
    for (int k = 0; k < 32; ++k) s[k / 4] += a[k] * b[k];
    return _mm256_loadu_si256((const __m256i*)s);
}

[[gnu::noinline]] inline __m256i pairs(__m256i sums, __m256i w, __m256i x) {
    int32_t s[8];
    int16_t a[16], b[16];
    std::memcpy(s, &sums, 32), std::memcpy(a, &w, 32), std::memcpy(b, &x, 32);
    for (int k = 0; k < 16; ++k) s[k / 2] += a[k] * b[k];
    return _mm256_loadu_si256((const __m256i*)s);
}

struct Whole {
    __m256i one, other;
};
struct Real {
    __m256 one, other;
};

inline Whole loaded(const void* from) {
    const __m256i* halves = (const __m256i*)from;
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline void stored(float* to, Real a) { _mm256_storeu_ps(to, a.one), _mm256_storeu_ps(to + 8, a.other); }
inline Real as_real(Whole a) { return {_mm256_castsi256_ps(a.one), _mm256_castsi256_ps(a.other)}; }
inline Whole as_whole(Real a) { return {_mm256_castps_si256(a.one), _mm256_castps_si256(a.other)}; }
inline Real real(Whole a) { return {_mm256_cvtepi32_ps(a.one), _mm256_cvtepi32_ps(a.other)}; }
template <typename R, typename F, typename A, typename... More>
inline R both(F f, A a, More... more) {
    return {f(a.one, more.one...), f(a.other, more.other...)};
}

}  // namespace imagined

#undef _mm256_dpbusd_epi32
#define _mm256_dpbusd_avx_epi32 imagined::bytes
#define _mm256_dpwssd_avx_epi32 imagined::pairs
#define _mm256_dpbusd_epi32 imagined::bytes
#define __m512i imagined::Whole
#define __m512 imagined::Real
#define IN_HALVES(R, f, ...) imagined::both<imagined::R>([=](auto... x) { return f(x...); }, __VA_ARGS__)
#define _mm512_loadu_si512 imagined::loaded
#define _mm512_storeu_ps imagined::stored
#define _mm512_set1_epi8(x) imagined::Whole{_mm256_set1_epi8(x), _mm256_set1_epi8(x)}
#define _mm512_set1_epi32(x) imagined::Whole{_mm256_set1_epi32(x), _mm256_set1_epi32(x)}
#define _mm512_set1_ps(x) imagined::Real{_mm256_set1_ps(x), _mm256_set1_ps(x)}
#define _mm512_setzero_ps() imagined::Real{_mm256_setzero_ps(), _mm256_setzero_ps()}
#define _mm512_setzero_si512() imagined::Whole{_mm256_setzero_si256(), _mm256_setzero_si256()}
#define _mm512_and_si512(a, b) IN_HALVES(Whole, _mm256_and_si256, a, b)
#define _mm512_add_epi32(a, b) IN_HALVES(Whole, _mm256_add_epi32, a, b)
#define _mm512_sub_epi32(a, b) IN_HALVES(Whole, _mm256_sub_epi32, a, b)
#define _mm512_dpbusd_epi32(a, b, c) IN_HALVES(Whole, imagined::bytes, a, b, c)
#define _mm512_dpwssd_epi32(a, b, c) IN_HALVES(Whole, imagined::pairs, a, b, c)
#define _mm512_mul_ps(a, b) IN_HALVES(Real, _mm256_mul_ps, a, b)
#define _mm512_fmadd_ps(a, b, c) IN_HALVES(Real, _mm256_fmadd_ps, a, b, c)
#define _mm512_srli_epi16(a, n) imagined::both<imagined::Whole>([](__m256i x) { return _mm256_srli_epi16(x, n); }, a)
#define _mm512_slli_epi32(a, n) imagined::both<imagined::Whole>([](__m256i x) { return _mm256_slli_epi32(x, n); }, a)
#define _mm512_slli_epi16(a, n) imagined::both<imagined::Whole>([](__m256i x) { return _mm256_slli_epi16(x, n); }, a)
#define _mm512_srai_epi16(a, n) imagined::both<imagined::Whole>([](__m256i x) { return _mm256_srai_epi16(x, n); }, a)
#define _mm512_castsi512_ps imagined::as_real
#define _mm512_castps_si512 imagined::as_whole
#define _mm512_cvtepi32_ps imagined::real
#define _mm512_castsi512_si256(a) (a).one
#define _mm512_extracti64x4_epi64(a, n) (a).other
