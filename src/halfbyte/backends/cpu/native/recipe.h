// What a call of the library needs besides the data: the contract's formulas and numbers. Python fills it once for a
// request and keeps it. (backends/cpu/recipe.py)
#pragma once
#include "formulas.h"

// Which kernel finds the scale bytes, named as in backends/cpu/choose.py.
enum Route : int {
    PLAIN_BLOCKS = 0,
    FOUR_SIX_BLOCKS = 1,
    FOUR_SIX_ORDERED = 2,
    EXACT_BLOCKS = 3,
    EXACT_GENERAL = 4,
    QWANTIZE_SEARCH = 5,
    MX_BLOCKS = 6,
    MX_EXACT = 7
};

struct Recipe {
    int32_t route;
    int32_t block, dtype;
    int32_t factor, pre_scale, element;  // a Factor, PreScale and ElementFormula
    int32_t stored;                      // a Stored; -1: nothing is stored and code times scale is the value
    int32_t multiplier;                  // a Multiplier
    int32_t tie, sign, wraps;
    int32_t nan_code;       // the code of y = NaN, before the sign
    int32_t for_zero_byte;  // as in Rule
    int32_t statistics;     // the Dtype of minima and maxima
    int32_t first;          // the smallest byte that an exact search tries
    int32_t error, metric;  // 4over6: numbers of the error formula and of what is added
    int32_t mx_element;     // MX: an MxElement
    int32_t zero_byte;      // MX search: the byte of an all-zero block, or -1
    int32_t worth_tables;   // from so many blocks on, tables are built
    float smallest, for_zero, largest, top;
    float given;           // a factor that the caller gave; 0: none
    const Tables* tables;  // MX: the tables of the contract and the dtype
    const float* values;   // the value of each scale byte, 256 of them: searches that take an array
    // By how much the tensor's own amax may be raised: for tensors of more than `small` elements, and for others.
    // (backends/headroom.py)
    // `sampled`: whether those of small tensors are candidates for a larger one is decided by a sample of about so many
    // elements; 0: they are not.
    int64_t small, sampled;
    int32_t headrooms, small_headrooms;  // 0: the amax stays
    double headroom[4], small_headroom[4];
    int64_t clearly[2];  // a headroom of the sample is one if it costs less than this share of 1 and 2
};

struct DecodeRecipe {
    int32_t decode;  // a Decode
    int32_t block;
    int32_t dtype;          // of the result
    int32_t negative_zero;  // whether code 8 is -0.0
    int32_t code_bits;      // 4, or 8: E4M3 elements, always by table
    float top;
    const void* table;  // the values of every byte and code, for formats without a tensor-level scale; or null
};
