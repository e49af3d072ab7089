//! Streams and events of the CPU backend: a thread and a queue each, with CUDA's meaning of record and wait.
//!
//! An event holds its latest [`Recording`]. Recording the event puts a fresh one into the stream's queue; a wait takes
//! the one that the event holds at that moment. A recording is completed exactly once, by the worker that reaches it, so
//! re-recording an event never confuses those that wait for its earlier point.
//!
//! When work fails, its stream stays failed: work behind it is dropped without running, recordings behind it complete with
//! the error, and a stream that waits for such a recording fails too.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::thread::Cores;

/// Work for a stream. It owns what it touches.
pub(crate) type Work = Box<dyn FnOnce() -> Result<()> + Send>;

enum Op {
    Run(Work),
    Record(Arc<Recording>),
    Wait(Arc<Recording>),
}

/// One recording of an event: empty until its stream reaches it.
#[derive(Default)]
pub(crate) struct Recording {
    reached: Mutex<Option<Result<Instant>>>,
    changed: Condvar,
}

impl Recording {
    fn complete(&self, outcome: Result<Instant>) {
        *lock(&self.reached) = Some(outcome);
        self.changed.notify_all();
    }

    fn outcome(&self) -> Option<Result<Instant>> {
        lock(&self.reached).clone()
    }

    fn wait(&self) -> Result<Instant> {
        let mut reached = lock(&self.reached);
        loop {
            match &*reached {
                Some(outcome) => return outcome.clone(),
                None => reached = self.changed.wait(reached).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// A point that can be recorded again and again.
pub(crate) struct CpuEvent {
    recording: Mutex<Option<Arc<Recording>>>,
    timed: bool,
}

impl CpuEvent {
    /// An event without a time refuses to tell one, as it would on a GPU.
    pub(crate) fn new(timed: bool) -> Self {
        Self { recording: Mutex::default(), timed }
    }

    fn recording(&self) -> Option<Arc<Recording>> {
        lock(&self.recording).clone()
    }

    pub(crate) fn is_done(&self) -> Result<bool> {
        match self.recording().and_then(|recording| recording.outcome()) {
            None => Ok(self.recording().is_none()),
            Some(outcome) => outcome.map(|_| true),
        }
    }

    pub(crate) fn wait(&self) -> Result<()> {
        self.recording().map_or(Ok(()), |recording| recording.wait().map(drop))
    }

    /// When the point was reached; an error where it was not recorded or not reached yet.
    pub(crate) fn time(&self) -> Result<Instant> {
        let early = || Error::BadOperands {
            operation: "elapsed",
            reason: "an event was not reached yet, or carries no time".to_owned(),
        };
        if !self.timed {
            return Err(early());
        }
        self.recording().ok_or_else(early)?.outcome().ok_or_else(early)?
    }
}

/// A queue and the thread that works it off.
pub(crate) struct CpuStream {
    queue: Arc<OpQueue>,
    pid: u32,
}

struct OpQueue {
    name: String,
    state: Mutex<OpQueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct OpQueueState {
    ops: VecDeque<Op>,
    closed: bool,
    failed: Option<Error>,
}

impl CpuStream {
    pub(crate) fn start(name: &str) -> Result<Self> {
        let queue = Arc::new(OpQueue { name: name.to_owned(), state: Mutex::default(), changed: Condvar::new() });
        let worker = queue.clone();
        Cores::here().spawn(&format!("forebay-{name}"), move || worker.work())?;
        Ok(Self { queue, pid: std::process::id() })
    }

    pub(crate) fn run(&self, work: Work) -> Result<()> {
        self.queue.push(Op::Run(work))
    }

    pub(crate) fn record(&self, event: &CpuEvent) -> Result<()> {
        let recording = Arc::new(Recording::default());
        self.queue.push(Op::Record(recording.clone()))?;
        *lock(&event.recording) = Some(recording);
        Ok(())
    }

    pub(crate) fn wait(&self, event: &CpuEvent) -> Result<()> {
        event.recording().map_or(Ok(()), |recording| self.queue.push(Op::Wait(recording)))
    }
}

impl Drop for CpuStream {
    fn drop(&mut self) {
        // A forked child has no such worker, and the lock may be held by one of the parent's for ever.
        if self.pid != std::process::id() {
            return;
        }
        // The worker finishes what was accepted and then ends; nobody waits for it here, since the last handle may go
        // on the worker's own thread.
        lock(&self.queue.state).closed = true;
        self.queue.changed.notify_one();
    }
}

impl OpQueue {
    fn push(&self, op: Op) -> Result<()> {
        let mut state = lock(&self.state);
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        state.ops.push_back(op);
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    fn next(&self) -> Option<Op> {
        let mut state = lock(&self.state);
        loop {
            match state.ops.pop_front() {
                Some(op) => return Some(op),
                None if state.closed => return None,
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn work(&self) {
        let mut failed: Option<Error> = None;
        while let Some(op) = self.next() {
            let outcome = match op {
                Op::Record(recording) => {
                    recording.complete(failed.clone().map_or_else(|| Ok(Instant::now()), Err));
                    continue;
                }
                _ if failed.is_some() => continue,
                Op::Run(work) => std::panic::catch_unwind(std::panic::AssertUnwindSafe(work))
                    .unwrap_or_else(|panic| Err(self.failure(&panic_text(&*panic)))),
                Op::Wait(recording) => recording.wait().map(drop),
            };
            if let Err(error) = outcome {
                let error = match error {
                    failure @ Error::StreamFailed { .. } => failure,
                    other => self.failure(&other.to_string()),
                };
                lock(&self.state).failed = Some(error.clone());
                failed = Some(error);
            }
        }
    }

    fn failure(&self, reason: &str) -> Error {
        Error::StreamFailed { stream: self.name.clone(), reason: reason.to_owned() }
    }
}

pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("its work panicked: {}", text.unwrap_or("no message"))
}

/// Nothing here leaves a lock's data half changed, so a panic elsewhere does not make it unusable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
