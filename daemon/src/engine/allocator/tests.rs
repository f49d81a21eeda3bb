//! Allocations against a naive model: a list of contents, who refers to them, and what is mapped. Nothing is counted
//! ahead: every number is made anew from the lists.

use std::collections::{BTreeMap, BTreeSet};

use lapis_proto::message::{Access, Map};
use proptest::prelude::*;

use super::super::cases::{Bench, check, pick};
use super::super::event::{Event, Request};
use super::super::ids::{Domain, MappingId};
use super::super::limits::Limits;
use super::*;

const PAGE: u64 = 4096;
const FILE_SIZE: u64 = 5 * PAGE + 5;
/// 16 RAM frames, less 4 kept for pages on their way down and 1 to read into, and 8 slots.
const ANONYMOUS_MAX: u64 = 19;
const PAGES_MAX: u64 = 40;
const ALLOCATIONS_MAX: u32 = 4;

#[derive(Debug, Clone)]
enum Op {
    Connect { domain: u32 },
    Allocate { session: usize, size: u64 },
    OpenFile { session: usize, inode: u64, offset: u64, length: u64 },
    Free { session: usize, allocation: usize },
    Map { session: usize, ranges: Vec<(usize, u32, u32)> },
    Unmap { session: usize, mapping: usize },
    Close { session: usize },
    Die { session: usize },
}

fn op() -> impl Strategy<Value = Op> {
    let any = any::<usize>;
    let size = || prop_oneof![Just(0), Just(1), 1..6 * PAGE, Just(4 * PAGE), Just(u64::MAX)];
    let offset =
        prop_oneof![4 => Just(0), 2 => Just(100), 1 => Just(FILE_SIZE), 1 => Just(u64::MAX)];
    let ranges = prop::collection::vec((any(), 0_u32..6, 0_u32..4), 1..4);
    prop_oneof![
        2 => (0_u32..2).prop_map(|domain| Op::Connect { domain }),
        4 => (any(), size()).prop_map(|(session, size)| Op::Allocate { session, size }),
        6 => (any(), 0_u64..2, offset, size()).prop_map(|(session, inode, offset, length)| {
            Op::OpenFile { session, inode, offset, length }
        }),
        4 => (any(), any()).prop_map(|(session, allocation)| Op::Free { session, allocation }),
        6 => (any(), ranges).prop_map(|(session, ranges)| Op::Map { session, ranges }),
        3 => (any(), any()).prop_map(|(session, mapping)| Op::Unmap { session, mapping }),
        1 => any().prop_map(|session| Op::Close { session }),
        1 => any().prop_map(|session| Op::Die { session }),
    ]
}

/// What stands behind allocations.
#[derive(Debug)]
struct Content {
    /// Domain, inode, offset, length and the store's id; `None` if anonymous.
    file: Option<((u32, u64, u64, u64), FileId)>,
    pages: u64,
}

/// Allocation, first page, pages and content.
type NaiveSpan = (AllocationId, u32, u32, usize);

#[derive(Debug, Default)]
struct Naive {
    /// Domain, and whether it is connected.
    sessions: BTreeMap<SessionId, (u32, bool)>,
    contents: Vec<Content>,
    /// Whose, and which content.
    allocations: BTreeMap<AllocationId, (SessionId, usize)>,
    mappings: BTreeMap<MappingId, (SessionId, Vec<AllocationId>, Vec<usize>)>,
    ever: BTreeSet<AllocationId>,
}

impl Naive {
    fn connected(&self, number: usize) -> Option<SessionId> {
        let open = self.sessions.iter().filter(|(_, (_, connected))| *connected);
        pick(open.map(|(id, _)| *id), number)
    }

    /// Any allocation there ever was, or one that never was.
    fn allocation(&self, number: usize) -> AllocationId {
        let never = AllocationId(u64::MAX);
        pick(self.ever.iter().copied().chain([never]), number).expect("at least one")
    }

    /// Contents that an allocation or a mapping needs.
    fn live(&self) -> BTreeSet<usize> {
        let allocated = self.allocations.values().map(|(_, content)| *content);
        allocated
            .chain(self.mappings.values().flat_map(|(.., contents)| contents.clone()))
            .collect()
    }

    fn pages(&self, counts: impl Fn(&Content) -> bool) -> u64 {
        let live = self.live();
        let contents = live.iter().map(|content| &self.contents[*content]);
        contents.filter(|content| counts(content)).map(|content| content.pages).sum()
    }

    /// Reasons to refuse an allocation of so many pages.
    fn reasons(&self, session: SessionId, bytes: u64) -> Vec<Code> {
        let own = self.allocations.values().filter(|(owner, _)| *owner == session).count();
        let pages = bytes.div_ceil(PAGE);
        let reasons = [
            (bytes == 0, Code::BadRequest),
            (self.pages(|_| true).saturating_add(pages) > PAGES_MAX, Code::TooMany),
            (own >= ALLOCATIONS_MAX as usize, Code::TooMany),
        ];
        reasons.into_iter().filter_map(|(holds, code)| holds.then_some(code)).collect()
    }

    fn allocated(
        &mut self,
        session: SessionId,
        content: usize,
        reply: Option<&Reply>,
    ) -> Result<(), TestCaseError> {
        let Some(&Reply::Allocated { allocation, pages }) = reply else {
            return Err(TestCaseError::fail(format!("{reply:?}")));
        };
        prop_assert_eq!(u64::from(pages), self.contents[content].pages);
        prop_assert!(self.ever.insert(allocation), "{allocation:?} is given twice");
        self.allocations.insert(allocation, (session, content));
        Ok(())
    }

    /// What ranges resolve to, or reasons to refuse.
    fn resolve(
        &self,
        session: SessionId,
        ranges: &[PageRange],
    ) -> Result<Vec<NaiveSpan>, Vec<Code>> {
        let (mut spans, mut reasons) = (Vec::new(), Vec::new());
        for &PageRange { allocation, first, count } in ranges {
            match self.allocations.get(&allocation) {
                Some((owner, content)) if *owner == session => {
                    let pages = self.contents[*content].pages;
                    let inside = (first..first + count).all(|page| u64::from(page) < pages);
                    if count == 0 || !inside {
                        reasons.push(Code::OutOfRange);
                    }
                    spans.push((allocation, first, count, *content));
                }
                _ => reasons.push(Code::UnknownAllocation),
            }
        }
        if reasons.is_empty() { Ok(spans) } else { Err(reasons) }
    }

    fn compare(&self, bench: &Bench) -> Result<(), TestCaseError> {
        let engine = &bench.engine;
        let given: Vec<_> = engine.allocations.keys().copied().collect();
        prop_assert_eq!(given, self.allocations.keys().copied().collect::<Vec<_>>());
        // Two allocations have one backing exactly when they have one content.
        let mut backings = BTreeMap::new();
        for (id, (session, content)) in &self.allocations {
            let real = &engine.allocations[id];
            let named = self.mappings.values().flat_map(|(_, allocations, _)| allocations);
            prop_assert_eq!(real.session, *session);
            prop_assert_eq!(real.mapped as usize, named.filter(|named| *named == id).count());
            let backing = *backings.entry(*content).or_insert(real.backing);
            prop_assert_eq!(backing, real.backing);
            prop_assert!(engine.sessions[session].allocations.contains(id));
        }
        let distinct: BTreeSet<_> = backings.values().collect();
        prop_assert_eq!(distinct.len(), backings.len());
        prop_assert_eq!(engine.table.iter().count(), self.live().len());
        prop_assert_eq!(engine.table.pages, self.pages(|_| true));
        prop_assert_eq!(engine.anonymous_pages, self.pages(|content| content.file.is_none()));
        let files = |contents: BTreeSet<usize>| {
            let files = contents.into_iter().filter_map(|content| self.contents[content].file);
            files.map(|(_, file)| file).collect::<BTreeSet<_>>()
        };
        prop_assert_eq!(&bench.files, &files(self.live()));
        let joinable = self.allocations.values().map(|(_, content)| *content).collect();
        prop_assert_eq!(engine.files.len(), files(joinable).len());
        Ok(())
    }
}

fn run(bench: &mut Bench, naive: &mut Naive, op: Op) -> Result<(), TestCaseError> {
    match op {
        Op::Connect { domain } => {
            let session = SessionId(bench.fresh());
            naive.sessions.insert(session, (domain, true));
            let domain = Domain(domain);
            bench.apply(Event::SessionOpened { session, domain, gid: 1, admin: false });
        }
        Op::Allocate { session, size } => {
            let Some(session) = naive.connected(session) else { return Ok(()) };
            let mut reasons = naive.reasons(session, size);
            let taken = naive.pages(|content| content.file.is_none());
            if taken.saturating_add(size.div_ceil(PAGE)) > ANONYMOUS_MAX {
                reasons.push(Code::OutOfMemory);
            }
            let reply = bench.ask(session, Request::Allocate { size }, &reasons)?;
            if reasons.is_empty() {
                naive.contents.push(Content { file: None, pages: size.div_ceil(PAGE) });
                naive.allocated(session, naive.contents.len() - 1, reply.as_ref())?;
            }
        }
        Op::OpenFile { session, inode, offset, length } => {
            let Some(session) = naive.connected(session) else { return Ok(()) };
            return open_file(bench, naive, session, (inode, offset, length));
        }
        Op::Free { session, allocation } => {
            let Some(session) = naive.connected(session) else { return Ok(()) };
            let id = naive.allocation(allocation);
            let own = naive.allocations.get(&id).is_some_and(|(owner, _)| *owner == session);
            let mapped = naive.mappings.values().any(|(_, named, _)| named.contains(&id));
            let reasons = match (own, mapped) {
                (false, _) => vec![Code::UnknownAllocation],
                (true, true) => vec![Code::InUse],
                (true, false) => Vec::new(),
            };
            bench.ask(session, Request::Free(id), &reasons)?;
            if reasons.is_empty() {
                naive.allocations.remove(&id);
            }
        }
        Op::Map { session, ranges } => {
            let Some(session) = naive.connected(session) else { return Ok(()) };
            return map(bench, naive, session, &ranges);
        }
        Op::Unmap { session, mapping } => {
            let Some(session) = naive.connected(session) else { return Ok(()) };
            let Some(id) = pick(naive.mappings.keys().copied(), mapping) else { return Ok(()) };
            let own = naive.mappings[&id].0 == session;
            let reasons = if own { vec![] } else { vec![Code::UnknownMapping] };
            bench.ask(session, Request::Unmap(vec![id]), &reasons)?;
            if own {
                naive.mappings.remove(&id);
            }
        }
        Op::Close { session } => {
            let Some(session) = naive.connected(session) else { return Ok(()) };
            // What is mapped stays: the process may live.
            naive.allocations.retain(|_, (owner, _)| *owner != session);
            naive.sessions.entry(session).and_modify(|(_, connected)| *connected = false);
            bench.apply(Event::SessionClosed { session });
        }
        Op::Die { session } => {
            let Some(session) = pick(naive.sessions.keys().copied(), session) else {
                return Ok(());
            };
            naive.sessions.remove(&session);
            naive.allocations.retain(|_, (owner, _)| *owner != session);
            naive.mappings.retain(|_, (owner, ..)| *owner != session);
            bench.apply(Event::ProcessDied { session });
        }
    }
    Ok(())
}

fn open_file(
    bench: &mut Bench,
    naive: &mut Naive,
    session: SessionId,
    (inode, offset, length): (u64, u64, u64),
) -> Result<(), TestCaseError> {
    let mut reasons = naive.reasons(session, length);
    if offset.checked_add(length).is_none_or(|end| end > FILE_SIZE) {
        reasons.push(Code::OutOfRange);
    }
    let file = FileId(bench.fresh());
    bench.files.insert(file);
    let identity = FileIdentity { device: 1, inode, size: FILE_SIZE, mtime_ns: 0, ctime_ns: 0 };
    let reply =
        bench.ask(session, Request::OpenFile { file, identity, offset, length }, &reasons)?;
    if !reasons.is_empty() {
        return Ok(());
    }
    let key = (naive.sessions[&session].0, inode, offset, length);
    let same = |content: &usize| naive.contents[*content].file.is_some_and(|(own, _)| own == key);
    // Only what an allocation refers to is joined: what is merely mapped is on its way out.
    let shared = naive.allocations.values().map(|(_, content)| *content).find(same);
    let content = shared.unwrap_or(naive.contents.len());
    if shared.is_none() {
        naive.contents.push(Content { file: Some((key, file)), pages: length.div_ceil(PAGE) });
    }
    naive.allocated(session, content, reply.as_ref())
}

fn map(
    bench: &mut Bench,
    naive: &mut Naive,
    session: SessionId,
    ranges: &[(usize, u32, u32)],
) -> Result<(), TestCaseError> {
    let ranges: Vec<_> = ranges
        .iter()
        .map(|(number, first, count)| {
            let allocation = naive.allocation(*number);
            PageRange { allocation, first: *first, count: *count }
        })
        .collect();
    let expected = naive.resolve(session, &ranges);
    let found = bench.engine.resolve(session, &ranges);
    prop_assert_eq!(found.is_ok(), expected.is_ok(), "{:?}: {:?}", ranges, found);
    for (span, (allocation, first, count, _)) in
        found.iter().flatten().zip(expected.iter().flatten())
    {
        let found = (span.allocation, span.first, span.count);
        prop_assert_eq!(found, (*allocation, *first, *count));
        prop_assert_eq!(span.backing, bench.engine.allocations[allocation].backing);
    }
    let reasons = expected.clone().err().unwrap_or_default();
    let request = Request::Map(Map { ranges, access: Access::Read, wait_us: 0 });
    let reply = bench.ask(session, request, &reasons)?;
    if let (Ok(spans), Some(Reply::Mapped(mapped))) = (expected, reply) {
        let allocations = spans.iter().map(|(allocation, ..)| *allocation).collect();
        let contents = spans.iter().map(|(.., content)| *content).collect();
        naive.mappings.insert(mapped.mapping, (session, allocations, contents));
    }
    Ok(())
}

#[test]
fn allocations_are_those_of_a_naive_list() {
    let limits = Limits {
        allocations_per_session_max: ALLOCATIONS_MAX,
        pages_max: PAGES_MAX,
        mappings_per_session_max: 1000,
        // Room for all pages at once: who may map what is not the question here.
        ..Limits::small(256, 16, 8)
    };
    check(1000, &prop::collection::vec(op(), 0..80), |ops| {
        let (mut bench, mut naive) = (Bench::new(limits.clone()), Naive::default());
        for op in ops {
            run(&mut bench, &mut naive, op)?;
            naive.compare(&bench)?;
        }
        Ok(())
    });
}
