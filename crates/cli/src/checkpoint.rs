//! The commands on checkpoints.

use std::collections::BTreeMap;
use std::path::Path;

use forebay::Error;
use forebay::checkpoint::{
    Change, Changed, Checkpoint, Problem, Summary, export_weights, from_safetensors, reencode, summarise,
    to_safetensors, verify as check,
};
use forebay::device::{MasterFormat, StateFormat};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::options::ConvertArgs;
use crate::output::{Json, check_writable};
use crate::progress::watch;
use crate::tables::{columns, count, size};
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

/// What a conversion has made.
#[derive(Serialize)]
struct Made {
    path: String,
    bytes: u64,
    /// If it is a checkpoint with other formats: bytes of the tensors before, and how many tensors of state are in each.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_before: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    formats: Option<BTreeMap<String, usize>>,
}

pub(crate) fn convert(args: &ConvertArgs) -> Result<u8, Failure> {
    let ConvertArgs { from, to, output, .. } = args;
    output.json.path().map_or(Ok(()), check_writable)?;
    let made = make(args)?;
    report(&output.json, &made, || {
        let Some(before) = made.bytes_before else {
            return format!("wrote {}: {}\n", to.display(), size(made.bytes));
        };
        let formats =
            made.formats.iter().flatten().map(|(format, tensors)| format!("{} as {format}", count(*tensors, "tensor")));
        let formats: Vec<String> = formats.collect();
        let state = if formats.is_empty() { "no state of an optimizer".to_owned() } else { formats.join(", ") };
        format!(
            "wrote {}: {} of tensors, {} in {}; {state}\n",
            made.path,
            size(made.bytes),
            size(before),
            from.display()
        )
    })?;
    Ok(SUCCESS)
}

fn make(args: &ConvertArgs) -> Result<Made, Failure> {
    let ConvertArgs { from, to, weights, state, master, .. } = args;
    let wrong = |option, path: &Path, remedy: &str| {
        let value = path.display().to_string();
        Err(Failure::Engine(Error::InvalidOption { option, value, remedy: remedy.to_owned() }))
    };
    let changes = state.is_some() || master.is_some();
    let plain = |bytes| Made { path: to.display().to_string(), bytes, bytes_before: None, formats: None };
    if !from.is_dir() {
        if *weights || changes {
            let option = if *weights { "weights" } else { "from" };
            let remedy = "weights and formats are those of a checkpoint; name its folder first";
            return wrong(option, from, remedy);
        }
        let bytes = std::fs::metadata(from).map_or(0, |file| file.len());
        watch("converting", bytes, |moved| from_safetensors(from, to, moved))?;
        return Ok(plain(bytes));
    }
    let checkpoint = Checkpoint::open(from)?;
    let bytes = checkpoint.manifest().tensor_bytes();
    if changes {
        if to.is_file() {
            return wrong("to", to, "a checkpoint with other formats is a folder; name a folder, not a file");
        }
        let state = state.as_deref().map(StateFormat::named).transpose()?;
        let master = master.as_deref().map(MasterFormat::named).transpose()?;
        let changed = watch("converting", bytes, |moved| reencode(&checkpoint, to, Change { state, master }, moved))?;
        let Changed { path, bytes_before, bytes, formats } = changed;
        return Ok(Made { path, bytes, bytes_before: Some(bytes_before), formats: Some(formats) });
    }
    if to.is_dir() {
        return wrong(
            "to",
            to,
            "a checkpoint becomes one file; name a file, not a folder, or say the formats of another checkpoint with \
             --state and --master",
        );
    }
    // Read once to compare the checksums, and once to copy.
    let write = if *weights { export_weights } else { to_safetensors };
    watch("converting", 2 * bytes, |moved| write(&checkpoint, to, moved))?;
    Ok(plain(std::fs::metadata(to).map_or(bytes, |file| file.len())))
}

fn table(summary: &Summary) -> String {
    let shape = |shape: &[u64]| format!("[{}]", shape.iter().map(u64::to_string).collect::<Vec<_>>().join(", "));
    let mut rows = vec![["tensor", "type", "shape", "shards", "size"].map(str::to_owned)];
    rows.extend(summary.tensors.iter().map(|tensor| {
        let [shards, bytes] = [tensor.shards.to_string(), size(tensor.bytes)];
        let dtype = tensor
            .format
            .as_ref()
            .map_or_else(|| tensor.dtype.clone(), |format| format!("{} as {format}", tensor.dtype));
        [tensor.name.clone(), dtype, shape(&tensor.shape), shards, bytes]
    }));
    let mut text = format!(
        "{}\n{} in {}, {} of tensors{}\n\n{}",
        summary.path,
        count(summary.tensors.len(), "tensor"),
        count(summary.files, "file"),
        size(summary.tensor_bytes),
        summary.step.map_or(String::new(), |step| format!(", step {step}")),
        columns(&rows)
    );
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
