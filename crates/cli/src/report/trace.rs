//! A trace file as its recorder writes it, schema 1: read, checked, and sorted by rank. It says what is wrong with a
//! file that it cannot use.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde::de::{Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The schema that is read.
const SCHEMA: u64 = 1;
/// A row with spans that overlap has more lines, whose numbers are this far apart.
const LINE: u64 = 100;

/// Everything in a file, by rank.
#[derive(Debug)]
pub(crate) struct Trace {
    pub(crate) ranks: Vec<Rank>,
}

/// The trace of one process.
#[derive(Debug, Default)]
pub(crate) struct Rank {
    pub(crate) about: About,
    /// The rows' names.
    pub(crate) rows: BTreeMap<u64, String>,
    /// Sorted by row, then by start.
    pub(crate) spans: Vec<Span>,
    pub(crate) instants: Vec<Span>,
    pub(crate) samples: Vec<Sample>,
}

/// One timed interval, or an instant, in nanoseconds since the trace began.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Span {
    pub(crate) row: u64,
    pub(crate) name: String,
    pub(crate) category: String,
    pub(crate) start_ns: i64,
    pub(crate) end_ns: i64,
    pub(crate) bytes: Option<u64>,
    /// Bytes that moved the same way since the span before and were not timed.
    pub(crate) untimed_bytes: u64,
    pub(crate) step: Option<u64>,
    pub(crate) args: Args,
}

/// What many spans have in common.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct Args {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) chunk: Option<Label>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) slot: Option<Label>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) optimizer: Option<Label>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) activations: Option<Label>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) layer: Option<Label>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// Whether this stands for copies that were not timed: see `untimed`.
    #[serde(skip_deserializing, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) untimed: bool,
}

/// What each span has of its own.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Own {
    bytes: Option<u64>,
    untimed_bytes: u64,
    step: Option<u64>,
}

/// A number or a name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(untagged)]
pub(crate) enum Label {
    Number(u64),
    Name(String),
}

/// A counter at one moment.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub(crate) counter: String,
    pub(crate) series: String,
    pub(crate) at_ns: i64,
    pub(crate) value: f64,
}

/// What a process says about itself: the object "forebay".
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct About {
    schema: Option<u64>,
    pub(crate) version: String,
    pub(crate) rank: u64,
    pub(crate) seconds: f64,
    pub(crate) capacity: u64,
    pub(crate) dropped: u64,
    /// Whether work is missing because its device has no times.
    pub(crate) partial: bool,
    pub(crate) machine: Map<String, Value>,
    pub(crate) wire: Option<Limit>,
    pub(crate) optimizers: Vec<Part>,
    pub(crate) overlaps: Vec<Part>,
    pub(crate) activations: Vec<Part>,
    pub(crate) sleepers: Vec<Part>,
    pub(crate) saves: Vec<Map<String, Value>>,
}

/// The measured limit of the wire, in GB/s.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
pub(crate) struct Limit {
    pub(crate) fetch_gbps: f64,
    pub(crate) store_gbps: f64,
    /// Each way, with both ways busy.
    pub(crate) both_gbps: f64,
}

/// An optimizer, an overlap, an activation offload or a sleeper.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) optimizer: String,
    pub(crate) class: String,
    pub(crate) settings: Map<String, Value>,
    pub(crate) stats: Map<String, Value>,
    pub(crate) plan: Option<Value>,
    pub(crate) explain: String,
    /// The names of the layers of an activation offload.
    pub(crate) layers: Vec<String>,
}

/// Why a file cannot be used, and what to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unusable {
    pub(crate) reason: String,
    pub(crate) remedy: &'static str,
}

const RECORD: &str = "name the JSON file of a trace that forebay recorded";

/// Reads a file.
pub(crate) fn read(path: &Path) -> Result<Trace, Unusable> {
    let text = std::fs::read(path).map_err(|error| Unusable {
        reason: format!("cannot be read: {error}"),
        remedy: "check that the path exists and that you may read it",
    })?;
    parse(&text)
}

#[derive(Deserialize)]
struct File {
    #[serde(rename = "traceEvents")]
    events: Option<Events>,
    forebay: Option<Value>,
}

fn parse(text: &[u8]) -> Result<Trace, Unusable> {
    let file: File = serde_json::from_slice(text).map_err(|error| {
        if error.is_eof() {
            let reason = format!("is truncated: it ends in the middle, after {} bytes", text.len());
            Unusable { reason, remedy: "write the trace again, and check that the disk has room" }
        } else if error.is_data() {
            Unusable { reason: format!("is not a trace of forebay: {error}"), remedy: RECORD }
        } else {
            Unusable { reason: format!("is not a trace: it is not JSON: {error}"), remedy: RECORD }
        }
    })?;
    let (Some(events), Some(about)) = (file.events, file.forebay) else {
        let reason = "is not a trace of forebay: it needs \"traceEvents\" and \"forebay\"".to_owned();
        return Err(Unusable { reason, remedy: RECORD });
    };
    check_schema(&about)?;
    let mut ranks = events.0;
    for about in abouts(about)? {
        let rank = ranks.entry(about.rank).or_default();
        rank.about = about;
    }
    ranks.retain(|_, rank| !rank.spans.is_empty());
    if ranks.is_empty() {
        return Err(Unusable {
            reason: "has no spans: nothing was recorded".to_owned(),
            remedy: "record at least one whole step",
        });
    }
    for (number, rank) in &mut ranks {
        rank.about.rank = *number;
        let untimed = untimed(&mut rank.spans);
        rank.spans.extend(untimed);
        sort(&mut rank.spans);
        rank.samples.sort_by_key(|sample| sample.at_ns);
    }
    Ok(Trace { ranks: ranks.into_values().collect() })
}

fn sort(spans: &mut [Span]) {
    spans.sort_by_key(|span| (span.row, span.start_ns, -span.end_ns));
}

/// Spans that stand for copies which were not timed. A recorder times one copy in a while and counts the bytes of the
/// next ones, which follow it at once; so they begin where it ends, and are as fast as the copies that were timed.
fn untimed(spans: &mut [Span]) -> Vec<Span> {
    sort(spans);
    let mut ends = HashMap::<(u64, String), i64>::new();
    let mut found = Vec::new();
    for span in spans.iter() {
        let before = ends.insert((span.row, span.category.clone()), span.end_ns);
        let (Some(bytes), true) = (span.bytes.filter(|bytes| *bytes > 0), span.untimed_bytes > 0) else { continue };
        let needed_ns = (span.end_ns - span.start_ns) as f64 * span.untimed_bytes as f64 / bytes as f64;
        let start_ns = before.unwrap_or_else(|| (span.start_ns - needed_ns as i64).max(0));
        let room_ns = span.start_ns - start_ns;
        let length_ns = if room_ns > 0 { room_ns.min(needed_ns as i64) } else { needed_ns as i64 };
        found.push(Span {
            row: span.row,
            name: "not timed".to_owned(),
            category: span.category.clone(),
            start_ns,
            end_ns: start_ns + length_ns,
            bytes: Some(span.untimed_bytes),
            args: Args { untimed: true, ..Args::default() },
            ..Span::default()
        });
    }
    found
}

fn check_schema(about: &Value) -> Result<(), Unusable> {
    let schema = &about["schema"];
    if *schema == SCHEMA {
        return Ok(());
    }
    let version = about["version"].as_str().map_or(String::new(), |version| format!(", written by forebay {version}"));
    Err(Unusable {
        reason: format!("has schema {schema}{version}; this forebay reads schema {SCHEMA}"),
        remedy: "make the report with the version of forebay that recorded the trace, or record it again",
    })
}

/// What each rank says about itself.
fn abouts(about: Value) -> Result<Vec<About>, Unusable> {
    let found: Result<Vec<About>, _> = if about["merged"] == true {
        serde_json::from_value(about["ranks"].clone())
    } else {
        serde_json::from_value(about).map(|about| vec![about])
    };
    let found = found.map_err(|error| Unusable {
        reason: format!("is not a trace of forebay: in \"forebay\": {error}"),
        remedy: RECORD,
    })?;
    let other = found.iter().find(|about| about.schema.is_some_and(|schema| schema != SCHEMA));
    other
        .map_or(Ok(()), |about| check_schema(&serde_json::json!({"schema": about.schema, "version": about.version})))?;
    Ok(found)
}

/// Events, sorted into ranks as they are read: kept as JSON, a large trace would take gigabytes.
struct Events(BTreeMap<u64, Rank>);

#[derive(Deserialize)]
struct Event {
    ph: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    cat: String,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    pid: u64,
    #[serde(default)]
    tid: u64,
    args: Option<Value>,
}

impl<'de> Deserialize<'de> for Events {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sorted;
        impl<'de> Visitor<'de> for Sorted {
            type Value = Events;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a list of events")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Events, A::Error> {
                let mut ranks = BTreeMap::<u64, Rank>::new();
                while let Some(event) = list.next_element::<Event>()? {
                    ranks.entry(event.pid).or_default().add(event).map_err(serde::de::Error::custom)?;
                }
                Ok(Events(ranks))
            }
        }
        deserializer.deserialize_seq(Sorted)
    }
}

impl Rank {
    fn add(&mut self, event: Event) -> Result<(), String> {
        let ns = |us: f64| (us * 1e3).round() as i64;
        let args = event.args.unwrap_or_default();
        match event.ph.as_str() {
            "M" if event.name == "thread_name" && event.tid < LINE => {
                if let Some(name) = args["name"].as_str() {
                    self.rows.insert(event.tid, name.to_owned());
                }
            }
            "C" => {
                for (series, value) in args.as_object().into_iter().flatten() {
                    let value = value.as_f64().ok_or_else(|| format!("counter {:?} has {value}", event.name))?;
                    let (counter, series) = (event.name.clone(), series.clone());
                    self.samples.push(Sample { counter, series, at_ns: ns(event.ts), value });
                }
            }
            kind @ ("X" | "i" | "I") => {
                if event.dur < 0.0 {
                    return Err(format!("span {:?} has a duration of {} us", event.name, event.dur));
                }
                let args = if args.is_null() { Value::Object(Map::new()) } else { args };
                let wrong = |error| format!("span {:?}: {error}", event.name);
                let own = Own::deserialize(&args).map_err(wrong)?;
                let args = Args::deserialize(&args).map_err(wrong)?;
                let span = Span {
                    row: event.tid % LINE,
                    name: event.name,
                    category: event.cat,
                    start_ns: ns(event.ts),
                    end_ns: ns(event.ts + event.dur),
                    bytes: own.bytes,
                    untimed_bytes: own.untimed_bytes,
                    step: own.step,
                    args,
                };
                if kind == "X" { self.spans.push(span) } else { self.instants.push(span) }
            }
            _ => {}
        }
        Ok(())
    }

    /// When its first span begins and its last one ends.
    pub(crate) fn range_ns(&self) -> (i64, i64) {
        let begin = self.spans.iter().map(|span| span.start_ns).min().unwrap_or(0);
        let end = self.spans.iter().map(|span| span.end_ns).max().unwrap_or(0);
        (begin.min(0), end.max((self.about.seconds * 1e9) as i64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        parse(text.as_bytes()).unwrap_err().reason
    }

    #[test]
    fn a_file_that_is_no_trace_says_why() {
        assert!(refused("hello").starts_with("is not a trace: it is not JSON: "));
        assert!(refused("[1, 2]").starts_with("is not a trace of forebay: "));
        assert!(refused("{}").contains("needs \"traceEvents\" and \"forebay\""));
        let whole = r#"{"traceEvents": [{"ph": "X", "ts": 1, "dur": 2}], "forebay": {"schema": 1}}"#;
        assert!(parse(whole.as_bytes()).is_ok());
        for cut in 1..whole.len() {
            assert_eq!(refused(&whole[..cut]), format!("is truncated: it ends in the middle, after {cut} bytes"));
        }
    }

    #[test]
    fn another_schema_is_named_with_its_version() {
        let other = r#"{"traceEvents": [], "forebay": {"schema": 2, "version": "9.1.0"}}"#;
        assert_eq!(refused(other), "has schema 2, written by forebay 9.1.0; this forebay reads schema 1");
        let inside = r#"{"traceEvents": [], "forebay": {"schema": 1, "merged": true, "ranks": [{"schema": 3}]}}"#;
        assert!(refused(inside).starts_with("has schema 3"));
        assert!(refused(r#"{"traceEvents": [], "forebay": {}}"#).starts_with("has schema null"));
    }

    #[test]
    fn wrong_spans_are_named() {
        let with = |event: &str| refused(&format!(r#"{{"traceEvents": [{event}], "forebay": {{"schema": 1}}}}"#));
        assert_eq!(with(""), "has no spans: nothing was recorded");
        assert!(with(r#"{"ph": "X", "name": "chunk 1", "ts": 1, "dur": -2}"#).contains("\"chunk 1\" has a duration"));
        assert!(with(r#"{"ph": "X", "name": "chunk 1", "args": {"bytes": "many"}}"#).contains("\"chunk 1\""));
        assert!(with(r#"{"ph": "C", "name": "ring bytes", "args": {"ring": "x"}}"#).contains("ring bytes"));
    }

    #[test]
    fn copies_that_were_not_timed_follow_the_one_before() {
        let text = r#"{"traceEvents": [
            {"ph": "X", "tid": 3, "cat": "fetch", "name": "a", "ts": 10, "dur": 2, "args": {"bytes": 100, "untimed_bytes": 50}},
            {"ph": "X", "tid": 3, "cat": "fetch", "name": "b", "ts": 18, "dur": 2, "args": {"bytes": 100, "untimed_bytes": 200}},
            {"ph": "X", "tid": 103, "cat": "fetch", "name": "c", "ts": 21, "dur": 2, "args": {"bytes": 100, "untimed_bytes": 90}}],
            "forebay": {"schema": 1}}"#;
        let trace = parse(text.as_bytes()).unwrap();
        let stood: Vec<_> = trace.ranks[0].spans.iter().filter(|span| span.args.untimed).collect();
        let ranges: Vec<_> = stood.iter().map(|span| (span.start_ns, span.end_ns, span.bytes)).collect();
        assert_eq!(ranges, [(9000, 10000, Some(50)), (12000, 16000, Some(200)), (20000, 21000, Some(90))]);
        assert!(stood.iter().all(|span| span.row == 3 && span.category == "fetch"));
    }

    #[test]
    fn ranks_are_apart_and_spans_in_order() {
        let text = r#"{"traceEvents": [
            {"ph": "X", "pid": 1, "tid": 3, "name": "b", "ts": 5.5, "dur": 1, "args": {"chunk": 4, "layer": "x.0"}},
            {"ph": "X", "pid": 1, "tid": 3, "name": "a", "ts": 2, "dur": 1},
            {"ph": "X", "pid": 0, "tid": 1, "name": "forward", "ts": 0, "dur": 1},
            {"ph": "M", "pid": 1, "tid": 3, "name": "thread_name", "args": {"name": "fetch"}}],
            "forebay": {"schema": 1, "merged": true, "ranks": [{"rank": 0, "version": "a"}, {"rank": 1, "version": "b"}]}}"#;
        let trace = parse(text.as_bytes()).unwrap();
        assert_eq!(trace.ranks.iter().map(|rank| rank.about.version.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        let second = &trace.ranks[1];
        assert_eq!(second.spans.iter().map(|span| span.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(second.rows[&3], "fetch");
        assert_eq!((second.spans[1].start_ns, second.spans[1].end_ns), (5500, 6500));
        assert_eq!(second.spans[1].args.chunk, Some(Label::Number(4)));
        assert_eq!(second.spans[1].args.layer, Some(Label::Name("x.0".to_owned())));
    }
}
