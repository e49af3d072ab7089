// Stochastic gradient descent with momentum; see src/update/sgd.rs.

#include "update.cuh"

constexpr u32 DECAYS = 2, MOMENTUM = 4, NESTEROV = 8, FIRST = 16, FUSE_BUFFER = 32;

struct Sgd {
    static constexpr int COLUMNS = 1, REQUIRED = 0;
    __device__ static void update(float& p, float g, float* state, u32 kept, const Scalars& s, u32) {
        float lr = s.value[0], momentum = s.value[1], one_minus_dampening = s.value[2], decay = s.value[3];
        g = s.has(DECAYS) ? __fmaf_rn(decay, p, g) : g;
        if (s.has(MOMENTUM) && kept) {
            float old = state[0];
            float later = s.has(FUSE_BUFFER) ? __fmaf_rn(momentum, old, __fmul_rn(one_minus_dampening, g))
                                             : __fmaf_rn(one_minus_dampening, g, __fmul_rn(momentum, old));
            state[0] = s.has(FIRST) ? g : later;
            g = s.has(NESTEROV) ? __fmaf_rn(momentum, state[0], g) : state[0];
        }
        p = __fmaf_rn(-lr, g, p);
    }
};

UPDATE_KERNELS(sgd, Sgd)
