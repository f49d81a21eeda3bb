//! In which order parts of the model are mapped, and which ones to prefetch meanwhile.

use std::ops::Range;

use lapis::model::{ModelFiles, Part};

/// One mapping: a layer, or a part of one that is too large to be mapped at once.
#[derive(Debug)]
pub(crate) struct Step {
    /// Index of its layer.
    pub(crate) layer: usize,
    /// The layer's name.
    pub(crate) name: String,
    /// What to map.
    pub(crate) part: Part,
    /// Its bytes as a share of its layer's.
    pub(crate) share: f64,
}

/// The steps of a pass.
#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) steps: Vec<Step>,
    pub(crate) layers: usize,
}

impl Schedule {
    /// Layers in the order of execution, in parts that touch at most `pages_max` pages.
    pub(crate) fn new(model: &ModelFiles, page_size: u64, pages_max: u64) -> Schedule {
        let grid = model.page_grid(page_size);
        let layers = model.layers();
        let mut steps = Vec::new();
        for (index, layer) in layers.iter().enumerate() {
            for part in layer.parts_of_pages(pages_max, &grid) {
                // A layer of empty tensors still takes its time.
                let share = if layer.bytes() == 0 {
                    1.0
                } else {
                    part.bytes() as f64 / layer.bytes() as f64
                };
                steps.push(Step { layer: index, name: layer.name.clone(), part, share });
            }
        }
        Schedule { steps, layers: layers.len() }
    }

    /// Bytes of a pass.
    pub(crate) fn bytes(&self) -> u64 {
        self.steps.iter().map(|step| step.part.bytes()).sum()
    }
}

/// Walks through all passes and says what to prefetch: each step once, as soon as its layer is near enough.
#[derive(Debug)]
pub(crate) struct Lookahead {
    /// First step that was not prefetched yet, counted through all passes.
    next: usize,
    /// Layers to look ahead.
    layers: usize,
    passes: usize,
}

impl Lookahead {
    pub(crate) fn new(layers: usize, passes: usize) -> Lookahead {
        Lookahead { next: 0, layers, passes }
    }

    /// The steps to prefetch while `step` of `pass` is about to be mapped, as a range that is counted through all
    /// passes: step `n` is step `n % schedule.steps.len()` of its pass.
    pub(crate) fn advance(
        &mut self,
        schedule: &Schedule,
        pass: usize,
        step: usize,
    ) -> Range<usize> {
        let steps = schedule.steps.len();
        let layer_of = |at: usize| at / steps * schedule.layers + schedule.steps[at % steps].layer;
        let now = pass * steps + step;
        let horizon = layer_of(now) + self.layers;
        // What is mapped now needs no prefetch.
        let start = self.next.max(now + 1);
        let mut end = start;
        while self.layers > 0 && end < self.passes * steps && layer_of(end) <= horizon {
            end += 1;
        }
        self.next = end;
        start..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(layers: &[usize]) -> Schedule {
        let step = |layer| Step { layer, name: String::new(), part: Part::default(), share: 1.0 };
        Schedule {
            steps: layers.iter().map(|layer| step(*layer)).collect(),
            layers: layers.last().map_or(0, |layer| layer + 1),
        }
    }

    fn walk(layers: &[usize], ahead: usize, passes: usize) -> Vec<Range<usize>> {
        let schedule = schedule(layers);
        let mut lookahead = Lookahead::new(ahead, passes);
        let steps = (0..passes).flat_map(|pass| (0..layers.len()).map(move |step| (pass, step)));
        steps.map(|(pass, step)| lookahead.advance(&schedule, pass, step)).collect()
    }

    #[test]
    fn each_step_is_prefetched_once_and_into_the_next_pass() {
        assert_eq!(walk(&[0, 1, 2], 2, 2), [1..3, 3..4, 4..5, 5..6, 6..6, 6..6]);
    }

    #[test]
    fn parts_of_one_layer_are_prefetched_together() {
        assert_eq!(walk(&[0, 0, 1, 1, 2], 1, 1), [1..4, 4..4, 4..5, 5..5, 5..5]);
    }

    #[test]
    fn nothing_is_prefetched_without_lookahead() {
        assert_eq!(walk(&[0, 0, 1], 0, 2), [1..1, 2..2, 3..3, 4..4, 5..5, 6..6]);
    }
}
