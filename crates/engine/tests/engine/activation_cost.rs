//! From a measured pass to its costs: what a call did not show is that of its family, and noise is not planned for.

use forebay::plan::{
    ActivationPlan, CallKind, CallTimes, LayerCost, MeasuredCall, MeasuredPass, PassCost, PassEvent, PassSample,
    TensorCost,
};

fn kind(name: &str, family: u64) -> CallKind {
    CallKind {
        name: name.to_owned(),
        family,
        can_recompute: true,
        recompute_share: 0.5,
        saved_bytes: 1000,
        input_bytes: 100,
        operations: 0,
        tensors: vec![],
    }
}

/// A pass whose calls take 100 ns forward and some time backward, one after the other, and 10 ns in between.
struct Script {
    pass: MeasuredPass,
    now: u64,
}

impl Script {
    fn new(kinds: Vec<CallKind>, calls: &[(Option<usize>, bool)]) -> Self {
        let calls = calls.iter().map(|&(kind, saves)| MeasuredCall { kind, saves }).collect();
        let mut script = Self { pass: MeasuredPass { samples: vec![], calls, kinds }, now: 0 };
        script.at(PassEvent::Begin, 0, (5000, 5000, 0));
        script
    }

    fn at(&mut self, event: PassEvent, call: usize, (allocated_bytes, peak_bytes, held_bytes): (u64, u64, u64)) {
        let at_ns = self.now;
        let sample = PassSample {
            event,
            call,
            at_ns,
            host_ns: 3 * at_ns,
            allocated_bytes,
            peak_bytes,
            held_bytes,
            gradient_bytes: 0,
            peak_gradient_bytes: 0,
        };
        self.pass.samples.push(sample);
    }

    /// Gradients at the last sample, and at the peak before it.
    fn made(&mut self, gradient_bytes: u64, peak_gradient_bytes: u64) {
        let last = self.pass.samples.last_mut().unwrap();
        (last.gradient_bytes, last.peak_gradient_bytes) = (gradient_bytes, peak_gradient_bytes);
    }

    fn forward(&mut self, call: usize, ns: u64, peak_bytes: u64) {
        self.now += 10;
        self.at(PassEvent::Enter, call, (5300, 5300, 200));
        self.now += ns;
        self.at(PassEvent::Leave, call, (5400, peak_bytes, 200));
    }

    fn backward(&mut self, call: usize, ns: u64) {
        self.at(PassEvent::Open, call, (6000, 9000, 400));
        self.now += ns;
    }

    fn cost(mut self) -> PassCost {
        self.at(PassEvent::End, 0, (5000, 9500, 0));
        self.pass.cost(2.0, 3.0, 7)
    }
}

fn alike(n: usize) -> Script {
    let calls: Vec<_> = (0..n).map(|call| (Some(0), call == 0)).collect();
    let mut script = Script::new(vec![kind("Block", 1)], &calls);
    for call in 0..n {
        script.forward(call, 100, if call == 0 { 8300 } else { 6300 });
    }
    script
}

#[test]
fn calls_of_a_family_lend_each_other_figures() {
    let mut script = alike(3);
    for (call, ns) in [(2, 250), (1, 250), (0, 900)] {
        script.backward(call, ns);
    }
    let cost = script.cost();
    assert_eq!((cost.store_gbps, cost.fetch_gbps, cost.host_bytes), (2.0, 3.0, 7));
    // Before the first call, twice between calls, and nothing before the backward pass.
    assert_eq!(cost.outside_ns, 30);
    // The peak up to the first use, less what was held for copies and what was there before.
    assert_eq!(cost.tail_bytes, 9000 - 400 - 5000);
    for (call, layer) in cost.layers.iter().enumerate() {
        assert_eq!(layer.name, format!("layer {call}, Block"));
        assert!(layer.can_recompute);
        // The first saves, and shows no time of its own: it waited for its tensors one by one.
        assert_eq!((layer.forward_ns, layer.recompute_ns, layer.backward_ns), (100, 50, 200), "{call}");
        assert_eq!((layer.forward_saving_bytes, layer.forward_bare_bytes), (3000, 1000), "{call}");
        assert_eq!((layer.input_bytes, layer.saved_bytes), (100, 1000));
        assert_eq!((layer.forward_base_bytes, layer.backward_base_bytes), (100, 600));
        // Twice what the host took beyond the device.
        assert_eq!(layer.select_ns, 2 * (300 - 100));
    }
    assert_eq!(cost.layers[0].backward_bytes, 9500 - 5000 - 600);
    assert_eq!(cost.layers[1].backward_bytes, 9000 - 400 - 5000 - 600);
}

#[test]
fn gradients_are_counted_at_the_peak_of_each_backward_pass() {
    let mut script = alike(4);
    // The tail makes 30, and had 20 of them at its peak. Calls 2 and 1 make 100 each; call 3 was left out.
    script.backward(2, 250);
    script.made(30, 20);
    script.backward(1, 250);
    script.made(130, 90);
    script.backward(0, 250);
    // The peak came after all of them.
    script.made(230, 230);
    let cost = script.cost();
    let made = |call: usize| (cost.layers[call].base_gradient_bytes, cost.layers[call].gradient_bytes);
    assert_eq!(cost.tail_gradient_bytes, 20);
    assert_eq!([made(2), made(1), made(0)], [(30, 90), (130, 230), (230, 230)]);
    // A call that saves more than its peak was: the peak is as it begins, before it makes gradients.
    let calls = [(Some(0), false), (Some(0), false)];
    let mut script = Script::new(vec![CallKind { saved_bytes: 4000, ..kind("Block", 1) }], &calls);
    script.forward(0, 100, 6000);
    script.forward(1, 100, 6000);
    script.backward(1, 250);
    script.made(30, 30);
    script.backward(0, 250);
    script.made(130, 90);
    assert_eq!(script.cost().layers[1].gradient_bytes, 30);
}

#[test]
fn a_call_that_waited_is_bounded_by_its_forward_pass() {
    let mut script = alike(1);
    script.backward(0, 900);
    let cost = script.cost();
    assert_eq!(cost.layers[0].backward_ns, 220);
    // Nothing showed that it can run again from its inputs, but they were seen.
    assert!(cost.layers[0].can_recompute);
}

#[test]
fn only_noise_is_smoothed() {
    let calls: Vec<_> = (0..5).map(|_| (Some(0), false)).collect();
    let mut script = Script::new(vec![kind("Block", 1)], &calls);
    for (call, ns) in [90, 100, 110, 300, 100].into_iter().enumerate() {
        script.forward(call, ns, 6000);
    }
    let layers: Vec<u64> = script.cost().layers.iter().map(|layer| layer.forward_ns).collect();
    assert_eq!(layers, [100, 100, 100, 300, 100]);
}

#[test]
fn operations_share_the_time_of_the_recomputation() {
    let tensor = |recompute_ns| TensorCost { name: "mm".to_owned(), bytes: 8, recompute_ns, saved: true };
    let calls = [(Some(0), false), (Some(1), false)];
    let known = |name, family, times: [u64; 2]| CallKind { tensors: times.map(tensor).to_vec(), ..kind(name, family) };
    let mut script = Script::new(vec![known("Slow", 1, [300, 100]), known("Fast", 2, [20, 10])], &calls);
    script.forward(0, 100, 6000);
    script.forward(1, 100, 6000);
    let times = |layer: &LayerCost| layer.tensors.iter().map(|tensor| tensor.recompute_ns).collect::<Vec<_>>();
    let cost = script.cost();
    assert_eq!(times(&cost.layers[0]), [37, 12], "50 ns of recomputation, three parts to one");
    assert_eq!(times(&cost.layers[1]), [20, 10], "these fit as they are");
}

#[test]
fn a_call_that_was_left_out_is_like_its_kind() {
    let calls = [(Some(0), false), (Some(1), false), (Some(0), false), (None, true)];
    let mut script = Script::new(vec![kind("Block", 1), kind("Head", 2)], &calls);
    script.forward(0, 100, 6000);
    script.forward(1, 200, 7000);
    let layers = script.cost().layers;
    assert_eq!(layers[2], LayerCost { name: "layer 2, Block".to_owned(), ..layers[0].clone() });
    let unknown = &layers[3];
    assert_eq!((unknown.name.as_str(), unknown.can_recompute), ("layer 3, not called", false));
    assert_eq!((unknown.forward_ns, unknown.saved_bytes), (0, 0));
    assert_eq!(unknown.forward_base_bytes, layers[1].forward_base_bytes);
}

#[test]
fn times_are_those_of_each_call() {
    let mut script = alike(3);
    script.backward(2, 70);
    script.backward(0, 30);
    script.at(PassEvent::End, 0, (0, 0, 0));
    let times = |forward_ns, backward_ns| CallTimes { forward_ns, backward_ns };
    let expected = [times(Some(100), Some(30)), times(Some(100), None), times(Some(100), Some(70))];
    assert_eq!(script.pass.times(), expected);
}

#[test]
fn a_pass_without_samples_costs_nothing() {
    let cost = MeasuredPass { samples: vec![], calls: vec![], kinds: vec![] }.cost(1.0, 1.0, 0);
    assert_eq!((cost.layers.len(), cost.tail_bytes, cost.outside_ns), (0, 0, 0));
}

#[test]
fn predictions_are_corrected_and_choices_are_not() {
    let mut script = alike(4);
    for call in (0..4).rev() {
        script.backward(call, 250);
    }
    let found = ActivationPlan::new(&script.cost(), 1 << 40).unwrap();
    let corrected = found.corrected(77, -10, 1.5);
    assert_eq!((corrected.budget_bytes, corrected.peak_bytes), (77, found.peak_bytes - 10));
    assert_eq!(corrected.pass_ns, (found.pass_ns as f64 * 1.5) as u64);
    assert_eq!(corrected.layers, found.layers);
}
