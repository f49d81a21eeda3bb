//! A file from the disk to VRAM through the daemon, beside fio, or beside plain reads where there is no fio.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use lapis::Access;
use nix::libc::O_DIRECT;

use crate::Outcome;
use crate::host::HostMemory;
use crate::rows::{Said, rate};
use crate::served::{Served, file, moved, pass};
use crate::setup::Setup;

const DEPTH: u64 = 8;
const BLOCK: usize = 2 << 20;

pub(crate) fn run(setup: &Setup, said: &Said) -> Outcome {
    let mib = setup.pick(4096, 96);
    let tier = setup.pick(256, 16);
    let path = file(setup, "disk", mib)?;
    let has_fio = Command::new("fio").arg("--version").output().is_ok();
    let limit = || if has_fio { fio(&path, mib) } else { plain(&path, mib) };
    let served = Served::start(setup, [tier, 2 * tier], 2)?;
    let client = served.connect()?;
    let memory = client.open_path(&path, 0, mib << 20)?;
    let window = (tier << 20) / 8;
    let mut before = limit()?;
    let mut pairs = Vec::new();
    for _ in 0..setup.pick(3, 1) {
        let hop = |stats: &lapis::Stats| stats.total.file_to_ram.bytes;
        let ours = moved(&client, hop, || pass(&client, &memory, window, Access::Read))?;
        let after = limit()?;
        pairs.push((ours, f64::midpoint(before, after)));
        before = after;
    }
    let beside = if has_fio { "fio" } else { "plain O_DIRECT reads" };
    said.beside("file -> VRAM, 2 MiB", beside, &pairs);
    drop((memory, client));
    std::fs::remove_file(&path)?;
    served.stop()
}

fn fio(path: &Path, mib: u64) -> Outcome<f64> {
    let output = Command::new("fio")
        .args(["--name=read", "--rw=read", "--bs=2m", "--ioengine=io_uring", "--direct=1"])
        .args(["--fixedbufs=1", "--registerfiles=1", "--output-format=json"])
        .arg(format!("--iodepth={DEPTH}"))
        .arg(format!("--filename={}", path.display()))
        .arg(format!("--size={mib}m"))
        .output()?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let rate = report["jobs"][0]["read"]["bw_bytes"].as_f64();
    Ok(rate.ok_or("fio reports no rate")? / 1e9)
}

/// So many threads, each with one read under way.
fn plain(path: &Path, mib: u64) -> Outcome<f64> {
    let blocks = (mib << 20) / BLOCK as u64;
    let one = |thread: u64| -> Result<(), String> {
        let open = OpenOptions::new().read(true).custom_flags(O_DIRECT).open(path);
        let file = open.map_err(|error| format!("{}, O_DIRECT: {error}", path.display()))?;
        let mut memory = HostMemory::new(BLOCK, true).map_err(|error| error.to_string())?;
        (thread..blocks).step_by(8).try_for_each(|block| {
            let read = file.read_exact_at(memory.slice(), block * BLOCK as u64);
            read.map_err(|error| error.to_string())
        })
    };
    let started = Instant::now();
    std::thread::scope(|scope| -> Result<(), String> {
        let threads: Vec<_> = (0..DEPTH).map(|thread| scope.spawn(move || one(thread))).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|_| Err("a reader died".into())))
    })?;
    Ok(rate(mib << 20, started.elapsed()))
}
