//! The totals of the process. They belong to the whole process, so this is one test, alone in its module.

use forebay::device::{Result, SharedDevice, open};
use forebay::flow::Pipeline;
use forebay::memory::{Allocator, PinnedBudget};
use forebay::optimizer::{Optimizer, OptimizerOptions, Placement};
use forebay::plan::{PlanOptions, TensorSpec};
use forebay::totals::{Totals, Use, Wait, count_fetched, count_stored, count_waits, forget_parent, totals};

const SLOT_BYTES: u64 = 4096;

fn pinned(of: Use) -> u64 {
    totals().pinned_bytes[of as usize]
}

/// Moves one chunk through a ring and back.
fn move_a_chunk(pipeline: &Pipeline, memory: &Allocator) -> forebay::Result<()> {
    let slab = memory.pin(&[SLOT_BYTES])?;
    let host = slab.part(0)?;
    let slot = pipeline.fetch(pipeline.acquire()?, std::slice::from_ref(&host), &[(0, SLOT_BYTES)])?;
    let slot = pipeline.store(slot, &[(0, SLOT_BYTES)], &[host], 0, SLOT_BYTES)?;
    pipeline.release(slot);
    pipeline.drain()
}

fn host_optimizer(device: &SharedDevice) -> Optimizer {
    let rule = forebay::device::Rule::named("adamw").unwrap();
    let plan = PlanOptions { slot_bytes: 1 << 16, ..PlanOptions::default() };
    let options = OptimizerOptions { placement: Placement::Host, plan, ..OptimizerOptions::default() };
    let optimizer = Optimizer::new(device.clone(), rule, options).unwrap();
    let columns = rule.kept(rule.defaults, false);
    optimizer
        .add(vec![TensorSpec { name: "weight".to_owned(), elements: 1000, columns, on_host: false, number: 0 }])
        .unwrap();
    optimizer
}

#[test]
fn totals_are_exact_and_count_once_what_is_shared() -> Result<()> {
    assert_eq!(totals(), Totals::default());
    let device = open("cpu")?;
    let budget = || PinnedBudget::new(None);

    // Pinned memory, by use, until the last clone is dropped.
    let sleep = Allocator::within(device.clone(), budget());
    let lease = sleep.pin_for(Use::Sleep, &[10_000]).unwrap();
    let other = lease.clone();
    assert_eq!((pinned(Use::Sleep), pinned(Use::Optimizer)), (lease.bytes(), 0));
    drop(lease);
    assert_eq!(pinned(Use::Sleep), other.bytes());
    drop(other);
    assert_eq!(pinned(Use::Sleep), 0);
    let tight = Allocator::within(device.clone(), PinnedBudget::new(Some(1)));
    assert!(tight.pin_for(Use::Sleep, &[10_000]).is_err());
    assert_eq!(totals().pinned_bytes, [0; 4], "what was refused does not count");

    // One ring for two users, and what crosses the wire.
    let memory = Allocator::within(device.clone(), budget());
    let first = Pipeline::open(&device, None, 3, SLOT_BYTES).unwrap();
    let second = Pipeline::open(&device, None, 3, SLOT_BYTES).unwrap();
    assert_eq!(totals().ring_bytes, 3 * SLOT_BYTES);
    for pipeline in [&first, &second, &first] {
        move_a_chunk(pipeline, &memory).unwrap();
    }
    assert_eq!(totals().fetched_bytes, [3 * SLOT_BYTES, 0, 0, 0]);
    assert_eq!(totals().stored_bytes, [3 * SLOT_BYTES, 0, 0, 0]);
    drop(first);
    assert_eq!(totals().ring_bytes, 3 * SLOT_BYTES);
    drop(second);
    assert_eq!(totals().ring_bytes, 0);

    // Two optimizers share the host's ring: each counts all of it, the process once.
    let one = host_optimizer(&device);
    let alone = pinned(Use::Optimizer);
    let two = host_optimizer(&device);
    let (each, together) = (two.pinned_bytes(), pinned(Use::Optimizer));
    assert_eq!(one.pinned_bytes(), each);
    assert_eq!(one.pinned_bytes(), one.stats().unwrap().pinned_bytes);
    assert!(each > together - alone && together < alone + each, "{alone}, {each}, {together}");
    drop((one, two));
    assert_eq!(pinned(Use::Optimizer), 0);

    // Counts add up, each in its place.
    let before = totals();
    for (i, one) in Use::ALL.into_iter().enumerate() {
        count_fetched(one, 10 + i as u64);
        count_stored(one, 20 + i as u64);
    }
    for (i, wait) in Wait::ALL.into_iter().enumerate() {
        count_waits(wait, 2, 30 + i as u64);
    }
    let after = totals();
    for i in 0..4 {
        assert_eq!(after.fetched_bytes[i] - before.fetched_bytes[i], 10 + i as u64);
        assert_eq!(after.stored_bytes[i] - before.stored_bytes[i], 20 + i as u64);
    }
    assert_eq!((after.waits, after.wait_ns), ([2; 3], [30, 31, 32]));

    // A forked child begins from zero.
    forget_parent();
    assert_eq!(totals(), Totals::default());
    Ok(())
}
