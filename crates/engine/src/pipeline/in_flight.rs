//! A value that the device still uses, with the event that ends that use.

use forebay_device::{Device, Event, Stream};

use crate::error::Result;

/// A value and the event that ends the device's use of it. The value comes out only in a way that respects the event.
#[derive(Debug)]
#[must_use = "the device still uses the value; release it with its event"]
pub struct InFlight<T> {
    value: T,
    done: Event,
}

impl<T> InFlight<T> {
    /// `done` was recorded after the last work that uses `value`.
    pub fn new(value: T, done: Event) -> Self {
        Self { value, done }
    }

    /// The value, for work on `stream`: what is submitted there from now on runs after the use has ended.
    pub fn on(self, device: &dyn Device, stream: &Stream) -> Result<T> {
        device.wait(stream, &self.done)?;
        Ok(self.value)
    }

    /// The value, for the host: blocks until the use has ended.
    pub fn wait(self, device: &dyn Device) -> Result<T> {
        device.synchronize(&self.done)?;
        Ok(self.value)
    }

    /// Both, for a holder that keeps them together.
    pub fn into_parts(self) -> (T, Event) {
        (self.value, self.done)
    }
}
