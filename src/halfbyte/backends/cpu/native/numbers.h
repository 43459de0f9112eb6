// Dtypes, bit casts and the E4M3 codec. Every kernel uses them.
//
// The build sets -ffp-contract=off and never -ffast-math, so every float operation rounds once, as in the numpy
// reference. A comment before a formula names the Python function that defines it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

enum Dtype : int { BF16 = 0, FP16 = 1, FP32 = 2 };

// Bits of infinity, which follow those of the largest finite magnitude.
static inline uint32_t inf_bits(int dtype) { return dtype == BF16 ? 0x7F80u : dtype == FP16 ? 0x7C00u : 0x7F800000u; }

static inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// Exact value of a float16 magnitude, including infinity and NaN. The sign bit must be clear.
static inline float half_magnitude(uint32_t h) {
    uint32_t exponent = h >> 10, mantissa = h & 0x3FF;
    if (exponent == 0) return (float)mantissa * 0x1p-24f;
    if (exponent == 31) return as_float(0x7F800000u | (mantissa << 13));
    return as_float(((exponent + 112) << 23) | (mantissa << 13));
}

// Value of a magnitude, given by its bits in `dtype`.
static inline float magnitude_value(uint32_t bits, int dtype) {
    return dtype == BF16 ? as_float(bits << 16) : dtype == FP16 ? half_magnitude(bits) : as_float(bits);
}

// E4M3 byte of a non-negative number: rounds to nearest even, saturates, and gives 0x7F for NaN. (codec.element.encode)
static inline int e4m3_encode(float x) {
    if (x != x) return 0x7F;
    if (x >= 448.0f) return 0x7E;
    if (x < 0x1p-6f) return (int)(((x + 0x1p14f) - 0x1p14f) * 512.0f);  // the last place of 2**14 is 2**-9
    uint32_t bits = as_bits(x);
    bits += 0x7FFFF + ((bits >> 20) & 1);
    int code = (int)(bits >> 20) - (120 << 3);
    return code > 0x7E ? 0x7E : code;
}

static inline float e4m3_decode(int byte) {
    if (byte >= 0x7F) return std::numeric_limits<float>::quiet_NaN();
    return byte < 8 ? (float)byte * 0x1p-9f : as_float(((uint32_t)byte + (120u << 3)) << 20);
}
