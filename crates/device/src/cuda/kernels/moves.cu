// Kernels that every optimizer needs: copies of many pairs, and powers for bias corrections.

#include "types.cuh"

constexpr u32 COPY_BLOCK_BYTES = 32768;
constexpr u32 MAX_PAIRS = 168;

struct Pair {
    u64 from, to;
    u32 bytes, first_block;
};

// By value, as updates are.
struct CopyPairs {
    u32 pairs, unused;
    Pair pair[MAX_PAIRS];
};
static_assert(sizeof(CopyPairs) <= 4096, "kernel parameters of every GPU and driver are at most 4 KiB");

// One block for each COPY_BLOCK_BYTES of a pair.
extern "C" __global__ void __launch_bounds__(THREADS) copy_pairs(const __grid_constant__ CopyPairs copy) {
    u32 low = 0, high = copy.pairs - 1;
    while (low < high) {
        u32 middle = (low + high + 1) / 2;
        if (copy.pair[middle].first_block <= blockIdx.x) low = middle;
        else high = middle - 1;
    }
    const Pair& pair = copy.pair[low];
    u32 begin = (blockIdx.x - pair.first_block) * COPY_BLOCK_BYTES;
    u32 bytes = pair.bytes - begin < COPY_BLOCK_BYTES ? pair.bytes - begin : COPY_BLOCK_BYTES;
    u64 from = pair.from + begin, to = pair.to + begin;
    u32 wide = (from | to) % 16 == 0 ? bytes / 16 : 0;
    const uint4* wide_from = reinterpret_cast<const uint4*>(from);
    uint4* wide_to = reinterpret_cast<uint4*>(to);
    for (u32 i = threadIdx.x; i < wide; i += THREADS) wide_to[i] = wide_from[i];
    const char* byte_from = reinterpret_cast<const char*>(from);
    char* byte_to = reinterpret_cast<char*>(to);
    for (u32 i = 16 * wide + threadIdx.x; i < bytes; i += THREADS) byte_to[i] = byte_from[i];
}

// torch's fused kernels take their bias corrections from powf on the device, which is not correctly rounded.
extern "C" __global__ void powers(float* values, u64 elements, float base, u64 first) {
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += u64(gridDim.x) * blockDim.x) {
        values[i] = powf(base, float(first + i));
    }
}
