//! Metrics and health of a real daemon: that they say what happened, and that they say it when all else hangs.
#![expect(clippy::unwrap_used, reason = "a test fails where its set-up fails")]

use std::collections::BTreeSet;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use lapis::{Access, Code, Quota, QuotaSubject};
use lapis_tests::binaries::{lapisd, scratch};
use lapis_tests::bytes::{edit, read};
use lapis_tests::daemon::{Daemon, arguments, failed_start};
use lapis_tests::good::{Sample, nothing_is_left, still_serves, write_and_read};
use lapis_tests::scrape::{Scrape, address_in, get, get_unix, has_program, try_get};
use lapis_tests::wait::{until, until_within};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use tempfile::TempDir;

const SMALL: &[&str] =
    &["--page-size", "64KiB", "--vram", "1MiB", "--ram", "2MiB", "--nvme", "4MiB"];
const PAGE: u64 = 64 << 10;
const LONG: Duration = Duration::from_secs(60);
/// A copy takes an hour: for this test, for ever.
const FOR_EVER: &[&str] = &["--link-latency-us", "3600000000"];

/// A daemon with metrics on a port of its own, and where they are.
fn start(directory: &Path, flags: &[&str]) -> (Daemon, String) {
    let flags = [SMALL, &["--metrics", "127.0.0.1:0"], flags].concat();
    let (daemon, log) = Daemon::start_logged(directory, &flags);
    let address = address_in(&log).unwrap_or_else(|| panic!("no address: {log:#?}"));
    (daemon, address)
}

fn started(flags: &[&str]) -> (TempDir, Daemon, String) {
    let directory = scratch();
    let (daemon, address) = start(directory.path(), flags);
    (directory, daemon, address)
}

#[test]
fn every_series_is_there_before_the_first_traffic_and_none_comes_with_it() {
    let (_directory, daemon, address) = started(&[]);
    let before = Scrape::of(&address);
    let client = daemon.connect();
    write_and_read(&client, 40);
    Sample::new(1, 1_000_000).stream(&client);
    client.map(&[(&client.allocate(PAGE).unwrap(), 0..PAGE)], Access::Read, LONG).unwrap();
    drop(client);
    let after = Scrape::of(&address);
    assert_eq!(before.series(), after.series());
    assert_eq!(before.types, after.types);
    assert_eq!(before.sum("lapis_requests_total"), 0.0);
    assert!(after.sum("lapis_requests_total") > 100.0);
    for (series, value) in &before.samples {
        let name = series.split(['{', ' ']).next().unwrap();
        let is_counter = before.types.get(name).is_some_and(|kind| kind == "counter");
        assert!(!is_counter || after.samples[series] >= *value, "{series} goes back");
        assert!(value.is_finite(), "{series} {value}");
    }
    daemon.stop_well();
}

#[test]
fn the_numbers_are_what_happened() {
    let (_directory, daemon, address) = started(&[]);
    let client = daemon.connect();
    // 20 pages of a file in 5 maps; VRAM lets 15 be mapped at once, and holds 16.
    let bytes = 20 * PAGE;
    let file = Sample::new(7, usize::try_from(bytes).unwrap());
    let model = client.open_path(file.path(), 0, bytes).unwrap();
    for start in (0..bytes).step_by(usize::try_from(4 * PAGE).unwrap()) {
        let mapping = client.map(&[(&model, start..start + 4 * PAGE)], Access::Read, LONG).unwrap();
        let at = usize::try_from(start).unwrap();
        assert!(*read(&mapping, 0) == file.content()[at..at + 4 * 65536]);
    }
    let now = Scrape::of(&address);
    let is = |now: &Scrape, series: &str, expected: u64| {
        assert_eq!(now.get(series), expected as f64, "{series}");
    };
    is(&now, "lapis_hop_bytes_total{from=\"file\",to=\"ram\"}", bytes);
    is(&now, "lapis_hop_pages_total{from=\"file\",to=\"ram\"}", 20);
    is(&now, "lapis_hop_bytes_total{from=\"ram\",to=\"vram\"}", bytes);
    is(&now, "lapis_mapped_pages_total{found=\"disk\"}", 20);
    is(&now, "lapis_mapped_pages_total{found=\"vram\"}", 0);
    is(&now, "lapis_map_duration_seconds_count", 5);
    is(&now, "lapis_map_duration_seconds_bucket{le=\"+Inf\"}", 5);
    is(&now, "lapis_requests_total{op=\"map\",code=\"ok\"}", 5);
    is(&now, "lapis_requests_total{op=\"open_file\",code=\"ok\"}", 1);
    is(&now, "lapis_connections_total{result=\"opened\"}", 1);
    is(&now, "lapis_sessions", 1);
    is(&now, "lapis_allocations", 1);
    // VRAM is full, and what left it was dropped: RAM, and the file, have it.
    is(&now, "lapis_tier_capacity_bytes{tier=\"vram\"}", 1 << 20);
    is(&now, "lapis_tier_used_bytes{tier=\"vram\"}", 1 << 20);
    is(&now, "lapis_evictions_total{reason=\"demand\"}", 4);
    is(&now, "lapis_dropped_pages_total{tier=\"vram\"}", 4);
    let took = now.get("lapis_hop_seconds_total{from=\"file\",to=\"ram\"}");
    assert!(took > 0.0 && took < 60.0, "{took}");
    is(&now, "lapis_hops_in_flight{from=\"file\",to=\"ram\"}", 0);
    // A page that is in VRAM; one that was never written, and then is; one that is prefetched.
    drop(client.map(&[(&model, bytes - PAGE..bytes)], Access::Read, LONG).unwrap());
    let memory = client.allocate(2 * PAGE).unwrap();
    let mut mapping = client.map(&[(&memory, 0..PAGE)], Access::Write, LONG).unwrap();
    edit(&mut mapping, 0, |bytes| bytes.fill(9));
    is(&Scrape::of(&address), "lapis_tier_pinned_bytes{tier=\"vram\"}", PAGE);
    drop(mapping);
    memory.prefetch(PAGE..2 * PAGE).unwrap();
    until("the page is prefetched", || {
        let zeroed = Scrape::of(&address).get("lapis_hop_pages_total{from=\"zeros\",to=\"vram\"}");
        if zeroed == 2.0 { Ok(()) } else { Err(zeroed) }
    });
    drop(client.map(&[(&memory, PAGE..2 * PAGE)], Access::Read, LONG).unwrap());
    let now = Scrape::of(&address);
    is(&now, "lapis_mapped_pages_total{found=\"vram\"}", 2);
    is(&now, "lapis_mapped_pages_total{found=\"nowhere\"}", 1);
    is(&now, "lapis_prefetched_pages_total{result=\"useful\"}", 1);
    is(&now, "lapis_anonymous_bytes", 2 * PAGE);
    is(&now, "lapis_requests_total{op=\"prefetch\",code=\"ok\"}", 1);
    // And all that clients are told is the same.
    let total = client.stats().unwrap().total;
    let now = Scrape::of(&address);
    is(&now, "lapis_hop_bytes_total{from=\"vram\",to=\"ram\"}", total.vram_to_ram.bytes);
    is(&now, "lapis_hop_bytes_total{from=\"ram\",to=\"nvme\"}", total.ram_to_spill.bytes);
    is(&now, "lapis_dropped_pages_total{tier=\"vram\"}", total.dropped_vram);
    is(&now, "lapis_map_duration_seconds_count", total.maps);
    let stalled = now.get("lapis_map_duration_seconds_sum");
    assert!((stalled - total.stalled_us as f64 / 1e6).abs() < 1e-9, "{stalled}");
    drop((memory, model, client));
    nothing_is_left(&daemon);
    let now = Scrape::of(&address);
    assert_eq!(now.sum("lapis_tier_used_bytes") + now.get("lapis_allocations"), 0.0);
    let run = now.get("lapis_tier_free_run_longest_bytes{tier=\"vram\"}");
    assert_eq!(run, now.get("lapis_tier_capacity_bytes{tier=\"vram\"}"));
    daemon.stop_well();
}

#[test]
fn refusals_are_counted_by_request_and_code_when_they_are_told() {
    let (_directory, daemon, address) = started(&[]);
    let client = daemon.connect();
    let memory = client.allocate(16 * PAGE).unwrap();
    let held = client.map(&[(&memory, 0..15 * PAGE)], Access::Write, LONG).unwrap();
    let other = daemon.connect();
    for _ in 0..3 {
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let last = [(&memory, 15 * PAGE..16 * PAGE)];
                client.map(&last, Access::Read, Duration::from_millis(300)).map(drop)
            });
            until("it waits", || {
                let depth = Scrape::of(&address).get("lapis_queue_depth{queue=\"maps_for_room\"}");
                if depth == 1.0 { Ok(()) } else { Err(depth) }
            });
            // The answer to another request goes before it.
            other.stats().unwrap();
            let error = waits.join().unwrap().unwrap_err();
            assert_eq!(error.code(), Some(Code::TimedOut), "{error}");
        });
    }
    drop(other);
    drop(held);
    let error = client.map(&[(&memory, 0..16 * PAGE)], Access::Read, LONG).unwrap_err();
    assert_eq!(error.code(), Some(Code::OverCapacity), "{error}");
    let error = client.allocate(1 << 40).unwrap_err();
    let code = error.code().unwrap();
    assert!([Code::OutOfMemory, Code::TooMany].contains(&code), "{error}");
    let now = Scrape::of(&address);
    assert_eq!(now.get("lapis_requests_total{op=\"map\",code=\"timed_out\"}"), 3.0);
    assert_eq!(now.get("lapis_requests_total{op=\"stat\",code=\"ok\"}"), 3.0);
    assert_eq!(now.get("lapis_requests_total{op=\"map\",code=\"over_capacity\"}"), 1.0);
    assert_eq!(now.get("lapis_requests_total{op=\"map\",code=\"ok\"}"), 1.0);
    let refused = if code == Code::TooMany { "too_many" } else { "out_of_memory" };
    let series = format!("lapis_requests_total{{op=\"allocate\",code=\"{refused}\"}}");
    assert_eq!(now.get(&series), 1.0);
    assert_eq!(now.get("lapis_requests_total{op=\"allocate\",code=\"ok\"}"), 1.0);
    // Connections that come to nothing.
    let mut noise = std::os::unix::net::UnixStream::connect(daemon.socket()).unwrap();
    noise.write_all(&[0xff; 64]).unwrap();
    drop(std::os::unix::net::UnixStream::connect(daemon.socket()).unwrap());
    until("both are counted", || {
        let now = Scrape::of(&address);
        let count = |result| now.get(&format!("lapis_connections_total{{result=\"{result}\"}}"));
        let counts = (count("opened"), count("refused"), count("failed"));
        if counts == (2.0, 1.0, 1.0) { Ok(()) } else { Err(counts) }
    });
    drop((noise, memory, client));
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn quotas_are_shown_with_what_they_bind() {
    let (_directory, daemon, address) = started(&[]);
    let client = daemon.connect();
    let uid = nix::unistd::geteuid().as_raw();
    if uid != 0 {
        return eprintln!("SKIPPED: only root may set quotas");
    }
    assert_eq!(Scrape::of(&address).sum("lapis_quota_vram_limit_bytes"), 0.0);
    let subject = QuotaSubject::Uid(uid);
    let quota = Quota { vram_max: Some(8 * PAGE), ..Quota::none(subject) };
    client.set_quota(quota).unwrap();
    write_and_read(&client, 12);
    let memory = client.allocate(3 * PAGE).unwrap();
    let now = Scrape::of(&address);
    assert_eq!(now.get("lapis_quota_vram_limit_bytes{subject=\"user:0\"}"), 8.0 * 65536.0);
    assert!(now.get("lapis_quota_vram_used_bytes{subject=\"user:0\"}") <= 8.0 * 65536.0);
    assert_eq!(now.get("lapis_quota_anonymous_used_bytes{subject=\"user:0\"}"), 3.0 * 65536.0);
    assert!(now.get("lapis_evictions_total{reason=\"quota\"}") >= 4.0);
    drop((memory, client));
    daemon.stop_well();
}

#[test]
fn metrics_and_health_are_told_while_the_device_hangs_and_while_the_daemon_stops() {
    let (_directory, daemon, address) = started(FOR_EVER);
    assert_eq!(get(&address, "/readyz").status, 200);
    let client = daemon.connect();
    let memory = client.allocate(PAGE).unwrap();
    memory.prefetch(0..1).unwrap();
    let now = Scrape::of(&address);
    assert_eq!(now.get("lapis_hops_in_flight{from=\"zeros\",to=\"vram\"}"), 1.0);
    until_within(LONG, "it is not ready", || match get(&address, "/readyz") {
        answer if answer.status == 503 && answer.body.contains("the device or a disk hangs") => {
            Ok(())
        }
        answer => Err(answer),
    });
    // It is not dead: what needs no transfer is served.
    assert_eq!(get(&address, "/healthz").status, 200);
    let now = Scrape::of(&address);
    assert!(now.get("lapis_transfers_stalled_seconds") >= 10.0);
    assert!(now.get("lapis_hop_seconds_total{from=\"zeros\",to=\"vram\"}") >= 10.0);
    assert_eq!((now.get("lapis_ready"), now.get("lapis_healthy")), (0.0, 1.0));
    assert!(now.get("lapis_snapshot_age_seconds") < 5.0);
    client.stats().unwrap();
    // It gives the transfer ten seconds, and says so meanwhile.
    daemon.signal(Signal::SIGTERM);
    until("it is stopping", || match get(&address, "/readyz") {
        answer if answer.status == 503 && answer.body == "the daemon is stopping\n" => Ok(()),
        answer => Err(answer),
    });
    assert_eq!(get(&address, "/healthz").status, 200);
    assert_eq!(Scrape::of(&address).get("lapis_ready"), 0.0);
    drop((memory, client));
    let (status, _) = daemon.ends(LONG);
    assert_eq!(status.code(), Some(1));
    assert!(try_get(&address, "/healthz").is_err(), "nobody is left to say ok");
}

#[test]
fn metrics_and_health_are_told_while_the_reactor_hangs() {
    let (_directory, daemon, address) = started(&[]);
    let client = daemon.connect();
    write_and_read(&client, 20);
    let before = Scrape::of(&address);
    // The reactor is the main thread; only that one is stopped.
    let main = Pid::from_raw(i32::try_from(daemon.pid()).unwrap());
    if let Err(error) = ptrace::seize(main, ptrace::Options::empty()) {
        return eprintln!("SKIPPED: processes can't be traced here: {error}");
    }
    ptrace::interrupt(main).unwrap();
    waitpid(main, None).unwrap();
    assert_eq!(get(&address, "/healthz").status, 200, "a moment is no hang");
    let during = Scrape::of(&address);
    let of = "lapis_hop_bytes_total{from=\"zeros\",to=\"vram\"}";
    assert_eq!(before.get(of), during.get(of));
    until_within(LONG, "it is dead", || match get(&address, "/healthz") {
        answer if answer.status == 503 && answer.body.contains("the reactor hangs") => Ok(()),
        answer => Err(answer),
    });
    assert_eq!(get(&address, "/readyz").status, 503);
    let during = Scrape::of(&address);
    assert_eq!(before.series(), during.series());
    assert!(during.get("lapis_watchdog_age_seconds") > 5.0);
    assert!(during.get("lapis_snapshot_age_seconds") > 5.0);
    assert_eq!(during.get("lapis_healthy"), 0.0);
    ptrace::detach(main, None).unwrap();
    until("it lives", || match get(&address, "/healthz") {
        answer if answer.status == 200 => Ok(()),
        answer => Err(answer),
    });
    assert_eq!(get(&address, "/readyz").status, 200);
    drop(client);
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn a_unix_socket_has_the_mode_of_the_other_and_goes_with_the_daemon() {
    let directory = scratch();
    let socket = directory.path().join("metrics");
    let flags = ["--metrics-socket", socket.to_str().unwrap(), "--socket-mode", "0640"];
    let (daemon, _address) = start(directory.path(), &flags);
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    assert_eq!(get_unix(&socket, "/readyz").body, "ok\n");
    let scrape = Scrape::parse(&get_unix(&socket, "/metrics").body);
    assert_eq!(scrape.get("lapis_tier_capacity_bytes{tier=\"vram\"}"), 1_048_576.0);
    daemon.stop_well();
    assert!(!socket.exists());
}

#[test]
fn a_port_in_use_is_said_with_what_to_do() {
    let directory = scratch();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let flags = [SMALL, &["--metrics", &address]].concat();
    let (status, said) =
        failed_start(Command::new(lapisd()).args(arguments(directory.path(), &flags)));
    assert_eq!(status, 1);
    let expected = format!("error: cannot serve metrics on {address}: Address already in use");
    assert!(said.contains(&expected) && said.contains("--metrics"), "{said}");
}

#[test]
fn promtool_finds_nothing_to_say() {
    if !has_program("promtool") {
        return;
    }
    let (_directory, daemon, address) = started(&[]);
    let text = get(&address, "/metrics").body;
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
    daemon.stop_well();
}

/// A Prometheus server of this test's own; killed when dropped.
struct Prometheus {
    child: std::process::Child,
    address: String,
    _directory: TempDir,
}

impl Prometheus {
    fn start(target: &str) -> Prometheus {
        let directory = scratch();
        let config = directory.path().join("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}\n\
             scrape_configs: [{{job_name: lapis, static_configs: [{{targets: [\"{target}\"]}}]}}]\n"
        );
        std::fs::write(&config, text).unwrap();
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", directory.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Prometheus { child, address, _directory: directory }
    }

    /// The value of the only series that a query finds.
    fn query(&self, query: &str) -> Option<f64> {
        let coded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let answer = try_get(&self.address, &format!("/api/v1/query?query={coded}")).ok()?;
        let json: serde_json::Value = serde_json::from_str(&answer.body).ok()?;
        json["data"]["result"][0]["value"][1].as_str()?.parse().ok()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _waited = self.child.wait();
    }
}

#[test]
fn a_prometheus_server_scrapes_it_and_answers_for_it() {
    if !has_program("prometheus") {
        return;
    }
    let (_directory, daemon, address) = started(&[]);
    let prometheus = Prometheus::start(&address);
    let finds = |query: &str, expected: f64| {
        until_within(LONG, query, || match prometheus.query(query) {
            Some(value) if value == expected => Ok(()),
            other => Err(other),
        });
    };
    finds("up", 1.0);
    let client = daemon.connect();
    let bytes = 20 * PAGE;
    let file = Sample::new(3, usize::try_from(bytes).unwrap());
    let model = client.open_path(file.path(), 0, bytes).unwrap();
    for start in (0..bytes).step_by(65536) {
        drop(client.map(&[(&model, start..start + PAGE)], Access::Read, LONG).unwrap());
    }
    finds("lapis_hop_bytes_total{from=\"file\"}", bytes as f64);
    finds("sum(lapis_requests_total{op=\"map\",code=\"ok\"})", 20.0);
    finds("lapis_map_duration_seconds_count", 20.0);
    finds("lapis_ready", 1.0);
    drop((model, client));
    daemon.stop_well();
    finds("up", 0.0);
}

/// A file of the repository.
fn repository(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(path)
}

/// The metrics of Lapis, and of its process, that a text speaks of.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    let ours = |word: &&str| word.starts_with("lapis_") || word.starts_with("process_");
    words.filter(ours).map(str::to_owned).collect()
}

/// All expressions in a value, wherever they are.
fn expressions(value: &serde_json::Value, found: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            let expression = fields.get("expr").or(fields.get("query"));
            found.extend(expression.and_then(|text| text.as_str()).map(str::to_owned));
            fields.values().for_each(|value| expressions(value, found));
        }
        serde_json::Value::Array(values) => values.iter().for_each(|v| expressions(v, found)),
        _ => {}
    }
}

#[test]
fn every_metric_of_the_dashboard_the_alerts_and_the_documents_is_there() {
    let (_directory, daemon, address) = started(&[]);
    let client = daemon.connect();
    if nix::unistd::geteuid().is_root() {
        // Quotas are shown when there are some.
        let subject = QuotaSubject::Uid(0);
        let (vram_max, anonymous_max) = (Some(8 * PAGE), Some(8 * PAGE));
        client.set_quota(Quota { vram_max, anonymous_max, ..Quota::none(subject) }).unwrap();
    }
    let scrape = Scrape::of(&address);
    let there: BTreeSet<String> =
        scrape.series().iter().map(|series| series.split('{').next().unwrap().to_owned()).collect();
    let dashboard = std::fs::read_to_string(repository("docs/grafana/lapis.json")).unwrap();
    let mut found = Vec::new();
    expressions(&serde_json::from_str(&dashboard).unwrap(), &mut found);
    assert!(found.len() > 30, "{found:?}");
    let read = |path| std::fs::read_to_string(repository(path)).unwrap();
    let texts = [
        ("the dashboard", found.join("\n")),
        ("the alerts", read("docs/prometheus/lapis.rules.yml")),
        ("the test of the alerts", read("docs/prometheus/lapis.test.yml")),
        ("operations.md", read("docs/operations.md")),
    ];
    for (place, text) in texts {
        let missing: Vec<_> = metrics_in(&text)
            .into_iter()
            .filter(|name| !there.contains(name) && !there.contains(&format!("{name}_count")))
            .filter(|name| nix::unistd::geteuid().is_root() || !name.starts_with("lapis_quota_"))
            .collect();
        assert!(missing.is_empty(), "{place} speaks of {missing:?}");
    }
    // And none is there that the documents do not explain.
    let explained = metrics_in(&read("docs/operations.md"));
    let family = |name: &String| {
        let bare = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        bare.map_or(name.clone(), str::to_owned)
    };
    let unexplained: BTreeSet<_> = there
        .iter()
        .filter(|name| name.starts_with("lapis_"))
        .filter(|name| !explained.contains(*name) && !explained.contains(&family(name)))
        .collect();
    assert!(unexplained.is_empty(), "operations.md does not explain {unexplained:?}");
    drop(client);
    daemon.stop_well();
}

#[test]
fn the_alerts_are_valid_fire_when_they_should_and_are_explained() {
    let rules = std::fs::read_to_string(repository("docs/prometheus/lapis.rules.yml")).unwrap();
    let operations = std::fs::read_to_string(repository("docs/operations.md")).unwrap();
    let names: Vec<_> = rules.lines().filter_map(|l| l.trim().strip_prefix("- alert: ")).collect();
    assert!(names.len() > 10);
    for name in names {
        assert!(operations.contains(&format!("`{name}`")), "operations.md does not explain {name}");
    }
    if !has_program("promtool") {
        return;
    }
    for arguments in [["check", "rules", "lapis.rules.yml"], ["test", "rules", "lapis.test.yml"]] {
        let mut promtool = Command::new("promtool");
        let directory = repository("docs/prometheus");
        let output = promtool.args(arguments).current_dir(directory).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
    }
}
