//! What passes of a model will be like: the engine's own doing, on a machine of given sizes and speeds, in virtual time.

use std::ops::Range;
use std::time::Duration;

use lapis::model::ModelFiles;
use lapisd::engine::limits::Limits;
use lapisd::paced::{Layer, Machine, Workload, run};

use crate::failure::Failure;
use crate::stream::schedule::Schedule;

/// Pages of a model beyond which larger ones are reckoned with, so that this takes a second or two at most.
const PAGES_MAX: u64 = 8192;
/// Passes, and how many of them it takes to fill the tiers and settle.
const PASSES: usize = 7;
const SETTLED: usize = 4;
/// How finely the compute is searched for that hides the transfers, and how often that is tried.
const SEARCH_STEP: f64 = 1.25;
const SEARCH_MAX: usize = 12;
/// Frames that an engine needs to move anything.
const FRAMES_MIN: u32 = 4;

/// A machine, and what a client does on it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) page_size: u64,
    pub(crate) vram_frames: u32,
    pub(crate) ram_frames: u32,
    /// From RAM to VRAM, bytes a second.
    pub(crate) up: f64,
    /// From the model's files to RAM, bytes a second.
    pub(crate) read: f64,
    /// What a map costs that has nothing to wait for.
    pub(crate) map: Duration,
    /// Of a layer.
    pub(crate) compute: Duration,
}

/// Passes once the tiers are filled, and where the model lies then.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prediction {
    /// Time of a pass.
    pub(crate) pass: Duration,
    /// Of which maps are waited for.
    pub(crate) stalled: Duration,
    /// Compute of all layers.
    pub(crate) compute: Duration,
    /// Bytes copied to VRAM in a pass.
    pub(crate) moved: u64,
    /// Bytes read from the files in a pass.
    pub(crate) read: u64,
    /// Layers, each with its compute.
    pub(crate) layers: usize,
}

impl Prediction {
    /// Whether the transfers are hidden: less than a twentieth of the time is spent waiting.
    pub(crate) fn is_hidden(&self) -> bool {
        self.stalled * 20 <= self.pass
    }

    /// Seconds that a pass keeps the link to the GPU busy, and the disk.
    pub(crate) fn links(&self, setting: &Setting) -> (f64, f64) {
        (self.moved as f64 / setting.up, self.read as f64 / setting.read)
    }
}

/// Predicts, for passes that are declared as a plan.
pub(crate) fn predict(files: &ModelFiles, setting: &Setting) -> Result<Prediction, Failure> {
    let page = page_size(files, setting);
    let frames = |frames: u32| {
        let bytes = u64::from(frames) * setting.page_size;
        u32::try_from(bytes / page).unwrap_or(u32::MAX).max(FRAMES_MIN)
    };
    let machine = Machine {
        vram: frames(setting.vram_frames),
        ram: frames(setting.ram_frames),
        up_ns: nanos(page, setting.up),
        read_ns: nanos(page, setting.read),
        map_ns: u64::try_from(setting.map.as_nanos()).unwrap_or(u64::MAX),
    };
    let schedule =
        Schedule::new(files, page, u64::from(Limits::mapped_pages_of(machine.vram) / 2).max(1));
    let layers = layers(files, &schedule, page, setting.compute);
    let compute = setting.compute * u32::try_from(schedule.layers).unwrap_or(u32::MAX);
    if layers.is_empty() {
        return Ok(Prediction {
            pass: compute,
            stalled: Duration::ZERO,
            compute,
            moved: 0,
            read: 0,
            layers: schedule.layers,
        });
    }
    let work = Workload {
        layers,
        plan: true,
        start_ns: 0,
        jitter_percent: 0,
        priority: 0,
        passes: PASSES,
    };
    let outcomes = run(machine, &[work]).map_err(Failure::Prediction)?;
    let outcome = outcomes.first().expect("one client has one outcome");
    let settled = (PASSES - SETTLED) as u64;
    let sum = |figures: &[u64]| figures[SETTLED..].iter().sum::<u64>();
    Ok(Prediction {
        pass: Duration::from_nanos(sum(&outcome.passes_ns) / settled),
        stalled: Duration::from_nanos(sum(&outcome.stalled_ns) / settled),
        compute,
        moved: (sum(&outcome.moved) * page / settled).min(files.bytes()),
        read: (sum(&outcome.read) * page / settled).min(files.bytes()),
        layers: schedule.layers,
    })
}

/// The compute of a layer, by steps of a quarter, that hides the transfers: at least what the links need for what one
/// moves. `None`: none near that does.
pub(crate) fn hiding_compute(
    files: &ModelFiles,
    setting: &Setting,
    prediction: &Prediction,
) -> Result<Option<Duration>, Failure> {
    let least = prediction.links(setting).0.max(prediction.links(setting).1);
    let mut compute = Duration::from_secs_f64(least / prediction.layers.max(1) as f64);
    for _ in 0..SEARCH_MAX {
        let slower = predict(files, &Setting { compute, ..*setting })?;
        if slower.is_hidden() {
            return Ok(Some(compute));
        }
        compute = compute.mul_f64(SEARCH_STEP);
    }
    Ok(None)
}

/// The real one, or larger ones where there would be too many.
fn page_size(files: &ModelFiles, setting: &Setting) -> u64 {
    let mut page = setting.page_size;
    while files.bytes() / page > PAGES_MAX {
        page *= 2;
    }
    page
}

/// The steps of a pass, by pages of one file that holds all shards.
fn layers(files: &ModelFiles, schedule: &Schedule, page: u64, compute: Duration) -> Vec<Layer> {
    let grid = files.page_grid(page);
    let mut first = 0;
    let starts: Vec<u64> = files
        .shards()
        .iter()
        .map(|shard| {
            let start = first;
            first += shard.data_length.div_ceil(page);
            start
        })
        .collect();
    let number = |page: u64| u32::try_from(page).expect("few pages were chosen");
    let layer = |step: &crate::stream::schedule::Step| {
        let moved = |(shard, pages): (usize, Range<u64>)| {
            number(starts[shard] + pages.start)..number(starts[shard] + pages.end)
        };
        let pages: Vec<Range<u32>> = grid.runs(&step.part.ranges).into_iter().map(moved).collect();
        let compute_ns = u64::try_from(compute.mul_f64(step.share).as_nanos()).unwrap_or(u64::MAX);
        Layer { pages, compute_ns }
    };
    schedule.steps.iter().map(layer).filter(|layer| !layer.pages.is_empty()).collect()
}

/// Time of so many bytes at a rate.
fn nanos(bytes: u64, rate: f64) -> u64 {
    let time =
        Duration::try_from_secs_f64(bytes as f64 / rate).unwrap_or(Duration::from_secs(3600));
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
