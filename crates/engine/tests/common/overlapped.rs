//! Overlapped steps of a rig.

use std::time::{Duration, Instant};

use super::trial::Rig;

/// How one overlapped step goes.
#[derive(Debug, Clone)]
pub(crate) struct Way {
    /// By tensor: how early it is needed.
    pub(crate) need: Vec<i64>,
    /// Tensors that are offered, in this order; the others are handed over at the commit.
    pub(crate) offered: Vec<usize>,
}

/// By table: how early tensors are needed.
pub(crate) fn order(rig: &Rig<'_>, need: &[i64]) -> Vec<Vec<i64>> {
    let (first, second) = need.split_at(rig.scenario.second_table.unwrap_or(need.len()));
    let second = rig.scenario.second_table.map(|_| second.to_vec());
    [first.to_vec()].into_iter().chain(second).collect()
}

/// Table and place of each tensor.
pub(crate) fn homes(rig: &Rig<'_>) -> Vec<(usize, usize)> {
    (0..rig.scenario.tensors.len()).map(|tensor| rig.scenario.place(tensor)).collect()
}

/// Offers a gradient, if there is one.
pub(crate) fn offer(rig: &Rig<'_>, step: usize, tensor: usize) -> forebay::Result<()> {
    let Some(binding) = rig.bindings(step).swap_remove(tensor) else { return Ok(()) };
    let (home, columns) = (rig.scenario.place(tensor), rig.columns_of(tensor));
    rig.optimizer.overlap_offer(home, binding, columns, Some(&rig.compute))
}

pub(crate) fn offer_all(rig: &Rig<'_>, step: usize, tensors: &[usize]) -> forebay::Result<()> {
    tensors.iter().try_for_each(|&tensor| offer(rig, step, tensor))
}

/// Hands over all gradients but those that were offered.
pub(crate) fn commit(rig: &Rig<'_>, step: usize, offered: &[usize]) -> forebay::Result<()> {
    let mut bindings = rig.bindings(step);
    offered.iter().for_each(|&tensor| bindings[tensor] = None);
    rig.optimizer.overlap_commit(rig.tables(bindings), Some(&rig.compute), rig.flags(step))
}

/// One overlapped step; its updates are submitted or not when this returns.
pub(crate) fn committed(rig: &Rig<'_>, step: usize, way: &Way) -> forebay::Result<()> {
    rig.optimizer.overlap_begin(&order(rig, &way.need), &rig.scenario.groups_at(step))?;
    offer_all(rig, step, &way.offered)?;
    commit(rig, step, &way.offered)
}

/// How many tensors are told as updated now.
pub(crate) fn tell(rig: &Rig<'_>) -> usize {
    rig.optimizer.overlap_updated().unwrap().len()
}

/// Looks until it is so.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what} did not come");
        std::thread::sleep(Duration::from_micros(200));
    }
}
