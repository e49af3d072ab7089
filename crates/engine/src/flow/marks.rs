//! Marks: points in streams that end the use of something, made of events that are reused.
//!
//! [Note: a refused recording] Work that was accepted uses its memory until the mark behind it is reached, even if the
//! recording of that mark is refused. So a refused recording is tried once more. If that is refused too, the event
//! still stands for an earlier point, which was reached long ago. The mark then remembers the stream: the next query or
//! wait records it first, and returns an error if that is refused again. So memory never counts as free because of an
//! event from an earlier use.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use forebay_device::{Event, SharedDevice, Stream};

use crate::error::Result;
use crate::sync::{Mutex, lock};

/// The events of one device that are not in use.
#[derive(Debug)]
pub(crate) struct Marks {
    device: SharedDevice,
    timed: bool,
    free: Mutex<Vec<Event>>,
}

impl Marks {
    pub(crate) fn new(device: SharedDevice) -> Arc<Self> {
        Arc::new(Self { device, timed: false, free: Mutex::new(Vec::new()) })
    }

    /// Marks that also carry a time.
    pub(crate) fn timed(device: SharedDevice) -> Arc<Self> {
        Arc::new(Self { device, timed: true, free: Mutex::new(Vec::new()) })
    }

    /// A mark of the caller's own. An event is made only if none is free.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Arc<Mark>> {
        let free = lock(&self.free).pop();
        let event = match free {
            Some(event) => event,
            None if self.timed => self.device.timed_event()?,
            None => self.device.event()?,
        };
        Ok(Arc::new(Mark { event, unrecorded: Mutex::new(None), order: AtomicU64::new(0), home: self.clone() }))
    }
}

/// A point in a stream. Its event is free again when the last reference is dropped.
#[derive(Debug)]
pub(crate) struct Mark {
    event: Event,
    /// The stream whose end this is, if both attempts to record it were refused.
    unrecorded: Mutex<Option<Stream>>,
    order: AtomicU64,
    home: Arc<Marks>,
}

impl Mark {
    /// Marks the present end of a stream. On an error the mark still stands for that end or a later one; see [Note: a
    /// refused recording].
    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        let record = || self.home.device.record(&self.event, stream);
        let Err(error) = record() else {
            *lock(&self.unrecorded) = None;
            return Ok(());
        };
        *lock(&self.unrecorded) = record().is_err().then(|| stream.clone());
        Err(error.into())
    }

    /// Whether the point was reached.
    pub(crate) fn query(&self) -> Result<bool> {
        self.make_up()?;
        Ok(self.home.device.query(&self.event)?)
    }

    /// Blocks until the point was reached.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.make_up()?;
        Ok(self.home.device.synchronize(&self.event)?)
    }

    /// Makes what is submitted to a stream from now on wait for the point.
    pub(crate) fn wait(&self, stream: &Stream) -> Result<()> {
        self.make_up()?;
        Ok(self.home.device.wait(stream, &self.event)?)
    }

    /// Records what could not be recorded when it should have been.
    fn make_up(&self) -> Result<()> {
        let mut unrecorded = lock(&self.unrecorded);
        if let Some(stream) = &*unrecorded {
            self.home.device.record(&self.event, stream)?;
            *unrecorded = None;
        }
        Ok(())
    }

    /// The time between two timed marks that were both reached, in nanoseconds.
    pub(crate) fn elapsed_ns(&self, end: &Self) -> Result<u64> {
        Ok(self.home.device.elapsed_ns(&self.event, &end.event)?)
    }

    /// The event, for clocks.
    pub(crate) fn event(&self) -> &Event {
        &self.event
    }

    /// Its place among the marks of one lane, larger for later ones; known once the lane has recorded it.
    pub(crate) fn order(&self) -> u64 {
        self.order.load(Relaxed)
    }

    pub(crate) fn set_order(&self, order: u64) {
        self.order.store(order, Relaxed);
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        lock(&self.home.free).push(self.event.clone());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use forebay_device::fault::{Call, Misbehaviour};
    use forebay_device::{Device, Fault, Kernel, open};

    #[test]
    fn a_mark_that_could_not_be_recorded_is_no_earlier_point() {
        let fault = Fault::wrap(open("cpu").unwrap());
        let (stream, other) = (fault.stream("late").unwrap(), fault.stream("other").unwrap());
        let marks = Marks::new(fault.clone());
        let (mark, behind) = (marks.take().unwrap(), marks.take().unwrap());
        let refuse = |times| (0..times).for_each(|nth| fault.on(Call::Record, nth, Misbehaviour::Fail));
        mark.record(&stream).unwrap();
        mark.synchronize().unwrap();
        for refusals in [1, 2] {
            fault.launch(&stream, &Kernel::Spin { ns: 500_000_000 }).unwrap();
            // After one refusal it is recorded all the same, and the error is returned. After two it is not recorded.
            refuse(refusals);
            mark.record(&stream).unwrap_err();
            assert!(!mark.query().unwrap(), "the stream is not done");
            mark.synchronize().unwrap();
            assert!(mark.query().unwrap());
        }
        fault.launch(&stream, &Kernel::Spin { ns: 500_000_000 }).unwrap();
        refuse(5);
        mark.record(&stream).unwrap_err();
        mark.query().unwrap_err();
        mark.synchronize().unwrap_err();
        mark.wait(&other).unwrap_err();
        // Recorded now: what waits for it waits for the stream.
        mark.wait(&other).unwrap();
        behind.record(&other).unwrap();
        assert!(!behind.query().unwrap());
        behind.synchronize().unwrap();
        assert!(mark.query().unwrap());
    }

    #[test]
    fn events_are_used_again_and_forget_what_they_were_for() {
        let device = open("cpu").unwrap();
        let (marks, stream) = (Marks::new(device.clone()), device.stream("any").unwrap());
        let first = marks.take().unwrap();
        first.set_order(3);
        first.record(&stream).unwrap();
        drop((first.clone(), first));
        let again = marks.take().unwrap();
        assert_eq!((again.order(), lock(&marks.free).len()), (0, 0));
        let other = marks.take().unwrap();
        drop((again, other));
        assert_eq!(lock(&marks.free).len(), 2);
    }
}
