//! The host's own threads: updates of host memory, while the device works.
//!
//! A pool serves the memory of any number of devices and any number of users at once ([`HostThreads::shared`]). Work is cut by bytes into shares of
//! [`SHARE_ELEMENTS`] elements or more, independent of the sizes of tensors. The threads take share after share, and go
//! from one piece of work to the next without a barrier. Threads sleep while there is nothing to do. Each may run on
//! any core of the process: torch has threads of its own, and the system's scheduler places all of them.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use crate::cpu::update::{Sweep, Unit};
use crate::error::{Error, Result};
use crate::memory::{DeviceId, Region, check_home, fresh_key};
use crate::registry::PerProcess;
use crate::thread::{Cores, ThreadHandle};
use crate::update::{Rule, Scalars, Segment};

/// Elements of the smallest share: small enough that the threads end together, large enough that taking one costs nothing.
const SHARE_ELEMENTS: usize = 32 << 10;

/// Elements of the largest one. A core has to find its streams anew in every share.
const MOST_SHARE_ELEMENTS: usize = 256 << 10;

/// Elements of the next share, given the elements left and the number of threads: large at first, small at last.
fn share_elements(left: usize, threads: usize) -> usize {
    (left / (4 * threads.max(1))).clamp(SHARE_ELEMENTS, MOST_SHARE_ELEMENTS)
}

/// Cuts inside a tensor fall on multiples of this, so that every share starts aligned as its tensor does, and no two
/// shares have elements of one block, whose scale only one of them may write.
const CUT_ELEMENTS: usize = crate::update::BLOCK as usize;

/// How to make the pool.
#[derive(Debug, Clone, Default)]
pub struct HostOptions {
    /// The number of threads; by default one for each core of this process.
    pub threads: Option<usize>,
    /// Which kernel: `portable`, `avx2` or `avx512`; by default the best that this CPU has.
    pub kernel: Option<String>,
}

impl HostOptions {
    /// Refuses what cannot work here, and returns how many threads there will be.
    pub fn check(&self) -> Result<usize> {
        Unit::named(self.kernel.as_deref())?;
        let cores = host_cores();
        let threads = self.threads.unwrap_or(cores);
        if threads == 0 || threads > cores {
            return Err(Error::InvalidOption {
                option: "host_threads",
                value: threads.to_string(),
                remedy: format!("this process may use {cores} cores; give 1 to {cores}"),
            });
        }
        Ok(threads)
    }
}

/// One update of host memory, cut into segments.
#[derive(Debug, Clone)]
pub struct HostUpdate {
    /// The rule.
    pub rule: &'static Rule,
    /// The parts of parameters to update, all of them on the host. No two may overlap.
    pub segments: Vec<Segment>,
    /// The sets of scalars that the segments name.
    pub scalars: Arc<[Scalars]>,
    /// Every gradient is multiplied with this.
    pub grad_scale: f32,
    /// As [`Update::trust_master`](crate::Update::trust_master): weights with a master are written and never read.
    pub trust_master: bool,
}

impl HostUpdate {
    /// Refuses what is not host memory of this device, or does not fit together.
    fn check(&self, device: DeviceId) -> Result<()> {
        for segment in &self.segments {
            for (region, _) in segment.operands() {
                check_home("host update", region, device)?;
                if !region.place().is_host() {
                    return Err(Error::BadOperands {
                        operation: "host update",
                        reason: format!("{region:?} is not host memory"),
                    });
                }
            }
            segment.check(self.rule, self.scalars.len(), self.trust_master)?;
        }
        Ok(())
    }

    /// Every region the update touches, and whether it writes it.
    #[cfg(feature = "testing")]
    pub(crate) fn accesses(&self) -> Vec<(&Region, bool)> {
        self.segments.iter().flat_map(Segment::operands).collect()
    }
}

/// Cores that this process may use, as many as its control group's quota allows; see [`Cores::here`].
pub fn host_cores() -> usize {
    crate::cpu::threads()
}

/// The names of the kernels that this CPU can run, the default first.
pub fn host_kernels() -> Vec<&'static str> {
    Unit::available().into_iter().rev().map(Unit::name).collect()
}

/// Threads that update host memory.
pub struct HostThreads {
    shared: Arc<Shared>,
    workers: Vec<ThreadHandle>,
    unit: Unit,
    cores: Cores,
    pid: u32,
}

impl std::fmt::Debug for HostThreads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostThreads({}, {})", self.threads(), self.kernel())
    }
}

#[derive(Default)]
struct Shared {
    queue: Mutex<JobQueue>,
    changed: Condvar,
}

#[derive(Default)]
struct JobQueue {
    jobs: VecDeque<Arc<Job>>,
    closed: bool,
}

/// A run of elements of one segment.
struct SegmentRange {
    segment: usize,
    range: Range<usize>,
}

enum Task {
    Update {
        update: HostUpdate,
        ranges: Vec<SegmentRange>,
        unit: Unit,
    },
    /// Adds nothing to every word, which the compiler cannot know: reads and writes all of it.
    Touch {
        region: Region,
    },
    Panic,
}

struct Job {
    task: Task,
    /// What one thread takes at a time: ranges of an update, or bytes of a region.
    shares: Vec<Range<usize>>,
    next: AtomicUsize,
    left: AtomicUsize,
    failed: AtomicBool,
    outcome: Mutex<Option<Result<()>>>,
    done: Condvar,
}

/// Work that the pool was given. Whoever drops it waits for its end, so that the memory it uses can go.
#[must_use = "dropping it waits for its end and loses its outcome"]
pub struct HostWork {
    job: Arc<Job>,
    key: u64,
}

impl std::fmt::Debug for HostWork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (left, all) = (self.job.left.load(Ordering::Relaxed), self.job.shares.len());
        write!(f, "HostWork#{}({left} of {all} shares left)", self.key)
    }
}

impl HostWork {
    /// Blocks until the work has ended.
    pub fn wait(self) -> Result<()> {
        self.job.wait()
    }

    /// Whether the work has ended.
    pub fn is_done(&self) -> bool {
        self.job.left.load(Ordering::Acquire) == 0
    }

    #[cfg(feature = "testing")]
    pub(crate) fn key(&self) -> u64 {
        self.key
    }
}

impl Drop for HostWork {
    fn drop(&mut self) {
        let _ = self.job.wait();
        // A thread that has just ended its share lets go of the job in a moment, and with it of the memory.
        while Arc::strong_count(&self.job) > 1 {
            std::thread::yield_now();
        }
    }
}

impl HostThreads {
    /// Starts the threads.
    pub fn new(options: &HostOptions) -> Result<Self> {
        let (threads, unit) = (options.check()?, Unit::named(options.kernel.as_deref())?);
        let (shared, cores) = (Arc::new(Shared::default()), Cores::here());
        let mut pool = Self { shared, workers: Vec::with_capacity(threads), unit, cores, pid: std::process::id() };
        for index in 0..threads {
            let shared = pool.shared.clone();
            pool.workers.push(cores.spawn(&format!("forebay-host-{index}"), move || shared.work())?);
        }
        Ok(pool)
    }

    /// The pool that this process has for such options: started by the first who asks, ended with the last. Work of
    /// several users queues up, and none of it waits for anything but threads, so no user can hold up another for ever.
    pub fn shared(options: &HostOptions) -> Result<Arc<Self>> {
        static POOLS: PerProcess<Mutex<Vec<Weak<HostThreads>>>> = PerProcess::new();
        let (threads, unit, cores) = (options.check()?, Unit::named(options.kernel.as_deref())?, Cores::here());
        // Locked while it starts: two threads that ask at once get one pool.
        let mut pools = lock(POOLS.here());
        pools.retain(|pool| pool.strong_count() > 0);
        // The process may have been given other cores since a pool was started.
        let fits = |pool: &Arc<Self>| (pool.threads(), pool.unit, pool.cores) == (threads, unit, cores);
        if let Some(pool) = pools.iter().filter_map(Weak::upgrade).find(fits) {
            return Ok(pool);
        }
        let pool = Arc::new(Self::new(options)?);
        pools.push(Arc::downgrade(&pool));
        Ok(pool)
    }

    /// How many threads there are.
    pub fn threads(&self) -> usize {
        self.workers.len()
    }

    /// Where they run.
    pub fn cores(&self) -> Cores {
        self.cores
    }

    /// Which kernel they run.
    pub fn kernel(&self) -> &'static str {
        self.unit.name()
    }

    /// Starts an update of host memory that belongs to a device. The caller has waited for the work that uses it.
    pub(crate) fn update(&self, device: DeviceId, update: HostUpdate) -> Result<HostWork> {
        update.check(device)?;
        let (mut ranges, mut shares) = (Vec::new(), Vec::new());
        let (mut first, mut elements) = (0, 0);
        let mut left: usize = update.segments.iter().map(|segment| segment.elements() as usize).sum();
        let mut share = share_elements(left, self.threads());
        for (segment, of) in update.segments.iter().enumerate() {
            let (mut start, end) = (0, of.elements() as usize);
            while start < end {
                let room = (share - elements).next_multiple_of(CUT_ELEMENTS);
                let stop = end.min(start + room);
                ranges.push(SegmentRange { segment, range: start..stop });
                elements += stop - start;
                start = stop;
                if elements >= share {
                    shares.push(first..ranges.len());
                    left -= elements;
                    (first, elements, share) = (ranges.len(), 0, share_elements(left, self.threads()));
                }
            }
        }
        if first < ranges.len() {
            shares.push(first..ranges.len());
        }
        self.submit(Task::Update { update, ranges, unit: self.unit }, shares)
    }

    /// Starts reading and writing back every word of a region of host memory, changing none: the pace of the memory.
    pub fn touch(&self, region: &Region) -> Result<HostWork> {
        if !region.place().is_host() || !region.bytes().is_multiple_of(4) || !region.addr().is_multiple_of(4) {
            return Err(Error::BadOperands {
                operation: "touch",
                reason: format!("{region:?} is not host memory of whole words"),
            });
        }
        let (bytes, share) = (region.bytes() as usize, SHARE_ELEMENTS * 4);
        let shares = (0..bytes).step_by(share).map(|start| start..(start + share).min(bytes)).collect();
        self.submit(Task::Touch { region: region.clone() }, shares)
    }

    /// Starts work that panics on the threads, for tests.
    #[doc(hidden)]
    pub fn fail(&self) -> Result<HostWork> {
        self.submit(Task::Panic, vec![0..1, 1..2])
    }

    fn submit(&self, task: Task, shares: Vec<Range<usize>>) -> Result<HostWork> {
        // The threads stay behind in the parent: a child that queued work would wait for ever.
        if self.pid != std::process::id() {
            return Err(Error::Forked { device: "the host's threads".to_owned() });
        }
        let job = Arc::new(Job {
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(shares.len()),
            failed: AtomicBool::new(false),
            outcome: Mutex::new(shares.is_empty().then_some(Ok(()))),
            done: Condvar::new(),
            task,
            shares,
        });
        if !job.shares.is_empty() {
            lock(&self.shared.queue).jobs.push_back(job.clone());
            self.shared.changed.notify_all();
        }
        Ok(HostWork { job, key: fresh_key() })
    }
}

impl Drop for HostThreads {
    fn drop(&mut self) {
        // A forked child has no such threads, and the lock may be held by one of the parent's for ever.
        if self.pid != std::process::id() {
            return;
        }
        lock(&self.shared.queue).closed = true;
        self.shared.changed.notify_all();
        self.workers.drain(..).for_each(|worker| drop(worker.join()));
    }
}

impl Shared {
    fn work(&self) {
        while let Some(job) = self.next() {
            while let Some(share) = job.take() {
                job.run(share);
            }
        }
    }

    /// The oldest job with a share to take. What was accepted is worked off before the pool ends.
    fn next(&self) -> Option<Arc<Job>> {
        let mut queue = lock(&self.queue);
        loop {
            while queue.jobs.front().is_some_and(|job| job.is_taken()) {
                queue.jobs.pop_front();
            }
            match queue.jobs.front() {
                Some(job) => return Some(job.clone()),
                None if queue.closed => return None,
                None => queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl Job {
    fn is_taken(&self) -> bool {
        self.next.load(Ordering::Relaxed) >= self.shares.len()
    }

    fn take(&self) -> Option<Range<usize>> {
        self.shares.get(self.next.fetch_add(1, Ordering::Relaxed)).cloned()
    }

    /// Runs one share; the last one to end says so.
    fn run(&self, share: Range<usize>) {
        if !self.failed.load(Ordering::Relaxed)
            && let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.task.run(share)))
        {
            self.failed.store(true, Ordering::Relaxed);
            let reason = crate::cpu::worker::panic_text(&*panic);
            *lock(&self.outcome) = Some(Err(Error::StreamFailed { stream: "the host's threads".to_owned(), reason }));
        }
        // Whoever sees the end sees what all shares wrote.
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            lock(&self.outcome).get_or_insert(Ok(()));
            self.done.notify_all();
        }
    }

    /// The outcome, once every share has ended: a failed one is known before the others are done with the memory.
    fn wait(&self) -> Result<()> {
        let mut outcome = lock(&self.outcome);
        while self.left.load(Ordering::Acquire) > 0 {
            outcome = self.done.wait(outcome).unwrap_or_else(PoisonError::into_inner);
        }
        outcome.clone().unwrap_or(Ok(()))
    }
}

impl Task {
    fn run(&self, share: Range<usize>) {
        match self {
            Self::Update { update, ranges, unit } => {
                for part in &ranges[share] {
                    let segment = &update.segments[part.segment];
                    let scalars = &update.scalars[segment.scalars as usize];
                    let how = Sweep { scale: update.grad_scale, scalars, trust_master: update.trust_master };
                    // SAFETY: `HostUpdate::check` refused anything that is not live, aligned host memory of the right
                    // size, and operands of one segment that overlap. Ranges are disjoint, each is taken once, and the
                    // job keeps the memory alive. Whoever touches it meanwhile breaks the contract of `Device` and
                    // gets unspecified numbers.
                    unsafe { unit.sweep(update.rule, segment, part.range.clone(), how) };
                }
            }
            Self::Touch { region } => {
                let nothing = std::hint::black_box(0u32);
                let first = (region.addr() + share.start) as *mut u32;
                // SAFETY: the region is live, aligned host memory of whole words, and shares are disjoint.
                let words = unsafe { std::slice::from_raw_parts_mut(first, share.len() / 4) };
                words.iter_mut().for_each(|word| *word = word.wrapping_add(nothing));
            }
            Self::Panic => panic!("an update failed on purpose"),
        }
    }
}

/// Nothing here leaves a lock's data half changed, so a panic elsewhere does not make it unusable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(options: &HostOptions) -> String {
        HostThreads::new(options).unwrap_err().to_string()
    }

    #[test]
    fn thread_counts_are_checked_against_the_cores() {
        let cores = host_cores();
        assert_eq!(HostThreads::new(&HostOptions::default()).unwrap().threads(), cores);
        for threads in [0, cores + 1] {
            let said = refused(&HostOptions { threads: Some(threads), kernel: None });
            assert_eq!(
                said,
                format!("invalid host_threads: {threads}; this process may use {cores} cores; give 1 to {cores}")
            );
        }
        assert!(refused(&HostOptions { threads: None, kernel: Some("mmx".to_owned()) }).contains("host_kernel: mmx"));
    }

    #[test]
    fn users_with_the_same_options_share_one_pool() {
        let one = || HostOptions { threads: Some(1), kernel: None };
        let portable = || HostOptions { threads: Some(1), kernel: Some("portable".to_owned()) };
        let pools: Vec<_> = std::thread::scope(|scope| {
            let users: Vec<_> = (0..4).map(|_| scope.spawn(|| HostThreads::shared(&one()).unwrap())).collect();
            users.into_iter().map(|user| user.join().unwrap()).collect()
        });
        assert!(pools.iter().all(|pool| Arc::ptr_eq(pool, &pools[0])));
        let (other, again) = (HostThreads::shared(&portable()).unwrap(), HostThreads::shared(&one()).unwrap());
        assert_eq!((other.kernel(), other.threads(), Arc::ptr_eq(&again, &pools[0])), ("portable", 1, true));
        // The default is as many threads as there are cores.
        let by_default = HostThreads::shared(&HostOptions::default()).unwrap();
        assert_eq!(Arc::ptr_eq(&by_default, &pools[0]), host_cores() == 1);
        // It ends with its last user, and the next one starts another.
        let (weak, first) = (Arc::downgrade(&pools[0]), Arc::downgrade(&other));
        drop((pools, again, by_default));
        assert!(weak.upgrade().is_none() && first.upgrade().is_some());
        assert_eq!(HostThreads::shared(&one()).unwrap().threads(), 1);
        for threads in [0, host_cores() + 1] {
            let refused = HostThreads::shared(&HostOptions { threads: Some(threads), kernel: None });
            assert!(refused.unwrap_err().to_string().contains("host_threads"));
        }
    }

    #[test]
    fn shares_are_large_at_first_and_small_at_last() {
        assert_eq!(share_elements(1 << 30, 16), MOST_SHARE_ELEMENTS);
        assert_eq!(share_elements(1 << 20, 2), 1 << 17);
        assert_eq!(share_elements(1 << 20, 16), SHARE_ELEMENTS);
        assert_eq!(share_elements(0, 2), SHARE_ELEMENTS);
    }

    #[test]
    fn touching_changes_nothing() {
        let pool = HostThreads::new(&HostOptions::default()).unwrap();
        let buffer = crate::memory::Buffer::pageable(SHARE_ELEMENTS as u64 * 9 + 4).unwrap();
        let pattern: Vec<u8> = (0..buffer.bytes()).map(|i| (i % 251) as u8).collect();
        // SAFETY: fresh memory of that length, which nobody else knows.
        let memory = unsafe { std::slice::from_raw_parts_mut(buffer.addr() as *mut u8, pattern.len()) };
        memory.copy_from_slice(&pattern);
        pool.touch(&buffer.all()).unwrap().wait().unwrap();
        assert!(*memory == *pattern);
        assert!(pool.touch(&buffer.region(0, 3).unwrap()).is_err());
    }

    /// Also after the child has unmapped the stacks of the parent's threads. The C library keeps 40 MiB of unused stacks
    /// and unmaps the others when a thread ends.
    #[test]
    fn a_forked_child_drops_the_pool_whoever_holds_its_lock() {
        let mut pools = Vec::new();
        while pools.iter().map(HostThreads::threads).sum::<usize>() < 64 {
            pools.push(HostThreads::new(&HostOptions::default()).unwrap());
        }
        let shared = pools[0].shared.clone();
        let held = lock(&shared.queue);
        // SAFETY: the child starts a thread, drops the pools and ends, without running destructors of others.
        match unsafe { libc::fork() } {
            -1 => panic!("fork: {}", std::io::Error::last_os_error()),
            0 => {
                // SAFETY: a child that hangs is ended by the signal.
                unsafe { libc::alarm(10) };
                let ended = Cores::here().spawn("child", || ()).is_ok_and(|own| own.join().is_ok());
                drop(pools);
                // SAFETY: as above.
                unsafe { libc::_exit(i32::from(!ended)) }
            }
            child => {
                let mut status = -1;
                // SAFETY: waits for the child from above.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                assert_eq!(status, 0, "14: the child hung; 11: it read a stack that is gone");
            }
        }
        drop(held);
    }

    #[test]
    fn a_panic_on_a_thread_is_the_outcome_and_the_pool_goes_on() {
        let pool = HostThreads::new(&HostOptions::default()).unwrap();
        for _ in 0..3 {
            let error = pool.submit(Task::Panic, vec![0..1, 1..2, 2..3]).unwrap().wait().unwrap_err();
            assert!(error.to_string().contains("an update failed on purpose"), "{error}");
        }
        let buffer = crate::memory::Buffer::pageable(4096).unwrap();
        pool.touch(&buffer.all()).unwrap().wait().unwrap();
        drop(pool.submit(Task::Panic, vec![0..1, 1..2]).unwrap());
    }
}
