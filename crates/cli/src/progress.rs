//! A progress bar on a terminal; no output in a pipe.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use forebay_bench::Progress;
use indicatif::{ProgressBar, ProgressStyle};

/// One bar, restarted for each phase of the work. It draws on standard error, and only on a terminal.
pub(crate) struct Bar(ProgressBar);

impl Bar {
    pub(crate) fn new() -> Self {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{msg:44} [{bar:30}] {pos}/{len} {elapsed}") {
            bar.set_style(style.progress_chars("=> "));
        }
        Self(bar)
    }
}

/// Runs work that counts the bytes it moves, and shows the count as a bar.
pub(crate) fn watch<T: Send>(what: &str, total_bytes: u64, work: impl FnOnce(&AtomicU64) -> T + Send) -> T {
    let moved = AtomicU64::new(0);
    let bar = ProgressBar::new(total_bytes);
    if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:30}] {bytes} of {total_bytes}, {bytes_per_sec}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what.to_owned());
    let outcome = std::thread::scope(|scope| {
        let worker = scope.spawn(|| work(&moved));
        while !worker.is_finished() {
            bar.set_position(moved.load(Relaxed));
            std::thread::sleep(Duration::from_millis(if bar.is_hidden() { 1 } else { 50 }));
        }
        worker.join()
    });
    bar.finish_and_clear();
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Progress for Bar {
    fn begin(&mut self, what: &str, steps: u64) {
        self.0.reset();
        self.0.set_length(steps);
        self.0.set_message(what.to_owned());
        self.0.enable_steady_tick(Duration::from_millis(200));
    }

    fn advance(&mut self) {
        self.0.inc(1);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
