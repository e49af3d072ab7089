//! `forebay report` from outside: figures of traces made by hand, the page, and files that are no traces.

use std::fs;
use std::path::Path;

use crate::support::{count, folder, json as found, number, refused_at_once, said};
use serde_json::{Value, json};

/// Adds a span; times are in milliseconds.
fn span(
    events: &mut Vec<Value>,
    (rank, row): (u64, u64),
    category: &str,
    name: &str,
    (start, length): (f64, f64),
    args: Value,
) {
    events.push(json!({
        "ph": "X", "pid": rank, "tid": row, "cat": category, "name": name, "ts": start * 1e3, "dur": length * 1e3, "args": args
    }));
}

/// Three steps of 100 ms: 20 forward, 40 backward, 30 step, in which 1 GB goes each way in 20 ms, 10 ms of them at once.
/// The first forward takes 100 ms more. Waits for a slot take 6 ms, for weights 3 ms, 1 ms of them at once.
fn events(rank: u64) -> Vec<Value> {
    let mut events = Vec::new();
    for step in 0..3 {
        let (at, number) = (if step == 0 { 0.0 } else { 100.0 * f64::from(step) + 100.0 }, step + 1);
        let forward = if step == 0 { 120.0 } else { 20.0 };
        let mut add =
            |row, category, name, span_of, args| span(&mut events, (rank, row), category, name, span_of, args);
        add(1, "pass", "forward", (at, forward), json!({"step": number}));
        add(1, "pass", "backward", (at + forward, 40.0), json!({"step": number}));
        let step_at = at + forward + 40.0;
        add(1, "pass", "step", (step_at + 10.0, 30.0), json!({"step": number}));
        add(3, "fetch", "chunk 0", (step_at + 10.0, 20.0), json!({"bytes": 1_000_000_000u64, "chunk": 0, "slot": 1}));
        add(5, "store", "chunk 0", (step_at + 20.0, 20.0), json!({"bytes": 1_000_000_000u64, "chunk": 0, "slot": 1}));
        add(10, "wait", "wait for a slot", (step_at + 12.0, 6.0), json!({"reason": "slot"}));
        add(10, "wait", "wait for weights", (step_at + 17.0, 3.0), json!({"reason": "weights"}));
        events.push(json!({"ph": "C", "pid": rank, "name": "pinned bytes", "ts": at * 1e3,
            "args": {"optimizer": 5e9, "saves": 1e9 * f64::from(step)}}));
    }
    events
}

fn about(rank: u64) -> Value {
    json!({
        "schema": 1, "version": "0.1.0", "rank": rank, "ranks": 1, "zero_unix_ns": 1_700_000_000_000_000_000u64,
        "seconds": 0.4, "capacity": 1000, "dropped": 0, "machine": {"device": "cuda:0", "name": "<b>GPU</b>"},
        "wire": {"fetch_gbps": 100.0, "store_gbps": 80.0, "both_gbps": 60.0},
        "optimizers": [{"name": "AdamW 0", "class": "AdamW", "stats": {},
            "settings": {"placement": "stream", "slots": 4, "chunk_bytes": 16 << 20, "max_grad_norm": null}}],
        "overlaps": [], "activations": [], "sleepers": [], "saves": []
    })
}

fn one() -> Value {
    json!({"displayTimeUnit": "ms", "traceEvents": events(0), "forebay": about(0)})
}

fn write(folder: &Path, name: &str, trace: &Value) -> String {
    let path = folder.join(name);
    fs::write(&path, trace.to_string()).unwrap();
    path.display().to_string()
}

fn close(value: &Value, name: &str, expected: f64) {
    let found = number(value, name);
    assert!(
        (found - expected).abs() <= 1e-9 * expected.abs().max(1.0),
        "{name} is {found}, not {expected}, in {value}"
    );
}

#[test]
fn the_figures_are_those_of_the_spans() {
    let path = write(&folder("report-figures"), "run.json", &one());
    let all = found(&format!("report {path} --json"));
    assert_eq!(all["version"], env!("CARGO_PKG_VERSION"));
    let rank = &all["ranks"][0];
    close(rank, "seconds", 0.4);
    assert_eq!(count(rank, "spans"), 21);
    assert_eq!(rank["device_times"], false);
    assert_eq!(rank["steps"].as_array().unwrap().len(), 3);
    // From the end of the first step, at 200 ms.
    let step = &rank["steps"][1];
    assert_eq!(
        (&step["step"], &step["begin_ns"], &step["end_ns"]),
        (&json!(2), &json!(200_000_000), &json!(300_000_000))
    );
    for (name, seconds) in [
        ("total_s", 0.1),
        ("forward_s", 0.02),
        ("backward_s", 0.04),
        ("step_s", 0.03),
        ("exposed_s", 0.008),
        ("idle_forward_s", 0.02),
        ("idle_backward_s", 0.04),
        ("micro_batches", 1.0),
    ] {
        close(step, name, seconds);
        // The first of three steps is not typical.
        close(&rank["typical"], name, seconds);
    }
    close(&rank["steps"][0], "forward_s", 0.12);
    assert_eq!((&step["fetch_bytes"], &step["store_bytes"]), (&json!(1_000_000_000), &json!(1_000_000_000)));
    close(&step["waits"], "slot", 0.006);
    close(&step["waits"], "weights", 0.003);
}

#[test]
fn waits_wire_and_memory_are_summed() {
    let path = write(&folder("report-sums"), "run.json", &one());
    let rank = found(&format!("report {path} --json"))["ranks"][0].clone();
    close(&rank, "exposed_s", 0.024);
    let slot = &rank["waits"][0];
    assert_eq!((&slot["reason"], &slot["count"]), (&json!("slot"), &json!(3)));
    close(slot, "seconds", 0.018);
    close(slot, "share", 2.0 / 3.0);
    close(slot, "longest_s", 0.006);
    let fetch = &rank["wire"]["fetch"];
    assert_eq!(fetch["bytes"], 3_000_000_000u64);
    close(fetch, "busy_s", 0.06);
    close(fetch, "gbps", 50.0);
    // 30 ms alone at 100 GB/s and 30 ms with the other way at 60 GB/s would be 4.8 GB.
    close(fetch, "share_while_busy", 3.0 / 4.8);
    close(fetch, "share", 3.0 / 40.0);
    close(&rank["wire"]["store"], "share_while_busy", 3.0 / 4.2);
    let peak = |series: &str| {
        let list = rank["memory"].as_array().unwrap();
        list.iter().find(|peak| peak["series"] == series).unwrap()["peak"].as_f64()
    };
    assert_eq!((peak("optimizer"), peak("saves"), peak("all")), (Some(5e9), Some(2e9), Some(7e9)));
    let advice = &rank["advice"][0];
    assert_eq!(advice["about"], "overlap_step");
    assert_eq!(
        advice["text"],
        "The wire is idle for 40.0 ms of each backward: overlap_step would hide about 30.0 ms per step."
    );
}

#[test]
fn a_limit_may_be_given_or_be_absent() {
    let folder = folder("report-limit");
    let mut trace = one();
    trace["forebay"]["wire"] = Value::Null;
    let path = write(&folder, "run.json", &trace);
    let rank = |args: &str| found(&format!("report {path} --json {args}"))["ranks"][0].clone();
    assert!(rank("")["wire"]["limit"].is_null() && rank("")["wire"]["fetch"]["share"].is_null());
    close(&rank("--wire-gbps 100")["wire"]["fetch"], "share_while_busy", 0.5);
    let page = folder.join("page.html").display().to_string();
    said(&format!("report {path} -o {page}"));
    let text = fs::read_to_string(&page).unwrap();
    assert!(text.contains("No limit of the wire is known") && text.contains("forebay report run.json --wire-gbps 50"));
    said(&format!("report {path} -o {page} --wire-gbps 100"));
    assert!(!fs::read_to_string(&page).unwrap().contains("No limit of the wire is known"));
}

#[test]
fn passes_of_the_device_are_used_where_they_are_known() {
    let mut trace = one();
    let mut more = Vec::new();
    for step in 0..3 {
        let at = 100.0 * f64::from(step);
        for (name, start, length) in [("forward", 0.0, 10.0), ("backward", 10.0, 15.0), ("step", 25.0, 75.0)] {
            span(&mut more, (0, 2), "pass", name, (at + start, length), json!({"step": step + 1}));
        }
    }
    trace["traceEvents"].as_array_mut().unwrap().extend(more);
    let path = write(&folder("report-device"), "run.json", &trace);
    let rank = found(&format!("report {path} --json"))["ranks"][0].clone();
    assert_eq!(rank["device_times"], true);
    close(&rank["typical"], "step_s", 0.075);
    close(&rank["typical"], "forward_s", 0.01);
}

#[test]
fn copies_that_were_not_timed_count() {
    let mut trace = one();
    // One copy in four has times, and the bytes of the others are with the next.
    let events = trace["traceEvents"].as_array_mut().unwrap();
    events.retain(|event| event["cat"] == "pass");
    for (start, untimed) in [(210.0, 0), (214.0, 150_000_000), (218.0, 150_000_000)] {
        let args = json!({"bytes": 50_000_000, "untimed_bytes": untimed});
        span(events, (0, 3), "fetch", "chunk", (start, 1.0), args);
    }
    let path = write(&folder("report-untimed"), "run.json", &trace);
    let rank = found(&format!("report {path} --json"))["ranks"][0].clone();
    assert_eq!(count(&rank, "spans"), 12);
    let fetch = &rank["wire"]["fetch"];
    assert_eq!(count(fetch, "bytes"), 450_000_000);
    close(fetch, "busy_s", 0.009);
    close(fetch, "gbps", 50.0);
    let step = &rank["steps"][1];
    assert_eq!(count(step, "fetch_bytes"), 450_000_000);
    close(step, "idle_forward_s", 0.02 - 0.009);
    close(step, "idle_backward_s", 0.04);
}

#[test]
fn several_optimizers_make_one_step() {
    let mut trace = one();
    let events = trace["traceEvents"].as_array_mut().unwrap();
    for step in events.iter_mut().filter(|event| event["name"] == "step") {
        step["dur"] = json!(20e3);
    }
    for end in [200.0, 300.0, 400.0] {
        span(events, (0, 1), "pass", "step", (end - 10.0, 10.0), json!({}));
    }
    let path = write(&folder("report-two"), "run.json", &trace);
    let rank = found(&format!("report {path} --json"))["ranks"][0].clone();
    assert_eq!(rank["steps"].as_array().unwrap().len(), 3);
    close(&rank["typical"], "step_s", 0.03);
    close(&rank["typical"], "total_s", 0.1);
}

#[test]
fn a_merged_trace_has_figures_of_every_rank() {
    let folder = folder("report-merged");
    let trace = json!({
        "traceEvents": ([events(0), events(3)].concat()),
        "forebay": {"schema": 1, "merged": true, "ranks": [about(0), about(3)]}
    });
    let path = write(&folder, "run.json", &trace);
    let ranks = found(&format!("report {path} --json"))["ranks"].clone();
    assert_eq!((&ranks[0]["rank"], &ranks[1]["rank"]), (&json!(0), &json!(3)));
    assert_eq!(ranks[0]["typical"], ranks[1]["typical"]);
    let page = folder.join("page.html").display().to_string();
    let printed = said(&format!("report {path} -o {page}"));
    assert!(printed.contains("run.json: 2 ranks") && printed.contains("\nrank 3: 3 steps, 21 spans\n"), "{printed}");
    let text = fs::read_to_string(&page).unwrap();
    assert!(text.contains("<option value=\"3\">rank 3</option>") && text.contains("data-rank=\"3\""));
}

#[test]
fn the_page_is_whole_and_names_no_folder() {
    let folder = folder("report-page");
    let mut trace = one();
    trace["traceEvents"][0]["name"] = json!("</script><script>alert(1)</script>");
    trace["forebay"]["dropped"] = json!(17);
    trace["forebay"]["partial"] = json!(true);
    let path = write(&folder, "run.json", &trace);
    let page = folder.join("page.html").display().to_string();
    let printed = said(&format!("report {path} -o {page}"));
    assert!(printed.ends_with(&format!("wrote {page}: open it in a browser\n")), "{printed}");
    assert!(printed.contains("- The wire is idle for 40.0 ms of each backward"), "{printed}");
    let text = fs::read_to_string(&page).unwrap();
    assert!(!text.contains(folder.to_str().unwrap()), "the page names the folder of the trace");
    assert_eq!(text.matches("<script").count(), 2, "what a trace has is no markup");
    assert!(!text.contains("<b>GPU"), "what a trace has is no markup");
    assert!(text.contains("17 spans found no room") && text.contains("some work is missing here"));
    assert!(text.contains("content=\"default-src 'none'; script-src 'sha256-"));
}

#[test]
fn json_can_go_to_a_file_and_the_page_with_it() {
    let folder = folder("report-both");
    let path = write(&folder, "run.json", &one());
    let (page, figures) = (folder.join("page.html"), folder.join("figures.json"));
    let printed = said(&format!("report {path} -o {} --json {}", page.display(), figures.display()));
    assert!(printed.contains("a step: 100 ms; forward 20.0 ms"), "{printed}");
    let written: Value = serde_json::from_slice(&fs::read(&figures).unwrap()).unwrap();
    assert_eq!(written["ranks"][0]["rank"], 0);
    assert!(page.exists());
    fs::remove_file(&page).unwrap();
    let only = found(&format!("report {path} -o {} --json", page.display()));
    assert_eq!(only, written);
    assert!(page.exists());
}

#[test]
fn a_trace_without_a_whole_step_still_has_a_page() {
    let folder = folder("report-part");
    let mut trace = one();
    trace["traceEvents"].as_array_mut().unwrap().retain(|event| event["name"] != "step");
    let path = write(&folder, "run.json", &trace);
    let page = folder.join("page.html").display().to_string();
    said(&format!("report {path} -o {page}"));
    let rank = found(&format!("report {path} --json"))["ranks"][0].clone();
    assert!(rank["typical"].is_null() && rank["advice"].as_array().unwrap().is_empty());
    assert!(fs::read_to_string(&page).unwrap().contains("The trace has no whole step"));
}

#[test]
fn files_that_are_no_traces_are_named_with_a_hint() {
    let folder = folder("report-wrong");
    let page = folder.join("page.html").display().to_string();
    let whole = one().to_string();
    for (name, text, named) in [
        ("text.json", "hello", "is not a trace: it is not JSON"),
        ("list.json", "[{\"ph\": \"X\"}]", "is not a trace of forebay"),
        ("other.json", "{\"a\": 1}", "is not a trace of forebay: it needs"),
        ("cut.json", &whole[..whole.len() / 2], "is truncated: it ends in the middle"),
        ("empty.json", "", "is truncated: it ends in the middle, after 0 bytes"),
        ("none.json", "{\"traceEvents\": [], \"forebay\": {\"schema\": 1}}", "has no spans"),
        (
            "next.json",
            "{\"traceEvents\": [], \"forebay\": {\"schema\": 2, \"version\": \"9.9\"}}",
            "has schema 2, written by forebay 9.9; this forebay reads schema 1",
        ),
    ] {
        let path = folder.join(name).display().to_string();
        fs::write(&path, text).unwrap();
        refused_at_once(&format!("report {path} -o {page}"), 1, &[&path, named]);
        assert!(!Path::new(&page).exists(), "{name}");
    }
    let absent = folder.join("absent.json").display().to_string();
    refused_at_once(&format!("report {absent} -o {page}"), 1, &[&absent, "cannot be read"]);
    refused_at_once(&format!("report {} -o {page}", folder.display()), 1, &["cannot be read"]);
}

#[test]
fn wrong_options_are_refused_with_a_hint() {
    let folder = folder("report-options");
    let path = write(&folder, "run.json", &one());
    refused_at_once("report", 2, &["TRACE"]);
    refused_at_once(&format!("report {path}"), 2, &["--output"]);
    refused_at_once(&format!("report {path} --json --wire-gbps 0"), 2, &["--wire-gbps", "positive"]);
    let before = fs::read(&path).unwrap();
    refused_at_once(&format!("report {path} -o {path}"), 2, &["--output", &path, "name another file"]);
    refused_at_once(
        &format!("report {path} --json {}/./run.json", folder.display()),
        2,
        &["--json", "name another file"],
    );
    assert_eq!(fs::read(&path).unwrap(), before);
    let nowhere = folder.join("absent/page.html").display().to_string();
    refused_at_once(&format!("report {path} -o {nowhere}"), 1, &["cannot write", &nowhere]);
}
