// Scale bytes and codes of single blocks by the contract's formulas, without tables. For a small tensor this is
// faster than building tables; it also serves blocks that tables leave out. (backends/reference/quantize.py)
#pragma once
#include "recipe.h"

// The numbers of one tensor under a recipe.
struct Numbers {
    Rule rule;  // without its constants
    float stored, multiplier;
};

// Whether formulas.h has every formula of a recipe. (test_numbering.py: the lists in Python are no longer than these)
static inline bool knows(const Recipe& r) {
    return r.factor <= NO_FACTOR && r.pre_scale <= DIVIDED_THEN_FACTOR && r.element <= OVER_SCALE &&
           r.stored <= STORE_RECIPROCAL_OR_ZERO && r.multiplier <= RECIPROCAL_OF_STORED;
}

// Returns false if a number is NaN or infinite: then the reference must quantize.
static inline bool numbers_of(const Recipe& recipe, float amax, Numbers* n) {
    Rule& r = n->rule;
    r.pre_scale = recipe.pre_scale;
    r.divides = divides(recipe.element);
    r.tie = recipe.tie;
    r.sign = recipe.sign;
    r.wraps = recipe.wraps;
    r.for_zero_byte = recipe.for_zero_byte;
    r.statistics = recipe.statistics;
    r.smallest = recipe.smallest;
    r.largest = recipe.largest;
    r.top = recipe.top;
    r.amax = amax;
    r.factor = recipe.given != 0.0f ? recipe.given : factor_of(recipe.factor, amax, recipe.top, recipe.statistics);
    // Model-Optimizer's static scale replaces a zero itself.
    r.for_zero = recipe.pre_scale == STATIC_SCALE ? (recipe.top / 6.0f) / (amax / 6.0f) : recipe.for_zero;
    n->stored = recipe.stored < 0 ? 1.0f : stored_of(recipe.stored, amax, r.factor);
    n->multiplier = recipe.stored < 0 ? 1.0f : multiplier_of(recipe.multiplier, n->stored, recipe.top);
    return knows(recipe) && std::isfinite(amax) && std::isfinite(r.factor);
}

static inline void fill_constants(const Recipe& recipe, Rule* r) {
    for (int byte = 0; byte < 127; ++byte)
        r->constant[byte] = constant_of(recipe.element, e4m3_decode(byte), r->factor);
    for (int byte = 127; byte < 256; ++byte) r->constant[byte] = 0.0f;
}

// Slot 3 of the contract. A NaN scale gives 0x7F.
static inline int scale_byte_of(const Recipe& recipe, const Rule& r, float v) {
    float scale = recipe.pre_scale == STATIC_SCALE && is_zero(r, v) ? r.for_zero : pre_scale(r, v);
    if (scale == 0.0f && recipe.for_zero >= 0.0f) scale = recipe.for_zero;
    if (scale != scale) return 0x7F;
    const int byte = e4m3_encode(scale > r.smallest ? scale : r.smallest);
    return byte == 0 && r.for_zero_byte >= 0 ? r.for_zero_byte : byte;
}

static inline uint32_t largest_bits(const uint8_t* x, int count, int dtype) {
    uint32_t most = 0;
    if (dtype == FP32) {
        const uint32_t* bits = (const uint32_t*)x;
        for (int i = 0; i < count; ++i) most = std::max(most, bits[i] & 0x7FFFFFFFu);
    } else {
        const uint16_t* bits = (const uint16_t*)x;
        uint16_t short_most = 0;
        for (int i = 0; i < count; ++i) short_most = std::max(short_most, (uint16_t)(bits[i] & 0x7FFF));
        most = short_most;
    }
    return most;
}

static inline void widen(const uint8_t* x, int count, int dtype, float* out) {
    if (dtype == FP32) std::memcpy(out, x, (size_t)count * 4);
    else if (dtype == BF16)
        for (int i = 0; i < count; ++i) out[i] = as_float((uint32_t)((const uint16_t*)x)[i] << 16);
    else
        for (int i = 0; i < count; ++i) {
            const uint32_t bits = ((const uint16_t*)x)[i];
            out[i] = as_float(as_bits(half_magnitude(bits & 0x7FFF)) | (bits & 0x8000u) << 16);
        }
}

// The code of a magnitude on the E2M1 grid, continued beyond 6 in steps of 2. (contracts.rounding:
// _round_without_end)
static inline int32_t wrapped_code(float magnitude) {
    const float shift = magnitude < 2.0f ? 0x1p22f : magnitude < 4.0f ? 0x1p23f : 0x1p24f;
    const float value = magnitude < 0x1p24f ? (magnitude + shift) - shift : magnitude;
    if (value < 1.0f) return (int32_t)(value * 2.0f);
    return (int32_t)((((as_bits(value) >> 23) - 126) * 2 + ((as_bits(value) >> 22) & 1)) & 0xF);
}

// Slots 4 and 5 of the contract for one block: two codes per byte.
template <bool DIVIDES>
static inline void direct_codes_of(const Recipe& recipe, const float* x, float constant, bool zeroed, uint8_t* out) {
    float middle[7];
    for (int k = 0; k < 7; ++k)  // the values 0.75, 1.75 and 3.5 themselves go up to the even code
        middle[k] = recipe.tie == TIE_EVEN && (k & 1) ? std::nextafter(MIDDLES[k], 0.0f) : MIDDLES[k];
    const int32_t below_zero = recipe.sign == SIGN_BELOW_ZERO, sign_bit = recipe.sign == SIGN_BIT,
                  not_above = recipe.sign == SIGN_NOT_ABOVE_ZERO, of_x = recipe.sign == SIGN_OF_X;
    int32_t codes[32];
    for (int i = 0; i < recipe.block; ++i) {
        const float quotient = DIVIDES ? x[i] / constant : x[i] * constant, y = zeroed ? 0.0f : quotient;
        const float magnitude = as_float(as_bits(y) & 0x7FFFFFFFu);
        int32_t code = 0;
        for (int k = 0; k < 7; ++k) code += magnitude > middle[k];
        code = y != y ? recipe.nan_code : code;
        code = of_x & (x[i] == 0.0f) ? 0 : code;
        const int32_t negative = (below_zero & (y < 0.0f)) | (sign_bit & (int32_t)(as_bits(y) >> 31) & (y == y)) |
                                 (not_above & !(y > 0.0f)) | (of_x & (x[i] < 0.0f));
        codes[i] = code | negative << 3;
    }
    if (recipe.wraps)
        for (int i = 0; i < recipe.block; ++i) {
            const float y = zeroed ? 0.0f : DIVIDES ? x[i] / constant : x[i] * constant;
            if (y >= 7.0f || y <= -7.0f) codes[i] = (codes[i] & 8) | wrapped_code(as_float(as_bits(y) & 0x7FFFFFFFu));
        }
    for (int i = 0; i < recipe.block / 2; ++i) out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

// Codes of a block under the scale byte. x: `recipe.block` elements, all finite.
static inline void direct_codes(const Recipe& recipe, const Rule& r, const uint8_t* x, int byte, uint8_t* out) {
    float values[32];
    widen(x, recipe.block, recipe.dtype, values);
    const float scale = e4m3_decode(byte), constant = constant_of(recipe.element, scale, r.factor);
    const bool zeroed = recipe.element == TIMES_RECIPROCAL_OR_ZERO && scale == 0.0f;
    if (r.divides) direct_codes_of<true>(recipe, values, constant, zeroed, out);
    else direct_codes_of<false>(recipe, values, constant, zeroed, out);
}
