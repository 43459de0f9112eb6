// The kernels of one instruction set, and the numbers they take.
#pragma once
#include "tables.h"

// One tensor's (or row's) numbers for 4over6.
struct FourSixScale {
    float factor;   // enc
    float inverse;  // 1/enc
    float amax;     // A
    float top;      // 6 * e4m3_max
};

// A contract's numbers for every scale byte, after the power-of-two pre-scale of the whole tensor.
struct SearchTables {
    float multiplier[128];  // element formula: y = x' * multiplier, or x' / multiplier where `divides`
    float scale[128];       // s' = E4M3 value * g'
    int32_t divides;
    int32_t first;      // smallest candidate byte
    int32_t zero_byte;  // what an all-zero block gets
    float prescale;     // x' = x * prescale, a power of two
    float unit;         // g', in [1, 2)
    float to_scale;     // about 1 / (6 g'): where the search begins
};

// Squared errors of bfloat16 magnitudes under sixteen neighbouring scales, to be looked up. (searches/nvfp4_lookup.inc)
//
// Numbers are in units of g'·2**e: the scales are 8, 9 .. 15, 16, 18 .. 30, amaxes lie in (56, 112]. Other e differ by
// powers of two alone, and a power of two moves the bits of a magnitude by 128.
struct alignas(64) ErrorRows {
    static constexpr int COLUMNS = 16, ROWS = 768, OCTAVE = 128;
    uint16_t error[ROWS][COLUMNS];       // by magnitude bits - lowest; row 0: what all of the scales round to zero
    uint16_t excluded[OCTAVE][COLUMNS];  // by amax bits: 0xFFFF where docs/methods.md excludes the scale
    uint16_t clipping[OCTAVE];           // by amax bits: a best sum below this rules out all smaller scales
    uint16_t beyond[2 * COLUMNS];        // zeros, then 0xFFFF: for scales above the largest
    int32_t amax, lowest;                // where amaxes and rows begin if the first scale is byte 80
    int32_t least, most;                 // the amaxes that all this describes
};

// How an element of an MX block becomes a code, in the order of ELEMENTS in backends/cpu/mx.py.
enum MxElement : int { MX_E2M1 = 0, MX_E2M1_DOWN = 1, MX_E4M3 = 2 };

// Every pointer covers what its counts say; callers check shapes and strides before a pointer gets here.
struct Kernels {
    int64_t (*plain)(const void* x, int64_t blocks, int block, int dtype, const Tables*, uint8_t* codes,
                     uint8_t* scales, int64_t* irregular);
    void (*emit)(const void* x, int64_t blocks, int block, int dtype, const Tables*, uint8_t* codes, uint8_t* scales);
    void (*direct)(const void* x, int64_t blocks, int dtype, float factor, uint8_t* codes, uint8_t* scales);
    void (*direct_emit)(const void* x, int64_t blocks, int dtype, float factor, uint8_t* codes, uint8_t* scales);
    int64_t (*mxfp8)(const void* x, int64_t blocks, int dtype, const Tables*, uint8_t* codes, uint8_t* scales,
                     int64_t* irregular);
    uint32_t (*amax)(const void* x, int64_t n, int dtype);
    void (*decode)(const uint8_t* codes, const uint8_t* scales, int64_t blocks, int block, const void* table, int width,
                   void* out);
    void (*decode_mxfp8)(const uint8_t* codes, const uint8_t* scales, int64_t blocks, const void* table, int width,
                         void* out);
    uint32_t (*four_six)(const void* x, int64_t blocks, int dtype, int kind, int squared, const FourSixScale*,
                         uint8_t* scales);
    void (*four_six_tiles)(const void* x, int64_t columns, int64_t stride, int dtype, int kind, int squared,
                           const FourSixScale*, uint8_t* scales);
    void (*search)(const void* x, int64_t stride, int64_t blocks, int dtype, const SearchTables*, const float* weights,
                   uint8_t* scales, int64_t scale_stride);
    bool (*build_error_rows)(const SearchTables&, ErrorRows*);
    int64_t (*search_by_rows)(const void* x, int64_t blocks, const ErrorRows&, uint8_t* scales, int32_t* undecided);
    void (*hessian)(const void* x, int64_t stride, int64_t rows, int dtype, const SearchTables*, const float* h,
                    const float* bounds, uint8_t* scales, int64_t scale_stride);
    void (*descend)(const void* x, int64_t stride, int64_t rows, int dtype, const SearchTables*, const float* h,
                    const uint8_t* scales, int64_t scale_stride, uint8_t* codes, int64_t code_stride);
    int64_t (*mx_search)(const void* x, int64_t stride, int64_t blocks, int block, int dtype, int element,
                         const float* weights, int zero_byte, uint8_t* scales, int64_t scale_stride, int64_t first,
                         int64_t step, int64_t* irregular);
    void (*mxfp8_emit)(const void* x, int64_t blocks, int block, int dtype, const Tables*, uint8_t* codes,
                       const uint8_t* scales);
    void (*pack)(const uint8_t* codes, int64_t bytes, uint8_t* out);
    void (*unpack)(const uint8_t* packed, int64_t bytes, uint8_t* out);
    int64_t (*cast)(const uint8_t* codes, const uint8_t* scales, int64_t blocks, const uint8_t* table,
                    uint8_t* codes_out, uint8_t* scales_out);
    void (*tile_amax)(const void* x, int64_t columns, int dtype, uint32_t* out);
    int lanes;
};
