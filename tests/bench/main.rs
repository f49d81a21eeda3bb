//! Speed, side by side: each line is our figure, a limit measured in the same round, and the ratio of the two.
//!
//! `cargo bench -p lapis-tests` prints the table and writes `target/bench.json`. Rounds alternate, and the limit is
//! measured before and after ours, so a disk that drifts doesn't decide. `-- --quick` runs one short round.

mod disk;
mod hiding;
mod observed;
mod plans;
mod policy;
mod round_trip;
mod table;

use table::Table;

/// Bytes of the file that is read.
const FILE_BYTES: u64 = 1 << 30;
const FILE_BYTES_QUICK: u64 = 128 << 20;
/// Microseconds that the policy may take for an access.
const PAGE_US_MAX: f64 = 5.0;
const ROUNDS: usize = 5;

fn main() {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let (rounds, bytes) = if quick { (1, FILE_BYTES_QUICK) } else { (ROUNDS, FILE_BYTES) };
    let mut table = Table::default();
    let disk = disk::Disk::new(bytes);
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        if let Some(disk) = &disk {
            let before = disk.fio();
            let to_ram = disk.to_ram();
            let between = disk.fio();
            let to_vram = disk.to_vram();
            let after = disk.fio();
            table.add(
                "NVMe -> RAM, 2 MiB pages, depth 8",
                "GB/s",
                "fio",
                to_ram,
                mean(before, between),
            );
            table.add(
                "NVMe -> VRAM, daemon and socket",
                "GB/s",
                "fio",
                to_vram,
                mean(between, after),
            );
        }
        let echo = round_trip::echo();
        let (map, pair) = round_trip::map();
        table.add("map, resident page, p50", "us", "socket echo", map, echo);
        table.add("map and unmap, resident page, p50", "us", "socket echo", pair, echo);
        let (ours, lru) = policy::access();
        table.add(
            "working set, an access to a chunk",
            "us",
            "what it may be",
            observed::access_us(),
            0.3,
        );
        let (page, set) = plans::page_us(1, 500_000);
        table.add("a planned page, 500,000 pages", "us", "what it may be", page, PAGE_US_MAX);
        table.add("a page of a plan that is set", "us", "what it may be", set, PAGE_US_MAX);
        let (page, _) = plans::page_us(32, 50_000);
        table.add("a planned page, 32 plans of it", "us", "what it may be", page, PAGE_US_MAX);
        for (name, compute) in [
            ("stall efficiency with a plan, C/T 0.5", 0.5),
            ("stall efficiency with a plan, C/T 0.8", 0.8),
            ("stall efficiency with a plan, C/T 1.2", 1.2),
        ] {
            table.add(name, "", "ideal", hiding::efficiency(compute), 1.0);
        }
        table.add("policy, an access, 500,000 units known", "us", "LRU alone", ours, lru);
    }
    print!("{table}");
    let path = lapis_tests::binaries::directory().parent().expect("in target").join("bench.json");
    std::fs::write(&path, table.json()).expect("target is writable");
    println!("written to {}", path.display());
}

fn mean(a: f64, b: f64) -> f64 {
    f64::midpoint(a, b)
}
