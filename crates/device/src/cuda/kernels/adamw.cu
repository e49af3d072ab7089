// AdamW; see src/update/adamw.rs.

#include "moments.cuh"

struct AdamW {
    static constexpr int COLUMNS = 3, REQUIRED = 2;
    __device__ static void update(float& p, float g, float* state, u32 kept, const Scalars& s, u32) {
        p = s.has(DECAYS) ? __fmaf_rn(-s.value[DECAY], p, p) : p;
        moment_step(p, g, state, kept, s);
    }
};

UPDATE_KERNELS(adamw, AdamW)
