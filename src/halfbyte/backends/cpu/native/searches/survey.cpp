// The errors of a tensor under several tensor scales, as exact integers. (backends/headroom.py)
#include "../searches.h"
#include <limits>
#include <numeric>
#include <vector>

namespace {

const int64_t CHUNK = 4096;  // blocks whose errors are held at once

struct Scratch {
    std::vector<int64_t> listed, tops;
    std::vector<uint8_t> gathered, joined;
    std::vector<float> errors;
};

Scratch& scratch() {
    static thread_local Scratch kept;
    return kept;
}

bool add(const float* errors, int64_t count, int shift, Sum* sum) {
    const double scale = std::ldexp(1.0, shift);
    for (int64_t i = 0; i < count; ++i) {
        const double steps = (double)errors[i] * scale;
        if (!(steps < 0x1p62)) return false;
        const int64_t whole = (int64_t)steps;  // of a non-negative number: its floor
        sum->low += whole & 0xFFFFFFFF;
        sum->rest += whole >> 32;
    }
    return true;
}

// Bits of the largest magnitude of a dtype that is at most `value`.
int32_t bits_up_to(float value, int dtype) {
    if (dtype == FP32) return (int32_t)as_bits(value);
    if (dtype == BF16) return (int32_t)(as_bits(value) >> 16);
    uint32_t low = 0, high = inf_bits(FP16);
    while (low + 1 < high) {
        const uint32_t middle = (low + high) / 2;
        if (half_magnitude(middle) <= value) low = middle;
        else high = middle;
    }
    return (int32_t)low;
}

// The least errors of blocks under one candidate.
struct Least {
    int isa = 0;
    const GeneralSearch* search = nullptr;
    bool quick = false;  // whether `tables` say what `search` says, for the kernel of NVFP4's usual blocks
    SearchTables tables;

    void prepare(int of_isa, const GeneralSearch& g) {
        isa = of_isa;
        search = &g;
        if (!g.constant) {
            quick = true;
            fill_search_tables(g.prescale[0], g.unit[0], g.first, g.zero_byte, &tables);
            return;
        }
        quick = g.block == 16 && g.element == EVEN && g.objective != QUADRATIC && !g.by_block && g.last == 126;
        if (!quick) return;
        tables.divides = g.divides;
        tables.first = g.first;
        tables.zero_byte = g.zero_byte;
        tables.prescale = g.prescale[0];
        tables.unit = g.unit[0];
        tables.to_scale = 1.0f / (6.0f * tables.unit);
        const float shift = g.divides ? tables.prescale : 1.0f / tables.prescale;
        for (int byte = 0; byte < 127; ++byte) {
            tables.multiplier[byte] = g.constant[byte] * shift;
            tables.scale[byte] = g.value[byte] * tables.unit;
        }
    }

    // Of at most CHUNK blocks of one column. `bytes` gets the scales if `quick`.
    void operator()(const uint8_t* x, int64_t stride, int64_t blocks, int64_t column, uint8_t* bytes,
                    float* errors) const {
        static thread_local uint8_t unused[CHUNK];
        if (!bytes) bytes = unused;
        const float* weights = search->objective == WEIGHTED_SQUARES ? search->numbers + column * 16 : nullptr;
        if (quick) tables_of(isa)->search_errors(x, stride, blocks, search->dtype, &tables, weights, bytes, 1, errors);
        else searches_of(isa)->errors(x, stride, blocks, column, search, errors, 1);
    }
};

// Some of the candidates, by their places.
struct Places {
    int count = 0, at[MOST_HEADROOMS];
};

// The candidates of a survey.
struct Candidates {
    const Survey& survey;
    Least least[MOST_HEADROOMS];
    Places all;

    Candidates(int isa, const Survey& of) : survey(of) {
        for (int c = 0; c < of.count; ++c) {
            least[c].prepare(isa, of.search[c]);
            all.at[all.count++] = c;
        }
    }

    Places but(int place) const {
        Places some;
        for (int c = 0; c < all.count; ++c)
            if (c != place) some.at[some.count++] = c;
        return some;
    }

    int64_t block_bytes() const { return survey.search[0].block * (survey.search[0].dtype == FP32 ? 4 : 2); }

    // Adds blocks that are `stride` bytes apart, all of one column, under some candidates. `bytes` gets the scales
    // under each of them, or is null.
    bool add(const uint8_t* x, int64_t stride, int64_t blocks, int64_t column, const Places& some, uint8_t* bytes,
             Sum* sums) const {
        std::vector<float>& errors = scratch().errors;
        errors.resize((size_t)CHUNK);
        for (int64_t start = 0; start < blocks; start += CHUNK) {
            const int64_t count = std::min(blocks - start, CHUNK);
            for (int i = 0; i < some.count; ++i) {
                const int c = some.at[i];
                uint8_t* own = bytes ? bytes + c * blocks + start : nullptr;
                least[c](x + start * stride, stride, count, column, own, errors.data());
                if (!::add(errors.data(), count, survey.shift[c], sums + c)) return false;
            }
        }
        return true;
    }

    // Adds a matrix column by column, because each has its own weights; of a sample, the rows that have a block in it.
    bool add_columns(const uint8_t* x, int64_t rows, int64_t columns, int64_t first, Sum* sums) const {
        const int64_t size = block_bytes(), step = survey.step / std::gcd((int64_t)survey.step, columns), some = 64;
        for (int64_t start = 0; start < rows; start += some * step)
            for (int64_t column = 0; column < columns; ++column) {
                int64_t row = 0;
                while (row < step && ((start + row) * columns + column - first) % survey.step != 0) ++row;
                if (row == step || start + row >= rows) continue;
                const int64_t count = std::min((rows - start - row - 1) / step + 1, some);
                if (!add(x + ((start + row) * columns + column) * size, step * columns * size, count, column, all,
                         nullptr, sums))
                    return false;
            }
        return true;
    }
};

// The two ends of a tensor, for the headrooms 1 and 2. Blocks are `stride` bytes apart.
struct EndsOf {
    int isa;
    const uint8_t* x;
    int64_t stride, blocks;
    const Candidates& candidates;
    Sum sums[MOST_HEADROOMS] = {};

    // Blocks next to each other.
    const uint8_t* joined(int64_t start, int64_t count) const {
        const int64_t size = candidates.block_bytes();
        if (stride == size) return x + start * size;
        std::vector<uint8_t>& to = scratch().joined;
        to.resize((size_t)(count * size));
        for (int64_t i = 0; i < count; ++i) std::memcpy(to.data() + i * size, x + (start + i) * stride, (size_t)size);
        return to.data();
    }

    // Adds blocks by their numbers.
    bool add(const int64_t* listed, int64_t count) {
        const Survey& survey = candidates.survey;
        const Places pair = {2, {survey.one, survey.two}};
        const int64_t size = candidates.block_bytes();
        std::vector<uint8_t>& to = scratch().gathered;
        if ((int64_t)to.size() < count * size) to.resize((size_t)(count * size));
        for (int64_t i = 0; i < count; ++i) std::memcpy(to.data() + i * size, x + listed[i] * stride, (size_t)size);
        return candidates.add(to.data(), size, count, 0, pair, nullptr, sums);
    }

    // Lists blocks from `start` on, at most CHUNK: those with an amax beyond `top`, and those with one up to `bottom`
    // as their complements.
    int64_t list(int64_t start, int64_t count, float bottom, float top) const {
        const GeneralSearch& of = candidates.survey.search[0];
        const int32_t low = bits_up_to(bottom, of.dtype), high = bits_up_to(top, of.dtype);
        std::vector<int64_t>& to = scratch().listed;
        to.resize((size_t)CHUNK);
        const int64_t found =
            searches_of(isa)->ends(joined(start, count), count, of.block, of.dtype, low, high, to.data());
        for (int64_t i = 0; i < found; ++i) to[i] += to[i] < 0 ? -start : start;
        return found;
    }

    // Decides: adds as much as it takes until it is certain which of the two costs less. A block beyond `top` never
    // costs more under 2, and one at the bottom not much more. So 2 wins once it is far enough ahead.
    bool decide(float bottom, float top) {
        std::vector<int64_t>&listed = scratch().listed, &tops = scratch().tops;
        int64_t step = 16;
        for (int64_t start = 0, count, some = 64; start < blocks; start += count, some = std::min(4 * some, CHUNK)) {
            count = std::min(blocks - start, some);
            const int64_t found = list(start, count, bottom, top);
            int64_t bottoms = 0;
            tops.clear();
            for (int64_t i = 0; i < found; ++i) {
                if (listed[(size_t)i] < 0) listed[(size_t)bottoms++] = ~listed[(size_t)i];
                else tops.push_back(listed[(size_t)i]);
            }
            if (!add(listed.data(), bottoms)) return false;
            for (int64_t from = 0, all = (int64_t)tops.size(); from < all;
                 from += step, step = std::min(2 * step, CHUNK)) {
                if (!add(tops.data() + from, std::min(all - from, step))) return false;
                if (second_is_less_behind(blocks - start - count)) return true;
            }
        }
        return true;
    }

    bool all(float bottom, float top) {
        for (int64_t start = 0; start < blocks; start += CHUNK) {
            const int64_t found = list(start, std::min(blocks - start, CHUNK), bottom, top);
            std::vector<int64_t>& listed = scratch().listed;
            for (int64_t i = 0; i < found; ++i)
                if (listed[(size_t)i] < 0) listed[(size_t)i] = ~listed[(size_t)i];
            if (!add(listed.data(), found)) return false;
        }
        return true;
    }

    bool second_is_less() const { return second_is_less_behind(0); }

    // Whether 2 costs less, whatever the `rest` of the blocks costs.
    bool second_is_less_behind(int64_t rest) const {
        const Sum &one = sums[candidates.survey.one], &two = sums[candidates.survey.two];
        // By how much a block can cost more under 2. (backends/headroom.py: MOST_LOST)
        const __int128 most = (__int128)rest << (candidates.survey.search[0].block == 16 ? 14 : 18);
        return ((__int128)two.rest << 32) + two.low + most < ((__int128)one.rest << 32) + one.low;
    }
};

}  // namespace

bool survey_blocks(int isa, const void* x, int64_t rows, int64_t columns, int64_t first, const Survey& survey,
                   uint8_t* bytes, Sum* sums) {
    const Candidates every(isa, survey);
    const int64_t size = every.block_bytes(), stride = survey.step * size, all = rows * columns;
    if (survey.search[0].objective != SQUARES) return every.add_columns((const uint8_t*)x, rows, columns, first, sums);
    const int64_t blocks = first < all ? (all - first - 1) / survey.step + 1 : 0;
    const uint8_t* at = (const uint8_t*)x + first * size;
    if (survey.two < 0) return every.add(at, stride, blocks, 0, every.all, bytes, sums);
    EndsOf ends{isa, at, stride, blocks, every};
    if (!(survey.decides ? ends.decide(survey.bottom, survey.top) : ends.all(survey.bottom, survey.top))) return false;
    const Sum &one = ends.sums[survey.one], &two = ends.sums[survey.two];
    if (survey.count == 2) {
        sums[survey.one] = one;
        sums[survey.two] = two;
        return true;
    }
    // Beside 1 and 2 there are others, for which every block is searched, and under the better one of 1 and 2. If all
    // that counts is which candidate is the best, the worse one of the two gets a sum that is larger than the other's.
    const bool second = survey.decides && ends.second_is_less();
    const int kept = second ? survey.two : survey.one, left_out = second ? survey.one : survey.two;
    if (!every.add(at, stride, blocks, 0, every.but(left_out), bytes, sums)) return false;
    sums[left_out] = sums[kept];
    if (survey.decides) ++sums[left_out].rest;
    else {  // 1 stands for 2 wherever they do not differ
        sums[left_out].low += two.low - one.low;
        sums[left_out].rest += two.rest - one.rest;
    }
    return true;
}

extern "C" {

int64_t hb_sizeof_survey() { return sizeof(Survey); }

// Lists blocks whose largest magnitude is beyond `top`, or is not 0 and not beyond `bottom`.
int64_t hb_list_ends(int isa, const void* x, int64_t blocks, int block, int dtype, float bottom, float top,
                     int64_t* out) {
    const int32_t low = bits_up_to(bottom, dtype), high = bits_up_to(top, dtype);
    const int64_t found = searches_of(isa)->ends(x, blocks, block, dtype, low, high, out);
    for (int64_t i = 0; i < found; ++i) out[i] = out[i] < 0 ? ~out[i] : out[i];
    return found;
}

// Adds to `sums`, one per candidate. `first`: the first block of a sample. Returns 1 if it cannot.
int hb_survey(int isa, const void* x, int64_t rows, int64_t columns, int64_t first, const Survey* survey, Sum* sums) {
    return !survey_blocks(isa, x, rows, columns, first, *survey, nullptr, sums);
}

// The same for each row with its own tensor scale: `ends`, `shifts` and `sums` have entries for each row, and so have
// the numbers of the searches, from number `row` on. A negative bottom stands for no ends.
int hb_survey_rows(int isa, const void* x, int64_t rows, int64_t columns, int64_t row, const Survey* survey,
                   const float* ends, const int32_t* shifts, Sum* sums) {
    const GeneralSearch& of = survey->search[0];
    const int64_t step = columns * of.block * (of.dtype == FP32 ? 4 : 2);
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = row + r;
        Survey own = *survey;
        own.bottom = ends[2 * r];
        own.top = ends[2 * r + 1];
        if (own.bottom < 0.0f) own.one = own.two = -1;
        for (int c = 0; c < own.count; ++c) {
            own.shift[c] = shifts[r * own.count + c];
            own.search[c].per_row = 0;
            if (own.search[c].constant) own.search[c].constant += 256 * at;
            own.search[c].prescale += at;
            own.search[c].unit += at;
        }
        if (!survey_blocks(isa, (const uint8_t*)x + r * step, 1, columns, 0, own, nullptr, sums + r * own.count))
            return 1;
    }
    return 0;
}

}  // extern "C"
