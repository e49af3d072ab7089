//! The queue between callers that ask for work and the one thread that submits it.
//!
//! [Note: the queue's protocol]
//! 1. A job is waiting, running, or over. One thread takes jobs, from the front, and runs one at a time.
//! 2. `wait` returns once a job is over: all its work has been submitted to the device, or it failed. Only then may a
//!    stream be made to wait for the job's mark; waiting for an event that was not recorded would be a no-op.
//! 3. `cancel` takes a waiting job out, so that it never ran. A running one is asked to stop at its next chunk, and
//!    `cancel` returns when it has stopped: everything that was submitted ends with the job's mark.
//! 4. After `close` the thread ends what it runs and takes nothing more; those who wait get an answer.
//!
//! The tests below run this protocol under loom.

use std::collections::{HashMap, VecDeque};

use crate::error::{Error, Result};
use crate::sync::{Condvar, Mutex, MutexGuard, lock};

/// Names a job of one queue; later jobs have larger numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Ticket(u64);

/// What became of a job that was cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cancelled {
    /// The device never saw it.
    Unrun,
    /// Some or all of it was submitted, and the job's mark ends that.
    Submitted,
}

#[derive(Debug)]
pub(crate) struct Queue<T> {
    state: Mutex<QueueState<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct QueueState<T> {
    waiting: VecDeque<(Ticket, T)>,
    running: Option<Running>,
    failed: HashMap<Ticket, Error>,
    next: u64,
    closed: bool,
}

#[derive(Debug)]
struct Running {
    ticket: Ticket,
    stop: bool,
}

impl<T> QueueState<T> {
    fn is_over(&self, ticket: Ticket) -> bool {
        self.running.as_ref().is_none_or(|running| running.ticket != ticket)
            && (self.closed || self.waiting.iter().all(|(waiting, _)| *waiting != ticket))
    }
}

impl<T> Queue<T> {
    pub(crate) fn new() -> Self {
        let state =
            QueueState { waiting: VecDeque::new(), running: None, failed: HashMap::new(), next: 0, closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Adds a job at the end, or before all others if a caller waits for it already.
    pub(crate) fn push(&self, job: T, urgent: bool) -> Ticket {
        let mut state = lock(&self.state);
        let ticket = Ticket(state.next);
        state.next += 1;
        if urgent {
            state.waiting.push_front((ticket, job));
        } else {
            state.waiting.push_back((ticket, job));
        }
        drop(state);
        self.changed.notify_all();
        ticket
    }

    /// Moves a waiting job before all others.
    pub(crate) fn hurry(&self, ticket: Ticket) {
        let mut state = lock(&self.state);
        if let Some(at) = state.waiting.iter().position(|(waiting, _)| *waiting == ticket)
            && let Some(job) = state.waiting.remove(at)
        {
            state.waiting.push_front(job);
        }
    }

    /// The next job, for the thread; `None` after the queue is closed.
    pub(crate) fn next(&self) -> Option<(Ticket, T)> {
        let mut state = lock(&self.state);
        loop {
            if state.closed {
                return None;
            }
            if let Some((ticket, job)) = state.waiting.pop_front() {
                state.running = Some(Running { ticket, stop: false });
                return Some((ticket, job));
            }
            state = self.sleep(state);
        }
    }

    /// Whether the running job should stop at its next chunk.
    pub(crate) fn should_stop(&self) -> bool {
        lock(&self.state).running.as_ref().is_some_and(|running| running.stop)
    }

    /// The running job is over.
    pub(crate) fn finish(&self, ticket: Ticket, outcome: Result<()>) {
        let mut state = lock(&self.state);
        state.running = None;
        if let Err(error) = outcome {
            state.failed.insert(ticket, error);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Whether a job is over; never blocks.
    pub(crate) fn is_over(&self, ticket: Ticket) -> bool {
        lock(&self.state).is_over(ticket)
    }

    /// Blocks until a job is over and returns its outcome; every caller that asks gets the error.
    pub(crate) fn wait(&self, ticket: Ticket) -> Result<()> {
        let mut state = lock(&self.state);
        while !state.is_over(ticket) {
            state = self.sleep(state);
        }
        state.failed.get(&ticket).map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Takes a job back, see [Note: the queue's protocol].
    pub(crate) fn cancel(&self, ticket: Ticket) -> Cancelled {
        let mut state = lock(&self.state);
        if let Some(at) = state.waiting.iter().position(|(waiting, _)| *waiting == ticket) {
            state.waiting.remove(at);
            return Cancelled::Unrun;
        }
        loop {
            match &mut state.running {
                Some(running) if running.ticket == ticket => running.stop = true,
                _ => {
                    state.failed.remove(&ticket);
                    return Cancelled::Submitted;
                }
            }
            state = self.sleep(state);
        }
    }

    /// Ends the thread after the job it runs; jobs still waiting are dropped.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        if let Some(running) = &mut state.running {
            running.stop = true;
        }
        state.waiting.clear();
        drop(state);
        self.changed.notify_all();
    }

    fn sleep<'a>(&self, state: MutexGuard<'a, QueueState<T>>) -> MutexGuard<'a, QueueState<T>> {
        self.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use loom::thread;

    /// Submits as many chunks as a job has, unless told to stop; counts them in `submitted`.
    fn work(queue: &Queue<usize>, submitted: &AtomicUsize) {
        while let Some((ticket, chunks)) = queue.next() {
            for _ in 0..chunks {
                if queue.should_stop() {
                    break;
                }
                submitted.fetch_add(1, SeqCst);
            }
            queue.finish(ticket, Ok(()));
        }
    }

    /// A queue, what was submitted, and the thread that works it off.
    fn started() -> (Arc<Queue<usize>>, Arc<AtomicUsize>, thread::JoinHandle<()>) {
        let (queue, submitted) = (Arc::new(Queue::new()), Arc::new(AtomicUsize::new(0)));
        let (its_queue, its_count) = (queue.clone(), submitted.clone());
        (queue, submitted, thread::spawn(move || work(&its_queue, &its_count)))
    }

    /// Who waits for a job finds all of it submitted, whenever the thread gets to it.
    #[test]
    fn loom_a_job_waited_for_was_submitted() {
        loom::model(|| {
            let (queue, submitted, thread) = started();
            let ticket = queue.push(2, false);
            queue.wait(ticket).unwrap();
            assert_eq!(submitted.load(SeqCst), 2);
            queue.close();
            thread.join().unwrap();
        });
    }

    /// A cancelled job submits nothing more once `cancel` has returned, and nothing at all if it had not begun.
    #[test]
    fn loom_a_cancelled_job_is_over() {
        loom::model(|| {
            let (queue, submitted, thread) = started();
            let ticket = queue.push(2, false);
            let outcome = queue.cancel(ticket);
            let seen = submitted.load(SeqCst);
            if outcome == Cancelled::Unrun {
                assert_eq!(seen, 0);
            }
            queue.close();
            thread.join().unwrap();
            assert_eq!(submitted.load(SeqCst), seen, "nothing is submitted after cancel has returned");
        });
    }

    /// Closing wakes those who wait, whether or not the thread got to the job.
    #[test]
    fn loom_closing_answers_those_who_wait() {
        loom::model(|| {
            let queue: Arc<Queue<usize>> = Arc::new(Queue::new());
            let ticket = queue.push(1, false);
            let waiter = {
                let queue = queue.clone();
                thread::spawn(move || queue.wait(ticket).is_ok())
            };
            queue.close();
            assert!(waiter.join().unwrap());
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn urgent_and_hurried_jobs_come_first_and_failures_stay_with_their_job() {
        let queue = Queue::new();
        let (a, b, c) = (queue.push('a', false), queue.push('b', false), queue.push('c', true));
        queue.hurry(b);
        let order: Vec<char> = (0..3)
            .map(|_| {
                let (ticket, job) = queue.next().unwrap();
                let failure = Error::InvalidOption { option: "job", value: job.to_string(), remedy: String::new() };
                queue.finish(ticket, if job == 'c' { Err(failure) } else { Ok(()) });
                job
            })
            .collect();
        assert_eq!(order, ['b', 'c', 'a']);
        assert!(queue.wait(a).is_ok() && queue.wait(b).is_ok() && queue.wait(c).is_err());
        assert_eq!(queue.cancel(c), Cancelled::Submitted);
    }
}
