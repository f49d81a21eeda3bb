use clap::Parser;
use lapis::model::Checkpoint;
use serde_json::Value;

use super::*;

#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    plan: Plan,
}

fn parse(arguments: &[&str]) -> Result<Plan, String> {
    let arguments = std::iter::once(&"plan").chain(arguments);
    Cli::try_parse_from(arguments).map(|cli| cli.plan).map_err(|error| error.to_string())
}

/// 64 MiB of BF16 in 8 layers and two more.
fn model() -> (tempfile::TempDir, ModelFiles) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.safetensors");
    Checkpoint { bytes: 64 << 20, layers: 8, ..Checkpoint::default() }.write(&path).unwrap();
    let files = ModelFiles::open(&path).unwrap();
    (directory, files)
}

fn report(arguments: &[&str], files: &ModelFiles) -> Report {
    let plan = parse(&[&["m"], arguments].concat()).unwrap();
    let sizes = plan.sizes(&Host::of_process()).unwrap();
    plan.report(files, &sizes, None).unwrap()
}

fn json(report: &Report) -> Value {
    serde_json::from_str(&output::json(report)).unwrap()
}

fn kinds(report: &Value) -> Vec<&str> {
    let advice = report["advice"].as_array().unwrap();
    advice.iter().map(|advice| advice["kind"].as_str().unwrap()).collect()
}

#[test]
fn flags_are_read() {
    let plan = parse(&["m", "--vram", "24GiB", "--h2d", "25GB/s", "--compute-ms", "2"]).unwrap();
    assert_eq!(plan.h2d, Some(Rate::from_bytes_per_s(25_000_000_000)));
    assert_eq!(plan.compute_ms, Some(Duration::from_millis(2)));
    for bad in [
        &["m", "--ram", "1GiB"][..],
        &["m", "--vram", "1GiB", "--socket", "/s"],
        &["m", "--h2d", "0"],
        &[],
    ] {
        assert!(parse(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn a_model_that_fits_moves_nothing_and_needs_no_advice() {
    let (_directory, files) = model();
    let fits = report(&["--vram", "80MiB", "--ram", "80MiB", "--compute-ms", "3"], &files);
    let fits = json(&fits);
    assert_eq!((&fits["fits"], kinds(&fits)), (&"vram".into(), vec!["nothing"]));
    assert_eq!(fits["pass"]["predicted_us"], 30_000.0);
    assert_eq!(fits["layer"]["hidden"], true);
}

#[test]
fn what_does_not_fit_is_told_by_tier_and_by_what_bounds_it() {
    let (_directory, files) = model();
    let vram = ["--vram", "33MiB", "--page-size", "1MiB", "--h2d", "100MB/s", "--read", "50MB/s"];
    let with = |more: &[&str]| json(&report(&[&vram[..], more].concat(), &files));
    let bound = with(&["--ram", "80MiB", "--compute-ms", "1"]);
    // Half of it, at 100 MB/s.
    let pass = bound["pass"]["predicted_us"].as_f64().unwrap();
    assert!((300_000.0..450_000.0).contains(&pass), "{bound}");
    assert_eq!((&bound["fits"], &bound["layer"]["hidden"]), (&"ram".into(), &false.into()));
    assert_eq!(kinds(&bound), ["quantise", "offload", "batch", "bigger_gpu"]);

    let hidden = with(&["--ram", "80MiB", "--compute-ms", "50"]);
    let pass = hidden["pass"]["predicted_us"].as_f64().unwrap();
    assert!((500_000.0..530_000.0).contains(&pass), "{hidden}");
    assert_eq!(hidden["layer"]["hidden"], true);
    assert_eq!(kinds(&hidden), ["quantise", "offload"]);

    let disk = with(&["--ram", "18MiB", "--nvme", "33MiB"]);
    assert_eq!(disk["fits"], "nvme");
    let (read, pass) = (&disk["steady"]["nvme_bytes"], &disk["pass"]["predicted_us"]);
    // At least what neither VRAM nor RAM can hold, at 50 MB/s.
    assert!(read.as_u64().unwrap() >= 14 << 20, "{disk}");
    assert!(pass.as_f64().unwrap() >= f64::from(14 << 20) / 50.0, "{disk}");
    assert_eq!(kinds(&disk), ["quantise", "offload", "ram", "batch", "bigger_gpu"]);
    let parts = ["vram_bytes", "ram_bytes", "nvme_bytes"].map(|part| &disk["steady"][part]);
    let sum: u64 = parts.iter().map(|part| part.as_u64().unwrap()).sum();
    assert_eq!(sum, files.bytes());
}

#[test]
fn smaller_formats_are_those_with_fewer_bits_and_the_best_that_fits_is_named() {
    let (_directory, files) = model();
    let report = report(&["--vram", "24MiB", "--ram", "120MiB", "--compute-ms", "0.001"], &files);
    let json = json(&report);
    let formats = json["quantisations"].as_array().unwrap();
    let fitting: Vec<_> =
        formats.iter().filter(|one| one["fits"] == true).map(|one| &one["name"]).collect();
    assert_eq!(formats.len(), 6);
    assert_eq!(fitting, ["Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K"]);
    let text = report.table();
    assert!(text.contains("1. a smaller format: Q5_K_M takes 22.7"), "{text}");
    // No batch hides it: a thousand times the compute would be needed.
    assert_eq!(kinds(&json), ["quantise", "offload", "bigger_gpu"]);
    assert!(text.contains("a bigger GPU, no batch hides this: 64.0"), "{text}");
}

#[test]
fn four_frames_are_enough_to_move_a_model_through() {
    let (_directory, files) = model();
    let tiny = parse(&["m", "--vram", "8MiB", "--ram", "64MiB", "--h2d", "1KB/s"]).unwrap();
    let sizes = tiny.sizes(&Host::of_process()).unwrap();
    // It is only slow.
    let slow = json(&tiny.report(&files, &sizes, None).unwrap());
    assert!(slow["steady"]["vram_bytes"].as_u64() <= Some(8 << 20), "{slow}");
}
