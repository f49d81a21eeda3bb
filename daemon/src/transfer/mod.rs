//! Runs hops: gives each to the store or the device, keeps what they have no room for yet, and turns completions into
//! events. It decides nothing; order among hops does not matter to the engine.

use std::collections::VecDeque;

use crate::device::{Device, DeviceDone, DeviceOp, Full};
use crate::engine::event::{Event, Hop, TransferFault};
use crate::engine::ids::{FileId, Tag};
use crate::store::{Store, StoreDone, StoreOp};

/// Hops under way. What waits here is bounded by the engine's frames: one hop a page.
#[derive(Debug)]
pub struct Transfer<S, D> {
    store: S,
    device: D,
    store_waits: VecDeque<(Tag, StoreOp)>,
    device_waits: VecDeque<(Tag, DeviceOp)>,
    store_done: Vec<StoreDone>,
    device_done: Vec<DeviceDone>,
    in_flight: usize,
}

impl<S: Store, D: Device> Transfer<S, D> {
    /// Over a store and a device that share the RAM frames.
    pub fn new(store: S, device: D) -> Self {
        Self {
            store,
            device,
            store_waits: VecDeque::new(),
            device_waits: VecDeque::new(),
            store_done: Vec::new(),
            device_done: Vec::new(),
            in_flight: 0,
        }
    }

    /// The store.
    pub fn store(&mut self) -> &mut S {
        &mut self.store
    }

    /// The device.
    pub fn device(&mut self) -> &mut D {
        &mut self.device
    }

    /// Hops that have not completed.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Hops that the store and the device have no room for yet.
    #[must_use]
    pub fn waiting(&self) -> (usize, usize) {
        (self.store_waits.len(), self.device_waits.len())
    }

    /// Takes a hop on; it starts at the next [`Self::submit`].
    pub fn start(&mut self, tag: Tag, hop: Hop) {
        self.in_flight += 1;
        let device = match hop {
            Hop::ReadFile { file, offset, length, target } => {
                let op = StoreOp::ReadFile { file, offset, length, target };
                return self.store_waits.push_back((tag, op));
            }
            Hop::ReadSpill { slot, checksum, target } => {
                let op = StoreOp::ReadSpill { slot, checksum, target };
                return self.store_waits.push_back((tag, op));
            }
            Hop::WriteSpill { source, slot } => {
                let op = StoreOp::WriteSpill { source, slot };
                return self.store_waits.push_back((tag, op));
            }
            Hop::Up { source, shift, target } => DeviceOp::Up { source, shift, target },
            Hop::Down { source, target } => DeviceOp::Down { source, target },
            Hop::Zero { target } => DeviceOp::Zero { target },
            Hop::Release { target } => DeviceOp::Release { target },
            Hop::Restore { target } => DeviceOp::Restore { target },
        };
        self.device_waits.push_back((tag, device));
    }

    /// Gives the store and the device as much as they take.
    pub fn submit(&mut self) {
        let mut submitted = false;
        while let Some((tag, op)) = self.store_waits.front().copied() {
            if self.store.submit(tag, op) == Err(Full) {
                break;
            }
            submitted = true;
            self.store_waits.pop_front();
        }
        if submitted {
            self.store.flush();
        }
        // The directions have queues of their own: one that is full must not hold up the other.
        let device = &mut self.device;
        self.device_waits.retain(|(tag, op)| device.submit(*tag, *op) == Err(Full));
    }

    /// Appends an event for each hop that has completed.
    pub fn poll(&mut self, events: &mut Vec<Event>) {
        self.store.poll(&mut self.store_done);
        self.device.poll(&mut self.device_done);
        self.in_flight -= self.store_done.len() + self.device_done.len();
        for done in self.store_done.drain(..) {
            let result = done.result.map_err(TransferFault::Store);
            events.push(Event::TransferDone { tag: done.tag, result });
        }
        for done in self.device_done.drain(..) {
            let result = done.result.map(|()| 0).map_err(TransferFault::Device);
            events.push(Event::TransferDone { tag: done.tag, result });
        }
    }

    /// Forgets a file on which nothing is in flight.
    pub fn close_file(&mut self, file: FileId) {
        self.store.close_file(file);
    }
}
