// The table of searches that add in a peer's own order, and of the search for any format; and the numbers they take.
#pragma once
#include "kernels.h"

// How an element is rounded. The order is that of ELEMENTS in backends/cpu/general_search.py.
enum Element : int { EVEN = 0, DOWN = 1, WRAPPED = 2, NEAREST_E4M3 = 3, FIRST_NEAREST = 4 };
enum Objective : int { SQUARES = 0, WEIGHTED_SQUARES = 1, QUADRATIC = 2 };
enum Measure : int { ABSOLUTE = 0, SQUARED = 1, LARGEST = 2 };

// The exact search of reference/search.py for any contract. "Per row" means one entry for all rows if `per_row` is 0.
struct GeneralSearch {
    int32_t block, dtype, element, objective;
    int32_t divides;      // y = x / constant[byte] instead of x * constant[byte]
    int32_t first, last;  // smallest and largest candidate byte
    int32_t by_block;     // k is the exponent of the block's amax (MX formats); otherwise it is the row's
    int32_t zero_byte;    // the byte of an all-zero block; -1: the block is listed as irregular
    int32_t per_row;
    int32_t start;          // MX: the search starts at the scale nearest to amax / 2**start
    float most_value;       // the largest element value
    float zero_below;       // y at or below this rounds to 0
    const float* value;     // scale of each byte
    const float* constant;  // what x is multiplied or divided by; 256 per row
    const float* prescale;  // 2**-k per row
    const float* unit;      // g·2**-k per row
    const float* numbers;   // per column: `block` weights, or the upper triangle of H, doubled off the diagonal
    const float* bounds;  // per column: root of the largest eigenvalue (negative: unknown), trace, smallest eigenvalue
};

// The element values in ascending order. The descent moves a code to its neighbour here.
struct Grid {
    int32_t size, code_bits;
    float value[256];    // ascending
    uint8_t code[256];   // code of each place in the grid
    uint8_t place[256];  // place of each code
};

// A sign bit that is set for negative codes other than zero (gguf). It comes after those of tables.h.
constexpr int SIGN_OF_CODE = 4;

// Error feedback besides the search of each block's scale. "Per row" means one entry for all rows if `per_row` is 0.
struct FeedbackSteps {
    int64_t width;
    int32_t sign, nan_code, sweeps, per_row;
    const int32_t* order;  // blocks in the order in which they are decided
    const float* factor;   // per turn: the rows of R up to the end of the block, `block` columns each
    const float* shift;    // per block: all rows of N, `block` columns each; or null
    const float* moments;  // per turn: all rows of A, `block` columns each; null without sweeps
    const float* scale;    // value of a code of 1 under each byte; 256 per row
    const float* most;     // per row: the largest magnitude for which the search is exact
};

// Numbers for Model-Optimizer's static weights. (contracts/searches/static.py)
struct StaticScale {
    float factor, inverse;  // multiplies the scale of the fake-quantized copy; 1 / factor
    float top, amax;        // N and G/6 of the exported scale
    float smallest;         // smallest exported scale
};

struct SweepTables {
    float scale[126];   // scale of each candidate in the fake-quantized copy
    uint8_t byte[128];  // byte that is written for each candidate
    int32_t ascending;  // the scales are positive and never decrease
    int32_t regular;    // also, each is within four units in the last place of E4M3 value * `unit`
    float unit;
};

// Numbers for qwantize's search. (contracts/searches/qwantize.py)
struct PeerSearch {
    int32_t block, dtype;
    int32_t last;      // the largest candidate byte
    int32_t limit;     // clipping error must stay below: 0: the best error, 1: ten times that, 2: the naive error
    float value[256];  // scale of each byte
    const float* h;    // block * block per column, or null
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
    int64_t (*ends)(const void* x, int64_t blocks, int block, int dtype, int32_t bottom, int32_t top, int64_t* out);
    void (*errors)(const void* x, int64_t stride, int64_t rows, int64_t column, const GeneralSearch*, float* out,
                   int64_t out_stride);
    int64_t (*feedback)(const float* w, int64_t rows, int64_t row, const GeneralSearch*, const FeedbackSteps*,
                        const Grid*, uint8_t* codes, uint8_t* scales, int64_t* left_out);
};

static const int MOST_HEADROOMS = 8;

// The search under each of several tensor scales, to choose among them. (backends/headroom.py) Rows by
// TransformerEngine's formulas have no constants: then `prescale` holds their factors, and `unit` their multipliers.
struct Survey {
    int32_t count;                  // candidates
    int32_t one, two;               // the places of the headrooms 1 and 2 if only the ends differ; otherwise -1
    int32_t decides;                // only the order of the sums has to be right
    int32_t step;                   // 1; or of a sample, every such block counts, under all candidates
    float bottom, top;              // the ends: amaxes of blocks
    int32_t shift[MOST_HEADROOMS];  // an error counts floor(E·2**shift)
    GeneralSearch search[MOST_HEADROOMS];
};

// Exact sum of non-negative numbers: the low 32 bits of each, and the rest.
struct Sum {
    int64_t low, rest;
};

// Finds the errors of a matrix of `columns` blocks per row under each candidate, up to a number that all share; of more
// candidates than 1 and 2, and of a sample, the errors themselves. If it `decides`, only the order is right, and a
// candidate that cannot win may have any larger sum. `first`: the first block of a sample. `bytes` gets the scales of
// all blocks under each candidate, or is null; not of one that cannot win. Returns false if an error is beyond what it
// can add.
bool survey_blocks(int isa, const void* x, int64_t rows, int64_t columns, int64_t first, const Survey& survey,
                   uint8_t* bytes, Sum* sums);

const Searches* searches_of(int isa);
