// The scale of least squared error for bfloat16, by a table. An entry holds the errors of one element under nine scales
// in sixteen bytes.
//
// search.cuh explains the candidates. The significand of L, one of eight, selects the table. Row r of a table stands
// for the magnitude whose bits are the table's base + r. The rows cover 5.1 octaves up to the largest M. An entry holds
// (q·s' − x)² of each candidate, by the contract's own q, rounded and at most s²:
//
// - words 0, 1 and 2: candidates 0 and 1, 2 and 5, 6 and 7, with sixteen bits each, in units of 2^-16·s²
// - word 3: candidates 3 and 4, which are rarely the best, with eleven bits each, in units of 2^-11·s²; candidate 8
//   with ten bits, in units of 2^-10·s²
//
// Row 0 also stands for everything smaller. There all codes are 0, so all candidates have the same error, and it is at
// most that of row 0. The sums of the words and of the shifted words give the sums of all fields without carries.
//
// What the sums prove, in units of 2^-16·s²: sixteen entries are off by at most 8.3, for candidates 3 and 4 by 256.3,
// for candidate 8 by 512.3. The objective, in float32, is off by 84u of s² with u = 2^-24 (nvfp4_exact.inc), which is
// 0.4. P of a candidate is its sum minus 8, 256 or 512, plus 512. The candidate's error is at least P − 512.3, even
// with saturated entries. It is at most P − 495.7, or P + 512.3 for the coarse candidates 3, 4 and 8. So the best
// candidate is known if
//
// - the second smallest P is larger by MARGIN_UNITS (COARSE_MARGIN) or more,
// - the smallest P is below the least cost of the byte L − 9 and all smaller ones, and no entry is saturated (`limit`),
//   and
// - where codes wrap beyond 6, no element reaches 7 under it, which the amax may do under candidates 7 and 8.
//
// Otherwise the objective itself decides, among the candidates that can still win; or among all scales, if others may
// win.
#ifndef MARGIN_UNITS
#define MARGIN_UNITS 18
#endif
#include "search.cuh"

#ifndef SHORT_BLOCKS
#define SHORT_BLOCKS 16  // of the building kernel
#endif

constexpr int ROW_COUNT = 656;  // M is at most 3.95·s, codes are 0 below 0.25·s/2: 4.99 octaves, plus 0.09
constexpr u32 COARSE_MARGIN = 1026, SATURATED = 65000, ROW_BLOCKS = BUILD_BLOCKS - SHORT_BLOCKS;

// The part of a table beside its rows.
struct Head {
    uint2 info[128];  // index: significand of the amax
    Bytes bytes;
};

struct Tables {
    uint4 entry[8 * ROW_COUNT];
    Head head;
};

// Shared memory holds COPIES copies of each row side by side, one for even lanes and one for odd lanes. Of eight lanes
// that read at once, four then share the four bank groups of their copy, instead of all eight lanes sharing eight
// groups. So fewer wait for each other.
constexpr int HEAD_AT = 8 * ROW_COUNT * COPIES;

static_assert(sizeof(Tables) <= TABLE_BYTES && HEAD_AT * 16 + sizeof(Head) <= SHARED_BYTES,
              "the launch sets this much aside");

__device__ __forceinline__ void copy_rows(const Tables* tables) {
    wait_for_kernel_before();
    const uint4 *rows = tables->entry, *head = (const uint4*)&tables->head;
#pragma unroll 6
    for (u32 i = threadIdx.x; i < 8 * ROW_COUNT; i += blockDim.x) {
        const uint4 row = rows[i];
#pragma unroll
        for (int copy = 0; copy < COPIES; ++copy) shared_memory[COPIES * i + copy] = row;
    }
    for (u32 i = threadIdx.x; i < (sizeof(Head) + 15) / 16; i += blockDim.x) shared_memory[HEAD_AT + i] = head[i];
    __syncthreads();
}

// --- building the table: thread blocks find the bytes of one octave and write some rows; the last ones write what
// depends on bytes ---

struct Octave {
    u32 last[128];  // L of each amax in one octave
    u32 end[8];     // for each significand of L, the index of the last amax with it
    Bytes bytes;
};

// The amax of an entry of `info`, in the octave where x' is in [8, 16). Scales are near 1 there.
__device__ __forceinline__ u32 amax_of(u32 index, float prescale) {
    return ((257 - (__float_as_uint(prescale) >> 23)) << 7) + index;
}

// One octave further up, L is larger by 8.
__device__ __forceinline__ u32 last_at(const Octave& g, u32 index) { return g.last[index & 127] + (index >> 7) * 8; }

__device__ __forceinline__ uint2 info_of(const Octave& g, u32 index, u32 amax, float prescale) {
    const u32 last = g.last[index];
    u32 end = index;
    while (last_at(g, end + 1) == last) ++end;
    const float clipped = float_of_bf16(amax) * prescale - 6.0f * g.bytes.scale[last - CANDIDATES];
    const float cost = clipped * clipped * 0.9999f * (65536.0f / (g.bytes.scale[last] * g.bytes.scale[last]));
    const u32 limit = (u32)(cost < (float)SATURATED ? cost : (float)SATURATED) + 500;
    const u32 row = ROW_COUNT - 1 - (end - index);
    return make_uint2((last & 7) * ROW_COUNT | row << 16, ((last - 8 * (amax >> 7)) & 0xFFFF) | limit << 16);
}

__device__ __forceinline__ bool is_coarse(int k) { return k == 3 || k == 4 || k == 8; }

__device__ __forceinline__ uint4 table_entry(const Octave& g, u32 last, float x, float scaled) {
    u32 error[CANDIDATES];
    const float unit = 1.0f / (g.bytes.scale[last] * g.bytes.scale[last]);
#pragma unroll
    for (int k = 0; k < CANDIDATES; ++k) {
        const u32 code = code_of(x, quotient(x, g.bytes.constant[last - k], false));
        const float d = __fmaf_rn(value_of_code(code), g.bytes.scale[last - k], -scaled);
        const float steps = k == 8 ? 1024.0f : is_coarse(k) ? 2048.0f : 65536.0f, units = (d * d) * unit * steps;
        error[k] = (u32)__float2int_rn(units < steps - 1.0f ? units : steps - 1.0f);
    }
    return make_uint4(error[0] | error[1] << 16, error[2] | error[5] << 16, error[6] | error[7] << 16,
                      error[3] | error[4] << 11 | error[8] << 22);
}

extern "C" __global__ void __launch_bounds__(BUILD_THREADS) build_optimal(const float* numbers, uint4* tables) {
    const float* n = numbers + blockIdx.y * NUMBERS;
    Tables* t = (Tables*)(tables + blockIdx.y * (TABLE_BYTES / 16));
    __shared__ Octave g;
    let_next_kernel_begin();
    const float unit = n[UNIT], prescale = n[PRESCALE] * n[PRESCALE_AGAIN];
    const bool usable = fill_constants(g.bytes, n), writes = blockIdx.x == 0;
    if (blockIdx.x >= ROW_BLOCKS) {
        fill_shorts(t->head.bytes, g.bytes, n, usable, blockIdx.x - ROW_BLOCKS, gridDim.x - ROW_BLOCKS);
        return;
    }
    for (u32 i = threadIdx.x; i < 128; i += blockDim.x) {
        if (usable) g.last[i] = last_of(float_of_bf16(amax_of(i, prescale)) * prescale, unit);
        if (!writes) continue;
        t->head.bytes.constant[i] = g.bytes.constant[i];
        t->head.bytes.scale[i] = g.bytes.scale[i];
        if (!usable) t->head.info[i] = make_uint2(0, 0x8000);  // far below FIRST_LAST
    }
    if (!usable) return;
    __syncthreads();
    const u32 first = amax_of(0, prescale);
    for (u32 i = threadIdx.x; i < 128; i += blockDim.x) {
        if (last_at(g, i + 1) != g.last[i]) g.end[g.last[i] & 7] = i;
        if (writes) t->head.info[i] = info_of(g, i, first + i, prescale);
    }
    __syncthreads();
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < 8 * ROW_COUNT; i += ROW_BLOCKS * blockDim.x) {
        const u32 which = i / ROW_COUNT, end = g.end[which];
        const float x = float_of_bf16(first + end - (ROW_COUNT - 1) + (i - which * ROW_COUNT));
        t->entry[i] = table_entry(g, g.last[end], x, x * prescale);
    }
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

// 16·P of every candidate, plus its number. The coarse candidates' numbers are larger by 8.
__device__ __forceinline__ void measure(const u32* magnitudes, u32 minus, u32 table, u32* p) {
    u32 plain[4] = {}, upper[4] = {}, top = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 rows = halves_above(magnitudes[i], minus);
        const uint4 low = quad_at(__dp2a_lo(rows, 16u * COPIES, table));
        const uint4 high = quad_at((rows >> (COPIES == 2 ? 11 : 12)) + table);  // rows are below 2**11
        const u32 a[4] = {low.x, low.y, low.z, low.w}, c[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            plain[j] += a[j] + c[j];
            upper[j] = (a[j] >> (j < 3 ? 16 : 11)) + upper[j];
            upper[j] = (c[j] >> (j < 3 ? 16 : 11)) + upper[j];
        }
        top = (a[3] >> 22) + top;
        top = (c[3] >> 22) + top;
    }
#pragma unroll
    for (int j = 0; j < 3; ++j) {
        const int k = j == 2 ? 6 : 2 * j, l = j == 0 ? 1 : j == 1 ? 5 : 7;
        p[k] = (plain[j] - (upper[j] << 16)) * 16 + (504 * 16 + k);
        p[l] = upper[j] * 16 + (504 * 16 + l);
    }
    p[3] = (plain[3] - (upper[3] << 11)) * (32 * 16) + (256 * 16 + 8 + 3);
    p[4] = (upper[3] - (top << 11)) * (32 * 16) + (256 * 16 + 8 + 4);
    p[8] = top * (64 * 16) + 8;
}

struct Zero {
    u32 amax, byte;
};

// Returns whether the table decides. If so, it writes codes and scale; otherwise `mask` tells what can still win.
__device__ __forceinline__ bool decide(const Operand& o, const Head& t, Zero blank, const Block& b, const Place& at,
                                       i64 block, bool exists, u32* mask) {
    u32 magnitudes[8], p[CANDIDATES];
#pragma unroll
    for (int i = 0; i < 8; ++i) magnitudes[i] = b.w[i] & 0x7FFF7FFF;
    const u32 v = largest(magnitudes);
    const uint2 info = t.info[v & 127];
    const u32 last = 8 * (v >> 7) + (u32)(int)(short)info.y;
    const bool inside = last - FIRST_LAST <= LAST_LAST - FIRST_LAST, zero = v == blank.amax;
    const u32 minus = __byte_perm(inside ? (info.x >> 16) - v : 0x8001u, 0, 0x1010);
    measure(magnitudes, minus, address_of(shared_memory + threadIdx.x % COPIES) + (info.x & 0xFFFF) * (16 * COPIES), p);
    if (__builtin_expect(last > 126 && inside, 0)) {  // bytes above 126 are no scales
#pragma unroll
        for (int k = 0; k < 7; ++k) p[k] = last - 126 > k ? 0x7FFFFFFF : p[k];
    }
    Best best =
        merged(merged(ordered(p[0], p[1]), ordered(p[2], p[3])), merged(ordered(p[4], p[5]), ordered(p[6], p[7])));
    best = merged(best, {p[8], 0x7FFFFFFF});
    const u32 winner = best.first & 15, reach = best.first + (winner & 8 ? COARSE_MARGIN : MARGIN_UNITS) * 16;
    const bool within = reach >> 4 < info.y >> 16;
    const u32 byte = zero ? blank.byte : last - (winner == 8 ? 8 : winner & 7);
    const Short by = zero ? Short{0.0f, 0.0f} : t.bytes.by[byte & 127];
    const bool clear = zero || (inside && within && best.second >= reach && float_of_bf16(v) * by.high < short_end());
    if (clear && exists) {
        o.codes[block] = make_uint2(short_codes(b.w, by), short_codes(b.w + 4, by));
        o.scales[scale_place(o, at, block)] = (unsigned char)byte;
    } else if (inside && reach >> 4 < SATURATED + 500) {
        *mask = (within ? 0 : SMALLER) | last << LAST_AT;
#pragma unroll
        for (int k = 0; k < CANDIDATES; ++k) *mask |= p[k] < reach + 16 ? 1u << k : 0;
    }
    return clear;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) quantize_optimal(const __grid_constant__ Operand o) {
    const Head& t = *(const Head*)(shared_memory + HEAD_AT);
    Undecided queues((u64*)(shared_memory + SHARED_BYTES / 16));
    for_all_segments(o, [&](const Segment& s) {
        const auto pair = [&](i64 block, u32 mask) {
            if (!exact_pair(o, s, t.bytes, block, mask)) exact_block(o, s, t.bytes, block, mask);
        };
        const auto exact = [&](i64 block, u32 mask) { exact_block(o, s, t.bytes, block, mask); };
        for_all_blocks(
            o, s, queues.others.lane,
            [&] {
                copy_rows((const Tables*)s.tables);
                return Zero{t.bytes.zero, t.bytes.zero_byte};
            },
            [&](Zero zero, const Block& b, const Place& at, i64 block, bool exists, u32* mask) {
                return decide(o, t, zero, b, at, block, exists, mask);
            },
            [&](bool unclear, i64 block, u32 mask) { queues.offer(unclear, block, mask, pair, exact); });
        queues.finish(pair, exact);
    });
}
