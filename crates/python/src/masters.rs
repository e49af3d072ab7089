//! Compact masters as f32, and back, in host memory.

use std::sync::Arc;

use forebay::device::update::master;
use forebay::device::update::{MASTER, MASTER_CARRY, MASTER_LOW};
use forebay::device::{Column, Region};
use pyo3::prelude::*;

use crate::guard;
use crate::torch::{self, Keeper};

/// A column of so many elements, which the caller holds.
fn column(addr: u64, of: &Column, elements: u64) -> forebay::Result<Region> {
    let keeper: Keeper = Arc::new(());
    torch::host_region(addr, of.bytes(elements), &keeper)
}

/// Write the f32 masters of bf16 weights, from the lower halves and carries that are kept beside them. All of it is on
/// the host, by address, and none of it is written by others meanwhile.
#[pyfunction]
pub(crate) fn read_masters(
    py: Python<'_>,
    weights: u64,
    low: u64,
    carry: u64,
    masters: u64,
    elements: u64,
) -> PyResult<()> {
    guard::run(py, || {
        let weights = torch::host_region(weights, 2 * elements, &(Arc::new(()) as Keeper))?;
        let (low, carry) = (column(low, &MASTER_LOW, elements)?, column(carry, &MASTER_CARRY, elements)?);
        Ok(master::masters_of(&weights, &low, &carry, &column(masters, &MASTER, elements)?)?)
    })
}

/// Write what is kept of f32 masters beside their weights: lower halves and carries. All of it is on the host.
#[pyfunction]
pub(crate) fn keep_masters(py: Python<'_>, masters: u64, low: u64, carry: u64, elements: u64) -> PyResult<()> {
    guard::run(py, || {
        let (low, carry) = (column(low, &MASTER_LOW, elements)?, column(carry, &MASTER_CARRY, elements)?);
        Ok(master::keep_masters(&column(masters, &MASTER, elements)?, &low, &carry)?)
    })
}
