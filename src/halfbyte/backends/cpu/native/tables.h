// The tables that drive the plain kernels, and the rule they are built from.
#pragma once
#include "numbers.h"

enum Tie : int { TIE_EVEN = 0, TIE_DOWN = 1 };
enum Sign : int { SIGN_BELOW_ZERO = 0, SIGN_BIT = 1, SIGN_NOT_ABOVE_ZERO = 2, SIGN_OF_X = 3 };

static const uint8_t IRREGULAR = 0xFF;

// bfloat16: a magnitude's code from its place among segments of 64 bit patterns. Code 4 begins at place 512; since
// codes 5 and 7 begin an octave after 3 and 5, and 6 after 4, no segment then holds the beginning of more than one.
struct Segment {
    static constexpr int SIZE = 64, COUNT = 16, PLACES = SIZE * COUNT, MIDDLE = PLACES / 2;
    uint8_t count[COUNT];  // 64 times the code at the segment's begin (less 4 from the middle on), plus 64 - where one
                           // begins in it
    uint32_t start;        // places count from here. Both 16-bit halves hold the number
    uint32_t unused[3];
};

// bfloat16: the byte of an amax's bits a without a look-up in memory, (a + offset + ahead[(a >> 3) & 15]) >> shift.
// Bytes begin more than eight bit patterns apart, and every binade of amaxes is like the one before it.
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
    int32_t last_bounded;  // up to this byte no magnitude of a block that its amax led to it lies beyond PLACES
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
    int32_t pre_scale;  // index into PRE_SCALES of backends/cpu/tables.py
    int32_t divides;    // y = x / constant[byte] instead of x * constant[byte]
    int32_t tie, sign, wraps;
    int32_t for_zero_byte;  // -1: none
    int32_t statistics;     // Dtype in which v/6 is rounded (pre_scale 4)
    float smallest;
    float for_zero;  // negative: none
    float factor, largest, top, amax;
    float constant[256];
};
