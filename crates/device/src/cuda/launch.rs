//! The shipped kernels: loaded once per device, their parameters laid out as `kernels.cu` expects them.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::{Context, check};
use crate::arith::AdamWScalars;
use crate::error::{Error, Result};
use crate::kernel::{AdamW, AdamWSegment, Dtype, Kernel};
use crate::memory::Region;

/// Made from `kernels.cu` by `scripts/make_ptx.py`.
pub(crate) const PTX: &str = include_str!("kernels.ptx");

// The constants and structs below mirror those of the same names in kernels.cu.
const THREADS: u32 = 256;
const BLOCK_ELEMENTS: u64 = 4096;
const MAX_SEGMENTS: usize = 56;
const MAX_SCALARS: usize = 8;
const COPY_BLOCK_BYTES: u64 = 32768;
const MAX_PAIRS: usize = 168;
/// Enough blocks to fill any GPU several times over; the loops in the kernels cover the rest.
const MAX_BLOCKS: u64 = 4096;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawScalars {
    decay: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    step_size: f32,
    bias_correction2_sqrt: f32,
    eps: f32,
    decays: u32,
    maximize: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawSegment {
    param: u64,
    grad: u64,
    exp_avg: u64,
    exp_avg_sq: u64,
    max_exp_avg_sq: u64,
    master: u64,
    elements: u32,
    first_block: u32,
    scalars: u32,
    unused: u32,
}

#[repr(C)]
struct RawAdamW {
    grad_scale: u64,
    skip: u64,
    segments: u32,
    unused: u32,
    scalars: [RawScalars; MAX_SCALARS],
    segment: [RawSegment; MAX_SEGMENTS],
}

const _: () = assert!(size_of::<RawAdamW>() == 3928, "the parameter size that kernels.ptx declares");

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawPair {
    from: u64,
    to: u64,
    bytes: u32,
    first_block: u32,
}

#[repr(C)]
struct RawPairs {
    pairs: u32,
    unused: u32,
    pair: [RawPair; MAX_PAIRS],
}

const _: () = assert!(size_of::<RawPairs>() == 4040, "the parameter size that kernels.ptx declares");

impl From<&AdamWScalars> for RawScalars {
    fn from(s: &AdamWScalars) -> Self {
        Self {
            decay: s.decay,
            beta1: s.beta1,
            one_minus_beta1: s.one_minus_beta1,
            beta2: s.beta2,
            one_minus_beta2: s.one_minus_beta2,
            step_size: s.step_size,
            bias_correction2_sqrt: s.bias_correction2_sqrt,
            eps: s.eps,
            decays: u32::from(s.decays),
            maximize: u32::from(s.maximize),
        }
    }
}

fn address(region: Option<&Region>) -> u64 {
    region.map_or(0, |region| region.addr() as u64)
}

impl RawAdamW {
    fn new(step: &AdamW<'_>) -> Self {
        Self {
            grad_scale: address(step.grad_scale.as_ref()),
            skip: address(step.skip.as_ref()),
            segments: 0,
            unused: 0,
            scalars: [RawScalars::default(); MAX_SCALARS],
            segment: [RawSegment::default(); MAX_SEGMENTS],
        }
    }
}

/// The loaded kernels of one device.
pub(crate) struct Kernels {
    _module: Module,
    adamw: [sys::CUfunction; 9],
    copy_pairs: sys::CUfunction,
    uniform: sys::CUfunction,
    powers: sys::CUfunction,
    count_differences: sys::CUfunction,
    spin: sys::CUfunction,
    trap: sys::CUfunction,
}

// SAFETY: module and function handles may be used from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above; they never change after loading.
unsafe impl Sync for Kernels {}

/// A loaded module, unloaded when dropped.
struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

impl Drop for Module {
    fn drop(&mut self) {
        self.context.drain();
        // SAFETY: loaded by us, unloaded once, and no kernel of it is running any more.
        let _ = self.context.call("cuModuleUnload", || unsafe { sys::cuModuleUnload(self.raw) });
    }
}

fn dtype_index(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
    }
}

impl Kernels {
    pub(crate) fn load(context: &Arc<Context>, ptx: &str) -> Result<Self> {
        let _bound = context.bind()?;
        let refused = |log: String| Error::KernelsRefused { device: context.name.clone(), log };
        let text = CString::new(ptx).map_err(|_| refused("the PTX holds a zero byte".to_owned()))?;
        let mut log = vec![0u8; 4096];
        let mut keys =
            [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
        let mut module = std::ptr::null_mut();
        // SAFETY: the text ends in a zero byte; two keys and two values, the log buffer as long as said; all outlive
        // the call.
        let answer = unsafe {
            sys::cuModuleLoadDataEx(&mut module, text.as_ptr().cast(), 2, keys.as_mut_ptr(), values.as_mut_ptr())
        };
        if let Err(error) = check("cuModuleLoadDataEx", answer) {
            let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
            return Err(refused(format!("{error} {}", String::from_utf8_lossy(&log[..end])).trim_end().to_owned()));
        }
        let module = Module { context: context.clone(), raw: module };
        let find = |name: &str| {
            let text = CString::new(name).map_err(|_| refused(name.to_owned()))?;
            let mut function = std::ptr::null_mut();
            // SAFETY: a live module and a name that ends in a zero byte.
            let answer = unsafe { sys::cuModuleGetFunction(&mut function, module.raw, text.as_ptr()) };
            check("cuModuleGetFunction", answer).map_err(|error| refused(format!("{name}: {error}")))?;
            Ok(function)
        };
        let mut adamw = [std::ptr::null_mut(); 9];
        for (i, function) in adamw.iter_mut().enumerate() {
            const NAMES: [&str; 3] = ["f32", "bf16", "f16"];
            *function = find(&format!("adamw_{}_{}", NAMES[i / 3], NAMES[i % 3]))?;
        }
        Ok(Self {
            adamw,
            copy_pairs: find("copy_pairs")?,
            uniform: find("uniform")?,
            powers: find("powers")?,
            count_differences: find("count_differences")?,
            spin: find("spin")?,
            trap: find("trap")?,
            _module: module,
        })
    }

    /// Launches a checked kernel. The context is bound.
    pub(crate) fn launch(&self, stream: sys::CUstream, kernel: &Kernel<'_>) -> Result<()> {
        let wide = |elements: u64| elements.div_ceil(u64::from(THREADS)).clamp(1, MAX_BLOCKS) as u32;
        match kernel {
            Kernel::Fill { dst, byte } => {
                if dst.bytes() == 0 {
                    return Ok(());
                }
                // SAFETY: a checked region of live device memory.
                let answer = unsafe { sys::cuMemsetD8Async(dst.addr() as u64, *byte, dst.bytes() as usize, stream) };
                check("cuMemsetD8Async", answer)
            }
            Kernel::Uniform { dst, seed, low, high } => {
                let (mut values, mut elements) = (dst.addr() as u64, dst.bytes() / 4);
                let (mut seed, mut low, mut high) = (*seed, *low, *high);
                let mut args = [arg(&mut values), arg(&mut elements), arg(&mut seed), arg(&mut low), arg(&mut high)];
                self.start(self.uniform, wide(elements), THREADS, stream, &mut args)
            }
            Kernel::Powers { dst, beta, first } => {
                let (mut values, mut elements) = (dst.addr() as u64, dst.bytes() / 4);
                let (mut beta, mut first) = (*beta, *first);
                let mut args = [arg(&mut values), arg(&mut elements), arg(&mut beta), arg(&mut first)];
                self.start(self.powers, wide(elements), THREADS, stream, &mut args)
            }
            Kernel::CountDifferences { a, b, count } => {
                let (mut a_addr, mut b_addr, mut words) = (a.addr() as u64, b.addr() as u64, a.bytes() / 4);
                let mut count = count.addr() as u64;
                let mut args = [arg(&mut a_addr), arg(&mut b_addr), arg(&mut words), arg(&mut count)];
                self.start(self.count_differences, wide(words), THREADS, stream, &mut args)
            }
            Kernel::AdamW(step) => self.adamw(stream, step),
            Kernel::CopyPairs { pairs } => self.copy_pairs(stream, pairs),
            Kernel::Spin { ns } => {
                let mut ns = *ns;
                self.start(self.spin, 1, 1, stream, &mut [arg(&mut ns)])
            }
            Kernel::Trap => self.start(self.trap, 1, 1, stream, &mut []),
        }
    }

    /// Packs segments into as few launches as their types and the parameter space allow.
    fn adamw(&self, stream: sys::CUstream, step: &AdamW<'_>) -> Result<()> {
        let mut raw = RawAdamW::new(step);
        // Which entry of `step.scalars` each slot of `raw.scalars` holds.
        let mut sets: Vec<u32> = Vec::with_capacity(MAX_SCALARS);
        let (mut blocks, mut function) = (0u64, std::ptr::null_mut());
        for segment in step.segments {
            let wanted = self.adamw[3 * dtype_index(segment.param_dtype) + dtype_index(segment.grad_dtype)];
            let known = sets.iter().position(|&set| set == segment.scalars);
            let full = raw.segments as usize == MAX_SEGMENTS || (known.is_none() && sets.len() == MAX_SCALARS);
            if raw.segments > 0 && (full || wanted != function) {
                self.start(function, blocks as u32, THREADS, stream, &mut [arg(&mut raw)])?;
                (raw.segments, blocks) = (0, 0);
                sets.clear();
            }
            function = wanted;
            let set = sets.iter().position(|&set| set == segment.scalars).unwrap_or_else(|| {
                raw.scalars[sets.len()] = (&step.scalars[segment.scalars as usize]).into();
                sets.push(segment.scalars);
                sets.len() - 1
            });
            raw.segment[raw.segments as usize] = raw_segment(segment, blocks as u32, set as u32);
            raw.segments += 1;
            blocks += segment.elements().div_ceil(BLOCK_ELEMENTS);
        }
        if raw.segments > 0 {
            self.start(function, blocks as u32, THREADS, stream, &mut [arg(&mut raw)])?;
        }
        Ok(())
    }

    /// As many pairs to a launch as the parameter space takes.
    fn copy_pairs(&self, stream: sys::CUstream, pairs: &[(Region, Region)]) -> Result<()> {
        let mut filled = pairs.iter().filter(|(from, _)| from.bytes() > 0).peekable();
        while filled.peek().is_some() {
            let mut raw = RawPairs { pairs: 0, unused: 0, pair: [RawPair::default(); MAX_PAIRS] };
            let mut blocks = 0u64;
            // The array first: a pair taken for an entry that is not there would be lost.
            for (raw_pair, (from, to)) in raw.pair.iter_mut().zip(filled.by_ref()) {
                let (from_addr, to_addr) = (from.addr() as u64, to.addr() as u64);
                *raw_pair =
                    RawPair { from: from_addr, to: to_addr, bytes: from.bytes() as u32, first_block: blocks as u32 };
                raw.pairs += 1;
                blocks += from.bytes().div_ceil(COPY_BLOCK_BYTES);
            }
            self.start(self.copy_pairs, blocks as u32, THREADS, stream, &mut [arg(&mut raw)])?;
        }
        Ok(())
    }

    fn start(
        &self,
        function: sys::CUfunction,
        blocks: u32,
        threads: u32,
        stream: sys::CUstream,
        args: &mut [*mut c_void],
    ) -> Result<()> {
        // SAFETY: the function belongs to a loaded module; `args` points to one live value per parameter, of the types
        // that kernels.cu declares; the driver copies them before it returns. Addresses among them come from checked
        // regions.
        let answer = unsafe {
            sys::cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                args.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", answer)
    }
}

fn arg<T>(value: &mut T) -> *mut c_void {
    std::ptr::from_mut(value).cast()
}

fn raw_segment(segment: &AdamWSegment, first_block: u32, scalars: u32) -> RawSegment {
    RawSegment {
        param: segment.param.addr() as u64,
        grad: segment.grad.addr() as u64,
        exp_avg: segment.exp_avg.addr() as u64,
        exp_avg_sq: segment.exp_avg_sq.addr() as u64,
        max_exp_avg_sq: address(segment.max_exp_avg_sq.as_ref()),
        master: address(segment.master.as_ref()),
        elements: segment.elements() as u32,
        first_block,
        scalars,
        unused: 0,
    }
}
