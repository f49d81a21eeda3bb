//! One walk through the model: prefetch, map, check, unmap.

use std::time::{Duration, Instant};

use lapis::model::{LayerMapping, Model};
use lapis::{Client, DeviceKind, MAP_WAIT_DEFAULT};

use super::Stream;
use super::pace;
use super::progress::Progress;
use super::report::{Hits, Mismatch, Moved, PassKind, PassReport, Verified};
use super::schedule::{Lookahead, Schedule};
use super::verify::Verifier;
use crate::failure::Failure;

/// Runs passes one after the other.
#[derive(Debug)]
pub(crate) struct Runner<'a> {
    client: &'a Client,
    model: &'a Model,
    schedule: &'a Schedule,
    verifier: Verifier<'a>,
    /// A slice's bytes, copied from a device whose memory the CPU can't reach.
    copied: Vec<u8>,
    lookahead: Lookahead,
    /// Compute of a whole layer.
    compute: Duration,
    /// Passes that ended.
    passes: usize,
}

/// Times of the pass under way.
#[derive(Debug, Default)]
struct Times {
    stalled: Duration,
    verifying: Duration,
}

impl<'a> Runner<'a> {
    pub(crate) fn new(
        client: &'a Client,
        model: &'a Model,
        schedule: &'a Schedule,
        options: &Stream,
        passes: usize,
    ) -> Runner<'a> {
        Runner {
            client,
            model,
            schedule,
            verifier: Verifier::new(model.files(), schedule),
            copied: Vec::new(),
            lookahead: Lookahead::new(options.prefetch.unwrap_or(0) as usize, passes),
            compute: options.compute_ms.unwrap_or_default(),
            passes: 0,
        }
    }

    /// Walks through all steps once.
    pub(crate) fn pass(
        &mut self,
        kind: PassKind,
        progress: &Progress,
    ) -> Result<PassReport, Failure> {
        let before = self.client.stats()?;
        let mut times = Times::default();
        let start = Instant::now();
        for index in 0..self.schedule.steps.len() {
            self.step(index, kind, &mut times, progress)?;
        }
        let time = start.elapsed();
        let after = self.client.stats()?;
        if kind == PassKind::Verify {
            self.verifier.end_pass();
        }
        self.passes += 1;
        let bytes = self.schedule.bytes();
        Ok(PassReport {
            kind,
            time,
            stalled: times.stalled,
            verifying: times.verifying,
            bytes,
            bytes_per_s: pace::rate(bytes, time),
            moved: Moved::between(&before.total, &after.total),
            hits: Hits::between(&before.session, &after.session),
            ideal: None,
            efficiency: None,
        })
    }

    /// What was right in all passes, and what was not.
    pub(crate) fn finish(self) -> (Verified, Vec<Mismatch>) {
        (self.verifier.verified(), self.verifier.into_mismatches())
    }

    fn step(
        &mut self,
        index: usize,
        kind: PassKind,
        times: &mut Times,
        progress: &Progress,
    ) -> Result<(), Failure> {
        let schedule = self.schedule;
        let step = &schedule.steps[index];
        progress.layer(&step.name);
        let asked = Instant::now();
        let mapping = self.model.map_part(&step.part, MAP_WAIT_DEFAULT)?;
        let mapped = Instant::now();
        times.stalled += mapped - asked;
        // Only now, so that what is needed at once does not queue behind what is needed later.
        for ahead in self.lookahead.advance(schedule, self.passes, index) {
            self.model.prefetch_part(&schedule.steps[ahead % schedule.steps.len()].part)?;
        }
        match kind {
            PassKind::Verify => {
                let start = Instant::now();
                self.verify(index, &mapping)?;
                times.verifying += start.elapsed();
            }
            PassKind::Compute => pace::wait_until(mapped + self.compute.mul_f64(step.share)),
            PassKind::Stream => {}
        }
        mapping.unmap()?;
        progress.advance(step.part.bytes());
        Ok(())
    }

    fn verify(&mut self, index: usize, mapping: &LayerMapping) -> Result<(), Failure> {
        let on_device = self.client.welcome().device == DeviceKind::Cuda;
        for (place, (slice, bytes)) in mapping.iter().enumerate() {
            let found = if on_device {
                let length = slice.range.end - slice.range.start;
                let length = usize::try_from(length).expect("what is mapped has addresses");
                self.copied.resize(length, 0);
                mapping.copy_to_host(place, 0, &mut self.copied)?;
                self.copied.as_slice()
            } else {
                bytes
            };
            self.verifier.check((index, place), slice, found)?;
        }
        Ok(())
    }
}
