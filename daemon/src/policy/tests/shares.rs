//! What the daemon's policy promises: its share of the hits of Belady's MIN, without any plan. docs/policy.md has the
//! table; these are its limits, over the generated patterns.

use super::super::patterns;
use super::*;

const PASSES: u32 = 40;

/// A pattern with a cache of one size: ratios of hits.
struct Cell {
    name: &'static str,
    pages: u64,
    lapis: f64,
    opt: f64,
    /// The better of LRU and S3-FIFO.
    simple: f64,
}

impl Cell {
    fn share(&self) -> f64 {
        self.lapis / self.opt
    }

    /// Hits in a hundred that it has less than what is simple.
    fn below(&self) -> f64 {
        (self.simple - self.lapis) * 100.0
    }
}

fn cell(name: &'static str, percent: usize, warm_up: usize) -> Cell {
    let trace = patterns::make(name, PASSES).unwrap().accesses;
    let distinct = *trace.iter().max().unwrap() as usize + 1;
    let pages = (distinct * percent / 100) as u64;
    let ratio = |directory: &mut dyn Directory| {
        hits(directory, trace[..warm_up].iter().copied());
        let counted = hits(directory, trace[warm_up..].iter().copied());
        counted as f64 / (trace.len() - warm_up) as f64
    };
    let lapis = ratio(&mut Duel::new(pages, Leader::Lirs));
    let opt = ratio(&mut Opt::new(pages, &trace));
    let simple = ratio(&mut Lru::new(pages)).max(ratio(&mut S3Fifo::new(pages)));
    Cell { name, pages, lapis, opt, simple }
}

#[test]
fn a_cycle_has_nearly_all_the_hits_there_can_be_after_two_passes() {
    let pass = patterns::make("cycle", 1).unwrap().accesses.len();
    for percent in (10..=90).step_by(10) {
        let share = cell("cycle", percent, 2 * pass).share();
        assert!(share >= 0.98, "{percent}%: {share:.3}");
    }
}

#[test]
fn patterns_have_most_of_the_hits_there_can_be() {
    let limit = |name| match name {
        // What is left out, or which expert is chosen, nobody can know.
        "cycle-skips" => 0.82,
        "experts" | "cycle-kv-zipf" => 0.88,
        "two-cycles-random" => 0.92,
        _ => 0.95,
    };
    let sizes = [10, 30, 50, 80];
    let mut cells = Vec::new();
    for name in patterns::NAMES {
        let these = sizes.map(|percent| cell(name, percent, 0));
        let share = these.iter().map(Cell::share).sum::<f64>() / 4.0;
        assert!(share >= limit(name), "{name}: {share:.3}");
        cells.extend(these);
    }
    let share = cells.iter().map(Cell::share).sum::<f64>() / cells.len() as f64;
    assert!(share >= 0.95, "{share:.3}");
    let good = cells.iter().filter(|cell| cell.below() <= 1.0).count();
    assert!(good * 100 >= cells.len() * 97, "{good} of {}", cells.len());
    for cell in &cells {
        let below = cell.below();
        assert!(below <= 2.0, "{} in {} pages: {below:.2} points", cell.name, cell.pages);
    }
}
