// Loops of a training step in fp32, each in one pass over memory: the gating of SwiGLU, GELU, the RMS norm, the rotation of pairs
// and softmax attention, with their gradients. `fused_loops.py` has the definitions. Every number is computed by one thread in
// one order, so that the bits depend neither on the number of threads nor on the other rows.

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

// f(first, last) for pieces of 0 .. count.
template <typename F>
inline void in_pieces(int64_t count, F f) {
    const int64_t pieces = (count + PIECE - 1) / PIECE;
#pragma omp parallel for schedule(static) if (count > FEW)
    for (int64_t k = 0; k < pieces; ++k) f(k * PIECE, std::min(count, (k + 1) * PIECE));
}

inline float product(const float* x, const float* y, int64_t count) {
    __m256 sums = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) sums = _mm256_fmadd_ps(load(x + i), load(y + i), sums);
    float total = sum(sums);
    for (; i < count; ++i) total += x[i] * y[i];
    return total;
}

// y[0], y[1] .. = F(x[0], x[1] ..) of `count` numbers; F takes and gives vectors of eight.
template <auto F, size_t N, size_t M>
inline void each(int64_t count, const float* const (&x)[N], float* const (&y)[M]) {
    in_pieces(count, [=](int64_t first, int64_t last) {
        __m256 given[N], made[M];
        int64_t i = first;
        for (; i + 8 <= last; i += 8) {
            for (size_t n = 0; n < N; ++n) given[n] = load(x[n] + i);
            F(given, made);
            for (size_t n = 0; n < M; ++n) store(y[n] + i, made[n]);
        }
        if (i == last) return;
        float some[8] = {};
        for (size_t n = 0; n < N; ++n) std::memcpy(some, x[n] + i, 4 * (last - i)), given[n] = load(some);
        F(given, made);
        for (size_t n = 0; n < M; ++n) store(some, made[n]), std::memcpy(y[n] + i, some, 4 * (last - i));
    });
}

// SwiGLU: of gate and up; of the gradient, gate and up those of gate and up.

inline void gate(const __m256* x, __m256* y) { y[0] = _mm256_mul_ps(_mm256_mul_ps(x[0], sigmoid(x[0])), x[1]); }

inline void gate_back(const __m256* x, __m256* y) {
    const __m256 s = sigmoid(x[1]), silu = _mm256_mul_ps(x[1], s);
    const __m256 slope = _mm256_fmadd_ps(silu, _mm256_sub_ps(number(1), s), s);
    y[0] = _mm256_mul_ps(_mm256_mul_ps(slope, x[0]), x[2]);
    y[1] = _mm256_mul_ps(silu, x[0]);
}

// GELU: x s, s = sigmoid(SLOPE (x + CUBE x^3)); of the gradient and x that of x.

constexpr float SLOPE = 2 * 0.7978845608028654, CUBE = 0.044715;

inline __m256 rise(__m256 square, float cube) { return _mm256_fmadd_ps(number(SLOPE * cube), square, number(SLOPE)); }

inline __m256 open(__m256 x) { return sigmoid(_mm256_mul_ps(x, rise(_mm256_mul_ps(x, x), CUBE))); }

inline void gelu(const __m256* x, __m256* y) { y[0] = _mm256_mul_ps(x[0], open(x[0])); }

inline void gelu_back(const __m256* x, __m256* y) {
    const __m256 s = open(x[1]), bend = _mm256_mul_ps(_mm256_mul_ps(x[1], s), _mm256_sub_ps(number(1), s));
    y[0] = _mm256_mul_ps(x[0], _mm256_fmadd_ps(bend, rise(_mm256_mul_ps(x[1], x[1]), 3 * CUBE), s));
}

// RMS norm

// y (d) = x rate w; returns rate = 1 / sqrt(mean(x^2) + eps).
inline float norm(const float* x, const float* w, float* y, int64_t d, float eps) {
    const float rate = 1 / std::sqrt(product(x, x, d) / d + eps);
    for (int64_t j = 0; j < d; ++j) y[j] = x[j] * rate * w[j];
    return rate;
}

// grad_x (d) = rate (grad w - x rate mean(grad w x rate)); grad_w (d) += grad x rate.
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
    for (int64_t j = 0; j < d; ++j) grad_x[j] = (grad[j] * w[j] - x[j] * mean) * rate;
}

// Rotation

// y (r) = x cos + (x with the numbers of each pair exchanged) sin; h - r numbers after them stay.
inline void turn(
    const float* __restrict x, const float* cosine, const float* sine, float* __restrict y, int64_t r, int64_t h, bool near,
    float sign
) {
    if (near) {
        for (int64_t i = 0; i < r; i += 2) {
            y[i] = x[i] * cosine[i] + x[i + 1] * (sign * sine[i]);
            y[i + 1] = x[i + 1] * cosine[i + 1] + x[i] * (sign * sine[i + 1]);
        }
    } else {
        const int64_t m = r / 2;
        for (int64_t i = 0; i < m; ++i) y[i] = x[i] * cosine[i] + x[i + m] * (sign * sine[i]);
        for (int64_t i = 0; i < m; ++i) y[i + m] = x[i + m] * cosine[i + m] + x[i] * (sign * sine[i + m]);
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

constexpr int64_t WIDE = 16, BLOCK = 48;  // columns of a product in registers; rows of q at a time

// 16 numbers. `fused` has the same bits with any instructions: each number is one sum, in order.
#if WITH_512
constexpr int64_t TILE = 12;  // rows of a product in registers, a divisor of BLOCK
using Wide = __m512;
inline Wide wide(const float* x) { return _mm512_loadu_ps(x); }
inline Wide fused(float a, Wide b, Wide c) { return _mm512_fmadd_ps(_mm512_set1_ps(a), b, c); }
inline void put(float* y, Wide x) { _mm512_storeu_ps(y, x); }
#else
constexpr int64_t TILE = 6;
struct Wide {
    __m256 one, other;
};
inline Wide wide(const float* x) { return {load(x), load(x + 8)}; }
inline Wide fused(float a, Wide b, Wide c) {
    return {_mm256_fmadd_ps(number(a), b.one, c.one), _mm256_fmadd_ps(number(a), b.other, c.other)};
}
inline void put(float* y, Wide x) { store(y, x.one), store(y + 8, x.other); }
#endif

struct View {  // number i of token t of head n of row b: at[b * row + t * token + n * head + i]
    float* at;
    int64_t row, token, head;
    float* of(int64_t b, int64_t n) const { return at + b * row + n * head; }
};

inline int64_t up_to(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// (rows, 16) of c = or += a @ b: number k of row n of a is a[n * a_row + k * a_k], of b (K, 16).
template <int N = TILE>
inline void tile(
    int64_t rows, const float* a, int64_t a_row, int64_t a_k, const float* b, int64_t K, float* c, int64_t c_row, bool add
) {
    if constexpr (N > 1)
        if (rows < N) return tile<N - 1>(rows, a, a_row, a_k, b, K, c, c_row, add);
    const float zero[WIDE] = {};
    Wide sums[N];
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) sums[n] = wide(add ? c + n * c_row : zero);
    for (int64_t k = 0; k < K; ++k) {
        const Wide panel = wide(b + WIDE * k);
#pragma GCC unroll 12
        for (int n = 0; n < N; ++n) sums[n] = fused(a[n * a_row + k * a_k], panel, sums[n]);
    }
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) put(c + n * c_row, sums[n]);
}

// The first `count` of 8 numbers; the others become 0, or -infinity.
constexpr float INF = __builtin_inff();
constexpr int32_t KEPT[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
constexpr float BOUNDS[16] = {INF, INF, INF, INF, INF, INF, INF, INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF};
inline __m256 kept(__m256 x, int64_t count) {
    const __m256i bits = _mm256_loadu_si256((const __m256i*)(KEPT + 8 - count));
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_castps_si256(x)));
}
inline __m256 bounded(__m256 x, int64_t count) { return _mm256_min_ps(x, load(BOUNDS + 8 - count)); }

// Rows of x (t, h) in panels (t, 16) of 16 columns, filled up with zeros.
inline void by_columns(const float* x, int64_t token, int64_t t, int64_t h, float* y) {
    for (int64_t first = 0; first < h; first += WIDE, y += t * WIDE) {
        const int64_t some = std::min(WIDE, h - first);
        for (int64_t j = 0; j < t; ++j) {
            const float* from = x + j * token + first;
            float* to = y + j * WIDE;
            if (some == WIDE) {
                store(to, load(from)), store(to + 8, load(from + 8));
                continue;
            }
            for (int64_t i = 0; i < WIDE; ++i) to[i] = i < some ? from[i] : 0;
        }
    }
}

// Rows of x (t, h) in panels (h, 16) of 16 rows, filled up with zeros.
inline void by_rows(const float* x, int64_t token, int64_t t, int64_t h, float* y) {
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
            for (int64_t j = 0; j < WIDE; ++j) y[i * WIDE + j] = j < some ? x[(first + j) * token + i] : 0;
    }
}

constexpr int64_t PIECES = 4, LEAST = 256;  // of a head, of queries: for threads that would wait for others

struct Attention {
    int64_t batch, n, g, s, t, h, v;  // heads of q and of k, queries, keys, widths of k and of v
    bool causal;
    float scale;

    int64_t keys() const { return up_to(t, WIDE); }
    int64_t wide() const { return up_to(h, WIDE); }
    int64_t values() const { return up_to(v, WIDE); }
    // Keys that rows up to `row` see.
    int64_t seen(int64_t row) const { return causal ? std::min(t, row + 1 + t - s) : t; }
    // Keys of row r that products of rows up to `last` read: those that the last row of its tile sees, and the last tile of
    // keys of which it sees one.
    int64_t read(int64_t r, int64_t last) const {
        return std::max(seen(std::min(last, r / TILE * TILE + TILE) - 1), std::min(t, up_to(seen(r), TILE)));
    }
    int64_t forward_room() const { return keys() * (wide() + values()) + BLOCK * (keys() + values()); }
    int64_t backward_room() const {
        return keys() * (3 * wide() + 2 * values()) + s * (wide() + values()) + BLOCK * (2 * keys() + wide());
    }

    // scores (rows, keys()) of rows first .. last of q (h), with k in panels; only those seen, to the end of a panel.
    void products(
        const float* q, int64_t token, int64_t width, const float* panels, int64_t first, int64_t last, float* scores
    ) const {
        for (int64_t j = 0; j < seen(last - 1); j += WIDE, panels += width * WIDE)
            for (int64_t r = first; r < last; r += TILE) {
                const int64_t end = std::min(last, r + TILE);
                if (j >= seen(end - 1)) continue;
                tile(end - r, q + r * token, token, 1, panels, width, scores + (r - first) * keys() + j, keys(), false);
            }
    }

    // y (rows, up to 16 times) = weights (rows, keys()) @ x (t, ...) in panels.
    void mixed(
        const float* weights, const float* panels, int64_t columns, int64_t first, int64_t last, float* y, int64_t y_row
    ) const {
        for (int64_t c = 0; c < columns; c += WIDE, panels += t * WIDE)
            for (int64_t r = first; r < last; r += TILE) {
                const int64_t end = std::min(last, r + TILE);
                tile(end - r, weights + (r - first) * keys(), keys(), 1, panels, seen(end - 1),
                     y + (r - first) * y_row + c, y_row, false);
            }
    }

    // y (t, columns) += weights (rows, keys())^T @ x (rows, ...) in panels of s rows.
    void gathered(
        const float* weights, const float* panels, int64_t columns, int64_t first, int64_t last, float* y
    ) const {
        for (int64_t c = 0; c < columns; c += WIDE, panels += s * WIDE)
            for (int64_t j = 0; j < seen(last - 1); j += TILE) {
                const int64_t from = causal ? std::max(first, j - (t - s)) : first;
                tile(std::min(TILE, t - j), weights + (from - first) * keys() + j, 1, keys(), panels + from * WIDE,
                     last - from, y + j * columns + c, columns, true);
            }
    }

    // The queries from .. to-1 of a head, of which the last sees all t keys if they are causal.
    void forward(const float* q, const float* k, const float* w, int64_t tokens[3], float* z, int64_t z_token, float* log_z,
                 float* room, int64_t from, int64_t to) const {
        float *by_key = room, *by_value = by_key + keys() * wide(), *scores = by_value + keys() * values();
        float* made = scores + BLOCK * keys();
        by_rows(k, tokens[1], t, h, by_key);
        by_columns(w, tokens[2], t, v, by_value);
        for (int64_t first = from; first < to; first += BLOCK) {
            const int64_t last = std::min(to, first + BLOCK);
            products(q, tokens[0], h, by_key, first, last, scores);
            float divisors[BLOCK];
            for (int64_t r = first; r < last; ++r) {
                float* row = scores + (r - first) * keys();
                const int64_t end = (seen(r) - 1) / 8 * 8, rest = seen(r) - end;  // the last vector has 1 .. 8 numbers
                __m256 tops = bounded(load(row + end), rest);
                for (int64_t j = 0; j < end; j += 8) tops = _mm256_max_ps(tops, load(row + j));
                const float top = few_rows::largest(tops);
                const __m256 minus = number(-scale * top);
                const auto weight = [&](int64_t j) {
                    return exponential(_mm256_fmadd_ps(number(scale), load(row + j), minus));
                };
                __m256 total = kept(weight(end), rest);
                store(row + end, total);
                for (int64_t j = 0; j < end; j += 8) {
                    const __m256 p = weight(j);
                    store(row + j, p);
                    total = _mm256_add_ps(total, p);
                }
                for (int64_t j = end + 8; j < read(r, last); j += 8) store(row + j, _mm256_setzero_ps());
                const float whole = sum(total);
                divisors[r - first] = 1 / whole;
                log_z[r] = scale * top + std::log(whole);
            }
            mixed(scores, by_value, v, first, last, made, values());
            for (int64_t r = first; r < last; ++r)
                for (int64_t i = 0; i < v; ++i) z[r * z_token + i] = made[(r - first) * values() + i] * divisors[r - first];
        }
    }

    // Of one head of k and v, with its heads of q.
    void backward(const View& grad, const View& q, const View& k, const View& w, const View& z, const float* log_z,
                  const View& grad_q, const View& grad_k, const View& grad_v, int64_t b, int64_t head, float* room) const {
        const int64_t ks = keys(), hs = wide(), vs = values();
        float *by_key = room, *as_key = by_key + ks * hs, *sum_k = as_key + ks * hs, *by_value = sum_k + ks * hs,
              *sum_v = by_value + ks * vs, *as_query = sum_v + ks * vs, *as_grad = as_query + s * hs,
              *weights = as_grad + s * vs, *slopes = weights + BLOCK * ks, *made = slopes + BLOCK * ks;
        by_rows(k.of(b, head), k.token, t, h, by_key);
        by_columns(k.of(b, head), k.token, t, h, as_key);
        by_rows(w.of(b, head), w.token, t, v, by_value);
        std::fill(sum_k, sum_k + ks * hs, 0.0f);
        std::fill(sum_v, sum_v + ks * vs, 0.0f);
        for (int64_t one = head * (n / g); one < (head + 1) * (n / g); ++one) {
            const float *query = q.of(b, one), *d = grad.of(b, one), *out = z.of(b, one), *log = log_z + (b * n + one) * s;
            by_columns(query, q.token, s, h, as_query);
            by_columns(d, grad.token, s, v, as_grad);
            for (int64_t first = 0; first < s; first += BLOCK) {
                const int64_t last = std::min(s, first + BLOCK);
                products(query, q.token, h, by_key, first, last, weights);
                products(d, grad.token, v, by_value, first, last, slopes);
                for (int64_t r = first; r < last; ++r) {
                    float *weight = weights + (r - first) * ks, *slope = slopes + (r - first) * ks;
                    const int64_t end = (seen(r) - 1) / 8 * 8, rest = seen(r) - end;
                    const float dot = product(d + r * grad.token, out + r * z.token, v);
                    const __m256 minus = number(-log[r]), less = number(dot);
                    const auto put_at = [&](int64_t j, int64_t count) {
                        const __m256 p = exponential(_mm256_fmadd_ps(number(scale), load(weight + j), minus));
                        const __m256 of = _mm256_mul_ps(p, _mm256_sub_ps(load(slope + j), less));
                        store(weight + j, count < 8 ? kept(p, count) : p);
                        store(slope + j, count < 8 ? kept(of, count) : of);
                    };
                    for (int64_t j = 0; j < end; j += 8) put_at(j, 8);
                    put_at(end, rest);
                    for (int64_t j = end + 8; j < read(r, last); j += 8)
                        store(weight + j, _mm256_setzero_ps()), store(slope + j, _mm256_setzero_ps());
                }
                mixed(slopes, as_key, hs, first, last, made, hs);
                float* to = grad_q.of(b, one);
                for (int64_t r = first; r < last; ++r)
                    for (int64_t i = 0; i < h; ++i) to[r * grad_q.token + i] = made[(r - first) * hs + i] * scale;
                gathered(slopes, as_query, hs, first, last, sum_k);
                gathered(weights, as_grad, vs, first, last, sum_v);
            }
        }
        float *to_k = grad_k.of(b, head), *to_v = grad_v.of(b, head);
        for (int64_t j = 0; j < t; ++j) {
            for (int64_t i = 0; i < h; ++i) to_k[j * grad_k.token + i] = sum_k[j * hs + i] * scale;
            for (int64_t i = 0; i < v; ++i) to_v[j * grad_v.token + i] = sum_v[j * vs + i];
        }
    }
};

}  // namespace fused_loops

#ifndef WITH_PRODUCTS
extern "C" {
using namespace fused_loops;

void swiglu(const float* gate, const float* up, float* y, int64_t count) {
    each<fused_loops::gate>(count, {gate, up}, {y});
}

void swiglu_back(
    const float* grad, const float* gate, const float* up, float* grad_gate, float* grad_up, int64_t count
) {
    each<gate_back>(count, {grad, gate, up}, {grad_gate, grad_up});
}

void gelu_tanh(const float* x, float* y, int64_t count) { each<gelu>(count, {x}, {y}); }

void gelu_tanh_back(const float* grad, const float* x, float* grad_x, int64_t count) {
    each<gelu_back>(count, {grad, x}, {grad_x});
}

void rms_norm(const float* x, const float* w, float* y, float* rates, int64_t rows, int64_t d, float eps) {
#pragma omp parallel for schedule(static) if (rows * d > FEW)
    for (int64_t r = 0; r < rows; ++r) rates[r] = norm(x + r * d, w, y + r * d, d, eps);
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

// x and y (b, s, n, h) with the strides of b, s and n; tables (b or 1, s, r).
void turn_pairs(
    const float* x, const int64_t* x_strides, const float* cosine, const float* sine, int64_t of_row, float* y,
    const int64_t* y_strides, const int64_t* sizes, int64_t r, int32_t near, float sign
) {
    const int64_t batch = sizes[0], s = sizes[1], n = sizes[2], h = sizes[3];
    const View from{const_cast<float*>(x), x_strides[0], x_strides[1], x_strides[2]};
    const View to{y, y_strides[0], y_strides[1], y_strides[2]};
#pragma omp parallel for schedule(static) collapse(2) if (batch * s * n * h > FEW)
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t t = 0; t < s; ++t)
            for (int64_t k = 0; k < n; ++k)
                turn(from.of(b, k) + t * from.token, cosine + b * of_row + t * r, sine + b * of_row + t * r,
                     to.of(b, k) + t * to.token, r, h, near, sign);
}

// Strides of b, s and n of each. 0; 1 without memory.
int32_t attend(
    const Attention* call, const View* q, const View* k, const View* v, const View* z, float* log_z
) {
    const Attention a = *call;
    const int64_t threads = omp_get_max_threads(), room = a.forward_room();
    try {
        std::unique_ptr<float[]> rooms(new float[threads * room]);
        const int64_t piece = up_to(std::max((a.s + PIECES - 1) / PIECES, LEAST), BLOCK);
#pragma omp parallel for schedule(dynamic) collapse(3)
        for (int64_t b = 0; b < a.batch; ++b)
            for (int64_t one = 0; one < a.n; ++one)
                for (int64_t from = 0; from < a.s; from += piece) {
                    const int64_t head = one / (a.n / a.g), to = std::min(a.s, from + piece);
                    int64_t tokens[3] = {q->token, k->token, v->token};
                    Attention some = a;
                    some.t = a.seen(to - 1);  // what it does not see is not read
                    some.s -= a.t - some.t;   // and the last of these sees all that are left
                    some.forward(q->of(b, one), k->of(b, head), v->of(b, head), tokens, z->of(b, one), z->token,
                                 log_z + (b * a.n + one) * a.s, rooms.get() + omp_get_thread_num() * room, from, to);
                }
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

int32_t attend_back(
    const Attention* call, const View* grad, const View* q, const View* k, const View* v, const View* z,
    const float* log_z, const View* grad_q, const View* grad_k, const View* grad_v
) {
    const Attention a = *call;
    const int64_t threads = omp_get_max_threads(), room = a.backward_room();
    try {
        std::unique_ptr<float[]> rooms(new float[threads * room]);
#pragma omp parallel for schedule(static) collapse(2)
        for (int64_t b = 0; b < a.batch; ++b)
            for (int64_t head = 0; head < a.g; ++head)
                a.backward(*grad, *q, *k, *v, *z, log_z, *grad_q, *grad_k, *grad_v, b, head,
                           rooms.get() + omp_get_thread_num() * room);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
}
#endif
