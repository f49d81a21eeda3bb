//! What a user does: `lapisd` with a driver's library, `lapisctl stream` beside it.

use std::process::{Command, Output};

use lapis::model::Checkpoint;
use lapis_tests::binaries::{lapisctl, scratch};

use crate::process::Machine;

/// Streams a model of a few layers through the machine's daemon.
fn stream(machine: &Machine, libcuda: Option<&str>) -> Output {
    let directory = scratch();
    let model = directory.path().join("model.safetensors");
    Checkpoint { bytes: 24 << 20, ..Checkpoint::default() }.write(&model).unwrap();
    let mut command = Command::new(lapisctl());
    command.arg("stream").arg(&model).arg("--socket").arg(machine.socket());
    command.args(["--output", "json"]).env_remove("LAPIS_LIBCUDA").env("NO_COLOR", "1");
    let [_, state] = machine.fake.environment();
    command.envs([state]).envs(libcuda.map(|path| ("LAPIS_LIBCUDA", path)));
    command.output().unwrap()
}

#[test]
fn a_model_streams_with_every_tensor_verified() {
    let machine = Machine::new(&[("FAKE_CUDA_POISON", "1")]);
    let daemon = machine.start(&["--device", "cuda"]);
    let library = machine.fake.library().display().to_string();
    let output = stream(&machine, Some(&library));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["daemon"]["device"], &report["result"]), (&"cuda".into(), &"ok".into()));
    assert_eq!(report["verified"]["tensors"], report["model"]["tensors"], "{report}");
    assert!(report["verified"]["tensors"].as_u64() > Some(20), "{report}");
    daemon.stop();
    assert_eq!(machine.memory_used(), 0);
}

#[test]
fn a_client_without_a_driver_is_told_what_it_lacks() {
    if std::path::Path::new("/dev/nvidiactl").exists() {
        return eprintln!("SKIPPED: the system has a driver");
    }
    let machine = Machine::new(&[]);
    let daemon = machine.start(&["--device", "cuda"]);
    for (library, reason) in [
        (None, "there is no CUDA driver: libcuda.so.1 is not found; install NVIDIA's driver, or"),
        (Some("/nowhere/libcuda.so.1"), "/nowhere/libcuda.so.1 can't be loaded"),
    ] {
        let output = stream(&machine, library);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("error: the daemon's memory is on a CUDA device: "), "{said}");
        assert!(said.contains(reason), "{said}");
    }
    daemon.stop();
}
