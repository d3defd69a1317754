// `fused_products.cpp` against the same formulas in fp64, with a plain product in place of the BLAS. Buffers end where the numbers
// do, so that a sanitizer sees what is read or written past them.

#include "../../src/glassformer/parts/fused_products.cpp"

#include <cstdio>
#include <random>

namespace {

using Numbers = std::vector<float>;
using Exact = std::vector<double>;
std::mt19937 draw(0);
int64_t wrong = 0, looked = 0;

int64_t some(int64_t most) { return 1 + draw() % most; }

Numbers drawn(int64_t count, float size = 1) {
    std::normal_distribution<float> normal;
    Numbers x(count);
    for (auto& one : x) one = size * normal(draw);
    return x;
}

void look(const Numbers& made, const Exact& meant) {
    double most = 1;
    for (const double one : meant) most = std::max(most, std::abs(one));
    for (size_t i = 0; i < meant.size(); ++i, ++looked) wrong += !(std::abs(made[i] - meant[i]) <= 2e-5 * most);
}

// c = a b + beta c as BLAS's sgemm: by columns.
void plain(
    const char* turn_a, const char* turn_b, const int32_t* m, const int32_t* n, const int32_t* k, const float* alpha,
    const float* a, const int32_t* lda, const float* b, const int32_t* ldb, const float* beta, float* c, const int32_t* ldc
) {
    for (int64_t j = 0; j < *n; ++j)
        for (int64_t i = 0; i < *m; ++i) {
            double total = 0;
            for (int64_t l = 0; l < *k; ++l)
                total += double(*turn_a == 'T' ? a[i * *lda + l] : a[l * *lda + i]) *
                         (*turn_b == 'T' ? b[l * *ldb + j] : b[j * *ldb + l]);
            float& to = c[j * *ldc + i];
            to = *alpha * total + (*beta ? *beta * to : 0.0);
        }
}

int alone(int) { return 1; }

// (m, n) = a (m, k) @ b, with strides of both.
Exact times(
    const double* a, int64_t a_row, int64_t a_k, const double* b, int64_t b_k, int64_t b_n, int64_t m, int64_t n, int64_t k
) {
    Exact c(m * n);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j)
            for (int64_t l = 0; l < k; ++l) c[i * n + j] += a[i * a_row + l * a_k] * b[l * b_k + j * b_n];
    return c;
}

Exact wide(const Numbers& x) { return Exact(x.begin(), x.end()); }

void sums_of(const Exact& x, int64_t rows, int64_t n, Exact& to) {
    to.assign(n, 0);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t j = 0; j < n; ++j) to[j] += x[r * n + j];
}

// A norm of the rows of x: none, RMS, or with means; and what the code makes of it.
struct Before {
    int64_t rows, d, kind;
    Numbers scale, offset, made, rates, means, parts, of_scale, of_offset;
    Exact rate, less;

    Before(int64_t rows, int64_t d, int64_t blocks)
        : rows(rows), d(d), kind(draw() % 4), scale(drawn(d)), offset(drawn(d)), made(rows * d), rates(rows), means(rows),
          parts(blocks * d * (kind == 3 ? 2 : 1)), of_scale(d), of_offset(kind == 3 ? d : 0), rate(rows, 1), less(rows) {}
    Norm norm() {
        return {kind ? scale.data() : nullptr, kind == 3 ? offset.data() : nullptr, made.data(), rates.data(),
                kind > 1 ? means.data() : nullptr, of_scale.data(), kind == 3 ? of_offset.data() : nullptr, 1e-3f};
    }
    void normalise(Exact& x) {
        for (int64_t r = 0; kind && r < rows; ++r) {
            double square = 0;
            for (int64_t i = 0; kind > 1 && i < d; ++i) less[r] += x[r * d + i] / d;
            for (int64_t i = 0; i < d; ++i) x[r * d + i] -= less[r], square += x[r * d + i] * x[r * d + i];
            rate[r] = 1 / std::sqrt(square / d + double(1e-3f));
            for (int64_t i = 0; i < d; ++i) x[r * d + i] = x[r * d + i] * rate[r] * scale[i] + (kind == 3 ? offset[i] : 0.0);
        }
    }
    // The gradient of the results becomes that of x, which g is added to.
    void compare(Exact& of_x, const Exact& g, const Numbers& x) const {
        if (!kind) return;
        const int64_t count = kind == 3 ? 2 * d : d;
        Exact of_weights(count);
        for (int64_t r = 0; r < rows; ++r) {
            double dot = 0, all = 0;
            const auto unit = [&](int64_t i) { return (x[r * d + i] - less[r]) * rate[r]; };
            for (int64_t i = 0; i < d; ++i) {
                const double to = of_x[r * d + i];
                of_weights[i] += to * unit(i), dot += to * scale[i] * unit(i) / d, all += to * scale[i] / d;
                if (kind == 3) of_weights[d + i] += to;
            }
            for (int64_t i = 0; i < d; ++i)
                of_x[r * d + i] = rate[r] * (of_x[r * d + i] * scale[i] - unit(i) * dot - (kind > 1 ? all : 0)) + g[r * d + i];
        }
        Numbers found = of_scale;
        found.insert(found.end(), of_offset.begin(), of_offset.end());
        look(found, of_weights);
    }
};

// Angles of `tokens` tokens, and their tables.
struct Turns {
    int64_t r;
    bool near;
    Numbers angle, cosine, sine;

    Turns(int64_t tokens, int64_t r, bool near)
        : r(r), near(near), angle(drawn(tokens * r / 2)), cosine(tokens * r), sine(tokens * r) {
        for (int64_t k = 0; k < int64_t(angle.size()); ++k)
            for (int64_t one = 0; one < 2; ++one) {
                const int64_t at = k / (r / 2) * r + pair(k % (r / 2), one);
                cosine[at] = std::cos(angle[k]), sine[at] = (one ? 1 : -1) * std::sin(angle[k]);
            }
    }
    int64_t pair(int64_t i, int64_t one) const { return near ? 2 * i + one : i + one * r / 2; }
    // y (h) = x turned by the angles of a token times `sign`.
    void turn(const double* x, double* y, int64_t token, int64_t h, double sign) const {
        for (int64_t i = r; i < h; ++i) y[i] = x[i];
        for (int64_t i = 0; i < r / 2; ++i) {
            const int64_t a = pair(i, 0), c = pair(i, 1);
            const double theta = sign * angle[token * (r / 2) + i], co = std::cos(theta), si = std::sin(theta);
            const double first = x[a], second = x[c];
            y[a] = first * co - second * si, y[c] = second * co + first * si;
        }
    }
};

// Value and slope.
std::pair<double, double> activated(int64_t number, double x) {
    const double s = 1 / (1 + std::exp(-x)), root = std::sqrt(2 / std::acos(-1.0)), t = std::tanh(root * (x + 0.044715 * x * x * x));
    const double below = std::erfc(-x / std::sqrt(2.0)) / 2, most = std::max(x, 0.0);
    switch (number) {
        case 0: return {x * s, s * (1 + x * (1 - s))};
        case 1: return {x * (1 + t) / 2, (1 + t) / 2 + x / 2 * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x)};
        case 2: return {most, x > 0};
        case 3: return {s, s * (1 - s)};
        case 4: return {most * most, 2 * most};
        default: return {x * below, below + x * root / 2 * std::exp(-x * x / 2)};
    }
}

void feeding() {
    const int64_t rows = some(70), d = some(30), f = some(40), gates = some(2), block = some(20), threads = some(3);
    const bool bias = draw() % 2;
    Before before(rows, d, (rows + block - 1) / block);
    const bool normed = before.kind;
    const int64_t activation = draw() % 6;
    const Call call{plain, alone, rows, d, f, block, threads * block, gates, activation, threads};
    Numbers x = drawn(rows * d), grad = drawn(rows * d), y(rows * d), room(threads * block * f), dx(rows * d);
    std::vector<Numbers> weights, biases, opened(gates, Numbers(rows * f)), rooms(gates + 1, Numbers(threads * block * f)), dw, db;
    std::vector<const float*> at_weights, at_biases, at_opened;
    std::vector<float*> to_opened, at_rooms, at_dw, at_db;
    for (int64_t i = 0; i <= gates; ++i) {
        weights.push_back(drawn(d * f, 0.3f)), biases.push_back(drawn(i < gates ? f : d));
        dw.push_back(Numbers(d * f)), db.push_back(Numbers(i < gates ? f : d));
    }
    for (int64_t i = 0; i <= gates; ++i) {
        at_weights.push_back(weights[i].data()), at_biases.push_back(bias ? biases[i].data() : nullptr);
        at_dw.push_back(dw[i].data()), at_db.push_back(bias ? db[i].data() : nullptr), at_rooms.push_back(rooms[i].data());
        if (i < gates) at_opened.push_back(opened[i].data()), to_opened.push_back(opened[i].data());
    }
    const Norm norm = before.norm();
    feed(&call, &norm, x.data(), at_weights.data(), at_biases.data(), to_opened.data(), room.data(), y.data());
    const bool frozen = draw() % 2, leaf = !normed && draw() % 2;
    if (frozen) at_dw[0] = nullptr;
    feed_back(&call, &norm, before.parts.data(), grad.data(), x.data(), at_weights.data(), at_opened.data(), at_rooms.data(), leaf ? nullptr : dx.data(), at_dw.data(), at_db.data());

    Exact in = wide(x);
    before.normalise(in);
    std::vector<Exact> open, exact;
    for (int64_t i = 0; i <= gates; ++i) exact.push_back(wide(weights[i]));
    for (int64_t i = 0; i < gates; ++i) {
        open.push_back(times(in.data(), d, 1, exact[i].data(), 1, d, rows, f, d));
        for (int64_t j = 0; bias && j < rows * f; ++j) open[i][j] += biases[i][j % f];
    }
    const Exact g = wide(grad);
    const Exact of_hidden = times(g.data(), d, 1, exact[gates].data(), f, 1, rows, f, d);
    Exact inner(rows * f);
    std::vector<Exact> closed(gates, Exact(rows * f));
    for (int64_t j = 0; j < rows * f; ++j) {
        const double a = open[0][j];
        const auto [phi, slope] = activated(activation, a);
        inner[j] = gates == 2 ? phi * open[1][j] : phi;
        closed[0][j] = of_hidden[j] * slope * (gates == 2 ? open[1][j] : 1);
        if (gates == 2) closed[1][j] = of_hidden[j] * phi;
    }
    Exact out = times(inner.data(), f, 1, exact[gates].data(), 1, f, rows, d, f), of_x(rows * d), sums;
    for (int64_t j = 0; j < rows * d; ++j) out[j] += (bias ? biases[gates][j % d] : 0.0) + (normed ? x[j] : 0.0);
    look(y, out);
    for (int64_t i = 0; i < gates; ++i) {
        const Exact part = times(closed[i].data(), f, 1, exact[i].data(), d, 1, rows, d, f);
        for (int64_t j = 0; j < rows * d; ++j) of_x[j] += part[j];
        if (i || !frozen) look(dw[i], times(closed[i].data(), 1, f, in.data(), d, 1, f, d, rows));
        if (bias) sums_of(closed[i], rows, f, sums), look(db[i], sums);
    }
    look(dw[gates], times(g.data(), 1, d, inner.data(), f, 1, d, f, rows));
    if (bias) sums_of(g, rows, d, sums), look(db[gates], sums);
    before.compare(of_x, g, x);
    if (!leaf) look(dx, of_x);
}

void projecting() {
    const int64_t b = some(3), s = some(20), g = some(2), n = g * some(2), d = some(20);
    const int64_t h = 2 * some(9), v = some(9), r = 2 * some(h / 2);
    const int64_t rows = b * s, block = some(15), threads = some(3), front = (n + g) * h, o = front + g * v;
    const bool bias = draw() % 2, near = draw() % 2, each = b > 1 && draw() % 2;
    const Call call{plain, alone, rows, d, o, block, threads * block, 0, 0, threads};
    const Numbers x = drawn(rows * d), weight = drawn(o * d), offset = drawn(o);
    const Turns turns((each ? b : 1) * s, r, near);
    const Heads heads{s, n, g, h, v, r, near, each ? s * r : 0, turns.cosine.data(), turns.sine.data()};
    Numbers q(rows * n * h), k(rows * g * h), w(rows * g * v), made(rows * o), room(threads * block * o), dx(rows * d), dw(o * d), db(o);
    const View of_q{q.data(), n * s * h, h, s * h}, of_k{k.data(), g * s * h, h, s * h};
    project(&call, &heads, x.data(), weight.data(), bias ? offset.data() : nullptr, made.data(), &of_q, &of_k);

    const Exact in = wide(x), exact = wide(weight);
    Exact y = times(in.data(), d, 1, exact.data(), 1, d, rows, o, d), mq(q.size()), mk(k.size()), grad(rows * o);
    for (int64_t j = 0; bias && j < rows * o; ++j) y[j] += offset[j % o];
    Numbers dq = drawn(q.size()), dk = drawn(k.size()), dv = drawn(w.size());
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t head = 0; head < n + g; ++head) {
            const int64_t t = row % s, text = row / s, count = head < n ? n : g, one = head < n ? head : head - n;
            const int64_t to = ((text * count + one) * s + t) * h, from = row * o + head * h;
            Exact& meant = head < n ? mq : mk;
            const Numbers& given = head < n ? dq : dk;
            const Exact from_q(given.begin() + to, given.begin() + to + h);
            turns.turn(&y[from], &meant[to], each ? row : t, h, 1), turns.turn(from_q.data(), &grad[from], each ? row : t, h, -1);
        }
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < g * v; ++i) grad[row * o + front + i] = dv[row * g * v + i];
    look(q, mq), look(k, mk), look(made, y);
    const View by_q{dq.data(), n * s * h, h, s * h}, by_k{dk.data(), g * s * h, h, s * h}, by_w{dv.data(), s * g * v, g * v, v};
    project_back(&call, &heads, &by_q, &by_k, &by_w, x.data(), weight.data(), room.data(), dx.data(), dw.data(),
                 bias ? db.data() : nullptr);
    look(dx, times(grad.data(), o, 1, exact.data(), d, 1, rows, d, o));
    look(dw, times(grad.data(), 1, o, in.data(), d, 1, o, d, rows));
    Exact sums;
    if (bias) sums_of(grad, rows, o, sums), look(db, sums);
}

void mixing() {
    const int64_t b = some(4), s = some(30), g = some(2), n = g * some(2), d = some(20), h = 2 * some(9), v = some(20);
    const int64_t r = draw() % 3 ? 2 * some(h / 2) : 0, rows = b * s, threads = some(3), texts = some(b), step = texts * s;
    const int64_t block = 1 + draw() % step, o = (n + g) * h + g * v, w = n * v;
    const bool bias = draw() % 2, causal = draw() % 2, each = b > 1 && draw() % 2;
    const Turns turns(each ? rows : s, r, draw() % 2);
    const Call call{plain, alone, rows, d, o, block, step, 0, 0, threads};
    const Heads heads{s, n, g, h, v, r, turns.near, each ? s * r : 0, turns.cosine.data(), turns.sine.data()};
    const Attention attention{b, n, g, s, s, h, v, causal, 0.4f};
    Before before(rows, d, (rows + step - 1) / step * ((step + block - 1) / block));
    const bool normed = before.kind;
    const Numbers x = drawn(rows * d), weight = drawn(o * d, 0.3f), offset = drawn(o), after = drawn(d * w, 0.3f), last = drawn(d),
                  grad = drawn(rows * d);
    Numbers qkv(rows * o), z(rows * w), log_z(b * n * s), y(rows * d), room(step * o), room_z(step * w), dx(rows * d), dw(o * d), db(o), da(d * w), dl(d);
    const Norm norm = before.norm();
    wrong += mix(&call, &norm, &heads, &attention, x.data(), weight.data(), bias ? offset.data() : nullptr, after.data(),
                 bias ? last.data() : nullptr, qkv.data(), z.data(), log_z.data(), y.data());
    wrong += mix_back(&call, &norm, &heads, &attention, before.parts.data(), grad.data(), x.data(), weight.data(), after.data(), qkv.data(),
                      z.data(), log_z.data(), room.data(), room_z.data(), dx.data(), dw.data(), bias ? db.data() : nullptr,
                      da.data(), bias ? dl.data() : nullptr);

    Exact in = wide(x);
    before.normalise(in);
    const Exact of_qkv = wide(weight), of_z = wide(after), gy = wide(grad);
    Exact open = times(in.data(), d, 1, of_qkv.data(), 1, d, rows, o, d), mixed(rows * w), closed(rows * o);
    for (int64_t j = 0; bias && j < rows * o; ++j) open[j] += offset[j % o];
    const auto turned = [&](Exact& x, double sign) {
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t head = 0; head < n + g; ++head)
                turns.turn(&x[row * o + head * h], &x[row * o + head * h], each ? row : row % s, h, sign);
    };
    turned(open, 1);
    const Exact dz = times(gy.data(), d, 1, of_z.data(), w, 1, rows, w, d);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t one = 0; one < n; ++one) {
            const int64_t first = row / s * s, seen = causal ? row % s + 1 : s, shared = one / (n / g);
            const double* q = &open[row * o + one * h];
            const auto key = [&](int64_t j) { return (first + j) * o + (n + shared) * h; };
            const auto value = [&](int64_t j) { return (first + j) * o + (n + g) * h + shared * v; };
            Exact p(seen), slope(seen);
            double total = 0, mean = 0;
            for (int64_t j = 0; j < seen; ++j) {
                double score = 0;
                for (int64_t i = 0; i < h; ++i) score += q[i] * open[key(j) + i];
                total += p[j] = std::exp(double(0.4f) * score);
            }
            for (int64_t j = 0; j < seen; ++j) {
                p[j] /= total;
                for (int64_t i = 0; i < v; ++i) {
                    mixed[row * w + one * v + i] += p[j] * open[value(j) + i];
                    slope[j] += dz[row * w + one * v + i] * open[value(j) + i];
                    closed[value(j) + i] += p[j] * dz[row * w + one * v + i];
                }
                mean += p[j] * slope[j];
            }
            for (int64_t j = 0; j < seen; ++j)
                for (int64_t i = 0; i < h; ++i) {
                    const double ds = double(0.4f) * p[j] * (slope[j] - mean);
                    closed[row * o + one * h + i] += ds * open[key(j) + i], closed[key(j) + i] += ds * q[i];
                }
        }
    turned(closed, -1);
    Exact out = times(mixed.data(), w, 1, of_z.data(), 1, w, rows, d, w), sums;
    for (int64_t j = 0; j < rows * d; ++j) out[j] += (bias ? last[j % d] : 0.0) + (normed ? x[j] : 0.0);
    look(qkv, open), look(z, mixed), look(y, out);
    Exact of_x = times(closed.data(), o, 1, of_qkv.data(), d, 1, rows, d, o);
    look(dw, times(closed.data(), 1, o, in.data(), d, 1, o, d, rows));
    look(da, times(gy.data(), 1, d, mixed.data(), w, 1, d, w, rows));
    if (bias) sums_of(closed, rows, o, sums), look(db, sums), sums_of(gy, rows, d, sums), look(dl, sums);
    before.compare(of_x, gy, x);
    look(dx, of_x);
}

}  // namespace

int main() {
    for (int round = 0; round < ROUNDS; ++round) feeding(), projecting(), mixing();
    std::printf("%lld of %lld wrong\n", (long long)wrong, (long long)looked);
    return wrong != 0;
}
