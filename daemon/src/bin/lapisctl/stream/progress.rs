//! The progress bar, on a terminal only, and notes; both on standard error.

use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Tells how far the run is. No bar when quiet, or when standard error is no terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    quiet: bool,
}

impl Progress {
    pub(crate) fn new(quiet: bool) -> Progress {
        Progress { bar: ProgressBar::hidden(), quiet }
    }

    /// Says something that is no result: what was chosen, and why.
    pub(crate) fn note(&self, text: &str) {
        if !self.quiet {
            // Nobody is left to tell that standard error is closed.
            self.bar.suspend(|| {
                let _closed = writeln!(std::io::stderr(), "{text}");
            });
        }
    }

    /// Starts a bar over so many bytes.
    pub(crate) fn start(&mut self, bytes: u64) {
        if self.quiet || !std::io::stderr().is_terminal() {
            return;
        }
        // No colours, so NO_COLOR asks for nothing else.
        let style = ProgressStyle::with_template(
            "{prefix} [{bar:30}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {wide_msg}",
        );
        let style = style.expect("the template above is valid").progress_chars("=> ");
        self.bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr())
            .with_style(style);
    }

    /// A new pass.
    pub(crate) fn pass(&self, text: String) {
        self.bar.set_prefix(text);
    }

    /// A layer, about to be mapped.
    pub(crate) fn layer(&self, name: &str) {
        if !self.bar.is_hidden() {
            self.bar.set_message(name.to_owned());
        }
    }

    /// So many more bytes are done.
    pub(crate) fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
