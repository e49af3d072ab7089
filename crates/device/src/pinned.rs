//! Host memory of exact size, mapped and faulted in by every core.
//!
//! A slab is one anonymous mapping. It is cut out of a larger reservation so that it starts on a huge-page boundary,
//! is left out of forked children (pinned pages would be copied at once), and is touched by all cores before the
//! driver registers it. Registering then only pins pages that exist, which is several times faster than letting the
//! driver fault them in one by one.
//!
//! [Note: huge pages are probed] Transparent huge pages speed faulting and registering up on some machines and slow
//! them down on others. The first [`PROBE_BYTES`] of a large slab are faulted in with them, the next without, and the
//! faster way is used for the rest. The probe faults memory that is needed anyway, so it costs almost nothing.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::thread::Cores;

const HUGE_PAGE_BYTES: u64 = 2 << 20;
const PROBE_BYTES: u64 = 256 << 20;
/// Threads that fault memory in count it in pieces of this size.
const COUNTED_BYTES: usize = 16 << 20;

static FAULTED: AtomicU64 = AtomicU64::new(0);

/// Bytes of host memory that this process has faulted in so far, for who shows how far that is.
pub fn faulted_bytes() -> u64 {
    FAULTED.load(Relaxed)
}

/// What it cost to make a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PinStats {
    /// Bytes pinned.
    pub bytes: u64,
    /// Time to fault the pages in.
    pub fault_ns: u64,
    /// Time to register them with the driver; 0 on the CPU backend.
    pub register_ns: u64,
    /// Whether most of the slab was faulted in as transparent huge pages.
    pub huge_pages: bool,
}

/// The size of a page of this machine.
pub(crate) fn page_bytes() -> u64 {
    // SAFETY: `sysconf` reads a constant of the system and takes no pointer.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}

/// An anonymous private mapping, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct HostMapping {
    addr: usize,
    bytes: u64,
    pub(crate) fault_ns: u64,
    pub(crate) huge_pages: bool,
    pid: u32,
}

impl HostMapping {
    /// Maps and faults in `bytes`, rounded up to a page, with `threads` threads.
    pub(crate) fn new(bytes: u64, threads: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::ZeroSize { what: "host memory" });
        }
        let bytes = bytes.next_multiple_of(page_bytes());
        refuse_more_than_memory(bytes)?;
        let reserved = bytes + HUGE_PAGE_BYTES;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                reserved as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(os_error("mmap", bytes));
        }
        let base = base as usize;
        let addr = base.next_multiple_of(HUGE_PAGE_BYTES as usize);
        unmap(base, addr - base);
        let end = addr + bytes as usize;
        unmap(end, base + reserved as usize - end);

        let mut mapping = Self { addr, bytes, fault_ns: 0, huge_pages: false, pid: std::process::id() };
        mapping.advise(0, bytes, libc::MADV_DONTFORK)?;
        let start = Instant::now();
        mapping.fault_in(threads.max(1))?;
        mapping.fault_ns = start.elapsed().as_nanos() as u64;
        Ok(mapping)
    }

    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    fn advise(&self, offset: u64, len: u64, advice: libc::c_int) -> Result<()> {
        // SAFETY: the range lies inside this mapping, and none of the advices used here discards its contents.
        let rc = unsafe { libc::madvise((self.addr + offset as usize) as *mut _, len as usize, advice) };
        if rc == 0 { Ok(()) } else { Err(os_error("madvise", len)) }
    }

    /// See [Note: huge pages are probed].
    fn fault_in(&mut self, threads: usize) -> Result<()> {
        if self.bytes < 4 * PROBE_BYTES {
            self.huge_pages = self.advise(0, self.bytes, libc::MADV_HUGEPAGE).is_ok();
            self.touch(0, self.bytes, threads);
            return Ok(());
        }
        // A kernel without huge pages refuses the advice; then there is nothing to choose.
        let offered = self.advise(0, PROBE_BYTES, libc::MADV_HUGEPAGE).is_ok();
        let huge_ns = self.touch(0, PROBE_BYTES, threads);
        if offered {
            self.advise(PROBE_BYTES, PROBE_BYTES, libc::MADV_NOHUGEPAGE)?;
        }
        let small_ns = self.touch(PROBE_BYTES, PROBE_BYTES, threads);
        let rest = self.bytes - 2 * PROBE_BYTES;
        self.huge_pages = offered && huge_ns <= small_ns;
        let advice = if self.huge_pages { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        if offered {
            self.advise(2 * PROBE_BYTES, rest, advice)?;
        }
        self.touch(2 * PROBE_BYTES, rest, threads);
        Ok(())
    }

    /// Writes one byte of every page of a range, split over the threads; returns the time taken.
    fn touch(&self, offset: u64, len: u64, threads: usize) -> u64 {
        let start = Instant::now();
        let page = page_bytes() as usize;
        let (first, len) = (self.addr + offset as usize, len as usize);
        let (spread, cores) = (numa_nodes() > 1, Cores::here());
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let mut portions = portions(len, threads, thread, spread).peekable();
                if portions.peek().is_none() {
                    break;
                }
                // Pages that no thread touches here are faulted in where they are used, only more slowly.
                let _ = cores.spawn_scoped(scope, "forebay-fault", move || {
                    let piece =
                        |range: &std::ops::Range<usize>, begin: usize| begin..range.end.min(begin + COUNTED_BYTES);
                    for range in portions {
                        for range in range.clone().step_by(COUNTED_BYTES).map(|begin| piece(&range, begin)) {
                            for addr in (first + range.start..first + range.end).step_by(page) {
                                // SAFETY: `addr` lies in this mapping, which outlives the scope; nobody else knows the
                                // address yet, and a fresh page holds zeros, so writing a zero changes nothing.
                                unsafe { (addr as *mut u8).write_volatile(0) };
                            }
                            FAULTED.fetch_add(range.len() as u64, Relaxed);
                        }
                    }
                });
            }
        });
        start.elapsed().as_nanos() as u64
    }
}

impl Drop for HostMapping {
    fn drop(&mut self) {
        // The mapping is not in a forked child (DONTFORK); something else may live at that address there.
        if self.pid == std::process::id() {
            unmap(self.addr, self.bytes as usize);
        }
    }
}

/// What one of several threads touches of a range: whole huge pages, so that two threads never fault in the same one.
///
/// [Note: first touch] A page lies on the node of the thread that touches it first. With one node each thread takes one
/// stretch. With several, threads take huge pages in turns, so that every chunk of the state lies on all nodes: a step
/// works on one chunk at a time with all its threads, and would otherwise use one node's memory after the other's.
fn portions(len: usize, threads: usize, thread: usize, spread: bool) -> impl Iterator<Item = std::ops::Range<usize>> {
    let huge = HUGE_PAGE_BYTES as usize;
    let share = if spread { huge } else { len.div_ceil(threads).next_multiple_of(huge) };
    (thread * share..len).step_by(share * threads).map(move |begin| begin..(begin + share).min(len))
}

/// Nodes of memory that this machine has.
fn numa_nodes() -> usize {
    let node = |name: &str| name.strip_prefix("node").is_some_and(|number| number.parse::<u32>().is_ok());
    let found = std::fs::read_dir("/sys/devices/system/node");
    found.map_or(1, |found| found.flatten().filter(|entry| entry.file_name().to_str().is_some_and(node)).count())
}

fn unmap(addr: usize, bytes: usize) {
    if bytes > 0 {
        // SAFETY: only called on ranges of a mapping made above that nothing uses (the trimmed ends) or that the
        // owner gives up (drop).
        unsafe { libc::munmap(addr as *mut _, bytes) };
    }
}

fn os_error(call: &'static str, bytes: u64) -> Error {
    let error = std::io::Error::last_os_error();
    Error::Os { call, bytes, errno: error.raw_os_error().unwrap_or(0), text: error.to_string() }
}

/// Touching more pages than there are ends in the kernel's out-of-memory killer, so say no beforehand.
fn refuse_more_than_memory(bytes: u64) -> Result<()> {
    let memory = HostMemory::now();
    if bytes > memory.available_bytes {
        return Err(Error::SlabLargerThanMemory {
            requested_bytes: bytes,
            available_bytes: memory.available_bytes,
            memory_bytes: memory.total_bytes,
        });
    }
    Ok(())
}

/// How much memory this process may use: the machine's, or its control group's where that is less.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    /// Bytes in all.
    pub total_bytes: u64,
    /// Bytes that are available without swapping.
    pub available_bytes: u64,
}

impl HostMemory {
    /// Reads the figures of this moment. Where the system gives none, nothing is refused.
    pub fn now() -> Self {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let machine = Self::parse_meminfo(&meminfo);
        let read = |name: &str| std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).unwrap_or_default();
        machine.limited(&read("memory.max"), &read("memory.current"))
    }

    fn parse_meminfo(text: &str) -> Self {
        let field = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
                .map(|kib| kib * 1024)
        };
        let total_bytes = field("MemTotal:").unwrap_or(u64::MAX);
        Self { total_bytes, available_bytes: field("MemAvailable:").unwrap_or(total_bytes) }
    }

    fn limited(self, max: &str, current: &str) -> Self {
        // The file says "max" where there is no limit.
        let Ok(limit) = max.trim().parse::<u64>() else { return self };
        let used = current.trim().parse::<u64>().unwrap_or(0);
        Self {
            total_bytes: self.total_bytes.min(limit),
            available_bytes: self.available_bytes.min(limit.saturating_sub(used)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_figures_follow_the_tighter_limit() {
        let machine = HostMemory::parse_meminfo("MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    600 kB\n");
        assert_eq!(machine, HostMemory { total_bytes: 1_024_000, available_bytes: 614_400 });
        assert_eq!(machine.limited("max\n", "5\n"), machine);
        let group = machine.limited("500000\n", "100000\n");
        assert_eq!(group, HostMemory { total_bytes: 500_000, available_bytes: 400_000 });
        assert_eq!(machine.limited("100\n", "500\n").available_bytes, 0);
    }

    #[test]
    fn mapping_is_exact_zeroed_and_on_a_huge_page_boundary() {
        let mapping = HostMapping::new(5 << 20 | 1, 3).unwrap();
        assert_eq!(mapping.bytes, (5 << 20) + page_bytes());
        assert_eq!(mapping.addr as u64 % HUGE_PAGE_BYTES, 0);
        // SAFETY: the mapping is alive, this long and written by nobody else.
        let bytes = unsafe { std::slice::from_raw_parts(mapping.addr as *const u8, mapping.bytes as usize) };
        assert!(bytes.iter().all(|&b| b == 0));
    }

    #[test]
    fn every_byte_is_touched_by_one_thread_and_with_several_nodes_by_turns() {
        let huge = HUGE_PAGE_BYTES as usize;
        for (len, threads) in [(1, 4), (huge, 1), (7 * huge + 5, 3), (64 * huge, 16)] {
            for spread in [false, true] {
                let mut all: Vec<_> = (0..threads).flat_map(|thread| portions(len, threads, thread, spread)).collect();
                all.sort_by_key(|range| range.start);
                assert_eq!((all[0].start, all[all.len() - 1].end), (0, len));
                assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start), "{len} {threads} {spread}");
                let longest = all.iter().map(std::ops::Range::len).max().unwrap();
                assert!(!spread || longest <= huge, "turns are of one huge page");
            }
        }
    }

    #[test]
    fn probing_path_covers_the_whole_mapping() {
        let mapping = HostMapping::new(4 * PROBE_BYTES + page_bytes(), 2).unwrap();
        let mut resident = vec![0u8; (mapping.bytes / page_bytes()) as usize];
        // SAFETY: one status byte per page of a live mapping.
        let rc = unsafe { libc::mincore(mapping.addr as *mut _, mapping.bytes as usize, resident.as_mut_ptr()) };
        assert_eq!(rc, 0);
        assert_eq!(resident.iter().filter(|&&r| r & 1 == 0).count(), 0, "every page was faulted in");
    }
}
