//! Opening a device: names, options, what is missing, and the simulated link.

use forebay_device::{
    Backend, CpuDevice, CpuOptions, CudaDevice, CudaOptions, Error, LinkOptions, SharedDevice, backends, open,
    open_default,
};

use crate::bench::{Subject, has_cuda};

forebay_device::on_devices! {
    every:
        a_device_says_what_it_is,
        a_name_is_one_device_for_the_whole_process,
        a_shared_device_outlives_its_users;
    cpu:
        a_link_holds_copies_to_its_pace,
        a_shared_link_carries_one_copy_at_a_time,
        two_streams_share_one_way_of_a_link,
        copies_on_the_device_do_not_use_the_link;
}

#[test]
fn names_of_no_device_are_refused() {
    for name in ["gpu", "cuda:-1", "cuda:x", "cuda:", "cuda: 0", "cuda:0x1", "cuda:9999", "cpu:0", "CPU", ""] {
        match open(name) {
            Err(Error::InvalidOption { option: "device", value, remedy }) => {
                assert_eq!(value, name);
                assert!(remedy.contains("cpu") && remedy.contains("cuda:N"), "{remedy}");
            }
            other => panic!("{name:?}: {other:?}"),
        }
    }
}

#[test]
fn an_absent_device_is_named_with_the_reason() {
    match open("cuda:99") {
        Err(Error::DeviceAbsent { device, reason }) => {
            assert!(device.starts_with("cuda") && !reason.is_empty(), "{device}: {reason}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn backends_are_listed_with_what_they_found() {
    let found = backends();
    assert_eq!(found.iter().map(|status| status.backend).collect::<Vec<_>>(), [Backend::Cpu, Backend::Cuda]);
    assert_eq!((&found[0].devices[..], &found[0].problem), (&["cpu".to_owned()][..], &None));
    assert_eq!(found[1].devices.is_empty(), open("cuda").is_err());
    if found[1].devices.is_empty() {
        assert_eq!(open("cuda").unwrap_err(), found[1].problem.clone().expect("a reason"));
    }
    let best = found.iter().rev().find_map(|status| status.devices.first()).unwrap();
    assert_eq!(&open_default().unwrap().info().name, best);
}

fn a_device_says_what_it_is(on: &Subject) {
    let backend = if on.kind.is_cuda() { Backend::Cuda } else { Backend::Cpu };
    let info = on.info();
    assert_eq!((info.name.as_str(), info.backend), (if on.kind.is_cuda() { "cuda:0" } else { "cpu" }, backend));
    assert!(!info.model.is_empty());
    assert_ne!(info.id, on.kind.open().info().id, "two devices have two ids");
    assert_eq!(on.streams(["a name"])[0].name(), "a name");
}

/// By whatever thread it is asked for, also by several at once.
fn a_name_is_one_device_for_the_whole_process(on: &Subject) {
    let name = on.info().name.clone();
    let ids: Vec<_> = std::thread::scope(|scope| {
        let openers: Vec<_> = (0..8).map(|_| scope.spawn(|| open(&name).unwrap().info().id)).collect();
        openers.into_iter().map(|opener| opener.join().unwrap()).collect()
    });
    let shared = open(&name).unwrap();
    assert!(ids.iter().all(|&id| id == shared.info().id), "{ids:?}");
    if on.kind.is_cuda() {
        assert_eq!(open("cuda").unwrap().info().id, shared.info().id, "`cuda` is `cuda:0`");
    }
    assert_ne!(on.info().id, shared.info().id, "a device of one's own is not the shared one");
}

/// One user's end is nothing to another: streams, memory and work of the shared device go on.
fn a_shared_device_outlives_its_users(on: &Subject) {
    let name = on.info().name.clone();
    let (first, id) = (open(&name).unwrap(), open(&name).unwrap().info().id);
    let second = Subject::wrapping(open(&name).unwrap(), on.kind);
    let [stream] = second.streams(["second user"]);
    let buffer = second.upload(&[1; 1000]);
    second.spin(&stream, 20);
    second.fill(&stream, &buffer.all(), 2).unwrap();
    drop(first);
    second.finish(&stream).unwrap();
    assert_eq!(second.download(&buffer.all()), vec![2; 1000]);
    drop((stream, buffer, second));
    assert_eq!(open(&name).unwrap().info().id, id, "it stays open when nobody uses it");
}

#[test]
fn kernels_the_driver_refuses_come_with_its_words() {
    if !has_cuda() {
        return;
    }
    let no_kernels = ".version 8.0\n.target sm_80\n.address_size 64\n";
    for ptx in ["garbage", "", "a zero \0 byte", no_kernels] {
        match CudaDevice::open(CudaOptions { ptx: Some(ptx.to_owned()), ..CudaOptions::default() }) {
            Err(Error::KernelsRefused { device, log }) => {
                assert!(device == "cuda:0" && !log.is_empty(), "{device}: {log}");
            }
            other => panic!("{ptx:?}: {other:?}"),
        }
    }
    open("cuda:0").unwrap();
}

#[test]
fn rates_that_are_none_are_refused() {
    for rate in [0.0, -0.0, -1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for (option, fetch, store) in [("fetch_bytes_per_s", rate, 1e9), ("store_bytes_per_s", 1e9, rate)] {
            let link = LinkOptions { fetch_bytes_per_s: fetch, store_bytes_per_s: store, duplex: true };
            match CpuDevice::open(CpuOptions { link: Some(link), ..CpuOptions::default() }) {
                Err(Error::InvalidOption { option: named, .. }) => assert_eq!(named, option, "{rate}"),
                other => panic!("{rate}: {other:?}"),
            }
        }
    }
}

const BYTES: u64 = 4 << 20;

/// What `BYTES` take at so many bytes per second.
fn link_ns(bytes_per_s: f64) -> u64 {
    (BYTES as f64 / bytes_per_s * 1e9) as u64
}

fn linked(on: &Subject, fetch_bytes_per_s: f64, store_bytes_per_s: f64, duplex: bool) -> Subject {
    let link = Some(LinkOptions { fetch_bytes_per_s, store_bytes_per_s, duplex });
    let device: SharedDevice = CpuDevice::open(CpuOptions { link, ..CpuOptions::default() }).unwrap();
    Subject::wrapping(on.kind.dress(device), on.kind)
}

fn a_link_holds_copies_to_its_pace(on: &Subject) {
    for duplex in [true, false] {
        let on = linked(on, 1e9, 0.5e9, duplex);
        let [stream] = on.streams(["copies"]);
        let [start, fetched, stored] = on.timed_events();
        let (buffer, host) = (on.alloc(BYTES).unwrap(), on.pinned(BYTES));
        on.write(&[3; BYTES as usize], &host).unwrap();
        on.record(&start, &stream).unwrap();
        on.copy(&stream, &host, &buffer.all()).unwrap();
        on.record(&fetched, &stream).unwrap();
        on.copy(&stream, &buffer.all(), &host).unwrap();
        on.record(&stored, &stream).unwrap();
        on.synchronize(&stored).unwrap();
        let (fetch_ns, store_ns) =
            (on.elapsed_ns(&start, &fetched).unwrap(), on.elapsed_ns(&fetched, &stored).unwrap());
        assert!(fetch_ns >= link_ns(1e9), "a fetch took {fetch_ns} ns");
        assert!(store_ns >= link_ns(0.5e9), "a store took {store_ns} ns");
        assert_eq!(on.host_bytes(&host), vec![3; BYTES as usize]);
    }
}

/// Time from before both copies to after both, each on a stream of its own.
fn both_ns(on: &Subject, ways: [bool; 2]) -> u64 {
    let streams = on.streams(["one", "two"]);
    let [start, first, second] = on.timed_events();
    let ends = [first, second];
    let pairs = [0, 1].map(|_| (on.upload(&vec![1; BYTES as usize]), on.pinned(BYTES)));
    on.record(&start, &streams[0]).unwrap();
    on.synchronize(&start).unwrap();
    for i in 0..2 {
        let (device, host) = (pairs[i].0.all(), &pairs[i].1);
        let (from, to) = if ways[i] { (host, &device) } else { (&device, host) };
        on.copy(&streams[i], from, to).unwrap();
        on.record(&ends[i], &streams[i]).unwrap();
    }
    ends.map(|end| {
        on.synchronize(&end).unwrap();
        on.elapsed_ns(&start, &end).unwrap()
    })
    .into_iter()
    .fold(0, u64::max)
}

fn a_shared_link_carries_one_copy_at_a_time(on: &Subject) {
    let taken_ns = both_ns(&linked(on, 1e9, 1e9, false), [true, false]);
    assert!(taken_ns >= 2 * link_ns(1e9), "both ways over one channel took {taken_ns} ns");
    let taken_ns = both_ns(&linked(on, 1e9, 1e9, true), [true, false]);
    assert!(taken_ns >= link_ns(1e9), "both ways over two channels took {taken_ns} ns");
}

fn two_streams_share_one_way_of_a_link(on: &Subject) {
    for way in [true, false] {
        let taken_ns = both_ns(&linked(on, 1e9, 1e9, true), [way, way]);
        assert!(taken_ns >= 2 * link_ns(1e9), "two copies one way took {taken_ns} ns");
    }
}

fn copies_on_the_device_do_not_use_the_link(on: &Subject) {
    // At this pace the copy across the link would take an hour and a half.
    let on = linked(on, 1.0, 1.0, true);
    let (a, b) = (on.alloc(5000).unwrap(), on.alloc(5000).unwrap());
    let [stream] = on.streams(["device"]);
    on.fill(&stream, &a.all(), 1).unwrap();
    on.copy(&stream, &a.all(), &b.all()).unwrap();
    on.finish(&stream).unwrap();
}
