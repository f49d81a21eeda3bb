//! `lapisctl quota`: who may use how much of a running daemon's tiers.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Subcommand;
use lapis::{Client, QuotaUse};
use lapisd::config::{Host, Size, SizeError, Subject};
use serde::Serialize;

use crate::connect;
use crate::failure::Failure;
use crate::output::{self, Format};
use crate::text::{self, Table};

/// Version of the JSON's fields.
const SCHEMA: u32 = 1;

/// Shows and changes the quotas of a running daemon
///
/// A change lasts until the daemon ends; [[quota]] tables of its configuration say what it starts with. Only root
/// and administrators may change quotas. SUBJECT is user:NAME, user:UID, group:NAME, group:GID (a process's primary
/// group), each-user (every user who has no quota of his own) or each-session.
#[derive(Debug, clap::Args)]
pub(crate) struct Quota {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Show(Show),
    Set(Set),
    Clear(Clear),
}

/// Shows all quotas and what is used of them; of each-user and each-session what the caller uses
#[derive(Debug, clap::Args)]
struct Show {
    #[command(flatten)]
    common: Common,
}

/// Sets a quota; what isn't given stays as it is
#[derive(Debug, clap::Args)]
struct Set {
    /// Whom it binds
    subject: Subject,
    /// Most VRAM that pages may hold, mapped or not, such as 8GiB; none takes the limit away
    #[arg(long, value_name = "SIZE|none")]
    vram: Option<Limit>,
    /// VRAM that others do not evict from; for users and groups, none for nothing
    #[arg(long, value_name = "SIZE|none")]
    vram_reserved: Option<Limit>,
    /// Most anonymous memory, in RAM and spill together; none takes the limit away
    #[arg(long, value_name = "SIZE|none")]
    anonymous: Option<Limit>,
    /// Maps of a subject with a higher one are served first, 0 to 255; 0 is the usual
    #[arg(long, value_name = "N")]
    priority: Option<u8>,
    #[command(flatten)]
    common: Common,
}

/// Takes a quota away
#[derive(Debug, clap::Args)]
struct Clear {
    /// Whose
    subject: Subject,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
struct Common {
    /// The daemon's socket
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// How to print the quotas
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    output: Format,
}

impl Common {
    fn connect(&self) -> Result<Client, Failure> {
        Ok(connect::connect(&self.socket.clone().unwrap_or_else(lapis::default_socket))?)
    }

    fn print(&self, quotas: &[QuotaUse]) -> Result<(), Failure> {
        let report = Report::new(quotas);
        output::print(&match self.output {
            Format::Table => report.table(),
            Format::Json => output::json(&report),
        })
    }
}

/// A limit, or that there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limit(Option<Size>);

impl FromStr for Limit {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Limit, SizeError> {
        if text == "none" { Ok(Limit(None)) } else { text.parse().map(|size| Limit(Some(size))) }
    }
}

impl Limit {
    fn bytes(self) -> Option<u64> {
        self.0.map(Size::bytes)
    }
}

impl Quota {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        match &self.verb {
            Verb::Show(show) => show.common.print(&show.common.connect()?.quotas()?),
            Verb::Set(set) => set.run(&Host::of_process()),
            Verb::Clear(clear) => clear.run(&Host::of_process()),
        }
    }
}

impl Set {
    fn run(&self, host: &Host) -> Result<(), Failure> {
        let subject = self.subject.resolve(host)?;
        let client = self.common.connect()?;
        let quotas = client.quotas()?;
        let old = quotas.iter().map(|used| used.quota).find(|quota| quota.subject == subject);
        client.set_quota(self.over(old.unwrap_or(lapis::Quota::none(subject))))?;
        self.common.print(&client.quotas()?)
    }

    /// The quota, with what was given in place of what it had.
    fn over(&self, mut quota: lapis::Quota) -> lapis::Quota {
        if let Some(limit) = self.vram {
            quota.vram_max = limit.bytes();
        }
        if let Some(limit) = self.vram_reserved {
            quota.vram_reserved = limit.bytes().unwrap_or(0);
        }
        if let Some(limit) = self.anonymous {
            quota.anonymous_max = limit.bytes();
        }
        quota.priority = self.priority.unwrap_or(quota.priority);
        quota
    }
}

impl Clear {
    fn run(&self, host: &Host) -> Result<(), Failure> {
        let subject = self.subject.resolve(host)?;
        let client = self.common.connect()?;
        if !client.quotas()?.iter().any(|used| used.quota.subject == subject) {
            return Err(Failure::NoQuota { subject: self.subject.clone() });
        }
        client.set_quota(lapis::Quota::none(subject))?;
        self.common.print(&client.quotas()?)
    }
}

#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    quotas: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    subject: String,
    vram_used_bytes: u64,
    vram_mapped_bytes: u64,
    vram_max_bytes: Option<u64>,
    vram_reserved_bytes: u64,
    anonymous_used_bytes: u64,
    anonymous_max_bytes: Option<u64>,
    priority: u8,
}

impl Report {
    fn new(quotas: &[QuotaUse]) -> Report {
        let row = |used: &QuotaUse| Row {
            subject: Subject::from(used.quota.subject).to_string(),
            vram_used_bytes: used.vram_used,
            vram_mapped_bytes: used.vram_mapped,
            vram_max_bytes: used.quota.vram_max,
            vram_reserved_bytes: used.quota.vram_reserved,
            anonymous_used_bytes: used.anonymous_used,
            anonymous_max_bytes: used.quota.anonymous_max,
            priority: used.quota.priority,
        };
        Report { schema: SCHEMA, quotas: quotas.iter().map(row).collect() }
    }

    fn table(&self) -> String {
        if self.quotas.is_empty() {
            return "there are no quotas\n".to_owned();
        }
        let mut table = Table::new(&[
            "subject",
            "vram used",
            "mapped",
            "most",
            "reserved",
            "anonymous used",
            "most",
            "priority",
        ]);
        let limit = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), text::bytes);
        for row in &self.quotas {
            table.row([
                row.subject.clone(),
                text::bytes(row.vram_used_bytes),
                text::bytes(row.vram_mapped_bytes),
                limit(row.vram_max_bytes),
                text::bytes(row.vram_reserved_bytes),
                text::bytes(row.anonymous_used_bytes),
                limit(row.anonymous_max_bytes),
                row.priority.to_string(),
            ]);
        }
        let mut out = String::new();
        table.write(&mut out);
        out
    }
}

#[cfg(test)]
mod tests {
    use lapis::QuotaSubject;

    use super::*;

    fn set(vram: Option<Limit>, reserved: Option<Limit>, priority: Option<u8>) -> Set {
        Set {
            subject: Subject::EachUser,
            vram,
            vram_reserved: reserved,
            anonymous: None,
            priority,
            common: Common { socket: None, output: Format::Table },
        }
    }

    #[test]
    fn what_is_not_given_stays() {
        let old = lapis::Quota {
            subject: QuotaSubject::Uid(7),
            vram_max: Some(1),
            vram_reserved: 2,
            anonymous_max: Some(3),
            priority: 4,
        };
        assert_eq!(set(None, None, None).over(old), old);
        let none: Limit = "none".parse().unwrap();
        let new = set(Some(none), Some("1KiB".parse().unwrap()), Some(0)).over(old);
        assert_eq!(new, lapis::Quota { vram_max: None, vram_reserved: 1024, priority: 0, ..old });
        assert_eq!(set(None, Some(none), None).over(old).vram_reserved, 0);
        assert!("some".parse::<Limit>().is_err());
    }

    #[test]
    fn quotas_are_shown_as_table_and_json() {
        let quota = lapis::Quota {
            vram_max: Some(8 << 20),
            priority: 4,
            ..lapis::Quota::none(QuotaSubject::Uid(7))
        };
        let used =
            QuotaUse { quota, vram_used: 4 << 20, vram_mapped: 2 << 20, anonymous_used: 1 << 20 };
        let report = Report::new(&[used]);
        assert_eq!(
            report.table(),
            "subject  vram used    mapped      most  reserved  anonymous used  most  priority\n\
             user:7    4.00 MiB  2.00 MiB  8.00 MiB       0 B        1.00 MiB     -         4\n"
        );
        assert_eq!(
            output::json(&report),
            concat!(
                r#"{"schema":1,"quotas":[{"subject":"user:7","vram_used_bytes":4194304,"#,
                r#""vram_mapped_bytes":2097152,"vram_max_bytes":8388608,"vram_reserved_bytes":0,"#,
                r#""anonymous_used_bytes":1048576,"anonymous_max_bytes":null,"priority":4}]}"#,
                "\n"
            )
        );
        assert_eq!(Report::new(&[]).table(), "there are no quotas\n");
    }
}
