//! A configuration that is read again while the daemon runs: what can change does, and the log says what can't.

use std::collections::BTreeMap;

use lapis_proto::message::{Quota, Tier};

use crate::config::{Config, Settings};
use crate::server::core::Core;

/// Settings that change while the daemon runs.
const LIVE: [&str; 6] = ["log", "admin_group", "quota", "vram", "ram", "nvme"];

fn table(config: &Config) -> toml::Table {
    toml::Table::try_from(Settings::from(config)).expect("settings are a table")
}

/// Names of the settings that differ and can't change while the daemon runs.
fn fixed_changes(old: &Config, new: &Config) -> Vec<String> {
    let (old, new) = (table(old), table(new));
    let mut names: Vec<_> = old.keys().chain(new.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let differs = |name: &&String| old.get(*name) != new.get(*name);
    let names = names.into_iter().filter(differs).filter(|name| !LIVE.contains(&name.as_str()));
    names.cloned().collect()
}

/// The quotas to set so that those of `old` become those of `new`. Others, set while it ran, stay.
fn quota_changes(old: &[Quota], new: &[Quota]) -> Vec<Quota> {
    let by_subject = |quotas: &[Quota]| -> BTreeMap<_, _> {
        quotas.iter().map(|quota| (quota.subject, *quota)).collect()
    };
    let (old, new) = (by_subject(old), by_subject(new));
    let gone = old.keys().filter(|subject| !new.contains_key(*subject));
    let gone = gone.map(|subject| Quota::none(*subject));
    // First what goes: it may make room.
    gone.chain(new.values().filter(|quota| old.get(&quota.subject) != Some(*quota)).copied())
        .collect()
}

/// The pages that tiers are to have, of those that are configured otherwise than before.
fn tier_changes(old: &Config, new: &Config) -> Vec<(Tier, &'static str, Option<u32>)> {
    // In pages of the size that they have, whatever is configured now.
    let new = &Config { page_size: old.page_size, unified: old.unified, ..new.clone() };
    let mut changes = Vec::new();
    if old.vram != new.vram {
        changes.push((Tier::Vram, "vram", new.vram_size().map(|_| new.vram_frames())));
    }
    if old.ram != new.ram {
        changes.push((Tier::Ram, "ram", Some(new.ram_frames())));
    }
    // What vram needs beyond ram is what it was at the start.
    if let Some(nvme) = new.nvme.filter(|nvme| old.nvme != Some(*nvme)) {
        let pages = u32::try_from(nvme.bytes() / new.page_size).ok();
        changes.push((Tier::Nvme, "nvme", pages));
    }
    changes
}

/// Changes what can change, says what can't, and returns the configuration that is in effect then.
pub(crate) fn apply(core: &mut Core, old: &Config, new: &Config) -> Config {
    let mut now = old.clone();
    let mut done: Vec<&str> = Vec::new();
    if old.log != new.log {
        // Whoever read the configuration has changed it.
        now.log.clone_from(&new.log);
        done.push("log");
    }
    if old.admin_gid != new.admin_gid {
        core.administered_by(new.admin_gid);
        now.admin_gid = new.admin_gid;
        done.push("admin_group");
    }
    let quotas = quota_changes(&old.quotas, &new.quotas);
    let mut refused = 0;
    for quota in &quotas {
        if let Err(why) = core.put_quota(*quota) {
            refused += 1;
            tracing::warn!("reload: a quota of {:?} is refused: {}", quota.subject, why.message);
        }
    }
    if !quotas.is_empty() && refused == 0 {
        now.quotas.clone_from(&new.quotas);
        done.push("quota");
    }
    for (tier, name, pages) in tier_changes(old, new) {
        let Some(pages) = pages else {
            tracing::warn!(
                "reload: {name} is a share: it takes effect when the daemon is restarted"
            );
            continue;
        };
        if let Err(why) = core.aim_tier(tier, pages) {
            tracing::warn!("reload: {name} stays as it is: {}", why.message);
            continue;
        }
        match tier {
            Tier::Vram => now.vram = new.vram,
            Tier::Ram => now.ram = new.ram,
            Tier::Nvme => now.nvme = new.nvme,
        }
        done.push(name);
    }
    for name in fixed_changes(old, new) {
        tracing::warn!("reload: {name} takes effect when the daemon is restarted");
    }
    core.tick();
    core.settle();
    match done.as_slice() {
        [] => tracing::info!("reloaded: nothing that can change while it runs was changed"),
        done => tracing::info!("reloaded: {}", done.join(", ")),
    }
    now
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Size;
    use lapis_proto::message::QuotaSubject;

    fn config() -> Config {
        Config::new("/s".into(), "/d".into())
    }

    #[test]
    fn what_is_fixed_is_named_and_what_is_live_is_not() {
        let new = Config {
            queue_depth: 9,
            page_size: 4 << 20,
            log: "debug".into(),
            vram: Size::gib(2).into(),
            ram: Size::gib(3),
            admin_gid: Some(4),
            ..config()
        };
        assert_eq!(fixed_changes(&config(), &new), ["page_size", "queue_depth"]);
        assert_eq!(fixed_changes(&config(), &config()), [""; 0]);
    }

    #[test]
    fn quotas_become_those_of_the_file_and_others_stay() {
        let quota = |uid, priority| Quota { priority, ..Quota::none(QuotaSubject::Uid(uid)) };
        let old = [quota(1, 1), quota(2, 1), quota(3, 1)];
        let new = [quota(2, 1), quota(3, 9), quota(4, 1)];
        assert_eq!(quota_changes(&old, &new), [quota(1, 0), quota(3, 9), quota(4, 1)]);
        assert_eq!(quota_changes(&new, &new), []);
    }

    #[test]
    fn tiers_are_changed_if_they_are_configured_otherwise() {
        let new = Config { vram: Size::gib(2).into(), nvme: Some(Size::gib(4)), ..config() };
        let changes = tier_changes(&config(), &new);
        assert_eq!(changes, [(Tier::Vram, "vram", Some(1024)), (Tier::Nvme, "nvme", Some(2048))]);
        // Pages stay as large as they are.
        let pages = Config { page_size: 4 << 20, ..new };
        assert_eq!(tier_changes(&config(), &pages), changes);
        let share = Config { vram: "50%".parse().unwrap(), ..config() };
        assert_eq!(tier_changes(&config(), &share), [(Tier::Vram, "vram", None)]);
    }
}
