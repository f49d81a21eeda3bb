//! What `lapisctl plan` found, as a table and as JSON.
//!
//! The JSON's fields are an interface: new ones may be added, and anything else raises `schema`.

use std::path::Path;
use std::time::Duration;

use lapis::model::ModelFiles;
use serde::Serialize;

use super::advice::{self, Advice, Kind, Quantisation};
use super::prediction::{Prediction, Setting};
use super::{Sizes, name};
use crate::text::{self, Table};

/// Version of the JSON's fields.
const SCHEMA: u32 = 1;

/// A speed, and who says so.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Figure {
    pub(crate) bytes_per_s: f64,
    pub(crate) source: Source,
}

/// Where a speed comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Source {
    Given,
    Measured,
    Assumed,
}

impl Source {
    fn name(self) -> &'static str {
        match self {
            Source::Given => "given",
            Source::Measured => "measured",
            Source::Assumed => "assumed",
        }
    }
}

/// Everything there is to say.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    schema: u32,
    model: ModelReport,
    tiers: TiersReport,
    up: Figure,
    read: Figure,
    map_us: u64,
    /// The fastest tier that holds the whole model together with those above it.
    fits: Fits,
    steady: Steady,
    layer: LayerReport,
    pass: PassReport,
    quantisations: Vec<Quantisation>,
    advice: Vec<Advice>,
}

#[derive(Debug, Serialize)]
struct ModelReport {
    path: String,
    bytes: u64,
    tensors: usize,
    layers: usize,
    parameters: u64,
    bits_per_weight: f64,
}

#[derive(Debug, Serialize)]
struct TiersReport {
    vram_bytes: u64,
    ram_bytes: u64,
    nvme_bytes: u64,
    page_size_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Fits {
    Vram,
    Ram,
    Nvme,
}

/// Where the model lies between passes, once the tiers are filled. A part comes and goes with each pass.
#[derive(Debug, Serialize)]
struct Steady {
    /// Stays in VRAM.
    vram_bytes: u64,
    /// Comes from RAM in each pass.
    ram_bytes: u64,
    /// Is read from the file in each pass.
    nvme_bytes: u64,
}

#[derive(Debug, Serialize)]
struct LayerReport {
    transfer_us: f64,
    read_us: f64,
    /// `None`: nobody said.
    compute_us: Option<f64>,
    /// Compute behind which it is all hidden; `None`: it is now, or none does.
    hiding_us: Option<f64>,
    hidden: bool,
}

#[derive(Debug, Serialize)]
struct PassReport {
    predicted_us: f64,
    stalled_us: f64,
    compute_us: f64,
    transfer_us: f64,
    read_us: f64,
}

impl Report {
    pub(crate) fn new(
        (path, files): (&Path, &ModelFiles),
        sizes: &Sizes,
        (up, read): (Figure, Figure),
        compute: Option<Duration>,
        setting: &Setting,
        prediction: &Prediction,
        hiding: Option<Duration>,
    ) -> Report {
        let bytes = files.bytes();
        let frames = |frames: u32| u64::from(frames) * sizes.page_size;
        let (vram_bytes, ram_bytes) = (frames(sizes.vram_frames), frames(sizes.ram_frames));
        let parameters = advice::parameters(files);
        let quantisations = advice::quantisations(bytes, parameters, vram_bytes);
        let advice = advice::advise(bytes, &quantisations, prediction, setting, hiding);
        let layers = prediction.layers.max(1) as f64;
        let (transfer, read_time) = prediction.links(setting);
        let (transfer_us, read_us) = (transfer * 1e6, read_time * 1e6);
        Report {
            schema: SCHEMA,
            model: ModelReport {
                path: name(path),
                bytes,
                tensors: files.tensors().len(),
                layers: prediction.layers,
                parameters,
                bits_per_weight: bytes as f64 * 8.0 / parameters.max(1) as f64,
            },
            tiers: TiersReport {
                vram_bytes,
                ram_bytes,
                nvme_bytes: sizes.nvme_bytes,
                page_size_bytes: sizes.page_size,
            },
            up,
            read,
            map_us: u64::try_from(setting.map.as_micros()).unwrap_or(u64::MAX),
            fits: if prediction.moved == 0 {
                Fits::Vram
            } else if prediction.read == 0 {
                Fits::Ram
            } else {
                Fits::Nvme
            },
            steady: Steady {
                vram_bytes: bytes - prediction.moved,
                ram_bytes: prediction.moved.saturating_sub(prediction.read),
                nvme_bytes: prediction.read,
            },
            layer: LayerReport {
                transfer_us: transfer_us / layers,
                read_us: read_us / layers,
                compute_us: compute.map(|compute| compute.as_secs_f64() * 1e6),
                hiding_us: hiding.map(|hiding| hiding.as_secs_f64() * 1e6),
                hidden: prediction.is_hidden(),
            },
            pass: PassReport {
                predicted_us: prediction.pass.as_secs_f64() * 1e6,
                stalled_us: prediction.stalled.as_secs_f64() * 1e6,
                compute_us: prediction.compute.as_secs_f64() * 1e6,
                transfer_us,
                read_us,
            },
            quantisations,
            advice,
        }
    }

    pub(crate) fn table(&self) -> String {
        let mut out = self.head();
        let mut steady = Table::new(&["in each pass", "bytes", "of the model", "takes"]);
        let share = |bytes: u64| {
            let share = bytes as f64 / self.model.bytes.max(1) as f64;
            format!("{:.0}%", share * 100.0)
        };
        for (place, bytes, takes) in [
            ("stays in VRAM", self.steady.vram_bytes, 0.0),
            ("comes from RAM", self.steady.ram_bytes, self.pass.transfer_us - self.disk_share_us()),
            ("is read from NVMe", self.steady.nvme_bytes, self.pass.read_us),
        ] {
            let takes = if bytes == 0 { "-".to_owned() } else { text::time(micros(takes)) };
            steady.row([place.to_owned(), text::bytes(bytes), share(bytes), takes]);
        }
        steady.write(&mut out);
        out.push('\n');
        out.push_str(&self.times());
        out.push('\n');
        for (number, advice) in (1..).zip(&self.advice) {
            out.push_str(&format!("{number}. {}\n", advice.text));
            if advice.kind == Kind::Quantise {
                self.formats(&mut out);
            }
        }
        out
    }

    /// Time on the link of what was read from the disk before.
    fn disk_share_us(&self) -> f64 {
        self.steady.nvme_bytes as f64 / self.up.bytes_per_s * 1e6
    }

    fn head(&self) -> String {
        let model = &self.model;
        let verdict = match self.fits {
            Fits::Vram => "fits VRAM",
            Fits::Ram => "does not fit VRAM; VRAM and RAM together hold it",
            Fits::Nvme => "does not fit VRAM and RAM; the rest is read from its files in each pass",
        };
        let rate = |figure: &Figure| {
            format!("{} ({})", text::rate(Some(figure.bytes_per_s)), figure.source.name())
        };
        format!(
            "model   {}: {}, {}, {}, {:.1} bits a weight\n\
             tiers   VRAM {}, RAM {}, NVMe {}, pages of {}\n\
             speed   RAM to VRAM {}, NVMe to RAM {}\n\
             result  {verdict}\n\n",
            model.path,
            text::bytes(model.bytes),
            text::count(model.tensors as u64, "tensor", "tensors"),
            text::count(model.layers as u64, "layer", "layers"),
            model.bits_per_weight,
            text::bytes(self.tiers.vram_bytes),
            text::bytes(self.tiers.ram_bytes),
            text::bytes(self.tiers.nvme_bytes),
            text::bytes(self.tiers.page_size_bytes),
            rate(&self.up),
            rate(&self.read),
        )
    }

    fn times(&self) -> String {
        let layer = &self.layer;
        let compute = match layer.compute_us {
            Some(compute) => text::time(micros(compute)),
            None => "not given".to_owned(),
        };
        let hidden = match (self.fits, layer.hidden) {
            (Fits::Vram, _) => "nothing is transferred",
            (Fits::Ram | Fits::Nvme, true) => "the transfer is hidden",
            (Fits::Ram | Fits::Nvme, false) => "the transfer is not hidden",
        };
        let pass = &self.pass;
        format!(
            "layer   transfer {}, reading {}, compute {compute}: {hidden}\n\
             pass    {}, of which {} are spent waiting\n",
            text::time(micros(layer.transfer_us)),
            text::time(micros(layer.read_us)),
            text::time(micros(pass.predicted_us)),
            text::time(micros(pass.stalled_us)),
        )
    }

    fn formats(&self, out: &mut String) {
        let mut table = Table::new(&["   format", "bits", "bytes", "in VRAM"]);
        for one in &self.quantisations {
            table.row([
                format!("   {}", one.name),
                format!("{:.2}", one.bits_per_weight),
                text::bytes(one.bytes),
                if one.fits { "whole" } else { "in part" }.to_owned(),
            ]);
        }
        table.write(out);
    }
}

fn micros(micros: f64) -> Duration {
    Duration::try_from_secs_f64(micros / 1e6).unwrap_or_default()
}
