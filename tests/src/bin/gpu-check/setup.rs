//! The command line.

use std::path::PathBuf;

const USAGE: &str = "\
usage: gpu-check [OPTIONS]
  --programs DIR   where lapisd and lapisctl are (where gpu-check is)
  --json FILE      where to write the results for programs (none)
  --scratch DIR    where to make files of some GiB, on the disk to measure (--programs)
  --seconds N      give up after so long (270)
  --only NAME      only this probe; may be given several times
  --quick          small sizes, one round";

/// What a run is told.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) programs: PathBuf,
    pub(crate) scratch: PathBuf,
    pub(crate) json: Option<PathBuf>,
    pub(crate) seconds: u64,
    pub(crate) only: Vec<String>,
    pub(crate) quick: bool,
}

/// What this process is for.
pub(crate) enum Mode {
    /// Run every probe, each in a process of its own.
    All,
    /// Be one of them.
    Probe(String),
    /// Be the other process of a probe.
    Role(Vec<String>),
}

impl Setup {
    pub(crate) fn parse(arguments: impl Iterator<Item = String>) -> Result<(Setup, Mode), String> {
        let own = std::env::current_exe().map_err(|error| format!("gpu-check: {error}"))?;
        let programs = own.parent().map(PathBuf::from).unwrap_or_default();
        let mut mode = Mode::All;
        let mut setup = Setup {
            scratch: PathBuf::new(),
            programs,
            json: None,
            seconds: 270,
            only: Vec::new(),
            quick: false,
        };
        let mut arguments = arguments.peekable();
        while let Some(flag) = arguments.next() {
            if flag == "--quick" {
                setup.quick = true;
                continue;
            }
            if flag == "--role" {
                mode = Mode::Role(arguments.by_ref().collect());
                break;
            }
            let value = arguments.next().ok_or(USAGE)?;
            match flag.as_str() {
                "--programs" => setup.programs = value.into(),
                "--json" => setup.json = Some(value.into()),
                "--scratch" => setup.scratch = value.into(),
                "--seconds" => setup.seconds = value.parse().map_err(|_| USAGE)?,
                "--only" => setup.only.push(value),
                "--probe" => mode = Mode::Probe(value),
                _ => return Err(USAGE.to_owned()),
            }
        }
        if setup.scratch.as_os_str().is_empty() {
            setup.scratch.clone_from(&setup.programs);
        }
        Ok((setup, mode))
    }

    /// One size or the other.
    pub(crate) fn pick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }
}
