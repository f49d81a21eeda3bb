//! Scrapes a daemon as Prometheus does, and reads what it says by the format's rules.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

/// What HTTP answered.
#[derive(Debug)]
pub struct Answer {
    /// Status.
    pub status: u16,
    /// Body.
    pub body: String,
}

fn exchange(mut stream: impl Read + Write, path: &str) -> std::io::Result<Answer> {
    stream.write_all(
        format!("GET {path} HTTP/1.1\r\nHost: lapis\r\nConnection: close\r\n\r\n").as_bytes(),
    )?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    let (head, body) =
        reply.split_once("\r\n\r\n").ok_or_else(|| std::io::Error::other("no head"))?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
    assert_eq!(length.and_then(|length| length.parse().ok()), Some(body.len()), "{head}");
    Ok(Answer { status: status.expect("a status"), body: body.to_owned() })
}

/// Asks `address` for a path.
///
/// # Errors
/// The connection's.
pub fn try_get(address: &str, path: &str) -> std::io::Result<Answer> {
    exchange(TcpStream::connect(address)?, path)
}

/// Asks `address` for a path.
///
/// # Panics
/// When nobody answers.
#[must_use]
pub fn get(address: &str, path: &str) -> Answer {
    try_get(address, path).expect("it answers")
}

/// Asks a Unix socket for a path.
///
/// # Panics
/// When nobody answers.
#[must_use]
pub fn get_unix(socket: &Path, path: &str) -> Answer {
    exchange(UnixStream::connect(socket).expect("it listens"), path).expect("it answers")
}

/// The address in the log line that says where metrics are.
#[must_use]
pub fn address_in(log: &[String]) -> Option<String> {
    let line = log.iter().find(|line| line.contains("metrics on http://"))?;
    let (_, rest) = line.split_once("http://")?;
    Some(rest.split('/').next()?.to_owned())
}

/// All samples of a scrape.
#[derive(Debug, Clone, PartialEq)]
pub struct Scrape {
    /// By name and labels, as they are written.
    pub samples: BTreeMap<String, f64>,
    /// Types of the families.
    pub types: BTreeMap<String, String>,
}

impl Scrape {
    /// Scrapes `address`.
    ///
    /// # Panics
    /// When it doesn't answer, or breaks the format's rules.
    #[must_use]
    pub fn of(address: &str) -> Scrape {
        let answer = get(address, "/metrics");
        assert_eq!(answer.status, 200, "{}", answer.body);
        Scrape::parse(&answer.body)
    }

    /// Reads the text format.
    ///
    /// # Panics
    /// When it breaks the format's rules: each family has its help and type once and ahead of its samples, each series
    /// comes once, counters are named as such, buckets add up.
    #[must_use]
    pub fn parse(text: &str) -> Scrape {
        let mut scrape = Scrape { samples: BTreeMap::new(), types: BTreeMap::new() };
        let mut helped = String::new();
        let mut family = String::new();
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                helped = help.split(' ').next().expect("a name").to_owned();
                assert!(help.len() > helped.len() + 2, "no help: {line}");
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').expect("a name and a type");
                assert_eq!(helped, name, "help comes first");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
                family = name.to_owned();
                let before = scrape.types.insert(family.clone(), kind.to_owned());
                assert_eq!(before, None, "a family comes once: {line}");
            } else {
                let (series, value) = line.rsplit_once(' ').expect("a series and a value");
                let name = series.split('{').next().expect("a name");
                let suffix = name.strip_prefix(&family).expect("samples follow their type");
                let histogram = scrape.types[&family] == "histogram";
                let suffixes = if histogram { &["_bucket", "_sum", "_count"][..] } else { &[""] };
                assert!(suffixes.contains(&suffix), "{line}");
                let value = value.parse().expect("a number");
                let before = scrape.samples.insert(series.to_owned(), value);
                assert_eq!(before, None, "a series comes once: {line}");
            }
        }
        scrape
    }

    /// The value of a series, written as in the text.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn get(&self, series: &str) -> f64 {
        let found = self.samples.get(series);
        *found.unwrap_or_else(|| panic!("no series {series}"))
    }

    /// The sum over all series of a name.
    #[must_use]
    pub fn sum(&self, name: &str) -> f64 {
        let own = |series: &&String| series.split('{').next() == Some(name);
        self.samples.iter().filter(|(series, _)| own(series)).map(|(_, value)| value).sum()
    }

    /// The names of all series.
    #[must_use]
    pub fn series(&self) -> Vec<&str> {
        self.samples.keys().map(String::as_str).collect()
    }
}

/// Whether a program can be run; says aloud when not.
#[must_use]
pub fn has_program(name: &str) -> bool {
    let mut command = Command::new(name);
    let status = command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let has = status.is_ok_and(|status| status.success());
    if !has {
        eprintln!("SKIPPED: there is no {name} here");
    }
    has
}
