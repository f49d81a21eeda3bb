//! `kill -9` of the daemon: the GPU has its memory back, but for what clients have mapped, and that when they let go.

use std::time::{Duration, Instant};

use lapis::Access;

use crate::Outcome;
use crate::card::Card;
use crate::rows::Said;
use crate::served::Served;
use crate::setup::Setup;

const WAIT: Duration = Duration::from_secs(15);
const LOOK: Duration = Duration::from_millis(2);
const MAPPED: u64 = 8 << 20;
/// What the driver may keep of what it made for a process's first calls.
const SLACK: u64 = 16 << 20;

/// Time until so much is free, or what was free at the end.
fn until_free(card: &Card, wanted: u64) -> Outcome<Duration> {
    until(card, wanted, |free| free + SLACK >= wanted)
}

/// Time until no more is free.
fn until_taken(card: &Card, wanted: u64) -> Outcome<Duration> {
    until(card, wanted, |free| free <= wanted)
}

fn until(card: &Card, wanted: u64, done: impl Fn(u64) -> bool) -> Outcome<Duration> {
    let started = Instant::now();
    loop {
        let (free, _) = card.memory()?;
        if done(free) {
            return Ok(started.elapsed());
        }
        if started.elapsed() > WAIT {
            return Err(format!("{} MiB free, wanted {} MiB", free >> 20, wanted >> 20).into());
        }
        std::thread::park_timeout(LOOK);
    }
}

pub(crate) fn run(setup: &Setup, said: &Said) -> Outcome {
    let card = Card::open()?;
    let vram = setup.pick(1024, 64);
    let (before, _) = card.memory()?;
    let mut served = Served::start(setup, [vram, vram], 2)?;
    let client = served.connect()?;
    let memory = client.allocate(MAPPED)?;
    let mut mapping = memory.map_all(Access::Overwrite)?;
    let bytes = vec![0x3D; usize::try_from(MAPPED)?];
    mapping.copy_from_host(0, 0, &bytes)?;
    match until_taken(&card, before.saturating_sub(vram << 20)) {
        Ok(took) => said.ok("lapisd takes its VRAM", format!("{} ms", took.as_millis())),
        Err(error) => said.failed("lapisd takes its VRAM", error),
    }

    served.kill()?;
    let row = "memory after the daemon's SIGKILL";
    match until_free(&card, before - MAPPED) {
        Ok(took) => said
            .ok(row, format!("back in {} ms, but for what a client has mapped", took.as_millis())),
        Err(error) => said.failed(row, error),
    }
    let mut found = vec![0; bytes.len()];
    let read = mapping.copy_to_host(0, 0, &mut found);
    let right = read.is_ok() && found == bytes;
    let text = read.map_or_else(|error| error.to_string(), |()| format!("bytes right: {right}"));
    said.check("a mapping after the daemon's SIGKILL", right, text);
    drop(mapping);
    drop((memory, client));
    match until_free(&card, before) {
        Ok(_) => said.ok("memory after the client let go", "all back"),
        Err(error) => said.failed("memory after the client let go", error),
    }
    Ok(())
}
