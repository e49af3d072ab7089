//! A device that refuses unordered accesses, for tests: it finds races from the order of submission alone.
//!
//! [Note: vector clocks] Each stream is an actor, the host is one more. Every piece of work ticks its actor's clock,
//! and each actor's view says how far it has seen every other. Recording an event copies the stream's view into it; a
//! wait, by stream or host, merges the event's view into the waiter's. The host submits all work, so every piece of
//! work starts with the host's view. Two accesses to the same bytes, one of them a write, are ordered exactly when the
//! actor of the later one has seen the tick of the earlier one. That does not depend on timing, so one run of a test
//! covers all timings.
//!
//! Bytes are known by their address, so that memory which is borrowed twice counts as one.
//!
//! All host threads count as one actor: races between host threads are for loom and the type system.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::device::{Counters, Device, Entered, Info, Memory, SharedDevice};
use crate::error::{Error, Result};
use crate::host::{HostThreads, HostUpdate, HostWork};
use crate::kernel::Kernel;
use crate::memory::{Buffer, Region, Slab, SlabLayout};
use crate::stream::{Event, Stream};
use crate::update::Rule;

const HOST: u64 = 0;

/// How far an actor has seen the others: the latest tick of each.
type View = HashMap<u64, u64>;

fn merge(into: &mut View, from: &View) {
    for (&actor, &tick) in from {
        let seen = into.entry(actor).or_default();
        *seen = tick.max(*seen);
    }
}

struct Access {
    what: String,
    actor: u64,
    tick: u64,
    start: u64,
    end: u64,
    writes: bool,
    /// The buffer it was made through, for messages: its number and where it begins.
    buffer: (u64, u64),
    /// Memory whose owner is gone was given back, which is allowed only after the work that uses it has ended.
    owner: Weak<dyn Any + Send + Sync>,
}

/// The addresses of a region. They name the same bytes through whichever buffer: the host and its devices share one
/// address space.
fn range(region: &Region) -> (u64, u64) {
    (region.addr() as u64, region.addr() as u64 + region.bytes())
}

/// The accesses that later ones must be ordered after, by address.
#[derive(Default)]
struct Accesses {
    by_start: BTreeMap<u64, Vec<Access>>,
    longest_bytes: u64,
}

impl Accesses {
    /// Those to memory in use that touch a range.
    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = &Access> {
        let first = start.saturating_sub(self.longest_bytes);
        let begun = self.by_start.range(first..end).flat_map(|(_, accesses)| accesses);
        begun.filter(move |access| start < access.end && access.owner.strong_count() > 0)
    }

    fn push(&mut self, new: Access) {
        self.longest_bytes = self.longest_bytes.max(new.end - new.start);
        let mut emptied = Vec::new();
        for (&start, accesses) in self.by_start.range_mut(new.start..new.end) {
            accesses.retain(|old| {
                // What this write covers is ordered before it; anything ordered after this write is after that too.
                let covered = new.writes && old.end <= new.end;
                // A repeated access of the same actor to the same range supersedes its earlier one.
                let repeated =
                    (old.actor, old.start, old.end, old.writes) == (new.actor, new.start, new.end, new.writes);
                !covered && !repeated && old.owner.strong_count() > 0
            });
            if accesses.is_empty() {
                emptied.push(start);
            }
        }
        emptied.iter().for_each(|start| drop(self.by_start.remove(start)));
        self.by_start.entry(new.start).or_default().push(new);
    }
}

#[derive(Default)]
struct Clocks {
    views: HashMap<u64, View>,
    events: HashMap<u64, View>,
    accesses: Accesses,
}

impl Clocks {
    /// What an actor has seen when its next piece of work starts: all that the host has, and its own new tick.
    fn next(&mut self, actor: u64) -> View {
        let mut view = self.views.entry(actor).or_default().clone();
        merge(&mut view, self.views.entry(HOST).or_default());
        *view.entry(actor).or_default() += 1;
        view
    }

    /// Refuses accesses that are not ordered after all earlier ones to the same bytes.
    fn check(&self, view: &View, what: &str, accesses: &[(&Region, bool)]) -> Result<()> {
        for (region, writes) in accesses.iter().filter(|(region, _)| region.bytes() > 0) {
            let (start, end) = range(region);
            for other in self.accesses.overlapping(start, end).filter(|other| other.writes || *writes) {
                if view.get(&other.actor).copied().unwrap_or(0) < other.tick {
                    let verb = |writes: bool| if writes { "writes" } else { "reads" };
                    let (offset, (key, base)) = (region.offset_bytes(), other.buffer);
                    let detail = format!(
                        "{what} {} bytes {offset}..{} of {:?}, which {} {} ({}..{} of Buffer#{key}) and nothing orders the two",
                        verb(*writes),
                        offset + region.bytes(),
                        region.buffer(),
                        other.what,
                        verb(other.writes),
                        other.start - base,
                        other.end - base,
                    );
                    return Err(Error::Unordered { detail });
                }
            }
        }
        Ok(())
    }

    /// Notes accepted work.
    fn commit(&mut self, actor: u64, view: View, what: &str, accesses: &[(&Region, bool)]) {
        let tick = view.get(&actor).copied().unwrap_or(0);
        self.views.insert(actor, view);
        for &(region, writes) in accesses.iter().filter(|(region, _)| region.bytes() > 0) {
            let ((start, end), buffer) = (range(region), region.buffer());
            let (what, owner) = (what.to_owned(), buffer.weak_owner());
            let buffer = (buffer.key(), buffer.addr() as u64);
            self.accesses.push(Access { what, actor, tick, start, end, writes, buffer, owner });
        }
    }

    fn host_sees(&mut self, event: &Event) {
        if let Some(view) = self.events.get(&event.key()) {
            let view = view.clone();
            merge(self.views.entry(HOST).or_default(), &view);
        }
    }
}

/// Wraps a device and refuses accesses that nothing orders, and waits for events that were never recorded.
pub struct Checked {
    inner: SharedDevice,
    clocks: Mutex<Clocks>,
}

impl std::fmt::Debug for Checked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checked({:?})", self.inner)
    }
}

impl Checked {
    /// Wraps a device.
    pub fn wrap(inner: SharedDevice) -> Arc<Self> {
        Arc::new(Self { inner, clocks: Mutex::default() })
    }

    fn clocks(&self) -> MutexGuard<'_, Clocks> {
        self.clocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands work on where nothing races. Noted only once it was accepted: a call that returns an error did nothing.
    fn run(
        &self,
        actor: u64,
        what: &str,
        accesses: &[(&Region, bool)],
        submit: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut clocks = self.clocks();
        let view = clocks.next(actor);
        clocks.check(&view, what, accesses)?;
        submit()?;
        clocks.commit(actor, view, what, accesses);
        Ok(())
    }
}

impl Device for Checked {
    fn info(&self) -> &Info {
        self.inner.info()
    }
    fn memory(&self) -> Result<Memory> {
        self.inner.memory()
    }
    fn counters(&self) -> Counters {
        self.inner.counters()
    }
    fn load(&self, rule: &'static Rule) -> Result<()> {
        self.inner.load(rule)
    }
    fn enter(&self) -> Result<Entered> {
        self.inner.enter()
    }
    fn alloc(&self, bytes: u64) -> Result<Buffer> {
        self.inner.alloc(bytes)
    }
    fn pin(&self, layout: SlabLayout) -> Result<Slab> {
        self.inner.pin(layout)
    }
    fn stream(&self, name: &str) -> Result<Stream> {
        self.inner.stream(name)
    }
    fn urgent_stream(&self, name: &str) -> Result<Stream> {
        self.inner.urgent_stream(name)
    }
    #[expect(unsafe_code, reason = "passes the caller's promise on")]
    unsafe fn borrow_stream(&self, handle: usize, name: &str) -> Result<Stream> {
        // SAFETY: the caller's promise, unchanged.
        unsafe { self.inner.borrow_stream(handle, name) }
    }
    fn event(&self) -> Result<Event> {
        self.inner.event()
    }
    fn timed_event(&self) -> Result<Event> {
        self.inner.timed_event()
    }
    fn record(&self, event: &Event, stream: &Stream) -> Result<()> {
        let mut clocks = self.clocks();
        let view = clocks.next(stream.key());
        self.inner.record(event, stream)?;
        clocks.events.insert(event.key(), view.clone());
        clocks.commit(stream.key(), view, "record", &[]);
        Ok(())
    }
    fn wait(&self, stream: &Stream, event: &Event) -> Result<()> {
        let mut clocks = self.clocks();
        let Some(view) = clocks.events.get(&event.key()).cloned() else {
            return Err(Error::Unordered {
                detail: format!("{stream:?} waits for {event:?}, which was never recorded"),
            });
        };
        self.inner.wait(stream, event)?;
        merge(clocks.views.entry(stream.key()).or_default(), &view);
        Ok(())
    }
    fn query(&self, event: &Event) -> Result<bool> {
        let done = self.inner.query(event)?;
        if done {
            self.clocks().host_sees(event);
        }
        Ok(done)
    }
    fn synchronize(&self, event: &Event) -> Result<()> {
        self.inner.synchronize(event)?;
        self.clocks().host_sees(event);
        Ok(())
    }
    fn elapsed_ns(&self, start: &Event, end: &Event) -> Result<u64> {
        self.inner.elapsed_ns(start, end)
    }
    fn copy(&self, stream: &Stream, from: &Region, to: &Region) -> Result<()> {
        let what = format!("copy on {}", stream.name());
        self.run(stream.key(), &what, &[(from, false), (to, true)], || self.inner.copy(stream, from, to))
    }
    fn launch(&self, stream: &Stream, kernel: &Kernel<'_>) -> Result<()> {
        let what = format!("{} on {}", kernel.name(), stream.name());
        self.run(stream.key(), &what, &kernel.accesses(), || self.inner.launch(stream, kernel))
    }
    // Each update is an actor of its own: what it wrote counts as seen by the host only once the host has waited for it.
    fn update_on_host(&self, threads: &HostThreads, update: HostUpdate) -> Result<HostWork> {
        let mut clocks = self.clocks();
        let view = clocks.next(HOST);
        let accesses: Vec<(Region, bool)> =
            update.accesses().into_iter().map(|(region, writes)| (region.clone(), writes)).collect();
        let accesses: Vec<(&Region, bool)> = accesses.iter().map(|(region, writes)| (region, *writes)).collect();
        clocks.check(&view, "the host's threads", &accesses)?;
        let work = self.inner.update_on_host(threads, update)?;
        let view = clocks.next(work.key());
        clocks.commit(work.key(), view, "the host's threads", &accesses);
        Ok(work)
    }
    fn finish_on_host(&self, work: HostWork) -> Result<()> {
        let key = work.key();
        let outcome = self.inner.finish_on_host(work);
        let mut clocks = self.clocks();
        let view = clocks.views.remove(&key).unwrap_or_default();
        merge(clocks.views.entry(HOST).or_default(), &view);
        outcome
    }
    fn read(&self, from: &Region, into: &mut [u8]) -> Result<()> {
        self.run(HOST, "the host", &[(from, false)], || self.inner.read(from, into))
    }
    fn write(&self, from: &[u8], to: &Region) -> Result<()> {
        self.run(HOST, "the host", &[(to, true)], || self.inner.write(from, to))
    }
}
