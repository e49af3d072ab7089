//! The one written arithmetic of AdamW, which every backend follows operation by operation.
//!
//! All values are f32, every operation rounds to nearest-even, and a fused multiply-add is used exactly where one is
//! written here. With `fma(a, b, c)` for `a * b + c` rounded once:
//!
//! ```text
//! g = grad * grad_scale              where a scale is given
//! g = -g                             where the sign is flipped (maximize)
//! p = the parameter                  or its master, where one is kept and the parameter is its rounding
//! p = fma(-decay, p, p)              where weight decay is not zero
//! m = fma(beta1, m, (1 - beta1) * g)
//! v = fma(beta2, v, (1 - beta2) * (g * g))
//! w = v, or with amsgrad  x = max(x, v), w = x
//! d = sqrt(w) / sqrt(1 - beta2^t) + eps
//! p = p - (step_size * m) / d        with step_size = lr / (1 - beta1^t)
//! ```
//!
//! A master whose rounding is not the parameter gives way to the parameter, element by element. So a master that starts
//! as zero becomes the weight at the first step, weights that were replaced are followed, and a master that was saved
//! with its weights stays.
//!
//! This is what torch 2.11's fused CUDA AdamW computes for f32, found by comparing candidates with its results bit for
//! bit; `decay`, `step_size` and the complements are rounded to f32 before they enter. [`crate::cpu`] compiles
//! [`adamw_element`] for scalar and vector units, `cuda/kernels.cu` writes the same operations as intrinsics, and the
//! contract tests compare their bits.

/// The numbers of one hyper-parameter set at one step, ready for the kernels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWScalars {
    /// `lr * weight_decay`.
    pub decay: f32,
    /// Whether weight decay is not zero: with it, even a rate of zero turns `-0.0` into `0.0`.
    pub decays: bool,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// `lr / (1 - beta1^t)`.
    pub step_size: f32,
    /// `sqrt(1 - beta2^t)`.
    pub bias_correction2_sqrt: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// Whether to climb instead of descend.
    pub maximize: bool,
}

/// The hyper-parameters of one group as a user gives them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWHyper {
    /// Learning rate.
    pub lr: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Whether to climb instead of descend.
    pub maximize: bool,
}

impl Default for AdamWHyper {
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2, maximize: false }
    }
}

impl AdamWHyper {
    /// The scalars at step `t`, counted from 1, with correctly rounded powers.
    pub fn at_step(&self, t: u64) -> AdamWScalars {
        self.with_powers(power_element(self.beta1 as f32, t), power_element(self.beta2 as f32, t))
    }

    /// The scalars from `beta1^t` and `beta2^t`, which a device may compute in its own way.
    pub fn with_powers(&self, power1: f32, power2: f32) -> AdamWScalars {
        let (lr, beta1, beta2) = (self.lr as f32, self.beta1 as f32, self.beta2 as f32);
        AdamWScalars {
            decay: lr * self.weight_decay as f32,
            decays: self.weight_decay != 0.0,
            beta1,
            one_minus_beta1: 1.0 - beta1,
            beta2,
            one_minus_beta2: 1.0 - beta2,
            step_size: lr / (1.0 - power1),
            bias_correction2_sqrt: (1.0 - power2).sqrt(),
            eps: self.eps as f32,
            maximize: self.maximize,
        }
    }
}

/// The f32 values of one element: weight (or master), both moments, and the largest second moment where it is kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWElement {
    /// The weight that is updated.
    pub p: f32,
    /// First moment.
    pub m: f32,
    /// Second moment.
    pub v: f32,
    /// Largest second moment; ignored without amsgrad.
    pub x: f32,
}

/// One element's update. `scale` is 1 where there is none: multiplying by one changes no bit.
#[inline(always)]
pub fn adamw_element(old: AdamWElement, grad: f32, scale: f32, amsgrad: bool, s: &AdamWScalars) -> AdamWElement {
    let g = grad * scale;
    let g = if s.maximize { -g } else { g };
    let p = if s.decays { (-s.decay).mul_add(old.p, old.p) } else { old.p };
    let m = s.beta1.mul_add(old.m, s.one_minus_beta1 * g);
    let v = s.beta2.mul_add(old.v, s.one_minus_beta2 * (g * g));
    // Written as a comparison, not `f32::max`: a NaN must come out as it does on the GPU.
    let x = if amsgrad && old.x < v { v } else { old.x };
    let w = if amsgrad { x } else { v };
    let d = w.sqrt() / s.bias_correction2_sqrt + s.eps;
    AdamWElement { p: p - (s.step_size * m) / d, m, v, x }
}

/// `beta^t`, correctly rounded but for rare ties.
#[inline(always)]
pub fn power_element(beta: f32, t: u64) -> f32 {
    f64::from(beta).powf(t as f64) as f32
}

/// The value at `index` of the sequence `seed`, uniform in `low..high`.
#[inline(always)]
pub fn uniform_element(seed: u64, index: u64, low: f32, high: f32) -> f32 {
    let mut z = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    // 24 bits: every value is exact in f32, and so is the product with a power of two.
    let unit = (z >> 40) as f32 * (1.0 / 16_777_216.0);
    unit.mul_add(high - low, low)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same step in f64 and in the textbook's order: the written arithmetic must be AdamW, up to rounding.
    #[test]
    fn arithmetic_is_adamw() {
        let hyper = AdamWHyper { lr: 3e-3, weight_decay: 0.1, ..AdamWHyper::default() };
        let (mut p, mut m, mut v) = (0.5f64, 0.0f64, 0.0f64);
        let mut e = AdamWElement { p: 0.5, m: 0.0, v: 0.0, x: 0.0 };
        for t in 1..=50u64 {
            let g = f64::from(uniform_element(7, t, -1.0, 1.0));
            e = adamw_element(e, g as f32, 1.0, false, &hyper.at_step(t));
            p -= hyper.lr * hyper.weight_decay * p;
            m = hyper.beta1 * m + (1.0 - hyper.beta1) * g;
            v = hyper.beta2 * v + (1.0 - hyper.beta2) * g * g;
            let m_hat = m / (1.0 - hyper.beta1.powi(t as i32));
            let v_hat = v / (1.0 - hyper.beta2.powi(t as i32));
            p -= hyper.lr * m_hat / (v_hat.sqrt() + hyper.eps);
            assert!((f64::from(e.p) - p).abs() < 1e-5, "step {t}: {} and {p}", e.p);
        }
    }

    #[test]
    fn decay_of_zero_leaves_the_sign_of_zero_alone() {
        let zero = AdamWElement { p: -0.0, m: 0.0, v: 1.0, x: 0.0 };
        let without = AdamWHyper { weight_decay: 0.0, ..AdamWHyper::default() }.at_step(1);
        assert!(adamw_element(zero, 0.0, 1.0, false, &without).p.is_sign_negative());
    }

    #[test]
    fn uniform_stays_in_range_and_depends_on_seed_and_index() {
        let values: Vec<f32> = (0..1000).map(|i| uniform_element(1, i, -2.0, 3.0)).collect();
        assert!(values.iter().all(|v| (-2.0..3.0).contains(v)));
        assert_ne!(values, (0..1000).map(|i| uniform_element(2, i, -2.0, 3.0)).collect::<Vec<_>>());
        let mean = values.iter().sum::<f32>() / 1000.0;
        assert!((mean - 0.5).abs() < 0.2, "{mean}");
    }
}
