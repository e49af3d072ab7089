//! Groups of every rule: the numbers and columns that its tests run with, and its arithmetic written a second time.
//!
//! The transcription follows the comment at the head of each rule's file and starts from the group's numbers, so neither
//! the arithmetic nor its scalars can drift unseen.

use forebay_device::kernel::power_element;
use forebay_device::update::{MAX_COLUMNS, RULES};
use forebay_device::{Rule, Scalars};

/// A group's numbers at one step, for a parameter with so many elements and these columns.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    pub(crate) rule: &'static Rule,
    pub(crate) hypers: Vec<f64>,
    pub(crate) kept: u32,
    pub(crate) step: u64,
    pub(crate) elements: u64,
}

impl Group {
    /// With the columns that its numbers need.
    fn new(rule: &'static Rule, hypers: &[f64], step: u64, elements: u64) -> Self {
        assert_eq!(hypers.len(), rule.hypers.len(), "{rule:?}");
        Self { rule, hypers: hypers.to_vec(), kept: (rule.keeps)(hypers), step, elements }
    }

    pub(crate) fn scalars(&self) -> Scalars {
        self.rule.at_step(&self.hypers, self.step, self.elements)
    }

    /// A number by its name.
    fn number(&self, name: &str) -> f64 {
        self.hypers[self.rule.hypers.iter().position(|&hyper| hyper == name).unwrap()]
    }

    fn is_on(&self, name: &str) -> bool {
        self.number(name) != 0.0
    }
}

/// Every rule.
pub(crate) fn rules() -> impl Iterator<Item = &'static Rule> {
    RULES.into_iter()
}

/// Both ways of a switch, as a number.
const SWITCH: [f64; 2] = [0.0, 1.0];

/// No weight decay, and some.
const DECAYS: [f64; 2] = [0.0, 0.13];

/// Elements of two parameters: a multiple of four and another number.
const ELEMENTS: [u64; 2] = [1 << 20, (1 << 20) + 3];

/// All that tells the groups of a rule apart, at different steps: every switch, number and column that is a case of its
/// own.
pub(crate) fn groups(rule: &'static Rule) -> Vec<Group> {
    let mut groups = Vec::new();
    let pairs = || DECAYS.into_iter().flat_map(|decay| SWITCH.map(|maximize| (decay, maximize)));
    for (i, (decay, maximize)) in pairs().enumerate() {
        let mut push = |hypers: &[f64], step, elements| {
            groups.push(Group::new(rule, hypers, step, elements));
        };
        let step = 1 + 7 * i as u64;
        match rule.name {
            "adamw" => {
                for amsgrad in SWITCH {
                    push(&[3e-3, 0.9, 0.999, 1e-8, decay, maximize, amsgrad], step, 1);
                }
            }
            "adam" => {
                for (amsgrad, elements) in SWITCH.into_iter().flat_map(|on| ELEMENTS.map(|elements| (on, elements))) {
                    push(&[3e-3, 0.9, 0.999, 1e-8, decay, maximize, amsgrad], step, elements);
                }
            }
            "sgd" => {
                push(&[3e-2, 0.0, 0.0, decay, 0.0, maximize], 0, 1);
                for (elements, (dampening, nesterov)) in ELEMENTS
                    .into_iter()
                    .flat_map(|elements| [(0.0, 0.0), (0.3, 0.0), (0.0, 1.0)].map(|of| (elements, of)))
                {
                    push(&[3e-2, 0.9, dampening, decay, nesterov, maximize], 2 + step, elements);
                }
                // The first update, where dampening does not count yet.
                push(&[3e-2, 0.9, 0.3, decay, 0.0, maximize], 1, 4);
                push(&[3e-2, 0.9, 0.0, decay, 1.0, maximize], 1, 4);
                // A buffer that is there while momentum is zero, and momentum whose buffer is not.
                for (momentum, kept) in [(0.0, 1), (0.9, 0)] {
                    let group = Group::new(rule, &[3e-2, momentum, 0.0, decay, 0.0, maximize], 5, 4);
                    groups.push(Group { kept, ..group });
                }
            }
            "lion" => push(&[3e-3, 0.9, 0.99, decay, maximize], step, 1),
            other => panic!("{other} has no groups here: write some, and its arithmetic below"),
        }
    }
    groups
}

/// Groups of a rule that are all different, with whatever columns they need.
pub(crate) fn different_groups(rule: &'static Rule, count: usize) -> Vec<Group> {
    let vary = |mut group: Group, i: usize| {
        for (number, name) in group.hypers.iter_mut().zip(rule.hypers) {
            match *name {
                "lr" | "eps" => *number *= (1 + i) as f64,
                "beta1" | "beta2" | "momentum" => *number *= 1.0 - 0.003 * i as f64,
                _ => {}
            }
        }
        group
    };
    groups(rule).into_iter().cycle().take(count).enumerate().map(|(i, group)| vary(group, i)).collect()
}

/// One element of a group by the written arithmetic: the new weight. The gradient is scaled, not yet negated.
pub(crate) fn written(group: &Group, weight: f32, grad: f32, state: &mut [f32; MAX_COLUMNS], position: u64) -> f32 {
    let grad = if group.is_on("maximize") { -grad } else { grad };
    match group.rule.name {
        "adamw" => {
            let decay = group.number("lr") as f32 * group.number("weight_decay") as f32;
            let weight = if group.is_on("weight_decay") { f32::mul_add(-decay, weight, weight) } else { weight };
            moment_step(group, weight, grad, state)
        }
        "adam" => {
            let decay = group.number("weight_decay") as f32;
            let twice = match (group.is_on("amsgrad"), group.is_on("maximize"), group.elements.is_multiple_of(4)) {
                (true, _, _) => false,
                (false, true, _) => true,
                (false, false, true) => position.is_multiple_of(4),
                (false, false, false) => (position / 512).is_multiple_of(4),
            };
            let decayed = if twice { grad + decay * weight } else { f32::mul_add(decay, weight, grad) };
            moment_step(group, weight, if group.is_on("weight_decay") { decayed } else { grad }, state)
        }
        "sgd" => {
            let decays = group.is_on("weight_decay");
            let g = if decays { f32::mul_add(group.number("weight_decay") as f32, weight, grad) } else { grad };
            let (momentum, damped) = (group.number("momentum") as f32, (1.0 - group.number("dampening")) as f32);
            let mut direction = g;
            if momentum != 0.0 && group.kept & 1 != 0 {
                let other = group.is_on("maximize") && !decays && group.elements.is_multiple_of(4);
                state[0] = match (group.step, other) {
                    (1, _) => g,
                    (_, true) => f32::mul_add(momentum, state[0], damped * g),
                    (_, false) => f32::mul_add(damped, g, momentum * state[0]),
                };
                direction = if group.is_on("nesterov") { f32::mul_add(momentum, state[0], g) } else { state[0] };
            }
            f32::mul_add(-(group.number("lr") as f32), direction, weight)
        }
        "lion" => {
            let [lr, decay, beta1, beta2] =
                ["lr", "weight_decay", "beta1", "beta2"].map(|name| group.number(name) as f32);
            let mixed = f32::mul_add(beta1, state[0], (1.0 - beta1) * grad);
            // Not `signum`, whose zero has a sign.
            let sign = if mixed == 0.0 { mixed } else { mixed.signum() };
            let weight = if group.is_on("weight_decay") { f32::mul_add(-(lr * decay), weight, weight) } else { weight };
            state[0] = f32::mul_add(beta2, state[0], (1.0 - beta2) * grad);
            f32::mul_add(-lr, sign, weight)
        }
        other => panic!("{other} is not written here"),
    }
}

/// What AdamW and Adam do with a gradient.
fn moment_step(group: &Group, weight: f32, grad: f32, state: &mut [f32; MAX_COLUMNS]) -> f32 {
    let [lr, beta1, beta2, eps] = ["lr", "beta1", "beta2", "eps"].map(|name| group.number(name) as f32);
    let [mean, square, largest] = state;
    *mean = f32::mul_add(beta1, *mean, (1.0 - beta1) * grad);
    *square = f32::mul_add(beta2, *square, (1.0 - beta2) * (grad * grad));
    let mut under = *square;
    if group.is_on("amsgrad") {
        *largest = largest.max(*square);
        under = *largest;
    }
    let divisor = under.sqrt() / (1.0 - power_element(beta2, group.step)).sqrt() + eps;
    let step_size = lr / (1.0 - power_element(beta1, group.step));
    weight - (step_size * *mean) / divisor
}
