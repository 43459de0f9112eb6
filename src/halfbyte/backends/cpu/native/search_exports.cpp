// The C functions of the peers' searches and of the search for any format. They pick an instruction set and go over
// rows and columns.
#include "searches.h"

extern const Searches hb_base_searches;
#if defined(HB_X86)
extern const Searches hb_avx2_searches;
extern const Searches hb_avx512_searches;
#endif

const Searches* searches_of(int isa) {
#if defined(HB_X86)
    if (isa == 1) return &hb_avx2_searches;
    if (isa == 2) return &hb_avx512_searches;
#endif
    (void)isa;
    return &hb_base_searches;
}

static const int64_t ROWS = 64;  // rows per step of a search that goes down columns: so many stay in a cache

static int64_t bytes_of(int64_t elements, int dtype) { return elements * (dtype == FP32 ? 4 : 2); }

extern "C" {

int64_t hb_sizeof_general() { return sizeof(GeneralSearch); }
int64_t hb_sizeof_grid() { return sizeof(Grid); }
int64_t hb_sizeof_sweep() { return sizeof(SweepTables); }
int64_t hb_sizeof_peer() { return sizeof(PeerSearch); }
int64_t hb_sizeof_feedback() { return sizeof(FeedbackSteps); }

// Scale bytes by 4over6, with one FourSixScale for all rows or one per row. If `peer`, with fouroversix's element
// formula and order of sums.
void hb_four_six_ordered(int isa, const void* x, int64_t rows, int64_t columns, int block, int dtype, int kind,
                         int measure, int peer, const FourSixScale* s, int per_row, uint8_t* scales) {
    const int64_t step = per_row ? columns : rows * columns;
    for (int64_t start = 0; start < rows * columns; start += step)
        searches_of(isa)->four_six((const uint8_t*)x + bytes_of(start * block, dtype), step, block, dtype, kind,
                                   measure, peer, s + (per_row ? start / columns : 0), scales + start);
}
void hb_four_six_ordered_tiles(int isa, const void* x, int64_t tile_rows, int64_t columns, int dtype, int measure,
                               const FourSixScale* s, uint8_t* scales) {
    const int64_t stride = bytes_of(columns * 16, dtype);
    for (int64_t row = 0; row < tile_rows; ++row)
        searches_of(isa)->four_six_tiles((const uint8_t*)x + row * 16 * stride, columns, stride, dtype, measure, s,
                                         scales + row * 16 * columns);
}
void hb_wrap(int isa, const void* x, int64_t blocks, int block, int dtype, const float* constant, uint8_t* codes,
             const uint8_t* scales) {
    searches_of(isa)->wrap(x, blocks, block, dtype, constant, codes, scales);
}
void hb_rotate(int isa, const void* x, int64_t groups, int dtype, const float* matrix, void* out) {
    searches_of(isa)->rotate(x, groups, dtype, matrix, out);
}
void hb_static_four_six(int isa, const void* x, int64_t blocks, int block, int dtype, const StaticScale* s,
                        uint8_t* scales) {
    searches_of(isa)->static_four_six(x, blocks, block, dtype, s, scales);
}
void hb_sweep(int isa, const void* x, int64_t blocks, int block, int dtype, const SweepTables* t, uint8_t* scales) {
    searches_of(isa)->sweep(x, blocks, block, dtype, t, scales);
}
// Replaces the naive bytes by better ones. With a Hessian, the lanes hold one column of several rows.
void hb_peer_search(int isa, const void* x, int64_t rows, int64_t columns, const PeerSearch* t, uint8_t* scales) {
    const int64_t size = bytes_of(t->block, t->dtype);
    const Searches* s = searches_of(isa);
    if (!t->h) return s->peer_search(x, size, rows * columns, t, nullptr, scales, 1);
    for (int64_t row = 0; row < rows; row += ROWS)
        for (int64_t c = 0; c < columns; ++c)
            s->peer_search((const uint8_t*)x + (row * columns + c) * size, columns * size,
                           rows - row < ROWS ? rows - row : ROWS, t, t->h + c * t->block * t->block,
                           scales + row * columns + c, columns);
}
// `row` is the number of the first row in the arrays of `t`. Lists the blocks it does not decide and returns their
// number.
int64_t hb_general(int isa, const void* x, int64_t rows, int64_t columns, int64_t row, const GeneralSearch* t,
                   uint8_t* scales, int64_t* irregular) {
    const int64_t size = bytes_of(t->block, t->dtype);
    int64_t found = 0;
    for (int64_t r = 0; r < rows; r += ROWS)
        for (int64_t c = 0; c < columns; ++c) {
            const int64_t at = r * columns + c;
            found += searches_of(isa)->general((const uint8_t*)x + at * size, columns * size,
                                               rows - r < ROWS ? rows - r : ROWS, row + r, c, t, scales + at, columns,
                                               at, irregular + found);
        }
    return found;
}
// Improves given codes by single steps.
void hb_general_descent(int isa, const void* x, int64_t rows, int64_t columns, int64_t row, const GeneralSearch* t,
                        const Grid* grid, const uint8_t* scales, uint8_t* codes) {
    const int64_t size = bytes_of(t->block, t->dtype), code_bytes = t->block * grid->code_bits / 8;
    for (int64_t c = 0; c < columns; ++c)
        searches_of(isa)->descend((const uint8_t*)x + c * size, columns * size, rows, row, c, t, grid, scales + c,
                                  columns, codes + c * code_bytes, columns * code_bytes);
}

// `w`: float32 rows, of which the first has the number `row` in the arrays of `t` and `s`. Lists the rows it leaves
// out.
int64_t hb_feedback(int isa, const void* w, int64_t rows, int64_t row, const GeneralSearch* t, const FeedbackSteps* s,
                    const Grid* grid, uint8_t* codes, uint8_t* scales, int64_t* left_out) {
    return searches_of(isa)->feedback((const float*)w, rows, row, t, s, grid, codes, scales, left_out);
}

}  // extern "C"
