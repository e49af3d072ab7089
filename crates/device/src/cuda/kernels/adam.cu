// Adam with L2 decay; see src/update/adam.rs, also for which elements round the decay twice.

#include "moments.cuh"

constexpr u32 TWICE = 4, TWICE_IN_FOUR = 8, TWICE_IN_BLOCKS = 16;

struct Adam {
    static constexpr int COLUMNS = 3, REQUIRED = 2;
    __device__ static void update(float& p, float g, float* state, u32 kept, const Scalars& s, u32 position) {
        bool twice = s.has(TWICE) || (s.has(TWICE_IN_FOUR) && position % 4 == 0) ||
                     (s.has(TWICE_IN_BLOCKS) && position / 512 % 4 == 0);
        float decayed = twice ? __fadd_rn(g, __fmul_rn(s.value[DECAY], p)) : __fmaf_rn(s.value[DECAY], p, g);
        moment_step(p, s.has(DECAYS) ? decayed : g, state, kept, s);
    }
};

UPDATE_KERNELS(adam, Adam)
