// Products of one row x (i,) with matrices of 4 and 8 bits, for processors with AVX512-VNNI and -VBMI. Each group of 32
// values of x is rounded to 16 bits with a scale of its own, which are two numbers of 8, so that 64 products are one
// instruction and the matrix is read as fast as memory gives it. `one_row.py` has the definitions; this file is compiled
// into the decoding step.

#include <immintrin.h>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t GROUP = 32;  // values that share a scale, of x and of a 4-bit matrix
constexpr int64_t BLOCK = 64;  // rows of a 4-bit matrix that lie together
constexpr float MOST = 127 * 256;

inline __m512 from_bf16(const uint16_t* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

inline void to_bf16(uint16_t* y, __m512 value) {  // to the nearest, ties to even
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256((__m256i*)y, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

// Zeros, where registers of 64 bytes are read at once.
struct Aligned {
    std::vector<__m512i> memory;
    explicit Aligned(int64_t bytes) : memory((bytes + 63) / 64, _mm512_setzero_si512()) {}
    int8_t* bytes() { return (int8_t*)memory.data(); }
    const int8_t* bytes() const { return (const int8_t*)memory.data(); }
};

// x ~ step_g q, q = 256 high + low; sum_g of the values themselves, count_g of q. Zeros after the last group.
struct Rounded {
    Aligned high, low;
    std::vector<float> step, sum;
    std::vector<int32_t> count;

    Rounded(const uint16_t* x, int64_t inner)
        : high(inner), low(inner), step(inner / GROUP), sum(inner / GROUP), count(inner / GROUP) {
        for (int64_t g = 0; g < inner / GROUP; ++g) {
            const __m512 parts[2] = {from_bf16(x + GROUP * g), from_bf16(x + GROUP * g + 16)};
            const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(parts[0]), _mm512_abs_ps(parts[1])));
            const __m512 over = _mm512_set1_ps(most > 0 ? MOST / most : 0);
            __m512i total = _mm512_setzero_si512();
            for (int half = 0; half < 2; ++half) {
                const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(parts[half], over));
                const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
                const __m512i l = _mm512_sub_epi32(q, _mm512_slli_epi32(h, 8));
                _mm_storeu_si128((__m128i*)(high.bytes() + GROUP * g + 16 * half), _mm512_cvtepi32_epi8(h));
                _mm_storeu_si128((__m128i*)(low.bytes() + GROUP * g + 16 * half), _mm512_cvtepi32_epi8(l));
                total = _mm512_add_epi32(total, q);
            }
            sum[g] = _mm512_reduce_add_ps(_mm512_add_ps(parts[0], parts[1]));
            step[g] = most / MOST + 0 * sum[g];  // of what is no number, none
            count[g] = _mm512_reduce_add_epi32(total);
        }
    }
};

inline __m512i dots(__m512i high, __m512i low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }

inline __m512i four(const int8_t* x) {
    int32_t together;
    std::memcpy(&together, x, 4);
    return _mm512_set1_epi32(together);
}

// packed (rows/64, inner, 32): a byte holds a row of the block's first half (low) and one of its second.
// scales (groups, rows, 2) bf16: s and z; w = (q - 8) s + z.
void rows_of_4_bits(
    const uint16_t* x, const void* packed, const uint16_t* scales, uint16_t* y, int64_t inner, int64_t rows
) {
    const Rounded in(x, inner);
    alignas(64) uint8_t order[2][64];  // four columns of 16 rows, from two registers of two columns of 32
    for (int part = 0; part < 2; ++part)
        for (int row = 0; row < 16; ++row)
            for (int k = 0; k < 4; ++k) order[part][4 * row + k] = 32 * k + 16 * part + row;
    const __m512i upper = _mm512_load_si512(order[0]), lower = _mm512_load_si512(order[1]);
    const __m512i nibble = _mm512_set1_epi8(15), left = _mm512_set1_epi32(0xffff0000);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < rows / BLOCK; ++block) {
        const uint8_t* w = (const uint8_t*)packed + block * inner * (BLOCK / 2);
        __m512 out[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int64_t g = 0; g < inner / GROUP; ++g) {
            __m512i high[4], low[4];
            for (int part = 0; part < 4; ++part) {
                high[part] = _mm512_setzero_si512();
                low[part] = _mm512_set1_epi32(-8 * in.count[g]);
            }
#pragma GCC unroll 8
            for (int64_t k = GROUP * g; k < GROUP * (g + 1); k += 4, w += 2 * BLOCK) {
                const __m512i x_high = four(in.high.bytes() + k), x_low = four(in.low.bytes() + k);
                const __m512i columns = _mm512_loadu_si512(w), next = _mm512_loadu_si512(w + BLOCK);
                const __m512i a = _mm512_permutex2var_epi8(columns, upper, next);
                const __m512i b = _mm512_permutex2var_epi8(columns, lower, next);
                const __m512i parts[4] = {
                    _mm512_and_si512(a, nibble), _mm512_and_si512(b, nibble),
                    _mm512_and_si512(_mm512_srli_epi16(a, 4), nibble), _mm512_and_si512(_mm512_srli_epi16(b, 4), nibble)
                };
#pragma GCC unroll 4
                for (int part = 0; part < 4; ++part) {
                    high[part] = _mm512_dpbusd_epi32(high[part], parts[part], x_high);
                    low[part] = _mm512_dpbusd_epi32(low[part], parts[part], x_low);
                }
            }
            const __m512 step = _mm512_set1_ps(in.step[g]), sum = _mm512_set1_ps(in.sum[g]);
            for (int part = 0; part < 4; ++part) {
                const __m512i both = _mm512_loadu_si512(scales + 2 * (g * rows + block * BLOCK + 16 * part));
                const __m512 s = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                const __m512 z = _mm512_castsi512_ps(_mm512_and_si512(both, left));
                const __m512 dot = _mm512_mul_ps(_mm512_cvtepi32_ps(dots(high[part], low[part])), step);
                out[part] = _mm512_fmadd_ps(s, dot, _mm512_fmadd_ps(z, sum, out[part]));
            }
        }
        for (int part = 0; part < 4; ++part) to_bf16(y + block * BLOCK + 16 * part, out[part]);
    }
}

// packed (rows, inner) int8, scales (rows,) bf16; w = q s.
void rows_of_8_bits(
    const uint16_t* x, const void* packed, const uint16_t* scales, uint16_t* y, int64_t inner, int64_t rows
) {
    const Rounded in(x, inner);
    const int8_t *x_high = in.high.bytes(), *x_low = in.low.bytes();
    Aligned steps(4 * BLOCK * ((inner + BLOCK - 1) / BLOCK)), starts(steps);
    float* step = (float*)steps.bytes();
    int32_t* start = (int32_t*)starts.bytes();  // the instruction takes q + 128 of W, for which this makes up
    for (int64_t k = 0; k < inner; ++k) {
        step[k / 4] = in.step[k / GROUP];
        start[k / 4] -= 128 * (256 * x_high[k] + x_low[k]);
    }
    const __m512i sign = _mm512_set1_epi8((char)0x80);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {  // one after the other, as they lie: memory is read ahead
        const int8_t* w = (const int8_t*)packed + row * inner;
        __m512 out = _mm512_setzero_ps();
        for (int64_t at = 0; at < inner; at += BLOCK) {
            const __m512i some = inner - at >= BLOCK
                ? _mm512_loadu_si512(w + at)
                : _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(w + at)));  // the rest meets zeros
            const __m512i parts = _mm512_xor_si512(some, sign);
            const __m512i high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), parts, _mm512_load_si512(x_high + at));
            const __m512i low = _mm512_dpbusd_epi32(
                _mm512_load_si512(start + at / 4), parts, _mm512_load_si512(x_low + at));
            out = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots(high, low)), _mm512_load_ps(step + at / 4), out);
        }
        const uint32_t bits = uint32_t(scales[row]) << 16;
        float s;
        std::memcpy(&s, &bits, 4);
        uint16_t kept[16];
        to_bf16(kept, _mm512_set1_ps(_mm512_reduce_add_ps(out) * s));
        y[row] = kept[0];
    }
}

using Product = void(const uint16_t*, const void*, const uint16_t*, uint16_t*, int64_t, int64_t);

AOTITorchError one_row(
    Product product, AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle scales, int64_t axis,
    AtenTensorHandle* made
) {
    void *in, *w, *s, *y;
    int64_t shape[2] = {1, 0}, inner;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(scales, axis, &shape[1]));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(x, 1, &inner));
    const int64_t strides[2] = {shape[1], 1};
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        2, shape, strides, aoti_torch_dtype_bfloat16(), aoti_torch_device_type_cpu(), 0, made));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(x, &in));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(packed, &w));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(scales, &s));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(*made, &y));
    product((const uint16_t*)in, w, (const uint16_t*)s, (uint16_t*)y, inner, shape[1]);
    return AOTI_TORCH_SUCCESS;
}

}  // namespace

AOTITorchError aoti_torch_cpu_row_of_4_bits(
    AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle scales, AtenTensorHandle* made
) {
    return one_row(rows_of_4_bits, x, packed, scales, 1, made);
}

AOTITorchError aoti_torch_cpu_row_of_8_bits(
    AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle scales, AtenTensorHandle* made
) {
    return one_row(rows_of_8_bits, x, packed, scales, 0, made);
}
