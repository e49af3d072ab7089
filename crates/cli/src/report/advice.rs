//! What could be changed, in sentences, each with the figures that it follows from. Pure: the same figures give the same
//! sentences.

use serde::Serialize;
use serde_json::Value;

use super::figures::Figures;
use super::numbers::{gbps, gib, percent, seconds, size};
use super::trace::{About, Part};

/// At most so many sentences.
const MOST: usize = 4;
/// Less than this share of a step is not worth a sentence.
const WORTH: f64 = 0.01;
/// A reason with at least this share of the exposed time gets a sentence.
const MAIN: f64 = 0.2;
/// From this share of its limit on, more copies at once do not help the wire.
const FULL: f64 = 0.9;
/// Suggested memory is a multiple of this.
const STEP_BYTES: u64 = 256 << 20;

/// One sentence.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Advice {
    /// What it is about, for programs.
    pub(crate) about: &'static str,
    pub(crate) text: String,
    /// The figures that it follows from.
    pub(crate) because: String,
    /// Seconds of each step that it is about.
    pub(crate) seconds: f64,
}

/// What the sentences follow from; times are of one step.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Facts {
    pub(crate) on_cpu: bool,
    pub(crate) total_s: f64,
    pub(crate) step_s: f64,
    pub(crate) exposed_s: f64,
    pub(crate) forward_s: f64,
    pub(crate) backward_s: f64,
    pub(crate) idle_forward_s: f64,
    pub(crate) idle_backward_s: f64,
    /// Seconds by reason, the longest first.
    pub(crate) waits: Vec<(String, f64)>,
    pub(crate) fetch_gbps: Option<f64>,
    /// The larger share of both directions, while they are busy.
    pub(crate) share_while_busy: Option<f64>,
    /// The optimizer whose state goes over the wire, if there is one.
    pub(crate) optimizer: Option<OptimizerFacts>,
    /// Device memory that nothing used at the peak.
    pub(crate) free_bytes: Option<u64>,
}

/// How an optimizer is set.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct OptimizerFacts {
    pub(crate) placement: String,
    pub(crate) overlapped: bool,
    pub(crate) clips: bool,
    pub(crate) slots: Option<u64>,
    pub(crate) chunk_bytes: Option<u64>,
    pub(crate) resident_bytes: u64,
}

impl Facts {
    /// The facts of a rank; `None` if it has no whole step.
    pub(crate) fn new(about: &About, figures: &Figures) -> Option<Self> {
        let step = figures.typical.as_ref()?;
        let mut waits: Vec<(String, f64)> = step.waits.clone().into_iter().collect();
        waits.sort_by(|a, b| b.1.total_cmp(&a.1));
        let text = |name: &str| about.machine.get(name).and_then(Value::as_str).unwrap_or_default();
        let used = figures.peak("device bytes", "reserved").or(figures.peak("device bytes", "allocated"));
        let memory = about.machine.get("device_bytes").and_then(Value::as_u64);
        let on_cpu = text("device").starts_with("cpu");
        Some(Self {
            on_cpu,
            total_s: step.total_s,
            step_s: step.step_s,
            exposed_s: step.exposed_s,
            forward_s: step.forward_s,
            backward_s: step.backward_s,
            idle_forward_s: step.idle_forward_s,
            idle_backward_s: step.idle_backward_s,
            waits,
            fetch_gbps: figures.wire.fetch.gbps,
            share_while_busy: [&figures.wire.fetch, &figures.wire.store]
                .iter()
                .filter_map(|direction| direction.share_while_busy)
                .max_by(f64::total_cmp),
            optimizer: about.optimizers.iter().find_map(|part| OptimizerFacts::new(part, about)),
            free_bytes: memory.zip(used).map(|(memory, used)| memory.saturating_sub(used as u64)).filter(|_| !on_cpu),
        })
    }
}

impl OptimizerFacts {
    fn new(part: &Part, about: &About) -> Option<Self> {
        let setting = |name: &str| part.settings.get(name).filter(|value| !value.is_null());
        let number = |name: &str| setting(name).and_then(Value::as_u64);
        let placement = setting("placement").and_then(Value::as_str).unwrap_or("stream");
        (placement != "resident").then(|| Self {
            placement: placement.to_owned(),
            overlapped: about.overlaps.iter().any(|overlap| overlap.optimizer == part.name),
            clips: setting("max_grad_norm").is_some(),
            slots: number("slots"),
            chunk_bytes: number("chunk_bytes"),
            resident_bytes: number("resident_bytes").unwrap_or(0),
        })
    }
}

/// The sentences, the one about the most time first. There is always one.
pub(crate) fn advise(facts: &Facts) -> Vec<Advice> {
    if facts.on_cpu {
        return vec![cpu(facts)];
    }
    let mut found: Vec<Advice> = overlap(facts).into_iter().collect();
    for (reason, waited) in &facts.waits {
        if *waited >= MAIN * facts.exposed_s && *waited >= WORTH * facts.total_s {
            found.extend(wait(facts, reason, *waited));
        }
    }
    found.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    found.truncate(MOST);
    if found.is_empty() {
        found.push(nothing(facts));
    }
    found
}

fn cpu(facts: &Facts) -> Advice {
    Advice {
        about: "cpu",
        text: "This trace is of the CPU backend, where passes, copies and updates share the same cores: it shows the \
               order of the work, and its times say nothing about a GPU."
            .to_owned(),
        because: format!("a step takes {}, of which {} are waits", seconds(facts.total_s), seconds(facts.exposed_s)),
        seconds: 0.0,
    }
}

/// A step at the end that could be hidden under passes in which the wire is idle.
fn overlap(facts: &Facts) -> Option<Advice> {
    let optimizer = facts.optimizer.as_ref().filter(|optimizer| !optimizer.overlapped)?;
    // With a norm, and on the host, updates begin when all gradients are known.
    let late = optimizer.clips || optimizer.placement != "stream";
    let (pass, idle_s) = match late {
        true => ("the forward", facts.idle_forward_s),
        false => ("backward", facts.idle_backward_s),
    };
    let room_s = if late { facts.idle_forward_s } else { facts.idle_forward_s + facts.idle_backward_s };
    let hidden_s = facts.step_s.min(room_s);
    (hidden_s >= WORTH * facts.total_s).then(|| Advice {
        about: "overlap_step",
        text: format!("The wire is idle in {pass}: overlap_step would hide about {} per step.", seconds(hidden_s)),
        because: format!(
            "the step takes {} of {}, and no copy is under way in {} of {}",
            seconds(facts.step_s),
            seconds(facts.total_s),
            seconds(idle_s),
            if late {
                format!("{} of forward", seconds(facts.forward_s))
            } else {
                format!("{} of backward", seconds(facts.backward_s))
            }
        ),
        seconds: hidden_s,
    })
}

/// What to do about waits for one reason.
fn wait(facts: &Facts, reason: &str, waited: f64) -> Option<Advice> {
    let share = format!("{} of the exposed time", percent(waited / facts.exposed_s));
    let optimizer = facts.optimizer.as_ref();
    let per_step = format!("{} of {} exposed per step", seconds(waited), seconds(facts.exposed_s));
    let (about, text, because) = match reason {
        "slot" => slot(facts, optimizer?, &share, per_step),
        "weights" => weights(facts, optimizer?, waited, &share, per_step)?,
        "gradients" if optimizer.is_some_and(|optimizer| !optimizer.overlapped && optimizer.placement != "stream") => (
            "last_backward",
            format!("{share} waits for gradients: last_backward() copies them to the host while backward runs."),
            per_step,
        ),
        "save" => (
            "snapshot_budget_bytes",
            format!(
                "{share} waits for a save: a larger snapshot_budget_bytes of async_save lets steps run ahead of it."
            ),
            per_step,
        ),
        "activation" => (
            "activations",
            format!(
                "{share} waits for activations: a larger budget_bytes, or a smaller fraction, moves fewer of them."
            ),
            per_step,
        ),
        "sleep" => (
            "lazy_wake",
            format!(
                "{share} waits for a sleeping model: wake(lazy=True) starts its first layer before the last arrives."
            ),
            per_step,
        ),
        _ => return None,
    };
    Some(Advice { about, text, because, seconds: waited })
}

fn slot(facts: &Facts, optimizer: &OptimizerFacts, share: &str, per_step: String) -> (&'static str, String, String) {
    if let Some(full) = facts.share_while_busy.filter(|share| *share >= FULL) {
        let how = if optimizer.overlapped { "" } else { "overlap_step hides it, or " };
        let text =
            format!("{share} waits for a slot because the wire is full: {how}resident_bytes keeps state off it.");
        return ("wire", text, format!("{per_step}; while it is busy the wire is at {} of its limit", percent(full)));
    }
    let slots = optimizer.slots.map_or("more slots".to_owned(), |slots| format!("slots={}", 2 * slots));
    let now = match (optimizer.slots, optimizer.chunk_bytes) {
        (Some(slots), Some(bytes)) => format!("; now slots={slots} and chunk_bytes={bytes} ({})", size(bytes)),
        _ => String::new(),
    };
    let rate = facts.share_while_busy.map_or("; no limit of the wire is known".to_owned(), |share| {
        format!("; while it is busy the wire is at {} of its limit", percent(share))
    });
    ("slots", format!("{share} waits for a slot: {slots} or a larger chunk_bytes."), format!("{per_step}{now}{rate}"))
}

/// How much state would have to stay so that nothing waits for weights: what the wire carries in that time.
fn weights(
    facts: &Facts,
    optimizer: &OptimizerFacts,
    waited: f64,
    share: &str,
    per_step: String,
) -> Option<(&'static str, String, String)> {
    let rate = facts.fetch_gbps?;
    let wanted = ((waited * rate * 1e9) as u64).next_multiple_of(STEP_BYTES);
    let room = facts.free_bytes.map(|free| free / STEP_BYTES * STEP_BYTES);
    let more = room.map_or(wanted, |room| wanted.min(room));
    if more == 0 {
        return None;
    }
    let what = if more < wanted { "part of the state" } else { "the state" };
    let free =
        facts.free_bytes.map_or(String::new(), |free| format!("; {} of GPU memory are free at the peak", gib(free)));
    let text = format!(
        "resident_bytes of {} would keep {what} that the next forward needs first on the GPU: {share} waits for weights.",
        gib(optimizer.resident_bytes + more)
    );
    Some((
        "resident_bytes",
        text,
        format!("{per_step}, in which the wire fetches {} at {}{free}", gib(wanted), gbps(rate)),
    ))
}

fn nothing(facts: &Facts) -> Advice {
    let share = if facts.total_s > 0.0 { facts.exposed_s / facts.total_s } else { 0.0 };
    let text = if share < WORTH {
        format!("Nothing is exposed: of {} per step, {} are waits.", seconds(facts.total_s), seconds(facts.exposed_s))
    } else {
        format!("{} of a step are waits, and no setting that this report knows shortens them.", percent(share))
    };
    Advice { about: "nothing", text, because: format!("waits are {} of a step", percent(share)), seconds: 0.0 }
}
