//! The speeds of this machine: a bounded part of the model, through a daemon.

use std::time::{Duration, Instant};

use lapis::model::{Model, ModelFiles};
use lapis::{Client, MAP_WAIT_DEFAULT};

use crate::failure::Failure;
use crate::stream::schedule::{Schedule, Step};

/// VRAM of a daemon that is started to measure.
pub(crate) const VRAM_BYTES_MAX: u64 = 128 << 20;
/// Time after which reading the model for the first time, and then copying it, ends.
const TIME_MAX: Duration = Duration::from_secs(3);
/// Maps of what is in VRAM already.
const MAPS: u32 = 32;

/// What was found; `None` where nothing had to be moved.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Measured {
    /// RAM to VRAM, bytes a second.
    pub(crate) up: Option<f64>,
    /// Files to RAM, bytes a second.
    pub(crate) read: Option<f64>,
    /// A map that finds its pages in VRAM.
    pub(crate) map: Duration,
}

/// Measures through a daemon.
pub(crate) fn through(client: &Client, files: &ModelFiles) -> Result<Measured, Failure> {
    let welcome = client.welcome();
    let stats = client.stats()?;
    let pages_max = u64::from(welcome.mapped_pages_max / 4).max(1);
    let schedule = Schedule::new(files, welcome.page_size, pages_max);
    let model = client.open_model_files(files.clone())?;
    // What fits RAM beside what VRAM takes of it.
    let room = stats.ram.capacity.max(stats.vram.capacity) / 4 * 3;
    let mut bytes = 0;
    let steps: Vec<&Step> = schedule
        .steps
        .iter()
        .take_while(|step| {
            bytes += step.part.bytes();
            bytes <= room || bytes == step.part.bytes()
        })
        .collect();
    let mut found = Measured::default();
    let before = client.stats()?.total;
    let started = Instant::now();
    {
        let _plan = model.plan_parts(steps.iter().map(|step| &step.part), false)?;
        walk(&model, &steps, started)?;
    }
    let after = client.stats()?.total;
    let took = started.elapsed();
    found.read = rate(after.file_to_ram.bytes - before.file_to_ram.bytes, took);
    let started = Instant::now();
    let _plan = model.plan_parts(steps.iter().map(|step| &step.part), true)?;
    while started.elapsed() < TIME_MAX / 2 {
        let before = client.stats()?.total;
        let pass = Instant::now();
        walk(&model, &steps, started)?;
        let after = client.stats()?.total;
        let moved = after.ram_to_vram.bytes - before.ram_to_vram.bytes;
        let best = rate(moved, pass.elapsed());
        found.up = found.up.into_iter().chain(best).max_by(f64::total_cmp);
        if moved == 0 {
            break;
        }
    }
    found.map = map_time(&model, &steps)?;
    Ok(found)
}

fn walk(model: &Model, steps: &[&Step], started: Instant) -> Result<(), Failure> {
    for step in steps {
        model.map_part(&step.part, MAP_WAIT_DEFAULT)?.unmap()?;
        if started.elapsed() > TIME_MAX {
            break;
        }
    }
    Ok(())
}

/// The median of some maps of the smallest step.
fn map_time(model: &Model, steps: &[&Step]) -> Result<Duration, Failure> {
    let Some(step) = steps.iter().min_by_key(|step| step.part.bytes()) else {
        return Ok(Duration::ZERO);
    };
    let mut times = Vec::new();
    for _ in 0..MAPS {
        let start = Instant::now();
        model.map_part(&step.part, MAP_WAIT_DEFAULT)?.unmap()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

/// Bytes a second, of at least a few pages' worth.
fn rate(bytes: u64, time: Duration) -> Option<f64> {
    (bytes > 0 && !time.is_zero()).then(|| bytes as f64 / time.as_secs_f64())
}
