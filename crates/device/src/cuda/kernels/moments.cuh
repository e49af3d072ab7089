// What AdamW and Adam have in common; see src/update/adamw.rs.

#pragma once

#include "update.cuh"

constexpr u32 DECAYS = 2;
constexpr u32 DECAY = 0;  // its place among the scalars

// The step along the moments, without decay.
__device__ inline void moment_step(float& p, float g, float* state, u32 kept, const Scalars& s) {
    bool amsgrad = (kept & 4) != 0;
    float m = __fmaf_rn(s.value[1], state[0], __fmul_rn(s.value[2], g));
    float v = __fmaf_rn(s.value[3], state[1], __fmul_rn(s.value[4], __fmul_rn(g, g)));
    float x = amsgrad && state[2] < v ? v : state[2];
    float w = amsgrad ? x : v;
    float d = __fadd_rn(__fdiv_rn(__fsqrt_rn(w), s.value[6]), s.value[7]);
    p = __fsub_rn(p, __fdiv_rn(__fmul_rn(s.value[5], m), d));
    state[0] = m;
    state[1] = v;
    state[2] = x;
}
