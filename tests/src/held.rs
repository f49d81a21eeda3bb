//! What a process holds of the system's: descriptors, mappings, threads. To see that work leaves nothing behind.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// How many of each kind a process holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    descriptors: BTreeMap<String, usize>,
    /// Mappings of files and memfds.
    mappings: BTreeMap<String, usize>,
    /// By number: a thread has the name of the one that started it until it gets its own.
    threads: usize,
}

impl Held {
    /// What this process holds now.
    ///
    /// # Panics
    /// When it is gone.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        let process = Path::new("/proc").join(pid.to_string());
        let entries = |name: &str| fs::read_dir(process.join(name)).expect("it runs").flatten();
        // One that has been closed since it was listed is not held.
        let descriptors = entries("fd").filter_map(|entry| fs::read_link(entry.path()).ok());
        let maps = fs::read_to_string(process.join("maps")).expect("it runs");
        // address permissions offset device inode path: anonymous ones have no path, or one in brackets.
        let mapped = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
        let mapped = mapped.filter(|path| !path.starts_with('['));
        let threads = entries("task")
            .filter_map(|task| fs::read_to_string(task.path().join("comm")).ok())
            // The kernel adds its own for io_uring, and ends them when it likes.
            .filter(|name| !name.starts_with("iou-"));
        Self {
            descriptors: counted(descriptors.map(|link| kind(&link.to_string_lossy()))),
            mappings: counted(mapped.map(str::to_owned)),
            threads: threads.count(),
        }
    }

    /// Memfds among the descriptors.
    #[must_use]
    pub fn memfds(&self) -> usize {
        let memfds = self.descriptors.iter().filter(|(kind, _)| kind.starts_with("/memfd:"));
        memfds.map(|(_, count)| count).sum()
    }
}

/// `socket:[4711]` is a `socket:`.
fn kind(link: &str) -> String {
    match link.split_once(":[") {
        Some((kind, _number)) if !link.starts_with('/') => format!("{kind}:"),
        _ => link.to_owned(),
    }
}

fn counted(names: impl Iterator<Item = String>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for name in names {
        *counts.entry(name).or_default() += 1;
    }
    counts
}
