//! The contract of [`forebay_device::Device`], as one test body per behaviour, run on every backend the machine has.
//!
//! A test named `ordering::x::cpu` is the body `x` of `contract/ordering.rs` on the CPU backend; `cpu_checked` is the
//! same under `Checked`, `cuda` and `cuda_checked` run on the first GPU. Without a GPU those two pass with a word on
//! standard error, unless `FOREBAY_REQUIRE_CUDA=1` is set: then they fail. The binary needs nothing but itself, so it
//! can be carried to a GPU machine and run there, under compute-sanitizer too.
//!
//! What must be ordered is proved with delayed streams: the producer is held up by a spin kernel, so that a consumer
//! that does not wait reads old bytes. Times are bounded from below only, and only where a duration is the contract.

#![allow(clippy::print_stderr, reason = "a skipped test must be visible in the log")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "contract/bench.rs"]
mod bench;

#[path = "contract/checker.rs"]
mod checker;
#[path = "contract/copies.rs"]
mod copies;
#[path = "contract/cuda_arithmetic.rs"]
mod cuda_arithmetic;
#[path = "contract/failure.rs"]
mod failure;
#[path = "contract/fault.rs"]
mod fault;
#[path = "contract/fork.rs"]
mod fork;
#[path = "contract/host.rs"]
mod host;
#[path = "contract/kernels.rs"]
mod kernels;
#[path = "contract/masters.rs"]
mod masters;
#[path = "contract/memory.rs"]
mod memory;
#[path = "contract/opening.rs"]
mod opening;
#[path = "contract/ordering.rs"]
mod ordering;
#[path = "contract/pairs.rs"]
mod pairs;
#[path = "contract/segments.rs"]
mod segments;
#[path = "contract/slab.rs"]
mod slab;
#[path = "contract/update.rs"]
mod update;
#[path = "contract/written.rs"]
mod written;
