// 4over6 of bfloat16 by a table: which of two scales errs less, and the codes under both, in one word an element.
//
// A bfloat16 has 7 bits of significand, scaling by a power of two is exact, and both scales S6 and S4 of a block follow from
// its amax v. So within an octave of v there are at most 17 pairs (S6, S4), eight steps of each; near the top S4 saturates at
// 448, which makes a few more. For a pair, row r of its table stands for the magnitude whose bits lie r above the pair's
// base, 4.8 octaves from below S6/4 up to the amax. An entry holds
//     bits 0–3, 4–7   the codes under S6 and S4
//     bits 8–31       e4 − e6 in units of 2^-18·s6 (squares: s6²), rounded; e = |d| or d², s6 = S6 as it is decoded
// Row 0 stands for everything smaller: both codes 0, both errors x, difference 0. The sum of sixteen entries tells the better
// scale unless it is near zero; then, and for blocks outside the table's octaves, the contract's own arithmetic decides.
//
// How near (u = 2^-24, everything in units of s6 or s6²; M <= 6.41 is the amax, 6·(1 + 1/16) rounded up, |d| <= 1.3):
// - the contract rounds q·s twice (values up to 1.1·M: 2.2·u·M = 14.2u), the difference, and each of sixteen sums. A sum of
//   magnitudes is off by at most 16·14.2u + 17u·Σ|d| <= 590u; a sum of squares by 2·14.2u·Σ|d| + 19u·Σd² <= 1110u. Two sums: 2220u
//   = 35 units of 2^-18.
// - an entry rounds s6 and s4 once or twice (another 14.2u each, 28.4u or, squared, 2.6·28.4u = 74u <= 1.2 units), e4 − e6 and
//   its unit a few times (below 0.1 units) and itself to 0.5 units: sixteen are off by less than 29 units.
// - the codes below carry at most 16·0x77/256 < 8 units into the sum.
// 35 + 29 + 8 = 72 < MARGIN_UNITS. Nothing under- or overflows: `lowest` and `highest` see to that.
#ifndef MARGIN_UNITS
#define MARGIN_UNITS 96
#endif
#include "common.cuh"

constexpr int ROW_COUNT = 616;  // ratios up to 6.41/0.25 = 25.7: 4.69 octaves of 128, and 0.09 because bits are no logarithm
constexpr int PAIRS = 26;       // 26·616·4 bytes are within 16 bits
constexpr int MARGIN = MARGIN_UNITS * 256;

enum Kind { BY_AMAX = 0, BY_RECIPROCAL = 1, SCALED = 2 };

struct Pair {
    Scale six, four;
};

struct Tables {
    u32 entry[PAIRS * ROW_COUNT];
    uint2 info[256];  // by the significand of the amax; from 128 on by its distance from `saturated`
    float4 pair[PAIRS];
    u32 last[PAIRS];  // the largest amax of a pair, among those that `info` stands for
    u32 starts[8];    // a bit for every entry of `info` that begins a pair
    u32 lowest, highest, saturated, beyond;  // amaxes (bfloat16 bits)
};

static_assert(sizeof(Tables) <= TABLE_BYTES, "the launch sets this much shared memory aside");

// --- the contract ---

__device__ __forceinline__ float pre_scale(u32 v, float factor) { return (float_of_bf16(v) / 6.0f) * factor; }

__device__ __forceinline__ Pair pair_of(u32 v, float factor) {
    const float base = pre_scale(v, factor);
    return {round_e4m3(base), round_e4m3(base * 1.5f)};
}

__device__ __forceinline__ float difference(float q, float scale, float x, const float* n) {
    if (KIND == BY_AMAX) return ((q * scale) * n[AMAX]) / TOP - x;
    if (KIND == BY_RECIPROCAL) return (q * scale) * n[INVERSE] - x;
    return q * scale - x * n[FACTOR];
}

__device__ __forceinline__ float error_of(const Block& b, float scale, float multiplier, const float* n) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float x = element(b, i), d = difference(round_signed(x * multiplier).value, scale, x, n);
        total = total + (SQUARED ? d * d : fabsf(d));
    }
    return total;
}

// A block by the contract's own formulas, whatever it holds. Not inlined: the others keep their registers.
__device__ __noinline__ void exact_block(const Operand& o, i64 block) {
    const Place at = place_of(o, block);
    const Block b = load_block(source(o, at));
    u32 magnitudes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) magnitudes[i] = b.w[i] & 0x7FFF7FFF;
    const Pair p = pair_of(largest(magnitudes), o.numbers[FACTOR]);
    const float by_six = multiplier_of(p.six.value, o.numbers[INVERSE]), by_four = multiplier_of(p.four.value, o.numbers[INVERSE]);
    const bool four = error_of(b, p.four.value, by_four, o.numbers) < error_of(b, p.six.value, by_six, o.numbers);
    o.codes[block] = codes_of(b, four ? by_four : by_six);
    o.scales[scale_place(o, at, block)] = (unsigned char)(four ? p.four.byte : p.six.byte);
}

// --- building the table ---

// The amax that an entry of `info` stands for; any octave would do for the first 128, and in this one scales are near 1.
__device__ __forceinline__ u32 amax_of(const Tables& t, u32 index, float factor) {
    if (index >= 128) return t.saturated + index - 128;
    return (__float_as_uint(12.0f / factor) >> 23 << 7) + index;
}

// The smallest amax whose base reaches a limit, by trying the numbers around it.
__device__ __forceinline__ void find_amax(u32* found, float limit, float factor) {
    const u32 guess = __float_as_uint(limit * 6.0f / factor) >> 16;
    for (u32 i = threadIdx.x; i < 8; i += blockDim.x)
        if (pre_scale(guess - 4 + i, factor) >= limit) atomicMin(found, guess - 4 + i);
}

__device__ __forceinline__ u32 table_entry(const float4& pair, u32 bits, const float* n) {
    const float x = float_of_bf16(bits);
    const Element six = round_e2m1(x * pair.z), four = round_e2m1(x * pair.w);
    if (pair.x == pair.y) return 1024u << 8 | six.code | four.code << 4;  // a tie keeps 6
    const float unit = KIND == SCALED ? 1.0f : KIND == BY_AMAX ? n[AMAX] / TOP : n[INVERSE];
    const float scaled = KIND == SCALED ? x * n[FACTOR] : x, s6 = pair.x * unit, s4 = pair.y * unit;
    const float d6 = fabsf(__fmaf_rn(six.value, s6, -scaled)), d4 = fabsf(__fmaf_rn(four.value, s4, -scaled));
    const float more = SQUARED ? (d4 - d6) * (d4 + d6) / (s6 * s6) : (d4 - d6) / s6;
    return (u32)__float2int_rn(more * 262144.0f) << 8 | six.code | four.code << 4;
}

__device__ void build(Tables& t, const float* n) {
    const float factor = n[FACTOR], inverse = n[INVERSE];
    if (threadIdx.x == 0) t.lowest = t.saturated = t.beyond = 0x7F80;
    for (u32 i = threadIdx.x; i < 8; i += blockDim.x) t.starts[i] = 0;
    __syncthreads();
    find_amax(&t.saturated, 464.0f / 1.5f, factor);  // from here on S4 is 448; 480 would be next
    find_amax(&t.beyond, 464.0f, factor);            // from here on S6 is too small for its block
    find_amax(&t.lowest, 0.015625f, factor);         // below, scales are subnormal
    __syncthreads();
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) {
        const u32 v = amax_of(t, i, factor);
        const Pair p = pair_of(v, factor), before = pair_of(v - 1, factor);
        const bool changes = p.six.byte != before.six.byte || p.four.byte != before.four.byte;
        if (i % 128 == 0 || v == t.beyond || changes) atomicOr(&t.starts[i >> 5], 1u << (i & 31));
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) {
        u32 number = __popc(t.starts[i >> 5] & (0xFFFFFFFF >> (31 - (i & 31)))) - 1;
        for (u32 j = 0; j < i >> 5; ++j) number += __popc(t.starts[j]);
        u32 last = i;
        while (last < 255 && !(t.starts[(last + 1) >> 5] >> ((last + 1) & 31) & 1)) ++last;
        const u32 v = amax_of(t, i, factor);
        const Pair p = pair_of(v, factor);
        const u32 row = ROW_COUNT - 1 - (last - i), octave = 8 * (v >> 7);
        t.info[i] = make_uint2(number * (ROW_COUNT * 4) | row << 16, ((p.six.byte - octave) & 0xFFFF) | (p.four.byte - octave) << 16);
        if (last == i && number < PAIRS) {
            t.pair[number] = make_float4(p.six.value, p.four.value, multiplier_of(p.six.value, inverse), multiplier_of(p.four.value, inverse));
            t.last[number] = v;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 count = 0;
        for (u32 j = 0; j < 8; ++j) count += __popc(t.starts[j]);
        // Within 2**±50 no square leaves the normal numbers.
        const u32 floor = 77 << 7, ceiling = 177 << 7;
        t.lowest = t.lowest < floor ? floor : t.lowest;
        t.highest = t.beyond - 1 < ceiling ? t.beyond - 1 : ceiling;
        if (!(n[NO_UNDERFLOW] > 0) || count > PAIRS || t.lowest > t.highest) t.lowest = t.highest = 0x7FFF;
        t.highest -= t.lowest;
    }
    u32 used = 0;
    for (u32 j = 0; j < 8; ++j) used += __popc(t.starts[j]);
    for (u32 i = threadIdx.x; i < (used < PAIRS ? used : PAIRS) * ROW_COUNT; i += blockDim.x) {
        const u32 number = i / ROW_COUNT, row = i - number * ROW_COUNT;
        const float4 pair = t.pair[number];
        t.entry[i] = row == 0 ? (pair.x == pair.y ? 1024u << 8 : 0) : table_entry(pair, t.last[number] - (ROW_COUNT - 1) + row, n);
    }
    __syncthreads();
}

// --- blocks ---

// Whether the table decides; if it does, codes and scale are written.
__device__ __forceinline__ bool decide(const Operand& o, const Tables& t, const Block& b, const Place& at, i64 block, bool exists) {
    u32 magnitudes[8], entries[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) magnitudes[i] = b.w[i] & 0x7FFF7FFF;
    const u32 v = largest(magnitudes);
    const bool inside = v - t.lowest <= t.highest;
    const u32 index = v >= t.saturated ? v - t.saturated + 128 : v & 127;
    const uint2 info = t.info[index & 255];
    const u32 table = address_of(t.entry) + (info.x & 0xFFFF);
    const u32 minus_base = inside ? (info.x >> 16) - v : 0x8001u;
    const u32 minus = __byte_perm(minus_base, 0, 0x1010);
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 rows = halves_above(magnitudes[i], minus);
        entries[2 * i] = word_at(__dp2a_lo(rows, 4u, table));
        entries[2 * i + 1] = word_at((rows >> 14) + table);  // rows are below 2**14
        sum += entries[2 * i] + entries[2 * i + 1];
    }
    const bool four = (int)sum < 0;
    const u32 down = four ? 4 : 0;
    u32 out[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32* e = entries + 8 * i;
        const u32 even = __byte_perm(__byte_perm(e[0], e[2], 0x0040), __byte_perm(e[4], e[6], 0x0040), 0x5410);
        const u32 odd = __byte_perm(__byte_perm(e[1], e[3], 0x0040), __byte_perm(e[5], e[7], 0x0040), 0x5410);
        out[i] = ((even >> down) & 0x0F0F0F0F) | ((odd << (4 - down)) & 0xF0F0F0F0) | signs(b.w + 4 * i);
    }
    const bool clear = inside && sum + MARGIN > 2u * MARGIN;
    if (clear && exists) {
        o.codes[block] = make_uint2(out[0], out[1]);
        o.scales[scale_place(o, at, block)] = (unsigned char)(8 * (v >> 7) + (four ? info.y >> 16 : info.y));
    }
    return clear;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) quantize_four_six(const __grid_constant__ Operand o) {
    Tables& t = *(Tables*)shared_memory;
    u64* queue = (u64*)(shared_memory + TABLE_BYTES / 16);
    for_all_blocks(
        o, queue, [&] { build(t, o.numbers); },
        [&](const Block& b, const Place& at, i64 block, bool exists, u32*) { return decide(o, t, b, at, block, exists); },
        [&](i64 block, u32) { exact_block(o, block); });
}
