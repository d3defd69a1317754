// Products of rows in fp32, each with the matrix of its group, and their gradients, for groups of few rows: each matrix is
// read once, as it is stored, and its gradient is written once. `grouped_rows.py` has the definitions. Every number is computed
// by one thread in one order, so that the bits depend neither on the number of threads nor on the other rows.

#define INCLUDED
#include "few_rows.cpp"

namespace grouped {

using few_rows::load;
using few_rows::store;

#ifndef SAME
#define SAME
#endif
#ifndef HINT
#define HINT 3
#endif
#ifndef STREAM
#define STREAM 1
#endif

constexpr int64_t QUAD = 4;           // rows of a matrix that meet a row together
constexpr int64_t OUT = 64;           // rows of a matrix that a thread takes at once
#ifndef WIDTH
#define WIDTH 256
#endif
constexpr int64_t WIDE = WIDTH;        // and columns
#ifndef DEPTH
#define DEPTH 32
#endif
constexpr int64_t DEEP = DEPTH;         // rows of a matrix that meet all rows before the next ones do
constexpr int64_t PANEL = 16;         // columns of a product in registers

#if WITH_512
constexpr int64_t LANES = 16, TALL = 6;
using Vector = __m512;
inline Vector get(const float* x) { return _mm512_loadu_ps(x); }
inline Vector all(float x) { return _mm512_set1_ps(x); }
inline Vector none() { return _mm512_setzero_ps(); }
inline Vector fused(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline void put(float* y, Vector x) { _mm512_storeu_ps(y, x); }
inline void put_past(float* y, Vector x) { _mm512_stream_ps(y, x); }
inline __m256 half(Vector x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1))); }
constexpr int64_t TILE = 12;
#else
constexpr int64_t LANES = 8, TALL = 3;
using Vector = __m256;
inline Vector get(const float* x) { return load(x); }
inline Vector all(float x) { return _mm256_set1_ps(x); }
inline Vector none() { return _mm256_setzero_ps(); }
inline Vector fused(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline void put(float* y, Vector x) { store(y, x); }
inline void put_past(float* y, Vector x) { _mm256_stream_ps(y, x); }
inline __m256 half(Vector x) { return x; }
constexpr int64_t TILE = 6;
#endif
constexpr int64_t PARTS = PANEL / LANES;

// The sum of each of four vectors.
inline __m128 sums(Vector a, Vector b, Vector c, Vector d) {
    const __m256 p = half(a), q = half(b), r = half(c), s = half(d);
    const __m256 one = _mm256_add_ps(_mm256_unpacklo_ps(p, q), _mm256_unpackhi_ps(p, q));
    const __m256 other = _mm256_add_ps(_mm256_unpacklo_ps(r, s), _mm256_unpackhi_ps(r, s));
    const __m256 both = _mm256_add_ps(_mm256_shuffle_ps(one, other, 0x44), _mm256_shuffle_ps(one, other, 0xee));
    return _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
}

// f<N>(first) for 0 .. count in runs of N <= MOST rows, as even as possible.
template <int N, typename F>
inline void run(int64_t rows, int64_t first, F& f) {
    if constexpr (N > 1)
        if (rows < N) return run<N - 1>(rows, first, f);
    f.template operator()<N>(first);
}
template <int MOST, typename F>
inline void in_runs(int64_t count, F f) {
    const int64_t runs = (count + MOST - 1) / MOST;
    for (int64_t k = 0, first = 0; k < runs; ++k) {
        const int64_t last = count * (k + 1) / runs;
        run<MOST>(last - first, first, f);
        first = last;
    }
}

// y (N, count <= 4) = x (N, i) times up to four rows of a matrix (o, i) each.
template <int N>
inline void dots(const float* x, const float* const (&w)[QUAD], int64_t inner, float* y, int64_t out, int64_t count, const float* soon, int64_t step) {
    Vector s[N][QUAD];
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n)
        for (int q = 0; q < QUAD; ++q) s[n][q] = none();
    int64_t i = 0;
    for (; i + LANES <= inner; i += LANES) {
        for (int64_t p = 0; p < step; p += 16) __builtin_prefetch(soon + p, 0, HINT);
        soon += step;
        Vector part[QUAD];
#pragma GCC unroll 4
        for (int q = 0; q < QUAD; ++q) part[q] = get(w[q] + i);
#pragma GCC unroll 12
        for (int n = 0; n < N; ++n) {
            const Vector own = get(x + n * inner + i);
#pragma GCC unroll 4
            for (int q = 0; q < QUAD; ++q) s[n][q] = fused(own, part[q], s[n][q]);
        }
    }
    if (i < inner) {
        float rest[QUAD][LANES] = {}, own[LANES] = {};
        for (int q = 0; q < QUAD; ++q) std::memcpy(rest[q], w[q] + i, 4 * (inner - i));
#pragma GCC unroll 12
        for (int n = 0; n < N; ++n) {
            std::memcpy(own, x + n * inner + i, 4 * (inner - i));
#pragma GCC unroll 4
            for (int q = 0; q < QUAD; ++q) s[n][q] = fused(get(own), get(rest[q]), s[n][q]);
        }
    }
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) {
        const __m128 made = sums(s[n][0], s[n][1], s[n][2], s[n][3]);
        if (count == QUAD) {
            _mm_storeu_ps(y + n * out, made);
        } else {
            float some[4];
            _mm_storeu_ps(some, made);
            std::memcpy(y + n * out, some, 4 * count);
        }
    }
}

// (N, 16) of c = or += a @ b: number k of row n of a is a[n * a_row + k * a_k], of b (K, 16) with b_row.
template <int N, bool PAST, bool KEEP = false>
inline void tile(
    const float* a, int64_t a_row, int64_t a_k, const float* b, int64_t b_row, int64_t K, float* c, int64_t c_row, bool add,
    int64_t ahead, float* keep = nullptr
) {
    Vector s[N][PARTS];
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; ++p) s[n][p] = add ? get(c + n * c_row + p * LANES) : none();
    for (int64_t k = 0; k < K; ++k) {
        Vector panel[PARTS];
#if 1
        if (KEEP) __builtin_prefetch(b + k * b_row + ahead, 0, HINT);
#endif
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; ++p) {
            panel[p] = get(b + k * b_row + p * LANES);
            if constexpr (KEEP) put(keep + k * PANEL + p * LANES, panel[p]);
        }
#pragma GCC unroll 12
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
            for (int p = 0; p < PARTS; ++p) s[n][p] = fused(all(a[n * a_row + k * a_k]), panel[p], s[n][p]);
    }
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; ++p) {
            if constexpr (PAST) put_past(c + n * c_row + p * LANES, s[n][p]);
            else put(c + n * c_row + p * LANES, s[n][p]);
        }
}

// The last columns, fewer than 16.
template <int N>
inline void rest(
    const float* a, int64_t a_row, int64_t a_k, const float* b, int64_t b_row, int64_t K, float* c, int64_t c_row, bool add,
    int64_t columns
) {
    float some[DEEP * PANEL] = {}, made[N * PANEL] = {};
    if (add)
        for (int n = 0; n < N; ++n) std::memcpy(made + n * PANEL, c + n * c_row, 4 * columns);
    for (int64_t k = 0; k < K; k += DEEP) {
        const int64_t deep = std::min(DEEP, K - k);
        for (int64_t j = 0; j < deep; ++j) std::memcpy(some + j * PANEL, b + (k + j) * b_row, 4 * columns);
        tile<N, false>(a + k * a_k, a_row, a_k, some, PANEL, deep, made, PANEL, true, 0);
    }
    for (int n = 0; n < N; ++n) std::memcpy(c + n * c_row, made + n * PANEL, 4 * columns);
}

// y (rows, o) of rows x (rows, i) and rows from .. to-1 of a matrix (o, i).
inline void forward(const float* x, const float* w, float* y, int64_t rows, int64_t inner, int64_t out, int64_t from, int64_t to) {
    for (int64_t o = from; o < to; o += QUAD) {
        const float* own[QUAD];
        for (int64_t q = 0; q < QUAD; ++q) own[q] = w + std::min(o + q, to - 1) * inner;
        const int64_t step = o + 2 * QUAD <= to ? QUAD * LANES / ((rows + TALL - 1) / TALL) : 0;
        const float* soon = w + (o + QUAD) * inner;
        in_runs<TALL>(rows, [&]<int N>(int64_t n) {
            dots<N>(x + n * inner, own, inner, y + n * out + o, out, std::min(QUAD, to - o), soon, step);
            soon += step * (inner / LANES);
        });
    }
}

// Columns from .. to-1 of the gradient (rows, i) of x, from that of y (rows, o). `room`: rows * (WIDE + DEEP) numbers.
inline void backward(
    const float* grad, const float* w, float* y, int64_t rows, int64_t inner, int64_t out, int64_t from, int64_t to, float* room
) {
    alignas(64) float kept[DEEP * PANEL];
    float *own = room, *some = room + rows * WIDE;  // panels (rows, 16) of the result; DEEP columns of grad
    for (int64_t k = 0; k < out; k += DEEP) {
        const int64_t deep = std::min(DEEP, out - k), ahead = k + 2 * DEEP <= out ? DEEP * inner : 0;
        for (int64_t n = 0; n < rows; ++n) std::memcpy(some + n * DEEP, grad + n * out + k, 4 * deep);
        for (int64_t c = from; c < to; c += PANEL) {
            const float* b = w + k * inner + c;
            float* panel = own + (c - from) * rows;
            const bool whole = to - c >= PANEL;
            if (!whole)
                for (int64_t j = 0; j < deep; ++j) {
                    std::memset(kept + j * PANEL, 0, 4 * PANEL);
                    std::memcpy(kept + j * PANEL, b + j * inner, 4 * (to - c));
                }
            in_runs<TILE>(rows, [&]<int N>(int64_t n) {
                if (n || !whole) tile<N, false>(some + n * DEEP, DEEP, 1, kept, PANEL, deep, panel + n * PANEL, PANEL, k > 0, 0);
                else tile<N, false, true>(some, DEEP, 1, b, inner, deep, panel, PANEL, k > 0, ahead, kept);
            });
        }
    }
    for (int64_t c = from; c < to; c += PANEL)
        for (int64_t n = 0; n < rows; ++n)
            std::memcpy(y + n * inner + c, own + (c - from) * rows + n * PANEL, 4 * std::min(PANEL, to - c));
}

// Rows from .. to-1 of the gradient (o, i) of a matrix.
inline void outer(const float* grad, const float* x, float* w, int64_t rows, int64_t inner, int64_t out, int64_t from, int64_t to) {
    const bool past = STREAM && inner % LANES == 0 && uintptr_t(w) % (4 * LANES) == 0;
    in_runs<TILE>(to - from, [&]<int N>(int64_t n) {
        for (int64_t c = 0; c < inner; c += PANEL) {
            const float *a = grad + from + n, *b = x + c;
            float* own = w + (from + n) * inner + c;
            if (inner - c < PANEL) rest<N>(a, 1, out, b, inner, rows, own, inner, false, inner - c);
            else if (past) tile<N, true>(a, 1, out, b, inner, rows, own, inner, false, 0);
            else tile<N, false>(a, 1, out, b, inner, rows, own, inner, false, 0);
        }
    });
}

inline int64_t in_pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace grouped

extern "C" {
using namespace grouped;

// Group j has the rows ends[j - 1] .. ends[j] - 1; w (n, o, i).
void grouped_forward(const float* x, const float* w, float* y, const int32_t* ends, int64_t n, int64_t inner, int64_t out) {
    const int64_t pieces = in_pieces(out, OUT);
#pragma omp parallel for schedule(dynamic)
    for (int64_t at = 0; at < n * pieces; ++at) {
        const int64_t j = at / pieces, from = at % pieces * OUT, first = j ? ends[j - 1] : 0, rows = ends[j] - first;
        if (rows) forward(x + first * inner, w + SAME j * out * inner, y + first * out, rows, inner, out, from, std::min(out, from + OUT));
    }
}

// Gradients of x and of w, either of which may be null.
void grouped_backward(
    const float* grad, const float* x, const float* w, float* of_x, float* of_w, const int32_t* ends, int64_t n, int64_t inner, int64_t out
) {
    const int64_t columns = of_x ? in_pieces(inner, WIDE) : 0, pieces = columns + (of_w ? in_pieces(out, OUT) : 0);
    int64_t most = 0;
    for (int64_t j = 0; j < n; ++j) most = std::max<int64_t>(most, ends[j] - (j ? ends[j - 1] : 0));
    const int64_t room = most * (WIDE + DEEP);
    std::unique_ptr<float[]> rooms(new float[omp_get_max_threads() * room]);
#pragma omp parallel for schedule(dynamic)
    for (int64_t at = 0; at < n * pieces; ++at) {
        const int64_t j = at / pieces, piece = at % pieces, first = j ? ends[j - 1] : 0, rows = ends[j] - first;
        const float *g = grad + first * out, *own = x + first * inner;
        if (piece < columns) {
            const int64_t from = piece * WIDE;
            if (rows) backward(g, w + SAME j * out * inner, of_x + first * inner, rows, inner, out, from, std::min(inner, from + WIDE), rooms.get() + omp_get_thread_num() * room);
        } else {
            const int64_t from = (piece - columns) * OUT;
            outer(g, own, of_w + SAME j * out * inner, rows, inner, out, from, std::min(out, from + OUT));
        }
    }
#if STREAM
    _mm_sfence();
#endif
}
}
