//! The virtual store: keeps the promises of [`lapisd::store::Store`], in virtual time and with every kind of failure.

use lapisd::device::Full;
use lapisd::engine::ids::{FileId, RamFrame, SpillSlot, Tag};
use lapisd::store::{Store, StoreDone, StoreFault, StoreOp, shift};
use nix::errno::Errno;
use xxhash_rust::xxh3::xxh3_64;

use super::faults::Fault;
use super::machine::{Flights, Machine, Shared, latency};
use super::mutant::Mutant;
use super::random::Random;
use super::scenario::Scenario;

/// An operation that has begun.
#[derive(Debug)]
struct Flight {
    tag: Tag,
    op: StoreOp,
}

/// Model files and the spill.
#[derive(Debug)]
pub(super) struct VirtualStore {
    machine: Shared,
    random: Random,
    queue_max: usize,
    usual_us: u64,
    /// Submitted since the last flush: nothing moves them yet.
    submitted: Vec<(Tag, StoreOp)>,
    flights: Flights<Flight>,
    /// Bytes of operations that were reported before they were there, by planted bug.
    late: Flights<Flight>,
    done: Vec<StoreDone>,
}

impl VirtualStore {
    /// On this hardware.
    #[must_use]
    pub(super) fn new(machine: Shared, scenario: &Scenario) -> Self {
        Self {
            machine,
            random: Random::new(scenario.seed, 0x57),
            queue_max: scenario.store_queue,
            usual_us: scenario.store_us,
            submitted: Vec::new(),
            flights: Flights::default(),
            late: Flights::default(),
            done: Vec::new(),
        }
    }

    /// When something next happens here.
    #[must_use]
    pub(super) fn next_end(&self) -> Option<u64> {
        [self.flights.next_end(), self.late.next_end()].into_iter().flatten().min()
    }

    /// Whether operations are in flight, or wait for a flush that is not coming.
    #[must_use]
    pub(super) fn is_idle(&self) -> bool {
        self.flights.is_empty() && self.submitted.is_empty()
    }

    /// Ends what ends by now.
    pub(super) fn run(&mut self) {
        let shared = self.machine.clone();
        let machine = &mut *shared.borrow_mut();
        while let Some((flight, overtaken)) = self.flights.land(machine.now) {
            if overtaken {
                machine.faults.count(Fault::Reordered);
            }
            let result = finish(machine, flight.op);
            release(machine, flight.op);
            let read = !matches!(flight.op, StoreOp::WriteSpill { .. });
            if read && result.is_ok() && machine.errs(Mutant::CompletionEarly) {
                undo(machine, flight.op);
                let op = flight.op;
                self.late.start(machine.now + 2000, Flight { tag: flight.tag, op });
            }
            self.done.push(StoreDone { tag: flight.tag, result });
        }
        while let Some((flight, _)) = self.late.land(machine.now) {
            // The planted bug's bytes come at last; whose they are by now is the bug.
            let _result = finish(machine, flight.op);
        }
    }
}

impl Store for VirtualStore {
    fn submit(&mut self, tag: Tag, op: StoreOp) -> Result<(), Full> {
        let mut machine = self.machine.borrow_mut();
        let in_flight = self.flights.len() + self.submitted.len();
        // Only while something is in flight: its end is when the engine's side tries again.
        if in_flight >= self.queue_max
            || (in_flight > 0 && machine.faults.strikes(Fault::QueueFull))
        {
            return Err(Full);
        }
        claim(&mut machine, op);
        self.submitted.push((tag, op));
        Ok(())
    }

    fn flush(&mut self) {
        let machine = &mut *self.machine.borrow_mut();
        for (tag, op) in self.submitted.drain(..) {
            let end = machine.now + latency(&mut self.random, &mut machine.faults, self.usual_us);
            self.flights.start(end, Flight { tag, op });
        }
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        done.append(&mut self.done);
    }

    fn close_file(&mut self, file: FileId) {
        let uses =
            |op: &StoreOp| matches!(op, StoreOp::ReadFile { file: used, .. } if *used == file);
        let queued = self.submitted.iter().map(|(_, op)| op);
        let mut flying = self.flights.iter().map(|flight| &flight.op).chain(queued);
        assert!(!flying.any(uses), "{file:?} is closed while it is read");
        let mut machine = self.machine.borrow_mut();
        if !machine.has(Mutant::FileLeaked) {
            machine.disk.close(file);
        }
    }
}

fn claim(machine: &mut Machine, op: StoreOp) {
    match op {
        StoreOp::ReadFile { length, target, .. } => {
            assert!(length > 0 && length as usize <= machine.page_size, "{op:?}");
            machine.claim_read_into(target.0);
        }
        StoreOp::ReadSpill { slot, checksum, target } => {
            let slot = claim_slot(machine, slot);
            assert_eq!(slot.checksum, Some(checksum), "{op:?}: the slot's last write said other");
            machine.claim_read_into(target.0);
        }
        StoreOp::WriteSpill { source, slot } => {
            claim_slot(machine, slot).checksum = None;
            machine.assert_copyable(source.0);
            machine.io().claim_read(source.0);
        }
    }
}

fn claim_slot(machine: &mut Machine, slot: SpillSlot) -> &mut super::disk::Slot {
    let found = &mut machine.disk.slots[slot.0 as usize];
    assert!(!found.claimed, "{slot:?} is used by two operations");
    found.claimed = true;
    found
}

fn release(machine: &mut Machine, op: StoreOp) {
    match op {
        StoreOp::ReadFile { target, .. } => machine.io().release(target.0),
        StoreOp::ReadSpill { slot, target, .. } => {
            machine.disk.slots[slot.0 as usize].claimed = false;
            machine.io().release(target.0);
        }
        StoreOp::WriteSpill { source, slot } => {
            machine.disk.slots[slot.0 as usize].claimed = false;
            machine.io().release(source.0);
        }
    }
}

/// For a planted bug: the target is as it was.
fn undo(machine: &mut Machine, op: StoreOp) {
    match op {
        StoreOp::ReadFile { target, .. } | StoreOp::ReadSpill { target, .. } => {
            machine.io().poison(target.0);
        }
        StoreOp::WriteSpill { .. } => {}
    }
}

fn finish(machine: &mut Machine, op: StoreOp) -> Result<u64, StoreFault> {
    match op {
        StoreOp::ReadFile { file, offset, length, target } => {
            read_file(machine, file, offset, length as usize, target).map(|()| 0)
        }
        StoreOp::ReadSpill { slot, checksum, target } => {
            read_spill(machine, slot, checksum, target).map(|()| 0)
        }
        StoreOp::WriteSpill { source, slot } => write_spill(machine, source, slot),
    }
}

fn read_file(
    machine: &mut Machine,
    file: FileId,
    offset: u64,
    length: usize,
    target: RamFrame,
) -> Result<(), StoreFault> {
    if machine.faults.strikes(Fault::ReadError) {
        return Err(StoreFault::Io { offset, errno: Errno::EIO });
    }
    let (opened, present) = machine.disk.find(file);
    let end = present.identity.size;
    let ignores = machine.has(Mutant::FileChangeIgnored);
    if end < offset + u64::try_from(length).expect("a page") {
        return Err(StoreFault::Truncated { offset, end });
    }
    if opened.identity != present.identity && !ignores {
        return Err(StoreFault::Changed { offset });
    }
    let first = usize::try_from(offset).expect("files are small");
    let bytes = present.bytes.clone();
    let (unshifted, short) =
        (machine.has(Mutant::ReadUnshifted), machine.errs(Mutant::ShortReadTaken));
    let is_tail = length < machine.page_size;
    let mut moved = if short { length / 2 } else { length };
    if is_tail && machine.has(Mutant::TailShort) {
        moved -= 1;
    }
    let begin = if unshifted { 0 } else { shift(offset) as usize };
    let page_end = begin + machine.page_size;
    let tail_stays = machine.has(Mutant::TailNotZeroed);
    let frame = machine.io().bytes_mut(target.0);
    frame[begin..begin + moved].copy_from_slice(&bytes[first..first + moved]);
    if !tail_stays {
        frame[begin + length..page_end].fill(0);
    }
    Ok(())
}

fn read_spill(
    machine: &mut Machine,
    slot: SpillSlot,
    checksum: u64,
    target: RamFrame,
) -> Result<(), StoreFault> {
    let offset = spill_offset(machine, slot);
    if machine.faults.strikes(Fault::SpillReadError) {
        return Err(StoreFault::Io { offset, errno: Errno::EIO });
    }
    let ignores = machine.has(Mutant::ChecksumIgnored);
    let bytes = machine.disk.slots[slot.0 as usize].bytes.clone();
    machine.io().bytes_mut(target.0)[..bytes.len()].copy_from_slice(&bytes);
    if xxh3_64(&bytes) != checksum && !ignores {
        machine.io().poison(target.0);
        return Err(StoreFault::Checksum { offset });
    }
    Ok(())
}

fn write_spill(
    machine: &mut Machine,
    source: RamFrame,
    slot: SpillSlot,
) -> Result<u64, StoreFault> {
    let offset = spill_offset(machine, slot);
    if machine.now < machine.disk.full_until {
        return Err(StoreFault::Io { offset, errno: Errno::ENOSPC });
    }
    let fails = machine.faults.strikes(Fault::SpillWriteError);
    let torn = !fails && machine.faults.strikes(Fault::TornWrite);
    let page_size = machine.page_size;
    let page = machine.io().bytes(source.0)[..page_size].to_vec();
    let checksum = xxh3_64(&page);
    let count = u32::try_from(machine.disk.slots.len()).expect("slots are few");
    let beside = machine.has(Mutant::WrongSlot);
    let target = if beside { (slot.0 + 1) % count } else { slot.0 };
    let moved = if fails || torn { page_size / 2 } else { page_size };
    if !machine.has(Mutant::SpillWriteLost) {
        machine.disk.slots[target as usize].bytes[..moved].copy_from_slice(&page[..moved]);
    }
    if fails {
        return Err(StoreFault::Io { offset, errno: Errno::EIO });
    }
    machine.disk.slots[slot.0 as usize].checksum = Some(checksum);
    Ok(checksum)
}

fn spill_offset(machine: &Machine, slot: SpillSlot) -> u64 {
    u64::from(slot.0) * u64::try_from(machine.page_size).expect("a page")
}
