// 4over6 for any dtype, by the contract's own codes and fused sums of the errors.
//
// Both scales and all codes are those of the contract: y is the same product, rounded alike. Only the errors are
// estimated: with s6 and s4 the decoded scales, d = q·s − |x| in one fused operation, Σ|d| or Σd·d in any order. Where
// the two sums are closer together than MARGIN_UNITS of 2^-18·s6 (for squares s6²), the contract's own arithmetic
// decides. four_six.cu shows that its two sums are off by less than 37 units. The estimate rounds s6 and s4 twice, each
// difference, square and sum once, which is less than that: below 37 units as well. 37 + 37 = 74 < MARGIN_UNITS.
//
// All this holds where S6 is a normal number and not saturated, so that no y reaches 7 (6.41 under S6, 6.22 under a
// saturated S4), and where nothing under- or overflows: amaxes within 2**±50, which follows from S6 and the tensor's
// factor. All other blocks are left to the contract's arithmetic.
#ifndef MARGIN_UNITS
#define MARGIN_UNITS 96
#endif
#include "four_six.cuh"

constexpr float MARGIN = MARGIN_UNITS * 0.000003814697265625f;                          // 2^-18
constexpr float LEAST_FACTOR = 3.637978807091713e-12f, MOST_FACTOR = 1099511627776.0f;  // 2^-38, 2^40

// v/6, correctly rounded where nothing underflows: a product in two parts. tests/backends/gpu/test_arithmetic.py tries
// every significand.
__device__ __forceinline__ float short_sixth(float v) {
    return __fmaf_rn(v, 0.1666666567325592f, v * 9.934107758624577e-09f);
}

// What depends on a scale's byte: what elements are multiplied by, and the decoded scale.
struct Byte {
    float multiplier, scale;
};

static_assert(128 * sizeof(Byte) <= SHARED_BYTES, "the launch sets this much aside");

// What all blocks of a tensor share.
struct Tensor {
    float factor;
    bool usable;
};

// E4M3 of a number from 2**-6 to 464·1.5.
__device__ __forceinline__ Scale round_normal(float scale) {
    const float inside = fminf(scale, 448.0f);
    const u32 power = __float_as_uint(inside) & 0x7F800000;
    const float magic = __uint_as_float(power) * 1048576.0f, shifted = inside + magic;
    return {(__float_as_uint(shifted) & 31) + (power >> 20) - 968, shifted - magic};
}

// Adds the error of one magnitude under one scale to a sum. Returns a number whose bits hold the code (raw_code_of).
__device__ __forceinline__ float add_error(float x, const Byte& by, float* sum) {
    const float y = x * by.multiplier, step = step_of(y), moved = __fmaf_rn(step, 524288.0f, y);
    const float d = __fmaf_rn(__fmaf_rn(step, -524288.0f, moved), by.scale, -x);
    *sum = SQUARED ? __fmaf_rn(d, d, *sum) : *sum + fabsf(d);
    return moved;
}

__device__ __forceinline__ void fill_bytes(Byte* bytes, const float* n) {
    const float unit = KIND == ERROR_BY_RECIPROCAL ? n[INVERSE] : n[AMAX] / TOP;
    for (u32 i = threadIdx.x; i < 128; i += blockDim.x) {
        const float value = value_of_e4m3(i);
        bytes[i] = {multiplier_of(value, n[INVERSE]), value * unit};
    }
    __syncthreads();
}

// Returns whether the estimates decide. If so, it writes codes and scale.
__device__ __forceinline__ bool decide(const Operand& o, const Byte* bytes, const Tensor& n, const Block& b,
                                       const Place& at, i64 block, bool exists) {
    const float v = largest_value(b.w), base = short_sixth(v) * n.factor;
    if (v == 0.0f) {
        if (n.usable && exists) {
            o.codes[block] = make_uint2(0, 0);
            o.scales[scale_place(o, at, block)] = 0;
        }
        return n.usable;
    }
    const bool inside = base >= 0.015625f && base < 464.0f && n.usable;
    const Scale six = round_normal(base), four = round_normal(base * 1.5f);
    const Byte by_six = bytes[six.byte & 127], by_four = bytes[four.byte & 127];
    float error_six = 0.0f, error_four = 0.0f, moved_six[16], moved_four[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float x = fabsf(element_of(b.w, i));
        moved_six[i] = add_error(x, by_six, &error_six);
        moved_four[i] = add_error(x, by_four, &error_four);
    }
    const float difference = error_four - error_six,
                margin = MARGIN * (SQUARED ? by_six.scale * by_six.scale : by_six.scale);
    const bool same = six.byte == four.byte;  // 6 wins
    const bool picks_four = difference < 0.0f;
    const bool clear = inside && (fabsf(difference) > margin || (same && difference == 0.0f));
    if (clear && exists) {
        u32 out[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 raw[8];
            float y[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                raw[i] = raw_code_of(picks_four ? moved_four[8 * half + i] : moved_six[8 * half + i]);
                if (DTYPE == FP32)
                    y[i] = element_of(b.w, 8 * half + i) * (picks_four ? by_four.multiplier : by_six.multiplier);
            }
            out[half] = pack_raw(raw) | (DTYPE == FP32 ? signs_of_floats(y, false) : signs(b.w + 4 * half));
        }
        o.codes[block] = make_uint2(out[0], out[1]);
        o.scales[scale_place(o, at, block)] = (unsigned char)(picks_four ? four.byte : six.byte);
    }
    return clear;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) quantize_four_six_estimate(const __grid_constant__ Operand o) {
    Byte* bytes = (Byte*)shared_memory;
    Queue queue((u64*)(shared_memory + SHARED_BYTES / 16));
    for_all_segments(o, [&](const Segment& s) {
        const auto exact = [&](i64 block, u32) { exact_block(o, s, block); };
        for_all_blocks(
            o, s, queue.lane,
            [&] {
                const float* n = s.numbers;
                fill_bytes(bytes, n);
                const bool usable = n[NO_UNDERFLOW] > 0.0f && n[FACTOR] >= LEAST_FACTOR && n[FACTOR] <= MOST_FACTOR;
                return Tensor{n[FACTOR], usable};
            },
            [&](const Tensor& n, const Block& b, const Place& at, i64 block, bool exists, u32*) {
                return decide(o, bytes, n, b, at, block, exists);
            },
            [&](bool unclear, i64 block, u32 mask) { queue.offer(unclear, block, mask, exact); });
        if (queue.waiting > 0) queue.take(exact);
    });
}
