//! What a device can do: memory, streams, events, copies and a closed list of kernels.
//!
//! # Design
//! - One object-safe trait, [`Device`], behind an `Arc`. Operations move megabytes; dynamic dispatch costs nothing.
//! - Backends are a closed set: [`cpu`] is the reference and runs everywhere, [`cuda`] finds the driver at run time,
//!   [`torch`] goes through torch's own streams for every other accelerator.
//! - Ordering is the caller's and is made of events. No backend adds waits of its own.
//! - All `unsafe` of the project is here and in the one file of the Python binding that takes torch's pointers. What is
//!   safe to call here never reaches freed, foreign or out-of-range memory.
//!
//! # Refusals
//! - No tensors, shapes or strides: regions are bytes, and kernels know element types.
//! - No kernels from outside: the list in [`kernel`] is closed, so that every backend has all of it.
//! - No copies between two host regions, and no managed memory.
//!
//! ```
//! use forebay_device::{Kernel, SlabLayout, open};
//!
//! let device = open("cpu")?;
//! let (slab, buffer) = (device.pin(SlabLayout::new(&[1024])?)?, device.alloc(1024)?);
//! let (stream, done) = (device.stream("fetch")?, device.event()?);
//! device.launch(&stream, &Kernel::Fill { dst: buffer.all(), byte: 7 })?;
//! device.copy(&stream, &buffer.all(), &slab.part(0)?)?;
//! device.record(&done, &stream)?;
//! device.synchronize(&done)?;
//! let mut bytes = [0u8; 1024];
//! device.read(&slab.part(0)?, &mut bytes)?;
//! assert_eq!(bytes, [7; 1024]);
//! # Ok::<(), forebay_device::Error>(())
//! ```

#[allow(unsafe_code, reason = "device memory of this backend is raw host memory")]
pub mod cpu;
#[allow(unsafe_code, reason = "the driver API is C")]
pub mod cuda;
mod device;
mod error;
#[allow(unsafe_code, reason = "system calls take addresses")]
pub mod file;
#[allow(unsafe_code, reason = "host memory is reached by address")]
pub mod host;
pub mod kernel;
mod ledger;
mod memory;
#[allow(unsafe_code, reason = "mappings are made by system calls")]
mod pinned;
#[allow(unsafe_code, reason = "values that live for ever are reached by address")]
mod registry;
mod stream;
#[cfg(feature = "testing")]
pub mod testing;
#[allow(unsafe_code, reason = "cores and rounding are the system's and the processor's")]
mod thread;
pub mod torch;
#[allow(unsafe_code, reason = "vector instructions are for CPUs that have them")]
pub mod update;

pub use cpu::{CpuDevice, CpuOptions, LinkOptions};
pub use cuda::{CudaDevice, CudaOptions};
pub use device::{Backend, Counters, Device, Entered, Info, Memory, SharedDevice};
pub use error::{Error, Result};
pub use host::{HostOptions, HostThreads, HostUpdate, HostWork, host_cores, host_kernels};
pub use kernel::{Dtype, Kernel, Mastered};
pub use memory::{ALIGN_BYTES, Buffer, DeviceId, PIECE_BYTES, Place, Region, Slab, SlabLayout};
pub use pinned::{HostMemory, PinStats, faulted_bytes};
pub use registry::PerProcess;
pub use stream::{Event, Stream};
#[cfg(feature = "testing")]
pub use testing::{checked, checked::Checked, fault, fault::Fault};
pub use thread::{Cores, ThreadHandle};
pub use update::{
    Column, Master, MasterFormat, Moment, Rule, RuleColumn, ScalarInputs, Scalars, Segment, StateFormat, Stored, Update,
};

/// The device of this name: `cpu`, `cuda` or `cuda:N`, or `torch:` and a name of torch's. Opened once in a process and shared by all who ask for it; see
/// [`CpuDevice::open`] and [`CudaDevice::open`] for one of your own.
pub fn open(name: &str) -> Result<SharedDevice> {
    if let Some(inner) = name.strip_prefix("torch:") {
        return registry::shared(name, || torch::open(inner));
    }
    let cuda = |ordinal| {
        registry::shared(&format!("cuda:{ordinal}"), || {
            Ok(CudaDevice::open(CudaOptions { ordinal, ..CudaOptions::default() })?)
        })
    };
    match name.split_once(':') {
        None if name == "cpu" => registry::shared(name, || Ok(CpuDevice::open(CpuOptions::default())?)),
        None if name == "cuda" => cuda(0),
        Some(("cuda", ordinal)) if ordinal.bytes().all(|b| b.is_ascii_digit()) && ordinal.len() < 4 => {
            cuda(ordinal.parse().map_err(|_| unknown(name))?)
        }
        _ => Err(unknown(name)),
    }
}

fn unknown(name: &str) -> Error {
    Error::InvalidOption { option: "device", value: name.to_owned(), remedy: "use cpu, cuda or cuda:N".to_owned() }
}

/// Whether a backend works on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendStatus {
    /// The backend.
    pub backend: Backend,
    /// Its devices, as [`open`] takes them; empty if the backend does not work.
    pub devices: Vec<String>,
    /// Why it does not work.
    pub problem: Option<Error>,
}

/// The backends in this binary, each with what it found on this machine.
pub fn backends() -> Vec<BackendStatus> {
    let (devices, problem) = match cuda::device_count() {
        Ok(count) => ((0..count).map(|i| format!("cuda:{i}")).collect(), None),
        Err(problem) => (Vec::new(), Some(problem)),
    };
    vec![
        BackendStatus { backend: Backend::Cpu, devices: vec!["cpu".to_owned()], problem: None },
        BackendStatus { backend: Backend::Cuda, devices, problem },
    ]
}

/// The first GPU, or the CPU backend if no GPU works.
pub fn open_default() -> Result<SharedDevice> {
    match cuda::device_count() {
        Ok(count) if count > 0 => open("cuda:0"),
        _ => open("cpu"),
    }
}
