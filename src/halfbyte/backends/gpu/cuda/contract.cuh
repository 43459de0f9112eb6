// Slots 2 to 5 of a contract (contracts/spec.py), by formulas that are compiled in. Numbers of formulas are those of
// backends/numbering.py. Every operation rounds by itself, in the order of contracts/expressions.py.
#pragma once
#include "values.cuh"

enum PreScale {
    FOLDED_SIXTH = 0,
    SIXTH_THEN_FACTOR = 1,
    DIVIDED_THEN_FACTOR_OR_ZERO = 2,
    OVER_PRODUCT = 3,
    FACTOR_TIMES_DIVIDED = 4,
    DIVIDED_TWICE = 5,
    DIVIDED = 6,
    DIVIDED_FLOORED = 7,
    STATIC_SCALE = 8,
    DIVIDED_THEN_FACTOR = 9
};

enum ElementFormula {
    TIMES_CLAMPED_RECIPROCAL = 0,
    TIMES_RECIPROCAL_OR_ZERO = 1,
    TIMES_RECIPROCAL_OVER_SCALE = 2,
    TIMES_RECIPROCAL_OF_SCALE = 3,
    TIMES_RECIPROCAL_ZEROED = 4,
    TIMES_RECIPROCAL_SHRUNK = 5,
    OVER_SCALE_PRODUCT = 6,
    OVER_SCALE_QUOTIENT = 7,
    OVER_SCALE = 8
};

enum Tie { EVEN = 0, DOWN = 1 };
enum Sign { BELOW_ZERO = 0, SIGN_BIT = 1, NOT_ABOVE_ZERO = 2 };

// --- 2: the block scale before it is rounded ---

__device__ __forceinline__ float pre_scale(float v, const float* n) {
    constexpr float sixth = 0.16666667163372040f;
    if (PRE == FOLDED_SIXTH) return v * n[FOLDED];
    if (PRE == SIXTH_THEN_FACTOR) return n[FACTOR] * (v * sixth);
    if (PRE == DIVIDED_THEN_FACTOR_OR_ZERO) return n[AMAX] == 0.0f ? 0.0f : (v / LARGEST) * n[FACTOR];
    if (PRE == OVER_PRODUCT) return v / (n[FACTOR] * 6.0f);
    if (PRE == FACTOR_TIMES_DIVIDED) {
        const float share = v / 6.0f;
        if (STATISTICS == FP32 || !(share <= FLOAT32_MAX)) return n[FACTOR] * share;
        const u32 bits = bits_in(share, STATISTICS);
        return n[FACTOR] * (STATISTICS == BF16 ? float_of_bf16(bits) : float_of_fp16(bits));
    }
    if (PRE == DIVIDED_TWICE) return (v / 6.0f) / n[FACTOR];
    if (PRE == DIVIDED) return v / 6.0f;
    if (PRE == DIVIDED_FLOORED) return v / 6.0f < 9.999999960041972e-13f ? 9.999999960041972e-13f : v / 6.0f;
    if (PRE == STATIC_SCALE) {
        const float share = v / 6.0f;
        return ((share == 0.0f ? 1.0f : share) * n[SHARE_OF_TOP]) / n[SHARE_OF_AMAX];
    }
    return (v / 6.0f) * n[FACTOR];
}

// --- 3: its byte ---

__device__ __forceinline__ Scale scale_byte(float pre) {
    if (FOR_ZERO >= 0.0f && pre == 0.0f) pre = FOR_ZERO;
    if (pre < SMALLEST) pre = SMALLEST;
    const Scale found = round_e4m3(pre);
    if (FOR_ZERO_BYTE >= 0 && found.byte == 0) return {(u32)FOR_ZERO_BYTE, value_of_e4m3(FOR_ZERO_BYTE)};
    return found;
}

// --- 4: what elements are multiplied or divided by, and y ---

__device__ __forceinline__ bool divides() {
    return ELEMENT == OVER_SCALE_PRODUCT || ELEMENT == OVER_SCALE_QUOTIENT || ELEMENT == OVER_SCALE;
}

__device__ __forceinline__ float element_constant(float scale, const float* n) {
    if (ELEMENT == OVER_SCALE_PRODUCT) return scale * n[FACTOR];
    if (ELEMENT == OVER_SCALE_QUOTIENT) return scale / n[FACTOR];
    if (ELEMENT == OVER_SCALE) return scale;
    if (ELEMENT == TIMES_RECIPROCAL_OVER_SCALE) return n[INVERSE] / scale;
    if (ELEMENT == TIMES_RECIPROCAL_OF_SCALE) return 1.0f / scale;
    const float product = scale * n[INVERSE];
    if (ELEMENT == TIMES_RECIPROCAL_ZEROED && product == 0.0f) return 0.0f;
    const float reciprocal = 1.0f / (ELEMENT == TIMES_RECIPROCAL_SHRUNK && product == 0.0f ? 1e8f : product);
    if (ELEMENT == TIMES_CLAMPED_RECIPROCAL && reciprocal > FLOAT32_MAX) return FLOAT32_MAX;
    return reciprocal;
}

__device__ __forceinline__ float quotient(float x, float constant, bool zero_scale) {
    if (divides()) return x / constant;
    return ELEMENT == TIMES_RECIPROCAL_OR_ZERO && zero_scale ? 0.0f : x * constant;
}

// --- 5: the code ---

// Beyond 6 the grid goes on in steps of 2, and the code is taken from the float's bits. (contracts/rounding.py)
__device__ __forceinline__ u32 code_without_end(float y) {
    const float value = y < 2.0f ? rintf(y * 2.0f) / 2.0f : y < 4.0f ? rintf(y) : rintf(y / 2.0f) * 2.0f;
    const u32 bits = __float_as_uint(value);
    if (value < 1.0f) return (u32)(value * 2.0f);
    return (((bits >> 23 & 0xFF) - 126) * 2 + (bits >> 22 & 1)) & 15;
}

__device__ __forceinline__ u32 code_down(float y) {
    return (y > 0.25f) + (y > 0.75f) + (y > 1.25f) + (y > 1.75f) + (y > 2.5f) + (y > 3.5f) + (y > 5.0f);
}

// The code of any y with its sign.
__device__ __forceinline__ u32 code_of(float x, float y) {
    const bool nan = y != y;
    const float magnitude = nan ? 0.0f : fabsf(y);
    u32 code = WRAPS ? code_without_end(magnitude) : TIE == DOWN ? code_down(magnitude) : round_e2m1(magnitude).code;
    if (nan) code = NAN_CODE;
    if (ZERO_INPUT) {
        if (x == 0.0f || x != x) code = 0;
        return x < 0.0f ? code | 8 : code;
    }
    const bool negative = SIGN == BELOW_ZERO ? y < 0.0f
                          : SIGN == SIGN_BIT ? (__float_as_uint(y) >> 31) != 0 && !nan
                                             : !(y > 0.0f);
    return negative ? code | 8 : code;
}

// Codes of any sixteen numbers under one scale.
__device__ __forceinline__ uint2 codes_of(const u32* words, float constant, bool zero_scale) {
    u64 out = 0;
#pragma unroll 4
    for (int i = 15; i >= 0; --i) {
        const float x = element_of(words, i);
        out = out << 4 | code_of(x, quotient(x, constant, zero_scale));
    }
    return make_uint2((u32)out, (u32)(out >> 32));
}

// --- a short way to the same codes ---

// y is off by a little, or too small by a little, but no number of the dtype lies where that would change its code:
// `short_fits` asks at every threshold. What multiplies is the contract's own y where that is a product and ties go to
// even, or the dtype is float32. NaN in place of `high` says that a byte has no such pair.
struct Short {
    float high, low;
};

// How ties go down: for 16-bit dtypes by a y that is too small. Numbers of float32 are too close together for that:
// what is rounded, in one operation with the step that it is added to, is y·(1 − 2^-24). It is below y's tie if y is
// the tie, and above if y is the next number.
__device__ __forceinline__ bool lowers_quotient() { return TIE == DOWN && DTYPE != FP32; }
__device__ __forceinline__ bool lowers_sum() { return TIE == DOWN && DTYPE == FP32; }

__device__ __forceinline__ bool short_is_exact() { return !divides() && TIE == EVEN; }

__device__ __forceinline__ float short_quotient(float x, Short by) {
    return divides() && !lowers_quotient() ? __fmaf_rn(x, by.high, x * by.low) : x * by.high;
}

// y moved to where its last place is the step. `step` is step_of(y).
__device__ __forceinline__ float short_moved(float y, float step) {
    return lowers_sum() ? __fmaf_rn(y, 0.99999994f, step * 524288.0f) : __fmaf_rn(step, 524288.0f, y);
}

// Code and value of a y of at least 0. As round_e2m1, but for ties.
__device__ __forceinline__ Element short_element(float y) {
    const float inside = y > 6.0f ? 6.0f : y, step = step_of(inside), moved = short_moved(inside, step);
    const u32 raw = __float_as_uint(moved);
    return {(raw + (raw >> 22) - 298) & 7, __fmaf_rn(step, -524288.0f, moved)};
}

__device__ __forceinline__ Short short_of(float constant) {
    if (short_is_exact()) return {constant, 0.0f};
    const float reciprocal = divides() ? 1.0f / constant : constant;
    if (lowers_quotient())
        return {reciprocal * (DTYPE == BF16 ? 0.99975586f : 0.99987793f), 0.0f};  // 1 − 2^-12, 1 − 2^-13
    if (!divides()) return {reciprocal, 0.0f};
    return {reciprocal, __fmaf_rn(-reciprocal, constant, 1.0f) * reciprocal};
}

// Whether both ways give the same code around threshold number `which` of seven. Both are monotone in x. Number 7 asks
// where y stops being zero, where signs are taken from y.
__device__ __forceinline__ bool short_fits(Short by, float constant, u32 which) {
    const float thresholds[8] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 0.0f};
    if (which == 7 && (DTYPE != FP32 || ZERO_INPUT)) return true;
    float middle = divides() ? thresholds[which] * constant : thresholds[which] / constant;
    if (which == 7) middle = __uint_as_float((u32)(constant < 65536.0f ? constant * 0.5f : 32768.0f));
    if (!(middle < (DTYPE == FP16 ? 65000.0f : 3e38f))) return false;
    const u32 center = bits_in(middle, DTYPE);
    for (u32 step = 0; step < 5; ++step) {
        if (center + step < 2) continue;
        const float x = value_of_bits(center + step - 2), y = quotient(x, constant, false), z = short_quotient(x, by);
        if (which == 7 ? (y == 0.0f) != (z == 0.0f) : code_of(x, y) != short_element(z).code) return false;
    }
    return true;
}

// Eight codes with their signs, for |y| below 8. `w`: their words. From 7 on, y rounds to 8, which is code 8: one less
// is the code of 6.
__device__ __forceinline__ u32 short_codes(const u32* w, Short by) {
    u32 raw[8];
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        y[i] = short_quotient(element_of(w, i), by);
        const float magnitude = fabsf(y[i]);
        raw[i] = raw_code_of(short_moved(magnitude, step_of(magnitude)));
        if (ZERO_INPUT) y[i] = element_of(w, i);  // its sign counts
    }
    const bool keeps_zeros = SIGN == SIGN_BIT && !ZERO_INPUT;
    const u32 packed = pack_raw(raw), codes = packed - (packed >> 3 & 0x11111111);
    return codes | (DTYPE == FP32 ? signs_of_floats(y, keeps_zeros) : signs(w, keeps_zeros));
}
