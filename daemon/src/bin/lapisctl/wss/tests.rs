use lapis::CurvePoint;

use super::*;

fn set(pattern: AccessPattern, hits: &[(u64, u32)]) -> SessionSet {
    let point = |(pages, hits_per_million): &(u64, u32)| CurvePoint {
        pages: *pages,
        hits_per_million: *hits_per_million,
    };
    SessionSet {
        session: SessionId(5),
        uid: 1000,
        pages: 100,
        pattern,
        windows: [10, 60, 100],
        counters: Counters {
            hits_vram: 30,
            hits_ram: 60,
            misses: 10,
            stalled_us: 1500,
            ..Counters::default()
        },
        curve: hits.iter().map(point).collect(),
    }
}

fn report(set: SessionSet, vram_bytes: u64) -> Report {
    let sets = WorkingSets { leader: Recency::Lirs, sessions: vec![set] };
    Report::new(&sets, 1 << 20, vram_bytes)
}

#[test]
fn the_list_has_a_line_for_each_session() {
    let report = report(set(AccessPattern::Cycle { steps: 80 }, &[]), 50 << 20);
    assert_eq!(
        report.list(),
        "session   uid      pattern  used in 10 s  used in 1 min  used in 10 min   allocated  VRAM hits  stalled\n\
         5        1000  cycle of 80     10.00 MiB      60.00 MiB      100.00 MiB  100.00 MiB      0.300   1.5 ms\n"
    );
}

#[test]
fn the_plot_fits_its_width_and_marks_vram() {
    let cliff = [(25, 0), (50, 0), (75, 0), (100, 900_000)];
    let report = report(set(AccessPattern::None, &cliff), 50 << 20);
    let text = report.details(48);
    let plot: Vec<&str> = text.lines().skip_while(|line| !line.contains("1.0 |")).collect();
    assert_eq!(plot[0].trim_end(), "  1.0 |                   |");
    assert_eq!(plot[1].trim_end(), "      |                   |                   *");
    assert_eq!(plot[10].trim_end(), "  0.0 |***************************************.");
    assert_eq!(plot[11], format!("      +{}", "-".repeat(40)));
    assert_eq!(plot[12], format!("       0{}100.00 MiB", " ".repeat(29)));
    assert_eq!(plot[13], "       | VRAM, 50.00 MiB");
    assert!(text.lines().all(|line| line.len() <= 72), "{text}");
    assert!(text.contains("with 50.00 MiB of VRAM the hit ratio would be 0.00\n"), "{text}");
    assert!(text.contains("with 100.00 MiB of VRAM the hit ratio would be 0.90\n"), "{text}");
}

#[test]
fn any_width_and_any_curve_can_be_drawn() {
    for width in [0, 1, 19, 20, 79, 100_000] {
        for curve in [&[][..], &[(0, 0)], &[(1, 1_000_000)], &[(u64::MAX, 5), (u64::MAX, 6)]] {
            let text = report(set(AccessPattern::None, curve), u64::MAX).details(width);
            assert!(text.lines().all(|line| line.len() <= 170), "{text}");
        }
    }
}

#[test]
fn the_json_has_sizes_in_bytes() {
    let report = report(set(AccessPattern::Planned { steps: 3 }, &[(50, 500_000)]), 7);
    let json = output::json(&report);
    assert!(json.starts_with(concat!(
        r#"{"schema":1,"vram_bytes":7,"leader":"lirs","sessions":[{"session":5,"uid":1000,"#,
        r#""allocated_bytes":104857600,"pattern":"plan","steps":3,"#,
        r#""working_set":[{"seconds":10,"bytes":10485760},"#
    )));
    assert!(json.contains(r#""curve":[{"bytes":52428800,"hit_ratio":0.5}]"#), "{json}");
}
