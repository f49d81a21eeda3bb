//! Which device the daemons of a test have: `LAPIS_TEST_DEVICE` is `sim`, unless it says `fake` or `gpu`. Each suite runs itself
//! again with the others; see [`runs_on_the_fake_gpu`] and [`runs_on_a_gpu`].

use std::path::Path;
use std::process::Command;

use lapis_fake_cuda::harness::FakeCuda;

use crate::wait::until;

const VARIABLE: &str = "LAPIS_TEST_DEVICE";
/// The directory of the fake machine that a suite runs on.
const MACHINE: &str = "LAPIS_TEST_FAKE_MACHINE";
/// Of the fake: pages as small as those of the sim device, room for daemons side by side, and memory that isn't zero
/// unless somebody cleared it.
const SETTINGS: [(&str, &str); 3] =
    [("FAKE_CUDA_GRANULARITY", "64KiB"), ("FAKE_CUDA_MEMORY", "8GiB"), ("FAKE_CUDA_POISON", "1")];

/// A device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// Host memory.
    Sim,
    /// CUDA on the fake driver.
    Fake,
    /// CUDA on the machine's own driver.
    Gpu,
}

/// The device of this process's daemons.
///
/// # Panics
/// When `LAPIS_TEST_DEVICE` names none.
#[must_use]
pub fn device() -> Device {
    match std::env::var(VARIABLE).as_deref() {
        Err(_) | Ok("sim") => Device::Sim,
        Ok("fake") => Device::Fake,
        Ok("gpu") => Device::Gpu,
        Ok(other) => panic!("{VARIABLE}={other}: sim, fake or gpu"),
    }
}

/// What `lapisd` and its reports call it.
#[must_use]
pub fn name() -> &'static str {
    if device() == Device::Sim { "sim" } else { "cuda" }
}

/// Sizes of the suites are for pages of 64 KiB. A card has none below 2 MiB: there everything is so many times as large.
#[must_use]
pub fn scale() -> u64 {
    if device() == Device::Gpu { 32 } else { 1 }
}

/// Whether the daemons have the sim device. If not, it says aloud what is not tested, and why.
#[must_use]
pub fn is_sim(why: &str) -> bool {
    let sim = device() == Device::Sim;
    if !sim {
        eprintln!("SKIPPED on {:?}: {why}", device());
    }
    sim
}

/// Waits until no process holds memory of the device that this daemon made. On the fake only: a card doesn't tell.
///
/// # Panics
/// When some is held.
pub fn is_given_back(daemon: u32) {
    if device() != Device::Fake {
        return;
    }
    until("memory of the device is held after the daemon's end", || {
        let held = memory_made_by(daemon);
        if held == 0 { Ok(()) } else { Err(held) }
    });
}

/// Bytes of the fake GPU that processes hold and this daemon made.
///
/// # Panics
/// On another device.
#[must_use]
pub fn memory_made_by(daemon: u32) -> u64 {
    let machine = std::env::var_os(MACHINE).expect("whoever runs a suite on the fake sets it");
    FakeCuda::open(Path::new(&machine)).memory_made_by(0, daemon).expect("the machine is there")
}

/// Runs all tests of this executable but those that call this or its like, on a fake machine of their own.
///
/// # Panics
/// With what they said, when one fails, or when memory of the fake device is in use when all are over.
pub fn runs_on_the_fake_gpu() {
    // Clients of every user use the library and the device's files.
    let directory = tempfile::tempdir().expect("a directory");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(directory.path(), open).expect("it is ours");
    let fake = FakeCuda::new(directory.path()).expect("a machine");
    let mut command = again("fake");
    command.env(MACHINE, directory.path()).envs(fake.environment()).envs(SETTINGS);
    succeeds(command, "the fake GPU");
    assert_eq!(fake.memory_used(0).expect("the machine is there"), 0, "in use after all is over");
}

/// Runs all tests of this executable but those that call this or its like, on the machine's GPU; says aloud when there is none.
///
/// # Panics
/// With what they said, when one fails.
pub fn runs_on_a_gpu() {
    if !Path::new("/dev/nvidiactl").exists() {
        return eprintln!("SKIPPED: there is no /dev/nvidiactl, so no GPU to test on");
    }
    succeeds(again("gpu"), "the GPU");
}

/// This executable, without the tests that run it again.
fn again(device: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a test has an executable"));
    command.args(["--skip", "on_the_fake_gpu", "--skip", "on_a_gpu", "--nocapture"]);
    command.env(VARIABLE, device);
    command
}

fn succeeds(mut command: Command, place: &str) {
    let output = command.output().expect("a test can be run");
    let said =
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    let [results, errors] = &said;
    assert!(output.status.success(), "on {place}: {}\n{results}\n{errors}", output.status);
    assert!(!results.contains(" 0 passed"), "no test ran on {place}:\n{results}");
    // Nothing that was skipped goes unseen.
    errors.lines().filter(|line| line.contains("SKIPPED")).for_each(|line| eprintln!("{line}"));
}
