//! A simulated link between host and device, so that overlap shows on a machine without a GPU.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// How fast copies go between host memory and the CPU backend's device memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkOptions {
    /// Toward the device.
    pub fetch_bytes_per_s: f64,
    /// Away from it.
    pub store_bytes_per_s: f64,
    /// Whether both ways run at once at full speed; otherwise they share one channel.
    pub duplex: bool,
}

impl LinkOptions {
    pub(crate) fn check(&self) -> Result<()> {
        for (option, rate) in
            [("fetch_bytes_per_s", self.fetch_bytes_per_s), ("store_bytes_per_s", self.store_bytes_per_s)]
        {
            if !(rate.is_finite() && rate >= 1.0) {
                return Err(Error::InvalidOption {
                    option,
                    value: rate.to_string(),
                    remedy: "give at least one byte per second".to_owned(),
                });
            }
        }
        Ok(())
    }
}

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Fetch,
    Store,
}

pub(crate) struct Link {
    options: LinkOptions,
    /// When each channel is free again.
    busy_until: Mutex<[Option<Instant>; 2]>,
}

impl Link {
    pub(crate) fn new(options: LinkOptions) -> Self {
        Self { options, busy_until: Mutex::default() }
    }

    /// Runs the copy and returns no sooner than the link would have finished it.
    pub(crate) fn transfer(&self, way: Way, bytes: u64, copy: impl FnOnce()) {
        let (rate, channel) = match way {
            Way::Fetch => (self.options.fetch_bytes_per_s, 0),
            Way::Store => (self.options.store_bytes_per_s, usize::from(self.options.duplex)),
        };
        let end = {
            let mut busy = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let start = busy[channel].map_or(now, |until| until.max(now));
            let end = start + Duration::from_secs_f64(bytes as f64 / rate);
            busy[channel] = Some(end);
            end
        };
        copy();
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
    }
}
