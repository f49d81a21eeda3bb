//! All probes, and the process that runs them one after the other.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::rows::{Kind, Said};
use crate::setup::Setup;
use crate::{Outcome, copies, costs, crash, disk, limits, sharing, stream, suite, vmm};

/// Sizes of pages that are looked at.
pub(crate) const PAGE_MIB: [usize; 3] = [2, 16, 64];

/// One process, and the rows that it answers.
pub(crate) struct Probe {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Setup, &Said) -> Outcome,
    seconds: u64,
    rows: &'static [(&'static str, Kind)],
}

use Kind::{Check, Fact, Measure};

#[rustfmt::skip]
pub(crate) const PROBES: [Probe; 14] = [
    Probe { name: "gpu", run: vmm::gpu, seconds: 30, rows: &[
        ("the driver starts, the GPU opens", Check),
        ("memory", Fact),
        ("granularity divides 2 MiB", Check),
        ("attributes", Fact),
    ] },
    Probe { name: "sharing", run: sharing::run, seconds: 40, rows: &[
        ("one descriptor, two importers", Check),
        ("descriptor after its exporter's SIGKILL", Check),
        ("start with all GPUs hidden", Fact),
        ("import where only another GPU is visible", Check),
    ] },
    Probe { name: "vmm", run: vmm::run, seconds: 20, rows: &[
        ("export of an imported handle", Fact),
        ("one cuMemSetAccess over two mappings", Check),
        ("one cuMemUnmap over two mappings", Fact),
    ] },
    Probe { name: "descriptors", run: limits::per_call, seconds: 20, rows: &[
        ("descriptors of cuMemCreate", Fact),
        ("descriptors of an export", Check),
        ("descriptors of an import", Fact),
    ] },
    Probe { name: "emfile", run: limits::none_left, seconds: 20, rows: &[
        ("export without a free descriptor", Check),
        ("import without a free descriptor", Fact),
        ("create without a free descriptor", Fact),
        ("export once there is one again", Check),
    ] },
    Probe { name: "stream", run: stream::run, seconds: 60, rows: &[
        ("lapisctl stream, every tensor", Check),
        ("lapisctl stream, rate", Measure),
    ] },
    Probe { name: "crash", run: crash::run, seconds: 60, rows: &[
        ("lapisd takes its VRAM", Check),
        ("memory after the daemon's SIGKILL", Check),
        ("a mapping after the daemon's SIGKILL", Check),
        ("memory after the client let go", Check),
    ] },
    Probe { name: "suite", run: suite::run, seconds: 90, rows: &[
        ("suite paging", Check), ("suite isolation", Check), ("suite crash", Check), ("suite stream", Check),
    ] },
    Probe { name: "costs", run: costs::run, seconds: 40, rows: &[
        ("create, 2 MiB", Measure), ("export, 2 MiB", Measure),
        ("import + map + set access, 2 MiB", Measure),
        ("map, 2 MiB", Measure), ("set access, 2 MiB", Measure), ("unmap, 2 MiB", Measure),
        ("create, 16 MiB", Measure), ("export, 16 MiB", Measure),
        ("import + map + set access, 16 MiB", Measure),
        ("map, 16 MiB", Measure), ("set access, 16 MiB", Measure), ("unmap, 16 MiB", Measure),
        ("create, 64 MiB", Measure), ("export, 64 MiB", Measure),
        ("import + map + set access, 64 MiB", Measure),
        ("map, 64 MiB", Measure), ("set access, 64 MiB", Measure), ("unmap, 64 MiB", Measure),
    ] },
    Probe { name: "pinning", run: limits::pinning, seconds: 30, rows: &[
        ("pin 1 GiB, 4 KiB pages", Measure),
        ("pin 1 GiB, huge pages", Measure),
        ("pin two pieces with a border in a huge page", Check),
    ] },
    Probe { name: "copies-2", run: copies::in_2_mib, seconds: 60, rows: &[
        ("RAM -> VRAM, 2 MiB", Measure), ("VRAM -> RAM, 2 MiB", Measure),
    ] },
    Probe { name: "copies-16", run: copies::in_16_mib, seconds: 60, rows: &[
        ("RAM -> VRAM, 16 MiB", Measure), ("VRAM -> RAM, 16 MiB", Measure),
    ] },
    Probe { name: "disk", run: disk::run, seconds: 60, rows: &[("file -> VRAM, 2 MiB", Measure)] },
    Probe { name: "zeroed", run: vmm::zeroed, seconds: 40, rows: &[("new memory", Fact)] },
];

/// How a run ended, and the table.
pub(crate) fn run_all(setup: &Setup) -> ExitCode {
    match all(setup) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gpu-check: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all checks hold.
fn all(setup: &Setup) -> Outcome<bool> {
    let end = Instant::now() + Duration::from_secs(setup.seconds);
    let started = Instant::now();
    let scratch = tempfile::tempdir_in(&setup.scratch)?;
    // For clients of other users.
    std::fs::set_permissions(scratch.path(), PermissionsExt::from_mode(0o755))?;
    let setup = Setup { scratch: scratch.path().to_owned(), ..setup.clone() };
    let chosen = |name: &str| setup.only.is_empty() || setup.only.iter().any(|one| one == name);
    let (mut rows, mut failed) = (Vec::new(), Vec::new());
    for probe in PROBES.iter().filter(|probe| chosen(probe.name)) {
        eprintln!("{} ...", probe.name);
        let (found, ended) = one(&setup, probe, end);
        for (name, kind) in probe.rows {
            let row = row(probe.name, name, *kind, found.get(*name), &ended);
            if row["outcome"] == "failed" && *kind == Check {
                failed.push(*name);
            }
            rows.push(row);
        }
    }
    let driver = driver(&rows);
    print!("{}", table(&driver, &rows));
    let seconds = started.elapsed().as_secs();
    let report = json!({
        "schema": 1, "driver": driver, "fake": is_fake(&driver), "quick": setup.quick,
        "seconds": seconds, "failed": failed, "rows": rows,
    });
    if let Some(path) = &setup.json {
        std::fs::write(path, format!("{report:#}\n"))?;
        println!("written to {}", path.display());
    }
    let holds = failed.is_empty() && !rows.is_empty();
    println!("{} s; {}", seconds, if holds { "all checks hold" } else { "CHECKS FAILED" });
    Ok(holds)
}

/// Runs one probe; returns its rows, and what those that it didn't answer failed of.
fn one(setup: &Setup, probe: &Probe, end: Instant) -> (BTreeMap<String, Value>, String) {
    let left = end.saturating_duration_since(Instant::now());
    let limit = left.min(Duration::from_secs(probe.seconds));
    if limit.is_zero() {
        return (BTreeMap::new(), "not run: the time is over".to_owned());
    }
    let path = setup.scratch.join(format!("{}.rows", probe.name));
    let ended = match start(setup, probe, &path) {
        Ok(child) => wait(child, limit),
        Err(error) => format!("not run: {error}"),
    };
    let said = std::fs::read_to_string(&path).unwrap_or_default();
    let (mut rows, mut why) = (BTreeMap::new(), ended);
    for value in said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        if let Some(error) = value["error"].as_str() {
            error.clone_into(&mut why);
        } else if let Some(row) = value["row"].as_str() {
            rows.insert(row.to_owned(), value.clone());
        }
    }
    (rows, why)
}

fn start(setup: &Setup, probe: &Probe, path: &std::path::Path) -> Outcome<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--programs").arg(&setup.programs).arg("--scratch").arg(&setup.scratch);
    if setup.quick {
        command.arg("--quick");
    }
    command.args(["--probe", probe.name]).stdin(Stdio::null()).stdout(File::create(path)?);
    // A group of its own, so that nothing it started is left.
    Ok(command.process_group(0).spawn()?)
}

/// Waits for a probe, kills what is left of its group, and says how it ended.
fn wait(mut child: Child, limit: Duration) -> String {
    let group = i32::try_from(child.id()).map(Pid::from_raw);
    let end = Instant::now() + limit;
    let mut over = false;
    while let Ok(pid) = group {
        // Not reaped yet, so its number is nobody else's.
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        if waitid(Id::Pid(pid), flags) != Ok(WaitStatus::StillAlive) {
            break;
        }
        over = Instant::now() > end;
        if over {
            break;
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
    if let Ok(pid) = group {
        let _gone = killpg(pid, Signal::SIGKILL);
    }
    let status: Option<ExitStatus> = child.wait().ok();
    match status {
        _ if over => format!("not within {} s", limit.as_secs()),
        Some(status) if status.success() => "no answer".to_owned(),
        Some(status) => status.signal().map_or_else(
            || format!("the probe ended with {status}"),
            |signal| format!("the probe died of signal {signal}"),
        ),
        None => "the probe was lost".to_owned(),
    }
}

fn row(probe: &str, name: &str, kind: Kind, found: Option<&Value>, ended: &str) -> Value {
    let mut row = found.cloned().unwrap_or_else(|| json!({ "outcome": "failed", "value": ended }));
    row["row"] = name.into();
    row["probe"] = probe.into();
    row["kind"] = kind.name().into();
    row
}

/// Which driver this was, as its first row says.
fn driver(rows: &[Value]) -> String {
    let found = rows.iter().find(|row| row["row"] == PROBES[0].rows[0].0);
    found.and_then(|row| row["value"].as_str()).unwrap_or("not asked").to_owned()
}

fn is_fake(driver: &str) -> bool {
    driver.starts_with("Lapis fake GPU")
}

fn table(driver: &str, rows: &[Value]) -> String {
    let mut text = format!("driver: {driver}\n");
    if is_fake(driver) {
        text.push_str("THE FAKE DRIVER: the numbers say nothing of a GPU\n");
    }
    let of = |row: &Value, key: &str| row[key].as_str().unwrap_or("").to_owned();
    for row in rows {
        let [kind, outcome, name, value] = ["kind", "outcome", "row", "value"].map(|k| of(row, k));
        text.push_str(&format!("{kind:<8} {outcome:<8} {name:<45} {value}\n"));
    }
    text
}
