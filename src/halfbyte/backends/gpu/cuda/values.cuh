// The elements of a block: loading and reading them in the operand's dtype, their largest magnitude and their signs.
#pragma once
#include "numbers.cuh"

enum Dtype { BF16 = 0, FP16 = 1, FP32 = 2 };

constexpr int WORDS = DTYPE == FP32 ? 16 : 8, QUADS = WORDS / 4;  // of a block of sixteen
constexpr u32 INFINITY_BITS = DTYPE == BF16 ? 0x7F80 : DTYPE == FP16 ? 0x7C00 : 0x7F800000;

#ifndef HALFBYTE_ON_CPU
__device__ __forceinline__ float float_of_fp16(u32 bits) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"((unsigned short)bits));
    return out;
}

__device__ __forceinline__ u32 fp16_of_float(float x) {
    unsigned short out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}

// 1/x of a normal number, off by at most one unit in the last place.
__device__ __forceinline__ float about_reciprocal(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// The larger magnitude; NaN if one of them is.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
    float out;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(fabsf(a)), "f"(fabsf(b)));
    return out;
}
#endif

// A number from its bits in the operand's dtype.
__device__ __forceinline__ float value_of_bits(u32 bits) {
    return DTYPE == BF16 ? float_of_bf16(bits) : DTYPE == FP16 ? float_of_fp16(bits) : __uint_as_float(bits);
}

// The bits of a number rounded to a dtype, nearest even. NaN and infinity are not asked for.
__device__ __forceinline__ u32 bits_in(float x, int dtype) {
    const u32 bits = __float_as_uint(x);
    return dtype == BF16 ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : dtype == FP16 ? fp16_of_float(x) : bits;
}

// --- a block in registers ---

struct Block {
    u32 w[WORDS];
};

__device__ __forceinline__ Block load_block(const uint4* at) {
    Block b;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const uint4 quad = __ldg(at + i);
        b.w[4 * i] = quad.x;
        b.w[4 * i + 1] = quad.y;
        b.w[4 * i + 2] = quad.z;
        b.w[4 * i + 3] = quad.w;
    }
    return b;
}

// Element i of words in registers or in memory.
__device__ __forceinline__ float element_of(const u32* w, int i) {
    if (DTYPE == FP32) return __uint_as_float(w[i]);
    const u32 word = w[i >> 1];
    if (DTYPE == BF16) return __uint_as_float(i & 1 ? word & 0xFFFF0000 : word << 16);
    return float_of_fp16(i & 1 ? word >> 16 : word & 0xFFFF);
}

// Bits of the largest of sixteen-bit magnitudes, two per word. NaN counts as larger than infinity.
__device__ __forceinline__ u32 largest(const u32* magnitudes) {
    u32 most = larger_halves(magnitudes[0], magnitudes[1]);
#pragma unroll
    for (int i = 2; i < 8; ++i) most = larger_halves(most, magnitudes[i]);
    const u32 low = most & 0xFFFF, high = most >> 16;
    return low > high ? low : high;
}

// The largest magnitude of a block. NaN wins.
__device__ __forceinline__ float largest_value(const u32* w) {
    if (DTYPE == FP32) {
        float most = larger_magnitude(__uint_as_float(w[0]), __uint_as_float(w[1]));
#pragma unroll
        for (int i = 2; i < 16; ++i) most = larger_magnitude(most, __uint_as_float(w[i]));
        return most;
    }
    u32 magnitudes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) magnitudes[i] = w[i] & 0x7FFF7FFF;
    return value_of_bits(largest(magnitudes));
}

// --- signs ---

// Turns −0.0 into +0.0 and keeps everything else, by x·1 + 0.
__device__ __forceinline__ u32 without_negative_zeros(u32 w) {
#if __CUDA_ARCH__ >= 900
    u32 out;
    if (DTYPE == BF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(w), "r"(0x3F803F80), "r"(0));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(w), "r"(0x3C003C00), "r"(0));
    return out;
#else
    return ((w & 0xFFFF) == 0x8000 ? 0 : w & 0xFFFF) | ((w & 0xFFFF0000) == 0x80000000 ? 0 : w & 0xFFFF0000);
#endif
}

// Bit 3 of eight nibbles, from the top bits of the bytes of two words: one has those of elements 0, 2, 4, 6.
__device__ __forceinline__ u32 sign_nibbles(u32 even, u32 odd) {
    return ((even >> 4) & 0x08080808) | (odd & 0x80808080);
}

// Sign bits of eight sixteen-bit values, given in four words. `keeps_zeros`: −0.0 counts as negative.
__device__ __forceinline__ u32 signs(const u32* w, bool keeps_zeros = false) {
    u32 clean[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) clean[i] = keeps_zeros ? w[i] : without_negative_zeros(w[i]);
    const u32 first = __byte_perm(clean[0], clean[1], 0x7531), second = __byte_perm(clean[2], clean[3], 0x7531);
    return sign_nibbles(__byte_perm(first, second, 0x6420), __byte_perm(first, second, 0x7531));
}

// The same of eight floats.
__device__ __forceinline__ u32 signs_of_floats(const float* y, bool keeps_zeros) {
    u32 bits[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = __float_as_uint(keeps_zeros ? y[i] : y[i] + 0.0f);
    const u32 even = __byte_perm(__byte_perm(bits[0], bits[2], 0x0073), __byte_perm(bits[4], bits[6], 0x0073), 0x5410);
    const u32 odd = __byte_perm(__byte_perm(bits[1], bits[3], 0x0073), __byte_perm(bits[5], bits[7], 0x0073), 0x5410);
    return sign_nibbles(even, odd);
}

// --- codes ---

// An integer whose low bits are the code of y in [0, 7), plus 298. Higher bits are noise.
__device__ __forceinline__ u32 raw_code_of(float moved) {
    const u32 bits = __float_as_uint(moved);
    return bits + (bits >> 22);
}

// Eight codes, the first in the low nibble. The shifts drop the bits above each code, and one subtraction removes all
// offsets.
__device__ __forceinline__ u32 pack_raw(const u32* raw) {
    const u32 low = ((raw[3] * 16 + raw[2]) * 16 + raw[1]) * 16 + raw[0],
              high = ((raw[7] * 16 + raw[6]) * 16 + raw[5]) * 16 + raw[4];
    return __byte_perm(low - 56778, high - 56778, 0x5410);
}
