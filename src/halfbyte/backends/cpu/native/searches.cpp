// The peers' searches, the search for any format and the Hadamard transform of one instruction set. Like kernels.cpp,
// this file is compiled once per instruction set.
#include "searches.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "codes/sixteen.inc"
#include "lanes.inc"
#include "codes/hadamard.inc"
#include "searches/four_six.inc"
#include "searches/nvfp4_exact.inc"
#include "searches/peer_arithmetic.inc"
#include "searches/four_six_any_order.inc"
#include "searches/static_weights.inc"
#include "searches/qwantize.inc"
#include "searches/any_format.inc"
#include "searches/survey.inc"
#include "searches/feedback.inc"

namespace {

template <int N, int KIND>
void four_six_of_kind(const uint8_t* x, int64_t blocks, int dtype, int measure, const FourSixScale& s,
                      uint8_t* scales) {
    if (measure == SQUARED) four_six_ordered<N, KIND, SQUARED, false>(x, blocks, dtype, s, scales);
    else four_six_ordered<N, KIND, ABSOLUTE, false>(x, blocks, dtype, s, scales);
}

template <int N>
void four_six_of_length(const uint8_t* x, int64_t blocks, int dtype, int kind, int measure, int peer,
                        const FourSixScale& s, uint8_t* scales) {
    if (peer && measure == LARGEST) four_six_ordered<N, ERROR_BY_AMAX, LARGEST, true>(x, blocks, dtype, s, scales);
    else if (peer && measure == SQUARED) four_six_ordered<N, ERROR_BY_AMAX, SQUARED, true>(x, blocks, dtype, s, scales);
    else if (peer) four_six_ordered<N, ERROR_BY_AMAX, ABSOLUTE, true>(x, blocks, dtype, s, scales);
    else if (kind == ERROR_BY_AMAX) four_six_of_kind<N, ERROR_BY_AMAX>(x, blocks, dtype, measure, s, scales);
    else if (kind == ERROR_BY_RECIPROCAL)
        four_six_of_kind<N, ERROR_BY_RECIPROCAL>(x, blocks, dtype, measure, s, scales);
    else four_six_of_kind<N, ERROR_SCALED>(x, blocks, dtype, measure, s, scales);
}

void four_six(const void* x, int64_t blocks, int block, int dtype, int kind, int measure, int peer,
              const FourSixScale* s, uint8_t* scales) {
    if (block == 16) four_six_of_length<16>((const uint8_t*)x, blocks, dtype, kind, measure, peer, *s, scales);
    else four_six_of_length<32>((const uint8_t*)x, blocks, dtype, kind, measure, peer, *s, scales);
}

void four_six_tiles(const void* x, int64_t columns, int64_t stride, int dtype, int measure, const FourSixScale* s,
                    uint8_t* scales) {
    const uint8_t* at = (const uint8_t*)x;
    if (measure == LARGEST) four_six_ordered_tiles<LARGEST>(at, columns, stride, dtype, *s, scales);
    else if (measure == SQUARED) four_six_ordered_tiles<SQUARED>(at, columns, stride, dtype, *s, scales);
    else four_six_ordered_tiles<ABSOLUTE>(at, columns, stride, dtype, *s, scales);
}

void static_four_six(const void* x, int64_t blocks, int block, int dtype, const StaticScale* s, uint8_t* scales) {
    if (block == 16) static_four_six_blocks<16>((const uint8_t*)x, blocks, dtype, *s, scales);
    else static_four_six_blocks<32>((const uint8_t*)x, blocks, dtype, *s, scales);
}

void sweep(const void* x, int64_t blocks, int block, int dtype, const SweepTables* t, uint8_t* scales) {
    if (block == 16) sweep_blocks<16>((const uint8_t*)x, blocks, dtype, *t, scales);
    else sweep_blocks<32>((const uint8_t*)x, blocks, dtype, *t, scales);
}

void peer_search(const void* x, int64_t stride, int64_t blocks, const PeerSearch* t, const float* h, uint8_t* scales,
                 int64_t scale_stride) {
    const uint8_t* at = (const uint8_t*)x;
    if (t->dtype == FP32) {
        if (t->block == 16) peer_search_blocks<16, true>(at, stride, blocks, *t, h, scales, scale_stride);
        else peer_search_blocks<32, true>(at, stride, blocks, *t, h, scales, scale_stride);
    } else {
        if (t->block == 16) peer_search_blocks<16, false>(at, stride, blocks, *t, h, scales, scale_stride);
        else peer_search_blocks<32, false>(at, stride, blocks, *t, h, scales, scale_stride);
    }
}

int64_t general(const void* x, int64_t stride, int64_t rows, int64_t row, int64_t column, const GeneralSearch* t,
                uint8_t* scales, int64_t scale_stride, int64_t first, int64_t* irregular) {
    if (t->block == 16)
        return general_column<16>((const uint8_t*)x, stride, rows, row, column, *t, scales, scale_stride, first,
                                  irregular);
    return general_column<32>((const uint8_t*)x, stride, rows, row, column, *t, scales, scale_stride, first, irregular);
}

void descend(const void* x, int64_t stride, int64_t rows, int64_t row, int64_t column, const GeneralSearch* t,
             const Grid* grid, const uint8_t* scales, int64_t scale_stride, uint8_t* codes, int64_t code_stride) {
    if (t->block == 16)
        general_descent<16>((const uint8_t*)x, stride, rows, row, column, *t, *grid, scales, scale_stride, codes,
                            code_stride);
    else
        general_descent<32>((const uint8_t*)x, stride, rows, row, column, *t, *grid, scales, scale_stride, codes,
                            code_stride);
}

void wrap(const void* x, int64_t blocks, int block, int dtype, const float* constant, uint8_t* codes,
          const uint8_t* scales) {
    const uint8_t* at = (const uint8_t*)x;
    if (dtype == BF16) wrap_codes<BF16>(at, blocks, block, constant, codes, scales);
    else if (dtype == FP16) wrap_codes<FP16>(at, blocks, block, constant, codes, scales);
    else wrap_codes<FP32>(at, blocks, block, constant, codes, scales);
}

void rotate(const void* x, int64_t groups, int dtype, const float* matrix, void* out) {
    if (dtype == BF16) rotate_groups<BF16>((const uint8_t*)x, groups, matrix, (uint8_t*)out);
    else if (dtype == FP16) rotate_groups<FP16>((const uint8_t*)x, groups, matrix, (uint8_t*)out);
    else rotate_groups<FP32>((const uint8_t*)x, groups, matrix, (uint8_t*)out);
}

int64_t ends(const void* x, int64_t blocks, int block, int dtype, int32_t bottom, int32_t top, int64_t* out) {
    if (dtype == FP32 && block == 16) return list_ends<16>((const int32_t*)x, blocks, bottom, top, out);
    if (dtype == FP32) return list_ends<32>((const int32_t*)x, blocks, bottom, top, out);
    if (block == 16) return list_ends<16>((const int16_t*)x, blocks, bottom, top, out);
    return list_ends<32>((const int16_t*)x, blocks, bottom, top, out);
}

void errors(const void* x, int64_t stride, int64_t rows, int64_t column, const GeneralSearch* t, float* out,
            int64_t out_stride) {
    if (t->block == 16) column_errors<16>((const uint8_t*)x, stride, rows, column, *t, out, out_stride);
    else column_errors<32>((const uint8_t*)x, stride, rows, column, *t, out, out_stride);
}

int64_t feedback(const float* w, int64_t rows, int64_t row, const GeneralSearch* t, const FeedbackSteps* s,
                 const Grid* grid, uint8_t* codes, uint8_t* scales, int64_t* left_out) {
    if (t->block == 16) return feedback_rows<16>(w, rows, row, *t, *s, *grid, codes, scales, left_out);
    return feedback_rows<32>(w, rows, row, *t, *s, *grid, codes, scales, left_out);
}

}  // namespace

#define HB_JOINED(a, b) a##b
#define HB_SEARCHES_OF(name) HB_JOINED(name, _searches)
extern const Searches HB_SEARCHES_OF(HB_NAME);
const Searches HB_SEARCHES_OF(HB_NAME) = {four_six, four_six_tiles, static_four_six, sweep, peer_search, general,
                                          descend,  wrap,           rotate,          ends,  errors,      feedback};
