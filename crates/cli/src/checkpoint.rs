//! The commands on checkpoints.

use std::path::Path;

use forebay::Error;
use forebay::checkpoint::{
    Checkpoint, Problem, Summary, export_weights, from_safetensors, summarise, to_safetensors, verify as check,
};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::output::{Json, check_writable, emit};
use crate::progress::watch;
use crate::tables::{count, size};
use crate::{FAILURE, Failure, SUCCESS, report};

pub(crate) fn inspect(path: &Path, json: &Json) -> Result<u8, Failure> {
    let summary = summarise(&Checkpoint::open(path)?)?;
    json.path().map_or(Ok(()), check_writable)?;
    report(json, &summary, || table(&summary))?;
    Ok(SUCCESS)
}

#[derive(Serialize)]
struct Verdict {
    path: String,
    is_whole: bool,
    checked_bytes: u64,
    problems: Vec<Problem>,
}

pub(crate) fn verify(path: &Path, json: &Json) -> Result<u8, Failure> {
    json.path().map_or(Ok(()), check_writable)?;
    let (folder, checked_bytes, problems) = match Checkpoint::open(path) {
        // A manifest that cannot be used is a finding too.
        Err(Error::Checkpoint { path, reason }) => (path.clone(), 0, vec![Problem { file: path, reason }]),
        Err(error) => return Err(error.into()),
        Ok(checkpoint) => {
            let total = checkpoint.manifest().files.iter().map(|file| file.bytes).sum();
            let problems = watch("verifying", total, |read| check(&checkpoint, read))?;
            (checkpoint.folder().display().to_string(), total, problems)
        }
    };
    let verdict = Verdict { path: folder, is_whole: problems.is_empty(), checked_bytes, problems };
    report(json, &verdict, || {
        if verdict.is_whole {
            return format!("{}: whole, {} checked\n", verdict.path, size(checked_bytes));
        }
        let list: String = verdict.problems.iter().map(|problem| format!("  {problem}\n")).collect();
        format!("{}: {} found\n{list}", verdict.path, count(verdict.problems.len(), "problem"))
    })?;
    Ok(if verdict.is_whole { SUCCESS } else { FAILURE })
}

pub(crate) fn convert(from: &Path, to: &Path, weights: bool) -> Result<u8, Failure> {
    let bytes = if from.is_dir() {
        if to.is_dir() {
            return Err(Failure::Engine(Error::InvalidOption {
                option: "to",
                value: to.display().to_string(),
                remedy: "a checkpoint becomes one file; name a file, not a folder".to_owned(),
            }));
        }
        let checkpoint = Checkpoint::open(from)?;
        let bytes = checkpoint.manifest().tensor_bytes();
        // Read once to compare the checksums, and once to copy.
        let write = if weights { export_weights } else { to_safetensors };
        watch("converting", 2 * bytes, |moved| write(&checkpoint, to, moved))?;
        std::fs::metadata(to).map_or(bytes, |file| file.len())
    } else if weights {
        return Err(Failure::Engine(Error::InvalidOption {
            option: "weights",
            value: from.display().to_string(),
            remedy: "weights are exported from a checkpoint; name its folder first".to_owned(),
        }));
    } else {
        let bytes = std::fs::metadata(from).map_or(0, |file| file.len());
        watch("converting", bytes, |moved| from_safetensors(from, to, moved))?;
        bytes
    };
    emit(&format!("wrote {}: {}\n", to.display(), size(bytes)))?;
    Ok(SUCCESS)
}

fn table(summary: &Summary) -> String {
    let shape = |shape: &[u64]| format!("[{}]", shape.iter().map(u64::to_string).collect::<Vec<_>>().join(", "));
    let rows: Vec<[String; 5]> = summary
        .tensors
        .iter()
        .map(|tensor| {
            let [shards, bytes] = [tensor.shards.to_string(), size(tensor.bytes)];
            [tensor.name.clone(), tensor.dtype.clone(), shape(&tensor.shape), shards, bytes]
        })
        .collect();
    let titles = ["tensor", "type", "shape", "shards", "size"].map(str::to_owned);
    let mut widths = [0; 5];
    for row in rows.iter().chain([&titles]) {
        widths.iter_mut().zip(row).for_each(|(width, cell)| *width = cell.chars().count().max(*width));
    }
    let line = |row: &[String; 5]| {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    let mut text = format!(
        "{}\n{} in {}, {} of tensors{}\n\n{}",
        summary.path,
        count(summary.tensors.len(), "tensor"),
        count(summary.files, "file"),
        size(summary.tensor_bytes),
        summary.step.map_or(String::new(), |step| format!(", step {step}")),
        line(&titles)
    );
    rows.iter().for_each(|row| text += &line(row));
    if !(summary.groups.is_empty() && summary.objects.is_empty()) {
        text += "\n";
    }
    for (number, group) in summary.groups.iter().enumerate() {
        text += &format!("group {number}: {}\n", describe(group));
    }
    for (name, value) in &summary.objects {
        text += &format!("{name}: {}\n", shortened(&bare(value)));
    }
    text
}

/// A group in one line: its numbers, and how many parameters it has.
fn describe(fields: &Map<String, Value>) -> String {
    let parameters = fields.get("params").and_then(Value::as_array).map_or(0, Vec::len);
    let plain = fields.iter().filter(|(key, value)| *key != "params" && !value.is_null());
    let list: Vec<String> = plain.map(|(key, value)| format!("{key} {}", bare(value))).collect();
    format!("{}, {}", count(parameters, "parameter"), list.join(", "))
}

/// A value without the tags of its type.
fn bare(value: &Value) -> String {
    match value {
        Value::Object(fields) if fields.contains_key("$") => {
            fields.get("value").map_or_else(|| value.to_string(), bare)
        }
        Value::Array(items) => format!("({})", items.iter().map(bare).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= 80 {
        text.to_owned()
    } else {
        format!("{}...", text.chars().take(77).collect::<String>())
    }
}
