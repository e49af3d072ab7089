//! Keeps a GPU fed with training state that does not fit on it.
//!
//! Read the modules downwards and you read the data flow:
//!
//! - [`plan`] decides which bytes travel in which chunk; pure, printable, serialisable.
//! - [`memory`] pins slabs and allocates rings: once, exact, counted.
//! - [`flow`] moves chunks through the ring: fetch, update, store.
//! - [`optimizer`] owns an optimizer's state and updates it at every placement; its inner loop is in `streamed.rs`.
//! - [`checkpoint`] writes state to files without a copy and reads it back into place.
//! - [`snapshot`] keeps the state of one moment for a save while steps go on.
//! - [`sleep`] puts whole storages into slabs and brings them back.
//! - [`activations`] moves saved tensors out during the forward pass and back during the backward pass.
//! - [`trace`] holds timed spans of the stages.
//! - [`totals`] counts what the whole process has pinned, moved and waited for.
//!
//! # Refusals
//! No `unsafe`: it lives in `forebay-device`. No Python and no terminal: those are crates of their own. No collectives:
//! distribution belongs to PyTorch; the engine sees one rank's shard.
#![forbid(unsafe_code)]

pub mod activations;
pub mod checkpoint;
pub mod error;
pub mod flow;
pub mod memory;
pub mod optimizer;
pub mod plan;
pub mod sleep;
pub mod snapshot;
mod sync;
pub mod totals;
pub mod trace;

pub use error::{Error, Result};
pub use forebay_device as device;

/// The version of this library.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
