//! Plans for activations: within the budget, never slower for more of it, the same each time, and as good as a search
//! of everything where everything can be searched.

use forebay::Error;
use forebay::plan::{ActivationPlan, Choice, LayerCost, Moment, PassCost, TensorCost};
use forebay_device::testing::kinds::cases;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn tensor(name: &str, bytes: u64, recompute_ns: u64) -> TensorCost {
    TensorCost { name: name.to_owned(), bytes, recompute_ns, saved: true }
}

/// A layer of Qwen2-7B shape for 16384 tokens, about as an H200 runs it.
fn decoder(i: usize) -> LayerCost {
    LayerCost {
        name: format!("layer {i}"),
        can_recompute: true,
        forward_ns: 15_000_000,
        backward_ns: 30_000_000,
        recompute_ns: 12_500_000,
        select_ns: 0,
        input_bytes: 112 * MIB,
        saved_bytes: 3524 * MIB,
        forward_base_bytes: 112 * MIB,
        forward_saving_bytes: 3700 * MIB,
        forward_bare_bytes: 2500 * MIB,
        backward_base_bytes: 224 * MIB,
        backward_bytes: 4700 * MIB,
        base_gradient_bytes: 0,
        gradient_bytes: 0,
        tensors: vec![
            tensor("qkv", 144 * MIB, 1_000_000),
            tensor("attention", 112 * MIB, 1_200_000),
            TensorCost { saved: false, ..tensor("out", 112 * MIB, 800_000) },
            tensor("gate", 592 * MIB, 3_700_000),
            tensor("up", 592 * MIB, 3_700_000),
            tensor("silu", 592 * MIB, 450_000),
        ],
    }
}

fn decoders(n: usize) -> PassCost {
    PassCost {
        layers: (0..n).map(decoder).collect(),
        tail_bytes: 600 * MIB,
        tail_gradient_bytes: 0,
        outside_ns: 3_000_000,
        store_gbps: 54.0,
        fetch_gbps: 54.0,
        host_bytes: u64::MAX,
    }
}

fn plan(cost: &PassCost, budget: u64) -> ActivationPlan {
    ActivationPlan::new(cost, budget).unwrap()
}

#[test]
fn each_budget_has_its_mix() {
    let cost = decoders(12);
    let least = ActivationPlan::frugal(&cost);
    assert!(least.layers.iter().all(|layer| layer.recompute && layer.input == Choice::Offload));
    let all = plan(&cost, 60 * GIB);
    assert!(all.layers.iter().all(|layer| !layer.recompute && layer.offloaded_bytes == 0), "{all}");
    assert_eq!(all.pass_ns, 12 * 45_000_000 + 3_000_000);
    for (budget, most) in [(5, 0.99), (6, 0.95), (9, 0.93), (16, 0.90), (30, 0.85)] {
        let found = plan(&cost, budget * GIB);
        assert!((found.pass_ns as f64) < most * least.pass_ns as f64, "{found}");
    }
    // What is expensive per byte is saved first: never silu without gate.
    let tight = plan(&cost, 7 * GIB);
    let saved = |layer: &forebay::plan::LayerPlan, i: usize| layer.tensors[i] != Choice::Recompute;
    let partly = tight.layers.iter().filter(|layer| layer.recompute);
    assert!(partly.clone().any(|layer| saved(layer, 3)), "{tight}");
    for layer in partly {
        assert!(!saved(layer, 5) || (saved(layer, 3) && saved(layer, 4)), "{tight}");
    }
    // The last layer is used at once: there is nothing to gain from recomputing it.
    assert_eq!(tight.layers[11].word, "keep");
}

#[test]
fn a_budget_that_is_too_small_is_refused_with_what_would_do() {
    let cost = decoders(4);
    let least = ActivationPlan::frugal(&cost).peak_bytes;
    assert!(ActivationPlan::new(&cost, least).is_ok());
    let Err(Error::InvalidOption { option, remedy, .. }) = ActivationPlan::new(&cost, least - 1) else {
        panic!("a budget below the least was accepted");
    };
    assert_eq!(option, "budget_bytes");
    assert!(remedy.contains(&least.to_string()) && remedy.contains("the backward pass of layer"), "{remedy}");
}

fn refused(cost: &PassCost, budget: u64) -> String {
    let Err(Error::InvalidOption { remedy, .. }) = ActivationPlan::new(cost, budget) else {
        panic!("a budget below the least was accepted");
    };
    remedy
}

#[test]
fn the_refusal_says_how_much_of_the_least_is_gradients() {
    assert!(!refused(&decoders(4), 1).contains("gradients"));
    let mut cost = decoders(4);
    for (i, layer) in cost.layers.iter_mut().enumerate() {
        let made = (3 - i as u64) * GIB;
        layer.backward_base_bytes += made;
        layer.backward_bytes += GIB;
        (layer.base_gradient_bytes, layer.gradient_bytes) = (made, made + GIB / 2);
    }
    let least = ActivationPlan::frugal(&cost).peak_bytes;
    let remedy = refused(&cost, 1);
    let expected = format!("layer 0 needs at least {least} bytes under every plan, of which about {} are", 7 * GIB / 2);
    assert!(remedy.contains(&expected) && remedy.contains("set_to_none=False"), "{remedy}");
    // What is recomputed takes more than was measured, before the layer makes gradients.
    cost.layers[0].saved_bytes = cost.layers[0].backward_bytes + 1;
    let remedy = refused(&cost, 1);
    assert!(remedy.contains(&format!("about {} are gradients", 3 * GIB)), "{remedy}");
    let cost = PassCost { tail_bytes: 99 * GIB, tail_gradient_bytes: 5 * GIB, ..cost };
    let remedy = refused(&cost, 1);
    assert!(remedy.starts_with("the loss needs at least") && remedy.contains(&(5 * GIB).to_string()), "{remedy}");
}

#[test]
fn gradients_do_not_grow_with_the_tokens() {
    let mut cost = decoders(1);
    (cost.layers[0].base_gradient_bytes, cost.layers[0].gradient_bytes) = (100 * MIB, 800 * MIB);
    (cost.tail_bytes, cost.tail_gradient_bytes) = (600 * MIB, 50 * MIB);
    let twice = cost.scaled(2048, 1024);
    assert_eq!(twice.layers[0].backward_base_bytes, 2 * (224 - 100) * MIB + 100 * MIB);
    assert_eq!(twice.layers[0].backward_bytes, 2 * (4700 - 700) * MIB + 700 * MIB);
    assert_eq!(twice.tail_bytes, 2 * 550 * MIB + 50 * MIB);
    assert_eq!(twice.layers[0].gradient_bytes, 800 * MIB);
    assert_eq!(twice.layers[0].forward_saving_bytes, 2 * 3700 * MIB);
}

/// Two layers that are recomputed: while the second is, the first one's inputs, which do not lie in what it saves, arrive.
#[test]
fn a_budget_that_keeping_everything_meets_is_met() {
    let layer = LayerCost { input_bytes: 900, saved_bytes: 1000, backward_bytes: 1000, tensors: vec![], ..decoder(0) };
    let layer = LayerCost { forward_base_bytes: 0, forward_saving_bytes: 1000, forward_bare_bytes: 1000, ..layer };
    let mut cost = decoders(2);
    cost.layers = vec![LayerCost { saved_bytes: 0, ..layer.clone() }, layer];
    for layer in &mut cost.layers {
        layer.backward_base_bytes = 0;
    }
    cost.tail_bytes = 0;
    let (least, whole) = (ActivationPlan::frugal(&cost).peak_bytes, plan(&cost, u64::MAX).peak_bytes);
    assert!(whole < least, "the test shows nothing: {whole} of {least}");
    let found = plan(&cost, whole);
    assert!(found.peak_bytes <= whole && found.least_bytes <= whole, "{found}");
    let Err(Error::InvalidOption { remedy, .. }) = ActivationPlan::new(&cost, found.least_bytes - 1) else {
        panic!("a budget below the least was accepted");
    };
    assert!(remedy.contains(&found.least_bytes.to_string()), "{remedy}");
}

#[test]
fn layers_that_cannot_be_recomputed_are_kept_or_offloaded() {
    let mut cost = decoders(6);
    cost.layers[2].can_recompute = false;
    for budget in [7, 9, 12, 20, 40] {
        let found = plan(&cost, budget * GIB);
        assert!(!found.layers[2].recompute, "{found}");
        assert_eq!(found.layers[2].kept_bytes + found.layers[2].offloaded_bytes, cost.layers[2].saved_bytes);
    }
}

#[test]
fn a_slow_link_is_not_used_and_a_fast_one_is() {
    let with = |gbps: f64| {
        let cost = PassCost { store_gbps: gbps, fetch_gbps: gbps, ..decoders(12) };
        plan(&cost, 9 * GIB)
    };
    let (slow, fast) = (with(2.0), with(400.0));
    let moved = |plan: &ActivationPlan| plan.layers.iter().map(|layer| layer.offloaded_bytes).sum::<u64>();
    assert!(moved(&slow) < 3 * GIB && moved(&fast) > 10 * GIB, "{slow}{fast}");
    assert!(fast.pass_ns < slow.pass_ns);
}

#[test]
fn no_more_is_offloaded_than_the_host_has_room_for() {
    let moved = |plan: &ActivationPlan| plan.layers.iter().map(|layer| layer.offloaded_bytes).sum::<u64>();
    let free = plan(&decoders(12), 9 * GIB);
    for gib in [2, 4, 6] {
        let cost = PassCost { host_bytes: gib * GIB, ..decoders(12) };
        let found = plan(&cost, 9 * GIB);
        assert!(moved(&found) <= gib * GIB && moved(&found) < moved(&free), "{found}");
        assert!(found.pass_ns >= free.pass_ns);
    }
}

#[test]
fn the_loss_can_be_what_needs_most() {
    let cost = PassCost { tail_bytes: 20 * GIB, ..decoders(8) };
    let least = ActivationPlan::frugal(&cost);
    assert_eq!((least.peak_at, least.peak_bytes), (Moment::Tail, 20 * GIB));
    // Nothing may be kept over it, so all that remains is to offload.
    let found = plan(&cost, 20 * GIB);
    assert!(found.layers.iter().all(|layer| layer.kept_bytes == 0), "{found}");
    assert!(found.pass_ns < least.pass_ns);
}

#[test]
fn plans_can_be_written_and_read() {
    let cost = decoders(5);
    let found = plan(&cost, 9 * GIB);
    let text = serde_json::to_string(&found).unwrap();
    assert_eq!(serde_json::from_str::<ActivationPlan>(&text).unwrap(), found);
    let words = found.to_string();
    assert!(words.contains("budget 9.00 GiB") && words.lines().count() == 6, "{words}");
}

#[test]
fn figures_grow_with_the_tokens() {
    let cost = decoders(3);
    let twice = cost.scaled(2000, 1000);
    assert_eq!(twice.layers[1].saved_bytes, 2 * cost.layers[1].saved_bytes);
    assert_eq!(twice.layers[0].tensors[1].recompute_ns, 2 * cost.layers[0].tensors[1].recompute_ns);
    assert_eq!(cost.scaled(1000, 1000), cost);
}

/// Numbers that look random and are the same on every machine.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    fn layer(&mut self) -> LayerCost {
        let saved_bytes = 100 + self.below(2000);
        let tensors = (0..self.below(6))
            .map(|_| TensorCost { saved: self.below(2) == 0, ..tensor("t", 1 + self.below(400), self.below(3000)) });
        LayerCost {
            tensors: tensors.collect(),
            name: "l".to_owned(),
            can_recompute: self.below(5) > 0,
            forward_ns: 100 + self.below(5000),
            backward_ns: 100 + self.below(9000),
            recompute_ns: self.below(4000),
            select_ns: self.below(100),
            input_bytes: 1 + self.below(100),
            saved_bytes,
            forward_base_bytes: self.below(300),
            forward_saving_bytes: saved_bytes + self.below(500),
            forward_bare_bytes: self.below(500),
            backward_base_bytes: self.below(300),
            backward_bytes: saved_bytes + self.below(800),
            base_gradient_bytes: 0,
            gradient_bytes: 0,
        }
    }

    fn pass(&mut self, layers: u64) -> PassCost {
        PassCost {
            layers: (0..1 + self.below(layers)).map(|_| self.layer()).collect(),
            tail_bytes: self.below(3000),
            tail_gradient_bytes: 0,
            outside_ns: self.below(5000),
            store_gbps: (1 + self.below(300)) as f64 / 100.0,
            fetch_gbps: (1 + self.below(300)) as f64 / 100.0,
            host_bytes: if self.below(3) == 0 { self.below(6000) } else { u64::MAX },
        }
    }
}

/// All numbers of a plan, mixed into one (FNV-1a).
fn mix(sum: &mut u64, plan: &ActivationPlan) {
    let mut add = |value: u64| {
        for byte in value.to_le_bytes() {
            *sum = (*sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    let choice = |choice: &Choice| match choice {
        Choice::Keep => 0,
        Choice::Offload => 1,
        Choice::Recompute => 2,
    };
    let at = match plan.peak_at {
        Moment::Forward(layer) => 2 * layer as u64,
        Moment::Backward(layer) => 2 * layer as u64 + 1,
        Moment::Tail => u64::MAX,
    };
    [plan.budget_bytes, plan.least_bytes, plan.peak_bytes, plan.pass_ns, at].into_iter().for_each(&mut add);
    for layer in &plan.layers {
        layer.word.bytes().map(u64::from).for_each(&mut add);
        [u64::from(layer.recompute), choice(&layer.input), layer.offload_bytes].into_iter().for_each(&mut add);
        layer.tensors.iter().map(choice).for_each(&mut add);
        [layer.free_at.into(), layer.fetch_at.into(), layer.kept_bytes, layer.offloaded_bytes]
            .into_iter()
            .for_each(&mut add);
        [layer.forward_ns, layer.backward_ns, layer.recompute_ns, layer.stall_ns].into_iter().for_each(&mut add);
    }
}

/// A change that is not meant to change plans leaves this number alone; one that is meant to replaces it.
#[test]
fn plans_are_the_same_as_before() {
    let mut draw = Draw(1);
    let mut sum = 0xcbf2_9ce4_8422_2325;
    for (passes, layers) in [(200, 7), (4, 40)] {
        for _ in 0..passes {
            let cost = draw.pass(layers);
            let least = ActivationPlan::frugal(&cost);
            mix(&mut sum, &least);
            for extra in [0, 500, 3000, 20_000] {
                mix(&mut sum, &plan(&cost, least.peak_bytes + extra));
            }
        }
    }
    for budget in [5, 7, 9, 16, 30] {
        mix(&mut sum, &plan(&decoders(12), budget * GIB));
    }
    assert_eq!(sum, 15_758_878_285_002_141_041);
}

fn any_tensor() -> impl Strategy<Value = TensorCost> {
    (1u64..400, 0u64..3000, any::<bool>()).prop_map(|(bytes, recompute_ns, saved)| TensorCost {
        name: "t".to_owned(),
        bytes,
        recompute_ns,
        saved,
    })
}

fn any_layer(tensors: usize) -> impl Strategy<Value = LayerCost> {
    let sizes = (1u64..100, 100u64..2000, 0u64..300, 0u64..500, 0u64..500, 0u64..300, 0u64..800);
    let times = (100u64..5000, 100u64..9000, 0u64..4000, 0u64..100, prop::bool::weighted(0.8));
    (sizes, times, prop::collection::vec(any_tensor(), 0..=tensors)).prop_map(|(sizes, times, tensors)| {
        let (input_bytes, saved_bytes, base, extra, bare, backward_base_bytes, work) = sizes;
        let (forward_ns, backward_ns, recompute_ns, select_ns, can_recompute) = times;
        LayerCost {
            name: "l".to_owned(),
            can_recompute,
            forward_ns,
            backward_ns,
            recompute_ns,
            select_ns,
            input_bytes,
            saved_bytes,
            forward_base_bytes: base,
            forward_saving_bytes: saved_bytes + extra,
            forward_bare_bytes: bare,
            backward_base_bytes,
            backward_bytes: saved_bytes + work,
            base_gradient_bytes: 0,
            gradient_bytes: 0,
            tensors,
        }
    })
}

fn any_pass(layers: usize, tensors: usize) -> impl Strategy<Value = PassCost> {
    let wires = (0.01f64..3.0, 0.01f64..3.0, 0u64..3000, 0u64..5000);
    (prop::collection::vec(any_layer(tensors), 1..=layers), wires).prop_map(|(layers, wires)| PassCost {
        layers,
        tail_bytes: wires.2,
        tail_gradient_bytes: 0,
        outside_ns: wires.3,
        store_gbps: wires.0,
        fetch_gbps: wires.1,
        host_bytes: u64::MAX,
    })
}

/// The least of a plan's memory that can be seen from the plan alone, moment by moment, written independently of the
/// planner: what is kept, what has not been freed yet, what has been fetched already.
fn needs(cost: &PassCost, plan: &ActivationPlan) -> u64 {
    let n = cost.layers.len();
    let mut most = 0;
    for i in 0..n {
        let before = |at: &dyn Fn(usize) -> u64| (0..i).map(at).sum::<u64>();
        let kept = before(&|k| plan.layers[k].kept_bytes);
        let leaving = before(&|k| if plan.layers[k].free_at as usize > i { plan.layers[k].offloaded_bytes } else { 0 });
        let arriving =
            before(&|k| if plan.layers[k].fetch_at as usize >= i { plan.layers[k].offloaded_bytes } else { 0 });
        let layer = &cost.layers[i];
        let bare = if plan.layers[i].recompute { layer.forward_bare_bytes } else { layer.forward_saving_bytes };
        most = most.max(layer.forward_base_bytes + kept + leaving + bare);
        most = most.max(layer.backward_base_bytes + kept + arriving + layer.backward_bytes);
    }
    most.max(cost.tail_bytes + plan.layers.iter().map(|layer| layer.kept_bytes).sum::<u64>())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(300), ..ProptestConfig::default() })]

    /// Within the budget, by the plan's own word and counted again; the same each time; every layer accounted for; never
    /// slower than the most frugal plan.
    #[test]
    fn plans_keep_their_promises(cost in any_pass(7, 4), extra in 0u64..6000) {
        let least = ActivationPlan::frugal(&cost);
        let budget = least.peak_bytes + extra;
        let found = plan(&cost, budget);
        prop_assert_eq!(&found, &plan(&cost, budget));
        prop_assert!(found.peak_bytes <= budget);
        prop_assert!(needs(&cost, &found) <= found.peak_bytes, "{}", found);
        prop_assert!(found.pass_ns <= least.pass_ns);
        prop_assert!(found.least_bytes <= least.peak_bytes.min(found.peak_bytes));
        let mut total = cost.outside_ns;
        for (i, (layer, cost)) in found.layers.iter().zip(&cost.layers).enumerate() {
            prop_assert!(cost.can_recompute || !layer.recompute);
            prop_assert!(layer.free_at as usize > i && layer.free_at as usize <= found.layers.len());
            prop_assert!(layer.fetch_at as usize >= i && (layer.fetch_at as usize) < found.layers.len());
            if !layer.recompute {
                prop_assert_eq!(layer.kept_bytes + layer.offloaded_bytes, cost.saved_bytes);
            }
            total += layer.forward_ns + layer.backward_ns;
        }
        prop_assert_eq!(total, found.pass_ns, "the parts add up");
    }

    /// More budget is never slower.
    #[test]
    fn more_budget_is_never_slower(cost in any_pass(7, 4), steps in prop::collection::vec(0u64..2000, 1..8)) {
        let mut budget = ActivationPlan::frugal(&cost).peak_bytes;
        let mut before = plan(&cost, budget).pass_ns;
        for step in steps {
            budget += step;
            let now = plan(&cost, budget).pass_ns;
            prop_assert!(now <= before);
            before = now;
        }
    }

    /// With room for everything, nothing is moved or recomputed.
    #[test]
    fn with_room_for_all_nothing_is_lost(cost in any_pass(7, 4)) {
        let found = plan(&cost, u64::MAX);
        let plain: u64 = cost.layers.iter().map(|layer| layer.forward_ns + layer.backward_ns).sum();
        prop_assert_eq!(found.pass_ns, plain + cost.outside_ns, "{}", found);
    }
}
