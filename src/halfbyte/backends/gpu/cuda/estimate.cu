// The scale of least squared error for any dtype, by estimates: the errors of a block under nine scales in fused
// float32 arithmetic, and a bound on how far they are off.
//
// search.cuh explains the candidates. Everything is measured in units of s, the scale of L: u = x'/s is at most 3.95,
// and ρ is a candidate's scale. With M the constant whose last place is the grid's step at y = u/ρ,
//
//     M = exponent of (a·y·y + b)·2^19        q = (u/ρ + M) − M        d = q·ρ − u        estimate = Σ d·d
//
// M may change from one step to the next anywhere within 1.75…2.25 and 3.5…4.5, because both steps round alike there.
// Neighbouring scales differ by at most 9/8, so some can share the M of one of them:
//
// - 0, 1, 2 that of 1, and 3, 4, 5 that of 4, with changes at y = 1.98 and 3.96, and at 6.26, which no y reaches
// - 6 and 7 that of 7, with changes at 1.98, 4.48 and 7.24
// - 8 has its own: a = 1 and b = 12.5. The amax reaches 7 under it, so q is cut off at 6.
//
// tests/backends/gpu/test_estimate.py tries all significands. Where codes wrap beyond 6, the amax becomes 0 under 8.
// That costs more than 12s², and candidate 0 never more than 4s²: 8 cannot win.
//
// How far an estimate e is off, in units of s², with ε = 2^-24:
//
// - u is off by 2^-21 of itself (a reciprocal, two products), ρ by 4ε of itself, so d by 3.95·2^-21 + 24ε + ε < 3.4e-6.
//   Over sixteen elements Σ|d| <= 4·√e: that is 2.8e-5·√e.
// - The contract's y and u/ρ differ by less than 2^-19 of themselves (`describes` allows 2^-21). Near a tie they may
//   round to different sides, which changes d·d by less than 5.4e-5 of itself.
// - The objective rounds q·s', the difference, the square and the sum: 3e-6·√e + 1.1e-6·e. The estimate rounds its sum,
//   and four bits of it hold the candidate's number: 2.1e-6·e.
//
// Together that is less than 6e-5·e + 3.1e-5·√e, and √e <= 2e + 1/8. So two estimates are off by less than 2.5e-4·e +
// 8e-6, e the larger. The best candidate is known if the second smallest estimate exceeds it by MARGIN of itself plus
// LEAST, and the next smaller scales cost more by clipping the amax. Otherwise the
// objective itself decides, among the candidates that can still win.
//
// For float16, halves.cuh estimates in float16, in units of its own and with a margin of its own.
#ifndef MARGIN_UNITS
#define MARGIN_UNITS 8
#endif
#include "halves.cuh"
#include "search.cuh"

constexpr float MARGIN = DTYPE == FP16 ? HALF_MARGIN : MARGIN_UNITS * 0.00006103515625f,
                LEAST = DTYPE == FP16 ? HALF_LEAST : MARGIN_UNITS * 0.0000019073486328125f;  // 2^-14, 2^-19
constexpr float LARGE = 1e30f;

struct Ratio {
    float scale, inverse, square, unused;  // ρ, 1/ρ, a·2^19/ρ²
};

struct Tables {
    union {
        Ratio ratio[8][CANDIDATES + 1];  // index: significand of L
        HalfRatio halves[8][CANDIDATES + 1];
    };
    Bytes bytes;
};

static_assert(sizeof(Tables) <= SHARED_BYTES, "the launch sets this much aside");

// a and b for the candidate in the middle of a group.
__device__ __forceinline__ float shared_step(int k) { return k < 6 ? 1.36041f : k < 8 ? 0.99074f : 1.0f; }
__device__ __forceinline__ float shared_offset(int k) { return k < 6 ? 10.66665f : k < 8 ? 12.1159f : 12.5f; }

__device__ __forceinline__ void fill_tables(Tables& t, const float* n) {
    for (u32 i = threadIdx.x; i < 8 * (CANDIDATES + 1); i += blockDim.x) {
        const u32 significand = i / (CANDIDATES + 1), k = i - significand * (CANDIDATES + 1), last = 64 + significand;
        if (DTYPE == FP16) {
            t.halves[significand][k] = half_ratio(value_of_e4m3(last - k) * 0.5f * n[UNIT], shared_step(k));
            continue;
        }
        const float scale = value_of_e4m3(last - k) / value_of_e4m3(last);
        t.ratio[significand][k] = {scale, 1.0f / scale, shared_step(k) * 524288.0f / (scale * scale), 0.0f};
    }
    const bool usable = fill_constants(t.bytes, n);
    fill_shorts(t.bytes, t.bytes, n, usable, 0, 1);
    __syncthreads();
}

// --- blocks ---

// Estimates of candidates FIRST_ONE to FIRST_ONE + COUNT − 1, which share the M of candidate MIDDLE.
template <int FIRST_ONE, int COUNT, int MIDDLE>
__device__ __forceinline__ void estimate(const float* u, const float* squares, const Ratio* ratio, float* errors) {
    float scale[COUNT], inverse[COUNT], total[COUNT];
    const float square = ratio[MIDDLE].square, offset = shared_offset(MIDDLE) * 524288.0f;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        scale[k] = ratio[FIRST_ONE + k].scale;
        inverse[k] = ratio[FIRST_ONE + k].inverse;
        total[k] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float magic = __uint_as_float(__float_as_uint(__fmaf_rn(squares[i], square, offset)) & 0x7F800000);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            float q = __fmaf_rn(u[i], inverse[k], magic) - magic;
            if (FIRST_ONE == 8) q = fminf(q, 6.0f);
            const float d = __fmaf_rn(q, scale[k], -u[i]);
            total[k] = __fmaf_rn(d, d, total[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < COUNT; ++k) errors[FIRST_ONE + k] = total[k];
}

// What all blocks of a tensor share.
struct Tensor {
    float unit, prescale, inverse;  // prescale: 2**-k; inverse: 1/(3.5·unit), a little too small
    bool zeros, usable;
    u32 zero_byte;
};

__device__ __forceinline__ Tensor tensor_of(const Tables& t, const float* n) {
    return {
        n[UNIT],          n[PRESCALE] * n[PRESCALE_AGAIN], 0.2857141f / n[UNIT], t.bytes.zero == 0, t.bytes.usable != 0,
        t.bytes.zero_byte};
}

// Estimates of all candidates, in units of s². The result: by how much the next smaller scale clips the amax.
__device__ __forceinline__ float measure(const Block& b, const Ratio* ratio, float most, u32 last, const Tensor& n,
                                         float* e) {
    const float per_scale = about_reciprocal(__uint_as_float((last + 960) << 20) * n.unit);
    const float to_units = n.prescale * per_scale;
    float u[16], squares[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        u[i] = fabsf(element_of(b.w, i)) * to_units;
        squares[i] = u[i] * u[i];
    }
    estimate<0, 3, 1>(u, squares, ratio, e);
    estimate<3, 3, 4>(u, squares, ratio, e);
    estimate<6, 2, 7>(u, squares, ratio, e);
    estimate<8, 1, 8>(u, squares, ratio, e);
    return most * per_scale - 6.0f * ratio[9].scale;
}

// The power of two that brings x to where the scale L is in [1, 4).
__device__ __forceinline__ float power_of(u32 last, const Tensor& n) {
    return n.prescale * __uint_as_float((134 - (last >> 3)) << 23);
}

// The same as `measure` for float16, in units of the square of that power. It is at least 2^-14, a float16 number.
__device__ __forceinline__ float measure_halves(const Block& b, const HalfRatio* ratio, float v, float power,
                                                float* e) {
    u32 minus[8], squares[8];
    const u32 times = halves_of(power <= 32768.0f ? power : power * 0.000030517578125f);
#pragma unroll
    for (int i = 0; i < 8; ++i) minus[i] = times_halves(b.w[i] | 0x80008000, times);
    if (power > 32768.0f) {
#pragma unroll
        for (int i = 0; i < 8; ++i) minus[i] = times_halves(minus[i], 0x78007800);  // 2^15
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) squares[i] = times_halves(minus[i], minus[i]);
    estimate_halves<0, 3, 1>(minus, squares, ratio, shared_offset(1), e);
    estimate_halves<3, 3, 4>(minus, squares, ratio, shared_offset(4), e);
    estimate_halves<6, 2, 7>(minus, squares, ratio, shared_offset(7), e);
    estimate_halves<8, 1, 8>(minus, squares, ratio, shared_offset(8), e);
    return v * power - 6.0f * (float_of_fp16(ratio[9].high & 0xFFFF) + float_of_fp16(ratio[9].low & 0xFFFF));
}

struct Best {
    float first, second;
};

__device__ __forceinline__ Best merged(Best a, Best b) {
    return {fminf(a.first, b.first), fminf(fmaxf(a.first, b.first), fminf(a.second, b.second))};
}

// Returns whether the estimates decide. If so, it writes codes and scale; otherwise `mask` tells what can still win.
__device__ __forceinline__ bool decide(const Operand& o, const Tables& t, const Tensor& n, const Block& b,
                                       const Place& at, i64 block, bool exists, u32* mask) {
    const float v = largest_value(b.w), most = v * n.prescale;
    u32 last = (__float_as_uint(most * n.inverse) >> 20) - 960;
    last += 7.0f * ((__uint_as_float((last + 961) << 20) * 0.5f) * n.unit) < most ? 1 : 0;  // it is `last` or the next
    const bool inside = n.usable && last - FIRST_LAST <= LAST_LAST - FIRST_LAST, zero = n.zeros && v == 0.0f;
    float e[CANDIDATES];
    const float clipped = DTYPE == FP16 ? measure_halves(b, t.halves[last & 7], v, power_of(last, n), e)
                                        : measure(b, t.ratio[last & 7], most, last, n, e);
    if (WRAPS) e[8] = LARGE;
#pragma unroll
    for (int k = 0; k < CANDIDATES; ++k) e[k] = __uint_as_float((__float_as_uint(e[k]) & ~15u) | k);
    if (__builtin_expect(last > 126 && inside, 0)) {  // bytes above 126 are no scales
#pragma unroll
        for (int k = 0; k < 7; ++k) e[k] = last - 126 > k ? LARGE : e[k];
    }
    Best best = {e[8], LARGE};
#pragma unroll
    for (int k = 0; k < 8; k += 2) best = merged(best, {fminf(e[k], e[k + 1]), fmaxf(e[k], e[k + 1])});
    const u32 winner = __float_as_uint(best.first) & 15;
    const float reach = __fmaf_rn(best.first, 1.0f + 1.125f * MARGIN, 2.0f * LEAST);
    const bool within = reach < clipped * clipped * 0.999f;
    const u32 byte = zero ? n.zero_byte : last - winner;
    const Short by = zero ? Short{0.0f, 0.0f} : t.bytes.by[byte & 127];
    const bool below = v * by.high < short_end();
    const bool decided = best.first < __fmaf_rn(best.second, 1.0f - MARGIN, -LEAST) && below;
    const bool clear = zero || (inside && within && decided);
    if (clear && exists) {
        o.codes[block] = make_uint2(short_codes(b.w, by), short_codes(b.w + WORDS / 2, by));
        o.scales[scale_place(o, at, block)] = (unsigned char)byte;
    } else if (inside && best.first < LARGE) {
        *mask = (within ? 0 : SMALLER) | last << LAST_AT;
#pragma unroll
        for (int k = 0; k < CANDIDATES; ++k) *mask |= e[k] <= reach ? 1u << k : 0;
        if (WRAPS && !below) *mask |= 2 * SMALLER - 1;
    }
    return clear;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) quantize_estimate(const __grid_constant__ Operand o) {
    Tables& t = *(Tables*)shared_memory;
    Undecided queues((u64*)(shared_memory + SHARED_BYTES / 16));
    for_all_segments(o, [&](const Segment& s) {
        const auto pair = [&](i64 block, u32 mask) {
            if (!exact_pair(o, s, t.bytes, block, mask)) exact_block(o, s, t.bytes, block, mask);
        };
        const auto exact = [&](i64 block, u32 mask) { exact_block(o, s, t.bytes, block, mask); };
        for_all_blocks(
            o, s, queues.others.lane,
            [&] {
                fill_tables(t, s.numbers);
                return tensor_of(t, s.numbers);
            },
            [&](const Tensor& n, const Block& b, const Place& at, i64 block, bool exists, u32* mask) {
                return decide(o, t, n, b, at, block, exists, mask);
            },
            [&](bool unclear, i64 block, u32 mask) { queues.offer(unclear, block, mask, pair, exact); });
        queues.finish(pair, exact);
    });
}
