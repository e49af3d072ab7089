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
    /// Forward passes in one step.
    pub(crate) micro_batches: f64,
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
            micro_batches: step.micro_batches,
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
    // Of several micro-batches only the last backward and the next forward can hide updates.
    let micro_batches = facts.micro_batches.max(1.0);
    let [forward, backward] = [(facts.idle_forward_s, facts.forward_s), (facts.idle_backward_s, facts.backward_s)]
        .map(|(idle_s, all_s)| (idle_s / micro_batches, all_s / micro_batches));
    // With a norm, and on the host, updates begin when all gradients are known.
    let is_late = optimizer.clips || optimizer.placement != "stream";
    let (pass, (idle_s, pass_s), room_s) =
        if is_late { ("forward", forward, forward.0) } else { ("backward", backward, forward.0 + backward.0) };
    let hidden_s = facts.step_s.min(room_s);
    (hidden_s >= WORTH * facts.total_s).then(|| Advice {
        about: "overlap_step",
        text: format!(
            "The wire is idle for {} of each {pass}: overlap_step would hide about {} per step.",
            seconds(idle_s),
            seconds(hidden_s)
        ),
        because: format!(
            "the step takes {} of {}, and no copy is under way in {} of {} of {pass}",
            seconds(facts.step_s),
            seconds(facts.total_s),
            seconds(idle_s),
            seconds(pass_s)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A plain streamed step of 500 ms after 100 ms of forward and 200 ms of backward, with an idle wire in both.
    fn plain() -> Facts {
        Facts {
            total_s: 0.8,
            step_s: 0.5,
            forward_s: 0.1,
            backward_s: 0.2,
            idle_forward_s: 0.1,
            idle_backward_s: 0.18,
            micro_batches: 1.0,
            fetch_gbps: Some(50.0),
            optimizer: Some(OptimizerFacts {
                placement: "stream".to_owned(),
                slots: Some(4),
                chunk_bytes: Some(16 << 20),
                ..OptimizerFacts::default()
            }),
            ..Facts::default()
        }
    }

    /// The same, overlapped, with 100 ms of waits for one reason.
    fn overlapped(reason: &str) -> Facts {
        let mut facts = Facts { step_s: 0.0, exposed_s: 0.1, waits: vec![(reason.to_owned(), 0.1)], ..plain() };
        set(&mut facts, |optimizer| optimizer.overlapped = true);
        facts
    }

    fn set(facts: &mut Facts, change: impl FnOnce(&mut OptimizerFacts)) {
        change(facts.optimizer.as_mut().unwrap());
    }

    fn about(facts: &Facts) -> Vec<&'static str> {
        advise(facts).iter().map(|advice| advice.about).collect()
    }

    /// The one sentence, and its figures.
    fn said(facts: &Facts) -> (String, String) {
        let [advice] = advise(facts).try_into().unwrap();
        (advice.text, advice.because)
    }

    #[test]
    fn an_idle_wire_under_backward_can_hide_the_step() {
        let (text, because) = said(&plain());
        assert_eq!(
            text,
            "The wire is idle for 180 ms of each backward: overlap_step would hide about 280 ms per step."
        );
        assert_eq!(
            because,
            "the step takes 500 ms of 800 ms, and no copy is under way in 180 ms of 200 ms of backward"
        );
        assert!((advise(&plain())[0].seconds - 0.28).abs() < 1e-9);
        let short = Facts { step_s: 0.02, ..plain() };
        assert!(said(&short).0.ends_with("would hide about 20.0 ms per step."));
    }

    #[test]
    fn with_a_norm_or_on_the_host_only_the_next_forward_hides() {
        for change in
            [|o: &mut OptimizerFacts| o.clips = true, |o: &mut OptimizerFacts| o.placement = "host".to_owned()]
        {
            let mut facts = plain();
            set(&mut facts, change);
            let text = "The wire is idle for 100 ms of each forward: overlap_step would hide about 100 ms per step.";
            assert_eq!(said(&facts).0, text);
        }
    }

    #[test]
    fn of_several_micro_batches_one_hides() {
        let facts = Facts { micro_batches: 4.0, ..plain() };
        assert!(said(&facts).0.ends_with("would hide about 70.0 ms per step."), "{}", said(&facts).0);
    }

    #[test]
    fn overlap_is_not_advised_where_it_is_or_where_it_hides_nothing() {
        let mut there = plain();
        set(&mut there, |optimizer| optimizer.overlapped = true);
        let busy = Facts { idle_forward_s: 0.0, idle_backward_s: 0.001, ..plain() };
        let resident = Facts { optimizer: None, ..plain() };
        for facts in [there, busy, resident, Facts { step_s: 0.001, ..plain() }] {
            assert_eq!(about(&facts), ["nothing"], "{facts:?}");
        }
    }

    #[test]
    fn waits_for_slots_ask_for_more_slots() {
        let (text, because) = said(&Facts { share_while_busy: Some(0.6), ..overlapped("slot") });
        assert_eq!(text, "100 % of the exposed time waits for a slot: slots=8 or a larger chunk_bytes.");
        assert_eq!(
            because,
            "100 ms of 100 ms exposed per step; now slots=4 and chunk_bytes=16777216 (16.8 MB); while it is busy the wire is at \
             60 % of its limit"
        );
        assert!(said(&overlapped("slot")).1.ends_with("no limit of the wire is known"));
    }

    #[test]
    fn a_full_wire_does_not_want_more_slots() {
        let full = Facts { share_while_busy: Some(0.97), ..overlapped("slot") };
        assert_eq!(
            said(&full).0,
            "100 % of the exposed time waits for a slot because the wire is full: resident_bytes keeps state off it."
        );
        assert_eq!(about(&full), ["wire"]);
        assert!(said(&full).1.ends_with("while it is busy the wire is at 97 % of its limit"));
    }

    #[test]
    fn waits_for_weights_are_what_resident_state_saves() {
        let (text, because) = said(&overlapped("weights"));
        // 0.1 s at 50 GB/s are 5e9 bytes, 4.66 GiB.
        assert_eq!(
            text,
            "resident_bytes of 4.75 GiB would keep the state that the next forward needs first on the GPU: 100 % of the exposed \
             time waits for weights."
        );
        assert_eq!(because, "100 ms of 100 ms exposed per step, in which the wire fetches 4.75 GiB at 50.0 GB/s");
        let mut more = overlapped("weights");
        set(&mut more, |optimizer| optimizer.resident_bytes = 2 << 30);
        assert!(said(&more).0.starts_with("resident_bytes of 6.75 GiB would keep the state"));
    }

    #[test]
    fn resident_state_is_no_more_than_what_is_free() {
        let some = Facts { free_bytes: Some((2 << 30) + 5), ..overlapped("weights") };
        assert!(said(&some).0.starts_with("resident_bytes of 2 GiB would keep part of the state"), "{}", said(&some).0);
        assert!(said(&some).1.ends_with("2 GiB of GPU memory are free at the peak"));
        assert_eq!(about(&Facts { free_bytes: Some(100 << 20), ..overlapped("weights") }), ["nothing"]);
        assert_eq!(about(&Facts { fetch_gbps: None, ..overlapped("weights") }), ["nothing"]);
    }

    #[test]
    fn each_other_reason_has_its_sentence() {
        for (reason, name, words) in [
            ("save", "snapshot_budget_bytes", "waits for a save: a larger snapshot_budget_bytes of async_save"),
            ("activation", "activations", "waits for activations: a larger budget_bytes, or a smaller fraction"),
            ("sleep", "lazy_wake", "waits for a sleeping model: wake(lazy=True)"),
        ] {
            let facts = overlapped(reason);
            assert_eq!(about(&facts), [name]);
            assert!(said(&facts).0.starts_with(&format!("100 % of the exposed time {words}")), "{}", said(&facts).0);
            assert_eq!(said(&facts).1, "100 ms of 100 ms exposed per step");
        }
    }

    #[test]
    fn gradients_can_be_copied_early_on_the_host_only() {
        let mut facts = Facts { step_s: 0.0, exposed_s: 0.1, waits: vec![("gradients".to_owned(), 0.1)], ..plain() };
        assert_eq!(about(&facts), ["nothing"]);
        set(&mut facts, |optimizer| optimizer.placement = "hybrid".to_owned());
        assert_eq!(about(&facts), ["last_backward"]);
        set(&mut facts, |optimizer| optimizer.overlapped = true);
        assert_eq!(about(&facts), ["nothing"]);
    }

    #[test]
    fn small_reasons_have_no_sentence() {
        let shares = vec![("slot".to_owned(), 0.084), ("save".to_owned(), 0.016)];
        let facts = Facts { waits: shares, ..overlapped("slot") };
        assert_eq!(about(&facts), ["slots"]);
        let tiny = Facts { exposed_s: 0.001, waits: vec![("slot".to_owned(), 0.001)], ..overlapped("slot") };
        assert_eq!(about(&tiny), ["nothing"]);
    }

    #[test]
    fn the_sentence_about_the_most_time_is_first() {
        let waits = vec![("slot".to_owned(), 0.06), ("save".to_owned(), 0.04)];
        let facts = Facts { exposed_s: 0.1, waits, ..plain() };
        assert_eq!(about(&facts), ["overlap_step", "slots", "snapshot_budget_bytes"]);
        assert_eq!(about(&Facts { idle_forward_s: 0.05, idle_backward_s: 0.0, ..facts })[0], "slots");
    }

    #[test]
    fn where_nothing_is_exposed_it_says_so() {
        let hidden = Facts { exposed_s: 0.0002, total_s: 0.65, ..overlapped("other") };
        assert_eq!(said(&hidden).0, "Nothing is exposed: of 650 ms per step, 0.20 ms are waits.");
        assert_eq!(said(&hidden).1, "waits are 0.03 % of a step");
        let unknown = overlapped("other");
        assert_eq!(said(&unknown).0, "12 % of a step are waits, and no setting that this report knows shortens them.");
    }

    #[test]
    fn a_trace_of_the_cpu_says_what_it_is() {
        let cpu = Facts { on_cpu: true, ..overlapped("slot") };
        assert_eq!(about(&cpu), ["cpu"]);
        assert!(said(&cpu).0.contains("its times say nothing about a GPU"));
    }
}
