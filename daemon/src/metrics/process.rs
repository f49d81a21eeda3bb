//! The metrics that every process has, under the names that every process gives them.

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{SysconfVar, sysconf};

/// Numbers of this process; what can't be read is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Process {
    pub(super) cpu_seconds: f64,
    pub(super) open_fds: u64,
    pub(super) max_fds: u64,
    pub(super) virtual_bytes: u64,
    pub(super) resident_bytes: u64,
    pub(super) start_seconds: f64,
    pub(super) threads: u64,
}

fn system(variable: SysconfVar) -> u64 {
    sysconf(variable).ok().flatten().and_then(|value| u64::try_from(value).ok()).unwrap_or(0)
}

/// Seconds from the epoch to the machine's start.
fn booted() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime ")?.parse().ok())
}

impl Process {
    /// Of this moment.
    pub(super) fn now() -> Process {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let fds = std::fs::read_dir("/proc/self/fd").map_or(0, |fds| fds.count() as u64);
        let max_fds = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
        // One of them is the directory being read.
        Process { open_fds: fds.saturating_sub(1), max_fds, ..Self::parse(&stat) }
    }

    /// Fields of `/proc/PID/stat` that come behind the name, which may hold anything.
    fn parse(stat: &str) -> Process {
        let behind = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let fields: Vec<&str> = behind.split_whitespace().collect();
        // Field 3 of the manual is the first here.
        let field = |number: usize| -> u64 {
            fields.get(number - 3).and_then(|text| text.parse().ok()).unwrap_or(0)
        };
        let ticks = system(SysconfVar::CLK_TCK).max(1) as f64;
        Process {
            cpu_seconds: (field(14) + field(15)) as f64 / ticks,
            start_seconds: booted().unwrap_or(0) as f64 + field(22) as f64 / ticks,
            threads: field(20),
            virtual_bytes: field(23),
            resident_bytes: field(24) * system(SysconfVar::PAGE_SIZE),
            ..Process::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_the_kernel_is_read_behind_any_name() {
        let stat = "42 (a ) b) S 1 42 42 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 7 0 1000 8192000 300 \
                    18446744073709551615 1 1";
        let process = Process::parse(stat);
        assert_eq!((process.cpu_seconds, process.threads), (3.0, 7));
        assert_eq!((process.virtual_bytes, process.resident_bytes), (8_192_000, 300 * 4096));
        assert_eq!(Process::parse("").threads, 0);
    }

    #[test]
    fn this_process_is_found() {
        let process = Process::now();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        assert!(process.threads >= 1 && process.open_fds >= 3 && process.max_fds > 0);
        assert!(process.resident_bytes > 1 << 20 && process.virtual_bytes > process.resident_bytes);
        assert!((0.0..86_400.0).contains(&(now.as_secs_f64() - process.start_seconds + 1.0)));
    }
}
