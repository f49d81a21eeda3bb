//! What becomes of a page when its hop ends, well or not.

use super::Engine;
use super::event::{Hop, Outbox, Reply, TransferFault};
use super::ids::{PageRef, RamFrame, VramFrame};
use super::limits::{READ_RETRIES, SPILL_REST_US};
use super::page::Motion;
use crate::store;

impl Engine {
    /// Advances a page whose hop ended well.
    pub(super) fn hop_succeeded(&mut self, at: PageRef, checksum: u64, outbox: &mut Outbox) {
        let bytes = self.useful_bytes(at);
        let file_backed = self.table.backing(at.backing).file_backed();
        let motion = self.table.page(at).motion;
        let hop = match motion {
            Motion::Still | Motion::NeedRam { .. } => unreachable!("nothing was in flight"),
            Motion::Reading { target, ram } => {
                self.reads -= 1;
                self.table.update(at, |page| page.read_failures = 0);
                if self.limits.unified {
                    self.filled(at, target, false);
                } else {
                    self.copy_up(at, ram, target, outbox);
                }
                if file_backed {
                    &mut self.counters.file_to_ram
                } else {
                    &mut self.counters.spill_to_ram
                }
            }
            Motion::Up { target } => {
                self.filled(at, target, false);
                &mut self.counters.ram_to_vram
            }
            Motion::Zero { target } => {
                self.filled(at, target, true);
                &mut self.counters.zeroed
            }
            Motion::Down { ram } => {
                self.downs -= 1;
                self.left_vram(at, ram);
                &mut self.counters.vram_to_ram
            }
            Motion::Out { slot } => {
                self.outs -= 1;
                self.table.update(at, |page| {
                    page.slot = Some(slot);
                    page.checksum = checksum;
                    page.motion = Motion::Still;
                });
                &mut self.counters.ram_to_spill
            }
        };
        hop.pages += 1;
        hop.bytes += bytes;
    }

    /// A page that was read goes on to VRAM.
    fn copy_up(&mut self, at: PageRef, ram: RamFrame, target: VramFrame, outbox: &mut Outbox) {
        let shift = self.shift_of(at);
        self.table.update(at, |page| {
            page.ram = Some(ram);
            page.motion = Motion::Up { target };
        });
        self.start(at, Hop::Up { source: ram, shift, target }, outbox);
    }

    pub(super) fn filled(&mut self, at: PageRef, target: VramFrame, zeros: bool) {
        let page = self.table.page(at);
        let others = page.ram.is_some() || page.slot.is_some();
        if zeros && others && page.overwriters == 0 {
            // Whoever was going to overwrite it has given up: its bytes are elsewhere.
            return self.cancel_fill(at, target);
        }
        let by_prefetch = self.table.update(at, |page| {
            page.vram = Some(target);
            page.motion = Motion::Still;
            page.zeros = zeros && !others;
            page.provisional = zeros && others;
            page.fetched = page.pins == 0;
            page.unfetchable = false;
            std::mem::take(&mut page.filled_by_prefetch)
        });
        self.prefetches_moving -= u32::from(by_prefetch);
    }

    /// A page was copied down to leave VRAM. It goes unless somebody wants it again by now.
    pub(super) fn left_vram(&mut self, at: PageRef, ram: RamFrame) {
        let frame = self.table.update(at, |page| {
            page.ram = Some(ram);
            page.motion = Motion::Still;
            if page.pins > 0 || page.prefetched || page.flushing {
                return None;
            }
            page.retained = false;
            page.vram.take()
        });
        if let Some(frame) = frame {
            self.vram.put(self.table.backing(at.backing).domain, frame);
        }
    }

    /// Takes back what a failed hop held, and tells who waited.
    pub(super) fn hop_failed(
        &mut self,
        at: PageRef,
        fault: &TransferFault,
        now: u64,
        outbox: &mut Outbox,
    ) {
        if self.read_again(at, fault, outbox) {
            return;
        }
        let file_backed = self.table.backing(at.backing).file_backed();
        let motion = self.table.page(at).motion;
        let hop = match motion {
            Motion::Still | Motion::NeedRam { .. } => unreachable!("nothing was in flight"),
            Motion::Reading { target, ram } => {
                self.reads -= 1;
                if !self.limits.unified {
                    self.ram.put(ram.0);
                }
                self.cancel_fill(at, target);
                if file_backed {
                    &mut self.counters.file_to_ram
                } else {
                    &mut self.counters.spill_to_ram
                }
            }
            Motion::Up { target } => {
                self.cancel_fill(at, target);
                &mut self.counters.ram_to_vram
            }
            Motion::Zero { target } => {
                self.cancel_fill(at, target);
                &mut self.counters.zeroed
            }
            Motion::Down { ram } => {
                self.downs -= 1;
                self.ram.put(ram.0);
                self.table.update(at, |page| page.motion = Motion::Still);
                &mut self.counters.vram_to_ram
            }
            Motion::Out { slot } => {
                self.outs -= 1;
                // The page stays in RAM. Other slots come first, after a rest.
                self.slots.put_last(slot.0);
                self.spill_rests_until = now.saturating_add(SPILL_REST_US);
                self.table.update(at, |page| page.motion = Motion::Still);
                &mut self.counters.ram_to_spill
            }
        };
        hop.errors += 1;
        self.count_checksum(fault);
        if let TransferFault::Device(_) = fault {
            self.device_lost = true;
        }
        let page = self.table.page(at);
        if page.vram.is_none() && !matches!(motion, Motion::Out { .. }) {
            self.table.update(at, |page| {
                page.prefetched = false;
                page.unfetchable = true;
            });
            self.fail_waiters(at, fault, outbox);
        }
        if let Motion::Out { .. } | Motion::Down { .. } = motion {
            self.fail_flushes(at, fault, outbox);
        }
        if self.device_lost {
            self.fail_all(fault, outbox);
        }
    }

    fn count_checksum(&mut self, fault: &TransferFault) {
        if let TransferFault::Store(store::StoreFault::Checksum { .. }) = fault {
            self.counters.checksum_errors += 1;
        }
    }

    /// A read that failed may do better the next time: a bus error, a reset of the disk. A file that changed won't.
    pub(super) fn read_again(
        &mut self,
        at: PageRef,
        fault: &TransferFault,
        outbox: &mut Outbox,
    ) -> bool {
        let Motion::Reading { ram, .. } = self.table.page(at).motion else { return false };
        let may_pass = matches!(
            fault,
            TransferFault::Store(store::StoreFault::Io { .. } | store::StoreFault::Checksum { .. })
        );
        let failures = self.table.update(at, |page| {
            page.read_failures = page.read_failures.saturating_add(1);
            page.read_failures
        });
        let again = may_pass && failures <= READ_RETRIES;
        if again {
            self.counters.read_retries += 1;
            if self.table.backing(at.backing).file_backed() {
                self.counters.file_to_ram.errors += 1;
            } else {
                self.counters.spill_to_ram.errors += 1;
            }
            self.count_checksum(fault);
            let hop = self.read_hop(at, ram);
            self.start(at, hop, outbox);
        } else {
            self.table.update(at, |page| page.read_failures = 0);
        }
        again
    }

    /// A page in line to be filled gives its VRAM frame back. If no process has that, another domain may have used it
    /// last, and nothing has been put over what was left there.
    pub(super) fn cancel_fill(&mut self, at: PageRef, target: VramFrame) {
        let by_prefetch = self.table.update(at, |page| {
            page.motion = Motion::Still;
            std::mem::take(&mut page.filled_by_prefetch)
        });
        self.prefetches_moving -= u32::from(by_prefetch);
        if self.holders(target).is_empty() {
            self.vram.unseen_again(target);
        } else {
            self.vram.put(self.table.backing(at.backing).domain, target);
        }
    }

    /// The device is lost: nobody who waits will be served.
    pub(super) fn fail_all(&mut self, fault: &TransferFault, outbox: &mut Outbox) {
        while let Some((id, pending)) = self.flushes.first_key_value() {
            let at = pending.spans[0].pages().next().expect("spans aren't empty");
            let refused = super::refusal::fault(at.index, fault);
            let id = *id;
            self.end_flush(id, Reply::Refused(Box::new(refused)), outbox);
        }
        while let Some((id, pending)) = self.pending.first_key_value() {
            let (id, page) = (*id, pending.spans[0].first);
            self.refuse_pending(id, super::refusal::fault(page, fault), outbox);
        }
        self.fail_resizes(outbox);
    }
}
