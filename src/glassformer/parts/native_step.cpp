// A decoding step as a list of instructions, for processors with AVX2 at least, or ARM: one new token in each of some
// texts, or some of one text. `generation/native_step.py` writes the list and says what each instruction computes; numbers between them are fp32. All threads
// go through the list together. Each number is summed by one thread in one order, so that a row has the same bits in
// any company, with any number of threads, and whether the tokens of its text are read at once or one after the other.

#define INCLUDED
#include "few_rows.cpp"
#include "vectors.h"

#include <omp.h>

#include <cmath>
#include <type_traits>
#include <vector>

namespace native_step {

using vectors::exponential;
using vectors::sigmoid;
using few_rows::from_bf16;
using few_rows::load;
using few_rows::number;
using few_rows::Rounded;
using few_rows::soon;
using few_rows::sum;

enum Kind : int32_t { NORM, ROUND, LINEAR, ADD, ACTIVATE, CAP, CLAMP, TURN, KEEP, ATTEND, EMBED };
enum Code : int32_t { FP32, BF16, INT8, INT4, NONE };  // how numbers are kept
enum Phi : int32_t { SAME, RELU, RELU2, SIGMOID, SILU, GELU, GELU_TANH };

constexpr int64_t MOST = 3;  // queries that meet a key while it is in a register

struct Place {  // of a value: row r has `stride` numbers from offset * rows + r * stride + column on
    int64_t offset, stride, column;
};

struct Instruction {
    int32_t kind, code, phi, centred, heads, groups, width, value_width, cache, table, turned, interleaved, plus_one,
        both, bias_code, window;
    int64_t inner, outer;
    float f, g;
    Place a, b, c, out;
    const void *weight, *scales, *bias;
};

struct Cache {  // keys and values (b, g, slots, h), with scales (b, g, slots) bf16 where they are whole numbers
    void *keys, *values;
    uint16_t *key_scales, *value_scales;
    int64_t slots, key_stride, value_stride, scale_stride;
    int32_t code, unused;
};

struct Table {  // cos and +-sin (n, r) of turned pairs, for n rows and again the next n or, with n = 0, for lengths 0, 1, ...
    const float *cosine, *sine;
    int64_t rows;
};

inline float from_bf16(uint16_t x) { return few_rows::number(&x); }

inline uint16_t to_bf16(float x) {
    uint16_t y;
    few_rows::store(&y, x);
    return y;
}

inline __m256 activated(__m256 x, int32_t phi) {
    switch (phi) {
        case RELU: return _mm256_max_ps(_mm256_setzero_ps(), x);
        case RELU2: {
            const __m256 y = _mm256_max_ps(_mm256_setzero_ps(), x);
            return _mm256_mul_ps(y, y);
        }
        case SIGMOID: return sigmoid(x);
        case SILU: return _mm256_mul_ps(x, sigmoid(x));
        case GELU: {
            alignas(32) float each[8];
            _mm256_store_ps(each, x);
            for (float& one : each) one = 0.5f * one * (1 + std::erf(one * 0.70710678f));
            return _mm256_load_ps(each);
        }
        case GELU_TANH: {
            const __m256 cube = _mm256_mul_ps(_mm256_mul_ps(x, x), x);
            const __m256 z = _mm256_mul_ps(
                _mm256_set1_ps(2 * 0.7978845608028654f), _mm256_fmadd_ps(_mm256_set1_ps(0.044715f), cube, x));
            return _mm256_mul_ps(x, sigmoid(z));
        }
        default: return x;
    }
}

inline __m256 capped(__m256 x, float cap) {  // cap tanh(x / cap)
    const __m256 s = sigmoid(_mm256_mul_ps(x, _mm256_set1_ps(2 / cap)));
    return _mm256_mul_ps(_mm256_set1_ps(cap), _mm256_fmsub_ps(_mm256_set1_ps(2), s, _mm256_set1_ps(1)));
}

// f(8 numbers of a, 8 of b) -> 8 of y; the last ones by way of a buffer. Without b, zeros.
template <typename F>
inline void each(const float* a, const float* b, float* y, int64_t first, int64_t end, F f) {
    int64_t i = first;
    for (; i + 8 <= end; i += 8) _mm256_storeu_ps(y + i, f(load(a + i), b ? load(b + i) : _mm256_setzero_ps()));
    if (i == end) return;
    alignas(32) float left[8] = {}, right[8] = {};
    std::memcpy(left, a + i, 4 * (end - i));
    if (b) std::memcpy(right, b + i, 4 * (end - i));
    _mm256_store_ps(left, f(_mm256_load_ps(left), _mm256_load_ps(right)));
    std::memcpy(y + i, left, 4 * (end - i));
}

// The sums of four vectors, in the order of `sum`.
inline __m128 sums(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 one = _mm256_add_ps(_mm256_permute2f128_ps(a, c, 0x20), _mm256_permute2f128_ps(a, c, 0x31));
    const __m256 other = _mm256_add_ps(_mm256_permute2f128_ps(b, d, 0x20), _mm256_permute2f128_ps(b, d, 0x31));
    const __m256 two = _mm256_add_ps(_mm256_shuffle_ps(one, other, 0x44), _mm256_shuffle_ps(one, other, 0xee));
    const __m128 ab = _mm256_castps256_ps128(two), cd = _mm256_extractf128_ps(two, 1);
    return _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd));
}

// y[q][n] = row q of x . row n of w, Q rows with 4 N; each sum is that of any Q and N.
template <int Q, int N, typename W>
inline void dots_of_fours(const float* const* x, const W* w, int64_t width, float* const* y, int64_t at) {
    __m256 total[Q][4 * N];
    for (int q = 0; q < Q; ++q)
        for (int n = 0; n < 4 * N; ++n) total[q][n] = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= width; i += 8)
#pragma GCC unroll 8
        for (int n = 0; n < 4 * N; ++n) {
            const __m256 key = load(w + n * width + i);
#pragma GCC unroll 4
            for (int q = 0; q < Q; ++q) total[q][n] = _mm256_fmadd_ps(load(x[q] + i), key, total[q][n]);
        }
    for (int q = 0; q < Q; ++q) {
        for (int n = 0; n < 4 * N; n += 4)
            _mm_storeu_ps(y[q] + at + n, sums(total[q][n], total[q][n + 1], total[q][n + 2], total[q][n + 3]));
        for (int n = 0; n < 4 * N; ++n)
            for (int64_t j = i; j < width; ++j) y[q][at + n] += x[q][j] * number(w + n * width + j);
    }
}

template <int Q, typename W>
inline void dots(const float* const* x, const W* w, int64_t count, int64_t width, float* const* y) {
    constexpr int N = Q == 1 ? 2 : 1;
    int64_t k = 0;
    for (; k + 4 * N <= count; k += 4 * N) dots_of_fours<Q, N>(x, w + k * width, width, y, k);
    for (; k < count; ++k)
        for (int q = 0; q < Q; ++q) {
            __m256 total = _mm256_setzero_ps();
            int64_t i = 0;
            for (; i + 8 <= width; i += 8) total = _mm256_fmadd_ps(load(x[q] + i), load(w + k * width + i), total);
            y[q][k] = sum(total);
            for (; i < width; ++i) y[q][k] += x[q][i] * number(w + k * width + i);
        }
}

// The sum of some numbers, eight at a time.
inline float added(const float* x, int64_t count) {
    __m256 total = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) total = _mm256_add_ps(total, load(x + i));
    float y = sum(total);
    for (; i < count; ++i) y += x[i];
    return y;
}

// The largest of some numbers and `most`, among those that are numbers.
inline float largest(const float* x, int64_t count, float most) {
    __m256 found = _mm256_set1_ps(most);
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) found = _mm256_max_ps(load(x + i), found);
    most = few_rows::largest(found);
    for (; i < count; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

// 8 N numbers of Q rows of y, each += the sum over rows of v of weight times number, in the order of the rows.
template <int Q, int N, typename V>
inline void add_columns(float* const* y, int64_t at, const float* const* weights, const V* v, int64_t count, int64_t width) {
    __m256 total[Q][N];
    for (int q = 0; q < Q; ++q)
        for (int n = 0; n < N; ++n) total[q][n] = load(y[q] + at + 8 * n);
    for (int64_t k = 0; k < count; ++k) {
        __m256 weight[Q];
        for (int q = 0; q < Q; ++q) weight[q] = _mm256_broadcast_ss(weights[q] + k);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            const __m256 value = load(v + k * width + at + 8 * n);
#pragma GCC unroll 4
            for (int q = 0; q < Q; ++q) total[q][n] = _mm256_fmadd_ps(weight[q], value, total[q][n]);
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int n = 0; n < N; ++n) _mm256_storeu_ps(y[q] + at + 8 * n, total[q][n]);
}

// y (Q, width) += weights (Q, count) @ v (count, width)
template <int Q, typename V>
inline void add_rows(float* const* y, const float* const* weights, const V* v, int64_t count, int64_t width) {
    constexpr int N = Q == 1 ? 8 : 4;
    int64_t i = 0;
    for (; i + 8 * N <= width; i += 8 * N) add_columns<Q, N>(y, i, weights, v, count, width);
    for (; i + 8 <= width; i += 8) add_columns<Q, 1>(y, i, weights, v, count, width);
    for (; i < width; ++i)
        for (int q = 0; q < Q; ++q)
            for (int64_t k = 0; k < count; ++k) y[q][i] += weights[q][k] * number(v + k * width + i);
}

// y (rows, o) from row `at` of W on, N rows of x with M of W. One sum of eight numbers each, whatever N and M are.
template <int N, int M, typename W>
inline void block(const float* const* x, const W* w, int64_t inner, float* const* y, int64_t at) {
    __m256 sums[N][M];
    for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m) sums[n][m] = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= inner; i += 8)
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
            const W* here = w + (at + m) * inner + i;
            soon((const char*)here + 1024);
            const __m256 weight = load(here);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sums[n][m] = _mm256_fmadd_ps(load(x[n] + i), weight, sums[n][m]);
        }
    for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m) {
            float total = sum(sums[n][m]);
            for (int64_t j = i; j < inner; ++j) total += x[n][j] * number(w + (at + m) * inner + j);
            y[n][at + m] = total;
        }
}

struct Step {
    float* values;
    const Cache* caches;
    const Table* tables;
    const int64_t *lengths, *tokens;  // of each row: number of tokens before it in its text, and its token
    int64_t rows, tokens_each;        // tokens of a text are rows one after the other
    int64_t from;                     // first row that is computed
    Rounded* in;
    std::vector<float>* scores;
    few_rows::Line* wide;  // of each thread, `room` lines for the matrices of many rows
    int64_t room;

    float* row(const Place& place, int64_t r) const {
        return values + place.offset * rows + r * place.stride + place.column;
    }

    struct Range {
        int64_t first, end;
    };
    static Range share(int64_t count, int64_t me, int64_t of) { return {count * me / of, count * (me + 1) / of}; }
    Range share_of_rows(int64_t pieces, int64_t me, int64_t of) const {  // of `pieces` pieces in each row
        const Range mine = share((rows - from) * pieces, me, of);
        return {from * pieces + mine.first, from * pieces + mine.end};
    }

    void norm(const Instruction& op, int64_t me, int64_t of) const {
        const Range mine = share_of_rows(op.heads, me, of);
        const int64_t width = op.width;
        for (int64_t k = mine.first; k < mine.end; ++k) {
            const int64_t r = k / op.heads, head = k % op.heads;
            const float* x = row(op.a, r) + head * width;
            float* y = row(op.out, r) + head * width;
            float mean = 0, square = 0;
            if (op.centred) {
                __m256 total = _mm256_setzero_ps();
                int64_t i = 0;
                for (; i + 8 <= width; i += 8) total = _mm256_add_ps(total, load(x + i));
                mean = sum(total);
                for (; i < width; ++i) mean += x[i];
                mean /= width;
            }
            __m256 total = _mm256_setzero_ps();
            int64_t i = 0;
            for (; i + 8 <= width; i += 8) {
                const __m256 apart = _mm256_sub_ps(load(x + i), _mm256_set1_ps(mean));
                total = _mm256_fmadd_ps(apart, apart, total);
            }
            square = sum(total);
            for (; i < width; ++i) square += (x[i] - mean) * (x[i] - mean);
            const float rate = 1 / std::sqrt(square / width + op.f);
            const int64_t first = op.both ? head * width : 0;  // weights of each head
            for (i = 0; i < width; ++i) {
                float w = op.code == NONE ? 1 : parameter(op.weight, op.code, first + i) + op.plus_one;
                float value = (x[i] - mean) * rate * w;
                if (op.bias_code != NONE) value += parameter(op.bias, op.bias_code, first + i);
                y[i] = value;
            }
        }
    }

    static float parameter(const void* weight, int32_t code, int64_t i) {
        return code == BF16 ? from_bf16(((const uint16_t*)weight)[i]) : ((const float*)weight)[i];
    }

    void round(const Instruction& op, int64_t me, int64_t of) const {
        const int64_t some = rows - from;
        const few_rows::Form form = op.both ? few_rows::Matrix<4>::form(some) : few_rows::Matrix<8>::form(some);
        if (me == 0) in->rows = some, in->inner = op.inner, in->groups = op.inner / few_rows::GROUP;
        const int64_t groups = op.inner / few_rows::GROUP;
        const Range mine = share_of_rows(groups, me, of);
        for (int64_t k = mine.first; k < mine.end; ++k) {
            const int64_t first = few_rows::GROUP * (k % groups), left = op.outer - first;
            const float* x = row(op.a, k / groups) + first;
            float filled[few_rows::GROUP] = {};
            if (left < few_rows::GROUP) std::memcpy(filled, x, 4 * left), x = filled;
            in->round(x, k / groups, k % groups, groups, form);
        }
    }

    template <typename W>
    void plain(const Instruction& op, Range mine) const {
        const float* x[4];
        float* y[4];
        const W* w = (const W*)op.weight;
        for (int64_t first = mine.first; first < mine.end; first += 64)  // of which all rows of x meet a piece
            for (int64_t r = from; r < rows;) {
                const int64_t end = std::min(first + 64, mine.end), n = rows - r >= 4 ? 4 : 1;
                for (int64_t k = 0; k < n; ++k) x[k] = row(op.a, r + k), y[k] = row(op.out, r + k);
                int64_t at = first;
                if (n == 4) {
                    for (; at + 2 <= end; at += 2) block<4, 2>(x, w, op.inner, y, at);
                    for (; at < end; ++at) block<4, 1>(x, w, op.inner, y, at);
                } else {
                    for (; at + 4 <= end; at += 4) block<1, 4>(x, w, op.inner, y, at);
                    for (; at < end; ++at) block<1, 1>(x, w, op.inner, y, at);
                }
                r += n;
            }
    }

    template <int BITS>
    Range packed(const Instruction& op, int64_t me, int64_t of) const {
        using Kind = few_rows::Matrix<BITS>;
        const int64_t width = op.out.stride, out = (op.outer + few_rows::BLOCK - 1) / few_rows::BLOCK * few_rows::BLOCK;
        const int64_t unit = Kind::unit(in->rows);
        const Kind matrix{op.weight, (const uint16_t*)op.scales, op.inner, out};
        const Range units = share(Kind::units(in->rows, out), me, of);
        matrix.product(*in, from, rows, units.first, units.end, row(op.out, 0), width, wide + me * room);
        return {units.first * unit, std::min(units.end * unit, op.outer)};
    }

    void linear(const Instruction& op, int64_t me, int64_t of) const {
        Range mine;
        if (op.code == INT4 || op.code == INT8) {
            mine = op.code == INT4 ? packed<4>(op, me, of) : packed<8>(op, me, of);
        } else {
            const Range units = share((op.outer + 15) / 16, me, of);
            mine = {units.first * 16, std::min(units.end * 16, op.outer)};
            if (op.code == BF16) plain<uint16_t>(op, mine);
            else plain<float>(op, mine);
        }
        if (op.bias_code != NONE)
            for (int64_t r = from; r < rows; ++r)
                for (int64_t i = mine.first; i < mine.end; ++i)
                    row(op.out, r)[i] += parameter(op.bias, op.bias_code, i);
    }

    template <typename F>
    void elementwise(const Instruction& op, int64_t me, int64_t of, F f) const {
        const Range units = share((op.outer + 63) / 64, me, of);
        const int64_t first = 64 * units.first, end = std::min(64 * units.end, op.outer);
        for (int64_t r = from; r < rows && first < end; ++r)
            each(row(op.a, r), op.both ? row(op.b, r) : nullptr, row(op.out, r), first, end, f);
    }

    void turn(const Instruction& op, int64_t me, int64_t of) const {
        const Range mine = share_of_rows(op.heads, me, of);
        const Table& table = tables[op.table];
        const int64_t r = op.turned, half = r / 2;
        for (int64_t k = mine.first; k < mine.end; ++k) {
            float* x = row(op.a, k / op.heads) + (k % op.heads) * op.width;
            const int64_t at = (table.rows == 0 ? lengths[k / op.heads] : k / op.heads % table.rows) * r;
            const float *cosine = table.cosine + at, *sine = table.sine + at;
            for (int64_t i = 0; i < half; ++i) {
                const int64_t one = op.interleaved ? 2 * i : i, other = op.interleaved ? 2 * i + 1 : i + half;
                const float a = x[one], b = x[other];
                x[one] = a * cosine[one] + b * sine[one];
                x[other] = b * cosine[other] + a * sine[other];
            }
        }
    }

    void embed(const Instruction& op, int64_t me, int64_t of) const {
        const Range mine = share_of_rows(1, me, of);
        for (int64_t r = mine.first; r < mine.end; ++r) {
            float* y = row(op.out, r);
            const int64_t first = tokens[r] * op.outer;
            for (int64_t i = 0; i < op.outer; ++i) {
                y[i] = parameter(op.weight, op.code, first + i) * op.f;
                if (op.code == BF16 && op.f != 1) y[i] = from_bf16(to_bf16(y[i]));
            }
        }
    }

    void keep(const Instruction& op, int64_t me, int64_t of) const {
        const Cache& cache = caches[op.cache];
        const Range mine = share_of_rows(op.groups, me, of);
        for (int64_t k = mine.first; k < mine.end; ++k) {
            const int64_t r = k / op.groups, g = k % op.groups, slot = lengths[r] % cache.slots, text = r / tokens_each;
            const int64_t scale = text * cache.scale_stride + g * cache.slots + slot;
            store(cache.keys, cache.code, text * cache.key_stride + (g * cache.slots + slot) * op.width,
                  row(op.b, r) + g * op.width, op.width, cache.key_scales + scale);
            store(cache.values, cache.code, text * cache.value_stride + (g * cache.slots + slot) * op.value_width,
                  row(op.c, r) + g * op.value_width, op.value_width, cache.value_scales + scale);
        }
    }

    static void store(void* cells, int32_t code, int64_t at, const float* x, int64_t width, uint16_t* scale) {
        if (code == FP32) std::memcpy((float*)cells + at, x, 4 * width);
        if (code == BF16) {
            uint16_t* y = (uint16_t*)cells + at;
            int64_t i = 0;
            for (; i + 8 <= width; i += 8) few_rows::store(y + i, load(x + i));
            for (; i < width; ++i) y[i] = to_bf16(x[i]);
        }
        if (code != INT8) return;
        float most = 0;
        bool whole = true;
        for (int64_t i = 0; i < width; ++i) most = std::max(most, std::fabs(x[i])), whole &= !std::isnan(x[i]);
        *scale = to_bf16(whole ? most / 127 : NAN);
        const float step = std::max(from_bf16(*scale), 1e-30f);
        for (int64_t i = 0; i < width; ++i) {
            const float q = std::nearbyint(x[i] / step);
            ((int8_t*)cells)[at + i] = whole ? (int8_t)std::min(127.0f, std::max(-127.0f, q)) : 0;
        }
    }

    // Attention of Q queries with the keys and values of `g` in the cache of their text: heads `head` of rows `r`.
    template <int Q, typename X>
    void attend(const Instruction& op, const int64_t* r, const int64_t* head, int64_t g, std::vector<float>& room) const {
        const Cache& cache = caches[op.cache];
        const int64_t text = r[0] / tokens_each, scale = text * cache.scale_stride + g * cache.slots;
        const X* keys = (const X*)cache.keys + text * cache.key_stride + g * cache.slots * op.width;
        const X* cells = (const X*)cache.values + text * cache.value_stride + g * cache.slots * op.value_width;
        const float* x[Q];
        float *scores[Q], *z[Q];
        int64_t first[Q], end[Q], from = 0, to = INT64_MAX;  // tokens that a query sees, and that all of them do
        for (int q = 0; q < Q; ++q) {
            x[q] = row(op.a, r[q]) + head[q] * op.width;
            z[q] = row(op.out, r[q]) + head[q] * op.value_width;
            end[q] = lengths[r[q]] + 1, first[q] = op.window ? std::max<int64_t>(0, end[q] - op.window) : 0;
            scores[q] = room.data() + q * (room.size() / MOST);
            from = std::max(from, first[q]), to = std::min(to, end[q]);
        }
        // f<number of queries>(first of them, slot, token, count): tokens one after the other, in the order of each query
        const auto stretch = [&](auto count_of, int one, int64_t token, int64_t last, const auto& f) {
            while (token < last) {
                const int64_t slot = token % cache.slots, count = std::min(last - token, cache.slots - slot);
                f(count_of, one, slot, token, count);
                token += count;
            }
        };
        const auto in_order = [&](const auto& f) {
            const std::integral_constant<int, 1> single;
            for (int q = 0; q < Q; ++q) stretch(single, q, first[q], std::min(from, end[q]), f);
            stretch(std::integral_constant<int, Q>(), 0, from, to, f);
            for (int q = 0; q < Q; ++q) stretch(single, q, std::max(from, to), end[q], f);
        };
        const auto at = [&](int64_t token, float** of) {
            for (int q = 0; q < Q; ++q) of[q] = scores[q] + token - first[q];
        };
        in_order([&](auto some, int one, int64_t slot, int64_t token, int64_t count) {
            float* y[Q];
            at(token, y);
            dots<decltype(some)::value>(x + one, keys + slot * op.width, count, op.width, y + one);
        });
        float total[Q];
        for (int q = 0; q < Q; ++q) total[q] = weigh<X>(op, cache, scale, head[q], first[q], end[q] - first[q], scores[q]);
        for (int q = 0; q < Q; ++q) std::memset(z[q], 0, 4 * op.value_width);
        in_order([&](auto some, int one, int64_t slot, int64_t token, int64_t count) {
            float* weights[Q];
            at(token, weights);
            add_rows<decltype(some)::value>(z + one, weights + one, cells + slot * op.value_width, count, op.value_width);
        });
        for (int q = 0; q < Q; ++q)
            each(z[q], nullptr, z[q], 0, op.value_width, [&](__m256 y, __m256) {
                return _mm256_div_ps(y, _mm256_set1_ps(total[q]));
            });
    }

    // From q . k of `count` tokens from `first` on to the weights of their values; returns what these are to be divided by.
    template <typename X>
    float weigh(
        const Instruction& op, const Cache& cache, int64_t scale, int64_t head, int64_t first, int64_t count, float* scores
    ) const {
        const bool scaled = std::is_same<X, int8_t>::value;
        const auto slot = [&](int64_t k) { return scale + (first + k) % cache.slots; };
        for (int64_t k = 0; k < count; ++k) scores[k] *= op.f;
        for (int64_t k = 0; scaled && k < count; ++k) scores[k] *= from_bf16(cache.key_scales[slot(k)]);
        for (int64_t k = 0; op.g && k < count; ++k) scores[k] = op.g * std::tanh(scores[k] / op.g);
        for (int64_t k = 0; op.scales && k < count; ++k) scores[k] -= ((const float*)op.scales)[head] * (count - 1 - k);
        const float sink = op.weight ? parameter(op.weight, op.code, head) : -INFINITY, most = largest(scores, count, sink);
        each(scores, nullptr, scores, 0, count, [most](__m256 x, __m256) {
            return exponential(_mm256_sub_ps(x, _mm256_set1_ps(most)));
        });
        const float total = (op.weight ? std::exp(sink - most) : 0) + added(scores, count);
        for (int64_t k = 0; scaled && k < count; ++k) scores[k] *= from_bf16(cache.value_scales[slot(k)]);
        return total;
    }

    template <typename X>
    void attend(const Instruction& op, int64_t me, int64_t of) const {
        const int64_t shared = op.heads / op.groups, some = tokens_each - from;  // rows of a text: `from` if there is one
        const Range mine = share_of_rows(op.heads, me, of);
        int64_t left = mine.end - mine.first, done = mine.first - from * op.heads;
        while (left > 0) {  // queries of a text and a group are one after the other, and up to MOST are computed at once
            const int64_t g = done / (some * shared) % op.groups, text = done / (some * op.heads);
            const int64_t same = std::min(left, some * shared - done % (some * shared));
            const int64_t n = same == MOST + 1 ? 2 : std::min<int64_t>(same, MOST);
            int64_t r[MOST], head[MOST];
            for (int q = 0; q < n; ++q) {
                const int64_t k = (done + q) % (some * shared);
                r[q] = text * tokens_each + from + k / shared, head[q] = g * shared + k % shared;
            }
            if (n == 1) attend<1, X>(op, r, head, g, scores[me]);
            else if (n == 2) attend<2, X>(op, r, head, g, scores[me]);
            else attend<3, X>(op, r, head, g, scores[me]);
            done += n, left -= n;
        }
    }

    void attend(const Instruction& op, int64_t me, int64_t of) const {
        const int32_t code = caches[op.cache].code;
        if (code == FP32) attend<float>(op, me, of);
        else if (code == BF16) attend<uint16_t>(op, me, of);
        else attend<int8_t>(op, me, of);
    }

    void run(const Instruction& op, int64_t me, int64_t of) const {
        const float f = op.f, g = op.g;
        const int32_t phi = op.phi;
        switch (op.kind) {
            case NORM: return norm(op, me, of);
            case ROUND: return round(op, me, of);
            case LINEAR: return linear(op, me, of);
            case ADD:
                return elementwise(op, me, of, [f, g](__m256 a, __m256 b) {
                    return _mm256_fmadd_ps(_mm256_set1_ps(g), b, _mm256_mul_ps(_mm256_set1_ps(f), a));
                });
            case ACTIVATE:
                if (op.both)
                    return elementwise(op, me, of, [phi](__m256 a, __m256 b) { return _mm256_mul_ps(activated(a, phi), b); });
                return elementwise(op, me, of, [phi](__m256 a, __m256) { return activated(a, phi); });
            case CAP: return elementwise(op, me, of, [f](__m256 a, __m256) { return capped(a, f); });
            case CLAMP:
                return elementwise(op, me, of, [f, g](__m256 a, __m256) {
                    return _mm256_min_ps(_mm256_set1_ps(g), _mm256_max_ps(_mm256_set1_ps(f), a));
                });
            case TURN: return turn(op, me, of);
            case KEEP: return keep(op, me, of);
            case ATTEND: return attend(op, me, of);
            case EMBED: return embed(op, me, of);
        }
    }
};

}  // namespace native_step

extern "C" {
int64_t size_of_instruction() { return sizeof(native_step::Instruction); }

// 0; 1 without memory, 2 for a row of negative length, 3 for a token without an embedding. `inner`: the largest of rounded rows; 0 if none is.
// After the last instruction that keeps anything, only the last `wanted` rows are computed.
int32_t run_native_step(
    const native_step::Instruction* list, int64_t count, int64_t rows, int64_t tokens_each, int64_t wanted, float* values,
    const native_step::Cache* caches, const native_step::Table* tables, const int64_t* lengths, const int64_t* tokens,
    int64_t inner, int64_t threads
) {
    int64_t longest = 0, kept = 0;
    for (int64_t k = 0; k < count; ++k)
        if (list[k].kind == native_step::KEEP) kept = k;
    for (int64_t r = 0; r < rows; ++r) {
        if (lengths[r] < 0) return 2;
        longest = std::max(longest, lengths[r]);
        if (list[0].kind == native_step::EMBED && (tokens[r] < 0 || tokens[r] >= list[0].inner)) return 3;
    }
    try {
        few_rows::Rounded in(rows, inner, few_rows::Form::HALVES);
        in.q.reset(new int16_t[(rows + few_rows::TILE - 1) / few_rows::TILE * few_rows::TILE * inner]);
        const int64_t room = std::max(few_rows::Matrix<4>::room(rows, inner), few_rows::Matrix<8>::room(rows, inner));
        const std::unique_ptr<few_rows::Line[]> wide(new few_rows::Line[threads * room]);
        std::vector<std::vector<float>> scores(threads, std::vector<float>(native_step::MOST * (longest + 1)));
        const native_step::Step whole{
            values, caches, tables, lengths, tokens, rows, tokens_each, 0, &in, scores.data(), wide.get(), room};
        native_step::Step rest = whole;
        rest.from = rows - wanted;
#pragma omp parallel num_threads(threads)
        {
            const int64_t me = omp_get_thread_num(), of = omp_get_num_threads();
            for (int64_t k = 0; k < count; ++k) {
                (k > kept ? rest : whole).run(list[k], me, of);
#pragma omp barrier
            }
        }
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

// The first of the largest of `width` numbers of each row, or its first NaN; `bad` unless that number is finite.
void largest(const float* x, int64_t rows, int64_t width, int64_t stride, int64_t* tokens, uint8_t* bad) {
    constexpr int64_t LANES = 32;
    for (int64_t r = 0; r < rows; ++r, x += stride) {
        float each[LANES], most = -INFINITY;
        int32_t odd[LANES] = {}, any = 0;
        std::fill(each, each + LANES, -INFINITY);
        const int64_t whole = width - width % LANES;
        for (int64_t i = 0; i < whole; i += LANES)
            for (int64_t j = 0; j < LANES; ++j) {
                const float y = x[i + j];
                each[j] = y > each[j] ? y : each[j], odd[j] |= y != y;
            }
        for (int64_t j = 0; j < LANES; ++j) most = std::max(most, each[j]), any |= odd[j];
        for (int64_t i = whole; i < width; ++i) most = x[i] > most ? x[i] : most, any |= x[i] != x[i];
        int64_t at = 0;
        while (any ? x[at] == x[at] : x[at] != most) ++at;
        tokens[r] = at, bad[r] = !std::isfinite(x[at]);
    }
}
}
