//! How much of the transfers is hidden behind compute, in virtual time: exact figures, that a slow machine can't change.
//!
//! *Efficiency* is the ideal time of a pass over the actual one, and the ideal is the longer of the compute and the
//! transfer of what does not fit.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "figures of a model: positive, and far below where they would not fit"
)]

use lapisd::paced::{Layer, Machine, Outcome, Workload, run, uniform};

const LAYERS: u32 = 80;
const PAGES: u32 = 32;
const PAGE_NS: u64 = 100_000;
const SHARES: [f64; 5] = [0.1, 0.3, 0.5, 0.7, 0.9];
const COMPUTES: [f64; 6] = [0.02, 0.1, 0.3, 0.5, 0.8, 1.2];

/// Efficiency, and pages moved over the least possible.
#[derive(Debug, Clone, Copy)]
struct Figure {
    efficiency: f64,
    moved: f64,
}

fn pages(layers: &[Layer]) -> u32 {
    layers.iter().flat_map(|layer| layer.pages.last()).map(|pages| pages.end).max().unwrap_or(0)
}

/// All pages in RAM, `f` of them fit VRAM.
fn machine(pages: u32, f: f64) -> Machine {
    let vram = (f64::from(pages) * f) as u32;
    Machine { vram, ram: 3 * pages, up_ns: PAGE_NS, read_ns: PAGE_NS / 10, map_ns: 0 }
}

fn workload(layers: Vec<Layer>, plan: bool, passes: usize) -> Workload {
    Workload { layers, plan, start_ns: 0, jitter_percent: 0, priority: 0, passes }
}

fn figure(outcome: &Outcome, layers: &[Layer], f: f64, from: usize) -> Figure {
    let transfer = f64::from(pages(layers)) * PAGE_NS as f64 * (1.0 - f);
    let compute: u64 = layers.iter().map(|layer| layer.compute_ns).sum();
    let ideal = transfer.max(compute as f64);
    let least = f64::from(pages(layers)) * (1.0 - f);
    Figure { efficiency: ideal / outcome.mean_ns(from), moved: outcome.mean_moved(from) / least }
}

/// One client on a machine that `f` of its pages fit.
fn alone(work: &Workload, f: f64, from: usize) -> Figure {
    let outcome = run(machine(pages(&work.layers), f), std::slice::from_ref(work))
        .expect("it fits")
        .remove(0);
    figure(&outcome, &work.layers, f, from)
}

/// The compute of a pass is `c` times the transfer of all its pages.
fn compute_ns(c: f64) -> u64 {
    (f64::from(PAGES) * PAGE_NS as f64 * c) as u64
}

/// Mean and worst efficiency, mean and most moved.
fn summary(name: &str, figures: &[Figure]) -> (f64, f64, f64, f64) {
    let n = figures.len() as f64;
    let mean = figures.iter().map(|figure| figure.efficiency).sum::<f64>() / n;
    let worst = figures.iter().map(|figure| figure.efficiency).fold(f64::MAX, f64::min);
    let moved = figures.iter().map(|figure| figure.moved).sum::<f64>() / n;
    let most = figures.iter().map(|figure| figure.moved).fold(0.0, f64::max);
    println!(
        "{name}: efficiency {mean:.3} (worst {worst:.3}), moved x{moved:.3} (most x{most:.3})"
    );
    (mean, worst, moved, most)
}

/// Every compute with every share.
fn all(mut one: impl FnMut(f64, f64) -> Figure) -> Vec<Figure> {
    let pairs = COMPUTES.iter().flat_map(|c| SHARES.iter().map(move |f| (*c, *f)));
    pairs
        .map(|(c, f)| {
            let figure = one(c, f);
            println!("  C/T {c}, f {f}: {:.3}, moved x{:.3}", figure.efficiency, figure.moved);
            figure
        })
        .collect()
}

#[test]
fn a_plan_hides_the_transfers_of_even_layers() {
    let figures =
        all(|c, f| alone(&workload(uniform(LAYERS, PAGES, compute_ns(c)), true, 6), f, 2));
    let (mean, worst, moved, _) = summary("even layers", &figures);
    assert!(mean >= 0.98 && worst >= 0.965, "{mean} {worst}");
    assert!(moved <= 1.06, "{moved}");
}

#[test]
fn a_plan_hides_transfers_behind_uneven_compute() {
    let figures = all(|c, f| {
        let layers = uniform(LAYERS, PAGES, compute_ns(c));
        alone(&Workload { jitter_percent: 30, ..workload(layers, true, 6) }, f, 2)
    });
    let (mean, ..) = summary("compute that varies by 30%", &figures);
    assert!(mean >= 0.955, "{mean}");
}

#[test]
fn a_plan_hides_the_transfers_of_uneven_layers() {
    let figures = all(|c, f| {
        let mut first = 0;
        let layer = |layer: u32| {
            let count = [8, 24, 32, 64][layer as usize % 4];
            first += count;
            let pages = std::iter::once(first - count..first).collect();
            Layer { pages, compute_ns: compute_ns(c) }
        };
        alone(&workload((0..LAYERS).map(layer).collect(), true, 6), f, 2)
    });
    let (mean, ..) = summary("uneven layers", &figures);
    assert!(mean >= 0.955, "{mean}");
}

/// As in files, where layers begin anywhere; and with compute that leaves time to spare.
#[test]
fn a_plan_hides_the_transfers_of_layers_that_share_pages() {
    let figures = all(|c, f| {
        let layer = |layer: u32| {
            let first = layer * (PAGES - 1);
            let pages = std::iter::once(first..first + PAGES).collect();
            Layer { pages, compute_ns: compute_ns(2.0 * c) }
        };
        alone(&workload((0..LAYERS).map(layer).collect(), true, 6), f, 2)
    });
    let (mean, ..) = summary("layers that share pages", &figures);
    assert!(mean >= 0.98, "{mean}");
}

#[test]
fn a_plan_hides_transfers_behind_compute_that_comes_late() {
    let figures = all(|c, f| {
        let mut layers = uniform(LAYERS, PAGES, 0);
        for (index, layer) in layers.iter_mut().enumerate() {
            // From nothing to twice the mean.
            let share = 2.0 * index as f64 / f64::from(LAYERS - 1);
            layer.compute_ns = (compute_ns(c) as f64 * share) as u64;
        }
        alone(&workload(layers, true, 6), f, 2)
    });
    let (mean, ..) = summary("compute that grows from layer to layer", &figures);
    assert!(mean >= 0.955, "{mean}");
}

/// Nobody declares anything: the cycle is learned.
#[test]
fn what_repeats_itself_is_learned() {
    let figures =
        all(|c, f| alone(&workload(uniform(LAYERS, PAGES, compute_ns(c)), false, 24), f, 20));
    let (mean, ..) = summary("no plan, from the twentieth pass", &figures);
    assert!(mean >= 0.97, "{mean}");
    let early = all(|c, f| alone(&workload(uniform(LAYERS, PAGES, compute_ns(c)), false, 6), f, 3));
    let (mean, ..) = summary("no plan, from the third pass", &early);
    assert!(mean >= 0.95, "{mean}");
}

/// A file that VRAM and RAM hold two thirds of together: the rest is read anew in each pass, and no more.
#[test]
fn tiers_add_up() {
    for (plan, c) in [(true, 0.0), (true, 0.5), (true, 4.0), (false, 0.0), (false, 4.0)] {
        let layers = uniform(24, 64, (64.0 * PAGE_NS as f64 * c) as u64);
        let machine =
            Machine { vram: 512, ram: 544, up_ns: PAGE_NS, read_ns: 3 * PAGE_NS, map_ns: 0 };
        let outcome =
            run(machine, &[workload(layers, plan, 12)]).expect("nothing is refused").remove(0);
        println!("  plan {plan}, C/T {c}: read {:?}, moved {:?}", outcome.read, outcome.moved);
        // 480 of 1536, at the least; LRU would read them all.
        assert!(outcome.read[8..].iter().all(|read| *read <= 700), "{:?}", outcome.read);
    }
}

/// A second client with a file of its own comes when the first one is in its fourth pass: both end up no slower than
/// the link allows for what of the two does not fit.
#[test]
fn a_plan_hides_transfers_when_a_second_client_arrives() {
    let mut efficiencies = Vec::new();
    for c in [0.1, 0.5, 1.2] {
        for f in [0.5, 0.7, 0.9] {
            let layers = uniform(LAYERS, PAGES, compute_ns(c));
            let transfer = f64::from(LAYERS * PAGES) * PAGE_NS as f64;
            let first = workload(layers.clone(), true, 16);
            let start_ns = (3.5 * transfer * f64::max(c, 1.0 - f)) as u64;
            let second = Workload { start_ns, passes: 8, ..first.clone() };
            // The share is of both files.
            let outcomes = run(machine(2 * pages(&layers), f), &[first, second]).expect("it fits");
            // Together they move what does not fit, once per pass of each at most; the slower one tells.
            let moved: u64 = outcomes[1].moved[3..].iter().sum();
            let time: u64 = outcomes[1].passes_ns[3..].iter().sum();
            let compute = c * transfer * (outcomes[1].passes_ns.len() - 3) as f64;
            let ideal = f64::max(compute, moved as f64 * PAGE_NS as f64);
            println!("  C/T {c}, f {f}: {:.3}", ideal / time as f64);
            efficiencies.push(ideal / time as f64);
        }
    }
    let mean = efficiencies.iter().sum::<f64>() / efficiencies.len() as f64;
    println!("a second client: efficiency {mean:.3}");
    assert!(mean >= 0.955, "{mean}");
}

/// Two equal clients, of whose pages 0.6 fit: the time of a pass of each, in transfers of all its pages.
fn two_that_compete(priorities: [u8; 2]) -> [f64; 2] {
    let layers = uniform(LAYERS, PAGES, compute_ns(0.1));
    let transfer = f64::from(LAYERS * PAGES) * PAGE_NS as f64;
    let work =
        priorities.map(|priority| Workload { priority, ..workload(layers.clone(), true, 30) });
    let outcomes = run(machine(2 * pages(&layers), 0.6), &work).expect("it fits");
    let time = |outcome: &Outcome| outcome.mean_ns(outcome.passes_ns.len() - 10) / transfer;
    [time(&outcomes[0]), time(&outcomes[1])]
}

/// Split evenly, each would move 0.4 of its pages at half of the link: 0.8 transfers a pass.
#[test]
fn of_two_cyclic_clients_one_is_held_whole_and_nobody_is_slower() {
    let times = two_that_compete([0, 0]);
    println!("  equal: {times:?}");
    let (fast, slow) = (times[0].min(times[1]), times[0].max(times[1]));
    assert!(fast <= 0.15, "{times:?}");
    assert!(slow <= 0.85, "{times:?}");
    for heavy in 0..2 {
        let mut priorities = [0, 0];
        priorities[heavy] = 3;
        let times = two_that_compete(priorities);
        println!("  {priorities:?}: {times:?}");
        assert!(times[heavy] <= 0.15, "{heavy}: {times:?}");
        assert!(times[1 - heavy] <= 0.9, "{heavy}: {times:?}");
    }
}
