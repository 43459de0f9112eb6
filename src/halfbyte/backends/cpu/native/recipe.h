// What a call of the library needs besides the data: the contract's formulas and numbers. Python fills it once for a
// request and keeps it. (backends/cpu/recipe.py)
#pragma once
#include "formulas.h"

// How the scale bytes of a recipe are found. The order is that of ROUTES in backends/cpu/recipe.py.
enum Route : int {
    PLAIN = 0,             // by the contract's formula
    FOUR_SIX = 1,          // 4over6 on blocks of 16, TransformerEngine's order of sums
    FOUR_SIX_ORDERED = 2,  // 4over6 in another order
    EXACT = 3,             // the exact search on blocks of 16
    EXACT_GENERAL = 4,     // the exact search for any block and rounding
    QWANTIZE = 5,          // qwantize's own search
    MX_PLAIN = 6,
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
    float smallest, for_zero, largest, top;
    float given;            // a factor that the caller gave; 0: none
    const Tables* tables;   // MX: the tables of the contract and the dtype
    const float* values;    // the value of each scale byte, 256 of them: searches that take an array
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
