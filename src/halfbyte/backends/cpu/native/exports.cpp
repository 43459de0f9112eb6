// The C functions that Python loads with ctypes. They pick an instruction set and call its kernels.
#include "kernels.h"
#include <array>

extern const Kernels hb_base;
#if defined(HB_X86)
extern const Kernels hb_avx2;
extern const Kernels hb_avx512;
#endif

const Kernels* tables_of(int isa) {
#if defined(HB_X86)
    if (isa == 1) return &hb_avx2;
    if (isa == 2) return &hb_avx512;
#endif
    (void)isa;
    return &hb_base;
}

static const int64_t CHUNK = 4096;   // blocks per step: 128 KiB of bfloat16, which fit well into a second-level cache
static const int64_t GATHERED = 64;  // undecided blocks that are searched together
static const int64_t WORTH_ROWS = 2048;  // blocks: with fewer, building the error table takes longer than it saves
static const int64_t ROWS = 64;          // rows per step of a search that goes down columns

// Fills the numbers of every scale byte for a row that has its own global scale, by TransformerEngine's formulas.
// (backends/cpu/tables_nvfp4.py)
void fill_search_tables(float factor, float multiplier, int first, int zero_byte, SearchTables* t) {
    int exponent;
    std::frexp(multiplier, &exponent);
    exponent -= 1;
    const float inverse = 1.0f / factor, largest = std::numeric_limits<float>::max();
    t->divides = 0;
    t->first = first;
    t->zero_byte = zero_byte;
    t->prescale = std::ldexp(1.0f, -exponent);
    t->unit = std::ldexp(multiplier, -exponent);
    t->to_scale = 1.0f / (6.0f * t->unit);
    static const std::array<float, 128> values = [] {
        std::array<float, 128> found = {};
        for (int byte = 0; byte < 127; ++byte) found[(size_t)byte] = e4m3_decode(byte);
        return found;
    }();
    const float up = std::ldexp(1.0f, exponent);
    for (int byte = 0; byte < 127; ++byte) {
        const float scale = values[(size_t)byte], reciprocal = 1.0f / (scale * inverse);
        t->multiplier[byte] = (reciprocal < largest ? reciprocal : largest) * up;
        t->scale[byte] = scale * t->unit;
    }
}

extern "C" {

// Defined in build_tables.cpp.
int64_t hb_bytes_of_amaxes(const uint32_t* bits, int64_t count, int dtype, const Tables* t, uint8_t* out);

#define HB_STRING_OF(x) #x
#define HB_STRING(x) HB_STRING_OF(x)
const char* hb_build_flags() { return HB_STRING(HB_FLAGS); }

// The widest instruction set of this machine: 0 portable, 1 AVX2, 2 AVX-512.
int hb_best_isa() {
#if defined(HB_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

int64_t hb_sizeof_tables() { return sizeof(Tables); }
int64_t hb_sizeof_rule() { return sizeof(Rule); }
int64_t hb_sizeof_search() { return sizeof(SearchTables); }
int64_t hb_sizeof_stored_rows() { return sizeof(StoredRows); }
int64_t hb_sizeof_judge() { return sizeof(ScaleJudge); }

// a·b + c in float32 with two roundings. Tests call it: a build that fuses the operations gives another number.
float hb_multiply_add(float a, float b, float c) { return a * b + c; }

int64_t hb_plain(int isa, const void* x, int64_t blocks, int block, int dtype, const Tables* t, uint8_t* codes,
                 uint8_t* scales, int64_t* irregular) {
    return tables_of(isa)->plain(x, blocks, block, dtype, t, codes, scales, irregular);
}
void hb_emit(int isa, const void* x, int64_t blocks, int block, int dtype, const Tables* t, uint8_t* codes,
             uint8_t* scales) {
    tables_of(isa)->emit(x, blocks, block, dtype, t, codes, scales);
}
// Rows that each have their own global scale. If `fixed`, the scale bytes are given.
void hb_direct_rows(int isa, const void* x, int64_t rows, int64_t blocks, int dtype, int fixed, const float* factors,
                    uint8_t* codes, uint8_t* scales) {
    const Kernels* k = tables_of(isa);
    const int64_t bytes = blocks * 16 * (dtype == FP32 ? 4 : 2);
    for (int64_t row = 0; row < rows; ++row)
        (fixed ? k->direct_emit : k->direct)((const uint8_t*)x + row * bytes, blocks, dtype, factors[row],
                                             codes + row * blocks * 8, scales + row * blocks);
}
int64_t hb_mxfp8(int isa, const void* x, int64_t blocks, int dtype, const Tables* t, uint8_t* codes, uint8_t* scales,
                 int64_t* irregular) {
    return tables_of(isa)->mxfp8(x, blocks, dtype, t, codes, scales, irregular);
}
// MXFP8 codes of blocks whose scale bytes are given.
void hb_mxfp8_emit(int isa, const void* x, int64_t blocks, int block, int dtype, const Tables* t, uint8_t* codes,
                   const uint8_t* scales) {
    tables_of(isa)->mxfp8_emit(x, blocks, block, dtype, t, codes, scales);
}
uint32_t hb_amax(int isa, const void* x, int64_t n, int dtype) { return tables_of(isa)->amax(x, n, dtype); }
void hb_amax_rows(int isa, const void* x, int64_t rows, int64_t n, int dtype, uint32_t* out) {
    for (int64_t row = 0; row < rows; ++row)
        out[row] = tables_of(isa)->amax((const uint8_t*)x + row * n * (dtype == FP32 ? 4 : 2), n, dtype);
}
// Plain 16x16 tiles. Each row of tiles is finished while it is in the cache: amaxes (written as bits), then scale
// bytes, then codes. Returns the number of irregular tiles; unless it is 0, bytes and codes are not valid.
int64_t hb_plain_tiles(int isa, const void* x, int64_t tile_rows, int64_t columns, int dtype, const Tables* t,
                       uint32_t* amaxes, uint8_t* scales, uint8_t* codes) {
    const Kernels* k = tables_of(isa);
    const int64_t bytes = columns * 256 * (dtype == FP32 ? 4 : 2);
    int64_t irregular = 0;
    for (int64_t row = 0; row < tile_rows; ++row) {
        const uint8_t* at = (const uint8_t*)x + row * bytes;
        uint8_t* first = scales + row * 16 * columns;
        k->tile_amax(at, columns, dtype, amaxes + row * columns);
        irregular += hb_bytes_of_amaxes(amaxes + row * columns, columns, dtype, t, first);
        for (int copy = 1; copy < 16; ++copy) std::memcpy(first + copy * columns, first, (size_t)columns);
        if (!irregular) k->emit(at, 16 * columns, 16, dtype, t, codes + row * 128 * columns, first);
    }
    return irregular;
}
void hb_decode(int isa, const uint8_t* codes, const uint8_t* scales, int64_t blocks, int block, const void* table,
               int width, void* out) {
    tables_of(isa)->decode(codes, scales, blocks, block, table, width, out);
}
void hb_decode_mxfp8(int isa, const uint8_t* codes, const uint8_t* scales, int64_t blocks, const void* table, int width,
                     void* out) {
    tables_of(isa)->decode_mxfp8(codes, scales, blocks, table, width, out);
}
// Compares rows of codes with bfloat16 or float32 values. `judge`: null where scales have no rules; then there are no
// marks either. Adds to `sums`. Returns the largest difference; NaN is left out.
float hb_compare_rows(int isa, const void* x, int dtype, const uint8_t* codes, const uint8_t* bytes,
                      const StoredRows* stored, const ScaleJudge* judge, RowSums* rows, uint8_t* marks,
                      FactorSums* sums) {
    return tables_of(isa)->compare_rows(x, dtype, codes, bytes, stored, judge, rows, marks, sums);
}
int64_t hb_cast(int isa, const uint8_t* codes, const uint8_t* scales, int64_t blocks, const uint8_t* table,
                uint8_t* codes_out, uint8_t* scales_out) {
    return tables_of(isa)->cast(codes, scales, blocks, table, codes_out, scales_out);
}
// Scale bytes by 4over6, with one FourSixScale for all rows or one per row. If tables are given, also the codes, chunk
// by chunk while the input is in the cache. Returns the float32 bits of the largest magnitude. If that is NaN, infinite
// or outside the range that the caller allows, the outputs are not valid.
uint32_t hb_four_six(int isa, const void* x, int64_t rows, int64_t columns, int dtype, int kind, int squared,
                     const FourSixScale* s, int per_row, uint8_t* scales, const Tables* t, uint8_t* codes) {
    const Kernels* k = tables_of(isa);
    const int64_t size = 16 * (dtype == FP32 ? 4 : 2), blocks = rows * columns;
    const uint8_t* input = (const uint8_t*)x;
    const int64_t step = per_row ? columns : CHUNK;
    uint32_t most = 0;
    for (int64_t start = 0; start < blocks; start += step) {
        const int64_t count = blocks - start < step ? blocks - start : step;
        const uint32_t largest = k->four_six(input + start * size, count, dtype, kind, squared,
                                             s + (per_row ? start / columns : 0), scales + start);
        most = largest > most ? largest : most;
        if (t) k->emit(input + start * size, count, 16, dtype, t, codes + start * 8, scales + start);
    }
    return most;
}
void hb_four_six_tiles(int isa, const void* x, int64_t tile_rows, int64_t columns, int dtype, int kind, int squared,
                       const FourSixScale* s, uint8_t* scales) {
    const int64_t stride = columns * 16 * (dtype == FP32 ? 4 : 2);
    for (int64_t row = 0; row < tile_rows; ++row)
        tables_of(isa)->four_six_tiles((const uint8_t*)x + row * 16 * stride, columns, stride, dtype, kind, squared, s,
                                       scales + row * 16 * columns);
}
// Scale bytes of at most CHUNK bfloat16 blocks by table look-up. Blocks that the table does not decide are gathered and
// searched.
static void look_up(const Kernels* k, const uint8_t* x, int64_t blocks, const SearchTables* t, const ErrorRows& rows,
                    uint8_t* scales) {
    int32_t undecided[CHUNK];
    uint8_t gathered[GATHERED * 32], bytes[GATHERED];
    const int64_t found = k->search_by_rows(x, blocks, rows, scales, undecided);
    for (int64_t start = 0; start < found; start += GATHERED) {
        const int64_t count = found - start < GATHERED ? found - start : GATHERED;
        for (int64_t i = 0; i < count; ++i) std::memcpy(gathered + i * 32, x + (int64_t)undecided[start + i] * 32, 32);
        k->search(gathered, 32, count, BF16, t, nullptr, bytes, 1);
        for (int64_t i = 0; i < count; ++i) scales[undecided[start + i]] = bytes[i];
    }
}
// Scale bytes of the exact search and their codes, chunk by chunk. `weights` has 16 per column, or is null.
void hb_search(int isa, const void* x, int64_t rows, int64_t columns, int dtype, const SearchTables* t,
               const float* weights, uint8_t* scales, const Tables* tables, uint8_t* codes) {
    const Kernels* k = tables_of(isa);
    const int64_t size = 16 * (dtype == FP32 ? 4 : 2), blocks = rows * columns;
    const uint8_t* input = (const uint8_t*)x;
    // Each column has its own weights, so with weights the lanes hold one column of several rows.
    const int64_t step = weights ? ROWS * columns : CHUNK;
    ErrorRows error_rows;
    const bool by_rows = dtype == BF16 && !weights && blocks >= WORTH_ROWS && k->build_error_rows(*t, &error_rows);
    for (int64_t start = 0; start < blocks; start += step) {
        const int64_t count = blocks - start < step ? blocks - start : step;
        const uint8_t* at = input + start * size;
        if (by_rows) look_up(k, at, count, t, error_rows, scales + start);
        else if (!weights) k->search(at, size, count, dtype, t, nullptr, scales + start, 1);
        else
            for (int64_t c = 0; c < columns; ++c)
                k->search(at + c * size, columns * size, count / columns, dtype, t, weights + c * 16,
                          scales + start + c, columns);
        k->emit(at, count, 16, dtype, tables, codes + start * 8, scales + start);
    }
}
void hb_search_rows(int isa, const void* x, int64_t rows, int64_t columns, int dtype, const float* factors,
                    const float* multipliers, int first, int zero_byte, uint8_t* scales, uint8_t* codes) {
    const Kernels* k = tables_of(isa);
    const int64_t size = 16 * (dtype == FP32 ? 4 : 2);
    for (int64_t row = 0; row < rows; ++row) {
        SearchTables t;
        fill_search_tables(factors[row], multipliers[row], first, zero_byte, &t);
        const uint8_t* at = (const uint8_t*)x + row * columns * size;
        k->search(at, size, columns, dtype, &t, nullptr, scales + row * columns, 1);
        k->direct_emit(at, columns, dtype, factors[row], codes + row * columns * 8, scales + row * columns);
    }
}
// Scale bytes of the exact search among powers of two, and their codes. Lists the blocks it does not decide and returns
// their number.
int64_t hb_mx_search(int isa, const void* x, int64_t rows, int64_t columns, int block, int dtype, int element,
                     const float* weights, int zero_byte, uint8_t* scales, const Tables* tables, uint8_t* codes,
                     int64_t* irregular) {
    const Kernels* k = tables_of(isa);
    const int64_t size = block * (dtype == FP32 ? 4 : 2), blocks = rows * columns,
                  code_bytes = element == MX_E4M3 ? block : block / 2;
    const int64_t step = weights ? ROWS * columns : CHUNK;
    int64_t found = 0;
    for (int64_t start = 0; start < blocks; start += step) {
        const int64_t count = blocks - start < step ? blocks - start : step;
        const uint8_t* at = (const uint8_t*)x + start * size;
        if (!weights)
            found += k->mx_search(at, size, count, block, dtype, element, nullptr, zero_byte, scales + start, 1, start,
                                  1, irregular + found);
        else
            for (int64_t c = 0; c < columns; ++c)
                found += k->mx_search(at + c * size, columns * size, count / columns, block, dtype, element,
                                      weights + c * block, zero_byte, scales + start + c, columns, start + c, columns,
                                      irregular + found);
        if (element == MX_E4M3)
            k->mxfp8_emit(at, count, block, dtype, tables, codes + start * code_bytes, scales + start);
        else k->emit(at, count, block, dtype, tables, codes + start * code_bytes, scales + start);
    }
    return found;
}
// The exact search with a Hessian: 136 numbers and three bounds per column. If `descends`, the codes are improved
// afterwards.
void hb_hessian(int isa, const void* x, int64_t rows, int64_t columns, int dtype, const SearchTables* t, const float* h,
                const float* bounds, int descends, uint8_t* scales, const Tables* tables, uint8_t* codes) {
    const Kernels* k = tables_of(isa);
    const int64_t size = 16 * (dtype == FP32 ? 4 : 2);
    for (int64_t c = 0; c < columns; ++c)
        k->hessian((const uint8_t*)x + c * size, columns * size, rows, dtype, t, h + c * 136, bounds + c * 3,
                   scales + c, columns);
    k->emit(x, rows * columns, 16, dtype, tables, codes, scales);
    if (!descends) return;
    for (int64_t c = 0; c < columns; ++c)
        k->descend((const uint8_t*)x + c * size, columns * size, rows, dtype, t, h + c * 136, scales + c, columns,
                   codes + c * 8, columns * 8);
}

}  // extern "C"
