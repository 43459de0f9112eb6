// A whole call in one function: the tensor's amax, its numbers under the contract, the tables if they pay, the blocks.
// It runs on the calling thread. Scratch memory belongs to the thread and is kept for its next call.
#include "searches/kept.h"
#include "searches/row_choice.inc"

namespace {

// One call: a recipe, the operand, and where the results go.
struct Call {
    const Recipe& recipe;
    int isa;
    const uint8_t* x;
    int64_t rows, columns;
    uint8_t *codes, *scales;
    Numbers n = {};
    float largest = -1.0f;  // the largest magnitude of the operand itself; negative: not known
    bool searched = false;  // whether the choice of a headroom has found the scale bytes

    int64_t blocks() const { return rows * columns; }
    int64_t block_bytes() const { return recipe.block * (recipe.dtype == FP32 ? 4 : 2); }
    int64_t code_bytes() const { return recipe.block / 2; }
    uint8_t* codes_at(int64_t block) const { return codes + block * code_bytes(); }

    float own_largest() {
        if (largest < 0.0f)
            largest = magnitude_value(tables_of(isa)->amax(x, blocks() * recipe.block, recipe.dtype), recipe.dtype);
        return largest;
    }

    // Whether the shortcuts of the searches are exact. (backends/cpu/ranges.py)
    bool in_range(float most) const { return in_range(most, n); }
    bool in_range(float most, const Numbers& n) const {
        const bool exact = recipe.route == EXACT_BLOCKS;
        const float least_amax = exact ? 0x1p-100f : 0x1p-60f, most_amax = exact ? 0x1p100f : 0x1p60f;
        const float least_g = exact ? 0x1p-115f : 0x1p-80f, most_g = exact ? 0x1p100f : 0x1p60f;
        const float amax = n.rule.amax, g = n.multiplier;
        return std::isfinite(most) && amax >= least_amax && amax <= most_amax && g >= least_g && g <= most_g &&
               (double)most <= (double)g * 0x1p50;
    }

    // Scale byte and codes of one block by the formulas. Returns false if it holds NaN or Inf, or has no scale.
    bool plain_block(int64_t block) {
        const uint8_t* at = x + block * block_bytes();
        const uint32_t bits = largest_bits(at, recipe.block, recipe.dtype);
        if (bits >= inf_bits(recipe.dtype)) return false;
        const int byte = scale_byte_of(recipe, n.rule, magnitude_value(bits, recipe.dtype));
        if (byte >= 0x7F) return false;
        scales[block] = (uint8_t)byte;
        direct_codes(recipe, n.rule, at, byte, codes_at(block));
        return true;
    }

    bool plain_blocks() {
        for (int64_t block = 0; block < blocks(); ++block)
            if (!plain_block(block)) return false;
        return true;
    }

    void codes_of_chosen() {
        for (int64_t block = 0; block < blocks(); ++block)
            direct_codes(recipe, n.rule, x + block * block_bytes(), scales[block], codes_at(block));
    }

    // The tables of this tensor; null if its numbers are not finite.
    Built* tables() {
        Built& kept = built();
        if (kept.amax == n.rule.amax && std::memcmp(&kept.recipe, &recipe, sizeof recipe) == 0) return &kept;
        kept.amax = -1.0f;
        kept.searches = false;
        fill_constants(recipe, &n.rule);
        if (hb_build_tables(&n.rule, recipe.dtype, &kept.tables)) return nullptr;
        kept.recipe = recipe;
        kept.amax = n.rule.amax;
        return &kept;
    }

    bool plain() {
        if (blocks() < recipe.worth_tables) return plain_blocks();
        const Built* kept = tables();
        if (!kept) return false;
        int64_t* irregular = listed(std::min(blocks(), CHUNK));
        for (int64_t start = 0; start < blocks(); start += CHUNK) {
            const int64_t count = std::min(blocks() - start, CHUNK);
            const int64_t found = tables_of(isa)->plain(x + start * block_bytes(), count, recipe.block, recipe.dtype,
                                                        &kept->tables, codes_at(start), scales + start, irregular);
            for (int64_t i = 0; i < found; ++i)
                if (!plain_block(start + irregular[i])) return false;
        }
        return true;
    }

    // Codes for the bytes that a search chose.
    bool emit() {
        if (blocks() < recipe.worth_tables) return codes_of_chosen(), true;
        Built* kept = tables();
        if (!kept) return false;
        tables_of(isa)->emit(x, blocks(), recipe.block, recipe.dtype, &kept->tables, codes, scales);
        if (recipe.wraps) {
            fill_constants(recipe, &n.rule);
            searches_of(isa)->wrap(x, blocks(), recipe.block, recipe.dtype, n.rule.constant, codes, scales);
        }
        return true;
    }

    FourSixScale four_six_scale() const { return {n.rule.factor, 1.0f / n.rule.factor, n.rule.amax, n.rule.top}; }

    bool four_six() {
        if (largest >= 0.0f && !in_range(largest)) return false;
        const FourSixScale s = four_six_scale();
        const Built* kept = blocks() < recipe.worth_tables ? nullptr : tables();
        const uint32_t most = hb_four_six(isa, x, rows, columns, recipe.dtype, recipe.error, recipe.metric, &s, 0,
                                          scales, kept ? &kept->tables : nullptr, codes);
        if (!in_range(as_float(most))) return false;
        return kept ? true : (codes_of_chosen(), true);
    }

    bool four_six_ordered() {
        if (!in_range(own_largest())) return false;
        const FourSixScale s = four_six_scale();
        hb_four_six_ordered(isa, x, rows, columns, recipe.block, recipe.dtype, recipe.error, recipe.metric,
                            recipe.wraps, &s, 0, scales);
        return emit();
    }

    // The numbers of every scale byte for the exact search, scaled by a power of two.
    bool fill_search(SearchTables* t) const {
        int exponent;
        std::frexp(n.multiplier, &exponent);
        exponent -= 1;
        const float up = std::ldexp(1.0f, exponent), down = std::ldexp(1.0f, -exponent);
        const int zero_byte = scale_byte_of(recipe, n.rule, 0.0f);
        t->divides = n.rule.divides;
        t->first = recipe.first;
        t->zero_byte = zero_byte;
        t->prescale = down;
        t->unit = n.multiplier * down;
        t->to_scale = 1.0f / (6.0f * t->unit);
        const float shift = t->divides ? down : up;
        for (int byte = 0; byte < 127; ++byte) {
            const float scale = e4m3_decode(byte);
            t->multiplier[byte] = constant_of(recipe.element, scale, n.rule.factor) * shift;
            t->scale[byte] = scale * t->unit;
        }
        return zero_byte < 0x7F;
    }

    bool exact() {
        if (!in_range(own_largest())) return false;
        if (searched) return emit();
        if (blocks() < recipe.worth_tables) {
            SearchTables t;
            if (recipe.tie != TIE_EVEN) return general();
            if (!fill_search(&t)) return false;
            tables_of(isa)->search(x, block_bytes(), blocks(), recipe.dtype, &t, nullptr, scales, 1);
            codes_of_chosen();
            return true;
        }
        Built* kept = tables();
        if (!kept || !search_by_multiplying(kept)) return kept && general();
        hb_search(isa, x, rows, columns, recipe.dtype, &kept->search, nullptr, scales, &kept->tables, codes);
        return true;
    }

    // Fills the search with multipliers that give the contract's codes. Returns false if it cannot.
    bool search_by_multiplying(Built* kept) const {
        if (kept->searches) return true;
        SearchTables& t = kept->search;
        if (!fill_search(&t)) return false;
        if (t.divides || recipe.tie != TIE_EVEN) {
            float near[127], fitted[127];
            for (int byte = 0; byte < 127; ++byte)
                near[byte] = t.divides ? 1.0f / t.multiplier[byte] : t.multiplier[byte];
            if (recipe.dtype != FP32 && !hb_fit_multipliers(&kept->tables, near, t.prescale, recipe.dtype, fitted)) {
                t.divides = 0;
                std::copy(fitted, fitted + 127, t.multiplier);
            } else if (recipe.tie != TIE_EVEN) return false;
        }
        return kept->searches = true;
    }

    // The search for any format with the numbers of one tensor, which must outlive it, as must the two numbers for
    // 2**-k and g·2**-k.
    GeneralSearch general_search(Numbers* own, int zero_byte, float* numbers) const {
        fill_constants(recipe, &own->rule);
        const float down = std::ldexp(1.0f, -std::ilogb(own->multiplier));
        numbers[0] = down;
        numbers[1] = own->multiplier * down;
        GeneralSearch g = {};
        g.block = recipe.block;
        g.dtype = recipe.dtype;
        g.element = recipe.wraps ? WRAPPED : recipe.tie == TIE_DOWN ? DOWN : EVEN;
        g.objective = SQUARES;
        g.divides = own->rule.divides;
        g.first = recipe.first;
        g.last = 126;
        g.zero_byte = zero_byte;
        g.most_value = 6.0f;
        g.zero_below = 0.25f;
        g.value = recipe.values;
        g.constant = own->rule.constant;
        g.prescale = numbers;
        g.unit = numbers + 1;
        return g;
    }

#include "searches/headroom.inc"

    bool general() {
        if (!in_range(own_largest())) return false;
        const int zero_byte = scale_byte_of(recipe, n.rule, 0.0f);
        if (zero_byte >= 0x7F) return false;
        float numbers[2];
        const GeneralSearch g = general_search(&n, zero_byte, numbers);
        const int64_t step = std::max<int64_t>(1, CHUNK / columns);
        for (int64_t row = 0; row < rows; row += step) {
            const int64_t count = std::min(step, rows - row), first = row * columns;
            if (hb_general(isa, x + first * block_bytes(), count, columns, row, &g, scales + first,
                           listed(count * columns)))
                return false;
        }
        return emit();
    }

    bool qwantize() {
        if (!plain()) return false;
        PeerSearch t = {};
        t.block = recipe.block;
        t.dtype = recipe.dtype;
        t.last = 126;
        std::memcpy(t.value, recipe.values, sizeof t.value);
        for (int64_t block = 0; block < blocks(); ++block)
            if (scales[block] == 0) return false;  // 0/0: the reference decides
        searches_of(isa)->peer_search(x, block_bytes(), blocks(), &t, nullptr, scales, 1);
        return emit();
    }

    // MX formats. Returns false if a block is listed: the caller gives the matrix to the slower path.
    bool mx() {
        int64_t* irregular = listed(std::min(blocks(), CHUNK));
        const int64_t bytes = recipe.mx_element == MX_E4M3 ? recipe.block : recipe.block / 2;
        for (int64_t first = 0; first < blocks(); first += CHUNK) {
            const int64_t count = std::min(CHUNK, blocks() - first);
            const uint8_t* at = x + first * block_bytes();
            uint8_t* codes_here = codes + first * bytes;
            int64_t found;
            if (recipe.route == MX_EXACT)
                found = hb_mx_search(isa, at, count, 1, recipe.block, recipe.dtype, recipe.mx_element, nullptr,
                                     recipe.zero_byte, scales + first, recipe.tables, codes_here, irregular);
            else if (recipe.mx_element == MX_E4M3)
                found = tables_of(isa)->mxfp8(at, count, recipe.dtype, recipe.tables, codes_here, scales + first,
                                              irregular);
            else
                found = tables_of(isa)->plain(at, count, recipe.block, recipe.dtype, recipe.tables, codes_here,
                                              scales + first, irregular);
            if (found) return false;
        }
        return true;
    }

    bool run() {
        switch (recipe.route) {
            case PLAIN_BLOCKS: return plain();
            case FOUR_SIX_BLOCKS: return four_six();
            case FOUR_SIX_ORDERED: return four_six_ordered();
            case EXACT_BLOCKS: return exact();
            case EXACT_GENERAL: return general();
            case QWANTIZE_SEARCH: return qwantize();
            default: return false;
        }
    }
};

}  // namespace

extern "C" {

int64_t hb_sizeof_recipe() { return sizeof(Recipe); }

// Quantizes a contiguous matrix of `columns` blocks per row. `given`: the amax to use, or negative for the tensor's
// own. NVFP4 also writes the stored scale and the multiplier of code times scale.
// Returns 0; or 1 if the matrix holds something that only the reference describes. Then the outputs are not valid.
int hb_quantize(const Recipe* recipe, int isa, const void* x, int64_t rows, int64_t columns, float given,
                uint8_t* codes, uint8_t* scales, float* stored, float* multiplier) {
    Call call{*recipe, isa, (const uint8_t*)x, rows, columns, codes, scales};
    if (recipe->route >= MX_BLOCKS) return !call.mx();
    float amax = given >= 0.0f ? given : call.own_largest();
    if (given < 0.0f && !call.raise(&amax)) return 1;
    if (!numbers_of(*recipe, amax, &call.n)) return 1;
    *stored = call.n.stored;
    *multiplier = call.n.multiplier;
    return !call.run();
}

// Adds to `sums` what each of `count` headrooms of an amax costs on a part of a tensor: of a sample if `step` is not 1,
// whose first block here is `first`. Returns 1 if only the reference, or a longer way, can tell. (cpu/headroom.py)
int hb_survey_part(const Recipe* recipe, int isa, const void* x, int64_t rows, int64_t columns, float amax, int count,
                   const double* headroom, int64_t first, int step, Sum* sums) {
    const Call call{*recipe, isa, (const uint8_t*)x, rows, columns, nullptr, nullptr};
    return !call.survey_part(amax, count, headroom, first, step, sums);
}

// Scales and codes of rows with a tensor scale each, by TransformerEngine's formulas. `chosen` gets the place of each
// row's headroom; -1 if only a longer way can tell: then nothing is written. `amax`: the rows' own.
void hb_choose_rows(const Recipe* recipe, int isa, const void* x, int64_t rows, int64_t columns, const float* amax,
                    int count, const double* headroom, uint8_t* scales, uint8_t* codes, int8_t* chosen) {
    const int64_t step = columns * 16 * (recipe->dtype == FP32 ? 4 : 2);
    for (int64_t row = 0; row < rows; ++row) {
        const Call call{*recipe,
                        isa,
                        (const uint8_t*)x + row * step,
                        1,
                        columns,
                        codes + row * columns * 8,
                        scales + row * columns};
        chosen[row] = (int8_t)call.choose_row(amax[row], count, headroom);
    }
}

// Adds to `sums` what each headroom costs on every `step`-th row, but for rows that have no scale under one of them.
// Returns 1 if only a longer way can tell.
int hb_survey_sampled_rows(const Recipe* recipe, int isa, const void* x, int64_t rows, int64_t columns,
                           const float* amax, int count, const double* headroom, int64_t step, Sum* sums) {
    const int64_t size = columns * recipe->block * (recipe->dtype == FP32 ? 4 : 2);
    for (int64_t row = 0; row < rows; row += step) {
        if (!(amax[row] > 0.0f && std::isfinite(amax[row]))) continue;
        const Call call{*recipe, isa, (const uint8_t*)x + row * size, 1, columns, nullptr, nullptr};
        Sum own[MOST_HEADROOMS] = {};
        if (!call.survey_part(amax[row], count, headroom, 0, 1, own)) return 1;
        for (int c = 0; c < count; ++c) {
            sums[c].low += own[c].low;
            sums[c].rest += own[c].rest;
        }
    }
    return 0;
}

// The blocks that differ between the headrooms 1 and 2 of an amax: bottom and top. Returns 1 if there are no such ends.
int hb_survey_ends(const Recipe* recipe, float amax, float* bottom_and_top) {
    const Call call{*recipe, 0, nullptr, 0, 0, nullptr, nullptr};
    return !call.ends_of(amax, bottom_and_top, bottom_and_top + 1);
}

}  // extern "C"
