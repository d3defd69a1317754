// `fused_loops.cpp` against the same formulas in fp64: random shapes, odd sizes, views with strides, values that are no numbers.
// Buffers end where the numbers do, so that a sanitizer sees what is read or written past them.

#include "../../src/glassformer/parts/fused_loops.cpp"

#include <cstdio>
#include <limits>
#include <random>

namespace {

using Numbers = std::vector<float>;
std::mt19937 draw(0);
int64_t wrong = 0, looked = 0;
bool odd = false;

int64_t some(int64_t most) { return 1 + draw() % most; }

Numbers drawn(int64_t count, float size = 1) {
    const float inf = std::numeric_limits<float>::infinity(), strange[] = {0.0f, -0.0f, 1e-40f, 1e12f, inf, -inf, std::nanf("")};
    std::normal_distribution<float> normal;
    Numbers x(count);
    for (auto& one : x) one = size * normal(draw);
    if (odd) x[draw() % count] = strange[draw() % 7];
    return x;
}

// A value within `size` * 1e-5 of the meant one; where that is no number, nor is the value.
void look(float made, double meant, double size) {
    ++looked;
    if (!std::isfinite(meant) || !std::isfinite((float)size) || size > 1e37) {
        wrong += !odd;
        return;
    }
    wrong += !(std::abs(made - meant) <= 1e-5 * (size + 1));
}

using Halves = std::vector<uint16_t>;

Halves narrowed(const Numbers& x) {
    Halves y(x.size());
    for (size_t i = 0; i < x.size(); ++i) fused_loops::put(y[i], x[i]);
    return y;
}

// f(numbers of 16 bits, results) has the bits of the same loop, g(the same numbers in fp32, results), rounded.
template <typename F, typename G>
void rounded(const Numbers& x, size_t count, F f, G g) {
    const Halves halves = narrowed(x);
    Numbers wide(x.size()), meant(count);
    Halves made(count);
    for (size_t i = 0; i < x.size(); ++i) wide[i] = fused_loops::value(halves[i]);
    f(halves.data(), made.data()), g(wide.data(), meant.data());
    const Halves to = narrowed(meant);
    for (size_t i = 0; i < count; ++i, ++looked) wrong += made[i] != to[i] && !std::isnan(meant[i]);
}

double logistic(double x) { return 1 / (1 + std::exp(-x)); }

void gating() {
    const int64_t n = some(5000);
    const Numbers gate = drawn(n, 3), up = drawn(n), grad = drawn(n);
    Numbers y(n), a(n), b(n);
    swiglu(gate.data(), up.data(), y.data(), n);
    swiglu_back(grad.data(), gate.data(), up.data(), a.data(), b.data(), n);
    for (int64_t i = 0; i < n; ++i) {
        const double s = logistic(gate[i]), silu = gate[i] * s, slope = s * (1 + gate[i] * (1 - s));
        look(y[i], silu * up[i], std::abs(silu * up[i]));
        look(a[i], grad[i] * up[i] * slope, std::abs(double(grad[i]) * up[i]) * (1 + std::abs(gate[i])));
        look(b[i], grad[i] * silu, std::abs(grad[i] * silu));
    }
    rounded(
        drawn(2 * n, 3), n, [&](const uint16_t* x, uint16_t* y) { swiglu_of_16_bits(x, x + n, y, n); },
        [&](const float* x, float* y) { swiglu(x, x + n, y, n); });
    gelu_tanh(gate.data(), y.data(), n);
    gelu_tanh_back(grad.data(), gate.data(), a.data(), n);
    for (int64_t i = 0; i < n; ++i) {
        const double x = gate[i], root = std::sqrt(2 / std::acos(-1.0)), t = std::tanh(root * (x + 0.044715 * x * x * x));
        const double slope = (1 + t) / 2 + x / 2 * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
        look(y[i], x * (1 + t) / 2, std::abs(x));
        look(a[i], grad[i] * slope, std::abs(grad[i]) * (1 + std::abs(x)));
    }
}

void norms() {
    const int64_t rows = some(200), d = some(70);
    const Numbers x = drawn(rows * d), w = drawn(d), grad = drawn(rows * d);
    Numbers y(rows * d), rates(rows), a(rows * d), b(d), parts((rows + 63) / 64 * d);
    rms_norm(x.data(), w.data(), y.data(), rates.data(), rows, d, 1e-5f);
    rms_norm_back(grad.data(), x.data(), w.data(), rates.data(), a.data(), b.data(), parts.data(), rows, d);
    rounded(
        x, x.size(), [&](const uint16_t* x, uint16_t* y) { rms_norm_of_16_bits(x, w.data(), y, rows, d, 1e-5f); },
        [&](const float* x, float* y) { rms_norm(x, w.data(), y, rates.data(), rows, d, 1e-5f); });
    std::vector<double> of_w(d), size_w(d);
    for (int64_t r = 0; r < rows; ++r) {
        double squares = 0, dot = 0, size = 0;
        for (int64_t i = 0; i < d; ++i) squares += double(x[r * d + i]) * x[r * d + i];
        const double rate = 1 / std::sqrt(squares / d + 1e-5);
        for (int64_t i = 0; i < d; ++i) {
            const double part = double(grad[r * d + i]) * x[r * d + i];
            dot += part * w[i] * rate / d, size += std::abs(part * w[i] * rate) / d;
            of_w[i] += part * rate, size_w[i] += std::abs(part * rate);
        }
        for (int64_t i = 0; i < d; ++i) {
            const double one = x[r * d + i] * rate, scaled = double(grad[r * d + i]) * w[i];
            look(y[r * d + i], one * w[i], std::abs(one * w[i]));
            look(a[r * d + i], (scaled - one * dot) * rate, (std::abs(scaled) + std::abs(one) * size) * rate);
        }
    }
    for (int64_t i = 0; i < d; ++i) look(b[i], of_w[i], size_w[i]);
}

void rotations() {
    const int64_t b = some(3), s = some(20), n = some(4), h = some(40), m = draw() % (h / 2 + 1), r = 2 * m;
    const bool near = draw() % 2, each = draw() % 2, back = draw() % 2;
    const Numbers x = drawn(b * s * n * h), cosine = drawn((each ? b : 1) * s * r + 1), sine = drawn((each ? b : 1) * s * r + 1);
    Numbers y(b * s * n * h);
    const int64_t by_token[] = {s * n * h, n * h, h}, by_head[] = {s * n * h, h, s * h}, sizes[] = {b, s, n, h};
    const float sign = back ? -1 : 1;
    const int64_t of_row = each ? s * r : 0;
    turn_pairs(x.data(), by_token, cosine.data(), sine.data(), of_row, y.data(), by_head, sizes, r, near, sign);
    rounded(
        x, x.size(),
        [&](const uint16_t* x, uint16_t* y) {
            turn_pairs_of_16_bits(x, by_token, cosine.data(), sine.data(), of_row, y, by_head, sizes, r, near, sign);
        },
        [&](const float* x, float* y) {
            turn_pairs(x, by_token, cosine.data(), sine.data(), of_row, y, by_head, sizes, r, near, sign);
        });
    for (int64_t row = 0; row < b; ++row)
        for (int64_t t = 0; t < s; ++t)
            for (int64_t k = 0; k < n; ++k)
                for (int64_t i = 0; i < h; ++i) {
                    const float* from = &x[((row * s + t) * n + k) * h];
                    const int64_t at = (each ? row : 0) * s * r + t * r + i, other = near ? i ^ 1 : i < m ? i + m : i - m;
                    double meant = from[i];
                    if (i < r) meant = double(from[i]) * cosine[at] + double(from[other]) * sine[at] * (back ? -1 : 1);
                    look(y[((row * n + k) * s + t) * h + i], meant, std::abs(from[i] * (i < r ? double(cosine[at]) : 1)) + std::abs(meant));
                }
}

void losses() {
    const int64_t rows = some(40), v = some(90);
    const Numbers logits = drawn(rows * v, 5);
    Numbers grads = logits, made(rows);
    std::vector<int64_t> targets(rows);
    for (auto& one : targets) one = draw() % 5 ? int64_t(draw() % v) : -100;
    wrong += cross_entropy(grads.data(), targets.data(), made.data(), rows, v, 0.5f);
    for (int64_t r = 0; r < rows; ++r) {
        double most = -INFINITY, total = 0;
        for (int64_t i = 0; i < v; ++i) most = std::max(most, double(logits[r * v + i]));
        for (int64_t i = 0; i < v; ++i) total += std::exp(logits[r * v + i] - most);
        const bool counts = targets[r] >= 0;
        const double loss = counts ? most + std::log(total) - logits[r * v + targets[r]] : 0;
        look(made[r], loss, std::abs(most) + std::abs(loss));
        for (int64_t i = 0; i < v; ++i)
            look(grads[r * v + i], counts ? 0.5 * (std::exp(logits[r * v + i] - most) / total - (i == targets[r])) : 0, std::isfinite(loss) ? 1 : loss);
    }
    if (v > 1) {
        targets[0] = v;
        wrong += !cross_entropy(grads.data(), targets.data(), made.data(), rows, v, 0.5f);
    }
}

void attention_in_halves() {
    const int64_t n = 1 + draw() % 2, s = some(70), t = s + draw() % 30, h = some(40), v = some(40);
    const Attention call{1, 2 * n, n, s, t, h, v, draw() % 2 == 0, 0.3f};
    const int64_t of_q = s * 2 * n * h, of_k = t * n * h, all = of_q + of_k + t * n * v;
    Numbers log_z(2 * n * s);
    const auto views = [&](auto* x, auto* z, auto attend) {
        using V = fused_loops::ViewOf<std::remove_const_t<std::remove_pointer_t<decltype(z)>>>;
        auto* at = const_cast<decltype(z)>(x);
        const V q{at, 0, 2 * n * h, h}, k{at + of_q, 0, n * h, h}, w{at + of_q + of_k, 0, n * v, v}, to{z, 0, 2 * n * v, v};
        wrong += attend(&call, &q, &k, &w, &to, log_z.data());
    };
    rounded(
        drawn(all), s * 2 * n * v, [&](const uint16_t* x, uint16_t* z) { views(x, z, attend_of_16_bits); },
        [&](const float* x, float* z) { views(x, z, attend); });
}

void attention() {
    const bool causal = draw() % 2;
    const int64_t b = some(2), g = some(2), n = g * some(2), s = some(110), t = causal ? s : some(110), h = some(40), v = some(40);
    const Attention call{b, n, g, s, t, h, v, causal, 0.3f};
    Numbers q = drawn(b * s * n * h), k = drawn(b * t * g * h), w = drawn(b * t * g * v), d = drawn(b * s * n * v);
    Numbers z(b * s * n * v), log_z(b * n * s), dq(q.size()), dk(k.size()), dw(w.size());
    const auto view = [](Numbers& x, int64_t tokens, int64_t heads, int64_t width) {
        return View{x.data(), tokens * heads * width, heads * width, width};
    };
    const View of_q = view(q, s, n, h), of_k = view(k, t, g, h), of_w = view(w, t, g, v), of_z = view(z, s, n, v),
               of_d = view(d, s, n, v), to_q = view(dq, s, n, h), to_k = view(dk, t, g, h), to_w = view(dw, t, g, v);
    wrong += attend(&call, &of_q, &of_k, &of_w, &of_z, log_z.data());
    wrong += attend_back(&call, &of_d, &of_q, &of_k, &of_w, &of_z, log_z.data(), &to_q, &to_k, &to_w);
    std::vector<double> mk(k.size()), mw(w.size());
    for (int64_t row = 0; row < b; ++row)
        for (int64_t one = 0; one < n; ++one) {
            const int64_t head = one / (n / g);
            for (int64_t i = 0; i < s; ++i) {
                const int64_t seen = causal ? i + 1 : t;
                std::vector<double> p(seen), slope(seen), out(v), of(h);
                double most = -INFINITY, total = 0, dot = 0;
                for (int64_t j = 0; j < seen; ++j) {
                    for (int64_t c = 0; c < h; ++c) p[j] += 0.3 * of_q.of(row, one)[i * of_q.token + c] * of_k.of(row, head)[j * of_k.token + c];
                    most = std::max(most, p[j]);
                }
                for (auto& x : p) total += x = std::exp(x - most);
                for (int64_t j = 0; j < seen; ++j) {
                    p[j] /= total;
                    for (int64_t c = 0; c < v; ++c) {
                        const double grad = of_d.of(row, one)[i * of_d.token + c], value = of_w.of(row, head)[j * of_w.token + c];
                        out[c] += p[j] * value, slope[j] += grad * value;
                        mw[(row * t + j) * g * v + head * v + c] += p[j] * grad;
                    }
                    dot += p[j] * slope[j];
                }
                for (int64_t j = 0; j < seen; ++j)
                    for (int64_t c = 0; c < h; ++c) {
                        const double part = 0.3 * p[j] * (slope[j] - dot);
                        of[c] += part * of_k.of(row, head)[j * of_k.token + c];
                        mk[(row * t + j) * g * h + head * h + c] += part * of_q.of(row, one)[i * of_q.token + c];
                    }
                for (int64_t c = 0; c < v; ++c) look(of_z.of(row, one)[i * of_z.token + c], out[c], 10);
                for (int64_t c = 0; c < h; ++c) look(to_q.of(row, one)[i * to_q.token + c], of[c], 30);
            }
        }
    for (size_t i = 0; i < dk.size(); ++i) look(dk[i], mk[i], 100);
    for (size_t i = 0; i < dw.size(); ++i) look(dw[i], mw[i], 100);
}

}  // namespace

int main() {
    for (int round = 0; round < ROUNDS; ++round) {
        odd = round % 4 == 3;
        gating(), norms(), rotations(), losses();
        odd = false;  // one strange number reaches all of a head
        attention(), attention_in_halves();
    }
    std::printf("%lld of %lld wrong\n", (long long)wrong, (long long)looked);
    return wrong != 0;
}
