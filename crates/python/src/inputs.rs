//! Conversions between Python's and the engine's values: inputs of an optimizer, and its statistics.

use std::sync::Arc;

use forebay::Result;
use forebay::device::update::MAX_COLUMNS;
use forebay::device::{HostOptions, MasterFormat, Place, Region, Rule, SharedDevice, StateFormat};
use forebay::optimizer::{Binding, Number, OptimizerOptions, Placement, TableInput};
use forebay::plan::{PlanOptions, StepPlan, TensorSpec, columns_for};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::looked::{Looked, Row};
use crate::torch::{self, Keeper};

/// What one step updates in a table: parameters, their gradients, and the number of each one's group. A gradient at
/// address 0 is none.
pub(crate) type Tensors = (Py<Looked>, Py<Looked>, Vec<u32>);

/// For tensors on the device: by table and tensor, the addresses of their columns.
pub(crate) type Resident = Vec<Vec<Vec<u64>>>;

/// The options of an optimizer, by the attributes of Python's.
#[derive(FromPyObject)]
pub(crate) struct Options {
    placement: String,
    slots: usize,
    chunk_bytes: u64,
    pinned_budget_bytes: Option<u64>,
    host_fraction: Option<f64>,
    host_threads: Option<usize>,
    host_kernel: Option<String>,
    rounding_seed: Option<u64>,
}

impl Options {
    pub(crate) fn parsed(self) -> Result<OptimizerOptions> {
        Ok(OptimizerOptions {
            placement: Placement::named(&self.placement, self.host_fraction)?,
            plan: PlanOptions { slot_bytes: self.chunk_bytes, slots: self.slots, ..PlanOptions::default() },
            pinned_budget_bytes: self.pinned_budget_bytes,
            host: HostOptions { threads: self.host_threads, kernel: self.host_kernel },
            rounding_seed: self.rounding_seed,
        })
    }
}

/// A tensor that gets state: name, elements, the number of its group, the format of its master (empty for none), whether
/// it lies on the host, and its place among the parameters of the optimizer.
pub(crate) type NewTensor = (String, u64, usize, String, bool, u64);

/// The format of each column of a rule, by name; columns without a name keep f32.
pub(crate) fn formats(names: &[String]) -> Result<[StateFormat; MAX_COLUMNS]> {
    let mut formats = [StateFormat::F32; MAX_COLUMNS];
    for (format, name) in formats.iter_mut().zip(names) {
        *format = StateFormat::named(name)?;
    }
    Ok(formats)
}

/// The tensors of a new table, with the columns that their groups' numbers call for.
pub(crate) fn specs(
    rule: &Rule,
    tensors: Vec<NewTensor>,
    hypers: &[Vec<f64>],
    wanted: [StateFormat; MAX_COLUMNS],
) -> Result<Vec<TensorSpec>> {
    let spec = |(name, elements, group, master, on_host, number): NewTensor| {
        let columns = columns_for(rule, &hypers[group], wanted, MasterFormat::named(&master)?, elements);
        Ok(TensorSpec { name, elements, columns, on_host, number })
    };
    tensors.into_iter().map(spec).collect()
}

/// One f32 on the device; nothing at address 0.
pub(crate) fn scalar(device: &SharedDevice, addr: u64) -> Result<Option<Region>> {
    (addr != 0).then(|| on_device(device, addr, 4)).transpose()
}

/// Memory on the device, which the caller holds.
pub(crate) fn on_device(device: &SharedDevice, addr: u64, bytes: u64) -> Result<Region> {
    let keeper: Keeper = Arc::new(());
    torch::region(device, addr, bytes, Place::Device, &keeper)
}

/// Host memory by address and bytes, which the caller holds.
pub(crate) fn host_regions(memory: Vec<(u64, u64)>) -> Result<Vec<Region>> {
    let keeper: Keeper = Arc::new(());
    memory.into_iter().map(|(addr, bytes)| torch::host_region(addr, bytes, &keeper)).collect()
}

/// A table's tensors at one step, as regions.
pub(crate) fn table_input(
    device: &SharedDevice,
    plan: &StepPlan,
    (params, grads, groups): &Tensors,
    resident: Option<&Vec<Vec<u64>>>,
) -> Result<TableInput> {
    let (keeper, mut input): (Keeper, _) = (Arc::new(()), TableInput::default());
    let rows = params.get().rows().iter().zip(grads.get().rows());
    for (i, (spec, (param, grad))) in plan.tensors().iter().zip(rows).enumerate() {
        let place = if spec.on_host { Place::Pageable } else { Place::Device };
        let operand = |row: &Row| -> Result<_> {
            Ok((torch::region(device, row.addr, row.elements * row.dtype.bytes(), place, &keeper)?, row.dtype))
        };
        // Without a gradient a parameter is not touched, and may have no address.
        let bind = || Ok::<_, forebay::Error>(Binding::new(operand(param)?, operand(grad)?, groups[i]));
        input.tensors.push((grad.addr != 0).then(bind).transpose()?);
        if let Some(addresses) = resident.map(|resident| &resident[i]) {
            let columns = addresses.iter().zip(&spec.columns).map(|(addr, column)| {
                torch::region(device, *addr, column.bytes(spec.elements), Place::Device, &keeper)
            });
            input.resident.push(columns.collect::<Result<_>>()?);
        }
    }
    Ok(input)
}

/// Numbers by name as a dict.
pub(crate) fn dict<'py>(py: Python<'py>, named: Vec<(&'static str, Number)>) -> PyResult<Bound<'py, PyDict>> {
    let numbers = PyDict::new(py);
    for (name, number) in named {
        match number {
            Number::Count(count) => numbers.set_item(name, count)?,
            Number::Real(real) => numbers.set_item(name, real)?,
            Number::Flag(flag) => numbers.set_item(name, flag)?,
        }
    }
    Ok(numbers)
}
