//! The suites that have a form for a GPU, as `cargo test` runs them where Rust is.

use std::process::Command;

use crate::Outcome;
use crate::rows::Said;
use crate::setup::Setup;

const SUITES: [&str; 4] = ["paging", "isolation", "crash", "stream"];

pub(crate) fn run(setup: &Setup, said: &Said) -> Outcome {
    for suite in SUITES {
        let row = format!("suite {suite}");
        let program = setup.programs.join(suite);
        if !program.exists() {
            said.skipped(&row, "it is not among the programs");
            continue;
        }
        let output = Command::new(program)
            .args(["--skip", "on_the_fake_gpu", "--skip", "on_a_gpu"])
            .env("LAPIS_TEST_DEVICE", "gpu")
            .env("LAPIS_TEST_PREBUILT", "1")
            .env("TMPDIR", &setup.scratch)
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let well = output.status.success() && !text.contains(" 0 passed");
        said.check(&row, well, summary(&text));
    }
    Ok(())
}

/// How many passed; which did not, and what the first said.
fn summary(text: &str) -> String {
    let result = text.lines().find_map(|line| line.strip_prefix("test result: "));
    let failed = text.lines().filter_map(|line| line.strip_suffix(" ... FAILED"));
    let failed: Vec<&str> = failed.map(|line| line.trim_start_matches("test ")).collect();
    let mut lines = text.lines();
    let first = lines.find(|line| line.contains("panicked at")).and_then(|_| lines.next());
    let (result, first) = (result.unwrap_or("it did not end"), first.unwrap_or_default());
    let result = result.split("; 0 measured").next().unwrap_or_default();
    format!("{result} {} {first}", failed.join(", ")).trim_end().to_owned()
}
