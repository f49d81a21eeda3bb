//! `lapisctl tier`: changes how much of a tier a running daemon uses.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Subcommand, ValueEnum};
use lapisd::config::Size;
use serde::Serialize;

use crate::connect;
use crate::failure::Failure;
use crate::output::{self, Format};
use crate::text;

/// Version of the JSON's fields.
const SCHEMA: u32 = 1;

/// Changes the tiers of a running daemon
#[derive(Debug, clap::Args)]
pub(crate) struct Tier {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Set(Set),
}

/// Shrinks or grows a tier, up to the size that the daemon was started with
///
/// Pages move out of the way; none is lost. It lasts until the daemon ends: the configuration says what comes after.
/// Only root and administrators may do this.
#[derive(Debug, clap::Args)]
struct Set {
    /// Which tier
    #[arg(value_enum)]
    tier: TierName,
    /// How much of it to use, such as 8GiB; whole pages are used
    size: Size,
    /// Seconds to wait for mappings that are in the way; the tier goes on shrinking after that
    #[arg(long, value_name = "S", default_value_t = 60)]
    wait: u32,
    /// The daemon's socket
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// How to print the result
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    output: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum TierName {
    /// Frames of the device
    Vram,
    /// Pinned frames of the host
    Ram,
    /// The spill file
    Nvme,
}

#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    tier: TierName,
    capacity_bytes: u64,
    used_bytes: u64,
}

impl Tier {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let Verb::Set(set) = &self.verb;
        set.run()
    }
}

impl Set {
    fn run(&self) -> Result<(), Failure> {
        let client = connect::connect(&self.socket.clone().unwrap_or_else(lapis::default_socket))?;
        let tier = match self.tier {
            TierName::Vram => lapis::Tier::Vram,
            TierName::Ram => lapis::Tier::Ram,
            TierName::Nvme => lapis::Tier::Nvme,
        };
        client.set_tier(tier, self.size.bytes(), Duration::from_secs(self.wait.into()))?;
        let stats = client.stats()?;
        let now = match self.tier {
            TierName::Vram => stats.vram,
            TierName::Ram => stats.ram,
            TierName::Nvme => stats.nvme,
        };
        let report = Report {
            schema: SCHEMA,
            tier: self.tier,
            capacity_bytes: now.capacity,
            used_bytes: now.used,
        };
        output::print(&match self.output {
            Format::Table => report.text(),
            Format::Json => output::json(&report),
        })
    }
}

impl Report {
    fn text(&self) -> String {
        let name = self.tier.to_possible_value().expect("no tier is hidden");
        let (size, used) = (text::bytes(self.capacity_bytes), text::bytes(self.used_bytes));
        format!("{}: {size}, {used} used\n", name.get_name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_result_is_the_tier_as_it_is_now() {
        let report = Report {
            schema: SCHEMA,
            tier: TierName::Vram,
            capacity_bytes: 64 << 20,
            used_bytes: 6 << 20,
        };
        assert_eq!(report.text(), "vram: 64.00 MiB, 6.00 MiB used\n");
        assert_eq!(
            output::json(&report),
            "{\"schema\":1,\"tier\":\"vram\",\"capacity_bytes\":67108864,\"used_bytes\":6291456}\n"
        );
    }
}
