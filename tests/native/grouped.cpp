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

}  // namespace

int main() {
    for (int round = 0; round < ROUNDS; ++round)
        check(1 + draw() % 5, 1 + draw() % 40, 1 + draw() % 90, 1 + draw() % 150, round % 4 == 3);
    check(3, 9, 560, 630, false);  // gradients that are written past the cache
    std::printf("%lld of %lld wrong\n", (long long)wrong, (long long)looked);
    return wrong != 0;
}
