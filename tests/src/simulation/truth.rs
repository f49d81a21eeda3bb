//! The naive model of the bytes: what every page of every allocation holds, as a plain copy.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use lapisd::engine::ids::AllocationId;

use super::random::Random;

/// A page of an allocation.
pub(super) type Place = (AllocationId, u32);

/// Part of a file as it was when it was opened.
#[derive(Debug, Clone)]
pub(super) struct FilePart {
    /// The whole file.
    pub(super) bytes: Rc<[u8]>,
    /// First byte.
    pub(super) offset: usize,
    /// Bytes.
    pub(super) length: usize,
}

/// All bytes as they should be.
#[derive(Debug)]
pub(super) struct Truth {
    page_size: usize,
    /// Pages that were written; the others are zeros.
    written: BTreeMap<Place, Vec<u8>>,
    files: BTreeMap<AllocationId, FilePart>,
    /// Pages that somebody asked to overwrite and has not written yet: old bytes or none.
    overwriting: BTreeMap<Place, u32>,
    random: Random,
}

impl Truth {
    /// Nothing written.
    #[must_use]
    pub(super) fn new(seed: u64, page_size: usize) -> Self {
        Self {
            page_size,
            written: BTreeMap::new(),
            files: BTreeMap::new(),
            overwriting: BTreeMap::new(),
            random: Random::new(seed, 0x77),
        }
    }

    /// An allocation is of a file.
    pub(super) fn opened(&mut self, allocation: AllocationId, part: FilePart) {
        self.files.insert(allocation, part);
    }

    /// Nobody can see this allocation any more.
    pub(super) fn forget(&mut self, allocation: AllocationId) {
        self.files.remove(&allocation);
        self.written.retain(|(id, _), _| *id != allocation);
        self.overwriting.retain(|(id, _), _| *id != allocation);
    }

    /// A page will be overwritten whole, if that is granted.
    pub(super) fn begin_overwrite(&mut self, place: Place) {
        *self.overwriting.entry(place).or_default() += 1;
    }

    /// It was, or it was refused.
    pub(super) fn end_overwrite(&mut self, place: Place) {
        if let Some(count) = self.overwriting.get_mut(&place) {
            *count -= 1;
            if *count == 0 {
                self.overwriting.remove(&place);
            }
        }
    }

    /// Compares what a client sees.
    ///
    /// # Panics
    /// If it is anything else than what was written.
    pub(super) fn check(&self, (allocation, page): Place, found: &[u8]) {
        if let Some(part) = self.files.get(&allocation) {
            let start = page as usize * self.page_size;
            let length = self.page_size.min(part.length - start);
            let first = part.offset + start;
            differ(&part.bytes[first..first + length], &found[..length], allocation, page);
            return all_zeros(&found[length..], allocation, page);
        }
        let unsure = self.overwriting.contains_key(&(allocation, page));
        match self.written.get(&(allocation, page)) {
            // Whoever overwrites it may have its frame and not have written yet: the bytes are anything.
            _ if unsure => {}
            Some(bytes) => differ(bytes, found, allocation, page),
            None => all_zeros(found, allocation, page),
        }
    }

    /// What a page that was written holds for certain.
    pub(super) fn written(&self, place: Place) -> Option<&[u8]> {
        let written = self.written.get(&place).filter(|_| !self.overwriting.contains_key(&place));
        written.map(Vec::as_slice)
    }

    /// A client writes some bytes of a page that it has mapped.
    pub(super) fn write(&mut self, place: Place, range: Range<usize>, seen: &mut [u8]) {
        let page_size = self.page_size;
        let page = self.written.entry(place).or_insert_with(|| vec![0; page_size]);
        self.random.fill(&mut page[range.clone()]);
        seen[range.clone()].copy_from_slice(&page[range]);
    }
}

fn differ(expected: &[u8], found: &[u8], allocation: AllocationId, page: u32) {
    if expected != found {
        let at = expected.iter().zip(found).position(|(a, b)| a != b);
        let at = at.expect("they differ and are of one length");
        panic!(
            "wrong byte {at} of page {page} of {allocation:?}: {:#04x} instead of {:#04x}",
            found[at], expected[at]
        );
    }
}

fn all_zeros(found: &[u8], allocation: AllocationId, page: u32) {
    if let Some(at) = found.iter().rposition(|byte| *byte != 0) {
        let byte = found[at];
        panic!("{byte:#04x} where page {page} of {allocation:?} has zeros, {at} bytes in");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: AllocationId = AllocationId(1);

    #[test]
    fn pages_are_zeros_then_what_was_written() {
        let mut truth = Truth::new(1, 16);
        truth.check((A, 0), &[0; 16]);
        let mut seen = [0; 16];
        truth.write((A, 0), 4..12, &mut seen);
        assert_eq!(seen[..4], [0; 4]);
        assert_ne!(seen[4..12], [0; 8]);
        truth.check((A, 0), &seen);
        truth.check((A, 1), &[0; 16]);
        truth.begin_overwrite((A, 0));
        truth.check((A, 0), &[0xEE; 16]);
    }

    #[test]
    #[should_panic(expected = "wrong byte 2 of page 1 of AllocationId(1): 0x00 instead of 0x07")]
    fn a_wrong_byte_of_a_file_is_seen() {
        let mut truth = Truth::new(1, 4);
        truth.opened(A, FilePart { bytes: (0..10).collect(), offset: 1, length: 9 });
        truth.check((A, 0), &[1, 2, 3, 4]);
        truth.check((A, 2), &[9, 0, 0, 0]);
        truth.check((A, 1), &[5, 6, 0, 8]);
    }

    #[test]
    #[should_panic(expected = "0xa5 where page 0 of AllocationId(1) has zeros, 0 bytes in")]
    fn a_tail_that_is_not_zeros_is_seen() {
        let mut truth = Truth::new(1, 4);
        truth.opened(A, FilePart { bytes: Rc::from(&[7, 8, 9][..]), offset: 0, length: 3 });
        truth.check((A, 0), &[7, 8, 9, 0xA5]);
    }
}
