//! Which pages of a snapshot are still needed as they were, and who may touch them when.
//!
//! [Note: the pages' protocol]
//! A snapshot is of memory that goes on being used. It is divided into pages, each in one of four states:
//!
//! ```text
//!            begin_read .. end_read, until nothing is left to write
//!        +-------------------------------------------------------------+
//!        |                                                             v
//!      Live --begin_protect--> Copying --end_copy--> Copied ---------> Done
//!                               (block)              (block)        (block is free)
//! ```
//! 1. The saver reads a page between `begin_read` and `end_read`: from the memory itself while it is Live, from its copy
//!    once it is Copied. It never reads one that is being copied; it waits.
//! 2. Whoever is about to change a page calls `begin_protect` before. A page that is Done or Copied may be changed at
//!    once. A Live page gets a block and is copied by the caller, who then calls `end_copy`. While the saver is reading
//!    it, or somebody is copying it, or no block is free, the caller waits.
//! 3. There is a fixed number of blocks: they are the budget. A block is free again when its page is Done. With none
//!    free, whoever wants to change a page waits for the saver, who needs no block to go on: so nobody waits for ever.
//! 4. `finish` ends it all: everything that waits returns, every page may be changed, and a read finds that there is
//!    nothing more to read. It is called when the save is over, however it ended. Whoever is reading just then learns
//!    from `end_read` that what was read is worth nothing: the page may have been changed under the reader's eyes.
//!
//! 5. The saver gives way: between two reads it calls `pause`, which lasts while a step is under way, so that the step has
//!    cores and memory to itself. Not once that step has waited for a block: then it is the saver that it needs. A saver
//!    that holds a page never pauses, and a step always ends or comes to need a block: so again nobody waits for ever. The
//!    limit that `pause` takes is for steps that follow each other without a gap; the protocol does not need it.
//!
//! The tests below run this protocol under loom, in every interleaving of a saver, a step and a copier.

use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex, MutexGuard, lock};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Live,
    Copying(usize),
    Copied(usize),
    Done,
}

#[derive(Debug, Clone, Copy)]
struct Page {
    state: State,
    readers: u32,
    /// Bytes still to be written from it; unknown until the files have been planned.
    left: Option<u64>,
}

#[derive(Debug)]
struct Inner {
    pages: Vec<Page>,
    free: Vec<usize>,
    is_over: bool,
    /// Steps under way.
    steps: usize,
    /// Whether one of them has come to wait for a block.
    is_awaited: bool,
    pauses: u64,
}

/// Where the saver finds a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// In the memory itself.
    Live,
    /// In a block.
    Copy(usize),
    /// Nowhere: the snapshot was given up.
    Gone,
}

/// What someone who wants to change a page has to do first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Duty {
    /// Nothing.
    None,
    /// Copy the page into this block, then call `end_copy`.
    Copy(usize),
    /// The page cannot be copied now; only who does not want to wait gets this.
    Busy,
}

#[derive(Debug)]
pub(super) struct Pages {
    inner: Mutex<Inner>,
    changed: Condvar,
}

impl Pages {
    pub(super) fn new(pages: usize, blocks: usize) -> Self {
        let page = Page { state: State::Live, readers: 0, left: None };
        let inner = Inner {
            pages: vec![page; pages],
            free: (0..blocks).rev().collect(),
            is_over: false,
            steps: 0,
            is_awaited: false,
            pauses: 0,
        };
        Self { inner: Mutex::new(inner), changed: Condvar::new() }
    }

    /// Says how many bytes of each page will be written. Pages of which none are need not be kept.
    pub(super) fn plan(&self, bytes: &[u64]) {
        let mut inner = lock(&self.inner);
        for (number, &bytes) in bytes.iter().enumerate() {
            inner.pages[number].left = Some(bytes);
            inner.settle(number);
        }
        self.changed.notify_all();
    }

    pub(super) fn begin_read(&self, number: usize) -> Source {
        let mut inner = lock(&self.inner);
        loop {
            if inner.is_over {
                return Source::Gone;
            }
            let page = &mut inner.pages[number];
            let source = match page.state {
                State::Live => Source::Live,
                State::Copied(block) => Source::Copy(block),
                State::Copying(_) => {
                    inner = self.wait(inner);
                    continue;
                }
                State::Done => return Source::Gone,
            };
            page.readers += 1;
            return source;
        }
    }

    /// Returns whether what was read is what was there at the moment of the snapshot.
    #[must_use]
    pub(super) fn end_read(&self, number: usize, bytes: u64) -> bool {
        let mut inner = lock(&self.inner);
        let page = &mut inner.pages[number];
        page.readers -= 1;
        page.left = page.left.map(|left| left.saturating_sub(bytes));
        inner.settle(number);
        self.changed.notify_all();
        !inner.is_over
    }

    /// Returns what is to be done before a page may be changed, and how long the saver had to be waited for.
    pub(super) fn begin_protect(&self, number: usize, waits: bool) -> (Duty, Option<Duration>) {
        let mut inner = lock(&self.inner);
        let mut start = None;
        let duty = loop {
            if inner.is_over {
                break Duty::None;
            }
            let page = inner.pages[number];
            match page.state {
                State::Done | State::Copied(_) => break Duty::None,
                State::Live if page.readers == 0 => {
                    if let Some(block) = inner.free.pop() {
                        inner.pages[number].state = State::Copying(block);
                        break Duty::Copy(block);
                    }
                }
                State::Live | State::Copying(_) => {}
            }
            if !waits {
                break Duty::Busy;
            }
            // Whoever is copying the page does what would have to be done here.
            if page.state == State::Live {
                start.get_or_insert_with(Instant::now);
            }
            if inner.free.is_empty() && !inner.is_awaited {
                inner.is_awaited = true;
                self.changed.notify_all();
            }
            inner = self.wait(inner);
        };
        (duty, start.map(|start| start.elapsed()))
    }

    pub(super) fn end_copy(&self, number: usize) {
        let mut inner = lock(&self.inner);
        if let State::Copying(block) = inner.pages[number].state {
            inner.pages[number].state = State::Copied(block);
            inner.settle(number);
        }
        self.changed.notify_all();
    }

    /// Waits until something changes; false once it is over. For who was told that a page is busy.
    pub(super) fn wait_for_change(&self) -> bool {
        let inner = lock(&self.inner);
        if inner.is_over {
            return false;
        }
        !self.wait(inner).is_over
    }

    /// Waits for so long, or until it is over. For who holds no page.
    pub(super) fn rest(&self, time: Duration) {
        let start = Instant::now();
        let mut inner = lock(&self.inner);
        while !inner.is_over {
            let left = time.saturating_sub(start.elapsed());
            if left.is_zero() {
                break;
            }
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    /// A step begins: from here on the saver gives way to it.
    pub(super) fn begin_step(&self) {
        let mut inner = lock(&self.inner);
        inner.is_awaited &= inner.steps > 0;
        inner.steps += 1;
    }

    pub(super) fn end_step(&self) {
        lock(&self.inner).steps -= 1;
        self.changed.notify_all();
    }

    /// Returns when the saver may go on, or after `limit`; and how long that took.
    pub(super) fn pause(&self, limit: Duration) -> Duration {
        let mut inner = lock(&self.inner);
        if !inner.has_precedence() {
            return Duration::ZERO;
        }
        inner.pauses += 1;
        let start = Instant::now();
        while inner.has_precedence() {
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                break;
            }
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        start.elapsed()
    }

    /// How often the saver has given way.
    pub(super) fn pauses(&self) -> u64 {
        lock(&self.inner).pauses
    }

    pub(super) fn finish(&self) {
        lock(&self.inner).is_over = true;
        self.changed.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
        lock(&self.inner).is_over
    }

    /// Whether every page may be changed at once.
    pub(super) fn is_safe(&self) -> bool {
        let inner = lock(&self.inner);
        inner.is_over || inner.pages.iter().all(|page| matches!(page.state, State::Done | State::Copied(_)))
    }

    fn wait<'a>(&self, inner: MutexGuard<'a, Inner>) -> MutexGuard<'a, Inner> {
        self.changed.wait(inner).unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Inner {
    /// Whether a step is under way that does not need the saver.
    fn has_precedence(&self) -> bool {
        self.steps > 0 && !self.is_awaited && !self.is_over
    }

    /// Makes a page Done when nobody needs it any more.
    fn settle(&mut self, number: usize) {
        let page = &mut self.pages[number];
        if page.left != Some(0) || page.readers > 0 {
            return;
        }
        match page.state {
            State::Live | State::Done => page.state = State::Done,
            State::Copied(block) => {
                page.state = State::Done;
                self.free.push(block);
            }
            // Settled when the copy has ended.
            State::Copying(_) => {}
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
    /// What no page and no block holds.
    const NOTHING: usize = 9;

    /// What a page holds at the moment of the snapshot.
    fn first(page: usize) -> usize {
        100 + page
    }

    /// Memory of as many pages as there are, and blocks.
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
                    // As long as the step likes: nobody relies on the limit.
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
            assert!(!is_whole || found == first(page), "page {page}: the saver sees {found}");
            is_whole
        }

        fn step(&self) {
            self.pages.begin_step();
            for page in 0..self.memory.len() {
                self.copy(page, true);
                self.memory[page].store(CHANGED, SeqCst);
            }
            self.pages.end_step();
        }

        fn copy(&self, page: usize, waits: bool) {
            if let (Duty::Copy(block), _) = self.pages.begin_protect(page, waits) {
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

    /// Three threads and several waits: switched against their will so often at most.
    fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.check(body);
    }

    /// With fewer blocks than pages the step waits for the saver, and both come to their end.
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

    /// The saver has the machine back when the step has ended, and not before.
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

    /// Two steps, of two stores that share a snapshot: the saver that one of them needs does not give way to the other.
    #[test]
    fn loom_saver_that_is_needed_does_not_pause() {
        model(3, || {
            let world = World::new(2, 0);
            let steps = [0, 1].map(|page| {
                beside(&world, move |world| {
                    world.pages.begin_step();
                    world.copy(page, true);
                    world.memory[page].store(CHANGED, SeqCst);
                    world.pages.end_step();
                })
            });
            assert_eq!(world.save(), 2);
            steps.map(|step| step.join().unwrap());
        });
    }

    /// A copier that runs ahead of the step takes part without harm.
    #[test]
    fn loom_copier_runs_ahead() {
        loom::model(|| {
            let world = World::new(1, 1);
            let stepping = beside(&world, World::step);
            let copying = beside(&world, |world| world.copy(0, false));
            assert_eq!(world.save(), 1);
            stepping.join().unwrap();
            copying.join().unwrap();
            assert_eq!(world.free_blocks(), 1, "every block is back");
        });
    }

    /// A copier that waits for blocks hears of the end, whether it comes before or after.
    #[test]
    fn loom_copier_ends_with_the_snapshot() {
        loom::model(|| {
            let world = World::new(1, 0);
            let copying = beside(&world, |world| while world.pages.wait_for_change() {});
            world.save();
            world.pages.finish();
            copying.join().unwrap();
        });
    }

    /// Two files have a part of the same page each; its block goes to the next page when both have been read.
    #[test]
    fn loom_two_savers_share_a_page() {
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

    /// A step waits without a block, and then nobody wants the page after all.
    #[test]
    fn loom_plan_frees_what_nobody_writes() {
        loom::model(|| {
            let world = World::new(2, 0);
            let stepping = beside(&world, World::step);
            world.pages.plan(&[0, 0]);
            stepping.join().unwrap();
            assert!(world.pages.is_safe());
        });
    }

    /// The same while the page is being copied: the block is back, by whoever comes last.
    #[test]
    fn loom_plan_during_a_copy_gives_the_block_back() {
        loom::model(|| {
            let world = World::new(1, 1);
            let copying = beside(&world, |world| world.copy(0, false));
            world.pages.plan(&[0]);
            copying.join().unwrap();
            assert_eq!(world.free_blocks(), 1, "every block is back");
            assert!(world.pages.is_safe());
        });
    }

    /// A save that is given up lets the step go on, wherever it waits.
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

    /// A snapshot that is given up under a saver's eyes: what the saver takes for whole is whole, and it waits for nobody.
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

    /// The end comes between the beginning and the end of a copy.
    #[test]
    fn loom_copy_ends_after_the_snapshot() {
        loom::model(|| {
            let world = World::new(1, 1);
            let (duty, _) = world.pages.begin_protect(0, true);
            let saving = beside(&world, |world| assert_eq!(world.save(), 0));
            world.pages.finish();
            assert_eq!(duty, Duty::Copy(0));
            world.pages.end_copy(0);
            saving.join().unwrap();
            assert_eq!(world.pages.begin_protect(0, true).0, Duty::None);
        });
    }
}
