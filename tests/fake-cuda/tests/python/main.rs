//! NVIDIA's own Python bindings on the fake driver: an ABI check by those who wrote `cuda.h`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lapis_fake_cuda::harness::FakeCuda;

/// The bindings, as pip names them.
const PACKAGE: &str = "cuda-bindings==13.5.0";

#[test]
fn nvidias_bindings_work() {
    let Some(python) = python() else { return };
    let directory = tempfile::tempdir().expect("a directory can be made");
    let fake = FakeCuda::new(directory.path()).expect("the directory is new");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/check.py");
    let mut command = Command::new(python);
    command.arg(script).envs(fake.environment());
    command.env("FAKE_CUDA_MEMORY", "64MiB").env("FAKE_CUDA_DEVICES", "2");
    let output = command.output().expect("Python runs");
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    // The script must have come to its end, and not to an exit on the way.
    assert!(text.ends_with("checked\n"), "{text}");
    assert_eq!(fake.memory_used(0).expect("it can be read"), 0, "all of it was given back");
}

/// A Python that has the bindings, in an environment of its own under `target`; `None`, said aloud, when it can't be had.
fn python() -> Option<PathBuf> {
    let test = std::env::current_exe().expect("a test has an executable");
    let target = test.ancestors().nth(3).expect("target/profile/deps/test");
    let environment = target.join("fixtures/cuda-bindings-13.5.0");
    let python = environment.join("bin/python");
    let has_bindings = || {
        let import = Command::new(&python).args(["-c", "import cuda.bindings.driver"]).output();
        import.is_ok_and(|output| output.status.success())
    };
    if has_bindings() {
        return Some(python);
    }
    std::fs::create_dir_all(target.join("fixtures")).expect("target is writable");
    // Without pip, as not every system has what puts it there; the one outside can install into it.
    let mut make = Command::new("python3");
    make.args(["-m", "venv", "--clear", "--without-pip"]).arg(&environment);
    let mut install = Command::new("python3");
    install.args(["-m", "pip", "--python"]).arg(&python).args(["install", "--quiet", PACKAGE]);
    for mut step in [make, install] {
        match step.output() {
            Ok(output) if output.status.success() => {}
            Ok(output) => return skipped(&said(&output)),
            Err(error) => return skipped(&error.to_string()),
        }
    }
    if has_bindings() { Some(python) } else { skipped("they can't be imported") }
}

fn skipped(why: &str) -> Option<PathBuf> {
    eprintln!("SKIPPED: {PACKAGE} can't be had, so the ABI was not checked with it: {why}");
    None
}

fn said(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!("{}{}", String::from_utf8_lossy(err), String::from_utf8_lossy(out))
}
