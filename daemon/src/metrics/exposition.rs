//! The numbers in Prometheus's text format. Names and labels are what dashboards and alerts are made of: they are listed
//! in `docs/operations.md`, and not changed lightly.
//!
//! Every series is there from the first scrape on, at 0; labels have few and known values. Families are made for each
//! scrape from plain numbers, on the thread that answers it.

use lapis_proto::message::{DeviceKind, HopStats, Quota, QuotaSubject};
use prometheus::proto::{
    Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType,
};
use prometheus::{TEXT_FORMAT, TextEncoder};

use super::board::{Board, DeviceFacts};
use super::process::Process;
use super::snapshot::Snapshot;
use crate::engine::stats::longest_run;
use crate::engine::tally::{Eviction, Failure, HopKind, WAIT_BUCKETS, Waits};

/// What the text is.
pub(super) const CONTENT_TYPE: &str = TEXT_FORMAT;

const TIERS: [&str; 3] = ["vram", "ram", "nvme"];

type Labels = Vec<(&'static str, String)>;
type Sample = (Labels, f64);

/// One label.
fn one(name: &'static str, value: &str) -> Labels {
    vec![(name, value.to_owned())]
}

fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

#[derive(Default)]
struct Families(Vec<MetricFamily>);

impl Families {
    fn add(&mut self, kind: MetricType, name: &str, help: &str, metrics: Vec<Metric>) {
        if metrics.is_empty() {
            return;
        }
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(kind);
        family.set_metric(metrics);
        self.0.push(family);
    }

    fn gauges(&mut self, name: &str, help: &str, samples: impl IntoIterator<Item = Sample>) {
        let metrics = samples.into_iter().map(|(labels, value)| {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            let mut metric = Metric::from_label(pairs(labels));
            metric.set_gauge(gauge);
            metric
        });
        self.add(MetricType::GAUGE, name, help, metrics.collect());
    }

    fn counters(&mut self, name: &str, help: &str, samples: impl IntoIterator<Item = Sample>) {
        debug_assert!(name.ends_with("_total"), "{name}");
        let metrics = samples.into_iter().map(|(labels, value)| {
            let mut counter = Counter::default();
            counter.set_value(value);
            let mut metric = Metric::from_label(pairs(labels));
            metric.set_counter(counter);
            metric
        });
        self.add(MetricType::COUNTER, name, help, metrics.collect());
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.gauges(name, help, [(Vec::new(), value)]);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.counters(name, help, [(Vec::new(), value as f64)]);
    }

    fn waits(&mut self, name: &str, help: &str, waits: &Waits) {
        let bucket = |index: usize| {
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(seconds(Waits::bound_us(index)));
            bucket.set_cumulative_count(waits.buckets[..=index].iter().sum());
            bucket
        };
        let buckets: Vec<_> = (0..WAIT_BUCKETS).map(bucket).collect();
        let mut histogram = Histogram::default();
        histogram.set_bucket(buckets);
        histogram.set_sample_count(waits.buckets.iter().sum());
        histogram.set_sample_sum(seconds(waits.sum_us));
        let mut metric = Metric::default();
        metric.set_histogram(histogram);
        self.add(MetricType::HISTOGRAM, name, help, vec![metric]);
    }
}

fn pairs(labels: Labels) -> Vec<LabelPair> {
    let pair = |(name, value): (&str, String)| {
        let mut pair = LabelPair::default();
        pair.set_name(name.to_owned());
        pair.set_value(value);
        pair
    };
    labels.into_iter().map(pair).collect()
}

/// All metrics of this moment.
#[must_use]
pub fn text(board: &Board, snapshot: &Snapshot) -> String {
    let mut families = Families::default();
    daemon(&mut families, board, snapshot);
    tiers(&mut families, snapshot);
    hops(&mut families, board, snapshot);
    paging(&mut families, snapshot);
    clients(&mut families, snapshot);
    quotas(&mut families, snapshot);
    process(&mut families);
    let text = TextEncoder::new().encode_to_string(&families.0);
    text.expect("families have names, and none is empty")
}

/// The UUID as `nvidia-smi -L` prints it.
fn uuid(device: &DeviceFacts) -> String {
    if device.kind == DeviceKind::Sim {
        return String::new();
    }
    let hex: String = device.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    format!("GPU-{}", parts.join("-"))
}

fn daemon(families: &mut Families, board: &Board, snapshot: &Snapshot) {
    let version = one("version", env!("CARGO_PKG_VERSION"));
    families.gauges("lapis_build_info", "The daemon's version.", [(version, 1.0)]);
    let device = board.device().map(|device| {
        let kind = match device.kind {
            DeviceKind::Sim => "sim",
            DeviceKind::Cuda => "cuda",
        };
        let labels = vec![
            ("kind", kind.to_owned()),
            ("uuid", uuid(device)),
            ("name", device.name.clone()),
            ("unified", device.unified.to_string()),
            ("store", device.store.to_owned()),
        ];
        (labels, 1.0)
    });
    let help =
        "The device that holds VRAM, and how files are read; missing while the daemon starts.";
    families.gauges("lapis_device_info", help, device);
    let flag = |yes: bool| f64::from(u8::from(yes));
    let (signs, health) = (board.signs(), board.health());
    let lost = board.phase() == super::board::Phase::Lost;
    families.gauge("lapis_device_lost", "Whether the device failed for good.", flag(lost));
    families.gauge("lapis_healthy", "Whether /healthz says ok.", flag(health.alive.is_ok()));
    families.gauge("lapis_ready", "Whether /readyz says ok.", flag(health.ready.is_ok()));
    let help = "Time since the reactor last turned; it turns twice a second.";
    families.gauge("lapis_watchdog_age_seconds", help, signs.silent.as_secs_f64());
    let age = seconds(board.now_us().saturating_sub(snapshot.taken_us));
    families.gauge("lapis_snapshot_age_seconds", "Age of the numbers of this scrape.", age);
    let help = "Time without a transfer ending while some are under way.";
    families.gauge("lapis_transfers_stalled_seconds", help, signs.stalled.as_secs_f64());
}

fn tiers(families: &mut Families, snapshot: &Snapshot) {
    let engine = &snapshot.engine;
    let tiers = || TIERS.iter().zip(&engine.tiers);
    let mut bytes = |name: &str, help: &str, of: fn(&lapis_proto::message::TierStats) -> u64| {
        families.gauges(name, help, tiers().map(|(t, stats)| (one("tier", t), of(stats) as f64)));
    };
    bytes("lapis_tier_capacity_bytes", "Size of the tier.", |tier| tier.capacity);
    bytes("lapis_tier_used_bytes", "Frames that hold a page.", |tier| tier.used);
    let help = "Pages that may not be moved now: mapped, or in the middle of a transfer.";
    bytes("lapis_tier_pinned_bytes", help, |tier| tier.pinned);
    let help =
        "Whether the tier does not take what it should: writes fail, or frames are out of use.";
    bytes("lapis_tier_degraded", help, |tier| u64::from(tier.degraded));
    let runs = TIERS.iter().zip(&engine.free).map(|(tier, free)| {
        let run = u64::from(longest_run(free.clone())) * engine.page_size;
        (one("tier", tier), run as f64)
    });
    let help =
        "Longest run of neighbouring free frames: the tier's fragmentation. No request needs one.";
    families.gauges("lapis_tier_free_run_longest_bytes", help, runs);
    let page = |count: u64| (count * engine.page_size) as f64;
    let help = "VRAM that is to be made yet, at the start or as the tier grows.";
    families.gauge("lapis_vram_growing_bytes", help, page(engine.growing));
    let help = "VRAM frames that clients were asked to give back and have not.";
    families.gauge("lapis_vram_quarantined_bytes", help, page(engine.revoking));
    let help = "VRAM frames that clients were asked to give back.";
    families.counter("lapis_revocations_total", help, engine.tally.revocations);
    let (anonymous, most) = engine.anonymous;
    families.gauge("lapis_anonymous_bytes", "Anonymous allocations.", anonymous as f64);
    let help = "Most that anonymous allocations may have: what RAM and spill can hold.";
    families.gauge("lapis_anonymous_limit_bytes", help, most as f64);
    let metadata = engine.metadata_bytes as f64;
    families.gauge("lapis_page_metadata_bytes", "Memory that the page table takes.", metadata);
}

fn hops(families: &mut Families, board: &Board, snapshot: &Snapshot) {
    let (total, tally) = (&snapshot.engine.total, &snapshot.engine.tally);
    // With one memory for both there is no RAM tier: reads go to VRAM.
    let ram = if board.device().is_some_and(|d| d.unified) { "vram" } else { "ram" };
    let of = |kind: HopKind| -> (Labels, HopStats) {
        let (from, to, stats) = match kind {
            HopKind::FileToRam => ("file", ram, total.file_to_ram),
            HopKind::SpillToRam => ("nvme", ram, total.spill_to_ram),
            HopKind::RamToVram => ("ram", "vram", total.ram_to_vram),
            HopKind::VramToRam => ("vram", "ram", total.vram_to_ram),
            HopKind::RamToSpill => (ram, "nvme", total.ram_to_spill),
            HopKind::Zero => ("zeros", "vram", total.zeroed),
        };
        (vec![("from", from.to_owned()), ("to", to.to_owned())], stats)
    };
    let mut counters = |name: &str, help: &str, number: fn(HopStats) -> u64| {
        let samples = HopKind::ALL.map(|kind| {
            let (labels, stats) = of(kind);
            (labels, number(stats) as f64)
        });
        families.counters(name, help, samples);
    };
    counters("lapis_hop_pages_total", "Pages moved.", |hop| hop.pages);
    counters("lapis_hop_bytes_total", "Bytes moved, padding left out.", |hop| hop.bytes);
    counters("lapis_hop_errors_total", "Transfers that failed.", |hop| hop.errors);
    let flow = |kind: HopKind| (of(kind).0, tally.flows[kind as usize]);
    let busy =
        HopKind::ALL.map(flow).map(|(labels, flow)| (labels, flow.busy_us(snapshot.engine_us)));
    let help =
        "Time that transfers took, each from order to completion; those under way count so far.";
    let busy = busy.map(|(labels, us)| (labels, seconds(us)));
    families.counters("lapis_hop_seconds_total", help, busy);
    let under_way = HopKind::ALL.map(flow).map(|(labels, flow)| (labels, flow.in_flight as f64));
    families.gauges("lapis_hops_in_flight", "Transfers ordered and not completed.", under_way);
    let failures = Failure::ALL.map(|failure| {
        let name = match failure {
            Failure::Io => "io",
            Failure::Truncated => "truncated",
            Failure::Changed => "changed",
            Failure::Checksum => "checksum",
            Failure::Device => "device",
        };
        (one("reason", name), tally.failures[failure as usize] as f64)
    });
    families.counters("lapis_transfer_errors_total", "Failed transfers by reason.", failures);
    let help = "Spilled pages that came back different.";
    families.counter("lapis_checksum_errors_total", help, total.checksum_errors);
    let help = "Reads tried again after they failed.";
    families.counter("lapis_read_retries_total", help, total.read_retries);
}

fn paging(families: &mut Families, snapshot: &Snapshot) {
    let (total, tally) = (&snapshot.engine.total, &snapshot.engine.tally);
    let help = "From a map request to its grant.";
    families.waits("lapis_map_duration_seconds", help, &tally.waits);
    let labelled = |label: &'static str, numbers: &[(&str, u64)]| -> Vec<Sample> {
        numbers.iter().map(|(value, number)| (one(label, value), *number as f64)).collect()
    };
    let found = [
        ("vram", total.hits_vram),
        ("ram", total.hits_ram),
        ("disk", total.misses),
        ("nowhere", total.zero_fills),
    ];
    let help = "Pages of granted maps, by where they were; nowhere: never written.";
    families.counters("lapis_mapped_pages_total", help, labelled("found", &found));
    let result = [
        ("useful", total.prefetch_useful),
        ("late", total.prefetch_late),
        ("wasted", total.prefetch_wasted),
    ];
    let help = "Prefetched pages: there in time, still under way when mapped, evicted unused.";
    families.counters("lapis_prefetched_pages_total", help, labelled("result", &result));
    let evictions = Eviction::ALL.map(|why| {
        let name = match why {
            Eviction::Demand => "demand",
            Eviction::Prefetch => "prefetch",
            Eviction::Quota => "quota",
            Eviction::Resize => "resize",
        };
        (one("reason", name), tally.evictions[why as usize] as f64)
    });
    let help = "Pages that had to leave VRAM, by what needed the room.";
    families.counters("lapis_evictions_total", help, evictions);
    let dropped = [("vram", total.dropped_vram), ("ram", total.dropped_ram)];
    let help = "Copies that went without being moved, as another remained.";
    families.counters("lapis_dropped_pages_total", help, labelled("tier", &dropped));
    let queues = &snapshot.engine.queues;
    let depths = [
        ("maps_for_room", queues.maps_for_room),
        ("maps_for_bytes", queues.maps_for_bytes),
        ("flushes", queues.flushes),
        ("resizes", queues.resizes),
        ("pages_for_vram", queues.pages_for_vram),
        ("prefetches_for_vram", queues.prefetches_for_vram),
        ("pages_for_ram", queues.pages_for_ram),
        ("pages_to_flush", queues.pages_to_flush),
        ("hops_for_store", snapshot.waiting.0),
        ("hops_for_device", snapshot.waiting.1),
    ];
    families.gauges("lapis_queue_depth", "What waits, and for what.", labelled("queue", &depths));
}

fn clients(families: &mut Families, snapshot: &Snapshot) {
    let engine = &snapshot.engine;
    families.gauge("lapis_sessions", "Open sessions.", engine.sessions as f64);
    let help = "Sessions that are closed and whose process lives on with what it had mapped.";
    families.gauge("lapis_sessions_lingering", help, engine.lingering as f64);
    families.gauge("lapis_allocations", "Live allocations.", engine.allocations as f64);
    families.gauge("lapis_mappings", "Live mappings.", engine.mappings as f64);
    let connections = &snapshot.connections;
    let results = [
        ("opened", connections.opened),
        ("refused", connections.refused),
        ("failed", connections.failed),
    ];
    let results = results.map(|(result, count)| (one("result", result), count as f64));
    let help = "Connections, by what became of their hello.";
    families.counters("lapis_connections_total", help, results);
    let requests = snapshot
        .requests
        .iter()
        .map(|(op, code, count)| (vec![("op", op), ("code", code)], count as f64));
    let help = "Requests answered, by answer; op none: messages that are no requests.";
    families.counters("lapis_requests_total", help, requests);
}

fn quotas(families: &mut Families, snapshot: &Snapshot) {
    let quotas = &snapshot.engine.quotas;
    let subject = |quota: &Quota| match quota.subject {
        QuotaSubject::Uid(uid) => one("subject", &format!("user:{uid}")),
        QuotaSubject::Gid(gid) => one("subject", &format!("group:{gid}")),
        QuotaSubject::EachUid => one("subject", "each-user"),
        QuotaSubject::EachSession => one("subject", "each-session"),
    };
    let mut gauges = |name: &str, help: &str, of: fn(&(Quota, u64, u64)) -> Option<u64>| {
        let samples = quotas.iter().filter_map(|quota| {
            let value = of(quota)?;
            Some((subject(&quota.0), value as f64))
        });
        families.gauges(name, help, samples);
    };
    let help = "VRAM that a user's or group's pages hold, of those with a quota.";
    gauges("lapis_quota_vram_used_bytes", help, |(_, vram, _)| Some(*vram));
    let help = "Most VRAM that a quota allows.";
    gauges("lapis_quota_vram_limit_bytes", help, |(quota, ..)| quota.vram_max);
    let help = "VRAM that a quota reserves.";
    gauges("lapis_quota_vram_reserved_bytes", help, |(quota, ..)| Some(quota.vram_reserved));
    let help = "Anonymous memory of a user or group with a quota.";
    gauges("lapis_quota_anonymous_used_bytes", help, |(_, _, anonymous)| Some(*anonymous));
    let help = "Most anonymous memory that a quota allows.";
    gauges("lapis_quota_anonymous_limit_bytes", help, |(quota, ..)| quota.anonymous_max);
}

fn process(families: &mut Families) {
    let process = Process::now();
    let help = "Total user and system CPU time spent in seconds.";
    let cpu = [(Vec::new(), process.cpu_seconds)];
    families.counters("process_cpu_seconds_total", help, cpu);
    let mut gauge = |name: &str, help: &str, value: f64| families.gauge(name, help, value);
    gauge("process_open_fds", "Number of open file descriptors.", process.open_fds as f64);
    let help = "Maximum number of open file descriptors.";
    gauge("process_max_fds", help, process.max_fds as f64);
    let help = "Virtual memory size in bytes.";
    gauge("process_virtual_memory_bytes", help, process.virtual_bytes as f64);
    let help = "Resident memory size in bytes.";
    gauge("process_resident_memory_bytes", help, process.resident_bytes as f64);
    let help = "Start time of the process since unix epoch in seconds.";
    gauge("process_start_time_seconds", help, process.start_seconds);
    gauge("process_threads", "Number of OS threads in the process.", process.threads as f64);
}
