//! Descriptors that the driver takes, what it says without one, and pinning.

use std::os::fd::AsFd;
use std::time::Instant;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::Outcome;
use crate::card::Card;
use crate::host::{HostMemory, descriptors};
use crate::rows::{Said, rate, us};
use crate::setup::Setup;

const PIECE: usize = 2 << 20;
const COUNT: usize = 16;

/// Descriptors that stay open for each call.
pub(crate) fn per_call(_: &Setup, said: &Said) -> Outcome {
    let card = Card::open()?;
    let each =
        |before: usize, after: usize| format!("{} for {COUNT} calls", after.saturating_sub(before));
    let before = descriptors()?;
    let handles = (0..COUNT).map(|_| card.create(PIECE)).collect::<Result<Vec<_>, _>>()?;
    let created = descriptors()?;
    said.ok("descriptors of cuMemCreate", each(before, created));
    let fds = handles.iter().map(|handle| card.export(*handle)).collect::<Outcome<Vec<_>>>()?;
    let exported = descriptors()?;
    said.check("descriptors of an export", exported - created == COUNT, each(created, exported));
    let _imported = fds.iter().map(|fd| card.import(fd.as_fd())).collect::<Result<Vec<_>, _>>()?;
    said.ok("descriptors of an import", each(exported, descriptors()?));
    Ok(())
}

/// Without a free descriptor.
pub(crate) fn none_left(_: &Setup, said: &Said) -> Outcome {
    let card = Card::open()?;
    let handle = card.create(PIECE)?;
    let fd = card.export(handle)?;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, 0, hard)?;
    let text = |failed: Option<String>| failed.unwrap_or_else(|| "it works".to_owned());
    let exported = card.export(handle).err().map(|error| error.to_string());
    let imported = card.import(fd.as_fd()).err().map(|failed| failed.to_string());
    let created = card.create(PIECE).err().map(|failed| failed.to_string());
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    said.check("export without a free descriptor", exported.is_some(), text(exported));
    said.ok("import without a free descriptor", text(imported));
    said.ok("create without a free descriptor", text(created));
    let after = card.export(handle).map(|_| "it works");
    match after {
        Ok(works) => said.ok("export once there is one again", works),
        Err(error) => said.failed("export once there is one again", error),
    }
    Ok(())
}

/// What pinning costs, and whether it minds borders inside of huge pages.
pub(crate) fn pinning(setup: &Setup, said: &Said) -> Outcome {
    let card = Card::open()?;
    let bytes = setup.pick(1 << 30, 64 << 20);
    for (huge, row) in [(false, "pin 1 GiB, 4 KiB pages"), (true, "pin 1 GiB, huge pages")] {
        let memory = HostMemory::new(bytes, huge)?;
        let mut times = Vec::new();
        for _ in 0..setup.pick(3, 1) {
            let started = Instant::now();
            card.pin(memory.at(0), bytes)?;
            // GB/s times 1e9 are bytes a second.
            let rate = rate(bytes as u64, started.elapsed());
            times.push(1.073_741_824 / rate * 1e3);
            card.unpin(memory.at(0))?;
        }
        said.measured(row, "ms", &times);
    }
    let memory = HostMemory::new(8 << 20, true)?;
    let border = (5 << 20) + 4096;
    let started = Instant::now();
    let pinned = card
        .pin(memory.at(0), border)
        .and_then(|()| card.pin(memory.at(border), memory.bytes() - border));
    let took = us(started.elapsed());
    let text = pinned.as_ref().map_or_else(ToString::to_string, |()| format!("{took:.0} us"));
    said.check("pin two pieces with a border in a huge page", pinned.is_ok(), text);
    // Whatever is pinned goes with the process; the memory must stay until then.
    std::mem::forget(memory);
    Ok(())
}
