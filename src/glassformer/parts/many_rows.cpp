// Products of many rows x (n, i) with a matrix in bf16, for processors with AVX2, or ARM, that are slow in bf16: in fp32, of a
// matrix that is widened 16 rows at a time. `many_rows.py` has the definition, tests/native/many_rows.cpp the same sums
// written plainly. Each sum runs over the columns in their order, whatever the other rows and the threads are.

#define INCLUDED
#include "few_rows.cpp"
#include "vectors.h"

#include <omp.h>

namespace many_rows {

using few_rows::BLOCK;
using few_rows::load;
using few_rows::number;
using few_rows::store;
using vectors::turned;

// Rows of x that meet 16 widened rows of the matrix, which then come from the nearest cache, before the next 16.
constexpr int64_t TOGETHER = 96;

// Up to 16 rows of W (o, inner) from `first` on, as (inner, 16), filled up with zeros.
inline void widened(const uint16_t* w, int64_t first, int64_t o, int64_t inner, float* made) {
    const int64_t rows = std::min(BLOCK, o - first);
    int64_t i = 0;
    for (; i + 8 <= inner; i += 8)
        for (int half = 0; half < 2; ++half) {
            __m256 some[8];
            for (int r = 0; r < 8; ++r)
                some[r] = 8 * half + r < rows ? load(w + (first + 8 * half + r) * inner + i) : _mm256_setzero_ps();
            turned(some);
            for (int k = 0; k < 8; ++k) _mm256_storeu_ps(made + (i + k) * BLOCK + 8 * half, some[k]);
        }
    for (; i < inner; ++i)
        for (int64_t r = 0; r < BLOCK; ++r) made[i * BLOCK + r] = r < rows ? number(w + (first + r) * inner + i) : 0;
}

// 16 sums, those of a row of x with 16 widened rows.
#if WITH_512
constexpr int64_t TILE = 12;
struct Sums {
    __m512 all = _mm512_setzero_ps();

    void add(float x, const float* w) { all = _mm512_fmadd_ps(_mm512_set1_ps(x), _mm512_loadu_ps(w), all); }
    void save(uint16_t* y) const { few_rows::store_all(y, all, nullptr); }
};
#else
constexpr int64_t TILE = 6;
struct Sums {
    __m256 one = _mm256_setzero_ps(), other = _mm256_setzero_ps();

    void add(float x, const float* w) {
        one = _mm256_fmadd_ps(_mm256_set1_ps(x), load(w), one);
        other = _mm256_fmadd_ps(_mm256_set1_ps(x), load(w + 8), other);
    }
    void save(uint16_t* y) const { store(y, one), store(y + 8, other); }
};
#endif

// N rows of x with 16 widened rows: each sum in the order of the columns.
template <int N>
inline void tile(const float* x, const float* w, int64_t inner, uint16_t* y, int64_t out, int64_t filled) {
    Sums sums[N];  // in registers, if each loop over them is unrolled
    for (int64_t i = 0; i < inner; ++i) {
#pragma GCC unroll 12
        for (int n = 0; n < N; ++n) sums[n].add(x[n * inner + i], w + BLOCK * i);
    }
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) {
        uint16_t made[BLOCK];
        sums[n].save(made);
        std::memcpy(y + n * out, made, 2 * filled);
    }
}

// The rows from `row` up to `end`, N at a time, and what is left.
template <int N>
inline void tiles(
    const float* x, int64_t row, int64_t end, const float* w, int64_t inner, uint16_t* y, int64_t out, int64_t filled
) {
    for (; row + N <= end; row += N) tile<N>(x + row * inner, w, inner, y + row * out, out, filled);
    if constexpr (N > 1)
        if (row < end) tiles<N / 2>(x, row, end, w, inner, y, out, filled);
}

// W (out, inner).
inline void of_16_bits(
    const uint16_t* x, const uint16_t* w, uint16_t* y, int64_t rows, int64_t inner, int64_t out
) {
    const int64_t total = rows * inner, blocks = (out + BLOCK - 1) / BLOCK, threads = omp_get_max_threads();
    std::unique_ptr<float[]> wide(new float[total + threads * BLOCK * inner]);
#pragma omp parallel num_threads(threads)
    {
        float* block = wide.get() + total + omp_get_thread_num() * BLOCK * inner;
#pragma omp for schedule(static)
        for (int64_t k = 0; k < total / 8; ++k) store(wide.get() + 8 * k, load(x + 8 * k));
#pragma omp single
        for (int64_t k = total / 8 * 8; k < total; ++k) wide[k] = number(x + k);
        for (int64_t first = 0; first < rows; first += TOGETHER) {
            const int64_t end = std::min(first + TOGETHER, rows);
#pragma omp for schedule(static) nowait
            for (int64_t at = 0; at < blocks; ++at) {
                widened(w, BLOCK * at, out, inner, block);
                const int64_t filled = std::min(BLOCK, out - BLOCK * at);
                tiles<TILE>(wide.get(), first, end, block, inner, y + BLOCK * at, out, filled);
            }
        }
    }
}

}  // namespace many_rows

extern "C" {
// 0; 1 without memory.
int32_t product_of_many_rows(
    const uint16_t* x, const uint16_t* w, uint16_t* y, int64_t rows, int64_t inner, int64_t out
) {
    try {
        many_rows::of_16_bits(x, w, y, rows, inner, out);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
}
