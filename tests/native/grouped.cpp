// `grouped.cpp` against the same sums in fp64: random shapes, odd sizes, groups without rows, values that are no numbers.
// Buffers end where the numbers do, so that a sanitizer sees what is read or written past them.

#include "../../src/glassformer/parts/grouped.cpp"

#include <cmath>
#include <cstdio>
#include <limits>
#include <new>
#include <random>
#include <vector>

namespace {

std::mt19937 draw(0);
int64_t wrong = 0, looked = 0;

struct Numbers {  // lie as torch's do
    int64_t count;
    float* at;
    explicit Numbers(int64_t count, bool odd = false) : count(count), at(new (std::align_val_t(64)) float[count]) {
        const float inf = std::numeric_limits<float>::infinity(), strange[] = {0.0f, -0.0f, 1e-40f, inf, -inf, std::nanf("")};
        std::normal_distribution<float> normal;
        for (int64_t k = 0; k < count; ++k) at[k] = normal(draw);
        if (odd && count) at[draw() % count] = strange[draw() % 6];
    }
    Numbers(const Numbers&) = delete;
    ~Numbers() { operator delete[](at, std::align_val_t(64)); }
    float operator[](int64_t k) const { return at[k]; }
};

// The sum of `count` products, and of their sizes.
template <typename F>
void look(float made, int64_t count, F product) {
    double meant = 0, size = 0;
    for (int64_t k = 0; k < count; ++k) meant += product(k), size += std::abs(product(k));
    ++looked;
    wrong += std::isfinite(meant) ? !(std::abs(made - meant) <= 1e-5 * size) : std::isnan(meant) != std::isnan(made);
}

void check(int64_t n, int64_t most, int64_t inner, int64_t out, bool odd) {
    std::vector<int32_t> ends(n);
    int32_t rows = 0;
    for (auto& one : ends) one = rows += draw() % 3 ? draw() % (most + 1) : 0;
    const Numbers x(rows * inner, odd), w(n * out * inner, odd), grad(rows * out, odd);
    Numbers y(rows * out), of_x(rows * inner), of_w(n * out * inner);
    const bool want_x = draw() % 4, want_w = draw() % 4;
    grouped_product(x.at, w.at, y.at, ends.data(), n, inner, out);
    wrong += grouped_product_back(
        grad.at, x.at, w.at, want_x ? of_x.at : nullptr, want_w ? of_w.at : nullptr, ends.data(), n, inner, out);
    for (int64_t j = 0, first = 0; j < n; first = ends[j++]) {
        const float* own = w.at + j * out * inner;
        for (int64_t r = first; r < ends[j]; ++r) {
            for (int64_t o = 0; o < out; ++o)
                look(y[r * out + o], inner, [&](int64_t i) { return double(x[r * inner + i]) * own[o * inner + i]; });
            for (int64_t i = 0; want_x && i < inner; ++i)
                look(of_x[r * inner + i], out, [&](int64_t o) { return double(grad[r * out + o]) * own[o * inner + i]; });
        }
        for (int64_t k = 0; want_w && k < out * inner; ++k)
            look(of_w[j * out * inner + k], ends[j] - first, [&](int64_t r) {
                return double(grad[(first + r) * out + k / inner]) * x[(first + r) * inner + k % inner];
            });
    }
}

// Experts: the result by its definition; of gradients only what is read and written.
void check_experts(int64_t tokens, int64_t n, int64_t d, int64_t f) {
    const int64_t k = 1 + draw() % n, rows = tokens * k;
    std::vector<int64_t> chosen(rows), place(rows);
    std::vector<int32_t> ends(n);
    const Numbers p(tokens * n), x(tokens * d), grad(tokens * d), gate(n * f * d), up(n * f * d), down(n * d * f);
    Numbers w(rows), y(tokens * d), by_row(rows * d), opened(rows * f), raised(rows * f), hidden(rows * f), out(rows * d);
    choose(p.at, nullptr, w.at, chosen.data(), tokens, n, k, false, 1);
    wrong += mix(x.at, w.at, chosen.data(), gate.at, up.at, down.at, ends.data(), place.data(), by_row.at, opened.at, raised.at,
                 hidden.at, out.at, y.at, tokens, k, n, d, f);
    const auto of = [&](const Numbers& m, int64_t j, int64_t row, int64_t width, auto given) {
        double sum = 0;
        for (int64_t i = 0; i < width; ++i) sum += m.at[(j * (m.count / n / width) + row) * width + i] * given(i);
        return sum;
    };
    for (int64_t t = 0; t < tokens; ++t) {
        std::vector<double> made(d), size(d);
        for (int64_t c = 0; c < k; ++c) {
            const int64_t j = chosen[t * k + c];
            std::vector<double> inner(f);
            for (int64_t m = 0; m < f; ++m) {
                const auto own = [&](int64_t i) { return double(x[t * d + i]); };
                const double open = of(gate, j, m, d, own);
                inner[m] = open / (1 + std::exp(-open)) * of(up, j, m, d, own);
            }
            for (int64_t i = 0; i < d; ++i) {
                made[i] += w[t * k + c] * of(down, j, i, f, [&](int64_t m) { return inner[m]; });
                for (int64_t m = 0; m < f; ++m) size[i] += std::abs(w[t * k + c] * inner[m] * down[(j * d + i) * f + m]);
            }
        }
        for (int64_t i = 0; i < d; ++i, ++looked) wrong += !(std::abs(y[t * d + i] - made[i]) <= 1e-4 * (size[i] + 1));
    }
    const bool want = draw() % 2;
    Numbers work(rows * 2 * (d + f)), of_x(x.count), of_w(rows), of_p(p.count), of_gate(gate.count), of_up(up.count),
        of_down(down.count);
    wrong += mix_back(grad.at, w.at, gate.at, up.at, down.at, ends.data(), place.data(), by_row.at, opened.at, raised.at,
                      hidden.at, out.at, work.at, want ? of_x.at : nullptr, want ? of_w.at : nullptr, of_gate.at, of_up.at,
                      want ? nullptr : of_down.at, tokens, k, n, d, f);
    choose_back(of_w.at, p.at, w.at, chosen.data(), of_p.at, tokens, n, k, true, 1);
}

}  // namespace

int main() {
    for (int round = 0; round < ROUNDS; ++round)
        check(1 + draw() % 5, 1 + draw() % 40, 1 + draw() % 90, 1 + draw() % 150, round % 4 == 3);
    for (int round = 0; round < ROUNDS / 2; ++round)
        check_experts(1 + draw() % 30, 1 + draw() % 5, 1 + draw() % 70, 1 + draw() % 90);
    check(3, 9, 560, 630, false);  // gradients that are written past the cache
    std::printf("%lld of %lld wrong\n", (long long)wrong, (long long)looked);
    return wrong != 0;
}
