//! `lapisctl replay`: what replacement policies make of a trace.

use std::path::PathBuf;
use std::str::FromStr;

use lapisd::policy::patterns::{self, Pattern};

use crate::failure::Failure;
use crate::output::{self, Format};
use policy::Policy;
use report::Report;
use trace::Trace;

mod policy;
mod report;
pub(crate) mod trace;

/// Passes of patterns: enough to learn them, and that what it takes to learn counts.
const PASSES: u32 = 40;

/// Replays traces of page accesses through replacement policies
///
/// A trace is a file of page ids, one a line, or of requests to a KV cache, JSON lines with a list hash_ids; both
/// may be gzip. Of a directory, files named .trace, .jsonl and the same with .gz are read. The cache begins empty, so no
/// policy hits a page's first use. What it prints is hits in a hundred accesses; opt is the most that there can be.
#[derive(Debug, clap::Args)]
pub(crate) struct Replay {
    /// Files, or directories of them
    #[arg(value_name = "TRACE", required_unless_present = "patterns")]
    traces: Vec<PathBuf>,
    /// Replay generated patterns of models too: all, or those named
    #[arg(
        long,
        value_name = "NAME",
        num_args = 0..=1,
        require_equals = true,
        value_delimiter = ',',
        default_missing_value = ALL,
        value_parser = clap::builder::PossibleValuesParser::new(names())
    )]
    patterns: Vec<String>,
    /// A policy to compare; may be given several times [default: lapis, lru, s3fifo, arc, lirs, opt]
    #[arg(long = "policy", value_enum, value_name = "NAME")]
    policies: Vec<Policy>,
    /// Sizes of the cache, in pages or as a share of the pages that a trace has
    #[arg(
        long,
        value_name = "SIZES",
        value_delimiter = ',',
        default_values = ["10%", "30%", "50%", "80%"]
    )]
    sizes: Vec<Share>,
    /// Accesses at the beginning of each trace whose hits do not count
    #[arg(long, value_name = "N", default_value_t = 0)]
    warm_up: usize,
    /// How to print the result
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    output: Format,
}

/// The name that stands for every pattern.
const ALL: &str = "all";

fn names() -> Vec<&'static str> {
    let mut names = vec![ALL];
    names.extend(patterns::NAMES);
    names
}

/// A size of the cache.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Share {
    Percent(f64),
    Pages(u64),
}

/// It isn't one.
#[derive(Debug, thiserror::Error)]
#[error("a size is a number of pages, or a share such as 30%")]
struct ShareError;

impl FromStr for Share {
    type Err = ShareError;

    fn from_str(text: &str) -> Result<Share, ShareError> {
        let share = match text.strip_suffix('%') {
            Some(percent) => Share::Percent(percent.parse().map_err(|_| ShareError)?),
            None => Share::Pages(text.parse().map_err(|_| ShareError)?),
        };
        match share {
            Share::Percent(percent) if percent > 0.0 && percent <= 100.0 => Ok(share),
            Share::Pages(pages) if pages > 0 => Ok(share),
            Share::Percent(_) | Share::Pages(_) => Err(ShareError),
        }
    }
}

impl Share {
    /// Pages of a cache for a trace of so many.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a u32 is one"
    )]
    fn pages(self, distinct: u32) -> u64 {
        match self {
            Share::Percent(percent) => {
                ((f64::from(distinct) * percent / 100.0).round() as u64).max(1)
            }
            Share::Pages(pages) => pages,
        }
    }
}

impl Replay {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let mut report = Report::new(self.policies(), self.warm_up);
        for pattern in self.chosen() {
            self.replay(&Trace::from(pattern), &mut report);
        }
        for path in &self.traces {
            for file in trace::files(path)? {
                self.replay(&trace::read(&file)?, &mut report);
            }
        }
        report.sum_up();
        output::print(&match self.output {
            Format::Table => report.table(),
            Format::Json => output::json(&report),
        })
    }

    fn replay(&self, trace: &Trace, report: &mut Report) {
        for size in &self.sizes {
            report.add(trace, size.pages(trace.distinct));
        }
    }

    fn chosen(&self) -> impl Iterator<Item = Pattern> + '_ {
        let wanted =
            |name: &&str| self.patterns.iter().any(|wanted| wanted == ALL || wanted == name);
        patterns::NAMES.into_iter().filter(wanted).filter_map(|name| patterns::make(name, PASSES))
    }

    fn policies(&self) -> Vec<Policy> {
        if self.policies.is_empty() { Policy::DEFAULT.to_vec() } else { self.policies.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_pages_or_shares() {
        let pages = |text: &str| text.parse::<Share>().map(|share| share.pages(1000));
        assert_eq!(pages("30%").unwrap(), 300);
        assert_eq!(pages("0.01%").unwrap(), 1);
        assert_eq!(pages("12").unwrap(), 12);
        for bad in ["0", "0%", "101%", "-1%", "NaN%", "x", "%", ""] {
            assert_eq!(
                pages(bad).unwrap_err().to_string(),
                "a size is a number of pages, or a share such as 30%",
                "{bad}"
            );
        }
    }
}
