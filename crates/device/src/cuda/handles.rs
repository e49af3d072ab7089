//! Handles of the driver: streams, events, device memory, registrations. Each has one owner and is freed when it drops.
//!
//! Memory is freed only after the device has been drained, so that no copy or kernel that uses it can still be running.
//! That wait may be long, which does no harm: memory is allocated once and kept.

use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::{Context, check};
use crate::error::Result;
use crate::ledger::Charge;
use crate::pinned::HostMapping;

/// A stream, owned or borrowed.
pub(crate) struct CudaStream {
    pub(crate) raw: sys::CUstream,
    owner: Option<Arc<Context>>,
}

// SAFETY: stream handles may be used from any thread.
unsafe impl Send for CudaStream {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    pub(crate) fn create(context: &Arc<Context>) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // Non-blocking: it does not wait for the legacy default stream, which torch uses by default.
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle; the context is bound.
        context.call("cuStreamCreate", || unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Self { raw, owner: Some(context.clone()) })
    }

    /// The same with the greatest priority that the device has.
    pub(crate) fn create_urgent(context: &Arc<Context>) -> Result<Self> {
        let (mut raw, mut least, mut greatest) = (std::ptr::null_mut(), 0, 0);
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes two numbers; the context is bound.
        context.call("cuCtxGetStreamPriorityRange", || unsafe {
            sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest)
        })?;
        // SAFETY: writes one handle; the context is bound.
        context.call("cuStreamCreateWithPriority", || unsafe {
            sys::cuStreamCreateWithPriority(&mut raw, flags, greatest)
        })?;
        Ok(Self { raw, owner: Some(context.clone()) })
    }

    /// Names a stream that other code made.
    pub(crate) fn borrow(handle: usize) -> Self {
        Self { raw: handle as sys::CUstream, owner: None }
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if let Some(context) = &self.owner {
            // SAFETY: created by us, destroyed once. The driver lets work that is under way finish.
            let _ = context.call("cuStreamDestroy", || unsafe { sys::cuStreamDestroy_v2(self.raw) });
        }
    }
}

/// An event, with or without a time.
pub(crate) struct CudaEvent {
    pub(crate) raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: event handles may be used from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    pub(crate) fn create(context: &Arc<Context>, timed: bool) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        let flags =
            if timed { sys::CUevent_flags::CU_EVENT_DEFAULT } else { sys::CUevent_flags::CU_EVENT_DISABLE_TIMING };
        let flags = flags as u32;
        // SAFETY: writes one handle; the context is bound.
        context.call("cuEventCreate", || unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Self { raw, context: context.clone() })
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: created by us, destroyed once; the driver allows it while a wait for it is pending.
        let _ = self.context.call("cuEventDestroy", || unsafe { sys::cuEventDestroy_v2(self.raw) });
    }
}

/// Device memory.
pub(crate) struct CudaMemory {
    pub(crate) raw: sys::CUdeviceptr,
    context: Arc<Context>,
    _charge: Charge,
}

impl CudaMemory {
    /// The raw answer goes back to the caller, which turns "out of memory" into an error with numbers.
    pub(crate) fn allocate(
        context: &Arc<Context>,
        bytes: u64,
        charge: Charge,
    ) -> Result<std::result::Result<Self, sys::CUresult>> {
        let _bound = context.bind()?;
        let mut raw = 0;
        // SAFETY: writes one address; the context is bound.
        let answer = unsafe { sys::cuMemAlloc_v2(&mut raw, bytes as usize) };
        if answer == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Ok(Err(answer));
        }
        check("cuMemAlloc", answer)?;
        Ok(Ok(Self { raw, context: context.clone(), _charge: charge }))
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        self.context.drain();
        // SAFETY: allocated by us, freed once, and the device has ended all work.
        let _ = self.context.call("cuMemFree", || unsafe { sys::cuMemFree_v2(self.raw) });
    }
}

/// Host memory registered with the driver, piece by piece.
pub(crate) struct Registration {
    // Declared before the mapping: unregistered first, unmapped after.
    ranges: RegisteredRanges,
    mapping: HostMapping,
    _charge: Charge,
}

struct RegisteredRanges {
    context: Arc<Context>,
    addrs: Vec<usize>,
}

impl Drop for RegisteredRanges {
    fn drop(&mut self) {
        self.context.drain();
        for &addr in &self.addrs {
            // SAFETY: registered by us at this address, unregistered once, the device drained and the mapping alive.
            let _ = self.context.call("cuMemHostUnregister", || unsafe { sys::cuMemHostUnregister(addr as *mut _) });
        }
    }
}

impl Registration {
    /// Registers each `(offset, bytes)` of the mapping; on failure takes back what was registered.
    pub(crate) fn new(
        context: &Arc<Context>,
        mapping: HostMapping,
        pieces: &[(u64, u64)],
        charge: Charge,
    ) -> Result<Self> {
        let mut registered = RegisteredRanges { context: context.clone(), addrs: Vec::with_capacity(pieces.len()) };
        for &(offset, bytes) in pieces {
            let addr = mapping.addr() + offset as usize;
            // SAFETY: the range lies in the mapping, whole pages that no other piece shares; the mapping stays until
            // after the unregistering, by the order of the fields.
            context.call("cuMemHostRegister", || unsafe {
                sys::cuMemHostRegister_v2(addr as *mut _, bytes as usize, sys::CU_MEMHOSTREGISTER_PORTABLE)
            })?;
            registered.addrs.push(addr);
        }
        Ok(Self { ranges: registered, mapping, _charge: charge })
    }

    pub(crate) fn addr(&self) -> usize {
        debug_assert!(!self.ranges.addrs.is_empty());
        self.mapping.addr()
    }
}
