//! The deterministic simulator: the real engine and the real transfer code between simulated clients on one side and a
//! virtual store and device on the other, in virtual time. Everything follows from a seed, so a failure replays exactly.
//!
//! ```text
//!  operations, client      what clients do, and what they know
//!        |  ^
//!  world, delivery         network, sockets, processes: the server's part, with delays
//!        |  ^
//!    ledger, rules, counts, served, shares, tiers, order, frames, retries, alarms
//!        |  ^              watch every event and command at the engine's border
//!        |  ^
//!  [ engine, transfer ]    under test
//!        |  ^
//!   store, device          on machine: memory, disk, clock, faults, planted bugs
//! ```
//! `truth` knows what every byte should be. A broken rule panics; [`run_seed`] turns that into a [`Failure`].
//!
//! To add an operation: a row of the table and an arm in `operations`; a new kind of request also has an arm in
//! `rules` (what it may be answered with) and in `ledger` (what its reply changes). `shares` and `tiers` are the naive
//! models of quotas and of the tiers' sizes. To add a fault: a line in `faults`,
//! and the place where it strikes. To plant a bug: a line in `mutant`, and the place where it shows.
//!
//! See `docs/testing.md`.

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use mutant::Mutant;
use report::Report;
use scenario::Scenario;
use world::World;

mod alarms;
mod client;
mod counts;
mod delivery;
mod device;
mod disk;
pub mod faults;
mod frames;
mod ledger;
mod machine;
mod memory;
pub mod mutant;
mod operations;
mod order;
mod random;
pub mod report;
mod retries;
mod rules;
mod sayings;
mod scenario;
mod served;
mod shares;
mod store;
mod tiers;
mod trace;
mod truth;
mod world;

/// Actions of clients in one run, unless said otherwise.
pub const STEPS: u64 = 1500;

/// How to run a seed.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Actions of clients.
    pub steps: u64,
    /// A bug to plant.
    pub mutant: Option<Mutant>,
    /// Print every event and command.
    pub print: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { steps: STEPS, mutant: None, print: false }
    }
}

/// What a run came to.
#[derive(Debug)]
pub struct Outcome {
    /// Its sums.
    pub report: Report,
    /// A number for all that happened.
    pub trace: u64,
}

/// A rule was broken.
#[derive(Debug)]
pub struct Failure {
    /// In which run.
    pub seed: u64,
    /// How it was run.
    pub options: Options,
    /// Which rule, and where it is.
    pub message: String,
    /// Requests that the engine had handled.
    pub operations: u64,
    /// Events that the engine had handled.
    pub events: u64,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, message, operations, events, .. } = self;
        writeln!(
            f,
            "seed {seed} failed after {operations} operations ({events} events): {message}"
        )?;
        write!(f, "replay: cargo run --release -p lapis-tests --bin simulate -- ")?;
        write!(f, "--seeds {seed}..{} --steps {}", seed + 1, self.options.steps)?;
        if let Some(mutant) = self.options.mutant {
            write!(f, " --mutant {}", mutant.name())?;
        }
        write!(f, " --trace")
    }
}

/// Runs one seed.
///
/// # Errors
/// The rule that was broken.
pub fn run_seed(seed: u64, options: Options) -> Result<Outcome, Box<Failure>> {
    let mut world = World::new(Scenario::new(seed), options);
    match catch(|| world.run()) {
        Ok(()) => Ok(Outcome { report: world.report(), trace: world.trace() }),
        Err(message) => {
            if options.print {
                println!("{:#?}", world.engine);
            }
            let Report { operations, events, .. } = world.report();
            Err(Box::new(Failure { seed, options, message, operations, events }))
        }
    }
}

/// Runs seeds on as many threads, and adds up. Stops at the first failure that any thread finds.
///
/// # Errors
/// That failure.
pub fn run_seeds(
    seeds: Range<u64>,
    options: Options,
    threads: usize,
) -> Result<Report, Box<Failure>> {
    let next = AtomicU64::new(seeds.start);
    let total = Mutex::new(Ok(Report::default()));
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            let outcome = run_seed(seed, options);
            let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
            match (&mut *total, outcome) {
                (Ok(sum), Ok(outcome)) => sum.add(&outcome.report),
                (Ok(_), Err(failure)) => *total = Err(failure),
                (Err(_), _) => return,
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    total.into_inner().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// What a panic said, while a run is watched.
    static CAUGHT: RefCell<Option<String>> = const { RefCell::new(None) };
    static WATCHED: RefCell<bool> = const { RefCell::new(false) };
}

/// Runs it; a panic is an error with its message and place, and prints nothing.
fn catch(run: impl FnOnce()) -> Result<(), String> {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if WATCHED.with_borrow(|watched| *watched) {
                CAUGHT.set(Some(info.to_string()));
            } else {
                usual(info);
            }
        }));
    });
    WATCHED.set(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    WATCHED.set(false);
    result.map_err(|_payload| CAUGHT.take().unwrap_or_default())
}
