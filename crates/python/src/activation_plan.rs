//! Activation plans as Python sees them: frozen classes, measured figures in and plans out.

use forebay::plan::{self, Choice, PassEvent};
use forebay::{Error, Result};
use pyo3::prelude::*;

use crate::guard;

fn from_json<T: serde::de::DeserializeOwned>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| Error::InvalidOption {
        option: what,
        value: text.chars().take(80).collect(),
        remedy: error.to_string(),
    })
}

fn to_json<T: serde::Serialize>(what: &'static str, value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|error| Error::InvalidOption {
        option: what,
        value: String::new(),
        remedy: error.to_string(),
    })
}

fn word(choice: Choice) -> &'static str {
    match choice {
        Choice::Keep => "keep",
        Choice::Offload => "offload",
        Choice::Recompute => "recompute",
    }
}

/// One moment of a watched pass.
#[pyclass(frozen, from_py_object)]
#[derive(Clone)]
pub(crate) struct PassSample(plan::PassSample);

#[pymethods]
impl PassSample {
    /// The event is "begin", "enter", "leave", "open" or "end"; the call counts for the middle three. Times are since the
    /// pass began on the device's clock, and on the host's; bytes are allocated now, at the peak since the sample before,
    /// and held for saved tensors that leave or arrive; gradients that the pass has made are counted now and at the peak.
    #[new]
    #[pyo3(signature = (
        event, *, call, at_ns, host_ns, allocated_bytes, peak_bytes, held_bytes, gradient_bytes, peak_gradient_bytes
    ))]
    #[expect(clippy::too_many_arguments, reason = "one sample, each figure named")]
    fn new(
        py: Python<'_>,
        event: &str,
        call: usize,
        at_ns: u64,
        host_ns: u64,
        allocated_bytes: u64,
        peak_bytes: u64,
        held_bytes: u64,
        gradient_bytes: u64,
        peak_gradient_bytes: u64,
    ) -> PyResult<Self> {
        guard::run(py, || {
            let event = match event {
                "begin" => PassEvent::Begin,
                "enter" => PassEvent::Enter,
                "leave" => PassEvent::Leave,
                "open" => PassEvent::Open,
                "end" => PassEvent::End,
                _ => {
                    return Err(Error::InvalidOption {
                        option: "event",
                        value: event.to_owned(),
                        remedy: "use begin, enter, leave, open or end".to_owned(),
                    });
                }
            };
            Ok(Self(plan::PassSample {
                event,
                call,
                at_ns,
                host_ns,
                allocated_bytes,
                peak_bytes,
                held_bytes,
                gradient_bytes,
                peak_gradient_bytes,
            }))
        })
    }
}

/// The results of one operation inside a layer, which can be saved when the layer is recomputed.
#[pyclass(frozen, from_py_object)]
#[derive(Clone)]
pub(crate) struct TensorCost(plan::TensorCost);

#[pymethods]
impl TensorCost {
    #[new]
    #[pyo3(signature = (name, *, bytes, recompute_ns, saved))]
    fn new(name: String, bytes: u64, recompute_ns: u64, saved: bool) -> Self {
        Self(plan::TensorCost { name, bytes, recompute_ns, saved })
    }

    /// The operation.
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// Bytes of its results.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// The time to recompute it.
    #[getter]
    fn recompute_ns(&self) -> u64 {
        self.0.recompute_ns
    }

    /// Whether autograd saves it anyway.
    #[getter]
    fn saved(&self) -> bool {
        self.0.saved
    }
}

/// What is known of calls of one kind. Kinds of one family take the same time and memory.
#[pyclass(frozen, from_py_object)]
#[derive(Clone)]
pub(crate) struct CallKind(plan::CallKind);

#[pymethods]
impl CallKind {
    #[new]
    #[pyo3(signature = (
        name, *, family, can_recompute, recompute_share, saved_bytes, input_bytes, operations, tensors
    ))]
    #[expect(clippy::too_many_arguments, reason = "one kind, each figure named")]
    fn new(
        name: String,
        family: u64,
        can_recompute: bool,
        recompute_share: f64,
        saved_bytes: u64,
        input_bytes: u64,
        operations: u64,
        tensors: Vec<TensorCost>,
    ) -> Self {
        let tensors = tensors.into_iter().map(|tensor| tensor.0).collect();
        Self(plan::CallKind {
            name,
            family,
            can_recompute,
            recompute_share,
            saved_bytes,
            input_bytes,
            operations,
            tensors,
        })
    }
}

/// One call in a measured pass: its kind, as a place in the list of kinds, and whether it saved everything.
#[pyclass(frozen, from_py_object)]
#[derive(Clone)]
pub(crate) struct MeasuredCall(plan::MeasuredCall);

#[pymethods]
impl MeasuredCall {
    #[new]
    #[pyo3(signature = (*, kind, saves))]
    fn new(kind: Option<usize>, saves: bool) -> Self {
        Self(plan::MeasuredCall { kind, saves })
    }
}

/// What one call took; None where that was not seen.
#[pyclass(frozen, get_all)]
pub(crate) struct CallTimes {
    /// Its forward pass.
    forward_ns: Option<u64>,
    /// Its backward pass.
    backward_ns: Option<u64>,
}

/// A pass as it was measured.
#[pyclass(frozen)]
pub(crate) struct MeasuredPass(plan::MeasuredPass);

#[pymethods]
impl MeasuredPass {
    #[new]
    #[pyo3(signature = (*, samples, calls, kinds))]
    fn new(samples: Vec<PassSample>, calls: Vec<MeasuredCall>, kinds: Vec<CallKind>) -> Self {
        Self(plan::MeasuredPass {
            samples: samples.into_iter().map(|sample| sample.0).collect(),
            calls: calls.into_iter().map(|call| call.0).collect(),
            kinds: kinds.into_iter().map(|kind| kind.0).collect(),
        })
    }

    /// What each call took.
    fn times(&self, py: Python<'_>) -> PyResult<Vec<CallTimes>> {
        let times = guard::run(py, || Ok(self.0.times()))?;
        Ok(times
            .into_iter()
            .map(|one| CallTimes { forward_ns: one.forward_ns, backward_ns: one.backward_ns })
            .collect())
    }

    /// The costs of the pass, with this many bytes of host memory to offload to.
    #[pyo3(signature = (*, host_bytes))]
    fn cost(&self, py: Python<'_>, host_bytes: u64) -> PyResult<PassCost> {
        guard::run(py, || Ok(PassCost(self.0.cost(0.0, 0.0, host_bytes))))
    }
}

/// What one layer costs.
#[pyclass(frozen)]
pub(crate) struct LayerCost(plan::LayerCost);

#[pymethods]
impl LayerCost {
    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// What it saves if it is recomputed.
    #[getter]
    fn input_bytes(&self) -> u64 {
        self.0.input_bytes
    }

    /// What it saves if it is not.
    #[getter]
    fn saved_bytes(&self) -> u64 {
        self.0.saved_bytes
    }

    /// Results that can be saved when it is recomputed.
    #[getter]
    fn tensors(&self) -> Vec<TensorCost> {
        self.0.tensors.iter().cloned().map(TensorCost).collect()
    }
}

/// What one pass costs.
#[pyclass(frozen)]
pub(crate) struct PassCost(plan::PassCost);

#[pymethods]
impl PassCost {
    /// Read costs that `to_json` wrote.
    #[staticmethod]
    fn from_json(py: Python<'_>, text: &str) -> PyResult<Self> {
        guard::run(py, || Ok(Self(from_json("cost", text)?)))
    }

    /// The costs as JSON.
    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        guard::run(py, || to_json("cost", &self.0))
    }

    /// The layers in the order of the forward pass.
    #[getter]
    fn layers(&self) -> Vec<LayerCost> {
        self.0.layers.iter().cloned().map(LayerCost).collect()
    }

    /// Plan a pass of this many tokens from costs measured with another number, over a link with these rates. Without a
    /// budget the plan is the one that takes the least memory.
    #[pyo3(signature = (budget_bytes, *, tokens, measured_tokens, store_gbps, fetch_gbps))]
    fn plan(
        &self,
        py: Python<'_>,
        budget_bytes: Option<u64>,
        tokens: u64,
        measured_tokens: u64,
        store_gbps: f64,
        fetch_gbps: f64,
    ) -> PyResult<ActivationPlan> {
        guard::run(py, || {
            let cost = plan::PassCost { store_gbps, fetch_gbps, ..self.0.scaled(tokens, measured_tokens) };
            Ok(ActivationPlan(match budget_bytes {
                Some(budget) => plan::ActivationPlan::new(&cost, budget)?,
                None => plan::ActivationPlan::frugal(&cost),
            }))
        })
    }
}

/// The plan for one layer. Choices are "keep", "offload" and "recompute".
#[pyclass(frozen)]
pub(crate) struct LayerPlan(plan::LayerPlan);

#[pymethods]
impl LayerPlan {
    /// The whole of it in one to three words.
    #[getter]
    fn word(&self) -> &str {
        &self.0.word
    }

    /// Whether it is recomputed.
    #[getter]
    fn recompute(&self) -> bool {
        self.0.recompute
    }

    /// The choice for its inputs, if it is recomputed.
    #[getter]
    fn input(&self) -> &'static str {
        word(self.0.input)
    }

    /// The choice for each result that can be saved, if it is recomputed.
    #[getter]
    fn tensors(&self) -> Vec<&'static str> {
        self.0.tensors.iter().copied().map(word).collect()
    }

    /// How many bytes of what it saves are offloaded, first saved first, if it is not recomputed.
    #[getter]
    fn offload_bytes(&self) -> u64 {
        self.0.offload_bytes
    }

    /// What is offloaded is freed before this layer begins.
    #[getter]
    fn free_at(&self) -> u32 {
        self.0.free_at
    }

    /// What is offloaded is fetched from the beginning of this layer's backward pass on.
    #[getter]
    fn fetch_at(&self) -> u32 {
        self.0.fetch_at
    }

    /// Bytes that stay on the device.
    #[getter]
    fn kept_bytes(&self) -> u64 {
        self.0.kept_bytes
    }

    /// Bytes that are offloaded.
    #[getter]
    fn offloaded_bytes(&self) -> u64 {
        self.0.offloaded_bytes
    }

    /// The predicted time of its forward pass.
    #[getter]
    fn forward_ns(&self) -> u64 {
        self.0.forward_ns
    }

    /// The predicted time of its backward pass.
    #[getter]
    fn backward_ns(&self) -> u64 {
        self.0.backward_ns
    }
}

/// The plan of a pass.
#[pyclass(frozen)]
pub(crate) struct ActivationPlan(plan::ActivationPlan);

#[pymethods]
impl ActivationPlan {
    /// Read a plan that `to_json` wrote.
    #[staticmethod]
    fn from_json(py: Python<'_>, text: &str) -> PyResult<Self> {
        guard::run(py, || Ok(Self(from_json("plan", text)?)))
    }

    /// The plan as JSON.
    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        guard::run(py, || to_json("plan", &self.0))
    }

    /// The plan as text: one line for the pass and one for each layer.
    fn explain(&self) -> String {
        self.0.explain()
    }

    /// The same plan with predictions corrected by the measurements of earlier passes: their peak exceeded the predicted
    /// peak by this many bytes, and they took `pace` times the predicted time.
    #[pyo3(signature = (*, budget_bytes, excess_bytes, pace))]
    fn corrected(&self, budget_bytes: u64, excess_bytes: i64, pace: f64) -> Self {
        Self(self.0.corrected(budget_bytes, excess_bytes, pace))
    }

    /// The budget.
    #[getter]
    fn budget_bytes(&self) -> u64 {
        self.0.budget_bytes
    }

    /// The smallest budget that has a plan.
    #[getter]
    fn least_bytes(&self) -> u64 {
        self.0.least_bytes
    }

    /// The predicted peak, above what is allocated as the pass begins.
    #[getter]
    fn peak_bytes(&self) -> u64 {
        self.0.peak_bytes
    }

    /// The predicted time.
    #[getter]
    fn pass_ns(&self) -> u64 {
        self.0.pass_ns
    }

    /// The plan of each layer.
    #[getter]
    fn layers(&self) -> Vec<LayerPlan> {
        self.0.layers.iter().cloned().map(LayerPlan).collect()
    }
}
