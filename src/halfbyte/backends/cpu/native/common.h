// Shared by every kernel: dtypes, bit casts, the tables that drive the plain kernels, the E4M3 codec.
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
enum Tie : int { TIE_EVEN = 0, TIE_DOWN = 1 };
enum Sign : int { SIGN_BELOW_ZERO = 0, SIGN_BIT = 1, SIGN_NOT_ABOVE_ZERO = 2, SIGN_OF_X = 3 };

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

static const uint8_t IRREGULAR = 0xFF;

// bfloat16: a magnitude's code from its place among segments of 64 bit patterns. Code 4 begins at place 512; since codes 5 and 7
// begin an octave after 3 and 5, and 6 after 4, no segment then holds the beginning of more than one.
struct Segment {
    static constexpr int SIZE = 64, COUNT = 16, PLACES = SIZE * COUNT, MIDDLE = PLACES / 2;
    uint8_t count[COUNT];  // 64 times the code at the segment's begin (less 4 from the middle on), plus 64 - where one begins in it
    uint32_t start;        // places count from here. Both 16-bit halves hold the number
    uint32_t unused[3];
};

// bfloat16: the byte of an amax's bits a without a look-up in memory, (a + offset + ahead[(a >> 3) & 15]) >> shift. Bytes begin
// more than eight bit patterns apart, and every binade of amaxes is like the one before it.
struct Steps {
    uint8_t ahead[16];
    uint16_t first, last;  // amax bits that are described; their bytes have bounded segments. None: first > last
    uint16_t offset;       // 256 * ahead[0] less than above: shuffling 16-bit lanes by bytes adds it to each
    uint16_t shift;
};

// Everything a plain kernel needs. Magnitudes are compared as integers, which order like the numbers.
struct Tables {
    uint8_t lut[32768];          // 16-bit input: scale byte by the amax's magnitude bits; IRREGULAR: ask the reference
                                 // FP32: the raw byte at the start of the amax's bucket, by its top 15 bits
    uint32_t starts[257];        // FP32: raw byte b begins at these amax bits
    uint8_t written[256];        // FP32: raw byte to the byte that is written, or IRREGULAR
    uint32_t zero_below;         // FP32: an amax below these bits has a scale of exactly 0 before rounding ...
    uint32_t zero_byte;          // ... and gets this byte
    int32_t threshold[256][8];   // code k + 1 where the bits exceed [k], k < 7; a negative keeps its sign above [7]
    int32_t positive_sign[256];  // positive x gets the sign bit below this (0: never)
    int32_t has_positive_sign;   // whether any entry above is not 0
    float scale[256];            // MXFP8: what elements are divided by
    int32_t first_segment, last_segment;  // bytes that `segment` describes; all have the same threshold[7], 0 or -1
    int32_t segment_sign;                 // that threshold
    int32_t last_bounded;                 // up to this byte no magnitude of a block that its amax led to it lies beyond PLACES
    Segment segment[256];
    Steps steps;
};

// Scale byte of an amax's bits, or IRREGULAR.
template <bool WIDE>
static inline uint8_t byte_of_amax(uint32_t amax, const Tables& t) {
    if (!WIDE) return t.lut[amax];
    if (amax < t.zero_below) return (uint8_t)t.zero_byte;
    uint32_t raw = t.lut[amax >> 16];
    while (raw < 255 && amax >= t.starts[raw + 1]) ++raw;
    return t.written[raw];
}

// How the scale byte and the elements of one tensor come about. (contracts.spec.NVFP4Rule)
struct Rule {
    int32_t pre_scale;       // index into PRE_SCALES of backends/cpu/tables.py
    int32_t divides;         // y = x / constant[byte] instead of x * constant[byte]
    int32_t tie, sign, wraps;
    int32_t for_zero_byte;   // -1: none
    int32_t statistics;      // Dtype in which v/6 is rounded (pre_scale 4)
    float smallest;
    float for_zero;          // negative: none
    float factor, largest, top, amax;
    float constant[256];
};
