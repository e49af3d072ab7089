//! The options of every command. Each option is checked when it is parsed.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Parser, Subcommand};
use forebay::device::StateFormat;
use forebay_bench::{CpuAdamOptions, Link, Model};

use crate::output::Json;
use crate::plan::{MasterType, StateType, WeightType, rule_names};

/// Keeps a GPU fed with training state that does not fit on it.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, arg_required_else_help = true, max_term_width = 110)]
#[command(after_help = "In the Python package, `forebay check --device npu:0` tries an accelerator of torch.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure this machine: copies, pinning, host memory, the kernel, and the limits that follow
    Probe {
        #[command(flatten)]
        device: DeviceChoice,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Show what is in a checkpoint: tensors, shapes, types, shards, bytes, step, groups
    Inspect {
        /// The folder that was saved to, or one of its numbered subfolders
        path: PathBuf,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Check every checksum of a checkpoint, and that every range of every tensor is there once; exit code 1 if not
    Verify {
        /// The folder that was saved to, or one of its numbered subfolders
        path: PathBuf,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Turn a checkpoint into one plain safetensors file, or such a file into a checkpoint; or, with --state or --master,
    /// make another checkpoint whose optimizer state is kept in other formats
    Convert(ConvertArgs),
    /// Make one HTML page about a trace: timeline, wire, waits, memory, plan, and what could be changed
    Report(ReportArgs),
    /// Print a plan: what would move in which chunk, before anything is allocated
    Plan {
        #[command(subcommand)]
        plan: Plan,
    },
    /// Work with files of forebay.trace
    Trace {
        #[command(subcommand)]
        trace: Trace,
    },
    /// Show the processes of this machine that use forebay; only those that call forebay.publish()
    Top(TopArgs),
    /// Measure what forebay does on this machine
    Bench {
        #[command(subcommand)]
        bench: Bench,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Plan {
    /// Print the plan of a streamed step over a model's shapes; needs no device
    Step(PlanStepArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Trace {
    /// Put the traces of several ranks into one file, on one clock
    Merge {
        /// The files, one for each rank
        #[arg(required = true)]
        traces: Vec<PathBuf>,
        /// The file to write
        #[arg(short, long)]
        output: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Run the streamed step over synthetic parameters of a model's shapes
    Step(StepArgs),
    /// Run the update on the host's threads, compared with the bandwidth of the memory
    CpuAdam(CpuAdamArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// A checkpoint's folder, or a safetensors file
    pub(crate) from: PathBuf,
    /// The file to write, or the folder to make a checkpoint in
    pub(crate) to: PathBuf,
    /// Only the model's weights, under the model's own names, as from_pretrained and other tools expect them
    #[arg(long, conflicts_with_all = ["state", "master"])]
    pub(crate) weights: bool,
    /// Keep the columns of the optimizer's state as f32, bf16 or 8bit
    #[arg(long, value_parser = PossibleValuesParser::new(StateFormat::ALL.map(StateFormat::name)))]
    pub(crate) state: Option<String>,
    /// Keep the masters of bf16 weights as f32 or compact
    #[arg(long, value_parser = PossibleValuesParser::new(["f32", "compact"]))]
    pub(crate) master: Option<String>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct OutputArgs {
    /// Print JSON; with a path, print the text and write JSON to the path
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "-", default_value = "", hide_default_value = true)]
    pub(crate) json: Json,
}

#[derive(Debug, Args)]
pub(crate) struct DeviceChoice {
    /// cpu, cuda or cuda:N [default: the first GPU, or the CPU where there is none]
    #[arg(long)]
    pub(crate) device: Option<String>,
    /// Simulate a link of this many GB/s each way on the CPU backend
    #[arg(long, value_parser = positive)]
    pub(crate) link_gbps: Option<f64>,
    /// Let both ways of the simulated link share its rate
    #[arg(long, requires = "link_gbps")]
    pub(crate) link_shared: bool,
}

impl DeviceChoice {
    pub(crate) fn link(&self) -> Option<Link> {
        self.link_gbps.map(|gbps| Link { gbps, is_shared: self.link_shared })
    }
}

/// The ring on the device.
#[derive(Debug, Args)]
pub(crate) struct RingArgs {
    /// Bytes of one slot, for all columns of state together: 16777216 or 16MiB
    #[arg(long, default_value = "16MiB", value_parser = bytes)]
    pub(crate) chunk_bytes: u64,
    /// Slots in the ring
    #[arg(long, default_value_t = 4)]
    pub(crate) slots: usize,
}

#[derive(Debug, Args)]
pub(crate) struct PlanStepArgs {
    /// Shapes of a public model [default: qwen2.5-3b]
    #[arg(long, value_parser = PossibleValuesParser::new(Model::names()), conflicts_with = "params")]
    pub(crate) model: Option<String>,
    /// Synthetic shapes with this many parameters: 40000000, 40e6 or 40M
    #[arg(long, value_parser = count)]
    pub(crate) params: Option<u64>,
    /// Type of the weights and gradients; half types have master weights
    #[arg(long, value_enum, default_value_t = WeightType::F32)]
    pub(crate) dtype: WeightType,
    /// How the state of the rule is kept
    #[arg(long, value_enum, default_value_t = StateType::F32)]
    pub(crate) state: StateType,
    /// How the master weights of half types are kept
    #[arg(long, value_enum, default_value_t = MasterType::F32)]
    pub(crate) master: MasterType,
    /// The optimizer's update rule, with its default settings
    #[arg(long, value_parser = PossibleValuesParser::new(rule_names()), default_value = rule_names()[0])]
    pub(crate) rule: String,
    #[command(flatten)]
    pub(crate) ring: RingArgs,
    /// A wire of this many GB/s each way: prints the shortest step that it allows
    #[arg(long, value_parser = positive)]
    pub(crate) wire_gbps: Option<f64>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct StepArgs {
    #[command(flatten)]
    pub(crate) device: DeviceChoice,
    /// Shapes of a public model [default on a GPU: qwen2.5-3b]
    #[arg(long, value_parser = PossibleValuesParser::new(Model::names()), conflicts_with = "params")]
    pub(crate) model: Option<String>,
    /// Synthetic shapes with this many parameters: 40000000, 40e6 or 40M [default on the CPU: 40M]
    #[arg(long, value_parser = count)]
    pub(crate) params: Option<u64>,
    #[command(flatten)]
    pub(crate) ring: RingArgs,
    /// The format of the moments
    #[arg(long, value_parser = PossibleValuesParser::new(StateFormat::ALL.map(StateFormat::name)), default_value = "f32")]
    pub(crate) state: String,
    /// Give bf16 parameters with masters in this format; without it, or with none, parameters are f32
    #[arg(long, value_enum)]
    pub(crate) master: Option<MasterType>,
    /// Steps to time, after one to warm up
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) steps: u64,
    /// Write a trace of one more step to this file, for Perfetto or chrome://tracing
    #[arg(long, value_name = "PATH")]
    pub(crate) trace: Option<String>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Print once and end, as where standard output is no terminal
    #[arg(long)]
    pub(crate) once: bool,
    /// Seconds between two pictures
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = period)]
    pub(crate) every: f64,
    /// The folder that was given to forebay.publish [default: its default]
    #[arg(long, value_name = "PATH")]
    pub(crate) folder: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// The JSON file of a trace, of one rank or of several that were merged
    #[arg(value_name = "TRACE")]
    pub(crate) trace: String,
    /// Write the page to this file; it needs nothing else and loads nothing
    #[arg(short = 'o', long = "output", value_name = "PATH", required_unless_present = "json")]
    pub(crate) page: Option<String>,
    /// The limit of the wire in GB/s each way, instead of the one in the trace; `forebay probe` measures it
    #[arg(long, value_parser = positive)]
    pub(crate) wire_gbps: Option<f64>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct CpuAdamArgs {
    /// Parameters of one update: 500000000, 500e6 or 500M [default: what memory easily holds, at most 500M]
    #[arg(long, value_parser = count)]
    params: Option<u64>,
    /// Numbers of threads, separated by commas [default: powers of two, and all cores]
    #[arg(long, value_delimiter = ',')]
    host_threads: Vec<usize>,
    /// portable, avx2 or avx512 [default: the best that this CPU has]
    #[arg(long)]
    host_kernel: Option<String>,
    /// Timed repetitions of each figure
    #[arg(long, default_value_t = 7)]
    repetitions: usize,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

impl CpuAdamArgs {
    pub(crate) fn options(&self) -> CpuAdamOptions {
        CpuAdamOptions {
            params: self.params,
            threads: self.host_threads.clone(),
            kernel: self.host_kernel.clone(),
            repetitions: self.repetitions,
        }
    }
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse::<f64>()
        .ok()
        .filter(|rate| rate.is_finite() && *rate > 0.0)
        .ok_or_else(|| "not a positive number".to_owned())
}

/// Seconds between two pictures.
fn period(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.ok_or_else(|| "not a number of seconds from 0.1 to 3600".to_owned())
}

/// A whole number, also as 40e6 or 40M.
fn count(text: &str) -> Result<u64, String> {
    scaled(text, &[("k", 1e3), ("m", 1e6), ("g", 1e9), ("b", 1e9)])
}

/// A number of bytes, also as 16MiB or 16MB.
fn bytes(text: &str) -> Result<u64, String> {
    let binary = |power: i32| 1024f64.powi(power);
    scaled(
        text,
        &[
            ("kib", binary(1)),
            ("mib", binary(2)),
            ("gib", binary(3)),
            ("kb", 1e3),
            ("mb", 1e6),
            ("gb", 1e9),
            ("b", 1.0),
        ],
    )
}

fn scaled(text: &str, units: &[(&str, f64)]) -> Result<u64, String> {
    let plain = text.trim().replace('_', "").to_ascii_lowercase();
    let (digits, scale) = units
        .iter()
        .find_map(|&(unit, scale)| plain.strip_suffix(unit).map(|digits| (digits.trim(), scale)))
        .unwrap_or((&plain, 1.0));
    let value = digits.parse::<f64>().map_err(|_| "not a number".to_owned())? * scale;
    // Beyond 2^53 an f64 skips whole numbers.
    if !(1.0..=9_007_199_254_740_992.0).contains(&value) || value.fract() != 0.0 {
        return Err("not a positive whole number".to_owned());
    }
    Ok(value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn options_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn numbers_may_be_written_as_people_write_them() {
        assert_eq!(count("40M"), Ok(40_000_000));
        assert_eq!(count("3.09e9"), Ok(3_090_000_000));
        assert_eq!(count("1_000"), Ok(1000));
        assert_eq!(bytes("16MiB"), Ok(16 << 20));
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("2 GB"), Ok(2_000_000_000));
        for wrong in ["", "-1", "0", "1.5", "x", "1e99", "nan", "inf"] {
            assert!(count(wrong).is_err() && bytes(wrong).is_err(), "{wrong}");
        }
    }
}
