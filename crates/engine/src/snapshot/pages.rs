//! Which pages of a snapshot are still needed unchanged, and who may read or change them when.
//!
//! [Note: the pages' protocol]
//! The memory of a snapshot stays in use. It is divided into pages. A page is in one of four states:
//!
//! ```text
//!            begin_read .. end_read, until nothing is left to write
//!        +-------------------------------------------------------------+
//!        |                                                             v
//!      Live --begin_protect--> Copying --end_copy--> Copied ---------> Done
//!                               (block)              (block)        (block is free)
//! ```
//! 1. The writer reads a page between `begin_read` and `end_read`: from the memory itself while the page is Live, from its
//!    copy once it is Copied. While a page is being copied, the writer waits.
//! 2. A step calls `begin_protect` before it changes a page. A page that is Done or Copied may be changed at once. A Live
//!    page gets a block; the caller copies it and calls `end_copy`. The caller waits while the writer reads the page,
//!    while another thread copies it, and while no block is free.
//! 3. The number of blocks is fixed: it is the budget. A block is free again when its page is Done. A caller that finds no
//!    free block waits for the writer, and the writer needs no block to go on: so every wait ends.
//! 4. `finish` ends the snapshot, whether the save succeeded or failed: every wait returns, every page may be changed, and
//!    nothing is left to read. A read that runs at that moment is void, and `end_read` says so: the page may have been
//!    changed meanwhile.
//! 5. The writer yields to steps: between two reads it calls `pause`, which lasts while a step runs, so that the step has
//!    the cores and the memory bandwidth. Once that step has waited for a block it needs the writer, and the pause ends. A
//!    writer that holds a page never pauses, and a step always ends or comes to need a block: so every pause ends. The
//!    limit that `pause` takes is for steps that follow each other without a gap; the protocol does not need it.
//!
//! [Note: who is woken]
//! Each kind of wait has its own condition variable, notified only by a change that can end such a wait:
//!
//! - `page_changed`: a page became Copied or Done, a block became free, or the last reader left a page for which there is
//!   a block. Steps, copiers and readers of a page that is being copied wait for it.
//! - `may_write`: the last running step ended, or a step needs the writer. Writers that pause wait for it.
//! - `over`: the snapshot ended. Copiers that are held to a rate wait for it.
//!
//! `finish` notifies all three. The tests below run the protocol under loom, in every interleaving of a writer, a step and
//! a copier.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex, MutexGuard, lock};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageState {
    Live,
    Copying(usize),
    Copied(usize),
    Done,
}

#[derive(Debug, Clone, Copy)]
struct Page {
    state: PageState,
    readers: u32,
    /// Bytes of the page that are still to be written; unknown until the files have been planned.
    left: Option<u64>,
}

#[derive(Debug)]
struct PagesInner {
    pages: Vec<Page>,
    free: Vec<usize>,
    is_over: bool,
    /// How many steps are running.
    steps: usize,
    /// Whether one of them has waited for a block.
    is_awaited: bool,
    pauses: u64,
}

/// Where the writer finds a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// In the memory itself.
    Live,
    /// In a block.
    Copy(usize),
    /// Nowhere: the snapshot was given up.
    Gone,
}

/// What a thread has to do before a page may be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Duty {
    /// Nothing.
    None,
    /// Copy the page into this block, then call `end_copy`.
    Copy(usize),
}

#[derive(Debug)]
pub(super) struct Pages {
    inner: Mutex<PagesInner>,
    page_changed: Condvar,
    may_write: Condvar,
    over: Condvar,
}

impl Pages {
    pub(super) fn new(pages: usize, blocks: usize) -> Self {
        let page = Page { state: PageState::Live, readers: 0, left: None };
        let inner = PagesInner {
            pages: vec![page; pages],
            free: (0..blocks).rev().collect(),
            is_over: false,
            steps: 0,
            is_awaited: false,
            pauses: 0,
        };
        Self { inner: Mutex::new(inner), page_changed: Condvar::new(), may_write: Condvar::new(), over: Condvar::new() }
    }

    /// Says how many bytes of each page will be written. A page of which no byte will be written is Done.
    pub(super) fn plan(&self, bytes: &[u64]) {
        let mut inner = lock(&self.inner);
        for (number, &bytes) in bytes.iter().enumerate() {
            inner.pages[number].left = Some(bytes);
            inner.settle(number);
        }
        self.page_changed.notify_all();
    }

    pub(super) fn begin_read(&self, number: usize) -> Source {
        let mut inner = lock(&self.inner);
        loop {
            if inner.is_over {
                return Source::Gone;
            }
            let page = &mut inner.pages[number];
            let source = match page.state {
                PageState::Live => Source::Live,
                PageState::Copied(block) => Source::Copy(block),
                PageState::Copying(_) => {
                    inner = self.wait_for_page(inner);
                    continue;
                }
                PageState::Done => return Source::Gone,
            };
            page.readers += 1;
            return source;
        }
    }

    /// Returns whether the bytes read are those of the moment of the snapshot.
    #[must_use]
    pub(super) fn end_read(&self, number: usize, bytes: u64) -> bool {
        let mut inner = lock(&self.inner);
        let page = &mut inner.pages[number];
        page.readers -= 1;
        page.left = page.left.map(|left| left.saturating_sub(bytes));
        inner.settle(number);
        let page = inner.pages[number];
        let may_be_copied = page.state == PageState::Live && page.readers == 0 && !inner.free.is_empty();
        if page.state == PageState::Done || may_be_copied {
            self.page_changed.notify_all();
        }
        !inner.is_over
    }

    /// Returns what a step has to do before it may change a page, and how long it waited for the writer.
    pub(super) fn begin_protect(&self, number: usize) -> (Duty, Option<Duration>) {
        let mut inner = lock(&self.inner);
        let mut start = None;
        loop {
            if let Some(duty) = inner.duty(number) {
                return (duty, start.map(|start: Instant| start.elapsed()));
            }
            // Waiting for another thread's copy of the page is no wait for the writer.
            if inner.pages[number].state == PageState::Live {
                start.get_or_insert_with(Instant::now);
            }
            if inner.free.is_empty() && !inner.is_awaited {
                inner.is_awaited = true;
                self.may_write.notify_all();
            }
            inner = self.wait_for_page(inner);
        }
    }

    /// The same for a copier, which runs ahead of the step: no step waits yet, so the writer need not hurry.
    pub(super) fn begin_copy_ahead(&self, number: usize) -> Duty {
        let mut inner = lock(&self.inner);
        loop {
            if let Some(duty) = inner.duty(number) {
                return duty;
            }
            inner = self.wait_for_page(inner);
        }
    }

    pub(super) fn end_copy(&self, number: usize) {
        let mut inner = lock(&self.inner);
        if let PageState::Copying(block) = inner.pages[number].state {
            inner.pages[number].state = PageState::Copied(block);
            inner.settle(number);
        }
        self.page_changed.notify_all();
    }

    /// Waits for `time`, or until the snapshot has ended. For a thread that holds no page.
    pub(super) fn rest(&self, time: Duration) {
        let inner = lock(&self.inner);
        drop(wait_while(&self.over, inner, time, |inner| !inner.is_over));
    }

    /// A step begins: from now on the writer yields to it.
    pub(super) fn begin_step(&self) {
        let mut inner = lock(&self.inner);
        inner.is_awaited &= inner.steps > 0;
        inner.steps += 1;
    }

    pub(super) fn end_step(&self) {
        let mut inner = lock(&self.inner);
        inner.steps -= 1;
        if inner.steps == 0 {
            self.may_write.notify_all();
        }
    }

    /// Returns when the writer may go on, at the latest after `limit`, and how long that took.
    pub(super) fn pause(&self, limit: Duration) -> Duration {
        let mut inner = lock(&self.inner);
        if !inner.has_precedence() {
            return Duration::ZERO;
        }
        inner.pauses += 1;
        let start = Instant::now();
        drop(wait_while(&self.may_write, inner, limit, PagesInner::has_precedence));
        start.elapsed()
    }

    /// How often the writer has paused.
    pub(super) fn pauses(&self) -> u64 {
        lock(&self.inner).pauses
    }

    pub(super) fn finish(&self) {
        lock(&self.inner).is_over = true;
        self.page_changed.notify_all();
        self.may_write.notify_all();
        self.over.notify_all();
    }

    /// Whether every page may be changed at once.
    pub(super) fn is_safe(&self) -> bool {
        let inner = lock(&self.inner);
        inner.is_over || inner.pages.iter().all(|page| matches!(page.state, PageState::Done | PageState::Copied(_)))
    }

    fn wait_for_page<'a>(&self, inner: MutexGuard<'a, PagesInner>) -> MutexGuard<'a, PagesInner> {
        self.page_changed.wait(inner).unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits while `goes_on` holds, at most for `limit`.
fn wait_while<'a>(
    changed: &Condvar,
    mut inner: MutexGuard<'a, PagesInner>,
    limit: Duration,
    goes_on: impl Fn(&PagesInner) -> bool,
) -> MutexGuard<'a, PagesInner> {
    let start = Instant::now();
    while goes_on(&inner) {
        let left = limit.saturating_sub(start.elapsed());
        if left.is_zero() {
            break;
        }
        inner = changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    inner
}

impl PagesInner {
    /// Whether a step is running that does not need the writer.
    fn has_precedence(&self) -> bool {
        self.steps > 0 && !self.is_awaited && !self.is_over
    }

    /// What must be done before a page may be changed; `None` while the caller must wait. A page that must be copied
    /// has its block from here on.
    fn duty(&mut self, number: usize) -> Option<Duty> {
        if self.is_over {
            return Some(Duty::None);
        }
        let page = self.pages[number];
        match page.state {
            PageState::Done | PageState::Copied(_) => Some(Duty::None),
            PageState::Live if page.readers == 0 => {
                let block = self.free.pop()?;
                self.pages[number].state = PageState::Copying(block);
                Some(Duty::Copy(block))
            }
            PageState::Live | PageState::Copying(_) => None,
        }
    }

    /// Makes a page Done when nothing of it is left to write.
    fn settle(&mut self, number: usize) {
        let page = &mut self.pages[number];
        if page.left != Some(0) || page.readers > 0 {
            return;
        }
        match page.state {
            PageState::Live | PageState::Done => page.state = PageState::Done,
            PageState::Copied(block) => {
                page.state = PageState::Done;
                self.free.push(block);
            }
            // Settled when the copy has ended.
            PageState::Copying(_) => {}
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use loom::thread;

    /// What a step writes over everything.
    const CHANGED: usize = 1;
    /// What an unused block holds.
    const NOTHING: usize = 9;

    /// What a page holds at the moment of the snapshot.
    fn first(page: usize) -> usize {
        100 + page
    }

    /// Pages with their memory, and blocks.
    struct World {
        pages: Pages,
        memory: Vec<AtomicUsize>,
        blocks: Vec<AtomicUsize>,
    }

    impl World {
        fn new(pages: usize, blocks: usize) -> Arc<Self> {
            Arc::new(Self {
                pages: Pages::new(pages, blocks),
                memory: (0..pages).map(|page| AtomicUsize::new(first(page))).collect(),
                blocks: (0..blocks).map(|_| AtomicUsize::new(NOTHING)).collect(),
            })
        }

        fn save(&self) -> usize {
            self.pages.plan(&vec![1; self.memory.len()]);
            (0..self.memory.len())
                .filter(|&page| {
                    // Without a limit: the protocol does not need one.
                    self.pages.pause(Duration::MAX);
                    self.read(page)
                })
                .count()
        }

        /// Reads one byte of a page; false if the snapshot was given up.
        fn read(&self, page: usize) -> bool {
            let found = match self.pages.begin_read(page) {
                Source::Live => self.memory[page].load(SeqCst),
                Source::Copy(block) => self.blocks[block].load(SeqCst),
                Source::Gone => return false,
            };
            let is_whole = self.pages.end_read(page, 1);
            assert!(!is_whole || found == first(page), "page {page}: the writer sees {found}");
            is_whole
        }

        fn step(&self) {
            self.pages.begin_step();
            for page in 0..self.memory.len() {
                self.protect(page);
                self.memory[page].store(CHANGED, SeqCst);
            }
            self.pages.end_step();
        }

        fn protect(&self, page: usize) {
            let (duty, _) = self.pages.begin_protect(page);
            self.fulfil(page, duty);
        }

        fn copy_ahead(&self, page: usize) {
            let duty = self.pages.begin_copy_ahead(page);
            self.fulfil(page, duty);
        }

        fn fulfil(&self, page: usize, duty: Duty) {
            if let Duty::Copy(block) = duty {
                self.blocks[block].store(self.memory[page].load(SeqCst), SeqCst);
                self.pages.end_copy(page);
            }
        }

        fn free_blocks(&self) -> usize {
            lock(&self.pages.inner).free.len()
        }
    }

    fn beside(world: &Arc<World>, work: impl FnOnce(&World) + 'static) -> thread::JoinHandle<()> {
        let world = world.clone();
        thread::spawn(move || work(&world))
    }

    /// For three threads and several waits, with a bound on how often a thread is preempted.
    fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.check(body);
    }

    /// With fewer blocks than pages the step waits for the writer, and both end.
    #[test]
    fn loom_snapshot_is_of_one_moment() {
        for blocks in [0, 1] {
            loom::model(move || {
                let world = World::new(2, blocks);
                let stepping = beside(&world, World::step);
                assert_eq!(world.save(), 2);
                stepping.join().unwrap();
                assert_eq!(world.free_blocks(), blocks, "every block is back");
            });
        }
    }

    /// The writer goes on when the step has ended, and not before.
    #[test]
    fn loom_pause_lasts_as_long_as_the_step() {
        loom::model(|| {
            let world = World::new(1, 1);
            world.pages.begin_step();
            let saving = beside(&world, |world| {
                world.pages.pause(Duration::MAX);
                assert_eq!(world.memory[0].load(SeqCst), CHANGED);
            });
            world.memory[0].store(CHANGED, SeqCst);
            world.pages.end_step();
            saving.join().unwrap();
        });
    }

    /// Two steps of two optimizers that share a snapshot: a writer that one step needs does not pause for the other.
    #[test]
    fn loom_writer_that_is_needed_does_not_pause() {
        model(3, || {
            let world = World::new(2, 0);
            let steps = [0, 1].map(|page| {
                beside(&world, move |world| {
                    world.pages.begin_step();
                    world.protect(page);
                    world.memory[page].store(CHANGED, SeqCst);
                    world.pages.end_step();
                })
            });
            assert_eq!(world.save(), 2);
            steps.into_iter().for_each(|step| step.join().unwrap());
        });
    }

    /// A copier runs ahead of the step.
    #[test]
    fn loom_copier_runs_ahead() {
        loom::model(|| {
            let world = World::new(1, 1);
            let stepping = beside(&world, World::step);
            let copying = beside(&world, |world| world.copy_ahead(0));
            assert_eq!(world.save(), 1);
            stepping.join().unwrap();
            copying.join().unwrap();
            assert_eq!(world.free_blocks(), 1, "every block is back");
        });
    }

    /// A copier that waits for a block ends when the snapshot does, whether it began to wait before or after that.
    #[test]
    fn loom_copier_ends_with_the_snapshot() {
        for reads in [0, 1, 2] {
            loom::model(move || {
                let world = World::new(2, 0);
                world.pages.plan(&[1, 1]);
                let copying = beside(&world, |world| (0..2).for_each(|page| world.copy_ahead(page)));
                (0..reads).for_each(|page| assert!(world.read(page)));
                world.pages.finish();
                copying.join().unwrap();
            });
        }
    }

    /// A copier waits for a block, and needs no end of the snapshot to get one: every change that matters wakes it.
    #[test]
    fn loom_copier_waits_for_a_block() {
        model(3, || {
            let world = World::new(2, 1);
            world.pages.plan(&[1, 1]);
            let copying = beside(&world, |world| (0..2).for_each(|page| world.copy_ahead(page)));
            assert!(world.read(0));
            assert!(world.read(1));
            copying.join().unwrap();
            assert_eq!(world.free_blocks(), 1, "every block is back");
        });
    }

    /// A writer reads a page in two pieces. A step that waits between them copies the page as soon as it can.
    #[test]
    fn loom_step_copies_between_two_pieces() {
        model(3, || {
            let world = World::new(1, 1);
            world.pages.plan(&[2]);
            let stepping = beside(&world, World::step);
            assert!(world.read(0));
            // Nothing more is read until the step has ended: what it waits for has happened.
            stepping.join().unwrap();
            assert!(world.read(0));
            assert_eq!(world.free_blocks(), 1, "every block is back");
        });
    }

    /// A copier at rest ends with the snapshot.
    #[test]
    fn loom_rest_ends_with_the_snapshot() {
        loom::model(|| {
            let world = World::new(1, 1);
            let resting = beside(&world, |world| world.pages.rest(Duration::MAX));
            world.pages.finish();
            resting.join().unwrap();
        });
    }

    /// Two files have a part of the same page each. The page's block is free when both have been read.
    #[test]
    fn loom_two_writers_share_a_page() {
        for blocks in [0, 1] {
            model(3, move || {
                let world = World::new(2, blocks);
                world.pages.plan(&[2, 1]);
                let stepping = beside(&world, World::step);
                let saving = beside(&world, |world| assert!(world.read(0)));
                assert!(world.read(0));
                assert!(world.read(1));
                saving.join().unwrap();
                stepping.join().unwrap();
                assert_eq!(world.free_blocks(), blocks, "every block is back");
            });
        }
    }

    /// A step waits for pages of which nothing will be written.
    #[test]
    fn loom_plan_frees_what_is_not_written() {
        loom::model(|| {
            let world = World::new(2, 0);
            let stepping = beside(&world, World::step);
            world.pages.plan(&[0, 0]);
            stepping.join().unwrap();
            assert!(world.pages.is_safe());
        });
    }

    /// The same while a page is being copied: its block is free afterwards, whichever ends last.
    #[test]
    fn loom_plan_during_a_copy_gives_the_block_back() {
        loom::model(|| {
            let world = World::new(1, 1);
            let copying = beside(&world, |world| world.copy_ahead(0));
            world.pages.plan(&[0]);
            copying.join().unwrap();
            assert_eq!(world.free_blocks(), 1, "every block is back");
            assert!(world.pages.is_safe());
        });
    }

    /// A step goes on when the snapshot is given up, wherever the step waits.
    #[test]
    fn loom_giving_up_frees_the_step() {
        loom::model(|| {
            let world = World::new(2, 0);
            let stepping = beside(&world, World::step);
            world.pages.finish();
            stepping.join().unwrap();
            assert_eq!(world.pages.begin_read(0), Source::Gone);
        });
    }

    /// A snapshot is given up while it is read: bytes that the writer accepts are right, and the writer does not wait.
    #[test]
    fn loom_giving_up_voids_a_read_under_way() {
        for blocks in [0, 1] {
            model(3, move || {
                let world = World::new(1, blocks);
                let stepping = beside(&world, World::step);
                let giving_up = beside(&world, |world| world.pages.finish());
                world.save();
                stepping.join().unwrap();
                giving_up.join().unwrap();
            });
        }
    }

    /// The snapshot ends between the beginning and the end of a copy.
    #[test]
    fn loom_copy_ends_after_the_snapshot() {
        loom::model(|| {
            let world = World::new(1, 1);
            let (duty, _) = world.pages.begin_protect(0);
            let saving = beside(&world, |world| assert_eq!(world.save(), 0));
            world.pages.finish();
            assert_eq!(duty, Duty::Copy(0));
            world.pages.end_copy(0);
            saving.join().unwrap();
            assert_eq!(world.pages.begin_protect(0).0, Duty::None);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;

    /// Pages, and pieces of them, that other threads go through meanwhile.
    const PIECES: usize = 50;
    /// A thread that waits once sleeps once, and again where it finds the lock taken.
    const FEW: u64 = 10;

    /// How often this thread has slept so far.
    fn sleeps() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
        line.trim().parse().unwrap()
    }

    /// Runs `wait` in a thread while `work` runs here, and returns how often that thread slept. `end` ends its wait.
    fn sleeps_during(
        pages: &Arc<Pages>,
        wait: impl FnOnce(&Pages) + Send + 'static,
        is_waiting: impl Fn(&PagesInner) -> bool,
        mut work: impl FnMut(usize),
        end: impl FnOnce(),
    ) -> u64 {
        let theirs = pages.clone();
        let waiting = thread::spawn(move || {
            let before = sleeps();
            wait(&theirs);
            sleeps() - before
        });
        while !is_waiting(&lock(&pages.inner)) {
            thread::yield_now();
        }
        for piece in 0..PIECES {
            work(piece);
            // Time for the thread to wake up, if this has woken it.
            thread::sleep(Duration::from_millis(2));
        }
        end();
        waiting.join().unwrap()
    }

    #[test]
    fn a_paused_writer_sleeps_through_the_pages_of_a_step() {
        let pages = Arc::new(Pages::new(PIECES, PIECES));
        pages.begin_step();
        let found = sleeps_during(
            &pages,
            |pages| assert!(pages.pause(Duration::MAX) > Duration::ZERO),
            |inner| inner.pauses > 0,
            |page| {
                assert!(matches!(pages.begin_protect(page).0, Duty::Copy(_)));
                pages.end_copy(page);
            },
            || pages.end_step(),
        );
        assert!(found < FEW, "woken {found} times by {PIECES} pages");
    }

    #[test]
    fn a_step_sleeps_through_pieces_that_free_nothing() {
        let pages = Arc::new(Pages::new(2, 0));
        pages.plan(&[1, PIECES as u64 + 1]);
        let found = sleeps_during(
            &pages,
            |pages| assert_eq!(pages.begin_protect(0).0, Duty::None),
            |inner| inner.is_awaited,
            |_| {
                assert_eq!(pages.begin_read(1), Source::Live);
                assert!(pages.end_read(1, 1));
            },
            || {
                assert_eq!(pages.begin_read(0), Source::Live);
                assert!(pages.end_read(0, 1));
            },
        );
        assert!(found < FEW, "woken {found} times by {PIECES} pieces");
    }

    #[test]
    fn a_copier_that_rests_sleeps_until_the_end() {
        let pages = Arc::new(Pages::new(PIECES, PIECES));
        let rests = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let begun = rests.clone();
        let found = sleeps_during(
            &pages,
            move |pages| {
                begun.store(true, std::sync::atomic::Ordering::SeqCst);
                pages.rest(Duration::from_secs(600));
            },
            |_| rests.load(std::sync::atomic::Ordering::SeqCst),
            |page| {
                assert!(matches!(pages.begin_protect(page).0, Duty::Copy(_)));
                pages.end_copy(page);
            },
            || pages.finish(),
        );
        assert!(found < FEW, "woken {found} times by {PIECES} pages");
    }
}
