//! The outcome of `lapisctl stream`, as a table and as JSON.
//!
//! The JSON's fields are an interface: new ones may be added, and anything else raises `schema`.

use std::path::PathBuf;
use std::time::Duration;

use lapis::Counters;
use serde::{Serialize, Serializer};

use super::pace;

mod table;

/// Version of the JSON's fields.
pub(crate) const SCHEMA: u32 = 1;

/// Everything there is to say about a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) schema: u32,
    pub(crate) result: Outcome,
    pub(crate) model: ModelReport,
    pub(crate) daemon: DaemonReport,
    pub(crate) passes: Vec<PassReport>,
    /// All passes together.
    pub(crate) moved: Moved,
    pub(crate) hits: Hits,
    pub(crate) prefetch: Prefetched,
    #[serde(rename = "stalled_us", serialize_with = "micros")]
    pub(crate) stalled: Duration,
    pub(crate) verified: Verified,
    /// With `--compute-ms` only.
    pub(crate) compute: Option<Compute>,
    pub(crate) mismatches: Vec<Mismatch>,
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Outcome {
    /// All bytes that were checked are right.
    Ok,
    /// Some are not.
    Mismatch,
    /// Nothing was checked: `--no-verify`.
    Unverified,
}

#[derive(Debug, Serialize)]
pub(crate) struct ModelReport {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) tensors: usize,
    pub(crate) layers: usize,
    /// Mappings of a pass; more than layers where a layer is larger than what can be mapped at once.
    pub(crate) parts: usize,
}

#[derive(Debug, Serialize)]
pub(crate) struct DaemonReport {
    pub(crate) version: String,
    /// Whether it ran inside this command.
    pub(crate) embedded: bool,
    pub(crate) socket: PathBuf,
    pub(crate) device: &'static str,
    pub(crate) page_size_bytes: u64,
    pub(crate) vram_bytes: u64,
    pub(crate) ram_bytes: u64,
    pub(crate) nvme_bytes: u64,
    /// Other sessions were open: the bytes moved include theirs.
    pub(crate) shared: bool,
}

/// What a pass is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PassKind {
    /// Each tensor is compared with the file.
    Verify,
    /// Nothing but streaming: no check, no compute.
    Stream,
    /// With simulated compute, no check.
    Compute,
}

impl PassKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            PassKind::Verify => "verify",
            PassKind::Stream => "stream",
            PassKind::Compute => "compute",
        }
    }
}

/// One walk through the model.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct PassReport {
    pub(crate) kind: PassKind,
    /// From its first map to its last unmap, checks included.
    #[serde(rename = "time_us", serialize_with = "micros")]
    pub(crate) time: Duration,
    /// Part of `time`: in calls that map.
    #[serde(rename = "stalled_us", serialize_with = "micros")]
    pub(crate) stalled: Duration,
    /// Part of `time`: hashing, and plain reads of the file.
    #[serde(rename = "verifying_us", serialize_with = "micros")]
    pub(crate) verifying: Duration,
    /// Tensor bytes that were mapped.
    pub(crate) bytes: u64,
    /// `bytes` in `time`.
    pub(crate) bytes_per_s: Option<f64>,
    pub(crate) moved: Moved,
    pub(crate) hits: Hits,
    /// With simulated compute: the least time that this pass could have taken, and its share of `time`.
    #[serde(rename = "ideal_us", serialize_with = "micros_if")]
    pub(crate) ideal: Option<Duration>,
    pub(crate) efficiency: Option<f64>,
}

/// Bytes moved over each hop, by all sessions of the daemon.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Moved {
    pub(crate) file_to_ram_bytes: u64,
    pub(crate) ram_to_vram_bytes: u64,
    pub(crate) vram_to_ram_bytes: u64,
    pub(crate) ram_to_spill_bytes: u64,
    pub(crate) spill_to_ram_bytes: u64,
}

impl Moved {
    /// Between two readings of the counters.
    pub(crate) fn between(before: &Counters, after: &Counters) -> Moved {
        Moved {
            file_to_ram_bytes: after.file_to_ram.bytes.saturating_sub(before.file_to_ram.bytes),
            ram_to_vram_bytes: after.ram_to_vram.bytes.saturating_sub(before.ram_to_vram.bytes),
            vram_to_ram_bytes: after.vram_to_ram.bytes.saturating_sub(before.vram_to_ram.bytes),
            ram_to_spill_bytes: after.ram_to_spill.bytes.saturating_sub(before.ram_to_spill.bytes),
            spill_to_ram_bytes: after.spill_to_ram.bytes.saturating_sub(before.spill_to_ram.bytes),
        }
    }
}

/// Where this session's mapped pages were when they were asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Hits {
    pub(crate) vram_pages: u64,
    pub(crate) ram_pages: u64,
    pub(crate) miss_pages: u64,
}

impl Hits {
    /// Between two readings of the session's counters.
    pub(crate) fn between(before: &Counters, after: &Counters) -> Hits {
        Hits {
            vram_pages: after.hits_vram.saturating_sub(before.hits_vram),
            ram_pages: after.hits_ram.saturating_sub(before.hits_ram),
            miss_pages: after.misses.saturating_sub(before.misses),
        }
    }
}

/// What became of prefetched pages, of all sessions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Prefetched {
    pub(crate) useful_pages: u64,
    pub(crate) late_pages: u64,
    pub(crate) wasted_pages: u64,
}

impl Prefetched {
    /// Between two readings of the counters.
    pub(crate) fn between(before: &Counters, after: &Counters) -> Prefetched {
        Prefetched {
            useful_pages: after.prefetch_useful.saturating_sub(before.prefetch_useful),
            late_pages: after.prefetch_late.saturating_sub(before.prefetch_late),
            wasted_pages: after.prefetch_wasted.saturating_sub(before.prefetch_wasted),
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Verified {
    /// Different tensors whose every byte was right in every pass that checked.
    pub(crate) tensors: usize,
    /// Passes that checked.
    pub(crate) passes: usize,
    /// Bytes compared, all passes together.
    pub(crate) bytes: u64,
}

/// The simulated compute.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Compute {
    #[serde(rename = "layer_us", serialize_with = "micros")]
    pub(crate) layer: Duration,
    /// Of a pass.
    #[serde(rename = "pass_us", serialize_with = "micros")]
    pub(crate) pass: Duration,
    /// Best rate to VRAM that a pass without checks reached or that was configured; `None` if nothing had to move.
    pub(crate) best_bytes_per_s: Option<f64>,
    /// Ideal time over actual time, all compute passes together.
    pub(crate) efficiency: f64,
}

impl Compute {
    /// Judges the passes, and notes ideal and efficiency in each one with compute.
    ///
    /// The best rate is the best of any pass without checks, of which one ran without compute, or `link`, the rate
    /// that was configured. So a pass can't come out above 1, and a link that is slow for everybody is not counted
    /// against the overlap.
    pub(crate) fn judge(
        layer: Duration,
        layers: u32,
        link: Option<f64>,
        passes: &mut [PassReport],
    ) -> Compute {
        let compute = layer * layers;
        let rates = passes
            .iter()
            .filter(|pass| pass.kind != PassKind::Verify)
            .filter_map(|pass| pace::rate(pass.moved.ram_to_vram_bytes, pass.time));
        let best = rates.chain(link).max_by(f64::total_cmp);
        let (mut ideal_sum, mut time_sum) = (Duration::ZERO, Duration::ZERO);
        for pass in passes.iter_mut().filter(|pass| pass.kind == PassKind::Compute) {
            let ideal = pace::ideal(compute, pass.moved.ram_to_vram_bytes, best);
            pass.ideal = Some(ideal);
            pass.efficiency = Some(pace::efficiency(ideal, pass.time));
            ideal_sum += ideal;
            time_sum += pass.time;
        }
        let efficiency = pace::efficiency(ideal_sum, time_sum);
        Compute { layer, pass: compute, best_bytes_per_s: best, efficiency }
    }
}

/// Bytes of one tensor that were not those of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Mismatch {
    /// From 1 on.
    pub(crate) pass: usize,
    pub(crate) tensor: String,
    /// First and last wrong byte, from the tensor's start.
    pub(crate) first: u64,
    pub(crate) last: u64,
    /// Wrong bytes.
    pub(crate) count: u64,
}

fn micros<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
}

fn micros_if<S: Serializer>(time: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => micros(time, serializer),
        None => serializer.serialize_none(),
    }
}

#[cfg(test)]
mod tests;
