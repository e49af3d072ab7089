//! A forked child: every call says so instead of hanging, and nothing of the parent's is touched.

#![expect(unsafe_code, reason = "fork, and what a child may do, are system calls")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_device::{Device, Error, Kernel, Result, SlabLayout, open};

use crate::bench::Subject;

forebay_device::on_devices! {
    every:
        calls_in_a_forked_child_say_so,
        slabs_stay_out_of_a_forked_child;
    cpu: a_forked_child_opens_a_device_of_its_own;
}

/// What the child found: 0 where all was well, else which check was not; 101 a panic, a negative number a signal.
fn in_a_child(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs only `body`, on this thread, and then leaves by `_exit`; the C library's allocator works
    // in the child of a process with threads.
    match unsafe { libc::fork() } {
        -1 => panic!("fork: {}", std::io::Error::last_os_error()),
        0 => {
            // SAFETY: as above; a hang is ended by the alarm's signal.
            unsafe { libc::alarm(30) };
            let code = catch_unwind(AssertUnwindSafe(body)).unwrap_or(101);
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { libc::_exit(code) }
        }
        child => {
            let mut status = 0;
            // SAFETY: waits for our own child and writes one integer.
            let waited = unsafe { libc::waitpid(child, &mut status, 0) };
            assert_eq!(waited, child);
            if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -libc::WTERMSIG(status) }
        }
    }
}

fn calls_in_a_forked_child_say_so(on: &Subject) {
    let [stream, busy] = on.streams(["stream", "busy"]);
    let [event, pending] = on.events();
    let slab = on.pin(SlabLayout::new(&[64]).unwrap()).unwrap();
    let (host, buffer) = (slab.part(0).unwrap(), on.upload(&[1; 64]));
    on.record(&event, &stream).unwrap();
    on.synchronize(&event).unwrap();
    on.spin(&busy, 100);
    on.record(&pending, &busy).unwrap();
    let device: &dyn Device = &**on;
    let found = in_a_child(|| {
        let fill = Kernel::Fill { dst: buffer.all(), byte: 2 };
        type Attempt<'a> = &'a dyn Fn() -> Result<()>;
        let attempts: [Attempt<'_>; 14] = [
            &|| device.launch(&stream, &fill),
            &|| device.copy(&stream, &host, &buffer.all()),
            &|| device.record(&event, &stream),
            &|| device.wait(&stream, &event),
            &|| device.query(&event).map(drop),
            &|| device.synchronize(&pending),
            &|| device.elapsed_ns(&event, &event).map(drop),
            &|| device.stream("child's").map(drop),
            &|| device.event().map(drop),
            &|| device.timed_event().map(drop),
            &|| device.alloc(64).map(drop),
            &|| device.pin(SlabLayout::new(&[64])?).map(drop),
            &|| device.read(&host, &mut [0; 64]),
            &|| device.write(&[0; 64], &host),
        ];
        let forked = |attempt: &Attempt<'_>| matches!(attempt(), Err(Error::Forked { .. }));
        attempts.iter().position(|attempt| !forked(attempt)).map_or(0, |i| i as i32 + 1)
    });
    assert_eq!(found, 0, "the call of this number (from 1) did not say that the process was forked");
    // The parent noticed nothing.
    on.synchronize(&pending).unwrap();
    on.fill(&stream, &buffer.all(), 3).unwrap();
    on.finish(&stream).unwrap();
    assert_eq!(on.download(&buffer.all()), vec![3; 64]);
}

/// The slab's addresses are free in the child, and dropping the child's copy of the handle leaves alone what the child
/// has put there since.
fn slabs_stay_out_of_a_forked_child(on: &Subject) {
    const BYTES: usize = 8192;
    let slab = on.pin(SlabLayout::new(&[BYTES as u64]).unwrap()).unwrap();
    on.write(&[7; BYTES], &slab.part(0).unwrap()).unwrap();
    let addr = slab.buffer().addr();
    let handle = slab.clone();
    let buffer = on.alloc(64).unwrap();
    let found = in_a_child(move || {
        // SAFETY: a mapping that may not replace one that is there.
        let mapped = unsafe {
            libc::mmap(
                addr as *mut _,
                BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
                -1,
                0,
            )
        };
        if mapped as usize != addr {
            return 1;
        }
        // SAFETY: just mapped, this long.
        unsafe { (addr as *mut u8).write_volatile(5) };
        drop((slab, handle, buffer));
        // SAFETY: as above; if the drop unmapped it, the child dies of a signal and the test fails.
        if unsafe { (addr as *const u8).read_volatile() } == 5 { 0 } else { 2 }
    });
    assert_eq!(found, 0, "1: the slab is mapped in the child; 2 or a signal: the drop touched the child's own memory");
}

/// Also while another thread of the parent opens devices: the child shares no lock with it.
fn a_forked_child_opens_a_device_of_its_own(on: &Subject) {
    let name = on.info().name.clone();
    let parents = open(&name).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                open(&name).unwrap();
            }
        });
        for _ in 0..50 {
            let found = in_a_child(|| {
                let own = open(&name).unwrap();
                if own.info().id == parents.info().id {
                    return 1;
                }
                let own = Subject::wrapping(own, on.kind);
                if own.download(&own.upload(&[6; 64]).all()) == vec![6; 64] { 0 } else { 2 }
            });
            assert_eq!(found, 0, "1: the parent's device; 2: one that does not work; -14: a hang");
        }
        stop.store(true, Ordering::Relaxed);
    });
}
