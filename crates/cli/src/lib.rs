//! The `forebay` command, as a function: a binary calls it, and the wheel's command too.
//!
//! Results go to standard output, progress and errors to standard error. Exit codes: 0 success, 1 a failure or a check
//! that did not hold, 2 wrong options. Nothing here touches signals: Ctrl-C does what the process has set.

mod checkpoint;
mod options;
mod output;
mod plan;
mod progress;
mod report;
mod tables;
mod top;
mod trace;

use std::ffi::OsString;

use clap::Parser as _;
use forebay::Error;
use forebay::device::{MasterFormat, StateFormat};
use forebay_bench::{Kept, Model, StepBenchOptions, bench_cpu_adam, bench_step, open_device, probe};
use serde::Serialize;

use options::{Bench, Cli, Command, CpuAdamArgs, DeviceChoice, Plan, RingArgs, StepArgs, Trace};
use output::{Json, check_writable, emit, fail};
use plan::MasterType;
use progress::Bar;

/// How long one rate of a simulated link is measured.
const LINK_SECONDS: f64 = 0.25;

/// The kind of processor that this was compiled for.
pub const PLATFORM: &str = std::env::consts::ARCH;

/// Runs the command with arguments, the first of which is the program's name, and returns its exit code. `built_by` is
/// what `--version` says about where the program comes from.
pub fn run<A: Into<OsString> + Clone>(arguments: impl IntoIterator<Item = A>, built_by: &str) -> u8 {
    let command = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli.command,
        Err(error) => return output::usage(&error, built_by),
    };
    let outcome = match command {
        Command::Probe { device, output } => run_probe(&device, &output.json),
        Command::Inspect { path, output } => checkpoint::inspect(&path, &output.json),
        Command::Verify { path, output } => checkpoint::verify(&path, &output.json),
        Command::Convert(args) => checkpoint::convert(&args),
        Command::Report(args) => report::make(&args),
        Command::Plan { plan: Plan::Step(args) } => plan::step(&args),
        Command::Trace { trace: Trace::Merge { traces, output } } => trace::merge(&traces, &output),
        Command::Top(args) => top::top(&args),
        Command::Bench { bench: Bench::Step(args) } => run_bench_step(&args),
        Command::Bench { bench: Bench::CpuAdam(args) } => run_bench_cpu_adam(&args),
    };
    outcome.unwrap_or_else(|failure| fail(&failure))
}

/// The command did what was asked.
const SUCCESS: u8 = 0;
/// It failed, or a check did not hold.
const FAILURE: u8 = 1;
/// Its options were wrong.
const WRONG_OPTIONS: u8 = 2;

/// Why a command did not finish.
enum Failure {
    Engine(Error),
    Write {
        path: String,
        error: std::io::Error,
    },
    /// A file that cannot be used, and what to do.
    Unusable {
        text: String,
        hint: &'static str,
    },
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Engine(error.into())
    }
}

fn run_probe(choice: &DeviceChoice, json: &Json) -> Result<u8, Failure> {
    let device = open_device(choice.device.as_deref(), choice.link())?;
    json.path().map_or(Ok(()), check_writable)?;
    let mut bar = Bar::new();
    let result = probe(&device, &mut bar)?;
    drop(bar);
    report(json, &result, || tables::probe(&result))?;
    Ok(SUCCESS)
}

fn run_bench_step(args: &StepArgs) -> Result<u8, Failure> {
    let device = open_device(args.device.device.as_deref(), args.device.link())?;
    let json = &args.output.json;
    json.path().into_iter().chain(args.trace.as_deref()).try_for_each(check_writable)?;
    let RingArgs { chunk_bytes, slots } = args.ring;
    let options = match (&args.model, args.params) {
        (Some(name), _) => StepBenchOptions::new(Model::named(name)?),
        (None, Some(params)) => StepBenchOptions::synthetic(&device, params, chunk_bytes, slots)?,
        (None, None) => StepBenchOptions::for_backend(device.info().backend)?,
    };
    let mut options =
        StepBenchOptions { slot_bytes: chunk_bytes, slots, steps: args.steps, trace: args.trace.is_some(), ..options };
    options.kept = Kept {
        state: StateFormat::named(&args.state)?,
        master: match args.master {
            None | Some(MasterType::None) => MasterFormat::None,
            Some(MasterType::F32) => MasterFormat::F32,
            Some(MasterType::Compact) => MasterFormat::Compact,
        },
    };
    if let Some(gbps) = args.device.link_gbps {
        // A simulated link has its rate from the first byte, so a short measurement is enough.
        options.wire_bytes = options.wire_bytes.min((gbps * 1e9 * LINK_SECONDS).max(1.0) as u64);
    }
    let mut bar = Bar::new();
    let result = bench_step(&device, &options, &mut bar)?;
    drop(bar);
    report(json, &result, || tables::step(&result))?;
    if let (Some(path), Some(recording)) = (&args.trace, &result.trace) {
        trace::write(path, recording)?;
        if !json.to_stdout() {
            emit(&format!("wrote {path}: open it in Perfetto or chrome://tracing\n"))?;
        }
    }
    Ok(if result.is_exact() { SUCCESS } else { FAILURE })
}

fn run_bench_cpu_adam(args: &CpuAdamArgs) -> Result<u8, Failure> {
    let json = &args.output.json;
    json.path().map_or(Ok(()), check_writable)?;
    // Only host memory is used, and the CPU backend is always there.
    let device = open_device(Some("cpu"), None)?;
    let mut bar = Bar::new();
    let result = bench_cpu_adam(&device, &args.options(), &mut bar)?;
    drop(bar);
    report(json, &result, || tables::cpu_adam(&result))?;
    Ok(SUCCESS)
}

/// Prints the table, the JSON, or the table with the JSON in a file.
fn report<T: Serialize>(json: &Json, result: &T, table: impl FnOnce() -> String) -> Result<(), Failure> {
    match json {
        Json::Off => emit(&table()),
        Json::Stdout => emit(&format!("{}\n", pretty(result))),
        Json::File(path) => {
            emit(&table())?;
            write(path, result)?;
            emit(&format!("wrote {path}\n"))
        }
    }
}

fn pretty<T: Serialize>(value: &T) -> String {
    serde_json::to_string_pretty(value).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
}

fn write<T: Serialize>(path: &str, value: &T) -> Result<(), Failure> {
    std::fs::write(path, format!("{}\n", pretty(value)))
        .map_err(|error| Failure::Write { path: path.to_owned(), error })
}
