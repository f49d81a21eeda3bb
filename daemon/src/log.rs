//! The log: to the journal where systemd reads standard error, else as text or JSON on standard error.
//!
//! A line that comes again and again is cut short: of one place in the source no more than [`BURST`] lines at once and
//! [`PER_SECOND`] a second are written, and then how many were left out. What a client names is escaped where it is logged.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

/// Lines of one place at once.
const BURST: u32 = 100;
/// And from then on.
const PER_SECOND: u32 = 10;
/// Variables that say what is logged, whatever the configuration says.
const VARIABLES: [&str; 2] = ["LAPIS_LOG", "RUST_LOG"];

/// How lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// To the journal if standard error is read by it, else text
    Auto,
    /// To the journal, with fields
    Journal,
    /// Text on standard error
    Text,
    /// A JSON object a line on standard error
    Json,
}

/// The log can't be started, or changed.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// What is to be logged can't be read.
    #[error("the log filter `{filter}` is not valid ({source}): use e.g. info or debug")]
    Filter {
        /// As given.
        filter: String,
        /// Why.
        source: tracing_subscriber::filter::ParseError,
    },
    /// There is a log already.
    #[error("cannot start the log: {0}")]
    Started(#[from] TryInitError),
    /// The log is gone.
    #[error("cannot change the log: {0}")]
    Gone(#[from] reload::Error),
    /// No journal.
    #[error(
        "log_format = \"journal\" is configured, but there is none: {0}; use log_format = \"auto\""
    )]
    NoJournal(std::io::Error),
}

/// The running log.
#[derive(Debug)]
pub struct Log {
    filter: reload::Handle<EnvFilter, Registry>,
}

fn filter(configured: &str) -> Result<EnvFilter, LogError> {
    let told = VARIABLES.iter().find_map(|name| std::env::var(name).ok());
    let filter = told.unwrap_or_else(|| configured.to_owned());
    EnvFilter::try_new(&filter).map_err(|source| LogError::Filter { filter, source })
}

/// Checks a filter.
///
/// # Errors
/// [`LogError::Filter`].
pub fn check_filter(text: &str) -> Result<(), LogError> {
    let parsed = EnvFilter::try_new(text);
    parsed.map(drop).map_err(|source| LogError::Filter { filter: text.to_owned(), source })
}

/// Whether standard error goes to the journal, which then takes lines with fields as well.
fn journal_reads_us() -> bool {
    let Ok(told) = std::env::var("JOURNAL_STREAM") else { return false };
    let stderr = std::fs::metadata("/proc/self/fd/2");
    stderr.is_ok_and(|stderr| told == format!("{}:{}", stderr.dev(), stderr.ino()))
}

type Boxed<S> = Box<dyn Layer<S> + Send + Sync>;

fn journal<S>() -> std::io::Result<Boxed<S>>
where
    S: Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    let layer = tracing_journald::layer()?.with_field_prefix(Some("LAPIS".to_owned()));
    Ok(layer.with_syslog_identifier("lapisd".to_owned()).boxed())
}

fn writer<S>(format: LogFormat) -> Result<Boxed<S>, LogError>
where
    S: Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a> + Send + Sync,
{
    let wanted = format == LogFormat::Journal;
    if wanted || (format == LogFormat::Auto && journal_reads_us()) {
        match journal() {
            Ok(layer) => return Ok(layer),
            Err(error) if wanted => return Err(LogError::NoJournal(error)),
            // As text it gets there all the same.
            Err(_) => {}
        }
    }
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    if format == LogFormat::Json {
        return Ok(layer.json().flatten_event(true).boxed());
    }
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    Ok(layer.with_ansi(colour).boxed())
}

impl Log {
    /// Starts the log of this process.
    ///
    /// # Errors
    /// [`LogError`].
    pub fn start(configured: &str, format: LogFormat) -> Result<Log, LogError> {
        let (level, handle) = reload::Layer::new(filter(configured)?);
        let lines = Registry::default().with(level).with(Brevity::default());
        lines.with(writer(format)?).try_init()?;
        Ok(Log { filter: handle })
    }

    /// Logs what is configured now, unless a variable says otherwise.
    ///
    /// # Errors
    /// [`LogError::Filter`], [`LogError::Gone`].
    pub fn set(&self, configured: &str) -> Result<(), LogError> {
        self.filter.reload(filter(configured)?)?;
        Ok(())
    }
}

/// Lines of one place.
#[derive(Debug)]
struct Bucket {
    left: u32,
    filled: Instant,
    left_out: u64,
}

impl Bucket {
    /// Whether one more line may be written, and how many were left out before it.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let refill = now.saturating_duration_since(self.filled).as_millis();
        let refill = u32::try_from(refill * u128::from(PER_SECOND) / 1000).unwrap_or(u32::MAX);
        if refill > 0 {
            self.left = self.left.saturating_add(refill).min(BURST);
            self.filled = now;
        }
        if self.left == 0 {
            self.left_out += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

/// Leaves out lines that come too often. Not those that are for debugging: whoever asks for them wants them all.
#[derive(Debug, Default)]
struct Brevity {
    buckets: Mutex<HashMap<tracing::callsite::Identifier, Bucket>>,
}

impl<S: Subscriber> Layer<S> for Brevity {
    fn max_level_hint(&self) -> Option<LevelFilter> {
        None
    }

    fn event_enabled(&self, event: &Event<'_>, _context: Context<'_, S>) -> bool {
        if *event.metadata().level() > Level::INFO {
            return true;
        }
        let now = Instant::now();
        let taken = {
            let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
            let fresh = || Bucket { left: BURST, filled: now, left_out: 0 };
            buckets.entry(event.metadata().callsite()).or_insert_with(fresh).take(now)
        };
        if let Some(count) = taken.filter(|count| *count > 0) {
            let (file, line) = (event.metadata().file(), event.metadata().line());
            tracing::warn!(count, file, line, "lines like the next one were left out: too many");
        }
        taken.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_place_has_its_burst_and_then_its_rate_and_says_what_it_left_out() {
        let start = Instant::now();
        let mut bucket = Bucket { left: BURST, filled: start, left_out: 0 };
        for _ in 0..100 {
            assert_eq!(bucket.take(start), Some(0));
        }
        for _ in 0..7 {
            assert_eq!(bucket.take(start), None);
        }
        let later = start + Duration::from_millis(100);
        assert_eq!(bucket.take(later), Some(7));
        assert_eq!(bucket.take(later), None);
        assert_eq!(bucket.take(later + Duration::from_secs(3600)), Some(1));
    }

    #[test]
    fn filters_are_checked() {
        check_filter("info,lapisd=debug").unwrap();
        let error = check_filter("lapisd=loud").unwrap_err().to_string();
        assert!(error.starts_with("the log filter `lapisd=loud` is not valid"), "{error}");
    }
}
