//! The optimizer's engine as Python sees it: lists of numbers in, none of its own logic.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay::checkpoint::Snapshot;
use forebay::device::arith::{AdamWHyper, AdamWScalars};
use forebay::device::{
    AdamW, AdamWSegment, Error as DeviceError, Event, HostOptions, Kernel, Place, Region, SharedDevice, SlabLayout,
    Stream, open,
};
use forebay::pipeline::{Pipeline, RunStats};
use forebay::plan::{PlanOptions, StateKind, StepPlan, TensorSpec};
use forebay::pool::Pool;
use forebay::step::{Binding, HostLane, HostShare, HostState, Hybrid, PlacedAdamW, Powers, StepInputs, check_memory};
use forebay::{Error, Result};
use pyo3::prelude::*;

use crate::guard;
use crate::landing::{Landing, check_budget};
use crate::looked::{Looked, Row};
use crate::torch::{self, HostView, Keeper};

/// One optimizer's device, ring and host state.
#[pyclass(frozen)]
pub(crate) struct Engine {
    device: SharedDevice,
    pool: Arc<Pool>,
    options: PlanOptions,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    pipeline: Option<Arc<Pipeline>>,
    stores: Vec<PlacedAdamW>,
    /// What was asked of the host, for the placements that give it a part.
    host: Option<(HostShare, HostOptions)>,
    /// The host's part; made with the first store.
    hybrid: Option<Hybrid>,
    /// Gradients that come down during backward.
    landing: Landing,
    powers: Option<Powers>,
    /// The CPU backend has no stream of torch's to borrow.
    own_compute: Option<Stream>,
    /// Marks the end of work on memory of torch's on the host.
    finished: Option<Event>,
    /// A step began and did not end.
    torn: bool,
    closed: bool,
}

impl Inner {
    fn pinned_bytes(&self) -> u64 {
        let states = self.stores.iter().map(PlacedAdamW::state);
        let state: u64 = states.map(|state| state.slab().bytes()).sum();
        state + self.hybrid.as_ref().map_or(0, |hybrid| hybrid.lane().pinned_bytes()) + self.landing.pinned_bytes()
    }
}

/// What one call updates: parameters, their gradients, and the number of each one's group. A gradient at address 0 is
/// none.
type Tensors = (Py<Looked>, Py<Looked>, Vec<u32>);

/// lr, beta1, beta2, eps, weight_decay, maximize.
type Group = (f64, f64, f64, f64, f64, bool);

fn hyper(&(lr, beta1, beta2, eps, weight_decay, maximize): &Group) -> AdamWHyper {
    AdamWHyper { lr, beta1, beta2, eps, weight_decay, maximize }
}

/// What is there, made now if it was not.
fn made_once<T>(slot: &mut Option<T>, make: impl FnOnce() -> Result<T>) -> Result<&mut T> {
    match slot {
        Some(made) => Ok(made),
        None => Ok(slot.insert(make()?)),
    }
}

impl Engine {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_cpu(&self) -> bool {
        self.device.info().backend == forebay::device::Backend::Cpu
    }

    fn open_inner(&self) -> Result<MutexGuard<'_, Inner>> {
        let inner = self.lock();
        if inner.closed {
            return Err(Error::InvalidOption {
                option: "optimizer",
                value: "closed".to_owned(),
                remedy: "it was closed; make a new one".to_owned(),
            });
        }
        Ok(inner)
    }

    /// Begins one snapshot of all state that these have in pinned memory; copies of it take so many bytes at most. Each may
    /// be there once.
    pub(crate) fn snapshot(engines: &[&Self], budget_bytes: u64) -> Result<Arc<Snapshot>> {
        // Two calls that have some of the same would each wait for what the other holds.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _mine = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let held = engines.iter().map(|engine| engine.open_inner()).collect::<Result<Vec<_>>>()?;
        let (mut arenas, mut next) = (Vec::new(), Vec::new());
        for inner in &held {
            inner.pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.drain())?;
            for store in &inner.stores {
                // An earlier one must have ended: only one is kept in mind.
                store.state().protect_all()?;
                let (these, order) = store.state().extent()?;
                arenas.extend(these);
                next.extend(order);
            }
        }
        let snapshot = Arc::new(Snapshot::new(arenas, &next, budget_bytes));
        held.iter().flat_map(|inner| &inner.stores).for_each(|store| store.state().keep(&snapshot));
        Ok(snapshot)
    }

    /// The stream to compute on: torch's, or one of our own on the CPU backend.
    fn compute(&self, inner: &mut Inner, handle: u64) -> Result<Stream> {
        if !self.is_cpu() {
            return torch::stream(&self.device, handle);
        }
        made_once(&mut inner.own_compute, || Ok(self.device.stream("compute")?)).cloned()
    }

    /// Blocks until the work on a stream is done: before memory of torch's on the host may change hands.
    fn finish(&self, finished: &mut Option<Event>, compute: &Stream) -> Result<()> {
        let done = made_once(finished, || Ok(self.device.event()?))?;
        self.device.record(done, compute)?;
        Ok(self.device.synchronize(done)?)
    }

    fn flag(&self, addr: u64, keeper: &Keeper) -> Result<Option<Region>> {
        (addr != 0).then(|| torch::region(&self.device, addr, 4, Place::Device, keeper)).transpose()
    }
}

/// Scalar sets of one call: one for each group and step count that occur.
#[derive(Default)]
struct Sets {
    /// The set found last: neighbours mostly share one.
    last: Option<((u32, u64), u32)>,
    index: HashMap<(u32, u64), u32>,
    scalars: Vec<AdamWScalars>,
}

impl Sets {
    fn find(&mut self, powers: &mut Powers, groups: &[Group], group: u32, t: u64) -> Result<u32> {
        if let Some((key, index)) = self.last
            && key == (group, t)
        {
            return Ok(index);
        }
        let index = match self.index.get(&(group, t)) {
            Some(&index) => index,
            None => {
                self.scalars.push(powers.scalars(&hyper(&groups[group as usize]), t)?);
                self.scalars.len() as u32 - 1
            }
        };
        self.index.insert((group, t), index);
        self.last = Some(((group, t), index));
        Ok(index)
    }
}

#[pymethods]
impl Engine {
    /// Open a device; nothing is pinned or allocated yet.
    #[new]
    fn new(py: Python<'_>, device: &str, slots: usize, chunk_bytes: u64) -> PyResult<Self> {
        guard::run(py, || {
            let device = open(device)?;
            let pool = Pool::new(device.clone());
            let options = PlanOptions { slot_bytes: chunk_bytes, slots, ..PlanOptions::default() };
            Ok(Self { device, pool, options, inner: Mutex::default() })
        })
    }

    /// Bytes of the ring to allocate for `open_ring`.
    fn ring_bytes(&self) -> u64 {
        Pipeline::ring_bytes(self.options.slots, self.options.slot_bytes)
    }

    /// Make the ring in memory that `owner` keeps alive, or on the device itself where the address is 0.
    fn open_ring(&self, py: Python<'_>, addr: u64, owner: Py<PyAny>, stream: u64) -> PyResult<()> {
        guard::run(py, || {
            let mut inner = self.open_inner()?;
            let PlanOptions { slots, slot_bytes, .. } = self.options;
            let pipeline = if addr == 0 {
                Pipeline::new(&self.pool, slots, slot_bytes)?
            } else {
                let after = self.compute(&mut inner, stream)?;
                let ring = torch::buffer(&self.device, addr, self.ring_bytes(), Arc::new(owner))?;
                Pipeline::in_memory(self.device.clone(), &ring, slots, slot_bytes, &after)?
            };
            let pipeline = Arc::new(pipeline);
            for store in &mut inner.stores {
                *store = PlacedAdamW::new(store.state().clone(), Some(pipeline.clone()));
            }
            inner.pipeline = Some(pipeline);
            Ok(())
        })
    }

    /// Wait for every store and let go of the ring; state stays, and `open_ring` makes steps possible again.
    fn close_ring(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || {
            let mut inner = self.open_inner()?;
            inner.pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.drain())?;
            for store in &mut inner.stores {
                *store = PlacedAdamW::new(store.state().clone(), None);
            }
            inner.pipeline = None;
            Ok(())
        })
    }

    /// Let the host update its share: a fraction, or nothing for what makes both ends finish together. Without a ring it
    /// updates all. Its threads are started and its own ring is pinned with the state.
    #[pyo3(signature = (fraction, threads, kernel))]
    fn open_host(
        &self,
        py: Python<'_>,
        fraction: Option<f64>,
        threads: Option<usize>,
        kernel: Option<String>,
    ) -> PyResult<()> {
        guard::run(py, || {
            let share = fraction.map_or(HostShare::Auto, HostShare::Fixed);
            self.open_inner()?.host = Some((share, HostOptions { threads, kernel }));
            Ok(())
        })
    }

    /// Pin zeroed state for a list of tensors and return the number of their store.
    #[expect(clippy::too_many_arguments, reason = "a list for each property crosses the border faster than objects")]
    fn add(
        &self,
        py: Python<'_>,
        names: Vec<String>,
        elements: Vec<u64>,
        amsgrad: Vec<bool>,
        master: Vec<bool>,
        on_host: Vec<bool>,
        budget_bytes: Option<u64>,
    ) -> PyResult<usize> {
        guard::run(py, || {
            let mut inner = self.open_inner()?;
            let plan = self.plan(names, &elements, &amsgrad, &master, &on_host)?;
            let PlanOptions { slots, slot_bytes, .. } = self.options;
            // What lies on the host is updated in place, and needs no slot.
            let slots = if on_host.iter().all(|&on_host| on_host) { 0 } else { slots };
            let mut bytes = SlabLayout::new(&HostState::part_bytes(&plan))?.bytes();
            if inner.host.is_some() {
                let pinned = inner.hybrid.as_ref().map_or(0, |hybrid| hybrid.lane().pinned_bytes());
                bytes += HostLane::bytes_to_pin(slots, slot_bytes)?.saturating_sub(pinned);
            }
            check_budget(bytes, inner.pinned_bytes(), budget_bytes)?;
            let pipeline = inner.pipeline.clone();
            if pipeline.is_none() && inner.host.is_none() {
                return Err(Error::Device(DeviceError::ZeroSize { what: "the ring" }));
            }
            made_once(&mut inner.powers, || Powers::new(&self.pool))?;
            let state = HostState::new(&self.pool, Arc::new(plan))?;
            let Inner { host, hybrid, .. } = &mut *inner;
            if let Some((share, options)) = host {
                let hybrid = made_once(hybrid, || Hybrid::new(&self.pool, *share, options, 0, slot_bytes))?;
                hybrid.open_ring(&self.pool, slots)?;
            }
            inner.stores.push(PlacedAdamW::new(state, pipeline));
            Ok(inner.stores.len() - 1)
        })
    }

    /// A tensor's state of one kind, or its step counter, as a buffer. An absent kind gives nothing.
    fn view(&self, py: Python<'_>, store: usize, tensor: usize, kind: &str) -> PyResult<Option<HostView>> {
        guard::run(py, || {
            let inner = self.open_inner()?;
            let state = inner.stores[store].state();
            let kind = match kind {
                "step" => return Ok(Some(HostView::new(state.step_counter(tensor)?))),
                "exp_avg" => StateKind::ExpAvg,
                "exp_avg_sq" => StateKind::ExpAvgSq,
                "max_exp_avg_sq" => StateKind::MaxExpAvgSq,
                _ => StateKind::Master,
            };
            Ok(state.tensor(tensor, kind)?.map(HostView::new))
        })
    }

    /// Update the tensors of every store, in the order of the stores. Returns when the last update has been submitted,
    /// or for memory on the host when it is done.
    fn step(
        &self,
        py: Python<'_>,
        tensors: Vec<Tensors>,
        groups: Vec<Group>,
        stream: u64,
        grad_scale: u64,
    ) -> PyResult<()> {
        guard::run(py, || {
            let mut guarded = self.open_inner()?;
            let compute = self.compute(&mut guarded, stream)?;
            let keeper: Keeper = Arc::new(());
            let Inner { pipeline, stores, powers, finished, hybrid, landing, torn, .. } = &mut *guarded;
            let Some(powers) = powers else { return Ok(()) };
            // Whatever happens, no later step may take them for its own.
            let landed = landing.take();
            let mut sets = Sets::default();
            let mut bound = Vec::with_capacity(stores.len());
            let mut counters = Vec::with_capacity(stores.len());
            for (store, tensors) in stores.iter().zip(&tensors) {
                let mut steps = store.state().steps()?;
                bound.push(self.bind(
                    store,
                    tensors,
                    &mut steps,
                    |group, t| sets.find(powers, &groups, group, t),
                    &keeper,
                )?);
                counters.push(steps);
            }
            let grad_scale = self.flag(grad_scale, &keeper)?;
            let inputs = StepInputs { scalars: &sets.scalars, grad_scale, skip: None };
            for (store, bindings) in stores.iter().zip(&bound) {
                store.check(bindings, &inputs)?;
            }
            // A save under way gives way until this returns.
            let _stepping: Vec<_> = stores.iter().filter_map(|store| store.state().stepping()).collect();
            *torn = true;
            pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.begin())?;
            let outcome = match hybrid {
                Some(hybrid) => hybrid.run(stores, &bound, &landed, &inputs, &compute),
                None => stores.iter().zip(&bound).try_for_each(|(store, bindings)| {
                    store.streamed().map_or(Ok(()), |streamed| streamed.run(bindings, &inputs, &compute))
                }),
            };
            let on_host = stores.iter().any(|store| store.plan().buckets().iter().any(|bucket| bucket.on_host));
            // After a failure too: torch may free the memory as soon as this returns.
            let ended = if self.is_cpu() || on_host || outcome.is_err() {
                let drained = pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.drain());
                let landed = hybrid.as_ref().map_or(Ok(()), |hybrid| hybrid.lane().drain());
                drained.and(landed).and(self.finish(finished, &compute))
            } else {
                Ok(())
            };
            outcome.and(ended)?;
            stores.iter().zip(&counters).try_for_each(|(store, steps)| store.state().set_steps(steps))?;
            *torn = false;
            Ok(())
        })
    }

    /// Update tensors whose state is on the device too: `state` has four addresses for each, 0 for an absent kind.
    #[expect(clippy::too_many_arguments, reason = "as in `add`")]
    fn update_resident(
        &self,
        py: Python<'_>,
        tensors: Tensors,
        state: Vec<[u64; 4]>,
        steps: Vec<u64>,
        groups: Vec<Group>,
        stream: u64,
        grad_scale: u64,
    ) -> PyResult<()> {
        guard::run(py, || {
            let mut guarded = self.open_inner()?;
            let compute = self.compute(&mut guarded, stream)?;
            let keeper: Keeper = Arc::new(());
            let Inner { powers, finished, torn, .. } = &mut *guarded;
            let powers = made_once(powers, || Powers::new(&self.pool))?;
            let mut sets = Sets::default();
            let (params, grads, group) = &tensors;
            let rows = params.get().rows().iter().zip(grads.get().rows());
            let mut segments = Vec::with_capacity(rows.len());
            for (i, (param, grad)) in rows.enumerate() {
                let scalars = sets.find(powers, &groups, group[i], steps[i])?;
                if param.elements == 0 {
                    continue;
                }
                let region = |addr: u64, width: u64| {
                    torch::region(&self.device, addr, param.elements * width, Place::Device, &keeper)
                };
                let optional = |addr: u64| (addr != 0).then(|| region(addr, 4)).transpose();
                let (param, param_dtype) = (region(param.addr, param.dtype.bytes())?, param.dtype);
                let (grad, grad_dtype) = (region(grad.addr, grad.dtype.bytes())?, grad.dtype);
                check_memory(|| format!("tensor {i} of this step"), (&param, param_dtype), (&grad, grad_dtype))?;
                segments.push(AdamWSegment {
                    param,
                    param_dtype,
                    grad,
                    grad_dtype,
                    exp_avg: region(state[i][0], 4)?,
                    exp_avg_sq: region(state[i][1], 4)?,
                    max_exp_avg_sq: optional(state[i][2])?,
                    master: optional(state[i][3])?,
                    scalars,
                });
            }
            let grad_scale = self.flag(grad_scale, &keeper)?;
            let step = AdamW { segments: &segments, scalars: &sets.scalars, grad_scale, skip: None };
            let launched = self.device.launch(&compute, &Kernel::AdamW(step));
            // Operands are refused before any of them is touched.
            *torn = !matches!(launched, Ok(()) | Err(DeviceError::BadOperands { .. }));
            let ended = if self.is_cpu() { self.finish(finished, &compute) } else { Ok(()) };
            *torn |= ended.is_err();
            launched.map_err(Error::from).and(ended)
        })
    }

    /// Whether the last step broke off when some of it was done already. Says so once.
    fn take_torn(&self) -> bool {
        std::mem::take(&mut self.lock().torn)
    }

    /// Block until a tensor's stores have ended; others go on.
    fn settle(&self, py: Python<'_>, store: usize, tensor: usize) -> PyResult<()> {
        guard::run(py, || self.lock().stores.get(store).map_or(Ok(()), |store| store.settle(tensor)))
    }

    /// Block until every store has ended.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || self.lock().pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.drain()))
    }

    /// Return when the host may write into the state, as far as a save under way is concerned.
    fn protect_all(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || self.lock().stores.iter().try_for_each(|store| store.state().protect_all()))
    }

    /// The last step in numbers, once its stores have ended: chunks, fetch_bytes, store_bytes, fetch_ns, update_ns,
    /// store_ns, stalls, stall_ns; then how often it waited for a save, and for how many nanoseconds.
    fn stats(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        guard::run(py, || {
            let inner = self.lock();
            let stats = match &inner.pipeline {
                None => RunStats::default(),
                Some(pipeline) => {
                    pipeline.drain()?;
                    pipeline.stats()
                }
            };
            let RunStats { chunks, fetch_bytes, store_bytes, fetch_ns, update_ns, store_ns, stalls, stall_ns } = stats;
            let waits = inner.stores.iter().map(|store| store.state().save_stalls());
            let (saves, save_ns) = waits.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            Ok(vec![chunks, fetch_bytes, store_bytes, fetch_ns, update_ns, store_ns, stalls, stall_ns, saves, save_ns])
        })
    }

    /// Pinned bytes of this optimizer's state, and of the host's ring and gradients where there are any.
    fn pinned_bytes(&self) -> u64 {
        self.lock().pinned_bytes()
    }

    /// The host's part of the last step: threads, chunks, state_bytes, down_bytes, up_bytes, run_ns, wire_wait_ns,
    /// update_wait_ns, and the time of the device's part. Zeros where it has none.
    fn host_stats(&self) -> Vec<u64> {
        let inner = self.lock();
        let Some(hybrid) = &inner.hybrid else { return vec![0; 9] };
        let (lane, stats) = (hybrid.lane(), hybrid.lane().stats());
        vec![
            lane.threads().threads() as u64,
            stats.chunks,
            stats.state_bytes,
            stats.down_bytes,
            stats.up_bytes,
            stats.run_ns,
            stats.wire_wait_ns,
            stats.update_wait_ns,
            hybrid.device_ns(),
        ]
    }

    /// The part of the state that the host updated in the last step, and the part on which it has settled.
    fn host_fractions(&self) -> (f64, Option<f64>) {
        let inner = self.lock();
        inner.hybrid.as_ref().map_or((0.0, Some(0.0)), |hybrid| (hybrid.last_fraction(), hybrid.settled_fraction()))
    }

    /// The vector unit that the host's threads use.
    fn host_kernel(&self) -> Option<String> {
        self.lock().hybrid.as_ref().map(|hybrid| hybrid.lane().threads().kernel().to_owned())
    }

    /// Pin room for the gradients of a store's tensors, so many bytes for each, where there is none yet.
    fn open_landing(&self, py: Python<'_>, store: usize, bytes: Vec<u64>, budget_bytes: Option<u64>) -> PyResult<()> {
        guard::run(py, || {
            let mut inner = self.open_inner()?;
            let taken = inner.pinned_bytes();
            inner.landing.open(&self.pool, store, &bytes, taken, budget_bytes)
        })
    }

    /// Bring a gradient down now. The caller keeps it as it is until the next step has returned, or `finish_landing`.
    fn land(&self, py: Python<'_>, store: usize, tensor: usize, addr: u64, bytes: u64, stream: u64) -> PyResult<()> {
        guard::run(py, || {
            let mut inner = self.open_inner()?;
            let after = self.compute(&mut inner, stream)?;
            let Inner { hybrid, landing, .. } = &mut *inner;
            let Some(hybrid) = hybrid else { return Ok(()) };
            let keeper: Keeper = Arc::new(());
            let grad = torch::region(&self.device, addr, bytes, Place::Device, &keeper)?;
            landing.land(hybrid.lane(), &grad, store, tensor, &after)
        })
    }

    /// Forget gradients that came down, all or one tensor's, and block until they have: the next step brings them anew.
    fn finish_landing(&self, py: Python<'_>, only: Option<(usize, usize)>) -> PyResult<()> {
        guard::run(py, || {
            let mut inner = self.lock();
            let Inner { hybrid, landing, .. } = &mut *inner;
            match only {
                Some((store, tensor)) => landing.forget(store, tensor),
                None => drop(landing.take()),
            }
            hybrid.as_ref().map_or(Ok(()), |hybrid| hybrid.lane().finish_landing())
        })
    }

    /// Read and write every byte of the state, and of other memory on the host (address and bytes of each, whole words),
    /// with the host's threads, changing none; returns bytes and seconds. This is the pace that the memory allows.
    fn touch_state(&self, py: Python<'_>, others: Vec<(u64, u64)>) -> PyResult<(u64, f64)> {
        guard::run(py, || {
            let inner = self.open_inner()?;
            let Some(hybrid) = &inner.hybrid else { return Ok((0, 0.0)) };
            let keeper: Keeper = std::sync::Arc::new(());
            let mut regions = Vec::new();
            for (addr, bytes) in others {
                regions.push(torch::host_region(addr, bytes, &keeper)?);
            }
            regions.extend(inner.stores.iter().map(|store| store.state().slab().buffer().all()));
            let start = std::time::Instant::now();
            let work: Vec<_> = regions
                .iter()
                .map(|region| hybrid.lane().threads().touch(region))
                .collect::<std::result::Result<_, _>>()?;
            work.into_iter().try_for_each(|work| work.wait())?;
            Ok((regions.iter().map(|region| region.bytes()).sum(), start.elapsed().as_secs_f64()))
        })
    }

    /// Make the next update on the host's threads fail, for tests.
    fn _fail_on_host_for_test(&self) {
        if let Some(hybrid) = &self.lock().hybrid {
            hybrid.lane().threads().fail_next_update();
        }
    }

    /// Allocations, slabs, streams and events made on the device so far; constant from the second step on.
    fn resources_made(&self) -> u64 {
        self.device.counters().total()
    }

    /// Let go of ring and state. Buffers that are still held keep their slab.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || {
            let mut inner = self.lock();
            let drained = inner.pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.drain());
            let landed = inner.hybrid.as_ref().map_or(Ok(()), |hybrid| hybrid.lane().drain());
            let drained = drained.and(landed);
            *inner = Inner { closed: true, ..Inner::default() };
            drained
        })
    }
}

impl Engine {
    fn plan(
        &self,
        names: Vec<String>,
        elements: &[u64],
        amsgrad: &[bool],
        master: &[bool],
        on_host: &[bool],
    ) -> Result<StepPlan> {
        let tensors = names
            .into_iter()
            .enumerate()
            .map(|(i, name)| TensorSpec {
                name,
                elements: elements[i],
                kinds: StateKind::set(amsgrad[i], master[i]),
                on_host: on_host[i],
            })
            .collect();
        StepPlan::new(tensors, self.options)
    }

    /// The tensors of one store with their memory, and their counters advanced where there is a gradient.
    fn bind(
        &self,
        store: &PlacedAdamW,
        tensors: &Tensors,
        steps: &mut [f32],
        mut set: impl FnMut(u32, u64) -> Result<u32>,
        keeper: &Keeper,
    ) -> Result<Vec<Binding>> {
        let (params, grads, group) = tensors;
        let (params, grads, specs) = (params.get().rows(), grads.get().rows(), store.plan().tensors());
        let mut bindings = Vec::with_capacity(specs.len());
        for (i, spec) in specs.iter().enumerate() {
            let place = if spec.on_host { Place::Pageable } else { Place::Device };
            // Without a gradient a parameter is not touched, and may have no address.
            let region = |row: &Row| {
                let bytes = spec.elements * row.dtype.bytes();
                torch::region(&self.device, row.addr.max(1), bytes, place, keeper)
            };
            let (param, grad) = (&params[i], &grads[i]);
            let has_grad = grad.addr != 0;
            let mut scalars = 0;
            if has_grad {
                if let Some(row) = [param, grad].into_iter().find(|row| row.elements != spec.elements) {
                    let reason = format!("{} elements where {} were planned", row.elements, spec.elements);
                    return Err(Error::PlanMismatch { tensor: spec.name.clone(), reason });
                }
                steps[i] += 1.0;
                scalars = set(group[i], steps[i] as u64)?;
            }
            bindings.push(Binding {
                param: region(param)?,
                param_dtype: param.dtype,
                grad: has_grad.then(|| Ok::<_, Error>((region(grad)?, grad.dtype))).transpose()?,
                scalars,
            });
        }
        Ok(bindings)
    }
}
