//! Rates: how fast a stream of bytes may go, and how long a writer may pause for steps.

use std::time::{Duration, Instant};

/// The longest pause of a stream after one piece.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// A writer may pause for steps this many times as long as it has worked: it keeps a quarter of the time for itself.
const PAUSE_PER_WORK: u32 = 3;

/// How long a writer may pause before it has worked at all.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// How long one thread of a writer has run, and how much of that time it has paused for steps.
#[derive(Debug)]
pub(crate) struct WriterPauses {
    start: Instant,
    paused: Duration,
}

impl WriterPauses {
    pub(crate) fn new() -> Self {
        Self { start: Instant::now(), paused: Duration::ZERO }
    }

    /// How long the thread may pause now.
    pub(super) fn allowance(&self) -> Duration {
        self.allowance_after(self.start.elapsed())
    }

    /// How long the thread may pause when `elapsed` has passed since its start. The share that is left to the thread is
    /// fixed, so a save ends however closely step follows step.
    fn allowance_after(&self, elapsed: Duration) -> Duration {
        let worked = elapsed.saturating_sub(self.paused);
        (worked * PAUSE_PER_WORK + FIRST_PAUSE).saturating_sub(self.paused)
    }

    /// Adds a pause.
    pub(super) fn add_pause(&mut self, pause: Duration) {
        self.paused += pause;
    }
}

/// Keeps a stream of bytes below a rate.
#[derive(Debug)]
pub(crate) struct Pace {
    bytes_per_s: Option<f64>,
    start: Instant,
    moved: u64,
}

impl Pace {
    pub(crate) fn new(bytes_per_s: Option<f64>) -> Self {
        Self { bytes_per_s, start: Instant::now(), moved: 0 }
    }

    /// Adds bytes, and sleeps if they came too early.
    pub(crate) fn moved(&mut self, bytes: u64) {
        std::thread::sleep(self.ahead(bytes));
    }

    /// Adds bytes, and returns how much too early they came.
    pub(super) fn ahead(&mut self, bytes: u64) -> Duration {
        self.ahead_after(bytes, self.start.elapsed())
    }

    /// Adds bytes when `elapsed` has passed since the start, and returns how much too early they came.
    fn ahead_after(&mut self, bytes: u64, elapsed: Duration) -> Duration {
        let Some(rate) = self.bytes_per_s else { return Duration::ZERO };
        self.moved += bytes;
        // At a rate close to zero the due time does not fit into a duration.
        let due = Duration::try_from_secs_f64(self.moved as f64 / rate).unwrap_or(LONGEST_PAUSE);
        due.saturating_sub(elapsed).min(LONGEST_PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    /// Steps that follow each other without a gap leave the writer a quarter of the time. After long work a long pause is
    /// allowed.
    #[test]
    fn pauses_are_a_share_of_the_time() {
        let (mut pauses, mut clock) = (WriterPauses { start: Instant::now(), paused: Duration::ZERO }, Duration::ZERO);
        let mut worked = Duration::ZERO;
        while clock < Duration::from_secs(1000) {
            let pause = pauses.allowance_after(clock);
            let work = Duration::from_millis(7);
            pauses.paused += pause;
            worked += work;
            clock += pause + work;
        }
        let share = worked.as_secs_f64() / clock.as_secs_f64();
        assert!((0.24..0.26).contains(&share), "{share}");
        let pauses = WriterPauses { start: Instant::now(), paused: Duration::ZERO };
        assert_eq!(pauses.allowance_after(Duration::from_secs(2)), Duration::from_secs(7));
    }

    /// A stream that takes no time of its own ends after its bytes divided by the rate, whatever its pieces are.
    #[test]
    fn pace_is_bytes_over_time() {
        for pieces in [vec![MB; 40], vec![40 * MB], vec![3 * MB, 7 * MB, 1, 30 * MB - 1]] {
            let mut pace = Pace::new(Some(10e6));
            let mut clock = Duration::ZERO;
            for bytes in pieces {
                clock += pace.ahead_after(bytes, clock);
            }
            assert!(clock.abs_diff(Duration::from_secs(4)) < Duration::from_micros(1), "{clock:?}");
        }
    }

    /// A disk slower than the rate is not slowed down. After a pause of its own the stream catches up, and no more.
    #[test]
    fn pace_waits_only_for_who_is_early() {
        let mut pace = Pace::new(Some(10e6));
        assert_eq!(pace.ahead_after(MB, Duration::from_secs(2)), Duration::ZERO);
        assert_eq!(pace.ahead_after(18 * MB, Duration::from_secs(2)), Duration::ZERO);
        let early = pace.ahead_after(11 * MB, Duration::from_secs(2));
        assert!(early.abs_diff(Duration::from_secs(1)) < Duration::from_micros(1), "{early:?}");
        assert_eq!(Pace::new(None).ahead_after(u64::MAX, Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn pace_of_next_to_nothing_does_not_overflow() {
        for rate in [f64::MIN_POSITIVE, 1e-12, 1e-3] {
            assert_eq!(Pace::new(Some(rate)).ahead_after(u64::MAX, Duration::ZERO), LONGEST_PAUSE);
        }
        assert_eq!(Pace::new(Some(f64::INFINITY)).ahead_after(u64::MAX, Duration::ZERO), Duration::ZERO);
    }
}
