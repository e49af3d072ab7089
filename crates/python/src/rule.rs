//! Update rules as Python sees them.

use forebay::device;
use forebay::device::MasterFormat;
use forebay::plan::state_bytes;
use pyo3::prelude::*;

use crate::guard;

/// An update rule: the state an optimizer keeps and the numbers of its groups.
#[pyclass(frozen)]
pub(crate) struct Rule {
    rule: &'static device::Rule,
}

#[pymethods]
impl Rule {
    /// The rule of a name.
    #[new]
    fn new(py: Python<'_>, name: &str) -> PyResult<Self> {
        guard::run(py, || Ok(Self { rule: device::Rule::named(name)? }))
    }

    /// Its name.
    #[getter]
    fn name(&self) -> &'static str {
        self.rule.name
    }

    /// The columns of state that it may keep, without the master.
    #[getter]
    fn columns(&self) -> Vec<&'static str> {
        self.rule.columns.iter().map(|column| column.name).collect()
    }

    /// The numbers of a group, by name and in order.
    #[getter]
    fn hypers(&self) -> Vec<&'static str> {
        self.rule.hypers.to_vec()
    }

    /// What those numbers are if a user gives none.
    #[getter]
    fn defaults(&self) -> Vec<f64> {
        self.rule.defaults.to_vec()
    }

    /// Whether a parameter's state shows its step counter.
    #[getter]
    fn shows_step(&self) -> bool {
        self.rule.shows_step
    }

    /// Whether a parameter's state appears with its first update, not when it is created.
    #[getter]
    fn appears_late(&self) -> bool {
        self.rule.appears_late
    }

    /// The columns that a group with these numbers needs, without the master.
    fn keeps(&self, hypers: Vec<f64>) -> Vec<&'static str> {
        self.rule.kept(&hypers, false).iter().map(|column| column.name).collect()
    }

    /// Bytes of state of a parameter in a group with these numbers, whose master has this format ("" for none).
    fn state_bytes(&self, py: Python<'_>, hypers: Vec<f64>, master: &str, elements: u64) -> PyResult<u64> {
        guard::run(py, || Ok(state_bytes(&self.rule.kept(&hypers, MasterFormat::named(master)?), elements)))
    }
}
