// The scale of least squared error for bfloat16, by a table: the errors of ten scales for one element in sixteen bytes.
//
// Scales from 2M/7 up are left out by definition (docs/methods.md; M is the block's amax). Let L be the last byte below, s its
// scale: M lies in (3.5, 3.95]·s, and L's significand, one of eight, says which table. Candidates are the bytes L, L − 1 …
// L − 9; the next one is below M/8, where clipping M alone costs more than M²/16. Row r of a table stands for the magnitude
// whose bits lie r above the table's base, 5.2 octaves up to the largest M. An entry holds (q·s' − x)² of each candidate:
//     words 0–3       bits 0–12 and 13–25: candidates 0, 1 | 2, 3 | 4, 5 | 6, 7, in units of 2^-13·s², at most 8191
//     bits 26–31      candidate 8 (words 0, 1) and 9 (words 2, 3), twelve bits in units of 2^-12·s², at most 4095
// Row 0 stands for everything smaller too: all codes are 0 there, so all candidates err alike, and no more than it says.
// Three sums a word hold all of this without carries: of the words, of the words shifted by 13, and by 26.
//
// What the sums prove. Sixteen entries are off by at most 8 units of 2^-13·s² (candidates 8, 9: 16), and float32, which the
// objective is computed in, by less than 1 (84u of s² with u = 2^-24; see exact.inc). P of a candidate is its sum, plus 8 for
// candidates 0–7: so the error of the smallest P is at most that P if it is one of these, and any other is at least its P
// less 16. A saturated entry only makes that bound smaller. So the best is clear if
// - the second smallest P is larger by MARGIN or more,
// - the smallest is no larger than what the byte L − 10 and all below cost at least, and below saturation (`limit`), and
// - it is not candidate 8 or 9, whose sums are coarser.
// Otherwise the objective itself decides: among the candidates that can still win, or, if there are others, among all.
#ifndef MARGIN_UNITS
#define MARGIN_UNITS 18
#endif
#include "common.cuh"

constexpr int CANDIDATES = 10, ROW_COUNT = 672;  // M up to 3.95·s, codes 0 below 0.25·s/2.25: 5.16 octaves, and 0.09
constexpr u32 FIRST_LAST = 20, LAST_LAST = 133;  // L within these: all candidates are normal; above 126 some are none
constexpr u32 WIDE_MARGIN = 40;                  // candidates further from the best than this cannot win

struct Tables {
    uint4 entry[8 * ROW_COUNT];
    uint2 info[128];                    // by the significand of the amax
    float multiplier[128], scale[128];  // by byte: what elements are multiplied by, s'
    u32 last[128];                      // L, for amaxes of one octave
};

static_assert(sizeof(Tables) <= TABLE_BYTES, "the launch sets this much shared memory aside");

// --- the objective (backends/reference_search.py) ---

__device__ __forceinline__ float scaled_of(float x, const float* n) { return (x * n[PRESCALE]) * n[PRESCALE_AGAIN]; }

__device__ __forceinline__ float objective(const Block& b, float multiplier, float scale, const float* n) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float x = element(b, i), r = round_signed(x * multiplier).value * scale - scaled_of(x, n);
        total = total + r * r;
    }
    return total;
}

// Half of it is a scale (odd bytes below 16 have none) and reaches the amax with 7: the half is no worse.
__device__ __forceinline__ bool excluded(u32 byte, float most, float unit) {
    return (byte > 15 || byte % 2 == 0) && 7.0f * ((value_of_e4m3(byte) * 0.5f) * unit) >= most;
}

// Any block: up from the byte nearest to M/6 until scales are excluded, then down until clipping M alone costs too much.
__device__ __noinline__ u32 search(const Block& b, const Tables& t, float most, u32 start, const float* n) {
    float best = FLOAT32_MAX;
    u32 best_byte = start, cover = round_e4m3(most / (n[UNIT] * 6.0f)).byte;
    cover = cover < 1 ? 1 : cover;
    for (u32 byte = cover; byte <= 126; ++byte) {
        if (excluded(byte, most, n[UNIT])) {
            if (byte > 15) break;
            continue;
        }
        const float error = objective(b, t.multiplier[byte], t.scale[byte], n);
        best_byte = error < best ? byte : best_byte;
        best = error < best ? error : best;
    }
    for (u32 byte = cover - 1; byte >= 1; --byte) {
        const float d = most - 6.0f * t.scale[byte];
        if (d > 0.0f && d * d * 0.99999f > best) break;
        if (excluded(byte, most, n[UNIT])) continue;
        const float error = objective(b, t.multiplier[byte], t.scale[byte], n);
        best_byte = error <= best ? byte : best_byte;  // the smaller scale of equals
        best = error <= best ? error : best;
    }
    return best_byte;
}

// A block that the table left undecided; `mask`: the candidates that can win, 0 for all scales.
__device__ __noinline__ void exact_block(const Operand& o, const Tables& t, i64 block, u32 mask) {
    const Place at = place_of(o, block);
    const Block b = load_block(source(o, at));
    const float* n = o.numbers;
    u32 magnitudes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) magnitudes[i] = b.w[i] & 0x7FFF7FFF;
    const u32 v = largest(magnitudes);
    const Scale start = round_e4m3(float_of_bf16(v) * n[FOLDED]);
    u32 byte = start.byte;
    if (mask != 0) {
        const u32 last = 8 * (v >> 7) + t.info[v & 127].y;
        float best = FLOAT32_MAX;
        for (int k = CANDIDATES - 1; k >= 0; --k) {
            if (!(mask >> k & 1)) continue;
            const u32 tried = (last - k) & 0xFF;
            const float error = objective(b, t.multiplier[tried], t.scale[tried], n);
            byte = error < best ? tried : byte;
            best = error < best ? error : best;
        }
    } else if (v > 0 && v < 0x7F80 && n[SEARCHED] > 0) {
        byte = search(b, t, scaled_of(float_of_bf16(v), n), start.byte, n);
    }
    o.codes[block] = codes_of(b, byte == 127 ? multiplier_of(start.value, n[INVERSE]) : t.multiplier[byte]);
    o.scales[scale_place(o, at, block)] = (unsigned char)byte;
}

// --- building the table ---

// The amax that an entry of `info` stands for, in an octave where x' is in [8, 16): scales are near 1 there.
__device__ __forceinline__ u32 amax_of(u32 index, float prescale) { return ((257 - (__float_as_uint(prescale) >> 23)) << 7) + index; }

// Last byte that is not excluded.
__device__ __forceinline__ u32 last_of(float most, float unit) {
    u32 byte = (__float_as_uint(most / (3.5f * unit)) >> 20) - 960;
    while (excluded(byte, most, unit)) --byte;
    while (!excluded(byte + 1, most, unit)) ++byte;
    return byte;
}

__device__ __forceinline__ uint4 table_entry(const Tables& t, u32 last, float x, float scaled) {
    u32 error[CANDIDATES];
    const float unit = 8192.0f / (t.scale[last] * t.scale[last]);
#pragma unroll
    for (int k = 0; k < CANDIDATES; ++k) {
        const float d = __fmaf_rn(round_e2m1(x * t.multiplier[last - k]).value, t.scale[last - k], -scaled);
        const float units = (d * d) * (k < 8 ? unit : 0.5f * unit), most = k < 8 ? 8191.0f : 4095.0f;
        error[k] = (u32)__float2int_rn(units < most ? units : most);
    }
    return make_uint4(error[0] | error[1] << 13 | error[8] << 26, error[2] | error[3] << 13 | error[8] >> 6 << 26,
                      error[4] | error[5] << 13 | error[9] << 26, error[6] | error[7] << 13 | error[9] >> 6 << 26);
}

__device__ void build(Tables& t, const float* n) {
    const float unit = n[UNIT], prescale = n[PRESCALE] * n[PRESCALE_AGAIN];
    const bool usable = n[NO_UNDERFLOW] > 0;
    for (u32 i = threadIdx.x; i < 128; i += blockDim.x) {
        t.multiplier[i] = multiplier_of(value_of_e4m3(i), n[INVERSE]);
        t.scale[i] = value_of_e4m3(i) * unit;
        if (usable) t.last[i] = last_of(float_of_bf16(amax_of(i, prescale)) * prescale, unit);
        else t.info[i] = make_uint2(0, 0x8000);  // far below FIRST_LAST
    }
    __syncthreads();
    if (!usable) return;
    const u32 first = amax_of(0, prescale);
    for (u32 i = threadIdx.x; i < 128; i += blockDim.x) {
        const u32 last = t.last[i];
        u32 end = i;  // the largest amax with the same L; an octave on, L is larger by 8
        while (t.last[(end + 1) & 127] + ((end + 1) >> 7) * 8 == last) ++end;
        const float most = float_of_bf16(first + i) * prescale, clipped = most - 6.0f * t.scale[last - CANDIDATES];
        const float cost = clipped * clipped * 0.9999f * (8192.0f / (t.scale[last] * t.scale[last]));
        const u32 limit = (u32)(cost < 8190.0f ? cost : 8190.0f) - 20;
        t.info[i] = make_uint2((last & 7) * ROW_COUNT | (ROW_COUNT - 1 - (end - i)) << 16, ((last - 8 * ((first + i) >> 7)) & 0xFFFF) | limit << 16);
    }
    for (u32 i = threadIdx.x; i < 8 * ROW_COUNT; i += blockDim.x) {
        const u32 which = i / ROW_COUNT, row = i - which * ROW_COUNT;
        // The last amax of this table: the last index with its significand, wherever in the octave that is.
        u32 end = 0;
        while ((t.last[end] & 7) != which || t.last[(end + 1) & 127] + ((end + 1) >> 7) * 8 == t.last[end]) ++end;
        const float x = float_of_bf16(first + end - (ROW_COUNT - 1) + row);
        t.entry[i] = table_entry(t, t.last[end], x, x * prescale);
    }
    __syncthreads();
}

// --- blocks ---

struct Best {
    u32 first, second;
};

__device__ __forceinline__ u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
__device__ __forceinline__ u32 larger(u32 a, u32 b) { return a > b ? a : b; }
__device__ __forceinline__ Best ordered(u32 a, u32 b) { return {smaller(a, b), larger(a, b)}; }
__device__ __forceinline__ Best merged(Best a, Best b) {
    return {smaller(a.first, b.first), smaller(larger(a.first, b.first), smaller(a.second, b.second))};
}

// Eight codes, the first in the low nibble: noise above a code is shifted out, offsets are taken off together.
__device__ __forceinline__ u32 pack(const u32* w, float multiplier) {
    u32 raw[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float y = __uint_as_float(i & 1 ? w[i >> 1] & 0x7FFF0000 : w[i >> 1] << 16 & 0x7FFF0000) * multiplier;
        const float inside = fminf(y, 6.0f);
        const u32 moved = __float_as_uint(__fmaf_rn(step_of(inside), 524288.0f, inside));
        raw[i] = moved + (moved >> 22);
    }
    const u32 low = ((raw[3] * 16 + raw[2]) * 16 + raw[1]) * 16 + raw[0], high = ((raw[7] * 16 + raw[6]) * 16 + raw[5]) * 16 + raw[4];
    return __byte_perm(low - 56778, high - 56778, 0x5410) | signs(w);
}

// Whether the table decides; if it does, codes and scale are written, else `mask` says what is left.
__device__ __forceinline__ bool decide(const Operand& o, const Tables& t, const Block& b, const Place& at, i64 block, bool exists, u32* mask) {
    u32 magnitudes[8], plain[4] = {}, by13[4] = {}, by26[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) magnitudes[i] = b.w[i] & 0x7FFF7FFF;
    const u32 v = largest(magnitudes);
    const uint2 info = t.info[v & 127];
    const u32 last = 8 * (v >> 7) + (u32)(int)(short)info.y;
    const bool inside = last - FIRST_LAST <= LAST_LAST - FIRST_LAST;
    const u32 minus = __byte_perm(inside ? (info.x >> 16) - v : 0x8001u, 0, 0x1010);
    const u32 table = address_of(t.entry) + (info.x & 0xFFFF) * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 rows = halves_above(magnitudes[i], minus);
        const uint4 low = quad_at(__dp2a_lo(rows, 16u, table)), high = quad_at((rows >> 12) + table);  // rows are below 2**12
        const u32 a[4] = {low.x, low.y, low.z, low.w}, c[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            plain[j] += a[j] + c[j];
            by13[j] = (a[j] >> 13) + by13[j];
            by13[j] = (c[j] >> 13) + by13[j];
            by26[j] = (a[j] >> 26) + by26[j];
            by26[j] = (c[j] >> 26) + by26[j];
        }
    }
    u32 p[CANDIDATES];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        p[2 * j] = (plain[j] - (by13[j] << 13)) * 16 + (8 * 16 + 2 * j);
        p[2 * j + 1] = (by13[j] - (by26[j] << 13)) * 16 + (8 * 16 + 2 * j + 1);
    }
    p[8] = (by26[0] + by26[1] * 64) * 32 + 8;
    p[9] = (by26[2] + by26[3] * 64) * 32 + 9;
    if (last > 126) {  // these are no scales
#pragma unroll
        for (int k = 0; k < 7; ++k) p[k] = last - 126 > k ? 0x7FFFFFFF : p[k];
    }
    Best best = merged(merged(ordered(p[0], p[1]), ordered(p[2], p[3])), merged(ordered(p[4], p[5]), ordered(p[6], p[7])));
    best = merged(best, ordered(p[8], p[9]));
    const u32 winner = best.first & 15;
    const bool within = inside && best.first >> 4 < info.y >> 16;
    const bool clear = within && winner < 8 && best.second >= best.first + MARGIN_UNITS * 16;
    if (clear && exists) {
        const u32 byte = last - winner;
        const float multiplier = t.multiplier[byte];
        o.codes[block] = make_uint2(pack(b.w, multiplier), pack(b.w + 4, multiplier));
        o.scales[scale_place(o, at, block)] = (unsigned char)byte;
    } else if (within) {
#pragma unroll
        for (int k = 0; k < CANDIDATES; ++k) *mask |= p[k] < best.first + WIDE_MARGIN * 16 ? 1u << k : 0;
    }
    return clear;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) quantize_optimal(const __grid_constant__ Operand o) {
    Tables& t = *(Tables*)shared_memory;
    u64* queue = (u64*)(shared_memory + TABLE_BYTES / 16);
    for_all_blocks(
        o, queue, [&] { build(t, o.numbers); },
        [&](const Block& b, const Place& at, i64 block, bool exists, u32* mask) { return decide(o, t, b, at, block, exists, mask); },
        [&](i64 block, u32 mask) { exact_block(o, t, block, mask); });
}
