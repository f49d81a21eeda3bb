//! Accesses as models make them, to try policies on. The same every time.

use super::Slot;

/// A pattern of accesses and its name.
#[derive(Debug, Clone)]
pub struct Pattern {
    /// What it is called.
    pub name: &'static str,
    /// The accesses; slots are dense.
    pub accesses: Vec<Slot>,
}

/// Writes a pattern of so many passes down.
type Make = fn(u32, &mut Maker);

/// Units of a layer.
const LAYER: u32 = 8;
/// Layers of a model.
const LAYERS: u32 = 80;
const MODEL: u32 = LAYER * LAYERS;

const MAKERS: [(&str, Make); 14] = [
    ("cycle", cycle),
    ("forward-backward", forward_backward),
    ("training-step", training_step),
    ("two-cycles", two_cycles),
    ("two-cycles-random", two_cycles_random),
    ("cycle-hot-set", cycle_hot_set),
    ("phase-change", phase_change),
    ("three-models", three_models),
    ("cycle-skips", cycle_skips),
    ("growing-kv", growing_kv),
    ("cycle-kv-zipf", cycle_kv_zipf),
    ("strided", strided),
    ("nested-loops", nested_loops),
    ("experts", experts),
];

/// What patterns are called.
pub const NAMES: [&str; MAKERS.len()] = {
    let mut names = [""; MAKERS.len()];
    let mut at = 0;
    while at < MAKERS.len() {
        names[at] = MAKERS[at].0;
        at += 1;
    }
    names
};

/// A pattern by its name. `passes` scales how long it is; in 40 anything can be learned.
#[must_use]
pub fn make(name: &str, passes: u32) -> Option<Pattern> {
    let (name, make) = MAKERS.into_iter().find(|maker| maker.0 == name)?;
    let mut maker = Maker { accesses: Vec::new(), random: 0x9e37_79b9_7f4a_7c15 };
    make(passes, &mut maker);
    Some(Pattern { name, accesses: maker.accesses })
}

/// Writes accesses down.
struct Maker {
    accesses: Vec<Slot>,
    random: u64,
}

impl Maker {
    fn range(&mut self, start: u32, count: u32) {
        self.accesses.extend(start..start + count);
    }

    /// A number below a limit.
    fn below(&mut self, limit: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        u32::try_from((self.random >> 32) % u64::from(limit)).unwrap_or(0)
    }

    /// One of so many, the first most often: the probability of the n-th is about one in n.
    fn zipf(&mut self, count: u32) -> u32 {
        let octaves = 32 - count.leading_zeros();
        loop {
            let octave = self.below(octaves);
            let drawn = (1 << octave) + self.below(1 << octave);
            if drawn <= count {
                return drawn - 1;
            }
        }
    }
}

/// Inference: all layers in order, again and again.
fn cycle(passes: u32, to: &mut Maker) {
    (0..passes).for_each(|_| to.range(0, MODEL));
}

/// Training: all layers in order, then in reverse.
fn forward_backward(passes: u32, to: &mut Maker) {
    for _ in 0..passes {
        to.range(0, MODEL);
        to.accesses.extend((0..MODEL).rev());
    }
}

/// The same with an optimizer that goes over its own state and the weights after it.
fn training_step(passes: u32, to: &mut Maker) {
    for _ in 0..passes {
        to.range(0, MODEL);
        to.accesses.extend((0..MODEL).rev());
        (0..MODEL).for_each(|unit| to.accesses.extend([unit, MODEL + unit]));
    }
}

/// Two models, one of 25 layers and one of 60, that take turns layer by layer.
fn two_cycles(passes: u32, to: &mut Maker) {
    for turn in 0..passes * LAYERS / 2 {
        to.range(turn % 25 * LAYER, LAYER);
        to.range((25 + turn % 60) * LAYER, LAYER);
    }
}

/// The same, but who is next is chance.
fn two_cycles_random(passes: u32, to: &mut Maker) {
    let (mut one, mut other) = (0, 0);
    for _ in 0..passes * LAYERS {
        if to.below(3) == 0 {
            to.range(one % 25 * LAYER, LAYER);
            one += 1;
        } else {
            to.range((25 + other % 60) * LAYER, LAYER);
            other += 1;
        }
    }
}

/// A cycle, and between its layers some of a few units that are used all the time.
fn cycle_hot_set(passes: u32, to: &mut Maker) {
    for layer in 0..passes * LAYERS {
        to.range(layer % LAYERS * LAYER, LAYER);
        for _ in 0..3 {
            let hot = to.below(48);
            to.accesses.push(MODEL + hot);
        }
    }
}

/// One model, then another, then the first again.
fn phase_change(passes: u32, to: &mut Maker) {
    for phase in 0..3 {
        for _ in 0..passes {
            to.range(phase % 2 * MODEL / 2, MODEL / 2);
        }
    }
}

/// Three models that take turns by a few passes.
fn three_models(passes: u32, to: &mut Maker) {
    const EACH: u32 = MODEL / 4;
    for turn in 0..passes {
        for _ in 0..4 {
            to.range(turn % 3 * EACH, EACH);
        }
    }
}

/// A cycle in which each layer is left out in 15 of 100 passes.
fn cycle_skips(passes: u32, to: &mut Maker) {
    for layer in 0..passes * LAYERS {
        if to.below(100) >= 15 {
            to.range(layer % LAYERS * LAYER, LAYER);
        }
    }
}

/// Decoding: each layer and its KV cache, which grows by a unit a layer every second pass.
fn growing_kv(passes: u32, to: &mut Maker) {
    for pass in 0..passes {
        for layer in 0..LAYERS {
            to.range(layer * LAYER, LAYER);
            let kv = |block: u32| MODEL + block * LAYERS + layer;
            to.accesses.extend((0..=pass / 8).map(kv));
        }
    }
}

/// A cycle, and between its layers blocks of KV caches of which some are used much more than others.
fn cycle_kv_zipf(passes: u32, to: &mut Maker) {
    for layer in 0..passes * LAYERS {
        to.range(layer % LAYERS * LAYER, LAYER);
        for _ in 0..LAYER / 2 {
            let block = to.zipf(600);
            to.accesses.push(MODEL + block);
        }
    }
}

/// A matrix by rows, then by columns.
fn strided(passes: u32, to: &mut Maker) {
    for _ in 0..passes {
        to.range(0, MODEL);
        for column in 0..LAYERS {
            to.accesses.extend((0..LAYER).map(|row| row * LAYERS + column));
        }
    }
}

/// Each group of ten layers three times, then the next.
fn nested_loops(passes: u32, to: &mut Maker) {
    for group in 0..passes * 3 {
        for _ in 0..3 {
            to.range(group % 8 * 10 * LAYER, 10 * LAYER);
        }
    }
}

/// Mixture of experts: each layer's own weights, and two of its experts, of which some are chosen more often.
fn experts(passes: u32, to: &mut Maker) {
    const EXPERTS: u32 = 32;
    const DEPTH: u32 = 24;
    for layer in 0..passes * DEPTH * 4 {
        let layer = layer % DEPTH;
        to.accesses.push(layer);
        for _ in 0..2 {
            // Which experts are popular differs from layer to layer.
            let expert = (to.zipf(EXPERTS) * 7 + layer * 5) % EXPERTS;
            to.accesses.push(DEPTH + layer * EXPERTS + expert);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_no_others() {
        assert!(make("", 4).is_none());
    }

    #[test]
    fn patterns_have_dense_slots_and_are_the_same_every_time() {
        for name in NAMES {
            let pattern = make(name, 4).unwrap();
            assert_eq!(pattern.accesses, make(name, 4).unwrap().accesses, "{name}");
            assert!(pattern.accesses.len() > 300, "{name}");
            let most = *pattern.accesses.iter().max().unwrap();
            assert!(most < 2 * MODEL, "{name}: {most}");
        }
    }

    #[test]
    fn what_is_drawn_first_is_drawn_most() {
        let mut maker = Maker { accesses: Vec::new(), random: 1 };
        let mut counts = [0; 7];
        (0..7000).for_each(|_| counts[maker.zipf(7) as usize] += 1);
        assert!(counts[0] > 2 * counts[2] && counts[6] > 100, "{counts:?}");
    }
}
