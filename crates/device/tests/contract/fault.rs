//! The device that misbehaves on demand: it strikes once, on the call it was told, in the way it was told.

use std::sync::Arc;

use forebay_device::fault::{Call, Misbehaviour};
use forebay_device::{Error, Event, Fault, Kernel, Region, Result, SlabLayout, Stream};

use crate::bench::{Kind, Subject, pattern, refused, stream_failed};

forebay_device::on_devices! {
    every:
        without_rules_it_is_the_device,
        each_call_can_fail_and_then_did_nothing,
        it_strikes_the_nth_call_once,
        both_sorts_of_event_count_as_one_call,
        memory_can_run_out,
        a_late_call_delays_its_stream,
        a_late_producer_is_still_waited_for,
        what_names_no_stream_cannot_be_late_or_break;
    cpu: a_broken_call_fails_a_later_wait;
}

fn faulty(on: &Subject) -> (Arc<Fault>, Subject) {
    let fault = Fault::wrap(on.device.clone());
    (fault.clone(), Subject::wrapping(fault, on.kind))
}

const ON_STREAMS: [Call; 4] = [Call::Record, Call::Wait, Call::Copy, Call::Launch];
const OTHERS: [Call; 6] = [Call::Alloc, Call::Pin, Call::Stream, Call::Event, Call::Synchronize, Call::Write];

/// Something of everything, made before the fault strikes.
struct Stage {
    stream: Stream,
    recorded: Event,
    fresh: Event,
    source: Region,
    sink: Region,
    host: Region,
}

impl Stage {
    fn new(on: &Subject) -> Self {
        let [stream] = on.streams(["struck"]);
        let [recorded, fresh] = on.timed_events();
        let (source, sink) = (on.upload(&[1; 64]).all(), on.upload(&[2; 64]).all());
        let host = on.pin(SlabLayout::new(&[64]).unwrap()).and_then(|slab| slab.part(0)).unwrap();
        on.record(&recorded, &stream).unwrap();
        Self { stream, recorded, fresh, source, sink, host }
    }

    fn call(&self, on: &Subject, call: Call) -> Result<()> {
        match call {
            Call::Alloc => on.alloc(1).map(drop),
            Call::Pin => on.pin(SlabLayout::new(&[1]).unwrap()).map(drop),
            Call::Stream => on.stream("made").map(drop),
            Call::Event => on.event().map(drop),
            Call::Record => on.record(&self.fresh, &self.stream),
            Call::Wait => on.wait(&self.stream, &self.recorded),
            Call::Synchronize => on.synchronize(&self.recorded),
            Call::Copy => on.copy(&self.stream, &self.source, &self.sink),
            Call::Launch => on.fill(&self.stream, &self.sink, 3),
            Call::Write => on.write(&[4; 64], &self.host),
            Call::HostUpdate => unreachable!("see host.rs"),
        }
    }
}

fn without_rules_it_is_the_device(on: &Subject) {
    let (_, faulty) = faulty(on);
    let sent = pattern(1, 5000);
    let buffer = faulty.upload(&sent);
    assert!(faulty.download(&buffer.all()) == sent && on.download(&buffer.all()) == sent);
    assert_eq!((faulty.info(), faulty.counters(), faulty.memory()), (on.info(), on.counters(), on.memory()));
}

fn each_call_can_fail_and_then_did_nothing(on: &Subject) {
    let (fault, faulty) = faulty(on);
    for call in ON_STREAMS.into_iter().chain(OTHERS) {
        let stage = Stage::new(on);
        let before = (on.counters(), on.memory().unwrap().allocated_bytes, on.memory().unwrap().pinned_bytes);
        fault.on(call, 0, Misbehaviour::Fail);
        let (stream, reason) = stream_failed(stage.call(&faulty, call));
        assert!(reason.contains(&format!("{call:?}")), "{reason}");
        assert_eq!(stream == "struck", ON_STREAMS.contains(&call), "{call:?} names {stream}");
        let after = (on.counters(), on.memory().unwrap().allocated_bytes, on.memory().unwrap().pinned_bytes);
        assert_eq!(after, before, "a failed {call:?} made something");
        refused(on.elapsed_ns(&stage.recorded, &stage.fresh));
        on.finish(&stage.stream).unwrap();
        assert_eq!(on.download(&stage.sink), vec![2; 64], "a failed {call:?} wrote");
        stage.call(&faulty, call).unwrap();
        on.finish(&stage.stream).unwrap();
    }
}

fn it_strikes_the_nth_call_once(on: &Subject) {
    let (fault, faulty) = faulty(on);
    for call in ON_STREAMS.into_iter().chain(OTHERS) {
        let stage = Stage::new(on);
        fault.on(call, 2, Misbehaviour::Fail);
        fault.on(call, 4, Misbehaviour::Fail);
        // Other calls neither count nor are struck.
        let other = if call == Call::Copy { Call::Launch } else { Call::Copy };
        let outcomes: Vec<bool> = (0..7)
            .map(|_| {
                stage.call(&faulty, other).unwrap();
                stage.call(&faulty, call).is_ok()
            })
            .collect();
        assert_eq!(outcomes, [true, true, false, true, false, true, true], "{call:?}");
        on.finish(&stage.stream).unwrap();
    }
}

fn both_sorts_of_event_count_as_one_call(on: &Subject) {
    let (fault, faulty) = faulty(on);
    fault.on(Call::Event, 1, Misbehaviour::Fail);
    fault.on(Call::Event, 2, Misbehaviour::Fail);
    faulty.event().unwrap();
    stream_failed(faulty.timed_event());
    stream_failed(faulty.event());
    faulty.timed_event().unwrap();
    assert_eq!(on.counters().events, 2);
}

fn memory_can_run_out(on: &Subject) {
    let (fault, faulty) = faulty(on);
    fault.on(Call::Alloc, 0, Misbehaviour::OutOfMemory);
    fault.on(Call::Pin, 0, Misbehaviour::OutOfMemory);
    assert!(matches!(faulty.alloc(64), Err(Error::OutOfDeviceMemory { .. })));
    let pinned = faulty.pin(SlabLayout::new(&[64]).unwrap());
    assert!(matches!(pinned, Err(Error::OutOfPinnedBudget { .. })), "{pinned:?}");
    let memory = on.memory().unwrap();
    assert_eq!((memory.allocated_bytes, memory.pinned_bytes, on.counters().pins), (0, 0, 0));
    assert_eq!(faulty.download(&faulty.upload(&[1; 64]).all()), vec![1; 64]);
}

fn a_late_call_delays_its_stream(on: &Subject) {
    let (fault, faulty) = faulty(on);
    for call in ON_STREAMS {
        let stage = Stage::new(on);
        let end = on.timed_event().unwrap();
        fault.on(call, 0, Misbehaviour::Late { ns: 30_000_000 });
        stage.call(&faulty, call).unwrap();
        on.record(&end, &stage.stream).unwrap();
        on.synchronize(&end).unwrap();
        let late_ns = on.elapsed_ns(&stage.recorded, &end).unwrap();
        assert!(late_ns >= 28_000_000, "a {call:?} late by 30 ms took {late_ns} ns");
    }
}

fn a_late_producer_is_still_waited_for(on: &Subject) {
    let (fault, on) = faulty(on);
    for call in ON_STREAMS {
        let [producer, consumer] = on.streams(["producer", "consumer"]);
        let [made, idle] = on.events();
        let (source, buffer, host) = (on.upload(&[5; 9000]), on.upload(&[1; 9000]), on.pinned(9000));
        on.record(&idle, &consumer).unwrap();
        fault.on(call, 0, Misbehaviour::Late { ns: 30_000_000 });
        on.wait(&producer, &idle).unwrap();
        on.launch(&producer, &Kernel::Spin { ns: 1 }).unwrap();
        on.copy(&producer, &source.all(), &buffer.all()).unwrap();
        on.record(&made, &producer).unwrap();
        on.wait(&consumer, &made).unwrap();
        on.copy(&consumer, &buffer.all(), &host).unwrap();
        on.finish(&consumer).unwrap();
        assert_eq!(on.host_bytes(&host), vec![5; 9000], "{call:?}");
    }
}

fn a_broken_call_fails_a_later_wait(on: &Subject) {
    for call in ON_STREAMS {
        let on = Subject::wrapping(on.kind.open(), on.kind);
        let (fault, faulty) = faulty(&on);
        let stage = Stage::new(&on);
        // Held up, so that the failure comes after all that is submitted here.
        on.spin(&stage.stream, 30);
        fault.on(call, 0, Misbehaviour::Break);
        stage.call(&faulty, call).unwrap();
        let [end, waited] = on.events();
        on.record(&end, &stage.stream).unwrap();
        let [dependent] = on.streams(["dependent"]);
        on.wait(&dependent, &end).unwrap();
        on.record(&waited, &dependent).unwrap();
        for event in [&end, &waited] {
            assert_eq!(stream_failed(faulty.synchronize(event)).0, "struck", "{call:?}");
        }
        on.synchronize(&stage.recorded).unwrap();
        if on.kind == Kind::Cpu {
            assert_eq!(on.download(&stage.sink), vec![2; 64], "a broken {call:?} ran");
        }
    }
}

fn what_names_no_stream_cannot_be_late_or_break(on: &Subject) {
    let (fault, faulty) = faulty(on);
    let stage = Stage::new(on);
    for how in [Misbehaviour::Late { ns: 1 }, Misbehaviour::Break] {
        for call in OTHERS {
            fault.on(call, 0, how);
            refused(stage.call(&faulty, call));
            stage.call(&faulty, call).unwrap();
        }
    }
}
