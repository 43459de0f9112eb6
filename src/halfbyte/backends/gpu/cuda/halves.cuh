// Errors of a block of float16 under nine scales in float16 arithmetic, two elements per operation. (estimate.cu has
// the candidates and the constants by which they share a rounding)
//
// A power of two brings the block to where s, the scale of L, is in [1, 4). There elements are float16 numbers still:
// u is exact. A scale S is the sum of two float16 numbers, hi + lo. With M as in estimate.cu,
//
//     q = (u·inverse + M) − M        d = q·lo + (q·hi − u)        estimate = Σ d·d, over even and over odd elements
//
// How far an estimate is off, with ε = 2^-11:
//
// - d is rounded twice: 2ε of itself, and 4e-6·s from the rounding of lo and of the inner difference. The sum of eight
//   squares is rounded eight times. Together 0.0059 of the estimate, and 2.6e-5·s·√e <= 5.2e-5·e + 4e-6·s².
// - The inverse is off by ε of itself, the contract's own y by 2^-19. So y may round to the other side of a tie that is
//   at most 3.5 steps up: then d·d is larger by at most 0.0138 of itself. It is never smaller than the nearest value's.
//
// So two estimates can be in the wrong order only if the larger is below 1.0138·1.0059/0.9941·1.0003 = 1.0262 times the
// smaller, or they differ by less than 1e-5·s² <= 1.6e-4. HALF_MARGIN is 0.0264, HALF_LEAST 4.9e-4. Numbers too small
// for float16 are off by 2^-25: 5e-7 in all.
#pragma once
#include "values.cuh"

constexpr float HALF_MARGIN = MARGIN_UNITS * 0.0032958984375f, HALF_LEAST = MARGIN_UNITS * 0.00006103515625f;

#ifndef HALFBYTE_ON_CPU
__device__ __forceinline__ u32 times_halves(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

__device__ __forceinline__ u32 minus_halves(u32 a, u32 b) {
    u32 out;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

// a·b + c, rounded once.
__device__ __forceinline__ u32 fused_halves(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

__device__ __forceinline__ u32 smaller_numbers(u32 a, u32 b) {
    u32 out;
    asm("min.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
#endif

// A float as two equal float16 numbers.
__device__ __forceinline__ u32 halves_of(float x) { return fp16_of_float(x) * 0x10001; }

__device__ __forceinline__ float sum_of_halves(u32 w) { return float_of_fp16(w & 0xFFFF) + float_of_fp16(w >> 16); }

struct HalfRatio {
    u32 inverse, high, low, square;  // −1/S; S; what is missing to S; a·2^6/S²
};

// `a`: of estimate.cu.
__device__ __forceinline__ HalfRatio half_ratio(float scale, float a) {
    const u32 high = halves_of(scale);
    return {halves_of(-1.0f / scale), high, halves_of(scale - float_of_fp16(high & 0xFFFF)),
            halves_of(a * 64.0f / (scale * scale))};
}

// Estimates of candidates FIRST_ONE to FIRST_ONE + COUNT − 1, which share the M of candidate MIDDLE. `minus`: −u of two
// elements each.
template <int FIRST_ONE, int COUNT, int MIDDLE>
__device__ __forceinline__ void estimate_halves(const u32* minus, const u32* squares, const HalfRatio* ratio,
                                                float offset, float* errors) {
    HalfRatio r[COUNT];
    u32 total[COUNT];
    const u32 square = ratio[MIDDLE].square, moved = halves_of(offset * 64.0f);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        r[k] = ratio[FIRST_ONE + k];
        total[k] = 0;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 magic = fused_halves(squares[i], square, moved) & 0x7C007C00;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            u32 q = minus_halves(fused_halves(minus[i], r[k].inverse, magic), magic);
            if (FIRST_ONE == 8) q = smaller_numbers(q, 0x46004600);  // 6
            const u32 d = fused_halves(q, r[k].low, fused_halves(q, r[k].high, minus[i]));
            total[k] = fused_halves(d, d, total[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < COUNT; ++k) errors[FIRST_ONE + k] = sum_of_halves(total[k]);
}
