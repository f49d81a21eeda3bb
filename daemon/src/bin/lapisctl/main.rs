//! `lapisctl`, the command line of Lapis: one file per group of verbs. It speaks to the daemon through the client
//! library, as any program does.

mod connect;
mod failure;
mod output;
mod plan;
mod quota;
mod replay;
mod status;
mod stream;
mod text;
mod tier;
mod wss;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use failure::Failure;

/// Controls lapisd and tries it out.
#[derive(Debug, Parser)]
#[command(name = "lapisctl", version, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Stream(stream::Stream),
    Plan(plan::Plan),
    Status(status::Status),
    Wss(wss::Wss),
    Tier(tier::Tier),
    Quota(quota::Quota),
    Replay(replay::Replay),
}

const AFTER_HELP: &str = "\
Socket: --socket, else $LAPIS_SOCKET, else $XDG_RUNTIME_DIR/lapis.sock if it exists, else /run/lapis/lapis.sock.
CUDA driver, where the daemon has a CUDA device: LAPIS_LIBCUDA, else the libcuda.so that the system finds.
Log of an embedded daemon: LAPIS_LOG=info (or warn, debug, trace) shows it on standard error.
Exit status: 0 ok, 1 failure or wrong bytes, 2 wrong usage, 3 daemon unreachable, 4 denied, 5 not found, \
6 out of capacity.";

fn main() -> ExitCode {
    let cli = Cli::parse();
    start_log();
    let result = match cli.verb {
        Verb::Stream(stream) => stream.run(),
        Verb::Plan(plan) => plan.run(),
        Verb::Status(status) => status.run(),
        Verb::Wss(wss) => wss.run(),
        Verb::Tier(tier) => tier.run(),
        Verb::Quota(quota) => quota.run(),
        Verb::Replay(replay) => replay.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // Nobody is left to tell that standard error is closed.
            let _closed = std::io::stderr().write_all(complaint(&failure).as_bytes());
            ExitCode::from(failure.exit() as u8)
        }
    }
}

/// What and why, then what to do next.
fn complaint(failure: &Failure) -> String {
    let mut text = format!("error: {}\n", failure.chain());
    if let Some(next) = failure.next() {
        text.push_str(&format!("next: {next}\n"));
    }
    text
}

/// The embedded daemon's log, only when it is asked for: the report is what counts here.
fn start_log() {
    let filter = std::env::var("LAPIS_LOG").ok();
    let filter = filter.and_then(|filter| tracing_subscriber::EnvFilter::try_new(filter).ok());
    if let Some(filter) = filter {
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .init();
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use lapisd::config::ConfigError;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_complaint_says_what_why_and_what_next() {
        let failure = Failure::Config(ConfigError::ShareOfSim);
        assert_eq!(
            complaint(&failure),
            "error: vram is a share, but the sim device has no memory of its own to take it of\n\
             next: give vram as a size, such as 8GiB\n"
        );
    }
}
