// One update of many segments with compact masters, for any rule: bf16 weights, and of each master its lower half and a
// bit. See src/update/master.rs for the format and update.cuh for the rest. scripts/make_ptx.py compiles this file and
// then the rule's own, whose UPDATE_KERNELS then makes these kernels.
//
// A thread takes eight elements, so that the byte with their carries is its own.

#pragma once

#include "update.cuh"

constexpr u32 CARRIES = 8;
constexpr u32 MAX_COMPACT_SEGMENTS = 48;

struct CompactSegment {
    u64 weight, grad, state[MAX_COLUMNS], low, carry;  // addresses; 0 for a column that is not there
    u32 elements, first_block, scalars;
    u32 first;  // where its first element is in the parameter, modulo 2048
};

struct CompactUpdate {
    u64 grad_scale, skip;  // as in Update
    u64 followed;
    u32 segments, unused;
    Scalars scalars[MAX_SETS];
    CompactSegment segment[MAX_COMPACT_SEGMENTS];
};
static_assert(sizeof(CompactUpdate) <= 4096, "kernel parameters of every GPU and driver are at most 4 KiB");

template <class T>
struct alignas(16) Eight { T at[CARRIES]; };

// All eight at once where they are there and aligned.
template <class T>
__device__ inline void load_eight(Eight<T>& to, u64 base, u32 at, u32 count, bool whole) {
    const T* from = reinterpret_cast<const T*>(base) + at;
    if (whole) to = *reinterpret_cast<const Eight<T>*>(from);
    else {
#pragma unroll
        for (u32 i = 0; i < CARRIES; i++) {
            if (i < count) to.at[i] = from[i];
        }
    }
}

template <class T>
__device__ inline void store_eight(const Eight<T>& from, u64 base, u32 at, u32 count, bool whole) {
    T* to = reinterpret_cast<T*>(base) + at;
    if (whole) *reinterpret_cast<Eight<T>*>(to) = from;
    else {
#pragma unroll
        for (u32 i = 0; i < CARRIES; i++) {
            if (i < count) to[i] = from.at[i];
        }
    }
}

// The elements from `at` on, at most eight.
template <class Rule, class G>
__device__ void update_eight(
    const CompactUpdate& step, const CompactSegment& seg, const Scalars& s, float scale, u32 at, u32 count, bool whole
) {
    auto kept = [&seg](int c) { return c < Rule::REQUIRED || seg.state[c] != 0; };
    unsigned char* carry_at = reinterpret_cast<unsigned char*>(seg.carry) + at / CARRIES;
    Eight<Bf16> p;
    Eight<u16> low;
    Eight<G> g;
    Eight<float> state[Rule::COLUMNS];
    load_eight(p, seg.weight, at, count, whole);
    load_eight(low, seg.low, at, count, whole);
    load_eight(g, seg.grad, at, count, whole);
#pragma unroll
    for (int c = 0; c < Rule::COLUMNS; c++) {
        if (kept(c)) load_eight(state[c], seg.state[c], at, count, whole);
    }
    u32 carries = *carry_at, new_carries = 0;
    bool all_hold = true;
#pragma unroll
    for (u32 i = 0; i < CARRIES; i++) {
        if (i >= count) continue;
        float master = __uint_as_float((u32(p.at[i].bits) - (carries >> i & 1)) << 16 | low.at[i]);
        bool is_pair = holds(master, p.at[i]);
        all_hold &= is_pair;
        float weight = is_pair ? master : widen(p.at[i]);
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
        u32 bits = __float_as_uint(weight);
        low.at[i] = u16(bits);
        new_carries |= u32(p.at[i].bits != bits >> 16) << i;
#pragma unroll
        for (int c = 0; c < Rule::COLUMNS; c++) state[c].at[i] = column[c];
    }
    // Many threads may store it, all the same value.
    if (step.followed && !all_hold) *reinterpret_cast<volatile u32*>(step.followed) = 1;
    store_eight(p, seg.weight, at, count, whole);
    store_eight(low, seg.low, at, count, whole);
#pragma unroll
    for (int c = 0; c < Rule::COLUMNS; c++) {
        if (kept(c)) store_eight(state[c], seg.state[c], at, count, whole);
    }
    *carry_at = static_cast<unsigned char>(new_carries);
}

template <class Rule, class G>
__device__ void update_compact(const CompactUpdate& step) {
    if (step.skip && *reinterpret_cast<const float*>(step.skip) != 0.0f) return;
    float scale = step.grad_scale ? *reinterpret_cast<const float*>(step.grad_scale) : 1.0f;

    // The last segment that starts at or before this block.
    u32 first = 0, last = step.segments - 1;
    while (first < last) {
        u32 middle = (first + last + 1) / 2;
        if (step.segment[middle].first_block <= blockIdx.x) first = middle;
        else last = middle - 1;
    }
    const CompactSegment& seg = step.segment[first];
    const Scalars s = step.scalars[seg.scalars];
    u32 begin = (blockIdx.x - seg.first_block) * BLOCK_ELEMENTS;
    u32 end = seg.elements - begin < BLOCK_ELEMENTS ? seg.elements : begin + BLOCK_ELEMENTS;

    u64 addresses = seg.weight | seg.grad | seg.low;
#pragma unroll
    for (int c = 0; c < Rule::COLUMNS; c++) addresses |= seg.state[c];
    bool aligned = addresses % 16 == 0;
    for (u32 at = begin + CARRIES * threadIdx.x; at < end; at += CARRIES * THREADS) {
        u32 count = end - at < CARRIES ? end - at : CARRIES;
        update_eight<Rule, G>(step, seg, s, scale, at, count, aligned && count == CARRIES);
    }
}

#define COMPACT_KERNEL(name, Rule, G)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ CompactUpdate step) { \
        update_compact<Rule, G>(step);                                                                      \
    }

// One kernel for each type of gradient.
#undef UPDATE_KERNELS
#define UPDATE_KERNELS(name, Rule)                    \
    COMPACT_KERNEL(name##_compact_f32, Rule, float)   \
    COMPACT_KERNEL(name##_compact_bf16, Rule, Bf16)   \
    COMPACT_KERNEL(name##_compact_f16, Rule, F16)
