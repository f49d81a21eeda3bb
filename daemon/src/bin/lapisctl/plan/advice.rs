//! What to change, in the order in which it should be tried: a smaller model, then offload, then more work for each
//! transfer, then another GPU.

use std::time::Duration;

use lapis::model::ModelFiles;
use serde::Serialize;

use super::prediction::{Prediction, Setting};
use crate::text;

/// Formats of llama.cpp, with the bits that a weight takes in a whole model of 7 billion of them (its own table; mixtures
/// differ a little from model to model).
const QUANTISATIONS: [(&str, f64); 6] = [
    ("Q8_0", 8.5),
    ("Q6_K", 6.56),
    ("Q5_K_M", 5.68),
    ("Q4_K_M", 4.84),
    ("Q3_K_M", 3.91),
    ("Q2_K", 3.35),
];
/// Formats below this lose so much that they are no answer by themselves.
const BITS_GOOD: f64 = 4.5;
/// Times the batch beyond which more batch is no answer.
const BATCH_FACTOR_MAX: f64 = 64.0;

/// The model in a smaller format.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Quantisation {
    pub(crate) name: &'static str,
    pub(crate) bits_per_weight: f64,
    pub(crate) bytes: u64,
    /// All of it in VRAM.
    pub(crate) fits: bool,
}

/// What to try, and what comes of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Advice {
    pub(crate) kind: Kind,
    pub(crate) text: String,
}

/// Ways to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// As it is.
    Nothing,
    /// A format with fewer bits.
    Quantise,
    /// As it is, moved through the tiers.
    Offload,
    /// More compute for each transfer.
    Batch,
    /// More RAM.
    Ram,
    /// One with more VRAM, or a faster link.
    BiggerGpu,
}

/// Elements of all tensors.
pub(crate) fn parameters(files: &ModelFiles) -> u64 {
    let elements = |shape: &[u64]| shape.iter().fold(1_u64, |all, side| all.saturating_mul(*side));
    files.tensors().iter().map(|tensor| elements(&tensor.shape)).fold(0, u64::saturating_add)
}

/// Smaller formats of a model.
pub(crate) fn quantisations(bytes: u64, parameters: u64, vram: u64) -> Vec<Quantisation> {
    let now = bytes as f64 * 8.0 / parameters.max(1) as f64;
    let smaller = QUANTISATIONS.into_iter().filter(|(_, bits)| *bits < 0.95 * now);
    smaller
        .map(|(name, bits_per_weight)| {
            let bytes = whole(parameters as f64 * bits_per_weight / 8.0);
            Quantisation { name, bits_per_weight, bytes, fits: bytes <= vram }
        })
        .collect()
}

/// What to try, first things first.
pub(crate) fn advise(
    bytes: u64,
    quantisations: &[Quantisation],
    prediction: &Prediction,
    setting: &Setting,
    needed: Option<Duration>,
) -> Vec<Advice> {
    if prediction.moved == 0 {
        let text = "nothing: the model stays in VRAM whole, and no pass moves anything".to_owned();
        return vec![Advice { kind: Kind::Nothing, text }];
    }
    let mut advice = Vec::new();
    advice.extend(quantise(quantisations));
    advice.push(offload(prediction));
    if !prediction.is_hidden() {
        if prediction.read > 0 {
            let more = text::bytes(prediction.read);
            let text = format!("{more} more RAM: then no pass reads the disk");
            advice.push(Advice { kind: Kind::Ram, text });
        }
        let batch = needed.and_then(|needed| batch(setting.compute, needed));
        let why = match &batch {
            Some(_) => "if none of this is fast enough",
            None => "no batch hides this",
        };
        advice.extend(batch);
        let text = format!("a bigger GPU, {why}: {} of VRAM hold the model", text::bytes(bytes));
        advice.push(Advice { kind: Kind::BiggerGpu, text });
    }
    advice
}

fn quantise(quantisations: &[Quantisation]) -> Option<Advice> {
    let kind = Kind::Quantise;
    let fitting = quantisations.iter().find(|one| one.fits);
    let smallest = quantisations.last()?;
    let text = match fitting {
        Some(one) if one.bits_per_weight >= BITS_GOOD => format!(
            "a smaller format: {} takes {} and stays in VRAM whole",
            one.name,
            text::bytes(one.bytes)
        ),
        Some(one) => format!(
            "a smaller format, if its quality will do: {} takes {} and stays in VRAM whole",
            one.name,
            text::bytes(one.bytes)
        ),
        None => format!(
            "a smaller format: none fits, as even {} takes {}, but each moves less",
            smallest.name,
            text::bytes(smallest.bytes)
        ),
    };
    Some(Advice { kind, text })
}

/// More compute for each transfer, where that is an answer.
fn batch(compute: Duration, needed: Duration) -> Option<Advice> {
    let hidden = format!("transfers are hidden once a layer computes for {}", text::time(needed));
    let factor = needed.as_secs_f64() / compute.as_secs_f64();
    let text = if compute.is_zero() {
        format!("a larger batch: {hidden}")
    } else if factor <= BATCH_FACTOR_MAX {
        format!(
            "a batch {} times as large: {hidden} (now {}); while the GPU is bound by its memory, a larger batch \
             adds less compute than that",
            times(factor),
            text::time(compute)
        )
    } else {
        return None;
    };
    Some(Advice { kind: Kind::Batch, text })
}

fn offload(prediction: &Prediction) -> Advice {
    let moved = text::bytes(prediction.moved);
    let text = if prediction.is_hidden() {
        format!("offload as it is: {moved} are moved in each pass, hidden behind its compute")
    } else {
        format!(
            "offload as it is: {moved} are moved in each pass, and {} of {} are spent waiting",
            text::time(prediction.stalled),
            text::time(prediction.pass)
        )
    };
    Advice { kind: Kind::Offload, text }
}

fn times(factor: f64) -> String {
    if factor < 10.0 { format!("{factor:.1}") } else { format!("{factor:.0}") }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a size of a model: positive, and a cast of a float stops at the ends of the target"
)]
fn whole(number: f64) -> u64 {
    number as u64
}
