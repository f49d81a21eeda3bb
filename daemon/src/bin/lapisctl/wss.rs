//! `lapisctl wss`: what sessions use again and again, and what more or less VRAM would do for them.

mod plot;

use std::path::PathBuf;

use lapis::{AccessPattern, Counters, Recency, SessionId, SessionSet, WorkingSets};
use serde::Serialize;

use crate::connect;
use crate::failure::Failure;
use crate::output::{self, Format};
use crate::text::{self, Table};

/// Version of the JSON's fields.
const SCHEMA: u32 = 1;
/// What the windows of a working set are called, in the order of the message.
const WINDOWS: [&str; 3] = ["10 s", "1 min", "10 min"];
const WINDOWS_SECONDS: [u32; 3] = [10, 60, 600];
/// Columns of a plot where nobody says how wide the output is.
const WIDTH_DEFAULT: usize = 80;

/// Shows working sets, access patterns and what VRAM of other sizes would hit
///
/// Administrators see all sessions, others those of their own user. With SESSION, one of them with its curve. The
/// hit ratio is of the session alone, and at least: with a plan or a cycle that of the best eviction there is, else that of LRU.
#[derive(Debug, clap::Args)]
pub(crate) struct Wss {
    /// The number of a session, as the list of all shows it
    session: Option<u64>,
    /// The daemon's socket
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// How to print it
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    output: Format,
}

impl Wss {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let socket = self.socket.clone().unwrap_or_else(lapis::default_socket);
        let client = connect::connect(&socket)?;
        let of = self.session.map(SessionId);
        let own = client.welcome().session;
        let mut sets = client.working_sets(of)?;
        if let (Some(session), true) = (self.session, sets.sessions.is_empty()) {
            return Err(Failure::NoSession { session });
        }
        // This command uses nothing.
        sets.sessions.retain(|set| set.session != own || of == Some(own));
        let vram_bytes = client.stats()?.vram.capacity;
        let report = Report::new(&sets, client.page_size(), vram_bytes);
        output::print(&match (self.output, self.session) {
            (Format::Json, _) => output::json(&report),
            (Format::Table, None) => report.list(),
            (Format::Table, Some(_)) => report.details(width()),
        })
    }
}

/// Columns of the terminal.
fn width() -> usize {
    let columns = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let terminal = || terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
    columns.or_else(terminal).unwrap_or(WIDTH_DEFAULT)
}

#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    vram_bytes: u64,
    /// What decides on pages that no plan speaks of.
    leader: &'static str,
    sessions: Vec<Session>,
}

#[derive(Debug, Serialize)]
struct Session {
    session: u64,
    uid: u32,
    allocated_bytes: u64,
    pattern: &'static str,
    /// Of the plans, or maps of the cycle.
    steps: Option<u32>,
    working_set: Vec<Window>,
    maps: u64,
    hits_vram_pages: u64,
    hits_ram_pages: u64,
    miss_pages: u64,
    zero_fill_pages: u64,
    stalled_us: u64,
    prefetch_useful_pages: u64,
    prefetch_late_pages: u64,
    curve: Vec<Point>,
}

#[derive(Debug, Serialize)]
struct Window {
    seconds: u32,
    bytes: u64,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Point {
    bytes: u64,
    hit_ratio: f64,
}

impl Report {
    fn new(sets: &WorkingSets, page_size: u64, vram_bytes: u64) -> Report {
        Report {
            schema: SCHEMA,
            vram_bytes,
            leader: match sets.leader {
                Recency::Lirs => "lirs",
                Recency::Gap => "gap",
                Recency::Lru => "lru",
            },
            sessions: sets.sessions.iter().map(|set| Session::new(set, page_size)).collect(),
        }
    }

    fn list(&self) -> String {
        let mut heading = vec!["session".to_owned(), "uid".to_owned(), "pattern".to_owned()];
        heading.extend(WINDOWS.map(|window| format!("used in {window}")));
        heading.extend(["allocated", "VRAM hits", "stalled"].map(str::to_owned));
        let heading: Vec<&str> = heading.iter().map(String::as_str).collect();
        let mut table = Table::new(&heading);
        for session in &self.sessions {
            let mut row =
                vec![session.session.to_string(), session.uid.to_string(), session.pattern()];
            row.extend(session.working_set.iter().map(|window| text::bytes(window.bytes)));
            row.push(text::bytes(session.allocated_bytes));
            row.push(session.hits().map_or("-".to_owned(), |ratio| format!("{ratio:.3}")));
            row.push(text::time(std::time::Duration::from_micros(session.stalled_us)));
            table.row(row);
        }
        let mut out = String::new();
        table.write(&mut out);
        out
    }

    fn details(&self, width: usize) -> String {
        let mut out = String::new();
        for session in &self.sessions {
            session.details(&mut out, self.vram_bytes, width);
        }
        out
    }
}

impl Session {
    fn new(set: &SessionSet, page_size: u64) -> Session {
        let bytes = |pages: u64| pages.saturating_mul(page_size);
        let (pattern, steps) = match set.pattern {
            AccessPattern::None => ("none", None),
            AccessPattern::Planned { steps } => ("plan", Some(steps)),
            AccessPattern::Cycle { steps } => ("cycle", Some(steps)),
        };
        let windows = WINDOWS_SECONDS.into_iter().zip(set.windows);
        let counters: &Counters = &set.counters;
        Session {
            session: set.session.0,
            uid: set.uid,
            allocated_bytes: bytes(set.pages),
            pattern,
            steps,
            working_set: windows
                .map(|(seconds, pages)| Window { seconds, bytes: bytes(pages) })
                .collect(),
            maps: counters.maps,
            hits_vram_pages: counters.hits_vram,
            hits_ram_pages: counters.hits_ram,
            miss_pages: counters.misses,
            zero_fill_pages: counters.zero_fills,
            stalled_us: counters.stalled_us,
            prefetch_useful_pages: counters.prefetch_useful,
            prefetch_late_pages: counters.prefetch_late,
            curve: set
                .curve
                .iter()
                .map(|point| Point {
                    bytes: bytes(point.pages),
                    hit_ratio: f64::from(point.hits_per_million) / 1e6,
                })
                .collect(),
        }
    }

    fn pattern(&self) -> String {
        match (self.pattern, self.steps) {
            ("plan", Some(steps)) => format!("plan of {steps}"),
            ("cycle", Some(steps)) => format!("cycle of {steps}"),
            (name, _) => name.to_owned(),
        }
    }

    /// The share of page uses that were in VRAM.
    fn hits(&self) -> Option<f64> {
        let all =
            self.hits_vram_pages + self.hits_ram_pages + self.miss_pages + self.zero_fill_pages;
        (all > 0).then(|| self.hits_vram_pages as f64 / all as f64)
    }

    fn details(&self, out: &mut String, vram_bytes: u64, width: usize) {
        out.push_str(&format!(
            "session {} of uid {}: pattern {}, {} allocated\n\n",
            self.session,
            self.uid,
            self.pattern(),
            text::bytes(self.allocated_bytes)
        ));
        let mut table = Table::new(&["", "value"]);
        let mut row = |name: String, value: String| table.row([name, value]);
        for (window, name) in self.working_set.iter().zip(WINDOWS) {
            row(format!("used in the last {name}"), text::bytes(window.bytes));
        }
        for (name, value) in [
            ("maps", self.maps),
            ("hits in VRAM, pages", self.hits_vram_pages),
            ("hits in RAM, pages", self.hits_ram_pages),
            ("misses, pages", self.miss_pages),
            ("filled with zeros, pages", self.zero_fill_pages),
            ("prefetched and used, pages", self.prefetch_useful_pages),
            ("prefetched late, pages", self.prefetch_late_pages),
        ] {
            row(name.to_owned(), value.to_string());
        }
        row("stalled".to_owned(), text::time(std::time::Duration::from_micros(self.stalled_us)));
        table.write(out);
        out.push('\n');
        if self.curve.is_empty() {
            out.push_str("it has mapped nothing yet\n");
            return;
        }
        plot::draw(&self.curve, vram_bytes, width, out);
        out.push('\n');
        out.push_str(&self.sentences(vram_bytes));
    }

    /// What VRAM of the size there is would do, and the least that is nearly as good as any.
    fn sentences(&self, vram_bytes: u64) -> String {
        let at = |bytes: u64| self.curve.iter().rfind(|point| point.bytes <= bytes);
        let last = self.curve.last().map_or(0.0, |point| point.hit_ratio);
        let enough = self.curve.iter().find(|point| point.hit_ratio >= last - 0.005);
        let sentence = |bytes: u64, ratio: f64| {
            format!("with {} of VRAM the hit ratio would be {ratio:.2}\n", text::bytes(bytes))
        };
        let mut out = String::new();
        if let Some(now) = at(vram_bytes) {
            out.push_str(&sentence(vram_bytes, now.hit_ratio));
        }
        if let Some(enough) = enough.filter(|enough| enough.bytes != vram_bytes) {
            out.push_str(&sentence(enough.bytes, enough.hit_ratio));
        }
        out
    }
}

#[cfg(test)]
mod tests;
