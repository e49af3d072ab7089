//! Snapshots: whatever a step, a saver and copiers do at the same time, what is saved is the state of one moment.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::common::trial::{Rig, Scenario, Tensor};
use crate::common::{Subject, cases, traced};
use forebay::checkpoint::{FileEntry, WriteOptions, write_files};
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::{Buffer, Dtype, Region, StateFormat};
use forebay::optimizer::Optimizer;
use forebay::snapshot::{PAGE_BYTES, Snapshot};
use forebay::trace::{Kind, Reason, TraceOptions};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

forebay_device::on_devices! {
    every:
        what_is_saved_is_of_one_moment,
        without_a_budget_the_step_waits_for_the_saver,
        with_room_for_all_the_step_waits_for_nobody,
        the_saver_gives_way_to_a_step_that_does_not_need_it,
        a_step_comes_to_pages_that_nobody_will_write,
        copiers_share_the_pages_and_end,
        a_copier_held_to_a_rate_ends_with_the_snapshot,
        states_of_several_optimizers_share_pages_and_blocks,
        a_copy_that_fails_ends_the_snapshot_and_not_the_step,
        the_memory_goes_with_the_snapshot,
        a_snapshot_that_was_given_up_is_not_read_to_its_end;
}

type Key = (usize, &'static str);
type Values = BTreeMap<Key, Vec<u8>>;

const STEPS: usize = 14;

fn tensors() -> Vec<Tensor> {
    vec![
        Tensor::f32(1000),
        Tensor::of(300, Dtype::Bf16, Dtype::Bf16).master(),
        Tensor::f32(0),
        Tensor::of(130, Dtype::F32, Dtype::Bf16).full(),
        Tensor::f32(1),
        Tensor::f32(64).on_host(),
        Tensor::f32(600).kept_as(StateFormat::Blocks),
        Tensor::f32(300).kept_as(StateFormat::Bf16),
    ]
}

fn regions(rig: &Rig<'_>) -> Vec<(Key, Region)> {
    let names = |tensor: usize| rig.scenario.columns(tensor).into_iter().map(move |column| (tensor, column.name));
    let keys = (0..rig.scenario.tensors.len()).flat_map(names);
    keys.map(|(tensor, name)| ((tensor, name), rig.column(tensor, name))).collect()
}

/// The state as it is; all stores have ended.
fn values(on: &Subject, rig: &Rig<'_>) -> Values {
    rig.optimizer.synchronize().unwrap();
    regions(rig).into_iter().map(|(key, region)| (key, on.host_bytes(&region).unwrap())).collect()
}

fn snapshot(rig: &Rig<'_>, page_bytes: u64, budget_bytes: u64) -> Arc<Snapshot> {
    Optimizer::snapshot_in_pages(&[&rig.optimizer], page_bytes, budget_bytes).unwrap()
}

fn pages(rig: &Rig<'_>, page_bytes: u64) -> u64 {
    arena_bytes(rig).div_ceil(page_bytes)
}

fn arena_bytes(rig: &Rig<'_>) -> u64 {
    rig.plan().arena_bytes().iter().sum()
}

/// Reads everything through a snapshot, piece by piece, with a pause after each.
fn read_all(
    snapshot: &Snapshot,
    regions: &[(Key, Region)],
    buffer_bytes: u64,
    mut pause: impl FnMut(),
) -> forebay::Result<Values> {
    snapshot.plan(&regions.iter().map(|(_, region)| region.clone()).collect::<Vec<_>>());
    let buffer = Buffer::pageable(buffer_bytes).unwrap();
    let mut read = Values::new();
    for (key, region) in regions {
        let bytes = read.entry(*key).or_default();
        snapshot.read(region, &buffer, bytes.len() as u64, |piece| {
            forebay::device::file::visit(piece, |part| bytes.extend_from_slice(part)).unwrap();
            pause();
            Ok(())
        })?;
    }
    Ok(read)
}

/// Writes everything into files through a snapshot, and reads the files.
fn write_all(
    snapshot: &Arc<Snapshot>,
    regions: &[(Key, Region)],
    rate: Option<f64>,
    direct: bool,
) -> forebay::Result<Values> {
    let folder = Folder::new();
    let entries: Vec<FileEntry> = regions
        .iter()
        .map(|((tensor, column), region)| FileEntry {
            name: format!("{tensor}.{column}"),
            dtype: "F32".to_owned(),
            shape: vec![region.bytes() / 4],
            data: (region.bytes() > 0).then(|| region.clone()),
        })
        .collect();
    let snapshot = Some(snapshot.clone());
    let options = WriteOptions { threads: 2, snapshot, bytes_per_s: rate, direct, ..WriteOptions::default() };
    let mut read = Values::new();
    for file in write_files(&folder.0, "0-", &entries, &options, &AtomicU64::new(0))? {
        let bytes = std::fs::read(folder.0.join(&file.record.name)).unwrap();
        for (entry, begin, end) in file.entries {
            read.insert(regions[entry].0, bytes[begin as usize..end as usize].to_vec());
        }
    }
    Ok(read)
}

/// A folder of this process alone, gone at the end.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("forebay-snapshot-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[derive(Debug, Clone, Copy)]
enum How {
    /// Into files, at this rate, past the system's cache or not.
    Files(Option<f64>, bool),
    /// Into memory, with a buffer of so many bytes and so many microseconds after each piece.
    Pieces(u64, u64),
}

#[derive(Debug, Clone)]
enum Action {
    Step,
    /// A step in which the n-th copy is refused, or late by so many nanoseconds.
    FaultyStep(u64, Option<u64>),
    /// With blocks for a share of the pages (in quarters), and so many copiers.
    Save {
        quarters: u64,
        copiers: usize,
        how: How,
    },
    /// Waits until the save is over.
    Join,
    /// Ends the save's snapshot, wherever it is.
    GiveUp,
    /// Writes other state, as a load does.
    Load,
    /// Moves the state to the other side of its memory.
    Exchange,
    /// Gives that other side up.
    CloseSecond,
    /// Reads whether a step would wait.
    Look,
    Pause(u64),
}

fn action() -> impl Strategy<Value = Action> {
    let how = prop_oneof![
        2 => (prop::option::of(Just(5e6)), any::<bool>()).prop_map(|(rate, direct)| How::Files(rate, direct)),
        4 => (prop_oneof![Just(64), Just(100), Just(4096)], prop_oneof![Just(0), Just(20), Just(200)])
            .prop_map(|(bytes, micros)| How::Pieces(bytes, micros)),
    ];
    prop_oneof![
        6 => Just(Action::Step),
        1 => (0..20u64, prop::option::of(Just(2_000_000))).prop_map(|(nth, late)| Action::FaultyStep(nth, late)),
        4 => (0..=4u64, 0..3usize, how).prop_map(|(quarters, copiers, how)| Action::Save { quarters, copiers, how }),
        1 => Just(Action::Join),
        1 => Just(Action::GiveUp),
        1 => Just(Action::Load),
        2 => Just(Action::Exchange),
        1 => Just(Action::CloseSecond),
        1 => Just(Action::Look),
        1 => (0..2000u64).prop_map(Action::Pause),
    ]
}

/// A save under way.
struct Saving {
    snapshot: Arc<Snapshot>,
    /// The state at the moment of the call.
    kept: Values,
    threads: Vec<JoinHandle<()>>,
    saver: JoinHandle<forebay::Result<Values>>,
    given_up: bool,
}

impl Saving {
    fn begin(on: &Subject, rig: &Rig<'_>, page_bytes: u64, quarters: u64, copiers: usize, how: How) -> Self {
        let kept = values(on, rig);
        let budget = pages(rig, page_bytes) * quarters / 4 * page_bytes;
        let snapshot = snapshot(rig, page_bytes, budget);
        let regions = regions(rig);
        let threads = (0..copiers)
            .map(|turn| {
                let snapshot = snapshot.clone();
                std::thread::spawn(move || snapshot.copy_ahead(turn, copiers, None))
            })
            .collect();
        let mine = snapshot.clone();
        let saver = std::thread::spawn(move || {
            let read = match how {
                How::Files(rate, direct) => write_all(&mine, &regions, rate, direct),
                How::Pieces(bytes, micros) => {
                    read_all(&mine, &regions, bytes, || std::thread::sleep(Duration::from_micros(micros)))
                }
            };
            // As a save does, however it went.
            mine.finish();
            read
        });
        Self { snapshot, kept, threads, saver, given_up: false }
    }

    /// Waits for it, and compares.
    fn end(self, budget_pages: u64, page_bytes: u64) {
        let read = self.saver.join().unwrap();
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        match read {
            Ok(read) => assert!(read == self.kept, "what was saved is not the state at the moment of the call"),
            Err(error) => assert!(self.given_up, "{error}"),
        }
        let stats = self.snapshot.stats();
        assert!(stats.block_bytes <= budget_pages * page_bytes, "{stats:?}");
        assert!(self.snapshot.is_safe());
    }
}

/// What the actions of one case add up to.
struct CopyRun<'a> {
    on: &'a Subject,
    rig: Rig<'a>,
    page_bytes: u64,
    saving: Option<(Saving, u64)>,
    steps: usize,
    is_exact: bool,
}

impl CopyRun<'_> {
    fn act(&mut self, action: &Action) {
        match *action {
            Action::Step | Action::FaultyStep(..) if self.steps == STEPS => {}
            Action::Step => {
                self.rig.step(self.steps).unwrap();
                self.steps += 1;
            }
            Action::FaultyStep(nth, late) => {
                let how = late.map_or(Misbehaviour::Fail, |ns| Misbehaviour::Late { ns });
                self.on.fault.on(Call::Copy, nth, how);
                // It is an error or comes through, whether that copy was reached or not.
                self.is_exact &= self.rig.step(self.steps).is_ok();
                self.rig.optimizer.trust();
                self.rig.assert_idle();
                self.steps += 1;
            }
            Action::Save { quarters, copiers, how } => {
                self.join();
                let budget = pages(&self.rig, self.page_bytes) * quarters / 4;
                let saving = Saving::begin(self.on, &self.rig, self.page_bytes, quarters, copiers, how);
                self.saving = Some((saving, budget));
            }
            Action::Join => self.join(),
            Action::GiveUp => {
                if let Some((saving, _)) = &mut self.saving {
                    saving.given_up = true;
                    saving.snapshot.finish();
                }
            }
            Action::Load => {
                self.rig.optimizer.synchronize().unwrap();
                self.rig.optimizer.protect_all().unwrap();
                for (_, region) in regions(&self.rig) {
                    let bytes: Vec<u8> = (0..region.bytes()).map(|i| (i % 4) as u8).collect();
                    self.on.write(&bytes, &region).unwrap();
                }
                self.is_exact = false;
            }
            Action::Exchange => {
                let state = values(self.on, &self.rig);
                self.rig.optimizer.open_second().unwrap();
                self.rig.optimizer.exchange().unwrap();
                self.rig.optimizer.protect_all().unwrap();
                for (key, region) in regions(&self.rig) {
                    self.on.write(&state[&key], &region).unwrap();
                }
            }
            Action::CloseSecond => self.rig.optimizer.close_second().unwrap(),
            Action::Look => {
                if let Some((saving, _)) = &self.saving {
                    saving.snapshot.is_safe();
                }
            }
            Action::Pause(micros) => std::thread::sleep(Duration::from_micros(micros)),
        }
    }

    fn join(&mut self) {
        if let Some((saving, budget_pages)) = self.saving.take() {
            saving.end(budget_pages, self.page_bytes);
        }
    }
}

/// Steps, faults, saves, loads, exchanges of sides and ends in any order; every save that comes through has the state of its call, and the
/// steps have the bits of steps without any save.
fn what_is_saved_is_of_one_moment(on: &Subject) {
    let cases = cases(if on.kind.is_cuda() { 20 } else { 70 });
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let page_bytes = prop_oneof![Just(64u64), Just(300), Just(1024), Just(1 << 20)];
    let input = (prop::collection::vec(action(), 1..30), page_bytes, 2..5usize);
    let outcome = runner.run(&input, |(actions, page_bytes, slots)| {
        let on = on.another();
        let rig = Rig::new(&on, Scenario::new(tensors(), slots, 2048), STEPS).warm();
        let mut run = CopyRun { on: &on, rig, page_bytes, saving: None, steps: 0, is_exact: true };
        actions.iter().for_each(|action| run.act(action));
        run.join();
        run.rig.optimizer.synchronize().unwrap();
        if run.is_exact {
            run.rig.assert_exact(run.steps);
        }
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

fn rig(on: &Subject) -> Rig<'_> {
    Rig::new(on, Scenario::new(tensors(), 2, 2048), 4).warm()
}

/// A saver that reads one more piece each time it is asked to.
fn led_saver(
    snapshot: &Arc<Snapshot>,
    rig: &Rig<'_>,
) -> (Sender<()>, Receiver<()>, JoinHandle<forebay::Result<Values>>) {
    let (go, gone) = channel();
    let (paused, pauses) = channel();
    let (snapshot, regions) = (snapshot.clone(), regions(rig));
    let saver = std::thread::spawn(move || {
        read_all(&snapshot, &regions, 64, || {
            let _ = paused.send(());
            let _ = gone.recv();
        })
    });
    (go, pauses, saver)
}

/// The step is at its end only when the saver is: it is held before the last piece until the step has been waiting.
fn without_a_budget_the_step_waits_for_the_saver(on: &Subject) {
    let rig = rig(on);
    let kept = values(on, &rig);
    let snapshot = snapshot(&rig, 256, 255);
    let (go, paused, saver) = led_saver(&snapshot, &rig);
    paused.recv().unwrap();
    let recorder = traced(TraceOptions::default());
    std::thread::scope(|scope| {
        let (end, ended) = channel::<()>();
        let stepping = scope.spawn(|| {
            rig.step(0).unwrap();
            rig.optimizer.synchronize().unwrap();
            drop(end);
        });
        // A step that does not wait takes a few milliseconds.
        assert_eq!(ended.recv_timeout(Duration::from_millis(100)), Err(RecvTimeoutError::Timeout));
        drop(go);
        stepping.join().unwrap();
    });
    assert!(saver.join().unwrap().unwrap() == kept);
    let stats = snapshot.stats();
    assert_eq!((stats.copied_bytes, stats.block_bytes), (0, 0));
    assert!(stats.stalls > 0 && stats.stall_ns > 0, "{stats:?}");
    let recording = recorder.stop();
    let waits = recording.spans().filter(|span| span.kind == Kind::Wait && span.reason == Some(Reason::Save));
    let waited: u64 = waits.map(|span| span.end_ns - span.start_ns).sum();
    // Waits below 10 microseconds are not shown.
    assert!(waited <= stats.stall_ns && waited + 10_000 * stats.stalls >= stats.stall_ns, "{waited} of {stats:?}");
    assert!(waited > 0);
    rig.assert_exact(1);
}

/// There is no saver at all yet, and the step comes to its end.
fn with_room_for_all_the_step_waits_for_nobody(on: &Subject) {
    let rig = rig(on);
    let kept = values(on, &rig);
    let snapshot = snapshot(&rig, 256, u64::MAX);
    assert!(!snapshot.is_safe());
    rig.step(0).unwrap();
    rig.step(1).unwrap();
    rig.optimizer.synchronize().unwrap();
    let stats = snapshot.stats();
    assert_eq!((stats.stalls, stats.stall_ns), (0, 0));
    assert_eq!(stats.copied_bytes, arena_bytes(&rig));
    assert_eq!(stats.block_bytes, pages(&rig, 256) * 256);
    assert!(snapshot.is_safe());
    assert!(read_all(&snapshot, &regions(&rig), 100, || {}).unwrap() == kept);
    rig.assert_exact(2);
}

/// How often the saver gave way, once it has; nought if it never does.
fn pauses(snapshot: &Snapshot) -> u64 {
    for _ in 0..5000 {
        if snapshot.stats().pauses > 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    snapshot.stats().pauses
}

fn the_saver_gives_way_to_a_step_that_does_not_need_it(on: &Subject) {
    let rig = rig(on);
    let kept = values(on, &rig);
    for direct in [false, true] {
        let snapshot = snapshot(&rig, 256, u64::MAX);
        let stepping = snapshot.step();
        let (mine, regions) = (snapshot.clone(), regions(&rig));
        let saver = std::thread::spawn(move || write_all(&mine, &regions, None, direct));
        assert!(pauses(&snapshot) > 0);
        drop(stepping);
        assert!(saver.join().unwrap().unwrap() == kept);
        snapshot.finish();
        let watched = Arc::downgrade(&snapshot);
        drop(snapshot);
        assert!(watched.upgrade().is_none(), "no snapshot is left that a step could inform");
    }
    // And a step says that it is one: here it takes its time, and the saver has more to do than that.
    let snapshot = snapshot(&rig, 256, u64::MAX);
    let (mine, all) = (snapshot.clone(), regions(&rig));
    let rate = arena_bytes(&rig) as f64 / 2.0;
    let saver = std::thread::spawn(move || write_all(&mine, &all, Some(rate), false));
    on.fault.on(Call::Copy, 1, Misbehaviour::Late { ns: 400_000_000 });
    rig.step(0).unwrap();
    rig.optimizer.synchronize().unwrap();
    assert!(snapshot.stats().pauses > 0);
    assert!(saver.join().unwrap().unwrap() == kept);
    rig.assert_exact(1);
}

/// What no file will hold need not be kept, also where a step waits for it before that is known.
fn a_step_comes_to_pages_that_nobody_will_write(on: &Subject) {
    let rig = rig(on);
    let snapshot = snapshot(&rig, 256, 0);
    std::thread::scope(|scope| {
        let stepping = scope.spawn(|| rig.step(0).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        snapshot.plan(&[]);
        stepping.join().unwrap();
    });
    assert!(snapshot.is_safe());
    assert_eq!(snapshot.stats().copied_bytes, 0);
}

fn copiers_share_the_pages_and_end(on: &Subject) {
    let rig = rig(on);
    let kept = values(on, &rig);
    for copiers in [1, 3] {
        let snapshot = snapshot(&rig, 256, u64::MAX);
        std::thread::scope(|scope| {
            (0..copiers).for_each(|turn| {
                let snapshot = &snapshot;
                scope.spawn(move || snapshot.copy_ahead(turn, copiers, None));
            });
        });
        assert!(snapshot.is_safe());
        assert_eq!(snapshot.stats().copied_bytes, arena_bytes(&rig), "each page once");
        assert!(read_all(&snapshot, &regions(&rig), 4096, || {}).unwrap() == kept);
    }
    // With blocks for one page only they wait for the saver, and go with it.
    let snapshot = snapshot(&rig, 256, 256);
    std::thread::scope(|scope| {
        let copying: Vec<_> = (0..2)
            .map(|turn| {
                scope.spawn({
                    let snapshot = &snapshot;
                    move || snapshot.copy_ahead(turn, 2, None)
                })
            })
            .collect();
        assert!(read_all(&snapshot, &regions(&rig), 64, || {}).unwrap() == kept);
        snapshot.finish();
        copying.into_iter().for_each(|thread| thread.join().unwrap());
    });
    assert!(snapshot.stats().block_bytes <= 256);
}

/// A byte a second: it copies one page, and rests for longer than this test lasts.
fn a_copier_held_to_a_rate_ends_with_the_snapshot(on: &Subject) {
    let rig = rig(on);
    let snapshot = snapshot(&rig, 256, u64::MAX);
    let (end, ended) = channel::<()>();
    let mine = snapshot.clone();
    let copying = std::thread::spawn(move || {
        mine.copy_ahead(0, 1, Some(1.0));
        drop(end);
    });
    assert_eq!(ended.recv_timeout(Duration::from_millis(100)), Err(RecvTimeoutError::Timeout));
    assert_eq!(snapshot.stats().copied_bytes, 256);
    snapshot.finish();
    assert_eq!(ended.recv_timeout(Duration::from_secs(20)), Err(RecvTimeoutError::Disconnected));
    copying.join().unwrap();
}

/// The optimizer that steps gets the blocks, however small its part is; and a page may have the end of one state and all of another.
fn states_of_several_optimizers_share_pages_and_blocks(on: &Subject) {
    let (large, small) = (rig(on), Rig::new(on, Scenario::new(vec![Tensor::f32(8)], 2, 2048), 4));
    let kept = [values(on, &large), values(on, &small)];
    for (page_bytes, budget_pages) in [(1 << 20, 1), (256, 2), (arena_bytes(&large) - 8, 1)] {
        let budget_bytes = budget_pages * page_bytes;
        let both = [&large.optimizer, &small.optimizer];
        let snapshot = Optimizer::snapshot_in_pages(&both, page_bytes, budget_bytes).unwrap();
        let all = arena_bytes(&large) + arena_bytes(&small);
        // No saver is there yet.
        small.optimizer.protect_all().unwrap();
        assert_eq!(snapshot.stats().stalls, 0);
        assert!(snapshot.stats().block_bytes <= budget_bytes);
        if budget_bytes >= all {
            large.optimizer.protect_all().unwrap();
            assert_eq!(snapshot.stats().copied_bytes, all, "each byte once");
        }
        snapshot.plan(&[regions(&large), regions(&small)].concat().into_iter().map(|(_, at)| at).collect::<Vec<_>>());
        let buffer = Buffer::pageable(100).unwrap();
        for (rig, kept) in [&large, &small].into_iter().zip(&kept) {
            for (key, region) in regions(rig) {
                let mut read = Vec::new();
                let look = |piece: &Region| {
                    forebay::device::file::visit(piece, |part| read.extend_from_slice(part)).unwrap();
                    Ok(())
                };
                snapshot.read(&region, &buffer, 0, look).unwrap();
                assert!(read == kept[&key], "{key:?}");
            }
        }
        assert!(snapshot.is_safe(), "nothing is left to write");
    }
}

/// A page that no machine has memory for.
fn a_copy_that_fails_ends_the_snapshot_and_not_the_step(on: &Subject) {
    let rig = rig(on);
    let snapshot = snapshot(&rig, 1 << 60, u64::MAX);
    rig.step(0).unwrap();
    rig.step(1).unwrap();
    rig.optimizer.synchronize().unwrap();
    rig.assert_exact(2);
    assert!(snapshot.is_safe());
    let error = read_all(&snapshot, &regions(&rig), 64, || {}).unwrap_err().to_string();
    assert!(error.contains("given up") && error.contains(&(1u64 << 60).to_string()), "{error}");
}

fn the_memory_goes_with_the_snapshot(on: &Subject) {
    let rig = rig(on);
    let snapshot = snapshot(&rig, PAGE_BYTES, u64::MAX);
    rig.step(0).unwrap();
    assert_eq!(snapshot.stats().block_bytes, pages(&rig, PAGE_BYTES) * PAGE_BYTES);
    let watched = Arc::downgrade(&snapshot);
    snapshot.finish();
    drop(snapshot);
    assert!(watched.upgrade().is_none(), "the state holds on to a save that is over");
    rig.step(1).unwrap();
    rig.optimizer.synchronize().unwrap();
    rig.assert_exact(2);
}

/// The end comes in the middle of a region, while the saver holds no page.
fn a_snapshot_that_was_given_up_is_not_read_to_its_end(on: &Subject) {
    let rig = rig(on);
    let snapshot = snapshot(&rig, 256, 0);
    let (go, paused, saver) = led_saver(&snapshot, &rig);
    paused.recv().unwrap();
    snapshot.finish();
    rig.step(0).unwrap();
    drop(go);
    let error = saver.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("given up"), "{error}");
}
