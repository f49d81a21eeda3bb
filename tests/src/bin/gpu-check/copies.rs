//! The daemon's copies between RAM and VRAM beside plain ones from pinned memory, round by round.

use lapis::{Access, Client};

use crate::Outcome;
use crate::card::Card;
use crate::host::HostMemory;
use crate::rows::{Said, rate};
use crate::served::{Served, file, moved, pass};
use crate::setup::Setup;

/// Most VRAM of the daemon; RAM is four times as much, and what goes through them three times.
const VRAM_MIB: u64 = 1024;
const VRAM_MIB_QUICK: u64 = 64;

pub(crate) fn in_2_mib(setup: &Setup, said: &Said) -> Outcome {
    run(setup, said, 2)
}

pub(crate) fn in_16_mib(setup: &Setup, said: &Said) -> Outcome {
    run(setup, said, 16)
}

/// Copies of the same size without anything around them.
struct Plain {
    card: Card,
    host: HostMemory,
    address: u64,
    piece: usize,
}

impl Plain {
    fn new(setup: &Setup, piece: usize) -> Outcome<Plain> {
        let card = Card::open()?;
        let bytes = setup.pick(512 << 20, 32 << 20);
        let host = HostMemory::new(bytes, true)?;
        let address = card.place(bytes, card.create(bytes)?)?;
        card.pin(host.at(0), bytes)?;
        Ok(Plain { card, host, address, piece })
    }

    fn copy(&mut self, up: bool) -> Outcome<f64> {
        let took = self.card.copy_all(up, self.address, &mut self.host, self.piece)?;
        Ok(rate(self.host.bytes() as u64, took))
    }

    fn end(self) -> Outcome {
        Ok(self.card.unpin(self.host.at(0))?)
    }
}

fn run(setup: &Setup, said: &Said, page: u64) -> Outcome {
    let mut plain = Plain::new(setup, usize::try_from(page << 20)?)?;
    let (free, _) = plain.card.memory()?;
    let most = setup.pick(VRAM_MIB, VRAM_MIB_QUICK);
    let vram = (free >> 22).min(host_mib()? / 8).min(most) / 64 * 64;
    let served = Served::start(setup, [vram, 4 * vram], page)?;
    let client = served.connect()?;
    let (window, rounds) = ((vram << 20) / 8, setup.pick(5, 1));
    let window = window.max(page << 20);
    let beside = "plain pinned copy";

    let path = file(setup, "copies", 3 * vram)?;
    let memory = client.open_path(&path, 0, (3 * vram) << 20)?;
    // The first one reads the file.
    pass(&client, &memory, window, Access::Read)?;
    let pairs = pairs(rounds, &mut plain, true, || {
        let hop = |stats: &lapis::Stats| stats.total.ram_to_vram.bytes;
        moved(&client, hop, || pass(&client, &memory, window, Access::Read))
    })?;
    said.beside(&format!("RAM -> VRAM, {page} MiB"), beside, &pairs);
    drop(memory);
    std::fs::remove_file(path)?;
    down(&client, said, &mut plain, (vram, window, page, rounds))?;
    drop(client);
    plain.end()?;
    served.stop()
}

/// Memory that is said to be overwritten goes down, and nothing up. Its bytes are nobody's.
fn down(
    client: &Client,
    said: &Said,
    plain: &mut Plain,
    (vram, window, page, rounds): (u64, u64, u64, usize),
) -> Outcome {
    // RAM keeps some frames free, whatever their size.
    let memory = client.allocate((5 * vram / 2) << 20)?;
    pass(client, &memory, window, Access::Overwrite)?;
    let pairs = pairs(rounds, plain, false, || {
        let hop = |stats: &lapis::Stats| stats.total.vram_to_ram.bytes;
        moved(client, hop, || pass(client, &memory, window, Access::Overwrite))
    })?;
    said.beside(&format!("VRAM -> RAM, {page} MiB"), "plain pinned copy", &pairs);
    Ok(())
}

/// Ours between two of the plain ones, whose mean is the limit.
fn pairs(
    rounds: usize,
    plain: &mut Plain,
    up: bool,
    mut ours: impl FnMut() -> Outcome<f64>,
) -> Outcome<Vec<(f64, f64)>> {
    // The first one also wakes the link up.
    let mut before = plain.copy(up).and_then(|_| plain.copy(up))?;
    let mut pairs = Vec::new();
    for _ in 0..rounds {
        let our = ours()?;
        let after = plain.copy(up)?;
        pairs.push((our, f64::midpoint(before, after)));
        before = after;
    }
    Ok(pairs)
}

/// Memory of this machine that can be had.
fn host_mib() -> Outcome<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).ok_or("MemAvailable")?;
    Ok(kib.parse::<u64>()? >> 10)
}
