//! The simulator's fixed set of seeds, and the bugs that it must see; `simulate` runs any number of seeds. See
//! `docs/testing.md`.

use lapis_tests::simulation::mutant::Mutant;
use lapis_tests::simulation::{Options, run_seed, run_seeds};

/// Seeds in which a planted bug must show.
const MUTANT_SEEDS: u64 = 400;

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[test]
fn no_rule_is_broken_in_the_fixed_set_of_seeds() {
    match run_seeds(0..200, Options::default(), threads()) {
        Ok(report) => assert!(report.operations > 50_000, "{report}"),
        Err(failure) => panic!("{failure}"),
    }
}

#[test]
fn a_seed_replays_exactly() {
    for seed in [3, 17, 40] {
        let run = || run_seed(seed, Options::default()).map(|outcome| outcome.trace);
        let (first, second) = (run(), run());
        assert_eq!(first.expect("no rule is broken"), second.expect("no rule is broken"));
    }
}

#[test]
fn every_planted_bug_is_found() {
    let mut missed = Vec::new();
    for mutant in Mutant::ALL {
        let options = Options { mutant: Some(*mutant), ..Options::default() };
        match run_seeds(0..MUTANT_SEEDS, options, threads()) {
            Ok(_) => missed.push(mutant.name()),
            Err(failure) => {
                eprintln!("{}: seed {}: {}", mutant.name(), failure.seed, failure.message);
            }
        }
    }
    assert!(missed.is_empty(), "not found in {MUTANT_SEEDS} seeds: {missed:?}");
}
