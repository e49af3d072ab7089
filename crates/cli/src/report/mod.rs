//! `forebay report`: one HTML page about a trace, and its figures as text or as JSON. It opens no device.

mod advice;
mod figures;
mod html;
mod intervals;
mod numbers;
mod page;
mod plan;
mod sections;
mod timeline;
mod trace;
mod wire;

use std::path::Path;

use forebay::Error;
use serde::Serialize;

use advice::{Advice, Facts, advise};
use figures::Figures;
use numbers::{percent, seconds, size};
use trace::{Limit, Rank, Trace};

use crate::options::ReportArgs;
use crate::output::{check_writable, emit};
use crate::tables::count;
use crate::trace::is_same;
use crate::{Failure, SUCCESS};

/// A trace with its figures.
struct Report {
    trace: Trace,
    /// One for each rank of the trace.
    computed: Vec<Computed>,
}

#[derive(Serialize)]
struct Computed {
    #[serde(flatten)]
    figures: Figures,
    /// Empty if the trace has no whole step.
    advice: Vec<Advice>,
}

/// What `--json` has.
#[derive(Serialize)]
struct Json<'a> {
    version: &'static str,
    ranks: &'a [Computed],
}

pub(crate) fn make(args: &ReportArgs) -> Result<u8, Failure> {
    let json = &args.output.json;
    for (option, path) in [("output", args.page.as_deref()), ("json", json.path())] {
        let Some(path) = path else { continue };
        if is_same(Path::new(path), Path::new(&args.trace)) {
            let remedy = "it is the trace that is read; name another file".to_owned();
            return Err(Error::InvalidOption { option, value: path.to_owned(), remedy }.into());
        }
        check_writable(path)?;
    }
    let trace = trace::read(Path::new(&args.trace)).map_err(|unusable| Failure::Unusable {
        text: format!("{} {}", args.trace, unusable.reason),
        hint: unusable.remedy,
    })?;
    let limit = args.wire_gbps.map(|gbps| Limit { fetch_gbps: gbps, store_gbps: gbps, both_gbps: gbps });
    let report = Report::new(trace, limit);
    let name = Path::new(&args.trace).file_name().unwrap_or_default().to_string_lossy();
    if let Some(path) = &args.page {
        std::fs::write(path, page::page(&report, &name))
            .map_err(|error| Failure::Write { path: path.clone(), error })?;
    }
    crate::report(json, &Json { version: forebay::VERSION, ranks: &report.computed }, || report.text(&name))?;
    if let Some(path) = args.page.as_deref().filter(|_| !json.to_stdout()) {
        emit(&format!("wrote {path}: open it in a browser\n"))?;
    }
    Ok(SUCCESS)
}

impl Report {
    fn new(trace: Trace, limit: Option<Limit>) -> Self {
        let computed = trace.ranks.iter().map(|rank| {
            let figures = Figures::new(rank, limit);
            let advice = Facts::new(&rank.about, &figures).map_or(Vec::new(), |facts| advise(&facts));
            Computed { figures, advice }
        });
        Self { computed: computed.collect(), trace }
    }

    fn ranks(&self) -> impl Iterator<Item = (&Rank, &Computed)> {
        self.trace.ranks.iter().zip(&self.computed)
    }

    /// The rank that a step waits for most.
    fn slowest(&self) -> Option<&Computed> {
        let exposed = |one: &&Computed| one.figures.typical.as_ref().map_or(0.0, |step| step.exposed_s);
        self.computed.iter().max_by(|a, b| exposed(a).total_cmp(&exposed(b)))
    }

    fn text(&self, name: &str) -> String {
        let mut text = format!("{name}: {}, forebay {}\n", count(self.computed.len(), "rank"), forebay::VERSION);
        for Computed { figures, advice } in &self.computed {
            let steps = count(figures.steps.len(), "step");
            text += &format!("\nrank {}: {steps}, {}\n", figures.rank, count(figures.spans, "span"));
            if let Some(step) = &figures.typical {
                let share = percent(step.exposed_s / step.total_s.max(f64::MIN_POSITIVE));
                text += &format!(
                    "a step: {}; forward {}, backward {}, step {}; exposed {} ({share})\n",
                    seconds(step.total_s),
                    seconds(step.forward_s),
                    seconds(step.backward_s),
                    seconds(step.step_s),
                    seconds(step.exposed_s),
                );
            }
            for (way, direction) in [("to", &figures.wire.fetch), ("from", &figures.wire.store)] {
                let rate = direction.gbps.map_or(String::new(), |rate| format!(" at {}", numbers::gbps(rate)));
                let limit = direction
                    .share_while_busy
                    .map_or(String::new(), |share| format!(", {} of the limit", percent(share)));
                text += &format!("{way} the device: {}{rate}{limit}\n", size(direction.bytes));
            }
            for advice in advice {
                text += &format!("- {}\n  ({})\n", advice.text, advice.because);
            }
        }
        text
    }
}
