//! Finds the programs under test, built with the profile of the test that runs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Says that the programs lie beside this test, and that nothing can be built.
const PREBUILT: &str = "LAPIS_TEST_PREBUILT";

/// Whether this runs on a machine that it was built for on another.
#[must_use]
pub fn is_prebuilt() -> bool {
    std::env::var_os(PREBUILT).is_some()
}

/// `target/debug` or `target/release`: where this test's own executable lies, without `deps`.
#[must_use]
pub fn directory() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        let test = std::env::current_exe().expect("a test has an executable");
        let deps = test.parent().expect("a file is in a directory");
        let directory = if deps.ends_with("deps") { deps.parent() } else { Some(deps) };
        let directory = directory.expect("deps is in a directory").to_owned();
        if !is_prebuilt() {
            build(&directory);
        }
        directory
    })
}

/// A test of one package does not build another's programs.
fn build(directory: &Path) {
    let mut command = Command::new(env!("CARGO"));
    command.args(["build", "--quiet", "--locked", "-p", "lapisd", "--bins"]);
    if directory.ends_with("release") {
        command.arg("--release");
    }
    command.arg("--target-dir").arg(directory.parent().expect("a profile is in target"));
    let status = command.status().expect("cargo runs");
    assert!(status.success(), "cannot build lapisd and lapisctl");
}

/// The daemon.
#[must_use]
pub fn lapisd() -> PathBuf {
    directory().join("lapisd")
}

/// The command line.
#[must_use]
pub fn lapisctl() -> PathBuf {
    directory().join("lapisctl")
}

/// Clients for tests that kill them, or that let another user be one.
#[must_use]
pub fn test_client() -> PathBuf {
    directory().join("test-client")
}

/// A directory on a disk, for files that must be readable with `O_DIRECT`; removed when dropped. Where everything is
/// built beforehand, it is in `TMPDIR`.
///
/// # Panics
/// When it can't be made.
#[must_use]
pub fn scratch() -> tempfile::TempDir {
    if is_prebuilt() {
        return tempfile::tempdir().expect("TMPDIR is writable");
    }
    let parent = directory().parent().expect("a profile is in target").join("tmp");
    std::fs::create_dir_all(&parent).expect("target is writable");
    tempfile::tempdir_in(parent).expect("target is writable")
}
