// Functions of vectors of eight numbers, of AVX2's instructions or their twins in `neon.h`, and of sixteen with AVX-512.

#pragma once

namespace vectors {

// e^x to 2 units in the last place; NaN stays, what is below -87 gives about 1e-38, above 88 about 2e38.
inline __m256 exponential(__m256 x) {
    const __m256 least = _mm256_set1_ps(-87.33654f), most = _mm256_set1_ps(88.37f);
    x = _mm256_min_ps(most, _mm256_max_ps(least, x));
    const __m256 n = _mm256_round_ps(
        _mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    p = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(p, r), r, r), _mm256_set1_ps(1));
    const __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));  // 1 .. 254
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(power, 23)));
}

#if WITH_512
// The same bits, of sixteen numbers.
inline __m512 exponential(__m512 x) {
    const __m512 least = _mm512_set1_ps(-87.33654f), most = _mm512_set1_ps(88.37f);
    x = _mm512_min_ps(most, _mm512_max_ps(least, x));
    const __m512 n = _mm512_roundscale_ps(
        _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1));
    return _mm512_scalef_ps(p, n);
}

inline __m512 sigmoid(__m512 x) {
    const __m512 one = _mm512_set1_ps(1);
    return _mm512_div_ps(one, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}
#endif

inline __m256 sigmoid(__m256 x) {
    const __m256 one = _mm256_set1_ps(1);
    return _mm256_div_ps(one, _mm256_add_ps(one, exponential(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

// From 8 vectors of 8, one for each row, to one for each column.
inline void turned(__m256 a[8]) {
    __m256 b[8];
    for (int k = 0; k < 4; ++k) {
        b[2 * k] = _mm256_unpacklo_ps(a[2 * k], a[2 * k + 1]);
        b[2 * k + 1] = _mm256_unpackhi_ps(a[2 * k], a[2 * k + 1]);
    }
    for (int k = 0; k < 8; k += 4)
        for (int one = 0; one < 2; ++one) {
            a[k + 2 * one] = _mm256_shuffle_ps(b[k + one], b[k + one + 2], 0x44);
            a[k + 2 * one + 1] = _mm256_shuffle_ps(b[k + one], b[k + one + 2], 0xee);
        }
    for (int k = 0; k < 4; ++k) {
        b[k] = _mm256_permute2f128_ps(a[k], a[k + 4], 0x20);
        b[k + 4] = _mm256_permute2f128_ps(a[k], a[k + 4], 0x31);
    }
    for (int k = 0; k < 8; ++k) a[k] = b[k];
}

}  // namespace vectors
