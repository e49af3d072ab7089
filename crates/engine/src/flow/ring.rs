//! The slot ring: a fixed number of slots that are reused in the order in which they come back.
//!
//! [Note: the ring's protocol]
//! 1. A slot has one owner at a time: the ring, or the one who acquired it.
//! 2. A slot comes back with a fence, the mark that ends the device's last use of it; or without one, if the device
//!    never used it. The ring remembers whose use that was, until the slot's next owner has waited for the fence.
//! 3. `acquire` takes the slot that came back first, then waits for its fence, with no lock held. So the owner may do
//!    anything with the slot at once, and other threads may acquire and release meanwhile. While it waits, the owner may
//!    prepare what needs to know the slot and does not touch it.
//! 4. If waiting for the fence fails, the slot goes back with its fence and the caller gets the error: no slot is ever
//!    lost, and a slot whose end of use is unknown stays in the ring.
//! 5. `acquire` on an empty ring sleeps until a slot comes back. An owner that needs a second slot while it holds one
//!    can wait for ever. The pipeline never does that, and users of the host's ring take turns.
//! 6. Any number of users share a ring. `settle` waits for the uses of one user alone, also where another one has
//!    taken the slot out of the ring and is still waiting for its fence. It owns no slot meanwhile, so it cannot hold up
//!    anyone.
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

/// One of those who share a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RingUser(u64);

/// The ring proper: slots by number, and their fences.
#[derive(Debug)]
pub(crate) struct Ring<F> {
    state: Mutex<RingState<F>>,
    returned: Condvar,
}

#[derive(Debug)]
struct RingState<F> {
    /// Slots that nobody owns, the one that came back first in front.
    free: VecDeque<usize>,
    /// By slot: its last use, until the next owner has waited for its end.
    uses: Vec<Option<SlotUse<F>>>,
    users: u64,
}

#[derive(Debug)]
struct SlotUse<F> {
    user: RingUser,
    fence: F,
}

impl<F: Fence + Clone> Ring<F> {
    /// A ring of this many slots.
    pub(crate) fn new(slots: usize) -> Self {
        let state = RingState { free: (0..slots).collect(), uses: (0..slots).map(|_| None).collect(), users: 0 };
        Self { state: Mutex::new(state), returned: Condvar::new() }
    }

    /// A user of its own.
    pub(crate) fn join(&self) -> RingUser {
        let mut state = lock(&self.state);
        state.users += 1;
        RingUser(state.users)
    }

    /// Takes the slot that came back first, ready for use.
    pub(crate) fn acquire(&self) -> Result<(usize, SlotWait)> {
        self.acquire_while(|_| ()).map(|(slot, (), stall)| (slot, stall))
    }

    /// The same with something to do before the wait.
    pub(crate) fn acquire_while<R>(&self, prepare: impl FnOnce(usize) -> R) -> Result<(usize, R, SlotWait)> {
        let (slot, fence, start) = {
            let mut state = lock(&self.state);
            let mut start = None;
            loop {
                match state.free.pop_front() {
                    Some(slot) => break (slot, state.uses[slot].as_ref().map(|used| used.fence.clone()), start),
                    None => {
                        start.get_or_insert_with(Instant::now);
                        state = self.returned.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
                    }
                }
            }
        };
        let mut taken = Taken { ring: self, slot, kept: false };
        let (prepared, stall) = pass(fence, start, || prepare(slot))?;
        taken.kept = true;
        lock(&self.state).uses[slot] = None;
        Ok((slot, prepared, stall))
    }

    /// Gives a slot back, with the fence that ends its use.
    pub(crate) fn release(&self, slot: usize, user: RingUser, fence: Option<F>) {
        let mut state = lock(&self.state);
        state.uses[slot] = fence.map(|fence| SlotUse { user, fence });
        state.free.push_back(slot);
        drop(state);
        self.returned.notify_one();
    }

    /// Waits for the end of all uses of slots that have come back, of one user or of all.
    pub(crate) fn settle(&self, user: Option<RingUser>) -> Result<()> {
        for fence in self.fences(user) {
            if !fence.reached()? {
                fence.wait()?;
            }
        }
        Ok(())
    }

    /// Returns an error if a slot's end of use cannot be known any more.
    pub(crate) fn check(&self) -> Result<()> {
        self.fences(None).iter().try_for_each(|fence| fence.reached().map(drop))
    }

    fn fences(&self, user: Option<RingUser>) -> Vec<F> {
        let state = lock(&self.state);
        let uses = state.uses.iter().flatten().filter(|used| user.is_none_or(|user| user == used.user));
        uses.map(|used| used.fence.clone()).collect()
    }

    /// Slots in the ring, reached or not.
    pub(crate) fn idle(&self) -> usize {
        lock(&self.state).free.len()
    }
}

impl Ring<Arc<Mark>> {
    /// Gives a slot back that may still be in use.
    pub(crate) fn give_back(&self, user: RingUser, slot: InFlight<usize>) {
        let (slot, end) = slot.into_parts();
        self.release(slot, user, end);
    }
}

/// A slot on its way from the ring to its owner. It goes back, still with its fence, unless it is kept.
struct Taken<'a, F: Fence + Clone> {
    ring: &'a Ring<F>,
    slot: usize,
    kept: bool,
}

impl<F: Fence + Clone> Drop for Taken<'_, F> {
    fn drop(&mut self) {
        if !self.kept {
            lock(&self.ring.state).free.push_back(self.slot);
            self.ring.returned.notify_one();
        }
    }
}

/// Waits for a fence. What is prepared before it was reached is part of the wait; if that took as long as the wait would
/// have, there was none.
fn pass<R>(fence: Option<impl Fence>, start: Option<Instant>, prepare: impl FnOnce() -> R) -> Result<(R, SlotWait)> {
    let before = stall(start);
    let reached = || fence.as_ref().map_or(Ok(true), Fence::reached);
    if reached()? {
        return Ok((prepare(), before));
    }
    let start = start.unwrap_or_else(Instant::now);
    let prepared = prepare();
    if reached()? {
        return Ok((prepared, before));
    }
    fence.as_ref().map_or(Ok(()), Fence::wait)?;
    Ok((prepared, stall(Some(start))))
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
    #[derive(Clone)]
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

    fn use_once(ring: &Ring<DeviceEvent>, slots: &[Arc<Slot>]) -> Arc<Slot> {
        let (index, _) = ring.acquire().unwrap();
        let slot = slots[index].clone();
        assert_eq!(slot.owners.fetch_add(1, SeqCst), 0, "a slot has one owner");
        assert!(!slot.device_busy.load(SeqCst), "a slot is handed out after its last use has ended");
        slot.device_busy.store(true, SeqCst);
        slot.owners.fetch_sub(1, SeqCst);
        ring.release(index, ring.join(), Some(DeviceEvent(slot.clone())));
        slot
    }

    /// Two users share a ring of one slot, and the device ends each use at any later moment.
    #[test]
    fn loom_one_owner_and_no_early_reuse() {
        loom::model(|| {
            let slots = vec![Arc::new(Slot::default())];
            let ring = Arc::new(Ring::new(1));
            let other = {
                let (ring, slots) = (ring.clone(), slots.clone());
                thread::spawn(move || use_once(&ring, &slots).device_busy.store(false, SeqCst))
            };
            use_once(&ring, &slots).device_busy.store(false, SeqCst);
            other.join().unwrap();
            assert_eq!(ring.idle(), 1, "every slot is back");
        });
    }

    /// A waiter on an empty ring is woken by the release, whenever it comes.
    #[test]
    fn loom_no_lost_wake_up() {
        loom::model(|| {
            let ring: Arc<Ring<DeviceEvent>> = Arc::new(Ring::new(1));
            let (held, _) = ring.acquire().unwrap();
            let waiter = {
                let ring = ring.clone();
                thread::spawn(move || {
                    let (slot, _) = ring.acquire().unwrap();
                    ring.release(slot, ring.join(), None);
                })
            };
            ring.release(held, ring.join(), None);
            waiter.join().unwrap();
            assert_eq!(ring.idle(), 1);
        });
    }

    /// A slot may be taken by another between the wake-up and the look: who was woken looks again.
    #[test]
    fn loom_woken_waiter_may_find_nothing() {
        loom::model(|| {
            let ring: Arc<Ring<DeviceEvent>> = Arc::new(Ring::new(1));
            let (held, _) = ring.acquire().unwrap();
            let waiter = {
                let ring = ring.clone();
                thread::spawn(move || {
                    let (slot, _) = ring.acquire().unwrap();
                    ring.release(slot, ring.join(), None);
                })
            };
            ring.release(held, ring.join(), None);
            let (again, _) = ring.acquire().unwrap();
            ring.release(again, ring.join(), None);
            waiter.join().unwrap();
            assert_eq!(ring.idle(), 1);
        });
    }

    /// The end of one use, reached at any later moment. It sleeps where a spin would be too much for loom.
    #[derive(Clone)]
    struct UseEnd(Arc<(Mutex<bool>, Condvar)>);

    impl UseEnd {
        fn new() -> Self {
            Self(Arc::new((Mutex::new(false), Condvar::new())))
        }
        fn reach(&self) {
            *lock(&self.0.0) = true;
            self.0.1.notify_all();
        }
    }

    impl Fence for UseEnd {
        fn reached(&self) -> Result<bool> {
            Ok(*lock(&self.0.0))
        }
        fn wait(&self) -> Result<()> {
            let mut reached = lock(&self.0.0);
            while !*reached {
                reached = self.0.1.wait(reached).unwrap();
            }
            Ok(())
        }
    }

    /// Who settles has seen the end of its own use, wherever the slot is: in the ring, with another user that still waits
    /// for the fence, or in that user's hands.
    #[test]
    fn loom_settling_waits_for_a_slot_that_another_user_takes() {
        loom::model(|| {
            let ring = Arc::new(Ring::new(1));
            let (own, ended) = (ring.join(), UseEnd::new());
            let (slot, _) = ring.acquire().unwrap();
            ring.release(slot, own, Some(ended.clone()));
            let other = {
                let ring = ring.clone();
                thread::spawn(move || {
                    let (slot, _) = ring.acquire().unwrap();
                    // Never reached: a use that is not the one that is settled.
                    ring.release(slot, ring.join(), Some(UseEnd::new()));
                })
            };
            let device = {
                let ended = ended.clone();
                thread::spawn(move || ended.reach())
            };
            ring.settle(Some(own)).unwrap();
            assert!(ended.reached().unwrap(), "the use goes on");
            other.join().unwrap();
            device.join().unwrap();
            assert_eq!(ring.idle(), 1);
        });
    }

    #[derive(Clone)]
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
            let ring: Arc<Ring<Broken>> = Arc::new(Ring::new(1));
            let (slot, _) = ring.acquire().unwrap();
            ring.release(slot, ring.join(), Some(Broken));
            let other = {
                let ring = ring.clone();
                thread::spawn(move || assert!(ring.acquire().is_err()))
            };
            assert!(ring.acquire().is_err());
            other.join().unwrap();
            assert_eq!(ring.idle(), 1);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    #[derive(Clone)]
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
        let ring = Ring::new(3);
        let user = ring.join();
        let (a, b, c) = (ring.acquire().unwrap().0, ring.acquire().unwrap().0, ring.acquire().unwrap().0);
        assert_eq!((a, b, c, ring.idle()), (0, 1, 2, 0));
        ring.release(b, user, Some(Recorded(waits.clone(), true)));
        ring.release(a, user, Some(Recorded(waits.clone(), false)));
        let (first, stall) = ring.acquire().unwrap();
        assert_eq!((first, stall.waited, waits.get()), (1, false, 0), "a reached fence costs no wait");
        let (second, stall) = ring.acquire().unwrap();
        assert_eq!((second, stall.waited, waits.get()), (0, true, 1));
    }

    #[derive(Clone)]
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
        let ring = Ring::new(1);
        let user = ring.join();
        let (slot, _) = ring.acquire().unwrap();
        ring.release(slot, user, Some(Late(reached.clone())));
        let (slot, seen, stall) = ring.acquire_while(|slot| (slot, reached.get())).unwrap();
        assert_eq!((slot, seen, stall.waited), (0, (0, false), true));
        ring.release(slot, user, Some(Late(reached.clone())));
        reached.set(false);
        let (_, (), stall) = ring.acquire_while(|_| reached.set(true)).unwrap();
        assert_eq!(stall, SlotWait::default(), "it was reached meanwhile: that was work, not waiting");
        let panics = || ring.acquire_while(|_| panic!("on purpose"));
        ring.release(0, user, None);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert_eq!(ring.idle(), 1, "nothing that goes wrong meanwhile loses a slot");
    }

    #[test]
    fn a_user_settles_its_own_uses_and_keeps_those_that_fail() {
        struct Dead;
        let ring = Ring::new(2);
        let (mine, other) = (ring.join(), ring.join());
        assert_ne!(mine, other);
        let waits = Rc::new(Cell::new(0));
        let (a, b) = (ring.acquire().unwrap().0, ring.acquire().unwrap().0);
        ring.release(a, mine, Some(Recorded(waits.clone(), false)));
        ring.release(b, other, Some(Recorded(waits.clone(), false)));
        ring.settle(Some(mine)).unwrap();
        assert_eq!(waits.get(), 1, "one use is mine");
        ring.settle(None).unwrap();
        assert_eq!((waits.get(), ring.idle()), (3, 2));
        ring.check().unwrap();
        impl Fence for Rc<Dead> {
            fn reached(&self) -> Result<bool> {
                Err(crate::Error::InvalidOption { option: "fence", value: "dead".to_owned(), remedy: String::new() })
            }
            fn wait(&self) -> Result<()> {
                self.reached().map(drop)
            }
        }
        let ring = Ring::new(1);
        let (mine, other) = (ring.join(), ring.join());
        let slot = ring.acquire().unwrap().0;
        ring.release(slot, mine, Some(Rc::new(Dead)));
        ring.settle(Some(other)).unwrap();
        for _ in 0..2 {
            assert!(ring.settle(Some(mine)).is_err() && ring.check().is_err() && ring.acquire().is_err());
            assert_eq!(ring.idle(), 1);
        }
    }
}
