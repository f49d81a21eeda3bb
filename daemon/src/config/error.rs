//! What can be wrong with a configuration. Each message says what and why; [`ConfigError::fix`] says what to do.

use std::borrow::Cow;
use std::fmt;
use std::io::ErrorKind;
use std::path::PathBuf;

use super::quota::Subject;
use super::size::Size;
use super::{PAGE_SIZE_MAX, PAGE_SIZE_MIN, SOCKET_PATH_BYTES_MAX};
use lapis_proto::message::QUOTAS_MAX;

/// The configuration can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the configuration file {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no TOML, or a value is not of its key's type.
    #[error("{}:{line}: {}{message}", path.display(), key.as_ref().map(|key| format!("{key}: ")).unwrap_or_default())]
    File {
        /// Which.
        path: PathBuf,
        /// Line, from 1 on.
        line: usize,
        /// The key whose value is wrong; `None` if the text is no TOML.
        key: Option<String>,
        /// What the parser says.
        message: String,
    },
    /// The file has a key that does not exist.
    #[error("{}:{line}: there is no setting `{key}`", path.display())]
    UnknownKey {
        /// Which file.
        path: PathBuf,
        /// Line, from 1 on.
        line: usize,
        /// As written.
        key: String,
        /// The setting that was probably meant.
        nearest: Option<String>,
    },
    /// A setting behind a `[[quota]]`, to which it then belongs.
    #[error("{}:{line}: `{key}` is in a [[quota]], but is a setting of the daemon", path.display())]
    SettingInQuota {
        /// Which file.
        path: PathBuf,
        /// Line, from 1 on.
        line: usize,
        /// The setting.
        key: String,
    },
    /// A setting has no default on this host.
    #[error("there is no default for {key}: {why}")]
    NoDefault {
        /// Which setting.
        key: &'static str,
        /// What the default would be made of.
        why: &'static str,
    },
    /// What a share is taken of can't be found out.
    #[error("{key} is a share, but {of} can't be found out")]
    ShareOfUnknown {
        /// Which setting.
        key: &'static str,
        /// Of what.
        of: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// What is to be logged can't be read.
    #[error("log: {message}")]
    Log {
        /// What is wrong.
        message: String,
    },
    /// A share of the memory of a GPU that does not exist.
    #[error("vram is a share, but the sim device has no memory of its own to take it of")]
    ShareOfSim,
    /// A RAM tier beside a unified device.
    #[error("ram is set, but a unified device has no RAM tier: its VRAM is host memory")]
    UnifiedRam,
    /// A real GPU that is to play another.
    #[error("unified is set, but that is for the sim device to play, and device is cuda")]
    UnifiedCuda,
    /// A quota's share of a tier whose size is not known before the device is open.
    #[error(
        "the quota of {subject} is a share, but vram is one as well: what it comes to is not known yet"
    )]
    QuotaShareOfShare {
        /// Whose.
        subject: Subject,
    },
    /// The page size is too small or too large.
    #[error(
        "page_size is {page_size}, outside of {} to {}",
        Size::from_bytes(PAGE_SIZE_MIN),
        Size::from_bytes(PAGE_SIZE_MAX)
    )]
    PageSizeBounds {
        /// As configured.
        page_size: Size,
    },
    /// The page size is no power of two.
    #[error("page_size is {page_size} bytes, which is no power of two")]
    PageSizePower {
        /// As configured, bytes.
        page_size: u64,
        /// The next power of two below.
        below: Size,
        /// And above.
        above: Size,
    },
    /// A tier has too few frames to move any page.
    #[error(
        "{tier} is {size}, but needs at least {frames_min} frames of {frame_size}: \
         with fewer, the pages that arrive and leave can wait for one another for ever"
    )]
    TierSmall {
        /// Which.
        tier: &'static str,
        /// As configured.
        size: Size,
        /// Bytes of a frame: a page, and in RAM some room beside it.
        frame_size: Size,
        /// Fewest frames.
        frames_min: u64,
        /// The same in bytes.
        size_min: Size,
    },
    /// A tier has too many frames.
    #[error("{tier} is {size}, but a tier has at most {size_max} in frames of {frame_size}")]
    TierLarge {
        /// Which.
        tier: &'static str,
        /// As configured.
        size: Size,
        /// Bytes of a frame.
        frame_size: Size,
        /// Most bytes in such frames.
        size_max: Size,
    },
    /// VRAM does not fit into the tiers below it.
    #[error(
        "vram ({vram}) is larger than ram ({ram}) and nvme ({nvme}) together, \
         less the 4KiB that a RAM frame takes beside its page: evicted pages would have nowhere to go"
    )]
    NowhereToEvict {
        /// VRAM tier.
        vram: Size,
        /// RAM tier.
        ram: Size,
        /// Spill.
        nvme: Size,
        /// What RAM must be at least, if the spill stays.
        ram_min: Size,
        /// What the spill must be at least, if RAM stays.
        nvme_min: Size,
    },
    /// VRAM of a unified device does not fit into the spill, the only tier below it.
    #[error(
        "vram ({vram}) is larger than nvme ({nvme}), and a unified device has no RAM tier: \
         evicted pages would have nowhere to go"
    )]
    UnifiedNvmeSmall {
        /// VRAM tier.
        vram: Size,
        /// Spill.
        nvme: Size,
        /// What the spill must be at least.
        nvme_min: Size,
    },
    /// A number is too small or too large.
    #[error("{key} is {}, outside of {} to {}", number(key, *value), number(key, *min), number(key, *max))]
    OutOfBounds {
        /// Which setting.
        key: &'static str,
        /// As configured.
        value: u32,
        /// Least.
        min: u32,
        /// Most.
        max: u32,
    },
    /// The spill directory's path is relative.
    #[error("spill_dir is {}, a relative path: the spill would follow the working directory", path.display())]
    SpillDirRelative {
        /// As configured.
        path: PathBuf,
    },
    /// The socket's path is longer than the kernel takes.
    #[error("socket is a path of {bytes} bytes, but Unix sockets have at most {SOCKET_PATH_BYTES_MAX}: {}", path.display())]
    SocketPathLong {
        /// As configured.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// A user or group that does not exist.
    #[error("there is no {kind} `{name}`")]
    NoSuchName {
        /// `user` or `group`.
        kind: &'static str,
        /// As configured.
        name: String,
    },
    /// A user or group that can't be looked up.
    #[error("the {kind} `{name}` can't be looked up")]
    NameUnknown {
        /// `user` or `group`.
        kind: &'static str,
        /// As configured.
        name: String,
        /// Why not.
        source: std::io::Error,
    },
    /// More quotas than a daemon keeps.
    #[error("there are {count} quotas, more than {QUOTAS_MAX}")]
    QuotasMany {
        /// As configured.
        count: usize,
    },
    /// Two quotas of one subject.
    #[error("{subject} has two quotas")]
    QuotaTwice {
        /// Whose.
        subject: Subject,
    },
    /// A quota that limits, reserves and prefers nothing.
    #[error("the quota of {subject} limits nothing")]
    QuotaEmpty {
        /// Whose.
        subject: Subject,
    },
    /// A reserve for an unknown number of users or sessions.
    #[error("the quota of {subject} reserves VRAM, but nobody knows how many there will be")]
    QuotaReserveEach {
        /// Whose.
        subject: Subject,
    },
    /// More reserved than there is.
    #[error("the quotas reserve {reserved} of VRAM, but {most} of it can be mapped")]
    QuotaReserves {
        /// All together, in whole pages.
        reserved: Size,
        /// What mappings may hold.
        most: Size,
    },
}

impl ConfigError {
    /// What to do about it.
    #[must_use]
    pub fn fix(&self) -> Cow<'static, str> {
        match self {
            ConfigError::Read { source, .. } if source.kind() == ErrorKind::InvalidData => {
                "give --config a TOML file, which is text in UTF-8".into()
            }
            ConfigError::Read { .. } => "give --config a file that this user can read".into(),
            ConfigError::File { .. } => {
                "correct that line; `lapisd --check` without --config prints a valid file".into()
            }
            ConfigError::UnknownKey { nearest: Some(nearest), .. } => {
                format!("did you mean `{nearest}`?").into()
            }
            ConfigError::UnknownKey { nearest: None, .. } => {
                "remove it; `lapisd --help` lists all settings".into()
            }
            ConfigError::SettingInQuota { .. } => {
                "move it before the first [[quota]]: what is behind one belongs to it".into()
            }
            ConfigError::NoDefault { key, .. } => {
                format!("give --{}", key.replace('_', "-")).into()
            }
            ConfigError::ShareOfUnknown { key, .. } => {
                format!("give {key} as a size, such as 8GiB").into()
            }
            ConfigError::Log { .. } => {
                "give a level, or levels by module: info, or info,lapisd=debug".into()
            }
            ConfigError::ShareOfSim => "give vram as a size, such as 8GiB".into(),
            ConfigError::UnifiedRam => "remove ram, and give vram its size".into(),
            ConfigError::UnifiedCuda => "remove unified, or set device to sim".into(),
            ConfigError::QuotaShareOfShare { .. } => {
                "give vram as a size, such as 8GiB, or what the quota allows".into()
            }
            ConfigError::PageSizeBounds { .. } => "2MiB suits most devices".into(),
            ConfigError::PageSizePower { below, above, .. } => {
                format!("set page_size to {below} or {above}").into()
            }
            ConfigError::TierSmall { tier, size_min, .. } => {
                format!("raise {tier} to at least {size_min}, or lower page_size").into()
            }
            ConfigError::TierLarge { tier, size_max, .. } => {
                format!("raise page_size, or lower {tier} to at most {size_max}").into()
            }
            ConfigError::NowhereToEvict { ram_min, nvme_min, .. } => {
                format!("raise ram to at least {ram_min}, or nvme to at least {nvme_min}").into()
            }
            ConfigError::UnifiedNvmeSmall { nvme_min, .. } => {
                format!("raise nvme to at least {nvme_min}, or leave it out").into()
            }
            ConfigError::OutOfBounds { key, min, max, .. } => {
                format!("set {key} to {} to {}", number(key, *min), number(key, *max)).into()
            }
            ConfigError::SpillDirRelative { path } => {
                format!("give the whole path, such as /var/cache/{}", path.display()).into()
            }
            ConfigError::SocketPathLong { .. } => {
                "choose a shorter one, such as /run/lapis/lapis.sock".into()
            }
            ConfigError::NoSuchName { kind, .. } => {
                format!("create it, or name another {kind}").into()
            }
            ConfigError::NameUnknown { kind, .. } => {
                format!("give the {kind}'s number instead").into()
            }
            ConfigError::QuotasMany { .. } => {
                "give quotas to groups, each-user or each-session instead of so many users".into()
            }
            ConfigError::QuotaTwice { .. } => "write both into one [[quota]]".into(),
            ConfigError::QuotaEmpty { .. } => {
                "give it vram, vram_reserved, anonymous or priority, or remove it".into()
            }
            ConfigError::QuotaReserveEach { .. } => {
                "reserve for a user or a group, such as user:ada".into()
            }
            ConfigError::QuotaReserves { most, .. } => {
                format!("raise vram, or lower vram_reserved to {most} in all").into()
            }
        }
    }
}

/// The configuration can be used, and is rarely meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigWarning {
    /// RAM holds less than VRAM.
    RamSmall {
        /// The VRAM tier.
        vram: Size,
        /// The RAM tier.
        ram: Size,
    },
}

impl fmt::Display for ConfigWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigWarning::RamSmall { vram, ram } => write!(
                f,
                "ram ({ram}) is smaller than vram ({vram}): what leaves VRAM soon leaves RAM as well, and comes back \
                 at the disk's speed; give ram at least {vram}"
            ),
        }
    }
}

/// Permission bits are octal, everything else decimal.
fn number(key: &str, value: u32) -> String {
    if key == "socket_mode" { format!("{value:04o}") } else { value.to_string() }
}
