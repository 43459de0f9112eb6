// The tables that drive the plain kernels, and the rule they are built from.
#pragma once
#include "numbers.h"

// The formulas of slot 2, named after their functions in contracts/expressions.py.
enum PreScale : int {
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
enum Tie : int { TIE_EVEN = 0, TIE_DOWN = 1 };
enum Sign : int { SIGN_BELOW_ZERO = 0, SIGN_BIT = 1, SIGN_NOT_ABOVE_ZERO = 2, SIGN_OF_X = 3 };

static const uint8_t IRREGULAR = 0xFF;

// bfloat16: finds a magnitude's code by its place, which is its bits minus `start`. Places fall into 16 segments of 64.
// Code 4 starts at place 512. Codes 5 and 7 start one octave after codes 3 and 5, and code 6 one octave after code 4,
// so at most one code starts inside a segment.
struct Segment {
    static constexpr int SIZE = 64, COUNT = 16, PLACES = SIZE * COUNT, MIDDLE = PLACES / 2;
    uint8_t count[COUNT];  // 64·(code at the segment's start, minus 4 in the upper half) + 64 − offset at which the
                           // next code starts (64 if none does)
    uint32_t start;        // the bits of place 0, in both 16-bit halves
    uint32_t unused[3];
};

// bfloat16: computes the scale byte of an amax with bits a as (a + offset + ahead[(a >> 3) & 15]) >> shift, without a
// look-up in memory. This works where bytes start more than eight bit patterns apart and every binade of amaxes repeats
// the one before.
struct Steps {
    uint8_t ahead[16];
    uint16_t first, last;  // the amax bits that this serves, all with bounded segments. first > last: none
    uint16_t offset;       // the offset above minus 256 * ahead[0], which the byte shuffle adds to every 16-bit lane
    uint16_t shift;
};

// Everything a plain kernel needs. It compares magnitudes as integers, because their bits have the same order.
struct Tables {
    uint8_t lut[32768];    // 16-bit input: the scale byte of each amax; IRREGULAR: the reference must decide
                           // FP32: the raw byte of the smallest amax with these top 15 bits
    uint32_t starts[257];  // FP32: the amax bits at which raw byte b starts
    uint8_t written[256];  // FP32: the byte to write for each raw byte, or IRREGULAR
    uint32_t zero_below;   // FP32: below these amax bits the scale is exactly 0 before rounding ...
    uint32_t zero_byte;    // ... and this byte is written
    // The code is k + 1 if the bits exceed [k], k < 7. A negative x keeps its sign if they exceed [7].
    int32_t threshold[256][8];
    int32_t positive_sign[256];           // a positive x below this gets the sign bit (0: never)
    int32_t has_positive_sign;            // whether any entry of positive_sign is not 0
    float scale[256];                     // MXFP8: elements are divided by this
    int32_t first_segment, last_segment;  // the bytes with a segment; all have the same threshold[7], 0 or -1
    int32_t segment_sign;                 // the threshold[7] of these bytes
    int32_t last_bounded;  // up to this byte: if the block's own amax gave the byte, no place is beyond PLACES
    Segment segment[256];
    Steps steps;
};

// Scale byte of an amax, given by its bits; or IRREGULAR.
template <bool WIDE>
static inline uint8_t byte_of_amax(uint32_t amax, const Tables& t) {
    if (!WIDE) return t.lut[amax];
    if (amax < t.zero_below) return (uint8_t)t.zero_byte;
    uint32_t raw = t.lut[amax >> 16];
    while (raw < 255 && amax >= t.starts[raw + 1]) ++raw;
    return t.written[raw];
}

// How the contract computes scale bytes and codes of one tensor. (contracts.spec.NVFP4Rule)
struct Rule {
    int32_t pre_scale;  // a PreScale
    int32_t divides;    // y = x / constant[byte] instead of x * constant[byte]
    int32_t tie, sign, wraps;
    int32_t for_zero_byte;  // -1: none
    int32_t statistics;     // the Dtype to which v/6 is rounded (FACTOR_TIMES_DIVIDED)
    float smallest;
    float for_zero;  // negative: none
    float factor, largest, top, amax;
    float constant[256];
};
