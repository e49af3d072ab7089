//! Stochastic gradient descent with momentum.
//!
//! ```text
//! g = fma(weight_decay, p, g)                    where weight decay is not zero
//! b = g                                          at a parameter's first update with momentum
//! b = fma(1 - dampening, g, momentum * b)        later
//! g = b, or with nesterov  g = fma(momentum, b, g)
//! p = fma(-lr, g, p)
//! ```
//!
//! This is what torch 2.11's fused CUDA SGD computes for f32, found by comparing candidates with its results bit for
//! bit. Torch's compiler fused the other product, `b = fma(momentum, b, (1 - dampening) * g)`, in one case, and so does
//! this rule: maximize, no weight decay, and a number of elements that is a multiple of 4.
//!
//! A parameter has no momentum buffer before its first update with momentum, as in torch. While a group's momentum is
//! zero, an existing buffer is not changed.

use super::{Arithmetic, MAX_COLUMNS, MAXIMIZE, Rule, RuleColumn, ScalarInputs, Scalars, Splat, element, flag};
use crate::cpu::update::sweep;
use crate::cpu::update::vector::Vector;

/// SGD.
pub(super) static RULE: Rule = Rule {
    name: "sgd",
    columns: &[RuleColumn::signed("momentum_buffer", "momentum_buffer_scale")],
    hypers: &["lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"],
    defaults: &[1e-3, 0.0, 0.0, 0.0, 0.0, 0.0],
    keeps: |hypers| flag(hypers[1] != 0.0, BUFFER),
    powers: &[],
    counts: |hypers| hypers[1] != 0.0,
    shows_step: false,
    appears_late: true,
    kind,
    scalars,
    element: element::<Sgd>,
    sweep: sweep::<Sgd>,
    ptx: include_str!("../cuda/kernels/sgd.ptx"),
    compact_ptx: include_str!("../cuda/kernels/sgd_compact.ptx"),
    packed_ptx: include_str!("../cuda/kernels/sgd_packed.ptx"),
};

/// The bit of the momentum buffer's column.
const BUFFER: u32 = 1;

const DECAYS: u32 = 2;
const MOMENTUM: u32 = 4;
const NESTEROV: u32 = 8;
const FIRST: u32 = 16;
/// The product with the buffer is the one that is not rounded.
const FUSE_BUFFER: u32 = 32;

/// Which product of the buffer's update is not rounded.
fn kind(hypers: &[f64], elements: u64) -> u32 {
    let by_elements = hypers[1] != 0.0 && hypers[3] == 0.0 && hypers[5] != 0.0;
    flag(by_elements && elements.is_multiple_of(4), FUSE_BUFFER)
}

fn scalars(at: &ScalarInputs<'_>) -> Scalars {
    let &[lr, momentum, dampening, weight_decay, nesterov, maximize] = at.hypers else { return Scalars::default() };
    Scalars {
        values: [lr as f32, momentum as f32, (1.0 - dampening) as f32, weight_decay as f32, 0.0, 0.0, 0.0, 0.0],
        flags: flag(maximize != 0.0, MAXIMIZE)
            | flag(weight_decay != 0.0, DECAYS)
            | flag(momentum != 0.0, MOMENTUM)
            | flag(nesterov != 0.0, NESTEROV)
            | flag(at.step <= 1, FIRST)
            | at.kind,
        origin: at.origin(),
    }
}

struct Sgd;

impl Arithmetic for Sgd {
    #[inline(always)]
    unsafe fn update<V: Vector>(
        weight: V,
        grad: V,
        state: &mut [V; MAX_COLUMNS],
        kept: u32,
        s: &Splat<V>,
        _position: u64,
    ) -> V {
        let [lr, momentum, one_minus_dampening, decay, ..] = s.values;
        // SAFETY: as the caller promises.
        unsafe {
            let mut grad = if s.has(DECAYS) { decay.mul_add(weight, grad) } else { grad };
            if s.has(MOMENTUM) && kept & BUFFER != 0 {
                let old = state[0];
                state[0] = if s.has(FIRST) {
                    grad
                } else if s.has(FUSE_BUFFER) {
                    momentum.mul_add(old, one_minus_dampening.mul(grad))
                } else {
                    one_minus_dampening.mul_add(grad, momentum.mul(old))
                };
                grad = if s.has(NESTEROV) { momentum.mul_add(state[0], grad) } else { state[0] };
            }
            lr.neg().mul_add(grad, weight)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::uniform_element;

    /// The same steps in f64 and in the textbook's order.
    #[test]
    fn arithmetic_is_sgd_with_momentum() {
        for (momentum, dampening, decay, nesterov) in
            [(0.0, 0.0, 0.0, 0.0), (0.9, 0.0, 0.0, 0.0), (0.9, 0.3, 0.01, 0.0), (0.8, 0.0, 0.01, 1.0)]
        {
            let hypers = [0.03, momentum, dampening, decay, nesterov, 0.0];
            let (mut p, mut b) = (0.5f64, 0.0f64);
            let (mut weight, mut state) = (0.5f32, [f32::NAN, 0.0, 0.0]);
            for t in 1..=50u64 {
                let g = f64::from(uniform_element(7, t, -1.0, 1.0));
                let s = RULE.at_step(&hypers, t, 4);
                weight = (RULE.element)(weight, g as f32, &mut state, (RULE.keeps)(&hypers), &s, 0);
                let g = g + decay * p;
                b = if t == 1 { g } else { momentum * b + (1.0 - dampening) * g };
                p -= 0.03
                    * if momentum == 0.0 {
                        g
                    } else if nesterov != 0.0 {
                        g + momentum * b
                    } else {
                        b
                    };
                assert!((f64::from(weight) - p).abs() < 1e-5, "step {t}: {weight} and {p}");
            }
        }
    }

    #[test]
    fn a_momentum_of_zero_leaves_the_buffer_alone() {
        let (s, mut state) = (RULE.at_step(&[0.1, 0.0, 0.0, 0.0, 0.0, 0.0], 5, 4), [0.25, 0.0, 0.0]);
        assert_eq!((RULE.element)(1.0, 1.0, &mut state, BUFFER, &s, 0), 0.9);
        assert_eq!(state[0], 0.25);
    }
}
