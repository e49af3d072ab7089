// Weights and the masters that they are roundings of: whether they are, and writing them anew. For updates that may be
// taken back.

#include "update.cuh"

constexpr u32 MAX_MASTERED = 160;

struct Mastered {
    u64 weight, master;
    u32 elements, first_block;
};

// By value, as updates are.
struct Masters {
    u64 differ;  // address of an f32 that is set to 1 where a weight is not its master's rounding
    u32 pairs, unused;
    Mastered pair[MAX_MASTERED];
};
static_assert(sizeof(Masters) <= 4096, "kernel parameters of every GPU and driver are at most 4 KiB");

// One block for each BLOCK_ELEMENTS of a pair.
template <bool WRITES, class P>
__device__ void visit_masters(const Masters& of) {
    u32 low = 0, high = of.pairs - 1;
    while (low < high) {
        u32 middle = (low + high + 1) / 2;
        if (of.pair[middle].first_block <= blockIdx.x) low = middle;
        else high = middle - 1;
    }
    const Mastered& pair = of.pair[low];
    u32 begin = (blockIdx.x - pair.first_block) * BLOCK_ELEMENTS;
    u32 count = pair.elements - begin < BLOCK_ELEMENTS ? pair.elements - begin : BLOCK_ELEMENTS;
    P* weights = reinterpret_cast<P*>(pair.weight) + begin;
    const float* masters = reinterpret_cast<const float*>(pair.master) + begin;
    bool all_hold = true;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        if (WRITES) narrow(masters[i], weights[i]);
        else all_hold &= holds(masters[i], weights[i]);
    }
    // Many threads may store it, all the same value.
    if (!all_hold) *reinterpret_cast<volatile float*>(of.differ) = 1.0f;
}

#define MASTER_KERNELS(name, P)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) compare_##name(const __grid_constant__ Masters of) {         \
        visit_masters<false, P>(of);                                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) round_##name(const __grid_constant__ Masters of) {           \
        visit_masters<true, P>(of);                                                                                    \
    }

MASTER_KERNELS(f32, float)
MASTER_KERNELS(bf16, Bf16)
MASTER_KERNELS(f16, F16)
