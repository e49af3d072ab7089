//! Where results, errors and hints go.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::str::FromStr;

use forebay::{Error, device};

use crate::{FAILURE, Failure, SUCCESS, WRONG_OPTIONS};

/// Where `--json` sends the result.
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

    pub(crate) fn path(&self) -> Option<&str> {
        if let Self::File(path) = self { Some(path) } else { None }
    }
}

/// Writes to standard output. A closed pipe (`| head`) is not an error; a full disk is.
pub(crate) fn emit(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::Write { path: "to standard output".to_owned(), error })
        }
        _ => Ok(()),
    }
}

/// Refuses a path that cannot be written, before a measurement of minutes.
pub(crate) fn check_writable(path: &str) -> Result<(), Failure> {
    let found = std::fs::metadata(path);
    // Opening and closing a pipe would end its reader.
    if found.as_ref().is_ok_and(|file| !file.is_file() && !file.is_dir()) {
        return Ok(());
    }
    let opened = OpenOptions::new().append(true).create(true).open(path);
    opened.map_err(|error| Failure::Write { path: path.to_owned(), error })?;
    if found.is_err() {
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

fn complain(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// Prints clap's message: help and version to standard output, an error with a hint to standard error.
pub(crate) fn usage(error: &clap::Error, built_by: &str) -> u8 {
    if error.kind() == clap::error::ErrorKind::DisplayVersion {
        // Built here only: looking for a driver takes time that other commands need not spend.
        return said(emit(&format!("forebay {}\n", crate::tables::version(built_by))));
    }
    if !error.use_stderr() {
        return said(emit(&error.to_string()));
    }
    let text = error.to_string();
    let text = text.split("\n\nFor more information").next().unwrap_or(&text).trim_end();
    complain(&format!("{text}\nhint: `forebay --help` lists the commands, `forebay COMMAND --help` their options\n"));
    WRONG_OPTIONS
}

fn said(outcome: Result<(), Failure>) -> u8 {
    outcome.map_or_else(|failure| fail(&failure), |()| SUCCESS)
}

/// Prints the error and a hint how to avoid it.
pub(crate) fn fail(failure: &Failure) -> u8 {
    let (text, hint, code) = match failure {
        Failure::Write { path, error } => (
            format!("cannot write {path}: {error}"),
            "give a path that can be written, in a folder that exists, on a disk with room".to_owned(),
            FAILURE,
        ),
        Failure::Unusable { text, hint } => (text.clone(), (*hint).to_owned(), FAILURE),
        Failure::Engine(
            Error::InvalidOption { option, value, remedy }
            | Error::Device(device::Error::InvalidOption { option, value, remedy }),
        ) => (format!("invalid {}: {value}", flag(option)), remedy.clone(), WRONG_OPTIONS),
        Failure::Engine(error) => {
            let (text, remedy) = split(error);
            let own = hint(error);
            (text, if own.is_empty() { remedy } else { own.to_owned() }, FAILURE)
        }
    };
    complain(&format!("error: {text}\n"));
    if !hint.is_empty() {
        complain(&format!("hint: {hint}\n"));
    }
    code
}

/// An error and its remedy. Messages of the library name the remedy after their last semicolon; the reason why a
/// checkpoint cannot be used may have other semicolons.
fn split(error: &Error) -> (String, String) {
    let text = error.to_string();
    match text.rsplit_once("; ") {
        Some((text, remedy)) if !matches!(error, Error::Checkpoint { .. }) => (text.to_owned(), remedy.to_owned()),
        _ => (text, String::new()),
    }
}

/// The library's name of an option as a flag: `--chunk-bytes` for `chunk_bytes`.
fn flag(option: &str) -> String {
    format!("--{}", option.trim_start_matches('-').replace('_', "-"))
}

fn hint(error: &Error) -> &'static str {
    let error = match error {
        Error::Device(error) => error,
        Error::Checkpoint { .. } => {
            return "name the folder of a complete checkpoint; `forebay verify` lists what is damaged";
        }
        Error::File { .. } | Error::InvalidOption { .. } | Error::PlanMismatch { .. } | Error::Distrusted { .. } => {
            return "";
        }
    };
    match error {
        device::Error::DeviceAbsent { .. } => "use --device cpu, or run on a machine with an NVIDIA GPU and its driver",
        device::Error::OutOfDeviceMemory { .. } => {
            "use a smaller --model, --params, --slots or --chunk-bytes, or free memory on the device"
        }
        device::Error::OutOfPinnedBudget { .. } | device::Error::SlabLargerThanMemory { .. } => {
            "use a smaller --model or --params: the state of AdamW and Adam takes 8 bytes of host memory per parameter"
        }
        _ => "",
    }
}
