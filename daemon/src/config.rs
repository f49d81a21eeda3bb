//! What the daemon is told to be: sizes of its tiers, paths, limits.
//!
//! [`Settings`] are what one source says: the file, the environment, the flags. Sources are merged, resolved against
//! the [`Host`] into a [`Config`], and that is validated. The rest of the daemon sees only a valid [`Config`].

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lapis_proto::message::Quota;
use serde::{Deserialize, Serialize};

use crate::log::LogFormat;
use crate::sys::memory::FRAME_SLACK;

pub use error::{ConfigError, ConfigWarning};
pub use gpu::{GpuChoice, GpuChoiceError};
pub use host::Host;
pub use quota::{ADMIN_GROUP_DEFAULT, QuotaSettings, Subject, SubjectError};
pub use settings::{MetricsAddress, Mode, Settings};
pub use size::{Amount, Rate, Size, SizeError};

mod error;
mod gpu;
mod host;
mod quota;
mod settings;
mod size;

/// Smallest page: below it the per-page work costs more than the copy.
pub const PAGE_SIZE_MIN: u64 = 64 << 10;
/// Largest page: above it a frame is too coarse a unit to keep or drop.
pub const PAGE_SIZE_MAX: u64 = 64 << 20;
/// Fewest VRAM frames: one mapped, one arriving, one leaving, and one spare so that these never wait in a circle.
pub const VRAM_FRAMES_MIN: u64 = 4;
/// Fewest RAM frames: each VRAM page may be on its way in while as many are on their way out.
pub const RAM_FRAMES_MIN: u64 = 8;
/// Most frames a tier can have.
pub const TIER_FRAMES_MAX: u64 = 16 << 20;
/// Longest path of a Unix socket: `sun_path` has 108 bytes, one of them the terminating zero.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Which device holds the VRAM tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DeviceChoice {
    /// A CUDA GPU if there is one that can be used, else `sim`
    Auto,
    /// A CUDA GPU
    Cuda,
    /// VRAM simulated in host memory
    Sim,
}

/// How files are read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum IoEngine {
    /// io_uring if the kernel allows it, else threads
    Auto,
    /// io_uring, or fail to start
    Uring,
    /// Threads with plain reads and writes
    Threads,
}

/// The speed of the sim device's copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Bytes a second; as fast as memory goes if `None`.
    pub bandwidth: Option<Rate>,
    /// Added to each copy.
    pub latency: Duration,
}

/// Bounds on what clients can make the daemon hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Open sessions.
    pub sessions_max: u32,
    /// Live allocations of a session.
    pub allocations_max: u32,
    /// Live mappings of a session.
    pub mappings_max: u32,
    /// Unanswered requests of a session.
    pub requests_max: u32,
    /// Pages of all allocations together.
    pub pages_max: u32,
    /// Longest wait that a `map` request may ask for.
    pub map_wait_max: Duration,
}

/// A daemon's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where clients connect.
    pub socket: PathBuf,
    /// The socket's permission bits.
    pub socket_mode: u32,
    /// TCP address that metrics and health are served on.
    pub metrics: Option<SocketAddr>,
    /// Unix socket that they are served on; its mode is `socket_mode`.
    pub metrics_socket: Option<PathBuf>,
    /// What is logged: a level, or levels by module.
    pub log: String,
    /// How it is logged.
    pub log_format: LogFormat,
    /// Which device.
    pub device: DeviceChoice,
    /// Which GPU; the first one if `None`.
    pub gpu: Option<GpuChoice>,
    /// The CUDA driver's library; the one that the system finds if `None`.
    pub libcuda: Option<PathBuf>,
    /// The sim device plays one whose memory is the host's own: there is no RAM tier.
    pub unified: bool,
    /// VRAM tier; whole pages of it are used. A share is of the GPU's free memory: [`Config::settled`].
    pub vram: Amount,
    /// RAM tier; whole frames of it are used, and a RAM frame takes [`FRAME_SLACK`] more than its page.
    pub ram: Size,
    /// Spill; whole pages of it are used. `None`: as much as [`Config::nvme_size`] says.
    pub nvme: Option<Size>,
    /// Directory that the spill file is made in.
    pub spill_dir: PathBuf,
    /// Bytes of a page, a power of two.
    pub page_size: u64,
    /// Reads and writes in flight.
    pub queue_depth: u32,
    /// Threads that copy between RAM and VRAM on the sim device.
    pub copy_threads: u32,
    /// Speed of the sim device.
    pub link: Link,
    /// How files are read and written.
    pub io: IoEngine,
    /// Bounds on clients.
    pub limits: Limits,
    /// Members of this group may change tiers and quotas, beside root.
    pub admin_gid: Option<u32>,
    /// Quotas from the start on.
    pub quotas: Vec<Quota>,
}

impl Config {
    /// The defaults, with these paths.
    #[must_use]
    pub fn new(socket: PathBuf, spill_dir: PathBuf) -> Config {
        Config {
            socket,
            socket_mode: 0o660,
            log: "info".to_owned(),
            log_format: LogFormat::Auto,
            metrics: None,
            metrics_socket: None,
            device: DeviceChoice::Auto,
            gpu: None,
            libcuda: None,
            unified: false,
            vram: Size::gib(1).into(),
            ram: Size::gib(1),
            nvme: None,
            spill_dir,
            page_size: 2 << 20,
            queue_depth: 8,
            copy_threads: 1,
            link: Link { bandwidth: None, latency: Duration::ZERO },
            io: IoEngine::Auto,
            limits: Limits {
                sessions_max: 1024,
                allocations_max: 1024,
                mappings_max: 1024,
                requests_max: 1024,
                pages_max: 4 << 20,
                map_wait_max: Duration::from_secs(60),
            },
            admin_gid: None,
            quotas: Vec::new(),
        }
    }

    /// The defaults, then `file` if there is one, then `settings`, which hold environment and flags; validated.
    ///
    /// # Errors
    /// The first thing that is wrong, with the fix.
    pub fn load(
        file: Option<&Path>,
        settings: Settings,
        host: &Host,
    ) -> Result<Config, ConfigError> {
        let below = file.map_or_else(|| Ok(Settings::default()), Settings::read)?;
        let config = settings.over(below).resolve(host)?;
        config.validate()?;
        Ok(config)
    }

    /// With a share of VRAM made a size, once the device is open; validated.
    ///
    /// # Errors
    /// [`ConfigError::ShareOfSim`] without a GPU; whatever [`Config::validate`] finds in the whole.
    pub fn settled(&self, gpu_free: Option<u64>) -> Result<Config, ConfigError> {
        let vram = match (self.vram, gpu_free) {
            (Amount::Fixed(size), _) => size,
            // In whole pages, as it is used.
            (share @ Amount::Share(_), Some(free)) => {
                let bytes = share.of(free).bytes();
                Size::from_bytes(bytes - bytes % self.page_size.max(1))
            }
            (Amount::Share(_), None) => return Err(ConfigError::ShareOfSim),
        };
        let config = Config { vram: vram.into(), ..self.clone() };
        config.validate()?;
        Ok(config)
    }

    /// Size of the VRAM tier; not known while it is a share.
    #[must_use]
    pub fn vram_size(&self) -> Option<Size> {
        match self.vram {
            Amount::Fixed(size) => Some(size),
            Amount::Share(_) => None,
        }
    }

    /// Frames of the VRAM tier; none while it is a share.
    #[must_use]
    pub fn vram_frames(&self) -> u32 {
        self.vram_size().map_or(0, |size| frames(size, self.page_size))
    }

    /// Frames of the RAM tier; none on a unified device.
    #[must_use]
    pub fn ram_frames(&self) -> u32 {
        if self.unified {
            return 0;
        }
        frames(self.ram, self.ram_frame_size())
    }

    /// Size of the spill: as configured, else the part of VRAM that RAM can't take, in whole pages. Nothing while it
    /// depends on a share.
    #[must_use]
    pub fn nvme_size(&self) -> Size {
        self.nvme.unwrap_or_else(|| {
            let pages = self.vram_frames().saturating_sub(self.ram_frames());
            Size::from_bytes(u64::from(pages) * self.page_size)
        })
    }

    /// Slots of the spill.
    #[must_use]
    pub fn spill_slots(&self) -> u32 {
        frames(self.nvme_size(), self.page_size)
    }

    /// Bytes of a RAM frame: a page, and room to round reads out.
    fn ram_frame_size(&self) -> u64 {
        self.page_size.saturating_add(FRAME_SLACK)
    }

    /// Checks everything that can be checked without touching the system.
    ///
    /// # Errors
    /// The first thing that is wrong, with numbers and the fix.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.device == DeviceChoice::Cuda && self.unified {
            return Err(ConfigError::UnifiedCuda);
        }
        self.validate_page_size()?;
        self.validate_tiers()?;
        self.validate_numbers()?;
        quota::validate(self)?;
        if !self.spill_dir.is_absolute() {
            return Err(ConfigError::SpillDirRelative { path: self.spill_dir.clone() });
        }
        if let Err(error) = crate::log::check_filter(&self.log) {
            return Err(ConfigError::Log { message: error.to_string() });
        }
        for path in std::iter::once(&self.socket).chain(&self.metrics_socket) {
            let bytes = path.as_os_str().len();
            if bytes > SOCKET_PATH_BYTES_MAX {
                return Err(ConfigError::SocketPathLong { path: path.clone(), bytes });
            }
        }
        Ok(())
    }

    /// What can be used, and is rarely meant.
    #[must_use]
    pub fn warning(&self) -> Option<ConfigWarning> {
        let (vram, ram) = (self.vram_size()?, self.ram);
        // A unified device has no RAM tier to be small.
        (!self.unified && ram < vram).then_some(ConfigWarning::RamSmall { vram, ram })
    }

    fn validate_page_size(&self) -> Result<(), ConfigError> {
        let page_size = self.page_size;
        if !(PAGE_SIZE_MIN..=PAGE_SIZE_MAX).contains(&page_size) {
            return Err(ConfigError::PageSizeBounds { page_size: Size::from_bytes(page_size) });
        }
        if !page_size.is_power_of_two() {
            let above = page_size.next_power_of_two();
            return Err(ConfigError::PageSizePower {
                page_size,
                below: Size::from_bytes(above / 2),
                above: Size::from_bytes(above),
            });
        }
        Ok(())
    }

    fn validate_tiers(&self) -> Result<(), ConfigError> {
        let nvme = self.nvme_size();
        let ram_frames_min = if self.unified { 0 } else { RAM_FRAMES_MIN };
        let (page_size, ram_frame_size) = (self.page_size, self.ram_frame_size());
        let tiers = [
            ("vram", self.vram_size(), page_size, VRAM_FRAMES_MIN),
            ("ram", Some(self.ram), ram_frame_size, ram_frames_min),
            ("nvme", Some(nvme), page_size, 0),
        ];
        for (tier, size, frame_size, frames_min) in tiers {
            // A share is looked at once it is a size.
            let Some(size) = size else { continue };
            let frames = size.bytes() / frame_size;
            let of = |frames: u64| Size::from_bytes(frames * frame_size);
            if frames < frames_min {
                let size_min = of(frames_min);
                return Err(ConfigError::TierSmall {
                    tier,
                    size,
                    frame_size: of(1),
                    frames_min,
                    size_min,
                });
            }
            if frames > TIER_FRAMES_MAX {
                let size_max = of(TIER_FRAMES_MAX);
                return Err(ConfigError::TierLarge { tier, size, frame_size: of(1), size_max });
            }
        }
        // The bounds above keep these sums far from overflow.
        let (vram, ram, slots) = (self.vram_frames(), self.ram_frames(), self.spill_slots());
        if vram > ram + slots && self.unified {
            let nvme_min = Size::from_bytes(u64::from(vram) * page_size);
            return Err(ConfigError::UnifiedNvmeSmall {
                vram: self.vram_size().unwrap_or_default(),
                nvme,
                nvme_min,
            });
        }
        if vram > ram + slots {
            return Err(ConfigError::NowhereToEvict {
                vram: self.vram_size().unwrap_or_default(),
                ram: self.ram,
                nvme,
                ram_min: Size::from_bytes(u64::from(vram - slots) * ram_frame_size),
                nvme_min: Size::from_bytes(u64::from(vram.saturating_sub(ram)) * page_size),
            });
        }
        Ok(())
    }

    fn validate_numbers(&self) -> Result<(), ConfigError> {
        let limits = &self.limits;
        for (key, value, min, max) in [
            ("socket_mode", self.socket_mode, 0o600, 0o777),
            ("queue_depth", self.queue_depth, 1, 4096),
            ("copy_threads", self.copy_threads, 1, 64),
            ("sessions_max", limits.sessions_max, 1, 65_536),
            ("allocations_max", limits.allocations_max, 1, 1 << 20),
            ("mappings_max", limits.mappings_max, 1, 1 << 20),
            ("requests_max", limits.requests_max, 1, 65_536),
            ("pages_max", limits.pages_max, 1, 64 << 20),
        ] {
            if !(min..=max).contains(&value) {
                return Err(ConfigError::OutOfBounds { key, value, min, max });
            }
        }
        Ok(())
    }
}

/// Whole frames in a size. Saturates; [`Config::validate`] refuses sizes that get near it.
fn frames(size: Size, frame_size: u64) -> u32 {
    u32::try_from(size.bytes() / frame_size.max(1)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
