// Feed-forward networks of a training step in fp32: products with the loop between them, by blocks of rows that stay in the
// cache. `fused_products.py` has the definitions. Products are those of the BLAS that torch brings, called in its way: by
// columns, so that a matrix by rows is its transpose.

#define WITH_PRODUCTS
#include "fused_loops.cpp"

namespace fused_products {

using Gemm = void (*)(
    const char*, const char*, const int32_t*, const int32_t*, const int32_t*, const float*, const float*, const int32_t*,
    const float*, const int32_t*, const float*, float*, const int32_t*
);

struct Call {
    Gemm gemm;
    int64_t rows, d, f, block, gates, threads;  // rows of x and of a block, widths, matrices before the loop

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
};

using fused_loops::each;

// sums (count) = or += the rows of x (m), `row` numbers apart.
inline void add_rows(const float* x, int64_t row, int64_t m, float* sums, int64_t count, bool add) {
    if (!add) std::fill(sums, sums + count, 0.0f);
    for (int64_t r = 0; r < m; ++r)
        for (int64_t j = 0; j < count; ++j) sums[j] += x[r * row + j];
}

}  // namespace fused_products

extern "C" {
using fused_products::Call;

// weights, biases: of the matrices before the loop (f, d), (f), then of that after it (d, f), (d). opened: results of the former
// (rows, f). room: (block, f) for each thread.
void feed(
    const Call* call, const float* x, const float* const* weights, const float* const* biases, float* const* opened,
    float* room, float* y
) {
    const Call& c = *call;
    const int64_t d = c.d, f = c.f, gates = c.gates;
#pragma omp parallel for schedule(static) num_threads(c.threads)
    for (int64_t first = 0; first < c.rows; first += c.block) {
        const int64_t m = std::min(c.block, c.rows - first);
        for (int64_t i = 0; i < gates; ++i)
            c.linear(x + first * d, weights[i], biases[i], opened[i] + first * f, m, f, d);
        float *one = opened[0] + first * f, *hidden = room + omp_get_thread_num() * c.block * f;
        if (gates == 2)
            fused_products::each<fused_loops::gate>(m * f, {one, opened[1] + first * f}, {hidden});
        else
            fused_products::each<fused_loops::gelu>(m * f, {one}, {hidden});
        c.linear(hidden, weights[gates], biases[gates], y + first * d, m, d, f);
    }
}

// rooms: for a block of each thread, `hidden` and the gradients of what `feed` opened, each (threads * block, f). grad_x and the
// gradients of weights and biases are null where they are not wanted.
void feed_back(
    const Call* call, const float* grad, const float* x, const float* const* weights, const float* const* opened,
    float* const* rooms, float* grad_x, float* const* grad_weights, float* const* grad_biases
) {
    const Call& c = *call;
    const int64_t d = c.d, f = c.f, gates = c.gates, threads = c.threads, share = (f / threads + 16) / 16 * 16;
#pragma omp parallel num_threads(threads)
    for (int64_t begin = 0; begin < c.rows; begin += threads * c.block) {
        const int64_t all = std::min(threads * c.block, c.rows - begin);
#pragma omp for schedule(static)
        for (int64_t from = 0; from < all; from += c.block) {
            const int64_t first = begin + from, m = std::min(c.block, all - from);
            float *hidden = rooms[0] + from * f, *one = rooms[1] + from * f;
            const float* open = opened[0] + first * f;
            c.product(grad + first * d, false, d, weights[gates], false, f, one, f, m, f, d, false);
            if (gates == 2)
                fused_products::each<fused_loops::gate_again>(
                    m * f, {one, open, opened[1] + first * f}, {one, rooms[2] + from * f, hidden});
            else
                fused_products::each<fused_loops::gelu_again>(m * f, {one, open}, {one, hidden});
            for (int64_t i = 0; grad_x && i < gates; ++i)
                c.product(rooms[1 + i] + from * f, false, f, weights[i], false, d, grad_x + first * d, d, m, d, f, i > 0);
        }
        const bool add = begin > 0;
#pragma omp for schedule(static)
        for (int64_t j = 0; j < f; j += share) {
            const int64_t n = std::min(share, f - j);
            for (int64_t i = 0; i < gates; ++i) {
                const float* closed = rooms[1 + i] + j;
                if (grad_weights[i])
                    c.product(closed, true, f, x + begin * d, false, d, grad_weights[i] + j * d, d, n, d, all, add);
                if (grad_biases[i]) fused_products::add_rows(closed, f, all, grad_biases[i] + j, n, add);
            }
            if (grad_weights[gates])
                c.product(grad + begin * d, true, d, rooms[0] + j, false, f, grad_weights[gates] + j, f, d, n, all, add);
        }
#pragma omp single
        if (grad_biases[gates]) fused_products::add_rows(grad + begin * d, d, all, grad_biases[gates], d, add);
    }
}
}
