//! The only file that turns numbers from torch into memory and streams: all `unsafe` of this crate is here.
//!
//! Python hands over addresses, lengths and stream handles. What makes them valid is written at each function as what
//! `forebay/_torch.py`, the one caller, guarantees.

use std::any::Any;
use std::ffi::c_int;
use std::sync::Arc;

use forebay::Result;
use forebay::device::{Buffer, Place, Region, SharedDevice, Stream};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Keeps whatever owns an address alive.
pub(crate) type Keeper = Arc<dyn Any + Send + Sync>;

/// Names a tensor's memory. An empty one has none.
pub(crate) fn region(device: &SharedDevice, addr: u64, bytes: u64, place: Place, keeper: &Keeper) -> Result<Region> {
    let (addr, len) = if bytes == 0 { (256, 1) } else { (addr as usize, bytes) };
    // SAFETY: `_torch.py` takes address and length from one tensor that it holds for the whole call, checks that the
    // tensor is dense and on the stated device, and for memory on a GPU passes torch's current stream, on which torch's
    // allocator keeps freed memory from being given to anyone who is not ordered behind our work. Memory on the host
    // is released by no one before the call returns, and the call waits for all work on it. For an empty tensor the
    // address is never used: the region below has no bytes.
    let buffer = unsafe { Buffer::borrow(addr, len, place, device.info().id, keeper.clone()) }?;
    if bytes == 0 { Ok(buffer.region(0, 0)?) } else { Ok(buffer.into_region()) }
}

/// Names a whole buffer, such as the ring that torch allocated.
pub(crate) fn buffer(device: &SharedDevice, addr: u64, bytes: u64, keeper: Keeper) -> Result<Buffer> {
    // SAFETY: as in `region`, but for the buffer's whole life: `keeper` holds the tensor, and the pipeline drains
    // before it lets go of it.
    Ok(unsafe { Buffer::borrow(addr as usize, bytes, Place::Device, device.info().id, keeper) }?)
}

/// Names the memory of a storage that stays as it is until the engine lets go of it.
pub(crate) fn held(device: &SharedDevice, addr: u64, bytes: u64) -> Result<Region> {
    // SAFETY: `forebay/_saved.py` takes address and length from one storage of the stated device and holds it from
    // before this call until the engine has named it as let go. By then the stream on which torch allocated the memory
    // waits for the copy's end (on the CPU the calling thread has waited), so whoever gets the memory next is behind it.
    let buffer = unsafe { Buffer::borrow(addr as usize, bytes, Place::Device, device.info().id, Arc::new(())) }?;
    Ok(buffer.into_region())
}

/// Names torch's current stream.
pub(crate) fn stream(device: &SharedDevice, handle: u64) -> Result<Stream> {
    // SAFETY: `_torch.py` passes `torch.cuda.current_stream(device).cuda_stream`; torch's streams live as long as the
    // process, and the device is torch's primary context.
    Ok(unsafe { device.borrow_stream(handle as usize, "torch") }?)
}

/// A range of a pinned slab as a Python buffer of exactly that size. It keeps the slab alive.
#[pyclass(frozen)]
pub(crate) struct HostView {
    region: Region,
}

impl HostView {
    pub(crate) fn new(region: Region) -> Self {
        Self { region }
    }
}

#[pymethods]
impl HostView {
    /// Bytes of the range.
    fn __len__(&self) -> usize {
        self.region.bytes() as usize
    }

    /// Fills in the buffer that Python asks for.
    ///
    /// # Safety
    /// Python calls this with a buffer to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no buffer to fill"));
        }
        let (addr, len) = {
            let region = &slf.get().region;
            (region.addr() as *mut std::ffi::c_void, region.bytes() as ffi::Py_ssize_t)
        };
        // SAFETY: `view` is the buffer to fill; the range is live host memory of that length for as long as `slf`
        // lives, of which the call takes a reference for the buffer's owner. Writes by the device are ordered by those
        // who use the buffer: `forebay.AdamW.state` waits for them.
        let status = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), addr, len, 0, flags) };
        if status == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
