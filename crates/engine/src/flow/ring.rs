//! The slot ring: a fixed number of slots that are reused in the order in which they come back.
//!
//! [Note: the ring's protocol]
//! 1. A slot has one owner at a time: the ring, or the one who acquired it.
//! 2. A slot comes back with a fence, the mark that ends the device's last use of it; or without one, if the device
//!    never used it.
//! 3. `acquire` takes the slot that came back first, then waits for its fence, with no lock held. So the owner may do
//!    anything with the slot at once, and other threads may acquire and release meanwhile. While it waits, the owner may
//!    prepare what needs to know the slot and does not touch it.
//! 4. If waiting for the fence fails, the slot goes back with its fence and the caller gets the error: no slot is ever
//!    lost, and a slot whose end of use is unknown stays in the ring.
//! 5. `acquire` on an empty ring sleeps until a slot comes back. An owner that needs a second slot while it holds one
//!    can wait for ever; the pipeline never does that.
//!
//! The tests below run this protocol under loom, in every interleaving of two users and a device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::in_flight::InFlight;
use super::marks::Mark;
use crate::error::Result;
use crate::sync::{Condvar, Mutex, lock};

/// A point in time that ends a use.
pub(crate) trait Fence {
    /// Whether it was reached.
    fn reached(&self) -> Result<bool>;
    /// Blocks until it was reached.
    fn wait(&self) -> Result<()>;
}

impl Fence for Arc<Mark> {
    fn reached(&self) -> Result<bool> {
        self.query()
    }
    fn wait(&self) -> Result<()> {
        self.synchronize()
    }
}

/// How long an acquirer waited for a slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SlotWait {
    pub(crate) waited: bool,
    pub(crate) time: Duration,
}

/// The ring proper: tokens of type `T` and their fences.
#[derive(Debug)]
pub(crate) struct Ring<T, F> {
    free: Mutex<VecDeque<(T, Option<F>)>>,
    returned: Condvar,
}

impl<T: Copy, F: Fence> Ring<T, F> {
    pub(crate) fn new(slots: impl IntoIterator<Item = T>) -> Self {
        Self { free: Mutex::new(slots.into_iter().map(|slot| (slot, None)).collect()), returned: Condvar::new() }
    }

    /// Takes the slot that came back first, ready for use.
    pub(crate) fn acquire(&self) -> Result<(T, SlotWait)> {
        self.acquire_while(|_| ()).map(|(slot, (), stall)| (slot, stall))
    }

    /// The same with something to do before the wait.
    pub(crate) fn acquire_while<R>(&self, prepare: impl FnOnce(&T) -> R) -> Result<(T, R, SlotWait)> {
        let (slot, fence, start) = {
            let mut free = lock(&self.free);
            let mut start = None;
            loop {
                match free.pop_front() {
                    Some((slot, fence)) => break (slot, fence, start),
                    None => {
                        start.get_or_insert_with(Instant::now);
                        free = self.returned.wait(free).unwrap_or_else(std::sync::PoisonError::into_inner);
                    }
                }
            }
        };
        let mut taken = Taken { ring: self, slot, fence, kept: false };
        let (prepared, stall) = taken.pass(start, prepare)?;
        taken.kept = true;
        Ok((slot, prepared, stall))
    }

    /// Gives a slot back, with the fence that ends its use.
    pub(crate) fn release(&self, slot: T, fence: Option<F>) {
        lock(&self.free).push_back((slot, fence));
        self.returned.notify_one();
    }

    /// Waits for the fences of the slots in the ring.
    pub(crate) fn settle(&self) -> Result<()> {
        for _ in 0..self.idle() {
            let (slot, _) = self.acquire()?;
            self.release(slot, None);
        }
        Ok(())
    }

    /// Slots in the ring, reached or not.
    pub(crate) fn idle(&self) -> usize {
        lock(&self.free).len()
    }
}

impl<T: Copy> Ring<T, Arc<Mark>> {
    /// Gives a slot back that may still be in use.
    pub(crate) fn give_back(&self, slot: InFlight<T>) {
        let (slot, end) = slot.into_parts();
        self.release(slot, end);
    }
}

/// A slot on its way from the ring to its owner. It goes back with its fence unless it is kept.
struct Taken<'a, T: Copy, F: Fence> {
    ring: &'a Ring<T, F>,
    slot: T,
    fence: Option<F>,
    kept: bool,
}

impl<T: Copy, F: Fence> Taken<'_, T, F> {
    /// Waits for the fence. What is prepared before it was reached is part of the wait; if that took as long as the wait
    /// would have, there was none.
    fn pass<R>(&self, start: Option<Instant>, prepare: impl FnOnce(&T) -> R) -> Result<(R, SlotWait)> {
        let before = stall(start);
        let reached = || self.fence.as_ref().map_or(Ok(true), Fence::reached);
        if reached()? {
            return Ok((prepare(&self.slot), before));
        }
        let start = start.unwrap_or_else(Instant::now);
        let prepared = prepare(&self.slot);
        if reached()? {
            return Ok((prepared, before));
        }
        self.fence.as_ref().map_or(Ok(()), Fence::wait)?;
        Ok((prepared, stall(Some(start))))
    }
}

impl<T: Copy, F: Fence> Drop for Taken<'_, T, F> {
    fn drop(&mut self) {
        if !self.kept {
            self.ring.release(self.slot, self.fence.take());
        }
    }
}

fn stall(start: Option<Instant>) -> SlotWait {
    SlotWait { waited: start.is_some(), time: start.map_or(Duration::ZERO, |start| start.elapsed()) }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::error::Error;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
    use loom::thread;

    /// What a slot really is: its bytes may be touched by one side at a time, the host or the device.
    #[derive(Default)]
    struct Slot {
        owners: AtomicUsize,
        device_busy: AtomicBool,
    }

    /// An event of a device that ends the slot's use at some later point.
    struct DeviceEvent(Arc<Slot>);

    impl Fence for DeviceEvent {
        fn reached(&self) -> Result<bool> {
            Ok(!self.0.device_busy.load(SeqCst))
        }
        fn wait(&self) -> Result<()> {
            while self.0.device_busy.load(SeqCst) {
                thread::yield_now();
            }
            Ok(())
        }
    }

    fn use_once(ring: &Ring<usize, DeviceEvent>, slots: &[Arc<Slot>]) -> Arc<Slot> {
        let (index, _) = ring.acquire().unwrap();
        let slot = slots[index].clone();
        assert_eq!(slot.owners.fetch_add(1, SeqCst), 0, "a slot has one owner");
        assert!(!slot.device_busy.load(SeqCst), "a slot is handed out after its last use has ended");
        slot.device_busy.store(true, SeqCst);
        slot.owners.fetch_sub(1, SeqCst);
        ring.release(index, Some(DeviceEvent(slot.clone())));
        slot
    }

    /// Two users share a ring of one slot, and the device ends each use at any later moment.
    #[test]
    fn loom_one_owner_and_no_early_reuse() {
        loom::model(|| {
            let slots = vec![Arc::new(Slot::default())];
            let ring = Arc::new(Ring::new(0..1));
            let other = {
                let (ring, slots) = (ring.clone(), slots.clone());
                thread::spawn(move || use_once(&ring, &slots).device_busy.store(false, SeqCst))
            };
            use_once(&ring, &slots).device_busy.store(false, SeqCst);
            other.join().unwrap();
            assert_eq!(lock(&ring.free).len(), 1, "every slot is back");
        });
    }

    /// A waiter on an empty ring is woken by the release, whenever it comes.
    #[test]
    fn loom_no_lost_wake_up() {
        loom::model(|| {
            let ring: Arc<Ring<usize, DeviceEvent>> = Arc::new(Ring::new(0..1));
            let (held, _) = ring.acquire().unwrap();
            let waiter = {
                let ring = ring.clone();
                thread::spawn(move || {
                    let (slot, _) = ring.acquire().unwrap();
                    ring.release(slot, None);
                })
            };
            ring.release(held, None);
            waiter.join().unwrap();
            assert_eq!(lock(&ring.free).len(), 1);
        });
    }

    /// A slot may be taken by another between the wake-up and the look: who was woken looks again.
    #[test]
    fn loom_woken_waiter_may_find_nothing() {
        loom::model(|| {
            let ring: Arc<Ring<usize, DeviceEvent>> = Arc::new(Ring::new(0..1));
            let (held, _) = ring.acquire().unwrap();
            let waiter = {
                let ring = ring.clone();
                thread::spawn(move || {
                    let (slot, _) = ring.acquire().unwrap();
                    ring.release(slot, None);
                })
            };
            ring.release(held, None);
            let (again, _) = ring.acquire().unwrap();
            ring.release(again, None);
            waiter.join().unwrap();
            assert_eq!(lock(&ring.free).len(), 1);
        });
    }

    struct Broken;
    impl Fence for Broken {
        fn reached(&self) -> Result<bool> {
            Ok(false)
        }
        fn wait(&self) -> Result<()> {
            Err(Error::InvalidOption { option: "fence", value: "broken".to_owned(), remedy: String::new() })
        }
    }

    /// A fence that fails gives the slot back to the ring and the error to each of two users.
    #[test]
    fn loom_failed_fence_loses_no_slot() {
        loom::model(|| {
            let ring: Arc<Ring<usize, Broken>> = Arc::new(Ring::new(0..1));
            let (slot, _) = ring.acquire().unwrap();
            ring.release(slot, Some(Broken));
            let other = {
                let ring = ring.clone();
                thread::spawn(move || assert!(ring.acquire().is_err()))
            };
            assert!(ring.acquire().is_err());
            other.join().unwrap();
            assert_eq!(lock(&ring.free).len(), 1);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    struct Recorded(Rc<Cell<usize>>, bool);
    impl Fence for Recorded {
        fn reached(&self) -> Result<bool> {
            Ok(self.1)
        }
        fn wait(&self) -> Result<()> {
            self.0.set(self.0.get() + 1);
            Ok(())
        }
    }

    #[test]
    fn slots_come_out_in_the_order_they_came_back_and_stalls_are_told() {
        let waits = Rc::new(Cell::new(0));
        let ring = Ring::new(0..3);
        let (a, b, c) = (ring.acquire().unwrap().0, ring.acquire().unwrap().0, ring.acquire().unwrap().0);
        assert_eq!((a, b, c, ring.idle()), (0, 1, 2, 0));
        ring.release(b, Some(Recorded(waits.clone(), true)));
        ring.release(a, Some(Recorded(waits.clone(), false)));
        let (first, stall) = ring.acquire().unwrap();
        assert_eq!((first, stall.waited, waits.get()), (1, false, 0), "a reached fence costs no wait");
        let (second, stall) = ring.acquire().unwrap();
        assert_eq!((second, stall.waited, waits.get()), (0, true, 1));
    }

    struct Late(Rc<Cell<bool>>);
    impl Fence for Late {
        fn reached(&self) -> Result<bool> {
            Ok(self.0.get())
        }
        fn wait(&self) -> Result<()> {
            self.0.set(true);
            Ok(())
        }
    }

    #[test]
    fn what_is_prepared_knows_the_slot_and_comes_before_the_wait() {
        let reached = Rc::new(Cell::new(false));
        let ring = Ring::new([7]);
        let (slot, _) = ring.acquire().unwrap();
        ring.release(slot, Some(Late(reached.clone())));
        let (slot, seen, stall) = ring.acquire_while(|&slot| (slot, reached.get())).unwrap();
        assert_eq!((slot, seen, stall.waited), (7, (7, false), true));
        ring.release(slot, Some(Late(reached.clone())));
        reached.set(false);
        let (_, (), stall) = ring.acquire_while(|_| reached.set(true)).unwrap();
        assert_eq!(stall, SlotWait::default(), "it was reached meanwhile: that was work, not waiting");
        let panics = || ring.acquire_while(|_| panic!("on purpose"));
        ring.release(7, None);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert_eq!(ring.idle(), 1, "nothing that goes wrong meanwhile loses a slot");
    }
}
