// Searches that follow one peer's order of sums, and the search that takes any element, block and row: what they take.
#pragma once
#include "kernels.h"

// How an element becomes a value, in the order of ELEMENTS in backends/cpu/general_search.py.
enum Element : int { EVEN = 0, DOWN = 1, WRAPPED = 2, NEAREST_E4M3 = 3, FIRST_NEAREST = 4 };
enum Objective : int { SQUARES = 0, WEIGHTED_SQUARES = 1, QUADRATIC = 2 };
enum Measure : int { ABSOLUTE = 0, SQUARED = 1, LARGEST = 2 };

// The exact search of reference/search.py for any contract. Arrays "a row" have one entry for all rows where `per_row`
// is 0.
struct GeneralSearch {
    int32_t block, dtype, element, objective;
    int32_t divides;      // y = x / constant[byte] instead of x * constant[byte]
    int32_t first, last;  // smallest and largest candidate byte
    int32_t by_block;     // k is the exponent of the block's amax (MX), not the row's
    int32_t zero_byte;    // what an all-zero block gets; -1: it is listed
    int32_t per_row;
    int32_t start;          // the candidate nearest to amax / 2**start (MX)
    float most_value;       // largest element value
    float zero_below;       // y up to this becomes 0
    const float* value;     // scale by byte
    const float* constant;  // what y is made with, 256 a row
    const float* prescale;  // 2**-k, a row
    const float* unit;      // g·2**-k, a row
    const float* numbers;   // `block` weights a column, or the upper triangle of a column's H, doubled off the diagonal
    const float* bounds;    // a column: root of the largest eigenvalue (negative: unknown), trace, smallest eigenvalue
};

// Codes of one step of the grid next to each other, for the descent.
struct Grid {
    int32_t size, code_bits;
    float value[256];    // ascending
    uint8_t code[256];   // of a place in the grid
    uint8_t place[256];  // of a code
};

// Model-Optimizer's static weights. (contracts/searches/static.py)
struct StaticScale {
    float factor, inverse;  // what the copy's scale is multiplied by, and 1 over it
    float top, amax;        // N and G/6 of the exported scale
    float smallest;         // of the exported scale
};

struct SweepTables {
    float scale[126];   // of the copy, one a candidate
    uint8_t byte[128];  // what is written for it
    int32_t ascending;  // scales are positive and never fall
    int32_t regular;    // and within four units in the last place of E4M3 values times `unit`
    float unit;
};

// qwantize's search. (contracts/searches/qwantize.py)
struct PeerSearch {
    int32_t block, dtype;
    int32_t last;      // largest candidate byte
    int32_t limit;     // clipping must stay below 0: the best so far, 1: ten times it, 2: the naive error
    float value[256];  // scale by byte
    const float* h;    // block·block a column, or null
};

struct Searches {
    void (*four_six)(const void* x, int64_t blocks, int block, int dtype, int kind, int measure, int peer,
                     const FourSixScale*, uint8_t* scales);
    void (*four_six_tiles)(const void* x, int64_t columns, int64_t stride, int dtype, int measure, const FourSixScale*,
                           uint8_t* scales);
    void (*static_four_six)(const void* x, int64_t blocks, int block, int dtype, const StaticScale*, uint8_t* scales);
    void (*sweep)(const void* x, int64_t blocks, int block, int dtype, const SweepTables*, uint8_t* scales);
    void (*peer_search)(const void* x, int64_t stride, int64_t blocks, const PeerSearch*, const float* h,
                        uint8_t* scales, int64_t scale_stride);
    int64_t (*general)(const void* x, int64_t stride, int64_t rows, int64_t row, int64_t column, const GeneralSearch*,
                       uint8_t* scales, int64_t scale_stride, int64_t first, int64_t* irregular);
    void (*descend)(const void* x, int64_t stride, int64_t rows, int64_t row, int64_t column, const GeneralSearch*,
                    const Grid*, const uint8_t* scales, int64_t scale_stride, uint8_t* codes, int64_t code_stride);
    void (*wrap)(const void* x, int64_t blocks, int block, int dtype, const float* constant, uint8_t* codes,
                 const uint8_t* scales);
    void (*rotate)(const void* x, int64_t groups, int dtype, const float* matrix, void* out);
};
