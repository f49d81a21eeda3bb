//! What making, exporting, importing and mapping frames costs.

use std::time::Instant;

use crate::card::Card;
use crate::role::Exporter;
use crate::rows::{Said, us};
use crate::setup::Setup;
use crate::{Outcome, probe::PAGE_MIB};

/// Bytes of all pieces of one size.
const BYTES: usize = 512 << 20;
const BYTES_QUICK: usize = 64 << 20;
/// Most pieces of one size.
const PIECES_MAX: usize = 128;

/// Pieces come from another process, as a client's do.
pub(crate) fn run(setup: &Setup, said: &Said) -> Outcome {
    let card = Card::open()?;
    let all = setup.pick(BYTES, BYTES_QUICK);
    let sizes = PAGE_MIB.map(|mib| (mib << 20, (all / (mib << 20)).clamp(1, PIECES_MAX)));
    let mut exporter = Exporter::start(&sizes)?;
    for ((bytes, count), mib) in sizes.into_iter().zip(PAGE_MIB) {
        let mut costs: [Vec<f64>; 6] = Default::default();
        for _ in 0..count {
            for (all, one) in costs.iter_mut().zip(piece(&card, &mut exporter, bytes)?) {
                all.push(one);
            }
        }
        let names = ["create", "export", "import + map + set access", "map", "set access", "unmap"];
        for (name, numbers) in names.iter().zip(&costs) {
            said.measured(&format!("{name}, {mib} MiB"), "us", numbers);
        }
    }
    Ok(())
}

fn piece(card: &Card, exporter: &mut Exporter, bytes: usize) -> Outcome<[f64; 6]> {
    use std::os::fd::AsFd;
    let piece = exporter.piece()?;
    let address = card.reserve(bytes)?;
    let started = Instant::now();
    let handle = card.import(piece.fd.as_fd())?;
    card.map(address, bytes, handle)?;
    card.allow(address, bytes)?;
    let whole = started.elapsed();
    card.unmap(address, bytes)?;
    // Again, as a client does with a frame that it has.
    let started = Instant::now();
    card.map(address, bytes, handle)?;
    let mapped = started.elapsed();
    let started = Instant::now();
    card.allow(address, bytes)?;
    let allowed = started.elapsed();
    let started = Instant::now();
    card.unmap(address, bytes)?;
    let unmapped = started.elapsed();
    card.release(handle)?;
    Ok([piece.created, piece.exported, whole, mapped, allowed, unmapped].map(us))
}
