//! `forebay plan`: the plan of a streamed step, as text or as JSON. It opens no device and allocates no state.

use clap::ValueEnum;
use forebay::Error;
use forebay::device::update::MAX_COLUMNS;
use forebay::device::{Column, MasterFormat, Rule, StateFormat};
use forebay::plan::{PlanOptions, StepPlan, TensorSpec, columns_for, state_bytes};
use forebay_bench::Model;
use serde::Serialize;

use crate::options::{PlanStepArgs, RingArgs};
use crate::output::check_writable;
use crate::tables::{rows, size};
use crate::{Failure, SUCCESS, report};

/// The update rules that can be planned; the first one is the default.
pub(crate) fn rule_names() -> Vec<&'static str> {
    forebay::device::update::RULES.iter().map(|rule| rule.name).collect()
}

/// The model that is planned by default.
const DEFAULT_MODEL: &str = "qwen2.5-3b";

/// A plan with more chunks is refused: it would take gigabytes, and no step could use it.
const MAX_CHUNKS: u64 = 1 << 22;

/// The type of weights and gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WeightType {
    F32,
    Bf16,
    F16,
}

impl WeightType {
    fn bytes(self) -> u64 {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// Half types keep master weights.
    fn masters(self, format: MasterType) -> Result<MasterFormat, Error> {
        match (self, format) {
            (Self::Bf16, MasterType::Compact) => Ok(MasterFormat::Compact),
            (_, MasterType::Compact) => Err(Error::InvalidOption {
                option: "master",
                value: "compact".to_owned(),
                remedy: "compact masters are for bf16; add --dtype bf16".to_owned(),
            }),
            (Self::F32, MasterType::F32) | (_, MasterType::None) => Ok(MasterFormat::None),
            (Self::Bf16 | Self::F16, MasterType::F32) => Ok(MasterFormat::F32),
        }
    }

    fn describe(self, format: MasterType) -> &'static str {
        match (self, format) {
            (Self::F32, _) => "f32",
            (Self::Bf16, MasterType::None) => "bf16",
            (Self::F16, MasterType::None) => "f16",
            (Self::Bf16, MasterType::F32) => "bf16 with f32 master weights",
            (Self::Bf16, MasterType::Compact) => "bf16 with compact master weights",
            (Self::F16, _) => "f16 with f32 master weights",
        }
    }
}

/// How the master weights of half types are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum MasterType {
    /// As f32
    F32,
    /// In 17 bits beside a bf16 weight
    Compact,
    /// Not at all
    None,
}

/// How the state of the rule is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
pub(crate) enum StateType {
    /// As f32
    #[value(name = "f32")]
    #[serde(rename = "f32")]
    F32,
    /// As bf16
    #[value(name = "bf16")]
    #[serde(rename = "bf16")]
    Bf16,
    /// In 8 bits, with a scale for each 256 elements
    #[value(name = "8bit")]
    #[serde(rename = "8bit")]
    Blocks,
}

impl StateType {
    fn formats(self) -> [StateFormat; MAX_COLUMNS] {
        let format = match self {
            Self::F32 => StateFormat::F32,
            Self::Bf16 => StateFormat::Bf16,
            Self::Blocks => StateFormat::Blocks,
        };
        [format; MAX_COLUMNS]
    }

    fn describe(self) -> &'static str {
        match self {
            Self::F32 => "",
            Self::Bf16 => ", state in bf16",
            Self::Blocks => ", state in 8 bits",
        }
    }
}

/// A plan and the figures that follow from it.
#[derive(Serialize)]
struct Planned {
    version: &'static str,
    rule: String,
    model: String,
    dtype: WeightType,
    /// Of half types.
    master: MasterType,
    state: StateType,
    params: u64,
    tensors: usize,
    /// State that one step moves each way, without alignment.
    payload_bytes: u64,
    state_bytes_per_param: f64,
    /// State on the host, with alignment.
    host_bytes: u64,
    ring_bytes: u64,
    /// Weights and gradients, which stay on the device.
    weight_and_grad_bytes: u64,
    chunks: usize,
    cut_tensors: usize,
    wire_gbps: Option<f64>,
    /// The payload over the wire, if its rate was given.
    floor_step_s: Option<f64>,
    plan: StepPlan,
}

pub(crate) fn step(args: &PlanStepArgs) -> Result<u8, Failure> {
    let json = &args.output.json;
    json.path().map_or(Ok(()), check_writable)?;
    let planned = plan(args)?;
    report(json, &planned, || text(&planned))?;
    Ok(SUCCESS)
}

fn plan(args: &PlanStepArgs) -> Result<Planned, Failure> {
    let RingArgs { chunk_bytes, slots } = args.ring;
    let named = args.model.as_deref().or(args.params.is_none().then_some(DEFAULT_MODEL)).map(Model::named);
    let model = named.transpose()?;
    let params = model.as_ref().map_or(args.params.unwrap_or(0), Model::params);
    let rule = Rule::named(&args.rule).map_err(Error::from)?;
    let master = args.dtype.masters(args.master)?;
    let columns = |elements| columns_for(rule, rule.defaults, args.state.formats(), master, elements);
    // Before the shapes are made: their list alone might not fit.
    check_size(params, &columns(params), chunk_bytes, slots)?;
    let model = match model {
        Some(model) => model,
        None => Model::synthetic(params)?,
    };
    let tensors = model.tensors.iter().zip(0..).map(|(tensor, number)| TensorSpec {
        name: tensor.name.clone(),
        elements: tensor.elements,
        columns: columns(tensor.elements),
        on_host: false,
        number,
    });
    let options = PlanOptions { slot_bytes: chunk_bytes, slots, ..PlanOptions::default() };
    let plan = StepPlan::new(tensors.collect(), options)?;
    let payload_bytes = plan.payload_bytes();
    Ok(Planned {
        version: forebay::VERSION,
        rule: args.rule.clone(),
        model: model.name,
        dtype: args.dtype,
        master: args.master,
        state: args.state,
        params,
        tensors: plan.tensors().len(),
        payload_bytes,
        state_bytes_per_param: payload_bytes as f64 / params as f64,
        host_bytes: plan.arena_bytes().iter().sum(),
        ring_bytes: plan.ring_bytes(),
        weight_and_grad_bytes: 2 * args.dtype.bytes() * params,
        chunks: plan.chunks().len(),
        cut_tensors: plan.cut_tensors(),
        wire_gbps: args.wire_gbps,
        floor_step_s: args.wire_gbps.map(|gbps| payload_bytes as f64 / gbps / 1e9),
        plan,
    })
}

/// Refuses a ring that no device can have, and a plan that this machine should not try to make.
fn check_size(params: u64, columns: &[Column], chunk_bytes: u64, slots: usize) -> Result<(), Error> {
    if (slots as u64).checked_mul(chunk_bytes).is_none_or(|ring| ring > 1 << 60) {
        return Err(Error::InvalidOption {
            option: "slots",
            value: slots.to_string(),
            remedy: format!("no device has memory for this many slots of {chunk_bytes} bytes"),
        });
    }
    // Of a million elements: some columns have less than a byte for each.
    let state_bytes = (u128::from(params) * u128::from(state_bytes(columns, 1_000_000))).div_ceil(1_000_000);
    let state_bytes = u64::try_from(state_bytes).unwrap_or(u64::MAX);
    if state_bytes.div_ceil(chunk_bytes) > MAX_CHUNKS {
        return Err(Error::InvalidOption {
            option: "chunk_bytes",
            value: chunk_bytes.to_string(),
            remedy: format!("use at least {} for {params} parameters", state_bytes.div_ceil(MAX_CHUNKS)),
        });
    }
    Ok(())
}

fn text(planned: &Planned) -> String {
    let mut text = format!(
        "plan of a streamed step: {}, {}, {}{}, forebay {}\n\n{}\n",
        planned.rule,
        planned.model,
        planned.dtype.describe(planned.master),
        planned.state.describe(),
        planned.version,
        planned.plan
    );
    let mut lines = vec![
        (
            "state per step",
            format!("{} bytes per parameter, {} each way", planned.state_bytes_per_param, size(planned.payload_bytes)),
        ),
        (
            "on the device",
            format!(
                "ring {}, weights and gradients {} ({} bytes per parameter)",
                size(planned.ring_bytes),
                size(planned.weight_and_grad_bytes),
                2 * planned.dtype.bytes()
            ),
        ),
        ("on the host", format!("{} of pinned memory", size(planned.host_bytes))),
    ];
    if let (Some(gbps), Some(seconds)) = (planned.wire_gbps, planned.floor_step_s) {
        let rate = planned.params as f64 / seconds / 1e9;
        lines.push(("floor", format!("{:.1} ms at {gbps} GB/s each way, {rate:.3} Gparam/s", seconds * 1e3)));
    }
    rows(&mut text, &lines);
    text
}
