//! A plan as text.

use std::fmt;
use std::fmt::Write as _;

use super::{ActivationPlan, LayerPlan};

fn size(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes >= 1e8 => format!("{:.2} GiB", bytes / f64::from(1 << 30)),
        bytes => format!("{:.2} MiB", bytes / f64::from(1 << 20)),
    }
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

fn layer_line(number: usize, layer: &LayerPlan) -> String {
    let mut text = format!(
        "layer {number}: {}; {} kept, {} offloaded; forward {:.1} ms, backward {:.1} ms",
        layer.word,
        size(layer.kept_bytes),
        size(layer.offloaded_bytes),
        ms(layer.forward_ns),
        ms(layer.backward_ns)
    );
    if layer.recompute_ns > 0 {
        let _ = write!(text, ", {:.1} of them recomputing", ms(layer.recompute_ns));
    }
    if layer.stall_ns > 0 {
        let _ = write!(text, ", {:.1} waiting", ms(layer.stall_ns));
    }
    text
}

impl ActivationPlan {
    /// The plan as text: one line for the pass and one for each layer.
    pub fn explain(&self) -> String {
        let mut text = format!(
            "budget {} (minimum {}): {:.1} ms a pass, {} at the peak, in {}\n",
            size(self.budget_bytes),
            size(self.least_bytes),
            ms(self.pass_ns),
            size(self.peak_bytes),
            self.peak_at
        );
        for (number, layer) in self.layers.iter().enumerate() {
            text.push_str(&layer_line(number, layer));
            text.push('\n');
        }
        text
    }
}

impl fmt::Display for ActivationPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.explain())
    }
}
