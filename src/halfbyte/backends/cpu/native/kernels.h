// One instruction set's table of kernels, and the numbers that these kernels take.
#pragma once
#include "tables.h"
#include "compare.h"

// The numbers of one tensor (or of one row) for 4over6.
struct FourSixScale {
    float factor;   // the tensor's encode factor
    float inverse;  // 1 / factor
    float amax;     // A, the tensor's amax
    float top;      // 6 * e4m3_max
};

// The contract's numbers for each scale byte. The whole tensor is first multiplied by a power of two, `prescale`.
struct SearchTables {
    float multiplier[128];  // y = x' * multiplier, or x' / multiplier if `divides`
    float scale[128];       // s' = E4M3 value * g'
    int32_t divides;
    int32_t first;      // the smallest candidate byte
    int32_t zero_byte;  // the byte of an all-zero block
    float prescale;     // x' = x * prescale, a power of two
    float unit;         // g', in [1, 2)
    float to_scale;     // about 1 / (6 g'): amax * to_scale is the scale at which the search starts
};

// Table of the squared errors of bfloat16 magnitudes under sixteen neighbouring scales. (searches/nvfp4_lookup.inc)
//
// Numbers are in units of g'·2**e. In these units the scales are 8, 9 .. 15, 16, 18 .. 30 and amaxes lie in (56, 112].
// One table serves every e: another e multiplies everything by a power of two, which adds a multiple of 128 to a
// magnitude's bits.
struct alignas(64) ErrorRows {
    static constexpr int COLUMNS = 16, ROWS = 768, OCTAVE = 128;
    uint16_t error[ROWS][COLUMNS];       // index: magnitude bits - lowest. Row 0: every scale rounds it to zero
    uint16_t excluded[OCTAVE][COLUMNS];  // index: amax bits. 0xFFFF if docs/methods.md excludes the scale
    uint16_t clipping[OCTAVE];           // index: amax bits. A best sum below this rules out all smaller scales
    uint16_t beyond[2 * COLUMNS];        // zeros, then 0xFFFF: added to exclude scales above the largest
    int32_t amax, lowest;                // first amax and first row if the first scale is byte 80
    int32_t least, most;                 // smallest and largest amax that the table serves
};

// How an element of an MX block is rounded. The order is that of ELEMENTS in backends/cpu/tables_mx.py.
enum MxElement : int { MX_E2M1 = 0, MX_E2M1_DOWN = 1, MX_E4M3 = 2 };

// The kernels trust their arguments: callers check shapes and strides before they pass a pointer.
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
    // The same, and the error of each block, next to each other.
    void (*search_errors)(const void* x, int64_t stride, int64_t blocks, int dtype, const SearchTables*,
                          const float* weights, uint8_t* scales, int64_t scale_stride, float* errors);
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
    int64_t (*cast)(const uint8_t* codes, const uint8_t* scales, int64_t blocks, const uint8_t* table,
                    uint8_t* codes_out, uint8_t* scales_out);
    void (*tile_amax)(const void* x, int64_t columns, int dtype, uint32_t* out);
    float (*compare_rows)(const void* x, int dtype, const uint8_t* codes, const uint8_t* bytes, const StoredRows*,
                          const ScaleJudge*, RowSums*, uint8_t* marks, FactorSums*);
    int lanes;
};

// The tables of a row with its own tensor scale, by TransformerEngine's formulas. (backends/cpu/tables_nvfp4.py)
void fill_search_tables(float factor, float multiplier, int first, int zero_byte, SearchTables* t);

// The kernels of an instruction set, by its number in backends/cpu/library.py.
const Kernels* tables_of(int isa);
