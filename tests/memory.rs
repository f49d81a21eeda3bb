//! How much memory and I/O streaming takes: what is configured, and no more.
#![expect(unsafe_code, reason = "cachestat is not wrapped by libc or nix")]

use std::os::fd::AsRawFd;
use std::time::Duration;

use lapis::Access;
use lapis_tests::binaries::scratch;
use lapis_tests::daemon::Daemon;
use nix::libc;

const MIB: u64 = 1 << 20;
const WAIT: Duration = Duration::from_secs(30);

/// Pages of a file in the page cache, or `None` before Linux 6.5.
fn cached_pages(file: &std::fs::File) -> Option<u64> {
    const CACHESTAT: libc::c_long = 451;
    let range: [u64; 2] = [0, 0];
    let mut stat = [0_u64; 5];
    // SAFETY: the descriptor is open; the kernel reads two numbers and writes five, and both arrays live during the
    // call.
    let outcome = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), stat.as_mut_ptr(), 0_u32)
    };
    (outcome == 0).then_some(stat[0])
}

#[test]
fn a_cyclic_scan_larger_than_the_tiers_reads_what_they_can_not_hold_and_grows_nothing() {
    let directory = scratch();
    let path = directory.path().join("model");
    let bytes = 96 * MIB;
    let mut content = vec![0; usize::try_from(bytes).expect("it fits")];
    content.iter_mut().zip(0_u64..).for_each(|(byte, i)| *byte = (i / 4096 * 7).to_le_bytes()[0]);
    std::fs::write(&path, &content).expect("target is writable");
    let file = std::fs::File::open(&path).expect("just written");
    file.sync_all().expect("the disk works");
    let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    nix::fcntl::posix_fadvise(&file, 0, 0, advice).expect("a hint");
    let cached = cached_pages(&file);
    let daemon = Daemon::start(&["--vram", "32MiB", "--ram", "34MiB"]);
    let client = daemon.connect();
    let allocation = client.open_path(&path, 0, bytes).expect("a file");
    let read = || client.stats().expect("it serves").total.file_to_ram.bytes;
    let mut per_pass = Vec::new();
    for _ in 0..5 {
        let before = read();
        for start in (0..bytes).step_by(4 << 20) {
            let range = start..start + 4 * MIB;
            let mapping =
                client.map(&[(&allocation, range.clone())], Access::Read, WAIT).expect("room");
            let from = usize::try_from(range.start).expect("it fits");
            assert!(mapping.bytes(0) == &content[from..from + (4 << 20)], "bytes from {start}");
        }
        per_pass.push((read() - before) / MIB);
    }
    assert_eq!(per_pass[0], 96, "the first pass reads everything once: {per_pass:?}");
    // VRAM and RAM hold 64 MiB, less what the stream itself goes through: LRU would read all 96 again.
    assert!(per_pass[4] <= 56, "{per_pass:?} MiB a pass");
    let grown = cached_pages(&file).zip(cached).map(|(now, before)| now.saturating_sub(before));
    match grown {
        Some(pages) => assert!(pages < 256, "the page cache grew by {pages} pages of 4 KiB"),
        None => eprintln!("SKIPPED: no cachestat here, the page cache was not looked at"),
    }
    let (anonymous, shared) = (daemon.status_kib("RssAnon:"), daemon.status_kib("RssShmem:"));
    assert!(anonymous <= (34 + 64) << 10, "{anonymous} KiB of the daemon's own memory");
    assert!(shared <= (32 + 1) << 10, "{shared} KiB of simulated VRAM");
    let stats = client.stats().expect("it serves");
    let pages = bytes / client.page_size();
    assert!(stats.metadata_bytes < pages * 128, "{} bytes for {pages}", stats.metadata_bytes);
}
