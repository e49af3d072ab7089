//! The shipped kernels, their parameters laid out as the files in `kernels/` expect them.
//!
//! What every optimizer needs is loaded when a device is opened. A rule's kernels, and those for benchmarks and tests,
//! are loaded at their first use and stay.

use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;

use super::driver::{Context, check};
use crate::error::{Error, Result};
use crate::kernel::{Dtype, Kernel, Mastered};
use crate::memory::Region;
use crate::update::{MAX_COLUMNS, MAX_SCALARS, Master, Moment, RULES, Rule, Scalars, Segment, StateFormat, Update};

/// Made from the `.cu` files beside them by `scripts/make_ptx.py`.
pub(super) const MOVES: &str = include_str!("kernels/moves.ptx");
const PROBES: &str = include_str!("kernels/probes.ptx");
const MASTERS: &str = include_str!("kernels/masters.ptx");

// The constants and structs below mirror those of the same names in kernels/*.cuh and moves.cu.
const THREADS: u32 = 256;
const BLOCK_ELEMENTS: u64 = 4096;
const MAX_SEGMENTS: usize = 56;
const MAX_COMPACT_SEGMENTS: usize = 48;
const MAX_PACKED_SEGMENTS: usize = 33;
/// In the kinds of a packed segment: columns are rounded at random.
const RANDOM: u32 = 1 << 12;
const MAX_SETS: usize = 8;
const COPY_BLOCK_BYTES: u64 = 32768;
const MAX_PAIRS: usize = 168;
const MAX_MASTERED: usize = 160;
/// Positions in a parameter are passed modulo this; what rules ask of a position repeats at least as often.
const POSITIONS: u64 = 2048;
/// Enough blocks to fill any GPU several times over; the loops in the kernels cover the rest.
const MAX_BLOCKS: u64 = 4096;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawScalars {
    values: [f32; MAX_SCALARS],
    flags: u32,
    unused: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawSegment {
    weight: u64,
    grad: u64,
    state: [u64; MAX_COLUMNS],
    master: u64,
    elements: u32,
    first_block: u32,
    scalars: u32,
    first: u32,
}

#[repr(C)]
struct RawUpdate {
    grad_scale: u64,
    skip: u64,
    followed: u64,
    segments: u32,
    trust_master: u32,
    scalars: [RawScalars; MAX_SETS],
    segment: [RawSegment; MAX_SEGMENTS],
}

const _: () = assert!(size_of::<RawUpdate>() == 3936, "the parameter size that the PTX declares");

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawCompactSegment {
    weight: u64,
    grad: u64,
    state: [u64; MAX_COLUMNS],
    low: u64,
    carry: u64,
    elements: u32,
    first_block: u32,
    scalars: u32,
    first: u32,
}

#[repr(C)]
struct RawCompactUpdate {
    grad_scale: u64,
    skip: u64,
    followed: u64,
    segments: u32,
    unused: u32,
    scalars: [RawScalars; MAX_SETS],
    segment: [RawCompactSegment; MAX_COMPACT_SEGMENTS],
}

const _: () = assert!(size_of::<RawCompactUpdate>() == 3808, "the parameter size that the PTX declares");

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawPackedSegment {
    weight: u64,
    grad: u64,
    state: [u64; MAX_COLUMNS],
    scale: [u64; MAX_COLUMNS],
    master: u64,
    carry: u64,
    elements: u32,
    first_block: u32,
    scalars: u32,
    first: u32,
    key: [u32; MAX_COLUMNS],
    kinds: u32,
}

#[repr(C)]
struct RawPackedUpdate {
    grad_scale: u64,
    skip: u64,
    followed: u64,
    segments: u32,
    trust_master: u32,
    scalars: [RawScalars; MAX_SETS],
    segment: [RawPackedSegment; MAX_PACKED_SEGMENTS],
}

const _: () = assert!(size_of::<RawPackedUpdate>() == 4048, "the parameter size that the PTX declares");

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

const _: () = assert!(size_of::<RawPairs>() == 4040, "the parameter size that the PTX declares");

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawMastered {
    weight: u64,
    master: u64,
    elements: u32,
    first_block: u32,
}

#[repr(C)]
struct RawMasters {
    differ: u64,
    pairs: u32,
    unused: u32,
    pair: [RawMastered; MAX_MASTERED],
}

const _: () = assert!(size_of::<RawMasters>() == 3856, "the parameter size that the PTX declares");

fn address(region: Option<&Region>) -> u64 {
    region.map_or(0, |region| region.addr() as u64)
}

/// Addresses of the numbers or codes of each column (0), or of its scales (1).
fn of_state(segment: &Segment, part: usize) -> [u64; MAX_COLUMNS] {
    segment.state.each_ref().map(|column| address(column.as_ref().and_then(|kept| kept.regions().nth(part))))
}

impl From<&Scalars> for RawScalars {
    fn from(s: &Scalars) -> Self {
        Self { values: s.values, flags: s.flags, unused: 0 }
    }
}

/// What one launch of updates passes, for segments of one kind.
trait Launch {
    /// The most segments.
    const SEGMENTS: usize;
    /// Without segments.
    fn new(update: &Update<'_>) -> Self;
    /// How many segments it has.
    fn len(&mut self) -> &mut u32;
    /// Adds a segment.
    fn push(&mut self, segment: &Segment, first_block: u32, set: u32);
    /// Its sets of scalars.
    fn scalars(&mut self) -> &mut [RawScalars; MAX_SETS];
}

impl Launch for RawUpdate {
    const SEGMENTS: usize = MAX_SEGMENTS;

    fn new(update: &Update<'_>) -> Self {
        Self {
            grad_scale: address(update.grad_scale.as_ref()),
            skip: address(update.skip.as_ref()),
            followed: address(update.followed.as_ref()),
            segments: 0,
            trust_master: update.trust_master.into(),
            scalars: [RawScalars::default(); MAX_SETS],
            segment: [RawSegment::default(); MAX_SEGMENTS],
        }
    }

    fn len(&mut self) -> &mut u32 {
        &mut self.segments
    }

    fn push(&mut self, segment: &Segment, first_block: u32, scalars: u32) {
        self.segment[self.segments as usize] = RawSegment {
            weight: segment.weight.addr() as u64,
            grad: segment.grad.addr() as u64,
            state: of_state(segment, 0),
            master: match &segment.master {
                Some(Master::F32(master)) => master.addr() as u64,
                _ => 0,
            },
            elements: segment.elements() as u32,
            first_block,
            scalars,
            first: (segment.first % POSITIONS) as u32,
        };
        self.segments += 1;
    }

    fn scalars(&mut self) -> &mut [RawScalars; MAX_SETS] {
        &mut self.scalars
    }
}

impl Launch for RawCompactUpdate {
    const SEGMENTS: usize = MAX_COMPACT_SEGMENTS;

    fn new(update: &Update<'_>) -> Self {
        Self {
            grad_scale: address(update.grad_scale.as_ref()),
            skip: address(update.skip.as_ref()),
            followed: address(update.followed.as_ref()),
            segments: 0,
            unused: 0,
            scalars: [RawScalars::default(); MAX_SETS],
            segment: [RawCompactSegment::default(); MAX_COMPACT_SEGMENTS],
        }
    }

    fn len(&mut self) -> &mut u32 {
        &mut self.segments
    }

    fn push(&mut self, segment: &Segment, first_block: u32, scalars: u32) {
        let (low, carry) = match &segment.master {
            Some(Master::Compact { low, carry }) => (low.addr() as u64, carry.addr() as u64),
            _ => (0, 0),
        };
        self.segment[self.segments as usize] = RawCompactSegment {
            weight: segment.weight.addr() as u64,
            grad: segment.grad.addr() as u64,
            state: of_state(segment, 0),
            low,
            carry,
            elements: segment.elements() as u32,
            first_block,
            scalars,
            first: (segment.first % POSITIONS) as u32,
        };
        self.segments += 1;
    }

    fn scalars(&mut self) -> &mut [RawScalars; MAX_SETS] {
        &mut self.scalars
    }
}

/// What the operands of a segment are, two bits each, and how its columns are rounded.
fn kinds(segment: &Segment) -> u32 {
    let master = match &segment.master {
        None => 0,
        Some(Master::F32(_)) => 1,
        Some(Master::Compact { .. }) => 2,
    };
    let format = |column: &Option<Moment>| match column.as_ref().map(Moment::format) {
        None | Some(StateFormat::F32) => 0,
        Some(StateFormat::Bf16) => 1,
        Some(StateFormat::Blocks) => 2,
    };
    let [weight, grad] = [segment.weight_dtype, segment.grad_dtype].map(|dtype| dtype_index(dtype) as u32);
    let fields = [weight, grad, master].into_iter().chain(segment.state.iter().map(format));
    let random = if segment.keys.is_some() { RANDOM } else { 0 };
    fields.enumerate().fold(random, |kinds, (i, field)| kinds | field << (2 * i))
}

impl Launch for RawPackedUpdate {
    const SEGMENTS: usize = MAX_PACKED_SEGMENTS;

    fn new(update: &Update<'_>) -> Self {
        Self {
            grad_scale: address(update.grad_scale.as_ref()),
            skip: address(update.skip.as_ref()),
            followed: address(update.followed.as_ref()),
            segments: 0,
            trust_master: update.trust_master.into(),
            scalars: [RawScalars::default(); MAX_SETS],
            segment: [RawPackedSegment::default(); MAX_PACKED_SEGMENTS],
        }
    }

    fn len(&mut self) -> &mut u32 {
        &mut self.segments
    }

    fn push(&mut self, segment: &Segment, first_block: u32, scalars: u32) {
        let (master, carry) = match &segment.master {
            None => (0, 0),
            Some(Master::F32(master)) => (master.addr() as u64, 0),
            Some(Master::Compact { low, carry }) => (low.addr() as u64, carry.addr() as u64),
        };
        self.segment[self.segments as usize] = RawPackedSegment {
            weight: segment.weight.addr() as u64,
            grad: segment.grad.addr() as u64,
            state: of_state(segment, 0),
            scale: of_state(segment, 1),
            master,
            carry,
            elements: segment.elements() as u32,
            first_block,
            scalars,
            // Random numbers depend on no more of it, and positions on less.
            first: segment.first as u32,
            key: segment.keys.unwrap_or_default(),
            kinds: kinds(segment),
        };
        self.segments += 1;
    }

    fn scalars(&mut self) -> &mut [RawScalars; MAX_SETS] {
        &mut self.scalars
    }
}

/// The loaded kernels of one device.
pub(crate) struct Kernels {
    context: Arc<Context>,
    copy_pairs: sys::CUfunction,
    powers: sys::CUfunction,
    probes: OnceLock<Probes>,
    masters: OnceLock<MasterKernels>,
    rules: [OnceLock<RuleKernels<9>>; RULES.len()],
    compact: [OnceLock<RuleKernels<3>>; RULES.len()],
    packed: [OnceLock<RuleKernels<1>>; RULES.len()],
    /// One thread loads at a time.
    loading: Mutex<()>,
    _moves: Module,
}

/// Kernels for benchmarks and tests.
struct Probes {
    uniform: sys::CUfunction,
    count_differences: sys::CUfunction,
    spin: sys::CUfunction,
    trap: sys::CUfunction,
    _module: Module,
}

/// Kernels for weights and their masters, by the type of the weight.
struct MasterKernels {
    compare: [sys::CUfunction; 3],
    round: [sys::CUfunction; 3],
    _module: Module,
}

/// A rule's kernels, by the types of weight and gradient; for compact masters by the type of the gradient. For columns in
/// fewer bits there is one.
struct RuleKernels<const N: usize> {
    functions: [sys::CUfunction; N],
    _module: Module,
}

impl<const N: usize> RuleKernels<N> {
    fn of(&self, segment: &Segment) -> sys::CUfunction {
        let weight = if segment.is_compact() { 0 } else { 3 * dtype_index(segment.weight_dtype) };
        self.functions[weight + dtype_index(segment.grad_dtype)]
    }
}

// SAFETY: module and function handles may be used from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above; they never change after loading, and loading is done under a lock.
unsafe impl Sync for Kernels {}
// SAFETY: as for `Kernels`.
unsafe impl Send for Probes {}
// SAFETY: as for `Kernels`.
unsafe impl Sync for Probes {}
// SAFETY: as for `Kernels`.
unsafe impl<const N: usize> Send for RuleKernels<N> {}
// SAFETY: as for `Kernels`.
unsafe impl<const N: usize> Sync for RuleKernels<N> {}

// SAFETY: as for `Kernels`.
unsafe impl Send for MasterKernels {}
// SAFETY: as for `Kernels`.
unsafe impl Sync for MasterKernels {}

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

impl Module {
    fn load(context: &Arc<Context>, ptx: &str) -> Result<Self> {
        let refused = |log: String| Error::KernelsRefused { device: context.name.clone(), log };
        let _bound = context.bind()?;
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
        Ok(Self { context: context.clone(), raw: module })
    }

    fn find(&self, name: &str) -> Result<sys::CUfunction> {
        let refused = |log: String| Error::KernelsRefused { device: self.context.name.clone(), log };
        let _bound = self.context.bind()?;
        let text = CString::new(name).map_err(|_| refused(name.to_owned()))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: a live module and a name that ends in a zero byte.
        let answer = unsafe { sys::cuModuleGetFunction(&mut function, self.raw, text.as_ptr()) };
        check("cuModuleGetFunction", answer).map_err(|error| refused(format!("{name}: {error}")))?;
        Ok(function)
    }
}

/// The types in the names of kernels, by [`dtype_index`].
const DTYPES: [&str; 3] = ["f32", "bf16", "f16"];

fn dtype_index(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
    }
}

/// The names of a rule's kernels: for each kind of weight, one for each type of gradient.
fn by_types(rule: &Rule, weights: &[&str]) -> Vec<String> {
    weights.iter().flat_map(|weight| DTYPES.map(|grad| format!("{}_{weight}_{grad}", rule.name))).collect()
}

impl Kernels {
    /// Loads what every optimizer needs, from the shipped PTX or another with the same entries.
    pub(crate) fn load(context: &Arc<Context>, ptx: Option<&str>) -> Result<Self> {
        let moves = Module::load(context, ptx.unwrap_or(MOVES))?;
        Ok(Self {
            context: context.clone(),
            copy_pairs: moves.find("copy_pairs")?,
            powers: moves.find("powers")?,
            probes: OnceLock::new(),
            masters: OnceLock::new(),
            rules: std::array::from_fn(|_| OnceLock::new()),
            compact: std::array::from_fn(|_| OnceLock::new()),
            packed: std::array::from_fn(|_| OnceLock::new()),
            loading: Mutex::new(()),
            _moves: moves,
        })
    }

    /// What is in a cell, loaded now if it was not.
    fn loaded<'a, T>(&self, cell: &'a OnceLock<T>, load: impl FnOnce() -> Result<T>) -> Result<&'a T> {
        if let Some(loaded) = cell.get() {
            return Ok(loaded);
        }
        let _one = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        if cell.get().is_none() {
            let _ = cell.set(load()?);
        }
        cell.get().ok_or_else(|| Error::KernelsRefused { device: self.context.name.clone(), log: String::new() })
    }

    /// A rule's kernels.
    fn rule(&self, rule: &Rule) -> Result<&RuleKernels<9>> {
        self.loaded(&self.rules[rule.index()], || self.functions(rule.ptx, &by_types(rule, &DTYPES)))
    }

    /// A rule's kernels for compact masters.
    fn compact(&self, rule: &Rule) -> Result<&RuleKernels<3>> {
        self.loaded(&self.compact[rule.index()], || self.functions(rule.compact_ptx, &by_types(rule, &["compact"])))
    }

    /// A rule's kernel for columns in fewer bits.
    fn packed(&self, rule: &Rule) -> Result<&RuleKernels<1>> {
        let name = || format!("{}_packed", rule.name);
        self.loaded(&self.packed[rule.index()], || self.functions(rule.packed_ptx, &[name()]))
    }

    /// All kernels of one of a rule's files.
    fn functions<const N: usize>(&self, ptx: &str, names: &[String]) -> Result<RuleKernels<N>> {
        let module = Module::load(&self.context, ptx)?;
        let mut functions = [std::ptr::null_mut(); N];
        for (function, name) in functions.iter_mut().zip(names) {
            *function = module.find(name)?;
        }
        Ok(RuleKernels { functions, _module: module })
    }

    /// Loads a rule's kernels.
    pub(crate) fn load_rule(&self, rule: &Rule) -> Result<()> {
        self.rule(rule).map(|_| ())
    }

    fn masters(&self) -> Result<&MasterKernels> {
        self.loaded(&self.masters, || {
            let module = Module::load(&self.context, MASTERS)?;
            Ok(MasterKernels {
                compare: [module.find("compare_f32")?, module.find("compare_bf16")?, module.find("compare_f16")?],
                round: [module.find("round_f32")?, module.find("round_bf16")?, module.find("round_f16")?],
                _module: module,
            })
        })
    }

    fn probes(&self) -> Result<&Probes> {
        self.loaded(&self.probes, || {
            let module = Module::load(&self.context, PROBES)?;
            Ok(Probes {
                uniform: module.find("uniform")?,
                count_differences: module.find("count_differences")?,
                spin: module.find("spin")?,
                trap: module.find("trap")?,
                _module: module,
            })
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
                self.start(self.probes()?.uniform, wide(elements), THREADS, stream, &mut args)
            }
            Kernel::Powers { dst, base, first } => {
                let (mut values, mut elements) = (dst.addr() as u64, dst.bytes() / 4);
                let (mut base, mut first) = (*base, *first);
                let mut args = [arg(&mut values), arg(&mut elements), arg(&mut base), arg(&mut first)];
                self.start(self.powers, wide(elements), THREADS, stream, &mut args)
            }
            Kernel::CountDifferences { a, b, count } => {
                let (mut a_addr, mut b_addr, mut words) = (a.addr() as u64, b.addr() as u64, a.bytes() / 4);
                let mut count = count.addr() as u64;
                let mut args = [arg(&mut a_addr), arg(&mut b_addr), arg(&mut words), arg(&mut count)];
                self.start(self.probes()?.count_differences, wide(words), THREADS, stream, &mut args)
            }
            Kernel::Update(update) => self.update(stream, update),
            Kernel::CopyPairs { pairs } => self.copy_pairs(stream, pairs),
            Kernel::CompareMasters { pairs, differ } => {
                self.with_masters(stream, pairs, differ.addr() as u64, &self.masters()?.compare)
            }
            Kernel::RoundMasters { pairs } => self.with_masters(stream, pairs, 0, &self.masters()?.round),
            Kernel::Spin { ns } => {
                let mut ns = *ns;
                self.start(self.probes()?.spin, 1, 1, stream, &mut [arg(&mut ns)])
            }
            Kernel::Trap => self.start(self.probes()?.trap, 1, 1, stream, &mut []),
        }
    }

    /// Runs of segments of one kind.
    fn update(&self, stream: sys::CUstream, update: &Update<'_>) -> Result<()> {
        let kind = |segment: &Segment| (segment.is_packed(), segment.is_compact() && !segment.is_packed());
        update.segments.chunk_by(|a, b| kind(a) == kind(b)).try_for_each(|segments| {
            if segments[0].is_packed() {
                let kernel = self.packed(update.rule)?.functions[0];
                self.pack::<RawPackedUpdate>(stream, update, segments, |_| kernel)
            } else if segments[0].is_compact() {
                let kernels = self.compact(update.rule)?;
                self.pack::<RawCompactUpdate>(stream, update, segments, |segment| kernels.of(segment))
            } else {
                let kernels = self.rule(update.rule)?;
                self.pack::<RawUpdate>(stream, update, segments, |segment| kernels.of(segment))
            }
        })
    }

    /// Packs segments into as few launches as their types and the parameter space allow.
    fn pack<L: Launch>(
        &self,
        stream: sys::CUstream,
        update: &Update<'_>,
        segments: &[Segment],
        kernel: impl Fn(&Segment) -> sys::CUfunction,
    ) -> Result<()> {
        let mut raw = L::new(update);
        // Which entry of `update.scalars` each place of the launch's holds.
        let mut sets: Vec<u32> = Vec::with_capacity(MAX_SETS);
        let (mut blocks, mut function) = (0u64, std::ptr::null_mut());
        for segment in segments {
            let wanted = kernel(segment);
            let known = sets.iter().position(|&set| set == segment.scalars);
            let full = *raw.len() as usize == L::SEGMENTS || (known.is_none() && sets.len() == MAX_SETS);
            if *raw.len() > 0 && (full || wanted != function) {
                self.start(function, blocks as u32, THREADS, stream, &mut [arg(&mut raw)])?;
                (*raw.len(), blocks) = (0, 0);
                sets.clear();
            }
            function = wanted;
            let set = sets.iter().position(|&set| set == segment.scalars).unwrap_or_else(|| {
                raw.scalars()[sets.len()] = (&update.scalars[segment.scalars as usize]).into();
                sets.push(segment.scalars);
                sets.len() - 1
            });
            raw.push(segment, blocks as u32, set as u32);
            blocks += segment.elements().div_ceil(BLOCK_ELEMENTS);
        }
        if *raw.len() > 0 {
            self.start(function, blocks as u32, THREADS, stream, &mut [arg(&mut raw)])?;
        }
        Ok(())
    }

    /// As many pairs of one type to a launch as the parameter space takes.
    fn with_masters(
        &self,
        stream: sys::CUstream,
        pairs: &[Mastered],
        differ: u64,
        functions: &[sys::CUfunction; 3],
    ) -> Result<()> {
        let filled: Vec<&Mastered> = pairs.iter().filter(|pair| pair.master.bytes() > 0).collect();
        for alike in filled.chunk_by(|a, b| a.dtype == b.dtype) {
            for some in alike.chunks(MAX_MASTERED) {
                let mut raw = RawMasters { differ, pairs: 0, unused: 0, pair: [RawMastered::default(); MAX_MASTERED] };
                let mut blocks = 0u64;
                for (raw_pair, pair) in raw.pair.iter_mut().zip(some) {
                    let (weight, master) = (pair.weight.addr() as u64, pair.master.addr() as u64);
                    let elements = pair.master.bytes() / 4;
                    *raw_pair = RawMastered { weight, master, elements: elements as u32, first_block: blocks as u32 };
                    raw.pairs += 1;
                    blocks += elements.div_ceil(BLOCK_ELEMENTS);
                }
                let function = functions[dtype_index(some[0].dtype)];
                self.start(function, blocks as u32, THREADS, stream, &mut [arg(&mut raw)])?;
            }
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
        // that the kernels declare; the driver copies them before it returns. Addresses among them come from checked
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

#[cfg(test)]
mod tests {
    use super::*;

    /// `SIGNED_COLUMNS` of kernels/packed.cuh.
    #[test]
    fn of_every_rule_the_first_column_may_be_below_zero() {
        for rule in RULES {
            assert!(rule.columns.iter().enumerate().all(|(i, column)| column.signed == (i == 0)), "{rule:?}");
        }
    }

    #[test]
    fn the_shipped_kernels_take_the_structs_declared_here() {
        for rule in RULES {
            for types in ["f32_f32", "bf16_f16", "f16_bf16"] {
                let parameter = format!(".b8 {}_{types}_param_0[{}]", rule.name, size_of::<RawUpdate>());
                assert!(rule.ptx.contains(&parameter), "{parameter}: make ptx");
            }
            for grad in DTYPES {
                let parameter = format!(".b8 {}_compact_{grad}_param_0[{}]", rule.name, size_of::<RawCompactUpdate>());
                assert!(rule.compact_ptx.contains(&parameter), "{parameter}: make ptx");
            }
            let parameter = format!(".b8 {}_packed_param_0[{}]", rule.name, size_of::<RawPackedUpdate>());
            assert!(rule.packed_ptx.contains(&parameter), "{parameter}: make ptx");
        }
        for kernel in ["compare_bf16", "round_f16"] {
            assert!(MASTERS.contains(&format!(".b8 {kernel}_param_0[{}]", size_of::<RawMasters>())));
        }
        assert!(MOVES.contains(&format!(".b8 copy_pairs_param_0[{}]", size_of::<RawPairs>())));
    }
}
