//! Quotas against a naive model, and what that has found.

use lapis_proto::message::Access;
use proptest::prelude::*;

use super::super::cases::check;
use super::naive::{Naive, Op, PAGE};
use super::*;

fn subject() -> impl Strategy<Value = QuotaSubject> {
    prop::sample::select(vec![
        QuotaSubject::EachSession,
        QuotaSubject::EachUid,
        QuotaSubject::Uid(0),
        QuotaSubject::Uid(1),
        QuotaSubject::Gid(100),
        QuotaSubject::Gid(101),
    ])
}

fn quota() -> impl Strategy<Value = Quota> {
    // Half a page more counts for nothing.
    let bytes = |pages: std::ops::Range<u64>| pages.prop_map(|pages| pages * PAGE + PAGE / 2);
    let vram_max = prop::option::of(bytes(0..10));
    let vram_reserved = prop_oneof![2 => Just(0), 1 => bytes(0..8)];
    let anonymous_max = prop::option::of(bytes(0..20));
    (subject(), vram_max, vram_reserved, anonymous_max, 0_u8..3).prop_map(
        |(subject, vram_max, vram_reserved, anonymous_max, priority)| Quota {
            subject,
            vram_max,
            vram_reserved,
            anonymous_max,
            priority,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let any = any::<usize>;
    let ranges = prop::collection::vec((any(), 0_u32..6, 1_u32..7), 1..4);
    let access = prop::sample::select(vec![Access::Read, Access::Write, Access::Overwrite]);
    prop_oneof![
        3 => (0_u32..2, 100_u32..102, prop::bool::weighted(0.8))
            .prop_map(|(domain, gid, admin)| Op::Connect { domain, gid, admin }),
        3 => (any(), quota()).prop_map(|(session, quota)| Op::SetQuota { session, quota }),
        5 => (any(), 1_u32..7).prop_map(|(session, pages)| Op::Allocate { session, pages }),
        4 => (any(), 0_u64..2).prop_map(|(session, inode)| Op::OpenFile { session, inode }),
        1 => any().prop_map(|allocation| Op::Free { allocation }),
        14 => (any(), ranges, access)
            .prop_map(|(session, ranges, access)| Op::Map { session, ranges, access }),
        8 => any().prop_map(|mapping| Op::Unmap { mapping }),
        1 => any().prop_map(|session| Op::Die { session }),
    ]
}

#[test]
fn quotas_bind_those_whom_they_name() {
    check(4000, &prop::collection::vec(op(), 0..60), |ops| {
        let mut naive = Naive::new();
        ops.into_iter().try_for_each(|op| naive.run(op))
    });
}

fn connect(domain: u32, gid: u32) -> Op {
    Op::Connect { domain, gid, admin: true }
}

/// A limit and a reserve of so many pages.
fn quota_of(subject: QuotaSubject, vram_max: Option<u64>, reserved: u64) -> Op {
    let vram_max = vram_max.map(|pages| pages * PAGE);
    let vram_reserved = reserved * PAGE;
    Op::SetQuota { session: 0, quota: Quota { vram_max, vram_reserved, ..Quota::none(subject) } }
}

/// Maps pages of one allocation of a session.
fn map(session: usize, allocation: usize, count: u32, access: Access) -> Op {
    Op::Map { session, ranges: vec![(allocation, 0, count)], access }
}

fn run(ops: impl IntoIterator<Item = Op>) {
    let mut naive = Naive::new();
    for op in ops {
        naive.run(op).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

#[test]
fn a_limit_holds_for_all_ranges_of_a_map_together() {
    run([
        connect(0, 100),
        quota_of(QuotaSubject::EachSession, Some(2), 0),
        Op::Allocate { session: 0, pages: 3 },
        Op::Map { session: 0, ranges: vec![(0, 2, 1), (0, 0, 2)], access: Access::Read },
    ]);
}

#[test]
fn a_limit_of_sessions_does_not_count_the_files_that_they_share() {
    run([
        connect(0, 100),
        quota_of(QuotaSubject::EachSession, Some(2), 0),
        Op::Allocate { session: 0, pages: 2 },
        Op::OpenFile { session: 0, inode: 0 },
        Op::Map { session: 0, ranges: vec![(0, 0, 2), (1, 0, 6)], access: Access::Read },
    ]);
}

#[test]
fn room_for_many_pages_at_once_leaves_a_reserve_alone() {
    // Pages of zeros are dropped, written ones copied down.
    for access in [Access::Read, Access::Write] {
        run([
            connect(0, 100),
            Op::Allocate { session: 0, pages: 7 },
            map(0, 0, 7, Access::Read),
            Op::Unmap { mapping: 0 },
            connect(1, 100),
            Op::Allocate { session: 1, pages: 30 },
            map(1, 0, 5, access),
            Op::Unmap { mapping: 0 },
            quota_of(QuotaSubject::Uid(1), None, 3),
            Op::Allocate { session: 0, pages: 4 },
            map(0, 1, 4, Access::Read),
        ]);
    }
}

#[test]
fn a_map_of_a_file_that_another_group_pays_for_is_filled_or_refused() {
    // Alone, and with a page that its own group pays for.
    for ranges in [vec![(0, 0, 4)], vec![(0, 0, 4), (1, 0, 1)]] {
        run([
            connect(0, 101),
            connect(0, 100),
            Op::OpenFile { session: 0, inode: 0 },
            Op::Allocate { session: 0, pages: 5 },
            Op::OpenFile { session: 1, inode: 0 },
            Op::Allocate { session: 1, pages: 30 },
            map(1, 1, 6, Access::Read),
            Op::Unmap { mapping: 0 },
            map(0, 1, 5, Access::Read),
            quota_of(QuotaSubject::Gid(100), None, 6),
            Op::Map { session: 1, ranges, access: Access::Read },
        ]);
    }
}
