//! `forebay bench cpu-adam`: options and table.

use std::fmt::Write as _;

use clap::Args;
use forebay::measure::{CpuAdamBench, CpuAdamOptions};

use crate::options::count;
use crate::output::Json;

#[derive(Debug, Args)]
pub(crate) struct CpuAdamArgs {
    /// Parameters updated at a time: 500000000, 500e6 or 500M [default: what memory easily holds, at most 500M]
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
    /// Print JSON, or with a path write it there beside the table
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "-", default_value = "", hide_default_value = true)]
    pub(crate) json: Json,
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

pub(crate) fn table(bench: &CpuAdamBench) -> String {
    let mut text = format!(
        "AdamW on the host, {} kernel, {} cores, {:.1}e6 parameters, forebay {}\n\n",
        bench.kernel,
        bench.cores,
        bench.params as f64 / 1e6,
        bench.version
    );
    let _ = writeln!(text, "threads  update                      Gparam/s    GB/s   touch GB/s  % of touch");
    for row in &bench.rows {
        let _ = writeln!(
            text,
            "{:>7}  {:26}  {:>8.3}  {:>6.1}      {:>7.1}      {:>6.1}",
            row.threads, row.case, row.gparam_per_s, row.gbps, row.touch_gbps, row.percent
        );
    }
    text.push_str("\ntouch: as many bytes read and written back by the same threads, in turns with the update\n");
    text
}
