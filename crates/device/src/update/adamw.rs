//! AdamW: Adam with decoupled weight decay.
//!
//! With `fma(a, b, c)` for `a * b + c` rounded once:
//!
//! ```text
//! p = fma(-decay, p, p)              where weight decay is not zero; decay = lr * weight_decay
//! m = fma(beta1, m, (1 - beta1) * g)
//! v = fma(beta2, v, (1 - beta2) * (g * g))
//! w = v, or with amsgrad  x = max(x, v), w = x
//! d = sqrt(w) / sqrt(1 - beta2^t) + eps
//! p = p - (step_size * m) / d        with step_size = lr / (1 - beta1^t)
//! ```
//!
//! This is what torch 2.11's fused CUDA AdamW computes for f32, found by comparing candidates with its results bit for
//! bit; `decay`, `step_size` and the complements are rounded to f32 before they enter.

use super::{Arithmetic, MAX_COLUMNS, MAXIMIZE, Rule, RuleColumn, ScalarInputs, Scalars, Splat, element, flag};
use crate::cpu::update::sweep;
use crate::cpu::update::vector::Vector;

/// AdamW.
pub(super) static RULE: Rule = Rule {
    name: "adamw",
    columns: &COLUMNS,
    hypers: &HYPERS,
    defaults: &[1e-3, 0.9, 0.999, 1e-8, 1e-2, 0.0, 0.0],
    keeps,
    powers: &[1, 2],
    counts: |_| true,
    shows_step: true,
    appears_late: false,
    kind: |_, _| 0,
    scalars,
    element: element::<AdamW>,
    sweep: sweep::<AdamW>,
    ptx: include_str!("../cuda/kernels/adamw.ptx"),
    compact_ptx: include_str!("../cuda/kernels/adamw_compact.ptx"),
    packed_ptx: include_str!("../cuda/kernels/adamw_packed.ptx"),
};

/// The first moment, the second, and the largest second moment so far.
pub(super) const COLUMNS: [RuleColumn; 3] = [
    RuleColumn::signed("exp_avg", "exp_avg_scale"),
    RuleColumn::unsigned("exp_avg_sq", "exp_avg_sq_scale"),
    RuleColumn::unsigned("max_exp_avg_sq", "max_exp_avg_sq_scale"),
];

pub(super) const HYPERS: [&str; 7] = ["lr", "beta1", "beta2", "eps", "weight_decay", "maximize", "amsgrad"];

/// The bit of the column that amsgrad needs.
const LARGEST: u32 = 1 << 2;

/// Weight decay is not zero: with it, even a rate of zero turns `-0.0` into `0.0`.
pub(super) const DECAYS: u32 = 2;

/// The place of the decay among the scalars.
pub(super) const DECAY: usize = 0;

pub(super) fn keeps(hypers: &[f64]) -> u32 {
    0b011 | flag(hypers[6] != 0.0, LARGEST)
}

fn scalars(at: &ScalarInputs<'_>) -> Scalars {
    let mut scalars = moment_scalars(at);
    scalars.values[DECAY] = at.hypers[0] as f32 * at.hypers[4] as f32;
    scalars
}

/// What AdamW and Adam have in common: everything but the decay.
pub(super) fn moment_scalars(at: &ScalarInputs<'_>) -> Scalars {
    let [lr, beta1, beta2, eps] = [0, 1, 2, 3].map(|i| at.hypers[i] as f32);
    let (step_size, correction2) = (lr / (1.0 - at.powers[0]), (1.0 - at.powers[1]).sqrt());
    Scalars {
        values: [0.0, beta1, 1.0 - beta1, beta2, 1.0 - beta2, step_size, correction2, eps],
        flags: flag(at.hypers[5] != 0.0, MAXIMIZE) | flag(at.hypers[4] != 0.0, DECAYS),
        origin: at.origin(),
    }
}

struct AdamW;

impl Arithmetic for AdamW {
    #[inline(always)]
    unsafe fn update<V: Vector>(
        weight: V,
        grad: V,
        state: &mut [V; MAX_COLUMNS],
        kept: u32,
        s: &Splat<V>,
        _position: u64,
    ) -> V {
        // SAFETY: as the caller promises.
        unsafe {
            let weight = if s.has(DECAYS) { s.values[DECAY].neg().mul_add(weight, weight) } else { weight };
            step(weight, grad, state, kept, s)
        }
    }
}

/// The step along the moments, without decay.
///
/// # Safety
/// The CPU must have the vector's instructions.
#[inline(always)]
pub(super) unsafe fn step<V: Vector>(weight: V, grad: V, state: &mut [V; MAX_COLUMNS], kept: u32, s: &Splat<V>) -> V {
    let [_, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, correction2_sqrt, eps] = s.values;
    // SAFETY: as the caller promises.
    unsafe {
        let mean = beta1.mul_add(state[0], one_minus_beta1.mul(grad));
        let square = beta2.mul_add(state[1], one_minus_beta2.mul(grad.mul(grad)));
        let mut under = square;
        if kept & LARGEST != 0 {
            // A comparison, not a maximum: a NaN must come out as it does on the GPU.
            under = state[2].raised_to(square);
            state[2] = under;
        }
        (state[0], state[1]) = (mean, square);
        let divisor = under.sqrt().div(correction2_sqrt).add(eps);
        weight.sub(step_size.mul(mean).div(divisor))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::uniform_element;

    const LR: f64 = 3e-3;
    const DECAYING: [f64; 7] = [LR, 0.9, 0.999, 1e-8, 0.1, 0.0, 0.0];

    /// The same step in f64 and in the textbook's order: the written arithmetic must be AdamW, up to rounding.
    #[test]
    fn arithmetic_is_adamw() {
        let (mut p, mut m, mut v) = (0.5f64, 0.0f64, 0.0f64);
        let (mut weight, mut state) = (0.5f32, [0f32; 3]);
        for t in 1..=50u64 {
            let g = f64::from(uniform_element(7, t, -1.0, 1.0));
            weight = (RULE.element)(weight, g as f32, &mut state, 0b011, &RULE.at_step(&DECAYING, t, 1), 0);
            p -= LR * 0.1 * p;
            m = 0.9 * m + (1.0 - 0.9) * g;
            v = 0.999 * v + (1.0 - 0.999) * g * g;
            let m_hat = m / (1.0 - 0.9f64.powi(t as i32));
            let v_hat = v / (1.0 - 0.999f64.powi(t as i32));
            p -= LR * m_hat / (v_hat.sqrt() + 1e-8);
            assert!((f64::from(weight) - p).abs() < 1e-5, "step {t}: {weight} and {p}");
        }
    }

    #[test]
    fn decay_of_zero_leaves_the_sign_of_zero_alone() {
        let without = RULE.at_step(&[LR, 0.9, 0.999, 1e-8, 0.0, 0.0, 0.0], 1, 1);
        let mut state = [0.0, 1.0, 0.0];
        assert!((RULE.element)(-0.0, 0.0, &mut state, 0b011, &without, 0).is_sign_negative());
    }
}
