// Loops of a training step in fp32, each in one pass over memory: the gating of SwiGLU, GELU, the RMS norm, the rotation of pairs
// and softmax attention, with their gradients. Prompts have some of them in bf16, computed in fp32. `fused_loops.py` has the
// definitions. Every number is computed by one thread in one order, so that the bits depend neither on the number of threads nor
// on the other rows.

#define INCLUDED
#include "few_rows.cpp"
#include "vectors.h"

#include <omp.h>

#include <cmath>
#include <vector>

namespace fused_loops {

using vectors::exponential;
using vectors::sigmoid;
using few_rows::load;
using few_rows::store;
using few_rows::sum;

constexpr int64_t FEW = 1 << 13;    // numbers that one thread computes before another one would have woken
constexpr int64_t PIECE = 1 << 11;  // numbers of a loop over all of a tensor that a thread takes at once
constexpr int64_t ROWS = 64;        // rows whose gradients of a weight are added up before those of other rows

inline __m256 number(float x) { return _mm256_set1_ps(x); }

constexpr int64_t WIDE = 16;

// 16 numbers, with the same bits whatever the instructions are.
#if WITH_512
constexpr int64_t TILE = 12, PANELS = 2;  // rows, a divisor of BLOCK, and panels (16 columns) of a product in registers
using Wide = __m512;
inline Wide wide(const float* x) { return _mm512_loadu_ps(x); }
inline Wide every(float x) { return _mm512_set1_ps(x); }
inline Wide wide(const float* x, int64_t count) { return _mm512_maskz_loadu_ps((1u << count) - 1, x); }
inline void put(float* y, Wide x) { _mm512_storeu_ps(y, x); }
inline void put(float* y, Wide x, int64_t count) { _mm512_mask_storeu_ps(y, (1u << count) - 1, x); }
inline Wide fused(Wide a, Wide b, Wide c) { return _mm512_fmadd_ps(a, b, c); }
inline Wide larger(Wide a, Wide b) { return _mm512_max_ps(a, b); }
inline Wide smaller(Wide a, Wide b) { return _mm512_min_ps(a, b); }
inline Wide quotient(Wide a, Wide b) { return _mm512_div_ps(a, b); }
inline Wide kept(Wide x, int64_t count) { return _mm512_maskz_mov_ps((1u << count) - 1, x); }
inline Wide bounded(Wide x, int64_t count) { return _mm512_mask_mov_ps(every(-INFINITY), (1u << count) - 1, x); }
inline __m256 half(Wide x, bool other) {
    const __m512d both = _mm512_castps_pd(x);
    return _mm256_castpd_ps(other ? _mm512_extractf64x4_pd(both, 1) : _mm512_castpd512_pd256(both));
}
#else
constexpr int64_t TILE = 6, PANELS = 1;
struct Wide {
    __m256 one, other;
};
inline Wide wide(const float* x) { return {load(x), load(x + 8)}; }
inline Wide every(float x) { return {number(x), number(x)}; }
inline Wide wide(const float* x, int64_t count) {
    if (count == 8) return {load(x), number(0)};
    float some[WIDE] = {};
    std::memcpy(some, x, 4 * count);
    return wide(some);
}
inline void put(float* y, Wide x) { store(y, x.one), store(y + 8, x.other); }
inline void put(float* y, Wide x, int64_t count) {
    if (count == 8) return store(y, x.one);
    float some[WIDE];
    put(some, x);
    std::memcpy(y, some, 4 * count);
}
inline Wide operator+(Wide a, Wide b) { return {_mm256_add_ps(a.one, b.one), _mm256_add_ps(a.other, b.other)}; }
inline Wide operator-(Wide a, Wide b) { return {_mm256_sub_ps(a.one, b.one), _mm256_sub_ps(a.other, b.other)}; }
inline Wide operator*(Wide a, Wide b) { return {_mm256_mul_ps(a.one, b.one), _mm256_mul_ps(a.other, b.other)}; }
inline Wide fused(Wide a, Wide b, Wide c) {
    return {_mm256_fmadd_ps(a.one, b.one, c.one), _mm256_fmadd_ps(a.other, b.other, c.other)};
}
inline Wide larger(Wide a, Wide b) { return {_mm256_max_ps(a.one, b.one), _mm256_max_ps(a.other, b.other)}; }
inline Wide smaller(Wide a, Wide b) { return {_mm256_min_ps(a.one, b.one), _mm256_min_ps(a.other, b.other)}; }
inline Wide quotient(Wide a, Wide b) { return {_mm256_div_ps(a.one, b.one), _mm256_div_ps(a.other, b.other)}; }
inline Wide sigmoid(Wide x) { return {sigmoid(x.one), sigmoid(x.other)}; }
inline Wide exponential(Wide x) { return {exponential(x.one), exponential(x.other)}; }
inline __m256 half(Wide x, bool other) { return other ? x.other : x.one; }

struct Bounds {
    int32_t bits[2 * WIDE];
    float most[2 * WIDE];
    constexpr Bounds() : bits(), most() {
        for (int64_t i = 0; i < 2 * WIDE; ++i) bits[i] = i < WIDE ? -1 : 0, most[i] = i < WIDE ? INFINITY : -INFINITY;
    }
};
constexpr Bounds BOUNDS;
inline __m256 kept(__m256 x, const int32_t* bits) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)bits), _mm256_castps_si256(x)));
}
inline Wide kept(Wide x, int64_t count) {
    const int32_t* bits = BOUNDS.bits + WIDE - count;
    return {kept(x.one, bits), kept(x.other, bits + 8)};
}
inline Wide bounded(Wide x, int64_t count) {
    const Wide most = wide(BOUNDS.most + WIDE - count);
    return {_mm256_min_ps(x.one, most.one), _mm256_min_ps(x.other, most.other)};
}
#endif
// kept and bounded: the first `count` numbers stay; the others become 0, or -infinity.
struct All {};
inline Wide kept(Wide x, All) { return x; }
inline Wide bounded(Wide x, All) { return x; }
inline float total(Wide x) { return sum(_mm256_add_ps(half(x, false), half(x, true))); }
inline float largest(Wide x) { return few_rows::largest(_mm256_max_ps(half(x, false), half(x, true))); }

// f(first, last) for pieces of 0 .. count.
template <typename F>
inline void in_pieces(int64_t count, F f) {
    const int64_t pieces = (count + PIECE - 1) / PIECE;
#pragma omp parallel for schedule(static) if (count > FEW)
    for (int64_t k = 0; k < pieces; ++k) f(k * PIECE, std::min(count, (k + 1) * PIECE));
}

inline float value(float x) { return x; }
inline float value(uint16_t x) { return few_rows::number(&x); }
inline void put(float& y, float x) { y = x; }
inline void put(uint16_t& y, float x) {  // as `few_rows::to_bf16` rounds
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    y = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <typename X>
inline float product(const X* x, const X* y, int64_t count) {
    __m256 sums = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) sums = _mm256_fmadd_ps(load(x + i), load(y + i), sums);
    float total = sum(sums);
    for (; i < count; ++i) total += value(x[i]) * value(y[i]);
    return total;
}

inline Wide wide(const uint16_t* x) {
#if WITH_512
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
#else
    return {load(x), load(x + 8)};
#endif
}
inline Wide wide(const uint16_t* x, int64_t count) {
    uint16_t some[WIDE] = {};
    std::memcpy(some, x, 2 * count);
    return wide(some);
}
inline void put(uint16_t* y, Wide x) { store(y, half(x, false)), store(y + 8, half(x, true)); }
inline void put(uint16_t* y, Wide x, int64_t count) {
    uint16_t some[WIDE];
    put(some, x);
    std::memcpy(y, some, 2 * count);
}

// y[0], y[1] .. = F(x[0], x[1] ..) of the numbers first .. last-1; F takes and gives vectors, and may give more.
template <auto F, typename X, size_t N, size_t M>
inline void piece(int64_t first, int64_t last, const X* const (&x)[N], X* const (&y)[M]) {
    Wide given[N], made[3];
    int64_t i = first;
    for (; i + WIDE <= last; i += WIDE) {
        for (size_t n = 0; n < N; ++n) given[n] = wide(x[n] + i);
        F(given, made);
        for (size_t n = 0; n < M; ++n) put(y[n] + i, made[n]);
    }
    if (i == last) return;
    for (size_t n = 0; n < N; ++n) given[n] = wide(x[n] + i, last - i);
    F(given, made);
    for (size_t n = 0; n < M; ++n) put(y[n] + i, made[n], last - i);
}

// The same of `count` numbers, divided among threads.
template <auto F, typename X, size_t N, size_t M>
inline void each(int64_t count, const X* const (&x)[N], X* const (&y)[M]) {
    in_pieces(count, [=](int64_t first, int64_t last) { piece<F>(first, last, x, y); });
}

// Activations: their value at x, and the slope there.

constexpr float SLOPE = 2 * 0.7978845608028654, CUBE = 0.044715;

inline Wide positive(Wide x) { return larger(every(0), x); }

// 1 for x > 0, also for the smallest; else 0.
inline Wide above(Wide x) { return smaller(every(1), positive(x) * every(0x1p126f) * every(0x1p26f)); }

struct Silu {
    static Wide of(Wide x, Wide& slope) {
        const Wide s = sigmoid(x), y = x * s;
        slope = fused(y, every(1) - s, s);
        return y;
    }
};

struct GeluTanh {  // x s, s = sigmoid(SLOPE (x + CUBE x^3))
    static Wide rise(Wide square, float cube) { return fused(every(SLOPE * cube), square, every(SLOPE)); }
    static Wide of(Wide x, Wide& slope) {
        const Wide square = x * x, s = sigmoid(x * rise(square, CUBE)), y = x * s;
        slope = fused(y * (every(1) - s), rise(square, 3 * CUBE), s);
        return y;
    }
};

struct Relu {
    static Wide of(Wide x, Wide& slope) {
        slope = above(x);
        return positive(x);
    }
};

struct Sigmoid {
    static Wide of(Wide x, Wide& slope) {
        const Wide s = sigmoid(x);
        slope = s * (every(1) - s);
        return s;
    }
};

struct Relu2 {
    static Wide of(Wide x, Wide& slope) {
        const Wide y = positive(x);
        slope = y + y;
        return y * y;
    }
};

// x P, P the share of a normal distribution below x: that below -|x| is e^(-x^2 / 2) times a polynomial of s = 1 / (1 + 0.35 |x|),
// which was fitted to erfcx(t / sqrt(2)) / 2 with an error of 4e-8 of it.
struct Gelu {
    static Wide of(Wide x, Wide& slope) {
        const Wide size = smaller(every(1e30f), larger(x, every(0) - x));  // infinite times 0 would be NaN
        const Wide s = quotient(every(1), fused(every(0.35f), size, every(1)));
        Wide share = every(-0.0295525694f);
        for (float c : {0.145892507f, -0.25954765f, 0.163379195f, -0.0258708353f, 0.106614f, 0.119570151f, 0.139895557f,
                        0.139619625f})
            share = fused(share, s, every(c));
        const Wide bell = exponential(x * x * every(-0.5f)), less = bell * share * s, half = above(x);
        slope = fused(x * every(0.3989422804f), bell, fused(half, every(1) - less - less, less));
        return positive(x) - size * less;
    }
};

// f() with the activation of this number, in the order of `ACTIVATIONS` in `fused_products.py`.
template <typename F>
inline void with_activation(int64_t number, F f) {
    switch (number) {
        case 0: return f(Silu());
        case 1: return f(GeluTanh());
        case 2: return f(Relu());
        case 3: return f(Sigmoid());
        case 4: return f(Relu2());
        default: return f(Gelu());
    }
}

// Of x; of the gradient and x that of x, and the result again.

template <typename A>
inline void active(const Wide* x, Wide* y) {
    Wide slope;
    y[0] = A::of(x[0], slope);
}

template <typename A>
inline void active_back(const Wide* x, Wide* y) {
    Wide slope;
    y[1] = A::of(x[1], slope);
    y[0] = x[0] * slope;
}

// Of gate and up; of the gradient, gate and up those of gate and up, and the result again.

template <typename A>
inline void gate(const Wide* x, Wide* y) {
    Wide slope;
    y[0] = A::of(x[0], slope) * x[1];
}

template <typename A>
inline void gate_back(const Wide* x, Wide* y) {
    Wide slope;
    const Wide open = A::of(x[1], slope);
    y[0] = slope * x[0] * x[2];
    y[1] = open * x[0];
    y[2] = open * x[2];
}

// RMS norm

// y (d) = x rate w.
template <typename X>
inline void scaled(const X* x, float rate, const float* w, X* y, int64_t d) {
#pragma GCC ivdep
    for (int64_t j = 0; j < d; ++j) put(y[j], value(x[j]) * rate * w[j]);
}

// The same of rate = 1 / sqrt(mean(x^2) + eps), which it returns.
template <typename X>
inline float norm(const X* x, const float* w, X* y, int64_t d, float eps) {
    const float rate = 1 / std::sqrt(product(x, x, d) / d + eps);
    scaled(x, rate, w, y, d);
    return rate;
}

// grad_x (d) = rate (grad w - x rate mean(grad w x rate)); grad_w (d) += grad x rate. grad_x may be grad.
inline void norm_back(
    const float* grad, const float* x, const float* w, float rate, float* grad_x, float* grad_w, int64_t d
) {
    __m256 dots = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= d; i += 8) {
        const __m256 part = _mm256_mul_ps(load(grad + i), load(x + i));
        dots = _mm256_fmadd_ps(part, load(w + i), dots);
        store(grad_w + i, _mm256_fmadd_ps(part, number(rate), load(grad_w + i)));
    }
    float dot = sum(dots);
    for (; i < d; ++i) dot += grad[i] * x[i] * w[i], grad_w[i] += grad[i] * x[i] * rate;
    const float mean = dot * rate / d * rate;
#pragma GCC ivdep
    for (int64_t j = 0; j < d; ++j) grad_x[j] = (grad[j] * w[j] - x[j] * mean) * rate;
}

// Rotation

// y (r) = x cos + (x with the numbers of each pair exchanged) sin; h - r numbers after them stay. y may be x.
template <typename X>
inline void turn(
    const X* x, const float* cosine, const float* sine, X* y, int64_t r, int64_t h, bool near, float sign
) {
    const int64_t pairs = r / 2;
    const auto pair = [=](int64_t i, int64_t j) {
        const float a = value(x[i]), b = value(x[j]);
        put(y[i], a * cosine[i] + b * (sign * sine[i]));
        put(y[j], b * cosine[j] + a * (sign * sine[j]));
    };
    if (near) {
#pragma GCC ivdep
        for (int64_t k = 0; k < pairs; ++k) pair(2 * k, 2 * k + 1);
    } else {
#pragma GCC ivdep
        for (int64_t k = 0; k < pairs; ++k) pair(k, k + pairs);
    }
    for (int64_t i = r; i < h; ++i) y[i] = x[i];
}

// Cross-entropy

// logits (v) -> (softmax - 1 at the target) times `share`; returns log sum exp(logits) - logits[target].
inline float surprise(float* logits, int64_t target, int64_t v, float share) {
    const int64_t full = v / 8 * 8;
    alignas(32) float rest[8];
    const float first = logits[0], hit = logits[target];
    for (int64_t i = 0; i < 8; ++i) rest[i] = full + i < v ? logits[full + i] : first;
    __m256 tops = _mm256_load_ps(rest), total = _mm256_setzero_ps();
    for (int64_t i = 0; i < full; i += 8) tops = _mm256_max_ps(tops, load(logits + i));
    const float top = few_rows::largest(tops);
    for (int64_t i = 0; i < full; i += 8) {
        const __m256 p = exponential(_mm256_sub_ps(load(logits + i), number(top)));
        store(logits + i, p);
        total = _mm256_add_ps(total, p);
    }
    _mm256_store_ps(rest, exponential(_mm256_sub_ps(_mm256_load_ps(rest), number(top))));
    float whole = sum(total);
    for (int64_t i = full; i < v; ++i) whole += logits[i] = rest[i - full];
    const float scale = share / whole;
    for (int64_t i = 0; i < v; ++i) logits[i] *= scale;
    logits[target] -= share;
    return top - hit + std::log(whole);
}

// Attention

constexpr int64_t BLOCK = 48;   // rows of q at a time
constexpr int64_t GROUP = 4;    // rows of scores at a time, for the processor to do while the sum of one waits
constexpr int64_t NEAR = 512;   // rows of a matrix that are read where they are; more are copied next to each other
constexpr int64_t PIECES = 4, LEAST = 256;  // of a head, of queries: for threads that would wait for others

template <typename X>
struct ViewOf {  // number i of token t of head n of row b: at[b * row + t * token + n * head + i]
    X* at;
    int64_t row, token, head;
    X* of(int64_t b, int64_t n) const { return at + b * row + n * head; }
    ViewOf from(int64_t b) const { return {at + b * row, row, token, head}; }
};
using View = ViewOf<float>;

struct alignas(64) Line {  // of the cache
    float of[WIDE];
};

struct Panels {  // number i of row k of panel p, of 16 columns: at[k * row + p * panel + i]
    const float* at;
    int64_t row, panel;
};

inline int64_t up_to(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// For functions that loops call: a call takes as long as some of K.
#define INLINE __attribute__((always_inline)) inline

// (N, 16 M) of c = a @ b, of K numbers, where number k of row n of a is a[n * step + k]; if ADD, c += a @ b unless `fresh`, and
// it is a[n + k * step].
template <bool ADD, int M, int N>
INLINE void tile(const float* a, int64_t step, Panels b, int64_t K, float* c, int64_t c_row, bool fresh) {
    constexpr int AT = ADD ? 1 : (N + 2) / 3;
    const float* at[AT];  // for three rows each: one for every row would not fit into the registers
    Wide sums[N][M];
    float* from = c;
#pragma GCC unroll 12
    for (int i = 0; i < AT; ++i) at[i] = a + 3 * i * step;
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n, from += c_row)
#pragma GCC unroll 2
        for (int m = 0; m < M; ++m) sums[n][m] = ADD && !fresh ? wide(from + m * WIDE) : every(0);
    for (int64_t k = 0; k < K; ++k, b.at += b.row) {
        Wide panels[M];
#pragma GCC unroll 2
        for (int m = 0; m < M; ++m) panels[m] = wide(b.at + m * b.panel);
#pragma GCC unroll 12
        for (int n = 0; n < N; ++n) {
            const Wide x = every(ADD ? at[0][n] : at[n / 3 % AT][n % 3 * step]);
#pragma GCC unroll 2
            for (int m = 0; m < M; ++m) sums[n][m] = fused(x, panels[m], sums[n][m]);
        }
#pragma GCC unroll 12
        for (int i = 0; i < AT; ++i) at[i] += ADD ? step : 1;
    }
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n, c += c_row)
#pragma GCC unroll 2
        for (int m = 0; m < M; ++m) put(c + m * WIDE, sums[n][m]);
}

// The same for `rows` up to N.
template <bool ADD, int M, int N>
void fewer(int64_t rows, const float* a, int64_t step, Panels b, int64_t K, float* c, int64_t c_row, bool fresh) {
    if constexpr (N > 1)
        if (rows < N) return fewer<ADD, M, N - 1>(rows, a, step, b, K, c, c_row, fresh);
    tile<ADD, M, N>(a, step, b, K, c, c_row, fresh);
}

// And of the first `count` columns of M panels; c has no others.
template <bool ADD, int M>
INLINE void columns(
    int64_t rows, const float* a, int64_t step, Panels b, int64_t K, float* c, int64_t c_row, int64_t count, bool fresh
) {
    constexpr int64_t ALL = M * WIDE, END = ALL - WIDE;
    float some[TILE * ALL];
    const bool part = count < ALL;
    float* to = part ? some : c;
    const int64_t to_row = part ? ALL : c_row;
    for (int64_t n = 0; part && ADD && !fresh && n < rows; ++n) {
        for (int64_t i = 0; i < END; i += WIDE) put(some + n * ALL + i, wide(c + n * c_row + i));
        put(some + n * ALL + END, wide(c + n * c_row + END, count - END));
    }
    if (rows == TILE)
        tile<ADD, M, TILE>(a, step, b, K, to, to_row, fresh);
    else
        fewer<ADD, M, TILE - 1>(rows, a, step, b, K, to, to_row, fresh);
    for (int64_t n = 0; part && n < rows; ++n) {
        for (int64_t i = 0; i < END; i += WIDE) put(c + n * c_row + i, wide(some + n * ALL + i));
        put(c + n * c_row + END, wide(some + n * ALL + END), count - END);
    }
}

// And of any number of columns.
template <bool ADD>
INLINE void tiles(
    int64_t rows, const float* a, int64_t step, Panels b, int64_t K, float* c, int64_t c_row, int64_t count,
    bool fresh = true
) {
    constexpr int64_t ALL = PANELS * WIDE;
    for (; count > ALL - WIDE; count -= ALL, c += ALL, b.at += PANELS * b.panel)
        columns<ADD, PANELS>(rows, a, step, b, K, c, c_row, count, fresh);
    if (count > 0) columns<ADD, 1>(rows, a, step, b, K, c, c_row, count, fresh);
}

// x (t, h) in panels: where it is, or in `room`, filled up with zeros.
template <typename X>
inline Panels by_columns(const X* x, int64_t token, int64_t t, int64_t h, float* room) {
    if constexpr (std::is_same_v<X, float>)
        if (h % WIDE == 0 && t <= NEAR) return {x, token, WIDE};
    for (int64_t first = 0; first < h; first += WIDE)
        for (int64_t j = 0; j < t; ++j) {
            const X* from = x + j * token + first;
            put(room + (first / WIDE * t + j) * WIDE, first + WIDE <= h ? wide(from) : wide(from, h - first));
        }
    return {room, WIDE, t * WIDE};
}

// Rows of x (t, h) in panels (h, 16) of 16 rows, filled up with zeros.
template <typename X>
inline void by_rows(const X* x, int64_t token, int64_t t, int64_t h, float* y) {
    for (int64_t first = 0; first < t; first += WIDE, y += h * WIDE) {
        const int64_t some = std::min(WIDE, t - first);
        int64_t i = 0;
        for (; some == WIDE && i + 8 <= h; i += 8)
            for (int64_t half = 0; half < WIDE; half += 8) {
                __m256 rows[8];
                for (int64_t j = 0; j < 8; ++j) rows[j] = load(x + (first + half + j) * token + i);
                vectors::turned(rows);
                for (int64_t k = 0; k < 8; ++k) store(y + (i + k) * WIDE + half, rows[k]);
            }
        for (; i < h; ++i)
            for (int64_t j = 0; j < WIDE; ++j) y[i * WIDE + j] = j < some ? value(x[(first + j) * token + i]) : 0;
    }
}

struct Attention {
    int64_t batch, n, g, s, t, h, v;  // heads of q and of k, queries, keys, widths of k and of v
    bool causal;
    float scale;

    int64_t keys() const { return up_to(t, WIDE); }
    int64_t line() const { return keys() + WIDE; }  // from a row of scores to the next, for the cache no power of 2
    int64_t wide_k() const { return up_to(h, WIDE); }
    int64_t wide_v() const { return up_to(v, WIDE); }
    // Keys that rows up to `row` see.
    int64_t seen(int64_t row) const { return causal ? std::min(t, row + 1 + t - s) : t; }
    int64_t forward_room() const { return keys() * (wide_k() + wide_v()) + BLOCK * (wide_k() + wide_v() + line()); }
    int64_t backward_room() const {
        return keys() * (2 * wide_k() + wide_v()) + BLOCK * (wide_k() + wide_v() + 2 * line());
    }

    // scores of rows first .. last of q (h), with k in panels of rows; only those seen, to the end of a panel.
    void products(
        const float* q, int64_t token, int64_t width, const float* panels, int64_t first, int64_t last, float* scores
    ) const {
        for (int64_t r = first; r < last; r += TILE) {
            const int64_t end = std::min(last, r + TILE);
            tiles<false>(end - r, q + r * token, token, {panels, WIDE, width * WIDE}, width, scores + (r - first) * line(),
                         line(), up_to(seen(end - 1), WIDE));
        }
    }

    // y (rows, columns) = weights @ x (t, columns)
    void mixed(
        const float* weights, Panels x, int64_t columns, int64_t first, int64_t last, float* y, int64_t token
    ) const {
        for (int64_t r = first; r < last; r += TILE) {
            const int64_t end = std::min(last, r + TILE);
            tiles<false>(end - r, weights + (r - first) * line(), line(), x, seen(end - 1), y + r * token, token, columns);
        }
    }

    // y (t, columns) += weights^T @ x (rows, columns), the keys from `old` on having no sum yet.
    void gathered(
        const float* weights, Panels x, int64_t columns, int64_t first, int64_t last, float* y, int64_t token, int64_t old
    ) const {
        for (int64_t j = 0; j < seen(last - 1); j += TILE) {
            const int64_t from = causal ? std::max(int64_t(0), j - (t - s) - first) : 0;
            tiles<true>(std::min(TILE, t - j), weights + from * line() + j, line(), {x.at + from * x.row, x.row, x.panel},
                        last - first - from, y + j * token, token, columns, j >= old);
        }
    }

    // f(n, j, count) for vector j of rows r + n < r + R, to the last vector that a product of rows up to `last` reads; a
    // row sees `count` of its numbers.
    template <int R, typename F>
    INLINE void each_vector(int64_t r, int64_t last, F f) const {
        const int64_t full = (seen(r) - 1) / WIDE * WIDE, tops = seen(std::min(last, up_to(r + R, TILE)) - 1);
        for (int64_t j = 0; j < full; j += WIDE)
#pragma GCC unroll 4
            for (int n = 0; n < R; ++n) f(n, j, All());
        for (int64_t j = full; j < std::min(t, up_to(tops, TILE)); j += WIDE)
#pragma GCC unroll 4
            for (int n = 0; n < R; ++n) f(n, j, std::max(int64_t(0), std::min(WIDE, seen(r + n) - j)));
    }

    // Scores of rows r .. r + R become exp(scale score - the largest); `shares` are 1 / sum.
    template <int R>
    void softmax(float* scores, int64_t r, int64_t last, float* log_z, float* shares) const {
        Wide tops[R], sums[R];
        for (int n = 0; n < R; ++n) tops[n] = every(-INFINITY), sums[n] = every(0);
        each_vector<R>(r, last, [&, line = line()](int n, int64_t j, auto count) {
            tops[n] = larger(tops[n], bounded(wide(scores + n * line + j), count));
        });
        for (int n = 0; n < R; ++n) log_z[n] = scale * largest(tops[n]), tops[n] = every(-log_z[n]);
        each_vector<R>(r, last, [&, line = line()](int n, int64_t j, auto count) {
            float* x = scores + n * line + j;
            const Wide p = kept(exponential(fused(every(scale), wide(x), tops[n])), count);
            put(x, p);
            sums[n] = sums[n] + p;
        });
        for (int n = 0; n < R; ++n) shares[n] = 1 / total(sums[n]), log_z[n] -= std::log(shares[n]);
    }

    // z of the queries from .. to-1 of a head.
    template <typename X>
    void forward(
        const X* q, int64_t token, const float* by_key, Panels by_value, X* z, int64_t z_token, float* log_z, float* room,
        int64_t from, int64_t to
    ) const {
        float *wide_q = room, *wide_z = wide_q + BLOCK * wide_k(), *scores = wide_z + BLOCK * wide_v();
        for (int64_t first = from; first < to; first += BLOCK) {
            const int64_t last = std::min(to, first + BLOCK);
            const float* query;  // of row 0, and z before its share
            float* made;
            int64_t step = token, made_step = z_token;
            if constexpr (std::is_same_v<X, float>) {
                query = q, made = z;
            } else {
                for (int64_t r = first; r < last; ++r)
                    for (int64_t j = 0; j < h; ++j) wide_q[(r - first) * wide_k() + j] = value(q[r * token + j]);
                step = wide_k(), query = wide_q - first * step;
                made_step = wide_v(), made = wide_z - first * made_step;
            }
            products(query, step, h, by_key, first, last, scores);
            float shares[BLOCK];
            int64_t i = 0;
            for (; first + i + GROUP <= last; i += GROUP)
                softmax<GROUP>(scores + i * line(), first + i, last, log_z + first + i, shares + i);
            for (; first + i < last; ++i) softmax<1>(scores + i * line(), first + i, last, log_z + first + i, shares + i);
            mixed(scores, by_value, v, first, last, made, made_step);
            for (int64_t r = first; r < last; ++r) {
                const float share = shares[r - first], *sums = made + r * made_step;
                for (int64_t c = 0; c < v; ++c) put(z[r * z_token + c], sums[c] * share);
            }
        }
    }

    // z of all queries of a head of k and v, with its heads of q.
    void forward(const View& q, const View& k, const View& w, const View& z, float* log_z, int64_t b, int64_t head,
                 float* room) const {
        float *by_key = room, *by_value = by_key + keys() * wide_k(), *scores = by_value + keys() * wide_v();
        by_rows(k.of(b, head), k.token, t, h, by_key);
        const Panels values = by_columns(w.of(b, head), w.token, t, v, by_value);
        for (int64_t one = head * (n / g); one < (head + 1) * (n / g); ++one)
            forward(q.of(b, one), q.token, by_key, values, z.of(b, one), z.token, log_z + (b * n + one) * s, scores, 0, s);
    }

    // Of one head of k and v, with its heads of q.
    void backward(const View& grad, const View& q, const View& k, const View& w, const View& z, const float* log_z,
                  const View& grad_q, const View& grad_k, const View& grad_v, int64_t b, int64_t head, float* room) const {
        float *by_key = room, *by_value = by_key + keys() * wide_k(), *as_key = by_value + keys() * wide_v(),
              *as_query = as_key + keys() * wide_k(), *as_grad = as_query + BLOCK * wide_k(),
              *weights = as_grad + BLOCK * wide_v(), *slopes = weights + BLOCK * line();
        by_rows(k.of(b, head), k.token, t, h, by_key);
        by_rows(w.of(b, head), w.token, t, v, by_value);
        const Panels of_keys = by_columns(k.of(b, head), k.token, t, h, as_key);
        for (int64_t one = head * (n / g); one < (head + 1) * (n / g); ++one)
            for (int64_t first = 0; first < s; first += BLOCK) {
                const int64_t last = std::min(s, first + BLOCK);
                const float *query = q.of(b, one), *d = grad.of(b, one), *out = z.of(b, one);
                products(query, q.token, h, by_key, first, last, weights);
                products(d, grad.token, v, by_value, first, last, slopes);
                for (int64_t r = first; r < last; ++r) {
                    float *weight = weights + (r - first) * line(), *slope = slopes + (r - first) * line();
                    const float dot = product(d + r * grad.token, out + r * z.token, v);
                    const Wide minus = every(-log_z[(b * n + one) * s + r]), less = every(-scale * dot);
                    each_vector<1>(r, last, [&](int, int64_t j, auto count) {
                        const Wide p = kept(exponential(fused(every(scale), wide(weight + j), minus)), count);
                        put(weight + j, p);
                        put(slope + j, kept(p * fused(every(scale), wide(slope + j), less), count));
                    });
                }
                mixed(slopes, of_keys, h, first, last, grad_q.of(b, one), grad_q.token);
                const Panels queries = by_columns(query + first * q.token, q.token, last - first, h, as_query);
                const Panels grads = by_columns(d + first * grad.token, grad.token, last - first, v, as_grad);
                const int64_t old = one > head * (n / g) ? t : first > 0 ? seen(first - 1) : 0;
                gathered(slopes, queries, h, first, last, grad_k.of(b, head), grad_k.token, old);
                gathered(weights, grads, v, first, last, grad_v.of(b, head), grad_v.token, old);
            }
    }
};

// x and y (b, s, n, h) with the strides of b, s and n; tables (b or 1, s, r).
template <typename X>
inline void turned(
    const X* x, const int64_t* x_strides, const float* cosine, const float* sine, int64_t of_row, X* y,
    const int64_t* y_strides, const int64_t* sizes, int64_t r, int32_t near, float sign
) {
    const int64_t batch = sizes[0], s = sizes[1], n = sizes[2], h = sizes[3];
    const ViewOf<const X> from{x, x_strides[0], x_strides[1], x_strides[2]};
    const ViewOf<X> to{y, y_strides[0], y_strides[1], y_strides[2]};
#pragma omp parallel for schedule(static) collapse(2) if (batch * s * n * h > FEW)
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t t = 0; t < s; ++t)
            for (int64_t k = 0; k < n; ++k)
                turn(from.of(b, k) + t * from.token, cosine + b * of_row + t * r, sine + b * of_row + t * r,
                     to.of(b, k) + t * to.token, r, h, near, sign);
}

// Strides of b, s and n of each. 0; 1 without memory.
template <typename X>
inline int32_t attended(
    const Attention* call, const ViewOf<X>* q, const ViewOf<X>* k, const ViewOf<X>* v, const ViewOf<X>* z, float* log_z
) {
    const Attention a = *call;
    const int64_t threads = omp_get_max_threads(), room = a.forward_room(), heads = a.n / a.g;
    try {
        const std::unique_ptr<Line[]> rooms(new Line[threads * room / WIDE]);
        const int64_t piece = up_to(std::max((a.s + PIECES - 1) / PIECES, LEAST), BLOCK);
        const int64_t pieces = (a.s + piece - 1) / piece;
#pragma omp parallel
        {
            float *by_key = rooms[omp_get_thread_num() * room / WIDE].of, *by_value = by_key + a.keys() * a.wide_k(),
                  *scores = by_value + a.keys() * a.wide_v();
            int64_t ready = -1;  // the head of k and v whose panels this thread has
            Panels values{};
#pragma omp for schedule(dynamic) collapse(4)
            for (int64_t b = 0; b < a.batch; ++b)
                for (int64_t head = 0; head < a.g; ++head)
                    for (int64_t left = pieces; left > 0; --left)  // the longest first
                        for (int64_t i = 0; i < heads; ++i) {
                            const int64_t one = head * heads + i, from = (left - 1) * piece;
                            if (ready != b * a.g + head) {
                                by_rows(k->of(b, head), k->token, a.t, a.h, by_key);
                                values = by_columns(v->of(b, head), v->token, a.t, a.v, by_value);
                                ready = b * a.g + head;
                            }
                            a.forward(q->of(b, one), q->token, by_key, values, z->of(b, one), z->token,
                                      log_z + (b * a.n + one) * a.s, scores, from, std::min(a.s, from + piece));
                        }
        }
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

}  // namespace fused_loops

#ifndef WITH_PRODUCTS
extern "C" {
using namespace fused_loops;

void swiglu(const float* gate, const float* up, float* y, int64_t count) {
    each<fused_loops::gate<Silu>>(count, {gate, up}, {y});
}

void swiglu_of_16_bits(const uint16_t* gate, const uint16_t* up, uint16_t* y, int64_t count) {
    each<fused_loops::gate<Silu>>(count, {gate, up}, {y});
}

void swiglu_back(
    const float* grad, const float* gate, const float* up, float* grad_gate, float* grad_up, int64_t count
) {
    each<gate_back<Silu>>(count, {grad, gate, up}, {grad_gate, grad_up});
}

void gelu_tanh(const float* x, float* y, int64_t count) { each<active<GeluTanh>>(count, {x}, {y}); }

void gelu_tanh_back(const float* grad, const float* x, float* grad_x, int64_t count) {
    each<active_back<GeluTanh>>(count, {grad, x}, {grad_x});
}

void rms_norm(const float* x, const float* w, float* y, float* rates, int64_t rows, int64_t d, float eps) {
#pragma omp parallel for schedule(static) if (rows * d > FEW)
    for (int64_t r = 0; r < rows; ++r) rates[r] = norm(x + r * d, w, y + r * d, d, eps);
}

void rms_norm_of_16_bits(const uint16_t* x, const float* w, uint16_t* y, int64_t rows, int64_t d, float eps) {
#pragma omp parallel for schedule(static) if (rows * d > FEW)
    for (int64_t r = 0; r < rows; ++r) norm(x + r * d, w, y + r * d, d, eps);
}

// `parts` (blocks of 64 rows, d): room for the gradients of w of each.
void rms_norm_back(
    const float* grad, const float* x, const float* w, const float* rates, float* grad_x, float* grad_w, float* parts,
    int64_t rows, int64_t d
) {
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(static) if (rows * d > FEW)
    for (int64_t k = 0; k < blocks; ++k) {
        std::fill(parts + k * d, parts + (k + 1) * d, 0.0f);
        for (int64_t r = k * ROWS; r < std::min(rows, (k + 1) * ROWS); ++r)
            norm_back(grad + r * d, x + r * d, w, rates[r], grad_x + r * d, parts + k * d, d);
    }
    std::fill(grad_w, grad_w + d, 0.0f);
    for (int64_t k = 0; k < blocks; ++k)
        for (int64_t i = 0; i < d; ++i) grad_w[i] += parts[k * d + i];
}

// Rows with a target of -100 get gradients and losses of 0. Sets `wrong` for a target outside of 0 .. v - 1.
int32_t cross_entropy(float* logits, const int64_t* targets, float* losses, int64_t rows, int64_t v, float share) {
    int32_t wrong = 0;
#pragma omp parallel for schedule(static) reduction(| : wrong) if (rows * v > FEW)
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t target = targets[r];
        const bool counts = target >= 0 && target < v;
        wrong |= !counts && target != -100;
        losses[r] = counts ? surprise(logits + r * v, target, v, share) : 0;
        if (!counts) std::fill(logits + r * v, logits + (r + 1) * v, 0.0f);
    }
    return wrong;
}

void turn_pairs(
    const float* x, const int64_t* x_strides, const float* cosine, const float* sine, int64_t of_row, float* y,
    const int64_t* y_strides, const int64_t* sizes, int64_t r, int32_t near, float sign
) {
    turned(x, x_strides, cosine, sine, of_row, y, y_strides, sizes, r, near, sign);
}

void turn_pairs_of_16_bits(
    const uint16_t* x, const int64_t* x_strides, const float* cosine, const float* sine, int64_t of_row, uint16_t* y,
    const int64_t* y_strides, const int64_t* sizes, int64_t r, int32_t near, float sign
) {
    turned(x, x_strides, cosine, sine, of_row, y, y_strides, sizes, r, near, sign);
}

int32_t attend(const Attention* call, const View* q, const View* k, const View* v, const View* z, float* log_z) {
    return attended(call, q, k, v, z, log_z);
}

int32_t attend_of_16_bits(
    const Attention* call, const ViewOf<uint16_t>* q, const ViewOf<uint16_t>* k, const ViewOf<uint16_t>* v,
    const ViewOf<uint16_t>* z, float* log_z
) {
    return attended(call, q, k, v, z, log_z);
}

int32_t attend_back(
    const Attention* call, const View* grad, const View* q, const View* k, const View* v, const View* z,
    const float* log_z, const View* grad_q, const View* grad_k, const View* grad_v
) {
    const Attention a = *call;
    const int64_t threads = omp_get_max_threads(), room = a.backward_room();
    try {
        const std::unique_ptr<Line[]> rooms(new Line[threads * room / WIDE]);
#pragma omp parallel for schedule(static) collapse(2)
        for (int64_t b = 0; b < a.batch; ++b)
            for (int64_t head = 0; head < a.g; ++head)
                a.backward(*grad, *q, *k, *v, *z, log_z, *grad_q, *grad_k, *grad_v, b, head,
                           rooms[omp_get_thread_num() * room / WIDE].of);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
}
#endif
