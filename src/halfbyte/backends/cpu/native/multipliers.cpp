// For each scale byte, a multiplier m such that round(x * m) equals the contract's code. (backends/cpu/multipliers.py
// says why one exists)
#include "formulas.h"

static int code_of(float y) {
    int code = 0;
    for (int k = 0; k < 7; ++k) code += k & 1 ? y >= MIDDLES[k] : y > MIDDLES[k];
    return code;
}

// Whether x * prescale * m rounds to the codes of the tables on both sides of every threshold of a byte.
static bool fits(const int32_t* threshold, float m, float prescale, int dtype) {
    if (!std::isfinite(m) || !(m > 0.0f)) return false;
    for (int k = 0; k < 7; ++k) {
        const int32_t last = (int16_t)(threshold[k] & 0xFFFF);  // the largest magnitude below code k + 1
        if (last < 0) continue;                                 // no input is below the threshold
        const float below = magnitude_value((uint32_t)last, dtype) * prescale;
        if (code_of(below * m) > k) return false;
        if (last + 1 >= (int32_t)inf_bits(dtype)) continue;  // no input is above it
        const float above = magnitude_value((uint32_t)last + 1, dtype) * prescale;
        if (code_of(above * m) <= k) return false;
    }
    return true;
}

// Fills 127 multipliers. `near`: first guesses. Returns 0, or 1 if some byte has none. Byte 0 may have none.
extern "C" int hb_fit_multipliers(const Tables* t, const float* near, float prescale, int dtype, float* out) {
    static const int32_t STEPS[] = {0, -1, 1, -2, 2, -3, 3};  // offsets from the guess in units in the last place
    constexpr int NORMAL = 16, BYTES = 127;                   // from byte 16 on, the kernel uses one m per significand
    bool set[BYTES] = {};
    std::copy(near, near + BYTES, out);
    for (int32_t step : STEPS) {
        auto tried = [&](int byte) { return as_float(as_bits(near[byte]) + (uint32_t)step); };
        auto try_from = [&](int first, int stride) {
            if (set[first]) return;
            for (int byte = first; byte < (stride ? BYTES : first + 1); byte += stride ? stride : 1)
                if (!fits(t->threshold[byte], tried(byte), prescale, dtype)) return;
            for (int byte = first; byte < (stride ? BYTES : first + 1); byte += stride ? stride : 1) {
                out[byte] = tried(byte);
                set[byte] = true;
            }
        };
        for (int byte = 0; byte < NORMAL; ++byte) try_from(byte, 0);
        for (int significand = 0; significand < 8; ++significand) try_from(NORMAL + significand, 8);
        if (std::all_of(set + 1, set + BYTES, [](bool one) { return one; })) return 0;
    }
    return 1;
}
