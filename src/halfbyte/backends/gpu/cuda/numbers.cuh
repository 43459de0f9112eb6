// Numbers in the CUDA kernels: the numbers of a tensor, pairs of 16-bit numbers in a word, E4M3 and E2M1. On the GPU it
// is compiled without contraction. The tests also compile it for the CPU, with one thread per thread block and one lane
// per warp (tests/backends/gpu/cuda_on_cpu.h).
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef HALFBYTE_ON_CPU
constexpr int WARP = 32;
extern __shared__ uint4 shared_memory[];
#endif

// Indices of a group's numbers, as `prepare` in triton/scales.py writes them.
constexpr int NUMBERS = 16;
enum Number {
    AMAX = 0,
    FACTOR = 1,
    INVERSE = 2,
    FOLDED = 3,
    SHARE_OF_TOP = 5,
    SHARE_OF_AMAX = 6,
    PRESCALE = 7,
    PRESCALE_AGAIN = 8,
    UNIT = 9,
    SEARCHED = 10,
    NO_UNDERFLOW = 11
};

constexpr float FLOAT32_MAX = 3.4028234663852886e38f;

// A bfloat16 is the upper half of a float.
__device__ __forceinline__ float float_of_bf16(u32 bits) { return __uint_as_float(bits << 16); }

// --- shared memory by 32-bit addresses, so that a table's start is added only once per block ---

#ifndef HALFBYTE_ON_CPU
__device__ __forceinline__ u32 address_of(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

__device__ __forceinline__ u32 word_at(u32 address) {
    u32 out;
    asm("ld.shared.u32 %0, [%1];" : "=r"(out) : "r"(address));
    return out;
}

__device__ __forceinline__ uint4 quad_at(u32 address) {
    uint4 out;
    asm("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "r"(address));
    return out;
}
#endif

// --- pairs of 16-bit numbers in a word ---

__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
    u32 out;
    asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
#else
    const u32 low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF,
              high = (a >> 16) > (b >> 16) ? a >> 16 : b >> 16;
    return high << 16 | low;
#endif
}

// max(a + minus, 0) per signed half. The sums must not overflow.
__device__ __forceinline__ u32 halves_above(u32 a, u32 minus) {
#if __CUDA_ARCH__ >= 900
    return __viaddmax_s16x2(a, minus, 0);
#else
    const short low = (short)(a + minus), high = (short)((a >> 16) + (minus >> 16));
    return (u32)(high > 0 ? high : 0) << 16 | (u32)(low > 0 ? low : 0);
#endif
}

// --- E4M3 and E2M1 ---

struct Scale {
    u32 byte;
    float value;
};

// Rounds to nearest even and saturates at 448. NaN gives 0x7F.
__device__ __forceinline__ Scale round_e4m3(float scale) {
    if (scale != scale) return {127, scale};
    const float inside = scale > 448.0f ? 448.0f : scale;
    const u32 power = __float_as_uint(inside > 0.015625f ? inside : 0.015625f) & 0x7F800000;
    const float magic = __uint_as_float(power) * 1048576.0f;  // its last place is the step of this binade
    const float shifted = inside + magic;
    return {(__float_as_uint(shifted) & 31) + (power >> 20) - 968, shifted - magic};
}

// Value of a byte below 127.
__device__ __forceinline__ float value_of_e4m3(u32 byte) {
    return byte < 8 ? (float)byte * 0.001953125f : __uint_as_float((byte + 960) << 20);
}

// A power of two p such that the last place of p·2**19 is the grid's step at y, for y in [0, 7). gpu/triton/blocks.py
// explains it.
__device__ __forceinline__ float step_of(float y) {
    return __uint_as_float(__float_as_uint(__fmaf_rn(y, y, 12.5f)) & 0x7F800000);
}

struct Element {
    u32 code;  // without its sign
    float value;
};

__device__ __forceinline__ Element round_e2m1(float y) {
    const float inside = y > 6.0f ? 6.0f : y, step = step_of(inside), moved = __fmaf_rn(step, 524288.0f, inside);
    const u32 raw = __float_as_uint(moved);
    return {(raw + (raw >> 22) - 298) & 7, __fmaf_rn(step, -524288.0f, moved)};
}

// Value of a code with its sign: its bits are those of a float with an exponent that is 126 too small.
__device__ __forceinline__ float value_of_code(u32 code) {
    const float magnitude = __uint_as_float((code & 7) << 22) * 8.507059173023462e37f;
    return code & 8 ? -magnitude : magnitude;
}
