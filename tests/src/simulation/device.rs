//! The virtual device: copies between frames in virtual time, until it is lost.

use std::os::fd::OwnedFd;

use lapis_proto::message::DeviceKind;
use lapisd::device::{Device, DeviceDone, DeviceFault, DeviceInfo, DeviceOp, Full};
use lapisd::engine::ids::{Tag, VramFrame};

use super::faults::Fault;
use super::machine::{Flights, Machine, Shared, latency};
use super::mutant::Mutant;
use super::random::Random;
use super::scenario::Scenario;

/// An operation that has begun; half of them read their source at once, half at their end.
#[derive(Debug)]
struct Flight {
    tag: Tag,
    op: DeviceOp,
    taken: Option<Vec<u8>>,
}

/// VRAM frames and what copies them.
#[derive(Debug)]
pub(super) struct VirtualDevice {
    machine: Shared,
    random: Random,
    info: DeviceInfo,
    queue_max: usize,
    usual_us: u64,
    flights: Flights<Flight>,
    /// Bytes of operations that were reported before they were there, by planted bug.
    late: Flights<Flight>,
    done: Vec<DeviceDone>,
}

impl VirtualDevice {
    /// On this hardware.
    #[must_use]
    pub(super) fn new(machine: Shared, scenario: &Scenario) -> Self {
        let info = DeviceInfo {
            kind: DeviceKind::Sim,
            unified: scenario.limits.unified,
            uuid: [0; 16],
            name: "virtual".to_owned(),
            frames: scenario.limits.vram_frames,
            frames_ready: scenario.frames_ready,
            page_kind: "virtual",
        };
        Self {
            machine,
            random: Random::new(scenario.seed, 0xDE),
            info,
            queue_max: scenario.device_queue,
            usual_us: scenario.device_us,
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

    /// Whether nothing is in flight.
    #[must_use]
    pub(super) fn is_idle(&self) -> bool {
        self.flights.is_empty()
    }

    /// Ends what ends by now.
    pub(super) fn run(&mut self) {
        let shared = self.machine.clone();
        let machine = &mut *shared.borrow_mut();
        while let Some((flight, overtaken)) = self.flights.land(machine.now) {
            if overtaken {
                machine.faults.count(Fault::Reordered);
            }
            let (tag, op) = (flight.tag, flight.op);
            let result = if machine.device_lost {
                Err(DeviceFault::Lost { reason: "it fell off the bus".into() })
            } else {
                check_held(machine, op);
                let result = frame_fault(machine, op);
                if result.is_ok() && machine.errs(Mutant::CompletionEarly) {
                    self.late.start(machine.now + 2000, flight);
                } else if result.is_ok() {
                    finish(machine, &flight);
                }
                result
            };
            release(machine, op);
            self.done.push(DeviceDone { tag, result });
        }
        while let Some((flight, _)) = self.late.land(machine.now) {
            finish(machine, &flight);
        }
    }
}

impl Device for VirtualDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&mut self, tag: Tag, op: DeviceOp) -> Result<(), Full> {
        let machine = &mut *self.machine.borrow_mut();
        let down = |op: &DeviceOp| matches!(op, DeviceOp::Down { .. });
        let same_way = |flight: &&Flight| down(&flight.op) == down(&op);
        let busy = self.flights.iter().filter(same_way).count();
        // Only while something is in flight: its end is when the engine's side tries again.
        if busy >= self.queue_max || (busy > 0 && machine.faults.strikes(Fault::QueueFull)) {
            return Err(Full);
        }
        check_held(machine, op);
        let early = self.random.one_in(2);
        let taken = claim(machine, op, early);
        let end = machine.now + latency(&mut self.random, &mut machine.faults, self.usual_us);
        self.flights.start(end, Flight { tag, op, taken });
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<DeviceDone>) {
        done.append(&mut self.done);
    }

    fn export(&self, frame: VramFrame) -> Result<OwnedFd, DeviceFault> {
        // Clients of the simulation need no descriptor.
        let source = nix::errno::Errno::ENOSYS;
        Err(DeviceFault::Frame { frame: frame.0, call: "export", source })
    }
}

/// No process may have what is overwritten, nor what is copied to be given up.
fn check_held(machine: &Machine, op: DeviceOp) {
    match op {
        DeviceOp::Up { target, .. } | DeviceOp::Zero { target } => {
            machine.assert_not_held(target.0, "overwritten");
        }
        DeviceOp::Down { source, .. } => machine.assert_not_written(source.0),
        DeviceOp::Release { target } => machine.assert_not_held(target.0, "released"),
        DeviceOp::Restore { .. } => return,
    }
    let (DeviceOp::Up { target: frame, .. }
    | DeviceOp::Down { source: frame, .. }
    | DeviceOp::Zero { target: frame }
    | DeviceOp::Release { target: frame }
    | DeviceOp::Restore { target: frame }) = op;
    assert!(!machine.released[frame.0 as usize], "{frame:?} has no memory, and {op:?}");
}

/// What may go wrong with a frame's memory.
fn frame_fault(machine: &mut Machine, op: DeviceOp) -> Result<(), DeviceFault> {
    let (frame, call, fault) = match op {
        DeviceOp::Release { target } => (target, "release", Fault::ReleaseFailed),
        DeviceOp::Restore { target } => (target, "restore", Fault::RestoreFailed),
        DeviceOp::Up { .. } | DeviceOp::Down { .. } | DeviceOp::Zero { .. } => return Ok(()),
    };
    if machine.faults.strikes(fault) {
        let source = nix::errno::Errno::ENOMEM;
        return Err(DeviceFault::Frame { frame: frame.0, call, source });
    }
    Ok(())
}

/// Claims the frames; answers the source's bytes if they are read at once.
fn claim(machine: &mut Machine, op: DeviceOp, early: bool) -> Option<Vec<u8>> {
    let page_size = machine.page_size;
    match op {
        DeviceOp::Up { source, shift, target } => {
            machine.ram.claim_read(source.0);
            machine.vram.claim_write(target.0);
            let begin = begin(machine, shift);
            early.then(|| machine.ram.bytes(source.0)[begin..begin + page_size].to_vec())
        }
        DeviceOp::Down { source, target } => {
            machine.vram.claim_read(source.0);
            machine.ram.claim_write(target.0);
            early.then(|| machine.vram.bytes(source.0).to_vec())
        }
        DeviceOp::Zero { target } => {
            if !machine.has(Mutant::ZeroSkipped) {
                machine.vram.claim_write(target.0);
            }
            None
        }
        DeviceOp::Release { target } | DeviceOp::Restore { target } => {
            machine.vram.claim_write(target.0);
            None
        }
    }
}

fn release(machine: &mut Machine, op: DeviceOp) {
    match op {
        DeviceOp::Up { source, target, .. } => {
            machine.ram.release(source.0);
            machine.vram.release(target.0);
        }
        DeviceOp::Down { source, target } => {
            machine.vram.release(source.0);
            machine.ram.release(target.0);
        }
        DeviceOp::Zero { target } => {
            if !machine.has(Mutant::ZeroSkipped) {
                machine.vram.release(target.0);
            }
        }
        DeviceOp::Release { target } | DeviceOp::Restore { target } => {
            machine.vram.release(target.0);
        }
    }
}

fn begin(machine: &Machine, shift: u32) -> usize {
    if machine.has(Mutant::UpUnshifted) { 0 } else { shift as usize }
}

fn finish(machine: &mut Machine, flight: &Flight) {
    let page_size = machine.page_size;
    match flight.op {
        DeviceOp::Up { source, shift, target } => {
            let begin = begin(machine, shift);
            let half = machine.errs(Mutant::UpHalf);
            let moved = if half { page_size / 2 } else { page_size };
            let from_frame = &machine.ram.bytes(source.0)[begin..begin + page_size];
            let page = flight.taken.as_deref().unwrap_or(from_frame);
            machine.vram.bytes_mut(target.0)[..moved].copy_from_slice(&page[..moved]);
        }
        DeviceOp::Down { source, target } => {
            if !machine.has(Mutant::DownWithoutCopy) {
                let page = flight.taken.as_deref().unwrap_or(machine.vram.bytes(source.0));
                machine.ram.bytes_mut(target.0)[..page_size].copy_from_slice(page);
            }
        }
        DeviceOp::Zero { target } => {
            if !machine.has(Mutant::ZeroSkipped) {
                machine.vram.bytes_mut(target.0).fill(0);
            }
        }
        // Garbage either way: what a frame comes back with is nobody's.
        DeviceOp::Release { target } => {
            machine.vram.poison(target.0);
            machine.released[target.0 as usize] = true;
        }
        DeviceOp::Restore { target } => {
            machine.vram.poison(target.0);
            machine.released[target.0 as usize] = machine.has(Mutant::RestoreLost);
        }
    }
}
