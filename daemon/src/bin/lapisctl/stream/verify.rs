//! Compares what is mapped with the file.
//!
//! The first time a slice of a tensor is seen its bytes are compared with a plain read of the file, and the hash of
//! that is kept; later it is enough to compare hashes. A wrong hash is looked into at once, while the slice is mapped.

use std::collections::BTreeSet;
use std::ops::Range;

use lapis::model::{ModelFiles, TensorSlice};
use xxhash_rust::xxh3::xxh3_64;

use super::reference::{PlainReader, ReferenceError};
use super::report::{Mismatch, Verified};
use super::schedule::Schedule;

/// Mismatches that are kept; more are only counted.
const MISMATCHES_MAX: usize = 1000;

/// Checks slices, and remembers what was wrong.
#[derive(Debug)]
pub(crate) struct Verifier<'a> {
    model: &'a ModelFiles,
    /// The file read last: layers rarely go back and forth between files.
    reader: Option<(usize, PlainReader)>,
    /// By step and slice: the hash of the file's bytes.
    expected: Vec<Vec<Option<u64>>>,
    /// Bytes of each tensor that were right in this pass.
    right: Vec<u64>,
    /// Tensors that were wrong or incomplete in any pass that ended.
    wrong: BTreeSet<usize>,
    mismatches: Vec<Mismatch>,
    passes: usize,
    bytes: u64,
}

impl<'a> Verifier<'a> {
    pub(crate) fn new(model: &'a ModelFiles, schedule: &Schedule) -> Verifier<'a> {
        let slices = schedule.steps.iter().map(|step| vec![None; step.part.slices.len()]);
        Verifier {
            model,
            reader: None,
            expected: slices.collect(),
            right: vec![0; model.tensors().len()],
            wrong: BTreeSet::new(),
            mismatches: Vec::new(),
            passes: 0,
            bytes: 0,
        }
    }

    /// Checks one slice. `found` is what the tiers show of it; `at` is its step and its place in the step.
    pub(crate) fn check(
        &mut self,
        at: (usize, usize),
        slice: &TensorSlice,
        found: &[u8],
    ) -> Result<(), ReferenceError> {
        self.bytes += found.len() as u64;
        let length = slice.range.end - slice.range.start;
        let hash = xxh3_64(found);
        let expected = match self.expected[at.0][at.1] {
            Some(expected) => expected,
            None => {
                let expected = self.reader(slice.shard)?.hash(&slice.range)?;
                self.expected[at.0][at.1] = Some(expected);
                expected
            }
        };
        if hash == expected && found.len() as u64 == length {
            self.right[slice.tensor] += length;
            return Ok(());
        }
        self.look_into(slice, found)
    }

    /// Ends a pass: a tensor counts if each of its bytes was right.
    pub(crate) fn end_pass(&mut self) {
        for (index, tensor) in self.model.tensors().iter().enumerate() {
            if self.right[index] != tensor.bytes() {
                self.wrong.insert(index);
            }
        }
        self.right.fill(0);
        self.passes += 1;
    }

    /// What was right in all passes that ended.
    pub(crate) fn verified(&self) -> Verified {
        let tensors = self.model.tensors().len() - self.wrong.len();
        Verified {
            tensors: if self.passes == 0 { 0 } else { tensors },
            passes: self.passes,
            bytes: self.bytes,
        }
    }

    pub(crate) fn into_mismatches(self) -> Vec<Mismatch> {
        self.mismatches
    }

    /// Finds out which bytes are wrong.
    fn look_into(&mut self, slice: &TensorSlice, found: &[u8]) -> Result<(), ReferenceError> {
        let difference = self.reader(slice.shard)?.compare(&slice.range, found)?;
        let pass = self.passes + 1;
        if self.mismatches.len() < MISMATCHES_MAX {
            let inside: &Range<u64> = &slice.inside;
            // No byte differs if the page was repaired between the two looks, or the file was changed: all of the
            // slice is suspect then.
            let (first, last, count) = match difference {
                Some(difference) => {
                    let at = inside.start;
                    (at + difference.first, at + difference.last, difference.count)
                }
                None => (inside.start, inside.end.saturating_sub(1), inside.end - inside.start),
            };
            let tensor = self.model.tensors()[slice.tensor].name.clone();
            self.mismatches.push(Mismatch { pass, tensor, first, last, count });
        }
        Ok(())
    }

    fn reader(&mut self, shard: usize) -> Result<&mut PlainReader, ReferenceError> {
        let open = self.reader.take().filter(|(open, _)| *open == shard);
        let reader = match open {
            Some((_, reader)) => reader,
            None => PlainReader::open(&self.model.shards()[shard].path)?,
        };
        let (_, reader) = self.reader.insert((shard, reader));
        Ok(reader)
    }
}

#[cfg(test)]
mod tests {
    use lapis::model::Checkpoint;

    use super::*;

    /// A small model in parts of at most 4 pages of 4 KiB, and its bytes.
    fn model() -> (tempfile::TempDir, ModelFiles, Schedule, Vec<u8>) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("m.safetensors");
        let checkpoint = Checkpoint { bytes: 1 << 20, layers: 2, ..Checkpoint::default() };
        checkpoint.write(&path).unwrap();
        let model = ModelFiles::open(&path).unwrap();
        let schedule = Schedule::new(&model, 4096, 4);
        let bytes = std::fs::read(&path).unwrap();
        (directory, model, schedule, bytes)
    }

    fn pass(verifier: &mut Verifier<'_>, schedule: &Schedule, bytes: &[u8]) {
        for (index, step) in schedule.steps.iter().enumerate() {
            for (place, slice) in step.part.slices.iter().enumerate() {
                let start = usize::try_from(slice.range.start).unwrap();
                let end = usize::try_from(slice.range.end).unwrap();
                verifier.check((index, place), slice, &bytes[start..end]).unwrap();
            }
        }
        verifier.end_pass();
    }

    #[test]
    fn right_bytes_verify_each_tensor_in_each_pass() {
        let (_directory, model, schedule, bytes) = model();
        assert!(schedule.steps.len() > schedule.layers, "some tensor is split");
        let mut verifier = Verifier::new(&model, &schedule);
        assert_eq!(verifier.verified(), Verified { tensors: 0, passes: 0, bytes: 0 });
        pass(&mut verifier, &schedule, &bytes);
        pass(&mut verifier, &schedule, &bytes);
        let expected =
            Verified { tensors: model.tensors().len(), passes: 2, bytes: 2 * model.bytes() };
        assert_eq!(verifier.verified(), expected);
        assert_eq!(verifier.into_mismatches(), []);
    }

    #[test]
    fn wrong_bytes_are_named_in_the_first_and_in_later_passes() {
        let (_directory, model, schedule, bytes) = model();
        let tensor = &model.tensors()[0];
        let at = usize::try_from(tensor.range.end).unwrap();
        let mut damaged = bytes.clone();
        damaged[at - 1] ^= 1;
        damaged[at - 3] ^= 1;
        let (last, length) = (tensor.bytes() - 1, model.tensors().len());
        let expected =
            |pass| Mismatch { pass, tensor: tensor.name.clone(), first: last - 2, last, count: 2 };

        let mut verifier = Verifier::new(&model, &schedule);
        pass(&mut verifier, &schedule, &damaged);
        pass(&mut verifier, &schedule, &bytes);
        pass(&mut verifier, &schedule, &damaged);
        assert_eq!(verifier.verified().tensors, length - 1);
        assert_eq!(verifier.into_mismatches(), [expected(1), expected(3)]);
    }

    #[test]
    fn a_tensor_that_was_not_seen_whole_does_not_count() {
        let (_directory, model, schedule, bytes) = model();
        let cut = Schedule { steps: schedule.steps.into_iter().skip(1).collect(), layers: 0 };
        let mut verifier = Verifier::new(&model, &cut);
        pass(&mut verifier, &cut, &bytes);
        assert!(verifier.verified().tensors < model.tensors().len());
    }
}
