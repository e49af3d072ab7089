//! The only file that turns numbers from torch into memory and streams: all `unsafe` of this crate is here.
//!
//! Python hands over addresses, lengths and stream handles. Each function says which Python code guarantees that they are
//! valid. Addresses come from `forebay/_tensors.py`, or from tensors that it passes to `Table::describe` below, and
//! streams from `forebay/_device.py`.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::Arc;

use forebay::Result;
use forebay::device::{Buffer, Dtype, Place, Region, SharedDevice, Stream};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::looked::Row;

/// Keeps the owner of an address alive.
pub(crate) type Keeper = Arc<dyn Any + Send + Sync>;

/// Names a tensor's memory. An empty one has none.
pub(crate) fn region(device: &SharedDevice, addr: u64, bytes: u64, place: Place, keeper: &Keeper) -> Result<Region> {
    let (addr, len) = if bytes == 0 { (256, 1) } else { (addr as usize, bytes) };
    // SAFETY: parameters and gradients: `Found` (optim/gather.py) takes address and length of each from one tensor, with
    // `look_with_gradients` (_tensors.py). `Found.read` checks that parameter and gradient are on one device, this GPU or
    // the host; `Optimizer._check_unchanged` (optim/base.py) that it is the one the plan has; and `Found.put_in_order`
    // replaces a tensor that is not dense by a dense copy. `Optimizer._update` (optim/base.py) holds `Found`, the clip
    // coefficient and, through `State.rooms`, resident state until the call returns. `hook` (optim/backward.py) holds a
    // gradient that is copied early until `finish_landing` has returned. Overlapped steps go on after the call:
    // `Trained.fitting` and `Overlap._is_prepared` (optim/overlap) take address and length from one tensor and check the
    // same; `Overlap` holds the parameters, the coefficient, and each gradient until the engine says that its update has
    // ended, or until torch's stream runs behind all updates (`_release`, `_end`, `_abandon`). For memory on a GPU all of them pass torch's current stream: torch's
    // allocator gives freed memory only to work that comes later on that stream, and the step makes that stream wait for
    // its own. Work on memory of the host ends before the call returns. Saves: `Snapshot._to_host` (checkpoint/snapshot.py)
    // and `Writer._write_tensors` (checkpoint/writer.py) hold contiguous tensors of the stated device until the call
    // returns, and the call waits for its copies. For an empty tensor the address is never used: the region below has no
    // bytes.
    let buffer = unsafe { Buffer::borrow(addr, len, place, device.info().id, keeper.clone()) }?;
    if bytes == 0 { Ok(buffer.region(0, 0)?) } else { Ok(buffer.into_region()) }
}

/// Names a tensor's memory on the host, which no device is asked to reach.
pub(crate) fn host_region(addr: u64, bytes: u64, keeper: &Keeper) -> Result<Region> {
    // SAFETY: `Writer._write_tensors` (checkpoint/writer.py) and `Reader._read_into` (checkpoint/reader.py) take address
    // and length from one dense or strided tensor on the CPU and hold that tensor until the call returns; so do
    // `Packed` (optim/packed.py) and the caller of `Optimizer.touch_state`, a benchmark. The calls return only when their threads have stopped using the
    // memory.
    let buffer = unsafe { Buffer::borrow_host(addr as usize, bytes, keeper.clone()) }?;
    Ok(buffer.into_region())
}

/// Names a whole buffer, such as the ring that torch allocated.
pub(crate) fn buffer(device: &SharedDevice, addr: u64, bytes: u64, keeper: Keeper) -> Result<Buffer> {
    // SAFETY: `Optimizer._open_ring` (optim/base.py), `_pin` (optim/units/memory.py) and `Mover._begin` (sleep/transfer.py)
    // take the address from one tensor of this many bytes on this device. `keeper` holds the tensor. A ring drops the
    // buffer when its last user is gone, and each user has waited for its own work before; a transfer drains before it
    // drops it.
    Ok(unsafe { Buffer::borrow(addr as usize, bytes, Place::Device, device.info().id, keeper) }?)
}

/// Names a storage's memory for a transfer that goes on after the call.
pub(crate) fn storage(device: &SharedDevice, addr: u64, bytes: u64, keeper: &Keeper) -> Result<Region> {
    // SAFETY: `Mover.submit` (sleep/transfer.py) takes address and length from one storage on this device, and `keeper`
    // holds the storage. `Sleeper._empty` and `Sleeper._allocate` (sleep/sleeper.py) resize a storage only after its batch
    // has arrived or before the batch is submitted, and `Room` (moving/rooms.py) never resizes one, so the memory stays
    // while the transfer uses it. For memory on a GPU, `Mover._begin` passes torch's current stream, behind whose work the
    // transfer begins, so nothing else uses memory that torch's allocator has just given out.
    Ok(unsafe { Buffer::borrow(addr as usize, bytes, Place::Device, device.info().id, keeper.clone()) }?.into_region())
}

/// Names the memory of a storage that stays as it is until the engine frees it.
pub(crate) fn held(device: &SharedDevice, addr: u64, bytes: u64) -> Result<Region> {
    // SAFETY: `Engine.save` and `Engine.fetch` (activations/saved.py) take address and length from one storage of the stated
    // device. The caller holds the storage during the call, and `Engine.held` holds it from then until the engine names its
    // entry as freed. By then the stream on which torch allocated the memory waits for the copy's end (on the CPU the
    // calling thread has waited), so later work that gets the memory comes after the copy.
    let buffer = unsafe { Buffer::borrow(addr as usize, bytes, Place::Device, device.info().id, Arc::new(())) }?;
    Ok(buffer.into_region())
}

/// Names torch's current stream.
pub(crate) fn stream(device: &SharedDevice, handle: u64) -> Result<Stream> {
    // SAFETY: callers pass what `stream_handle` (_device.py) returns for this device, the handle of torch's current
    // stream; `ShardReader.order_gathering` (optim/overlap/reads.py) passes those of the streams on which FSDP2 gathers,
    // which torch made too. Torch's streams live as long as the process, and the device is torch's primary context.
    Ok(unsafe { device.borrow_stream(handle as usize, "torch") }?)
}

/// The same on backends where torch has streams. On the CPU it has none, and work that torch was given has ended.
pub(crate) fn stream_of(device: &SharedDevice, handle: u64) -> Result<Option<Stream>> {
    device.info().backend.is_stream_ordered().then(|| stream(device, handle)).transpose()
}

/// A tensor as DLPack's C table describes it, without a reference to it; the layout is DLPack's, of major version 1.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// The head of DLPack's table of C functions, up to the one used here.
#[repr(C)]
struct DlTable {
    major: u32,
    minor: u32,
    _previous: *mut c_void,
    _allocate: *mut c_void,
    _from_object: *mut c_void,
    _to_object: *mut c_void,
    describe: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
}

/// Torch's table of C functions, and the types of tensor to which it belongs.
pub(crate) struct ExchangeApi<'py> {
    describe: unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int,
    plain: [Bound<'py, PyAny>; 2],
}

impl<'py> ExchangeApi<'py> {
    /// The table in a capsule; `None` if it is of another version.
    pub(crate) fn new(
        capsule: &Bound<'py, PyAny>,
        plain: (Bound<'py, PyAny>, Bound<'py, PyAny>),
    ) -> PyResult<Option<Self>> {
        let table = capsule.cast::<PyCapsule>()?.pointer_checked(Some(c"dlpack_exchange_api"))?.cast::<DlTable>();
        // SAFETY: a capsule of this name holds a pointer to such a table, which lives as long as the process; its head
        // is the same in every version, and the rest is only looked at where the major version is the one declared
        // above.
        let (major, describe) = unsafe { ((*table.as_ptr()).major, (*table.as_ptr()).describe) };
        let describe = describe.filter(|_| major == 1);
        Ok(describe.map(|describe| Self { describe, plain: plain.into() }))
    }

    /// Whether it is a tensor to which the table belongs.
    pub(crate) fn is_plain(&self, tensor: &Bound<'py, PyAny>) -> bool {
        let kind = tensor.get_type();
        self.plain.iter().any(|plain| kind.is(plain))
    }

    /// A tensor's row and whether it is contiguous; `None` if the kernels cannot use the tensor directly.
    pub(crate) fn describe(&self, tensor: &Bound<'py, PyAny>) -> Option<(Row, bool)> {
        const CPU: i32 = 1;
        const CUDA: i32 = 2;
        if !self.is_plain(tensor) {
            return None;
        }
        let mut at = MaybeUninit::<DlTensor>::uninit();
        // SAFETY: `tensor` is a live object, and of one of the types in `plain`: `_PLAIN` (_tensors.py) names torch's own
        // tensor types, whose table this is. The function fills the struct or returns an error with a Python exception
        // set. The GIL is held.
        if unsafe { (self.describe)(tensor.as_ptr().cast(), at.as_mut_ptr()) } != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: filled by the call.
        let at = unsafe { at.assume_init() };
        let dtype = match (at.code, at.bits, at.lanes) {
            (2, 32, 1) => Dtype::F32,
            (4, 16, 1) => Dtype::Bf16,
            (2, 16, 1) => Dtype::F16,
            _ => return None,
        };
        let device = match at.device_type {
            CPU => -1,
            CUDA => at.device_id,
            _ => return None,
        };
        let (mut elements, mut contiguous) = (1i64, true);
        for dim in (0..at.ndim as usize).rev() {
            // SAFETY: shape and strides have `ndim` entries, and live as long as the tensor does.
            let (side, stride) = unsafe { (*at.shape.add(dim), *at.strides.add(dim)) };
            contiguous &= side == 1 || stride == elements;
            elements *= side;
        }
        let addr = match at.data as u64 {
            0 if elements == 0 => 1,
            // Its memory was taken away: Python says which it is.
            0 => return None,
            data => data + at.byte_offset,
        };
        Some((Row { addr, elements: elements as u64, device, dtype }, contiguous))
    }
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
        // who use the buffer: `State` (optim/state.py) waits for them, and so does `Home.settle` (optim/units/unit.py),
        // whose tensors torch copies to and from; `Snapshot._to_host` (checkpoint/snapshot.py) gets
        // its buffers when their copies have ended, and `Room.store` (moving/rooms.py) asks for buffers when the batch has
        // arrived and stores to no range that a buffer is in use for.
        let status = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), addr, len, 0, flags) };
        if status == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
