//! What defaults and shares depend on: who runs the daemon, and how much memory and disk there is.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::unistd::{Group, User};

/// The surroundings of a process, as far as a configuration depends on them.
#[derive(Debug, Clone)]
pub struct Host {
    /// Whether it runs as root.
    pub root: bool,
    /// `$XDG_RUNTIME_DIR`.
    pub runtime_dir: Option<PathBuf>,
    /// `$XDG_CACHE_HOME`, else `$HOME/.cache`.
    pub cache_dir: Option<PathBuf>,
    /// Bytes of memory that can be had.
    pub memory_available: fn() -> io::Result<u64>,
    /// Free bytes of the file system that will hold this directory.
    pub disk_free: fn(&Path) -> io::Result<u64>,
    /// The uid of a user's name.
    pub user_id: fn(&str) -> io::Result<Option<u32>>,
    /// The gid of a group's name.
    pub group_id: fn(&str) -> io::Result<Option<u32>>,
}

impl Host {
    /// This process's.
    #[must_use]
    pub fn of_process() -> Host {
        let directory = |name: &str| {
            std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute())
        };
        Host {
            root: nix::unistd::geteuid().is_root(),
            runtime_dir: directory("XDG_RUNTIME_DIR"),
            cache_dir: directory("XDG_CACHE_HOME")
                .or_else(|| directory("HOME").map(|home| home.join(".cache"))),
            memory_available,
            disk_free,
            user_id: |name| Ok(User::from_name(name)?.map(|user| user.uid.as_raw())),
            group_id: |name| Ok(Group::from_name(name)?.map(|group| group.gid.as_raw())),
        }
    }

    /// Where a daemon of this user listens: `/run/lapis/lapis.sock` for root, else `$XDG_RUNTIME_DIR/lapis.sock`.
    #[must_use]
    pub fn socket(&self) -> Option<PathBuf> {
        if self.root {
            return Some("/run/lapis/lapis.sock".into());
        }
        self.runtime_dir.as_ref().map(|directory| directory.join("lapis.sock"))
    }

    /// Where a daemon of this user spills: `/var/cache/lapis` for root, else `lapis` in the user's cache directory.
    #[must_use]
    pub fn spill_dir(&self) -> Option<PathBuf> {
        if self.root {
            return Some("/var/cache/lapis".into());
        }
        self.cache_dir.as_ref().map(|directory| directory.join("lapis"))
    }
}

/// What the kernel says is available, but no more than the cgroups of this process still allow: in a container the
/// machine's number is far beyond what may be used.
fn memory_available() -> io::Result<u64> {
    let machine = available_in(&fs::read_to_string("/proc/meminfo")?)?;
    // No cgroup file system, or none of the limits readable: nothing is known to be tighter than the machine.
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Ok(cgroup_room(&cgroups, Path::new("/sys/fs/cgroup")).map_or(machine, |room| room.min(machine)))
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn available_in(meminfo: &str) -> io::Result<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = value.and_then(|value| value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.and_then(|kib| kib.checked_mul(1024)).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo has no MemAvailable")
    })
}

/// The least that any cgroup above this process still allows, version 2 or version 1.
fn cgroup_room(cgroups: &str, mount: &Path) -> Option<u64> {
    let mut least = None;
    for line in cgroups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (root, limit, usage) = if controllers.is_empty() {
            (mount.to_owned(), "memory.max", "memory.current")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (mount.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
        } else {
            continue;
        };
        let group = root.join(path.trim_start_matches('/'));
        for directory in group.ancestors().take_while(|directory| directory.starts_with(&root)) {
            // `max`, or a missing file at the root, means that this level has no limit.
            let number = |name: &str| {
                fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok()
            };
            if let Some(limit) = number(limit) {
                let room = limit.saturating_sub(number(usage).unwrap_or(0));
                least = Some(least.map_or(room, |least: u64| least.min(room)));
            }
        }
    }
    least
}

/// Free bytes of the file system that holds `directory` or, if it does not exist yet, its nearest ancestor.
fn disk_free(directory: &Path) -> io::Result<u64> {
    let there = directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let stat = nix::sys::statvfs::statvfs(there)?;
    Ok(stat.blocks_available().saturating_mul(stat.fragment_size()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_meminfo() {
        let text = "MemTotal:       24634040 kB\nMemAvailable:   24000000 kB\nBuffers: 1 kB\n";
        assert_eq!(available_in(text).ok(), Some(24_576_000_000));
        assert!(available_in("MemTotal: 1 kB\n").is_err());
    }

    #[test]
    fn the_tightest_cgroup_counts() -> io::Result<()> {
        let mount = tempfile::tempdir()?;
        let inner = mount.path().join("slice/unit");
        fs::create_dir_all(&inner)?;
        fs::write(inner.join("memory.max"), "max\n")?;
        fs::write(mount.path().join("slice/memory.max"), "1000000\n")?;
        fs::write(mount.path().join("slice/memory.current"), "400000\n")?;
        assert_eq!(cgroup_room("0::/slice/unit\n", mount.path()), Some(600_000));
        assert_eq!(cgroup_room("0::/other\n", mount.path()), None);

        let old = mount.path().join("memory/unit");
        fs::create_dir_all(&old)?;
        fs::write(old.join("memory.limit_in_bytes"), "500000\n")?;
        fs::write(old.join("memory.usage_in_bytes"), "600000\n")?;
        let both = "7:cpu,cpuacct:/unit\n4:memory:/unit\n0::/slice/unit\n";
        assert_eq!(cgroup_room(both, mount.path()), Some(0));
        Ok(())
    }

    #[test]
    fn paths_follow_the_user() {
        let mut host = Host::of_process();
        host.root = true;
        assert_eq!(host.socket(), Some("/run/lapis/lapis.sock".into()));
        assert_eq!(host.spill_dir(), Some("/var/cache/lapis".into()));
        host.root = false;
        host.runtime_dir = Some("/run/user/1000".into());
        host.cache_dir = Some("/home/ada/.cache".into());
        assert_eq!(host.socket(), Some("/run/user/1000/lapis.sock".into()));
        assert_eq!(host.spill_dir(), Some("/home/ada/.cache/lapis".into()));
        host.runtime_dir = None;
        assert_eq!(host.socket(), None);
    }

    #[test]
    fn this_machine_has_memory_and_disk() {
        let host = Host::of_process();
        assert!((host.memory_available)().is_ok_and(|bytes| bytes > 0));
        assert!((host.disk_free)(Path::new("/nowhere/at/all")).is_ok());
        assert_eq!((host.user_id)("root").ok(), Some(Some(0)));
        assert_eq!((host.group_id)("no-such-group-at-all").ok(), Some(None));
    }
}
