//! How much of the transfers is hidden behind compute, in virtual time: exact figures, that a slow machine can't change.

use lapis_tests::paced::{Machine, Outcome, Workload, run, uniform};

const LAYERS: u32 = 80;
const PAGES: u32 = 32;
const PAGE_NS: u64 = 100_000;

/// All pages in RAM, `f` of them fit VRAM; compute of a pass is `c` times its transfer.
fn cyclic(c: f64, f: f64, plan: bool, passes: usize) -> (Outcome, f64) {
    let pages = LAYERS * PAGES;
    let transfer_ns = u64::from(pages) * PAGE_NS;
    let compute_ns = (transfer_ns as f64 * c / f64::from(LAYERS)) as u64;
    let vram = (f64::from(pages) * f) as u32;
    let machine = Machine { vram, ram: pages + 64, up_ns: PAGE_NS, read_ns: PAGE_NS / 10 };
    let layers = uniform(LAYERS, PAGES, compute_ns);
    let work = Workload { layers, plan, start_ns: 0, jitter_percent: 0, priority: 0, passes };
    let outcome = run(machine, &[work]).remove(0);
    let ideal = (transfer_ns as f64 * c).max(transfer_ns as f64 * (1.0 - f));
    (outcome, ideal)
}

#[test]
fn a_plan_hides_transfers() {
    for c in [0.02, 0.1, 0.3, 0.5, 0.8, 1.2] {
        for f in [0.1, 0.3, 0.5, 0.7, 0.9] {
            let (outcome, ideal) = cyclic(c, f, true, 12);
            if c == 0.5 || c == 0.3 {
                println!(
                    "{:?}",
                    outcome
                        .moved
                        .iter()
                        .map(|m| (*m as f64 / f64::from(LAYERS * PAGES) / (1.0 - f) * 100.0) as u64)
                        .collect::<Vec<_>>()
                );
                println!(
                    "{:?}",
                    outcome
                        .passes_ns
                        .iter()
                        .map(|m| (ideal / *m as f64 * 100.0) as u64)
                        .collect::<Vec<_>>()
                );
            }
            let pages = f64::from(LAYERS * PAGES);
            let moved = outcome.mean_moved(2) / (pages * (1.0 - f));
            println!("C/T {c} f {f}: {:.3} x{moved:.3}", ideal / outcome.mean_ns(2));
        }
    }
}
