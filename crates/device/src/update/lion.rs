//! Lion: the sign of an interpolated momentum (Chen et al., 2023, algorithm 2).
//!
//! ```text
//! u = fma(beta1, m, (1 - beta1) * g)
//! p = fma(-decay, p, p)              where weight decay is not zero; decay = lr * weight_decay
//! p = fma(-lr, sign(u), p)
//! m = fma(beta2, m, (1 - beta2) * g)
//! ```
//!
//! The sign of a NaN is a NaN: a broken gradient shows in the weight and does not freeze it.

use super::{Arithmetic, MAX_COLUMNS, MAXIMIZE, Rule, RuleColumn, ScalarInputs, Scalars, Splat, element, flag};
use crate::cpu::update::sweep;
use crate::cpu::update::vector::Vector;

/// Lion.
pub(super) static RULE: Rule = Rule {
    name: "lion",
    columns: &[RuleColumn::signed("exp_avg", "exp_avg_scale")],
    hypers: &["lr", "beta1", "beta2", "weight_decay", "maximize"],
    defaults: &[1e-4, 0.9, 0.99, 0.0, 0.0],
    keeps: |_| 1,
    powers: &[],
    counts: |_| true,
    shows_step: false,
    appears_late: false,
    kind: |_, _| 0,
    scalars,
    element: element::<Lion>,
    sweep: sweep::<Lion>,
    ptx: include_str!("../cuda/kernels/lion.ptx"),
    compact_ptx: include_str!("../cuda/kernels/lion_compact.ptx"),
    packed_ptx: include_str!("../cuda/kernels/lion_packed.ptx"),
};

const DECAYS: u32 = 2;

fn scalars(at: &ScalarInputs<'_>) -> Scalars {
    let [lr, beta1, beta2, weight_decay] = [0, 1, 2, 3].map(|i| at.hypers[i] as f32);
    Scalars {
        values: [lr, lr * weight_decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, 0.0, 0.0],
        flags: flag(at.hypers[4] != 0.0, MAXIMIZE) | flag(at.hypers[3] != 0.0, DECAYS),
        origin: at.origin(),
    }
}

struct Lion;

impl Arithmetic for Lion {
    #[inline(always)]
    unsafe fn update<V: Vector>(
        weight: V,
        grad: V,
        state: &mut [V; MAX_COLUMNS],
        _kept: u32,
        s: &Splat<V>,
        _position: u64,
    ) -> V {
        let [lr, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, ..] = s.values;
        // SAFETY: as the caller promises.
        unsafe {
            let direction = beta1.mul_add(state[0], one_minus_beta1.mul(grad)).sign();
            let weight = if s.has(DECAYS) { decay.neg().mul_add(weight, weight) } else { weight };
            state[0] = beta2.mul_add(state[0], one_minus_beta2.mul(grad));
            lr.neg().mul_add(direction, weight)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::uniform_element;

    /// The same steps in f64, as the paper writes them.
    #[test]
    fn arithmetic_is_lion() {
        let (mut p, mut m) = (0.5f64, 0.0f64);
        let (mut weight, mut state) = (0.5f32, [0f32; 3]);
        for t in 1..=50u64 {
            let g = f64::from(uniform_element(7, t, -1.0, 1.0));
            let s = RULE.at_step(&[1e-2, 0.9, 0.99, 0.1, 0.0], t, 4);
            weight = (RULE.element)(weight, g as f32, &mut state, 1, &s, 0);
            let direction = (0.9 * m + 0.1 * g).signum();
            p -= 1e-2 * (direction + 0.1 * p);
            m = 0.99 * m + 0.01 * g;
            assert!((f64::from(weight) - p).abs() < 1e-5, "step {t}: {weight} and {p}");
        }
    }

    #[test]
    fn the_sign_of_zero_is_no_step_and_of_a_nan_a_nan() {
        let s = RULE.at_step(&[1e-2, 0.9, 0.99, 0.0, 0.0], 1, 4);
        assert_eq!((RULE.element)(0.5, 0.0, &mut [0.0; 3], 1, &s, 0), 0.5);
        assert!((RULE.element)(0.5, f32::NAN, &mut [0.0; 3], 1, &s, 0).is_nan());
    }
}
