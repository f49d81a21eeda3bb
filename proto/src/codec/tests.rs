use std::fmt::Debug;

use proptest::collection::vec;
use proptest::prelude::*;
use wincode::{SchemaReadOwned, SchemaWrite, config::DefaultConfig};

use super::*;
use crate::code::Code;
use crate::ids::{AllocationId, MappingId, SessionId, VramFrame};
use crate::message::*;

fn frame<M: Message>(message: &M) -> Vec<u8> {
    let mut out = Vec::new();
    encode(RequestId(7), message, *M::KIND.fds().start(), &mut out).expect("encodes");
    out
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// One message: round trip, the same bytes from another codec, every cut and one byte too many refused.
fn check<M>(message: &M)
where
    M: Message + PartialEq + Debug,
    M: SchemaWrite<DefaultConfig, Src = M> + SchemaReadOwned<DefaultConfig, Dst = M>,
{
    let frame = frame(message);
    let (head, body) = frame.split_first_chunk::<HEADER_BYTES>().expect("a header");
    let header = Header::decode(head).expect("our own header");
    assert_eq!(
        (header.kind, header.body_bytes(), header.request),
        (M::KIND, body.len(), RequestId(7))
    );
    assert_eq!(&decode::<M>(body).expect("decodes"), message);

    assert_eq!(wincode::serialize(message).expect("wincode writes"), body);
    assert_eq!(&wincode::deserialize::<M>(body).expect("wincode reads"), message);

    for cut in 0..body.len() {
        assert!(
            matches!(decode::<M>(&body[..cut]), Err(CodecError::Decode { .. })),
            "cut at {cut}"
        );
    }
    let longer = [body, &[0]].concat();
    let length = longer.len();
    assert!(matches!(
        decode::<M>(&longer),
        Err(CodecError::Trailing { consumed, length: found, .. }) if consumed + 1 == length && found == length
    ));
}

fn text() -> impl Strategy<Value = String> {
    "\\PC{0,40}"
}

fn page_ranges() -> impl Strategy<Value = Vec<PageRange>> {
    let range = (any::<u64>(), any::<u32>(), any::<u32>())
        .prop_map(|(id, first, count)| PageRange { allocation: AllocationId(id), first, count });
    vec(range, 0..20)
}

fn frames() -> impl Strategy<Value = Vec<VramFrame>> {
    vec(any::<u32>().prop_map(VramFrame), 0..40)
}

fn quotas() -> impl Strategy<Value = Quota> {
    let subject = prop_oneof![
        Just(QuotaSubject::EachSession),
        Just(QuotaSubject::EachUid),
        any::<u32>().prop_map(QuotaSubject::Uid),
        any::<u32>().prop_map(QuotaSubject::Gid),
    ];
    (subject, any::<Option<u64>>(), any::<u64>(), any::<Option<u64>>(), any::<u8>()).prop_map(
        |(subject, vram_max, vram_reserved, anonymous_max, priority)| Quota {
            subject,
            vram_max,
            vram_reserved,
            anonymous_max,
            priority,
        },
    )
}

fn quota_uses() -> impl Strategy<Value = Vec<QuotaUse>> {
    let used = (quotas(), any::<u64>(), any::<u64>(), any::<u64>());
    let used = used.prop_map(|(quota, vram_used, vram_mapped, anonymous_used)| QuotaUse {
        quota,
        vram_used,
        vram_mapped,
        anonymous_used,
    });
    vec(used, 0..5)
}

/// All the counters, from one list of numbers.
fn stats(n: &[u64; 80]) -> Stats {
    let mut next = n.iter().copied();
    let mut n = || next.next().expect("enough numbers");
    let mut tier = || TierStats {
        capacity: n(),
        used: n(),
        pinned: n(),
        free_run_longest: n(),
        degraded: n() % 2 == 1,
    };
    let (vram, ram, nvme) = (tier(), tier(), tier());
    let mut counters = || {
        let mut hop = || HopStats { pages: n(), bytes: n(), errors: n() };
        Counters {
            file_to_ram: hop(),
            spill_to_ram: hop(),
            ram_to_vram: hop(),
            vram_to_ram: hop(),
            ram_to_spill: hop(),
            zeroed: hop(),
            dropped_vram: n(),
            dropped_ram: n(),
            hits_vram: n(),
            hits_ram: n(),
            misses: n(),
            zero_fills: n(),
            maps: n(),
            stalled_us: n(),
            prefetch_useful: n(),
            prefetch_late: n(),
            prefetch_wasted: n(),
            read_retries: n(),
            checksum_errors: n(),
        }
    };
    let (total, session) = (counters(), counters());
    Stats {
        vram,
        ram,
        nvme,
        total,
        session,
        sessions: 1,
        allocations: 2,
        mappings: 3,
        quarantined_frames: 4,
        metadata_bytes: n(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn handshake_messages_round_trip(
        (version_min, version_max, features, name) in (any::<u16>(), any::<u16>(), any::<u64>(), text()),
        (session, page_size, vram_frames, mapped_pages_max) in (any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>()),
        device_uuid in any::<[u8; 16]>(), cuda in any::<bool>(), unified in any::<bool>(),
    ) {
        check(&Hello { version_min, version_max, features, client_name: name.clone() });
        check(&Welcome {
            version: version_max,
            features,
            session: SessionId(session),
            page_size,
            vram_frames,
            mapped_pages_max,
            device: if cuda { DeviceKind::Cuda } else { DeviceKind::Sim },
            device_uuid,
            unified,
            daemon_version: name,
        });
    }

    #[test]
    fn requests_round_trip(
        (a, b, wait_us) in (any::<u64>(), any::<u64>(), any::<u64>()),
        ranges in page_ranges(), frames in frames(), mappings in vec(any::<u64>(), 0..20),
        access in prop_oneof![Just(Access::Read), Just(Access::Write), Just(Access::Overwrite)],
    ) {
        check(&Allocate { size: a });
        check(&OpenFile { offset: a, length: b });
        check(&Free { allocation: AllocationId(a) });
        check(&Map { ranges: ranges.clone(), access, wait_us });
        check(&Unmap { mappings: mappings.into_iter().map(MappingId).collect() });
        check(&Revoked { frames });
        check(&Flush { ranges, wait_us });
    }

    #[test]
    fn hints_round_trip(
        ranges in page_ranges(), priority in any::<u8>(), within_us in any::<u64>(),
        advice in prop_oneof![
            Just(Advice::Normal),
            Just(Advice::Sequential),
            Just(Advice::Random),
            Just(Advice::Keep),
            Just(Advice::DontNeed),
            Just(Advice::Chain),
        ],
    ) {
        check(&Prefetch { ranges: ranges.clone(), priority, within_us });
        check(&CancelPrefetch { ranges: ranges.clone() });
        check(&Advise { ranges, advice });
    }

    #[test]
    fn plans_round_trip(
        plan in any::<u32>(), cyclic in any::<bool>(), steps in vec(page_ranges(), 0..6),
        access in prop_oneof![Just(Access::Read), Just(Access::Write), Just(Access::Overwrite)],
    ) {
        let uses = |ranges: Vec<PageRange>| PlanStep {
            uses: ranges.into_iter().map(|range| PlanUse { range, access }).collect(),
        };
        check(&SetPlan { plan, cyclic, steps: steps.into_iter().map(uses).collect() });
    }

    #[test]
    fn working_sets_round_trip(
        session in proptest::option::of(any::<u64>()), leader in 0..3_usize, counts in vec(0..4_usize, 0..4),
        (numbers, steps) in (any::<[u64; 20]>(), any::<u32>()),
    ) {
        check(&WorkingSet { session: session.map(SessionId) });
        let pattern = [AccessPattern::None, AccessPattern::Planned { steps }, AccessPattern::Cycle { steps }];
        let point = CurvePoint { pages: numbers[5], hits_per_million: steps };
        let set = |count: usize| SessionSet {
            session: SessionId(numbers[0]),
            uid: steps,
            pages: numbers[1],
            pattern: pattern[count % 3],
            windows: [numbers[2], numbers[3], numbers[4]],
            counters: stats(&std::array::from_fn(|index| numbers[index % 20])).session,
            curve: vec![point; count],
        };
        let leader = [Recency::Lirs, Recency::Gap, Recency::Lru][leader];
        check(&WorkingSets { leader, sessions: counts.into_iter().map(set).collect() });
    }

    #[test]
    fn administration_round_trips(
        (size, wait_us) in (any::<u64>(), any::<u64>()), quota in quotas(), uses in quota_uses(),
        tier in prop_oneof![Just(Tier::Vram), Just(Tier::Ram), Just(Tier::Nvme)],
    ) {
        check(&SetTier { tier, size, wait_us });
        check(&SetQuota { quota });
        check(&Quotas { quotas: uses });
    }

    #[test]
    fn replies_round_trip(
        (a, b, c, d) in (any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()),
        (pages, hits_vram, hits_ram) in (any::<u32>(), any::<u32>(), any::<u32>()),
        frames in frames(), message in text(), code in prop::sample::select(Code::ALL),
    ) {
        check(&Refused { code, object: a, asked: b, in_use: c, limit: d, message });
        check(&Allocated { allocation: AllocationId(a), pages });
        check(&Mapped { mapping: MappingId(a), frames: frames.clone(), hits_vram, hits_ram, waited_us: b });
        check(&Frames { frames: frames.clone() });
        check(&Revoke { frames });
    }

    #[test]
    fn stats_round_trip(numbers in any::<[u64; 20]>()) {
        check(&stats(&std::array::from_fn(|index| numbers[index % 20].wrapping_add(index as u64))));
    }

    /// Garbage never panics or allocates much; what it decodes to encodes to the same bytes again.
    #[test]
    fn garbage_is_an_error_or_canonical(body in vec(any::<u8>(), 0..200)) {
        fn attempt<M: Message>(body: &[u8]) {
            if let Ok(message) = decode::<M>(body) {
                assert_eq!(&frame(&message)[HEADER_BYTES..], body);
            }
        }
        attempt::<Hello>(&body);
        attempt::<Welcome>(&body);
        attempt::<Map>(&body);
        attempt::<Mapped>(&body);
        attempt::<Refused>(&body);
        attempt::<Unmap>(&body);
        attempt::<Frames>(&body);
        attempt::<Stats>(&body);
        attempt::<Done>(&body);
        attempt::<Prefetch>(&body);
        attempt::<Advise>(&body);
        attempt::<SetTier>(&body);
        attempt::<SetPlan>(&body);
        attempt::<SetQuota>(&body);
        attempt::<Quotas>(&body);
        attempt::<WorkingSet>(&body);
        attempt::<WorkingSets>(&body);
    }
}

#[test]
fn empty_messages_round_trip() {
    check(&Stat {});
    check(&Bye {});
    check(&Done {});
    check(&ListQuotas {});
}

#[test]
fn bytes_of_every_message_are_frozen() {
    let header = |kind: &str, body: &str, fds: &str| {
        format!("4c5053310100{kind}{body}{fds}00000700000000000000")
    };
    let golden = |bytes: Vec<u8>, head: String, body: &str| assert_eq!(hex(&bytes), head + body);
    let id = AllocationId(0x0102);
    let range = PageRange { allocation: id, first: 3, count: 4 };
    golden(
        frame(&Hello { version_min: 1, version_max: 2, features: 3, client_name: "ab".into() }),
        header("0100", "16000000", "0000"),
        "01000200030000000000000002000000000000006162",
    );
    golden(
        frame(&Welcome {
            version: 1,
            features: 2,
            session: SessionId(3),
            page_size: 0x20_0000,
            vram_frames: 5,
            mapped_pages_max: 6,
            device: DeviceKind::Cuda,
            device_uuid: *b"0123456789abcdef",
            unified: true,
            daemon_version: "0.1".into(),
        }),
        header("0200", "42000000", "0000"),
        "01000200000000000000030000000000000000002000000000000500000006000000010000003031323334353637383961626364\
         6566010300000000000000302e31",
    );
    golden(
        frame(&Refused {
            code: Code::VersionUnsupported,
            object: 0,
            asked: 9,
            in_use: 0,
            limit: 1,
            message: "no".into(),
        }),
        header("4000", "2c000000", "0000"),
        "0900000000000000000009000000000000000000000000000000010000000000000002000000000000006e6f",
    );
    golden(frame(&Allocate { size: 256 }), header("1000", "08000000", "0000"), "0001000000000000");
    golden(
        frame(&OpenFile { offset: 1, length: 2 }),
        header("1100", "10000000", "0100"),
        "01000000000000000200000000000000",
    );
    golden(frame(&Free { allocation: id }), header("1200", "08000000", "0000"), "0201000000000000");
    golden(
        frame(&Map { ranges: vec![range], access: Access::Overwrite, wait_us: 5 }),
        header("1300", "24000000", "0000"),
        "010000000000000002010000000000000300000004000000020000000500000000000000",
    );
    golden(
        frame(&Unmap { mappings: vec![MappingId(1)] }),
        header("1400", "10000000", "0000"),
        "01000000000000000100000000000000",
    );
    golden(
        frame(&Prefetch { ranges: vec![range], priority: 5, within_us: 6 }),
        header("1500", "21000000", "0000"),
        "010000000000000002010000000000000300000004000000050600000000000000",
    );
    golden(frame(&Stat {}), header("1600", "00000000", "0000"), "");
    golden(frame(&Bye {}), header("1700", "00000000", "0000"), "");
    golden(
        frame(&Revoked { frames: vec![VramFrame(1), VramFrame(2)] }),
        header("1800", "10000000", "0000"),
        "02000000000000000100000002000000",
    );
    golden(
        frame(&CancelPrefetch { ranges: vec![range] }),
        header("1900", "18000000", "0000"),
        "010000000000000002010000000000000300000004000000",
    );
    golden(
        frame(&Advise { ranges: vec![range], advice: Advice::DontNeed }),
        header("1a00", "1c000000", "0000"),
        "01000000000000000201000000000000030000000400000004000000",
    );
    golden(
        frame(&Flush { ranges: vec![range], wait_us: 5 }),
        header("1b00", "20000000", "0000"),
        "0100000000000000020100000000000003000000040000000500000000000000",
    );
    golden(
        frame(&SetTier { tier: Tier::Nvme, size: 0x20_0000, wait_us: 5 }),
        header("1c00", "14000000", "0000"),
        "0200000000002000000000000500000000000000",
    );
    let each = Quota {
        subject: QuotaSubject::EachUid,
        vram_max: None,
        vram_reserved: 1,
        anonymous_max: Some(2),
        priority: 3,
    };
    golden(
        frame(&SetQuota { quota: each }),
        header("1d00", "17000000", "0000"),
        "01000000000100000000000000010200000000000000\
         03",
    );
    golden(frame(&ListQuotas {}), header("1e00", "00000000", "0000"), "");
    let own = Quota { vram_max: Some(4), ..Quota::none(QuotaSubject::Gid(5)) };
    golden(
        frame(&Quotas {
            quotas: vec![QuotaUse { quota: own, vram_used: 6, vram_mapped: 7, anonymous_used: 8 }],
        }),
        header("4500", "3b000000", "0000"),
        "010000000000000003000000050000000104000000000000000000000000000000000006000000000000000700000000000000\
         0800000000000000",
    );
    golden(
        frame(&Allocated { allocation: id, pages: 3 }),
        header("4100", "0c000000", "0000"),
        "020100000000000003000000",
    );
    let range = PageRange { allocation: AllocationId(1), first: 2, count: 3 };
    let used = PlanUse { range, access: Access::Overwrite };
    golden(
        frame(&SetPlan { plan: 9, cyclic: true, steps: vec![PlanStep { uses: vec![used] }] }),
        header("1f00", "29000000", "0000"),
        "09000000010100000000000000010000000000000001000000000000000200000003000000\
         02000000",
    );
    golden(
        frame(&WorkingSet { session: Some(SessionId(3)) }),
        header("2000", "09000000", "0000"),
        "010300000000000000",
    );
    golden(frame(&WorkingSet { session: None }), header("2000", "01000000", "0000"), "00");
    let set = SessionSet {
        session: SessionId(1),
        uid: 2,
        pages: 3,
        pattern: AccessPattern::Cycle { steps: 4 },
        windows: [5, 6, 7],
        counters: Counters::default(),
        curve: vec![CurvePoint { pages: 8, hits_per_million: 9 }],
    };
    let zeros = "00".repeat(6 * 24 + 13 * 8);
    golden(
        frame(&WorkingSets { leader: Recency::Gap, sessions: vec![set] }),
        header("4600", "4c010000", "0000"),
        &format!(
            "010000000100000000000000010000000000000002000000030000000000000002000000040000000500000000000000\
             06000000000000000700000000000000{zeros}0100000000000000080000000000000009000000"
        ),
    );
    golden(frame(&Done {}), header("4200", "00000000", "0000"), "");
    golden(
        frame(&Mapped {
            mapping: MappingId(1),
            frames: vec![VramFrame(2)],
            hits_vram: 3,
            hits_ram: 4,
            waited_us: 5,
        }),
        header("4300", "24000000", "0000"),
        "010000000000000001000000000000000200000003000000040000000500000000000000",
    );
    golden(
        frame(&Frames { frames: vec![VramFrame(7)] }),
        header("6000", "0c000000", "0100"),
        "010000000000000007000000",
    );
    golden(
        frame(&Revoke { frames: vec![VramFrame(7)] }),
        header("6100", "0c000000", "0000"),
        "010000000000000007000000",
    );
    let stats = frame(&stats(&std::array::from_fn(|index| index as u64)));
    assert_eq!(hex(&stats[..24]), header("4400", "6b020000", "0000"));
    assert_eq!(hex(&stats[24..40]), "00000000000000000100000000000000");
    assert_eq!(hex(&stats[stats.len() - 24..]), "010000000200000003000000040000004d00000000000000");
}

#[test]
fn numbers_of_variants_are_frozen() {
    fn number<M: Message>(message: &M, at: usize) -> u8 {
        frame(message)[HEADER_BYTES + at]
    }
    let advice = [
        Advice::Normal,
        Advice::Sequential,
        Advice::Random,
        Advice::Keep,
        Advice::DontNeed,
        Advice::Chain,
    ];
    assert_eq!(
        advice.map(|advice| number(&Advise { ranges: vec![], advice }, 8)),
        [0, 1, 2, 3, 4, 5]
    );
    let tiers = [Tier::Vram, Tier::Ram, Tier::Nvme];
    assert_eq!(tiers.map(|tier| number(&SetTier { tier, size: 0, wait_us: 0 }, 0)), [0, 1, 2]);
    let subjects = [
        QuotaSubject::EachSession,
        QuotaSubject::EachUid,
        QuotaSubject::Uid(9),
        QuotaSubject::Gid(9),
    ];
    let numbers = subjects.map(|subject| number(&SetQuota { quota: Quota::none(subject) }, 0));
    assert_eq!(numbers, [0, 1, 2, 3]);
}

#[test]
fn as_many_quotas_as_there_may_be_are_one_message() {
    for quota in [
        Quota::none(QuotaSubject::EachSession),
        Quota {
            subject: QuotaSubject::Uid(1),
            vram_max: Some(1),
            vram_reserved: 1,
            anonymous_max: Some(1),
            priority: 1,
        },
    ] {
        let quota = QuotaUse { quota, vram_used: 1, vram_mapped: 1, anonymous_used: 1 };
        let all = Quotas { quotas: vec![quota; 1024] };
        assert_eq!(decode::<Quotas>(&frame(&all)[HEADER_BYTES..]).expect("decodes"), all);
    }
}

#[test]
fn claimed_lengths_are_refused_before_allocation() {
    for length in [1_u64 << 20, 1 << 32, 1 << 45, 1 << 60, u64::MAX] {
        let body = length.to_le_bytes();
        assert!(matches!(decode::<Frames>(&body), Err(CodecError::Decode { .. })), "{length}");
        assert!(matches!(decode::<Unmap>(&body), Err(CodecError::Decode { .. })), "{length}");
        assert!(matches!(decode::<Prefetch>(&body), Err(CodecError::Decode { .. })), "{length}");
        assert!(matches!(decode::<Quotas>(&body), Err(CodecError::Decode { .. })), "{length}");
        let hello = [&[0; 12][..], &body].concat();
        assert!(matches!(decode::<Hello>(&hello), Err(CodecError::Decode { .. })), "{length}");
    }
}

#[test]
fn longest_body_is_written_and_one_more_element_is_not() {
    let most = (BODY_BYTES_MAX - 8) / 4;
    let longest = frame(&Revoked { frames: vec![VramFrame(1); most] });
    assert_eq!(longest.len(), 24 + 1_048_576);
    assert_eq!(decode::<Revoked>(&longest[24..]).expect("decodes").frames.len(), 262_142);

    let mut out = vec![9, 9];
    let error =
        encode(RequestId(1), &Revoked { frames: vec![VramFrame(1); most + 1] }, 0, &mut out);
    assert!(matches!(error, Err(CodecError::Encode { kind: Kind::Revoked, .. })));
    assert_eq!(out, [9, 9]);
}

#[test]
fn descriptors_that_the_kind_does_not_carry_are_refused() {
    let mut out = Vec::new();
    let error = encode(RequestId(1), &OpenFile { offset: 0, length: 1 }, 0, &mut out);
    assert!(matches!(error, Err(CodecError::Header(HeaderError::FdCount { found: 0, .. }))));
    let error = encode(RequestId(1), &Done {}, 1, &mut out);
    assert!(matches!(error, Err(CodecError::Header(HeaderError::FdCount { found: 1, .. }))));
    assert!(out.is_empty());
}

#[test]
fn unknown_codes_and_variants_are_errors() {
    let mut body = frame(&Refused {
        code: Code::Io,
        object: 0,
        asked: 0,
        in_use: 0,
        limit: 0,
        message: String::new(),
    })
    .split_off(HEADER_BYTES);
    assert_eq!(body[..2], [66, 0]);
    body[0] = 63;
    assert!(matches!(decode::<Refused>(&body), Err(CodecError::Decode { .. })));

    let mut body = frame(&Map { ranges: Vec::new(), access: Access::Read, wait_us: 0 })
        .split_off(HEADER_BYTES);
    body[8] = 3;
    assert!(matches!(decode::<Map>(&body), Err(CodecError::Decode { .. })));

    let mut body = [0; 20];
    decode::<SetTier>(&body).expect("the VRAM tier");
    body[0] = 3;
    assert!(matches!(decode::<SetTier>(&body), Err(CodecError::Decode { .. })));

    let mut body = [0; 15];
    decode::<SetQuota>(&body).expect("no quota for each session");
    body[0] = 4;
    assert!(matches!(decode::<SetQuota>(&body), Err(CodecError::Decode { .. })));
    body[0] = 0;
    // Neither `None` nor `Some`.
    body[4] = 2;
    assert!(matches!(decode::<SetQuota>(&body), Err(CodecError::Decode { .. })));

    let mut body = [0; 12];
    decode::<Advise>(&body).expect("advice");
    body[8] = 6;
    assert!(matches!(decode::<Advise>(&body), Err(CodecError::Decode { .. })));
}
