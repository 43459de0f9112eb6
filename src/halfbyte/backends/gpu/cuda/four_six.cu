// 4over6 of bfloat16 by a table. One word per element tells how much better one of the two scales is, and holds the
// codes under both.
//
// A bfloat16 has 7 bits of significand, multiplying by a power of two is exact, and both scales S6 and S4 of a block
// follow from its amax v. So an octave of v has at most 17 pairs (S6, S4), eight steps of each. Near the top S4
// saturates at 448, which adds a few pairs. In the table of a pair, row r stands for the magnitude whose bits are the
// pair's base + r. The rows cover 4.8 octaves, from below S6/4 up to the amax. An entry holds:
//
// - bits 0–3 and 4–7: the codes under S6 and S4
// - bits 8–31: e4 − e6, rounded, in units of 2^-18·s6 (for squares s6²). e is |d| or d², s6 is the decoded S6.
//
// Row 0 stands for everything smaller: both codes are 0, both errors are x, and the difference is 0. The sum of sixteen
// entries tells which scale is better, unless it is close to zero. Then the contract's own arithmetic decides, as it
// does for blocks outside the table's octaves.
//
// How close is decided as follows, with u = 2^-24 and everything in units of s6 or s6². The amax is at most 6.41,
// because S6 is off by at most 1/16. s4 is at most 1.7; if it is saturated, no |d| exceeds 1.3 and no q·s exceeds 7.7.
// Over sixteen elements, Σ|d| <= 20.8 and Σd² <= 27.1.
//
// - The contract rounds q·s twice (15.4u), the difference, the square, and each sum. A sum of magnitudes is off by at
//   most 16·15.4u + 17u·Σ|d| <= 600u, a sum of squares by at most 2·15.4u·Σ|d| + 19u·Σd² <= 1160u. For both sums that
//   is 2320u < 37 units of 2^-18.
// - An entry rounds s6 and s4 twice (15.4u each; for squares 2·1.3 times that, 80u < 1.3 units), rounds a few times
//   more in its arithmetic (0.2 units), and is rounded itself (0.5 units). Sixteen entries are off by less than 32
//   units.
// - The codes in the low bits carry at most 16·0x77/256 < 8 units into the sum.
//
// 37 + 32 + 8 = 77 < MARGIN_UNITS. `limits` excludes amaxes for which something could underflow or overflow.
#ifndef MARGIN_UNITS
#define MARGIN_UNITS 96
#endif
#include "four_six.cuh"

// Ratios reach 6.41/0.25 = 25.7, which is 4.69 octaves of 128 rows, plus 0.09 because bits are not quite a logarithm.
constexpr int ROW_COUNT = 616;
constexpr int PAIRS = 26;  // 26·616·4 bytes fit into 16 bits
constexpr int MARGIN = MARGIN_UNITS * 256;

// The amaxes (bfloat16 bits) that the table serves, and the first one with a saturated S4.
struct Limits {
    u32 lowest, span, saturated;  // span: highest − lowest
    u32 zero;                     // the amax of a block of zeros, or a number that is no amax
};

struct Tables {
    u32 entry[PAIRS * ROW_COUNT];
    uint2 info[256];  // index: significand of the amax; from 128 on, its distance from `saturated`
    Limits limits;
};

static_assert(sizeof(Tables) <= TABLE_BYTES && sizeof(Tables) <= SHARED_BYTES, "the launch sets this much aside");

// --- building the table: every thread block finds the pairs and writes the rows of some ---

struct Pairing {
    u32 starts[8];  // one bit per entry of `info`: whether a pair starts there
    u32 lowest, saturated, beyond, octave;
    Pair of[256];          // the pair of each entry of `info`
    u32 first[PAIRS + 1];  // the first entry of each pair; after the last pair, 256
};

// The amax of an entry of `info`. For the first 128 any octave would do; in `octave` the scales are near 1.
__device__ __forceinline__ u32 amax_of(const Pairing& g, u32 index) {
    return index < 128 ? g.octave + index : g.saturated + index - 128;
}

// Finds the smallest amax whose base reaches a limit, by trying the numbers around it. `first` is the first thread that
// tries.
__device__ __forceinline__ void find_amax(u32* found, u32 first, float limit, float factor) {
    for (u32 i = threadIdx.x; i < first + 8; i += blockDim.x) {
        if (i < first) continue;
        const u32 tried = (__float_as_uint(limit * 6.0f / factor) >> 16) - 4 + (i - first);
        if (scale_before_rounding(float_of_bf16(tried), factor) >= limit) atomicMin(found, tried);
    }
}

__device__ __forceinline__ u32 pairs_up_to(const Pairing& g, u32 index) {
    u32 count = 0;
#pragma unroll
    for (u32 j = 0; j < 8; ++j)
        count += __popc(g.starts[j] & (index >= 32 * j + 31 ? 0xFFFFFFFF
                                       : index >= 32 * j    ? (2u << (index - 32 * j)) - 1
                                                            : 0));
    return count;
}

// Numbers the pairs, finds their first entries in `info`, and returns how many pairs there are.
__device__ __forceinline__ u32 find_pairs(Pairing& g, float factor) {
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) g.of[i] = pair_of(float_of_bf16(amax_of(g, i)), factor);
    __syncthreads();
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) {
        const Pair &p = g.of[i], &before = g.of[i > 0 ? i - 1 : 0];
        const bool changes = p.six.byte != before.six.byte || p.four.byte != before.four.byte;
        if (i % 128 == 0 || amax_of(g, i) == g.beyond || changes) atomicOr(&g.starts[i >> 5], 1u << (i & 31));
    }
    __syncthreads();
    u32 pairs = 0;
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) {
        const u32 number = pairs_up_to(g, i) - 1;
        if ((g.starts[i >> 5] >> (i & 31) & 1) && number < PAIRS) g.first[number] = i;
    }
    pairs = pairs_up_to(g, 255);
    if (threadIdx.x == 0 && pairs <= PAIRS) g.first[pairs] = 256;
    __syncthreads();
    return pairs;
}

__device__ __forceinline__ uint2 info_of(const Pairing& g, u32 index) {
    const u32 number = pairs_up_to(g, index) - 1, octave = 8 * (amax_of(g, index) >> 7);
    const u32 row = ROW_COUNT - 1 - (g.first[number + 1] - 1 - index);
    const Pair& p = g.of[index];
    return make_uint2(number * (ROW_COUNT * 4) | row << 16, ((p.six.byte - octave) & 0xFFFF) | (p.four.byte - octave)
                                                                                                   << 16);
}

__device__ __forceinline__ Limits limits_of(const Pairing& g, bool usable) {
    // Within 2**±50 every square is a normal number.
    const u32 floor = 77 << 7, ceiling = 177 << 7;
    const u32 lowest = g.lowest < floor ? floor : g.lowest, highest = g.beyond - 1 < ceiling ? g.beyond - 1 : ceiling;
    if (!usable || lowest > highest) return {0x8000, 0, 0x8000, usable ? 0 : 0xFFFFFFFF};  // larger than every amax
    return {lowest, highest - lowest, g.saturated, 0};
}

__device__ __forceinline__ void write_rows(const Pair& p, u32 last, u32* entries, const float* n) {
    const bool tie = p.six.byte == p.four.byte;  // if both scales are equal, 6 wins
    const float by_six = multiplier_of(p.six.value, n[INVERSE]), by_four = multiplier_of(p.four.value, n[INVERSE]);
    const float unit = KIND == ERROR_SCALED ? 1.0f : KIND == ERROR_BY_AMAX ? n[AMAX] / TOP : n[INVERSE];
    const float s6 = p.six.value * unit, s4 = p.four.value * unit, units = 262144.0f / (SQUARED ? s6 * s6 : s6);
    for (u32 row = threadIdx.x; row < ROW_COUNT; row += blockDim.x) {
        const float x = float_of_bf16(last - (ROW_COUNT - 1) + row), scaled = KIND == ERROR_SCALED ? x * n[FACTOR] : x;
        const Element six = round_e2m1(x * by_six), four = round_e2m1(x * by_four);
        const float d6 = fabsf(__fmaf_rn(six.value, s6, -scaled)), d4 = fabsf(__fmaf_rn(four.value, s4, -scaled));
        const float more = SQUARED ? (d4 - d6) * (d4 + d6) : d4 - d6;
        const u32 difference = tie ? 1024 : row == 0 ? 0 : (u32)__float2int_rn(more * units);
        entries[row] = difference << 8 | (row == 0 ? 0 : six.code | four.code << 4);
    }
}

extern "C" __global__ void __launch_bounds__(BUILD_THREADS) build_four_six(const float* numbers, uint4* tables) {
    const float* n = numbers + blockIdx.y * NUMBERS;
    Tables* t = (Tables*)(tables + blockIdx.y * (TABLE_BYTES / 16));
    __shared__ Pairing g;
    let_next_kernel_begin();
    const float factor = n[FACTOR];
    if (threadIdx.x == 0) {
        g.lowest = g.saturated = g.beyond = 0x7F80;
        g.octave = __float_as_uint(12.0f / factor) >> 23 << 7;
    }
    for (u32 i = threadIdx.x; i < 8; i += blockDim.x) g.starts[i] = 0;
    __syncthreads();
    find_amax(&g.saturated, 0, 464.0f / 1.5f, factor);  // from here on S4 is 448; the next scale would be 480
    find_amax(&g.beyond, 32, 464.0f, factor);           // from here on S6 is too small for its block
    find_amax(&g.lowest, 64, 0.015625f, factor);        // below this, scales are subnormal
    __syncthreads();
    const u32 pairs = find_pairs(g, factor);
    const bool usable = n[NO_UNDERFLOW] > 0 && pairs <= PAIRS;
    if (blockIdx.x == 0 && threadIdx.x == 0) t->limits = limits_of(g, usable);
    if (blockIdx.x == 0)
        for (u32 i = threadIdx.x; i < 256; i += blockDim.x) t->info[i] = usable ? info_of(g, i) : make_uint2(0, 0);
    if (!usable) return;
    for (u32 number = blockIdx.x; number < pairs; number += gridDim.x) {
        const u32 last = g.first[number + 1] - 1;
        write_rows(g.of[last], amax_of(g, last), t->entry + number * ROW_COUNT, n);
    }
}

// --- blocks ---

// Starts all loads at once.
__device__ __forceinline__ void copy_tables(const uint4* tables) {
    wait_for_kernel_before();
    for (u32 i = threadIdx.x; i < (sizeof(Tables) + 15) / 16; i += blockDim.x) {
#if __CUDA_ARCH__ >= 900
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address_of(shared_memory + i)), "l"(tables + i)
                     : "memory");
#else
        shared_memory[i] = tables[i];
#endif
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    __syncthreads();
}

// Returns whether the table decides. If so, it writes codes and scale.
__device__ __forceinline__ bool decide(const Operand& o, const Tables& t, const Limits& limits, const Block& b,
                                       const Place& at, i64 block, bool exists) {
    u32 magnitudes[8], entries[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) magnitudes[i] = b.w[i] & 0x7FFF7FFF;
    const u32 v = largest(magnitudes);
    const bool inside = v - limits.lowest <= limits.span, zero = v == limits.zero;
    const u32 index = v >= limits.saturated ? v - limits.saturated + 128 : v & 127;
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
    const bool clear = zero || (inside && sum + MARGIN > 2u * MARGIN);
    if (clear && exists) {
        o.codes[block] = make_uint2(out[0], out[1]);
        o.scales[scale_place(o, at, block)] = (unsigned char)(zero ? 0 : 8 * (v >> 7) + (four ? info.y >> 16 : info.y));
    }
    return clear;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) quantize_four_six(const __grid_constant__ Operand o) {
    Tables& t = *(Tables*)shared_memory;
    Queue queue((u64*)(shared_memory + SHARED_BYTES / 16));
    for_all_segments(o, [&](const Segment& s) {
        const auto exact = [&](i64 block, u32) { exact_block(o, s, block); };
        for_all_blocks(
            o, s, queue.lane,
            [&] {
                copy_tables(s.tables);
                return t.limits;
            },
            [&](const Limits& limits, const Block& b, const Place& at, i64 block, bool exists, u32*) {
                return decide(o, t, limits, b, at, block, exists);
            },
            [&](bool unclear, i64 block, u32 mask) { queue.offer(unclear, block, mask, exact); });
        if (queue.waiting > 0) queue.take(exact);
    });
}
