//! `lapisd`, the Lapis daemon: reads the configuration, starts the log, runs the reactor until it is told to stop.

use std::ffi::OsStr;
use std::fs::DirBuilder;
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use lapisd::config::{Config, ConfigError, Host, Settings, Size};
use lapisd::log::Log;
use lapisd::reactor::{self, Service, StartError};
use lapisd::sys::systemd::{self, Notifier};

/// The daemon failed while it ran or could not start.
const EXIT_FAILURE: u8 = 1;
/// The command line or the configuration can't be used; clap ends with the same.
const EXIT_USAGE: u8 = 2;

/// Gives client processes more GPU memory than the card has: VRAM, RAM and NVMe as one tiered store.
///
/// Settings come from the defaults, then the file, then the environment, then the flags; the last one wins. Sizes
/// are numbers with a unit: KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB, TB (powers of 1000); without one
/// they are bytes.
#[derive(Debug, Parser)]
#[command(name = "lapisd", version, after_help = AFTER_HELP)]
struct Cli {
    /// Configuration file: TOML, the long flags' names with `_` for `-` as keys
    #[arg(long, env = "LAPISD_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the configuration, print what is in effect as TOML, and exit
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    settings: Settings,
}

const AFTER_HELP: &str = "\
Log: to the journal under systemd, else to standard error; LAPIS_LOG (else RUST_LOG) goes before --log.
Metrics: with --metrics ADDRESS, http://ADDRESS/metrics is for Prometheus; /healthz and /readyz answer 200 or 503.
Signals: TERM and INT stop the daemon cleanly; HUP reads the configuration again: log, quotas, admin_group and the \
sizes of tiers change at once, the log says what does not.
Exit status: 0 stopped as told, 1 failure, 2 wrong usage or configuration.";

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let config = config_error(&error);
            let fix = config.map(|error| format!("\nfix: {}", error.fix())).unwrap_or_default();
            // Nothing is left to tell that standard error is closed.
            let _closed = writeln!(std::io::stderr(), "error: {}{fix}", chain(&error));
            ExitCode::from(if config.is_some() { EXIT_USAGE } else { EXIT_FAILURE })
        }
    }
}

fn config_error(error: &anyhow::Error) -> Option<&ConfigError> {
    match error.downcast_ref::<StartError>() {
        Some(StartError::Config(error)) => Some(error),
        _ => error.downcast_ref(),
    }
}

/// The message with its causes, each once: some messages quote their cause already.
fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for message in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = message;
        } else if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
    }
    text
}

fn run(cli: Cli) -> anyhow::Result<()> {
    let host = Host::of_process();
    let Cli { config: file, check, settings } = cli;
    let config = Config::load(file.as_deref(), settings.clone(), &host)?;
    if check {
        if let Some(warning) = config.warning() {
            // Nothing is left to tell that standard error is closed.
            let _closed = writeln!(std::io::stderr(), "warning: {warning}");
        }
        let text = Settings::from(&config).to_toml();
        return std::io::stdout()
            .write_all(text.as_bytes())
            .context("cannot print the configuration");
    }
    // Before any descriptor is opened.
    let inherited = systemd::inherit().map_err(StartError::from)?;
    let log = Log::start(&config.log, config.log_format)?;
    for (variable, meant) in unknown_variables(std::env::vars_os().map(|(name, _)| name)) {
        tracing::warn!("{variable} is ignored: no setting has that name{meant}");
    }
    announce(&config);
    if let Some(warning) = config.warning() {
        tracing::warn!("{warning}");
    }
    make_default_directories(&config, &host)?;
    let reload = move || {
        let loaded = Config::load(file.as_deref(), settings.clone(), &host);
        let config = loaded.map_err(|error| format!("{error}; {}", error.fix()))?;
        log.set(&config.log).map_err(|error| error.to_string())?;
        Ok(config)
    };
    let notifier = Notifier::from_environment();
    Ok(reactor::run(&config, Service { notifier, inherited, reload: Box::new(reload) })?)
}

/// Makes the directories of the default paths; systemd has made them already where it runs the daemon. A directory
/// that was configured is not made: if it is missing, its disk may just not be mounted.
fn make_default_directories(config: &Config, host: &Host) -> anyhow::Result<()> {
    let make = |path: &Path, mode: u32| {
        let made = DirBuilder::new().recursive(true).mode(mode).create(path);
        made.with_context(|| format!("cannot make the directory {}", path.display()))
    };
    // What a share of VRAM comes to, and so what it spills, is not known yet.
    let spills = config.spill_slots() > 0 || config.nvme.or(config.vram_size()).is_none();
    if spills && host.spill_dir().as_ref() == Some(&config.spill_dir) {
        make(&config.spill_dir, 0o700)?;
    }
    if host.root && host.socket().as_ref() == Some(&config.socket) {
        config.socket.parent().map_or(Ok(()), |directory| make(directory, 0o755))?;
    }
    Ok(())
}

/// What the daemon is going to be, for the log.
fn announce(config: &Config) {
    let nvme = match config.nvme.or(config.vram_size()) {
        Some(_) => config.nvme_size().to_string(),
        None => "what vram needs beyond ram".to_owned(),
    };
    tracing::info!(
        vram = %config.vram,
        ram = %config.ram,
        nvme = %nvme,
        page_size = %Size::from_bytes(config.page_size),
        socket = %config.socket.display(),
        spill_dir = %config.spill_dir.display(),
        "lapisd {} starts", env!("CARGO_PKG_VERSION"),
    );
}

/// Variables that look like settings and are none, each with what was probably meant.
fn unknown_variables<N: AsRef<OsStr>>(names: impl Iterator<Item = N>) -> Vec<(String, String)> {
    let known = Settings::keys();
    let names = names.filter_map(|name| name.as_ref().to_str().map(str::to_owned));
    names
        .filter_map(|variable| {
            let name = variable.strip_prefix("LAPISD_")?.to_lowercase();
            if name == "config" || known.contains(&name) {
                return None;
            }
            let meant = Settings::nearest_key(&name)
                .map(|key| format!("; did you mean LAPISD_{}?", key.to_uppercase()))
                .unwrap_or_default();
            Some((variable, meant))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_become_settings() {
        let cli = Cli::try_parse_from([
            "lapisd",
            "--config",
            "/etc/l.toml",
            "--check",
            "--vram",
            "24GiB",
            "--ram",
            "50%",
            "--page-size",
            "4MiB",
            "--device",
            "sim",
            "--socket-mode",
            "0600",
            "--link-bandwidth",
            "25GB/s",
        ])
        .unwrap();
        assert_eq!(cli.config, Some("/etc/l.toml".into()));
        assert!(cli.check);
        assert_eq!(
            cli.settings.to_toml(),
            "socket_mode = \"0600\"\ndevice = \"sim\"\nvram = \"24GiB\"\nram = \"50%\"\n\
             page_size = \"4MiB\"\nlink_bandwidth = \"25GB/s\"\n"
        );
    }

    #[test]
    fn a_bad_size_is_refused_with_its_flag() {
        let error = Cli::try_parse_from(["lapisd", "--vram", "24G"]).unwrap_err().to_string();
        assert!(
            error.contains("'--vram <SIZE>': `G` is no unit; use GiB (1024 MiB) or GB"),
            "{error}"
        );
    }

    #[test]
    fn only_default_directories_are_made() {
        let home = tempfile::tempdir().unwrap();
        let cache_dir = Some(home.path().join("cache"));
        let host = Host { root: false, cache_dir, ..Host::of_process() };
        let config = |spill_dir: PathBuf, vram| Config {
            vram: Size::gib(vram).into(),
            ..Config::new("/nowhere/lapis.sock".into(), spill_dir)
        };
        let default = home.path().join("cache/lapis");
        make_default_directories(&config(home.path().join("disk"), 2), &host).unwrap();
        assert!(!home.path().join("disk").exists());
        let no_spill = Config { ram: Size::gib(2), ..config(default.clone(), 1) };
        make_default_directories(&no_spill, &host).unwrap();
        assert!(!default.exists());
        make_default_directories(&config(default.clone(), 2), &host).unwrap();
        assert!(default.is_dir());
    }

    #[test]
    fn misspelt_variables_are_noticed() {
        let names = ["LAPISD_VRAM", "LAPISD_CONFIG", "LAPISD_VRM", "LAPISD_COLOURFUL", "PATH"];
        assert_eq!(
            unknown_variables(names.iter()),
            [
                ("LAPISD_VRM".to_owned(), "; did you mean LAPISD_VRAM?".to_owned()),
                ("LAPISD_COLOURFUL".to_owned(), String::new()),
            ]
        );
    }
}
