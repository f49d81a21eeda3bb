use std::path::{Path, PathBuf};
use std::time::Duration;

use lapis_proto::message::{Quota, QuotaSubject};

use super::*;

mod gpu;

fn host() -> Host {
    Host {
        root: false,
        runtime_dir: Some("/run/user/1000".into()),
        cache_dir: Some("/home/ada/.cache".into()),
        memory_available: || Ok(10 << 30),
        disk_free: |_| Ok(1_000_000_000),
        user_id: |name| Ok((name == "ada").then_some(1000)),
        group_id: |name| match name {
            "ml" => Ok(Some(50)),
            "broken" => Err(std::io::Error::other("no directory service")),
            _ => Ok(None),
        },
    }
}

fn parse(text: &str) -> Result<Settings, ConfigError> {
    Settings::parse(Path::new("/etc/lapis/lapisd.toml"), text)
}

fn config() -> Config {
    Config::new("/run/lapis/lapis.sock".into(), "/var/cache/lapis".into())
}

/// The error's text and its fix.
fn refusal(config: &Config) -> (String, String) {
    let error = config.validate().expect_err("an invalid configuration");
    (error.to_string(), error.fix().into_owned())
}

#[test]
fn defaults_are_valid_and_as_documented() {
    let config = Settings::default().resolve(&host()).unwrap();
    config.validate().unwrap();
    assert_eq!(config.socket, PathBuf::from("/run/user/1000/lapis.sock"));
    assert_eq!(config.spill_dir, PathBuf::from("/home/ada/.cache/lapis"));
    assert_eq!((config.vram_frames(), config.ram_frames(), config.spill_slots()), (512, 511, 1));
    assert_eq!((config.page_size, config.queue_depth), (2_097_152, 8));
}

#[test]
fn the_effective_configuration_is_a_file_that_reads_back() {
    let text = "\
socket = \"/run/user/1000/lapis.sock\"
socket_mode = \"0600\"
metrics = \"127.0.0.1:9471\"
metrics_socket = \"/run/lapis/metrics.sock\"
log = \"warn,lapisd=debug\"
log_format = \"json\"
device = \"sim\"
gpu = \"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f\"
libcuda = \"/opt/libcuda.so.1\"
unified = false
vram = \"24GiB\"
ram = \"8GiB\"
nvme = \"17GiB\"
spill_dir = \"/nvme\"
page_size = \"4MiB\"
queue_depth = 32
copy_threads = 2
link_bandwidth = \"25GB/s\"
link_latency_us = 10
io = \"threads\"
sessions_max = 1
allocations_max = 2
mappings_max = 3
requests_max = 4
pages_max = 5
map_wait_max_s = 6
admin_group = \"50\"

[[quota]]
subject = \"user:1000\"
vram = \"8GiB\"
vram_reserved = \"4GiB\"
anonymous = \"16GiB\"
priority = 7

[[quota]]
subject = \"each-session\"
vram = \"2GiB\"
";
    let settings = parse(text).unwrap();
    let config = settings.clone().resolve(&host()).unwrap();
    config.validate().unwrap();
    assert_eq!(config.link.latency, Duration::from_micros(10));
    assert_eq!(config.limits.map_wait_max, Duration::from_secs(6));
    assert_eq!(config.socket_mode, 0o600);
    assert_eq!(Settings::from(&config).to_toml(), text);
    assert_eq!(Settings::from(&config), settings);
}

#[test]
fn upper_sources_win_key_by_key() {
    let upper = parse("vram = \"2GiB\"").unwrap();
    let lower = parse("vram = \"3GiB\"\nram = \"4GiB\"").unwrap();
    let config = upper.over(lower).resolve(&host()).unwrap();
    assert_eq!((config.vram, config.ram), (Size::gib(2).into(), Size::gib(4)));
}

#[test]
fn each_setting_is_merged() {
    let all = Settings::from(&Config {
        gpu: Some(GpuChoice::Ordinal(1)),
        libcuda: Some("/this".into()),
        link: Link { bandwidth: Some(Rate::from_bytes_per_s(1)), latency: Duration::ZERO },
        quotas: vec![Quota { priority: 1, ..Quota::none(QuotaSubject::EachUid) }],
        ..config()
    });
    let other = Settings::from(&Config {
        socket: "/other".into(),
        socket_mode: 0o600,
        metrics: Some(([127, 0, 0, 1], 1).into()),
        metrics_socket: Some("/other".into()),
        log: "debug".to_owned(),
        log_format: crate::log::LogFormat::Json,
        device: DeviceChoice::Sim,
        gpu: Some(GpuChoice::Ordinal(2)),
        libcuda: Some("/other".into()),
        unified: true,
        vram: Size::mib(1).into(),
        ram: Size::mib(2),
        nvme: Some(Size::mib(3)),
        spill_dir: "/other".into(),
        page_size: 4096,
        queue_depth: 4,
        copy_threads: 5,
        link: Link {
            bandwidth: Some(Rate::from_bytes_per_s(6)),
            latency: Duration::from_micros(7),
        },
        io: IoEngine::Threads,
        limits: Limits {
            sessions_max: 8,
            allocations_max: 9,
            mappings_max: 10,
            requests_max: 11,
            pages_max: 12,
            map_wait_max: Duration::from_secs(13),
        },
        admin_gid: Some(14),
        quotas: vec![Quota { priority: 15, ..Quota::none(QuotaSubject::EachUid) }],
    });
    assert_eq!(all.clone().over(other), all);
    assert_eq!(all.clone().over(Settings::default()), all);
    assert_eq!(Settings::default().over(all.clone()), all);
    let text = all.to_toml();
    let (keys, _quotas) = text.split_once("\n[[quota]]\n").unwrap();
    let keys: Vec<String> =
        keys.lines().map(|line| line.split(' ').next().unwrap().into()).collect();
    assert_eq!(keys, Settings::keys());
}

#[test]
fn shares_are_of_this_host() {
    let settings = parse("ram = \"50%\"\nnvme = \"10%\"").unwrap();
    let config = settings.resolve(&host()).unwrap();
    assert_eq!(config.ram, Size::gib(5));
    assert_eq!(config.nvme, Some(Size::from_bytes(100_000_000)));
    let error = parse("device = \"sim\"\nvram = \"80%\"").unwrap().resolve(&host()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "vram is a share, but the sim device has no memory of its own to take it of"
    );
}

#[test]
fn an_unknown_key_is_refused_with_its_line_and_what_was_meant() {
    let error = parse("ram = \"1GiB\"\n\n# tier\nvrma = \"1GiB\"\n").unwrap_err();
    assert_eq!(error.to_string(), "/etc/lapis/lapisd.toml:4: there is no setting `vrma`");
    assert_eq!(error.fix(), "did you mean `vram`?");
    let error = parse("page-size = \"1MiB\"").unwrap_err();
    assert_eq!(error.fix(), "did you mean `page_size`?");
    let error = parse("[telemetry]\nlisten = \"::1\"").unwrap_err();
    assert_eq!(error.to_string(), "/etc/lapis/lapisd.toml:1: there is no setting `telemetry`");
    assert_eq!(error.fix(), "remove it; `lapisd --help` lists all settings");
}

#[test]
fn metrics_are_served_where_they_are_told_to_be_and_nowhere_else() {
    let config = |text| parse(text).unwrap().resolve(&host()).unwrap();
    assert_eq!((config("").metrics, config("").metrics_socket), (None, None));
    let off = config("metrics = \"\"\nmetrics_socket = \"\"");
    assert_eq!((off.metrics, off.metrics_socket), (None, None));
    let on = config("metrics = \"[::1]:9471\"\nmetrics_socket = \"/run/m\"");
    assert_eq!(on.metrics, Some("[::1]:9471".parse().unwrap()));
    assert_eq!(on.metrics_socket, Some("/run/m".into()));
    let error = parse("metrics = \"localhost\"").unwrap_err().to_string();
    assert!(
        error.contains("metrics: `localhost` is no address and port; write them as"),
        "{error}"
    );
}

#[test]
fn a_bad_value_is_refused_with_its_line_and_key() {
    let message = |text: &str| parse(text).unwrap_err().to_string();
    assert_eq!(
        message("ram = \"1GiB\"\nvram = \"24G\""),
        "/etc/lapis/lapisd.toml:2: vram: `G` is no unit; use GiB (1024 MiB) or GB (1000 MB)"
    );
    assert_eq!(
        message("queue_depth = -1"),
        "/etc/lapis/lapisd.toml:1: queue_depth: invalid value: integer `-1`, expected u32"
    );
    assert_eq!(
        message("\ndevice = \"gpu\""),
        "/etc/lapis/lapisd.toml:2: device: unknown variant `gpu`, expected one of `auto`, `cuda`, `sim`"
    );
    assert_eq!(
        message("socket_mode = \"rw\""),
        "/etc/lapis/lapisd.toml:1: socket_mode: `rw` is no octal mode; write it as \"0660\""
    );
    assert!(message("vram = \n").starts_with("/etc/lapis/lapisd.toml:1: "));
    let error = parse("vram = \"1GiB\"\nvram = \"2GiB\"").unwrap_err();
    assert!(matches!(error, ConfigError::File { line: 2, key: None, .. }), "{error}");
}

#[test]
fn a_missing_file_is_named() {
    let error = Settings::read(Path::new("/nowhere/lapisd.toml")).unwrap_err();
    assert_eq!(error.to_string(), "cannot read the configuration file /nowhere/lapisd.toml");
}

#[test]
fn defaults_that_do_not_exist_are_asked_for() {
    let bare = Host { runtime_dir: None, cache_dir: None, ..host() };
    let error = Settings::default().resolve(&bare).unwrap_err();
    assert_eq!(error.fix(), "give --socket");
    let socket = Settings { socket: Some("/tmp/s".into()), ..Settings::default() };
    assert_eq!(socket.resolve(&bare).unwrap_err().fix(), "give --spill-dir");
}

#[test]
fn page_sizes_are_powers_of_two_within_bounds() {
    let (message, fix) = refusal(&Config { page_size: 3 << 20, ..config() });
    assert_eq!(message, "page_size is 3145728 bytes, which is no power of two");
    assert_eq!(fix, "set page_size to 2MiB or 4MiB");
    let (message, _) = refusal(&Config { page_size: 32 << 10, ..config() });
    assert_eq!(message, "page_size is 32KiB, outside of 64KiB to 64MiB");
    let (message, _) = refusal(&Config { page_size: 128 << 20, ..config() });
    assert_eq!(message, "page_size is 128MiB, outside of 64KiB to 64MiB");
    for page_size in [64 << 10, 64 << 20] {
        Config { page_size, ..config() }.validate().unwrap();
    }
}

#[test]
fn tiers_hold_a_handful_of_pages() {
    let (message, fix) = refusal(&Config { vram: Size::mib(7).into(), ..config() });
    assert_eq!(
        message,
        "vram is 7MiB, but needs at least 4 frames of 2MiB: \
         with fewer, the pages that arrive and leave can wait for one another for ever"
    );
    assert_eq!(fix, "raise vram to at least 8MiB, or lower page_size");
    let (message, fix) = refusal(&Config { ram: Size::mib(16), ..config() });
    assert!(
        message.starts_with("ram is 16MiB, but needs at least 8 frames of 2052KiB: "),
        "{message}"
    );
    assert_eq!(fix, "raise ram to at least 16416KiB, or lower page_size");
    Config { vram: Size::mib(8).into(), ram: Size::kib(16_416), ..config() }.validate().unwrap();

    let large = Config { vram: Size::gib(2 << 20).into(), page_size: 64 << 10, ..config() };
    let (message, fix) = refusal(&large);
    assert_eq!(message, "vram is 2048TiB, but a tier has at most 1TiB in frames of 64KiB");
    assert_eq!(fix, "raise page_size, or lower vram to at most 1TiB");
}

#[test]
fn vram_fits_into_the_tiers_below() {
    let small = Config { vram: Size::gib(3).into(), nvme: Some(Size::gib(2)), ..config() };
    let (message, fix) = refusal(&small);
    assert_eq!(
        message,
        "vram (3GiB) is larger than ram (1GiB) and nvme (2GiB) together, \
         less the 4KiB that a RAM frame takes beside its page: evicted pages would have nowhere to go"
    );
    assert_eq!(fix, "raise ram to at least 1026MiB, or nvme to at least 2050MiB");
    Config { nvme: Some(Size::mib(2050)), ..small.clone() }.validate().unwrap();
    Config { ram: Size::mib(1026), ..small.clone() }.validate().unwrap();

    let auto = Config { nvme: None, ..small };
    auto.validate().unwrap();
    assert_eq!(auto.nvme_size(), Size::mib(2050));
    let odd = Config { vram: Size::mib(27).into(), ram: Size::mib(17), ..auto };
    assert_eq!((odd.vram_frames(), odd.ram_frames(), odd.spill_slots()), (13, 8, 5));
    odd.validate().unwrap();
}

#[test]
fn ram_smaller_than_vram_is_warned_of() {
    let warning = |vram: Size, ram| {
        let config = Config { vram: vram.into(), ram, ..config() };
        config.validate().unwrap();
        config.warning().map(|warning| warning.to_string())
    };
    assert_eq!(
        warning(Size::gib(3), Size::gib(2)).as_deref(),
        Some(
            "ram (2GiB) is smaller than vram (3GiB): what leaves VRAM soon leaves RAM as well, and comes back at the \
             disk's speed; give ram at least 3GiB"
        )
    );
    assert_eq!(warning(Size::gib(2), Size::gib(2)), None);
    assert_eq!(config().warning(), None, "the defaults are meant");
}

#[test]
fn numbers_have_bounds() {
    let (message, fix) = refusal(&Config { queue_depth: 0, ..config() });
    assert_eq!(message, "queue_depth is 0, outside of 1 to 4096");
    assert_eq!(fix, "set queue_depth to 1 to 4096");
    let (message, _) = refusal(&Config { socket_mode: 0o060, ..config() });
    assert_eq!(message, "socket_mode is 0060, outside of 0600 to 0777");
}

#[test]
fn paths_can_be_used() {
    let (message, fix) = refusal(&Config { spill_dir: "spill".into(), ..config() });
    assert_eq!(
        message,
        "spill_dir is spill, a relative path: the spill would follow the working directory"
    );
    assert_eq!(fix, "give the whole path, such as /var/cache/spill");
    let long = PathBuf::from(format!("/{}", "s".repeat(107)));
    let (message, _) = refusal(&Config { socket: long, ..config() });
    assert!(
        message
            .starts_with("socket is a path of 108 bytes, but Unix sockets have at most 107: /ss")
    );
    let fits = PathBuf::from(format!("/{}", "s".repeat(106)));
    Config { socket: fits, ..config() }.validate().unwrap();
}

#[test]
fn administrators_are_a_group() {
    let gid = |text: &str, host: &Host| parse(text).unwrap().resolve(host).map(|c| c.admin_gid);
    assert_eq!(gid("", &host()).unwrap(), None, "the default group does not exist");
    let there = Host { group_id: |name| Ok((name == "lapis-admin").then_some(70)), ..host() };
    assert_eq!(gid("", &there).unwrap(), Some(70));
    assert_eq!(gid("admin_group = \"\"", &there).unwrap(), None);
    assert_eq!(gid("admin_group = \"ml\"", &host()).unwrap(), Some(50));
    assert_eq!(gid("admin_group = \"51\"", &host()).unwrap(), Some(51));
    let error = gid("admin_group = \"m1\"", &host()).unwrap_err();
    assert_eq!(error.to_string(), "there is no group `m1`");
    assert_eq!(error.fix(), "create it, or name another group");
    let error = gid("admin_group = \"broken\"", &host()).unwrap_err();
    assert_eq!(error.fix(), "give the group's number instead");
}

#[test]
fn quotas_name_users_and_take_shares_of_the_tiers() {
    let text = "vram = \"1GiB\"\nram = \"1GiB\"\nnvme = \"3GiB\"\n\
                [[quota]]\nsubject = \"user:ada\"\nvram = \"50%\"\nvram_reserved = \"25%\"\n\
                [[quota]]\nsubject = \"group:ml\"\nanonymous = \"75%\"\npriority = 3\n";
    let config = parse(text).unwrap().resolve(&host()).unwrap();
    config.validate().unwrap();
    let ada = Quota {
        vram_max: Some(512 << 20),
        vram_reserved: 256 << 20,
        ..Quota::none(QuotaSubject::Uid(1000))
    };
    let ml =
        Quota { anonymous_max: Some(3 << 30), priority: 3, ..Quota::none(QuotaSubject::Gid(50)) };
    assert_eq!(config.quotas, [ada, ml]);
}

#[test]
fn bad_quotas_are_refused() {
    let error = |text: &str| {
        let settings = match parse(text) {
            Ok(settings) => settings,
            Err(error) => return error.to_string(),
        };
        let config = settings.resolve(&host());
        config.and_then(|config| config.validate()).expect_err(text).to_string()
    };
    assert_eq!(error("[[quota]]\nsubject = \"user:bob\"\npriority = 1"), "there is no user `bob`");
    assert_eq!(error("[[quota]]\nsubject = \"user:1\""), "the quota of user:1 limits nothing");
    let twice = "[[quota]]\nsubject = \"user:ada\"\npriority = 1\n\
                 [[quota]]\nsubject = \"user:1000\"\npriority = 2\n";
    assert_eq!(error(twice), "user:1000 has two quotas");
    assert_eq!(
        error("[[quota]]\nsubject = \"each-user\"\nvram_reserved = \"1MiB\""),
        "the quota of each-user reserves VRAM, but nobody knows how many there will be"
    );
    let much = "[[quota]]\nsubject = \"user:1\"\nvram_reserved = \"600MiB\"\n\
                [[quota]]\nsubject = \"user:2\"\nvram_reserved = \"40%\"\n";
    assert_eq!(error(much), "the quotas reserve 1008MiB of VRAM, but 960MiB of it can be mapped");
    assert_eq!(
        error("vram = \"1GiB\"\n\n[[quota]]\nsubject = \"ada\"\n"),
        "/etc/lapis/lapisd.toml:4: `ada` is no subject; write user:NAME, user:UID, group:NAME, group:GID, \
         each-user or each-session"
    );
    assert!(
        error("[[quota]]\nsubject = \"user:1\"\nvrma = 1\n")
            .starts_with("/etc/lapis/lapisd.toml:3: unknown field `vrma`, expected one of"),
    );
}

#[test]
fn a_setting_behind_a_quota_is_told_where_it_belongs() {
    let text = "[[quota]]\nsubject = \"user:1\"\nvram = \"1GiB\"\n\nsocket = \"/s\"\n";
    let error = parse(text).unwrap_err();
    assert_eq!(
        error.to_string(),
        "/etc/lapis/lapisd.toml:5: `socket` is in a [[quota]], but is a setting of the daemon"
    );
    assert_eq!(error.fix(), "move it before the first [[quota]]: what is behind one belongs to it");
}

#[test]
fn a_file_that_is_no_text_is_not_taken_for_one_that_is_out_of_reach() {
    let error =
        |kind: std::io::ErrorKind| ConfigError::Read { path: "/c".into(), source: kind.into() };
    let fix = |kind| error(kind).fix().into_owned();
    use std::io::ErrorKind::{InvalidData, PermissionDenied};
    assert_eq!(fix(InvalidData), "give --config a TOML file, which is text in UTF-8");
    assert_eq!(fix(PermissionDenied), "give --config a file that this user can read");
}

#[test]
fn a_unified_device_has_no_ram_tier() {
    let config = parse("unified = true\nvram = \"1GiB\"").unwrap().resolve(&host()).unwrap();
    config.validate().unwrap();
    assert_eq!((config.vram_frames(), config.ram_frames(), config.spill_slots()), (512, 0, 512));
    let again = Settings::from(&config);
    assert_eq!(again.ram, None);
    assert_eq!(again.resolve(&host()).unwrap().ram_frames(), 0);
    let error = parse("unified = true\nram = \"1GiB\"").unwrap().resolve(&host()).unwrap_err();
    assert_eq!(error.fix(), "remove ram, and give vram its size");
}

#[test]
fn nobody_is_told_to_change_the_ram_tier_of_a_unified_device() {
    let unified = Config { unified: true, vram: Amount::Fixed(Size::gib(2)), ..config() };
    unified.validate().unwrap();
    assert_eq!(unified.warning(), None);
    let (message, fix) = refusal(&Config { nvme: Some(Size::gib(1)), ..unified });
    assert_eq!(
        message,
        "vram (2GiB) is larger than nvme (1GiB), and a unified device has no RAM tier: \
         evicted pages would have nowhere to go"
    );
    assert_eq!(fix, "raise nvme to at least 2GiB, or leave it out");
}
