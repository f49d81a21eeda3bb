//! What one request costs: a map of a resident page beside the echo of as many bytes on a raw socket.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use lapis::Access;
use lapis_tests::daemon::Daemon;

const TRIPS: usize = 20_000;
/// Bytes of a map request: header, one range, access, wait.
const REQUEST_BYTES: usize = 64;

fn p50_us(mut trips: Vec<Duration>) -> f64 {
    trips.sort_unstable();
    trips[trips.len() / 2].as_secs_f64() * 1e6
}

/// A blocking echo between two processes' worth of threads.
pub(crate) fn echo() -> f64 {
    let (mut ours, mut theirs) = UnixStream::pair().expect("a socket pair");
    let echo = std::thread::spawn(move || {
        let mut bytes = [0; REQUEST_BYTES];
        while theirs.read_exact(&mut bytes).is_ok() && theirs.write_all(&bytes).is_ok() {}
    });
    let mut bytes = [7; REQUEST_BYTES];
    let mut trips = Vec::with_capacity(TRIPS);
    for _ in 0..TRIPS {
        let started = Instant::now();
        ours.write_all(&bytes).expect("the peer lives");
        ours.read_exact(&mut bytes).expect("the peer lives");
        trips.push(started.elapsed());
    }
    drop(ours);
    echo.join().expect("it ends with the socket");
    p50_us(trips)
}

/// A map of one resident page, and the same with its unmap.
pub(crate) fn map() -> (f64, f64) {
    let daemon = Daemon::start(&["--vram", "16MiB", "--ram", "32MiB"]);
    let client = daemon.connect();
    let allocation = client.allocate(client.page_size()).expect("a page");
    let (mut maps, mut pairs) = (Vec::with_capacity(TRIPS), Vec::with_capacity(TRIPS));
    for _ in 0..TRIPS {
        let started = Instant::now();
        let mapping = allocation.map_all(Access::Read).expect("it fits");
        maps.push(started.elapsed());
        mapping.unmap().expect("it was mapped");
        pairs.push(started.elapsed());
    }
    (p50_us(maps), p50_us(pairs))
}
