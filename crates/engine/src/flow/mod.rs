//! How bytes move: streams, the marks that order them, and the slots and queues that limit the work under way.
//!
//! - [`InFlight`] is a value with the mark that ends the device's use of it. Memory that a call leaves in use is
//!   passed on as `InFlight`: slots of the rings, blocks of activations, staging memory of sleeps.
//! - `Marks` are those points in streams. `Ring` holds slots that are reused in the order in which they come back.
//! - [`Pipeline`] moves chunks through a ring: fetch, update, store. Several users of a device share one ring through
//!   `Shared`. `Lane` makes the copies of one direction, in the
//!   order of the requests in its `Queue`.

mod in_flight;
pub(crate) mod lane;
pub(crate) mod marks;
mod pipeline;
pub(crate) mod queue;
pub(crate) mod ring;
mod shared;

pub use in_flight::InFlight;
pub(crate) use lane::{CopyJob, Lane, QueuedCopy, Shown};
pub(crate) use marks::{Mark, Marks};
pub use pipeline::{Pipeline, RunStats, Slot};
pub(crate) use queue::Cancelled;
pub(crate) use ring::{Ring, RingUser};
pub(crate) use shared::{Shared, SharedKey};
