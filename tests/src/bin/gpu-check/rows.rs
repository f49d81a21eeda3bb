//! What probes say: one line of JSON for each row, on standard output.

use std::io::Write;

use serde_json::{Value, json};

/// What a row means for the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Lapis relies on it: the run fails if it does.
    Check,
    /// An answer that nothing depends on.
    Fact,
    /// A number.
    Measure,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Check => "check",
            Kind::Fact => "fact",
            Kind::Measure => "measure",
        }
    }
}

/// Standard output of a probe.
pub(crate) struct Said;

impl Said {
    fn line(value: &Value) {
        // Without a reader there is nobody to tell.
        let _gone = writeln!(std::io::stdout(), "{value}");
    }

    /// An answer, or a check that holds.
    #[expect(clippy::needless_pass_by_value, reason = "texts and errors are given as they come")]
    pub(crate) fn ok(&self, row: &str, value: impl ToString) {
        Self::line(&json!({ "row": row, "outcome": "ok", "value": value.to_string() }));
    }

    /// Holds or not.
    pub(crate) fn check(&self, row: &str, holds: bool, value: impl ToString) {
        if holds { self.ok(row, value) } else { self.failed(row, value) }
    }

    /// No answer, or a check that doesn't hold.
    #[expect(clippy::needless_pass_by_value, reason = "texts and errors are given as they come")]
    pub(crate) fn failed(&self, row: &str, why: impl ToString) {
        Self::line(&json!({ "row": row, "outcome": "failed", "value": why.to_string() }));
    }

    /// Can't be asked here.
    pub(crate) fn skipped(&self, row: &str, why: &str) {
        Self::line(&json!({ "row": row, "outcome": "skipped", "value": why }));
    }

    /// The same number several times.
    pub(crate) fn measured(&self, row: &str, unit: &str, numbers: &[f64]) {
        let Some((min, median, max)) = spread(numbers) else {
            return self.failed(row, "nothing was measured");
        };
        let value = format!("{median:.2} {unit} ({min:.2} to {max:.2}, {} times)", numbers.len());
        Self::line(&json!({
            "row": row, "outcome": "ok", "value": value, "unit": unit, "median": median,
            "numbers": numbers,
        }));
    }

    /// Ours beside a limit of the same round.
    pub(crate) fn beside(&self, row: &str, limit_name: &str, pairs: &[(f64, f64)]) {
        let ratios: Vec<f64> = pairs.iter().map(|(ours, limit)| ours / limit).collect();
        let (ours, limit): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
        let (Some(ratio), Some(our), Some(best)) = (spread(&ratios), spread(&ours), spread(&limit))
        else {
            return self.failed(row, "nothing was measured");
        };
        let value = format!(
            "{:.2} GB/s, {limit_name} {:.2}: ratio {:.2} ({:.2} to {:.2})",
            our.1, best.1, ratio.1, ratio.0, ratio.2
        );
        Self::line(&json!({
            "row": row, "outcome": "ok", "value": value, "unit": "GB/s", "ours": ours,
            "limit": limit, "beside": limit_name, "ratio": ratio.1,
        }));
    }

    /// What the rest of the probe's rows failed of.
    pub(crate) fn error(&self, text: &str) {
        Self::line(&json!({ "error": text }));
    }
}

/// Minimum, median, maximum.
fn spread(numbers: &[f64]) -> Option<(f64, f64, f64)> {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    Some((*sorted.first()?, *sorted.get(sorted.len() / 2)?, *sorted.last()?))
}

/// Bytes in a time, in GB/s.
pub(crate) fn rate(bytes: u64, took: std::time::Duration) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "exact up to 2^52")]
    let bytes = bytes as f64;
    bytes / took.as_secs_f64() / 1e9
}

/// A time in microseconds.
pub(crate) fn us(took: std::time::Duration) -> f64 {
    took.as_secs_f64() * 1e6
}
