//! The trace: every room reports what it does, with the right bytes, in order, and changes nothing.
//!
//! A process has one trace at a time: the tests of this module take turns where they share a process.

use std::collections::HashMap;

use crate::common::overlapped::{Way, committed};
use crate::common::trial::{Rig, Scenario, Tensor, group_tensors, mixed_tensors};
use crate::common::{Subject, Traced, in_one_of_three, traced};
use forebay::activations::{Compute, Key, Location, Offload, OffloadOptions};
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::{Buffer, Kernel};
use forebay::memory::{Allocator, PinnedBudget};
use forebay::optimizer::{HostShare, Placement};
use forebay::sleep::{Direction, Sleeper};
use forebay::trace::{self, About, Counter, Kind, Label, Reason, Record, Recording, Span, TraceOptions};

forebay_device::on_devices! {
    every:
        each_stage_of_each_chunk_has_a_span,
        spans_of_work_before_the_trace_are_left_out,
        a_wait_for_a_slot_has_its_reason,
        parts_on_the_host_are_shown,
        resident_state_has_updates_alone,
        overlapped_steps_are_shown,
        activations_are_shown_with_their_layers,
        sleeps_and_wakes_are_shown,
        memory_is_counted,
        rows_of_a_file_never_cross;
}

struct Tracing(Traced);

fn tracing() -> Tracing {
    Tracing(traced(TraceOptions::default()))
}

impl Tracing {
    fn end(self) -> Recording {
        let recording = self.0.stop();
        assert_eq!(recording.dropped, 0);
        assert!(!recording.is_partial && !trace::is_on());
        for span in recording.spans() {
            assert!(span.start_ns <= span.end_ns && span.end_ns as f64 / 1e9 <= recording.seconds, "{span:?}");
        }
        assert!(recording.records.is_sorted_by_key(Record::at_ns));
        recording
    }
}

fn of(recording: &Recording, kind: Kind, owner: u32) -> Vec<Span> {
    recording.spans().filter(|span| span.kind == kind && span.owner == owner).copied().collect()
}

/// Bytes that spans account for, those that were not timed too.
fn bytes(spans: &[Span]) -> u64 {
    spans.iter().map(|span| span.bytes + span.untimed_bytes).sum()
}

/// Half a microsecond is the resolution of a GPU's events, and their difference is a 32-bit float.
fn slack_ns(on: &Subject) -> u64 {
    if on.kind.is_cuda() { 5000 } else { 0 }
}

const STAGES: [Kind; 3] = [Kind::Fetch, Kind::Update, Kind::Store];

fn each_stage_of_each_chunk_has_a_span(on: &Subject) {
    let missing = |step, tensor| step == 2 && tensor == 7;
    let rig = Rig::new(on, Scenario { missing, ..Scenario::new(mixed_tensors(), 3, 4096) }, 4);
    rig.step(0).unwrap();
    let mut whole = on.kind.is_cuda();
    for step in 1..4 {
        let tracing = tracing();
        rig.step(step).unwrap();
        let recording = tracing.end();
        let (chunks, payload) = rig.expected_stats(step);
        let all: Vec<Vec<Span>> = STAGES.map(|kind| of(&recording, kind, rig.optimizer.trace_owner())).into();
        if on.kind.is_cuda() {
            assert!(all.iter().all(|spans| !spans.is_empty() && bytes(spans) <= payload));
            continue;
        }
        let stats = rig.stats().streamed;
        let measured = [stats.fetch_ns, stats.update_ns, stats.store_ns];
        let shown: Vec<u64> =
            all.iter().map(|spans| spans.iter().map(|span| span.end_ns - span.start_ns).sum()).collect();
        assert!(all.iter().all(|spans| (spans.len() as u64, bytes(spans)) == (chunks, payload)));
        // A span is cut off where it was seen to have ended, which a busy machine may set before its measured end.
        assert!(shown.iter().zip(measured).all(|(shown, measured)| *shown <= measured), "{shown:?} {measured:?}");
        whole |= shown == measured;
        assert_spans_are_ordered(&all.concat(), slack_ns(on));
    }
    assert!(whole, "no step's spans are as long as what was measured");
    rig.assert_exact(4);
}

/// A chunk passes its stages one after the other, each stream does one thing at a time, and a slot holds one chunk.
fn assert_spans_are_ordered(spans: &[Span], slack_ns: u64) {
    let stage = |span: &Span| STAGES.iter().position(|&kind| kind == span.kind);
    let (mut chunks, mut rows, mut slots) = (HashMap::new(), HashMap::new(), HashMap::new());
    for &span in spans {
        chunks.entry(span.chunk).or_insert_with(Vec::new).push(span);
        rows.entry(span.kind).or_insert_with(Vec::new).push(span);
        slots.entry(span.slot).or_insert_with(Vec::new).push(span);
    }
    for spans in chunks.values_mut() {
        spans.sort_by_key(stage);
        assert!(spans.windows(2).all(|pair| pair[0].slot == pair[1].slot), "{spans:?}");
    }
    rows.values_mut().for_each(|spans| spans.sort_by_key(|span| span.chunk));
    slots.values_mut().for_each(|spans| spans.sort_by_key(|span| (span.chunk, stage(span))));
    for spans in chunks.values().chain(rows.values()).chain(slots.values()) {
        for pair in spans.windows(2) {
            assert!(pair[0].end_ns <= pair[1].start_ns + slack_ns, "{:?} overlaps {:?}", pair[0], pair[1]);
        }
    }
}

fn spans_of_work_before_the_trace_are_left_out(on: &Subject) {
    let rig = Rig::new(on, Scenario::new(vec![Tensor::f32(3000)], 4, 2048), 4);
    let chunks = rig.plan().chunks().len();
    for step in [0, 2] {
        // Its stores are under way when the trace begins.
        rig.step(step).unwrap();
        let tracing = tracing();
        rig.step(step + 1).unwrap();
        let recording = tracing.end();
        for kind in STAGES {
            let spans = of(&recording, kind, rig.optimizer.trace_owner());
            assert!(spans.len() == chunks || on.kind.is_cuda() && spans.len() < chunks, "{spans:?}");
        }
    }
    rig.assert_exact(4);
}

fn waits(recording: &Recording, reason: Reason) -> Vec<Span> {
    recording.spans().filter(|span| span.kind == Kind::Wait && span.reason == Some(reason)).copied().collect()
}

fn a_wait_for_a_slot_has_its_reason(on: &Subject) {
    let rig = Rig::new(on, Scenario::new(vec![Tensor::f32(3000)], 2, 2048), 1).warm();
    in_one_of_three("the host never waited for a slot that was late", || {
        rig.reset();
        on.fault.on(Call::Copy, 2, Misbehaviour::Late { ns: 50_000_000 });
        let tracing = tracing();
        rig.step(0).unwrap();
        let recording = tracing.end();
        let longest = waits(&recording, Reason::Slot).iter().map(|span| span.end_ns - span.start_ns).max();
        longest.is_some_and(|ns| ns > 10_000_000)
    });
    on.fault.clear();
}

fn parts_on_the_host_are_shown(on: &Subject) {
    for (placement, landed) in
        [(Placement::Host, false), (Placement::Host, true), (Placement::Hybrid(HostShare::Fixed(0.5)), false)]
    {
        let rig = Rig::placed(on, Scenario::new(group_tensors(), 3, 4096), 2, placement);
        rig.step(0).unwrap();
        rig.synchronize();
        let grad = rig.grad(1, 0).unwrap();
        if landed {
            let grads: Vec<u64> = (0..rig.scenario.tensors.len())
                .map(|tensor| rig.grad(1, tensor).map_or(0, |grad| grad.bytes()))
                .collect();
            rig.optimizer.open_landing(0, &grads).unwrap();
        }
        let tracing = tracing();
        if landed {
            rig.optimizer.land(0, 0, &grad, Some(&rig.compute)).unwrap();
        }
        rig.step(1).unwrap();
        rig.optimizer.synchronize().unwrap();
        let recording = tracing.end();
        let (host, owner) = (rig.stats().host.unwrap().stats, rig.optimizer.trace_owner());
        let on_the_host = |kind: Kind, words: &'static str| -> Vec<Span> {
            of(&recording, kind, owner).into_iter().filter(|span| span.label == Label::ChunkAnd(words)).collect()
        };
        let updates = on_the_host(Kind::Update, "on the host");
        assert_eq!(bytes(&updates), host.state_bytes, "{placement:?}");
        assert_eq!(updates.iter().map(|span| u64::from(span.chunks)).sum::<u64>(), host.chunks);
        assert!(
            updates.windows(2).all(|pair| pair[0].end_ns <= pair[1].start_ns),
            "the threads do one after the other"
        );
        if !on.kind.is_cuda() {
            assert_eq!(bytes(&on_the_host(Kind::Store, "down")), host.down_bytes);
            assert_eq!(bytes(&on_the_host(Kind::Fetch, "up")), host.up_bytes);
            let early = of(&recording, Kind::Store, owner);
            let early: Vec<Span> = early.into_iter().filter(|span| span.label == Label::Words("gradient")).collect();
            assert_eq!(bytes(&early), if landed { grad.bytes() } else { 0 });
        }
    }
}

fn resident_state_has_updates_alone(on: &Subject) {
    let rig = Rig::placed(on, Scenario::new(group_tensors(), 3, 4096), 2, Placement::Resident);
    rig.step(0).unwrap();
    let tracing = tracing();
    rig.step(1).unwrap();
    let recording = tracing.end();
    let owner = rig.optimizer.trace_owner();
    assert_eq!(bytes(&of(&recording, Kind::Update, owner)), rig.expected_stats(1).1);
    assert!(of(&recording, Kind::Fetch, owner).is_empty() && of(&recording, Kind::Store, owner).is_empty());
}

fn overlapped_steps_are_shown(on: &Subject) {
    let tensors = mixed_tensors().len();
    let way = Way { need: (0..tensors as i64).collect(), offered: (0..tensors / 2).collect() };
    let rig = Rig::new(on, Scenario::new(mixed_tensors(), 3, 4096), 3);
    committed(&rig, 0, &way).unwrap();
    rig.synchronize();
    for step in 1..3 {
        let tracing = tracing();
        if step == 2 {
            // The updates wait for this, and who reads a weight waits for them.
            on.launch(&rig.compute, &Kernel::Spin { ns: 20_000_000 }).unwrap();
        }
        committed(&rig, step, &way).unwrap();
        let reader = on.stream("reader").unwrap();
        rig.optimizer.overlap_wait(None, Some(&reader)).unwrap();
        rig.optimizer.synchronize().unwrap();
        let recording = tracing.end();
        let owner = rig.optimizer.trace_owner();
        let payload = rig.expected_stats(step).1;
        for kind in STAGES {
            let moved = bytes(&of(&recording, kind, owner));
            assert!(moved == payload || on.kind.is_cuda() && 0 < moved && moved <= payload, "{kind:?}: {moved}");
        }
        let waited: u64 = waits(&recording, Reason::Weights).iter().map(|span| span.end_ns - span.start_ns).sum();
        assert!(step == 1 || waited > 1_000_000, "{waited} ns");
    }
    rig.synchronize();
    rig.assert_exact(3);
}

fn activations_are_shown_with_their_layers(on: &Subject) {
    const BYTES: u64 = 64 << 10;
    let allocator = Allocator::within(on.device.clone(), PinnedBudget::default());
    let options = OffloadOptions { fraction: Some(1.0), max_in_flight_bytes: Some(BYTES) };
    let offload = Offload::new(allocator, options).unwrap();
    let compute = Compute::on_stream(on.stream("computation").unwrap());
    let tracing = tracing();
    let sources: Vec<Buffer> = (0..4).map(|value| on.upload(&vec![value; BYTES as usize])).collect();
    let mut saves = Vec::new();
    for (layer, source) in sources.iter().enumerate() {
        offload.enter(layer as u32, &compute).unwrap();
        let (storage, addr) = (layer as u64 + 1, source.all().addr() as u64);
        let key = Key { storage, storage_bytes: BYTES, addr, start_bytes: 0, bytes: BYTES, version: 0 };
        let saved = offload.save(key, (true, true), None, || Ok(source.all()), &compute).unwrap();
        saves.push(saved.saved.save);
        offload.leave(&compute).unwrap();
    }
    // The computation waits for this fetch.
    on.fault.on(Call::Copy, 0, Misbehaviour::Late { ns: 20_000_000 });
    let mut memory = Vec::new();
    for &save in saves.iter().rev() {
        let opened = offload.open(save, &compute).unwrap();
        let now = (opened.location == Location::Host).then_some(opened.entry);
        for entry in now.into_iter().chain(opened.ahead) {
            let buffer = on.alloc(offload.entry_bytes(entry)).unwrap();
            offload.fetch(entry, buffer.all(), entry == opened.entry, &compute).unwrap();
            memory.push(buffer);
        }
        if !matches!(opened.location, Location::Kept | Location::Leaving) {
            offload.ready(opened.entry, &compute).unwrap();
        }
    }
    let stats = offload.stats().unwrap();
    let recording = tracing.end();
    on.fault.clear();
    for (kind, moved) in [(Kind::ActivationStore, stats.stored_bytes), (Kind::ActivationFetch, stats.fetched_bytes)] {
        let spans = of(&recording, kind, offload.trace_owner());
        assert!(moved > 0 && (bytes(&spans) == moved || on.kind.is_cuda()), "{kind:?}: {spans:?}, {moved}");
        assert!(spans.iter().all(|span| span.label == Label::Layer && span.bytes == BYTES));
        let layers: Vec<u32> = spans.iter().filter_map(|span| span.layer).collect();
        // Out in the order of the forward pass, in from the last layer on.
        let mut order = layers.clone();
        order.sort_unstable();
        if kind == Kind::ActivationFetch {
            order.reverse();
        }
        assert_eq!(layers, order);
    }
    let waited: u64 = waits(&recording, Reason::Activation).iter().map(|span| span.end_ns - span.start_ns).sum();
    assert_eq!((waited, waits(&recording, Reason::Activation).len() as u64), (stats.stall_ns, stats.stalls));
    assert!(stats.stalls > 0);
    for save in saves {
        offload.release(save).unwrap();
    }
}

fn sleeps_and_wakes_are_shown(on: &Subject) {
    let sizes: [u64; 3] = [5000, 70_000, 64];
    let sleeper = Sleeper::new(Allocator::new(on.device.clone()));
    let compute = on.stream("compute").unwrap();
    let memory: Vec<Buffer> = sizes.iter().map(|&size| on.upload(&vec![3; size as usize])).collect();
    let wants: Vec<(u64, u64)> = (0..).zip(sizes).collect();
    sleeper.place(&wants, None).unwrap();
    let tracing = tracing();
    for direction in [Direction::Sleep, Direction::Wake] {
        let transfer = sleeper.begin(direction, Some(&compute), None).unwrap();
        let batch = |ids: std::ops::Range<u64>| ids.map(|id| (id, memory[id as usize].all())).collect::<Vec<_>>();
        for ids in [0..2, 2..3] {
            let number = sleeper.submit(&transfer, batch(ids), Some(&compute)).unwrap();
            transfer.wait(number).unwrap();
        }
        transfer.finish().unwrap();
    }
    let recording = tracing.end();
    sleeper.free(&[0, 1, 2]);
    for kind in [Kind::Sleep, Kind::Wake] {
        let spans = of(&recording, kind, 0);
        let found: Vec<(Option<u32>, u64)> = spans.iter().map(|span| (span.chunk, span.bytes)).collect();
        assert_eq!(found, [(Some(0), 75_000), (Some(1), 64)], "{kind:?}");
    }
}

fn memory_is_counted(on: &Subject) {
    let before = tracing().end();
    let first = |recording: &Recording| {
        let pinned = recording.records.iter().find_map(|record| match record {
            Record::Counter(_, Counter::Pinned(pinned)) => Some(*pinned),
            _ => None,
        });
        let ring = recording.records.iter().find_map(|record| match record {
            Record::Counter(_, Counter::Ring(ring)) => Some(*ring),
            _ => None,
        });
        (pinned.unwrap(), ring.unwrap())
    };
    let (pinned, ring) = first(&before);
    let rig = Rig::placed(on, Scenario::new(group_tensors(), 3, 4096), 1, Placement::Hybrid(HostShare::Fixed(0.5)));
    let tracing = tracing();
    let found = {
        let sleeper = Sleeper::new(Allocator::new(on.device.clone()));
        sleeper.place(&[(0, 100_000)], None).unwrap();
        sleeper.pinned_bytes()
    };
    let recording = tracing.end();
    let (now, ring_now) = first(&recording);
    // The numbers of steps are shared by all optimizers and count for none.
    assert!(now[0] >= pinned[0] + rig.optimizer.pinned_bytes());
    assert_eq!((now[1..].to_vec(), ring_now), (pinned[1..].to_vec(), ring + rig.optimizer.ring_bytes()));
    let asleep: Vec<u64> = recording
        .records
        .iter()
        .filter_map(|record| match record {
            Record::Counter(_, Counter::Pinned(pinned)) => Some(pinned[2]),
            _ => None,
        })
        .collect();
    assert_eq!(asleep, [pinned[2], pinned[2] + found, pinned[2]]);
}

/// Every two spans of one line follow each other, or one is inside the other.
fn rows_of_a_file_never_cross(on: &Subject) {
    let rigs: Vec<_> = (0..2)
        .map(|_| Rig::placed(on, Scenario::new(group_tensors(), 3, 4096), 3, Placement::Hybrid(HostShare::Fixed(0.5))))
        .collect();
    let tracing = tracing();
    std::thread::scope(|scope| {
        for rig in &rigs {
            scope.spawn(|| (0..3).for_each(|step| rig.step(step).unwrap()));
        }
    });
    let recording = tracing.end();
    let mut file = Vec::new();
    let owners = rigs.iter().enumerate().map(|(i, rig)| (rig.optimizer.trace_owner(), format!("AdamW {i}"))).collect();
    recording.write(&mut file, &About { rank: 3, ranks: 4, owners, ..About::default() }).unwrap();
    let file: serde_json::Value = serde_json::from_slice(&file).unwrap();
    let mut lines: HashMap<u64, Vec<(f64, f64)>> = HashMap::new();
    for event in file["traceEvents"].as_array().unwrap() {
        assert_eq!(event["pid"], 3);
        if event["ph"] == "X" {
            let begin = event["ts"].as_f64().unwrap();
            let span = (begin, begin + event["dur"].as_f64().unwrap());
            lines.entry(event["tid"].as_u64().unwrap()).or_default().push(span);
        }
    }
    // Times are whole nanoseconds, written in microseconds.
    const NS: f64 = 1e-3;
    for (line, spans) in lines {
        for (i, a) in spans.iter().enumerate() {
            for b in &spans[i + 1..] {
                let apart = a.1 <= b.0 + NS || b.1 <= a.0 + NS;
                let inside = (a.0 <= b.0 + NS && b.1 <= a.1 + NS) || (b.0 <= a.0 + NS && a.1 <= b.1 + NS);
                assert!(apart || inside, "line {line}: {a:?} and {b:?}");
            }
        }
    }
    let header = &file["forebay"];
    assert_eq!((&header["rank"], &header["ranks"], &header["schema"]), (&3.into(), &4.into(), &1.into()));
    rigs.iter().for_each(|rig| rig.assert_exact(3));
}
