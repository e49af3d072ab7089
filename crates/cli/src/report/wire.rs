//! The wire: bytes and rates of each direction, compared with what it can carry.

use serde::Serialize;

use super::intervals::Intervals;
use super::trace::{Limit, Rank, Span};

/// Categories of copies to the device, and from it.
pub(super) const FETCHES: [&str; 3] = ["fetch", "activation_fetch", "wake"];
pub(super) const STORES: [&str; 3] = ["store", "activation_store", "sleep"];

/// The bytes of a span that is a copy of one of these kinds.
pub(super) fn copied(span: &Span, kinds: &[&str]) -> Option<u64> {
    span.bytes.filter(|_| kinds.contains(&span.category.as_str()))
}

/// The wire over the whole trace.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Wire {
    pub(crate) limit: Option<Limit>,
    pub(crate) fetch: Direction,
    pub(crate) store: Direction,
}

/// One direction of the wire.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Direction {
    pub(crate) bytes: u64,
    pub(crate) busy_s: f64,
    /// While it is busy.
    pub(crate) gbps: Option<f64>,
    /// Of what the limit allows in the time that it is busy.
    pub(crate) share_while_busy: Option<f64>,
    /// Of what the limit allows in the time of the trace.
    pub(crate) share: Option<f64>,
}

impl Wire {
    /// `busy` has the times in which copies to the device, and from it, were under way; `seconds` is the whole time.
    pub(super) fn new(rank: &Rank, busy: [&Intervals; 2], limit: Option<Limit>, seconds: f64) -> Self {
        let [fetch, store] = busy;
        let both_s = fetch.and(store).seconds();
        let direction = |kinds: &[&str], busy: &Intervals, alone: fn(Limit) -> f64| {
            let bytes: u64 = rank.spans.iter().filter_map(|span| copied(span, kinds)).sum();
            let busy_s = busy.seconds();
            let allowed = limit.map(|limit| 1e9 * (alone(limit) * (busy_s - both_s) + limit.both_gbps * both_s));
            Direction {
                bytes,
                busy_s,
                gbps: (busy_s > 0.0).then(|| bytes as f64 / busy_s / 1e9),
                share_while_busy: allowed.filter(|allowed| *allowed > 0.0).map(|allowed| bytes as f64 / allowed),
                share: limit.filter(|_| seconds > 0.0).map(|limit| bytes as f64 / (1e9 * alone(limit) * seconds)),
            }
        };
        Self {
            limit,
            fetch: direction(&FETCHES, fetch, |limit| limit.fetch_gbps),
            store: direction(&STORES, store, |limit| limit.store_gbps),
        }
    }
}
