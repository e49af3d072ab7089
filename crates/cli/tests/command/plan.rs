//! `forebay plan step` from outside. It needs no device, so it never names one.

use std::fs;

use crate::support::{count, folder, json, number, refused_at_once, said};
use serde_json::Value;

#[test]
fn the_text_has_the_plan_and_its_figures() {
    let printed = said("plan step --model qwen2.5-3b --dtype bf16 --wire-gbps 50");
    for part in [
        "adamw, qwen2.5-3b, bf16 with f32 master weights",
        "434 tensors, 3085938688 elements",
        "ring: 4 slots of 16.0 MiB, 64.0 MiB on the device",
        "12 bytes per parameter, 37.0 GB each way",
        "ring 67.1 MB, weights and gradients 12.3 GB (4 bytes per parameter)",
        "740.6 ms at 50 GB/s each way, 4.167 Gparam/s",
    ] {
        assert!(printed.contains(part), "{part:?} in {printed}");
    }
}

#[test]
fn state_in_fewer_bits_is_planned() {
    let printed = said("plan step --model qwen2.5-3b --dtype bf16 --master compact --state 8bit");
    for part in ["state in 8 bits", "exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, master_low, master_carry"] {
        assert!(printed.contains(part), "{part} is missing:\n{printed}");
    }
    // Two moments of an element; blocks of 256 divide these shapes.
    for (state, master, bytes) in [
        ("8bit", "none", 2 * (1_000_000 + 1_000_000 / 64)),
        ("bf16", "none", 4_000_000),
        ("f32", "none", 8_000_000),
        ("bf16", "f32", 8_000_000),
        ("8bit", "compact", 2 * (1_000_000 + 1_000_000 / 64) + 2_125_000),
    ] {
        let found = json(&format!("plan step --params 1M --dtype bf16 --state {state} --master {master} --json -"));
        assert_eq!((&found["state"], &found["master"]), (&state.into(), &master.into()));
        let payload = count(&found, "payload_bytes");
        // A tensor whose elements are no multiple of a block has one scale more, and a smaller one keeps f32.
        assert!(payload.abs_diff(bytes) < bytes / 50, "{state}, {master}: {payload}, not {bytes}");
    }
    refused_at_once("plan step --state 4bit", 2, &["invalid value '4bit' for '--state", "f32, bf16, 8bit"]);
}

#[test]
fn compact_masters_take_17_bits() {
    let printed = said("plan step --model qwen2.5-3b --dtype bf16 --master compact --wire-gbps 50");
    for part in
        ["bf16 with compact master weights", "10.125", "exp_avg, exp_avg_sq, master_low, master_carry", "624.9 ms at"]
    {
        assert!(printed.contains(part), "{part:?} in {printed}");
    }
    let found = json("plan step --params 2M --dtype bf16 --master compact --json -");
    assert_eq!((&found["master"], count(&found, "payload_bytes")), (&"compact".into(), 20_250_000));
    for dtype in ["f32", "f16"] {
        let args = format!("plan step --params 2M --dtype {dtype} --master compact");
        refused_at_once(&args, 2, &["invalid --master: compact", "compact masters are for bf16", "--dtype bf16"]);
    }
}

#[test]
fn the_default_is_a_model_in_f32_without_a_wire() {
    let printed = said("plan step");
    assert_eq!(printed, said("plan step --model qwen2.5-3b --dtype f32 --rule adamw --slots 4 --chunk-bytes 16MiB"));
    assert!(printed.contains("8 bytes per parameter, 24.7 GB each way"), "{printed}");
    assert!(!printed.contains("floor"), "{printed}");
    let found = json("plan step --json");
    assert!(found["wire_gbps"].is_null() && found["floor_step_s"].is_null());
}

#[test]
fn json_has_the_figures_and_the_whole_plan() {
    for (dtype, bytes_per_param, weight_bytes) in [("f32", 8, 4), ("bf16", 12, 2), ("f16", 12, 2)] {
        let found =
            json(&format!("plan step --params 2M --dtype {dtype} --slots 3 --chunk-bytes 1MiB --wire-gbps 2 --json -"));
        assert_eq!(found["version"], env!("CARGO_PKG_VERSION"));
        assert_eq!((&found["rule"], &found["dtype"]), (&"adamw".into(), &dtype.into()));
        assert_eq!(found["model"], "synthetic-2000000");
        assert_eq!(count(&found, "params"), 2_000_000);
        assert_eq!(count(&found, "payload_bytes"), bytes_per_param * 2_000_000);
        assert_eq!(number(&found, "state_bytes_per_param"), bytes_per_param as f64);
        assert_eq!(count(&found, "weight_and_grad_bytes"), 2 * weight_bytes * 2_000_000);
        assert_eq!(count(&found, "ring_bytes"), 3 << 20);
        assert!(count(&found, "host_bytes") >= count(&found, "payload_bytes"));
        let floor = bytes_per_param as f64 * 2e6 / 2e9;
        assert!((number(&found, "floor_step_s") - floor).abs() < 1e-12, "{found}");

        let plan = &found["plan"];
        let elements = |list: &Value| list.as_array().unwrap().iter().map(|item| count(item, "elements")).sum::<u64>();
        assert_eq!(elements(&plan["tensors"]), 2_000_000);
        assert_eq!(elements(&plan["pieces"]), 2_000_000, "every element travels once");
        assert_eq!(plan["tensors"].as_array().unwrap().len() as u64, count(&found, "tensors"));
        assert_eq!(plan["chunks"].as_array().unwrap().len() as u64, count(&found, "chunks"));
    }
}

#[test]
fn json_goes_to_a_file_beside_the_text() {
    let path = folder("plan").join("plan.json");
    let printed = said(&format!("plan step --params 1M --json {}", path.display()));
    assert!(printed.contains("ring: 4 slots") && !printed.contains('{'), "{printed}");
    assert!(printed.ends_with(&format!("wrote {}\n", path.display())), "{printed}");
    let found: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    assert_eq!(count(&found, "params"), 1_000_000);
}

#[test]
fn wrong_options_are_refused_with_a_hint() {
    for (args, named) in [
        ("plan nope", &["nope"][..]),
        ("plan step --model nope", &["--model", "nope", "qwen2.5-3b"]),
        ("plan step --model qwen2.5-3b --params 5", &["--model", "--params"]),
        ("plan step --params 0", &["--params", "positive"]),
        ("plan step --dtype f64", &["--dtype", "f64", "bf16"]),
        ("plan step --rule nope", &["--rule", "nope", "adamw"]),
        ("plan step --slots 1", &["--slots: 1", "hint: use at least 2"]),
        ("plan step --params 1M --chunk-bytes 511", &["--chunk-bytes: 511", "need at least 512"]),
        ("plan step --params 1M --dtype f16 --chunk-bytes 767", &["--chunk-bytes: 767", "need at least 768"]),
        ("plan step --wire-gbps 0", &["--wire-gbps", "positive"]),
        ("plan step --device cpu", &["--device"]),
    ] {
        refused_at_once(args, 2, named);
    }
}

#[test]
fn a_plan_of_no_use_is_refused_at_once_and_without_overflow() {
    refused_at_once("plan step --chunk-bytes 512", 2, &["--chunk-bytes: 512", "use at least 5886"]);
    refused_at_once("plan step --params 9e15", 2, &["--chunk-bytes: 16777216", "9000000000000000 parameters"]);
    refused_at_once("plan step --slots 18446744073709551615", 2, &["--slots: 18446744073709551615", "no device"]);
    refused_at_once("plan step --chunk-bytes 9e15 --slots 4096", 2, &["--slots: 4096", "9000000000000000 bytes"]);
}

#[test]
fn a_path_that_cannot_be_written_is_refused() {
    let path = folder("plan-unwritable").join("absent/plan.json").display().to_string();
    refused_at_once(&format!("plan step --json {path}"), 1, &["cannot write", &path]);
}
