//! The `forebay` command as a binary of its own; the wheel brings the same command.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(forebay_cli::run(std::env::args_os(), &format!("cargo for {}", forebay_cli::PLATFORM)))
}
