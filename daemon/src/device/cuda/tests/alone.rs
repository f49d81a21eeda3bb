//! A test in a process of its own, on a machine with fake devices.

use std::path::Path;
use std::process::Command;

use lapis_fake_cuda::harness::FakeCuda;

/// In the child: which test it is.
const TEST: &str = "CUDA_TEST";
/// Longest that a test may take. Most take less than a second; on a machine that is busy with much else, many.
const SECONDS_MAX: u32 = 120;
/// In the child: where the machine is.
const DIRECTORY: &str = "CUDA_TEST_DIRECTORY";

/// Runs the body in a process of its own, with these settings of the fake driver. `test` is the name of the test that
/// calls this; behind a `#` is what tells several bodies of one apart.
pub(super) fn alone(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    if let Ok(current) = std::env::var(TEST) {
        if current == test {
            // SAFETY: takes no pointers. A test that hangs ends by a signal.
            unsafe { libc::alarm(SECONDS_MAX) };
            body();
            std::fs::write(directory().join("reached"), "").unwrap();
        }
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let fake = FakeCuda::new(directory.path()).unwrap();
    let (function, _) = test.split_once('#').unwrap_or((test, ""));
    let output = Command::new(std::env::current_exe().unwrap())
        .args([&format!("device::cuda::tests::{function}"), "--exact", "--nocapture"])
        .env(TEST, test)
        .env(DIRECTORY, directory.path())
        .envs(fake.environment())
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    // By way of this test's own output, which is shown when it fails.
    print!("{}", String::from_utf8_lossy(&output.stdout));
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{test}: {}", output.status);
    // A wrong name would run no test at all, and succeed.
    assert!(directory.path().join("reached").exists(), "{test} was not run");
}

fn directory() -> std::path::PathBuf {
    std::env::var_os(DIRECTORY).unwrap().into()
}

/// The machine of this process.
pub(super) fn machine() -> FakeCuda {
    FakeCuda::open(Path::new(&directory()))
}
