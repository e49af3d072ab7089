//! Files of traces: one of a benchmark's step, and the merge of several ranks' files.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use forebay::Error;
use forebay::trace::{About, Recording};
use serde_json::Value;

use crate::output::{check_writable, emit};
use crate::{Failure, SUCCESS};

/// Writes what was recorded in this process.
pub(crate) fn write(path: &str, recording: &Recording) -> Result<(), Failure> {
    to_file(Path::new(path), |file| recording.write(file, &About { ranks: 1, ..About::default() }))
}

/// Merges the traces of several ranks.
pub(crate) fn merge(traces: &[PathBuf], output: &Path) -> Result<u8, Failure> {
    let path = output.display().to_string();
    if let Some(same) = traces.iter().find(|trace| is_same(trace, output)) {
        return Err(Failure::Engine(Error::InvalidOption {
            option: "output",
            value: path,
            remedy: format!("it is also read, as {}; give another file", same.display()),
        }));
    }
    check_writable(&path)?;
    let merged = forebay::trace::merge(traces.iter().map(|trace| read(trace)).collect::<Result<_, _>>()?)?;
    to_file(output, |file| {
        serde_json::to_writer(&mut *file, &merged)?;
        writeln!(file)
    })?;
    let events = merged["traceEvents"].as_array().map_or(0, Vec::len);
    emit(&format!("wrote {path}: {} ranks, {events} events; open it in Perfetto or chrome://tracing\n", traces.len()))?;
    Ok(SUCCESS)
}

/// Whether two paths lead to one file.
pub(crate) fn is_same(one: &Path, other: &Path) -> bool {
    one == other || matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

fn read(path: &Path) -> Result<(String, Value), Failure> {
    let name = path.display().to_string();
    let refused = |error: std::io::Error| {
        let (text, errno) = (error.to_string(), error.raw_os_error());
        Failure::Engine(Error::File { action: "read", path: name.clone(), errno, text })
    };
    let bytes = std::fs::read(path).map_err(refused)?;
    let trace = serde_json::from_slice(&bytes).map_err(|error| {
        let text = format!("it is not JSON ({error}); give files that forebay.trace has written");
        Failure::Engine(Error::File { action: "merge", path: name.clone(), errno: None, text })
    })?;
    Ok((name, trace))
}

fn to_file(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>) -> Result<(), Failure> {
    let written = File::create(path).and_then(|file| {
        let mut file = BufWriter::new(file);
        write(&mut file)?;
        file.flush()
    });
    written.map_err(|error| Failure::Write { path: path.display().to_string(), error })
}
