//! The schedule against its rules, for plans, orders and events by chance.

use std::collections::BTreeSet;
use std::sync::Arc;

use forebay_device::Rule;
use proptest::prelude::*;

use super::schedule::{Layout, Lies, Part, Schedule};
use crate::plan::{PlanOptions, StepPlan, TensorSpec};

fn plan(elements: &[u64]) -> StepPlan {
    let rule = Rule::named("adamw").unwrap();
    let spec = |(i, &elements): (usize, &u64)| TensorSpec {
        name: format!("tensor.{i}"),
        elements,
        columns: rule.kept(rule.defaults, i % 3 == 0),
        on_host: false,
        number: 0,
    };
    let options = PlanOptions { slots: 2, slot_bytes: 4096, ..PlanOptions::default() };
    StepPlan::new(elements.iter().enumerate().map(spec).collect(), options).unwrap()
}

/// What happens to a step, in some order.
#[derive(Debug, Clone, Copy)]
enum Event {
    Offer(usize),
    /// The oldest offer that is awaited becomes final.
    Final,
    Run,
    RunResident,
    Commit,
    ReachCommit,
}

fn events(tensors: usize) -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        4 => (0..tensors).prop_map(Event::Offer),
        4 => Just(Event::Final),
        4 => Just(Event::Run),
        2 => Just(Event::RunResident),
        1 => Just(Event::Commit),
        1 => Just(Event::ReachCommit),
    ];
    prop::collection::vec(event, 0..60)
}

/// The same rules written a second time: what is known of each tensor, looked at anew each time.
struct Model {
    layout: Arc<Layout>,
    order: Vec<i64>,
    offered: Vec<usize>,
    ready: BTreeSet<usize>,
    late: BTreeSet<usize>,
    committed: bool,
    commit_reached: bool,
    ran: BTreeSet<usize>,
}

impl Model {
    fn updates(&self, tensor: usize) -> bool {
        self.ready.contains(&tensor) || self.late.contains(&tensor)
    }

    fn awaited(&self) -> bool {
        self.offered.iter().any(|tensor| !self.ready.contains(tensor))
    }

    /// Units that may run, with what they are sorted by: those behind the commit last.
    fn may_run(&self, travels: bool) -> Vec<((bool, i64, usize), usize)> {
        let mut found = Vec::new();
        for (index, unit) in self.layout.units.iter().enumerate() {
            let is_known = |&tensor: &usize| self.updates(tensor) || self.committed && !self.offered.contains(&tensor);
            let need =
                unit.tensors.iter().filter(|&&tensor| self.updates(tensor)).map(|&tensor| self.order[tensor]).min();
            let is_late = unit.tensors.iter().any(|tensor| self.late.contains(tensor)) && !self.commit_reached;
            let held_back = is_late && self.awaited();
            if unit.travels == travels
                && unit.tensors.iter().all(is_known)
                && !self.ran.contains(&index)
                && !held_back
                && let Some(need) = need
            {
                found.push(((is_late, need, index), index));
            }
        }
        found.sort_unstable();
        found
    }

    fn is_complete(&self, tensor: usize) -> bool {
        let units = self.layout.units.iter().enumerate().filter(|(_, unit)| unit.tensors.contains(&tensor));
        self.updates(tensor) && units.into_iter().all(|(index, _)| self.ran.contains(&index))
    }
}

proptest! {
    #[test]
    fn a_unit_runs_when_its_gradients_are_final_and_the_most_needed_first(
        elements in prop::collection::vec(0..1500u64, 1..12),
        resident in prop::collection::vec(1..200u64, 0..4),
        order in prop::collection::vec(-5..20i64, 16),
        missing in prop::collection::vec(any::<bool>(), 16),
        events in events(16),
        lies in prop::sample::select(vec![Lies::OnHost, Lies::Shared]),
    ) {
        let plans = [plan(&elements), plan(&resident)];
        let layout = Arc::new(Layout::new([(&plans[0], lies), (&plans[1], Lies::OnDevice)].into_iter()));
        let tensors = layout.tensors();
        let order = order[..tensors.min(16)].to_vec();
        let mut schedule = Schedule::new(layout.clone(), order.clone());
        let mut model = Model {
            layout,
            order,
            offered: Vec::new(),
            ready: BTreeSet::new(),
            late: BTreeSet::new(),
            committed: false,
            commit_reached: false,
            ran: BTreeSet::new(),
        };
        let mut completed = Vec::new();
        // Then all that is left, so that the step ends.
        let tail = [Event::Commit, Event::ReachCommit].into_iter();
        let tail = tail.chain((0..tensors).map(|_| Event::Final)).chain((0..1000).flat_map(|_| [Event::Run, Event::RunResident]));
        for event in events.into_iter().chain(tail) {
            match event {
                Event::Offer(tensor) => {
                    if tensor < tensors && !model.committed && !model.offered.contains(&tensor) {
                        schedule.offer(tensor);
                        model.offered.push(tensor);
                    }
                }
                Event::Final => {
                    if let Some(&tensor) = model.offered.iter().find(|tensor| !model.ready.contains(tensor)) {
                        schedule.ready(tensor);
                        model.ready.insert(tensor);
                    }
                }
                Event::Commit => {
                    if !model.committed {
                        model.committed = true;
                        let late = |tensor: &usize| !model.offered.contains(tensor) && !missing[*tensor];
                        model.late = (0..tensors).filter(late).collect();
                        schedule.commit(model.late.iter().copied());
                    }
                }
                Event::ReachCommit => {
                    if model.committed && !model.commit_reached {
                        model.commit_reached = true;
                        schedule.reach_commit();
                    }
                }
                Event::Run | Event::RunResident => {
                    let travels = matches!(event, Event::Run);
                    let expected = model.may_run(travels).first().map(|&(_, unit)| unit);
                    let unit = schedule.next(travels);
                    prop_assert_eq!(unit, expected);
                    if let Some(unit) = unit {
                        prop_assert_eq!(schedule.is_late(unit), model.layout.units[unit].tensors.iter().any(|tensor| model.late.contains(tensor)));
                        schedule.ran(unit);
                        model.ran.insert(unit);
                    }
                }
            }
            for tensor in schedule.take_completed() {
                prop_assert!(model.is_complete(tensor), "{} is told too early", tensor);
                completed.push(tensor);
            }
        }
        prop_assert!(schedule.is_over());
        completed.sort_unstable();
        let updated: Vec<usize> = (0..tensors).filter(|&tensor| model.updates(tensor)).collect();
        prop_assert_eq!(completed, updated, "each is told once");
    }
}

#[test]
fn units_and_tensors_are_found_by_table_and_place() {
    let plans = [plan(&[700, 0, 60]), plan(&[5, 0, 9])];
    let layout = Layout::new([(&plans[0], Lies::OnHost), (&plans[1], Lies::OnDevice)].into_iter());
    assert_eq!((layout.tables(), layout.tensors()), (2, 6));
    assert_eq!(
        [layout.number(0, 2), layout.number(1, 0), layout.number(0, 3), layout.number(2, 0)],
        [Some(2), Some(3), None, None]
    );
    assert_eq!((layout.home(2), layout.home(5)), ((0, 2), (1, 2)));
    let chunks = plans[0].chunks().len();
    assert_eq!(layout.units.len(), chunks + 2, "an empty tensor is no unit");
    assert_eq!(
        (layout.chunk(0, chunks - 1), layout.chunk(0, chunks), layout.chunk(1, 0)),
        (Some(chunks - 1), None, None)
    );
    assert_eq!(layout.units[chunks + 1].part, Part::Tensor(2));
    assert!(layout.units[..chunks].iter().all(|unit| unit.travels) && !layout.units[chunks].travels);
}

/// What a flag on the device held back counts as done.
#[test]
fn what_is_skipped_is_complete() {
    let plan = plan(&[3000, 10, 500]);
    let layout = Arc::new(Layout::new([(&plan, Lies::Shared)].into_iter()));
    let mut schedule = Schedule::new(layout, vec![0; 3]);
    schedule.commit([0, 2].into_iter());
    assert!(!schedule.is_over());
    schedule.skip_rest();
    assert_eq!((schedule.take_completed(), schedule.is_over()), (vec![0, 2], true));
}
