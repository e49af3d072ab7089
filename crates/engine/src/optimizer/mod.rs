//! An optimizer: its state, where it lies, and one step for every placement.
//!
//! [`Optimizer`] owns everything that belongs to an optimizer: tables of state, its use of the rings and of the host's
//! threads, landed gradients, the budget of pinned memory, whether the state can be trusted, and the pages that a save
//! still needs. A [`Rule`] says which optimizer it is; the code here uses only its columns and scalars.
//!
//! [Note: locks of several optimizers] Optimizers of a process share rings and threads. Each has one lock, which a call
//! holds from its beginning to its end. Only [`Optimizer::snapshot`] holds the locks of several, and one snapshot at a
//! time does. Behind its own lock a call waits for nothing that another optimizer's lock guards:
//! - for the device's ring it waits slot by slot; its owners never wait for a second slot while they hold one, nor for a
//!   lock of an optimizer (see [Note: users of one ring] in `flow/pipeline.rs`);
//! - for its turn on the host's ring it waits with its own lock alone; who has the turn is in a step, and takes no lock
//!   of an optimizer any more (see `host_ring.rs`);
//! - for a save, with a slot or with the turn: the thread that writes a save takes no lock, no slot and no turn.
//! - for the thread of its overlapped step: that takes no lock of an optimizer, and waits for the same three.
//!
//! So no circle of waits can close. What is dropped, perhaps by Python's collector with the GIL held, waits for work of
//! the device only.
//!
//! A step goes through these files: `scalars` finds the numbers of each group, and `segments` checks and builds the
//! operands of the kernels. Then `streamed` (the inner loop), `host_lane`, or both at once under `hybrid` run the
//! updates.

mod host_lane;
mod host_ring;
mod hybrid;
mod landing;
mod overlap;
mod placement;
mod scalars;
mod second;
mod segments;
mod sides;
mod stats;
mod streamed;
mod table;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use forebay_device::{Buffer, Error as DeviceError, Event, HostOptions, PinStats, Region, Rule, SharedDevice, Stream};

pub use host_lane::HostStats;
pub use hybrid::HostShare;
pub use overlap::{OverlapStats, OverlapUnit};
pub use placement::Placement;
pub use segments::{Binding, TableInput};
pub use stats::{HostReport, Number, OptimizerStats};
pub use table::StateTable;

use crate::error::{Error, Result};
use crate::flow::{Pipeline, RunStats};
use crate::memory::{Allocator, PinnedBudget};
use crate::plan::{PlanOptions, StepPlan, TensorSpec};
use crate::snapshot::{PAGE_BYTES, Snapshot};
use crate::trace::{self, Reason};
use host_lane::HostLane;
use hybrid::Hybrid;
use landing::Landing;
use overlap::Overlap;
use scalars::{Powers, ScalarSets, SharedPowers};
use segments::{Segments, StepInputs, TableStep};

/// How to make an optimizer.
#[derive(Debug, Clone)]
pub struct OptimizerOptions {
    /// Where state lies and who updates it.
    pub placement: Placement,
    /// Slots and their size, for state that streams.
    pub plan: PlanOptions,
    /// Most bytes that may be pinned.
    pub pinned_budget_bytes: Option<u64>,
    /// The host's threads, for placements that use them.
    pub host: HostOptions,
    /// The seed with which columns in fewer bits than an f32 are rounded at random; `None` to round them to nearest.
    pub rounding_seed: Option<u64>,
}

impl Default for OptimizerOptions {
    fn default() -> Self {
        Self {
            placement: Placement::Stream,
            plan: PlanOptions::default(),
            pinned_budget_bytes: None,
            host: HostOptions::default(),
            rounding_seed: None,
        }
    }
}

/// What applies to a whole step.
#[derive(Debug, Clone, Default)]
pub struct StepFlags {
    /// An f32 on the device that every gradient is multiplied with.
    pub grad_scale: Option<Region>,
    /// An f32 on the device; where it is not zero, nothing changes.
    pub skip: Option<Region>,
}

/// An optimizer with its state.
#[derive(Debug)]
pub struct Optimizer {
    device: SharedDevice,
    rule: &'static Rule,
    options: OptimizerOptions,
    /// What counts against the user's budget.
    memory: Arc<Allocator>,
    /// Made with the first overlapped step. Its hooks take no other lock of the optimizer. Declared before what it works
    /// on: a step that was committed is completed first.
    overlap: OnceLock<Overlap>,
    /// What it is called in a trace.
    owner: u32,
    inner: Mutex<OptimizerInner>,
}

#[derive(Debug, Default)]
struct OptimizerInner {
    pipeline: Option<Arc<Pipeline>>,
    /// Slots of the next ring, where that is not the options'.
    slots: Option<usize>,
    tables: Vec<Arc<StateTable>>,
    /// Whether every pinned table has a second slab.
    second: bool,
    /// The host's part; made with the first table.
    hybrid: Option<Arc<Hybrid>>,
    landing: Landing,
    powers: Option<SharedPowers>,
    /// For backends on which torch has no streams.
    own_compute: Option<Stream>,
    /// Marks the end of work on the caller's host memory.
    finished: Option<Event>,
    /// Why the state cannot be trusted.
    distrusted: Option<String>,
    closed: bool,
}

impl OptimizerInner {
    fn pinned_bytes(&self) -> u64 {
        let state: u64 = self.tables.iter().map(|table| table.pinned_bytes()).sum();
        state + self.hybrid.as_ref().map_or(0, |hybrid| hybrid.lane().pinned_bytes()) + self.landing.pinned_bytes()
    }

    /// Waits until every store and every copy of the host's part has ended.
    fn drain(&self) -> Result<()> {
        let stored = self.pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.drain());
        stored.and(self.hybrid.as_ref().map_or(Ok(()), |hybrid| hybrid.lane().drain()))
    }

    fn check_open(&self) -> Result<()> {
        if !self.closed {
            return Ok(());
        }
        Err(Error::InvalidOption {
            option: "optimizer",
            value: "closed".to_owned(),
            remedy: "it was closed; make a new one".to_owned(),
        })
    }

    fn check_trusted(&self) -> Result<()> {
        self.distrusted.clone().map_or(Ok(()), |reason| Err(Error::Distrusted { reason }))
    }

    /// Refuses a step that has nothing to go through. With a share of its own the host can do without the ring.
    fn check_ring(&self) -> Result<()> {
        let travels = self.tables.iter().any(|table| !table.is_resident());
        if travels && self.hybrid.is_none() && self.pipeline.is_none() { Err(no_ring()) } else { Ok(()) }
    }

    fn distrust(&mut self, error: &Error) {
        self.distrusted.get_or_insert_with(|| format!("its last step broke off with: {error}"));
    }

    fn table(&self, table: usize) -> Result<&Arc<StateTable>> {
        self.tables.get(table).ok_or_else(|| Error::InvalidOption {
            option: "table",
            value: table.to_string(),
            remedy: format!("there are {}", self.tables.len()),
        })
    }
}

/// What is in an option, made now if it was not.
fn made_once<T>(slot: &mut Option<T>, make: impl FnOnce() -> Result<T>) -> Result<&mut T> {
    match slot {
        Some(made) => Ok(made),
        None => Ok(slot.insert(make()?)),
    }
}

/// The f32 values in a region of host memory that nobody is writing.
fn read_f32(device: &SharedDevice, region: &Region) -> Result<Vec<f32>> {
    let mut bytes = vec![0; region.bytes() as usize];
    device.read(region, &mut bytes)?;
    Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn no_ring() -> Error {
    Error::Device(DeviceError::ZeroSize { what: "the ring" })
}

impl Optimizer {
    /// An optimizer without state. Loads the rule's kernels; pins and allocates nothing yet.
    pub fn new(device: SharedDevice, rule: &'static Rule, options: OptimizerOptions) -> Result<Self> {
        device.load(rule)?;
        let memory = Allocator::within(device.clone(), PinnedBudget::new(options.pinned_budget_bytes));
        Ok(Self {
            device,
            rule,
            options,
            memory,
            inner: Mutex::default(),
            overlap: OnceLock::new(),
            owner: trace::owner(),
        })
    }

    /// The number under which it reports to a trace.
    pub fn trace_owner(&self) -> u32 {
        self.owner
    }

    /// The device that it computes on.
    pub fn device(&self) -> &SharedDevice {
        &self.device
    }

    /// Its rule.
    pub fn rule(&self) -> &'static Rule {
        self.rule
    }

    fn lock(&self) -> MutexGuard<'_, OptimizerInner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same when no overlapped step is under way: a committed one is submitted first. Calls that read or change state,
    /// tables or rings begin so.
    fn open(&self) -> Result<MutexGuard<'_, OptimizerInner>> {
        let inner = self.settled()?;
        inner.check_open()?;
        Ok(inner)
    }

    /// For calls that only say what lies where.
    fn layout(&self) -> Result<MutexGuard<'_, OptimizerInner>> {
        let inner = self.lock();
        inner.check_open()?;
        Ok(inner)
    }

    /// The same, also after it was closed.
    fn settled(&self) -> Result<MutexGuard<'_, OptimizerInner>> {
        let mut inner = self.lock();
        if let Some(overlap) = self.overlap()
            && let Err(error) = overlap.finish()
        {
            // The step's own failure is kept as the reason; a failure of this call is not.
            match overlap.failed() {
                Some(failed) => inner.distrust(&failed),
                None => return Err(error),
            }
        }
        Ok(inner)
    }

    /// Bytes of the ring; 0 if nothing streams.
    pub fn ring_bytes(&self) -> u64 {
        let slots = self.slots(&self.lock());
        if self.options.placement.streams() { Pipeline::ring_bytes(slots, self.options.plan.slot_bytes) } else { 0 }
    }

    /// Slots of the next ring.
    fn slots(&self, inner: &OptimizerInner) -> usize {
        inner.slots.unwrap_or(self.options.plan.slots)
    }

    /// Changes how many slots the next ring has, while there is none. Their size stays, as the chunks do.
    pub fn set_slots(&self, slots: usize) -> Result<()> {
        let mut inner = self.open()?;
        let refuse = |remedy: &str| {
            Err(Error::InvalidOption { option: "slots", value: slots.to_string(), remedy: remedy.to_owned() })
        };
        if inner.pipeline.is_some() && slots != self.slots(&inner) {
            return refuse("close the ring first");
        }
        if slots < 2 {
            return refuse("use at least 2");
        }
        inner.slots = Some(slots);
        Ok(())
    }

    /// Whether the ring is there.
    pub fn has_ring(&self) -> bool {
        self.lock().pipeline.is_some()
    }

    /// Uses the ring that another optimizer of this process has on the same device, with as many slots of the same size.
    /// Returns whether there is one; if not, [`Self::open_ring`] makes it.
    pub fn join_ring(&self) -> Result<bool> {
        let mut inner = self.open()?;
        if inner.pipeline.is_none() {
            let (slots, slot_bytes) = (self.slots(&inner), self.options.plan.slot_bytes);
            let joined = Pipeline::join(&self.device, slots, slot_bytes)?;
            joined.iter().for_each(|pipeline| pipeline.set_owner(self.owner));
            inner.pipeline = joined.map(Arc::new);
        }
        Ok(inner.pipeline.is_some())
    }

    /// Uses a ring that is there, as [`Self::join_ring`] does, or makes one: on the device itself or in memory of the
    /// caller's. What was submitted to the stream so far may still use that memory. A ring that this optimizer has already
    /// is closed first.
    pub fn open_ring(&self, memory: Option<(&Buffer, Option<&Stream>)>) -> Result<()> {
        let mut inner = self.open()?;
        inner.pipeline = None;
        let (slots, slot_bytes) = (self.slots(&inner), self.options.plan.slot_bytes);
        let after = memory.map(|(_, after)| self.compute(&mut inner, after)).transpose()?;
        let memory = memory.map(|(ring, _)| ring).zip(after.as_ref());
        let pipeline = Pipeline::open(&self.device, memory, slots, slot_bytes)?;
        pipeline.set_owner(self.owner);
        inner.pipeline = Some(Arc::new(pipeline));
        Ok(())
    }

    /// Waits for every store and gives the ring up; its memory is freed if no other optimizer uses it. State stays, and
    /// [`Self::open_ring`] makes steps possible again.
    pub fn close_ring(&self) -> Result<()> {
        let mut inner = self.open()?;
        inner.pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.drain())?;
        inner.pipeline = None;
        Ok(())
    }

    /// The stream to compute on: the caller's, or the engine's own if torch has none.
    fn compute(&self, inner: &mut OptimizerInner, given: Option<&Stream>) -> Result<Stream> {
        match given {
            Some(stream) => Ok(stream.clone()),
            None => made_once(&mut inner.own_compute, || Ok(self.device.stream("compute")?)).cloned(),
        }
    }

    /// Creates zeroed state for tensors and returns the number of their table. Starts the host's threads and pins their
    /// ring where the placement needs them. The budget is checked before anything is pinned.
    pub fn add(&self, tensors: Vec<TensorSpec>) -> Result<usize> {
        self.add_table(tensors, self.options.placement == Placement::Resident)
    }

    /// The same for tensors whose state lies on the device, with the caller, whatever the placement of the others is.
    pub fn add_resident(&self, tensors: Vec<TensorSpec>) -> Result<usize> {
        self.add_table(tensors, true)
    }

    /// The one or the other.
    pub fn add_at(&self, tensors: Vec<TensorSpec>, resident: bool) -> Result<usize> {
        if resident { self.add_resident(tensors) } else { self.add(tensors) }
    }

    fn add_table(&self, tensors: Vec<TensorSpec>, resident: bool) -> Result<usize> {
        let mut inner = self.open()?;
        let plan = StepPlan::new(tensors, self.options.plan)?;
        made_once(&mut inner.powers, || Powers::of(&self.device))?;
        let table = if resident {
            StateTable::resident(self.device.clone(), self.rule, Arc::new(plan))?
        } else {
            self.pin_table(&mut inner, plan)?
        };
        inner.tables.push(Arc::new(table.rounded_with(self.options.rounding_seed)));
        Ok(inner.tables.len() - 1)
    }

    fn pin_table(&self, inner: &mut OptimizerInner, plan: StepPlan) -> Result<StateTable> {
        let (share, PlanOptions { slots, slot_bytes, .. }) = (self.options.placement.host_share(), self.options.plan);
        // What lies on the host is updated in place, and needs no slot.
        let slots = if plan.tensors().iter().all(|tensor| tensor.on_host) { 0 } else { slots };
        let sides = if inner.second { 2 } else { 1 };
        let mut bytes = StateTable::bytes_to_pin(&plan)? * sides;
        if share.is_some() {
            let pinned = inner.hybrid.as_ref().map_or(0, |hybrid| hybrid.lane().pinned_bytes());
            bytes += HostLane::bytes_to_pin(slots, slot_bytes)?.saturating_sub(pinned);
        }
        self.memory.budget().check(bytes)?;
        if self.options.placement.streams() && inner.pipeline.is_none() {
            return Err(no_ring());
        }
        let table = StateTable::pinned(&self.memory, self.rule, Arc::new(plan))?;
        if inner.second {
            table.open_second(&self.memory)?;
        }
        if let Some(share) = share {
            let new = || Hybrid::new(&self.memory, share, &self.options.host, 0, slot_bytes, self.owner).map(Arc::new);
            made_once(&mut inner.hybrid, new)?.open_ring(&self.memory, slots)?;
        }
        Ok(table)
    }

    /// What lies where in a table.
    pub fn plan(&self, table: usize) -> Result<Arc<StepPlan>> {
        Ok(self.layout()?.table(table)?.plan().clone())
    }

    /// The names of the columns that are kept for a tensor.
    pub fn columns(&self, table: usize, tensor: usize) -> Result<Vec<&'static str>> {
        Ok(self.layout()?.table(table)?.columns(tensor).iter().map(|column| column.name).collect())
    }

    /// A tensor's column in pinned memory; `None` if it is not kept there. Wait with [`Self::settle`] to read it.
    pub fn column(&self, table: usize, tensor: usize, name: &str) -> Result<Option<Region>> {
        self.layout()?.table(table)?.column(tensor, name)
    }

    /// A tensor's step counter, an f32. Only the host touches it.
    pub fn step_counter(&self, table: usize, tensor: usize) -> Result<Region> {
        self.layout()?.table(table)?.step_counter(tensor)
    }

    /// What pinning a table cost.
    pub fn pin_stats(&self, table: usize) -> Result<Option<PinStats>> {
        Ok(self.layout()?.table(table)?.slab().map(|slab| slab.pin_stats()))
    }

    /// Updates every tensor that has a gradient, in the order of the tables. Returns when the last update was submitted to
    /// `compute`. Without such a stream, or where tensors lie on the host, it returns when all is done.
    ///
    /// `groups` has the numbers of each group in the order of [`Rule::hypers`], and `inputs` has one entry for each table.
    /// Everything is checked before anything changes. A step that fails in the middle leaves state that cannot be trusted:
    /// later steps are refused until [`Self::trust`]. Gradients that were copied early may be freed when this returns,
    /// also after a failure.
    pub fn step(
        &self,
        inputs: Vec<TableInput>,
        groups: &[Vec<f64>],
        compute: Option<&Stream>,
        flags: StepFlags,
    ) -> Result<()> {
        let mut inner = self.open()?;
        // Whatever happens, no later step may take them for its own.
        let landed = inner.landing.take();
        let outcome = self.step_with(&mut inner, inputs, groups, compute, flags, &landed);
        if let (Err(_), Some(hybrid)) = (&outcome, &inner.hybrid)
            && landed.iter().flatten().any(Option::is_some)
        {
            // A step that was refused has not waited for them. Its own error says more than a second one.
            let _ = hybrid.lane().finish_landing();
        }
        outcome
    }

    fn step_with(
        &self,
        inner: &mut OptimizerInner,
        mut inputs: Vec<TableInput>,
        groups: &[Vec<f64>],
        compute: Option<&Stream>,
        flags: StepFlags,
        landed: &[Vec<Option<Region>>],
    ) -> Result<()> {
        inner.check_trusted()?;
        let (compute, is_own) = (self.compute(inner, compute)?, compute.is_none());
        if inputs.len() != inner.tables.len() {
            return Err(Error::PlanMismatch {
                tensor: format!("a step of {} tables", inputs.len()),
                reason: format!("{} were added", inner.tables.len()),
            });
        }
        // Weights may still be on their way from an overlapped step.
        self.overlap().map_or(Ok(()), |overlap| overlap.order_all(&compute))?;
        let Some(powers) = &inner.powers else { return Ok(()) };
        inner.check_ring()?;
        let (mut sets, mut counters) = (ScalarSets::new(self.rule, groups)?, Vec::with_capacity(inputs.len()));
        for (table, input) in inner.tables.iter().zip(&mut inputs) {
            TableStep { table, input, landed: &[] }.check()?;
            let mut steps = table.steps()?;
            for (tensor, spec) in table.plan().tensors().iter().enumerate() {
                if let Some(binding) = &mut input.tensors[tensor] {
                    (binding.scalars, binding.update) =
                        sets.advance(powers, binding.group, &mut steps[tensor], spec.elements)?;
                }
            }
            counters.push(steps);
        }
        let inputs_of_all = StepInputs { scalars: sets.scalars, grad_scale: flags.grad_scale, skip: flags.skip };
        let landed_of = |i: usize| landed.get(i).map_or(&[][..], Vec::as_slice);
        let tables = inner.tables.iter().zip(&inputs).enumerate();
        let steps: Vec<TableStep<'_>> =
            tables.map(|(i, (table, input))| TableStep { table, input, landed: landed_of(i) }).collect();
        // A save yields to the step until this returns.
        inner.tables.iter().for_each(|table| table.count_stalls());
        let _stepping: Vec<_> = inner.tables.iter().filter_map(|table| table.stepping()).collect();
        let (resident, travel): (Vec<_>, Vec<_>) = steps.iter().partition(|step| step.table.is_resident());
        let mut outcome = self.update_resident(&resident, &inputs_of_all, &compute);
        // Operands are refused before any of them is touched.
        let mut torn = !matches!(outcome, Ok(()) | Err(Error::Device(DeviceError::BadOperands { .. })));
        if outcome.is_ok() && self.options.placement != Placement::Resident {
            let (pipeline, hybrid) = (inner.pipeline.as_deref(), inner.hybrid.as_deref());
            outcome = self.update_tables(pipeline, hybrid, &travel, &inputs_of_all, &compute);
            torn = outcome.is_err();
        }
        let on_host = steps.iter().any(|step| step.plan().buckets().iter().any(|bucket| bucket.on_host));
        drop((steps, resident, travel));
        // Without a stream of the caller's nothing orders later uses of this memory, and after a failure nothing may use
        // it any more: it can be freed as soon as this returns.
        let waits = is_own || on_host || outcome.is_err();
        let waiting = trace::wait();
        let ended = if waits { inner.drain().and(self.finish(&mut inner.finished, &compute)) } else { Ok(()) };
        waiting.end(Reason::Other, "wait for the end of the step", self.owner);
        torn |= ended.is_err();
        let mut outcome = outcome.and(ended);
        if outcome.is_ok() {
            let mut counted = inner.tables.iter().zip(&counters);
            outcome = counted.try_for_each(|(table, steps)| table.set_steps(steps));
            torn = outcome.is_err();
        }
        if let Err(error) = &outcome
            && torn
        {
            inner.distrust(error);
        }
        outcome
    }

    /// State on the device: whole tensors, as few launches as they fit into.
    fn update_resident(&self, steps: &[TableStep<'_>], inputs: &StepInputs, compute: &Stream) -> Result<()> {
        let mut segments = Segments::default();
        if steps.is_empty() {
            return Ok(());
        }
        for step in steps {
            let mut tensors = 0..step.plan().tensors().len();
            tensors.try_for_each(|tensor| streamed::resident_segment(*step, tensor, &mut segments))?;
        }
        let traced = trace::timed(&self.device, compute, None);
        inputs.launch(&*self.device, compute, self.rule, &segments)?;
        if let Some(traced) = traced {
            let bytes = steps.iter().map(|step| step.state_bytes()).sum();
            traced.end(compute, streamed::in_place(bytes, self.owner));
        }
        Ok(())
    }

    /// State on the host: through the ring, on the host's threads, or both.
    fn update_tables(
        &self,
        pipeline: Option<&Pipeline>,
        hybrid: Option<&Hybrid>,
        steps: &[TableStep<'_>],
        inputs: &StepInputs,
        compute: &Stream,
    ) -> Result<()> {
        pipeline.into_iter().for_each(Pipeline::begin);
        match (hybrid, pipeline) {
            (Some(hybrid), pipeline) => hybrid.run(steps, pipeline, inputs, compute, None),
            (None, Some(pipeline)) => steps.iter().try_for_each(|step| streamed::run(pipeline, *step, inputs, compute)),
            (None, None) if steps.is_empty() => Ok(()),
            (None, None) => Err(no_ring()),
        }
    }

    /// Blocks until the work on a stream is done.
    fn finish(&self, finished: &mut Option<Event>, compute: &Stream) -> Result<()> {
        let done = made_once(finished, || Ok(self.device.event()?))?;
        self.device.record(done, compute)?;
        Ok(self.device.synchronize(done)?)
    }

    /// Why the state cannot be trusted, if it cannot.
    pub fn distrusted(&self) -> Option<String> {
        let mut inner = self.lock();
        if let Some(error) = self.overlap().and_then(Overlap::failed) {
            inner.distrust(&error);
        }
        inner.distrusted.clone()
    }

    /// Refuses steps from now on: something wrong was written into the state.
    pub fn distrust(&self, reason: &str) {
        self.lock().distrusted = Some(reason.to_owned());
    }

    /// Allows steps again: all of the state was loaded.
    pub fn trust(&self) {
        let mut inner = self.lock();
        inner.distrusted = None;
        if let Some(overlap) = self.overlap() {
            overlap.forget_failure();
        }
    }

    /// Blocks until a tensor's stores have ended; others go on. What the host updates is there when a step returns.
    pub fn settle(&self, table: usize, tensor: usize) -> Result<()> {
        if let Some(overlap) = self.overlap() {
            overlap.finish_tensor(table, tensor)?;
        }
        let inner = self.lock();
        let (Some(pipeline), Some(table)) = (&inner.pipeline, inner.tables.get(table)) else { return Ok(()) };
        if table.is_resident() {
            return Ok(());
        }
        (0..table.columns(tensor).len()).try_for_each(|index| pipeline.settle(&table.tensor(tensor, index)?))
    }

    /// Blocks until every store has ended.
    pub fn synchronize(&self) -> Result<()> {
        self.settled()?.pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.drain())
    }

    /// Returns when no save needs the present state any longer, so that the host may write into it.
    pub fn protect_all(&self) -> Result<()> {
        self.settled()?.tables.iter().try_for_each(|table| table.protect_all())
    }

    /// Begins one snapshot of all state that these have in pinned memory. Copies of it take at most this many bytes.
    /// Each optimizer may be named once.
    pub fn snapshot(optimizers: &[&Self], budget_bytes: u64) -> Result<Arc<Snapshot>> {
        Self::snapshot_in_pages(optimizers, PAGE_BYTES, budget_bytes)
    }

    /// The same with pages of another size.
    pub fn snapshot_in_pages(optimizers: &[&Self], page_bytes: u64, budget_bytes: u64) -> Result<Arc<Snapshot>> {
        // Two calls that have some of the same would each wait for what the other holds; see [Note: locks of several
        // optimizers].
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _mine = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let held = optimizers.iter().map(|optimizer| optimizer.open()).collect::<Result<Vec<_>>>()?;
        let (mut arenas, mut next) = (Vec::new(), Vec::new());
        for inner in &held {
            inner.pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.drain())?;
            for table in &inner.tables {
                // An earlier one must have ended: a table remembers one only.
                table.protect_sides()?;
                let (these, order) = table.extent()?;
                arenas.extend(these);
                next.extend(order);
            }
        }
        let snapshot = Arc::new(Snapshot::new(page_bytes, arenas, &next, budget_bytes));
        held.iter().flat_map(|inner| &inner.tables).for_each(|table| table.keep(&snapshot));
        Ok(snapshot)
    }

    /// Pins memory for the gradients of a table's tensors, with the given bytes for each, if there is none yet.
    pub fn open_landing(&self, table: usize, bytes: &[u64]) -> Result<()> {
        let mut inner = self.open()?;
        let Some(wanted) = inner.landing.bytes_to_pin(table, bytes)? else { return Ok(()) };
        self.memory.budget().check(wanted)?;
        inner.landing.open(&self.memory, table, bytes)
    }

    /// Copies a gradient to the host now, after what `after` was given so far. The caller keeps it as it is until the
    /// next step or [`Self::finish_landing`] has returned.
    pub fn land(&self, table: usize, tensor: usize, grad: &Region, after: Option<&Stream>) -> Result<()> {
        let mut inner = self.open()?;
        let after = self.compute(&mut inner, after)?;
        let OptimizerInner { hybrid, landing, .. } = &mut *inner;
        match hybrid {
            Some(hybrid) => landing.land(hybrid.lane(), grad, (table, tensor), &after),
            None => Ok(()),
        }
    }

    /// Forgets gradients that were copied early, all or one tensor's, and blocks until the copies have ended. The next
    /// step copies them anew.
    pub fn finish_landing(&self, only: Option<(usize, usize)>) -> Result<()> {
        let mut inner = self.lock();
        match only {
            Some(tensor) => inner.landing.forget(tensor),
            None => drop(inner.landing.take()),
        }
        inner.hybrid.as_ref().map_or(Ok(()), |hybrid| hybrid.lane().finish_landing())
    }

    /// The last step in numbers, once its stores have ended.
    pub fn stats(&self) -> Result<OptimizerStats> {
        let inner = self.lock();
        // A step that goes on or has failed has numbers too.
        let _ = self.overlap().map(Overlap::finish);
        let streamed = match &inner.pipeline {
            None => RunStats::default(),
            Some(pipeline) => {
                pipeline.drain()?;
                pipeline.stats()
            }
        };
        let waits = inner.tables.iter().map(|table| table.save_stalls());
        let (save_stalls, save_stall_ns) = waits.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let placement = self.options.placement;
        let settled = match placement.host_share() {
            None => Some(0.0),
            Some(HostShare::Fixed(share)) => Some(share),
            Some(HostShare::Auto) => None,
        };
        let nothing = HostReport { settled, ..HostReport::default() };
        let host = inner.hybrid.as_ref().map(|hybrid| HostReport {
            stats: hybrid.lane().stats(),
            threads: hybrid.lane().threads().threads() as u64,
            fraction: hybrid.last_fraction(),
            settled: hybrid.settled_fraction(),
            device_ns: hybrid.device_ns(),
        });
        Ok(OptimizerStats {
            streamed,
            device_bytes: inner.pipeline.as_ref().map_or(0, |pipeline| pipeline.bytes()),
            pinned_bytes: inner.pinned_bytes(),
            save_stalls,
            save_stall_ns,
            host: host.or(placement.reports_host().then_some(nothing)),
        })
    }

    /// Bytes that are pinned for it. Takes no lock, which a step or a save may hold for long.
    pub fn pinned_bytes(&self) -> u64 {
        self.memory.budget().used_bytes()
    }

    /// Slots of the ring, and of the host's ring, that nobody owns: all of them between steps of all that share them.
    pub fn idle_slots(&self) -> (usize, usize) {
        let inner = self.lock();
        let ring = inner.pipeline.as_ref().map_or(0, |pipeline| pipeline.idle_slots());
        (ring, inner.hybrid.as_ref().map_or(0, |hybrid| hybrid.lane().idle_slots()))
    }

    /// The vector unit that the host's threads use.
    pub fn host_kernel(&self) -> Option<&'static str> {
        self.lock().hybrid.as_ref().map(|hybrid| hybrid.lane().threads().kernel())
    }

    /// Reads and writes every byte of the state and of other host memory with the host's threads, changing none, and
    /// returns how many bytes that were: the pace that the memory allows.
    pub fn touch(&self, others: Vec<Region>) -> Result<u64> {
        let inner = self.open()?;
        let Some(hybrid) = &inner.hybrid else { return Ok(0) };
        let slabs = inner.tables.iter().filter_map(|table| table.slab()).map(|slab| slab.buffer().all());
        let regions: Vec<Region> = others.into_iter().chain(slabs).collect();
        let work = regions.iter().map(|region| hybrid.lane().threads().touch(region));
        let work = work.collect::<std::result::Result<Vec<_>, _>>()?;
        work.into_iter().try_for_each(|work| work.wait())?;
        Ok(regions.iter().map(Region::bytes).sum())
    }

    /// Makes the next update on the host's threads fail, for tests.
    #[doc(hidden)]
    pub fn fail_next_host_update(&self) {
        if let Some(hybrid) = &self.lock().hybrid {
            hybrid.lane().fail_next_update();
        }
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Frees state, and the rings if no other optimizer uses them. Memory that is still held elsewhere stays until it is not.
    pub fn close(&self) -> Result<()> {
        let mut inner = self.lock();
        if let Some(overlap) = self.overlap() {
            overlap.close();
        }
        let drained = inner.drain();
        *inner = OptimizerInner { closed: true, ..OptimizerInner::default() };
        drained
    }
}
