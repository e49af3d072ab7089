//! Several ranks' traces as one: their times are put on the wall clock, from the one that began first.

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::error::{Error, Result};

/// Merges traces, each with the name that an error calls it.
pub fn merge(traces: Vec<(String, Value)>) -> Result<Value> {
    let mut parts = Vec::new();
    let mut ranks = HashSet::new();
    for (name, mut trace) in traces {
        let header = trace["forebay"].take();
        let (Some(zero), Some(rank), false) =
            (header["zero_unix_ns"].as_u64(), header["rank"].as_u64(), header["merged"] == true)
        else {
            return Err(refused(&name, "it is no trace of one rank that forebay.trace has written"));
        };
        if header["schema"] != 1 {
            return Err(refused(&name, &format!("its schema is {}, this version merges schema 1", header["schema"])));
        }
        if !ranks.insert(rank) {
            return Err(refused(&name, &format!("another file has rank {rank} too; merge one file for each rank")));
        }
        let Value::Array(events) = trace["traceEvents"].take() else {
            return Err(refused(&name, "it has no traceEvents"));
        };
        parts.push((zero, rank, events, header));
    }
    if parts.is_empty() {
        return Err(refused("nothing", "name the traces to merge"));
    }
    parts.sort_by_key(|(_, rank, ..)| *rank);
    let first = parts.iter().map(|(zero, ..)| *zero).min().unwrap_or(0);
    let (mut all, mut headers) = (Vec::new(), Vec::new());
    for (zero, rank, events, header) in parts {
        let later_us = (zero - first) as f64 / 1e3;
        all.extend(events.into_iter().map(|mut event| {
            event["pid"] = rank.into();
            if let Some(ts) = event["ts"].as_f64() {
                event["ts"] = (ts + later_us).into();
            }
            event
        }));
        headers.push(header);
    }
    Ok(json!({
        "displayTimeUnit": "ms",
        "traceEvents": all,
        "forebay": {"schema": 1, "merged": true, "zero_unix_ns": first, "ranks": headers},
    }))
}

fn refused(path: &str, text: &str) -> Error {
    Error::File { action: "merge", path: path.to_owned(), errno: None, text: text.to_owned() }
}
