//! Quotas as the configuration and the command line write them: `user:ada`, `group:50`, `each-user`, `each-session`.

use std::fmt;
use std::str::FromStr;

use lapis_proto::message::{QUOTAS_MAX, Quota, QuotaSubject};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::error::ConfigError;
use super::host::Host;
use super::size::{Amount, Size};
use super::{Config, Settings};
use crate::engine::limits::Limits;

/// Whom a quota binds, by name or number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// Every session for itself.
    EachSession,
    /// Every user for himself who has no quota of his own.
    EachUser,
    /// A user, by name or uid.
    User(String),
    /// A group, by name or gid.
    Group(String),
}

/// A text names no subject.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is no subject; write user:NAME, user:UID, group:NAME, group:GID, each-user or each-session"
)]
pub struct SubjectError {
    text: String,
}

impl Subject {
    /// With the numbers of this host.
    ///
    /// # Errors
    /// [`ConfigError::NoSuchName`], [`ConfigError::NameUnknown`].
    pub fn resolve(&self, host: &Host) -> Result<QuotaSubject, ConfigError> {
        Ok(match self {
            Subject::EachSession => QuotaSubject::EachSession,
            Subject::EachUser => QuotaSubject::EachUid,
            Subject::User(name) => QuotaSubject::Uid(id("user", name, host.user_id)?),
            Subject::Group(name) => QuotaSubject::Gid(id("group", name, host.group_id)?),
        })
    }
}

/// The number of a user or group that is given by name or number.
pub(super) fn id(
    kind: &'static str,
    name: &str,
    look_up: fn(&str) -> std::io::Result<Option<u32>>,
) -> Result<u32, ConfigError> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    match look_up(name) {
        Ok(Some(number)) => Ok(number),
        Ok(None) => Err(ConfigError::NoSuchName { kind, name: name.to_owned() }),
        Err(source) => Err(ConfigError::NameUnknown { kind, name: name.to_owned(), source }),
    }
}

impl From<QuotaSubject> for Subject {
    fn from(subject: QuotaSubject) -> Subject {
        match subject {
            QuotaSubject::EachSession => Subject::EachSession,
            QuotaSubject::EachUid => Subject::EachUser,
            QuotaSubject::Uid(uid) => Subject::User(uid.to_string()),
            QuotaSubject::Gid(gid) => Subject::Group(gid.to_string()),
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Subject::EachSession => f.write_str("each-session"),
            Subject::EachUser => f.write_str("each-user"),
            Subject::User(name) => write!(f, "user:{name}"),
            Subject::Group(name) => write!(f, "group:{name}"),
        }
    }
}

impl FromStr for Subject {
    type Err = SubjectError;

    fn from_str(text: &str) -> Result<Subject, SubjectError> {
        match (text, text.split_once(':')) {
            ("each-session", _) => Ok(Subject::EachSession),
            ("each-user", _) => Ok(Subject::EachUser),
            (_, Some(("user", name))) if !name.is_empty() => Ok(Subject::User(name.to_owned())),
            (_, Some(("group", name))) if !name.is_empty() => Ok(Subject::Group(name.to_owned())),
            _ => Err(SubjectError { text: text.to_owned() }),
        }
    }
}

impl Serialize for Subject {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Subject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Subject, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// One `[[quota]]` of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuotaSettings {
    /// Whom it binds.
    pub subject: Subject,
    /// Most VRAM; a share is of the VRAM tier.
    pub vram: Option<Amount>,
    /// VRAM that others do not evict from; a share is of the VRAM tier.
    pub vram_reserved: Option<Amount>,
    /// Most anonymous memory; a share is of the RAM and NVMe tiers together.
    pub anonymous: Option<Amount>,
    /// Maps of a subject with a higher one are served first.
    pub priority: Option<u8>,
}

impl QuotaSettings {
    /// Those that a setting of the daemon may share its name with.
    pub(super) const KEYS: [&str; 5] =
        ["subject", "vram", "vram_reserved", "anonymous", "priority"];

    /// With the numbers of this host and the sizes of these tiers.
    pub(super) fn resolve(&self, host: &Host, config: &Config) -> Result<Quota, ConfigError> {
        let vram = match config.vram {
            Amount::Fixed(size) => size.bytes(),
            Amount::Share(_) => {
                let amounts = [self.vram, self.vram_reserved, self.anonymous];
                if amounts.iter().any(|amount| matches!(amount, Some(Amount::Share(_)))) {
                    let subject = self.subject.clone();
                    return Err(ConfigError::QuotaShareOfShare { subject });
                }
                0
            }
        };
        let ram = if config.unified { 0 } else { config.ram.bytes() };
        let below = ram.saturating_add(config.nvme_size().bytes());
        let of = |amount: Option<Amount>, whole| amount.map(|amount| amount.of(whole).bytes());
        Ok(Quota {
            subject: self.subject.resolve(host)?,
            vram_max: of(self.vram, vram),
            vram_reserved: of(self.vram_reserved, vram).unwrap_or(0),
            anonymous_max: of(self.anonymous, below),
            priority: self.priority.unwrap_or(0),
        })
    }
}

impl From<&Quota> for QuotaSettings {
    fn from(quota: &Quota) -> QuotaSettings {
        let fixed = |bytes| Amount::Fixed(Size::from_bytes(bytes));
        QuotaSettings {
            subject: quota.subject.into(),
            vram: quota.vram_max.map(fixed),
            vram_reserved: (quota.vram_reserved > 0).then(|| fixed(quota.vram_reserved)),
            anonymous: quota.anonymous_max.map(fixed),
            priority: (quota.priority > 0).then_some(quota.priority),
        }
    }
}

impl Settings {
    /// The group that administers, as a number. The default one may be missing; one that was named may not. An empty
    /// name is no group.
    pub(super) fn admin_gid(&self, host: &Host) -> Result<Option<u32>, ConfigError> {
        match self.admin_group.as_deref() {
            Some("") => Ok(None),
            Some(name) => id("group", name, host.group_id).map(Some),
            // A host that can't look names up has no such group either.
            None => Ok((host.group_id)(ADMIN_GROUP_DEFAULT).unwrap_or(None)),
        }
    }
}

/// Members of this group administer the daemon unless another one is configured.
pub const ADMIN_GROUP_DEFAULT: &str = "lapis-admin";

/// Checks quotas against one another and against the VRAM that can be mapped.
pub(super) fn validate(config: &Config) -> Result<(), ConfigError> {
    let quotas = &config.quotas;
    if quotas.len() > QUOTAS_MAX {
        return Err(ConfigError::QuotasMany { count: quotas.len() });
    }
    let mut reserved = 0_u64;
    for (index, quota) in quotas.iter().enumerate() {
        let subject = || Subject::from(quota.subject);
        if quotas[..index].iter().any(|other| other.subject == quota.subject) {
            return Err(ConfigError::QuotaTwice { subject: subject() });
        }
        if quota.is_none() {
            return Err(ConfigError::QuotaEmpty { subject: subject() });
        }
        let each = matches!(quota.subject, QuotaSubject::EachSession | QuotaSubject::EachUid);
        if each && quota.vram_reserved > 0 {
            return Err(ConfigError::QuotaReserveEach { subject: subject() });
        }
        // As the engine counts: whole pages of each.
        reserved = reserved.saturating_add(quota.vram_reserved / config.page_size);
    }
    let most = Limits::mapped_pages_of(config.vram_frames());
    if config.vram_size().is_some() && reserved > u64::from(most) {
        let bytes = |pages: u64| Size::from_bytes(pages.saturating_mul(config.page_size));
        let (reserved, most) = (bytes(reserved), bytes(u64::from(most)));
        return Err(ConfigError::QuotaReserves { reserved, most });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_are_written_as_they_are_read() {
        for text in ["each-session", "each-user", "user:ada", "user:1000", "group:ml"] {
            assert_eq!(text.parse::<Subject>().unwrap().to_string(), text);
        }
        for text in ["", "ada", "user:", "group:", "each", "uid:1"] {
            let error = text.parse::<Subject>().unwrap_err();
            assert!(error.to_string().starts_with(&format!("`{text}` is no subject; ")));
        }
    }
}
