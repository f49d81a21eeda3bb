//! `gpu-check` on the fake driver: every row is answered there, and what fails is told and spoils nothing else.
#![expect(clippy::unwrap_used, reason = "a test fails where its set-up fails")]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use lapis_fake_cuda::harness::FakeCuda;
use lapis_tests::binaries::{directory, scratch};
use serde_json::Value;

/// Runs it on a fake machine, and returns whether all checks hold, its table, and its JSON.
fn check(arguments: &[&str], settings: &[(&str, &str)]) -> (bool, String, Value) {
    let machine = scratch();
    let fake = FakeCuda::new(machine.path()).unwrap();
    let json = machine.path().join("gpu-check.json");
    let output = Command::new(env!("CARGO_BIN_EXE_gpu-check"))
        .args(["--quick", "--programs"])
        .arg(directory())
        .arg("--scratch")
        .arg(machine.path())
        .arg("--json")
        .arg(&json)
        .args(arguments)
        .envs(fake.environment())
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    let text = std::fs::read_to_string(&json);
    let text = text.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(left_over(machine.path()), ["gpu-check.json", "lib", "state"]);
    assert_eq!(fake.memory_used(0).unwrap(), 0, "every process is gone");
    (output.status.success(), table, serde_json::from_str(&text).unwrap())
}

fn left_over(directory: &Path) -> Vec<String> {
    let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

fn of<'a>(report: &'a Value, row: &str) -> &'a Value {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().find(|found| found["row"] == row).unwrap_or_else(|| panic!("no row {row}"))
}

#[test]
fn every_row_is_answered_on_the_fake() {
    let (holds, table, report) = check(&[], &[("FAKE_CUDA_DEVICES", "2")]);
    assert!(holds, "{table}");
    assert!(table.contains("THE FAKE DRIVER"), "{table}");
    assert_eq!((&report["schema"], &report["fake"]), (&1.into(), &true.into()));
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 55, "{table}");
    for row in rows.iter().filter(|row| row["probe"] != "suite") {
        assert_eq!(row["outcome"], "ok", "{row}");
        assert!(!row["value"].as_str().unwrap().is_empty(), "{row}");
        assert!(table.contains(row["row"].as_str().unwrap()), "{row}");
        let measured = row["numbers"].is_array() || row["ours"].is_array();
        assert_eq!(measured, row["kind"] == "measure", "{row}");
    }
    // What the fake is known to do.
    let value = |row| of(&report, row)["value"].as_str().unwrap().to_owned();
    assert!(value("one cuMemUnmap over two mappings").contains("failed with 1 "));
    assert!(value("start with all GPUs hidden").contains("failed with 100 "));
    assert!(value("import where only another GPU is visible").contains("failed with 101 "));
    assert!(value("export without a free descriptor").contains("failed with 304 "));
    assert!(value("new memory").starts_with("zeros in each"));
}

#[test]
fn what_fails_is_told_with_its_code_and_the_rest_goes_on() {
    // Imports fail, so everything that shares memory does; poison is found.
    let settings = [
        ("FAKE_CUDA_FAULTS", "cuMemImportFromShareableHandle:0:1234:1000000"),
        ("FAKE_CUDA_POISON", "1"),
    ];
    let only = ["--only", "gpu", "--only", "sharing", "--only", "crash", "--only", "zeroed"];
    let (holds, table, report) = check(&only, &settings);
    assert!(!holds && table.contains("CHECKS FAILED"), "{table}");
    for row in ["one descriptor, two importers", "a mapping after the daemon's SIGKILL"] {
        let row = of(&report, row);
        assert_eq!(row["outcome"], "failed", "{row}");
        assert!(row["value"].as_str().unwrap().contains("failed with 1234"), "{row}");
    }
    let names = report["failed"].as_array().unwrap();
    assert!(names.contains(&"one descriptor, two importers".into()), "{table}");
    assert_eq!(of(&report, "memory")["outcome"], "ok");
    assert_eq!(of(&report, "import where only another GPU is visible")["outcome"], "skipped");
    assert!(of(&report, "new memory")["value"].as_str().unwrap().contains("not zeros"));
}

#[test]
fn a_driver_that_does_not_start_fails_every_row_that_needs_it() {
    let only = ["--only", "gpu", "--only", "stream", "--only", "costs"];
    let (holds, table, report) = check(&only, &[("FAKE_CUDA_FAULTS", "cuInit:0:803")]);
    assert!(!holds, "{table}");
    for row in report["rows"].as_array().unwrap() {
        assert_eq!(row["outcome"], "failed", "{row}");
        assert!(row["value"].as_str().unwrap().contains("cuInit failed with 803"), "{row}");
    }
}

#[test]
fn the_suites_are_run_from_where_the_programs_are() {
    let programs = scratch();
    let script = |name: &str, text: &str| {
        let path = programs.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    };
    script("paging", "echo \"test result: ok. 7 passed; on $LAPIS_TEST_DEVICE in $TMPDIR\"");
    script("crash", "echo 'test it_holds ... FAILED\npanicked at a.rs:\nno room'; exit 101");
    script("stream", "echo 'test result: ok. 0 passed; 0 failed'");
    let programs = programs.path().display().to_string();
    let (holds, table, report) = check(&["--only", "suite", "--programs", &programs], &[]);
    assert!(!holds, "{table}");
    let said = |row| (of(&report, row)["outcome"].clone(), of(&report, row)["value"].to_string());
    let (outcome, text) = said("suite paging");
    assert!(outcome == "ok" && text.contains("7 passed; on gpu in /"), "{text}");
    let (outcome, text) = said("suite crash");
    assert!(outcome == "failed" && text.contains("it_holds no room"), "{text}");
    assert_eq!(said("suite stream").0, "failed", "none ran");
    assert_eq!(said("suite isolation").0, "skipped");
}
