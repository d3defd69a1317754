// `many_rows.cpp` against the same sums written plainly, to the bit: random shapes, odd sizes, values that are no
// numbers. Buffers end where the numbers do, so that a sanitizer sees what is read past them.

#include "../../src/glassformer/parts/many_rows.cpp"

#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

namespace {

float wide(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

uint16_t narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

bool same(uint16_t a, uint16_t b) { return a == b || (std::isnan(wide(a)) && std::isnan(wide(b))); }

}  // namespace

int main() {
    std::mt19937 draw(0);
    const float inf = std::numeric_limits<float>::infinity(), odd[] = {0.0f, -0.0f, 1e-40f, 3e38f, inf, -inf, std::nanf("")};
    std::normal_distribution<float> normal;
    int64_t wrong = 0, looked = 0;
    for (int round = 0; round < ROUNDS; ++round) {
        const int64_t rows = round % 7 == 6 ? 40 + draw() % 70 : draw() % 18;
        const int64_t inner = 1 + draw() % 90, out = 1 + draw() % 70;
        std::vector<uint16_t> x(rows * inner), w(out * inner), y(rows * out);
        for (auto& one : x) one = narrow(normal(draw));
        for (auto& one : w) one = narrow(normal(draw) * (round % 4 == 3 ? 1e-39f : 0.1f));
        if (round % 5 == 4)
            for (int k = 0; k < 3 && rows; ++k) x[draw() % x.size()] = narrow(odd[draw() % 7]);
        wrong += product_of_many_rows(x.data(), w.data(), y.data(), rows, inner, out);
        for (int64_t n = 0; n < rows; ++n)
            for (int64_t o = 0; o < out; ++o, ++looked) {
                float sum = 0;
                for (int64_t i = 0; i < inner; ++i) sum = std::fma(wide(x[n * inner + i]), wide(w[o * inner + i]), sum);
                wrong += !same(y[n * out + o], narrow(sum));
            }
    }
    std::printf("%lld of %lld wrong\n", (long long)wrong, (long long)looked);
    return wrong != 0;
}
