// The formulas of an NVFP4 contract on single numbers. Each is named after its function in contracts/expressions.py,
// which defines it.
#pragma once
#include "tables.h"

// Slot 1: the tensor-level number from the tensor's amax.
enum Factor : int {
    CLAMPED_RATIO = 0,
    RATIO = 1,
    RECIPROCAL_PRODUCT = 2,
    RECIPROCAL_PRODUCT_OR_MAX = 3,
    RECIPROCAL_PRODUCT_IN_STATISTICS = 4,
    QUOTIENT = 5,
    NO_FACTOR = 6
};
// Slot 4: y from an element and its block scale.
enum ElementFormula : int {
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
// Slot 6: what is stored with the blocks, what code times scale is multiplied by, and how values are decoded.
enum Stored : int { STORE_AMAX = 0, STORE_FACTOR = 1, STORE_RECIPROCAL = 2, STORE_RECIPROCAL_OR_ZERO = 3 };
enum Multiplier : int { AMAX_OVER_TOP = 0, AS_STORED = 1, RECIPROCAL_OF_STORED = 2 };
enum Decode : int {
    DECODE_BY_AMAX = 0,
    DECODE_BY_MULTIPLIER = 1,
    DECODE_BY_DIVISOR = 2,
    DECODE_BY_RECIPROCAL = 3,
    DECODE_SINGLE_LEVEL = 4
};

static const float FLOAT_MAX = std::numeric_limits<float>::max();
static const float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

// The middles between neighbouring E2M1 magnitudes.
static const float MIDDLES[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};

static inline float round_to_half(float x) {
    // Rounds a non-negative x to the nearest float16, ties to even.
    if (x != x || x >= 65520.0f) return x != x ? x : std::numeric_limits<float>::infinity();
    if (x < 0x1p-14f) return (x + 0.5f) - 0.5f;  // the last place of 0.5 is 2**-24
    uint32_t bits = as_bits(x);
    bits += 0xFFF + ((bits >> 13) & 1);
    return as_float(bits & ~0x1FFFu);
}

static inline float round_to_bfloat(float x) {
    if (x != x) return x;
    uint32_t bits = as_bits(x);
    bits += 0x7FFF + ((bits >> 16) & 1);
    return as_float(bits & 0xFFFF0000u);
}

// Slot 2 of the contract.
static inline float pre_scale(const Rule& r, float v) {
    const float sixth = 1.0f / 6.0f;
    switch (r.pre_scale) {
        case FOLDED_SIXTH: return v * (r.factor * sixth);
        case SIXTH_THEN_FACTOR: return r.factor * (v * sixth);
        case DIVIDED_THEN_FACTOR_OR_ZERO: return r.amax == 0.0f ? 0.0f : (v / r.largest) * r.factor;
        case OVER_PRODUCT: return v / (6.0f * r.factor);
        case FACTOR_TIMES_DIVIDED: {
            float share = v / 6.0f;
            if (r.statistics == FP16) share = round_to_half(share);
            if (r.statistics == BF16) share = round_to_bfloat(share);
            return r.factor * share;
        }
        case DIVIDED_TWICE: return (v / 6.0f) / r.factor;
        case DIVIDED: return v / 6.0f;
        case DIVIDED_FLOORED: return v / 6.0f > 1e-12f ? v / 6.0f : 1e-12f;
        case STATIC_SCALE:
            // A zero share is not replaced here (`for_zero` does that), so the scale never decreases as v grows.
            return ((v / 6.0f) * (r.top / 6.0f)) / (r.amax / 6.0f);
        case DIVIDED_THEN_FACTOR: return (v / 6.0f) * r.factor;
        default: return std::numeric_limits<float>::quiet_NaN();  // no such formula: backends/cpu/choose.py refuses it
    }
}

// Whether `for_zero` applies, that is, whether the scale is exactly 0. Model-Optimizer's static weights ask this of
// v/6.
static inline bool is_zero(const Rule& r, float v) {
    return (r.pre_scale == STATIC_SCALE ? v / 6.0f : pre_scale(r, v)) == 0.0f;
}

// Slot 3 of the contract without its exceptions for zero, so that the byte never decreases as v grows.
static inline int byte_of(const Rule& r, float v) {
    float scale = pre_scale(r, v);
    return e4m3_encode(scale > r.smallest ? scale : r.smallest);
}

// Rounds a non-negative x to the Dtype of a contract's statistics.
static inline float round_to(float x, int statistics) {
    return statistics == FP16 ? round_to_half(x) : statistics == BF16 ? round_to_bfloat(x) : x;
}

// Slot 1 of the contract.
static inline float factor_of(int formula, float amax, float top, int statistics) {
    switch (formula) {
        case CLAMPED_RATIO: {
            const float ratio = std::min(top / amax, FLOAT_MAX);
            return ratio == 0.0f ? 1.0f : ratio;
        }
        case RATIO: return top / amax;
        case RECIPROCAL_PRODUCT: return (1.0f / amax) * top;
        case RECIPROCAL_PRODUCT_OR_MAX: return amax == 0.0f ? FLOAT_MAX : (1.0f / amax) * top;
        case RECIPROCAL_PRODUCT_IN_STATISTICS: {
            const float tiny = statistics == FP16 ? 0x1p-14f : 0x1p-126f;
            const float reciprocal = round_to(1.0f / std::max(round_to(amax, statistics), tiny), statistics);
            const float factor = round_to(reciprocal * top, statistics);
            return std::isfinite(factor) ? factor : 1.0f;
        }
        case QUOTIENT: return amax / top;
        case NO_FACTOR: return 1.0f;
        default: return NOT_A_NUMBER;
    }
}

static inline bool divides(int formula) { return formula >= OVER_SCALE_PRODUCT; }

// Slot 4 of the contract: what x is multiplied with, or divided by if the formula divides, under a decoded scale.
static inline float constant_of(int formula, float scale, float factor) {
    switch (formula) {
        case TIMES_CLAMPED_RECIPROCAL: return std::min(1.0f / (scale * (1.0f / factor)), FLOAT_MAX);
        case TIMES_RECIPROCAL_OR_ZERO: return scale == 0.0f ? 0.0f : 1.0f / ((1.0f / factor) * scale);
        case TIMES_RECIPROCAL_OVER_SCALE: return (1.0f / factor) / scale;
        case TIMES_RECIPROCAL_OF_SCALE: return 1.0f / scale;
        case TIMES_RECIPROCAL_ZEROED: {
            const float combined = scale * (1.0f / factor);
            return combined == 0.0f ? 0.0f : 1.0f / combined;
        }
        case TIMES_RECIPROCAL_SHRUNK: {
            const float combined = scale * (1.0f / factor);
            return 1.0f / (combined == 0.0f ? 1e8f : combined);
        }
        case OVER_SCALE_PRODUCT: return scale * factor;
        case OVER_SCALE_QUOTIENT: return scale / factor;
        case OVER_SCALE: return scale;
        default: return NOT_A_NUMBER;
    }
}

// Slot 6 of the contract.
static inline float stored_of(int formula, float amax, float factor) {
    switch (formula) {
        case STORE_AMAX: return amax;
        case STORE_FACTOR: return factor;
        case STORE_RECIPROCAL: return 1.0f / factor;
        case STORE_RECIPROCAL_OR_ZERO: return amax == 0.0f ? 0.0f : 1.0f / factor;
        default: return NOT_A_NUMBER;
    }
}

static inline float multiplier_of(int formula, float stored, float top) {
    switch (formula) {
        case AMAX_OVER_TOP: return stored / top;
        case AS_STORED: return stored;
        case RECIPROCAL_OF_STORED: return 1.0f / stored;
        default: return NOT_A_NUMBER;
    }
}

static inline float decoded_value(int formula, float q, float scale, float stored, float top) {
    switch (formula) {
        case DECODE_BY_AMAX: return ((q * scale) * stored) / top;
        case DECODE_BY_MULTIPLIER: return q * (scale * stored);
        case DECODE_BY_DIVISOR: return q * (scale / stored);
        case DECODE_BY_RECIPROCAL: return q * (scale * (1.0f / stored));
        case DECODE_SINGLE_LEVEL: return q * scale;
        default: return NOT_A_NUMBER;
    }
}
