// Blocks in the CUDA kernels: where they lie, the loop over them, and the queue of blocks that a table does not decide.
#pragma once
#include "values.cuh"

#ifndef HALFBYTE_ON_CPU
#define COUNT_EXACT()
#endif

// --- where blocks lie ---

struct Operand {
    const uint4* x;
    uint2* codes;
    unsigned char* scales;
    const float* numbers;            // NUMBERS per group; the blocks of a group share a tensor-level scale
    const uint4* tables;             // TABLE_BYTES per group, as the building kernel writes them
    const i64* listed;               // (address, blocks, blocks before) per group, if groups are separate allocations
    i64 blocks, columns, row_quads;  // rows are `row_quads` * 16 bytes apart
    i64 groups, group_blocks;
};

// Blocks of one group that one thread block works on.
struct Segment {
    const uint4* x;
    const float* numbers;
    const uint4* tables;
    i64 before;  // number of blocks before those in x
    i64 begin, end, step;
};

// The segment that starts at block `begin`. With one group, thread blocks take turns over all blocks. With several
// groups, each takes a span of consecutive blocks, so that it needs few tables.
__device__ __forceinline__ Segment segment_at(const Operand& o, i64 begin, i64 end) {
    if (!GROUPED) return {o.x, o.numbers, o.tables, 0, begin, o.blocks, (i64)gridDim.x * blockDim.x};
    i64 group = LISTED ? 0 : begin / o.group_blocks, group_end = (group + 1) * o.group_blocks, before = 0;
    const uint4* x = o.x;
    if (LISTED) {
        for (i64 beyond = o.groups; group + 1 < beyond;) {  // find the last group that starts at or before the block
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
    return s.x + (ROWS ? p.row * o.row_quads + QUADS * p.column : QUADS * (p.column - s.before));
}

__device__ __forceinline__ i64 scale_place(const Operand& o, const Place& p, i64 block) {
    if (!SWIZZLED) return block;
    const i64 tile = (p.row >> 7) * ((o.columns + 3) >> 2) + (p.column >> 2);
    return tile * 512 + (p.row & 31) * 16 + ((p.row & 127) >> 5) * 4 + (p.column & 3);
}

// --- blocks that a table does not decide ---

// Each warp has its own queues, of blocks whose exact arithmetic takes equally long. Blocks wait until there is one for
// every lane, so that no lane idles. Each kernel defines what the 24 bits of `mask` mean.
struct Queue {
    u64* entries;  // 2·WARP entries: fewer than WARP wait when up to WARP more arrive
    u32 lane, waiting;

    __device__ Queue(u64* memory, u32 number = 0)
        : entries(memory + number * blockDim.x * 2 + threadIdx.x / WARP * (2 * WARP)),
          lane(threadIdx.x % WARP),
          waiting(0) {}

    __device__ __forceinline__ void add(bool joins, i64 block, u32 mask, u32 all) {
        if (joins) entries[waiting + __popc(all & ((1u << lane) - 1))] = (u64)block << 24 | mask;
        waiting += __popc(all);
    }
    // The lanes whose block joins; a full queue is worked on.
    template <typename Work>
    __device__ __forceinline__ void offer(bool joins, i64 block, u32 mask, Work work) {
        const u32 all = __ballot_sync(0xFFFFFFFF, joins);
        if (all == 0) return;
        add(joins, block, mask, all);
        if (waiting >= WARP) take(work);
    }
    // Takes up to WARP blocks and calls work(block, mask) in the lanes that got one.
    template <typename Work>
    __device__ __forceinline__ void take(Work work) {
        __syncwarp();
        const u32 count = waiting < WARP ? waiting : WARP;
        waiting -= count;
        if (lane < count) {
            const u64 entry = entries[waiting + lane];
            COUNT_EXACT();
            work((i64)(entry >> 24), (u32)entry & 0xFFFFFF);
        }
        __syncwarp();
    }
};

// The kernel that builds tables lets the next kernel start at once. That one waits in wait_for_kernel_before until the
// tables are written.
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

// Calls `decide` for each block of a segment and loads the next block meanwhile. Lanes beyond the last block take part
// too, so that warps stay together. `prepare` runs after the first loads have started, and `decide` gets its result
// with every block. What it does not decide goes to `undecided`.
template <typename Prepare, typename Decide, typename Undecided>
__device__ __forceinline__ void for_all_blocks(const Operand& o, const Segment& s, u32 lane, Prepare prepare,
                                               Decide decide, Undecided undecided) {
    i64 block = s.begin + threadIdx.x;
    Place at = place_of(o, block < s.end ? block : 0);
    const Place stride = place_of(o, s.step);
    Block next = {};
    if (block < s.end) next = load_block(source(o, s, at));
    const auto limits = prepare();
    for (i64 first = block - lane; first < s.end; first += s.step) {
        const Block b = next;
        const Place here = at;
        const bool exists = block < s.end;
        if (!ROWS) at = {0, block + s.step};
        else {
            at.row += stride.row;
            at.column += stride.column;
            if (at.column >= o.columns) {
                at.column -= o.columns;
                at.row += 1;
            }
        }
        if (block + s.step < s.end) next = load_block(source(o, s, at));
        u32 mask = 0;
        const bool unclear = !decide(limits, b, here, block, exists, &mask) && exists;
        undecided(unclear, block, mask);
        block += s.step;
    }
}

// Calls `work` for every segment of this thread block.
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
        __syncthreads();  // the tables may be overwritten now
    }
}
