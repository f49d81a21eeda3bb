//! Pages through all tiers of a real daemon, from real client sessions: every byte is checked.

use std::time::Duration;

use lapis::{Access, Allocation, Client, Code};
use lapis_tests::binaries::scratch;
use lapis_tests::bytes::{edit, read};
use lapis_tests::daemon::Daemon;
use lapis_tests::device::{Device, device, runs_on_a_gpu, runs_on_the_fake_gpu};

const MIB: u64 = 1 << 20;
const WAIT: Duration = Duration::from_secs(30);

/// xorshift64*, to fill and choose.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 16) % n
    }
}

fn fill(bytes: &mut [u8], seed: u64) {
    let mut random = Random(seed | 1);
    let (words, tail) = bytes.as_chunks_mut::<8>();
    words.iter_mut().for_each(|word| *word = random.next().to_le_bytes());
    tail.fill(0x5A);
}

fn is_filled(bytes: &[u8], seed: u64) -> bool {
    let mut random = Random(seed | 1);
    let (words, tail) = bytes.as_chunks::<8>();
    words.iter().all(|word| *word == random.next().to_le_bytes()) && tail.iter().all(|b| *b == 0x5A)
}

fn map(allocation: &Allocation, client: &Client, page: u64, access: Access) -> lapis::Mapping {
    let size = client.page_size();
    client.map(&[(allocation, page * size..(page + 1) * size)], access, WAIT).expect("room is made")
}

#[test]
fn anonymous_pages_larger_than_vram_and_ram_come_back_whole_in_any_order() {
    let daemon = Daemon::start(&["--vram", "16MiB", "--ram", "32MiB", "--nvme", "96MiB"]);
    let client = daemon.connect();
    let pages = 50;
    let allocation = client.allocate(pages * client.page_size()).unwrap();
    let mut written = vec![0u64; 50];
    let mut random = Random(7);
    for step in 1..600u64 {
        let page = random.below(pages);
        let seed = &mut written[usize::try_from(page).unwrap()];
        if step % 3 == 0 {
            let mut mapping = map(&allocation, &client, page, Access::Write);
            check_page(&read(&mapping, 0), *seed, page);
            edit(&mut mapping, 0, |bytes| fill(bytes, step));
            *seed = step;
        } else {
            let mapping = map(&allocation, &client, page, Access::Read);
            check_page(&read(&mapping, 0), *seed, page);
        }
    }
    let stats = client.stats().unwrap();
    assert!(stats.total.ram_to_spill.pages > 0, "nothing went to the spill: {stats:?}");
    assert!(stats.total.spill_to_ram.pages > 0, "nothing came back: {stats:?}");
    assert_eq!(stats.total.checksum_errors, 0);
    assert!(stats.metadata_bytes < 50 * 128, "{} bytes for 50 pages", stats.metadata_bytes);
}

fn check_page(bytes: &[u8], seed: u64, page: u64) {
    let right = if seed == 0 { bytes.iter().all(|b| *b == 0) } else { is_filled(bytes, seed) };
    assert!(right, "page {page} is not what was written (seed {seed})");
}

#[test]
fn overwritten_pages_hold_what_was_written() {
    let daemon = Daemon::start(&["--vram", "8MiB", "--ram", "18MiB", "--nvme", "32MiB"]);
    let client = daemon.connect();
    let allocation = client.allocate(16 * client.page_size()).unwrap();
    for pass in 1..4u64 {
        for page in 0..16 {
            let mut mapping = map(&allocation, &client, page, Access::Overwrite);
            edit(&mut mapping, 0, |bytes| fill(bytes, pass * 100 + page));
        }
        for page in (0..16).rev() {
            let mapping = map(&allocation, &client, page, Access::Read);
            assert!(is_filled(&read(&mapping, 0), pass * 100 + page), "page {page}, pass {pass}");
        }
    }
}

#[test]
fn a_file_range_at_any_offset_and_length_reads_as_the_file_does() {
    let daemon = Daemon::start(&["--vram", "1MiB", "--ram", "2MiB", "--page-size", "64KiB"]);
    let directory = scratch();
    let path = directory.path().join("data");
    let mut content = vec![0; 3_000_001];
    fill(&mut content, 3);
    std::fs::write(&path, &content).unwrap();
    let client = daemon.connect();
    for (offset, length) in [
        (0, 3_000_001),
        (11_416, 2_000_000),
        (4095, 4098),
        (1, 1),
        (2_999_999, 2),
        (65_536, 65_536),
    ] {
        let allocation = client.open_path(&path, offset, length).unwrap();
        let page = client.page_size();
        let mut at = 0;
        while at < length {
            let end = length.min(at + 4 * page);
            let mapping = client.map(&[(&allocation, at..end)], Access::Read, WAIT).unwrap();
            let (from, to) = (usize::try_from(offset + at), usize::try_from(offset + end));
            let expected = &content[from.unwrap()..to.unwrap()];
            assert!(*read(&mapping, 0) == *expected, "bytes {at}..{end} from offset {offset}");
            at = end;
        }
    }
}

#[test]
fn addresses_are_stable_and_a_page_outside_a_mapping_is_not_touchable() {
    let daemon = Daemon::start(&[
        "--vram",
        "1MiB",
        "--ram",
        "2MiB",
        "--nvme",
        "2MiB",
        "--page-size",
        "64KiB",
    ]);
    let client = daemon.connect();
    let page = client.page_size();
    let allocation = client.allocate(40 * page).unwrap();
    let first = map(&allocation, &client, 0, Access::Read).as_ptr(0) as usize;
    for index in 0..40 {
        let mapping = map(&allocation, &client, index, Access::Write);
        let distance = mapping.as_ptr(0) as usize - first;
        assert_eq!(distance as u64, index * page);
    }
    if device() == Device::Gpu {
        return eprintln!("SKIPPED: the CPU's page table doesn't tell what a GPU can reach");
    }
    let own = std::process::id().to_string();
    let readable = |address: usize| {
        let maps = std::fs::read_to_string(format!("/proc/{own}/maps")).unwrap();
        maps.lines().any(|line| {
            let (range, rest) = line.split_once(' ').unwrap();
            let (from, to) = range.split_once('-').unwrap();
            let hex = |text| usize::from_str_radix(text, 16).unwrap();
            (hex(from)..hex(to)).contains(&address) && rest.starts_with('r')
        })
    };
    let mapping = map(&allocation, &client, 3, Access::Read);
    let address = mapping.as_ptr(0) as usize;
    assert!(readable(address));
    drop(mapping);
    assert!(!readable(address), "the page is readable after its mapping ended");
}

#[test]
fn many_clients_of_one_file_share_its_pages() {
    let daemon = Daemon::start(&["--vram", "32MiB", "--ram", "32MiB"]);
    let directory = scratch();
    let path = directory.path().join("model");
    let mut content = vec![0; 16 * usize::try_from(MIB).unwrap()];
    fill(&mut content, 11);
    std::fs::write(&path, &content).unwrap();
    let clients: Vec<_> = (0..4).map(|_| daemon.connect()).collect();
    let allocations: Vec<_> =
        clients.iter().map(|client| client.open_path(&path, 0, 16 * MIB).unwrap()).collect();
    let mappings: Vec<_> = allocations.iter().map(|a| a.map_all(Access::Read).unwrap()).collect();
    for mapping in &mappings {
        assert!(*read(mapping, 0) == content);
    }
    let stats = clients[0].stats().unwrap();
    assert_eq!(stats.total.file_to_ram.bytes, 16 * MIB, "the file was read more than once");
    assert_eq!(stats.vram.used, 16 * MIB, "the file is in VRAM more than once");
}

#[test]
fn what_can_never_fit_is_refused_at_once_with_numbers() {
    let daemon = Daemon::start(&["--vram", "8MiB", "--ram", "18MiB", "--nvme", "16MiB"]);
    let client = daemon.connect();
    let allocation = client.allocate(4 * 2 * MIB).unwrap();
    let error = allocation.map_all(Access::Read).unwrap_err();
    assert_eq!(error.code(), Some(Code::OverCapacity), "{error}");
    assert!(
        error.to_string().contains("4 pages") && error.to_string().contains("3 pages"),
        "{error}"
    );
    let error = client.allocate(1 << 40).unwrap_err();
    assert_eq!(error.code(), Some(Code::OutOfMemory), "{error}");
    let two = client.map(&[(&allocation, 0..4 * MIB)], Access::Read, WAIT).unwrap();
    let error =
        client.map(&[(&allocation, 4 * MIB..8 * MIB)], Access::Read, Duration::from_millis(50));
    assert_eq!(error.unwrap_err().code(), Some(Code::TimedOut));
    drop(two);
    drop(client.map(&[(&allocation, 4 * MIB..8 * MIB)], Access::Read, WAIT).unwrap());
}

#[test]
fn all_of_this_on_the_fake_gpu() {
    runs_on_the_fake_gpu();
}

#[test]
fn all_of_this_on_a_gpu() {
    runs_on_a_gpu();
}
