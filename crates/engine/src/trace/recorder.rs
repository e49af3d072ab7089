//! The recorder: a ring of records of fixed size, and the one switch of the process.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use forebay_device::{PerProcess, SharedDevice, Stream};

use super::clock::{DeviceClock, Pace, Pending, Timed};
use super::pools;
use super::span::{Counter, Record, Span};
use crate::error::{Error, Result};

/// Whether a trace is being recorded; in a forked child also where its parent records one.
static ON: AtomicBool = AtomicBool::new(false);
/// The recorder of this process; see [Note: a trace and a fork] in the parent module.
static CURRENT: PerProcess<Mutex<Option<Arc<Recorder>>>> = PerProcess::new();

/// Spans of work whose end was not reached are looked through when there are this many.
const LOOK_AT: usize = 64;
/// More of them than this are dropped, oldest first, and counted.
const MOST_PENDING: usize = 4096;

// These locks are std's also under loom: a trace is no part of the protocols that loom tests.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How to record.
#[derive(Debug, Clone, Copy)]
pub struct TraceOptions {
    /// Spans and values of counters that are kept; older ones are dropped and counted.
    pub capacity: usize,
}

impl Default for TraceOptions {
    fn default() -> Self {
        Self { capacity: 1 << 18 }
    }
}

/// What has spans to report that nobody asked for yet.
pub(crate) trait Source: Send + Sync {
    /// Reports them, waiting for work that has them.
    fn report(&self, recorder: &Recorder);
}

/// A trace that is being recorded.
pub struct Recorder {
    id: u64,
    zero: Instant,
    zero_unix_ns: u64,
    capacity: usize,
    records: Mutex<Records>,
    clocks: Mutex<Vec<(usize, Option<Arc<DeviceClock>>)>>,
    pending: Mutex<VecDeque<Pending>>,
    sources: Mutex<Vec<Weak<dyn Source>>>,
    given: Mutex<Vec<String>>,
}

#[derive(Default)]
struct Records {
    /// The oldest in front.
    kept: VecDeque<Record>,
    dropped: u64,
}

/// A trace that has ended.
#[derive(Debug, Clone, Default)]
pub struct Recording {
    /// The wall clock at time 0.
    pub zero_unix_ns: u64,
    /// How long it took.
    pub seconds: f64,
    /// How many records it kept.
    pub capacity: usize,
    /// Records that were dropped.
    pub dropped: u64,
    /// Spans and counters, in the order of their begins.
    pub records: Vec<Record>,
    /// Names of [`Label::Given`](super::Label::Given).
    pub given: Vec<String>,
    /// Whether work was left out because its device has no times.
    pub is_partial: bool,
}

impl Recording {
    /// The spans alone.
    pub fn spans(&self) -> impl Iterator<Item = &Span> {
        self.records.iter().filter_map(|record| match record {
            Record::Span(span) => Some(span),
            Record::Counter(..) => None,
        })
    }
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("id", &self.id).field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

/// Whether a trace is being recorded: one relaxed load.
#[inline]
pub fn is_on() -> bool {
    ON.load(Relaxed)
}

/// The recorder of this process, if there is one.
#[inline]
pub(crate) fn current() -> Option<Arc<Recorder>> {
    if is_on() { lock(CURRENT.here()).clone() } else { None }
}

/// Begins a trace; a process has one at a time.
pub fn start(options: TraceOptions) -> Result<Arc<Recorder>> {
    static STARTED: AtomicU64 = AtomicU64::new(0);
    if options.capacity == 0 {
        return Err(Error::InvalidOption {
            option: "capacity",
            value: "0".to_owned(),
            remedy: "give the number of spans to keep, at least 1".to_owned(),
        });
    }
    let mut current = lock(CURRENT.here());
    if current.is_some() {
        return Err(Error::InvalidOption {
            option: "trace",
            value: "a second one in this process".to_owned(),
            remedy: "one is being recorded already; end that one first".to_owned(),
        });
    }
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let recorder = Arc::new(Recorder {
        id: STARTED.fetch_add(1, Relaxed) + 1,
        zero: Instant::now(),
        zero_unix_ns: since.as_nanos() as u64,
        capacity: options.capacity,
        // All of its memory now; the system gives pages as they are used.
        records: Mutex::new(Records { kept: VecDeque::with_capacity(options.capacity), dropped: 0 }),
        clocks: Mutex::default(),
        pending: Mutex::default(),
        sources: Mutex::default(),
        given: Mutex::default(),
    });
    pools::now().into_iter().for_each(|counter| recorder.count(counter));
    *current = Some(recorder.clone());
    ON.store(true, Relaxed);
    Ok(recorder)
}

impl Recorder {
    /// Ends the trace: waits for the work whose times are not known yet, and returns all that was recorded.
    pub fn stop(&self) -> Recording {
        {
            let mut current = lock(CURRENT.here());
            if current.as_ref().is_none_or(|current| current.id != self.id) {
                return Recording::default();
            }
            // Nothing new from here on.
            ON.store(false, Relaxed);
            current.take();
        }
        let sources = std::mem::take(&mut *lock(&self.sources));
        sources.iter().filter_map(Weak::upgrade).for_each(|source| source.report(self));
        for pending in std::mem::take(&mut *lock(&self.pending)) {
            pending.wait();
            pending.span().into_iter().for_each(|span| self.push(span));
        }
        let seconds = self.now_ns() as f64 / 1e9;
        let Records { kept, dropped } = std::mem::take(&mut *lock(&self.records));
        let mut records = Vec::from(kept);
        records.sort_by_key(Record::at_ns);
        Recording {
            zero_unix_ns: self.zero_unix_ns,
            seconds,
            capacity: self.capacity,
            dropped,
            records,
            given: std::mem::take(&mut *lock(&self.given)),
            is_partial: lock(&self.clocks).iter().any(|(_, clock)| clock.is_none()),
        }
    }

    /// Unlike any other trace of this process.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn zero(&self) -> Instant {
        self.zero
    }

    /// Adds a span.
    pub fn push(&self, span: Span) {
        self.keep(Record::Span(span));
    }

    /// Adds the values that a counter has now.
    pub fn count(&self, counter: Counter) {
        self.keep(Record::Counter(self.now_ns(), counter));
    }

    fn keep(&self, record: Record) {
        let mut records = lock(&self.records);
        if records.kept.len() == self.capacity {
            records.kept.pop_front();
            records.dropped += 1;
        }
        records.kept.push_back(record);
    }

    /// The number of a name, for [`Label::Given`](super::Label::Given).
    pub fn give(&self, name: &str) -> u32 {
        let mut given = lock(&self.given);
        let at = given.iter().position(|known| known == name).unwrap_or_else(|| {
            given.push(name.to_owned());
            given.len() - 1
        });
        at as u32
    }

    /// Spans so far that were dropped.
    pub fn dropped(&self) -> u64 {
        lock(&self.records).dropped
    }

    /// What has spans that are asked for at the end.
    pub(crate) fn add_source(&self, source: Weak<dyn Source>) {
        let mut sources = lock(&self.sources);
        sources.retain(|known| known.strong_count() > 0);
        sources.push(source);
    }

    /// The clock of a device, made at its first use; `None` if the device has no times.
    pub(crate) fn clock(&self, device: &SharedDevice) -> Option<Arc<DeviceClock>> {
        let key = Arc::as_ptr(device).cast::<()>().addr();
        let mut clocks = lock(&self.clocks);
        if let Some((_, clock)) = clocks.iter().find(|(known, _)| *known == key) {
            return clock.clone();
        }
        let clock = DeviceClock::new(device, self.zero).ok().map(Arc::new);
        clocks.push((key, clock.clone()));
        clock
    }

    pub(super) fn timed(
        self: &Arc<Self>,
        device: &SharedDevice,
        stream: &Stream,
        paced: Option<(&Pace, u64)>,
    ) -> Option<Timed> {
        let clock = self.clock(device)?;
        let untimed_bytes = match paced {
            None => 0,
            Some((pace, bytes)) => match pace.take(clock.pace_ns(), self.now_ns()) {
                Some(untimed_bytes) => untimed_bytes,
                None => {
                    pace.skip(bytes);
                    return None;
                }
            },
        };
        Timed::begin(self, clock, stream, untimed_bytes)
    }

    /// Keeps a span until its end is reached.
    pub(super) fn keep_pending(&self, pending: Pending) {
        let mut all = lock(&self.pending);
        all.push_back(pending);
        if all.len() < LOOK_AT {
            return;
        }
        let mut reached = Vec::new();
        all.retain(|pending| {
            let has_ended = pending.has_ended();
            if has_ended {
                reached.extend(pending.span());
            }
            !has_ended
        });
        let excess = all.len().saturating_sub(MOST_PENDING);
        all.drain(..excess);
        drop(all);
        lock(&self.records).dropped += excess as u64;
        reached.into_iter().for_each(|span| self.push(span));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::{Kind, Label, Pace, waited};
    use super::*;
    use crate::trace::{About, Reason, merge};
    use std::time::Duration;

    /// A process has one trace at a time.
    fn alone() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        lock(&TURN)
    }

    fn span(start_ns: u64, end_ns: u64, owner: u32) -> Span {
        Span { start_ns, end_ns, owner, ..Span::new(Kind::Update, Label::Words("work")) }
    }

    fn owners(recording: &Recording) -> Vec<u32> {
        recording.spans().map(|span| span.owner).collect()
    }

    #[test]
    fn a_full_recorder_drops_the_oldest_and_counts_them() {
        let _alone = alone();
        let recorder = start(TraceOptions { capacity: 5 }).unwrap();
        // Two counters are there from the beginning.
        (0..5).for_each(|i| recorder.push(span(10 * u64::from(i), 10 * u64::from(i) + 5, i)));
        assert_eq!(recorder.dropped(), 2);
        (5..8).for_each(|i| recorder.push(span(10 * u64::from(i), 10 * u64::from(i) + 5, i)));
        let recording = recorder.stop();
        assert_eq!((owners(&recording), recording.dropped, recording.capacity), (vec![3, 4, 5, 6, 7], 5, 5));
        assert!(recorder.stop().records.is_empty(), "it ends once");
    }

    #[test]
    fn memory_is_taken_once() {
        let _alone = alone();
        let recorder = start(TraceOptions { capacity: 100 }).unwrap();
        let before = lock(&recorder.records).kept.capacity();
        (0..1000).for_each(|i| recorder.push(span(i, i + 1, 0)));
        assert_eq!(lock(&recorder.records).kept.capacity(), before);
        recorder.stop();
    }

    #[test]
    fn records_of_several_threads_are_all_there_in_the_order_of_their_begins() {
        let _alone = alone();
        let recorder = start(TraceOptions::default()).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                let recorder = &recorder;
                scope.spawn(move || {
                    for i in 0..1000 {
                        let now = recorder.now_ns();
                        recorder.push(span(now, now + i, thread));
                    }
                });
            }
        });
        let recording = recorder.stop();
        let mut counts = [0; 4];
        owners(&recording).into_iter().for_each(|owner| counts[owner as usize] += 1);
        assert_eq!((counts, recording.dropped), ([1000; 4], 0));
        assert!(recording.records.is_sorted_by_key(Record::at_ns));
    }

    #[test]
    fn a_process_has_one_trace_at_a_time_and_none_records_nothing() {
        let _alone = alone();
        waited(Duration::from_secs(1), Reason::Other, "before", 0);
        assert!(current().is_none() && !is_on());
        let recorder = start(TraceOptions::default()).unwrap();
        let refused = start(TraceOptions::default()).unwrap_err().to_string();
        assert!(refused.contains("one is being recorded already"), "{refused}");
        assert!(start(TraceOptions { capacity: 0 }).unwrap_err().to_string().contains("capacity"));
        waited(Duration::from_micros(50), Reason::Slot, "within", 3);
        waited(Duration::from_micros(5), Reason::Slot, "too short to be one", 3);
        let background = std::thread::spawn(|| {
            super::super::in_background();
            waited(Duration::from_millis(50), Reason::Slot, "of a thread of the engine's", 3);
        });
        background.join().unwrap();
        let recording = recorder.stop();
        assert_eq!(owners(&recording), [3]);
        // The next one begins with nothing of it.
        let next = start(TraceOptions::default()).unwrap();
        assert_ne!(next.id(), recorder.id());
        recorder.push(span(1, 2, 9));
        assert!(owners(&next.stop()).is_empty());
    }

    #[test]
    fn a_lane_is_timed_no_more_often_than_its_pace_and_loses_no_bytes() {
        let pace = Pace::default();
        let (mut timed, mut bytes) = (Vec::new(), 0);
        for now_ns in (1000..100_000).step_by(1000) {
            match pace.take(10_000, now_ns) {
                Some(untimed) => {
                    timed.push(now_ns);
                    bytes += untimed + 7;
                }
                None => pace.skip(7),
            }
        }
        assert!(timed.windows(2).all(|pair| pair[1] - pair[0] == 10_000), "{timed:?}");
        assert_eq!(bytes + pace.take(10_000, 1_000_000).unwrap(), 99 * 7);
        assert!(pace.take(10_000, 5).is_some(), "a later trace starts from 0");
        assert!((0..9).all(|now_ns| Pace::default().take(0, now_ns) == Some(0)));
    }

    fn file(recording: &Recording, rank: u32) -> serde_json::Value {
        let mut file = Vec::new();
        recording.write(&mut file, &About { rank, ranks: 2, ..About::default() }).unwrap();
        serde_json::from_slice(&file).unwrap()
    }

    #[test]
    fn ranks_are_merged_by_the_wall_clock() {
        let made = |zero_unix_ns, rank| {
            let records = vec![Record::Span(span(1000, 2000, 0)), Record::Counter(500, Counter::Ring(7))];
            (format!("rank {rank}"), file(&Recording { zero_unix_ns, records, ..Recording::default() }, rank))
        };
        let merged = merge(vec![made(5_000_000_000, 1), made(5_000_004_000, 0)]).unwrap();
        let events = merged["traceEvents"].as_array().unwrap();
        let times = |ph: &str| -> Vec<(u64, f64)> {
            let of = events.iter().filter(|event| event["ph"] == ph);
            of.map(|event| (event["pid"].as_u64().unwrap(), event["ts"].as_f64().unwrap())).collect()
        };
        assert_eq!(times("X"), [(0, 5.0), (1, 1.0)]);
        assert_eq!(times("C"), [(0, 4.5), (1, 0.5)]);
        let header = &merged["forebay"];
        assert_eq!((&header["merged"], &header["zero_unix_ns"]), (&true.into(), &5_000_000_000u64.into()));
        assert_eq!(header["ranks"].as_array().unwrap().len(), 2);
        let twice = merge(vec![made(0, 1), made(1, 1)]).unwrap_err().to_string();
        assert!(twice.contains("rank 1 too"), "{twice}");
        let again = merge(vec![("merged".to_owned(), merged)]).unwrap_err().to_string();
        assert!(again.contains("no trace of one rank"), "{again}");
        assert!(merge(Vec::new()).is_err());
        let (name, mut other) = made(0, 0);
        other["forebay"]["schema"] = 9.into();
        assert!(merge(vec![(name, other)]).unwrap_err().to_string().contains("schema is 9"));
    }

    #[test]
    fn spans_that_cross_are_on_lines_of_their_own() {
        let spans = [(0, 100), (10, 20), (20, 30), (25, 120), (100, 130), (140, 150)];
        let records = spans.map(|(start_ns, end_ns)| Record::Span(span(start_ns, end_ns, 0))).into();
        let file = file(&Recording { records, ..Recording::default() }, 0);
        let tids: Vec<u64> = file["traceEvents"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|event| event["tid"].as_u64().unwrap())
            .collect();
        assert_eq!(tids, [4, 4, 4, 104, 4, 4]);
        let names: Vec<&str> =
            file["traceEvents"].as_array().unwrap().iter().filter_map(|event| event["args"]["name"].as_str()).collect();
        assert_eq!(names, ["rank 0", "update", "update (2)"]);
    }
}
