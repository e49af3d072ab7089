//! A value that the device may still use, with the mark that ends that use.

use std::sync::Arc;

use forebay_device::Stream;

use super::marks::Mark;
use crate::error::Result;

/// A value and the mark that ends the device's use of it; no mark if the device does not use it. The value can be taken
/// out only in ways that respect the mark.
#[derive(Debug)]
#[must_use = "the device may still use the value; pass it on with its mark"]
pub struct InFlight<T> {
    value: T,
    end: Option<Arc<Mark>>,
}

impl<T> InFlight<T> {
    /// `end` was recorded after the last work that uses `value`; `None` if no work does.
    pub(crate) fn new(value: T, end: Option<Arc<Mark>>) -> Self {
        Self { value, end }
    }

    /// A value in use until `end`.
    pub(crate) fn until(value: T, end: Arc<Mark>) -> Self {
        Self::new(value, Some(end))
    }

    /// The value, for work on `stream`: what is submitted there from now on runs after the use has ended.
    pub fn on(self, stream: &Stream) -> Result<T> {
        self.end.as_ref().map_or(Ok(()), |end| end.wait(stream))?;
        Ok(self.value)
    }

    /// The value, for the host: blocks until the use has ended.
    pub fn wait(self) -> Result<T> {
        self.end.as_ref().map_or(Ok(()), |end| end.synchronize())?;
        Ok(self.value)
    }

    /// The end of its use.
    pub(crate) fn end(&self) -> Option<&Arc<Mark>> {
        self.end.as_ref()
    }

    /// Both, for a holder that keeps them together.
    pub(crate) fn into_parts(self) -> (T, Option<Arc<Mark>>) {
        (self.value, self.end)
    }
}
