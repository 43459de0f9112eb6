// Compiles the CUDA kernels' own source for the CPU: thread blocks of one thread, warps of one lane, one after the
// other. The constants that the GPU build sets (-DKIND=…) are variables here, so that one build serves all.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define HALFBYTE_ON_CPU
#define SHORT_BLOCKS 2
#define COUNT_EXACT() ++exact_blocks
#define __device__
#define __shared__ static
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct Index {
    uint32_t x, y;
};

static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

constexpr int WARP = 1;
static const Index threadIdx = {0, 0}, blockDim = {1, 1};
static Index gridDim = {1, 1};
static Index blockIdx = {0, 0};
#ifndef COPIES
#define COPIES 1
#endif
alignas(16) static uint4 shared_memory[COPIES * 6144];  // 96 KiB, or twice that

template <typename T>
static inline T __ldg(const T* at) {
    return *at;
}
static inline void __syncthreads() {}
static inline void __syncwarp() {}
static inline uint32_t __ballot_sync(uint32_t, bool vote) { return vote; }
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __ffs(uint32_t x) { return __builtin_ffs((int)x); }
static inline float __uint_as_float(uint32_t x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
static inline uint32_t __float_as_uint(float x) {
    uint32_t y;
    memcpy(&y, &x, 4);
    return y;
}
// Half precision through the compiler's own type.
static inline float float_of_fp16(uint32_t bits) {
    const uint16_t narrow = (uint16_t)bits;
    _Float16 y;
    memcpy(&y, &narrow, 2);
    return (float)y;
}
static inline uint32_t fp16_of_float(float x) {
    const _Float16 y = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &y, 2);
    return bits;
}
// Pairs of half precision numbers in a word. Sums and products of the kernels' numbers are exact in double precision,
// so they are rounded once.
template <typename Operation>
static inline uint32_t each_half(Operation operation) {
    uint32_t out = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const _Float16 y = (_Float16)operation(shift);
        uint16_t bits;
        memcpy(&bits, &y, 2);
        out |= (uint32_t)bits << shift;
    }
    return out;
}
static inline double half_at(uint32_t word, int shift) { return float_of_fp16(word >> shift & 0xFFFF); }
static inline uint32_t fused_halves(uint32_t a, uint32_t b, uint32_t c) {
    return each_half([=](int at) { return half_at(a, at) * half_at(b, at) + half_at(c, at); });
}
static inline uint32_t times_halves(uint32_t a, uint32_t b) {
    return each_half([=](int at) { return half_at(a, at) * half_at(b, at); });
}
static inline uint32_t minus_halves(uint32_t a, uint32_t b) {
    return each_half([=](int at) { return half_at(a, at) - half_at(b, at); });
}
static inline uint32_t smaller_numbers(uint32_t a, uint32_t b) {
    return each_half([=](int at) { return fmin(half_at(a, at), half_at(b, at)); });
}
// The card's is off by one unit in the last place here and there; so is this one, always.
static inline float about_reciprocal(float x) { return __uint_as_float(__float_as_uint(1.0f / x) + 1); }
static inline float larger_magnitude(float x, float y) {
    return x != x ? x : y != y ? y : fabsf(x) > fabsf(y) ? fabsf(x) : fabsf(y);
}
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline int __float2int_rn(float x) { return (int)lrintf(x); }
static inline void atomicMin(uint32_t* at, uint32_t x) { *at = x < *at ? x : *at; }
static inline void atomicOr(uint32_t* at, uint32_t x) { *at |= x; }

static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t select) {
    const uint64_t bytes = (uint64_t)y << 32 | x;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= (uint32_t)(bytes >> (8 * (select >> (4 * i) & 7)) & 0xFF) << (8 * i);
    return out;
}

static inline uint32_t __dp2a_lo(uint32_t x, uint32_t y, uint32_t z) {
    return (x & 0xFFFF) * (y & 0xFF) + (x >> 16) * (y >> 8 & 0xFF) + z;
}

static inline uint32_t address_of(const void* shared) {
    return (uint32_t)((const char*)shared - (const char*)shared_memory);
}
// Stops where the GPU would: at an address outside of shared memory or not a multiple of its size.
template <typename T>
static inline T shared_at(uint32_t address) {
    if (address % sizeof(T) != 0 || address + sizeof(T) > sizeof(shared_memory)) abort();
    T y;
    memcpy(&y, (const char*)shared_memory + address, sizeof(T));
    return y;
}
static inline uint32_t word_at(uint32_t address) { return shared_at<uint32_t>(address); }
static inline uint4 quad_at(uint32_t address) { return shared_at<uint4>(address); }

// --- what the tests set and read ---

static long long exact_blocks;  // number of blocks that the tables did not decide
static int ROWS, SWIZZLED, GROUPED, LISTED, KIND, SQUARED;
static float TOP;
static int PRE, ELEMENT, STATISTICS, FOR_ZERO_BYTE, TIE, SIGN, NAN_CODE, ZERO_INPUT, WRAPS;
static uint32_t FIRST;
static float LARGEST, SMALLEST, FOR_ZERO;
constexpr int THREADS = 1, BUILD_THREADS = 1, BUILD_BLOCKS = 4, TABLE_BYTES = 96 << 10,
              SHARED_BYTES = sizeof(shared_memory) - 64;

extern "C" void choose(int rows, int swizzled, int grouped, int listed, int kind, int squared, float top) {
    ROWS = rows;
    SWIZZLED = swizzled;
    GROUPED = grouped;
    LISTED = listed;
    KIND = kind;
    SQUARED = squared;
    TOP = top;
}

extern "C" void choose_contract(const double* c) {  // in the order of table_kernels.CONTRACT
    PRE = (int)c[0];
    ELEMENT = (int)c[1];
    STATISTICS = (int)c[2];
    LARGEST = (float)c[3];
    SMALLEST = (float)c[4];
    FOR_ZERO = (float)c[5];
    FOR_ZERO_BYTE = (int)c[6];
    TIE = (int)c[7];
    SIGN = (int)c[8];
    NAN_CODE = (int)c[9];
    ZERO_INPUT = (int)c[10];
    WRAPS = (int)c[11];
    FIRST = (uint32_t)c[12];
}
