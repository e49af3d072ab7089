//! A progress bar on a terminal; nothing in a pipe.

use forebay::measure::Progress;
use indicatif::{ProgressBar, ProgressStyle};

/// One bar that is started again for each part of the work. It draws on standard error, and only on a terminal.
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

impl Progress for Bar {
    fn begin(&mut self, what: &str, steps: u64) {
        self.0.reset();
        self.0.set_length(steps);
        self.0.set_message(what.to_owned());
        self.0.enable_steady_tick(std::time::Duration::from_millis(200));
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
