//! The contract of a device, checked on a machine that has it: for `forebay check`, on accelerators that no test of this
//! project ran on.
//!
//! The tests of `crates/device/tests/contract` say more; these are the parts on which a step, an offload and a sleep rely
//! and which a backend of torch may lack. What must be ordered is checked behind a stream that is kept busy, so that a
//! wait that does nothing reads old bytes. Where torch cannot keep a stream busy, it gets many copies to do.

use forebay::Result;
use forebay::device::{Buffer, Event, Kernel, Place, Region, SharedDevice, SlabLayout, Stream};

/// Bytes of the payload of one check.
const BYTES: u64 = 1 << 20;
/// Bytes of one copy with which a stream is kept busy, and how many of them.
const BUSY: (u64, usize) = (64 << 20, 8);

/// How one check went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checked {
    /// What has to hold.
    pub what: &'static str,
    /// Why it does not.
    pub problem: Option<String>,
}

type Check = fn(&Subject<'_>) -> Result<Option<String>>;

const CHECKS: [(&str, Check); 9] = [
    ("copies carry every byte and no other", copies),
    ("one stream runs in the order of submission", in_order),
    ("a stream waits for an event of another", waits),
    ("a wait is for the mark of its submission", marks),
    ("the host waits for an event", host_waits),
    ("submitting does not wait for the work", submits),
    ("times cover the work between two events", times),
    ("memory on the device is aligned and counted", memory),
    ("streams and events are made once and kept", counts),
];

struct Subject<'a> {
    device: &'a SharedDevice,
    busy: Option<(Buffer, Buffer)>,
}

/// Runs every check on a device. A check that cannot run is a problem too.
pub fn check_contract(device: &SharedDevice) -> Result<Vec<Checked>> {
    let spins = {
        let stream = device.stream("spin")?;
        device.launch(&stream, &Kernel::Spin { ns: 1 }).is_ok()
    };
    let busy = if spins { None } else { Some((device.alloc(BUSY.0)?, device.alloc(BUSY.0)?)) };
    let subject = Subject { device, busy };
    let run = |(what, check): (&'static str, Check)| Checked {
        what,
        problem: check(&subject).unwrap_or_else(|error| Some(error.to_string())),
    };
    Ok(CHECKS.into_iter().map(run).collect())
}

impl Subject<'_> {
    fn stream(&self) -> Result<Stream> {
        Ok(self.device.stream("check")?)
    }

    fn pinned(&self, bytes: u64, byte: u8) -> Result<Region> {
        let region = self.device.pin(SlabLayout::new(&[bytes])?)?.part(0)?;
        self.device.write(&vec![byte; bytes as usize], &region)?;
        Ok(region)
    }

    /// Keeps a stream busy for some tens of milliseconds, if the device can be.
    fn delay(&self, stream: &Stream) -> Result<()> {
        match &self.busy {
            None => self.device.launch(stream, &Kernel::Spin { ns: 100_000_000 })?,
            Some((a, b)) => {
                (0..BUSY.1).try_for_each(|_| self.device.copy(stream, &a.all(), &b.all()))?;
            }
        }
        Ok(())
    }

    fn finish(&self, stream: &Stream) -> Result<()> {
        let end = self.device.event()?;
        self.device.record(&end, stream)?;
        Ok(self.device.synchronize(&end)?)
    }

    fn bytes(&self, region: &Region) -> Result<Vec<u8>> {
        let mut bytes = vec![0; region.bytes() as usize];
        self.device.read(region, &mut bytes)?;
        Ok(bytes)
    }

    fn holds(&self, region: &Region, byte: u8, what: &str) -> Result<Option<String>> {
        let wrong = self.bytes(region)?.into_iter().filter(|&found| found != byte).count();
        Ok((wrong > 0).then(|| format!("{what}: {wrong} of {} bytes are wrong", region.bytes())))
    }
}

fn copies(on: &Subject<'_>) -> Result<Option<String>> {
    let stream = on.stream()?;
    let (a, b) = (on.device.alloc(BYTES + 1024)?, on.device.alloc(BYTES + 1024)?);
    for (bytes, from, to) in [(1, 0, 0), (3, 255, 1), (4097, 13, 777), (BYTES - 3, 5, 11)] {
        let (source, sink) = (on.pinned(BYTES + 1024, 0)?, on.pinned(BYTES + 1024, 0xcc)?);
        let sent: Vec<u8> = (0..BYTES + 1024).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 11) as u8).collect();
        on.device.write(&sent, &source)?;
        on.device.copy(&stream, &source.slice(from, bytes)?, &a.region(to, bytes)?)?;
        on.device.copy(&stream, &a.region(to, bytes)?, &b.region(from, bytes)?)?;
        on.device.copy(&stream, &b.region(from, bytes)?, &sink.slice(to, bytes)?)?;
        on.finish(&stream)?;
        let found = on.bytes(&sink)?;
        let range = |start: u64| start as usize..(start + bytes) as usize;
        let mut wanted = vec![0xcc; found.len()];
        wanted[range(to)].copy_from_slice(&sent[range(from)]);
        if found != wanted {
            return Ok(Some(format!("{bytes} bytes from offset {from} to {to} came out wrong")));
        }
    }
    Ok(None)
}

fn in_order(on: &Subject<'_>) -> Result<Option<String>> {
    let (stream, slot) = (on.stream()?, on.device.alloc(BYTES)?);
    let (one, two) = (on.pinned(BYTES, 1)?, on.pinned(BYTES, 2)?);
    let (first, second) = (on.pinned(BYTES, 0)?, on.pinned(BYTES, 0)?);
    on.delay(&stream)?;
    on.device.copy(&stream, &one, &slot.all())?;
    on.device.copy(&stream, &slot.all(), &first)?;
    on.device.copy(&stream, &two, &slot.all())?;
    on.device.copy(&stream, &slot.all(), &second)?;
    on.finish(&stream)?;
    Ok(on.holds(&first, 1, "the first")?.or(on.holds(&second, 2, "the second")?))
}

fn waits(on: &Subject<'_>) -> Result<Option<String>> {
    let (slow, quick, done) = (on.stream()?, on.stream()?, on.device.event()?);
    let (slot, sink) = (on.device.alloc(BYTES)?, on.pinned(BYTES, 0)?);
    on.device.copy(&slow, &on.pinned(BYTES, 1)?, &slot.all())?;
    on.finish(&slow)?;
    let source = on.pinned(BYTES, 2)?;
    on.delay(&slow)?;
    on.device.copy(&slow, &source, &slot.all())?;
    on.device.record(&done, &slow)?;
    on.device.wait(&quick, &done)?;
    on.device.copy(&quick, &slot.all(), &sink)?;
    on.finish(&quick)?;
    on.holds(&sink, 2, "what the other stream read")
}

fn marks(on: &Subject<'_>) -> Result<Option<String>> {
    let (slow, quick, event) = (on.stream()?, on.stream()?, on.device.event()?);
    let end: Event = on.device.event()?;
    on.device.record(&event, &slow)?;
    on.device.wait(&quick, &event)?;
    on.delay(&slow)?;
    on.device.record(&event, &slow)?;
    on.finish(&quick)?;
    on.device.record(&end, &slow)?;
    let pending = !on.device.query(&end)?;
    on.device.synchronize(&end)?;
    Ok((!pending).then(|| "a wait was for a mark that came later, or nothing runs beside anything".to_owned()))
}

fn host_waits(on: &Subject<'_>) -> Result<Option<String>> {
    let (stream, event) = (on.stream()?, on.device.event()?);
    let (slot, source, sink) = (on.device.alloc(BYTES)?, on.pinned(BYTES, 3)?, on.pinned(BYTES, 0)?);
    on.delay(&stream)?;
    on.device.copy(&stream, &source, &slot.all())?;
    on.device.copy(&stream, &slot.all(), &sink)?;
    on.device.record(&event, &stream)?;
    on.device.synchronize(&event)?;
    if !on.device.query(&event)? {
        return Ok(Some("an event that the host waited for was not reached".to_owned()));
    }
    on.holds(&sink, 3, "what the host read")
}

fn submits(on: &Subject<'_>) -> Result<Option<String>> {
    let (stream, event) = (on.stream()?, on.device.event()?);
    let (slot, source) = (on.device.alloc(BYTES)?, on.pinned(BYTES, 3)?);
    on.delay(&stream)?;
    on.device.copy(&stream, &source, &slot.all())?;
    on.device.copy(&stream, &slot.all(), &source)?;
    on.device.record(&event, &stream)?;
    let pending = !on.device.query(&event)?;
    on.device.synchronize(&event)?;
    Ok((!pending).then(|| "the work had ended when the call returned: copies hide under nothing".to_owned()))
}

fn times(on: &Subject<'_>) -> Result<Option<String>> {
    let (stream, begin, end) = (on.stream()?, on.device.timed_event()?, on.device.timed_event()?);
    on.device.record(&begin, &stream)?;
    on.delay(&stream)?;
    on.device.record(&end, &stream)?;
    on.device.synchronize(&end)?;
    let (there, back) = (on.device.elapsed_ns(&begin, &end)?, on.device.elapsed_ns(&end, &begin)?);
    Ok((there == 0 || back != 0).then(|| format!("{there} ns from begin to end, and {back} ns back")))
}

fn memory(on: &Subject<'_>) -> Result<Option<String>> {
    let before = on.device.memory()?.allocated_bytes;
    let buffers = [1, 1000, BYTES].map(|bytes| on.device.alloc(bytes));
    for buffer in buffers {
        let all = buffer?.all();
        if all.addr() % 256 != 0 || all.place() != Place::Device {
            return Ok(Some(format!("memory at {:#x}", all.addr())));
        }
    }
    let after = on.device.memory()?.allocated_bytes;
    Ok((after != before).then(|| format!("{before} bytes before, {after} bytes after")))
}

fn counts(on: &Subject<'_>) -> Result<Option<String>> {
    let (stream, event) = (on.stream()?, on.device.event()?);
    let before = on.device.counters();
    for _ in 0..3 {
        on.device.record(&event, &stream)?;
        on.device.wait(&stream, &event)?;
        on.device.synchronize(&event)?;
    }
    let made = on.device.counters().total() - before.total();
    Ok((made != 0).then(|| format!("{made} more were made")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay::device::{CpuDevice, CpuOptions};

    #[test]
    fn the_reference_keeps_the_contract() {
        let device: SharedDevice = CpuDevice::open(CpuOptions::default()).unwrap();
        for checked in check_contract(&device).unwrap() {
            assert_eq!(checked.problem, None, "{}", checked.what);
        }
    }
}
