//! What `lapisctl plan` predicts, beside what `lapisctl stream` then takes on a simulated device with the same sizes and
//! speeds.
//!
//! The link is slow, so that a pass takes much longer than what a loaded machine adds to it.

use std::path::Path;
use std::process::Command;

use lapis::model::Checkpoint;
use lapis_tests::binaries::{lapisctl, scratch};
use serde_json::Value;

/// How far the prediction may be off.
const OFF_MAX: f64 = 0.15;
/// Timed passes; the first ones fill the tiers.
const PASSES: usize = 9;
const FILLING: usize = 3;
/// Another try for a machine that was busy with something else.
const TRIES: usize = 3;

fn json(arguments: &[&str], cache: &Path) -> Value {
    let output = Command::new(lapisctl())
        .args(arguments)
        .args(["-o", "json"])
        .env("LAPIS_CACHE", cache)
        .env_remove("LAPIS_SOCKET")
        .output()
        .expect("lapisctl runs");
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(&text).unwrap_or_else(|error| {
        panic!("{error}: {text}\n{}", String::from_utf8_lossy(&output.stderr))
    })
}

/// Microseconds of a pass: the median of those after the tiers are filled.
fn streamed(model: &str, tiers: &[&str], link: &str, compute: &str, cache: &Path) -> f64 {
    let passes = PASSES.to_string();
    let mut arguments = vec!["stream", model, "--embedded", "--no-verify", "--passes", &passes];
    arguments.extend(["--link-bandwidth", link, "--compute-ms", compute]);
    arguments.extend(tiers);
    let report = json(&arguments, cache);
    let passes = report["passes"].as_array().expect("passes");
    let timed = passes.iter().filter(|pass| pass["kind"] == "compute").skip(FILLING);
    let mut times: Vec<f64> = timed.map(|pass| pass["time_us"].as_f64().expect("a time")).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn predicted(model: &str, tiers: &[&str], link: &str, compute: &str, cache: &Path) -> f64 {
    let mut arguments = vec!["plan", model, "--h2d", link, "--compute-ms", compute];
    arguments.extend(tiers);
    let report = json(&arguments, cache);
    report["pass"]["predicted_us"].as_f64().expect("a time")
}

#[test]
fn a_pass_takes_what_was_predicted() {
    let directory = scratch();
    let path = directory.path().join("model.safetensors");
    let checkpoint = Checkpoint { bytes: 48 << 20, layers: 12, ..Checkpoint::default() };
    checkpoint.write(&path).expect("target is writable");
    let model = path.display().to_string();
    let all_in_ram = ["--vram", "24MiB", "--ram", "64MiB", "--page-size", "512KiB"];
    let from_the_file = ["--vram", "16MiB", "--ram", "24MiB", "--page-size", "512KiB"];
    let all_in_vram = ["--vram", "56MiB", "--ram", "64MiB", "--page-size", "512KiB"];
    for (name, tiers, link, compute) in [
        ("the link decides", all_in_ram, "150MB/s", "2"),
        ("compute decides", all_in_ram, "300MB/s", "15"),
        ("both do", all_in_ram, "150MB/s", "12"),
        ("pages are read in each pass", from_the_file, "150MB/s", "2"),
        ("nothing moves", all_in_vram, "150MB/s", "15"),
    ] {
        let predicted = predicted(&model, &tiers, link, compute, directory.path());
        let mut off = Vec::new();
        for _ in 0..TRIES {
            let streamed = streamed(&model, &tiers, link, compute, directory.path());
            println!("{name}: predicted {predicted:.0} us, streamed {streamed:.0} us");
            off.push(streamed / predicted - 1.0);
            if off.last().is_some_and(|off| off.abs() <= OFF_MAX) {
                break;
            }
        }
        assert!(off.iter().any(|off| off.abs() <= OFF_MAX), "{name}: {off:?}");
    }
}

#[test]
fn speeds_are_measured_with_the_model_itself() {
    let directory = scratch();
    let path = directory.path().join("model.safetensors");
    let checkpoint = Checkpoint { bytes: 48 << 20, layers: 12, ..Checkpoint::default() };
    checkpoint.write(&path).expect("target is writable");
    let model = path.display().to_string();
    let tiers = ["--vram", "24MiB", "--ram", "64MiB", "--page-size", "512KiB"];
    let measured = json(&[&["plan", &model, "--measure"], &tiers[..]].concat(), directory.path());
    for speed in ["up", "read"] {
        assert_eq!(measured[speed]["source"], "measured", "{measured}");
        let rate = measured[speed]["bytes_per_s"].as_f64().expect("a rate");
        assert!((1e7..1e12).contains(&rate), "{speed}: {rate}");
    }
    assert!(measured["map_us"].as_u64().expect("a time") > 0, "{measured}");
}
