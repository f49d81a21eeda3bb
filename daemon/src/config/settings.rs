//! Settings as one source gives them: everything may be absent. The same fields are the keys of the file, the
//! flags of `lapisd` and, in capitals behind `LAPISD_`, the variables of its environment.

use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::error::ConfigError;
use super::gpu::GpuChoice;
use super::host::Host;
use super::quota::QuotaSettings;
use super::size::{Amount, Rate, Size};
use super::{Config, DeviceChoice, IoEngine};
use crate::log::LogFormat;

/// What one source says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Socket that clients connect to [default: /run/lapis/lapis.sock for root, else $XDG_RUNTIME_DIR/lapis.sock]
    #[arg(long, env = "LAPISD_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Permission bits of the socket, octal [default: 0660]
    #[arg(long, env = "LAPISD_SOCKET_MODE", value_name = "OCTAL")]
    pub socket_mode: Option<Mode>,
    /// Address and port that metrics and health are served on over HTTP, such as 127.0.0.1:9471; "" for none [default: none]
    #[arg(long, env = "LAPISD_METRICS", value_name = "ADDRESS")]
    pub metrics: Option<MetricsAddress>,
    /// Unix socket that they are served on as well, with the mode of the other; "" for none [default: none]
    #[arg(long, env = "LAPISD_METRICS_SOCKET", value_name = "PATH")]
    pub metrics_socket: Option<PathBuf>,
    /// What is logged: error, warn, info, debug, trace, or one per module; LAPIS_LOG and RUST_LOG go before it
    /// [default: info]
    #[arg(long, env = "LAPISD_LOG", value_name = "FILTER")]
    pub log: Option<String>,
    /// How it is logged [default: auto]
    #[arg(long, env = "LAPISD_LOG_FORMAT", value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
    /// Device that holds the VRAM tier [default: auto]
    #[arg(long, env = "LAPISD_DEVICE", value_name = "DEVICE")]
    pub device: Option<DeviceChoice>,
    /// GPU: its number among those that this process sees, or its UUID as `nvidia-smi -L` prints it [default: 0]
    #[arg(long, env = "LAPISD_GPU", value_name = "GPU")]
    pub gpu: Option<GpuChoice>,
    /// Library of the CUDA driver [default: the libcuda.so that the system finds]
    #[arg(long, env = "LAPISD_LIBCUDA", value_name = "FILE")]
    pub libcuda: Option<PathBuf>,
    /// Let the sim device play one that shares the host's memory, as integrated GPUs do: pages go from NVMe straight
    /// to VRAM, and there is no RAM tier [default: false]
    #[arg(long, env = "LAPISD_UNIFIED", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub unified: Option<bool>,
    /// VRAM tier, such as 24GiB; a share such as 80% is of the GPU's free memory [default: 1GiB]
    #[arg(long, env = "LAPISD_VRAM", value_name = "SIZE")]
    pub vram: Option<Amount>,
    /// RAM tier: pinned host memory, such as 64GiB; a share such as 50% is of the memory available to this process
    /// [default: 1GiB]
    #[arg(long, env = "LAPISD_RAM", value_name = "SIZE")]
    pub ram: Option<Amount>,
    /// NVMe tier: the spill file, such as 200GiB; a share is of the disk's free space [default: what vram needs
    /// beyond ram]
    #[arg(long, env = "LAPISD_NVME", value_name = "SIZE")]
    pub nvme: Option<Amount>,
    /// Directory of the spill file [default: /var/cache/lapis for root, else ~/.cache/lapis]
    #[arg(long, env = "LAPISD_SPILL_DIR", value_name = "DIR")]
    pub spill_dir: Option<PathBuf>,
    /// Size of a page, the unit of transfer: a power of two, 64KiB to 64MiB [default: 2MiB]
    #[arg(long, env = "LAPISD_PAGE_SIZE", value_name = "SIZE")]
    pub page_size: Option<Size>,
    /// Reads and writes of files in flight [default: 8]
    #[arg(long, env = "LAPISD_QUEUE_DEPTH", value_name = "N")]
    pub queue_depth: Option<u32>,
    /// Threads that copy between RAM and VRAM on the sim device [default: 1]
    #[arg(long, env = "LAPISD_COPY_THREADS", value_name = "N")]
    pub copy_threads: Option<u32>,
    /// Speed of copies on the sim device, such as 25GB/s [default: as fast as memory goes]
    #[arg(long, env = "LAPISD_LINK_BANDWIDTH", value_name = "RATE")]
    pub link_bandwidth: Option<Rate>,
    /// Time added to each copy on the sim device, in microseconds [default: 0]
    #[arg(long, env = "LAPISD_LINK_LATENCY_US", value_name = "US")]
    pub link_latency_us: Option<u32>,
    /// How files are read and written [default: auto]
    #[arg(long, env = "LAPISD_IO", value_name = "ENGINE")]
    pub io: Option<IoEngine>,
    /// Most open sessions [default: 1024]
    #[arg(long, env = "LAPISD_SESSIONS_MAX", value_name = "N")]
    pub sessions_max: Option<u32>,
    /// Most allocations of a session [default: 1024]
    #[arg(long, env = "LAPISD_ALLOCATIONS_MAX", value_name = "N")]
    pub allocations_max: Option<u32>,
    /// Most mappings of a session [default: 1024]
    #[arg(long, env = "LAPISD_MAPPINGS_MAX", value_name = "N")]
    pub mappings_max: Option<u32>,
    /// Most unanswered requests of a session [default: 1024]
    #[arg(long, env = "LAPISD_REQUESTS_MAX", value_name = "N")]
    pub requests_max: Option<u32>,
    /// Most pages of all allocations together [default: 4194304]
    #[arg(long, env = "LAPISD_PAGES_MAX", value_name = "N")]
    pub pages_max: Option<u32>,
    /// Longest wait of a map request, in seconds [default: 60]
    #[arg(long, env = "LAPISD_MAP_WAIT_MAX_S", value_name = "S")]
    pub map_wait_max_s: Option<u32>,
    /// Group whose members may change tiers and quotas, as root may; "" for none [default: lapis-admin, if it exists]
    #[arg(long, env = "LAPISD_ADMIN_GROUP", value_name = "GROUP")]
    pub admin_group: Option<String>,
    /// Quotas; only in the file, and last there, as tables come after keys.
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<Vec<QuotaSettings>>,
}

/// The keys of all `[[quota]]`, each with its place.
fn quota_keys<'a>(
    document: &'a toml::de::DeTable<'_>,
) -> impl Iterator<Item = (&'a str, Range<usize>)> {
    let quotas = document.get("quota").and_then(|quotas| quotas.get_ref().as_array());
    let tables = quotas.into_iter().flat_map(|quotas| quotas.iter());
    let keys = tables.filter_map(|table| table.get_ref().as_table()).flat_map(|table| table.keys());
    keys.map(|key| (key.get_ref().as_ref(), key.span()))
}

impl Settings {
    /// Reads a file.
    ///
    /// # Errors
    /// [`ConfigError::Read`], [`ConfigError::File`], [`ConfigError::UnknownKey`].
    pub fn read(path: &Path) -> Result<Settings, ConfigError> {
        let text = fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Settings::parse(path, &text)
    }

    /// Reads a file's text; `path` is for errors.
    ///
    /// # Errors
    /// [`ConfigError::File`], [`ConfigError::UnknownKey`].
    pub fn parse(path: &Path, text: &str) -> Result<Settings, ConfigError> {
        let line = |span: Option<Range<usize>>| {
            let before = text.get(..span.map_or(0, |span| span.start)).unwrap_or_default();
            before.bytes().filter(|byte| *byte == b'\n').count() + 1
        };
        let error = |key: Option<String>, error: &toml::de::Error| ConfigError::File {
            path: path.to_owned(),
            line: line(error.span()),
            key,
            message: error.message().to_owned(),
        };
        let document = toml::de::DeTable::parse(text).map_err(|source| error(None, &source))?;
        let known = Settings::keys();
        for key in document.get_ref().keys() {
            let name = key.get_ref().as_ref();
            if name != "quota" && !known.iter().any(|known| known == name) {
                return Err(ConfigError::UnknownKey {
                    path: path.to_owned(),
                    line: line(Some(key.span())),
                    key: name.to_owned(),
                    nearest: Settings::nearest_key(name),
                });
            }
        }
        let misplaced = |(name, _): &(&str, _)| {
            known.iter().any(|known| known == name) && !QuotaSettings::KEYS.contains(name)
        };
        if let Some((key, span)) = quota_keys(document.get_ref()).find(misplaced) {
            return Err(ConfigError::SettingInQuota {
                path: path.to_owned(),
                line: line(Some(span)),
                key: key.to_owned(),
            });
        }
        toml::from_str(text).map_err(|source| {
            let at = source.span().map_or(0, |span| span.start);
            let holds = |value: &toml::Spanned<_>| value.span().contains(&at);
            let mut entries = document.get_ref().iter();
            let key =
                entries.find(|(_, value)| holds(value)).map(|(key, _)| key.get_ref().to_string());
            error(key, &source)
        })
    }

    /// Names of all settings but the quotas, from the one list of them that there is: the fields, as flags.
    #[must_use]
    pub fn keys() -> Vec<String> {
        let command = <Settings as clap::Args>::augment_args(clap::Command::new("settings"));
        command.get_arguments().map(|argument| argument.get_id().to_string()).collect()
    }

    /// The setting whose name is least far from `name`, if it is near enough to be what was meant.
    #[must_use]
    pub fn nearest_key(name: &str) -> Option<String> {
        let name = name.to_lowercase().replace('-', "_");
        let keys = Settings::keys().into_iter();
        let (distance, key) = keys.map(|key| (distance(&name, &key), key)).min()?;
        (distance <= 2.max(name.len() / 3)).then_some(key)
    }

    /// These settings, and those of `lower` where these say nothing.
    #[must_use]
    pub fn over(self, lower: Settings) -> Settings {
        Settings {
            socket: self.socket.or(lower.socket),
            socket_mode: self.socket_mode.or(lower.socket_mode),
            metrics: self.metrics.or(lower.metrics),
            metrics_socket: self.metrics_socket.or(lower.metrics_socket),
            log: self.log.or(lower.log),
            log_format: self.log_format.or(lower.log_format),
            device: self.device.or(lower.device),
            gpu: self.gpu.or(lower.gpu),
            libcuda: self.libcuda.or(lower.libcuda),
            unified: self.unified.or(lower.unified),
            vram: self.vram.or(lower.vram),
            ram: self.ram.or(lower.ram),
            nvme: self.nvme.or(lower.nvme),
            spill_dir: self.spill_dir.or(lower.spill_dir),
            page_size: self.page_size.or(lower.page_size),
            queue_depth: self.queue_depth.or(lower.queue_depth),
            copy_threads: self.copy_threads.or(lower.copy_threads),
            link_bandwidth: self.link_bandwidth.or(lower.link_bandwidth),
            link_latency_us: self.link_latency_us.or(lower.link_latency_us),
            io: self.io.or(lower.io),
            sessions_max: self.sessions_max.or(lower.sessions_max),
            allocations_max: self.allocations_max.or(lower.allocations_max),
            mappings_max: self.mappings_max.or(lower.mappings_max),
            requests_max: self.requests_max.or(lower.requests_max),
            pages_max: self.pages_max.or(lower.pages_max),
            map_wait_max_s: self.map_wait_max_s.or(lower.map_wait_max_s),
            admin_group: self.admin_group.or(lower.admin_group),
            quota: self.quota.or(lower.quota),
        }
    }

    /// Fills in defaults and turns shares into sizes. Validates nothing else.
    ///
    /// # Errors
    /// [`ConfigError::NoDefault`], [`ConfigError::ShareOfSim`], [`ConfigError::ShareOfUnknown`],
    /// [`ConfigError::NoSuchName`], [`ConfigError::NameUnknown`], [`ConfigError::UnifiedRam`].
    pub fn resolve(self, host: &Host) -> Result<Config, ConfigError> {
        let admin_gid = self.admin_gid(host)?;
        let socket = self.socket.or_else(|| host.socket()).ok_or(ConfigError::NoDefault {
            key: "socket",
            why: "XDG_RUNTIME_DIR is not set, and only root listens in /run/lapis",
        })?;
        let spill_dir = self.spill_dir.or_else(|| host.spill_dir()).ok_or(ConfigError::NoDefault {
            key: "spill_dir",
            why: "neither XDG_CACHE_HOME nor HOME is set, and only root spills to /var/cache/lapis",
        })?;
        let mut config = Config::new(socket, spill_dir);
        config.metrics = self.metrics.and_then(|MetricsAddress(address)| address);
        let named = |path: &PathBuf| !path.as_os_str().is_empty();
        config.metrics_socket = self.metrics_socket.filter(named);
        set(&mut config.log, self.log);
        set(&mut config.log_format, self.log_format);
        set(&mut config.device, self.device);
        set(&mut config.vram, self.vram);
        set(&mut config.unified, self.unified);
        if matches!(config.vram, Amount::Share(_))
            && (config.unified || config.device == DeviceChoice::Sim)
        {
            return Err(ConfigError::ShareOfSim);
        }
        (config.gpu, config.libcuda) = (self.gpu, self.libcuda);
        if config.unified && self.ram.is_some() {
            return Err(ConfigError::UnifiedRam);
        }
        if let Some(ram) = self.ram {
            config.ram = size_of("ram", ram, "the available memory", host.memory_available)?;
        }
        if let Some(nvme) = self.nvme {
            let free = || (host.disk_free)(&config.spill_dir);
            config.nvme = Some(size_of("nvme", nvme, "the disk's free space", free)?);
        }
        set(&mut config.socket_mode, self.socket_mode.map(|Mode(bits)| bits));
        set(&mut config.page_size, self.page_size.map(Size::bytes));
        set(&mut config.queue_depth, self.queue_depth);
        set(&mut config.copy_threads, self.copy_threads);
        set(&mut config.io, self.io);
        config.link.bandwidth = self.link_bandwidth.or(config.link.bandwidth);
        let micros = |us: u32| Duration::from_micros(u64::from(us));
        set(&mut config.link.latency, self.link_latency_us.map(micros));
        set(&mut config.limits.sessions_max, self.sessions_max);
        set(&mut config.limits.allocations_max, self.allocations_max);
        set(&mut config.limits.mappings_max, self.mappings_max);
        set(&mut config.limits.requests_max, self.requests_max);
        set(&mut config.limits.pages_max, self.pages_max);
        let seconds = |s: u32| Duration::from_secs(u64::from(s));
        set(&mut config.limits.map_wait_max, self.map_wait_max_s.map(seconds));
        config.admin_gid = admin_gid;
        // Last: shares are of the tiers.
        let quotas = self.quota.unwrap_or_default();
        let quotas = quotas.iter().map(|quota| quota.resolve(host, &config));
        config.quotas = quotas.collect::<Result<_, _>>()?;
        Ok(config)
    }

    /// As the text of a file.
    #[must_use]
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("numbers and texts, then tables of them, are a TOML document")
    }
}

impl From<&Config> for Settings {
    /// Settings that make this configuration again, on any host.
    fn from(config: &Config) -> Settings {
        Settings {
            socket: Some(config.socket.clone()),
            socket_mode: Some(Mode(config.socket_mode)),
            metrics: Some(MetricsAddress(config.metrics)),
            metrics_socket: Some(config.metrics_socket.clone().unwrap_or_default()),
            log: Some(config.log.clone()),
            log_format: Some(config.log_format),
            device: Some(config.device),
            gpu: config.gpu,
            libcuda: config.libcuda.clone(),
            unified: Some(config.unified),
            vram: Some(config.vram),
            ram: (!config.unified).then_some(Amount::Fixed(config.ram)),
            // What vram needs, if that is not known yet.
            nvme: (config.nvme.or(config.vram_size()).is_some())
                .then(|| Amount::Fixed(config.nvme_size())),
            spill_dir: Some(config.spill_dir.clone()),
            page_size: Some(Size::from_bytes(config.page_size)),
            queue_depth: Some(config.queue_depth),
            copy_threads: Some(config.copy_threads),
            link_bandwidth: config.link.bandwidth,
            link_latency_us: u32::try_from(config.link.latency.as_micros()).ok(),
            io: Some(config.io),
            sessions_max: Some(config.limits.sessions_max),
            allocations_max: Some(config.limits.allocations_max),
            mappings_max: Some(config.limits.mappings_max),
            requests_max: Some(config.limits.requests_max),
            pages_max: Some(config.limits.pages_max),
            map_wait_max_s: u32::try_from(config.limits.map_wait_max.as_secs()).ok(),
            admin_group: Some(config.admin_gid.map(|gid| gid.to_string()).unwrap_or_default()),
            quota: (!config.quotas.is_empty())
                .then(|| config.quotas.iter().map(QuotaSettings::from).collect()),
        }
    }
}

fn set<T>(target: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *target = value;
    }
}

fn size_of(
    key: &'static str,
    amount: Amount,
    of: &'static str,
    available: impl FnOnce() -> std::io::Result<u64>,
) -> Result<Size, ConfigError> {
    match amount {
        Amount::Fixed(size) => Ok(size),
        Amount::Share(_) => match available() {
            Ok(available) => Ok(amount.of(available)),
            Err(source) => Err(ConfigError::ShareOfUnknown { key, of, source }),
        },
    }
}

/// Insertions, deletions and replacements that make one text of another.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (above, one) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = above + 1;
        for (left, other) in other.iter().enumerate() {
            let replaced = diagonal + usize::from(one != *other);
            diagonal = row[left + 1];
            row[left + 1] = replaced.min(diagonal + 1).min(row[left] + 1);
        }
    }
    row[other.len()]
}

/// Address and port to serve metrics on; none in an empty text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MetricsAddress(pub Option<SocketAddr>);

/// A text is no address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no address and port; write them as 127.0.0.1:9471 or [::1]:9471")]
pub struct MetricsAddressError {
    text: String,
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |address| address.fmt(f))
    }
}

impl FromStr for MetricsAddress {
    type Err = MetricsAddressError;

    fn from_str(text: &str) -> Result<MetricsAddress, MetricsAddressError> {
        if text.is_empty() {
            return Ok(MetricsAddress(None));
        }
        let address = text.parse().map_err(|_| MetricsAddressError { text: text.to_owned() })?;
        Ok(MetricsAddress(Some(address)))
    }
}

impl Serialize for MetricsAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MetricsAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<MetricsAddress, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Permission bits; octal in text: `0660`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mode(pub u32);

/// A text is no permission bits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no octal mode; write it as \"0660\"")]
pub struct ModeError {
    text: String,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl FromStr for Mode {
    type Err = ModeError;

    fn from_str(text: &str) -> Result<Mode, ModeError> {
        let digits = text.strip_prefix("0o").unwrap_or(text);
        u32::from_str_radix(digits, 8).map(Mode).map_err(|_| ModeError { text: text.to_owned() })
    }
}

impl Serialize for Mode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Mode, D::Error> {
        // Only text: `660` as a number would be decimal, and mean something else.
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
