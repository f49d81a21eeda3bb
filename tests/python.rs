//! The Python package: its wheel, in a virtual environment of its own, with its own tests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use lapis::model::Checkpoint;
use lapis_tests::binaries::{directory, is_prebuilt, lapisd, scratch};
use lapis_tests::daemon::Daemon;
use lapis_tests::device::{Device, device, runs_on_a_gpu, runs_on_the_fake_gpu, scale};
use lapis_tests::fixtures::minilm;

const NEEDS: [&str; 5] =
    ["maturin>=1.9,<2", "numpy>=2.1", "ml_dtypes>=0.5", "gguf>=0.17", "pytest>=8"];
const TIERS: [&str; 8] =
    ["--vram", "2MiB", "--ram", "8MiB", "--nvme", "128MiB", "--page-size", "64KiB"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("it is in the workspace").to_owned()
}

fn target() -> &'static Path {
    directory().parent().expect("a profile is in target")
}

/// What went wrong, if anything.
fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(said);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!("{command:?}: {}\n{said}\n{errors}", output.status))
}

/// Python with the package installed; `None`, said aloud, where its tools can't be had. That the package can't be built
/// or installed is a failure.
fn python() -> Option<&'static Path> {
    static PYTHON: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = PYTHON.get_or_init(|| {
        if is_prebuilt() {
            eprintln!("SKIPPED: what is built beforehand has no wheel; the Python package was not tested");
            return None;
        }
        let venv = target().join("python");
        std::fs::create_dir_all(&venv).expect("target is writable");
        let lock = std::fs::File::create(target().join("python.lock")).expect("target is writable");
        lock.lock().expect("it is ours");
        let python = venv.join("bin/python");
        // What it needs is left there for the next time, which then needs no network.
        let ready = venv.join("ready");
        let wanted = NEEDS.join("\n");
        if std::fs::read_to_string(&ready).is_ok_and(|had| had == wanted) {
            return Some(python);
        }
        let tools = run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))
            .and_then(|_| run(Command::new(&python).args(["-m", "pip", "install", "-q"]).args(NEEDS)));
        if let Err(error) = tools {
            let last = error.lines().last().unwrap_or_default();
            eprintln!("SKIPPED: Python 3.11, venv, pip and what it fetches are needed to test the package: {last}");
            return None;
        }
        std::fs::write(ready, wanted).expect("target is writable");
        Some(python)
    });
    let python = made.as_deref()?;
    static INSTALLED: OnceLock<()> = OnceLock::new();
    INSTALLED.get_or_init(|| install(python));
    Some(python)
}

/// Builds the wheel and installs it.
fn install(python: &Path) {
    if device() != Device::Sim {
        // Whoever runs this suite again on another device has done so.
        return;
    }
    let wheels = scratch();
    let release = directory().ends_with("release");
    let mut command = Command::new(python);
    command.args(["-m", "maturin", "build", "--quiet", "--locked", "--compatibility", "linux"]);
    command
        .args(["--profile", if release { "release" } else { "dev" }, "--interpreter"])
        .arg(python);
    command.arg("--out").arg(wheels.path()).arg("--target-dir").arg(target());
    command.current_dir(root().join("client-lib/python"));
    run(&mut command).unwrap_or_else(|error| panic!("{error}"));
    let wheel = std::fs::read_dir(wheels.path()).expect("it is there").flatten().next();
    let wheel = wheel.expect("maturin made one").path();
    let name = wheel.file_name().expect("it has one").to_string_lossy().into_owned();
    assert!(name.contains("-cp311-abi3-"), "{name}");
    let mut command = Command::new(python);
    command.args(["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--force-reinstall"]);
    run(command.arg(wheel)).unwrap_or_else(|error| panic!("{error}"));
}

fn model(directory: &Path) -> PathBuf {
    let path = directory.join("model.safetensors");
    let checkpoint = Checkpoint { bytes: (1 << 20) * scale(), ..Checkpoint::default() };
    checkpoint.write(&path).expect("target is writable");
    path
}

#[test]
fn the_same_ten_lines() {
    let Some(python) = python() else { return };
    let daemon = Daemon::start(&TIERS);
    let mut command = Command::new(python);
    command.arg(root().join("client-lib/examples/hello.py")).env("LAPIS_SOCKET", daemon.socket());
    assert_eq!(run(&mut command).as_deref(), Ok("hello, tiers!\n"));
    daemon.stop_well();
}

#[test]
fn the_package_passes_its_tests() {
    let Some(python) = python() else { return };
    let directory = scratch();
    let daemon = Daemon::start(&TIERS);
    let mut command = Command::new(python);
    command.args(["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]);
    command.arg(root().join("client-lib/python/tests")).current_dir(directory.path());
    command.env("LAPIS_SOCKET", daemon.socket()).env("LAPIS_TEST_LAPISD", lapisd());
    command.env("LAPIS_TEST_MODEL", model(directory.path()));
    if device() != Device::Sim {
        // A call of the fake driver goes through a file that processes share.
        command.env("LAPIS_TEST_MAPS", "3000");
    }
    let said = run(&mut command).unwrap_or_else(|error| panic!("{error}"));
    said.lines().filter(|line| line.contains("SKIPPED")).for_each(|line| eprintln!("{line}"));
    assert!(said.contains(" passed"), "{said}");
    daemon.stop_well();
}

#[test]
fn a_real_model_larger_than_vram_infers_bit_for_bit_what_it_does_from_memory() {
    if device() != Device::Sim {
        return eprintln!("SKIPPED on {:?}: numpy computes on the CPU", device());
    }
    let (Some(python), Some(model)) = (python(), minilm()) else { return };
    // A third of its 91 MB, and no room in RAM for the rest.
    let daemon = Daemon::start(&["--vram", "30MiB", "--ram", "40MiB", "--page-size", "64KiB"]);
    let mut command = Command::new(python);
    command
        .arg(root().join("tests/python/minilm.py"))
        .arg(model)
        .env("LAPIS_SOCKET", daemon.socket());
    let said = run(&mut command).unwrap_or_else(|error| panic!("{error}"));
    eprint!("{said}");
    assert!(said.contains("equal bit for bit"), "{said}");
    daemon.stop_well();
}

#[test]
fn all_of_this_on_the_fake_gpu() {
    // Builds it once for both.
    if python().is_some() {
        runs_on_the_fake_gpu();
    }
}

#[test]
fn all_of_this_on_a_gpu() {
    if python().is_some() {
        runs_on_a_gpu();
    }
}
