//! What is going on, on a terminal only.

use std::io::{IsTerminal, stderr};

use indicatif::{ProgressBar, ProgressStyle};

/// A bar on standard error, or nothing.
pub(super) struct Progress(ProgressBar);

impl Progress {
    pub(super) fn new(steps: u64) -> Self {
        if !stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::new(steps);
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}") {
            bar.set_style(style);
        }
        Self(bar)
    }

    pub(super) fn say(&self, what: &str) {
        // Drawn when asked to: a ticker would take time from what is measured.
        self.0.set_message(what.to_owned());
    }

    pub(super) fn step(&self) {
        self.0.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
