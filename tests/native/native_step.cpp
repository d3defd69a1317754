// Every instruction of a step on drawn numbers: prints a line for each, its name and the numbers that it leaves, in
// hexadecimal, so that processors can be compared to the bit.

#include "../../src/glassformer/parts/native_step.cpp"

#include <cstdio>
#include <random>

using namespace native_step;

namespace {

constexpr int64_t ROWS = 3, WIDTH = 96, SLOTS = 16, HEADS = 4, GROUPS = 2, KEYS = 12, VALUES = 20;
std::mt19937 draw(0);

float uniform() { return int32_t(draw()) * 0x1p-30f; }  // -2 .. 2, alike everywhere

std::vector<float> wide(int64_t count) {
    std::vector<float> made(count);
    for (float& one : made) one = uniform();
    return made;
}

std::vector<uint16_t> narrow(int64_t count) {
    std::vector<uint16_t> made(count);
    for (uint16_t& one : made) one = to_bf16(uniform());
    return made;
}

std::vector<int8_t> bytes(int64_t count) {
    std::vector<int8_t> made(count);
    for (int8_t& one : made) one = int(draw() % 255) - 127;
    return made;
}

// Values: four of each row's WIDTH numbers that are read, then what is written.
std::vector<float> values = wide(5 * ROWS * WIDTH);
const int64_t lengths[ROWS] = {0, 9, 21}, tokens[ROWS] = {6, 0, 3};

Place at(int64_t buffer) { return {buffer * WIDTH, WIDTH, 0}; }

Instruction made(Kind kind, int64_t outer) {
    Instruction op = {};
    op.kind = kind, op.code = op.bias_code = NONE;
    op.inner = WIDTH, op.outer = outer, op.width = WIDTH, op.heads = 1;
    op.a = at(0), op.b = at(1), op.c = at(2), op.out = at(4);
    return op;
}

void run(const char* name, std::vector<Instruction> list, const Cache* cache = nullptr, const Table* table = nullptr) {
    std::fill(values.begin() + 4 * ROWS * WIDTH, values.end(), 0.0f);
    if (run_native_step(
            list.data(), list.size(), ROWS, 1, ROWS, values.data(), cache, table, lengths, tokens, WIDTH, 2)) std::abort();
    std::printf("%s", name);
    for (int64_t k = 4 * ROWS * WIDTH; k < 5 * ROWS * WIDTH; ++k) std::printf(" %a", values[k]);
    std::printf("\n");
}

void linears() {
    const auto w = wide(50 * WIDTH), bias = wide(50);
    const auto thin = narrow(50 * WIDTH), scales = narrow(WIDTH / 32 * 64 * 2);
    const auto whole = bytes(50 * WIDTH), four = bytes(WIDTH / 2 * 64);
    Instruction op = made(LINEAR, 50);
    op.code = FP32, op.weight = w.data(), op.bias_code = FP32, op.bias = bias.data();
    run("fp32", {op});
    op.code = BF16, op.weight = thin.data(), op.bias_code = NONE;
    run("bf16", {op});
    Instruction round = made(ROUND, WIDTH);
    op.code = INT8, op.weight = whole.data(), op.scales = scales.data(), op.outer = 37;
    run("int8", {round, op});
    round.both = 1, op.code = INT4, op.weight = four.data(), op.outer = 64;
    run("int4", {round, op});
}

void norms() {
    const auto w = wide(WIDTH), bias = wide(WIDTH);
    const auto thin = narrow(WIDTH);
    Instruction op = made(NORM, WIDTH);
    op.f = 1e-5f;
    run("rms", {op});
    op.code = BF16, op.weight = thin.data(), op.heads = 4, op.width = 24, op.both = op.plus_one = 1;
    run("rms of heads", {op});
    op = made(NORM, WIDTH);
    op.f = 1e-5f, op.centred = 1, op.code = op.bias_code = FP32, op.weight = w.data(), op.bias = bias.data();
    run("layer norm", {op});
}

void elementwise() {
    const char* names[] = {"same", "relu", "relu2", "sigmoid", "silu", "gelu", "gelu_tanh"};
    for (int both = 0; both < 2; ++both)
        for (int phi = 0; phi < 7; ++phi) {
            Instruction op = made(ACTIVATE, 90);
            op.phi = phi, op.both = both;
            run(names[phi], {op});
        }
    for (Kind kind : {ADD, CAP, CLAMP}) {
        Instruction op = made(kind, 90);
        op.both = kind == ADD, op.f = kind == CLAMP ? -0.5f : 1.5f, op.g = 0.7f;
        run(kind == ADD ? "add" : kind == CAP ? "cap" : "clamp", {op});
    }
    const auto cosine = wide(22 * 8), sine = wide(22 * 8);
    for (int k = 0; k < 4; ++k) {
        const int interleaved = k % 2;
        const Table table = {cosine.data(), sine.data(), k < 2 ? ROWS : 0};
        Instruction copy = made(ACTIVATE, WIDTH), op = made(TURN, WIDTH);
        op.a = at(4), op.heads = 4, op.width = 24, op.turned = 8, op.interleaved = interleaved;
        run("turn", {copy, op}, nullptr, &table);
    }
}

void embeddings() {
    const auto w = wide(7 * WIDTH);
    const auto thin = narrow(7 * WIDTH);
    Instruction op = made(EMBED, WIDTH);
    op.inner = 7, op.f = 1.5f, op.code = FP32, op.weight = w.data();
    run("embed fp32", {op});
    op.code = BF16, op.weight = thin.data();
    run("embed bf16", {op});
}

template <typename X>
void attention(const char* name, Code code, std::vector<X> keys, std::vector<X> cells) {
    auto key_scales = narrow(ROWS * GROUPS * SLOTS), value_scales = narrow(ROWS * GROUPS * SLOTS);
    const Cache cache = {keys.data(), cells.data(), key_scales.data(), value_scales.data(), SLOTS,
                         GROUPS * SLOTS * KEYS, GROUPS * SLOTS * VALUES, GROUPS * SLOTS, code, 0};
    const auto slopes = wide(HEADS);
    Instruction keep = made(KEEP, 0), op = made(ATTEND, 0);
    keep.groups = op.groups = GROUPS, keep.width = op.width = KEYS, keep.value_width = op.value_width = VALUES;
    op.heads = HEADS, op.window = SLOTS, op.f = 0.3f, op.scales = slopes.data();
    run(name, {keep, op}, &cache);
}

}  // namespace

int main() {
    linears(), norms(), elementwise(), embeddings();
    const int64_t k = ROWS * GROUPS * SLOTS * KEYS, v = ROWS * GROUPS * SLOTS * VALUES;
    const auto keys = wide(k), cells = wide(v);  // named, as the order of drawn arguments is the compiler's
    const auto thin_keys = narrow(k), thin_cells = narrow(v);
    const auto whole_keys = bytes(k), whole_cells = bytes(v);
    attention("attention fp32", FP32, keys, cells);
    attention("attention bf16", BF16, thin_keys, thin_cells);
    attention("attention int8", INT8, whole_keys, whole_cells);
}
