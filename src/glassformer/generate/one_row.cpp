// Products of one row x (i,) with matrices of 4 and 8 bits, for processors with AVX512-VNNI and -VBMI. Each group of 32
// values of x is rounded to 8 bits with a scale of its own, so that 64 products are one instruction and the matrix is
// read as fast as memory gives it. `one_row.py` has the definitions; this file is compiled into the decoding step.

#include <immintrin.h>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t GROUP = 32;  // values that share a scale, of x and of a 4-bit matrix
constexpr int64_t BLOCK = 64;  // rows of a 4-bit matrix that lie together

inline __m512 from_bf16(const uint16_t* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

inline void to_bf16(uint16_t* y, __m512 value) {  // to the nearest, ties to even
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256((__m256i*)y, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

// x ~ step_g q, q in -127..127; sum_g of the values themselves, count_g of q. Filled up with zeros to pairs of groups.
struct Rounded {
    std::vector<int8_t> q;
    std::vector<float> step, sum;
    std::vector<int32_t> count;

    Rounded(const uint16_t* x, int64_t inner)
        : q(inner + GROUP), step(inner / GROUP + 1), sum(inner / GROUP + 1), count(inner / GROUP + 1) {
        for (int64_t g = 0; g < inner / GROUP; ++g) {
            const __m512 a = from_bf16(x + GROUP * g), b = from_bf16(x + GROUP * g + 16);
            const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
            const __m512 over = _mm512_set1_ps(most > 0 ? 127 / most : 0);
            const __m512i m = _mm512_cvtps_epi32(_mm512_mul_ps(a, over)), n = _mm512_cvtps_epi32(_mm512_mul_ps(b, over));
            _mm_storeu_si128((__m128i*)&q[GROUP * g], _mm512_cvtepi32_epi8(m));
            _mm_storeu_si128((__m128i*)&q[GROUP * g + 16], _mm512_cvtepi32_epi8(n));
            sum[g] = _mm512_reduce_add_ps(_mm512_add_ps(a, b));
            step[g] = most / 127 + 0 * sum[g];  // of what is no number, none
            count[g] = _mm512_reduce_add_epi32(_mm512_add_epi32(m, n));
        }
    }
};

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
            __m512i dots[4];
            for (auto& dot : dots) dot = _mm512_set1_epi32(-8 * in.count[g]);
#pragma GCC unroll 8
            for (int64_t k = 0; k < GROUP; k += 4, w += 2 * BLOCK) {
                int32_t four;
                std::memcpy(&four, &in.q[GROUP * g + k], 4);
                const __m512i x4 = _mm512_set1_epi32(four);
                const __m512i columns = _mm512_loadu_si512(w), next = _mm512_loadu_si512(w + BLOCK);
                const __m512i a = _mm512_permutex2var_epi8(columns, upper, next);
                const __m512i b = _mm512_permutex2var_epi8(columns, lower, next);
                dots[0] = _mm512_dpbusd_epi32(dots[0], _mm512_and_si512(a, nibble), x4);
                dots[1] = _mm512_dpbusd_epi32(dots[1], _mm512_and_si512(b, nibble), x4);
                dots[2] = _mm512_dpbusd_epi32(dots[2], _mm512_and_si512(_mm512_srli_epi16(a, 4), nibble), x4);
                dots[3] = _mm512_dpbusd_epi32(dots[3], _mm512_and_si512(_mm512_srli_epi16(b, 4), nibble), x4);
            }
            const __m512 step = _mm512_set1_ps(in.step[g]), sum = _mm512_set1_ps(in.sum[g]);
            for (int part = 0; part < 4; ++part) {
                const __m512i both = _mm512_loadu_si512(scales + 2 * (g * rows + block * BLOCK + 16 * part));
                const __m512 s = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                const __m512 z = _mm512_castsi512_ps(_mm512_and_si512(both, left));
                const __m512 dot = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[part]), step);
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
    const int64_t pairs = (inner + BLOCK - 1) / BLOCK;  // of groups: 64 values are 16 lanes of four
    std::vector<float> step(16 * pairs);
    std::vector<int32_t> start(16 * pairs);  // the instruction takes q + 128 of W, for which this makes up
    for (int64_t lane = 0; lane < inner / 4; ++lane) {
        step[lane] = in.step[lane / 8];
        for (int k = 0; k < 4; ++k) start[lane] -= 128 * in.q[4 * lane + k];
    }
    const __m512i sign = _mm512_set1_epi8((char)0x80);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {  // one after the other, as they lie: memory is read ahead
        const int8_t* w = (const int8_t*)packed + row * inner;
        __m512 out = _mm512_setzero_ps();
        for (int64_t at = 0; at < inner; at += BLOCK) {
            const bool whole = inner - at >= BLOCK;
            const __m512i some = whole ? _mm512_loadu_si512(w + at)
                                       : _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(w + at)));
            const __m512i dot = _mm512_dpbusd_epi32(
                _mm512_loadu_si512(&start[at / 4]), _mm512_xor_si512(some, sign), _mm512_loadu_si512(&in.q[at]));
            out = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_loadu_ps(&step[at / 4]), out);
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
