//! What the driver's documentation leaves open about mappings and new memory.

use std::os::fd::AsFd;

use crate::Outcome;
use crate::card::{Called, Card};
use crate::rows::Said;
use crate::setup::Setup;

const PIECE: usize = 2 << 20;
/// Memory is made dirty in such pieces.
const DIRTY_PIECE: usize = 64 << 20;
const DIRTY_PIECE_QUICK: usize = 8 << 20;
/// Bytes looked at in each 2 MiB of new memory.
const LOOKED_AT: usize = 64 << 10;

fn answer(called: &Called) -> String {
    called.as_ref().map_or_else(ToString::to_string, |()| "it may".to_owned())
}

/// What the GPU is.
pub(crate) fn gpu(_: &Setup, said: &Said) -> Outcome {
    let card = Card::open()?;
    said.ok(
        "the driver starts, the GPU opens",
        format!("{}, CUDA {}", card.name()?, card.version()?),
    );
    let (free, total) = card.memory()?;
    said.ok("memory", format!("{} MiB, {} MiB free", total >> 20, free >> 20));
    said.check(
        "granularity divides 2 MiB",
        PIECE.is_multiple_of(card.granularity()?),
        card.granularity()?,
    );
    // VMM, export by descriptor, integrated, host page tables, GPUDirect RDMA.
    let wanted = [("vmm", 102), ("fd", 103), ("integrated", 18), ("ats", 100), ("rdma", 110)];
    let text = wanted.map(|(name, number)| match card.attribute(number) {
        Ok(value) => format!("{name} {value}"),
        Err(failed) => format!("{name} failed with {}", failed.code),
    });
    said.ok("attributes", text.join(", "));
    Ok(())
}

pub(crate) fn run(_: &Setup, said: &Said) -> Outcome {
    let card = Card::open()?;
    let first = card.create(PIECE)?;
    // Imported memory exported again.
    let fd = card.export(first)?;
    let imported = card.import(fd.as_fd())?;
    match card.export(imported) {
        Ok(_again) => said.ok("export of an imported handle", "it may"),
        Err(error) => said.ok("export of an imported handle", error),
    }
    card.release(imported)?;
    drop(fd);
    // Two mappings side by side, taken out in one call.
    let second = card.create(PIECE)?;
    let address = card.reserve(2 * PIECE)?;
    card.map(address, PIECE, first)?;
    card.map(address + PIECE as u64, PIECE, second)?;
    let allowed = card.allow(address, 2 * PIECE);
    let row = "one cuMemSetAccess over two mappings";
    said.check(row, allowed.is_ok(), answer(&allowed));
    said.ok("one cuMemUnmap over two mappings", answer(&card.unmap(address, 2 * PIECE)));
    Ok(())
}

/// Whether new memory is zeros, after what was there was made dirty.
pub(crate) fn zeroed(setup: &Setup, said: &Said) -> Outcome {
    let card = Card::open()?;
    let (free, _) = card.memory()?;
    let piece = setup.pick(DIRTY_PIECE, DIRTY_PIECE_QUICK);
    let wanted = setup.pick((free / 10 * 9).min(64 << 30), 32 << 20);
    let count = usize::try_from(wanted)? / piece;
    let mut pieces = Vec::new();
    for _ in 0..count {
        let handle = card.create(piece)?;
        let address = card.place(piece, handle)?;
        card.fill(address, piece, 0xA5)?;
        pieces.push((address, handle));
    }
    for (address, handle) in pieces {
        card.remove(address, piece, handle)?;
    }
    let mut dirty = 0;
    let looked = count.min(16);
    for _ in 0..looked {
        let handle = card.create(piece)?;
        let address = card.place(piece, handle)?;
        for offset in (0..piece).step_by(PIECE) {
            let bytes = card.read(address + offset as u64, LOOKED_AT)?;
            dirty += usize::from(bytes.iter().any(|byte| *byte != 0));
        }
    }
    let of = format!(
        "of {} MiB, after {} MiB were dirtied",
        (looked * piece) >> 20,
        (count * piece) >> 20
    );
    let text = match dirty {
        0 => format!("zeros in each 2 MiB {of}"),
        dirty => format!("{dirty} times 2 MiB not zeros {of}"),
    };
    said.ok("new memory", text);
    Ok(())
}
