//! A model through the daemon, every tensor compared with the file.

use std::process::Command;

use lapis::model::Checkpoint;

use crate::Outcome;
use crate::rows::Said;
use crate::served::Served;
use crate::setup::Setup;

const ROW: &str = "lapisctl stream, every tensor";

pub(crate) fn run(setup: &Setup, said: &Said) -> Outcome {
    let model = Checkpoint {
        bytes: setup.pick(1 << 30, 48 << 20),
        layers: setup.pick(16, 6),
        ..Checkpoint::default()
    };
    let path = setup.scratch.join("model.safetensors");
    model.write(&path)?;
    let served = Served::start(setup, setup.pick([128, 256], [16, 24]), 2)?;
    let output = Command::new(setup.programs.join("lapisctl"))
        .arg("stream")
        .arg(&path)
        .args(["--quiet", "--output", "json", "--socket"])
        .arg(served.socket())
        .output()
        .map_err(|error| format!("lapisctl: {error}"))?;
    std::fs::remove_file(&path)?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let (right, all) = (&report["verified"]["tensors"], &report["model"]["tensors"]);
    if !output.status.success() || right.as_u64().is_none() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(
            format!("{}: {right} of {all} tensors right; {}", output.status, said.trim()).into()
        );
    }
    let device = &report["daemon"]["device"];
    let holds = report["result"] == "ok" && right == all && device == "cuda";
    said.check(ROW, holds, format!("{right} of {all} tensors right, device {device}"));
    let passes = report["passes"].as_array().into_iter().flatten();
    let rates: Vec<f64> =
        passes.filter_map(|pass| pass["bytes_per_s"].as_f64()).map(|rate| rate / 1e9).collect();
    said.measured("lapisctl stream, rate", "GB/s", &rates);
    served.stop()
}
