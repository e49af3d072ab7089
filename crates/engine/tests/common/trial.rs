//! The same optimizer run in three ways: as the test places it, resident on the device in whole tensors, and element by
//! element in the test itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay::device::update::format::{bf16_at_random, random, random_key, scale_of};
use forebay::device::update::master::{join, split};
use forebay::device::update::{BLOCK, MASTER, MASTER_CARRY, MASTER_LOW, MAX_COLUMNS, MAXIMIZE};
use forebay::device::{
    Column, Dtype, HostOptions, Kernel, MasterFormat, Region, Rule, RuleColumn, ScalarInputs, Scalars, SharedDevice,
    StateFormat, Stream,
};
use forebay::flow::RunStats;
use forebay::optimizer::{Binding, Optimizer, OptimizerOptions, OptimizerStats, Placement, StepFlags, TableInput};
use forebay::plan::{PlanOptions, StepPlan, TensorSpec, state_bytes};

use super::Subject;
use super::packed::{Packed, Placed, bytes_of, encode, values, widen};

/// A parameter of a trial.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tensor {
    pub(crate) elements: u64,
    pub(crate) param: Dtype,
    pub(crate) grad: Dtype,
    /// Whether its group has numbers with which the rule keeps every column that it has.
    pub(crate) full: bool,
    pub(crate) master: MasterFormat,
    /// How each column of the rule is kept.
    pub(crate) formats: [StateFormat; MAX_COLUMNS],
    /// Whether parameter and gradients lie on the host.
    pub(crate) on_host: bool,
}

impl Tensor {
    pub(crate) const fn f32(elements: u64) -> Self {
        Self::of(elements, Dtype::F32, Dtype::F32)
    }

    pub(crate) const fn of(elements: u64, param: Dtype, grad: Dtype) -> Self {
        let formats = [StateFormat::F32; MAX_COLUMNS];
        Self { elements, param, grad, full: false, master: MasterFormat::None, formats, on_host: false }
    }

    pub(crate) const fn full(self) -> Self {
        Self { full: true, ..self }
    }

    pub(crate) const fn master(self) -> Self {
        Self { master: MasterFormat::F32, ..self }
    }

    pub(crate) const fn compact(self) -> Self {
        Self { master: MasterFormat::Compact, ..self }
    }

    pub(crate) const fn kept_as(self, format: StateFormat) -> Self {
        self.kept([format; MAX_COLUMNS])
    }

    pub(crate) const fn kept(self, formats: [StateFormat; MAX_COLUMNS]) -> Self {
        Self { formats, ..self }
    }

    pub(crate) const fn on_host(self) -> Self {
        Self { on_host: true, ..self }
    }
}

/// Every pair of types, with and without masters and all columns, next to tensors of one element and of none.
pub(crate) fn mixed_tensors() -> Vec<Tensor> {
    use Dtype::{Bf16, F16, F32};
    vec![
        Tensor::f32(4097),
        Tensor::f32(1),
        Tensor::f32(0),
        Tensor::of(3000, Bf16, Bf16).master(),
        Tensor::of(777, Bf16, F32).master().full(),
        Tensor::of(2500, F16, F16).master(),
        Tensor::of(1234, F16, F32),
        Tensor::of(5000, F32, Bf16).full(),
        Tensor::of(65, Bf16, Bf16),
        Tensor::of(63, F32, F16),
        Tensor::of(0, Bf16, Bf16).master(),
        Tensor::of(1, Bf16, F16).master().full(),
        Tensor::f32(2100).full().master(),
        Tensor::of(64, F16, Bf16).full(),
        Tensor::of(3001, Bf16, Bf16).compact(),
        Tensor::of(900, Bf16, F32).compact().full(),
        Tensor::of(3, Bf16, F16).compact(),
        Tensor::of(0, Bf16, Bf16).compact(),
        Tensor::of(2222, Bf16, Bf16).master().kept_as(StateFormat::Bf16),
        Tensor::f32(1001).full().kept([StateFormat::F32, StateFormat::Bf16, StateFormat::F32]),
    ]
}

/// Every format of state, with and without masters and all columns, in numbers of elements around those of a block.
pub(crate) fn reduced_tensors() -> Vec<Tensor> {
    use Dtype::{Bf16, F16, F32};
    use StateFormat::{Bf16 as Half, Blocks, F32 as Full};
    vec![
        Tensor::f32(4097).kept_as(Blocks),
        Tensor::f32(0).kept_as(Blocks),
        Tensor::f32(1).kept_as(Half),
        Tensor::of(3000, Bf16, Bf16).master().kept_as(Blocks),
        Tensor::of(777, Bf16, F32).master().full().kept_as(Blocks),
        Tensor::of(2500, F16, F16).master().kept_as(Half),
        Tensor::of(1234, F16, F32).kept_as(Blocks),
        Tensor::f32(1500),
        Tensor::of(3001, Bf16, Bf16).compact().kept_as(Blocks),
        Tensor::of(900, Bf16, F32).compact().full().kept([Blocks, Half, Full]),
        Tensor::f32(255).kept_as(Blocks),
        Tensor::f32(256).full().kept([Full, Blocks, Half]),
        Tensor::f32(257).kept([Half, Blocks, Blocks]),
        Tensor::of(5000, F32, Bf16).full().kept_as(Half),
        Tensor::of(2100, Bf16, Bf16).kept_as(Half),
        Tensor::of(65, Bf16, F16).compact().kept_as(Half),
    ]
}

/// Every group with a number of elements that is a multiple of 4 and with one that is not, with a master and without; of
/// the masters, every other one is compact.
/// Larger than most chunks: some rules round by an element's place in its tensor.
pub(crate) fn group_tensors() -> Vec<Tensor> {
    let tensor = |i: u64| {
        let elements = 1500 + 4 * i + i / 3 % 2;
        let tensor =
            if i.is_multiple_of(2) { Tensor::f32(elements) } else { Tensor::of(elements, Dtype::Bf16, Dtype::F32) };
        let master = [MasterFormat::None, MasterFormat::F32, MasterFormat::None, MasterFormat::Compact][i as usize % 4];
        Tensor { full: i >= 6, master, ..tensor }
    };
    (0..12).map(tensor).collect()
}

/// Six groups of a rule: three that keep no column that can be done without, and three that keep all.
fn groups_of(rule: &Rule) -> Vec<Vec<f64>> {
    let adam = |full: f64| {
        vec![
            vec![3e-2, 0.9, 0.999, 1e-8, 1e-2, 0.0, full],
            vec![1e-2, 0.8, 0.95, 1e-6, 0.0, 0.0, full],
            vec![2e-2, 0.9, 0.999, 1e-8, 0.1, 1.0, full],
        ]
    };
    match rule.name {
        "adamw" | "adam" => [adam(0.0), adam(1.0)].concat(),
        "sgd" => vec![
            vec![3e-2, 0.0, 0.0, 1e-2, 0.0, 0.0],
            vec![1e-2, 0.0, 0.0, 0.0, 0.0, 0.0],
            vec![2e-2, 0.0, 0.0, 0.1, 0.0, 1.0],
            vec![3e-2, 0.9, 0.3, 1e-2, 0.0, 0.0],
            vec![1e-2, 0.8, 0.0, 0.0, 1.0, 0.0],
            vec![2e-2, 0.9, 0.1, 0.0, 0.0, 1.0],
        ],
        "lion" => {
            let (decays, plain, maximizes) =
                ([3e-3, 0.9, 0.99, 0.1, 0.0], [1e-3, 0.8, 0.95, 0.0, 0.0], [2e-3, 0.9, 0.99, 0.05, 1.0]);
            [decays, plain, maximizes].repeat(2).into_iter().map(Vec::from).collect()
        }
        other => panic!("{other} has no groups for trials yet"),
    }
}

/// What is trained and how.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) rule: &'static Rule,
    /// The numbers of each group at the first step. Of `n` groups, tensor `i` is in group `i % (n / 2)`, and in the second
    /// half of them if it keeps all columns.
    pub(crate) groups: Vec<Vec<f64>>,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) options: PlanOptions,
    /// Whether a tensor (the second number) has no gradient at a step (the first).
    pub(crate) missing: fn(usize, usize) -> bool,
    pub(crate) grad_scale: Option<f32>,
    /// Whether the flag that says so is set at a step; without any there is no flag.
    pub(crate) skipped: Option<fn(usize) -> bool>,
    /// Updates that a tensor has had before the first step.
    pub(crate) counter: fn(usize) -> u64,
    /// The first tensor of a second table.
    pub(crate) second_table: Option<usize>,
    /// Whether the state of the second table is on the device.
    pub(crate) second_resident: bool,
    /// The seed with which reduced columns are rounded at random.
    pub(crate) rounding_seed: Option<u64>,
}

impl Scenario {
    pub(crate) fn new(tensors: Vec<Tensor>, slots: usize, slot_bytes: u64) -> Self {
        let (rule, options) = (Rule::named("adamw").unwrap(), PlanOptions { slots, slot_bytes, ..Default::default() });
        Self {
            rule,
            groups: groups_of(rule),
            tensors,
            options,
            missing: |_, _| false,
            grad_scale: None,
            skipped: None,
            counter: |_| 0,
            second_table: None,
            second_resident: false,
            rounding_seed: None,
        }
    }

    /// The same with another rule.
    pub(crate) fn with(self, rule: &'static Rule) -> Self {
        Self { rule, groups: groups_of(rule), ..self }
    }

    pub(crate) fn specs(&self) -> Vec<TensorSpec> {
        let spec = |(i, tensor): (usize, &Tensor)| TensorSpec {
            name: format!("tensor.{i}"),
            elements: tensor.elements,
            columns: self.columns(i),
            on_host: tensor.on_host,
            number: i as u64,
        };
        self.tensors.iter().enumerate().map(spec).collect()
    }

    /// The plan of all tensors in one table.
    pub(crate) fn plan(&self) -> StepPlan {
        StepPlan::new(self.specs(), self.options).unwrap()
    }

    /// The table of a tensor, and its place there.
    pub(crate) fn place(&self, tensor: usize) -> (usize, usize) {
        match self.second_table {
            Some(first) if tensor >= first => (1, tensor - first),
            _ => (0, tensor),
        }
    }

    pub(crate) fn group(&self, tensor: usize) -> usize {
        let half = self.groups.len() / 2;
        tensor % half + if self.tensors[tensor].full { half } else { 0 }
    }

    pub(crate) fn columns(&self, tensor: usize) -> Vec<Column> {
        let Tensor { formats, master, .. } = self.tensors[tensor];
        self.rule.kept_as(&self.groups[self.group(tensor)], formats, master)
    }

    /// The groups with a rate that changes at every step.
    pub(crate) fn groups_at(&self, step: usize) -> Vec<Vec<f64>> {
        let mut groups = self.groups.clone();
        groups.iter_mut().for_each(|group| group[0] *= 1.0 - 0.05 * step as f64);
        groups
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
    fn state(&self, tensor: usize, index: usize) -> Vec<f32> {
        let elements = self.tensors[tensor].elements;
        let least = if index == 0 { -0.1 } else { 0.0 };
        values(200 + 100 * index + tensor, elements, least, 0.1)
    }

    /// The same as it lies in memory.
    fn kept_state(&self, tensor: usize, index: usize) -> Kept {
        let (column, format) = (&self.rule.columns[index], self.tensors[tensor].formats[index]);
        Kept::narrow(column, format, &self.state(tensor, index), None)
    }

    /// The weights before the first step, as exact as they are kept. Lower halves of compact masters are anything, many of
    /// them ties.
    fn weights(&self, tensor: usize) -> Vec<f32> {
        let Tensor { elements, param, master, .. } = self.tensors[tensor];
        let weights = widen(param, &self.param(tensor));
        if master != MasterFormat::Compact {
            return weights;
        }
        let halves = values(900 + tensor, elements, 0.0, 65_536.0);
        let master = |(i, (weight, low)): (usize, (f32, f32))| {
            let low = if i % 3 == 0 { 0x8000 } else { low as u16 };
            join((weight.to_bits() >> 16) as u16, low, low > 0x8000)
        };
        weights.into_iter().zip(halves).enumerate().map(master).collect()
    }

    /// A column before the first step, as it lies in memory.
    fn state_bytes(&self, tensor: usize, column: &Column) -> Vec<u8> {
        match part_of(self.rule, column) {
            Some((index, part)) => self.kept_state(tensor, index).parts.swap_remove(part),
            None => master_bytes(column, &self.weights(tensor)),
        }
    }

    fn is_skipped(&self, step: usize) -> bool {
        self.skipped.is_some_and(|skipped| skipped(step))
    }

    /// Streams so many steps, without a pause between them, and compares with both other ways.
    pub(crate) fn check(&self, on: &Subject, steps: usize) {
        self.check_placed(on, steps, Placement::Stream);
    }

    /// The same with another placement.
    pub(crate) fn check_placed(&self, on: &Subject, steps: usize, placement: Placement) {
        let rig = Rig::placed(on, self.clone(), steps, placement);
        rig.steps(steps);
        rig.synchronize();
        rig.assert_exact(steps);
    }
}

/// The column of a rule of which this is a part, by its place in the rule, and which part it is.
fn part_of(rule: &Rule, column: &Column) -> Option<(usize, usize)> {
    let named = |(i, own): (usize, &RuleColumn)| match column.name {
        name if name == own.name => Some((i, 0)),
        name if name == own.scale => Some((i, 1)),
        _ => None,
    };
    rule.columns.iter().enumerate().find_map(named)
}

/// A column of a rule in a format: its parts, and the numbers that they stand for.
struct Kept {
    parts: Vec<Vec<u8>>,
    numbers: Vec<f32>,
}

impl Kept {
    /// Numbers in a format, element by element; with a key, rounded at random.
    fn narrow(column: &RuleColumn, format: StateFormat, numbers: &[f32], key: Option<u32>) -> Self {
        let at_random = |i: usize| key.map(|key| random(key, i as u32));
        match format {
            StateFormat::F32 => Self { parts: vec![bytes_of(numbers)], numbers: numbers.to_vec() },
            StateFormat::Bf16 => {
                // As a compact master divides an f32: its rounding and the rest.
                let nearest = |number: f32| (number.to_bits() >> 16) as u16 + u16::from(split(number).1);
                let half = |(i, &number): (usize, &f32)| match at_random(i) {
                    Some(random) => bf16_at_random(number, random),
                    None => nearest(number),
                };
                let halves: Vec<u8> = numbers.iter().enumerate().flat_map(|one| half(one).to_le_bytes()).collect();
                Self { numbers: widen(Dtype::Bf16, &halves), parts: vec![halves] }
            }
            StateFormat::Blocks => {
                let (code, block) = (column.code(), BLOCK as usize);
                let (mut codes, mut scales, mut found) = (Vec::new(), Vec::new(), Vec::new());
                for (start, block) in (0..).step_by(block).zip(numbers.chunks(block)) {
                    let (scale, inverse) = scale_of(block.iter().map(|number| number.abs().to_bits()).max().unwrap());
                    for (i, number) in block.iter().enumerate() {
                        codes.push(code.nearest(*number, inverse, at_random(start + i)));
                        found.push(code.share(codes[start + i]) * scale);
                    }
                    scales.push(scale);
                }
                Self { parts: vec![codes, bytes_of(&scales)], numbers: found }
            }
        }
    }
}

/// A column of these masters.
fn master_bytes(column: &Column, values: &[f32]) -> Vec<u8> {
    if *column == MASTER_LOW {
        return values.iter().flat_map(|&master| split(master).0.to_le_bytes()).collect();
    }
    if *column == MASTER_CARRY {
        let carries = |eight: &[f32]| (0..eight.len()).fold(0, |byte, i| byte | u8::from(split(eight[i]).1) << i);
        return values.chunks(8).map(carries).collect();
    }
    bytes_of(values)
}

/// The name under which an [`Outcome`] has step counters.
const COUNTER: &str = "step";

/// The bits of parameters (no name), columns and step counters after some steps, by tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome(pub(crate) BTreeMap<(usize, Option<&'static str>), Vec<u8>>);

impl Outcome {
    /// All that the other knows is here, bit for bit.
    pub(crate) fn assert_has(&self, other: &Self, who: &str) {
        for (key, expected) in &other.0 {
            let found = &self.0[key];
            assert_eq!(found.len(), expected.len(), "{key:?}");
            if let Some(at) = (0..found.len()).find(|&i| found[i] != expected[i]) {
                panic!("tensor and column {key:?} differ from {who} at byte {at} of {}", found.len());
            }
        }
    }

    /// The same without step counters, which advance where an update is skipped too.
    pub(crate) fn without_counters(mut self) -> Self {
        self.0.retain(|(_, name), _| *name != Some(COUNTER));
        self
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

/// An optimizer with everything that its steps need.
pub(crate) struct Rig<'a> {
    on: &'a Subject,
    pub(crate) scenario: Scenario,
    placement: Placement,
    pub(crate) optimizer: Optimizer,
    pub(crate) compute: Stream,
    params: Placed,
    inputs: Inputs,
    /// Columns on the device, by tensor, where the placement is resident.
    resident: Option<(Packed, Vec<Vec<Region>>)>,
}

impl<'a> Rig<'a> {
    /// One that streams.
    pub(crate) fn new(on: &'a Subject, scenario: Scenario, steps: usize) -> Self {
        Self::placed(on, scenario, steps, Placement::Stream)
    }

    pub(crate) fn placed(on: &'a Subject, scenario: Scenario, steps: usize, placement: Placement) -> Self {
        Self::within(on, scenario, steps, placement, None).unwrap()
    }

    /// The same within a budget of pinned memory.
    pub(crate) fn within(
        on: &'a Subject,
        scenario: Scenario,
        steps: usize,
        placement: Placement,
        pinned_budget_bytes: Option<u64>,
    ) -> forebay::Result<Self> {
        Self::on_device(on, on.device.clone(), scenario, steps, placement, pinned_budget_bytes)
    }

    fn on_device(
        on: &'a Subject,
        device: SharedDevice,
        scenario: Scenario,
        steps: usize,
        placement: Placement,
        pinned_budget_bytes: Option<u64>,
    ) -> forebay::Result<Self> {
        let options = OptimizerOptions {
            placement,
            plan: scenario.options,
            pinned_budget_bytes,
            host: HostOptions::default(),
            rounding_seed: scenario.rounding_seed,
        };
        let optimizer = Optimizer::new(device, scenario.rule, options)?;
        if placement.streams() {
            optimizer.open_ring(None)?;
        }
        let mut specs = scenario.specs();
        let second = scenario.second_table.map(|first| specs.split_off(first));
        optimizer.add(specs)?;
        let add = |specs| if scenario.second_resident { optimizer.add_resident(specs) } else { optimizer.add(specs) };
        second.map_or(Ok(0), add)?;
        let params: Vec<_> =
            (0..scenario.tensors.len()).map(|i| (scenario.param(i), scenario.tensors[i].param.bytes())).collect();
        let params = Placed::new(on, &params);
        let (inputs, compute) = (Inputs::new(on, &scenario, steps), on.stream("compute").unwrap());
        let is_resident = |tensor: usize| {
            placement == Placement::Resident || scenario.second_resident && scenario.place(tensor).0 == 1
        };
        let any_resident = (0..scenario.tensors.len()).any(is_resident);
        let resident = any_resident.then(|| resident_columns(on, &scenario, is_resident));
        let rig = Self { on, scenario, placement, optimizer, compute, params, inputs, resident };
        rig.write_state();
        Ok(rig)
    }

    fn write_state(&self) {
        if let Some((columns, _)) = &self.resident {
            columns.reset(self.on);
        }
        for tensor in 0..self.scenario.tensors.len() {
            let counter = (self.scenario.counter)(tensor) as f32;
            self.on.write(&bytes_of(&[counter]), &self.counter(tensor)).unwrap();
            for column in self.scenario.columns(tensor).iter().filter(|_| !self.is_resident(tensor)) {
                let bytes = self.scenario.state_bytes(tensor, column);
                self.on.write(&bytes, &self.column(tensor, column.name)).unwrap();
            }
        }
    }

    /// Parameters and state as before the first step, whatever happened since.
    pub(crate) fn reset(&self) {
        self.synchronize();
        self.write_state();
        self.params.places.iter().for_each(|place| place.reset(self.on));
        self.optimizer.trust();
    }

    /// Steps twice and starts anew with a fresh ring. Later steps compute no powers, so that a test can count their calls.
    pub(crate) fn warm(self) -> Self {
        self.step(0).unwrap();
        self.step(0).unwrap();
        self.reset();
        if self.placement.streams() {
            self.optimizer.close_ring().unwrap();
            self.optimizer.open_ring(None).unwrap();
        }
        self
    }

    /// The plan of the first table.
    pub(crate) fn plan(&self) -> Arc<StepPlan> {
        self.optimizer.plan(0).unwrap()
    }

    /// A tensor's column, wherever it lies.
    pub(crate) fn column(&self, tensor: usize, name: &str) -> Region {
        let (table, place) = self.scenario.place(tensor);
        match self.resident.as_ref().filter(|_| self.is_resident(tensor)) {
            None => self.optimizer.column(table, place, name).unwrap().unwrap(),
            Some((_, columns)) => {
                let index = self.scenario.columns(tensor).iter().position(|column| column.name == name);
                columns[tensor][index.unwrap()].clone()
            }
        }
    }

    /// Whether a tensor's state is on the device.
    fn is_resident(&self, tensor: usize) -> bool {
        self.resident
            .as_ref()
            .is_some_and(|_| self.placement == Placement::Resident || self.scenario.place(tensor).0 == 1)
    }

    pub(crate) fn counter(&self, tensor: usize) -> Region {
        let (table, place) = self.scenario.place(tensor);
        self.optimizer.step_counter(table, place).unwrap()
    }

    pub(crate) fn weight(&self, tensor: usize) -> Region {
        self.params.region(tensor, self.scenario.tensors[tensor].on_host)
    }

    pub(crate) fn grad(&self, step: usize, tensor: usize) -> Option<Region> {
        self.inputs.grads[step][tensor].clone()
    }

    /// Each tensor with its gradient at a step, where it has one.
    pub(crate) fn bindings(&self, step: usize) -> Vec<Option<Binding>> {
        let of = |tensor: usize| {
            let Tensor { param, grad, .. } = self.scenario.tensors[tensor];
            let group = self.scenario.group(tensor) as u32;
            Some(Binding::new((self.weight(tensor), param), (self.grad(step, tensor)?, grad), group))
        };
        (0..self.scenario.tensors.len()).map(of).collect()
    }

    /// The same by table.
    pub(crate) fn tables(&self, mut bindings: Vec<Option<Binding>>) -> Vec<TableInput> {
        let mut resident = self.resident.as_ref().map_or_else(Vec::new, |(_, columns)| columns.clone());
        let second = self.scenario.second_table.map(|first| {
            let resident = if resident.is_empty() { Vec::new() } else { resident.split_off(first) };
            TableInput { tensors: bindings.split_off(first), resident }
        });
        [TableInput { tensors: bindings, resident }].into_iter().chain(second).collect()
    }

    /// A tensor's columns on the device, where the placement is resident.
    pub(crate) fn columns_of(&self, tensor: usize) -> Vec<Region> {
        self.resident.as_ref().map_or_else(Vec::new, |(_, columns)| columns[tensor].clone())
    }

    pub(crate) fn flags(&self, step: usize) -> StepFlags {
        StepFlags { grad_scale: self.inputs.scale.clone(), skip: self.inputs.skip(&self.scenario, step) }
    }

    pub(crate) fn step(&self, step: usize) -> forebay::Result<()> {
        self.step_with(step, self.bindings(step))
    }

    pub(crate) fn step_with(&self, step: usize, bindings: Vec<Option<Binding>>) -> forebay::Result<()> {
        let groups = self.scenario.groups_at(step);
        self.optimizer.step(self.tables(bindings), &groups, Some(&self.compute), self.flags(step))
    }

    /// Waits for all that the steps left under way, and lets the host see it.
    pub(crate) fn synchronize(&self) {
        self.optimizer.synchronize().unwrap();
        self.optimizer.overlap_wait(None, Some(&self.compute)).unwrap();
        self.on.finish(&self.compute).unwrap();
    }

    pub(crate) fn stats(&self) -> OptimizerStats {
        self.optimizer.stats().unwrap()
    }

    /// The first so many steps, one right after the other.
    pub(crate) fn steps(&self, steps: usize) {
        for step in 0..steps {
            self.step(step).unwrap();
            self.assert_idle();
        }
    }

    /// Every slot is with its ring.
    pub(crate) fn assert_idle(&self) {
        let slots = self.scenario.options.slots;
        let mut travel = self.scenario.tensors.iter().enumerate().filter(|&(tensor, _)| !self.is_resident(tensor));
        let all_on_host = travel.all(|(_, tensor)| tensor.on_host);
        let ring = if self.optimizer.has_ring() { slots } else { 0 };
        let host = if self.placement.host_share().is_some() && !all_on_host { 2 * slots } else { 0 };
        assert_eq!(self.optimizer.idle_slots(), (ring, host), "slots are missing");
    }

    /// Parameters, columns and counters; all stores have ended.
    pub(crate) fn outcome(&self) -> Outcome {
        let mut values = BTreeMap::new();
        let mut resident = self.resident.iter().flat_map(|(columns, _)| columns.download(self.on));
        let on_host: Vec<bool> = self.scenario.tensors.iter().map(|tensor| tensor.on_host).collect();
        for (tensor, bytes) in self.params.download(self.on, &on_host).into_iter().enumerate() {
            values.insert((tensor, None), bytes);
            values.insert((tensor, Some(COUNTER)), self.on.host_bytes(&self.counter(tensor)).unwrap());
            for Column { name, .. } in self.scenario.columns(tensor) {
                let on_host = || self.on.host_bytes(&self.column(tensor, name)).unwrap();
                let bytes = if self.is_resident(tensor) { resident.next().unwrap() } else { on_host() };
                values.insert((tensor, Some(name)), bytes);
            }
        }
        Outcome(values)
    }

    /// Compares with the other two ways after so many steps.
    pub(crate) fn assert_exact(&self, steps: usize) {
        let outcome = self.outcome();
        if self.placement != Placement::Resident {
            outcome.assert_has(&resident(self.on, &self.scenario, steps), "the resident update");
        }
        outcome.assert_has(&reference(self.on, &self.scenario, steps), "the test's arithmetic");
    }

    /// Chunks that travel in a step, and their payload. A chunk without columns stays where it is.
    pub(crate) fn expected_stats(&self, step: usize) -> (u64, u64) {
        let plan = self.plan();
        let moving = |tensor: usize| !(self.scenario.missing)(step, tensor);
        let travels = |chunk: &&forebay::plan::Chunk| {
            let bucket = &plan.buckets()[chunk.bucket];
            let moves = plan.pieces(chunk).iter().any(|piece| moving(piece.tensor));
            moves && (bucket.on_host || !bucket.columns.is_empty())
        };
        let chunks = plan.chunks().iter().filter(travels).count();
        let tensors = self.scenario.tensors.iter().enumerate().filter(|&(i, _)| moving(i));
        (chunks as u64, tensors.map(|(i, tensor)| state_bytes(&self.scenario.columns(i), tensor.elements)).sum())
    }

    pub(crate) fn assert_stats(&self, stats: RunStats, step: usize) {
        let (chunks, bytes) = self.expected_stats(step);
        assert_eq!((stats.chunks, stats.fetch_bytes, stats.store_bytes), (chunks, bytes, bytes), "{stats:?}");
    }
}

/// The columns of all tensors in one buffer on the device.
fn resident_columns(
    on: &Subject,
    scenario: &Scenario,
    is_resident: impl Fn(usize) -> bool,
) -> (Packed, Vec<Vec<Region>>) {
    let (mut parts, mut counts) = (Vec::new(), Vec::new());
    for tensor in 0..scenario.tensors.len() {
        let columns = if is_resident(tensor) { scenario.columns(tensor) } else { Vec::new() };
        parts.extend(columns.iter().map(|column| (scenario.state_bytes(tensor, column), column.stored.bytes())));
        counts.push(columns.len());
    }
    let packed = Packed::new(on, &parts, false);
    let mut regions = packed.regions.iter().cloned();
    let columns = counts.into_iter().map(|count| regions.by_ref().take(count).collect()).collect();
    (packed, columns)
}

/// The steps over whole tensors, their state resident on the device. Faults do not reach it.
pub(crate) fn resident(on: &Subject, scenario: &Scenario, steps: usize) -> Outcome {
    let tensors = scenario.tensors.iter().map(|&tensor| Tensor { on_host: false, ..tensor }).collect();
    let scenario = Scenario { tensors, second_table: None, ..scenario.clone() };
    let rig = Rig::on_device(on, on.calm.clone(), scenario, steps, Placement::Resident, None).unwrap();
    rig.steps(steps);
    rig.synchronize();
    rig.outcome()
}

/// The numbers of a step: the powers are the device's on a GPU, and the rule's own elsewhere.
fn scalars(on: &Subject, rule: &Rule, hypers: &[f64], step: u64, elements: u64) -> Scalars {
    if !on.kind.is_cuda() || rule.powers.is_empty() {
        return rule.at_step(hypers, step, elements);
    }
    let (memory, stream) = (on.alloc(4).unwrap(), on.stream("powers").unwrap());
    let power = |&i: &usize| {
        let base = hypers[i] as f32;
        on.launch(&stream, &Kernel::Powers { dst: memory.all(), base, first: step }).unwrap();
        on.finish(&stream).unwrap();
        widen(Dtype::F32, &on.download(&memory.all()))[0]
    };
    let powers: Vec<f32> = rule.powers.iter().map(power).collect();
    (rule.scalars)(&ScalarInputs { hypers, powers: &powers, step, kind: (rule.kind)(hypers, elements) })
}

/// The steps in the test, for tensors whose weights are f32 somewhere: rounding to half precision is the device's.
pub(crate) fn reference(on: &Subject, scenario: &Scenario, steps: usize) -> Outcome {
    let (mut values, rule) = (BTreeMap::new(), scenario.rule);
    for (tensor, of) in scenario.tensors.iter().enumerate() {
        if of.param != Dtype::F32 && of.master == MasterFormat::None {
            continue;
        }
        let (columns, kept) = (scenario.columns(tensor), (rule.keeps)(&scenario.groups[scenario.group(tensor)]));
        let mut weights = scenario.weights(tensor);
        let mut state: [Option<Kept>; MAX_COLUMNS] =
            std::array::from_fn(|i| (kept & 1 << i != 0).then(|| scenario.kept_state(tensor, i)));
        let mut counter = (scenario.counter)(tensor);
        for step in 0..steps {
            let (Some(grad), groups) = (scenario.grad(step, tensor), scenario.groups_at(step)) else { continue };
            let hypers = &groups[scenario.group(tensor)];
            counter += u64::from((rule.counts)(hypers));
            if scenario.is_skipped(step) {
                continue;
            }
            let scalars = scalars(on, rule, hypers, counter, of.elements);
            let sign = if scalars.flags & MAXIMIZE != 0 { -1.0 } else { 1.0 };
            let mut news = [const { Vec::new() }; MAX_COLUMNS];
            for (i, grad) in widen(of.grad, &grad).into_iter().enumerate() {
                let grad = sign * (grad * scenario.grad_scale.unwrap_or(1.0));
                let mut of_element = state.each_ref().map(|kept| kept.as_ref().map_or(0.0, |kept| kept.numbers[i]));
                weights[i] = (rule.element)(weights[i], grad, &mut of_element, kept, &scalars, i as u64);
                news.iter_mut().zip(of_element).for_each(|(new, number)| new.push(number));
            }
            for (i, (kept, numbers)) in state.iter_mut().zip(&news).enumerate().filter(|(_, (kept, _))| kept.is_some())
            {
                let key = scenario.rounding_seed.map(|seed| random_key(seed, counter, i as u32, tensor as u64));
                *kept = Some(Kept::narrow(&rule.columns[i], of.formats[i], numbers, key));
            }
        }
        values.insert((tensor, Some(COUNTER)), bytes_of(&[counter as f32]));
        for column in columns {
            let bytes = match part_of(rule, &column) {
                Some((index, part)) => state[index].as_ref().unwrap().parts[part].clone(),
                None => master_bytes(&column, &weights),
            };
            values.insert((tensor, Some(column.name)), bytes);
        }
        let has = |column: Column| values.contains_key(&(tensor, Some(column.name)));
        assert_eq!(of.master == MasterFormat::F32, has(MASTER));
        assert_eq!(of.master == MasterFormat::Compact, has(MASTER_LOW) && has(MASTER_CARRY));
        if of.master == MasterFormat::Compact {
            let rounded = |master: &f32| (master.to_bits() >> 16) as u16 + u16::from(split(*master).1);
            values.insert((tensor, None), weights.iter().flat_map(|master| rounded(master).to_le_bytes()).collect());
        }
        if of.param == Dtype::F32 {
            values.insert((tensor, None), bytes_of(&weights));
        }
    }
    Outcome(values)
}
