// Products of a training step in fp32 with the loops before and after them, by blocks of rows that stay in the cache.
// `fused_products.py` has the definitions. Products are those of the BLAS that torch brings, called in its way: by columns, so
// that a matrix by rows is its transpose.

#define WITH_PRODUCTS
#include "fused_loops.cpp"

namespace fused_products {

using Gemm = void (*)(
    const char*, const char*, const int32_t*, const int32_t*, const int32_t*, const float*, const float*, const int32_t*,
    const float*, const int32_t*, const float*, float*, const int32_t*
);

// sums (count) = or += the rows of x (m), `row` numbers apart.
inline void add_rows(const float* x, int64_t row, int64_t m, float* sums, int64_t count, bool add) {
    if (!add) std::fill(sums, sums + count, 0.0f);
    for (int64_t r = 0; r < m; ++r)
        for (int64_t j = 0; j < count; ++j) sums[j] += x[r * row + j];
}

struct Call {
    Gemm gemm;
    int (*limit)(int);  // sets the threads of a product in this thread, and gives the number before
    int64_t rows, d, f, block, step, gates, activation, threads;  // rows of x, of a block and of all threads' blocks, widths,
                                                                  // matrices before the loop

    // f() in every thread of a team, each of whose products takes one thread.
    template <typename F>
    void together(F f) const {
#pragma omp parallel num_threads(threads)
        {
            const int before = limit(1);
            f();
            limit(before);
        }
    }

    // f(room of `count` numbers) in every thread of a team. 0; 1 without memory.
    template <typename F>
    int32_t with_rooms(int64_t count, F f) const {
        try {
            const int64_t lines = fused_loops::up_to(count, fused_loops::WIDE) / fused_loops::WIDE;
            const std::unique_ptr<fused_loops::Line[]> rooms(new fused_loops::Line[threads * lines]);
            together([=, at = rooms.get()] { f(at[omp_get_thread_num() * lines].of); });
        } catch (const std::bad_alloc&) {
            return 1;
        }
        return 0;
    }

    // f(first row, rows) for each block of the rows 0 .. all-1; for a thread of a team.
    template <typename F>
    void blocks(int64_t all, F f) const {
#pragma omp for schedule(static)
        for (int64_t first = 0; first < all; first += block) f(first, std::min(block, all - first));
    }

    // f(first column, columns) for each thread's share of `count`.
    template <typename F>
    void columns(int64_t count, F f) const {
        const int64_t share = fused_loops::up_to((count + threads - 1) / threads, 16);
#pragma omp for schedule(static)
        for (int64_t j = 0; j < count; j += share) f(j, std::min(share, count - j));
    }

    // c (m, n) = or += a @ b, with a (m, k) or its transpose and b (k, n) or its transpose; and numbers between their rows.
    void product(
        const float* a, bool turn_a, int32_t a_row, const float* b, bool turn_b, int32_t b_row, float* c, int32_t c_row,
        int32_t m, int32_t n, int32_t k, bool add
    ) const {
        const float one = 1, old = add;
        gemm(turn_b ? "T" : "N", turn_a ? "T" : "N", &n, &m, &k, &one, b, &b_row, a, &a_row, &old, c, &c_row);
    }

    // y (m, o) = x (m, i) W^T + b, of W (o, i) and b (o).
    void linear(const float* x, const float* weight, const float* bias, float* y, int32_t m, int32_t o, int32_t i) const {
        for (int64_t r = 0; bias && r < m; ++r) std::memcpy(y + r * o, bias, o * sizeof(float));
        product(x, false, i, weight, true, i, y, o, m, o, i, bias);
    }

    // Gradients of rows j .. j+n-1 of W (o, i) and b = or += those from m rows of y, `row` numbers apart, and x (m, i).
    void gather(
        const float* grad, int32_t row, const float* x, float* weight, float* bias, int64_t j, int32_t n, int32_t i,
        int32_t m, bool add
    ) const {
        if (weight) product(grad, true, row, x, false, i, weight + j * i, i, n, i, m, add);
        if (bias) add_rows(grad, row, m, bias + j, n, add);
    }
};

constexpr int64_t WIDEST = 1 << 13;  // most numbers of a row with a mean; `fused_products.py` has the same

inline float mean(const float* x, int64_t d) {
    __m256 sums = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= d; i += 8) sums = _mm256_add_ps(sums, few_rows::load(x + i));
    float total = few_rows::sum(sums);
    for (; i < d; ++i) total += x[i];
    return total / d;
}

// A norm before the first matrices, whose x is added to y: its weight (d), or null without a norm, room for the results of a step
// (step, d), and rates. RMS, or with an offset (d) and means that of x - mean(x). The gradient makes the results again.
struct Norm {
    const float *weight, *offset;
    float *room, *rates, *means, *grad_weight, *grad_offset;
    float eps;

    int64_t sums(int64_t d) const { return offset ? 2 * d : d; }  // numbers of the gradients of weight and offset

    // What the matrices read of rows `from` of a step, which begin at x.
    const float* of(const float* x, int64_t from, int64_t d) const { return weight ? room + from * d : x; }

    const float* centred(const float* x, int64_t r, int64_t d, float* row) const {
        if (!means) return x;
        for (int64_t i = 0; i < d; ++i) row[i] = x[i] - means[r];
        return row;
    }

    void forward(const float* x, int64_t from, int64_t first, int64_t m, int64_t d) const {
        float row[WIDEST], *y = room + from * d;
        for (int64_t r = first; weight && r < first + m; ++r, y += d) {
            if (means) means[r] = mean(x + r * d, d);
            rates[r] = fused_loops::norm(centred(x + r * d, r, d, row), weight, y, d, eps);
            for (int64_t i = 0; offset && i < d; ++i) y[i] += offset[i];
        }
    }

    void again(const float* x, int64_t from, int64_t first, int64_t m, int64_t d) const {
        float row[WIDEST], *y = room + from * d;
        for (int64_t r = first; weight && r < first + m; ++r, y += d) {
            fused_loops::scaled(centred(x + r * d, r, d, row), rates[r], weight, y, d);
            for (int64_t i = 0; offset && i < d; ++i) y[i] += offset[i];
        }
    }

    void add(const float* x, float* y, int64_t first, int64_t m, int64_t d) const {
        for (int64_t i = first * d; weight && i < (first + m) * d; ++i) y[i] += x[i];
    }

    // Makes the sums of `blocks` blocks the gradients of weight and offset.
    void gather(const float* sums, int64_t blocks, int64_t d) const {
        if (!weight) return;
        const int64_t count = this->sums(d);
        for (int64_t j = 0; j < count; ++j) {
            float total = sums[j];
            for (int64_t i = 1; i < blocks; ++i) total += sums[i * count + j];
            (j < d ? grad_weight[j] : grad_offset[j - d]) = total;
        }
    }

    // grad_x, the gradient of the results, becomes that of x; `grad` is that of y. sums (d, and d of the offset): of the weights.
    void backward(const float* grad, const float* x, float* grad_x, float* sums, int64_t first, int64_t m, int64_t d) const {
        if (!weight) return;
        float row[WIDEST];
        std::fill(sums, sums + this->sums(d), 0.0f);
        for (int64_t r = first; r < first + m; ++r) {
            float* to = grad_x + r * d;
            for (int64_t i = 0; offset && i < d; ++i) sums[d + i] += to[i];
            fused_loops::norm_back(to, centred(x + r * d, r, d, row), weight, rates[r], to, sums, d);
            const float less = means ? mean(to, d) : 0;
            for (int64_t i = 0; i < d; ++i) to[i] += grad[r * d + i] - less;
        }
    }
};

using fused_loops::each;
using fused_loops::Attention;
using fused_loops::View;

struct Heads {
    int64_t s, n, g, h, v, r, near, of_row;  // tokens, heads of q and k, widths of k and v, numbers turned, and tables of a row
    const float *cosine, *sine;

    // Views of q, k and v in y (rows, o).
    View queries(float* y) const { return {y, s * width(), width(), h}; }
    View keys(float* y) const { return {y + n * h, s * width(), width(), h}; }
    View values(float* y) const { return {y + (n + g) * h, s * width(), width(), v}; }
    int64_t width() const { return (n + g) * h + g * v; }

    // Turns q and k of rows first .. first+m-1 in y, whose first row is number `begin`.
    void turn_in_place(float* y, int64_t begin, int64_t first, int64_t m, float sign) const {
        if (r)
            turn(first, m, [&](int64_t row, int64_t head, int64_t, int64_t, const float* cosine, const float* sine) {
                float* x = y + (row - begin) * width() + head * h;
                fused_loops::turn(x, cosine, sine, x, r, r, near, sign);
            });
    }

    // f(row, head of q and then of k, text and token, tables) for rows first .. first+m-1.
    template <typename F>
    void turn(int64_t first, int64_t m, F f) const {
        for (int64_t row = first; row < first + m; ++row) {
            const int64_t b = row / s, t = row % s, at = b * of_row + t * r;
            for (int64_t head = 0; head < n + g; ++head) f(row, head, b, t, cosine + at, sine + at);
        }
    }
};

}  // namespace fused_products

extern "C" {
using fused_loops::Attention;
using fused_products::Call;
using fused_products::Heads;
using fused_products::Norm;
using fused_products::View;

// room: (step, f). weights, biases: of the matrices before the loop (f, d), (f), then of that after it (d, f), (d). opened: results of the former
// (rows, f). The result of the loop is made again for the gradient, which costs less than memory.
void feed(
    const Call* call, const Norm* norm, const float* x, const float* const* weights, const float* const* biases,
    float* const* opened, float* room, float* y
) {
    const Call& c = *call;
    const Norm before = *norm;
    const int64_t d = c.d, f = c.f, gates = c.gates;
    c.together([=] { c.blocks(c.rows, [=](int64_t first, int64_t m) {
        const int64_t own = omp_get_thread_num() * c.block, at = first * f;
        before.forward(x, own, first, m, d);
        for (int64_t i = 0; i < gates; ++i)
            c.linear(before.of(x + first * d, own, d), weights[i], biases[i], opened[i] + at, m, f, d);
        float *one = opened[0] + at, *made = room + own * f;
        fused_loops::with_activation(c.activation, [=](auto kind) {
            if (gates == 2)
                fused_products::each<fused_loops::gate<decltype(kind)>>(m * f, {one, opened[1] + at}, {made});
            else
                fused_products::each<fused_loops::active<decltype(kind)>>(m * f, {one}, {made});
        });
        c.linear(made, weights[gates], biases[gates], y + first * d, m, d, f);
        before.add(x, y, first, m, d);
    }); });
}

// rooms: for the gradients of what `feed` opened, and the result of the loop, each (step, f). grad_x and the gradients of weights and biases are
// null where they are not wanted; after a norm, grad_x is wanted. grad_norms: room for the gradients of the norm's weight and offset
// from each block.
void feed_back(
    const Call* call, const Norm* norm, float* grad_norms, const float* grad, const float* x, const float* const* weights,
    const float* const* opened, float* const* rooms, float* grad_x, float* const* grad_weights, float* const* grad_biases
) {
    const Call& c = *call;
    const int64_t d = c.d, f = c.f, gates = c.gates;
    const Norm before = *norm;
    c.together([=] {
        for (int64_t begin = 0; begin < c.rows; begin += c.step) {
            const int64_t all = std::min(c.step, c.rows - begin);
            const bool add = begin > 0;
            c.blocks(all, [=](int64_t from, int64_t m) {
                const int64_t first = begin + from;
                float* one = rooms[0] + from * f;
                const float* open = opened[0] + first * f;
                c.product(grad + first * d, false, d, weights[gates], false, f, one, f, m, f, d, false);
                float* other = rooms[1] + from * f;
                fused_loops::with_activation(c.activation, [=](auto kind) {
                    if (gates == 2)
                        fused_products::each<fused_loops::gate_back<decltype(kind)>>(
                            m * f, {one, open, opened[1] + first * f}, {one, other, rooms[2] + from * f});
                    else
                        fused_products::each<fused_loops::active_back<decltype(kind)>>(m * f, {one, open}, {one, other});
                });
                for (int64_t i = 0; grad_x && i < gates; ++i)
                    c.product(rooms[i] + from * f, false, f, weights[i], false, d, grad_x + first * d, d, m, d, f, i > 0);
                before.again(x, from, first, m, d);
                before.backward(grad, x, grad_x, grad_norms + first / c.block * before.sums(d), first, m, d);
            });
            c.columns(f, [=](int64_t j, int64_t n) {
                for (int64_t i = 0; i < gates; ++i)
                    c.gather(rooms[i] + j, f, before.of(x + begin * d, 0, d), grad_weights[i], grad_biases[i], j, n, d, all, add);
                if (float* w = grad_weights[gates])
                    c.product(grad + begin * d, true, d, rooms[gates] + j, false, f, w + j, f, d, n, all, add);
            });
            if (float* b = grad_biases[gates])
                c.columns(d, [=](int64_t j, int64_t n) { fused_products::add_rows(grad + begin * d + j, d, all, b + j, n, add); });
        }
    });
    before.gather(grad_norms, (c.rows + c.block - 1) / c.block, d);
}

// y (rows, o) = x W^T + b, and its q and k, by strides, turned.
void project(
    const Call* call, const Heads* heads, const float* x, const float* weight, const float* bias, float* y, const View* q,
    const View* k
) {
    const Call& c = *call;
    const Heads& of = *heads;
    const int64_t d = c.d, o = c.f;
    c.together([=] { c.blocks(c.rows, [=](int64_t first, int64_t m) {
        c.linear(x + first * d, weight, bias, y + first * o, m, o, d);
        of.turn(first, m, [&](int64_t row, int64_t head, int64_t b, int64_t t, const float* cosine, const float* sine) {
            const View& to = head < of.n ? *q : *k;
            const int64_t one = head < of.n ? head : head - of.n;
            fused_loops::turn(y + row * o + head * of.h, cosine, sine, to.of(b, one) + t * to.token, of.r, of.h, of.near, 1);
        });
    }); });
}

// From the gradients of q, k and v. room: (step, o) for all o results.
void project_back(
    const Call* call, const Heads* heads, const View* q, const View* k, const View* v, const float* x, const float* weight,
    float* room, float* grad_x, float* grad_weight, float* grad_bias
) {
    const Call& c = *call;
    const Heads& of = *heads;
    const int64_t d = c.d, o = c.f;
    c.together([=] {
        for (int64_t begin = 0; begin < c.rows; begin += c.step) {
            const int64_t all = std::min(c.step, c.rows - begin);
            c.blocks(all, [=](int64_t from, int64_t m) {
                float *grad = room + from * o, *y = grad;
                of.turn(begin + from, m, [&](int64_t, int64_t head, int64_t b, int64_t t, const float* cosine, const float* sine) {
                    const View& by = head < of.n ? *q : *k;
                    const int64_t one = head < of.n ? head : head - of.n;
                    fused_loops::turn(by.of(b, one) + t * by.token, cosine, sine, y, of.r, of.h, of.near, -1);
                    y += of.h;
                    if (head + 1 < of.n + of.g) return;
                    for (int64_t i = 0; i < of.g; ++i, y += of.v)
                        std::memcpy(y, v->of(b, i) + t * v->token, of.v * sizeof(float));
                });
                if (grad_x) c.product(grad, false, o, weight, false, d, grad_x + (begin + from) * d, d, m, d, o, false);
            });
            c.columns(o, [=](int64_t j, int64_t n) {
                c.gather(room + j, o, x + begin * d, grad_weight, grad_bias, j, n, d, all, begin > 0);
            });
        }
    });
}

// y (rows, d) = attention(x) W^T + b: of qkv (rows, o), with q and k turned, and z (rows, i). Whole texts pass through all of it.
// 0; 1 without memory.
int32_t mix(
    const Call* call, const Norm* norm, const Heads* heads, const Attention* attention, const float* x, const float* weight,
    const float* bias, const float* after, const float* offset, float* qkv, float* z, float* log_z, float* y
) {
    const Call& c = *call;
    const Norm before = *norm;
    const Heads of = *heads;
    const Attention a = *attention;
    const int64_t d = c.d, o = c.f, i = a.n * a.v;
    const View q = of.queries(qkv), k = of.keys(qkv), v = of.values(qkv), made{z, a.s * i, i, a.v};
    return c.with_rooms(a.forward_room(), [=](float* room) {
        for (int64_t begin = 0; begin < c.rows; begin += c.step) {
            const int64_t all = std::min(c.step, c.rows - begin);
            c.blocks(all, [=](int64_t from, int64_t m) {
                const int64_t first = begin + from;
                before.forward(x, from, first, m, d);
                c.linear(before.of(x + first * d, from, d), weight, bias, qkv + first * o, m, o, d);
                of.turn_in_place(qkv, 0, first, m, 1);
            });
#pragma omp for schedule(static)
            for (int64_t one = begin / a.s * a.g; one < (begin + all) / a.s * a.g; ++one)
                a.forward(q, k, v, made, log_z, one / a.g, one % a.g, room);
            c.blocks(all, [=](int64_t from, int64_t m) {
                const int64_t first = begin + from;
                c.linear(z + first * i, after, offset, y + first * d, m, d, i);
                before.add(x, y, first, m, d);
            });
        }
    });
}

// rooms: for the gradients of qkv and z, (step, o) and (step, i). grad_x and the gradients of weights and biases are null where they
// are not wanted; after a norm, grad_x is wanted. grad_norms: as in `feed_back`.
int32_t mix_back(
    const Call* call, const Norm* norm, const Heads* heads, const Attention* attention, float* grad_norms, const float* grad,
    const float* x, const float* weight, const float* after, const float* qkv, const float* z, const float* log_z, float* room,
    float* room_z, float* grad_x, float* grad_weight, float* grad_bias, float* grad_after, float* grad_offset
) {
    const Call& c = *call;
    const Norm before = *norm;
    const Heads of = *heads;
    const Attention a = *attention;
    const int64_t d = c.d, o = c.f, i = a.n * a.v;
    float* given = const_cast<float*>(qkv);
    const View q = of.queries(given), k = of.keys(given), v = of.values(given), made{const_cast<float*>(z), a.s * i, i, a.v};
    const View dq = of.queries(room), dk = of.keys(room), dv = of.values(room), dz{room_z, a.s * i, i, a.v};
    const int64_t in_step = (c.step + c.block - 1) / c.block;
    const int32_t failed = c.with_rooms(a.backward_room(), [=](float* own) {
        for (int64_t begin = 0; begin < c.rows; begin += c.step) {
            const int64_t all = std::min(c.step, c.rows - begin), text = begin / a.s;
            const bool add = begin > 0;
            c.blocks(all, [=](int64_t from, int64_t m) {
                c.product(grad + (begin + from) * d, false, d, after, false, i, room_z + from * i, i, m, i, d, false);
            });
#pragma omp for schedule(static)
            for (int64_t one = 0; one < all / a.s * a.g; ++one)
                a.backward(dz, q.from(text), k.from(text), v.from(text), made.from(text), log_z + text * a.n * a.s, dq, dk, dv,
                           one / a.g, one % a.g, own);
            c.blocks(all, [=](int64_t from, int64_t m) {
                const int64_t first = begin + from;
                of.turn_in_place(room, begin, first, m, -1);
                if (grad_x) c.product(room + from * o, false, o, weight, false, d, grad_x + first * d, d, m, d, o, false);
                float* sums = grad_norms + (begin / c.step * in_step + from / c.block) * before.sums(d);
                before.again(x, from, first, m, d);
                before.backward(grad, x, grad_x, sums, first, m, d);
            });
            c.columns(o, [=](int64_t j, int64_t n) {
                c.gather(room + j, o, before.of(x + begin * d, 0, d), grad_weight, grad_bias, j, n, d, all, add);
            });
            c.columns(i, [=](int64_t j, int64_t n) {
                if (grad_after)
                    c.product(grad + begin * d, true, d, z + begin * i + j, false, i, grad_after + j, i, d, n, all, add);
            });
            if (grad_offset)
                c.columns(d, [=](int64_t j, int64_t n) {
                    fused_products::add_rows(grad + begin * d + j, d, all, grad_offset + j, n, add);
                });
        }
    });
    const int64_t left = c.rows % c.step;  // rows of the last step, which has fewer blocks
    if (!failed) before.gather(grad_norms, c.rows / c.step * in_step + (left + c.block - 1) / c.block, d);
    return failed;
}
}
