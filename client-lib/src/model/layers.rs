//! Groups a model's tensors into layers in the order in which they are executed, and cuts layers into parts.
//!
//! Only names tell: files order tensors by type or alphabet (`layers.10` before `layers.2`). A *stack* is a prefix
//! with numbers behind it, such as `model.layers`, `blk` or `encoder.layer`; each of its numbers makes a layer.

use std::collections::BTreeMap;
use std::ops::Range;

use super::pages::PageGrid;
use super::{ModelFiles, Tensor};

/// Least budget of [`Layer::parts`]: a smaller one counts as this.
pub const PART_BYTES_MIN: u64 = 4096;
/// Components that name a stack even when it has only one layer.
const STACK_WORDS: [&str; 8] =
    ["layers", "layer", "h", "blk", "blocks", "block", "resblocks", "layer_stack"];
/// Words of tensors that are used before the first layer.
const FIRST_WORDS: [&str; 6] = ["embed", "embd", "wte", "wpe", "token_types", "rope_freqs"];
/// Numbers in one name that are looked at.
const NUMBERS_MAX: usize = 4;

/// Tensors that are used together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Stack and number, such as `model.layers.3`; `embeddings` before all stacks, `head` after them.
    pub name: String,
    /// Its tensors, by index in the model, in the order of their bytes.
    pub tensors: Vec<usize>,
    /// Where its bytes are: shard and range in the file, merged where they touch. Empty tensors have none.
    pub ranges: Vec<(usize, Range<u64>)>,
    spans: Vec<TensorSlice>,
}

/// Some or all bytes of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSlice {
    /// The tensor, by index in the model.
    pub tensor: usize,
    /// Which of its bytes, from the tensor's start.
    pub inside: Range<u64>,
    /// Its shard.
    pub shard: usize,
    /// The same bytes, from the start of the shard's file.
    pub range: Range<u64>,
}

/// A piece of a layer that fits a budget.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Part {
    /// The tensors in it. One that is larger than the budget is in several parts.
    pub slices: Vec<TensorSlice>,
    /// Where its bytes are, as in [`Layer::ranges`].
    pub ranges: Vec<(usize, Range<u64>)>,
}

impl Part {
    /// Bytes of all its slices.
    pub fn bytes(&self) -> u64 {
        range_bytes(&self.ranges)
    }
}

impl Layer {
    /// `tensors` is in ascending order, and so in the order of the bytes, as [`ModelFiles::tensors`] is.
    fn new(name: String, tensors: Vec<usize>, all: &[Tensor]) -> Layer {
        let spans: Vec<TensorSlice> = tensors
            .iter()
            .map(|index| {
                let tensor = &all[*index];
                let (inside, range) = (0..tensor.bytes(), tensor.range.clone());
                TensorSlice { tensor: *index, inside, shard: tensor.shard, range }
            })
            .collect();
        let ranges = merged(&spans);
        Layer { name, tensors, ranges, spans }
    }

    /// Its tensors as slices, whole, in the same order.
    pub fn slices(&self) -> &[TensorSlice] {
        &self.spans
    }

    /// Bytes of all its tensors.
    pub fn bytes(&self) -> u64 {
        range_bytes(&self.ranges)
    }

    /// Cuts the layer into parts of at most `bytes_max` bytes each, in the order of the bytes. Only a tensor larger
    /// than that is cut. Pages are whole, so a part may touch up to two pages more per range than its bytes fill:
    /// count them with [`PageGrid::count`], or cut by pages with [`Layer::parts_of_pages`].
    pub fn parts(&self, bytes_max: u64) -> Vec<Part> {
        let bytes_max = bytes_max.max(PART_BYTES_MIN);
        let mut builder = Builder::default();
        let mut room = bytes_max;
        for span in &self.spans {
            if span.range.end - span.range.start > room {
                builder.finish();
                room = bytes_max;
            }
            let mut rest = span.clone();
            while rest.range.end - rest.range.start > room {
                let cut = rest.range.start + room;
                builder.slices.push(rest.split_off_front(cut));
                builder.finish();
                room = bytes_max;
            }
            room -= rest.range.end - rest.range.start;
            builder.slices.push(rest);
        }
        builder.into_parts()
    }

    /// Cuts the layer into parts that touch at most `pages_max` pages each (0 counts as 1), in the order of the
    /// bytes. Only a tensor that touches more pages than that is cut, and only where pages meet.
    pub fn parts_of_pages(&self, pages_max: u64, grid: &PageGrid) -> Vec<Part> {
        let pages_max = pages_max.max(1);
        let mut builder = Builder::default();
        let mut used = 0;
        let mut last = None;
        for span in &self.spans {
            let mut rest = span.clone();
            let mut whole = true;
            loop {
                let pages = grid.pages(rest.shard, &rest.range);
                let count = pages.end - pages.start;
                let shared = u64::from(count > 0 && last == Some((rest.shard, pages.start)));
                if used + count - shared <= pages_max {
                    used += count - shared;
                    if count > 0 {
                        last = Some((rest.shard, pages.end - 1));
                    }
                    builder.slices.push(rest);
                    break;
                }
                let free = pages_max - used + shared;
                if free > 0 && !(whole && count <= pages_max) {
                    let cut = grid.page_start(rest.shard, pages.start + free);
                    builder.slices.push(rest.split_off_front(cut));
                    whole = false;
                }
                builder.finish();
                (used, last) = (0, None);
            }
        }
        builder.into_parts()
    }
}

impl TensorSlice {
    /// Keeps what is at and after byte `cut` of the file; returns what is before it.
    fn split_off_front(&mut self, cut: u64) -> TensorSlice {
        let inside_cut = self.inside.start + (cut - self.range.start);
        let front = TensorSlice {
            tensor: self.tensor,
            inside: self.inside.start..inside_cut,
            shard: self.shard,
            range: self.range.start..cut,
        };
        self.inside.start = inside_cut;
        self.range.start = cut;
        front
    }
}

#[derive(Default)]
struct Builder {
    parts: Vec<Part>,
    slices: Vec<TensorSlice>,
}

impl Builder {
    fn finish(&mut self) {
        if !self.slices.is_empty() {
            let slices = std::mem::take(&mut self.slices);
            let ranges = merged(&slices);
            self.parts.push(Part { slices, ranges });
        }
    }

    fn into_parts(mut self) -> Vec<Part> {
        self.finish();
        self.parts
    }
}

fn range_bytes(ranges: &[(usize, Range<u64>)]) -> u64 {
    ranges.iter().map(|(_, range)| range.end - range.start).sum()
}

/// The ranges of slices that are in the order of their bytes; touching ones made one.
fn merged(slices: &[TensorSlice]) -> Vec<(usize, Range<u64>)> {
    let mut ranges: Vec<(usize, Range<u64>)> = Vec::new();
    for slice in slices.iter().filter(|slice| !slice.range.is_empty()) {
        match ranges.last_mut() {
            Some((shard, range)) if *shard == slice.shard && range.end == slice.range.start => {
                range.end = slice.range.end;
            }
            _ => ranges.push((slice.shard, slice.range.clone())),
        }
    }
    ranges
}

/// Where a tensor belongs; ordered as executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place<'a> {
    First,
    Stack { rank: u8, prefix: &'a str, number: u64 },
    Last,
}

impl ModelFiles {
    /// All tensors, each in exactly one layer, in the order of execution as far as names tell: embeddings, then the
    /// stacks (vision and audio, encoders, others, decoders), then norm and head.
    pub fn layers(&self) -> Vec<Layer> {
        let mut numbers: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for tensor in self.tensors() {
            for (prefix, number) in numbered(&tensor.name) {
                let seen = numbers.entry(prefix).or_insert((number, number));
                *seen = (seen.0.min(number), seen.1.max(number));
            }
        }
        let is_stack = |prefix: &str| {
            let word = prefix.rsplit('.').next().unwrap_or(prefix);
            let repeated = numbers.get(prefix).is_some_and(|(least, most)| least != most);
            repeated || STACK_WORDS.contains(&word)
        };
        let mut places: BTreeMap<Place<'_>, Vec<usize>> = BTreeMap::new();
        for (index, tensor) in self.tensors().iter().enumerate() {
            let stack = numbered(&tensor.name).find(|(prefix, _)| is_stack(prefix));
            let place = match stack {
                Some((prefix, number)) => Place::Stack { rank: stack_rank(prefix), prefix, number },
                None if is_first(&tensor.name) => Place::First,
                None => Place::Last,
            };
            places.entry(place).or_default().push(index);
        }
        places
            .into_iter()
            .map(|(place, tensors)| {
                let name = match place {
                    Place::First => "embeddings".to_owned(),
                    Place::Stack { prefix: "", number, .. } => number.to_string(),
                    Place::Stack { prefix, number, .. } => format!("{prefix}.{number}"),
                    Place::Last => "head".to_owned(),
                };
                Layer::new(name, tensors, self.tensors())
            })
            .collect()
    }
}

/// The numeric components of a name, each with what is before it.
fn numbered(name: &str) -> impl Iterator<Item = (&str, u64)> {
    let mut start = 0;
    let components = name.split('.').map(move |component| {
        let at = start;
        start += component.len() + 1;
        (at, component)
    });
    components
        .filter_map(|(at, component)| {
            let digits = component.bytes().all(|byte| byte.is_ascii_digit());
            let number = component.parse().ok().filter(|_| digits)?;
            Some((name[..at].trim_end_matches('.'), number))
        })
        .take(NUMBERS_MAX)
}

fn is_first(name: &str) -> bool {
    name.split('.').any(|component| {
        // `embed_out` is the head of GPT-NeoX.
        component != "embed_out" && FIRST_WORDS.iter().any(|word| component.contains(word))
    })
}

fn stack_rank(prefix: &str) -> u8 {
    let has = |words: &[&str], whole: &[&str]| {
        prefix.split('.').any(|component| {
            whole.contains(&component) || words.iter().any(|word| component.contains(word))
        })
    };
    if has(&["vision", "visual", "image", "audio"], &["v", "a"]) {
        0
    } else if has(&["encoder"], &["enc"]) {
        1
    } else if has(&["decoder"], &["dec"]) {
        3
    } else {
        2
    }
}

#[cfg(test)]
mod tests;
