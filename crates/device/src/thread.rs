//! Worker threads: on the cores of the process and with IEEE arithmetic, whichever thread starts them.
//!
//! A thread inherits its cores and its floating-point mode from the thread that starts it, which is the user's. If the
//! user called `torch.set_flush_denormal(True)`, the new thread would flush denormals: an update would depend on when
//! its threads were started, and differ from the GPU's update. And OpenMP may have bound the user's thread to a single
//! core.
//!
//! [Note: bound by OpenMP] With `OMP_PROC_BIND`, `OMP_PLACES` or the like in the environment, OpenMP's library binds
//! the thread that loads it to the first of its places, and its own threads to the others. The places together are the
//! cores that the process had when it was started, and the library reports them. So if the calling thread's cores lie
//! within one place, worker threads use all places. Cores that were chosen in any other way (`taskset`, a launcher, a
//! call) are respected.
//!
//! [Note: threads after a fork] A forked child inherits handles of threads that it does not have. The C library's
//! record of a thread lies at the end of the thread's stack, and the child reuses or unmaps the stacks of missing
//! threads. Joining or detaching such a thread reads freed memory, so [`ThreadHandle`] forgets it instead.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use crate::error::{Error, Result};

/// Cores on which threads are started.
#[derive(Debug, Clone, Copy)]
pub struct Cores {
    /// `None` if the system did not report them: threads then run on the cores of the thread that starts them.
    set: Option<libc::cpu_set_t>,
}

impl PartialEq for Cores {
    fn eq(&self, other: &Self) -> bool {
        match (&self.set, &other.set) {
            (Some(own), Some(other)) => contains(own, other) && contains(other, own),
            (own, other) => own.is_none() && other.is_none(),
        }
    }
}

impl Cores {
    /// The process's cores, as far as the calling thread can see.
    pub fn here() -> Self {
        let Some(own) = own_set() else { return Self { set: None } };
        let places = openmp_places();
        let bound = places.iter().any(|place| contains(place, &own));
        Self { set: Some(if bound { places.iter().fold(own, |all, place| union(&all, place)) } else { own }) }
    }

    /// How many threads can run at once: the number of cores, or less if the control group has a smaller quota.
    pub fn count(&self) -> usize {
        let count = || std::thread::available_parallelism().map_or(1, usize::from);
        // The standard library counts for the thread that asks.
        std::thread::scope(|scope| {
            self.spawn_scoped(scope, "forebay-count", count).ok().and_then(|counted| counted.join().ok()).unwrap_or(1)
        })
    }

    /// Starts a thread.
    pub fn spawn(self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<ThreadHandle> {
        let begin = move || {
            self.settle_in();
            work();
        };
        let started = Builder::new().name(name.to_owned()).spawn(begin).map_err(refused)?;
        Ok(ThreadHandle { started: Some(started), pid: std::process::id() })
    }

    /// Starts a thread that ends with a scope.
    pub fn spawn_scoped<'scope, T: Send + 'scope>(
        self,
        scope: &'scope Scope<'scope, '_>,
        name: &str,
        work: impl FnOnce() -> T + Send + 'scope,
    ) -> Result<ScopedJoinHandle<'scope, T>> {
        let begin = move || {
            self.settle_in();
            work()
        };
        Builder::new().name(name.to_owned()).spawn_scoped(scope, begin).map_err(refused)
    }

    /// Sets the cores and the rounding of a fresh worker thread.
    fn settle_in(&self) {
        round_as_written();
        if let Some(set) = &self.set {
            // SAFETY: a complete set that lives through the call. Refused where those cores have gone meanwhile; the
            // thread then runs where its starter does.
            unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), set) };
        }
    }
}

/// A thread that can be waited for. Dropping the handle lets the thread run on.
#[derive(Debug)]
pub struct ThreadHandle {
    started: Option<JoinHandle<()>>,
    pid: u32,
}

impl ThreadHandle {
    /// Blocks until the thread has ended; an error where it panicked. Returns at once in a forked child.
    pub fn join(mut self) -> std::thread::Result<()> {
        self.take().map_or(Ok(()), JoinHandle::join)
    }

    /// The thread, unless it is the parent's: see [Note: threads after a fork].
    fn take(&mut self) -> Option<JoinHandle<()>> {
        let started = self.started.take()?;
        if self.pid == std::process::id() {
            return Some(started);
        }
        std::mem::forget(started);
        None
    }
}

impl Drop for ThreadHandle {
    fn drop(&mut self) {
        drop(self.take());
    }
}

fn refused(error: std::io::Error) -> Error {
    Error::Os { call: "thread spawn", bytes: 0, errno: error.raw_os_error().unwrap_or(0), text: error.to_string() }
}

/// The calling thread's cores; nothing on a machine with more of them than a set can name.
fn own_set() -> Option<libc::cpu_set_t> {
    let mut set = empty();
    // SAFETY: fills a set of the stated size.
    let rc = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    (rc == 0).then_some(set)
}

fn empty() -> libc::cpu_set_t {
    // SAFETY: a set is an array of bits.
    unsafe { std::mem::zeroed() }
}

fn has(set: &libc::cpu_set_t, core: usize) -> bool {
    // SAFETY: looks at one bit of a live set; refuses what is out of its range.
    unsafe { libc::CPU_ISSET(core, set) }
}

fn contains(all: &libc::cpu_set_t, some: &libc::cpu_set_t) -> bool {
    (0..libc::CPU_SETSIZE as usize).all(|core| has(all, core) || !has(some, core))
}

fn union(a: &libc::cpu_set_t, b: &libc::cpu_set_t) -> libc::cpu_set_t {
    set_of((0..libc::CPU_SETSIZE as usize).filter(|&core| has(a, core) || has(b, core)))
}

fn set_of(cores: impl Iterator<Item = usize>) -> libc::cpu_set_t {
    let mut set = empty();
    for core in cores.filter(|&core| core < libc::CPU_SETSIZE as usize) {
        // SAFETY: sets one bit of a live set, in its range.
        unsafe { libc::CPU_SET(core, &mut set) };
    }
    set
}

/// The places of every OpenMP library in this process; empty if it binds no threads.
fn openmp_places() -> Vec<libc::cpu_set_t> {
    openmp_libraries()
        .iter()
        .flat_map(|path| OpenMp::find(path).map_or_else(Vec::new, |found| found.places()))
        .collect()
}

/// Paths of the OpenMP libraries that this process has loaded. There may be several: each wheel brings its own.
fn openmp_libraries() -> Vec<CString> {
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, found: *mut c_void) -> c_int {
        // SAFETY: called from `dl_iterate_phdr` below, with a description of a library and the vector given there.
        let (name, found) = unsafe { ((*info).dlpi_name, &mut *found.cast::<Vec<CString>>()) };
        if !name.is_null() {
            // SAFETY: the library's path, which ends with a zero.
            let path = unsafe { CStr::from_ptr(name) };
            let file = path.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
            if [&b"libgomp"[..], b"libiomp", b"libomp"].iter().any(|openmp| file.starts_with(openmp)) {
                found.push(path.to_owned());
            }
        }
        0
    }
    let mut found: Vec<CString> = Vec::new();
    // SAFETY: the callback is called during this call only, with the vector, which nothing else uses meanwhile.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut found).cast()) };
    found
}

/// A library's functions about places, from version 4.5 of OpenMP.
struct OpenMp {
    library: *mut c_void,
    places: unsafe extern "C" fn() -> c_int,
    cores: unsafe extern "C" fn(c_int) -> c_int,
    core_ids: unsafe extern "C" fn(c_int, *mut c_int),
}

impl OpenMp {
    /// A library that is loaded already.
    fn find(path: &CStr) -> Option<Self> {
        // SAFETY: loads nothing: gives a handle where the library is there.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if library.is_null() {
            return None;
        }
        let function = |name: *const c_char| {
            // SAFETY: a live handle and a name that ends with a zero.
            let found = unsafe { libc::dlsym(library, name) };
            (!found.is_null()).then_some(found)
        };
        let found = [c"omp_get_num_places", c"omp_get_place_num_procs", c"omp_get_place_proc_ids"]
            .map(|name| function(name.as_ptr()));
        let [Some(places), Some(cores), Some(core_ids)] = found else {
            // SAFETY: the handle from above, once.
            unsafe { libc::dlclose(library) };
            return None;
        };
        // SAFETY: functions of these names have these signatures, by OpenMP's standard.
        unsafe {
            Some(Self {
                library,
                places: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(places),
                cores: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int) -> c_int>(cores),
                core_ids: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int, *mut c_int)>(core_ids),
            })
        }
    }

    fn places(&self) -> Vec<libc::cpu_set_t> {
        // SAFETY: the library is held open; these read a list that it made when it was loaded.
        let place = |at: c_int| unsafe {
            let mut ids = vec![-1; usize::try_from((self.cores)(at)).unwrap_or(0)];
            // Writes as many as it has just said.
            (self.core_ids)(at, ids.as_mut_ptr());
            set_of(ids.into_iter().filter_map(|id| usize::try_from(id).ok()))
        };
        // SAFETY: as above.
        let count = unsafe { (self.places)() };
        (0..count).map(place).collect()
    }
}

impl Drop for OpenMp {
    fn drop(&mut self) {
        // SAFETY: the handle from `find`, once; the library stays loaded for those who loaded it.
        unsafe { libc::dlclose(self.library) };
    }
}

/// Keep denormals, and round to nearest: the arithmetic is written for this mode, and Rust assumes it.
fn round_as_written() {
    #[cfg(target_arch = "x86_64")]
    {
        let default = 0x1f80_u32;
        // SAFETY: loads the register's value at the start of a program, all exceptions masked.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const default, options(nostack, readonly)) };
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: zero is the register's value at the start of a program.
    unsafe {
        std::arch::asm!("msr fpcr, {}", in(reg) 0_u64, options(nostack, nomem));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores_of(set: &libc::cpu_set_t) -> Vec<usize> {
        (0..libc::CPU_SETSIZE as usize).filter(|&core| has(set, core)).collect()
    }

    #[test]
    fn threads_run_on_the_cores_that_were_chosen_and_no_others() {
        let all = own_set().unwrap();
        let one = set_of(cores_of(&all).into_iter().take(1));
        let narrow = Cores { set: Some(one) };
        assert_eq!(narrow.count(), 1);
        let seen = std::thread::scope(|scope| {
            let inner = || {
                // Nothing has bound this thread in OpenMP's name, so it is kept to.
                (cores_of(&own_set().unwrap()), Cores::here().count())
            };
            narrow.spawn_scoped(scope, "narrow", inner).unwrap().join().unwrap()
        });
        assert_eq!(seen, (cores_of(&one), 1));
        assert_eq!(Cores::here().count(), std::thread::available_parallelism().unwrap().get());
        assert_eq!(cores_of(&own_set().unwrap()), cores_of(&all), "the calling thread stays where it was");
    }

    #[test]
    fn sets_are_compared_and_joined() {
        let [a, b, both] = [&[1, 3][..], &[3, 700], &[1, 3, 700]].map(|cores| set_of(cores.iter().copied()));
        assert_eq!(cores_of(&union(&a, &b)), cores_of(&both));
        assert!(contains(&both, &a) && contains(&both, &b) && !contains(&a, &b) && contains(&a, &empty()));
        assert_eq!(cores_of(&set_of([5, 99_999].into_iter())), [5], "what a set cannot name is left out");
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn threads_keep_small_numbers_whoever_starts_them() {
        let half = |tiny: f32| std::hint::black_box(tiny) * std::hint::black_box(0.5);
        let tiny = f32::MIN_POSITIVE;
        let run = |flush: bool| {
            let starter = move || {
                let mode = if flush { 0x9fc0_u32 } else { 0x1f80 };
                // SAFETY: flushes small numbers to zero on a thread that ends soon and computes nothing else.
                unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack, readonly)) };
                let cores = Cores { set: own_set() };
                let ours = std::thread::scope(|scope| {
                    cores.spawn_scoped(scope, "ours", || half(tiny)).unwrap().join().unwrap()
                });
                (half(tiny), ours)
            };
            std::thread::spawn(starter).join().unwrap()
        };
        assert_eq!(run(false), (tiny / 2.0, tiny / 2.0));
        assert_eq!(run(true), (0.0, tiny / 2.0));
    }
}
