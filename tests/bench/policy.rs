//! What a policy costs per access, with 500,000 units known: a random one, in a cache of a tenth of them, so that nine in
//! ten let something go. Beside it is LRU, the cheapest there is, on the same accesses.

use std::time::Instant;

use lapisd::policy::adapt::{Adapt, Changes};
use lapisd::policy::duel::Leader;
use lapisd::policy::lru::Lru;
use lapisd::policy::{Directory, Slot};

const UNITS: Slot = 500_000;
const CACHE: u64 = 50_000;
const ACCESSES: u32 = 1_000_000;

/// Microseconds an access: our policy and LRU.
pub(crate) fn access() -> (f64, f64) {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        Slot::try_from((random >> 20) % u64::from(UNITS)).expect("a remainder by a slot")
    };
    let accesses: Vec<Slot> = (0..UNITS).chain((0..ACCESSES).map(|_| draw())).collect();
    let (known, accesses) = accesses.split_at(UNITS as usize);

    let (mut adapt, mut changes) = (Adapt::new(CACHE, Leader::Lirs), Changes::default());
    let touch = |slot: &Slot| {
        adapt.touch(u64::from(*slot), 1, &mut changes);
    };
    let ours = time(known, accesses, touch);
    let (mut lru, mut out) = (Lru::new(CACHE), Vec::new());
    let touch = |slot: &Slot| {
        out.clear();
        lru.access(*slot, 1, &mut out);
    };
    (ours, time(known, accesses, touch))
}

/// Microseconds for each of the accesses after those that make all units known.
fn time(known: &[Slot], accesses: &[Slot], mut touch: impl FnMut(&Slot)) -> f64 {
    known.iter().for_each(&mut touch);
    let start = Instant::now();
    accesses.iter().for_each(&mut touch);
    start.elapsed().as_secs_f64() * 1e6 / f64::from(ACCESSES)
}
