// Products in fp32 of rows with the matrix of their group, and the gradients, for groups of few rows: each matrix is read
// once, as it is stored, and its gradient is written once. `grouped.py` has the definition, tests/native/grouped.cpp the
// sums in fp64. Every number is computed by one thread in one order, so that the bits depend neither on the number of
// threads nor on the other rows.

#define WITH_PRODUCTS
#include "fused_loops.cpp"

#include <cmath>
#include <type_traits>
#include <utility>

namespace grouped {

using few_rows::load;
using few_rows::store;

constexpr int64_t QUAD = 4;          // rows of a matrix that meet a row together
constexpr int64_t PANEL = 16;        // columns of a product in registers
constexpr int64_t OUT = 64;          // rows of a matrix that a thread takes at once
constexpr int64_t WIDE = 512;        // and columns, at most
constexpr int64_t DEEP = 32;         // rows of a matrix that meet all rows before the next ones do
constexpr int64_t LITTLE = 1 << 16;  // products that one thread computes before another one would have woken
constexpr float TINY = 0x1p-126f;    // the least normal number
constexpr int64_t PAST = 1 << 20;    // numbers of a gradient that leaves the cache before it is read

// LANES: numbers in a register. TALL: rows of x whose dot products with QUAD rows are in registers; TILE: rows whose
// panels are.
#if WITH_512
constexpr int64_t LANES = 16, TALL = 6, TILE = 12;
using Vector = __m512;
inline Vector get(const float* x) { return _mm512_loadu_ps(x); }
inline Vector all(float x) { return _mm512_set1_ps(x); }
inline Vector fused(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline void put(float* y, Vector x) { _mm512_storeu_ps(y, x); }
inline void put_past(float* y, Vector x) { _mm512_stream_ps(y, x); }
inline __m256 halved(Vector x) {
    const __m512d bits = _mm512_castps_pd(x);
    return _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(bits, 1)));
}
#else
constexpr int64_t LANES = 8, TALL = 3, TILE = 6;
using Vector = __m256;
inline Vector get(const float* x) { return load(x); }
inline Vector all(float x) { return _mm256_set1_ps(x); }
inline Vector fused(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline void put(float* y, Vector x) { store(y, x); }
#if WITH_NEON
inline void put_past(float* y, Vector x) { store(y, x); }
#else
inline void put_past(float* y, Vector x) { _mm256_stream_ps(y, x); }
#endif
inline __m256 halved(Vector x) { return x; }
#endif
constexpr int64_t PARTS = PANEL / LANES;

inline int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Sums of four vectors.
inline __m128 sums(const Vector (&x)[QUAD]) {
    const __m256 a = halved(x[0]), b = halved(x[1]), c = halved(x[2]), d = halved(x[3]);
    const __m256 one = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 other = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const __m256 both = _mm256_add_ps(_mm256_shuffle_ps(one, other, 0x44), _mm256_shuffle_ps(one, other, 0xee));
    return _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
}

// f(N, first) for runs of N <= MOST of 0 .. count, as even as possible; N is known to the compiler.
template <int64_t N, typename F>
inline void run(int64_t rows, int64_t first, F& f) {
    if constexpr (N > 1)
        if (rows < N) return run<N - 1>(rows, first, f);
    f(std::integral_constant<int64_t, N>(), first);
}
template <int64_t MOST, typename F>
inline void in_runs(int64_t count, F f) {
    const int64_t runs = parts(count, MOST);
    for (int64_t k = 0, first = 0; k < runs; ++k) {
        const int64_t last = count * (k + 1) / runs;
        run<MOST>(last - first, first, f);
        first = last;
    }
}

// y (N, count) = x (N, inner) times `count` rows w. Meanwhile asks for `step` numbers from `soon` on for each vector.
template <int64_t N>
inline void dots(
    const float* x, const float* const (&w)[QUAD], int64_t inner, float* y, int64_t out, int64_t count, const float* soon,
    int64_t step
) {
    Vector s[N][QUAD];
#pragma GCC unroll 6
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
        for (int q = 0; q < QUAD; ++q) s[n][q] = all(0);
    const auto add = [&](const float* own, int64_t row, const float* const(&part)[QUAD]) {
        Vector b[QUAD];
#pragma GCC unroll 4
        for (int q = 0; q < QUAD; ++q) b[q] = get(part[q]);
#pragma GCC unroll 6
        for (int n = 0; n < N; ++n) {
            const Vector a = get(own + n * row);
#pragma GCC unroll 4
            for (int q = 0; q < QUAD; ++q) s[n][q] = fused(a, b[q], s[n][q]);
        }
    };
    int64_t i = 0;
    for (; i + LANES <= inner; i += LANES, soon += step) {
        for (int64_t p = 0; p < step; p += 16) __builtin_prefetch(soon + p);  // reads nothing
        add(x + i, inner, {w[0] + i, w[1] + i, w[2] + i, w[3] + i});
    }
    if (i < inner) {
        float own[N][LANES] = {}, part[QUAD][LANES] = {};
        for (int n = 0; n < N; ++n) std::memcpy(own[n], x + n * inner + i, 4 * (inner - i));
        for (int q = 0; q < QUAD; ++q) std::memcpy(part[q], w[q] + i, 4 * (inner - i));
        add(own[0], LANES, {part[0], part[1], part[2], part[3]});
    }
#pragma GCC unroll 6
    for (int n = 0; n < N; ++n) {
        float made[QUAD];
        _mm_storeu_ps(made, sums(s[n]));
        std::memcpy(y + n * out, made, 4 * count);
    }
}

enum class Kind { plain, keeping, past };

// (N, 16) of c = or += a @ b: number k of row n of a is a[n * a_row + k * a_k], of b (K, 16) with b_row. Keeping: also
// copies b to `kept` and asks for what is `ahead` of it. Past: writes past the cache, where c is aligned.
template <int64_t N, Kind kind = Kind::plain>
inline void tile(
    const float* a, int64_t a_row, int64_t a_k, const float* b, int64_t b_row, int64_t K, float* c, int64_t c_row, bool add,
    float* kept = nullptr, int64_t ahead = 0
) {
    Vector s[N][PARTS];
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; ++p) s[n][p] = add ? get(c + n * c_row + p * LANES) : all(0);
    for (int64_t k = 0; k < K; ++k) {
        Vector panel[PARTS];
        if constexpr (kind == Kind::keeping) __builtin_prefetch(b + k * b_row + ahead);
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; ++p) {
            panel[p] = get(b + k * b_row + p * LANES);
            if constexpr (kind == Kind::keeping) put(kept + k * PANEL + p * LANES, panel[p]);
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
            float* to = c + n * c_row + p * LANES;
            if constexpr (kind == Kind::past) put_past(to, s[n][p]);
            else put(to, s[n][p]);
        }
}

// The first columns of x (rows, ..) as (rows, 16), filled up with zeros.
inline void padded(const float* x, int64_t row, int64_t rows, int64_t columns, float* y) {
    std::memset(y, 0, 4 * rows * PANEL);
    for (int64_t n = 0; n < rows; ++n) std::memcpy(y + n * PANEL, x + n * row, 4 * columns);
}

struct Group {
    int64_t rows, inner, out;

    // Columns from .. to-1 of y (rows, out), the product of x (rows, inner) with w (out, inner).
    void product(const float* x, const float* w, float* y, int64_t from, int64_t to) const {
        for (int64_t o = from; o < to; o += QUAD) {
            const float *own[QUAD], *soon = w + (o + QUAD) * inner;
            for (int64_t q = 0; q < QUAD; ++q) own[q] = w + std::min(o + q, to - 1) * inner;
            const int64_t step = o + 2 * QUAD <= to ? QUAD * LANES / parts(rows, TALL) : 0;
            in_runs<TALL>(rows, [&](auto N, int64_t n) {
                dots<N>(x + n * inner, own, inner, y + n * out + o, out, std::min(QUAD, to - o), soon, step);
                soon += step * (inner / LANES);
            });
        }
    }

    // Columns from .. to-1 of the gradient y (rows, inner) of x, which is multiplied by N matrices w; `grad` of each product.
    // `room`: rows * (to - from + PANEL + DEEP) numbers.
    template <size_t N>
    void of_x(
        const float* const (&grad)[N], const float* const (&w)[N], float* y, int64_t from, int64_t to, float* room
    ) const {
        alignas(64) float kept[DEEP * PANEL];
        float *some = room, *made = room + rows * DEEP;  // `made`: panels (rows, PANEL)
        for (int64_t at = 0; at < int64_t(N) * out;) {
            const float *own_grad = grad[at / out], *own = w[at / out];
            const int64_t k = at % out, deep = std::min(DEEP, out - k), ahead = k + 2 * DEEP <= out ? DEEP * inner : 0;
            for (int64_t n = 0; n < rows; ++n) std::memcpy(some + n * DEEP, own_grad + n * out + k, 4 * deep);
            for (int64_t c = from; c < to; c += PANEL) {
                const float* b = own + k * inner + c;
                float* panel = made + (c - from) * rows;
                const bool whole = to - c >= PANEL;
                if (!whole) padded(b, inner, deep, to - c, kept);
                in_runs<TILE>(rows, [&](auto M, int64_t n) {
                    const float* a = some + n * DEEP;
                    float* own = panel + n * PANEL;
                    if (n || !whole) tile<M>(a, DEEP, 1, kept, PANEL, deep, own, PANEL, at > 0);
                    else tile<M, Kind::keeping>(a, DEEP, 1, b, inner, deep, own, PANEL, at > 0, kept, ahead);
                });
            }
            at += deep;
        }
        for (int64_t c = from; c < to; c += PANEL)
            for (int64_t n = 0; n < rows; ++n)
                std::memcpy(y + n * inner + c, made + (c - from) * rows + n * PANEL, 4 * std::min(PANEL, to - c));
    }

    // Rows from .. to-1 of the gradient y (out, inner) of w. `room`: rows * PANEL numbers.
    void of_w(const float* grad, const float* x, float* y, int64_t from, int64_t to, bool past, float* room) const {
        const int64_t whole = inner / PANEL * PANEL;
        if (whole < inner) padded(x + whole, inner, rows, inner - whole, room);
        in_runs<TILE>(to - from, [&](auto N, int64_t n) {
            const float* a = grad + from + n;
            float* own = y + (from + n) * inner;
            for (int64_t c = 0; c < whole; c += PANEL)
                if (past) tile<N, Kind::past>(a, 1, out, x + c, inner, rows, own + c, inner, false);
                else tile<N>(a, 1, out, x + c, inner, rows, own + c, inner, false);
            if (whole == inner) return;
            float made[N * PANEL];
            tile<N>(a, 1, out, room, PANEL, rows, made, PANEL, false);
            for (int64_t r = 0; r < N; ++r) std::memcpy(own + r * inner + whole, made + r * PANEL, 4 * (inner - whole));
        });
    }
};

// Groups whose rows lie one after the other: group j has the rows ends[j - 1] .. ends[j] - 1. What works on all of them is
// called by each thread of a team, and does not wait for the others.
struct Groups {
    int64_t n, threads;
    const int32_t* ends;

    // f(group, its first row, its rows, from, to) for pieces from .. to-1 of `count`, of `size`.
    template <typename F>
    void pieces(int64_t count, int64_t size, F f) const {
        const int64_t each = parts(count, size);
#pragma omp for schedule(dynamic) nowait
        for (int64_t at = 0; at < n * each; ++at) {
            const int64_t j = at / each, from = at % each * size, first = j ? ends[j - 1] : 0;
            f(j, first, ends[j] - first, from, std::min(count, from + size));
        }
    }

    // y (rows, out), the product of x (rows, inner) with w (n, out, inner).
    void product(const float* x, const float* w, float* y, int64_t inner, int64_t out) const {
        pieces(out, OUT, [=](int64_t j, int64_t first, int64_t rows, int64_t from, int64_t to) {
            const Group one{rows, inner, out};
            if (rows) one.product(x + first * inner, w + j * out * inner, y + first * out, from, to);
        });
    }

    // Columns of a gradient of x that a thread takes at once, and the numbers of its room.
    int64_t width(int64_t inner) const {
        const int64_t shares = std::max(parts(inner, WIDE), parts(2 * threads, n));
        return parts(inner, PANEL * shares) * PANEL;
    }
    int64_t room(int64_t inner) const {
        int64_t most = 0;
        for (int64_t j = 0; j < n; ++j) most = std::max<int64_t>(most, ends[j] - (j ? ends[j - 1] : 0));
        return most * (width(inner) + PANEL + DEEP);
    }

    // The gradient y (rows, inner) of x; `then(first row, rows, from, to)` after the columns from .. to-1 of a group.
    template <size_t N, typename F>
    void of_x(
        const float* const (&grad)[N], const float* const (&w)[N], float* y, int64_t inner, int64_t out, float* room, F then
    ) const {
        pieces(inner, width(inner), [&](int64_t j, int64_t first, int64_t rows, int64_t from, int64_t to) {
            if (!rows) return;
            const float *own_grad[N], *own[N];
            for (size_t k = 0; k < N; ++k) own_grad[k] = grad[k] + first * out, own[k] = w[k] + j * out * inner;
            Group{rows, inner, out}.of_x(own_grad, own, y + first * inner, from, to, room);
            then(first, rows, from, to);
        });
    }

    // The gradient y (n, out, inner) of w; nothing if y is null.
    void of_w(const float* grad, const float* x, float* y, int64_t inner, int64_t out, float* room) const {
        if (!y) return;
        const bool past = n * out * inner >= PAST && inner % LANES == 0 && uintptr_t(y) % (4 * LANES) == 0;
        pieces(out, OUT, [=](int64_t j, int64_t first, int64_t rows, int64_t from, int64_t to) {
            const Group one{rows, inner, out};
            one.of_w(grad + first * out, x + first * inner, y + j * out * inner, from, to, past, room);
        });
#if !WITH_NEON
        if (past) _mm_sfence();
#endif
    }
};

// y (d), the sum of k rows of x at `place`, times their weights unless these are null.
inline void add_up(const float* x, const float* weights, const int64_t* place, int64_t k, float* y, int64_t d) {
    for (int64_t c = 0; c < k; ++c) {
        const float* own = x + place[c] * d;
        const float w = weights ? weights[c] : 1;
        for (int64_t i = 0; i < d; ++i) y[i] = c ? y[i] + w * own[i] : w * own[i];
    }
}

// The k experts of largest p + bias (e), those of p = 0 last, the first of equal ones; not a number counts as largest.
inline void choose(const float* p, const float* bias, int64_t e, int64_t k, int64_t* chosen) {
    const auto rank = [=](int64_t j) {
        const float value = p[j] <= 0 ? -INFINITY : bias ? p[j] + bias[j] : p[j];
        return value == value ? value : INFINITY;
    };
    for (int64_t c = 0; c < k; ++c) {
        int64_t best = -1;
        for (int64_t j = 0; j < e; ++j)
            if ((best < 0 || rank(j) > rank(best)) && std::find(chosen, chosen + c, j) == chosen + c) best = j;
        chosen[c] = best;
    }
}

// The sum of p over the chosen, at least `TINY`; 1 for weights that are not divided by it.
inline float divisor(const float* p, const int64_t* chosen, int64_t k, bool normalised) {
    float sum = 0;
    for (int64_t c = 0; c < k; ++c) sum += p[chosen[c]];
    return normalised ? sum < TINY ? TINY : sum : 1;
}

inline void nothing(int64_t, int64_t, int64_t, int64_t) {}

}  // namespace grouped

extern "C" {
using namespace grouped;

void grouped_product(
    const float* x, const float* w, float* y, const int32_t* ends, int64_t n, int64_t inner, int64_t out
) {
    const Groups all{n, omp_get_max_threads(), ends};
#pragma omp parallel num_threads(all.threads) if (ends[n - 1] * inner * out > LITTLE)
    all.product(x, w, y, inner, out);
}

// Gradients of x and of w, either of which may be null. 0; 1 without memory.
int32_t grouped_product_back(
    const float* grad, const float* x, const float* w, float* of_x, float* of_w, const int32_t* ends, int64_t n,
    int64_t inner, int64_t out
) {
    const Groups all{n, omp_get_max_threads(), ends};
    const int64_t room = all.room(inner);
    try {
        std::unique_ptr<float[]> rooms(new float[all.threads * room]);
#pragma omp parallel num_threads(all.threads) if (ends[n - 1] * inner * out > LITTLE)
        {
            float* own = rooms.get() + omp_get_thread_num() * room;
            if (of_x) all.of_x({grad}, {w}, of_x, inner, out, own, nothing);
            all.of_w(grad, x, of_w, inner, out, own);
        }
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

// Weights and indices (tokens, k) of the experts that tokens of p (tokens, e) choose; bias (e) may be null.
void choose(
    const float* p, const float* bias, float* weights, int64_t* chosen, int64_t tokens, int64_t e, int64_t k, bool normalised,
    float scale
) {
#pragma omp parallel for schedule(static) if (tokens * e * k > LITTLE)
    for (int64_t t = 0; t < tokens; ++t) {
        const float* own = p + t * e;
        int64_t* of = chosen + t * k;
        grouped::choose(own, bias, e, k, of);
        const float sum = divisor(own, of, k, normalised);
        for (int64_t c = 0; c < k; ++c) weights[t * k + c] = own[of[c]] / sum * scale;
    }
}

// The gradient of p, from that of the weights.
void choose_back(
    const float* grad, const float* p, const float* weights, const int64_t* chosen, float* of_p, int64_t tokens, int64_t e,
    int64_t k, bool normalised, float scale
) {
#pragma omp parallel for schedule(static) if (tokens * e > LITTLE)
    for (int64_t t = 0; t < tokens; ++t) {
        const int64_t* of = chosen + t * k;
        const float *given = grad + t * k, *w = weights + t * k;
        const float sum = divisor(p + t * e, of, k, normalised);
        float share = 0;
        for (int64_t c = 0; c < k && normalised && sum > TINY; ++c) share += given[c] * w[c];
        std::fill(of_p + t * e, of_p + (t + 1) * e, 0.0f);
        for (int64_t c = 0; c < k; ++c) of_p[t * e + of[c]] = (given[c] * scale - share) / sum;
    }
}

// Experts: y (tokens, d), the sum over a token's k choices of weights (tokens, k) times the SwiGLU of the chosen group. Kept:
// `place` (tokens, k), the row of each choice, x (rows, d) by rows, gate, up and hidden (rows, f), and each row's result `out`
// (rows, d). 0; 1 for a choice of no group.
int32_t mix(
    const float* x, const float* weights, const int64_t* chosen, const float* w_gate, const float* w_up, const float* w_down,
    int32_t* ends, int64_t* place, float* by_row, float* gate, float* up, float* hidden, float* out, float* y, int64_t tokens,
    int64_t k, int64_t n, int64_t d, int64_t f
) {
    std::fill(ends, ends + n, 0);
    for (int64_t at = 0; at < tokens * k; ++at) {
        if (uint64_t(chosen[at]) >= uint64_t(n)) return 1;
        ++ends[chosen[at]];
    }
    for (int64_t j = 0, first = 0; j < n; ++j) first += std::exchange(ends[j], first);
    for (int64_t at = 0; at < tokens * k; ++at) place[at] = ends[chosen[at]]++;
    const Groups all{n, omp_get_max_threads(), ends};
#pragma omp parallel num_threads(all.threads) if (tokens * k * d * f > LITTLE)
    {
#pragma omp for schedule(static)
        for (int64_t at = 0; at < tokens * k; ++at) std::memcpy(by_row + place[at] * d, x + at / k * d, 4 * d);
        all.pieces(f, OUT, [=](int64_t j, int64_t first, int64_t rows, int64_t from, int64_t to) {
            if (!rows) return;
            const Group one{rows, d, f};
            const float* own = by_row + first * d;
            one.product(own, w_gate + j * f * d, gate + first * f, from, to);
            one.product(own, w_up + j * f * d, up + first * f, from, to);
            for (int64_t r = first; r < first + rows; ++r)
                fused_loops::piece<fused_loops::gate<fused_loops::Silu>>(r * f + from, r * f + to, {gate, up}, {hidden});
        });
#pragma omp barrier
        all.product(hidden, w_down, out, f, d);
#pragma omp barrier
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < tokens; ++t) add_up(out, weights + t * k, place + t * k, k, y + t * d, d);
    }
    return 0;
}

// Gradients of x (tokens, d), of the weights and of the matrices, each of which may be null. `work`: room for rows * 2 (d + f)
// numbers. 0; 1 without memory.
int32_t mix_back(
    const float* grad, const float* weights, const float* w_gate, const float* w_up, const float* w_down, const int32_t* ends,
    const int64_t* place, const float* by_row, const float* gate, const float* up, const float* hidden, const float* out,
    float* work, float* of_x, float* of_weights, float* of_gate, float* of_up, float* of_down, int64_t tokens, int64_t k,
    int64_t n, int64_t d, int64_t f
) {
    const Groups all{n, omp_get_max_threads(), ends};
    const int64_t rows = tokens * k, room = std::max(all.room(d), all.room(f));
    float *of_out = work, *of_row = of_out + rows * d, *opened = of_row + rows * d, *raised = opened + rows * f;
    try {
        std::unique_ptr<float[]> rooms(new float[all.threads * room]);
#pragma omp parallel num_threads(all.threads) if (rows * d * f > LITTLE)
        {
            float* own = rooms.get() + omp_get_thread_num() * room;
#pragma omp for schedule(static)
            for (int64_t at = 0; at < rows; ++at) {
                const float* given = grad + at / k * d;
                const float w = weights[at];
                float* to = of_out + place[at] * d;
                for (int64_t i = 0; i < d; ++i) to[i] = w * given[i];
                if (of_weights) of_weights[at] = fused_loops::product(given, out + place[at] * d, d);
            }
            const auto through = [=](int64_t first, int64_t count, int64_t from, int64_t to) {
                for (int64_t r = first; r < first + count; ++r)
                    fused_loops::piece<fused_loops::gate_back<fused_loops::Silu>>(r * f + from, r * f + to, {raised, gate, up}, {opened, raised});
            };
            all.of_x({of_out}, {w_down}, raised, f, d, own, through);
            all.of_w(of_out, hidden, of_down, f, d, own);
#pragma omp barrier
            if (of_x) all.of_x({opened, raised}, {w_gate, w_up}, of_row, d, f, own, nothing);
            all.of_w(opened, by_row, of_gate, d, f, own);
            all.of_w(raised, by_row, of_up, d, f, own);
            if (of_x) {
#pragma omp barrier
#pragma omp for schedule(static) nowait
                for (int64_t t = 0; t < tokens; ++t) add_up(of_row, nullptr, place + t * k, k, of_x + t * d, d);
            }
        }
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
}
