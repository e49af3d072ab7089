//! Helpers that the tests of this crate and of the crates above it share.

pub mod checked;
pub mod fault;
pub mod kinds;
