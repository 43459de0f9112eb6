// The exact search over E4M3 scales, and what a kernel that estimates needs of a tensor: constants per byte, which
// scales can win, and when estimates may be trusted. (backends/reference/search.py)
//
// Scales of at least 2M/7 are excluded by definition (docs/methods.md); M is the block's amax. Let L be the largest
// byte that is not excluded and s its scale. Then M is in (3.5, 3.95]·s. Candidates are the bytes L, L − 1 … L − 8. The
// next one is below M/7.4, where clipping M alone costs more than M²/28.
#pragma once
#include "blocks.cuh"
#include "contract.cuh"

constexpr int CANDIDATES = 9;
constexpr u32 FIRST_LAST = 20,
              LAST_LAST = 133;            // for L in this range all candidates are normal; above 126 some do not exist
constexpr u32 SMALLER = 1 << CANDIDATES;  // set beside a mask of candidates: smaller scales can win too
constexpr u32 LAST_AT = 16;               // where L is, behind such a mask
constexpr u32 NO_AMAX = 0xFFFFFFFF;

// What depends on the scale's byte.
struct Bytes {
    float constant[128], scale[128];  // what elements are multiplied or divided by, and s'
    Short by[128];                    // for codes
    u32 zero, zero_byte;              // the amax of a block of zeros (or a number that is no amax), and its byte
    u32 usable, unused;               // whether estimates describe this contract and tensor
};

// --- the objective ---

__device__ __forceinline__ float scaled_of(float x, const float* n) { return (x * n[PRESCALE]) * n[PRESCALE_AGAIN]; }

// The error by the contract's own formulas.
__device__ __forceinline__ float general_objective(const u32* words, float constant, float scale, const float* n) {
    float total = 0.0f;
#pragma unroll 2
    for (int i = 0; i < 16; ++i) {
        const float x = element_of(words, i), q = value_of_code(code_of(x, quotient(x, constant, false)));
        const float r = q * scale - scaled_of(x, n);
        total = total + r * r;
    }
    return total;
}

// Below which y the short way gives the contract's codes: at 8 it does not go on, and where codes wrap it ends at 7.
__device__ __forceinline__ float short_end() { return WRAPS ? 6.9999f : 7.9999f; }

// The same, where a byte has a short way to its codes. y has the sign of x, so magnitudes give the same squares.
__device__ __forceinline__ float short_objective(const u32* words, Short by, float scale, const float* n) {
    float total = 0.0f;
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
        const float x = fabsf(element_of(words, i));
        const float r = short_element(short_quotient(x, by)).value * scale - scaled_of(x, n);
        total = total + r * r;
    }
    return total;
}

// Whether the scale is excluded: its half is a scale too (odd bytes below 16 have none), and 7 times the half reaches
// the amax. Then the half is no worse.
__device__ __forceinline__ bool excluded(u32 byte, float most, float unit) {
    return (byte > 15 || byte % 2 == 0) && 7.0f * ((value_of_e4m3(byte) * 0.5f) * unit) >= most;
}

// The largest byte that is not excluded.
__device__ __forceinline__ u32 last_of(float most, float unit) {
    u32 byte = (__float_as_uint(most / (3.5f * unit)) >> 20) - 960;
    while (excluded(byte, most, unit)) --byte;
    while (!excluded(byte + 1, most, unit)) ++byte;
    return byte;
}

struct Found {
    float error;
    u32 byte;

    // v: the largest magnitude. Where codes do not wrap, values beyond 6 are 6 both ways.
    __device__ __forceinline__ void consider(u32 tried, const u32* words, const Bytes& t, float v, const float* n) {
        const Short by = t.by[tried];
        const bool is_short = WRAPS ? v * by.high < short_end() : by.high == by.high;
        const float found = is_short ? short_objective(words, by, t.scale[tried], n)
                                     : general_objective(words, t.constant[tried], t.scale[tried], n);
        if (found < error || (found == error && tried < byte)) {  // of two equal errors the smaller scale wins
            error = found;
            byte = tried;
        }
    }
    // Tries the bytes from `tried` down, until clipping the amax alone costs more than the best.
    __device__ __forceinline__ void go_down(u32 tried, const u32* words, const Bytes& t, float v, float most,
                                            const float* n) {
#pragma unroll 1
        for (; tried >= FIRST && tried < 128; --tried) {
            const float d = most - 6.0f * t.scale[tried];
            if (d > 0.0f && d * d * 0.99999f > error) break;
            if (!excluded(tried, most, n[UNIT])) consider(tried, words, t, v, n);
        }
    }
};

// The search for any block: from the byte nearest to M/6 up until scales are excluded, then down.
__device__ __forceinline__ u32 search(const u32* words, const Bytes& t, float v, float most, u32 start,
                                      const float* n) {
    Found best = {FLOAT32_MAX, 255};
    u32 cover = round_e4m3(most / (n[UNIT] * 6.0f)).byte;
    cover = cover < FIRST ? FIRST : cover;
#pragma unroll 1
    for (u32 byte = cover; byte <= 126; ++byte) {
        if (!excluded(byte, most, n[UNIT])) best.consider(byte, words, t, v, n);
        else if (byte > 15) break;
    }
    best.go_down(cover - 1, words, t, v, most, n);
    return best.byte == 255 ? start : best.byte;  // 255: no error was finite
}

// A block that estimates did not decide. `mask` has a bit for each candidate that can win, SMALLER if smaller scales
// can, and L. 0 means all scales.
__device__ __noinline__ void exact_block(const Operand& o, const Segment& s, const Bytes& t, i64 block, u32 mask) {
    const Place at = place_of(o, block);
    const u32* words = (const u32*)source(o, s, at);
    const float* n = s.numbers;
    const float v = largest_value(words), most = scaled_of(v, n);
    const Scale start = scale_byte(pre_scale(v, n));
    u32 byte = start.byte;
    if (mask != 0) {
        const u32 last = mask >> LAST_AT;
        Found best = {FLOAT32_MAX, 255};
#pragma unroll 1
        for (u32 left = mask & (SMALLER - 1); left != 0; left &= left - 1)
            best.consider(last - (__ffs(left) - 1), words, t, v, n);
        if (mask & SMALLER) best.go_down(last - CANDIDATES, words, t, v, most, n);
        byte = best.byte;
    } else if (v > 0.0f && v <= FLOAT32_MAX && n[SEARCHED] > 0.0f) {
        byte = search(words, t, v, most, start.byte, n);
    }
    if (v * t.by[byte].high < short_end())
        o.codes[block] = make_uint2(short_codes(words, t.by[byte]), short_codes(words + WORDS / 2, t.by[byte]));
    else o.codes[block] = codes_of(words, t.constant[byte], byte == 0);
    o.scales[scale_place(o, at, block)] = (unsigned char)byte;
}

// A block with two candidates. If both have a short way, one pass over the elements compares them; the result tells. x'
// is exact here (`describes`, and L is in range), so it can be subtracted in one operation with the product by which it
// is scaled.
__device__ __noinline__ bool exact_pair(const Operand& o, const Segment& s, const Bytes& t, i64 block, u32 mask) {
    const Place at = place_of(o, block);
    const Block b = load_block(source(o, s, at));
    const float* n = s.numbers;
    const float v = largest_value(b.w), minus = -(n[PRESCALE] * n[PRESCALE_AGAIN]);
    const u32 both = mask & (SMALLER - 1), last = mask >> LAST_AT;
    const u32 first = last - (__ffs(both) - 1), second = last - (__ffs(both & (both - 1)) - 1);
    const Short by_first = t.by[first], by_second = t.by[second];
    if (!(v * by_first.high < short_end() && v * by_second.high < short_end())) return false;
    const float scale_first = t.scale[first], scale_second = t.scale[second];
    float error_first = 0.0f, error_second = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float x = fabsf(element_of(b.w, i));
        const float one = __fmaf_rn(x, minus, short_element(short_quotient(x, by_first)).value * scale_first);
        const float other = __fmaf_rn(x, minus, short_element(short_quotient(x, by_second)).value * scale_second);
        error_first = error_first + one * one;
        error_second = error_second + other * other;
    }
    const bool takes_first = error_first < error_second;  // of two equal errors the smaller scale wins
    const Short by = takes_first ? by_first : by_second;
    o.codes[block] = make_uint2(short_codes(b.w, by), short_codes(b.w + WORDS / 2, by));
    o.scales[scale_place(o, at, block)] = (unsigned char)(takes_first ? first : second);
    return true;
}

// The queues of both kinds of blocks. Pairs are worth a queue of their own where there are many.
constexpr bool HAS_PAIRS = DTYPE == FP16;

struct Undecided {
    Queue pairs, others;

    __device__ Undecided(u64* memory) : pairs(memory, HAS_PAIRS), others(memory) {}

    template <typename Pair, typename Exact>
    __device__ __forceinline__ void offer(bool unclear, i64 block, u32 mask, Pair pair, Exact exact) {
        if (!HAS_PAIRS) {
            others.offer(unclear, block, mask, exact);
            return;
        }
        if (__ballot_sync(0xFFFFFFFF, unclear) == 0) return;
        const u32 most = mask & (2 * SMALLER - 1), second = most & (most - 1);
        const bool is_pair = second != 0 && (second & (second - 1)) == 0 && most < SMALLER;
        pairs.offer(unclear && is_pair, block, mask, pair);
        others.offer(unclear && !is_pair, block, mask, exact);
    }
    template <typename Pair, typename Exact>
    __device__ __forceinline__ void finish(Pair pair, Exact exact) {
        if (HAS_PAIRS && pairs.waiting > 0) pairs.take(pair);
        if (others.waiting > 0) others.take(exact);
    }
};

// --- constants per byte ---

// Whether estimates describe the contract: y is x'/s' but for roundings, and neither y nor any square under- or
// overflows. Then a y of 0 means that x is 0: for 16-bit dtypes the sign of y is that of x. The contract's own formulas
// are asked, so that any mixture of them can be tried. `i`: a byte.
__device__ __forceinline__ bool describes(const float* n, u32 i, float constant, float scale) {
    const float prescale = n[PRESCALE] * n[PRESCALE_AGAIN];  // 1/g, but for a factor below 2
    if (!(n[SEARCHED] > 0.0f && prescale <= 1e22f && prescale >= 0.03125f)) return false;
    if (i < 8 || i > 126) return true;
    const float ratio = divides() ? (constant * prescale) / scale : (constant / prescale) * scale;
    return fabsf(ratio - 1.0f) <= 4.7e-7f;  // 2^-21
}

// Writes constants and scales, all threads of a thread block together. Returns whether estimates may be used.
__device__ __forceinline__ bool fill_constants(Bytes& t, const float* n) {
    __shared__ u32 strange;
    if (threadIdx.x == 0) strange = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < 128; i += blockDim.x) {
        const float value = value_of_e4m3(i), scale = value * n[UNIT];
        const float constant = element_constant(i == 127 ? __uint_as_float(0x7FC00000) : value, n);
        t.constant[i] = constant;
        t.scale[i] = scale;
        if (!describes(n, i, constant, scale)) atomicOr(&strange, 1);
    }
    __syncthreads();
    return strange == 0;
}

// Writes the rest, from the constants: the short ways of the bytes `first`, `first + step` and so on, and what a block
// of zeros becomes.
__device__ __forceinline__ void fill_shorts(Bytes& t, const Bytes& from, const float* n, bool usable, u32 first,
                                            u32 step) {
    __shared__ u32 unfit[4];
    for (u32 i = threadIdx.x; i < 4; i += blockDim.x) unfit[i] = 0;
    __syncthreads();
    if (!short_is_exact() && usable) {
        for (u32 i = threadIdx.x;; i += blockDim.x) {
            const u32 byte = first + (i >> 3) * step;
            if (byte > 126) break;
            const float constant = from.constant[byte];
            if (byte >= 8 && !short_fits(short_of(constant), constant, i & 7))
                atomicOr(&unfit[byte >> 5], 1u << (byte & 31));
        }
    }
    __syncthreads();
    for (u32 byte = first + threadIdx.x * step; byte < 128; byte += blockDim.x * step) {
        const bool fits = usable && byte >= 8 && byte < 127 && !(unfit[byte >> 5] >> (byte & 31) & 1);
        t.by[byte] = fits ? short_of(from.constant[byte]) : Short{__uint_as_float(0x7FC00000), 0.0f};
    }
    if (threadIdx.x == 0 && first == 0) {
        const Scale zero = scale_byte(pre_scale(0.0f, n));
        const float y = quotient(0.0f, element_constant(zero.value, n), zero.byte == 0);
        t.zero = usable && zero.byte < 127 && code_of(0.0f, y) == 0 ? 0 : NO_AMAX;
        t.zero_byte = zero.byte;
        t.usable = usable;
    }
}
