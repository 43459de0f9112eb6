// 4over6 by TransformerEngine's formulas (contracts/peers/transformer_engine.py): both scales of a block, the error of
// an element under one of them, and a block that is not decided by anything shorter.
#pragma once
#include "blocks.cuh"

enum Kind { ERROR_BY_AMAX = 0, ERROR_BY_RECIPROCAL = 1, ERROR_SCALED = 2 };

struct Pair {
    Scale six, four;
};
__device__ __forceinline__ float scale_before_rounding(float v, float factor) { return (v / 6.0f) * factor; }

__device__ __forceinline__ Pair pair_of(float v, float factor) {
    const float base = scale_before_rounding(v, factor);
    return {round_e4m3(base), round_e4m3(base * 1.5f)};
}

// The multiplier of elements: min(1/(S·(1/enc)), largest float32). NaN stays NaN.
__device__ __forceinline__ float multiplier_of(float scale, float inverse) {
    const float reciprocal = 1.0f / (scale * inverse);
    return reciprocal > FLOAT32_MAX ? FLOAT32_MAX : reciprocal;
}

// x/c. If nothing underflows, the product with 1/c in two parts is the correctly rounded quotient.
// tests/backends/gpu/test_arithmetic.py tries every significand.
__device__ __forceinline__ float over_top(float x, bool short_form) {
    if (!short_form || (TOP != 2688.0f && TOP != 1536.0f)) return x / TOP;
    const float high = TOP == 2688.0f ? 0.0003720237873494625f : 0.0006510416278615594f;
    const float low = TOP == 2688.0f ? 2.217434742768365e-11f : 3.8805108432127255e-11f;
    return __fmaf_rn(x, high, x * low);
}

__device__ __forceinline__ float difference(float q, float scale, float x, const float* n) {
    if (KIND == ERROR_BY_AMAX) return over_top((q * scale) * n[AMAX], n[NO_UNDERFLOW] > 0) - x;
    if (KIND == ERROR_BY_RECIPROCAL) return (q * scale) * n[INVERSE] - x;
    return q * scale - x * n[FACTOR];
}

// Code and value of any y, with its sign. NaN gives code 0.
__device__ __forceinline__ Element round_signed(float y) {
    const Element e = round_e2m1(y != y ? 0.0f : fabsf(y));
    return y < 0.0f ? Element{e.code | 8, -e.value} : e;
}

__device__ __forceinline__ float size_of(float x, const Scale& scale, float multiplier, const float* n) {
    const float d = difference(round_signed(x * multiplier).value, scale.value, x, n);
    return SQUARED ? d * d : fabsf(d);
}

// A block by the contract's own formulas, for any numbers. It is not inlined, so that the other path keeps its
// registers.
__device__ __noinline__ void exact_block(const Operand& o, const Segment& s, i64 block) {
    const Place at = place_of(o, block);
    const u32* words = (const u32*)source(o, s, at);
    const float* n = s.numbers;
    const Pair p = pair_of(largest_value(words), n[FACTOR]);
    const float by_six = multiplier_of(p.six.value, n[INVERSE]), by_four = multiplier_of(p.four.value, n[INVERSE]);
    float error_six = 0.0f, error_four = 0.0f;
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
        const float x = element_of(words, i);
        error_six = error_six + size_of(x, p.six, by_six, n);
        error_four = error_four + size_of(x, p.four, by_four, n);
    }
    const bool four = error_four < error_six;
    const float by = four ? by_four : by_six;
    u64 out = 0;
#pragma unroll 4
    for (int i = 15; i >= 0; --i) out = out << 4 | round_signed(element_of(words, i) * by).code;
    o.codes[block] = make_uint2((u32)out, (u32)(out >> 32));
    o.scales[scale_place(o, at, block)] = (unsigned char)(four ? p.four.byte : p.six.byte);
}
