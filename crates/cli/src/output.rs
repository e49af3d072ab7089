//! Where results, errors and hints go.

use std::io::Write as _;
use std::process::ExitCode;
use std::str::FromStr;

use forebay::{Error, device};

use crate::Failure;

/// What `--json` asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Json {
    Off,
    Stdout,
    File(String),
}

impl FromStr for Json {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "" => Self::Off,
            "-" => Self::Stdout,
            path => Self::File(path.to_owned()),
        })
    }
}

impl Json {
    pub(crate) fn to_stdout(&self) -> bool {
        *self == Self::Stdout
    }
}

/// Writes to standard output. A reader that has seen enough (`| head`) is not an error.
pub(crate) fn emit(text: &str) {
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}

fn complain(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// Prints clap's own answer: help and version to standard output, a complaint with a hint to standard error.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    if error.kind() == clap::error::ErrorKind::DisplayVersion {
        // Asked for here and not before: looking for a driver takes a moment that other commands need not wait.
        emit(&format!("forebay {}\n", crate::tables::version()));
        return ExitCode::SUCCESS;
    }
    if !error.use_stderr() {
        emit(&error.to_string());
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    let text = text.split("\n\nFor more information").next().unwrap_or(&text).trim_end();
    complain(&format!("{text}\nhint: `forebay --help` lists the commands, `forebay COMMAND --help` their options\n"));
    ExitCode::from(2)
}

/// Prints what went wrong and what to do about it.
pub(crate) fn fail(failure: &Failure) -> ExitCode {
    let (text, hint, code) = match failure {
        Failure::Write { path, error } => (
            format!("cannot write {path}: {error}"),
            "give a path in a folder that exists and can be written".to_owned(),
            1,
        ),
        Failure::Engine(
            Error::InvalidOption { option, value, remedy }
            | Error::Device(device::Error::InvalidOption { option, value, remedy }),
        ) => (format!("invalid {option}: {value}"), remedy.clone(), 2),
        Failure::Engine(error) => (error.to_string(), hint(error).to_owned(), 1),
    };
    complain(&format!("error: {text}\n"));
    if !hint.is_empty() {
        complain(&format!("hint: {hint}\n"));
    }
    ExitCode::from(code)
}

fn hint(error: &Error) -> &'static str {
    let Error::Device(error) = error else { return "" };
    match error {
        device::Error::DeviceAbsent { .. } => "use --device cpu, or run on a machine with an NVIDIA GPU and its driver",
        device::Error::OutOfDeviceMemory { .. } => "use a smaller --model or --params, or free memory on the device",
        device::Error::OutOfPinnedBudget { .. } | device::Error::SlabLargerThanMemory { .. } => {
            "use a smaller --model or --params: the state takes 8 bytes of host memory for each parameter"
        }
        device::Error::KernelsRefused { .. } => {
            "this GPU or driver cannot run the kernels; forebay needs compute 8.0 or newer"
        }
        _ => "",
    }
}
