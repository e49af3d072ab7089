//! What the caller's threads and the thread that submits updates hand to each other.
//!
//! [Note: the handover's protocol]
//! 1. A step is open from `begin` to `commit` or `abort`, and committed until the thread has submitted all of it. One
//!    step is under way at a time.
//! 2. Messages arrive in the order in which they were sent. The lock is held for moments only, never over a call of the
//!    device, so a hook of autograd never waits for one.
//! 3. The thread reports a tensor with the point behind its last update, after it has recorded that point. Who waits for
//!    a tensor therefore gets a point that a stream may wait for.
//! 4. Between `begin` and `commit` nobody waits: what was not offered may never be updated.
//! 5. A failure ends the step. All who wait get it, and so does every later call until it is forgotten.
//!
//! `loom_tests.rs` runs this protocol under loom.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::sync::{AtomicBool, Condvar, Mutex, MutexGuard, lock};

/// How far the step under way has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// There is none.
    Idle,
    /// Gradients may be offered.
    Open,
    /// All is known, and not all is submitted.
    Committed,
}

/// How long the thread sleeps if there is no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sleep {
    Not,
    For(Duration),
    UntilMail,
}

#[derive(Debug)]
pub(super) struct Handover<M> {
    state: Mutex<HandoverState<M>>,
    /// For the thread: there is a message.
    mail: Condvar,
    /// For the others: something was submitted, or the step has ended.
    changed: Condvar,
    /// Whether every update was seen to have ended, so that nobody needs to wait for one.
    quiet: AtomicBool,
}

#[derive(Debug)]
struct HandoverState<M> {
    messages: Vec<M>,
    phase: Phase,
    closed: bool,
    /// By tensor: whether it will be updated in this step and was not yet.
    wanted: Vec<bool>,
    wanted_count: usize,
    /// By tensor: the point behind its last update.
    ends: Vec<u64>,
    /// Tensors that were updated in this step and not taken.
    updated: Vec<usize>,
    failed: Option<Error>,
}

impl<M> HandoverState<M> {
    fn want(&mut self, tensor: usize) {
        if !std::mem::replace(&mut self.wanted[tensor], true) {
            self.wanted_count += 1;
        }
    }

    fn check(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn is_waited_for(&self, tensors: Option<&[usize]>) -> bool {
        self.phase == Phase::Committed
            && match tensors {
                Some(tensors) => tensors.iter().any(|&tensor| self.wanted[tensor]),
                None => true,
            }
    }
}

impl<M> Handover<M> {
    pub(super) fn new() -> Self {
        let state = HandoverState {
            messages: Vec::new(),
            phase: Phase::Idle,
            closed: false,
            wanted: Vec::new(),
            wanted_count: 0,
            ends: Vec::new(),
            updated: Vec::new(),
            failed: None,
        };
        Self { state: Mutex::new(state), mail: Condvar::new(), changed: Condvar::new(), quiet: AtomicBool::new(true) }
    }

    pub(super) fn phase(&self) -> Phase {
        lock(&self.state).phase
    }

    /// The failure that ended the last step.
    pub(super) fn failed(&self) -> Option<Error> {
        lock(&self.state).failed.clone()
    }

    /// The state can be trusted again.
    pub(super) fn forget_failure(&self) {
        lock(&self.state).failed = None;
    }

    /// Opens a step of so many tensors. There is none under way.
    pub(super) fn begin(&self, tensors: usize, message: M) {
        let mut state = lock(&self.state);
        state.phase = Phase::Open;
        state.wanted = vec![false; tensors];
        state.wanted_count = 0;
        state.ends.resize(tensors, 0);
        state.updated.clear();
        state.failed = None;
        self.send(state, message);
    }

    /// Hands a gradient over.
    pub(super) fn offer(&self, tensor: usize, message: M) -> Result<()> {
        let mut state = lock(&self.state);
        state.check()?;
        state.want(tensor);
        self.send(state, message);
        Ok(())
    }

    /// Closes the list of gradients: these, and those that were offered.
    pub(super) fn commit(&self, tensors: &[usize], message: M) -> Result<()> {
        let mut state = lock(&self.state);
        state.check()?;
        tensors.iter().for_each(|&tensor| state.want(tensor));
        state.phase = Phase::Committed;
        self.quiet.store(false, Release);
        self.send(state, message);
        Ok(())
    }

    /// Tells the thread to give an open step up, and waits until it has. Nothing else is given up.
    pub(super) fn abort_open(&self, message: M) {
        let mut state = lock(&self.state);
        if state.phase != Phase::Open {
            return;
        }
        state.messages.push(message);
        self.mail.notify_all();
        while state.phase != Phase::Idle {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn send(&self, mut state: MutexGuard<'_, HandoverState<M>>, message: M) {
        state.messages.push(message);
        drop(state);
        self.mail.notify_all();
    }

    /// Ends the thread after the step that it has.
    pub(super) fn close(&self) {
        lock(&self.state).closed = true;
        self.mail.notify_all();
    }

    /// Moves the messages that have come to the end of a list, for the thread. `false` when it was closed and there is no
    /// step.
    pub(super) fn take(&self, into: &mut Vec<M>, sleep: Sleep) -> bool {
        let mut state = lock(&self.state);
        loop {
            if !state.messages.is_empty() {
                into.append(&mut state.messages);
                return true;
            }
            if state.closed && state.phase == Phase::Idle {
                return false;
            }
            match sleep {
                Sleep::Not => return true,
                Sleep::For(time) => {
                    let (mut state, _) = self.mail.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner);
                    into.append(&mut state.messages);
                    return true;
                }
                Sleep::UntilMail => state = self.mail.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// All updates of these tensors were submitted, and end with this point, which is recorded.
    pub(super) fn submitted(&self, tensors: &[usize], point: u64) {
        let mut state = lock(&self.state);
        for &tensor in tensors {
            state.ends[tensor] = point;
            if std::mem::replace(&mut state.wanted[tensor], false) {
                state.wanted_count -= 1;
            }
        }
        state.updated.extend_from_slice(tensors);
        self.quiet.store(false, Release);
        drop(state);
        self.changed.notify_all();
    }

    /// The thread is done with the step.
    pub(super) fn end(&self, outcome: Result<()>) {
        let mut state = lock(&self.state);
        state.phase = Phase::Idle;
        state.messages.clear();
        if let Err(error) = outcome {
            state.failed = Some(error);
            // Who asks must be told.
            self.quiet.store(false, Release);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Blocks until all updates of these tensors (or of all) were submitted, if the step is committed. Returns the point
    /// behind the last of them, and whether it blocked.
    pub(super) fn wait(&self, tensors: Option<&[usize]>) -> Result<(u64, bool)> {
        let (mut state, mut blocked) = (lock(&self.state), false);
        while state.is_waited_for(tensors) {
            blocked = true;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.check()?;
        let end = |&tensor: &usize| state.ends.get(tensor).copied().unwrap_or(0);
        let last = match tensors {
            Some(tensors) => tensors.iter().map(end).max(),
            None => state.ends.iter().copied().max(),
        };
        Ok((last.unwrap_or(0), blocked))
    }

    /// Whether tensors were updated and not taken, or the step has failed.
    pub(super) fn has_updated(&self) -> bool {
        let state = lock(&self.state);
        !state.updated.is_empty() || state.failed.is_some()
    }

    /// Takes the tensors that were updated since the last call, as far as their points were reached.
    pub(super) fn take_updated(&self, reached: u64) -> Result<Vec<usize>> {
        let mut state = lock(&self.state);
        state.check()?;
        let HandoverState { updated, ends, .. } = &mut *state;
        Ok(updated.extract_if(.., |&mut tensor| ends[tensor] <= reached).collect())
    }

    /// Tensors that will be updated in this step and are not yet.
    pub(super) fn pending(&self) -> usize {
        lock(&self.state).wanted_count
    }

    /// Whether nobody has to wait for anything.
    pub(super) fn is_quiet(&self) -> bool {
        self.quiet.load(Acquire)
    }

    /// The host has seen this point: if it is the last one of all, nobody has to wait any more.
    pub(super) fn reached(&self, point: u64) {
        let state = lock(&self.state);
        if state.phase == Phase::Idle && state.failed.is_none() && state.ends.iter().all(|&end| end <= point) {
            self.quiet.store(true, Release);
        }
    }
}
