// Builds the tables of one NVFP4 tensor. It evaluates the contract's own formulas to find where each byte and each code
// starts.
#include "formulas.h"

// The smallest bits in [0, end] for which `holds` is true, or end + 1 if there are none. `holds` must be false up to
// some bits and true from there on.
template <class Predicate>
static uint32_t first_true(Predicate holds, uint32_t guess, uint32_t end) {
    if (guess > end) guess = end;
    uint32_t low, high, step = 1;  // holds(high) is true; holds(low) is false
    if (holds(guess)) {
        high = guess;
        for (;;) {
            if (high == 0) return 0;
            low = high > step ? high - step : 0;
            if (!holds(low)) break;
            high = low;
            step *= 2;
        }
    } else {
        low = guess;
        for (;;) {
            if (low == end) return end + 1;
            high = end - low > step ? low + step : end;
            if (holds(high)) break;
            low = high;
            step *= 2;
        }
    }
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (holds(middle)) high = middle;
        else low = middle;
    }
    return high;
}

// Bits of a magnitude close to `value`. The search for a threshold starts there.
static uint32_t bits_near(float value, int dtype) {
    if (!(value > 0.0f)) return 0;
    if (dtype == FP32) return as_bits(value);
    if (dtype == BF16) return as_bits(value) >> 16;
    if (value >= 65504.0f) return 0x7BFF;
    if (value < 0x1p-14f) return (uint32_t)(value * 0x1p24f);
    return (as_bits(value) - (112u << 23)) >> 13;
}

// Kernels for 16-bit input compare 16-bit lanes, so both halves of the word hold the threshold.
static int32_t in_lanes(int32_t threshold, int dtype) {
    return dtype == FP32 ? threshold : (int32_t)((uint32_t)(threshold & 0xFFFF) * 0x10001u);
}

static void fill_thresholds(const Rule& r, int dtype, int byte, Tables* t) {
    const uint32_t end = inf_bits(dtype) - 1;
    const float constant = r.constant[byte];
    auto y = [&](uint32_t bits) {
        float x = magnitude_value(bits, dtype);
        return r.divides ? x / constant : x * constant;
    };
    for (int k = 0; k < 7; ++k) {
        const bool closed = r.tie == TIE_EVEN && (k & 1);  // 0.75, 1.75 and 3.5 round up to the even code
        const float middle = MIDDLES[k];
        auto reached = [&](uint32_t bits) { return closed ? y(bits) >= middle : y(bits) > middle; };
        float near = r.divides ? middle * constant : middle / constant;
        t->threshold[byte][k] = in_lanes((int32_t)first_true(reached, bits_near(near, dtype), end) - 1, dtype);
    }
    auto not_zero = [&](uint32_t bits) { return y(bits) > 0.0f; };
    int32_t first = (int32_t)first_true(not_zero, 1, end);
    const int32_t keeps_sign = r.sign == SIGN_BELOW_ZERO ? first - 1 : r.sign == SIGN_OF_X ? 0 : -1;
    t->threshold[byte][7] = in_lanes(keeps_sign, dtype);
    t->positive_sign[byte] = r.sign == SIGN_NOT_ABOVE_ZERO ? first : 0;
    if (t->positive_sign[byte]) t->has_positive_sign = 1;
}

// Fills a segment table. Returns false if the thresholds do not fit one; that happens among subnormal numbers.
static bool fill_segment(const int32_t* threshold, Segment* s) {
    int32_t begin[7];  // the place at which code k + 1 starts
    auto bits = [&](int k) { return (int32_t)(int16_t)(threshold[k] & 0xFFFF) + 1; };
    const int32_t start = bits(3) - Segment::MIDDLE;
    if (start < 0) return false;
    for (int k = 0; k < 7; ++k) begin[k] = bits(k) - start;
    for (int at = 0; at < Segment::COUNT; ++at) {
        const int32_t first = at * Segment::SIZE, middle = first < Segment::MIDDLE ? 0 : 4;
        int32_t code = 0, inside = 0, place = Segment::SIZE;
        for (int32_t k : begin) {
            code += k <= first;
            if (k > first && k < first + Segment::SIZE) ++inside, place = k - first;
        }
        if (inside > 1 || code < middle || code + inside > middle + 3) return false;
        s->count[at] = (uint8_t)(Segment::SIZE * (code - middle) + Segment::SIZE - place);
    }
    s->start = (uint32_t)start * 0x10001u;
    return s->count[0] == 0;  // the upper bytes of 16-bit lanes look up entry 0 and must get 0
}

// Fills the steps, from the last amax with a bounded segment down to the first that does not fit. (tables.h: Steps)
static void fill_steps(Tables* t) {
    Steps& s = t->steps;
    const uint32_t end = t->starts[t->last_bounded + 1];
    uint32_t first = t->starts[t->first_segment];
    if (t->last_bounded < t->first_segment || end > 32768 || end < first + 256) return;
    s.shift = t->lut[end - 1] - t->lut[end - 1 - 128] == 8 ? 4 : 7;  // a binade has eight bytes, or one
    int32_t least[16], most[16];  // smallest and largest sum offset + ahead[i] that gives the right bytes
    std::fill(least, least + 16, -65536);
    std::fill(most, most + 16, 65536);
    for (uint32_t a = end; a-- > first;) {
        const int32_t from = ((int32_t)t->lut[a] << s.shift) - (int32_t)a, place = (a >> 3) & 15;
        const int32_t lower = std::max(least[place], from), upper = std::min(most[place], from + (1 << s.shift) - 1);
        if (lower > upper || t->lut[a] == IRREGULAR) first = a + 1;
        else least[place] = lower, most[place] = upper;
    }
    if (end < first + 128) return;
    const int32_t lowest = *std::min_element(least, least + 16);
    if (*std::max_element(least, least + 16) - lowest > 255) return;
    for (int i = 0; i < 16; ++i) s.ahead[i] = (uint8_t)(least[i] - lowest);
    s.offset = (uint16_t)(lowest - 256 * s.ahead[0]);
    s.first = (uint16_t)first;
    s.last = (uint16_t)(end - 1);
}

// Fills the segments. Thresholds and amaxes must be there already. The bytes with a segment are the last one that fits
// and those below it, down to the first that does not.
extern "C" void hb_build_segments(int dtype, Tables* t) {
    t->first_segment = 1;
    t->last_segment = t->last_bounded = 0;
    t->steps.first = 1;
    t->steps.last = 0;
    if (dtype != BF16 || t->has_positive_sign) return;
    auto sign_of = [&](int byte) { return (int32_t)(int16_t)(t->threshold[byte][7] & 0xFFFF); };
    int byte = 255;
    while (byte >= 0 && !fill_segment(t->threshold[byte], &t->segment[byte])) --byte;
    if (byte < 0 || sign_of(byte) > 0) return;
    t->segment_sign = sign_of(byte);
    t->last_segment = byte;
    while (byte >= 0 && sign_of(byte) == t->segment_sign && fill_segment(t->threshold[byte], &t->segment[byte])) --byte;
    t->first_segment = byte + 1;
    // The largest magnitude under a byte is the largest amax that leads to it.
    for (byte = t->first_segment; byte <= t->last_segment; ++byte) {
        if ((int64_t)t->starts[byte + 1] - 1 - (t->segment[byte].start & 0xFFFF) >= Segment::PLACES) break;
        t->last_bounded = byte;
    }
    fill_steps(t);
}

// Whether y is a number for every x under this byte.
static bool regular_constant(const Rule& r, int byte) {
    return byte < 127 && std::isfinite(r.constant[byte]) && !(r.divides && r.constant[byte] == 0.0f);
}

// Returns 0, or 1 if the factor or the amax is NaN or infinite: then the caller uses the reference.
extern "C" int hb_build_tables(const Rule* rule, int dtype, Tables* t) {
    const Rule& r = *rule;
    if (!std::isfinite(r.factor) || !std::isfinite(r.amax)) return 1;
    const uint32_t end = inf_bits(dtype) - 1, shift = dtype == FP32 ? 16 : 0;
    t->has_positive_sign = 0;
    // The amax at which each byte starts. A byte that no amax reaches starts at infinity.
    uint32_t* starts = t->starts;
    starts[0] = 0;
    const float ratio = pre_scale(r, 1.0f);
    for (int byte = 1; byte < 127; ++byte) {
        float near = (e4m3_decode(byte) + e4m3_decode(byte - 1)) * 0.5f / ratio;
        auto reached = [&](uint32_t bits) { return byte_of(r, magnitude_value(bits, dtype)) >= byte; };
        uint32_t guess = bits_near(near, dtype);
        starts[byte] = first_true(reached, guess < starts[byte - 1] ? starts[byte - 1] : guess, end);
    }
    for (int byte = 127; byte <= 256; ++byte) starts[byte] = end + 1;
    for (int byte = 0; byte < 127; ++byte) fill_thresholds(r, dtype, byte, t);
    std::memset(t->threshold[127], 0, sizeof t->threshold[127] * 129);  // no block has these bytes
    for (int byte = 0; byte < 127; ++byte) {
        const int written = byte == 0 && r.for_zero_byte >= 0 ? r.for_zero_byte : byte;
        const float c = r.constant[written];
        bool regular = regular_constant(r, written);
        if (r.wraps && starts[byte + 1] > starts[byte]) {  // from y = 7 on the code no longer rises with x
            float x = magnitude_value(starts[byte + 1] - 1, dtype);
            regular = regular && (r.divides ? x / c : x * c) < 7.0f;
        }
        t->written[byte] = regular ? (uint8_t)written : IRREGULAR;
    }
    for (int byte = 127; byte < 256; ++byte) t->written[byte] = IRREGULAR;
    // Entry i is the byte of the amax with bits i << shift.
    const uint32_t round_up = (1u << shift) - 1;
    uint32_t filled = 0;
    for (int byte = 0; byte < 127; ++byte) {
        const uint32_t until = (starts[byte + 1] + round_up) >> shift;
        if (until <= filled) continue;
        std::memset(t->lut + filled, shift ? byte : t->written[byte], until - filled);
        filled = until;
    }
    std::memset(t->lut + filled, shift ? 127 : IRREGULAR, 32768 - filled);
    t->zero_below = 0;
    if (r.for_zero >= 0.0f) {
        auto not_zero = [&](uint32_t bits) { return !is_zero(r, magnitude_value(bits, dtype)); };
        t->zero_below = first_true(not_zero, 1, end);
        t->zero_byte = (uint32_t)e4m3_encode(r.for_zero > r.smallest ? r.for_zero : r.smallest);
        if (!regular_constant(r, (int)t->zero_byte)) t->zero_byte = IRREGULAR;
        if (!shift)
            for (uint32_t index = 0; index < t->zero_below; ++index) t->lut[index] = (uint8_t)t->zero_byte;
    }
    hb_build_segments(dtype, t);
    return 0;
}

// Scale bytes of amaxes, given by their bits. Returns how many are IRREGULAR.
extern "C" int64_t hb_bytes_of_amaxes(const uint32_t* bits, int64_t count, int dtype, const Tables* t, uint8_t* out) {
    int64_t irregular = 0;
    for (int64_t i = 0; i < count; ++i) {
        out[i] = dtype == FP32 ? byte_of_amax<true>(bits[i], *t) : byte_of_amax<false>(bits[i], *t);
        irregular += out[i] == IRREGULAR;
    }
    return irregular;
}
