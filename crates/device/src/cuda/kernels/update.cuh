// One update of many segments, for any rule. A rule's own file defines a struct with
//   COLUMNS     how many columns of state it may have,
//   REQUIRED    how many of them, the first ones, are always there,
//   update      the arithmetic of one element, as its file in src/update writes it down,
// and instantiates the kernels with UPDATE_KERNELS.
//
// Every rounding is an intrinsic and the compiler may not fuse (--fmad=false), so a fused multiply-add is where one is
// written. src/cuda/launch.rs lays out the structs.

#pragma once

#include "types.cuh"

constexpr u32 BLOCK_ELEMENTS = 4096;
constexpr u32 MAX_SEGMENTS = 56;
constexpr u32 MAX_SETS = 8;
constexpr u32 MAX_COLUMNS = 3;
constexpr u32 MAX_SCALARS = 8;

constexpr u32 MAXIMIZE = 1;  // a flag of every rule

struct Scalars {
    float value[MAX_SCALARS];
    u32 flags, unused;
    __device__ bool has(u32 flag) const { return (flags & flag) != 0; }
};

struct Segment {
    u64 weight, grad, state[MAX_COLUMNS], master;  // addresses; 0 for what is not there
    u32 elements, first_block, scalars;
    u32 first;  // where its first element is in the parameter, modulo 2048
};

// Passed by value: a launch must not depend on memory that the host may have changed by the time it runs.
struct Update {
    u64 grad_scale, skip;  // addresses of an f32 each, or 0
    u64 followed;          // address of a u32 that is set to 1 where a master gives way to its weight, or 0
    u32 segments;
    u32 trust_master;      // whether masters count as they are, whatever their weights
    Scalars scalars[MAX_SETS];
    Segment segment[MAX_SEGMENTS];
};
static_assert(sizeof(Update) <= 4096, "kernel parameters of every GPU and driver are at most 4 KiB");

struct Bf16 { u16 bits; };
struct F16 { u16 bits; };

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(Bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ inline float widen(F16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

__device__ inline void narrow(float x, float& y) { y = x; }
__device__ inline void narrow(float x, Bf16& y) {
    u32 bits = __float_as_uint(x);
    y.bits = x != x ? u16(0x7fff) : u16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
__device__ inline void narrow(float x, F16& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }

__device__ inline bool same(float a, float b) { return __float_as_uint(a) == __float_as_uint(b); }
__device__ inline bool same(Bf16 a, Bf16 b) { return a.bits == b.bits; }
__device__ inline bool same(F16 a, F16 b) { return a.bits == b.bits; }

// Whether a weight is its master's rounding.
template <class P>
__device__ inline bool holds(float master, P weight) {
    P rounded;
    narrow(master, rounded);
    return same(rounded, weight);
}

// N elements starting at `at`: loaded together, so that all their reads are under way at once.
template <class Rule, int N, class P, class G>
__device__ void update_run(const Update& step, const Segment& seg, const Scalars& s, float scale, u32 at) {
    struct alignas(N * sizeof(P)) Ps { P at[N]; };
    struct alignas(N * sizeof(G)) Gs { G at[N]; };
    struct alignas(N * sizeof(float)) Fs { float at[N]; };
    auto f = [at](u64 base) { return reinterpret_cast<Fs*>(base + u64(at) * sizeof(float)); };
    auto kept = [&seg](int c) { return c < Rule::REQUIRED || seg.state[c] != 0; };
    Ps* weights = reinterpret_cast<Ps*>(seg.weight + u64(at) * sizeof(P));
    Ps p = *weights;
    Fs master, state[Rule::COLUMNS];
    if (seg.master) master = *f(seg.master);
    Gs g = *reinterpret_cast<const Gs*>(seg.grad + u64(at) * sizeof(G));
#pragma unroll
    for (int c = 0; c < Rule::COLUMNS; c++) {
        if (kept(c)) state[c] = *f(seg.state[c]);
    }
    bool trusts = step.trust_master != 0;
    if (step.followed && seg.master && !trusts) {
        bool all_hold = true;
#pragma unroll
        for (int i = 0; i < N; i++) all_hold &= holds(master.at[i], p.at[i]);
        // Many threads may store it, all the same value.
        if (!all_hold) *reinterpret_cast<volatile u32*>(step.followed) = 1;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        float weight = widen(p.at[i]);
        if (seg.master) weight = trusts | holds(master.at[i], p.at[i]) ? master.at[i] : weight;
        float grad = __fmul_rn(widen(g.at[i]), scale);
        grad = s.has(MAXIMIZE) ? -grad : grad;
        float column[Rule::COLUMNS];
        u32 mask = 0;
#pragma unroll
        for (int c = 0; c < Rule::COLUMNS; c++) {
            column[c] = kept(c) ? state[c].at[i] : 0.0f;
            mask |= kept(c) ? 1u << c : 0u;
        }
        Rule::update(weight, grad, column, mask, s, seg.first + at + i);
        narrow(weight, p.at[i]);
        master.at[i] = weight;
#pragma unroll
        for (int c = 0; c < Rule::COLUMNS; c++) state[c].at[i] = column[c];
    }
    *weights = p;
#pragma unroll
    for (int c = 0; c < Rule::COLUMNS; c++) {
        if (kept(c)) *f(seg.state[c]) = state[c];
    }
    if (seg.master) *f(seg.master) = master;
}

template <class Rule, class P, class G>
__device__ void update_segments(const Update& step) {
    if (step.skip && *reinterpret_cast<const float*>(step.skip) != 0.0f) return;
    float scale = step.grad_scale ? *reinterpret_cast<const float*>(step.grad_scale) : 1.0f;

    // The last segment that starts at or before this block.
    u32 low = 0, high = step.segments - 1;
    while (low < high) {
        u32 middle = (low + high + 1) / 2;
        if (step.segment[middle].first_block <= blockIdx.x) low = middle;
        else high = middle - 1;
    }
    const Segment& seg = step.segment[low];
    const Scalars s = step.scalars[seg.scalars];
    u32 begin = (blockIdx.x - seg.first_block) * BLOCK_ELEMENTS;
    u32 end = seg.elements - begin < BLOCK_ELEMENTS ? seg.elements : begin + BLOCK_ELEMENTS;

    u64 columns = seg.master;
#pragma unroll
    for (int c = 0; c < Rule::COLUMNS; c++) columns |= seg.state[c];
    bool aligned = seg.weight % (4 * sizeof(P)) == 0 && seg.grad % (4 * sizeof(G)) == 0 && columns % 16 == 0;
    u32 fours = aligned ? (end - begin) / 4 : 0;
    for (u32 i = threadIdx.x; i < fours; i += THREADS) update_run<Rule, 4, P, G>(step, seg, s, scale, begin + 4 * i);
    for (u32 i = begin + 4 * fours + threadIdx.x; i < end; i += THREADS) {
        update_run<Rule, 1, P, G>(step, seg, s, scale, i);
    }
}

#define UPDATE_KERNEL(name, Rule, P, G)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Update step) { \
        update_segments<Rule, P, G>(step);                                                           \
    }

// One kernel for each type of weight and of gradient.
#define UPDATE_KERNELS(name, Rule)                 \
    UPDATE_KERNEL(name##_f32_f32, Rule, float, float)  \
    UPDATE_KERNEL(name##_f32_bf16, Rule, float, Bf16)  \
    UPDATE_KERNEL(name##_f32_f16, Rule, float, F16)    \
    UPDATE_KERNEL(name##_bf16_f32, Rule, Bf16, float)  \
    UPDATE_KERNEL(name##_bf16_bf16, Rule, Bf16, Bf16)  \
    UPDATE_KERNEL(name##_bf16_f16, Rule, Bf16, F16)    \
    UPDATE_KERNEL(name##_f16_f32, Rule, F16, float)    \
    UPDATE_KERNEL(name##_f16_bf16, Rule, F16, Bf16)    \
    UPDATE_KERNEL(name##_f16_f16, Rule, F16, F16)
