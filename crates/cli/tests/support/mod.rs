//! Runs of the `forebay` binary, and what is checked after each of them.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A limit for answers that need no measurement: long enough on a busy machine, too short for a measurement.
const AT_ONCE: Duration = Duration::from_secs(3);

pub(crate) fn command(args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(args.split_whitespace()).stdin(Stdio::null());
    command
}

pub(crate) fn forebay(args: &str) -> Output {
    command(args).output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// The standard output of a run that succeeded and wrote nothing to standard error, no progress bar either.
pub(crate) fn said(args: &str) -> String {
    let output = forebay(args);
    assert_eq!(output.status.code(), Some(0), "forebay {args}: {output:?}");
    assert_eq!(text(&output.stderr), "", "forebay {args}");
    text(&output.stdout).to_owned()
}

pub(crate) fn json(args: &str) -> Value {
    let printed = said(args);
    serde_json::from_str(&printed).unwrap_or_else(|error| panic!("forebay {args}: {error} in {printed}"))
}

/// A run that failed with this code: nothing on standard output, an error that names each of `named`, a hint.
pub(crate) fn refused(args: &str, code: i32, named: &[&str]) -> String {
    let output = forebay(args);
    let complaint = text(&output.stderr).to_owned();
    assert_eq!(output.status.code(), Some(code), "forebay {args}: {output:?}");
    assert_eq!(text(&output.stdout), "", "forebay {args}");
    assert!(complaint.starts_with("error: "), "forebay {args}: {complaint}");
    assert!(complaint.lines().any(|line| line.len() > 10 && line.starts_with("hint: ")), "forebay {args}: {complaint}");
    assert!(!complaint.contains(['\r', '\x1b']), "forebay {args}: {complaint:?}");
    for name in named {
        assert!(complaint.contains(name), "forebay {args}: no {name:?} in {complaint}");
    }
    complaint
}

pub(crate) fn refused_at_once(args: &str, code: i32, named: &[&str]) -> String {
    let start = Instant::now();
    let complaint = refused(args, code, named);
    let elapsed = start.elapsed();
    assert!(elapsed < AT_ONCE, "forebay {args}: refused after {elapsed:?}");
    complaint
}

/// An empty folder for one test. Its path has no spaces, at which `command` would split.
pub(crate) fn folder(test: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    assert!(!folder.to_str().unwrap().contains(char::is_whitespace));
    folder
}

pub(crate) fn number(value: &Value, name: &str) -> f64 {
    value[name].as_f64().unwrap_or_else(|| panic!("{name} is no number in {value}"))
}

pub(crate) fn count(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or_else(|| panic!("{name} is no count in {value}"))
}
