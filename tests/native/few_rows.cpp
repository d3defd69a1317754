// `few_rows.cpp` against the same sums written plainly, to the bit: random shapes, odd sizes, activations that are no
// numbers, scales too small for the usual form. Buffers end where the numbers do, so that a sanitizer sees what is read past them.
// With IMAGINED, the instructions of AVX-VNNI and AVX512-VNNI are functions, for processors that lack them.

#ifdef IMAGINED
#include "imagined.h"
#endif

#include "../../src/glassformer/parts/few_rows.cpp"

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

float in_pairs(const float a[8]) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }

struct Group {
    int32_t q[32];
    float step, total;
};

Group rounded(const uint16_t* x) {
    Group made;
    float most = 0x1p-80f, sums[8];
    for (int k = 0; k < 32; ++k)
        if (std::fabs(wide(x[k])) > most) most = std::fabs(wide(x[k]));
    for (int k = 0; k < 8; ++k)
        sums[k] = (wide(x[k]) + wide(x[k + 8])) + (wide(x[k + 16]) + wide(x[k + 24]));
    const float over = 32512 / most;
    for (int k = 0; k < 32; ++k) {
        const float q = std::nearbyint(wide(x[k]) * over);
        made.q[k] = std::isfinite(q) ? int32_t(q) : 0;
    }
    made.total = in_pairs(sums);
    made.step = most / 32512 + 0 * made.total;
    return made;
}

uint16_t of_4(const uint16_t* x, const uint8_t* packed, const uint16_t* scales, int64_t inner, int64_t o) {
    float sum = 0;
    for (int64_t g = 0; g < inner / 32; ++g) {
        const Group in = rounded(x + 32 * g);
        int32_t dot = 0;
        for (int64_t k = 0; k < 32; ++k) {
            const int64_t column = 32 * g + k;
            const uint8_t both = packed[((o / 16 * (inner / 8) + column / 8) * 16 + o % 16) * 4 + column % 4];
            dot += ((column % 8 < 4 ? both & 15 : both >> 4) - 8) * in.q[k];
        }
        const uint16_t* pair = scales + ((o / 16 * (inner / 32) + g) * 16 + o % 16) * 2;
        const float product = float(dot) * in.step;
        sum = std::fma(wide(pair[0]), product, std::fma(wide(pair[1]), in.total, sum));
    }
    return narrow(sum);
}

uint16_t of_8(const uint16_t* x, const int8_t* packed, const uint16_t* scales, int64_t inner, int64_t o) {
    float sum = 0;
    for (int64_t g = 0; g < inner / 32; ++g) {
        const Group in = rounded(x + 32 * g);
        int32_t dot = 0;
        for (int64_t k = 0; k < 32; ++k) {
            const int64_t column = 32 * g + k;
            dot += packed[((o / 16 * (inner / 4) + column / 4) * 16 + o % 16) * 4 + column % 4] * in.q[k];
        }
        sum = std::fma(float(dot), in.step, sum);
    }
    return narrow(sum * wide(scales[o]));
}

bool same(uint16_t a, uint16_t b) { return a == b || (std::isnan(wide(a)) && std::isnan(wide(b))); }

}  // namespace

int main() {
    std::mt19937 draw(0);
    const float large = std::numeric_limits<float>::max(), inf = std::numeric_limits<float>::infinity();
    const float odd[] = {0.0f, -0.0f, 1e-30f, -1e-38f, 1e-40f, 3e38f, inf, -inf, std::nanf(""), 1e20f, -large};
    int64_t wrong = 0, looked = 0;
    for (int round = 0; round < ROUNDS; ++round) {
        const int64_t rows = round % 7 == 6 ? (round % 2 ? 187 : 63) + draw() % 8 : draw() % 30, inner = 32 * (1 + draw() % 9);
        const int64_t blocks = 1 + draw() % 5, out = 16 * blocks;
        const float size = std::ldexp(1.0f, int(draw() % 20) * (round % 3 == 0 ? -7 : 1) - 10);
        std::normal_distribution<float> normal;
        std::vector<uint16_t> x(rows * inner), pairs(blocks * inner), scales(out);
        std::vector<uint8_t> four(blocks * inner * 8);
        std::vector<int8_t> eight(out * inner);
        for (auto& one : x) one = narrow(normal(draw) * size);
        if (round % 5 == 4)
            for (int k = 0; k < 3 && rows; ++k) x[draw() % x.size()] = narrow(odd[draw() % 11]);
        if (round % 11 == 10)
            for (auto& one : x) one = narrow(draw() % 2 ? -3.0f : 3.0f);  // sums as large as they can be
        for (auto& one : pairs) one = narrow(normal(draw) * (round % 4 == 3 ? 1e-39f : 0.1f));
        for (auto& one : scales) one = narrow(std::fabs(normal(draw)) * (round % 4 == 3 ? 1e-39f : 0.1f));
        for (auto& one : four) one = round % 11 == 10 ? 255 : draw();
        for (auto& one : eight) one = round % 11 == 10 ? -127 : int(draw() % 255) - 127;
        std::vector<uint16_t> y(rows * out), z(rows * out);
        few_rows_of_4_bits(x.data(), four.data(), pairs.data(), y.data(), rows, inner, out);
        few_rows_of_8_bits(x.data(), eight.data(), scales.data(), z.data(), rows, inner, out);
        for (int64_t n = 0; n < rows; ++n) {
            for (int64_t o = 0; o < out; ++o, ++looked)
                wrong += !same(y[n * out + o], of_4(&x[n * inner], four.data(), pairs.data(), inner, o));
            for (int64_t o = 0; o < out; ++o, ++looked)
                wrong += !same(z[n * out + o], of_8(&x[n * inner], eight.data(), scales.data(), inner, o));
        }
    }
    std::printf("%lld of %lld wrong\n", (long long)wrong, (long long)looked);
    return wrong != 0;
}
