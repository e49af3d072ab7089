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
