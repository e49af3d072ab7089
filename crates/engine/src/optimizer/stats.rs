//! Statistics of an optimizer's last step.

use serde::Serialize;

use super::host_lane::HostStats;
use crate::flow::RunStats;

/// What the last step did, and what the optimizer holds.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct OptimizerStats {
    /// The streamed part.
    pub streamed: RunStats,
    /// Bytes of the ring on the device. Each optimizer that shares a ring reports all of it.
    pub device_bytes: u64,
    /// Bytes of pinned host memory: state, and where there are any the host's ring and gradients. Each optimizer that
    /// shares the host's ring reports all of it.
    pub pinned_bytes: u64,
    /// How often the step waited for a save, and for how long.
    pub save_stalls: u64,
    /// The time of these waits.
    pub save_stall_ns: u64,
    /// The host's part, for placements that have one.
    pub host: Option<HostReport>,
}

/// The host's part of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct HostReport {
    /// What it did.
    pub stats: HostStats,
    /// Its threads.
    pub threads: u64,
    /// The share of the state, by bytes, that it updated.
    pub fraction: f64,
    /// The share that stays: the requested one, or the one that "auto" has chosen.
    pub settled: Option<f64>,
    /// Time from the beginning of the step until the device's part had submitted its last chunk.
    pub device_ns: u64,
}

/// A number with its kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Number {
    /// A count.
    Count(u64),
    /// Seconds, a rate or a share.
    Real(f64),
    /// Yes or no.
    Flag(bool),
}

impl OptimizerStats {
    /// All numbers by name, as users read them: seconds, bytes and GB/s.
    pub fn named(&self) -> Vec<(&'static str, Number)> {
        use Number::{Count, Flag, Real};
        let seconds = |ns: u64| Real(ns as f64 / 1e9);
        let rate = |bytes: u64, ns: u64| Real(if ns == 0 { 0.0 } else { bytes as f64 / ns as f64 });
        let run = &self.streamed;
        let mut named = vec![
            ("fetch_s", seconds(run.fetch_ns)),
            ("update_s", seconds(run.update_ns)),
            ("store_s", seconds(run.store_ns)),
            ("fetch_bytes", Count(run.fetch_bytes)),
            ("store_bytes", Count(run.store_bytes)),
            ("fetch_gbps", rate(run.fetch_bytes, run.fetch_ns)),
            ("store_gbps", rate(run.store_bytes, run.store_ns)),
            ("device_bytes", Count(self.device_bytes)),
            ("pinned_bytes", Count(self.pinned_bytes)),
            ("chunks", Count(run.chunks)),
            ("stalls", Count(run.stalls)),
            ("stall_s", seconds(run.stall_ns)),
            ("save_stalls", Count(self.save_stalls)),
            ("save_stall_s", seconds(self.save_stall_ns)),
        ];
        if let Some(host) = &self.host {
            named.extend([
                ("host_fraction", Real(host.fraction)),
                ("host_settled", Flag(host.settled.is_some())),
                ("host_threads", Count(host.threads)),
                ("host_chunks", Count(host.stats.chunks)),
                ("host_state_bytes", Count(host.stats.state_bytes)),
                ("host_down_bytes", Count(host.stats.down_bytes)),
                ("host_up_bytes", Count(host.stats.up_bytes)),
                ("host_s", seconds(host.stats.run_ns)),
                ("host_wire_wait_s", seconds(host.stats.wire_wait_ns)),
                ("host_update_wait_s", seconds(host.stats.update_wait_ns)),
                ("device_s", seconds(host.device_ns)),
            ]);
        }
        named
    }
}
