//! The sections of the page, as tables that are complete without a script.

use serde_json::{Map, Value};

use super::html::{Table, escape};
use super::numbers::{gbps, gib, percent, seconds, size};
use super::trace::{Limit, Rank, Span};
use super::wire::Direction;
use super::{Advice, Computed, Report};
use crate::tables::count;

/// Names of what is drawn, in the order of the legend, with their class in the style.
const LEGEND: [(&str, &str); 12] = [
    ("forward", "forward"),
    ("backward", "backward"),
    ("step", "step"),
    ("fetch", "fetch"),
    ("update", "update"),
    ("store", "store"),
    ("activation_store", "activations out"),
    ("activation_fetch", "activations in"),
    ("sleep", "sleep"),
    ("wake", "wake"),
    ("save", "save"),
    ("wait", "wait"),
];

/// Closed where a table is long, so that the page stays short; printing opens it.
const LONG: usize = 24;

/// One part for each rank, which a choice of a rank shows or hides.
fn by_rank(report: &Report, part: impl Fn(&Rank, &Computed) -> String) -> String {
    let parts = report.ranks().map(|(rank, computed)| {
        let number = rank.about.rank;
        let title = if report.computed.len() > 1 { format!("<h3>rank {number}</h3>") } else { String::new() };
        format!("<div data-rank=\"{number}\">{title}{}</div>\n", part(rank, computed))
    });
    let many = if report.computed.len() > 1 { " many" } else { "" };
    format!("<div class=\"ranks{many}\">{}</div>", parts.collect::<String>())
}

fn paragraph(text: &str) -> String {
    format!("<p>{}</p>", escape(text))
}

fn folded(title: &str, rows: usize, inside: &str) -> String {
    let open = if rows <= LONG { " open" } else { "" };
    format!("<details{open}><summary>{}</summary>{inside}</details>", escape(title))
}

fn or_none<T>(value: Option<T>, text: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), text)
}

/// What a reader must know first: what is missing.
pub(super) fn notes(report: &Report) -> String {
    let mut text = String::new();
    for rank in &report.trace.ranks {
        let about = &rank.about;
        let mut note = |words: &str| {
            text += &format!("<p class=\"note\" data-rank=\"{0}\">Rank {0}: {1}</p>", about.rank, escape(words));
        };
        if about.dropped > 0 {
            note(&format!(
                "{} spans found no room and are missing here; the recorder had room for {}. Record fewer steps, or give it a \
                 larger capacity.",
                about.dropped, about.capacity
            ));
        }
        if about.partial {
            note("some work is missing here, because its device has no times.");
        }
    }
    text
}

pub(super) fn legend(report: &Report) -> String {
    let is_there = |class: &str| {
        let is_it = |span: &Span| span.category == class || (span.category == "pass" && span.name == class);
        report.trace.ranks.iter().any(|rank| rank.spans.iter().any(is_it))
    };
    let item = |(class, name): &(&str, &str)| format!("<li><i class=\"c-{class}\"></i>{name}</li>");
    LEGEND.iter().filter(|(class, _)| is_there(class)).map(item).collect()
}

fn sentences(list: &[Advice]) -> String {
    let item =
        |advice: &Advice| format!("<li>{}<span>Because {}.</span></li>", escape(&advice.text), escape(&advice.because));
    format!("<ol class=\"advice\">{}</ol>", list.iter().map(item).collect::<String>())
}

pub(super) fn summary(report: &Report) -> String {
    let mut text = String::new();
    if let Some(slowest) = report.slowest().filter(|_| report.computed.len() > 1) {
        let mut table =
            Table::new("Mean step of each rank", &["rank", "steps", "step", "exposed", "to device", "from device"]);
        for Computed { figures, .. } in &report.computed {
            let mean = figures.typical.as_ref();
            table.row(&[
                figures.rank.to_string(),
                figures.steps.len().to_string(),
                or_none(mean, |step| seconds(step.total_s)),
                or_none(mean, |step| seconds(step.exposed_s)),
                or_none(figures.wire.fetch.gbps, gbps),
                or_none(figures.wire.store.gbps, gbps),
            ]);
        }
        text += &format!(
            "<div data-rank=\"all\"><p>Rank {} waits most.</p>{}{}</div>",
            slowest.figures.rank,
            sentences(&slowest.advice),
            table.end()
        );
    }
    let own = by_rank(report, |_, computed| {
        let none = "<p>The trace has no whole step, so there is nothing to compare: record at least one step.</p>";
        let advice = if computed.advice.is_empty() { none.to_owned() } else { sentences(&computed.advice) };
        format!("<div data-own>{advice}</div>{}", tiles(computed))
    });
    text + &own
}

fn tiles(computed: &Computed) -> String {
    let figures = &computed.figures;
    let mut list = Vec::<(&str, String, String)>::new();
    if let Some(step) = &figures.typical {
        let of = figures.steps.len();
        let which = if of >= 3 {
            format!("mean of {} steps, without the first", of - 1)
        } else {
            format!("mean of {}", count(of, "step"))
        };
        list.push(("step", seconds(step.total_s), which));
        let share = percent(step.exposed_s / step.total_s.max(f64::MIN_POSITIVE));
        list.push(("exposed per step", seconds(step.exposed_s), format!("{share} of the step")));
    } else {
        list.push(("exposed", seconds(figures.exposed_s), "in the whole trace".to_owned()));
    }
    for (name, direction) in [("to the device", &figures.wire.fetch), ("from the device", &figures.wire.store)] {
        let limit = or_none(direction.share_while_busy, |share| format!("while busy, {} of the limit", percent(share)));
        let limit = if limit == "-" { "while busy; no limit is known".to_owned() } else { limit };
        list.push((name, or_none(direction.gbps, gbps), limit));
    }
    if let Some(peak) = figures.peak("device bytes", "allocated") {
        let reserved = figures
            .peak("device bytes", "reserved")
            .map_or(String::new(), |peak| format!(", {} reserved", gib(peak as u64)));
        list.push(("device memory", gib(peak as u64), format!("allocated at the peak{reserved}")));
    }
    if let Some(peak) = figures.peak("pinned bytes", "all") {
        list.push(("pinned memory", size(peak as u64), "at the peak".to_owned()));
    }
    let tile = |(name, value, more): &(&str, String, String)| {
        format!("<div><dt>{name}</dt><dd>{}<small>{}</small></dd></div>", escape(value), escape(more))
    };
    format!("<dl class=\"tiles\">{}</dl>", list.iter().map(tile).collect::<String>())
}

pub(super) fn wire(report: &Report, name: &str) -> String {
    by_rank(report, |_, Computed { figures, .. }| {
        let wire = &figures.wire;
        let titles =
            ["direction", "bytes", "busy", "rate while busy", "of the limit while busy", "of the limit, all the time"];
        let mut table = Table::new("Copies over the wire", &titles);
        for (name, direction) in [("to the device", &wire.fetch), ("from the device", &wire.store)] {
            let Direction { bytes, busy_s, gbps: rate, share_while_busy, share } = direction;
            table.row(&[
                name.to_owned(),
                size(*bytes),
                seconds(*busy_s),
                or_none(*rate, gbps),
                or_none(*share_while_busy, percent),
                or_none(*share, percent),
            ]);
        }
        let limit = match wire.limit {
            Some(Limit { fetch_gbps, store_gbps, both_gbps }) => paragraph(&format!(
                "Limit: {} to the device, {} from it, {} each way with both ways busy.",
                gbps(fetch_gbps),
                gbps(store_gbps),
                gbps(both_gbps)
            )),
            None => format!(
                "<p>No limit of the wire is known, so rates are not compared with one. <code>forebay probe</code> measures \
                 it; give its rate with <code>forebay report {} --wire-gbps 50 -o report.html</code>.</p>",
                escape(name)
            ),
        };
        table.end() + &limit
    })
}

pub(super) fn exposed(report: &Report) -> String {
    by_rank(report, |_, Computed { figures, .. }| {
        if figures.waits.is_empty() {
            return paragraph("No wait was recorded: neither the caller's thread nor the device's stream stood still.");
        }
        let titles = ["reason", "waits", "time", "share", "longest", "per step"];
        let mut table = Table::new("Waits of the caller's thread and of torch's stream, by reason", &titles);
        for wait in &figures.waits {
            let mean = figures.typical.as_ref().and_then(|step| step.waits.get(&wait.reason)).copied();
            table.row(&[
                wait.reason.clone(),
                wait.count.to_string(),
                seconds(wait.seconds),
                percent(wait.share),
                seconds(wait.longest_s),
                or_none(figures.typical.as_ref(), |_| seconds(mean.unwrap_or(0.0))),
            ]);
        }
        let mut titles = vec!["step", "exposed"];
        titles.extend(figures.waits.iter().map(|wait| wait.reason.as_str()));
        let mut steps = Table::new("Exposed time of each step; waits that overlap count once", &titles);
        for step in &figures.steps {
            let mut cells = vec![step.step.to_string(), seconds(step.exposed_s)];
            let of = |reason: &str| step.waits.get(reason).map_or("-".to_owned(), |value| seconds(*value));
            cells.extend(figures.waits.iter().map(|wait| of(&wait.reason)));
            steps.row(&cells);
        }
        let total = paragraph(&format!(
            "{} of {} were exposed: the caller's thread or torch's stream waited.",
            seconds(figures.exposed_s),
            seconds(figures.seconds)
        ));
        let steps = folded("Waits of each step", figures.steps.len(), &steps.end());
        format!("{total}<div class=\"parts\">{}{steps}</div>", table.end())
    })
}

pub(super) fn steps(report: &Report) -> String {
    by_rank(report, |_, Computed { figures, .. }| {
        if figures.steps.is_empty() {
            return paragraph("No whole step was recorded.");
        }
        let whose = if figures.device_times { "as the device ran them" } else { "as the caller's thread saw them" };
        let titles = ["step", "total", "forward", "backward", "step", "other", "exposed", "to device", "from device"];
        let mut table = Table::new(&format!("Passes {whose}"), &titles);
        for step in &figures.steps {
            let other = (step.total_s - step.forward_s - step.backward_s - step.step_s).max(0.0);
            let [fetched, stored] = [size(step.fetch_bytes), size(step.store_bytes)];
            let times =
                [step.total_s, step.forward_s, step.backward_s, step.step_s, other, step.exposed_s].map(seconds);
            table.row(&[[step.step.to_string()].as_slice(), &times, &[fetched, stored]].concat());
        }
        folded(&count(figures.steps.len(), "step"), figures.steps.len(), &table.end())
    })
}

pub(super) fn memory(report: &Report) -> String {
    by_rank(report, |_, Computed { figures, .. }| {
        if figures.memory.is_empty() {
            return paragraph("No memory was recorded.");
        }
        let mut table = Table::new("Memory", &["counter", "<what", "peak", "at the end"]);
        for peak in &figures.memory {
            let [most, last] = [peak.peak, peak.last].map(|bytes| size(bytes as u64));
            table.row(&[peak.counter.clone(), peak.series.clone(), most, last]);
        }
        table.end()
    })
}

pub(super) fn plan(report: &Report) -> String {
    by_rank(report, |rank, Computed { figures, .. }| {
        let mut text = String::new();
        for plan in &figures.plans {
            let error = |predicted: f64, measured: f64| format!("{:+.1} %", 100.0 * (predicted / measured - 1.0));
            let mut passes = Table::new(
                &format!(
                    "{}: budget {}, the smallest possible {}",
                    plan.name,
                    size(plan.budget_bytes),
                    size(plan.least_bytes)
                ),
                &["pass", "predicted", "measured", "error"],
            );
            let time = plan.pass_s.filter(|time| *time > 0.0);
            passes.row(&[
                "time".to_owned(),
                seconds(plan.predicted_pass_s),
                or_none(time, seconds),
                or_none(time, |time| error(plan.predicted_pass_s, time)),
            ]);
            let peak = plan.peak_bytes.filter(|peak| *peak > 0);
            passes.row(&[
                "peak".to_owned(),
                size(plan.predicted_peak_bytes),
                or_none(peak, size),
                or_none(peak, |peak| error(plan.predicted_peak_bytes as f64, peak as f64)),
            ]);
            let titles = [
                "layer",
                "<choice",
                "kept",
                "offloaded",
                "forward, predicted",
                "measured",
                "backward, predicted",
                "measured",
                "recomputes",
                "waits",
            ];
            let mut table = Table::new("Layer by layer", &titles);
            for layer in &plan.layers {
                table.row(&[
                    layer.name.clone().unwrap_or_else(|| layer.layer.to_string()),
                    layer.choice.clone(),
                    size(layer.kept_bytes),
                    size(layer.offloaded_bytes),
                    seconds(layer.predicted_forward_s),
                    or_none(layer.forward_s, seconds),
                    seconds(layer.predicted_backward_s),
                    or_none(layer.backward_s, seconds),
                    seconds(layer.recompute_s),
                    seconds(layer.stall_s),
                ]);
            }
            let layers = folded(&count(plan.layers.len(), "layer"), plan.layers.len(), &table.end());
            text += &format!("<div class=\"parts\">{}{layers}</div>", passes.end());
        }
        for part in rank.about.activations.iter().filter(|part| !part.explain.is_empty()) {
            let explain = format!("<pre tabindex=\"0\">{}</pre>", escape(&part.explain));
            text += &format!("<details><summary>{}, explained</summary>{explain}</details>", escape(&part.name));
        }
        if text.is_empty() { paragraph("No activations were offloaded under a plan.") } else { text }
    })
}

pub(super) fn settings(report: &Report) -> String {
    by_rank(report, |rank, _| {
        let about = &rank.about;
        let mut tables = String::new();
        let mut add = |title: String, fields: &Map<String, Value>| {
            if !fields.is_empty() {
                tables += &pairs(&title, fields);
            }
        };
        add("machine".to_owned(), &about.machine);
        for part in &about.optimizers {
            let class = if part.class.is_empty() { String::new() } else { format!(" ({})", part.class) };
            add(format!("optimizer {}{class}", part.name), &part.settings);
            add(format!("{}, last step", part.name), &part.stats);
        }
        for part in &about.overlaps {
            add(format!("overlap of {}", part.optimizer), &part.settings);
            add(format!("overlap of {}, last step", part.optimizer), &part.stats);
        }
        for part in &about.activations {
            add(format!("activations of {}", part.name), &part.settings);
            add(format!("activations of {}, sums", part.name), &part.stats);
        }
        for part in &about.sleepers {
            add(format!("sleeper {}", part.name), &part.stats);
        }
        for (number, save) in about.saves.iter().enumerate() {
            add(format!("save {}", number + 1), save);
        }
        format!("<div class=\"parts\">{tables}</div>")
    })
}

fn pairs(title: &str, fields: &Map<String, Value>) -> String {
    let mut table = Table::new(title, &["name", "value"]);
    for (name, value) in fields {
        table.row(&[name.clone(), shown(name, value)]);
    }
    table.end()
}

/// A value with the unit that its name ends with.
fn shown(name: &str, value: &Value) -> String {
    match (value, value.as_f64()) {
        (Value::Null, _) => "none".to_owned(),
        (Value::Bool(yes), _) => if *yes { "yes" } else { "no" }.to_owned(),
        (Value::String(text), _) => text.clone(),
        (_, Some(number)) if name == "bytes" || name.ends_with("_bytes") => {
            let exact = if number >= 10_000.0 { format!(" ({number})") } else { String::new() };
            format!("{}{exact}", size(number.max(0.0) as u64))
        }
        (_, Some(number)) if name == "seconds" || name.ends_with("_s") => seconds(number),
        (_, Some(number)) if name.ends_with("_ns") => seconds(number / 1e9),
        (_, Some(number)) if name.ends_with("_gbps") => gbps(number),
        (other, _) => other.to_string(),
    }
}
