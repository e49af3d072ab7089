//! The `forebay` command.
//!
//! Results go to standard output, progress and errors to standard error. Exit codes: 0 done, 1 it failed or a check did
//! not hold, 2 wrong options.

mod checkpoint;
mod cpu_adam;
mod options;
mod output;
mod progress;
mod tables;

use std::process::ExitCode;

use clap::Parser as _;
use cpu_adam::CpuAdamArgs;
use forebay::Error;
use forebay::device::{CpuDevice, CpuOptions, LinkOptions, SharedDevice, open, open_default};
use forebay::measure::{Model, ProbeOptions, StepBenchOptions, bench_cpu_adam, bench_step, check_fit, probe};
use serde::Serialize;

use options::{Bench, Cli, Command, DeviceChoice, StepArgs};
use output::{Json, check_writable, emit, fail};
use progress::Bar;

/// How long one rate of a simulated link is measured.
const LINK_SECONDS: f64 = 0.25;

fn main() -> ExitCode {
    let outcome = match Cli::try_parse() {
        Ok(Cli { command: Command::Probe { device, json } }) => run_probe(&device, &json),
        Ok(Cli { command: Command::Inspect { path, json } }) => checkpoint::inspect(&path, &json),
        Ok(Cli { command: Command::Verify { path, json } }) => checkpoint::verify(&path, &json),
        Ok(Cli { command: Command::Convert { from, to } }) => checkpoint::convert(&from, &to),
        Ok(Cli { command: Command::Bench { bench: Bench::Step(args) } }) => run_bench_step(&args),
        Ok(Cli { command: Command::Bench { bench: Bench::CpuAdam(args) } }) => run_bench_cpu_adam(&args),
        Err(error) => return output::usage(&error),
    };
    outcome.unwrap_or_else(|failure| fail(&failure))
}

/// Why a command did not finish.
enum Failure {
    Engine(Error),
    Write { path: String, error: std::io::Error },
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Engine(error.into())
    }
}

fn open_device(choice: &DeviceChoice) -> Result<SharedDevice, Failure> {
    let Some(gbps) = choice.link_gbps else {
        return Ok(match &choice.device {
            Some(name) => open(name)?,
            None => open_default(None)?,
        });
    };
    if choice.device.as_deref().is_some_and(|name| name != "cpu") {
        return Err(Failure::Engine(Error::InvalidOption {
            option: "--link-gbps",
            value: gbps.to_string(),
            remedy: "only the CPU backend has a simulated link; add --device cpu or leave it out".to_owned(),
        }));
    }
    let rate = gbps * 1e9;
    let link = LinkOptions { fetch_bytes_per_s: rate, store_bytes_per_s: rate, duplex: !choice.link_shared };
    Ok(CpuDevice::open(CpuOptions { link: Some(link), ..CpuOptions::default() })?)
}

fn run_probe(choice: &DeviceChoice, json: &Json) -> Result<ExitCode, Failure> {
    let device = open_device(choice)?;
    json.path().map_or(Ok(()), check_writable)?;
    let options = ProbeOptions::for_backend(device.info().backend);
    let mut bar = Bar::new();
    let result = probe(&device, &options, &mut bar)?;
    drop(bar);
    report(json, &result, || tables::probe(&result))?;
    Ok(ExitCode::SUCCESS)
}

fn run_bench_step(args: &StepArgs) -> Result<ExitCode, Failure> {
    let device = open_device(&args.device)?;
    args.json.path().into_iter().chain(args.trace.as_deref()).try_for_each(check_writable)?;
    let model = match (&args.model, args.params) {
        (Some(name), _) => Model::named(name)?,
        (None, Some(params)) => {
            // Asked before the shapes are made: the list of so many tensors might not fit either.
            check_fit(&device, params, args.chunk_bytes, args.slots)?;
            Model::synthetic(params)?
        }
        (None, None) => StepBenchOptions::default_model(device.info().backend)?,
    };
    let mut options = StepBenchOptions::new(model);
    if let Some(gbps) = args.device.link_gbps {
        // A simulated link keeps its pace from the first byte; a slow one need not be watched for a minute.
        options.wire_bytes = options.wire_bytes.min((gbps * 1e9 * LINK_SECONDS).max(1.0) as u64);
    }
    options.slot_bytes = args.chunk_bytes;
    options.slots = args.slots;
    options.steps = args.steps;
    options.trace = args.trace.is_some();
    let mut bar = Bar::new();
    let result = bench_step(&device, &options, &mut bar)?;
    drop(bar);
    report(&args.json, &result, || tables::step(&result))?;
    if let (Some(path), Some(trace)) = (&args.trace, &result.trace) {
        write(path, &trace.chrome_events())?;
        if !args.json.to_stdout() {
            emit(&format!("wrote {path}: open it in Perfetto or chrome://tracing\n"))?;
        }
    }
    Ok(if result.is_exact() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run_bench_cpu_adam(args: &CpuAdamArgs) -> Result<ExitCode, Failure> {
    args.json.path().map_or(Ok(()), check_writable)?;
    // The memory is the host's, so the device that lends it is the one that is always there.
    let device = open("cpu")?;
    let mut bar = Bar::new();
    let result = bench_cpu_adam(&device, &args.options(), &mut bar)?;
    drop(bar);
    report(&args.json, &result, || cpu_adam::table(&result))?;
    Ok(ExitCode::SUCCESS)
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
