//! The `forebay` binary from outside, one module for each part of it.

mod support;

#[path = "command/checkpoint.rs"]
mod checkpoint;
#[path = "command/cli.rs"]
mod cli;
#[path = "command/plan.rs"]
mod plan;
#[path = "command/report.rs"]
mod report;
#[path = "command/top.rs"]
mod top;
