use super::*;

fn pass(kind: PassKind, millis: u64, vram_bytes: u64) -> PassReport {
    PassReport {
        kind,
        time: Duration::from_millis(millis),
        stalled: Duration::from_micros(1500),
        verifying: Duration::from_millis(20),
        bytes: 1 << 30,
        bytes_per_s: pace::rate(1 << 30, Duration::from_millis(millis)),
        moved: Moved { ram_to_vram_bytes: vram_bytes, ..Moved::default() },
        hits: Hits { vram_pages: 1, ram_pages: 20, miss_pages: 300 },
        ideal: None,
        efficiency: None,
    }
}

fn report() -> Report {
    Report {
        schema: SCHEMA,
        result: Outcome::Ok,
        model: ModelReport {
            path: "/models/tiny.safetensors".into(),
            bytes: 1 << 30,
            tensors: 146,
            layers: 18,
            parts: 18,
        },
        daemon: DaemonReport {
            version: "0.1.0".to_owned(),
            embedded: true,
            socket: "/tmp/lapis/lapis.sock".into(),
            device: "sim",
            page_size_bytes: 2 << 20,
            vram_bytes: 128 << 20,
            ram_bytes: 256 << 20,
            nvme_bytes: 0,
            shared: false,
        },
        passes: vec![pass(PassKind::Verify, 500, 1 << 30), pass(PassKind::Verify, 12_500, 0)],
        moved: Moved {
            file_to_ram_bytes: 1 << 30,
            ram_to_vram_bytes: 3 << 29,
            vram_to_ram_bytes: 0,
            ram_to_spill_bytes: 4096,
            spill_to_ram_bytes: 100,
        },
        hits: Hits { vram_pages: 2, ram_pages: 40, miss_pages: 600 },
        prefetch: Prefetched { useful_pages: 7, late_pages: 8, wasted_pages: 9 },
        stalled: Duration::from_millis(3),
        verified: Verified { tensors: 146, passes: 2, bytes: 2 << 30 },
        compute: None,
        mismatches: Vec::new(),
    }
}

#[test]
fn the_table_shows_passes_hops_and_the_result() {
    let expected = "\
model   /models/tiny.safetensors: 1.00 GiB, 146 tensors, 18 layers
daemon  lapisd 0.1.0, embedded: sim device, VRAM 128.00 MiB, RAM 256.00 MiB, NVMe 0 B, pages of 2.00 MiB

pass          time  stalled  verifying  throughput  VRAM hits  RAM hits  misses
1 verify  500.0 ms   1.5 ms    20.0 ms   2.15 GB/s          1        20     300
2 verify    12.5 s   1.5 ms    20.0 ms   85.9 MB/s          1        20     300

hop              moved
file to RAM   1.00 GiB
RAM to VRAM   1.50 GiB
VRAM to RAM        0 B
RAM to spill  4.00 KiB
spill to RAM     100 B

prefetch  7 pages useful, 8 late, 9 wasted
stalled   3.0 ms
result    ok: verified 146 tensors x 2 passes
";
    assert_eq!(report().table(), expected);
}

#[test]
fn mismatches_are_named_and_counted() {
    let mut report = report();
    report.result = Outcome::Mismatch;
    report.verified.tensors = 145;
    report.daemon.embedded = false;
    report.daemon.shared = true;
    report.model.parts = 40;
    let mismatch = Mismatch { pass: 2, tensor: "wte".to_owned(), first: 5, last: 9, count: 3 };
    report.mismatches = vec![mismatch; 12];
    let table = report.table();
    assert!(table.contains("18 layers in 40 parts\n"), "{table}");
    assert!(table.contains("lapisd 0.1.0, at /tmp/lapis/lapis.sock: sim device"), "{table}");
    assert!(
        table.contains("other sessions were open: the bytes moved include theirs\n"),
        "{table}"
    );
    let line = "mismatch  pass 2, wte: 3 bytes differ, from byte 5 to byte 9 of the tensor\n";
    assert_eq!(table.matches(line).count(), 10);
    assert!(table.ends_with(
        "mismatch  and 2 more: see -o json\n\
         result    MISMATCH: 145 of 146 tensors right in all 2 passes\n"
    ));
}

#[test]
fn compute_is_judged_against_the_best_rate() {
    let mut report = report();
    report.passes = vec![
        pass(PassKind::Verify, 10, 1_000_000_000),
        pass(PassKind::Stream, 500, 1_000_000_000),
        pass(PassKind::Compute, 1000, 1_600_000_000),
        pass(PassKind::Compute, 1000, 100_000_000),
    ];
    let compute = Compute::judge(Duration::from_millis(20), 20, None, &mut report.passes);
    assert_eq!(compute.pass, Duration::from_millis(400));
    assert_eq!(compute.best_bytes_per_s, Some(2e9));
    let ideals: Vec<_> = report.passes.iter().map(|pass| pass.ideal).collect();
    let millis = |millis| Some(Duration::from_millis(millis));
    assert_eq!(ideals, [None, None, millis(800), millis(400)]);
    assert_eq!(report.passes[2].efficiency, Some(0.8));
    assert_eq!(format!("{:.3}", compute.efficiency), "0.600");
    report.compute = Some(compute);
    let table = report.table();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(
        lines[3..8],
        [
            "pass           time  stalled  verifying   throughput  VRAM hits  RAM hits  misses     ideal  efficiency",
            "1 verify    10.0 ms   1.5 ms    20.0 ms  107.37 GB/s          1        20     300         -           -",
            "2 stream   500.0 ms   1.5 ms          -    2.15 GB/s          1        20     300         -           -",
            "3 compute   1.000 s   1.5 ms          -    1.07 GB/s          1        20     300  800.0 ms      80.0 %",
            "4 compute   1.000 s   1.5 ms          -    1.07 GB/s          1        20     300  400.0 ms      40.0 %",
        ]
    );
    assert!(table.contains(
        "compute   20.0 ms a layer, 400.0 ms a pass; best rate to VRAM 2.00 GB/s; efficiency 60.0 %\n"
    ));
}

#[test]
fn a_model_that_stays_in_vram_has_no_rate() {
    let mut passes = [pass(PassKind::Stream, 1, 0), pass(PassKind::Compute, 100, 0)];
    let compute = Compute::judge(Duration::from_millis(5), 10, None, &mut passes);
    assert_eq!(compute.best_bytes_per_s, None);
    assert_eq!(passes[1].efficiency, Some(0.5));
}

#[test]
fn a_configured_link_is_the_rate_if_it_is_faster() {
    let mut passes = [pass(PassKind::Stream, 1000, 100), pass(PassKind::Compute, 1000, 100)];
    let judge = |link, passes: &mut [PassReport]| {
        Compute::judge(Duration::ZERO, 1, Some(link), passes).best_bytes_per_s
    };
    assert_eq!(judge(400.0, &mut passes), Some(400.0));
    assert_eq!(passes[1].efficiency, Some(0.25));
    assert_eq!(judge(50.0, &mut passes), Some(100.0));
    assert_eq!(passes[1].efficiency, Some(1.0));
}

#[test]
fn an_unverified_run_says_so() {
    let mut report = report();
    report.result = Outcome::Unverified;
    report.passes[0].kind = PassKind::Stream;
    let table = report.table();
    assert!(table.contains("1 stream  500.0 ms   1.5 ms          -   2.15 GB/s"), "{table}");
    assert!(table.ends_with("result    not verified (--no-verify)\n"), "{table}");
}

#[test]
fn the_json_is_one_line_with_a_schema() {
    let mut report = report();
    report.passes.truncate(1);
    report.passes[0].bytes_per_s = Some(2.5);
    report.passes[0].ideal = Some(Duration::from_micros(7));
    report.mismatches =
        vec![Mismatch { pass: 1, tensor: "a\"b".to_owned(), first: 0, last: 1, count: 2 }];
    let expected = concat!(
        r#"{"schema":1,"result":"ok","#,
        r#""model":{"path":"/models/tiny.safetensors","bytes":1073741824,"tensors":146,"layers":18,"parts":18},"#,
        r#""daemon":{"version":"0.1.0","embedded":true,"socket":"/tmp/lapis/lapis.sock","device":"sim","#,
        r#""page_size_bytes":2097152,"vram_bytes":134217728,"ram_bytes":268435456,"nvme_bytes":0,"shared":false},"#,
        r#""passes":[{"kind":"verify","time_us":500000,"stalled_us":1500,"verifying_us":20000,"bytes":1073741824,"#,
        r#""bytes_per_s":2.5,"moved":{"file_to_ram_bytes":0,"ram_to_vram_bytes":1073741824,"vram_to_ram_bytes":0,"#,
        r#""ram_to_spill_bytes":0,"spill_to_ram_bytes":0},"#,
        r#""hits":{"vram_pages":1,"ram_pages":20,"miss_pages":300},"ideal_us":7,"efficiency":null}],"#,
        r#""moved":{"file_to_ram_bytes":1073741824,"ram_to_vram_bytes":1610612736,"vram_to_ram_bytes":0,"#,
        r#""ram_to_spill_bytes":4096,"spill_to_ram_bytes":100},"#,
        r#""hits":{"vram_pages":2,"ram_pages":40,"miss_pages":600},"#,
        r#""prefetch":{"useful_pages":7,"late_pages":8,"wasted_pages":9},"stalled_us":3000,"#,
        r#""verified":{"tensors":146,"passes":2,"bytes":2147483648},"compute":null,"#,
        r#""mismatches":[{"pass":1,"tensor":"a\"b","first":0,"last":1,"count":2}]}"#,
        "\n"
    );
    assert_eq!(crate::output::json(&report), expected);
}

#[test]
fn counters_are_told_apart_by_their_difference() {
    let hop = |bytes| lapis::HopStats { pages: 1, bytes, errors: 0 };
    let before =
        Counters { file_to_ram: hop(10), hits_vram: 3, prefetch_late: 1, ..Counters::default() };
    let after = Counters {
        file_to_ram: hop(25),
        ram_to_vram: hop(1),
        vram_to_ram: hop(2),
        ram_to_spill: hop(3),
        spill_to_ram: hop(4),
        hits_vram: 5,
        hits_ram: 6,
        misses: 7,
        prefetch_useful: 8,
        prefetch_late: 10,
        prefetch_wasted: 11,
        ..Counters::default()
    };
    let moved = Moved {
        file_to_ram_bytes: 15,
        ram_to_vram_bytes: 1,
        vram_to_ram_bytes: 2,
        ram_to_spill_bytes: 3,
        spill_to_ram_bytes: 4,
    };
    assert_eq!(Moved::between(&before, &after), moved);
    let hits = Hits { vram_pages: 2, ram_pages: 6, miss_pages: 7 };
    assert_eq!(Hits::between(&before, &after), hits);
    let prefetched = Prefetched { useful_pages: 8, late_pages: 9, wasted_pages: 11 };
    assert_eq!(Prefetched::between(&before, &after), prefetched);
}
