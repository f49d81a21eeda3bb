//! What defaults and shares depend on: who runs the daemon, and how much memory and disk there is.

use std::io;
use std::path::{Path, PathBuf};

use nix::unistd::{Group, User};

use crate::sys::memory::budget::headroom;

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

/// What can still be had, the cgroups of this process counted: in a container the machine's number is far beyond what
/// may be used.
fn memory_available() -> io::Result<u64> {
    headroom().map(|headroom| headroom.bytes).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo has no MemAvailable")
    })
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
