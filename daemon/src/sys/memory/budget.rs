//! How much memory this process may still take: the machine's, and each cgroup's above us, v1 and v2.
//!
//! Asked once at start. Taking more would not fail then but end in an OOM kill later.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that can still be had, and what limits them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Headroom {
    /// Bytes.
    pub(crate) bytes: u64,
    /// The limit's name, for people: `MemAvailable of /proc/meminfo` or the path of a cgroup's limit.
    pub(crate) limit: String,
}

/// The tightest limit, or `None` where the system tells nothing.
#[must_use]
pub(crate) fn headroom() -> Option<Headroom> {
    headroom_under(Path::new("/"))
}

fn headroom_under(root: &Path) -> Option<Headroom> {
    let mut tightest =
        fs::read_to_string(root.join("proc/meminfo")).ok().and_then(|text| available(&text));
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    for hierarchy in hierarchies(&groups) {
        for found in hierarchy.headrooms(root) {
            if tightest.as_ref().is_none_or(|tightest| found.bytes < tightest.bytes) {
                tightest = Some(found);
            }
        }
    }
    tightest
}

/// The `MemAvailable` line of `/proc/meminfo`, which leaves out the huge page pool.
fn available(meminfo: &str) -> Option<Headroom> {
    let kib = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = kib.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(Headroom {
        bytes: kib.saturating_mul(1024),
        limit: "MemAvailable of /proc/meminfo".to_owned(),
    })
}

/// One cgroup hierarchy that can limit memory, and our place in it.
#[derive(Debug, PartialEq, Eq)]
struct Hierarchy {
    unified: bool,
    path: PathBuf,
}

/// Reads `/proc/self/cgroup`: `0::/path` is the unified hierarchy, `4:memory:/path` the memory one of v1.
fn hierarchies(text: &str) -> Vec<Hierarchy> {
    let parse = |line: &str| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let unified = number == "0" && controllers.is_empty();
        let limits = unified || controllers.split(',').any(|name| name == "memory");
        limits.then(|| Hierarchy { unified, path: PathBuf::from(path.trim_start_matches('/')) })
    };
    text.lines().filter_map(parse).collect()
}

impl Hierarchy {
    /// What each group from ours up to the root leaves. A container may show our path under its own root, where the
    /// lower directories do not exist: those are passed over, and the root itself carries the limit.
    fn headrooms(&self, root: &Path) -> Vec<Headroom> {
        let mounts: &[&str] = if self.unified {
            &["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        } else {
            &["sys/fs/cgroup/memory"]
        };
        let group = |mount: &Path, path: &Path| self.group_headroom(root, &mount.join(path));
        mounts
            .iter()
            .flat_map(|mount| {
                self.path.ancestors().filter_map(move |path| group(Path::new(mount), path))
            })
            .collect()
    }

    fn group_headroom(&self, root: &Path, group: &Path) -> Option<Headroom> {
        let (limit_file, usage_file, file_keys) = if self.unified {
            ("memory.max", "memory.current", ["inactive_file", "active_file"])
        } else {
            (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ["total_inactive_file", "total_active_file"],
            )
        };
        let read = |name: &str| fs::read_to_string(root.join(group).join(name)).ok();
        // v2 says `max` for no limit, which is no number; v1 says a number no machine has.
        let limit: u64 = read(limit_file)?.trim().parse().ok()?;
        let usage: u64 = read(usage_file)?.trim().parse().ok()?;
        let stat = read("memory.stat").unwrap_or_default();
        let cache: u64 = file_keys.iter().filter_map(|key| counter(&stat, key)).sum();
        // The page cache is charged to the group and given up when memory is asked for.
        let bytes = limit.saturating_sub(usage.saturating_sub(cache));
        Some(Headroom {
            bytes,
            limit: Path::new("/").join(group).join(limit_file).display().to_string(),
        })
    }
}

/// The value of one line `key value` of `memory.stat`.
fn counter(stat: &str, key: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal:  4000 kB\nMemAvailable:    2000 kB\n");

    #[test]
    fn without_cgroups_the_machine_is_the_limit() {
        let root = tree(&[MEMINFO]);
        let found = headroom_under(root.path()).unwrap();
        assert_eq!(
            found,
            Headroom { bytes: 2_048_000, limit: "MemAvailable of /proc/meminfo".to_owned() }
        );
    }

    #[test]
    fn a_system_that_tells_nothing_limits_nothing() {
        assert_eq!(headroom_under(tree(&[]).path()), None);
    }

    #[test]
    fn the_tightest_group_above_us_limits_on_v2() {
        let root = tree(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/system.slice/lapisd.service\n"),
            ("sys/fs/cgroup/system.slice/lapisd.service/memory.max", "max\n"),
            ("sys/fs/cgroup/system.slice/lapisd.service/memory.current", "5\n"),
            ("sys/fs/cgroup/system.slice/memory.max", "1000000\n"),
            ("sys/fs/cgroup/system.slice/memory.current", "300000\n"),
            (
                "sys/fs/cgroup/system.slice/memory.stat",
                "anon 1\ninactive_file 50000\nactive_file 20000\n",
            ),
        ]);
        let found = headroom_under(root.path()).unwrap();
        assert_eq!(found.bytes, 770_000);
        assert_eq!(found.limit, "/sys/fs/cgroup/system.slice/memory.max");
    }

    #[test]
    fn a_container_that_sees_only_its_root_is_limited_by_it_on_v1() {
        let root = tree(&[
            MEMINFO,
            ("proc/self/cgroup", "5:cpuset:/x\n4:memory:/docker/abc\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "900000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "400000\n"),
            (
                "sys/fs/cgroup/memory/memory.stat",
                "inactive_file 7\ntotal_inactive_file 1000\ntotal_active_file 1\n",
            ),
        ]);
        let found = headroom_under(root.path()).unwrap();
        assert_eq!(found.bytes, 501_001);
        assert_eq!(found.limit, "/sys/fs/cgroup/memory/memory.limit_in_bytes");
    }

    #[test]
    fn a_v1_group_without_a_limit_limits_nothing() {
        let root = tree(&[
            MEMINFO,
            ("proc/self/cgroup", "4:memory:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "400000\n"),
        ]);
        assert_eq!(headroom_under(root.path()).unwrap().bytes, 2_048_000);
    }

    #[test]
    fn a_group_over_its_limit_leaves_nothing() {
        let root = tree(&[
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "10\n"),
            ("sys/fs/cgroup/memory.current", "20\n"),
        ]);
        assert_eq!(headroom_under(root.path()).unwrap().bytes, 0);
    }
}
