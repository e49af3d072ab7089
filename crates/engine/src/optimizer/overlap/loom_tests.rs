//! The handover's protocol in every interleaving of callers and the thread.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use loom::thread;

use super::handover::{Handover, Phase, Sleep};
use crate::error::{Error, Result};

/// What the thread is told: to begin, of a tensor, that these are all, to stop.
enum Told {
    Begin,
    Tensor(usize),
    All(Vec<usize>),
    Stop,
}

fn broken() -> Error {
    Error::InvalidOption { option: "update", value: "broken".to_owned(), remedy: String::new() }
}

/// The thread, with the point that it recorded last. It fails at a tensor if it is told to.
fn work(handover: &Handover<Told>, recorded: &AtomicUsize, fails: Option<usize>) {
    let mut mail = Vec::new();
    let update = |tensor: usize| -> Result<()> {
        if fails == Some(tensor) {
            return Err(broken());
        }
        let point = recorded.fetch_add(1, SeqCst) + 1;
        handover.submitted(&[tensor], point as u64);
        Ok(())
    };
    while handover.take(&mut mail, Sleep::UntilMail) {
        for told in mail.drain(..) {
            let outcome = match told {
                Told::Begin => continue,
                Told::Tensor(tensor) => match update(tensor) {
                    Ok(()) => continue,
                    failed => failed,
                },
                Told::All(tensors) => tensors.into_iter().try_for_each(update),
                Told::Stop => Ok(()),
            };
            handover.end(outcome);
        }
    }
}

struct Started {
    handover: Arc<Handover<Told>>,
    recorded: Arc<AtomicUsize>,
    thread: thread::JoinHandle<()>,
}

fn start(fails: Option<usize>) -> Started {
    let (handover, recorded) = (Arc::new(Handover::new()), Arc::new(AtomicUsize::new(0)));
    let (its_handover, its_count) = (handover.clone(), recorded.clone());
    let thread = thread::spawn(move || work(&its_handover, &its_count, fails));
    Started { handover, recorded, thread }
}

impl Started {
    fn close(self) {
        self.handover.close();
        self.thread.join().unwrap();
    }
}

/// Who waits for a tensor gets a point that was recorded, whenever the thread comes to it.
#[test]
fn loom_a_tensor_that_was_waited_for_was_submitted() {
    loom::model(|| {
        let started = start(None);
        let handover = &started.handover;
        handover.begin(2, Told::Begin);
        handover.offer(0, Told::Tensor(0)).unwrap();
        handover.commit(&[1], Told::All(vec![1])).unwrap();
        assert!(!handover.is_quiet());
        let (point, _) = handover.wait(Some(&[1])).unwrap();
        assert!(point == 2 && started.recorded.load(SeqCst) == 2);
        handover.wait(None).unwrap();
        assert_eq!(handover.phase(), Phase::Idle);
        handover.reached(1);
        assert!(!handover.is_quiet(), "one was not seen to have ended");
        handover.reached(2);
        assert!(handover.is_quiet());
        started.close();
    });
}

/// Two who wait, one of them in another thread; all who wait are woken. Three threads have too many interleavings: these
/// are all with up to two preemptions.
#[test]
fn loom_all_who_wait_are_woken() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let started = start(None);
        let handover = started.handover.clone();
        handover.begin(2, Told::Begin);
        handover.commit(&[0, 1], Told::All(vec![0, 1])).unwrap();
        let waiter = {
            let handover = handover.clone();
            thread::spawn(move || handover.wait(Some(&[0])).unwrap().0)
        };
        assert_eq!(handover.wait(Some(&[1])).unwrap().0, 2);
        assert_eq!(waiter.join().unwrap(), 1);
        assert_eq!(handover.take_updated(1).unwrap(), [0]);
        assert_eq!(handover.take_updated(2).unwrap(), [1]);
        started.close();
    });
}

/// A failure reaches who waits, and who comes later.
#[test]
fn loom_a_failure_reaches_everybody() {
    loom::model(|| {
        let started = start(Some(1));
        let handover = &started.handover;
        handover.begin(2, Told::Begin);
        // The step may have failed before it is committed.
        let offered = handover.offer(1, Told::Tensor(1));
        let committed = offered.and_then(|()| handover.commit(&[0], Told::All(vec![0])));
        let waited = handover.wait(Some(&[0, 1]));
        assert!(waited.is_err() && handover.wait(None).is_err());
        assert!(committed.is_ok() || handover.failed().is_some());
        assert_eq!(handover.phase(), Phase::Idle);
        assert!(!handover.is_quiet(), "who asks must be told");
        handover.forget_failure();
        handover.wait(None).unwrap();
        started.close();
    });
}

/// After a step was given up nothing of it is submitted any more, and another one can begin.
#[test]
fn loom_a_step_that_was_given_up_is_over() {
    loom::model(|| {
        let started = start(None);
        let handover = &started.handover;
        handover.begin(1, Told::Begin);
        handover.offer(0, Told::Tensor(0)).unwrap();
        handover.abort_open(Told::Stop);
        let submitted = started.recorded.load(SeqCst);
        assert_eq!(handover.phase(), Phase::Idle);
        handover.begin(1, Told::Begin);
        handover.abort_open(Told::Stop);
        assert_eq!(started.recorded.load(SeqCst), submitted);
        started.close();
    });
}

/// Closing ends the thread after what was committed, whenever it comes.
#[test]
fn loom_closing_completes_what_was_committed() {
    loom::model(|| {
        let started = start(None);
        let recorded = started.recorded.clone();
        started.handover.begin(2, Told::Begin);
        started.handover.commit(&[0, 1], Told::All(vec![0, 1])).unwrap();
        started.close();
        assert_eq!(recorded.load(SeqCst), 2);
    });
}
