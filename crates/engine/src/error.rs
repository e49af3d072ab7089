//! The errors of the engine: a device's error, or one of the engine's own.

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
    /// A checkpoint that cannot be used.
    #[error("{path}: {reason}")]
    Checkpoint {
        /// The file or folder at fault.
        path: String,
        /// What is wrong with it, with the numbers.
        reason: String,
    },
    /// The system refused a file or a folder.
    #[error(
        "cannot {action} {path}: {text}; check that the path exists, that you may use it, and that the disk has room"
    )]
    File {
        /// The operation that failed.
        action: &'static str,
        /// The file or folder.
        path: String,
        /// `errno`, if there is one.
        errno: Option<i32>,
        /// The system's description.
        text: String,
    },
    /// State that a load or a step left half written.
    #[error("the optimizer cannot be stepped: {reason}; load a complete checkpoint of optimizer and model")]
    Distrusted {
        /// What broke off, and with what.
        reason: String,
    },
    /// Tensors that are not the ones that were planned for.
    #[error("{tensor} does not fit the plan: {reason}; make a new optimizer after changing its parameters")]
    PlanMismatch {
        /// The tensor's name.
        tensor: String,
        /// Expected and found, with the numbers.
        reason: String,
    },
}

impl Error {
    /// What the system said when it refused a file or a folder.
    pub(crate) fn file(action: &'static str, path: &std::path::Path, error: &std::io::Error) -> Self {
        Self::File { action, path: path.display().to_string(), errno: error.raw_os_error(), text: error.to_string() }
    }
}
