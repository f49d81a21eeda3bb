//! `lapisctl replay`: what replacement policies make of a trace.

use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueEnum;
use lapisd::policy::Directory;
use lapisd::policy::arc::Arc;
use lapisd::policy::lirs::Lirs;
use lapisd::policy::lru::Lru;
use lapisd::policy::opt::Opt;
use lapisd::policy::s3fifo::S3Fifo;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{self, Format};
use crate::text::Table;
use trace::Trace;

pub(crate) mod trace;

/// Version of the JSON's fields.
const SCHEMA: u32 = 1;

/// Replays traces of page accesses through replacement policies
///
/// A trace is a file of page ids, one a line, or of requests to a KV cache, JSON lines with a list hash_ids; both
/// may be gzip. Of a directory, files named .trace, .jsonl and the same with .gz are read. The cache begins empty, so no
/// policy hits a page's first use. `opt` knows the future and is the most that can be had.
#[derive(Debug, clap::Args)]
pub(crate) struct Replay {
    /// Files, or directories of them
    #[arg(value_name = "TRACE", required = true)]
    traces: Vec<PathBuf>,
    /// A policy to compare; may be given several times [default: all but parts of lapis]
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
    /// How to print the result
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    output: Format,
}

/// A policy by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Policy {
    /// Least recently used
    Lru,
    /// S3-FIFO
    S3fifo,
    /// ARC
    Arc,
    /// LIRS
    Lirs,
    /// Belady's MIN, which knows the future
    Opt,
}

impl Policy {
    const DEFAULT: [Policy; 5] =
        [Policy::Lru, Policy::S3fifo, Policy::Arc, Policy::Lirs, Policy::Opt];

    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn directory(self, pages: u64, trace: &Trace) -> Box<dyn Directory> {
        match self {
            Policy::Lru => Box::new(Lru::new(pages)),
            Policy::S3fifo => Box::new(S3Fifo::new(pages)),
            Policy::Arc => Box::new(Arc::new(pages)),
            Policy::Lirs => Box::new(Lirs::new(pages)),
            Policy::Opt => Box::new(Opt::new(pages, &trace.accesses)),
        }
    }

    /// Hits on a trace with a cache of so many pages.
    fn hits(self, pages: u64, trace: &Trace) -> u64 {
        let (mut directory, mut out, mut hits) = (self.directory(pages, trace), Vec::new(), 0);
        for slot in &trace.accesses {
            out.clear();
            hits += u64::from(directory.access(*slot, 1, &mut out));
        }
        hits
    }
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
        let mut report = Report { schema: SCHEMA, policies: self.policies(), cells: Vec::new() };
        for path in &self.traces {
            for file in trace::files(path)? {
                report.add(&trace::read(&file)?, &self.sizes);
            }
        }
        output::print(&match self.output {
            Format::Table => report.table(),
            Format::Json => output::json(&report),
        })
    }

    fn policies(&self) -> Vec<Policy> {
        if self.policies.is_empty() { Policy::DEFAULT.to_vec() } else { self.policies.clone() }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    policies: Vec<Policy>,
    cells: Vec<Cell>,
}

/// A trace with a cache of one size.
#[derive(Debug, Serialize)]
struct Cell {
    trace: String,
    /// Whether its units are blocks of KV caches.
    blocks: bool,
    accesses: usize,
    distinct: u32,
    pages: u64,
    /// In the order of the policies.
    hits: Vec<u64>,
    hit_ratios: Vec<f64>,
}

impl Report {
    fn add(&mut self, trace: &Trace, sizes: &[Share]) {
        for size in sizes {
            let pages = size.pages(trace.distinct);
            let hits: Vec<u64> =
                self.policies.iter().map(|policy| policy.hits(pages, trace)).collect();
            let ratio = |hits: &u64| *hits as f64 / trace.accesses.len() as f64;
            self.cells.push(Cell {
                trace: trace.name.clone(),
                blocks: trace.blocks,
                accesses: trace.accesses.len(),
                distinct: trace.distinct,
                pages,
                hit_ratios: hits.iter().map(ratio).collect(),
                hits,
            });
        }
    }

    fn table(&self) -> String {
        let names: Vec<String> = self.policies.iter().map(|policy| policy.name()).collect();
        let mut heading = vec!["hit %", "pages"];
        heading.extend(names.iter().map(String::as_str));
        let mut table = Table::new(&heading);
        for cell in &self.cells {
            let ratios = cell.hit_ratios.iter().map(|ratio| format!("{:.2}", ratio * 100.0));
            table.row([cell.trace.clone(), cell.pages.to_string()].into_iter().chain(ratios));
        }
        let mut out = String::new();
        table.write(&mut out);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trace::Numbers;

    fn cycle() -> Trace {
        let mut numbers = Numbers::default();
        (0..40).for_each(|at| numbers.access(at % 4));
        numbers.into_trace("cycle".to_owned(), false)
    }

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

    #[test]
    fn a_report_is_a_table_or_json() {
        let policies = vec![Policy::Lru, Policy::Opt];
        let mut report = Report { schema: SCHEMA, policies, cells: Vec::new() };
        report.add(&cycle(), &[Share::Percent(50.0), Share::Pages(4)]);
        assert_eq!(
            report.table(),
            "hit %  pages    lru    opt\n\
             cycle      2   0.00  30.00\n\
             cycle      4  90.00  90.00\n"
        );
        report.cells.pop();
        assert_eq!(
            output::json(&report),
            concat!(
                r#"{"schema":1,"policies":["lru","opt"],"cells":[{"trace":"cycle","blocks":false,"#,
                r#""accesses":40,"distinct":4,"pages":2,"hits":[0,12],"hit_ratios":[0.0,0.3]}]}"#,
                "\n"
            )
        );
    }
}
