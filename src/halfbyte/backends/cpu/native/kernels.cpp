// The kernels of one instruction set. This file is compiled once per instruction set; HB_NAME is the name of its table.
#include "kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "codes/sixteen.inc"
#include "codes/segments.inc"
#include "codes/plain.inc"
#include "codes/row_scaled.inc"
#include "codes/mxfp8.inc"
#include "codes/amax.inc"
#include "codes/decode.inc"
#include "codes/repack.inc"
#include "codes/compare.inc"
#include "lanes.inc"
#include "searches/four_six.inc"
#include "searches/nvfp4_exact.inc"
#include "searches/nvfp4_lookup.inc"
#include "searches/nvfp4_hessian.inc"
#include "searches/mx_exact.inc"

namespace {

int64_t plain(const void* x, int64_t blocks, int block, int dtype, const Tables* t, uint8_t* codes, uint8_t* scales,
              int64_t* irregular) {
    if (dtype == FP32) {
        if (block == 16) return plain_blocks<true, 1>(x, blocks, *t, codes, scales, irregular);
        return plain_blocks<true, 2>(x, blocks, *t, codes, scales, irregular);
    }
    if (block == 16) return plain_blocks<false, 1>(x, blocks, *t, codes, scales, irregular);
    return plain_blocks<false, 2>(x, blocks, *t, codes, scales, irregular);
}

void emit(const void* x, int64_t blocks, int block, int dtype, const Tables* t, uint8_t* codes, uint8_t* scales) {
    const uint8_t* input = (const uint8_t*)x;
    if (dtype == FP32) {
        if (block == 16) emit_blocks<true, 1>(input, blocks, *t, codes, scales);
        else emit_blocks<true, 2>(input, blocks, *t, codes, scales);
    } else {
        if (block == 16) emit_blocks<false, 1>(input, blocks, *t, codes, scales);
        else emit_blocks<false, 2>(input, blocks, *t, codes, scales);
    }
}

template <bool FIXED>
void direct(const void* x, int64_t blocks, int dtype, float factor, uint8_t* codes, uint8_t* scales) {
    if (dtype == BF16) direct_blocks<BF16, FIXED>(x, blocks, factor, codes, scales);
    else if (dtype == FP16) direct_blocks<FP16, FIXED>(x, blocks, factor, codes, scales);
    else direct_blocks<FP32, FIXED>(x, blocks, factor, codes, scales);
}

int64_t mxfp8(const void* x, int64_t blocks, int dtype, const Tables* t, uint8_t* codes, uint8_t* scales,
              int64_t* irregular) {
    if (dtype == BF16) return mxfp8_blocks<BF16>(x, blocks, *t, codes, scales, irregular);
    if (dtype == FP16) return mxfp8_blocks<FP16>(x, blocks, *t, codes, scales, irregular);
    return mxfp8_blocks<FP32>(x, blocks, *t, codes, scales, irregular);
}

uint32_t amax(const void* x, int64_t n, int dtype) {
    return dtype == FP32 ? amax_bits((const uint32_t*)x, n) : amax_bits((const uint16_t*)x, n);
}

// An output of this size has left the caches before its start is read, so it is stored past them.
constexpr int64_t STREAMED_BYTES = 8 << 20;

template <bool STREAMED>
void decode_to(const uint8_t* codes, const uint8_t* scales, int64_t blocks, int block, const void* table, int width,
               void* out) {
    if (width == 2) {
        if (block == 16) decode16<1, STREAMED>(codes, scales, blocks, (const uint8_t*)table, (uint16_t*)out);
        else decode16<2, STREAMED>(codes, scales, blocks, (const uint8_t*)table, (uint16_t*)out);
    } else {
        if (block == 16) decode32<1, STREAMED>(codes, scales, blocks, (const float*)table, (float*)out);
        else decode32<2, STREAMED>(codes, scales, blocks, (const float*)table, (float*)out);
    }
}

void decode(const uint8_t* codes, const uint8_t* scales, int64_t blocks, int block, const void* table, int width,
            void* out) {
    if (blocks * block * width < STREAMED_BYTES || ((uintptr_t)out & 15))
        return decode_to<false>(codes, scales, blocks, block, table, width, out);
    decode_to<true>(codes, scales, blocks, block, table, width, out);
    finish_stream();
}

void decode_mxfp8(const uint8_t* codes, const uint8_t* scales, int64_t blocks, const void* table, int width,
                  void* out) {
    if (width == 2) decode_bytes(codes, scales, blocks, (const uint16_t*)table, (uint16_t*)out);
    else decode_bytes(codes, scales, blocks, (const uint32_t*)table, (uint32_t*)out);
}

template <template <int, bool> class Call, class... Arguments>
auto by_error(int kind, int squared, Arguments... arguments) {
    switch (kind * 2 + squared) {
        case 0: return Call<0, false>::run(arguments...);
        case 1: return Call<0, true>::run(arguments...);
        case 2: return Call<1, false>::run(arguments...);
        case 3: return Call<1, true>::run(arguments...);
        case 4: return Call<2, false>::run(arguments...);
        default: return Call<2, true>::run(arguments...);
    }
}

template <int KIND, bool SQUARED>
struct Bytes {
    static uint32_t run(const uint8_t* x, int64_t blocks, int dtype, const FourSixScale* s, uint8_t* scales) {
        return four_six_blocks<KIND, SQUARED>(x, blocks, dtype, *s, scales);
    }
};

template <int KIND, bool SQUARED>
struct TileRow {
    // One row of tiles: `columns` tiles side by side, each of sixteen rows that are `stride` bytes apart.
    static void run(const uint8_t* x, int64_t columns, int64_t stride, int dtype, const FourSixScale* s,
                    uint8_t* scales) {
        const int64_t size = 16 * (dtype == FP32 ? 4 : 2);
        for (int64_t c = 0; c < columns; ++c) {
            const uint8_t byte = (uint8_t)four_six_tile<KIND, SQUARED>(x + c * size, stride, dtype, *s);
            for (int r = 0; r < 16; ++r) scales[r * columns + c] = byte;
        }
    }
};

uint32_t four_six(const void* x, int64_t blocks, int dtype, int kind, int squared, const FourSixScale* s,
                  uint8_t* scales) {
    return by_error<Bytes>(kind, squared, (const uint8_t*)x, blocks, dtype, s, scales);
}

void four_six_tiles(const void* x, int64_t columns, int64_t stride, int dtype, int kind, int squared,
                    const FourSixScale* s, uint8_t* scales) {
    by_error<TileRow>(kind, squared, (const uint8_t*)x, columns, stride, dtype, s, scales);
}

void search_errors(const void* x, int64_t stride, int64_t blocks, int dtype, const SearchTables* t,
                   const float* weights, uint8_t* scales, int64_t scale_stride, float* errors) {
    const auto run = weights      ? t->divides ? search_blocks<true, true> : search_blocks<false, true>
                     : t->divides ? search_blocks<true, false>
                                  : search_blocks<false, false>;
    run((const uint8_t*)x, stride, blocks, dtype, *t, weights, scales, scale_stride, errors);
}

void search(const void* x, int64_t stride, int64_t blocks, int dtype, const SearchTables* t, const float* weights,
            uint8_t* scales, int64_t scale_stride) {
    search_errors(x, stride, blocks, dtype, t, weights, scales, scale_stride, nullptr);
}

void hessian(const void* x, int64_t stride, int64_t rows, int dtype, const SearchTables* t, const float* h,
             const float* bounds, uint8_t* scales, int64_t scale_stride) {
    if (t->divides) hessian_column<true>((const uint8_t*)x, stride, rows, dtype, *t, h, bounds, scales, scale_stride);
    else hessian_column<false>((const uint8_t*)x, stride, rows, dtype, *t, h, bounds, scales, scale_stride);
}

void descend(const void* x, int64_t stride, int64_t rows, int dtype, const SearchTables* t, const float* h,
             const uint8_t* scales, int64_t scale_stride, uint8_t* codes, int64_t code_stride) {
    descend_column((const uint8_t*)x, stride, rows, dtype, *t, h, scales, scale_stride, codes, code_stride);
}

template <class Element>
int64_t mx_search_of(const uint8_t* x, int64_t stride, int64_t blocks, int block, int dtype, const float* weights,
                     int zero_byte, uint8_t* scales, int64_t scale_stride, int64_t first, int64_t step,
                     int64_t* irregular) {
    if (weights)
        return mx_search_blocks<Element, true>(x, stride, blocks, block, dtype, weights, zero_byte, scales,
                                               scale_stride, first, step, irregular);
    return mx_search_blocks<Element, false>(x, stride, blocks, block, dtype, weights, zero_byte, scales, scale_stride,
                                            first, step, irregular);
}

int64_t mx_search(const void* x, int64_t stride, int64_t blocks, int block, int dtype, int element,
                  const float* weights, int zero_byte, uint8_t* scales, int64_t scale_stride, int64_t first,
                  int64_t step, int64_t* irregular) {
    const uint8_t* at = (const uint8_t*)x;
    if (element == MX_E4M3)
        return mx_search_of<E4M3Element>(at, stride, blocks, block, dtype, weights, zero_byte, scales, scale_stride,
                                         first, step, irregular);
    if (element == MX_E2M1_DOWN)
        return mx_search_of<E2M1DownElement>(at, stride, blocks, block, dtype, weights, zero_byte, scales, scale_stride,
                                             first, step, irregular);
    return mx_search_of<E2M1Element>(at, stride, blocks, block, dtype, weights, zero_byte, scales, scale_stride, first,
                                     step, irregular);
}

void mxfp8_emit(const void* x, int64_t blocks, int block, int dtype, const Tables* t, uint8_t* codes,
                const uint8_t* scales) {
    if (dtype == BF16) mxfp8_codes<BF16>(x, blocks, block, *t, codes, scales);
    else if (dtype == FP16) mxfp8_codes<FP16>(x, blocks, block, *t, codes, scales);
    else mxfp8_codes<FP32>(x, blocks, block, *t, codes, scales);
}

void tile_amax(const void* x, int64_t columns, int dtype, uint32_t* out) {
    if (dtype == FP32) tile_amax_bits((const uint32_t*)x, columns, out);
    else tile_amax_bits((const uint16_t*)x, columns, out);
}

}  // namespace

extern const Kernels HB_NAME;
const Kernels HB_NAME = {plain,        emit,          direct<false>,    direct<true>,   mxfp8,
                         amax,         decode,        decode_mxfp8,     four_six,       four_six_tiles,
                         search,       search_errors, build_error_rows, search_by_rows, hessian,
                         descend,      mx_search,     mxfp8_emit,       cast_blocks,    tile_amax,
                         compare_rows, LANES};
