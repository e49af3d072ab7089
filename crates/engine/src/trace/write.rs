//! The file of a trace: JSON that Perfetto and chrome://tracing open.
//!
//! Spans of one row follow each other or lie inside each other. Where they do not, because two optimizers or a host and a
//! device work at once, the row gets more than one line: line `n` has the row's number plus 100 times `n`.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;

use serde_json::{Map, Value, json};

use super::recorder::Recording;
use super::span::{Counter, Kind, Label, Record, Span};

/// Between the numbers of two lines of one row.
const LINE: u32 = 100;
/// The version of the format.
const SCHEMA: u32 = 1;

/// What a trace is told about its process when it is written.
#[derive(Debug, Clone, Default)]
pub struct About {
    /// This process's number, and how many there are.
    pub rank: u32,
    /// How many processes train together.
    pub ranks: u32,
    /// Names of those that reported.
    pub owners: HashMap<u32, String>,
    /// Names of layers, by owner and number.
    pub layers: HashMap<(u32, u32), String>,
    /// What else the file says under `forebay`.
    pub others: Map<String, Value>,
}

/// The lines of one row: the ends of the spans that are open in each.
#[derive(Default)]
struct Lines(Vec<Vec<u64>>);

impl Lines {
    /// The line for the next span, in the order of begins.
    fn place(&mut self, span: &Span) -> u32 {
        for (line, open) in self.0.iter_mut().enumerate() {
            while open.last().is_some_and(|&end| end <= span.start_ns) {
                open.pop();
            }
            if open.last().is_none_or(|&end| span.end_ns <= end) {
                open.push(span.end_ns);
                return line as u32;
            }
        }
        self.0.push(vec![span.end_ns]);
        self.0.len() as u32 - 1
    }
}

impl Recording {
    /// Writes the file.
    pub fn write(&self, to: &mut impl Write, about: &About) -> std::io::Result<()> {
        writeln!(to, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        let name = json!({"name": "process_name", "ph": "M", "pid": about.rank,
            "args": {"name": format!("rank {}", about.rank)}});
        serde_json::to_writer(&mut *to, &name)?;
        let mut rows: BTreeMap<u32, (&'static str, Lines)> = BTreeMap::new();
        // Of spans that begin together the longer one is around the other.
        let mut order: Vec<&Record> = self.records.iter().collect();
        order.sort_by_key(|record| match record {
            Record::Span(span) => (span.start_ns, u64::MAX - span.end_ns),
            Record::Counter(at_ns, _) => (*at_ns, 0),
        });
        for record in order {
            let event = match record {
                Record::Span(span) => {
                    let (row, name) = span.kind.row();
                    let line = rows.entry(row).or_insert_with(|| (name, Lines::default())).1.place(span);
                    self.event(span, row + LINE * line, about)
                }
                Record::Counter(at_ns, counter) => count(*at_ns, counter, about.rank),
            };
            to.write_all(b",\n")?;
            serde_json::to_writer(&mut *to, &event)?;
        }
        for (row, (name, lines)) in rows {
            for line in 0..lines.0.len() as u32 {
                let name = if line == 0 { name.to_owned() } else { format!("{name} ({})", line + 1) };
                let of = |event: &str, args: Value| {
                    json!({"name": event, "ph": "M", "pid": about.rank,
                    "tid": row + LINE * line, "args": args})
                };
                for event in [
                    of("thread_name", json!({"name": name})),
                    of("thread_sort_index", json!({"sort_index": row * LINE + line})),
                ] {
                    to.write_all(b",\n")?;
                    serde_json::to_writer(&mut *to, &event)?;
                }
            }
        }
        write!(to, "\n],\"forebay\":")?;
        serde_json::to_writer(&mut *to, &self.header(about))?;
        writeln!(to, "}}")
    }

    fn header(&self, about: &About) -> Value {
        let mut header = json!({
            "schema": SCHEMA,
            "version": crate::VERSION,
            "rank": about.rank,
            "ranks": about.ranks.max(1),
            "zero_unix_ns": self.zero_unix_ns,
            "seconds": self.seconds,
            "capacity": self.capacity,
            "dropped": self.dropped,
            "partial": self.is_partial,
        });
        if let Value::Object(header) = &mut header {
            header.extend(about.others.clone());
        }
        header
    }

    fn event(&self, span: &Span, tid: u32, about: &About) -> Value {
        let mut args = Map::new();
        let mut put = |name: &str, value: Value| args.insert(name.to_owned(), value);
        if span.bytes > 0 {
            put("bytes", span.bytes.into());
        }
        if span.untimed_bytes > 0 {
            put("untimed_bytes", span.untimed_bytes.into());
        }
        if span.label != Label::Batch
            && let Some(chunk) = span.chunk
        {
            put("chunk", chunk.into());
            if span.chunks > 1 {
                put("chunks", span.chunks.into());
            }
        }
        if let Some(slot) = span.slot {
            put("slot", slot.into());
        }
        if let Some(owner) = about.owners.get(&span.owner) {
            let of = match span.kind {
                Kind::ActivationStore | Kind::ActivationFetch => "activations",
                _ if span.layer.is_some() => "activations",
                _ => "optimizer",
            };
            put(of, owner.as_str().into());
        }
        if let Some(layer) = span.layer {
            put("layer", self.layer(span.owner, layer, about).into());
        }
        if let Some(reason) = span.reason {
            put("reason", reason.word().into());
        }
        if let Some(step) = span.step {
            put("step", step.into());
        }
        json!({
            "ph": "X",
            "pid": about.rank,
            "tid": tid,
            "cat": span.kind.category(),
            "name": self.name(span, about),
            "ts": us(span.start_ns),
            "dur": us(span.end_ns.saturating_sub(span.start_ns)),
            "args": args,
        })
    }

    fn name(&self, span: &Span, about: &About) -> String {
        let chunk = || match (span.chunk, span.chunks) {
            (None, _) => "state".to_owned(),
            (Some(chunk), 0 | 1) => format!("chunk {chunk}"),
            (Some(chunk), chunks) => format!("chunks {chunk} to {}", chunk + chunks - 1),
        };
        match span.label {
            Label::Chunk => chunk(),
            Label::ChunkAnd(words) => format!("{} {words}", chunk()),
            Label::Layer => self.layer(span.owner, span.layer.unwrap_or(0), about),
            Label::Batch => format!("batch {}", span.chunk.unwrap_or(0)),
            Label::Words(words) => words.to_owned(),
            Label::Given(number) => self.given.get(number as usize).cloned().unwrap_or_default(),
        }
    }

    fn layer(&self, owner: u32, layer: u32, about: &About) -> String {
        about.layers.get(&(owner, layer)).cloned().unwrap_or_else(|| format!("layer {layer}"))
    }
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

fn count(at_ns: u64, counter: &Counter, rank: u32) -> Value {
    let (name, args) = match counter {
        Counter::Pinned([optimizer, activations, sleep, saves]) => (
            "pinned bytes",
            json!({"optimizer": optimizer, "activations": activations, "sleep": sleep, "saves": saves}),
        ),
        Counter::Ring(ring) => ("ring bytes", json!({"ring": ring})),
        Counter::Device([allocated, reserved]) => {
            ("device bytes", json!({"allocated": allocated, "reserved": reserved}))
        }
    };
    json!({"ph": "C", "pid": rank, "tid": 0, "name": name, "ts": us(at_ns), "args": args})
}
