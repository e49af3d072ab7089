//! Chunks shared out between the device and the host, both at work at once.
//!
//! The device takes chunks from the front of the list, the host from its back. A fixed share says beforehand where they
//! meet. "Auto" lets them meet where they meet for a few steps, which is where both finish together, and tries each alone
//! for one: where both need the same thing, the wire or the memory, sharing can be slower than either. The best stays.
//! Where a chunk is updated changes no bit of it: one arithmetic serves both.

use std::ops::Range;
use std::time::Instant;

use forebay_device::{HostOptions, Stream};

use super::host::Part;
use super::{Binding, HostLane, PlacedAdamW, StepInputs, payload_bytes};
use crate::error::{Error, Result};
use crate::pool::Pool;
use crate::sync::{Mutex, lock};

/// How much of the state the host updates, by bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HostShare {
    /// This fraction, from 0 to 1.
    Fixed(f64),
    /// What makes both ends finish together, found in the first steps.
    Auto,
}

/// What one of the first steps tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trial {
    /// Both, until they meet.
    Meet,
    /// The device alone.
    Stream,
    /// The host alone.
    Host,
}

/// What the first steps try. The very first makes pages, caches and clocks warm, and does not count.
const TRIALS: [Trial; 6] = [Trial::Meet, Trial::Meet, Trial::Stream, Trial::Host, Trial::Meet, Trial::Meet];

/// One alone must be faster than both by this much to be preferred: it was tried only once.
const PREFERENCE: f64 = 0.98;

/// The list of chunks of one step, taken from both ends.
#[derive(Debug)]
pub(crate) struct Claims {
    /// Part, chunk and bytes of each.
    order: Vec<(usize, usize, u64)>,
    ends: Mutex<Ends>,
}

#[derive(Debug)]
struct Ends {
    /// The next one for the device, and the last it may take plus one.
    front: usize,
    front_limit: usize,
    /// The last one taken by the host, and the first it may take.
    back: usize,
    back_limit: usize,
}

impl Claims {
    fn new(order: Vec<(usize, usize, u64)>, share: HostShare) -> Self {
        let n = order.len();
        let (front_limit, back_limit) = match share {
            HostShare::Auto => (n, 0),
            HostShare::Fixed(fraction) => {
                let at = meeting_point(&order, fraction);
                (at, at)
            }
        };
        Self { order, ends: Mutex::new(Ends { front: 0, front_limit, back: n, back_limit }) }
    }

    /// The next chunk for the device.
    pub(crate) fn front(&self) -> Option<(usize, usize)> {
        let mut ends = lock(&self.ends);
        let at = ends.front;
        if at >= ends.front_limit.min(ends.back) {
            return None;
        }
        ends.front += 1;
        Some((self.order[at].0, self.order[at].1))
    }

    /// The next chunks for the host: consecutive ones of one part, as many as fit.
    pub(crate) fn back(&self, fits: impl Fn(usize, &[usize]) -> bool) -> Option<(usize, Range<usize>)> {
        let mut ends = lock(&self.ends);
        let mut taken: Option<(usize, Range<usize>)> = None;
        while ends.back > ends.back_limit.max(ends.front) {
            let (part, chunk, _) = self.order[ends.back - 1];
            let more = match &taken {
                None => chunk..chunk + 1,
                Some((same, range)) if *same == part && chunk + 1 == range.start => chunk..range.end,
                Some(_) => break,
            };
            if taken.is_some() && !fits(part, &more.clone().collect::<Vec<_>>()) {
                break;
            }
            taken = Some((part, more));
            ends.back -= 1;
        }
        taken
    }

    /// No more chunks for either: something failed.
    fn close(&self) {
        let mut ends = lock(&self.ends);
        (ends.front_limit, ends.back_limit) = (0, self.order.len());
    }

    /// The part of the bytes that the host took.
    fn host_fraction(&self) -> f64 {
        let back = lock(&self.ends).back;
        let bytes = |chunks: &[(usize, usize, u64)]| chunks.iter().map(|chunk| chunk.2).sum::<u64>();
        bytes(&self.order[back..]) as f64 / bytes(&self.order).max(1) as f64
    }
}

/// The first chunk of the host's, so that its bytes come nearest to the fraction.
fn meeting_point(order: &[(usize, usize, u64)], fraction: f64) -> usize {
    let total: u64 = order.iter().map(|chunk| chunk.2).sum();
    let (wanted, mut taken) = (total as f64 * fraction, 0.0);
    for (at, chunk) in order.iter().enumerate().rev() {
        let bytes = chunk.2 as f64;
        if taken + bytes / 2.0 > wanted {
            return at + 1;
        }
        taken += bytes;
    }
    0
}

#[derive(Debug, Default)]
struct Measured {
    /// The host's fraction and the seconds of each trial.
    tried: Vec<(f64, f64)>,
    settled: Option<f64>,
    last: f64,
}

/// The best of all trials.
fn choose(tried: &[(f64, f64)]) -> f64 {
    let of = |wanted: Trial| {
        let all = TRIALS.iter().zip(tried).skip(1);
        let mut found: Vec<(f64, f64)> = all.filter(|(trial, _)| **trial == wanted).map(|(_, found)| *found).collect();
        found.sort_by(|a, b| a.1.total_cmp(&b.1));
        found.get(found.len() / 2).copied().unwrap_or((0.0, f64::INFINITY))
    };
    let (meeting, both) = of(Trial::Meet);
    let (stream, host) = (of(Trial::Stream).1, of(Trial::Host).1);
    match (stream < both * PREFERENCE, host < both * PREFERENCE) {
        (true, _) if stream <= host => 0.0,
        (_, true) => 1.0,
        _ => meeting,
    }
}

/// A step on the host, or on host and device at once.
#[derive(Debug)]
pub struct Hybrid {
    lane: HostLane,
    share: HostShare,
    measured: Mutex<Measured>,
}

impl Hybrid {
    /// Starts the host's threads and pins its ring.
    pub fn new(pool: &Pool, share: HostShare, options: &HostOptions, slots: usize, slot_bytes: u64) -> Result<Self> {
        if let HostShare::Fixed(fraction) = share
            && !(0.0..=1.0).contains(&fraction)
        {
            return Err(Error::InvalidOption {
                option: "host_fraction",
                value: fraction.to_string(),
                remedy: "give a number from 0.0 to 1.0, or \"auto\"".to_owned(),
            });
        }
        let lane = HostLane::new(pool, options, slots, slot_bytes)?;
        Ok(Self { lane, share, measured: Mutex::default() })
    }

    /// The host's threads, ring and statistics.
    pub fn lane(&self) -> &HostLane {
        &self.lane
    }

    /// The part of the bytes that the host updated in the last step.
    pub fn last_fraction(&self) -> f64 {
        lock(&self.measured).last
    }

    /// The fraction that stays: the one asked for, or the one that "auto" has settled on.
    pub fn settled_fraction(&self) -> Option<f64> {
        match self.share {
            HostShare::Fixed(fraction) => Some(fraction),
            HostShare::Auto => lock(&self.measured).settled,
        }
    }

    /// Updates every tensor that has a gradient and returns when the last weights are on their way. `landed` has the
    /// gradients that came down before, by store and tensor; it may be empty.
    pub fn run(
        &self,
        stores: &[PlacedAdamW],
        tensors: &[Vec<Binding>],
        landed: &[Vec<Option<forebay_device::Region>>],
        inputs: &StepInputs<'_>,
        compute: &Stream,
    ) -> Result<()> {
        let parts: Vec<Part<'_>> = stores
            .iter()
            .zip(tensors)
            .enumerate()
            .map(|(i, (store, tensors))| Part {
                state: store.state(),
                tensors,
                landed: landed.get(i).map_or(&[], Vec::as_slice),
            })
            .collect();
        let order = parts.iter().enumerate().flat_map(|(i, part)| {
            let plan = part.state.plan();
            let bytes = plan.chunks().iter().map(|chunk| payload_bytes(plan, chunk, part.tensors));
            bytes.enumerate().filter(|&(_, bytes)| bytes > 0).map(move |(chunk, bytes)| (i, chunk, bytes))
        });
        let claims = Claims::new(order.collect(), self.next_share(stores));
        let start = Instant::now();
        self.lane.begin(inputs, compute)?;
        let outcome = self.run_both(stores, &parts, &claims, inputs, compute);
        // Also after a failure: weights may be on their way up.
        outcome.and(self.lane.end(compute))?;
        self.note(claims.host_fraction(), start.elapsed().as_secs_f64());
        Ok(())
    }

    fn next_share(&self, stores: &[PlacedAdamW]) -> HostShare {
        if stores.iter().any(|store| store.streamed().is_none()) {
            return HostShare::Fixed(1.0);
        }
        if let Some(fraction) = self.settled_fraction() {
            return HostShare::Fixed(fraction);
        }
        match TRIALS.get(lock(&self.measured).tried.len()) {
            Some(Trial::Stream) => HostShare::Fixed(0.0),
            Some(Trial::Host) => HostShare::Fixed(1.0),
            _ => HostShare::Auto,
        }
    }

    fn note(&self, fraction: f64, seconds: f64) {
        let mut measured = lock(&self.measured);
        measured.last = fraction;
        if self.share != HostShare::Auto || measured.settled.is_some() {
            return;
        }
        measured.tried.push((fraction, seconds));
        if measured.tried.len() == TRIALS.len() {
            measured.settled = Some(choose(&measured.tried));
        }
    }

    fn run_both(
        &self,
        stores: &[PlacedAdamW],
        parts: &[Part<'_>],
        claims: &Claims,
        inputs: &StepInputs<'_>,
        compute: &Stream,
    ) -> Result<()> {
        let pipeline = stores.iter().find_map(|store| store.streamed()).map(|streamed| streamed.pipeline());
        let closing = |outcome: Result<()>| {
            if outcome.is_err() {
                claims.close();
            }
            outcome
        };
        let host = || closing(self.lane.run(parts, claims, inputs, pipeline));
        let Some(pipeline) = pipeline else { return host() };
        let device = || -> Result<()> {
            let _entered = pipeline.device().enter()?;
            while let Some((part, chunk)) = claims.front() {
                if let Some(streamed) = stores[part].streamed() {
                    streamed.run_chunk(chunk, parts[part].tensors, inputs, compute)?;
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let driver = std::thread::Builder::new().name("forebay-host".to_owned()).spawn_scoped(scope, host);
            let driver = driver.map_err(|error| {
                Error::Device(forebay_device::Error::Os {
                    call: "thread spawn",
                    bytes: 0,
                    errno: error.raw_os_error().unwrap_or(0),
                    text: error.to_string(),
                })
            })?;
            let device = closing(device());
            let host = driver.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            device.and(host)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(bytes: &[u64]) -> Vec<(usize, usize, u64)> {
        bytes.iter().enumerate().map(|(i, &bytes)| (0, i, bytes)).collect()
    }

    #[test]
    fn the_ends_of_the_range_give_all_to_one_side() {
        let chunks = order(&[5, 1, 9, 3]);
        assert_eq!(meeting_point(&chunks, 0.0), 4);
        assert_eq!(meeting_point(&chunks, 1.0), 0);
        assert_eq!(meeting_point(&[], 0.5), 0);
    }

    #[test]
    fn a_fraction_is_met_as_nearly_as_chunks_allow() {
        let chunks = order(&[10; 10]);
        for (fraction, host) in [(0.04, 0), (0.06, 1), (0.5, 5), (0.94, 9), (0.96, 10)] {
            assert_eq!(meeting_point(&chunks, fraction), 10 - host, "{fraction}");
        }
    }

    #[test]
    fn every_chunk_is_claimed_once_wherever_the_ends_meet() {
        for share in [HostShare::Auto, HostShare::Fixed(0.3), HostShare::Fixed(0.0), HostShare::Fixed(1.0)] {
            let patterns = [[true; 8], [false; 8], [true, false, true, false, true, true, false, true]];
            for (pattern, room) in patterns.into_iter().flat_map(|pattern| [1, 2, 9].map(|room| (pattern, room))) {
                let claims = Claims::new(order(&[1; 8]), share);
                let mut seen: Vec<usize> = Vec::new();
                // In the pattern's order, then whatever is left on either side.
                for front in pattern.into_iter().chain([true; 8]).chain([false; 8]) {
                    if front {
                        seen.extend(claims.front().map(|(_, chunk)| chunk));
                    } else if let Some((_, chunks)) = claims.back(|_, chunks| chunks.len() <= room) {
                        assert!((1..=room).contains(&chunks.len()));
                        seen.extend(chunks);
                    }
                }
                seen.sort_unstable();
                assert_eq!(seen, (0..8).collect::<Vec<_>>(), "{share:?}");
                let host = match share {
                    HostShare::Fixed(fraction) => (fraction * 8.0).round() / 8.0,
                    HostShare::Auto => claims.host_fraction(),
                };
                assert_eq!(claims.host_fraction(), host);
            }
        }
    }

    #[test]
    fn the_best_of_the_trials_stays() {
        // Meet, meet, stream, host, meet, meet: the first does not count, and of the others the middle one.
        let meets = |stream: f64, host: f64| {
            choose(&[(0.9, 1.0), (0.3, 5.0), (0.0, stream), (1.0, host), (0.4, 6.0), (0.5, 7.0)])
        };
        assert_eq!(meets(9.0, 8.0), 0.4);
        assert_eq!(meets(4.0, 8.0), 0.0);
        assert_eq!(meets(9.0, 4.0), 1.0);
        assert_eq!((meets(4.0, 3.0), meets(3.0, 4.0)), (1.0, 0.0));
        assert_eq!(meets(5.99, 5.99), 0.4, "a hair's breadth does not count");
    }

    #[test]
    fn a_closed_list_gives_nothing() {
        let claims = Claims::new(order(&[1; 8]), HostShare::Auto);
        assert!(claims.front().is_some() && claims.back(|_, _| false).is_some());
        claims.close();
        assert!(claims.front().is_none() && claims.back(|_, _| true).is_none());
    }

    #[test]
    fn the_host_takes_chunks_of_one_part_in_a_row() {
        // Chunk 1 of the second part has no gradients, so the others do not follow each other.
        let chunks = vec![(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 2, 1), (1, 3, 1)];
        let claims = Claims::new(chunks, HostShare::Fixed(1.0));
        let taken: Vec<_> = std::iter::from_fn(|| claims.back(|_, _| true)).collect();
        assert_eq!(taken, [(1, 2..4), (1, 0..1), (0, 0..2)]);
    }
}
