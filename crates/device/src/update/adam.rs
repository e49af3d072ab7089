//! Adam with L2 decay: the decay is part of the gradient, and so of the moments.
//!
//! ```text
//! g = g + weight_decay * p           where weight decay is not zero
//! ```
//!
//! and then the moments and the step of AdamW.
//!
//! # The rounding of the decay
//! Torch's compiler fused that multiplication with the addition for some elements of its unrolled loop and not for
//! others. To give the bits of torch 2.11's fused CUDA Adam for f32, this rule does the same; it was found by comparing
//! both candidates with torch's results, element by element:
//!
//! | | fused | rounded twice |
//! |---|---|---|
//! | amsgrad | all elements | |
//! | no amsgrad, maximize | | all elements |
//! | no amsgrad, elements a multiple of 4 | the others | element `i` with `i % 4 == 0` |
//! | no amsgrad, another number of elements | the others | element `i` with `i / 512 % 4 == 0` |

use super::adamw::{COLUMNS, DECAY, DECAYS, HYPERS, keeps, moment_scalars, step};
use super::{Arithmetic, MAX_COLUMNS, Rule, ScalarInputs, Scalars, Splat, element};
use crate::cpu::update::sweep;
use crate::cpu::update::vector::Vector;

/// Adam.
pub(super) static RULE: Rule = Rule {
    name: "adam",
    columns: &COLUMNS,
    hypers: &HYPERS,
    defaults: &[1e-3, 0.9, 0.999, 1e-8, 0.0, 0.0, 0.0],
    keeps,
    powers: &[1, 2],
    counts: |_| true,
    shows_step: true,
    appears_late: false,
    kind,
    scalars,
    element: element::<Adam>,
    sweep: sweep::<Adam>,
    ptx: include_str!("../cuda/kernels/adam.ptx"),
    compact_ptx: include_str!("../cuda/kernels/adam_compact.ptx"),
    packed_ptx: include_str!("../cuda/kernels/adam_packed.ptx"),
};

/// The decay is rounded twice: everywhere, in one element of four, or in one block of four.
const TWICE: u32 = 4;
const TWICE_IN_FOUR: u32 = 8;
const TWICE_IN_BLOCKS: u32 = 16;

/// Elements of such a block.
const BLOCK: u64 = 512;

/// How the decay of a parameter is rounded: one of the flags above, or 0.
fn kind(hypers: &[f64], elements: u64) -> u32 {
    let fuses = hypers[4] == 0.0 || hypers[6] != 0.0;
    match (fuses, hypers[5] != 0.0, elements.is_multiple_of(4)) {
        (true, _, _) => 0,
        (false, true, _) => TWICE,
        (false, false, true) => TWICE_IN_FOUR,
        (false, false, false) => TWICE_IN_BLOCKS,
    }
}

fn scalars(at: &ScalarInputs<'_>) -> Scalars {
    let mut scalars = moment_scalars(at);
    scalars.values[DECAY] = at.hypers[4] as f32;
    scalars.flags |= at.kind;
    scalars
}

struct Adam;

impl Arithmetic for Adam {
    #[inline(always)]
    unsafe fn update<V: Vector>(
        weight: V,
        grad: V,
        state: &mut [V; MAX_COLUMNS],
        kept: u32,
        s: &Splat<V>,
        position: u64,
    ) -> V {
        // SAFETY: as the caller promises.
        unsafe {
            let grad = if s.has(DECAYS) { decayed(weight, grad, s, position) } else { grad };
            step(weight, grad, state, kept, s)
        }
    }
}

/// The gradient with the decay added, rounded as the table above says.
///
/// # Safety
/// The CPU must have the vector's instructions.
#[inline(always)]
unsafe fn decayed<V: Vector>(weight: V, grad: V, s: &Splat<V>, position: u64) -> V {
    // SAFETY: as the caller promises.
    unsafe {
        let once = s.values[DECAY].mul_add(weight, grad);
        if !s.has(TWICE | TWICE_IN_FOUR | TWICE_IN_BLOCKS) {
            return once;
        }
        let twice = grad.add(s.values[DECAY].mul(weight));
        if s.has(TWICE) {
            return twice;
        }
        let in_fours = s.has(TWICE_IN_FOUR);
        once.or_where(twice, |lane| {
            let at = position + lane as u64;
            (if in_fours { at } else { at / BLOCK }).is_multiple_of(4)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::uniform_element;

    fn hypers(weight_decay: f64, maximize: f64, amsgrad: f64) -> [f64; 7] {
        [3e-3, 0.9, 0.999, 1e-8, weight_decay, maximize, amsgrad]
    }

    /// The same step in f64 and in the textbook's order.
    #[test]
    fn arithmetic_is_adam_with_l2_decay() {
        for maximize in [0.0, 1.0] {
            let numbers = hypers(0.1, maximize, 0.0);
            let (mut p, mut m, mut v) = (0.5f64, 0.0f64, 0.0f64);
            let (mut weight, mut state) = (0.5f32, [0f32; 3]);
            for t in 1..=50u64 {
                // As the kernels hand it over: negated already.
                let g = f64::from(uniform_element(7, t, -1.0, 1.0));
                let s = RULE.at_step(&numbers, t, 7);
                weight = (RULE.element)(weight, g as f32, &mut state, 0b011, &s, t);
                let g = g + 0.1 * p;
                m = 0.9 * m + (1.0 - 0.9) * g;
                v = 0.999 * v + (1.0 - 0.999) * g * g;
                let m_hat = m / (1.0 - 0.9f64.powi(t as i32));
                let v_hat = v / (1.0 - 0.999f64.powi(t as i32));
                p -= 3e-3 * m_hat / (v_hat.sqrt() + 1e-8);
                assert!((f64::from(weight) - p).abs() < 1e-5, "step {t}: {weight} and {p}");
            }
        }
    }

    /// The table of roundings, by what the first moment shows of the gradient.
    #[test]
    fn the_decay_is_rounded_as_torch_rounds_it() {
        // The gradient cancels the rounded product: what is left is the product's error, or nothing.
        let (p, decay) = (0.300_000_1f32, 0.013f32);
        let g = -(decay * p);
        let (once, twice) = (decay.mul_add(p, g), g + decay * p);
        assert_ne!(once, twice, "choose other numbers");
        let mean = |numbers: &[f64; 7], elements: u64, position: u64| {
            let (s, mut state) = (RULE.at_step(numbers, 1, elements), [0f32; 3]);
            let _ = (RULE.element)(p, g, &mut state, (RULE.keeps)(numbers), &s, position);
            if state[0] == s.values[2] * once {
                "once"
            } else {
                assert_eq!(state[0], s.values[2] * twice);
                "twice"
            }
        };
        for position in [0, 1, 3, 4, 511, 512, 513, 2047, 2048, 4096 + 511] {
            assert_eq!(mean(&hypers(0.013, 0.0, 1.0), 8, position), "once");
            assert_eq!(mean(&hypers(0.013, 1.0, 1.0), 8, position), "once");
            assert_eq!(mean(&hypers(0.013, 1.0, 0.0), 8, position), "twice");
            let fourth = if position % 4 == 0 { "twice" } else { "once" };
            assert_eq!(mean(&hypers(0.013, 0.0, 0.0), 8, position), fourth);
            let block = if position / 512 % 4 == 0 { "twice" } else { "once" };
            assert_eq!(mean(&hypers(0.013, 0.0, 0.0), 9, position), block);
        }
    }
}
