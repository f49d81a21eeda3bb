//! Errors on demand: `FAKE_CUDA_FAULTS`, the file `faults`, and `fakeCudaFail`.
//!
//! A fault is `SYMBOL:AFTER:CODE[:TIMES]`: the first AFTER calls of SYMBOL in this process pass, the next TIMES (1 if not given)
//! return CODE and do nothing. The symbol `work` stands for the execution of queued copies and fills.
//! A sticky code also breaks the context that the call is made in.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use crate::code::Code;
use crate::config;

/// The pseudo-symbol of queued copies and fills.
pub(crate) const WORK: &str = "work";

#[derive(Clone, Debug)]
struct Fault {
    symbol: String,
    after: u64,
    code: u32,
    times: u64,
}

/// Which file it is, when it was last written, and how long it is: one put in its place at once differs in the first.
type Stamp = Option<(u64, SystemTime, u64)>;

#[derive(Debug, Default)]
struct Faults {
    own: Vec<Fault>,
    of_file: Vec<Fault>,
    file: PathBuf,
    seen: Stamp,
}

/// Adds one fault. False when there is no such symbol.
pub(crate) fn add(symbol: &str, after: u64, code: u32, times: u64) -> bool {
    let known = is_known(symbol);
    if known {
        let fault = Fault { symbol: symbol.to_owned(), after, code, times };
        with(|faults| faults.own.push(fault));
    }
    known
}

/// Forgets all faults but those of the file.
pub(crate) fn clear() {
    with(|faults| faults.own.clear());
}

/// Counts a call of `symbol`; the code that it must fail with, if it must.
pub(crate) fn take(symbol: &str) -> Option<Code> {
    with(|faults| {
        faults.reread();
        let mut all = faults.own.iter_mut().chain(&mut faults.of_file);
        all.find_map(|fault| fault.count(symbol))
    })
}

/// What is wrong with the faults asked for in the environment, if anything.
pub(crate) fn check_environment() -> Result<(), String> {
    from_environment().map(drop)
}

fn with<T>(body: impl FnOnce(&mut Faults) -> T) -> T {
    static FAULTS: OnceLock<Mutex<Faults>> = OnceLock::new();
    let faults = FAULTS.get_or_init(|| {
        // What is wrong with them is said by `cuInit`.
        let own = from_environment().unwrap_or_default();
        let file = config::directory().join("faults");
        Mutex::new(Faults { own, file, ..Faults::default() })
    });
    body(&mut faults.lock().unwrap_or_else(PoisonError::into_inner))
}

fn from_environment() -> Result<Vec<Fault>, String> {
    let list = std::env::var("FAKE_CUDA_FAULTS").unwrap_or_default();
    let items = list.split(',').filter(|item| !item.trim().is_empty());
    items
        .map(|item| {
            Fault::parse(item.trim())
                .ok_or_else(|| format!("FAKE_CUDA_FAULTS: {item}: not a fault"))
        })
        .collect()
}

fn is_known(symbol: &str) -> bool {
    symbol == WORK || crate::api::names().any(|name| name == symbol)
}

impl Fault {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let symbol = parts.next()?.to_owned();
        let after = parts.next()?.parse().ok()?;
        let code = parts.next()?.parse().ok()?;
        let times = parts.next().map_or(Some(1), |times| times.parse().ok())?;
        (is_known(&symbol) && parts.next().is_none()).then_some(Self { symbol, after, code, times })
    }

    fn count(&mut self, symbol: &str) -> Option<Code> {
        if self.symbol != symbol || self.times == 0 {
            return None;
        }
        if self.after > 0 {
            self.after -= 1;
            return None;
        }
        self.times -= 1;
        Some(Code(self.code))
    }
}

impl Faults {
    /// Takes the file's faults anew when it was written to.
    fn reread(&mut self) {
        let found = std::fs::metadata(&self.file).ok();
        let stamp =
            found.and_then(|found| Some((found.ino(), found.modified().ok()?, found.len())));
        if stamp == self.seen {
            return;
        }
        self.seen = stamp;
        let text = std::fs::read_to_string(&self.file).unwrap_or_default();
        self.of_file.clear();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            match Fault::parse(line.trim()) {
                Some(fault) => self.of_file.push(fault),
                None => eprintln!("fake-cuda: {}: {line}: not a fault", self.file.display()),
            }
        }
    }
}
