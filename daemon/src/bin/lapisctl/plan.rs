//! `lapisctl plan`: what a model would do on a machine, before it is tried, and what to change.

mod advice;
mod measure;
mod prediction;
mod report;

use std::path::{Path, PathBuf};
use std::time::Duration;

use lapis::model::ModelFiles;
use lapisd::config::{Amount, Host, Rate, Size};

use crate::connect::{self, Target, Tiers};
use crate::failure::Failure;
use crate::output::{self, Format};
use crate::stream::{demo, milliseconds};
use measure::Measured;
use prediction::Setting;
use report::{Figure, Report, Source};

/// A PCIe 4.0 link of 16 lanes, as copies from pinned memory use it.
const UP_ASSUMED: f64 = 25e9;
/// A PCIe 4.0 NVMe disk, large reads.
const READ_ASSUMED: f64 = 5e9;

/// Says whether a model fits, what will be waited for, and what to change
///
/// Reads the model's headers only. What passes will take is predicted by the daemon's own engine, run on a machine of these
/// sizes and speeds. Weights only: what else the GPU holds, such as KV caches, is not part of --vram.
///
/// Sizes that are not given are those of the daemon that runs, and speeds are those of a usual machine (PCIe 4.0: 25 GB/s
/// to the GPU, 5 GB/s from the disk). --measure measures them, in a few seconds, with the model's own files: through the daemon
/// that runs if there is one and no size is given, else on a simulated device, whose copies are those of memory.
#[derive(Debug, clap::Args)]
pub(crate) struct Plan {
    /// A .safetensors or .gguf file, a .safetensors.index.json, or a directory that holds one
    model: PathBuf,
    /// VRAM for the model, such as 24GiB
    #[arg(long, value_name = "SIZE")]
    vram: Option<Amount>,
    /// RAM tier; a share such as 50% is of the available memory [default: 50%]
    #[arg(long, value_name = "SIZE", requires = "vram")]
    ram: Option<Amount>,
    /// NVMe tier: for memory that spills; a model's pages lie in its files [default: what VRAM needs beyond RAM]
    #[arg(long, value_name = "SIZE", requires = "vram")]
    nvme: Option<Amount>,
    /// Size of a page [default: 2MiB]
    #[arg(long, value_name = "SIZE", requires = "vram")]
    page_size: Option<Size>,
    /// Speed from RAM to VRAM, such as 25GB/s
    #[arg(long, value_name = "RATE")]
    h2d: Option<Rate>,
    /// Speed from the model's disk to RAM, such as 5GB/s
    #[arg(long, value_name = "RATE")]
    read: Option<Rate>,
    /// Compute of each layer, in milliseconds
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    compute_ms: Option<Duration>,
    /// Measure the speeds that are not given
    #[arg(long)]
    measure: bool,
    /// The daemon whose sizes count
    #[arg(long, value_name = "PATH", conflicts_with = "vram")]
    socket: Option<PathBuf>,
    /// How to print the report
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    output: Format,
}

/// Sizes of the tiers.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    page_size: u64,
    vram_frames: u32,
    ram_frames: u32,
    nvme_bytes: u64,
    unified: bool,
}

impl Plan {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let files = ModelFiles::open(&self.model)?;
        let host = Host::of_process();
        let client = match self.vram {
            Some(_) => None,
            None => Some(self.connect()?),
        };
        let sizes = match &client {
            Some(client) => sizes_of(client)?,
            None => self.sizes(&host)?,
        };
        let measured = match (self.measure, &client) {
            (false, _) => None,
            (true, Some(client)) => Some(measure::through(client, &files)?),
            (true, None) => {
                let daemon =
                    measure_target(&sizes).connect(|| demo::cache_dir(&host), &host, |_| ())?;
                Some(measure::through(&daemon.client, &files)?)
            }
        };
        let report = self.report(&files, &sizes, measured)?;
        output::print(&match self.output {
            Format::Table => report.table(),
            Format::Json => output::json(&report),
        })
    }

    fn connect(&self) -> Result<lapis::Client, Failure> {
        let socket = self.socket.clone().unwrap_or_else(lapis::default_socket);
        connect::connect(&socket).map_err(|error| match self.socket {
            None if connect::is_absent(&error) => Failure::NoSizes { socket },
            _ => error.into(),
        })
    }

    fn sizes(&self, host: &Host) -> Result<Sizes, Failure> {
        let tiers = Tiers {
            vram: self.vram,
            ram: self.ram.or(Some(Amount::Share(50))),
            nvme: self.nvme,
            page_size: self.page_size,
            link_bandwidth: None,
        };
        // Nothing is made there.
        let config = tiers.config(std::env::temp_dir(), host)?;
        Ok(Sizes {
            page_size: config.page_size,
            vram_frames: config.vram_frames(),
            ram_frames: config.ram_frames(),
            nvme_bytes: config.nvme_size().bytes(),
            unified: config.unified,
        })
    }

    fn report(
        &self,
        files: &ModelFiles,
        sizes: &Sizes,
        measured: Option<Measured>,
    ) -> Result<Report, Failure> {
        let up = choose(self.h2d, measured.and_then(|found| found.up), UP_ASSUMED);
        let read = choose(self.read, measured.and_then(|found| found.read), READ_ASSUMED);
        let setting = Setting {
            page_size: sizes.page_size,
            vram_frames: sizes.vram_frames,
            ram_frames: sizes.ram_frames,
            // What is read is in VRAM where there is one memory.
            up: if sizes.unified { f64::MAX } else { up.bytes_per_s },
            read: read.bytes_per_s,
            map: measured.map_or(Duration::ZERO, |found| found.map),
            compute: self.compute_ms.unwrap_or_default(),
        };
        let prediction = prediction::predict(files, &setting)?;
        let hiding = match prediction.is_hidden() {
            true => None,
            false => prediction::hiding_compute(files, &setting, &prediction)?,
        };
        let model = (self.model.as_path(), files);
        Ok(Report::new(model, sizes, (up, read), self.compute_ms, &setting, &prediction, hiding))
    }
}

fn choose(given: Option<Rate>, measured: Option<f64>, assumed: f64) -> Figure {
    match (given, measured) {
        (Some(rate), _) => Figure { bytes_per_s: rate.bytes_per_s() as f64, source: Source::Given },
        (None, Some(bytes_per_s)) => Figure { bytes_per_s, source: Source::Measured },
        (None, None) => Figure { bytes_per_s: assumed, source: Source::Assumed },
    }
}

fn sizes_of(client: &lapis::Client) -> Result<Sizes, Failure> {
    let (welcome, stats) = (client.welcome(), client.stats()?);
    let frames = |bytes: u64| u32::try_from(bytes / welcome.page_size.max(1)).unwrap_or(u32::MAX);
    Ok(Sizes {
        page_size: welcome.page_size,
        vram_frames: frames(stats.vram.capacity),
        ram_frames: frames(stats.ram.capacity),
        nvme_bytes: stats.nvme.capacity,
        unified: welcome.unified,
    })
}

/// A small daemon with pages of the same size: enough to measure.
fn measure_target(sizes: &Sizes) -> Target {
    let size = |frames: u32, most: u64| {
        Some(Amount::Fixed(Size::from_bytes((u64::from(frames) * sizes.page_size).min(most))))
    };
    let most = measure::VRAM_BYTES_MAX.max(16 * sizes.page_size);
    let tiers = Tiers {
        vram: size(sizes.vram_frames, most),
        ram: size(sizes.ram_frames, 4 * most),
        nvme: None,
        page_size: Some(Size::from_bytes(sizes.page_size)),
        link_bandwidth: None,
    };
    Target { socket: None, embedded: true, tiers }
}

/// The model's name for people: its file.
fn name(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests;
