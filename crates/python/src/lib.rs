//! The extension module `forebay._core`: numbers in, numbers out. What it does is in the crates behind it.
//!
//! Every function that can block or fail does its work inside [`guard::run`], which releases the GIL and turns both
//! errors and panics into the exceptions of `forebay.errors`. The engine gets addresses and sizes, never tensors: `looked`
//! reads them off tensors, many at a time, and `torch` turns them into memory. Nothing here links torch.
//!
//! `python/forebay/_core.pyi` is generated from this crate (`make stubs`). For that the module has to be this inline
//! `mod`, and every type in a signature has to be one that PyO3 can name.

mod accelerator;
mod activation_plan;
mod activations;
mod checkpoint;
mod command;
mod error;
mod guard;
mod inputs;
mod landing;
mod looked;
mod masters;
mod measure;
mod moments;
mod optimizer;
mod overlap;
mod rule;
mod second;
mod sleep;
mod testing;
#[expect(unsafe_code, reason = "torch's memory and streams come as numbers")]
mod torch;
mod totals;
mod trace;

/// The compiled part of forebay.
#[pyo3::pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::activation_plan::{
        ActivationPlan, CallKind, CallTimes, LayerCost, LayerPlan, MeasuredCall, MeasuredPass, PassCost, PassSample,
        TensorCost,
    };
    #[pymodule_export]
    use crate::activations::{Activations, LayerStats, OffloadStats, Opened, Route, Saved};
    #[pymodule_export]
    use crate::checkpoint::{
        Checkpoint, HostCopies, Moved, Saving, Snapshot, checkpoint_encoding, checkpoint_encoding_record,
        checkpoint_summary, export_weights, kept_copy_bytes, latest_checkpoint, release_copies, verify_checkpoint,
        write_checkpoint,
    };
    #[pymodule_export]
    use crate::command::command;
    #[pymodule_export]
    use crate::looked::{Looked, look, look_with_gradients};
    #[pymodule_export]
    use crate::masters::{keep_masters, read_masters};
    #[pymodule_export]
    use crate::measure::{backends, bench_placements, bench_step, check_contract, check_host, host_memory, probe};
    #[pymodule_export]
    use crate::optimizer::Optimizer;
    #[pymodule_export]
    use crate::rule::Rule;
    #[pymodule_export]
    use crate::sleep::Slabs;
    #[pymodule_export]
    use crate::testing::{_errors_for_test, _gil_is_released_for_test, _memory_for_test, _panic_for_test};
    #[pymodule_export]
    use crate::torch::HostView;
    #[pymodule_export]
    use crate::totals::{bytes_faulted_in, count_copied, count_save_wait, forget_parent_totals, totals};
    #[pymodule_export]
    use crate::trace::{Trace, TracedWork};

    /// Elements of a parameter that share a scale, in state of 8 bits.
    #[pymodule_export]
    const STATE_BLOCK: u32 = forebay::device::update::BLOCK;

    /// Bytes of a checkpoint's file that one checksum covers.
    #[pymodule_export]
    const CHECKPOINT_BLOCK_BYTES: u64 = forebay::checkpoint::BLOCK_BYTES;

    /// Make devices of torch's openable. The package calls it once; an initializer of the module would leave the stubs
    /// without its list of names.
    #[pyfunction]
    fn open_through_torch() {
        crate::accelerator::install();
    }

    /// The version of the extension module, which is the version of the package.
    #[pyfunction]
    fn version() -> &'static str {
        env!("CARGO_PKG_VERSION")
    }
}
