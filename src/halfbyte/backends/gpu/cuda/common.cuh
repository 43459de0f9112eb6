// What the CUDA kernels share: the numbers of a tensor, where blocks lie, E4M3 and E2M1, packing, and the queue of blocks
// that a table does not decide. Compiled for the card with contraction off. The tests compile it for the CPU as well, with
// one thread per block of threads and one lane per warp (tests/gpu/cuda_on_cpu.h).
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef HALFBYTE_ON_CPU
#define COUNT_EXACT()
constexpr int WARP = 32;
extern __shared__ uint4 shared_memory[];
#endif

// The numbers of a group, as `prepare` in triton/scales.py writes them. A test compares them with gpu/constants.py.
constexpr int NUMBERS = 16;
enum Number { AMAX = 0, FACTOR = 1, INVERSE = 2, FOLDED = 3, PRESCALE = 7, PRESCALE_AGAIN = 8, UNIT = 9, SEARCHED = 10, NO_UNDERFLOW = 11 };

constexpr float FLOAT32_MAX = 3.4028234663852886e38f;

// A bfloat16 is the upper half of a float.
__device__ __forceinline__ float float_of_bf16(u32 bits) { return __uint_as_float(bits << 16); }

// --- shared memory by 32-bit addresses, so that the start of a table is added once per block ---

#ifndef HALFBYTE_ON_CPU
__device__ __forceinline__ u32 address_of(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

__device__ __forceinline__ u32 word_at(u32 address) {
    u32 out;
    asm("ld.shared.u32 %0, [%1];" : "=r"(out) : "r"(address));
    return out;
}

__device__ __forceinline__ uint4 quad_at(u32 address) {
    uint4 out;
    asm("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "r"(address));
    return out;
}
#endif

// --- where blocks lie ---

struct Operand {
    const uint4* x;
    uint2* codes;
    unsigned char* scales;
    const float* numbers;            // NUMBERS for each group; the blocks of a group share a tensor-level scale
    const uint4* tables;             // TABLE_BYTES for each group, written by the building kernel
    const i64* listed;               // (address, blocks, blocks before) of each group, where groups are separate allocations
    i64 blocks, columns, row_quads;  // the distance between rows is `row_quads` times sixteen bytes
    i64 groups, group_blocks;
};

// The blocks with one tensor-level scale that one block of threads works on.
struct Segment {
    const uint4* x;
    const float* numbers;
    const uint4* tables;
    i64 before;  // blocks that are not in x
    i64 begin, end, step;
};

// The segment that starts at a block. With one group: all blocks, shared in turns with the other blocks of threads. With
// several: a span of consecutive blocks, so that few tables are needed.
__device__ __forceinline__ Segment segment_at(const Operand& o, i64 begin, i64 end) {
    if (!GROUPED) return {o.x, o.numbers, o.tables, 0, begin, o.blocks, (i64)gridDim.x * blockDim.x};
    i64 group = LISTED ? 0 : begin / o.group_blocks, group_end = (group + 1) * o.group_blocks, before = 0;
    const uint4* x = o.x;
    if (LISTED) {
        for (i64 beyond = o.groups; group + 1 < beyond;) {  // the last group that starts at or before the block
            const i64 middle = (group + beyond) / 2;
            if (o.listed[3 * middle + 2] <= begin) group = middle;
            else beyond = middle;
        }
        x = (const uint4*)o.listed[3 * group];
        before = o.listed[3 * group + 2];
        group_end = before + o.listed[3 * group + 1];
    }
    const float* numbers = o.numbers + group * NUMBERS;
    const uint4* tables = o.tables + group * (TABLE_BYTES / 16);
    return {x, numbers, tables, before, begin, end < group_end ? end : group_end, (i64)blockDim.x};
}

struct Place {
    i64 row, column;
};

__device__ __forceinline__ Place place_of(const Operand& o, i64 block) {
    if (!ROWS) return {0, block};
    const i64 row = block / o.columns;
    return {row, block - row * o.columns};
}

__device__ __forceinline__ const uint4* source(const Operand& o, const Segment& s, const Place& p) {
    return s.x + (ROWS ? p.row * o.row_quads + 2 * p.column : 2 * (p.column - s.before));
}

__device__ __forceinline__ i64 scale_place(const Operand& o, const Place& p, i64 block) {
    if (!SWIZZLED) return block;
    const i64 tile = (p.row >> 7) * ((o.columns + 3) >> 2) + (p.column >> 2);
    return tile * 512 + (p.row & 31) * 16 + ((p.row & 127) >> 5) * 4 + (p.column & 3);
}

// --- pairs of 16-bit numbers in a word ---

__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
    u32 out;
    asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
#else
    const u32 low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF, high = (a >> 16) > (b >> 16) ? a >> 16 : b >> 16;
    return high << 16 | low;
#endif
}

// max(a + minus, 0) of signed halves; they must not overflow.
__device__ __forceinline__ u32 halves_above(u32 a, u32 minus) {
#if __CUDA_ARCH__ >= 900
    return __viaddmax_s16x2(a, minus, 0);
#else
    const short low = (short)(a + minus), high = (short)((a >> 16) + (minus >> 16));
    return (u32)(high > 0 ? high : 0) << 16 | (u32)(low > 0 ? low : 0);
#endif
}

// −0.0 becomes +0.0, everything else stays: x·1 + 0.
__device__ __forceinline__ u32 without_negative_zeros(u32 w) {
#if __CUDA_ARCH__ >= 900
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(w), "r"(0x3F803F80), "r"(0));
    return out;
#else
    return ((w & 0xFFFF) == 0x8000 ? 0 : w & 0xFFFF) | ((w & 0xFFFF0000) == 0x80000000 ? 0 : w & 0xFFFF0000);
#endif
}

// --- a block in registers ---

struct Block {
    u32 w[8];
};

__device__ __forceinline__ Block load_block(const uint4* at) {
    const uint4 a = __ldg(at), b = __ldg(at + 1);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

// Bits of the largest magnitude, as bfloat16. NaN lies above Inf, Inf above all numbers.
__device__ __forceinline__ u32 largest(const u32* magnitudes) {
    u32 most = larger_halves(magnitudes[0], magnitudes[1]);
#pragma unroll
    for (int i = 2; i < 8; ++i) most = larger_halves(most, magnitudes[i]);
    const u32 low = most & 0xFFFF, high = most >> 16;
    return low > high ? low : high;
}

// Sign bits of eight values in four words, as bit 3 of each nibble.
__device__ __forceinline__ u32 signs(const u32* w) {
    const u32 first = __byte_perm(without_negative_zeros(w[0]), without_negative_zeros(w[1]), 0x7531);
    const u32 second = __byte_perm(without_negative_zeros(w[2]), without_negative_zeros(w[3]), 0x7531);
    const u32 even = __byte_perm(first, second, 0x6420), odd = __byte_perm(first, second, 0x7531);
    return ((even >> 4) & 0x08080808) | (odd & 0x80808080);
}

// --- E4M3 and E2M1, by the contract's rounding ---

struct Scale {
    u32 byte;
    float value;
};

// Nearest even, saturating at 448; NaN is 0x7F.
__device__ __forceinline__ Scale round_e4m3(float scale) {
    if (scale != scale) return {127, scale};
    const float inside = scale > 448.0f ? 448.0f : scale;
    const u32 power = __float_as_uint(inside > 0.015625f ? inside : 0.015625f) & 0x7F800000;
    const float magic = __uint_as_float(power) * 1048576.0f;  // its last place is the step of this binade
    const float shifted = inside + magic;
    return {(__float_as_uint(shifted) & 31) + (power >> 20) - 968, shifted - magic};
}

// Value of a byte below 127.
__device__ __forceinline__ float value_of_e4m3(u32 byte) {
    return byte < 8 ? (float)byte * 0.001953125f : __uint_as_float((byte + 960) << 20);
}

// What an element is multiplied by: min(1/(S·(1/enc)), FMAX); NaN stays.
__device__ __forceinline__ float multiplier_of(float scale, float inverse) {
    const float reciprocal = 1.0f / (scale * inverse);
    return reciprocal > FLOAT32_MAX ? FLOAT32_MAX : reciprocal;
}

// P of the rounding to E2M1, for y in [0, 7): gpu/triton/blocks.py explains it.
__device__ __forceinline__ float step_of(float y) {
    return __uint_as_float(__float_as_uint(__fmaf_rn(y, y, 12.5f)) & 0x7F800000);
}

struct Element {
    u32 code;  // without its sign
    float value;
};

__device__ __forceinline__ Element round_e2m1(float y) {
    const float inside = y > 6.0f ? 6.0f : y, step = step_of(inside), moved = __fmaf_rn(step, 524288.0f, inside);
    const u32 raw = __float_as_uint(moved);
    return {(raw + (raw >> 22) - 298) & 7, __fmaf_rn(step, -524288.0f, moved)};
}

// The same for any y, with its sign in the code and in the value; NaN gives code 0.
__device__ __forceinline__ Element round_signed(float y) {
    const float magnitude = y != y ? 0.0f : fabsf(y);
    const Element e = round_e2m1(magnitude);
    return y < 0.0f ? Element{e.code | 8, -e.value} : e;
}

// A block in memory, for the exact paths. They are rare, and read it again instead of keeping it in registers.
struct Words {
    const u32* at;

    __device__ __forceinline__ float first(int i) const { return __uint_as_float(at[i] << 16); }
    __device__ __forceinline__ float second(int i) const { return __uint_as_float(at[i] & 0xFFFF0000); }

    __device__ __forceinline__ u32 largest() const {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) most = larger_halves(most, at[i] & 0x7FFF7FFF);
        return (most & 0xFFFF) > most >> 16 ? most & 0xFFFF : most >> 16;
    }
    // Codes under one scale, any numbers.
    __device__ __forceinline__ uint2 codes(float multiplier) const {
        u64 out = 0;
#pragma unroll 4
        for (int i = 7; i >= 0; --i)
            out = out << 8 | round_signed(second(i) * multiplier).code << 4 | round_signed(first(i) * multiplier).code;
        return make_uint2((u32)out, (u32)(out >> 32));
    }
};

// --- blocks that a table does not decide ---

// Each warp has its own. Blocks wait until there is one for every lane, so that the exact arithmetic has no idle lanes. Only
// the kernel knows what `mask` means.
struct Queue {
    u64* entries;  // 2·WARP of them: fewer than WARP wait when up to WARP are added
    u32 lane, waiting;

    __device__ Queue(u64* memory) : entries(memory + threadIdx.x / WARP * (2 * WARP)), lane(threadIdx.x % WARP), waiting(0) {}

    __device__ __forceinline__ void add(bool joins, i64 block, u32 mask, u32 all) {
        if (joins) entries[waiting + __popc(all & ((1u << lane) - 1))] = (u64)block << 16 | mask;
        waiting += __popc(all);
    }
    // Take up to WARP blocks, and call work(block, mask) in each lane that got one.
    template <typename Work>
    __device__ __forceinline__ void take(Work work) {
        __syncwarp();
        const u32 count = waiting < WARP ? waiting : WARP;
        waiting -= count;
        if (lane < count) {
            const u64 entry = entries[waiting + lane];
            COUNT_EXACT();
            work((i64)(entry >> 16), (u32)entry & 0xFFFF);
        }
        __syncwarp();
    }
};

// The kernel that builds tables lets the next kernel start at once; that one waits until the tables are written.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Call `decide` for each block of a segment, while the next block is being loaded. Lanes beyond the last block take part, so
// that warps stay together. `prepare` runs after the first loads have started; `decide` gets its result with every block.
template <typename Prepare, typename Decide, typename Exact>
__device__ __forceinline__ void for_all_blocks(const Operand& o, const Segment& s, Queue& queue, Prepare prepare, Decide decide,
                                               Exact exact) {
    i64 block = s.begin + threadIdx.x;
    Place at = place_of(o, block < s.end ? block : 0);
    const Place stride = place_of(o, s.step);
    Block next = {};
    if (block < s.end) next = load_block(source(o, s, at));
    const auto limits = prepare();
    for (i64 first = block - queue.lane; first < s.end; first += s.step) {
        const Block b = next;
        const Place here = at;
        const bool exists = block < s.end;
        at.row += stride.row;
        at.column += stride.column;
        if (ROWS && at.column >= o.columns) {
            at.column -= o.columns;
            at.row += 1;
        }
        if (block + s.step < s.end) next = load_block(source(o, s, at));
        u32 mask = 0;
        const bool unclear = !decide(limits, b, here, block, exists, &mask) && exists;
        const u32 all = __ballot_sync(0xFFFFFFFF, unclear);
        if (all != 0) {
            queue.add(unclear, block, mask, all);
            if (queue.waiting >= WARP) queue.take(exact);
        }
        block += s.step;
    }
    if (queue.waiting > 0) queue.take(exact);
}

// Every segment of this block of threads.
template <typename Work>
__device__ __forceinline__ void for_all_segments(const Operand& o, Work work) {
    if (!GROUPED) {
        work(segment_at(o, (i64)blockIdx.x * blockDim.x, o.blocks));
        return;
    }
    const i64 share = ((o.blocks + gridDim.x - 1) / gridDim.x + WARP - 1) / WARP * WARP;
    const i64 end = (blockIdx.x + 1) * share < o.blocks ? (blockIdx.x + 1) * share : o.blocks;
    for (i64 begin = blockIdx.x * share; begin < end;) {
        const Segment s = segment_at(o, begin, end);
        work(s);
        begin = s.end;
        __syncthreads();  // no thread needs the tables any more
    }
}
