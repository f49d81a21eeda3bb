//! Finds the daemon to use, or starts one inside this process.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use lapis::{Client, ConnectOptions};
use lapisd::config::{Amount, Config, DeviceChoice, Host, Rate, Settings, Size};
use lapisd::reactor::{Embedded, StartError};

use crate::failure::Failure;

/// VRAM tier of an embedded daemon: smaller than the demonstration model, so that every tier has work.
const VRAM_DEFAULT: Size = Size::mib(128);
/// RAM tier of an embedded daemon: likewise.
const RAM_DEFAULT: Size = Size::mib(256);

/// Which daemon to use.
#[derive(Debug, clap::Args)]
pub(crate) struct Target {
    /// Use the daemon at this socket, and no other
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Use a daemon of its own inside this command, even if another one runs
    #[arg(long, conflicts_with = "socket")]
    pub(crate) embedded: bool,
    #[command(flatten)]
    pub(crate) tiers: Tiers,
}

/// Settings of an embedded daemon.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Embedded daemon")]
pub(crate) struct Tiers {
    /// VRAM tier of an embedded daemon, such as 1GiB [default: 128MiB]
    #[arg(long, value_name = "SIZE")]
    pub(crate) vram: Option<Amount>,
    /// RAM tier of an embedded daemon; a share such as 50% is of the available memory [default: 256MiB]
    #[arg(long, value_name = "SIZE")]
    pub(crate) ram: Option<Amount>,
    /// NVMe tier of an embedded daemon [default: what VRAM needs beyond RAM]
    #[arg(long, value_name = "SIZE")]
    pub(crate) nvme: Option<Amount>,
    /// Size of a page of an embedded daemon: a power of two, 64KiB to 64MiB [default: 2MiB]
    #[arg(long, value_name = "SIZE")]
    pub(crate) page_size: Option<Size>,
    /// Speed of copies between RAM and VRAM of an embedded daemon, such as 25GB/s [default: as fast as memory goes]
    #[arg(long, value_name = "RATE")]
    pub(crate) link_bandwidth: Option<Rate>,
}

impl Tiers {
    /// The flags that were given.
    fn given(&self) -> String {
        let flags = [
            ("--vram", self.vram.is_some()),
            ("--ram", self.ram.is_some()),
            ("--nvme", self.nvme.is_some()),
            ("--page-size", self.page_size.is_some()),
            ("--link-bandwidth", self.link_bandwidth.is_some()),
        ];
        let given: Vec<&str> =
            flags.iter().filter(|(_, given)| *given).map(|(flag, _)| *flag).collect();
        given.join(", ")
    }

    /// The configuration of an embedded daemon.
    pub(crate) fn config(&self, spill_dir: PathBuf, host: &Host) -> Result<Config, Failure> {
        let settings = Settings {
            // Replaced by the embedded daemon's private one.
            socket: Some("lapis.sock".into()),
            device: Some(DeviceChoice::Sim),
            vram: self.vram.or(Some(Amount::Fixed(VRAM_DEFAULT))),
            ram: self.ram.or(Some(Amount::Fixed(RAM_DEFAULT))),
            nvme: self.nvme,
            page_size: self.page_size,
            link_bandwidth: self.link_bandwidth,
            spill_dir: Some(spill_dir),
            ..Settings::default()
        };
        Ok(Config::load(None, settings, host)?)
    }
}

/// A connection, and the daemon behind it if it runs in this process.
#[derive(Debug)]
pub(crate) struct Daemon {
    // Fields are dropped in this order: the client must say goodbye while the daemon still runs.
    pub(crate) client: Client,
    embedded: Option<Embedded>,
    _spill: Option<SpillDir>,
    pub(crate) socket: PathBuf,
}

impl Daemon {
    pub(crate) fn is_embedded(&self) -> bool {
        self.embedded.is_some()
    }
}

impl Target {
    /// Connects, or starts a daemon in a directory of `cache`. `note` is told what was chosen if nobody asked for it.
    pub(crate) fn connect(
        &self,
        cache: impl FnOnce() -> Result<PathBuf, Failure>,
        host: &Host,
        note: impl FnOnce(&str),
    ) -> Result<Daemon, Failure> {
        if self.embedded {
            return self.embed(&cache()?, host);
        }
        let named = self.socket.is_some()
            || std::env::var_os("LAPIS_SOCKET").is_some_and(|name| !name.is_empty());
        let socket = self.socket.clone().unwrap_or_else(lapis::default_socket);
        match connect(&socket) {
            Ok(client) => {
                let flags = self.tiers.given();
                if !flags.is_empty() {
                    return Err(Failure::TierFlags { flags, socket });
                }
                Ok(Daemon { client, embedded: None, _spill: None, socket })
            }
            Err(error) if !named && is_absent(&error) => {
                note(&format!("no daemon at {}: starting an embedded one", socket.display()));
                self.embed(&cache()?, host)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn embed(&self, cache: &Path, host: &Host) -> Result<Daemon, Failure> {
        let spill = SpillDir::make(cache)?;
        let config = self.tiers.config(spill.0.clone(), host)?;
        let embedded = Embedded::start(config).map_err(|error| match error {
            StartError::Config(error) => Failure::Config(error),
            error => Failure::Start(error),
        })?;
        let socket = embedded.socket().to_owned();
        let client = connect(&socket)?;
        Ok(Daemon { client, embedded: Some(embedded), _spill: Some(spill), socket })
    }
}

/// Connects to a daemon that is there.
pub(crate) fn connect(socket: &Path) -> Result<Client, lapis::Error> {
    ConnectOptions {
        socket: Some(socket.to_owned()),
        name: "lapisctl".to_owned(),
        ..ConnectOptions::default()
    }
    .connect()
}

/// Whether there is no daemon, rather than one that can't be used.
pub(crate) fn is_absent(error: &lapis::Error) -> bool {
    matches!(error, lapis::Error::Connect { source, .. }
        if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused))
}

/// A spill directory of this process alone, so that several embedded daemons never share one. Removed at the end.
#[derive(Debug)]
struct SpillDir(PathBuf);

impl SpillDir {
    fn make(cache: &Path) -> Result<SpillDir, Failure> {
        let path = cache.join(format!("embedded-{}", std::process::id()));
        // It may be there from an earlier process with the same id.
        match fs::create_dir_all(&path) {
            Ok(()) => Ok(SpillDir(path)),
            Err(source) => Err(Failure::Cache { action: "make", path, source }),
        }
    }
}

impl Drop for SpillDir {
    fn drop(&mut self) {
        // What is left behind takes no space: the spill file has no name.
        let _left = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(tiers: Tiers) -> Target {
        Target { socket: Some("/nowhere/lapis.sock".into()), embedded: false, tiers }
    }

    #[test]
    fn a_named_socket_without_a_daemon_is_an_error() {
        let target = target(Tiers::default());
        let cache = || -> Result<PathBuf, Failure> { panic!("nothing is embedded") };
        let error = target.connect(cache, &Host::of_process(), |_| ()).unwrap_err();
        assert_eq!(error.exit() as u8, 3, "{error}");
    }

    #[test]
    fn tier_flags_are_listed() {
        let tiers = Tiers {
            vram: Some(Amount::Fixed(Size::mib(8))),
            page_size: Some(Size::kib(64)),
            ..Tiers::default()
        };
        assert_eq!(tiers.given(), "--vram, --page-size");
        assert_eq!(Tiers::default().given(), "");
    }

    #[test]
    fn an_embedded_daemon_is_small_unless_told_otherwise() {
        let config = |tiers: Tiers| tiers.config("/cache/embedded-1".into(), &Host::of_process());
        let small = config(Tiers::default()).unwrap();
        assert_eq!((small.vram_frames(), small.ram_frames(), small.spill_slots()), (64, 127, 0));
        let large = config(Tiers { vram: Some(Amount::Fixed(Size::mib(300))), ..Tiers::default() })
            .unwrap();
        assert_eq!((large.vram_frames(), large.ram_frames(), large.spill_slots()), (150, 127, 23));
        let error = config(Tiers { ram: Some(Amount::Fixed(Size::mib(2))), ..Tiers::default() })
            .unwrap_err();
        assert_eq!(error.exit() as u8, 2);
    }

    #[test]
    fn a_spill_directory_is_removed_at_the_end() {
        let cache = tempfile::tempdir().unwrap();
        let spill = SpillDir::make(cache.path()).unwrap();
        let path = spill.0.clone();
        assert!(path.is_dir());
        drop(spill);
        assert!(!path.exists());
    }
}
