//! How much of the transfers a plan hides on a real daemon: a client computes on each layer in turn, half of the layers
//! fit VRAM, and the link has a known speed. Beside it is the ideal, 1: the longer of the compute and of what must move.

use std::fs::File;
use std::time::{Duration, Instant};

use lapis::Access;
use lapis_tests::binaries::scratch;
use lapis_tests::daemon::Daemon;

const PAGE: u64 = 2 << 20;
/// As many as a large model has: the layer in use and the one that comes take up little of VRAM.
const LAYERS: u64 = 60;
const PAGES: u64 = 3;
/// Of all pages.
const VRAM_PAGES: u64 = LAYERS * PAGES / 2;
/// Slow, so that a pass takes much longer than what a busy machine adds to it.
const LINK_BYTES_PER_S: u64 = 300_000_000;
/// Passes that fill the tiers, and those that count.
const FILLING: u32 = 2;
const PASSES: u32 = 4;
/// Timers are late by about a millisecond: the rest is waited for awake.
const AWAKE: Duration = Duration::from_millis(2);

/// Ideal time over actual time, where the compute of a pass takes so many times the transfer of all pages.
pub(crate) fn efficiency(compute_to_transfer: f64) -> f64 {
    let directory = scratch();
    let length = LAYERS * PAGES * PAGE;
    let path = directory.path().join("layers");
    // A hole reads as zeros.
    File::create(&path).and_then(|file| file.set_len(length)).expect("target is writable");
    let bytes = |pages: u64| (pages * PAGE).to_string();
    let (vram, ram) = (bytes(VRAM_PAGES), bytes(2 * LAYERS * PAGES));
    let link = format!("{LINK_BYTES_PER_S}/s");
    let daemon = Daemon::start(&["--vram", &vram, "--ram", &ram, "--link-bandwidth", &link]);
    let client = daemon.connect();
    let file = File::open(&path).expect("it was made");
    let model = client.open_file(&file, 0, length).expect("it has bytes");
    let layer = |layer: u64| layer * PAGES * PAGE..(layer + 1) * PAGES * PAGE;
    let steps: Vec<_> =
        (0..LAYERS).map(|index| vec![(&model, layer(index), Access::Read)]).collect();
    let _plan = client.plan(&steps, true).expect("few steps");
    let page_s = PAGE as f64 / LINK_BYTES_PER_S as f64;
    let compute = Duration::from_secs_f64(PAGES as f64 * page_s * compute_to_transfer);
    let mut started = Instant::now();
    for pass in 0..FILLING + PASSES {
        if pass == FILLING {
            started = Instant::now();
        }
        for index in 0..LAYERS {
            let mapping = model.map(layer(index), Access::Read).expect("it fits");
            wait(compute);
            mapping.unmap().expect("it was mapped");
        }
    }
    let actual = started.elapsed().as_secs_f64() / f64::from(PASSES);
    let transfer = (LAYERS * PAGES - VRAM_PAGES) as f64 * page_s;
    (compute.as_secs_f64() * LAYERS as f64).max(transfer) / actual
}

fn wait(time: Duration) {
    let end = Instant::now() + time;
    if let Some(asleep) = time.checked_sub(AWAKE) {
        std::thread::park_timeout(asleep);
    }
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}
