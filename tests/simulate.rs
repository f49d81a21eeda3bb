//! Runs seeds of the simulator: `cargo run --release -p lapis-tests --bin simulate -- --seeds 0..10000`.

use std::ops::Range;
use std::process::ExitCode;
use std::time::Instant;

use lapis_tests::simulation::mutant::Mutant;
use lapis_tests::simulation::{Options, run_seed, run_seeds};

const USAGE: &str = "\
usage: simulate [--seeds FIRST..END] [--steps N] [--threads N] [--mutant NAME] [--trace]
  --seeds FIRST..END  which runs (0..1000)
  --steps N           actions of clients in each (1500)
  --threads N         runs at once (as many as there are CPUs)
  --mutant NAME       plant a bug; `list` for the names
  --trace             print every event and command of each run";

struct Arguments {
    seeds: Range<u64>,
    threads: usize,
    options: Options,
}

fn parse() -> Result<Arguments, String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut parsed = Arguments { seeds: 0..1000, threads, options: Options::default() };
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        if flag == "--trace" {
            parsed.options.print = true;
            parsed.threads = 1;
            continue;
        }
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        let number = |text: &str| text.parse().map_err(|_| format!("{text} is no number"));
        match flag.as_str() {
            "--seeds" => {
                let (first, end) =
                    value.split_once("..").ok_or("--seeds takes FIRST..END, e.g. 0..1000")?;
                parsed.seeds = number(first)?..number(end)?;
            }
            "--steps" => parsed.options.steps = number(&value)?,
            "--threads" => {
                parsed.threads =
                    value.parse().map_err(|_| format!("{value} is no number of threads"))?;
            }
            "--mutant" => {
                let names = || Mutant::ALL.iter().map(|m| m.name()).collect::<Vec<_>>().join(" ");
                let mutant = Mutant::from_name(&value);
                parsed.options.mutant =
                    Some(mutant.ok_or_else(|| format!("planted bugs are: {}", names()))?);
            }
            _ => return Err(format!("{flag} is not known")),
        }
    }
    Ok(parsed)
}

fn main() -> ExitCode {
    let Arguments { seeds, threads, options } = match parse() {
        Ok(parsed) => parsed,
        Err(error) => {
            eprintln!("simulate: {error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let started = Instant::now();
    let result = if seeds.end - seeds.start == 1 {
        run_seed(seeds.start, options).map(|outcome| {
            println!("trace            {:>#18x}", outcome.trace);
            outcome.report
        })
    } else {
        run_seeds(seeds, options, threads)
    };
    match result {
        Ok(report) => {
            print!("{report}");
            println!("seconds          {:>12.1}", started.elapsed().as_secs_f64());
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}
