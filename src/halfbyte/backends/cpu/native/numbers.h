// Shared by every kernel: dtypes, bit casts, the E4M3 codec.
//
// Built with -ffp-contract=off and without -ffast-math: every float operation below rounds once, as the numpy reference
// does. The comment before each formula names its twin there.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

enum Dtype : int { BF16 = 0, FP16 = 1, FP32 = 2 };

// Largest finite magnitude + 1, that is the bit pattern of Inf, by dtype.
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

// Exact value of a half-precision magnitude (sign clear), Inf and NaN included.
static inline float half_magnitude(uint32_t h) {
    uint32_t exponent = h >> 10, mantissa = h & 0x3FF;
    if (exponent == 0) return (float)mantissa * 0x1p-24f;
    if (exponent == 31) return as_float(0x7F800000u | (mantissa << 13));
    return as_float(((exponent + 112) << 23) | (mantissa << 13));
}

// Float value of a magnitude's bits in the given dtype.
static inline float magnitude_value(uint32_t bits, int dtype) {
    return dtype == BF16 ? as_float(bits << 16) : dtype == FP16 ? half_magnitude(bits) : as_float(bits);
}

// E4M3 byte of a non-negative number: nearest even, saturating, NaN 0x7F. (codec.element.encode)
static inline int e4m3_encode(float x) {
    if (x != x) return 0x7F;
    if (x >= 448.0f) return 0x7E;
    if (x < 0x1p-6f) return (int)(((x + 0x1p14f) - 0x1p14f) * 512.0f);  // one unit of 2**14 is 2**-9
    uint32_t bits = as_bits(x);
    bits += 0x7FFFF + ((bits >> 20) & 1);
    int code = (int)(bits >> 20) - (120 << 3);
    return code > 0x7E ? 0x7E : code;
}

static inline float e4m3_decode(int byte) {
    if (byte >= 0x7F) return std::numeric_limits<float>::quiet_NaN();
    return byte < 8 ? (float)byte * 0x1p-9f : as_float(((uint32_t)byte + (120u << 3)) << 20);
}
