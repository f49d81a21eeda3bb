//! `lapisctl status`: how full the tiers are, and what has moved since the daemon started.

use std::path::PathBuf;

use lapis::{Counters, DeviceKind, HopStats, Stats, TierStats, Welcome};
use serde::Serialize;

use crate::connect;
use crate::failure::Failure;
use crate::output::{self, Format};
use crate::text::{self, Table};

/// Version of the JSON's fields.
const SCHEMA: u32 = 1;

/// Shows the tiers and counters of a running daemon
#[derive(Debug, clap::Args)]
pub(crate) struct Status {
    /// The daemon's socket
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// How to print it
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    output: Format,
}

impl Status {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let socket = self.socket.clone().unwrap_or_else(lapis::default_socket);
        let client = connect::connect(&socket)?;
        let report = Report::new(socket, client.welcome(), &client.stats()?);
        output::print(&match self.output {
            Format::Table => report.table(),
            Format::Json => output::json(&report),
        })
    }
}

#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    daemon_version: String,
    socket: PathBuf,
    device: &'static str,
    page_size_bytes: u64,
    tiers: [Tier; 3],
    hops: [Hop; 6],
    counters: Totals,
    sessions: u32,
    allocations: u32,
    mappings: u32,
    quarantined_frames: u32,
    metadata_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Tier {
    name: &'static str,
    capacity_bytes: u64,
    used_bytes: u64,
    pinned_bytes: u64,
    free_run_longest_bytes: u64,
    degraded: bool,
}

#[derive(Debug, Serialize)]
struct Hop {
    name: &'static str,
    pages: u64,
    bytes: u64,
    errors: u64,
}

#[derive(Debug, Serialize)]
struct Totals {
    dropped_vram_pages: u64,
    dropped_ram_pages: u64,
    hits_vram_pages: u64,
    hits_ram_pages: u64,
    miss_pages: u64,
    zero_fill_pages: u64,
    maps: u64,
    stalled_us: u64,
    prefetch_useful_pages: u64,
    prefetch_late_pages: u64,
    prefetch_wasted_pages: u64,
    checksum_errors: u64,
}

impl Report {
    fn new(socket: PathBuf, welcome: &Welcome, stats: &Stats) -> Report {
        let tier = |name, tier: &TierStats| Tier {
            name,
            capacity_bytes: tier.capacity,
            used_bytes: tier.used,
            pinned_bytes: tier.pinned,
            free_run_longest_bytes: tier.free_run_longest,
            degraded: tier.degraded,
        };
        let hop = |name, hop: &HopStats| Hop {
            name,
            pages: hop.pages,
            bytes: hop.bytes,
            errors: hop.errors,
        };
        let total = &stats.total;
        Report {
            schema: SCHEMA,
            daemon_version: welcome.daemon_version.clone(),
            socket,
            device: match welcome.device {
                DeviceKind::Sim => "sim",
                DeviceKind::Cuda => "cuda",
            },
            page_size_bytes: welcome.page_size,
            tiers: [tier("vram", &stats.vram), tier("ram", &stats.ram), tier("nvme", &stats.nvme)],
            hops: [
                hop("file_to_ram", &total.file_to_ram),
                hop("ram_to_vram", &total.ram_to_vram),
                hop("vram_to_ram", &total.vram_to_ram),
                hop("ram_to_spill", &total.ram_to_spill),
                hop("spill_to_ram", &total.spill_to_ram),
                hop("zeroed", &total.zeroed),
            ],
            counters: Totals::new(total),
            sessions: stats.sessions,
            allocations: stats.allocations,
            mappings: stats.mappings,
            quarantined_frames: stats.quarantined_frames,
            metadata_bytes: stats.metadata_bytes,
        }
    }

    fn table(&self) -> String {
        let mut out = format!(
            "lapisd {} at {}: {} device, pages of {}\n\n",
            self.daemon_version,
            self.socket.display(),
            self.device,
            text::bytes(self.page_size_bytes)
        );
        let mut tiers =
            Table::new(&["tier", "size", "used", "pinned", "longest free run", "state"]);
        for tier in &self.tiers {
            tiers.row([
                tier.name.to_owned(),
                text::bytes(tier.capacity_bytes),
                text::bytes(tier.used_bytes),
                text::bytes(tier.pinned_bytes),
                text::bytes(tier.free_run_longest_bytes),
                if tier.degraded { "degraded" } else { "ok" }.to_owned(),
            ]);
        }
        tiers.write(&mut out);
        out.push('\n');
        let mut hops = Table::new(&["hop", "pages", "bytes", "errors"]);
        for hop in &self.hops {
            hops.row([
                hop.name.replace('_', " "),
                hop.pages.to_string(),
                text::bytes(hop.bytes),
                hop.errors.to_string(),
            ]);
        }
        hops.write(&mut out);
        out.push('\n');
        let totals = &self.counters;
        let mut counters = Table::new(&["counter", "value"]);
        for (name, value) in [
            ("hits in VRAM, pages", totals.hits_vram_pages),
            ("hits in RAM, pages", totals.hits_ram_pages),
            ("misses, pages", totals.miss_pages),
            ("filled with zeros, pages", totals.zero_fill_pages),
            ("dropped from VRAM, pages", totals.dropped_vram_pages),
            ("dropped from RAM, pages", totals.dropped_ram_pages),
            ("prefetched and used, pages", totals.prefetch_useful_pages),
            ("prefetched late, pages", totals.prefetch_late_pages),
            ("prefetched in vain, pages", totals.prefetch_wasted_pages),
            ("checksum errors", totals.checksum_errors),
            ("maps", totals.maps),
            ("stalled, us", totals.stalled_us),
            ("sessions", u64::from(self.sessions)),
            ("allocations", u64::from(self.allocations)),
            ("mappings", u64::from(self.mappings)),
            ("quarantined frames", u64::from(self.quarantined_frames)),
            ("metadata, bytes", self.metadata_bytes),
        ] {
            counters.row([name.to_owned(), value.to_string()]);
        }
        counters.write(&mut out);
        out
    }
}

impl Totals {
    fn new(total: &Counters) -> Totals {
        Totals {
            dropped_vram_pages: total.dropped_vram,
            dropped_ram_pages: total.dropped_ram,
            hits_vram_pages: total.hits_vram,
            hits_ram_pages: total.hits_ram,
            miss_pages: total.misses,
            zero_fill_pages: total.zero_fills,
            maps: total.maps,
            stalled_us: total.stalled_us,
            prefetch_useful_pages: total.prefetch_useful,
            prefetch_late_pages: total.prefetch_late,
            prefetch_wasted_pages: total.prefetch_wasted,
            checksum_errors: total.checksum_errors,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let welcome = Welcome {
            version: 1,
            features: 0,
            session: lapis_proto::ids::SessionId(3),
            page_size: 2 << 20,
            vram_frames: 64,
            mapped_pages_max: 60,
            device: DeviceKind::Sim,
            device_uuid: [0; 16],
            unified: false,
            daemon_version: "0.1.0".to_owned(),
        };
        let tier = |used| TierStats {
            capacity: 128 << 20,
            used,
            pinned: 4096,
            free_run_longest: 64 << 20,
            degraded: used == 0,
        };
        let hop = |pages| HopStats { pages, bytes: pages << 20, errors: 1 };
        let total = Counters {
            file_to_ram: hop(1),
            spill_to_ram: hop(2),
            ram_to_vram: hop(3),
            vram_to_ram: hop(4),
            ram_to_spill: hop(5),
            zeroed: hop(6),
            dropped_vram: 7,
            dropped_ram: 8,
            hits_vram: 9,
            hits_ram: 10,
            misses: 11,
            zero_fills: 12,
            maps: 13,
            stalled_us: 14,
            prefetch_useful: 15,
            prefetch_late: 16,
            prefetch_wasted: 17,
            read_retries: 0,
            checksum_errors: 18,
        };
        let stats = Stats {
            vram: tier(1 << 20),
            ram: tier(2 << 20),
            nvme: tier(0),
            total,
            session: Counters::default(),
            sessions: 19,
            allocations: 20,
            mappings: 21,
            quarantined_frames: 22,
            metadata_bytes: 23,
        };
        Report::new("/run/lapis/lapis.sock".into(), &welcome, &stats)
    }

    #[test]
    fn the_table_shows_tiers_hops_and_counters() {
        let expected = "\
lapisd 0.1.0 at /run/lapis/lapis.sock: sim device, pages of 2.00 MiB

tier        size      used    pinned  longest free run     state
vram  128.00 MiB  1.00 MiB  4.00 KiB         64.00 MiB        ok
ram   128.00 MiB  2.00 MiB  4.00 KiB         64.00 MiB        ok
nvme  128.00 MiB       0 B  4.00 KiB         64.00 MiB  degraded

hop           pages     bytes  errors
file to ram       1  1.00 MiB       1
ram to vram       3  3.00 MiB       1
vram to ram       4  4.00 MiB       1
ram to spill      5  5.00 MiB       1
spill to ram      2  2.00 MiB       1
zeroed            6  6.00 MiB       1

counter                     value
hits in VRAM, pages             9
hits in RAM, pages             10
misses, pages                  11
filled with zeros, pages       12
dropped from VRAM, pages        7
dropped from RAM, pages         8
prefetched and used, pages     15
prefetched late, pages         16
prefetched in vain, pages      17
checksum errors                18
maps                           13
stalled, us                    14
sessions                       19
allocations                    20
mappings                       21
quarantined frames             22
metadata, bytes                23
";
        assert_eq!(report().table(), expected);
    }

    #[test]
    fn the_json_is_one_line_with_a_schema() {
        let json = output::json(&report());
        assert!(json.starts_with(concat!(
            r#"{"schema":1,"daemon_version":"0.1.0","socket":"/run/lapis/lapis.sock","device":"sim","#,
            r#""page_size_bytes":2097152,"tiers":[{"name":"vram","capacity_bytes":134217728,"#,
            r#""used_bytes":1048576,"pinned_bytes":4096,"free_run_longest_bytes":67108864,"degraded":false},"#
        )));
        assert!(json.contains(r#"{"name":"ram_to_vram","pages":3,"bytes":3145728,"errors":1}"#));
        assert!(json.ends_with(concat!(
            r#""counters":{"dropped_vram_pages":7,"dropped_ram_pages":8,"hits_vram_pages":9,"#,
            r#""hits_ram_pages":10,"miss_pages":11,"zero_fill_pages":12,"maps":13,"stalled_us":14,"#,
            r#""prefetch_useful_pages":15,"prefetch_late_pages":16,"prefetch_wasted_pages":17,"#,
            r#""checksum_errors":18},"sessions":19,"allocations":20,"mappings":21,"#,
            r#""quarantined_frames":22,"metadata_bytes":23}"#,
            "\n"
        )));
        assert_eq!(json.lines().count(), 1);
    }
}
