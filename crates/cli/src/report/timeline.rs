//! What the page draws: spans by row, packed into columns of numbers so that hundreds of thousands stay small.

use std::collections::HashMap;

use serde::Serialize;

use super::figures::Figures;
use super::trace::{Args, Limit, Rank, Span};

/// Spans of one row that overlap are put into so many lanes at most.
const LANES: usize = 8;

/// What the page draws for one rank. Times are nanoseconds since `begin`.
#[derive(Serialize)]
pub(crate) struct Timeline<'a> {
    rank: u64,
    begin: i64,
    length: i64,
    rows: Vec<Row>,
    /// What spans have in common; a span has the place of its kind in this list.
    kinds: Vec<Kind<'a>>,
    counters: Vec<Counter<'a>>,
    instants: Vec<(i64, u64, &'a str)>,
    /// Number, begin and end of each step.
    steps: Vec<(u64, i64, i64)>,
    limit: Option<Limit>,
}

#[derive(Serialize)]
struct Row {
    row: u64,
    name: String,
    lanes: Vec<Lane>,
}

/// Spans that do not overlap, in order, as columns.
#[derive(Default, Serialize)]
struct Lane {
    kind: Vec<usize>,
    /// Each start as the distance from the one before, which is a shorter number.
    start: Vec<i64>,
    duration: Vec<i64>,
    /// 0 where it is not known.
    bytes: Vec<u64>,
    /// -1 where it is not known.
    step: Vec<i64>,
    #[serde(skip)]
    last_start: i64,
    #[serde(skip)]
    end: i64,
}

#[derive(PartialEq, Eq, Hash, Serialize)]
struct Kind<'a> {
    name: &'a str,
    category: &'a str,
    args: &'a Args,
}

#[derive(Serialize)]
struct Counter<'a> {
    name: &'a str,
    series: Vec<Series<'a>>,
}

#[derive(Serialize)]
struct Series<'a> {
    name: &'a str,
    at: Vec<i64>,
    value: Vec<f64>,
}

impl<'a> Timeline<'a> {
    pub(crate) fn new(rank: &'a Rank, figures: &Figures) -> Self {
        let (begin, end) = rank.range_ns();
        let mut kinds = Kinds::default();
        let mut rows: Vec<Row> = Vec::new();
        for span in &rank.spans {
            if rows.last().is_none_or(|row| row.row != span.row) {
                let name = rank.rows.get(&span.row).cloned().unwrap_or_else(|| format!("row {}", span.row));
                rows.push(Row { row: span.row, name, lanes: Vec::new() });
            }
            let Some(row) = rows.last_mut() else { continue };
            let kind = kinds.place(span);
            row.lane(span.start_ns).push(span, kind, begin);
        }
        let mut counters = Vec::<Counter<'_>>::new();
        for sample in &rank.samples {
            let counter = found(
                &mut counters,
                |counter| counter.name == sample.counter,
                || Counter { name: &sample.counter, series: Vec::new() },
            );
            let series = found(
                &mut counter.series,
                |series| series.name == sample.series,
                || Series { name: &sample.series, at: Vec::new(), value: Vec::new() },
            );
            series.at.push(sample.at_ns - begin);
            series.value.push(sample.value);
        }
        Self {
            rank: rank.about.rank,
            begin,
            length: (end - begin).max(1),
            rows,
            kinds: kinds.list,
            counters,
            instants: rank.instants.iter().map(|at| (at.start_ns - begin, at.row, at.name.as_str())).collect(),
            steps: figures.steps.iter().map(|step| (step.step, step.begin_ns - begin, step.end_ns - begin)).collect(),
            limit: figures.wire.limit,
        }
    }
}

fn found<T>(list: &mut Vec<T>, is_it: impl Fn(&T) -> bool, make: impl FnOnce() -> T) -> &mut T {
    let place = list.iter().position(is_it).unwrap_or_else(|| {
        list.push(make());
        list.len() - 1
    });
    &mut list[place]
}

#[derive(Default)]
struct Kinds<'a> {
    list: Vec<Kind<'a>>,
    places: HashMap<(&'a str, &'a str, &'a Args), usize>,
}

impl<'a> Kinds<'a> {
    fn place(&mut self, span: &'a Span) -> usize {
        let key = (span.name.as_str(), span.category.as_str(), &span.args);
        *self.places.entry(key).or_insert_with(|| {
            self.list.push(Kind { name: key.0, category: key.1, args: key.2 });
            self.list.len() - 1
        })
    }
}

impl Row {
    /// The first lane that is free, or the last one.
    fn lane(&mut self, start_ns: i64) -> &mut Lane {
        let free = self.lanes.iter().position(|lane| lane.end <= start_ns);
        let place = free.unwrap_or_else(|| {
            if self.lanes.len() < LANES {
                self.lanes.push(Lane { end: i64::MIN, ..Lane::default() });
            }
            self.lanes.len() - 1
        });
        &mut self.lanes[place]
    }
}

impl Lane {
    fn push(&mut self, span: &Span, kind: usize, begin: i64) {
        let start = span.start_ns - begin;
        self.kind.push(kind);
        self.start.push(start - self.last_start);
        self.duration.push(span.end_ns - span.start_ns);
        self.bytes.push(span.bytes.unwrap_or(0));
        self.step.push(span.step.map_or(-1, |step| step as i64));
        self.last_start = start;
        self.end = self.end.max(span.end_ns);
    }
}
