//! `forebay inspect`, `verify` and `convert` from outside.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

/// A folder for one test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("forebay-cli-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn forebay(args: &[&dyn AsRef<std::ffi::OsStr>]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_forebay")).args(args.iter().map(|arg| arg.as_ref())).output().unwrap()
}

fn said(args: &[&dyn AsRef<std::ffi::OsStr>]) -> String {
    let output = forebay(args);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// A safetensors file as any other tool could have written it.
fn plain_file(path: &Path) {
    let header = json!({
        "__metadata__": {"format": "pt"},
        "layer.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "layer.step": {"dtype": "F32", "shape": [], "data_offsets": [24, 28]},
        "bytes": {"dtype": "U8", "shape": [5], "data_offsets": [28, 33]},
    })
    .to_string();
    let mut text = (header.len() as u64).to_le_bytes().to_vec();
    text.extend(header.bytes());
    (0..6).for_each(|i| text.extend((i as f32).to_le_bytes()));
    text.extend(7f32.to_le_bytes());
    text.extend([1, 2, 3, 4, 5]);
    fs::write(path, text).unwrap();
}

fn tensors(path: &Path) -> Value {
    let mut found: Value = serde_json::from_str(&said(&[&"inspect", &path, &"--json"])).unwrap();
    found["tensors"].take()
}

#[test]
fn a_plain_file_becomes_a_checkpoint_and_a_plain_file_again() {
    let folder = Folder::new("round");
    let (plain, checkpoint, again, twice) =
        (folder.at("in.safetensors"), folder.at("checkpoint"), folder.at("out.safetensors"), folder.at("twice"));
    plain_file(&plain);
    assert!(said(&[&"convert", &plain, &checkpoint]).starts_with("wrote "));
    assert!(said(&[&"verify", &checkpoint]).contains("whole"));
    said(&[&"convert", &checkpoint, &again]);
    said(&[&"convert", &again, &twice]);
    assert_eq!(tensors(&checkpoint), tensors(&twice));
    // Wide elements first, by name: each tensor's bytes are all there.
    let bytes = fs::read(&again).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let numbers: Vec<f32> =
        bytes[start..start + 28].chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(numbers, [7.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(bytes[start + 28..], [1, 2, 3, 4, 5]);
}

#[test]
fn inspect_says_what_is_there() {
    let folder = Folder::new("inspect");
    let (plain, checkpoint) = (folder.at("in.safetensors"), folder.at("checkpoint"));
    plain_file(&plain);
    said(&[&"convert", &plain, &checkpoint]);
    let table = said(&[&"inspect", &checkpoint]);
    for text in ["3 tensors in 1 file, 33 bytes of tensors, step 7", "layer.weight  F32   [2, 3]  1       24 bytes"] {
        assert!(table.contains(text), "{table}");
    }
    let found: Value = serde_json::from_str(&said(&[&"inspect", &checkpoint, &"--json"])).unwrap();
    assert_eq!((&found["step"], &found["tensor_bytes"], &found["files"]), (&json!(7.0), &json!(33), &json!(1)));
    assert_eq!(found["tensors"][1]["shape"], json!([]));
    assert_eq!(
        found["tensors"][2],
        json!({"name": "layer.weight", "dtype": "F32", "shape": [2, 3], "shards": 1, "bytes": 24})
    );
}

#[test]
fn verify_lists_what_is_damaged_and_exits_with_1() {
    let folder = Folder::new("verify");
    let (plain, checkpoint) = (folder.at("in.safetensors"), folder.at("checkpoint"));
    plain_file(&plain);
    said(&[&"convert", &plain, &checkpoint]);
    let file = checkpoint.join("00000001/0-0.safetensors");
    let whole = fs::read(&file).unwrap();

    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 4;
    fs::write(&file, &damaged).unwrap();
    let output = forebay(&[&"verify", &checkpoint]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("1 problem found") && text.contains("0-0.safetensors: block 0"), "{text}");
    let output = forebay(&[&"verify", &checkpoint, &"--json"]);
    let verdict: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &verdict["is_whole"]), (Some(1), &json!(false)));
    assert_eq!(verdict["problems"][0]["file"], "0-0.safetensors");
    // Nothing is made of a checkpoint that is not whole.
    let output = forebay(&[&"convert", &checkpoint, &folder.at("out.safetensors")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("0-0.safetensors"), "{output:?}");
    assert!(!folder.at("out.safetensors").exists() && !folder.at("out.partial").exists());

    fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    let output = forebay(&[&"verify", &checkpoint]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("bytes where the manifest has"), "{output:?}");

    fs::write(&file, &whole).unwrap();
    fs::write(checkpoint.join("00000001/manifest.json"), "{}").unwrap();
    let output = forebay(&[&"verify", &checkpoint]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("manifest.json: not a manifest"), "{output:?}");
}

#[test]
fn what_is_no_checkpoint_is_refused_with_a_hint() {
    let folder = Folder::new("refuse");
    let file = folder.at("x.safetensors");
    fs::write(&file, "not one").unwrap();
    let huge = folder.at("huge.safetensors");
    fs::write(&huge, u64::MAX.to_le_bytes()).unwrap();
    let cases: [&[&dyn AsRef<std::ffi::OsStr>]; 6] = [
        &[&"inspect", &folder.0],
        &[&"inspect", &folder.at("absent")],
        &[&"verify", &folder.at("absent")],
        &[&"convert", &file, &folder.at("out")],
        &[&"convert", &huge, &folder.at("out")],
        &[&"convert", &folder.at("absent"), &folder.at("out")],
    ];
    for args in cases {
        let output = forebay(args);
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{complaint}");
        assert!(complaint.starts_with("error: ") && complaint.contains("hint: "), "{complaint}");
        assert!(complaint.contains(&*folder.0.display().to_string()), "the path is named: {complaint}");
    }
    assert!(!folder.at("out").join("00000001").exists());
}

/// A checkpoint with a bf16 weight, a moment and a master of 600 elements.
fn with_state(folder: &Folder) -> PathBuf {
    let header = json!({
        "optimizer.state.w.exp_avg": {"dtype": "F32", "shape": [600], "data_offsets": [0, 2400]},
        "optimizer.state.w.master_param": {"dtype": "F32", "shape": [600], "data_offsets": [2400, 4800]},
        "model.w": {"dtype": "BF16", "shape": [600], "data_offsets": [4800, 6000]},
    })
    .to_string();
    let mut text = (header.len() as u64).to_le_bytes().to_vec();
    text.extend(header.bytes());
    let master = |i: u32| (1.0 + i as f32 / 8.0).to_bits() | 3;
    (0..600).for_each(|i| text.extend((i as f32).to_le_bytes()));
    (0..600).for_each(|i| text.extend(master(i).to_le_bytes()));
    // Rounded down: the lower halves are small.
    (0..600).for_each(|i| text.extend(((master(i) + 0x7fff + (master(i) >> 16 & 1)) >> 16).to_le_bytes()[..2].iter()));
    let (plain, checkpoint) = (folder.at("in.safetensors"), folder.at("run"));
    fs::write(&plain, text).unwrap();
    said(&[&"convert", &plain, &checkpoint]);
    checkpoint
}

#[test]
fn state_is_kept_in_other_formats_and_back() {
    let folder = Folder::new("formats");
    let run = with_state(&folder);
    let (native, back) = (folder.at("native"), folder.at("back"));
    let text = said(&[&"convert", &run, &native, &"--state", &"8bit", &"--master", &"compact"]);
    assert!(text.contains("1 tensor as 8bit, 1 tensor as compact"), "{text}");
    let table = said(&[&"inspect", &native]);
    for row in ["F32 as 8bit", "F32 as compact", "optimizer.state.w.exp_avg"] {
        assert!(table.contains(row), "{table}");
    }
    assert!(said(&[&"verify", &native]).contains("whole"));
    let bytes =
        |of: &Value| of.as_array().unwrap().iter().map(|one| one["bytes"].as_u64().unwrap()).collect::<Vec<_>>();
    // The weights, 600 codes and 3 scales, 17 bits for each master.
    assert_eq!(bytes(&tensors(&native)), [1200, 612, 1275]);
    let made = said(&[&"convert", &native, &back, &"--state", &"f32", &"--master", &"f32", &"--json"]);
    let made: Value = serde_json::from_str(&made).unwrap();
    assert_eq!((&made["bytes"], &made["bytes_before"]), (&json!(6000), &json!(3087)));
    assert_eq!(made["formats"], json!({"f32": 2}));
    assert_eq!(tensors(&back), tensors(&run));
    // Masters are exact.
    let master = |path: &Path| {
        let plain = folder.at("out.safetensors");
        said(&[&"convert", &path, &plain]);
        let bytes = fs::read(plain).unwrap();
        let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[start + 2400..start + 6000].to_vec()
    };
    assert_eq!(master(&back), master(&run));
    assert_eq!(master(&native), master(&run));
}

#[test]
fn conversions_that_make_no_sense_are_refused() {
    let folder = Folder::new("nonsense");
    let run = with_state(&folder);
    let file = folder.at("in.safetensors");
    let cases: [(&[&dyn AsRef<std::ffi::OsStr>], i32, &str); 5] = [
        (&[&"convert", &run, &folder.at("x"), &"--state", &"fp4"], 2, "f32, bf16, 8bit"),
        (&[&"convert", &run, &folder.at("x"), &"--master", &"8bit"], 2, "f32, compact"),
        (&[&"convert", &run, &folder.at("x"), &"--weights", &"--state", &"f32"], 2, "cannot be used with"),
        (&[&"convert", &file, &folder.at("x"), &"--state", &"f32"], 2, "those of a checkpoint"),
        (&[&"convert", &run, &file, &"--state", &"f32"], 2, "name a folder"),
    ];
    for (args, code, reason) in cases {
        let output = forebay(args);
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{complaint}");
        assert!(complaint.contains(reason), "{complaint}");
    }
    assert!(!folder.at("x").exists());
}
