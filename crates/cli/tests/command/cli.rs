//! The `forebay` binary from outside: what it prints where, its exit codes, and its errors. Every run names
//! `--device cpu` unless the device is the point, so the tests need no GPU and do the same on a machine with one.

#![allow(clippy::print_stderr, reason = "the log must show a skipped assertion")]

use std::collections::HashMap;
use std::fs::{self, File};
use std::process::Stdio;

use crate::support::{command, count, folder, forebay, json, number, refused, refused_at_once, said, text};
use forebay::device::HostMemory;
use serde_json::Value;

fn has_cuda() -> bool {
    said("--version").contains("backend cuda: built in, cuda:0")
}

#[test]
fn version_names_the_build_its_kernels_and_what_each_backend_found() {
    let printed = said("--version");
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 5, "{printed}");
    assert_eq!(lines[0], format!("forebay {}", env!("CARGO_PKG_VERSION")));
    assert_eq!(lines[1], format!("built by cargo for {}", std::env::consts::ARCH));
    let kernels = "kernels adamw, adam, sgd, lion; cuda: PTX of CUDA 12.4 for sm_80 and newer; host: ";
    assert!(lines[2].starts_with(kernels) && lines[2].ends_with("portable"), "{printed}");
    assert_eq!(lines[3], "backend cpu: built in, cpu");
    assert!(lines[4].starts_with("backend cuda: built in, "), "{printed}");
}

#[test]
fn help_lists_every_command_and_option() {
    let shared = ["--device", "--link-gbps", "--link-shared", "--json", "--help"];
    let step = ["--model", "--params", "--chunk-bytes", "--slots", "--steps", "--trace"];
    for (args, names) in [
        ("--help", vec!["probe", "plan", "bench", "trace", "--version", "--help"]),
        ("trace merge --help", vec!["--output", "<TRACES>..."]),
        ("help", vec!["probe", "bench"]),
        ("bench --help", vec!["step"]),
        ("probe --help", shared.to_vec()),
        ("bench step --help", [&shared[..], &step[..]].concat()),
    ] {
        let printed = said(args);
        for name in names {
            assert!(printed.contains(name), "forebay {args} does not list {name}: {printed}");
        }
    }
    let printed = said("bench step --help");
    for model in ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b"] {
        assert!(printed.contains(model), "{printed}");
    }
    for default in ["[default: 16MiB]", "[default: 4]", "[default: 5]"] {
        assert!(printed.contains(default), "{printed}");
    }
}

#[test]
fn a_command_is_asked_for_where_there_is_none() {
    for args in ["", "bench", "plan"] {
        let output = forebay(args);
        assert_eq!(output.status.code(), Some(2), "forebay {args}: {output:?}");
        assert!(text(&output.stderr).contains("Usage: forebay"), "forebay {args}: {output:?}");
    }
}

#[test]
fn wrong_options_are_refused_with_a_hint() {
    for (args, named) in [
        ("nope", &["nope"][..]),
        ("bench nope", &["nope"]),
        ("probe nope", &["nope"]),
        ("bench step --nope", &["--nope"]),
        ("probe --slots 4", &["--slots"]),
        ("bench step --model nope", &["--model", "nope", "qwen2.5-3b"]),
        ("bench step --params 0", &["--params", "positive"]),
        ("bench step --params -3", &["-3"]),
        ("bench step --params=-3", &["--params", "positive"]),
        ("bench step --params 1.5", &["--params", "whole"]),
        ("bench step --params many", &["--params", "not a number"]),
        ("bench step --params 1e30", &["--params"]),
        ("bench step --model qwen2.5-3b --params 5", &["--model", "--params"]),
        ("bench step --device cpu --chunk-bytes 10", &["--chunk-bytes: 10", "need at least 512"]),
        ("bench step --device cpu --chunk-bytes 511", &["--chunk-bytes: 511"]),
        ("bench step --chunk-bytes 0", &["--chunk-bytes", "positive"]),
        ("bench step --chunk-bytes 16XiB", &["--chunk-bytes"]),
        ("bench step --device cpu --slots 1", &["--slots: 1", "hint: use at least 2"]),
        ("bench step --device cpu --slots 0", &["--slots: 0"]),
        ("bench step --slots -1", &["-1"]),
        ("bench step --steps 0", &["--steps"]),
        ("bench step --steps 2.5", &["--steps"]),
        ("bench step --device gpu", &["--device: gpu", "cuda:N"]),
        ("bench step --device cuda:x", &["--device: cuda:x", "cuda:N"]),
        ("probe --device gpu", &["--device: gpu"]),
        ("bench step --link-gbps 0", &["--link-gbps", "positive"]),
        ("bench step --link-gbps -1", &["-1"]),
        ("bench step --link-gbps inf", &["--link-gbps", "positive"]),
        ("bench step --link-gbps 5 --device cuda:0", &["--link-gbps: 5", "--device cpu"]),
        ("probe --link-gbps 5 --device cuda:0", &["--link-gbps: 5"]),
        ("bench step --link-shared", &["--link-gbps"]),
        ("bench step --trace", &["--trace"]),
    ] {
        refused_at_once(args, 2, named);
    }
}

#[test]
fn an_absent_gpu_is_named_with_the_way_out() {
    if has_cuda() {
        eprintln!("there is a CUDA device: skipped");
        return;
    }
    for args in ["bench step --device cuda:0", "bench step --device cuda", "probe --device cuda:0"] {
        refused_at_once(args, 1, &["device cuda", "is not available: ", "hint: use --device cpu"]);
    }
}

#[test]
fn what_cannot_fit_is_refused_with_the_numbers_before_anything_is_measured() {
    // No machine has so much; the sums must not overflow either.
    for (args, requested) in [
        ("--params 9e15", "72000000067108864"),
        ("--params 2M --slots 2 --chunk-bytes 9e15", "18000000016000000"),
        ("--slots 18446744073709551615", "18446744073709551615"),
    ] {
        let args = format!("bench step --device cpu {args}");
        let requested = format!("{requested} bytes requested");
        refused_at_once(&args, 1, &["out of device memory on cpu", &requested, " available of "]);
    }
    // 7.6e9 parameters with gradients and two moments, 4 bytes each.
    if HostMemory::now().available_bytes >= 7_600_000_000 * 16 {
        eprintln!("a 7B model may fit into this machine: skipped");
        return;
    }
    let complaint =
        refused_at_once("bench step --device cpu --model qwen2.5-7b", 1, &[" bytes", " available of ", "--model"]);
    // Parameters and gradients, or with the state besides, whichever was found not to fit.
    let numbers: Vec<u64> =
        complaint.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
    let requested = numbers.iter().copied().max().unwrap();
    assert!((60_000_000_000..123_000_000_000).contains(&requested), "{complaint}");
    assert!(numbers.iter().any(|&number| number > 1 << 20 && number < requested), "available bytes: {complaint}");
}

/// What holds for every result of `bench step`, whatever the machine.
fn check_step(result: &Value, params: u64, chunk_bytes: u64, slots: u64, steps: u64) {
    assert_eq!(result["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(result["device"], "cpu");
    assert!(result["device_model"].as_str().is_some_and(|model| model.starts_with("CPU")), "{result}");
    assert_eq!(result["model"], format!("synthetic-{params}"));
    let tensors = count(result, "tensors");
    assert_eq!((count(result, "params"), count(result, "chunk_bytes")), (params, chunk_bytes));
    assert_eq!((count(result, "slots"), count(result, "ring_bytes")), (slots, slots * chunk_bytes));
    assert!(count(result, "driver_ring_bytes") >= slots * chunk_bytes, "{result}");
    assert!(result["driver_pin_bytes"].is_u64() && result["pin_huge_pages"].is_boolean(), "{result}");
    assert!(count(result, "pinned_bytes") >= 8 * params, "{result}");
    // Exact: the state, at most 63 elements of alignment for each tensor and moment, and the rest of a page.
    assert!(count(result, "pinned_bytes") <= 8 * params + tensors * 2 * 256 + 8192, "{result}");
    assert_eq!(count(result, "resources_made_in_steps"), 0);
    let chunks = count(result, "chunks");
    assert!(chunks >= (8 * params).div_ceil(chunk_bytes), "{result}");

    let times: Vec<f64> = result["step_s"].as_array().unwrap().iter().map(|time| time.as_f64().unwrap()).collect();
    assert_eq!(times.len() as u64, steps);
    assert!(times.contains(&number(result, "median_step_s")), "{result}");
    for rate in ["median_call_s", "gparam_per_s", "gbps_each_way", "wire_gbps", "floor_step_s", "pin_gib_per_s"] {
        assert!(number(result, rate) > 0.0, "{rate} in {result}");
    }
    let percent = 100.0 * number(result, "gbps_each_way") / number(result, "wire_gbps");
    assert!((number(result, "percent_of_wire") - percent).abs() < 1e-6, "{result}");

    let last = &result["last_step"];
    assert_eq!((count(last, "chunks"), count(last, "fetch_bytes")), (chunks, 8 * params));
    assert_eq!(count(last, "store_bytes"), 8 * params);
    for time in ["fetch_ns", "update_ns", "store_ns"] {
        assert!(count(last, time) > 0, "{time} in {result}");
    }
    assert!(last["stalls"].is_u64() && last["stall_ns"].is_u64(), "{result}");

    let run = &result["exactness"];
    assert_eq!((count(run, "differing"), count(run, "compared")), (0, 3 * params));
    assert_eq!((count(run, "steps"), count(run, "tensors")), (steps + 1, tensors));
    assert_eq!(count(run, "ring_wraps"), chunks / slots);
    let cut = &result["cut_exactness"];
    assert_eq!(count(cut, "differing"), 0);
    assert!(count(cut, "compared") > 0 && count(cut, "steps") > 1, "{result}");
    assert_eq!(count(cut, "cut_tensors"), count(cut, "tensors"));
    assert!(count(cut, "ring_wraps") >= 3, "{result}");
}

#[test]
fn json_alone_is_all_that_is_printed_and_the_run_is_exact() {
    let result = json("bench step --device cpu --params 2M --steps 2 --json");
    check_step(&result, 2_000_000, 16 << 20, 4, 2);
}

#[test]
fn json_and_trace_go_to_files_beside_the_table() {
    let folder = folder("files");
    let (result, trace) = (folder.join("result.json"), folder.join("trace.json"));
    fs::write(&result, "an older result").unwrap();
    let printed = said(&format!(
        "bench step --device cpu --params 2e6 --steps 1 --chunk-bytes 1MiB --slots 3 --json {} --trace {}",
        result.display(),
        trace.display()
    ));
    for row in ["streamed step on cpu", "of the wire", "made in timed steps  0", "equal, bit for bit: 0 of"] {
        assert!(printed.contains(row), "{row:?} in {printed}");
    }
    assert!(!printed.contains("DIFFERENT") && !printed.contains('{'), "{printed}");
    for path in [&result, &trace] {
        assert!(printed.contains(&format!("wrote {}", path.display())), "{printed}");
    }

    let result: Value = serde_json::from_slice(&fs::read(result).unwrap()).unwrap();
    check_step(&result, 2_000_000, 1 << 20, 3, 1);
    let chunks = count(&result, "chunks");
    assert!(chunks > 2 * count(&result, "slots"), "{chunks}");
    assert!(result.get("trace").is_none(), "the spans have a file of their own");

    let trace: Value = serde_json::from_slice(&fs::read(trace).unwrap()).unwrap();
    check_trace(&trace, chunks, count(&result, "slots"));
}

/// Three spans for each chunk, as Chrome's format has them, and each chunk's stages one after the other.
fn check_trace(trace: &Value, chunks: u64, slots: u64) {
    assert_eq!((&trace["forebay"]["schema"], &trace["forebay"]["dropped"]), (&1.into(), &0.into()));
    let mut stages: HashMap<(String, String), (f64, f64)> = HashMap::new();
    for event in trace["traceEvents"].as_array().unwrap() {
        let category = event["cat"].as_str().unwrap_or_default();
        if !["fetch", "update", "store"].contains(&category) {
            continue;
        }
        assert_eq!(event["ph"], "X", "{event}");
        assert!(event["pid"] == 0 && event["tid"].is_u64(), "{event}");
        assert!(count(&event["args"], "slot") < slots && count(&event["args"], "bytes") > 0, "{event}");
        let (start, length) = (number(event, "ts"), number(event, "dur"));
        assert!(start >= 0.0 && length >= 0.0, "{event}");
        let key = (event["name"].as_str().unwrap().to_owned(), category.to_owned());
        assert!(stages.insert(key, (start, start + length)).is_none(), "twice: {event}");
    }
    assert_eq!(stages.len() as u64, 3 * chunks);
    for chunk in 0..chunks {
        let stage = |name: &str| stages[&(format!("chunk {chunk}"), name.to_owned())];
        let [fetch, update, store] = ["fetch", "update", "store"].map(stage);
        // Times are whole nanoseconds, written in microseconds.
        let after = |first: (f64, f64), second: (f64, f64)| first.1 <= second.0 + 0.01;
        assert!(after(fetch, update) && after(update, store), "chunk {chunk}: {fetch:?} {update:?} {store:?}");
    }
}

#[test]
fn traces_of_ranks_are_merged_and_others_are_refused() {
    let folder = folder("merge");
    let path = |name: &str| folder.join(name).display().to_string();
    let trace = |rank: u64, zero: u64| {
        format!(
            r#"{{"traceEvents": [{{"ph": "X", "pid": {rank}, "tid": 1, "ts": 1.5, "dur": 2.0, "name": "step"}}],
            "forebay": {{"schema": 1, "rank": {rank}, "zero_unix_ns": {zero}}}}}"#
        )
    };
    fs::write(path("a.json"), trace(0, 1_700_000_000_000_000_000)).unwrap();
    fs::write(path("b.json"), trace(1, 1_700_000_000_000_250_000)).unwrap();
    fs::write(path("text.json"), "no JSON").unwrap();
    fs::write(path("other.json"), "{\"traceEvents\": []}").unwrap();
    let (a, b, all) = (path("a.json"), path("b.json"), path("all.json"));
    let printed = said(&format!("trace merge {b} {a} -o {all}"));
    assert!(printed.contains("2 ranks, 2 events"), "{printed}");
    let merged: Value = serde_json::from_slice(&fs::read(&all).unwrap()).unwrap();
    let times: Vec<f64> = merged["traceEvents"].as_array().unwrap().iter().map(|event| number(event, "ts")).collect();
    assert_eq!(times, [1.5, 251.5]);
    assert_eq!(merged["forebay"]["ranks"][1]["rank"], 1);
    for (inputs, output, words) in [
        (vec![&a, &a], "x.json", "rank 0 too"),
        (vec![&a, &all], "x.json", "no trace of one rank"),
        (vec![&path("other.json")], "x.json", "no trace of one rank"),
        (vec![&path("text.json")], "x.json", "not JSON"),
        (vec![&path("absent.json")], "x.json", "cannot read"),
        (vec![&a, &b], "absent/x.json", "cannot write"),
        (vec![&a, &b], "a.json", "it is also read"),
    ] {
        let inputs: Vec<&str> = inputs.into_iter().map(String::as_str).collect();
        // Which file is written is an option; what is in the others is not.
        let code = if output == "a.json" { 2 } else { 1 };
        refused_at_once(&format!("trace merge {} -o {}", inputs.join(" "), path(output)), code, &[words]);
    }
    assert!(!folder.join("x.json").exists() && fs::read_to_string(&a).unwrap() == trace(0, 1_700_000_000_000_000_000));
}

#[test]
fn a_path_that_cannot_be_written_is_refused_before_the_run() {
    let folder = folder("unwritable");
    let absent = folder.join("absent/result.json");
    for args in ["bench step --device cpu --json", "bench step --device cpu --trace", "probe --device cpu --json"] {
        for path in [&absent, &folder] {
            let path = path.display().to_string();
            refused_at_once(&format!("{args} {path}"), 1, &["cannot write", &path]);
        }
    }
}

#[test]
fn a_run_that_is_refused_leaves_files_as_they_were() {
    let folder = folder("untouched");
    let (old, new) = (folder.join("old.json"), folder.join("new.json"));
    fs::write(&old, "an older result").unwrap();
    let args = format!("bench step --device cpu --slots 1 --json {} --trace {}", old.display(), new.display());
    refused(&args, 2, &["--slots"]);
    assert_eq!(fs::read_to_string(old).unwrap(), "an older result");
    assert!(!new.exists());
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    for args in ["--version", "bench step --help", "bench step --params 100k --steps 1"] {
        let mut child = command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""), "forebay {args}");
    }
}

#[test]
fn a_full_disk_under_standard_output_is_an_error() {
    for args in ["--version", "--help"] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = command(args).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "forebay {args}: {output:?}");
        assert!(text(&output.stderr).starts_with("error: cannot write to standard output: "), "{output:?}");
    }
}

/// Rates are bounded from above only: a busy machine may be slower than the link, never faster.
#[test]
fn a_simulated_link_is_the_wire_and_the_run_stays_exact() {
    let result = json("bench step --link-gbps 1 --params 2M --steps 2 --chunk-bytes 1MiB --json");
    check_step(&result, 2_000_000, 1 << 20, 4, 2);
    for rate in ["wire_gbps", "gbps_each_way"] {
        assert!(number(&result, rate) < 1.01, "{rate} in {result}");
    }
}

#[test]
fn a_shared_link_gives_each_way_half() {
    let result = json("bench step --link-gbps 1 --link-shared --device cpu --params 1M --steps 1 --json");
    check_step(&result, 1_000_000, 16 << 20, 4, 1);
    // The last copy of a measurement may go alone, so somewhat more than half.
    assert!(number(&result, "wire_gbps") < 0.6, "{result}");
}

#[test]
fn probe_prints_the_machine_and_the_limits_that_follow() {
    let result = json("probe --device cpu --json");
    assert_eq!((&result["version"], &result["device"]), (&env!("CARGO_PKG_VERSION").into(), &"cpu".into()));
    assert!(result["model"].is_string(), "{result}");
    assert!(count(&result, "device_memory_bytes") > 0 && count(&result, "host_memory_bytes") > 0, "{result}");

    let copies = result["copies"].as_array().unwrap();
    let sizes: Vec<u64> = copies.iter().map(|rate| count(rate, "copy_bytes") >> 20).collect();
    assert_eq!(sizes, [1, 4, 16, 32, 64, 128, 256]);
    let mut wire = 0f64;
    for rates in copies {
        for place in ["pinned_fetch", "pinned_store", "pinned_duplex", "pageable_fetch", "pageable_store"] {
            assert!(number(rates, &format!("{place}_gbps")) > 0.0, "{place} in {rates}");
        }
        if count(rates, "copy_bytes") >= 16 << 20 {
            wire = wire.max(number(rates, "pinned_duplex_gbps"));
        }
    }
    assert_eq!(number(&result, "wire_gbps"), wire, "the best duplex rate of the larger copies");
    let limits = &result["limits"];
    assert!((number(limits, "f32_moments_gparam_per_s") - wire / 8.0).abs() < 1e-9, "{result}");
    assert!((number(limits, "f32_moments_and_master_gparam_per_s") - wire / 12.0).abs() < 1e-9, "{result}");

    let pin = &result["pin"];
    assert!(count(pin, "bytes") > 0 && number(pin, "gib_per_s") > 0.0 && number(pin, "fault_gib_per_s") > 0.0, "{pin}");
    assert!(pin["register_gib_per_s"].is_null() && pin["huge_pages"].is_boolean(), "{pin}");
    let host = &result["host"];
    assert!(count(host, "threads") > 0 && number(host, "copy_gbps") > 0.0 && number(host, "add_gbps") > 0.0, "{host}");
    let kernel = &result["kernel"];
    assert!(count(kernel, "params") > 0 && number(kernel, "gparam_per_s") > 0.0, "{kernel}");
    assert!((number(kernel, "gbps") - 28.0 * number(kernel, "gparam_per_s")).abs() < 1e-6, "{kernel}");
}

#[test]
fn the_update_on_the_host_is_set_against_the_memory() {
    let args = "bench cpu-adam --params 200k --host-threads 1 --host-kernel portable --repetitions 1";
    let found = json(&format!("{args} --json"));
    assert_eq!((found["kernel"].as_str(), found["params"].as_u64()), (Some("portable"), Some(200_000)));
    let rows = found["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert_eq!(row["threads"], 1);
        let gbps = number("gparam_per_s") * number("bytes_per_param");
        assert!((number("gbps") / gbps - 1.0).abs() < 1e-9, "{row}");
        assert!((number("percent") - 100.0 * number("gbps") / number("touch_gbps")).abs() < 1e-6, "{row}");
    }
    let table = said(args);
    assert!(table.contains("bf16 in, bf16 out") && table.contains("touch GB/s"), "{table}");
}

#[test]
fn the_update_on_the_host_refuses_what_this_machine_has_not() {
    refused("bench cpu-adam --host-threads 0", 2, &["--host-threads: 0", "hint: this process may use"]);
    refused("bench cpu-adam --host-threads 100000", 2, &["--host-threads: 100000"]);
    refused("bench cpu-adam --host-kernel mmx", 2, &["--host-kernel: mmx", "there is no such kernel"]);
    refused("bench cpu-adam --repetitions 0", 2, &["--repetitions: 0"]);
}
