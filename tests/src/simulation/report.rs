//! What runs amounted to.

use std::collections::BTreeMap;
use std::fmt;

use lapis_proto::code::Code;

use super::faults::Fault;

/// Sums over runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Runs.
    pub seeds: u64,
    /// Runs in which nothing failed.
    pub calm_seeds: u64,
    /// Requests that the engine handled.
    pub operations: u64,
    /// Events that the engine handled: requests, completions, ticks, sessions that came and went.
    pub events: u64,
    /// Pages that clients compared with the model.
    pub pages_checked: u64,
    /// Pages that clients wrote.
    pub pages_written: u64,
    /// Virtual time, microseconds.
    pub virtual_us: u64,
    /// Replies by kind.
    pub replies: BTreeMap<&'static str, u64>,
    /// Refusals by the number of their code.
    pub refusals: BTreeMap<u16, u64>,
    /// Transfers that ended, by kind.
    pub hops: BTreeMap<&'static str, u64>,
    /// Faults, in the order of [`Fault::ALL`].
    pub faults: Vec<u64>,
}

impl Report {
    /// Adds another's sums.
    pub fn add(&mut self, other: &Report) {
        self.seeds += other.seeds;
        self.calm_seeds += other.calm_seeds;
        self.operations += other.operations;
        self.events += other.events;
        self.pages_checked += other.pages_checked;
        self.pages_written += other.pages_written;
        self.virtual_us += other.virtual_us;
        for (name, count) in &other.replies {
            *self.replies.entry(name).or_default() += count;
        }
        for (code, count) in &other.refusals {
            *self.refusals.entry(*code).or_default() += count;
        }
        for (name, count) in &other.hops {
            *self.hops.entry(name).or_default() += count;
        }
        self.faults.resize(Fault::ALL.len(), 0);
        for (sum, count) in self.faults.iter_mut().zip(&other.faults) {
            *sum += count;
        }
    }

    /// How often a code was answered.
    #[must_use]
    pub fn refused(&self, code: Code) -> u64 {
        self.refusals.get(&code.number()).copied().unwrap_or(0)
    }

    /// How often a fault happened.
    #[must_use]
    pub fn happened(&self, fault: Fault) -> u64 {
        self.faults.get(fault as usize).copied().unwrap_or(0)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seeds            {:>12}  ({} of them calm)", self.seeds, self.calm_seeds)?;
        writeln!(f, "operations       {:>12}", self.operations)?;
        writeln!(f, "engine events    {:>12}", self.events)?;
        writeln!(f, "pages checked    {:>12}", self.pages_checked)?;
        writeln!(f, "pages written    {:>12}", self.pages_written)?;
        writeln!(f, "virtual seconds  {:>12}", self.virtual_us / 1_000_000)?;
        let rows = |f: &mut fmt::Formatter<'_>, rows: &BTreeMap<&'static str, u64>| {
            rows.iter().try_for_each(|(name, count)| writeln!(f, "  {name:<32} {count:>12}"))
        };
        writeln!(f, "replies")?;
        rows(f, &self.replies)?;
        for (number, count) in &self.refusals {
            let code = Code::from_u16(*number).map_or_else(String::new, |code| format!("{code:?}"));
            writeln!(f, "  Refused: {code:<23} {count:>12}")?;
        }
        writeln!(f, "transfers")?;
        rows(f, &self.hops)?;
        writeln!(f, "faults")?;
        for (fault, count) in Fault::ALL.iter().zip(&self.faults) {
            writeln!(f, "  {:<32} {count:>12}", fault.name())?;
        }
        Ok(())
    }
}
