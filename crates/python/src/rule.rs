//! Update rules as Python sees them.

use forebay::device;
use forebay::device::{MasterFormat, RuleColumn, StateFormat};
use forebay::plan::{columns_for, formats_for, state_bytes};
use pyo3::prelude::*;

use crate::inputs::formats;
use crate::{guard, moments};

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

    /// Bytes of state of a parameter in a group with these numbers, whose columns are asked for in these formats and whose
    /// master has this one ("" for none).
    fn state_bytes(
        &self,
        py: Python<'_>,
        hypers: Vec<f64>,
        state_formats: Vec<String>,
        master: &str,
        elements: u64,
    ) -> PyResult<u64> {
        guard::run(py, || {
            let master = MasterFormat::named(master)?;
            Ok(state_bytes(&columns_for(self.rule, &hypers, formats(&state_formats)?, master, elements), elements))
        })
    }

    /// The format of each column for a parameter of this many elements, where these are asked for.
    fn formats_for(&self, py: Python<'_>, state_formats: Vec<String>, elements: u64) -> PyResult<Vec<&'static str>> {
        guard::run(py, || {
            let found = formats_for(formats(&state_formats)?, elements).into_iter().map(StateFormat::name);
            Ok(found.take(self.rule.columns.len()).collect())
        })
    }

    /// The memory of a column in a format, the numbers first: the engine's name, the type of a value, and the elements of
    /// the parameter for each.
    fn parts(&self, py: Python<'_>, column: &str, format: &str) -> PyResult<Vec<(&'static str, &'static str, u32)>> {
        guard::run(py, || {
            let parts = self.column(column)?.kept_as(StateFormat::named(format)?);
            Ok(parts.into_iter().map(|part| (part.name, part.stored.name(), part.block)).collect())
        })
    }

    /// Write the numbers of a column in a format as f32. All memory is on the host, by address, and none of it is written
    /// by others meanwhile.
    fn read_column(
        &self,
        py: Python<'_>,
        column: &str,
        format: &str,
        parts: Vec<u64>,
        numbers: u64,
        elements: u64,
    ) -> PyResult<()> {
        guard::run(py, || {
            moments::numbers_of(self.column(column)?, StateFormat::named(format)?, &parts, numbers, elements)
        })
    }

    /// Keep these f32 numbers in a column of a format, rounded to nearest. All memory is on the host.
    fn keep_column(
        &self,
        py: Python<'_>,
        column: &str,
        format: &str,
        numbers: u64,
        parts: Vec<u64>,
        elements: u64,
    ) -> PyResult<()> {
        guard::run(py, || {
            moments::keep_numbers(self.column(column)?, StateFormat::named(format)?, numbers, &parts, elements)
        })
    }
}

impl Rule {
    fn column(&self, name: &str) -> forebay::Result<&'static RuleColumn> {
        self.rule.columns.iter().find(|column| column.name == name).ok_or_else(|| forebay::Error::InvalidOption {
            option: "column",
            value: name.to_owned(),
            remedy: format!("{} has {}", self.rule.name, self.columns().join(", ")),
        })
    }
}
