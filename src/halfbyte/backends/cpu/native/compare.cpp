// Stored blocks of 4-bit codes against the values they stand for: sums, the largest difference, and whether every code
// is the nearest. `halfbyte verify` uses it. It shares no code with the kernels that quantize or decode, because it
// checks them. (verify/nearest.py)
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(HB_X86) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#define HB_CLONED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HB_CLONED
#endif

namespace {

struct BlockResult {
    float amax, product, power;
    double squares, off;  // sums of the squared source and of the squared differences
    bool wrong;
};

// Adds sixteen numbers pairwise.
inline float sum16(const float* x) {
    float half[8], quarter[4];
    for (int i = 0; i < 8; ++i) half[i] = x[i] + x[i + 8];
    for (int i = 0; i < 4; ++i) quarter[i] = half[i] + half[i + 4];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

inline float largest16(const float* x) {
    float half[8], quarter[4];
    for (int i = 0; i < 8; ++i) half[i] = x[i] > x[i + 8] ? x[i] : x[i + 8];
    for (int i = 0; i < 4; ++i) quarter[i] = half[i] > half[i + 4] ? half[i] : half[i + 4];
    const float a = quarter[0] > quarter[2] ? quarter[0] : quarter[2];
    const float b = quarter[1] > quarter[3] ? quarter[1] : quarter[3];
    return a > b ? a : b;
}

// Squares that leave float32's range are added again in float64.
inline double sum_of_squares(const float* x, float sum) {
    if (sum > 1e-25f && sum < 1e30f) return (double)sum;
    double exact = 0.0;
    for (int i = 0; i < 16; ++i) exact += (double)x[i] * (double)x[i];
    return exact;
}

// For each pair of codes in a byte: values, and the smallest and largest quotients that they are nearest to.
struct Pairs {
    float value[256][2], low[256][2], high[256][2];
};

template <int DTYPE>
inline void load16(const uint8_t* x, float* out) {
    if (DTYPE == 2) {
        std::memcpy(out, x, 64);
        return;
    }
    uint16_t words[16];
    std::memcpy(words, x, 32);
    for (int i = 0; i < 16; ++i) {
        const uint32_t bits = (uint32_t)words[i] << 16;
        std::memcpy(out + i, &bits, 4);
    }
}

// Sixteen elements of a block whose codes are multiplied by `factor`.
inline void sixteen(const float* x, const uint8_t* codes, float factor, const Pairs& pairs, BlockResult* r,
                    float* largest) {
    float value[16], low[16], high[16], part[16], off[16];
    for (int i = 0; i < 8; ++i) {
        std::memcpy(value + 2 * i, pairs.value[codes[i]], 8);
        std::memcpy(low + 2 * i, pairs.low[codes[i]], 8);
        std::memcpy(high + 2 * i, pairs.high[codes[i]], 8);
    }
    const float magnitude = std::fabs(factor), step = magnitude > 0.0f ? magnitude : std::nanf("");
    int32_t outside[16], any = 0;
    for (int i = 0; i < 16; ++i) {
        const float quotient = x[i] / step;
        outside[i] = (quotient < low[i]) | (quotient > high[i]);
    }
    for (int i = 0; i < 16; ++i) any |= outside[i];
    r->wrong |= any != 0;
    for (int i = 0; i < 16; ++i) part[i] = value[i] * x[i];
    r->product += sum16(part);
    for (int i = 0; i < 16; ++i) part[i] = value[i] * value[i];
    r->power += sum16(part);
    for (int i = 0; i < 16; ++i) part[i] = x[i] * x[i];
    r->squares += sum_of_squares(x, sum16(part));
    for (int i = 0; i < 16; ++i) part[i] = std::fabs(x[i]);
    const float amax = largest16(part);
    r->amax = amax > r->amax ? amax : r->amax;
    for (int i = 0; i < 16; ++i) off[i] = value[i] * factor - x[i];
    for (int i = 0; i < 16; ++i) part[i] = off[i] * off[i];
    r->off += sum_of_squares(off, sum16(part));
    for (int i = 0; i < 16; ++i) part[i] = std::fabs(off[i]);
    const float most = largest16(part);
    *largest = most > *largest ? most : *largest;
}

template <int DTYPE>
inline float blocks_of(const uint8_t* x, const uint8_t* codes, const float* factors, int64_t blocks, int block,
                       const Pairs& pairs, float* amax, float* product, float* power, double* squares, double* off,
                       uint8_t* wrong) {
    const int parts = block / 16;
    float largest = 0.0f;
    for (int64_t b = 0; b < blocks; ++b) {
        BlockResult r = {};
        for (int part = 0; part < parts; ++part) {
            float values[16];
            load16<DTYPE>(x, values);
            sixteen(values, codes, factors[b], pairs, &r, &largest);
            x += 16 * (DTYPE == 2 ? 4 : 2);
            codes += 8;
        }
        amax[b] = r.squares == r.squares ? r.amax : std::nanf("");
        product[b] = r.product;
        power[b] = r.power;
        squares[b] = r.squares;
        off[b] = r.off;
        wrong[b] = r.wrong;
    }
    return largest;
}

HB_CLONED float blocks_of_bfloat(const uint8_t* x, const uint8_t* codes, const float* factors, int64_t blocks,
                                 int block, const Pairs& pairs, float* amax, float* product, float* power,
                                 double* squares, double* off, uint8_t* wrong) {
    return blocks_of<0>(x, codes, factors, blocks, block, pairs, amax, product, power, squares, off, wrong);
}

HB_CLONED float blocks_of_float(const uint8_t* x, const uint8_t* codes, const float* factors, int64_t blocks,
                                int block, const Pairs& pairs, float* amax, float* product, float* power,
                                double* squares, double* off, uint8_t* wrong) {
    return blocks_of<2>(x, codes, factors, blocks, block, pairs, amax, product, power, squares, off, wrong);
}

}  // namespace

// `tables`: for the sixteen codes, their values and the smallest and largest quotients that they are nearest to.
// `dtype` of x: 0 bfloat16, 2 float32. A block has 16 or 32 elements. Returns the largest difference; NaN is left out.
extern "C" float hb_compare_blocks(const void* x, int dtype, const uint8_t* codes, const float* factors, int64_t blocks,
                                   int block, const float* tables, float* amax, float* product, float* power,
                                   double* squares, double* off, uint8_t* wrong) {
    Pairs pairs;
    for (int byte = 0; byte < 256; ++byte)
        for (int half = 0; half < 2; ++half) {
            const int code = half ? byte >> 4 : byte & 15;
            pairs.value[byte][half] = tables[code];
            pairs.low[byte][half] = tables[16 + code];
            pairs.high[byte][half] = tables[32 + code];
        }
    const auto run = dtype == 2 ? blocks_of_float : blocks_of_bfloat;
    return run((const uint8_t*)x, codes, factors, blocks, block, pairs, amax, product, power, squares, off, wrong);
}
