//! What can go wrong in the engine: a device's error, with the engine's own beside it.

use forebay_device as device;

/// The result of an engine call.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an engine call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A device call failed.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// An option with a value that cannot work.
    #[error("invalid {option}: {value}; {remedy}")]
    InvalidOption {
        /// The option's name as the user writes it.
        option: &'static str,
        /// The value given.
        value: String,
        /// What would work.
        remedy: String,
    },
    /// Tensors that are not the ones that were planned for.
    #[error("{tensor} does not fit the plan: {reason}")]
    PlanMismatch {
        /// The tensor's name.
        tensor: String,
        /// Expected and found, with the numbers.
        reason: String,
    },
}
