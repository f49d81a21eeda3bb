//! What came out, trace by trace and in all.

use serde::Serialize;

use super::policy::Policy;
use super::trace::Trace;
use crate::text::{self, Table};

/// Version of the JSON's fields.
const SCHEMA: u32 = 1;
/// Hits of a hundred accesses that lapis may have less than the better of LRU and S3-FIFO for a cell to count as good.
const POINTS_BELOW: f64 = 1.0;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    schema: u32,
    policies: Vec<Policy>,
    /// Accesses of each trace whose hits don't count.
    warm_up: usize,
    cells: Vec<Cell>,
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<Summary>,
}

/// A trace with a cache of one size.
#[derive(Debug, Serialize)]
struct Cell {
    trace: String,
    /// Whether its units are blocks of KV caches.
    blocks: bool,
    /// Those that count.
    accesses: usize,
    distinct: u32,
    pages: u64,
    /// In the order of the policies.
    hits: Vec<u64>,
    hit_ratios: Vec<f64>,
}

/// How the daemon's policy does over all cells.
#[derive(Debug, Serialize)]
struct Summary {
    cells: usize,
    /// Mean of its hits in those of `opt`, over cells in which that has any.
    share_of_opt: f64,
    /// Share of cells at most a point below the better of LRU and S3-FIFO.
    good_cells: f64,
    /// Points below that in the worst cell, and which that is.
    worst_points_below: f64,
    worst_cell: String,
}

impl Report {
    pub(super) fn new(policies: Vec<Policy>, warm_up: usize) -> Report {
        Report { schema: SCHEMA, policies, warm_up, cells: Vec::new(), summary: None }
    }

    /// Replays a trace with a cache of so many pages.
    pub(super) fn add(&mut self, trace: &Trace, pages: u64) {
        let accesses = trace.accesses.len().saturating_sub(self.warm_up);
        let hits = self.policies.iter().map(|policy| policy.hits(pages, trace, self.warm_up));
        let hits: Vec<u64> = hits.collect();
        let ratio = |hits: &u64| *hits as f64 / accesses.max(1) as f64;
        self.cells.push(Cell {
            trace: trace.name.clone(),
            blocks: trace.blocks,
            accesses,
            distinct: trace.distinct,
            pages,
            hit_ratios: hits.iter().map(ratio).collect(),
            hits,
        });
    }

    /// Sums up, if what it takes was replayed.
    pub(super) fn sum_up(&mut self) {
        let at = |wanted| self.policies.iter().position(|policy| *policy == wanted);
        let columns = [Policy::Lapis, Policy::Lru, Policy::S3fifo, Policy::Opt].map(at);
        let [Some(lapis), Some(lru), Some(s3fifo), Some(opt)] = columns else { return };
        let with_hits = || self.cells.iter().filter(|cell| cell.hits[opt] > 0);
        let shares = with_hits().map(|cell| cell.hit_ratios[lapis] / cell.hit_ratios[opt]);
        let below = |cell: &Cell| {
            let ratios = &cell.hit_ratios;
            (ratios[lru].max(ratios[s3fifo]) - ratios[lapis]) * 100.0
        };
        let good = self.cells.iter().filter(|cell| below(cell) <= POINTS_BELOW).count();
        let worst = self.cells.iter().max_by(|a, b| below(a).total_cmp(&below(b)));
        self.summary = worst.map(|worst| Summary {
            cells: self.cells.len(),
            share_of_opt: shares.sum::<f64>() / with_hits().count().max(1) as f64,
            good_cells: good as f64 / self.cells.len() as f64,
            worst_points_below: below(worst),
            worst_cell: format!("{} in {} pages", worst.trace, worst.pages),
        });
    }

    pub(super) fn table(&self) -> String {
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
        out.push_str(&self.summary.as_ref().map_or_else(String::new, Summary::text));
        out
    }
}

impl Summary {
    fn text(&self) -> String {
        format!(
            "\nlapis has {:.3} of opt's hits (mean of {}); in {:.1}% of them it is at most 1 point below \
             the better of lru and s3fifo\nworst: {}, {:.2} points {}\n",
            self.share_of_opt,
            text::count(self.cells as u64, "cell", "cells"),
            self.good_cells * 100.0,
            self.worst_cell,
            self.worst_points_below.abs(),
            if self.worst_points_below > 0.0 { "below" } else { "above" },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::trace::Numbers;
    use super::*;
    use crate::output;

    fn cycle() -> Trace {
        let mut numbers = Numbers::default();
        (0..40).for_each(|at| numbers.access(at % 4));
        numbers.into_trace("cycle".to_owned(), false)
    }

    #[test]
    fn a_report_is_a_table_or_json() {
        let mut report = Report::new(vec![Policy::Lru, Policy::Opt], 0);
        report.add(&cycle(), 2);
        report.add(&cycle(), 4);
        report.sum_up();
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
                r#"{"schema":1,"policies":["lru","opt"],"warm_up":0,"cells":[{"trace":"cycle","#,
                r#""blocks":false,"accesses":40,"distinct":4,"pages":2,"hits":[0,12],"#,
                r#""hit_ratios":[0.0,0.3]}]}"#,
                "\n"
            )
        );
    }

    #[test]
    fn hits_of_the_warm_up_do_not_count() {
        let mut report = Report::new(vec![Policy::Lru], 4);
        report.add(&cycle(), 4);
        assert_eq!((report.cells[0].accesses, report.cells[0].hits[0]), (36, 36));
        let mut report = Report::new(vec![Policy::Lru], 50);
        report.add(&cycle(), 4);
        assert_eq!((report.cells[0].accesses, report.cells[0].hit_ratios[0]), (0, 0.0));
    }

    #[test]
    fn the_summary_says_how_far_from_the_best_it_is() {
        let policies = vec![Policy::Lru, Policy::S3fifo, Policy::Lapis, Policy::Opt];
        let mut report = Report::new(policies, 0);
        let cell = |pages, hit_ratios: [f64; 4]| Cell {
            trace: "t".to_owned(),
            blocks: false,
            accesses: 100,
            distinct: 9,
            pages,
            hits: vec![0, 0, 0, u64::from(hit_ratios[3] > 0.0)],
            hit_ratios: hit_ratios.to_vec(),
        };
        report.cells.push(cell(1, [0.5, 0.25, 0.375, 0.5]));
        report.cells.push(cell(2, [0.125, 0.25, 0.25, 0.25]));
        report.cells.push(cell(3, [0.0, 0.0, 0.0, 0.0]));
        report.sum_up();
        assert!(report.table().ends_with(
            "\nlapis has 0.875 of opt's hits (mean of 3 cells); in 66.7% of them it is at most 1 \
             point below the better of lru and s3fifo\nworst: t in 1 pages, 12.50 points below\n"
        ));
    }
}
