//! Keeps a GPU fed with training state that does not fit on it.
//!
//! Read the modules downwards and you read the data flow:
//!
//! - [`plan`] decides which bytes travel in which chunk; pure, printable, serialisable.
//! - [`pool`] pins slabs and allocates rings: once, exact, counted.
//! - [`pipeline`] moves chunks through the ring: fetch, update, store.
//! - [`step`] is the streamed AdamW step on top of it; its inner loop is [`step::StreamedAdamW::step`].
//! - [`checkpoint`] writes state to files from where it lies and reads it back into place.
//! - [`sleep`] puts whole storages into slabs and brings them back.
//! - [`trace`] says what happened when.
//! - [`measure`] finds out what the machine can do, and how much of it the step uses.
//!
//! # Refusals
//! No `unsafe`: it lives in `forebay-device`. No Python and no terminal: those are crates of their own. No collectives:
//! distribution belongs to PyTorch; the engine sees one rank's shard.
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod error;
pub mod measure;
pub mod pipeline;
pub mod plan;
pub mod pool;
pub mod sleep;
pub mod step;
mod sync;
pub mod trace;

pub use error::{Error, Result};
pub use forebay_device as device;

/// The version of this library.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
