// What `halfbyte verify` compares and gets: stored rows, the rules of scales, sums. (backends/compare.py)
#pragma once
#include <cstdint>

// Which rules the scale of a block obeys. (verify/against/scale_rules.py)
enum ScaleMark : int {
    EXACTLY_SIX = 1,
    LOOSELY_SIX = 2,
    CLEARLY_SIX = 4,
    EXACTLY_FOUR = 8,
    LOOSELY_FOUR = 16,
    CLEARLY_FOUR = 32,
    LEAST_SQUARES = 64,
    TOLD = 128
};

// Rows of blocks as they are stored.
struct StoredRows {
    int64_t rows, columns;  // columns: blocks per row
    int32_t block;          // 16 or 32
    float tensor_scale;
    const float* values;  // of each scale byte
    const float* tables;  // 3 x 16: of each code its value, the smallest and the largest quotient it is nearest to
};

// The numbers of the rules, for one tensor scale. Slacks are pairs that multiply `low` and `high`.
struct ScaleJudge {
    float six, four, tensor_scale, clipped, small;
    float exact[2], loose[2], tight[2], least[2];
    float low[128], high[128];  // the numbers that round to each scale byte
};

struct RowSums {
    double squares, off;  // of the source, and of the differences
    int64_t wrong;        // blocks with a code that is not the nearest
};

struct FactorSums {
    double product, power, squares, spread;
};
