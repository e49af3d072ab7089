// Lion; see src/update/lion.rs.

#include "update.cuh"

constexpr u32 DECAYS = 2;

struct Lion {
    static constexpr int COLUMNS = 1, REQUIRED = 1;
    __device__ static void update(float& p, float g, float* state, u32, const Scalars& s, u32) {
        float lr = s.value[0], decay = s.value[1];
        float u = __fmaf_rn(s.value[2], state[0], __fmul_rn(s.value[3], g));
        float direction = u > 0.0f ? 1.0f : u < 0.0f ? -1.0f : u;
        p = s.has(DECAYS) ? __fmaf_rn(-decay, p, p) : p;
        p = __fmaf_rn(-lr, direction, p);
        state[0] = __fmaf_rn(s.value[4], state[0], __fmul_rn(s.value[5], g));
    }
};

UPDATE_KERNELS(lion, Lion)
