// The kernels, in CUDA C++. kernels.ptx beside this file is made from it by scripts/make_ptx.py and is what ships; a
// test makes it again and compares.
//
// The arithmetic is that of src/arith.rs, operation by operation: every rounding is an intrinsic and the compiler may
// not fuse (--fmad=false), so a fused multiply-add is where one is written. src/cuda/launch.rs lays out the structs.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 THREADS = 256;
constexpr u32 BLOCK_ELEMENTS = 4096;
constexpr u32 MAX_SEGMENTS = 56;
constexpr u32 MAX_SCALARS = 8;

struct Scalars {
    float decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, bias_correction2_sqrt, eps;
    u32 decays;
    u32 maximize;
};

struct Segment {
    u64 param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, master;  // addresses; the last two may be 0
    u32 elements, first_block, scalars, unused;
};

// Passed by value: a launch must not depend on memory that the host may have changed by the time it runs.
struct AdamW {
    u64 grad_scale, skip;  // addresses of an f32 each, or 0
    u32 segments, unused;
    Scalars scalars[MAX_SCALARS];
    Segment segment[MAX_SEGMENTS];
};
static_assert(sizeof(AdamW) <= 4096, "kernel parameters of every GPU and driver are at most 4 KiB");

struct Bf16 { u16 bits; };
struct F16 { u16 bits; };

__device__ float widen(float x) { return x; }
__device__ float widen(Bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ float widen(F16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

__device__ void narrow(float x, float& y) { y = x; }
__device__ void narrow(float x, Bf16& y) {
    u32 bits = __float_as_uint(x);
    y.bits = x != x ? u16(0x7fff) : u16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
__device__ void narrow(float x, F16& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }

// One element; see adamw_element in src/arith.rs.
__device__ void update(float& p, float& m, float& v, float& x, float grad, float scale, bool amsgrad, const Scalars& s) {
    float g = __fmul_rn(grad, scale);
    g = s.maximize ? -g : g;
    p = s.decays ? __fmaf_rn(-s.decay, p, p) : p;
    m = __fmaf_rn(s.beta1, m, __fmul_rn(s.one_minus_beta1, g));
    v = __fmaf_rn(s.beta2, v, __fmul_rn(s.one_minus_beta2, __fmul_rn(g, g)));
    x = amsgrad && x < v ? v : x;
    float w = amsgrad ? x : v;
    float d = __fadd_rn(__fdiv_rn(__fsqrt_rn(w), s.bias_correction2_sqrt), s.eps);
    p = __fsub_rn(p, __fdiv_rn(__fmul_rn(s.step_size, m), d));
}

__device__ bool same(float a, float b) { return __float_as_uint(a) == __float_as_uint(b); }
__device__ bool same(Bf16 a, Bf16 b) { return a.bits == b.bits; }
__device__ bool same(F16 a, F16 b) { return a.bits == b.bits; }

// N elements starting at `at`: loaded together, so that all their reads are under way at once.
template <int N, class P, class G>
__device__ void update_run(const Segment& seg, const Scalars& s, float scale, u32 at) {
    struct alignas(N * sizeof(P)) Ps { P at[N]; };
    struct alignas(N * sizeof(G)) Gs { G at[N]; };
    struct alignas(N * sizeof(float)) Fs { float at[N]; };
    auto f = [at](u64 base) { return reinterpret_cast<Fs*>(base + u64(at) * sizeof(float)); };
    Ps* params = reinterpret_cast<Ps*>(seg.param + u64(at) * sizeof(P));
    Ps p = *params;
    Fs master, x;
    if (seg.master) master = *f(seg.master);
    Gs g = *reinterpret_cast<const Gs*>(seg.grad + u64(at) * sizeof(G));
    Fs m = *f(seg.exp_avg), v = *f(seg.exp_avg_sq);
    if (seg.max_exp_avg_sq) x = *f(seg.max_exp_avg_sq);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float weight = widen(p.at[i]);
        if (seg.master) {
            P rounded;
            narrow(master.at[i], rounded);
            if (same(rounded, p.at[i])) weight = master.at[i];
        }
        float largest = seg.max_exp_avg_sq ? x.at[i] : 0.0f;
        update(weight, m.at[i], v.at[i], largest, widen(g.at[i]), scale, seg.max_exp_avg_sq != 0, s);
        narrow(weight, p.at[i]);
        master.at[i] = weight;
        x.at[i] = largest;
    }
    *params = p;
    *f(seg.exp_avg) = m;
    *f(seg.exp_avg_sq) = v;
    if (seg.master) *f(seg.master) = master;
    if (seg.max_exp_avg_sq) *f(seg.max_exp_avg_sq) = x;
}

template <class P, class G>
__device__ void adamw(const AdamW& step) {
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

    bool aligned = seg.param % (4 * sizeof(P)) == 0 && seg.grad % (4 * sizeof(G)) == 0 &&
                   (seg.exp_avg | seg.exp_avg_sq | seg.max_exp_avg_sq | seg.master) % 16 == 0;
    u32 fours = aligned ? (end - begin) / 4 : 0;
    for (u32 i = threadIdx.x; i < fours; i += THREADS) update_run<4, P, G>(seg, s, scale, begin + 4 * i);
    for (u32 i = begin + 4 * fours + threadIdx.x; i < end; i += THREADS) update_run<1, P, G>(seg, s, scale, i);
}

#define ADAMW(name, P, G) \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ AdamW step) { adamw<P, G>(step); }
ADAMW(adamw_f32_f32, float, float)
ADAMW(adamw_f32_bf16, float, Bf16)
ADAMW(adamw_f32_f16, float, F16)
ADAMW(adamw_bf16_f32, Bf16, float)
ADAMW(adamw_bf16_bf16, Bf16, Bf16)
ADAMW(adamw_bf16_f16, Bf16, F16)
ADAMW(adamw_f16_f32, F16, float)
ADAMW(adamw_f16_bf16, F16, Bf16)
ADAMW(adamw_f16_f16, F16, F16)

constexpr u32 COPY_BLOCK_BYTES = 32768;
constexpr u32 MAX_PAIRS = 168;

struct Pair {
    u64 from, to;
    u32 bytes, first_block;
};

// By value, as AdamW is.
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

// See uniform_element in src/arith.rs.
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

// torch's fused AdamW takes its bias corrections from powf on the device, which is not correctly rounded.
extern "C" __global__ void powers(float* values, u64 elements, float beta, u64 first) {
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += u64(gridDim.x) * blockDim.x) {
        values[i] = powf(beta, float(first + i));
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
