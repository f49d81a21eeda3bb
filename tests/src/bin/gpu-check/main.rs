//! Asks a GPU what only hardware can tell, and runs `lapisd` on it: `gpu-check --help`.
//!
//! Each probe is a process of its own, with a time limit: one that fails, hangs or dies spoils no other.

mod card;
mod copies;
mod costs;
mod crash;
mod disk;
mod host;
mod limits;
mod probe;
mod role;
mod rows;
mod served;
mod setup;
mod sharing;
mod stream;
mod suite;
mod vmm;

use std::process::ExitCode;

use rows::Said;
use setup::{Mode, Setup};

/// What a probe or a role comes to.
type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let (setup, mode) = match Setup::parse(std::env::args().skip(1)) {
        Ok(parsed) => parsed,
        Err(text) => {
            eprintln!("{text}");
            return ExitCode::from(2);
        }
    };
    match mode {
        Mode::All => probe::run_all(&setup),
        Mode::Probe(name) => {
            let Some(found) = probe::PROBES.iter().find(|probe| probe.name == name) else {
                eprintln!("no such probe: {name}");
                return ExitCode::from(2);
            };
            if let Err(error) = (found.run)(&setup, &Said) {
                Said.error(&error.to_string());
            }
            ExitCode::SUCCESS
        }
        Mode::Role(arguments) => role::play(&arguments),
    }
}
