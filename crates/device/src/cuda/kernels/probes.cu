// Kernels for benchmarks and tests: they fill, compare, delay and fail. Loaded at their first use.

#include "types.cuh"

// See uniform_element in src/kernel.rs.
extern "C" __global__ void uniform(float* values, u64 elements, u64 seed, float low, float high) {
    float width = __fsub_rn(high, low);
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += u64(gridDim.x) * blockDim.x) {
        u64 z = seed + i * 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        z ^= z >> 31;
        float unit = __fmul_rn(float(u32(z >> 40)), 1.0f / 16777216.0f);
        values[i] = __fmaf_rn(unit, width, low);
    }
}

extern "C" __global__ void count_differences(const u32* a, const u32* b, u64 words, u64* count) {
    u64 differing = 0;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += u64(gridDim.x) * blockDim.x) {
        differing += a[i] != b[i];
    }
    for (int offset = 16; offset > 0; offset /= 2) differing += __shfl_down_sync(0xffffffff, differing, offset);
    if (threadIdx.x % 32 == 0 && differing != 0) atomicAdd(count, differing);
}

extern "C" __global__ void spin(u64 ns) {
    u64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - start < ns);
}

extern "C" __global__ void trap() { asm volatile("trap;"); }
