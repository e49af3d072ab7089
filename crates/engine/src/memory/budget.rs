//! The pinned budget: how many bytes one user of the engine may have pinned at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use forebay_device::Error as DeviceError;

use crate::error::{Error, Result};

/// A limit on pinned bytes and a count of those in use. Clones share both.
///
/// A request that does not fit is refused with the numbers, before anything is pinned.
#[derive(Debug, Clone)]
pub struct PinnedBudget {
    shared: Arc<Usage>,
}

#[derive(Debug)]
struct Usage {
    /// `u64::MAX` if there is no limit.
    limit_bytes: AtomicU64,
    used_bytes: AtomicU64,
}

impl PinnedBudget {
    /// A budget of this many bytes, or without a limit.
    pub fn new(limit_bytes: Option<u64>) -> Self {
        let limit_bytes = AtomicU64::new(limit_bytes.unwrap_or(u64::MAX));
        Self { shared: Arc::new(Usage { limit_bytes, used_bytes: AtomicU64::new(0) }) }
    }

    /// Another limit from now on. Memory in use stays in use, even if it is more than the new limit.
    pub fn set_limit(&self, limit_bytes: Option<u64>) {
        self.shared.limit_bytes.store(limit_bytes.unwrap_or(u64::MAX), Relaxed);
    }

    /// The limit, if there is one.
    pub fn limit_bytes(&self) -> Option<u64> {
        Some(self.shared.limit_bytes.load(Relaxed)).filter(|&limit| limit != u64::MAX)
    }

    /// Bytes pinned at the moment.
    pub fn used_bytes(&self) -> u64 {
        self.shared.used_bytes.load(Relaxed)
    }

    /// Bytes that may still be pinned.
    pub fn available_bytes(&self) -> u64 {
        self.shared.limit_bytes.load(Relaxed).saturating_sub(self.used_bytes())
    }

    /// Refuses a request that does not fit now; for users that pin in several steps and want to fail before the first.
    pub fn check(&self, requested_bytes: u64) -> Result<()> {
        let used = self.used_bytes();
        self.fits(used, requested_bytes).map(drop).ok_or_else(|| self.refusal(used, requested_bytes))
    }

    /// Refuses a second copy of memory that is in use already, with the bytes of both copies and what is left for them.
    pub fn check_second(&self, first_bytes: u64) -> Result<()> {
        let used = self.used_bytes();
        let both = first_bytes.saturating_mul(2);
        let refuse = || self.refusal(used.saturating_sub(first_bytes), both);
        self.fits(used, first_bytes).map(drop).ok_or_else(refuse)
    }

    /// Counts bytes until the result is dropped.
    pub(super) fn take(&self, requested_bytes: u64) -> Result<PinnedBytes> {
        self.shared
            .used_bytes
            .fetch_update(Relaxed, Relaxed, |used| self.fits(used, requested_bytes))
            .map_err(|used| self.refusal(used, requested_bytes))?;
        Ok(PinnedBytes { shared: self.shared.clone(), bytes: requested_bytes })
    }

    /// The sum, if it stays within the limit.
    fn fits(&self, used_bytes: u64, requested_bytes: u64) -> Option<u64> {
        let limit = self.shared.limit_bytes.load(Relaxed);
        used_bytes.checked_add(requested_bytes).filter(|&sum| sum <= limit)
    }

    fn refusal(&self, used_bytes: u64, requested_bytes: u64) -> Error {
        let budget_bytes = self.shared.limit_bytes.load(Relaxed);
        let available_bytes = budget_bytes.saturating_sub(used_bytes);
        Error::Device(DeviceError::OutOfPinnedBudget { requested_bytes, available_bytes, budget_bytes })
    }
}

impl Default for PinnedBudget {
    /// Without a limit.
    fn default() -> Self {
        Self::new(None)
    }
}

/// Bytes that count as pinned until this is dropped.
#[derive(Debug)]
pub(super) struct PinnedBytes {
    shared: Arc<Usage>,
    bytes: u64,
}

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        self.shared.used_bytes.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn refusal(outcome: Result<impl std::fmt::Debug>) -> (u64, u64, u64) {
        match outcome {
            Err(Error::Device(DeviceError::OutOfPinnedBudget { requested_bytes, available_bytes, budget_bytes })) => {
                (requested_bytes, available_bytes, budget_bytes)
            }
            other => panic!("{other:?} where the budget should refuse"),
        }
    }

    #[test]
    fn a_request_is_counted_to_the_byte_and_given_back() {
        let budget = PinnedBudget::new(Some(100));
        let first = budget.take(60).unwrap();
        assert_eq!(refusal(budget.take(41)), (41, 40, 100));
        assert_eq!(refusal(budget.check(41)), (41, 40, 100));
        assert_eq!(refusal(budget.take(u64::MAX)), (u64::MAX, 40, 100));
        assert_eq!((budget.used_bytes(), budget.available_bytes()), (60, 40), "a refused request is not counted");
        budget.check(40).unwrap();
        let second = budget.clone().take(40).unwrap();
        assert_eq!((budget.used_bytes(), budget.available_bytes()), (100, 0), "clones share one count");
        drop((first, second));
        assert_eq!(budget.used_bytes(), 0);
    }

    #[test]
    fn a_second_copy_is_refused_with_the_bytes_of_both() {
        let budget = PinnedBudget::new(Some(100));
        let (_state, _others) = (budget.take(40).unwrap(), budget.take(15).unwrap());
        budget.check_second(40).unwrap();
        budget.set_limit(Some(94));
        assert_eq!(refusal(budget.check_second(40)), (80, 79, 94));
        assert_eq!(refusal(budget.check_second(u64::MAX)), (u64::MAX, 94, 94));
        assert_eq!(budget.used_bytes(), 55, "nothing is counted");
    }

    #[test]
    fn a_limit_can_change_and_can_be_absent() {
        let budget = PinnedBudget::default();
        assert_eq!(budget.limit_bytes(), None);
        let taken = budget.take(1 << 40).unwrap();
        budget.set_limit(Some(10));
        assert_eq!(refusal(budget.check(1)), (1, 0, 10));
        drop(taken);
        budget.check(10).unwrap();
        assert_eq!(budget.limit_bytes(), Some(10));
    }

    #[test]
    fn threads_together_stay_within_it() {
        let budget = PinnedBudget::new(Some(50));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let taken = budget.take(20);
                        assert!(budget.used_bytes() <= 50);
                        drop(taken);
                    }
                });
            }
        });
        assert_eq!(budget.used_bytes(), 0);
    }
}
