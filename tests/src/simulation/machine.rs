//! The simulated hardware that the virtual store and the virtual device share.

use std::cell::RefCell;
use std::rc::Rc;

use lapisd::store::ALIGNMENT;

use super::disk::Disk;
use super::faults::Faults;
use super::memory::Frames;
use super::mutant::Mutant;
use super::random::Random;
use super::scenario::Scenario;

/// Frames, disk, clock, and what is wrong with them.
#[derive(Debug)]
pub(super) struct Machine {
    /// Microseconds.
    pub(super) now: u64,
    /// Bytes.
    pub(super) page_size: usize,
    /// The store reads into VRAM and writes from it.
    pub(super) unified: bool,
    /// A page and 4 KiB each.
    pub(super) ram: Frames,
    /// A page each.
    pub(super) vram: Frames,
    /// Mappings of live processes that hold each VRAM frame.
    pub(super) held: Vec<u32>,
    /// Files and spill.
    pub(super) disk: Disk,
    /// Of these, mappings for writing.
    pub(super) written: Vec<u32>,
    /// VRAM frames whose memory was given back.
    pub(super) released: Vec<bool>,
    /// The device is gone.
    pub(super) device_lost: bool,
    /// What goes wrong.
    pub(super) faults: Faults,
    mutant: Option<Mutant>,
    mutant_random: Random,
}

/// The hardware, as the store, the device and the world hold it.
pub(super) type Shared = Rc<RefCell<Machine>>;

impl Machine {
    /// The hardware of a scenario, with at most one bug planted.
    #[must_use]
    pub(super) fn new(scenario: &Scenario, mutant: Option<Mutant>) -> Self {
        let limits = &scenario.limits;
        let page_size = usize::try_from(limits.page_size).expect("pages are small");
        let frame_size = page_size + usize::try_from(ALIGNMENT).expect("4 KiB");
        Self {
            now: 1,
            page_size,
            unified: limits.unified,
            ram: Frames::new("RAM", limits.ram_frames, frame_size),
            vram: Frames::new("VRAM", limits.vram_frames, page_size),
            held: vec![0; limits.vram_frames as usize],
            written: vec![0; limits.vram_frames as usize],
            released: (0..limits.vram_frames).map(|frame| frame >= scenario.frames_ready).collect(),
            disk: Disk::new(scenario.seed, &scenario.files, limits.spill_slots, page_size),
            device_lost: false,
            faults: Faults::new(scenario.seed, scenario.calm),
            mutant,
            mutant_random: Random::new(scenario.seed, 0x4D),
        }
    }

    /// Whether this bug is planted.
    #[must_use]
    pub(super) fn has(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    /// Whether this bug is planted and shows now: it does once in a while.
    pub(super) fn errs(&mut self, mutant: Mutant) -> bool {
        self.has(mutant) && self.mutant_random.one_in(50)
    }

    /// The frames that the store reads into and writes from.
    pub(super) fn io(&mut self) -> &mut Frames {
        if self.unified { &mut self.vram } else { &mut self.ram }
    }

    /// The store begins to read into a frame.
    pub(super) fn claim_read_into(&mut self, frame: u32) {
        if self.unified {
            self.assert_not_held(frame, "read into");
            assert!(!self.released[frame as usize], "frame {frame} has no memory and is read into");
        }
        self.io().claim_write(frame);
    }

    /// The store begins to write from a frame.
    pub(super) fn assert_copyable(&self, frame: u32) {
        if self.unified {
            self.assert_not_written(frame);
        }
    }

    /// A VRAM frame is about to be overwritten or released.
    ///
    /// # Panics
    /// If a process has it mapped.
    pub(super) fn assert_not_held(&self, frame: u32, why: &str) {
        assert_eq!(self.held[frame as usize], 0, "VRAM frame {frame} is {why} while mapped");
    }

    /// A VRAM frame is about to be copied.
    ///
    /// # Panics
    /// If a process may write to it meanwhile.
    pub(super) fn assert_not_written(&self, frame: u32) {
        assert_eq!(self.written[frame as usize], 0, "VRAM frame {frame} is copied while written");
    }
}

/// Operations in flight, by when they end.
#[derive(Debug)]
pub(super) struct Flights<T> {
    by_end: std::collections::BTreeMap<(u64, u64), T>,
    submitted: u64,
    /// Order of the latest submission among those that have ended.
    latest: u64,
}

impl<T> Default for Flights<T> {
    fn default() -> Self {
        Self { by_end: std::collections::BTreeMap::new(), submitted: 0, latest: 0 }
    }
}

impl<T> Flights<T> {
    /// One takes off and will end then.
    pub(super) fn start(&mut self, end: u64, flight: T) {
        self.submitted += 1;
        self.by_end.insert((end, self.submitted), flight);
    }

    /// In flight.
    #[must_use]
    pub(super) fn len(&self) -> usize {
        self.by_end.len()
    }

    /// Whether none is in flight.
    #[must_use]
    pub(super) fn is_empty(&self) -> bool {
        self.by_end.is_empty()
    }

    /// When the next one ends.
    #[must_use]
    pub(super) fn next_end(&self) -> Option<u64> {
        self.by_end.keys().next().map(|(end, _)| *end)
    }

    /// The next that has ended by now, and whether it overtook another.
    pub(super) fn land(&mut self, now: u64) -> Option<(T, bool)> {
        if self.next_end()? > now {
            return None;
        }
        let ((_, order), flight) = self.by_end.pop_first()?;
        let overtaken = order < self.latest;
        self.latest = self.latest.max(order);
        Some((flight, overtaken))
    }

    /// All in flight.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.by_end.values()
    }
}

/// How long an operation takes: usually about `usual_us`, now and then a thousand times that.
pub(super) fn latency(random: &mut Random, faults: &mut Faults, usual_us: u64) -> u64 {
    let usual = random.between(usual_us.div_ceil(2), usual_us * 2);
    if faults.strikes(super::faults::Fault::LatencySpike) { usual * 1000 } else { usual }
}
