//! Keeps a GPU fed with training state that does not fit on it.
#![forbid(unsafe_code)]

/// The version of this library.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
