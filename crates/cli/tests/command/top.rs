//! `forebay top` on files as `forebay.publish()` writes them, and on files that it must not believe.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use crate::support::{count, folder, json as printed, number, refused_at_once, said};
use serde_json::{Value, json};

/// When a process began, as the kernel counts it.
fn start_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap()
}

/// A pid that no process has: larger than any that the kernel gives out.
const NOBODY: u32 = 0x7fff_ffff;

/// What this test's own process would publish.
fn figures() -> Value {
    let pid = std::process::id();
    json!({
        "schema": 1, "pid": pid, "start_ticks": start_ticks(pid), "command": "train.py", "rank": 3,
        "device": "cuda:1", "unix_s": 1e9, "pinned_bytes": 24_700_000_000_u64, "ring_bytes": 67_108_864,
        "fetch_gbps": 41.25, "store_gbps": 40.75, "stalls": 7, "stall_s": 0.5, "saves": 1,
    })
}

/// A folder of this user's alone.
fn private(test: &str) -> PathBuf {
    let made = folder(test);
    fs::set_permissions(&made, fs::Permissions::from_mode(0o700)).unwrap();
    made
}

fn publish(folder: &Path, name: &str, text: &str, mode: u32) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    path
}

/// What is shown of one file, which is the file of this test's process.
fn shown(test: &str, figures: &Value) -> Vec<Value> {
    let folder = private(test);
    publish(&folder, &format!("{}.json", std::process::id()), &figures.to_string(), 0o600);
    processes(&folder)
}

fn processes(folder: &Path) -> Vec<Value> {
    printed(&format!("top --json --folder {}", folder.display()))["processes"].as_array().unwrap().clone()
}

#[test]
fn a_process_is_shown_with_its_figures() {
    let found = shown("top-shown", &figures());
    assert_eq!(found.len(), 1);
    for (name, wanted) in figures().as_object().unwrap() {
        let hidden = ["schema", "start_ticks", "unix_s"].contains(&name.as_str());
        assert_eq!(found[0].get(name), (!hidden).then_some(wanted), "{name}");
    }
    assert!(number(&found[0], "age_s") > 1e6);
    assert_eq!(count(&found[0], "pinned_bytes"), 24_700_000_000);
}

#[test]
fn the_table_has_a_row_for_each_process() {
    let folder = private("top-table");
    publish(&folder, &format!("{}.json", std::process::id()), &figures().to_string(), 0o600);
    let text = said(&format!("top --once --folder {}", folder.display()));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[0].starts_with("pid") && lines[0].contains("fetch GB/s") && lines[0].contains("saves"), "{text}");
    for part in ["train.py", "3", "cuda:1", "24.7 GB", "41.25", "40.75", "7 (0.5 s)", "silent for"] {
        assert!(lines[1].contains(part), "no {part} in {text}");
    }
    assert_eq!(said(&format!("top --folder {}", folder.display())).lines().count(), 2, "a pipe gets one picture");
}

#[test]
fn without_publishers_it_says_how_to_publish() {
    let folder = private("top-nothing");
    let text = said(&format!("top --once --folder {}", folder.display()));
    assert!(text.contains("no process of this user publishes") && text.contains("forebay.publish()"), "{text}");
    assert!(processes(&folder).is_empty());
}

#[test]
fn what_a_killed_process_left_is_removed() {
    let folder = private("top-stale");
    let mut gone = figures();
    gone["pid"] = json!(NOBODY);
    let left = publish(&folder, &format!("{NOBODY}.json"), &gone.to_string(), 0o600);
    let half = publish(&folder, &format!(".{NOBODY}.new"), "{", 0o600);
    // Another process has the pid by now.
    let mut other = figures();
    other["start_ticks"] = json!(start_ticks(std::process::id()) + 1);
    let reused = publish(&folder, &format!("{}.json", std::process::id()), &other.to_string(), 0o600);
    let own = publish(&folder, &format!(".{}.new", std::process::id()), "{", 0o600);
    assert!(processes(&folder).is_empty());
    assert!(!left.exists() && !half.exists() && !reused.exists());
    assert!(own.exists(), "a file that is being written stays");
}

#[test]
fn files_that_cannot_be_believed_are_not_shown() {
    let pid = std::process::id();
    let name = format!("{pid}.json");
    let good = figures().to_string();
    let changed = |field: &str, value: Value| {
        let mut figures = figures();
        figures[field] = value;
        figures.to_string()
    };
    let cases = [
        ("schema", name.clone(), changed("schema", json!(2)), 0o600),
        ("pid", name.clone(), changed("pid", json!(1)), 0o600),
        ("negative", name.clone(), changed("fetch_gbps", json!(-1.0)), 0o600),
        ("type", name.clone(), changed("stalls", json!("many")), 0o600),
        ("missing", name.clone(), changed("stalls", Value::Null), 0o600),
        ("text", name.clone(), "not json".to_owned(), 0o600),
        ("cut", name.clone(), good[..good.len() / 2].to_owned(), 0o600),
        ("large", name.clone(), format!("{good}{}", " ".repeat(20_000)), 0o600),
        ("readable", name.clone(), good.clone(), 0o644),
        ("name", "other.json".to_owned(), good.clone(), 0o600),
    ];
    for (case, name, text, mode) in cases {
        let folder = private(&format!("top-bad-{case}"));
        let path = publish(&folder, &name, &text, mode);
        assert!(processes(&folder).is_empty(), "{case}");
        assert!(path.exists(), "{case}: only what a process has left is removed");
    }
    let folder = private("top-bad-link");
    let elsewhere = publish(&private("top-bad-link-to"), &name, &good, 0o600);
    symlink(&elsewhere, folder.join(&name)).unwrap();
    assert!(processes(&folder).is_empty(), "a link is not followed");
    fs::remove_file(folder.join(&name)).unwrap();
    fs::hard_link(&elsewhere, folder.join(&name)).unwrap();
    assert!(processes(&folder).is_empty(), "nor a second name of a file");
}

#[test]
fn names_are_printed_without_control_characters() {
    let mut figures = figures();
    figures["command"] = json!("evil\u{1b}[2J\r\n\u{202e}name");
    figures["device"] = json!("\u{7}".repeat(500));
    let folder = private("top-names");
    publish(&folder, &format!("{}.json", std::process::id()), &figures.to_string(), 0o600);
    let text = said(&format!("top --once --folder {}", folder.display()));
    assert!(text.contains("evil?[2J???name"), "{text}");
    assert!(text.chars().all(|letter| letter == '\n' || !letter.is_control()), "{text:?}");
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(text.lines().all(|line| line.len() < 200), "{text}");
}

#[test]
fn folders_of_others_are_refused() {
    let open = folder("top-open");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
    refused_at_once(&format!("top --folder {}", open.display()), 2, &["--folder", "hint: ", "0700"]);
    let linked = folder("top-linked").join("link");
    symlink(private("top-linked-to"), &linked).unwrap();
    refused_at_once(&format!("top --folder {}", linked.display()), 2, &["--folder", "no link"]);
    let absent = folder("top-absent").join("nothing");
    refused_at_once(&format!("top --folder {}", absent.display()), 2, &["--folder", "forebay.publish"]);
}

#[test]
fn wrong_periods_are_refused() {
    for period in ["0", "-1", "nan", "1e9", "soon"] {
        refused_at_once(&format!("top --every={period}"), 2, &["--every", "from 0.1 to 3600"]);
    }
}
