//! The same optimizer run three ways: streamed through the ring or updated on the host, resident on the device in whole
//! tensors, and element by element in the test itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay::device::HostOptions;
use forebay::device::arith::{AdamWElement, AdamWHyper, AdamWScalars, adamw_element, uniform_element};
use forebay::device::{AdamW, AdamWSegment, Dtype, Kernel, Region, Stream};
use forebay::pipeline::{Pipeline, RunStats};
use forebay::plan::{PlanOptions, StateKind, StepPlan, TensorSpec};
use forebay::pool::Pool;
use forebay::step::{Binding, HostShare, HostState, Hybrid, PlacedAdamW, StepInputs, StreamedAdamW};

use super::Subject;

/// A parameter of a trial.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tensor {
    pub(crate) elements: u64,
    pub(crate) param: Dtype,
    pub(crate) grad: Dtype,
    pub(crate) amsgrad: bool,
    pub(crate) master: bool,
    /// Whether parameter and gradients lie on the host.
    pub(crate) on_host: bool,
}

impl Tensor {
    pub(crate) const fn f32(elements: u64) -> Self {
        Self::of(elements, Dtype::F32, Dtype::F32)
    }

    pub(crate) const fn of(elements: u64, param: Dtype, grad: Dtype) -> Self {
        Self { elements, param, grad, amsgrad: false, master: false, on_host: false }
    }

    pub(crate) const fn amsgrad(self) -> Self {
        Self { amsgrad: true, ..self }
    }

    pub(crate) const fn master(self) -> Self {
        Self { master: true, ..self }
    }

    pub(crate) const fn on_host(self) -> Self {
        Self { on_host: true, ..self }
    }

    pub(crate) fn kinds(&self) -> Vec<StateKind> {
        StateKind::set(self.amsgrad, self.master)
    }
}

/// Every pair of types, with and without masters and amsgrad, next to tensors of one element and of none.
pub(crate) fn mixed_tensors() -> Vec<Tensor> {
    use Dtype::{Bf16, F16, F32};
    vec![
        Tensor::f32(4097),
        Tensor::f32(1),
        Tensor::f32(0),
        Tensor::of(3000, Bf16, Bf16).master(),
        Tensor::of(777, Bf16, F32).master().amsgrad(),
        Tensor::of(2500, F16, F16).master(),
        Tensor::of(1234, F16, F32),
        Tensor::of(5000, F32, Bf16).amsgrad(),
        Tensor::of(65, Bf16, Bf16),
        Tensor::of(63, F32, F16),
        Tensor::of(0, Bf16, Bf16).master(),
        Tensor::of(1, Bf16, F16).master().amsgrad(),
        Tensor::f32(2100).amsgrad().master(),
        Tensor::of(64, F16, Bf16).amsgrad(),
    ]
}

/// What is trained and how.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) options: PlanOptions,
    /// Whether a tensor (the second number) has no gradient at a step (the first).
    pub(crate) missing: fn(usize, usize) -> bool,
    pub(crate) grad_scale: Option<f32>,
    /// Whether the flag that says so is set at a step; without any there is no flag.
    pub(crate) skipped: Option<fn(usize) -> bool>,
}

impl Scenario {
    pub(crate) fn new(tensors: Vec<Tensor>, slots: usize, slot_bytes: u64) -> Self {
        let options = PlanOptions { slots, slot_bytes, ..PlanOptions::default() };
        Self { tensors, options, missing: |_, _| false, grad_scale: None, skipped: None }
    }

    pub(crate) fn plan(&self) -> StepPlan {
        let tensors = self.tensors.iter().enumerate().map(|(i, tensor)| TensorSpec {
            name: format!("tensor.{i}"),
            elements: tensor.elements,
            kinds: tensor.kinds(),
            on_host: tensor.on_host,
        });
        StepPlan::new(tensors.collect(), self.options).unwrap()
    }

    /// A set for each tensor: three groups with hyper-parameters of their own, a rate that changes at every step, and a
    /// step count that stands still while there is no gradient.
    fn scalars(&self, step: usize) -> Vec<AdamWScalars> {
        let groups = [
            AdamWHyper { lr: 3e-2, ..AdamWHyper::default() },
            AdamWHyper { lr: 1e-2, beta1: 0.8, beta2: 0.95, eps: 1e-6, weight_decay: 0.0, maximize: false },
            AdamWHyper { lr: 2e-2, weight_decay: 0.1, maximize: true, ..AdamWHyper::default() },
        ];
        (0..self.tensors.len())
            .map(|tensor| {
                let t = (0..=step).filter(|&step| !(self.missing)(step, tensor)).count().max(1);
                let group = groups[tensor % groups.len()];
                AdamWHyper { lr: group.lr * (1.0 - 0.05 * step as f64), ..group }.at_step(t as u64)
            })
            .collect()
    }

    fn param(&self, tensor: usize) -> Vec<u8> {
        let Tensor { elements, param, .. } = self.tensors[tensor];
        encode(param, &values(100 + tensor, elements, -1.0, 1.0))
    }

    fn grad(&self, step: usize, tensor: usize) -> Option<Vec<u8>> {
        let Tensor { elements, grad, .. } = self.tensors[tensor];
        let seed = 10_000 + 1000 * step + tensor;
        (!(self.missing)(step, tensor)).then(|| encode(grad, &values(seed, elements, -1.0, 1.0)))
    }

    /// State before the first step. Not zero: a misplaced byte must show at once.
    fn state(&self, tensor: usize, kind: StateKind) -> Vec<f32> {
        let Tensor { elements, param, .. } = self.tensors[tensor];
        match kind {
            StateKind::ExpAvg => values(200 + tensor, elements, -0.1, 0.1),
            StateKind::ExpAvgSq => values(300 + tensor, elements, 0.0, 0.1),
            StateKind::MaxExpAvgSq => values(400 + tensor, elements, 0.0, 0.1),
            StateKind::Master => widen(param, &self.param(tensor)),
        }
    }

    fn is_skipped(&self, step: usize) -> bool {
        self.skipped.is_some_and(|skipped| skipped(step))
    }

    /// The same where the host updates its share.
    pub(crate) fn check_placed(&self, on: &Subject, steps: usize, placement: Placement) {
        let rig = Rig::placed(on, self.clone(), steps, Some(placement));
        rig.steps(steps);
        rig.synchronize();
        rig.assert_exact(steps);
    }

    /// Streams so many steps, without a pause between them, and compares with both other ways.
    pub(crate) fn check(&self, on: &Subject, steps: usize) {
        let rig = Rig::new(on, self.clone(), steps);
        rig.steps(steps);
        rig.optimizer.synchronize().unwrap();
        rig.assert_exact(steps);
    }
}

fn values(seed: usize, elements: u64, low: f32, high: f32) -> Vec<f32> {
    (0..elements).map(|i| uniform_element(seed as u64, i, low, high)).collect()
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Values of a type that lie near these; cut off, not rounded, and no subnormals.
fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let half = |value: f32| {
        let bits = value.to_bits();
        match dtype {
            Dtype::F16 => {
                let (sign, exponent) = ((bits >> 16 & 0x8000) as u16, (bits >> 23 & 0xff) as i32 - 112);
                if exponent <= 0 { sign } else { sign | (exponent as u16) << 10 | (bits >> 13 & 0x3ff) as u16 }
            }
            _ => (bits >> 16) as u16,
        }
    };
    match dtype {
        Dtype::F32 => bytes_of(values),
        Dtype::Bf16 | Dtype::F16 => values.iter().flat_map(|&value| half(value).to_le_bytes()).collect(),
    }
}

/// The inverse of [`encode`].
fn widen(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let half = |pair: &[u8]| u32::from(u16::from_le_bytes([pair[0], pair[1]]));
    match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Dtype::Bf16 => bytes.chunks_exact(2).map(|b| f32::from_bits(half(b) << 16)).collect(),
        Dtype::F16 => bytes
            .chunks_exact(2)
            .map(half)
            .map(|h| {
                let magnitude = if h & 0x7c00 == 0 { 0 } else { ((h >> 10 & 0x1f) + 112) << 23 | (h & 0x3ff) << 13 };
                f32::from_bits((h & 0x8000) << 16 | magnitude)
            })
            .collect(),
    }
}

/// Several byte strings in one buffer, aligned to their elements and to no more, as slices of tensors are.
struct Packed {
    bytes: Vec<u8>,
    memory: Region,
    regions: Vec<Region>,
}

impl Packed {
    fn new(on: &Subject, parts: &[(Vec<u8>, u64)], on_host: bool) -> Self {
        let (mut bytes, mut places) = (Vec::new(), Vec::new());
        for (i, (part, width)) in parts.iter().enumerate() {
            bytes.resize(bytes.len().next_multiple_of(64) + (*width as usize) * (i % 5), 0);
            places.push((bytes.len() as u64, part.len() as u64));
            bytes.extend_from_slice(part);
        }
        bytes.push(0);
        let size = bytes.len() as u64;
        let memory = if on_host { on.pinned(size) } else { on.alloc(size).unwrap().all() };
        let regions = places.iter().map(|&(offset, len)| memory.slice(offset, len).unwrap()).collect();
        let packed = Self { bytes, memory, regions };
        packed.reset(on);
        packed
    }

    /// The bytes as they were at first; the host has seen the end of all other work on them.
    fn reset(&self, on: &Subject) {
        if self.memory.place().is_host() {
            on.write(&self.bytes, &self.memory).unwrap();
        } else {
            on.put(&self.bytes, &self.memory);
        }
    }

    fn download(&self, on: &Subject) -> Vec<Vec<u8>> {
        let memory = &self.memory;
        let bytes = if memory.place().is_host() { on.host_bytes(memory).unwrap() } else { on.download(memory) };
        let range = |region: &Region| {
            let start = (region.offset_bytes() - memory.offset_bytes()) as usize;
            start..start + region.bytes() as usize
        };
        self.regions.iter().map(|region| bytes[range(region)].to_vec()).collect()
    }
}

/// The same bytes in both places; each tensor uses its own.
struct Placed {
    places: [Packed; 2],
}

impl Placed {
    fn new(on: &Subject, parts: &[(Vec<u8>, u64)]) -> Self {
        Self { places: [false, true].map(|on_host| Packed::new(on, parts, on_host)) }
    }

    fn region(&self, part: usize, on_host: bool) -> Region {
        self.places[usize::from(on_host)].regions[part].clone()
    }

    fn download(&self, on: &Subject, scenario: &Scenario) -> Vec<Vec<u8>> {
        let [device, host] = self.places.each_ref().map(|place| place.download(on));
        let both = device.into_iter().zip(host).zip(&scenario.tensors);
        both.map(|((device, host), tensor)| if tensor.on_host { host } else { device }).collect()
    }
}

/// The bits of parameters (no kind) and state after some steps, by tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome(pub(crate) BTreeMap<(usize, Option<StateKind>), Vec<u8>>);

impl Outcome {
    /// All that the other knows is here, bit for bit.
    pub(crate) fn assert_has(&self, other: &Self, who: &str) {
        for (key, expected) in &other.0 {
            let found = &self.0[key];
            assert_eq!(found.len(), expected.len(), "{key:?}");
            if let Some(at) = (0..found.len()).find(|&i| found[i] != expected[i]) {
                panic!("tensor and kind {key:?} differ from {who} at byte {at} of {}", found.len());
            }
        }
    }
}

/// Gradients of all steps and the flags, on the device before the first step begins.
struct Inputs {
    grads: Vec<Vec<Option<Region>>>,
    scale: Option<Region>,
    /// The flag that skips nothing and the one that skips.
    flags: [Region; 2],
}

impl Inputs {
    fn new(on: &Subject, scenario: &Scenario, steps: usize) -> Self {
        let tensors = 0..scenario.tensors.len();
        let mut parts: Vec<(Vec<u8>, u64)> =
            [scenario.grad_scale.unwrap_or(1.0), 0.0, 1.0].iter().map(|flag| (bytes_of(&[*flag]), 4)).collect();
        let mut at = vec![vec![None; tensors.len()]; steps];
        for (step, at) in at.iter_mut().enumerate() {
            for (tensor, at) in tensors.clone().zip(at) {
                if let Some(grad) = scenario.grad(step, tensor) {
                    *at = Some(parts.len());
                    parts.push((grad, scenario.tensors[tensor].grad.bytes()));
                }
            }
        }
        let placed = Placed::new(on, &parts);
        let region = |part: usize| placed.region(part, false);
        let of_step = |at: &Vec<Option<usize>>| {
            let places = scenario.tensors.iter().zip(at);
            places.map(|(tensor, at)| at.map(|part| placed.region(part, tensor.on_host))).collect()
        };
        let grads = at.iter().map(of_step).collect();
        Self { grads, scale: scenario.grad_scale.map(|_| region(0)), flags: [region(1), region(2)] }
    }

    fn skip(&self, scenario: &Scenario, step: usize) -> Option<Region> {
        scenario.skipped.map(|_| self.flags[usize::from(scenario.is_skipped(step))].clone())
    }
}

/// Where the update runs, other than streamed through the device.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Placement {
    /// On the host alone: there is no ring on the device.
    Host,
    /// On both.
    Hybrid(HostShare),
}

/// The streamed optimizer with everything it needs.
pub(crate) struct Rig<'a> {
    /// The host's part, where it has one, and the state it works on.
    pub(crate) hybrid: Option<(Hybrid, Vec<PlacedAdamW>)>,
    on: &'a Subject,
    pub(crate) scenario: Scenario,
    pub(crate) pool: Arc<Pool>,
    pub(crate) optimizer: StreamedAdamW,
    pub(crate) compute: Stream,
    params: Placed,
    inputs: Inputs,
}

impl<'a> Rig<'a> {
    pub(crate) fn new(on: &'a Subject, scenario: Scenario, steps: usize) -> Self {
        Self::placed(on, scenario, steps, None)
    }

    pub(crate) fn placed(on: &'a Subject, scenario: Scenario, steps: usize, placement: Option<Placement>) -> Self {
        let pool = Pool::new(on.device.clone());
        let PlanOptions { slots, slot_bytes, .. } = scenario.options;
        let pipeline = Arc::new(Pipeline::new(&pool, slots, slot_bytes).unwrap());
        let state = HostState::new(&pool, Arc::new(scenario.plan())).unwrap();
        let hybrid = placement.map(|placement| {
            let (share, ring) = match placement {
                Placement::Host => (HostShare::Fixed(1.0), None),
                Placement::Hybrid(share) => (share, Some(pipeline.clone())),
            };
            let hybrid = Hybrid::new(&pool, share, &HostOptions::default(), slots, slot_bytes).unwrap();
            (hybrid, vec![PlacedAdamW::new(state.clone(), ring)])
        });
        let optimizer = StreamedAdamW::from_parts(state, pipeline);
        let params: Vec<_> =
            (0..scenario.tensors.len()).map(|i| (scenario.param(i), scenario.tensors[i].param.bytes())).collect();
        let params = Placed::new(on, &params);
        let (inputs, compute) = (Inputs::new(on, &scenario, steps), on.stream("compute").unwrap());
        let rig = Self { hybrid, on, scenario, pool, optimizer, compute, params, inputs };
        rig.write_state();
        rig
    }

    fn write_state(&self) {
        for (tensor, of) in self.scenario.tensors.iter().enumerate() {
            for kind in of.kinds() {
                let bytes = bytes_of(&self.scenario.state(tensor, kind));
                self.on.write(&bytes, &self.state(tensor, kind)).unwrap();
            }
        }
    }

    /// Parameters and state as before the first step, whatever happened since.
    pub(crate) fn reset(&self) {
        self.synchronize();
        self.on.finish(&self.compute).unwrap();
        self.write_state();
        self.params.places.iter().for_each(|place| place.reset(self.on));
    }

    pub(crate) fn state(&self, tensor: usize, kind: StateKind) -> Region {
        self.optimizer.state().tensor(tensor, kind).unwrap().unwrap()
    }

    pub(crate) fn bindings(&self, step: usize) -> Vec<Binding> {
        let grads = &self.inputs.grads[step];
        (0..self.scenario.tensors.len())
            .map(|i| Binding {
                param: self.params.region(i, self.scenario.tensors[i].on_host),
                param_dtype: self.scenario.tensors[i].param,
                grad: grads[i].clone().map(|grad| (grad, self.scenario.tensors[i].grad)),
                scalars: i as u32,
            })
            .collect()
    }

    pub(crate) fn step(&self, step: usize) -> forebay::Result<()> {
        self.step_with(step, &self.bindings(step))
    }

    pub(crate) fn step_with(&self, step: usize, tensors: &[Binding]) -> forebay::Result<()> {
        let (grad_scale, skip) = (self.inputs.scale.clone(), self.inputs.skip(&self.scenario, step));
        let scalars = self.scenario.scalars(step);
        let inputs = StepInputs { scalars: &scalars, grad_scale, skip };
        match &self.hybrid {
            None => self.optimizer.step(tensors, &inputs, &self.compute),
            Some((hybrid, stores)) => {
                stores[0].check(tensors, &inputs)?;
                hybrid.run(stores, &[tensors.to_vec()], &[], &inputs, &self.compute)
            }
        }
    }

    /// A step of the host's for which some gradients are down already.
    pub(crate) fn run_landed(&self, step: usize, landed: &[Vec<Option<Region>>]) -> forebay::Result<()> {
        let scalars = self.scenario.scalars(step);
        let inputs = StepInputs { scalars: &scalars, ..StepInputs::default() };
        let (hybrid, stores) = self.hybrid.as_ref().unwrap();
        hybrid.run(stores, &[self.bindings(step)], landed, &inputs, &self.compute)
    }

    /// Waits for all that the steps left under way, and lets the host see it.
    pub(crate) fn synchronize(&self) {
        self.optimizer.synchronize().unwrap();
        if let Some((hybrid, _)) = &self.hybrid {
            hybrid.lane().drain().unwrap();
            self.on.finish(&self.compute).unwrap();
        }
    }

    /// The first so many steps, one right after the other.
    pub(crate) fn steps(&self, steps: usize) {
        for step in 0..steps {
            self.step(step).unwrap();
            self.assert_idle();
        }
    }

    /// Every slot is with the ring.
    pub(crate) fn assert_idle(&self) {
        assert_eq!(self.optimizer.pipeline().idle_slots(), self.scenario.options.slots, "slots are missing");
        if let Some((hybrid, _)) = &self.hybrid {
            assert_eq!(hybrid.lane().idle_slots(), 2 * self.scenario.options.slots, "the host's slots are missing");
        }
    }

    /// Parameters and state; all stores have ended.
    pub(crate) fn outcome(&self) -> Outcome {
        let mut values = BTreeMap::new();
        for (tensor, bytes) in self.params.download(self.on, &self.scenario).into_iter().enumerate() {
            values.insert((tensor, None), bytes);
            for kind in self.scenario.tensors[tensor].kinds() {
                values.insert((tensor, Some(kind)), self.on.host_bytes(&self.state(tensor, kind)).unwrap());
            }
        }
        Outcome(values)
    }

    /// Compares with the other two ways after so many steps.
    pub(crate) fn assert_exact(&self, steps: usize) {
        let outcome = self.outcome();
        outcome.assert_has(&resident(self.on, &self.scenario, steps), "the resident update");
        outcome.assert_has(&reference(&self.scenario, steps), "the host's arithmetic");
    }

    /// What the books must say after a step.
    pub(crate) fn expected_stats(&self, step: usize) -> (u64, u64) {
        let plan = self.optimizer.plan();
        let moving = |tensor: usize| !(self.scenario.missing)(step, tensor);
        let chunks = plan.chunks().iter().filter(|c| plan.segments(c).iter().any(|s| moving(s.tensor))).count();
        let tensors = self.scenario.tensors.iter().enumerate().filter(|&(i, _)| moving(i));
        (chunks as u64, tensors.map(|(_, t)| t.elements * 4 * t.kinds().len() as u64).sum())
    }

    pub(crate) fn assert_stats(&self, stats: RunStats, step: usize) {
        let (chunks, bytes) = self.expected_stats(step);
        assert_eq!((stats.chunks, stats.fetch_bytes, stats.store_bytes), (chunks, bytes, bytes), "{stats:?}");
    }
}

/// The steps as one launch each over whole tensors, their state resident on the device.
pub(crate) fn resident(on: &Subject, scenario: &Scenario, steps: usize) -> Outcome {
    let stream = on.stream("resident").unwrap();
    let tensors = scenario.tensors.iter().map(|&tensor| Tensor { on_host: false, ..tensor }).collect();
    let scenario = &Scenario { tensors, ..scenario.clone() };
    let inputs = Inputs::new(on, scenario, steps);
    let (mut keys, mut parts) = (Vec::new(), Vec::new());
    for (tensor, of) in scenario.tensors.iter().enumerate() {
        keys.push((tensor, None));
        parts.push((scenario.param(tensor), of.param.bytes()));
        for kind in of.kinds() {
            keys.push((tensor, Some(kind)));
            parts.push((bytes_of(&scenario.state(tensor, kind)), 4));
        }
    }
    let memory = Packed::new(on, &parts, false);
    let region = |tensor: usize, kind: Option<StateKind>| {
        keys.iter().position(|&key| key == (tensor, kind)).map(|at| memory.regions[at].clone())
    };
    for step in 0..steps {
        let segments: Vec<AdamWSegment> = (0..scenario.tensors.len())
            .filter(|&tensor| scenario.tensors[tensor].elements > 0)
            .filter_map(|tensor| {
                Some(AdamWSegment {
                    grad: inputs.grads[step][tensor].clone()?,
                    grad_dtype: scenario.tensors[tensor].grad,
                    param: region(tensor, None)?,
                    param_dtype: scenario.tensors[tensor].param,
                    exp_avg: region(tensor, Some(StateKind::ExpAvg))?,
                    exp_avg_sq: region(tensor, Some(StateKind::ExpAvgSq))?,
                    max_exp_avg_sq: region(tensor, Some(StateKind::MaxExpAvgSq)),
                    master: region(tensor, Some(StateKind::Master)),
                    scalars: tensor as u32,
                })
            })
            .collect();
        let scalars = scenario.scalars(step);
        let (grad_scale, skip) = (inputs.scale.clone(), inputs.skip(scenario, step));
        on.launch(&stream, &Kernel::AdamW(AdamW { segments: &segments, scalars: &scalars, grad_scale, skip })).unwrap();
    }
    on.finish(&stream).unwrap();
    Outcome(keys.into_iter().zip(memory.download(on)).collect())
}

/// The steps on the host, for tensors whose weights are f32 somewhere: rounding to half precision is the device's.
pub(crate) fn reference(scenario: &Scenario, steps: usize) -> Outcome {
    let mut values = BTreeMap::new();
    for (tensor, of) in scenario.tensors.iter().enumerate() {
        if of.param != Dtype::F32 && !of.master {
            continue;
        }
        let start = |kind: StateKind| scenario.state(tensor, kind);
        let (weights, m, v) = (start(StateKind::Master), start(StateKind::ExpAvg), start(StateKind::ExpAvgSq));
        let x = start(StateKind::MaxExpAvgSq);
        let mut elements: Vec<AdamWElement> = (0..of.elements as usize)
            .map(|i| AdamWElement { p: weights[i], m: m[i], v: v[i], x: if of.amsgrad { x[i] } else { 0.0 } })
            .collect();
        for step in (0..steps).filter(|&step| !scenario.is_skipped(step)) {
            let Some(grad) = scenario.grad(step, tensor) else { continue };
            let (scale, scalars) = (scenario.grad_scale.unwrap_or(1.0), scenario.scalars(step)[tensor]);
            for (element, grad) in elements.iter_mut().zip(widen(of.grad, &grad)) {
                *element = adamw_element(*element, grad, scale, of.amsgrad, &scalars);
            }
        }
        let mut put = |kind: Option<StateKind>, get: fn(&AdamWElement) -> f32| {
            values.insert((tensor, kind), bytes_of(&elements.iter().map(get).collect::<Vec<_>>()));
        };
        put(Some(StateKind::ExpAvg), |e| e.m);
        put(Some(StateKind::ExpAvgSq), |e| e.v);
        if of.amsgrad {
            put(Some(StateKind::MaxExpAvgSq), |e| e.x);
        }
        if of.master {
            put(Some(StateKind::Master), |e| e.p);
        }
        if of.param == Dtype::F32 {
            put(None, |e| e.p);
        }
    }
    Outcome(values)
}
