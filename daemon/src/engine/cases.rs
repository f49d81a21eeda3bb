//! What the tests against naive models share: random cases that can be run again, and an engine whose transfers end at
//! once and whose clients give frames back when asked.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{BuildHasher, RandomState};

use lapis_proto::code::Code;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestCaseResult, TestRunner};

use super::Engine;
use super::event::{Command, Event, Outbox, Reply, Request};
use super::ids::{FileId, RequestId, SessionId};
use super::limits::Limits;

/// Runs a test on `count` cases, the same each time, so that a change is to blame for what begins to fail.
/// `PROPTEST_CASES` asks for so many new ones. A case that fails is made as small as can be and printed with its
/// seed, which `PROPTEST_RNG_SEED` runs again.
pub(super) fn check<S: Strategy>(
    count: u32,
    strategy: &S,
    test: impl Fn(S::Value) -> TestCaseResult,
) {
    let mut config = Config { failure_persistence: None, ..Config::default() };
    let fresh = std::env::var_os("PROPTEST_CASES").is_some();
    if !fresh {
        config.cases = count;
    }
    let seed = match config.rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random if fresh => RandomState::new().hash_one(count),
        RngSeed::Random => u64::from(count),
    };
    config.rng_seed = RngSeed::Fixed(seed);
    if let Err(error) = TestRunner::new(config).run(strategy, test) {
        panic!("{error}\nPROPTEST_RNG_SEED={seed} runs it again");
    }
}

/// One of some things, by a number that need not be below how many there are.
pub(super) fn pick<T: Copy>(things: impl IntoIterator<Item = T>, number: usize) -> Option<T> {
    let things: Vec<_> = things.into_iter().collect();
    if things.is_empty() { None } else { Some(things[number % things.len()]) }
}

/// An engine whose transfers end at once.
pub(super) struct Bench {
    pub(super) engine: Engine,
    /// Files that it has been given and has not closed.
    pub(super) files: BTreeSet<FileId>,
    /// Microseconds.
    pub(super) now: u64,
    replies: BTreeMap<RequestId, Reply>,
    last: u64,
}

impl Bench {
    pub(super) fn new(limits: Limits) -> Self {
        let (files, replies) = (BTreeSet::new(), BTreeMap::new());
        Self { engine: Engine::new(limits), files, now: 1, replies, last: 0 }
    }

    /// A number that was not used before.
    pub(super) fn fresh(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    pub(super) fn apply(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let mut outbox = Outbox::new();
            self.engine.apply(event, self.now, &mut outbox);
            self.engine.verify_invariants();
            for command in outbox {
                match command {
                    Command::Transfer { tag, .. } => {
                        events.push_back(Event::TransferDone { tag, result: Ok(0) });
                    }
                    Command::Reply { request, reply, .. } => {
                        let old = self.replies.insert(request, reply);
                        assert!(old.is_none(), "two replies to {request:?}");
                    }
                    Command::CloseFile(file) => {
                        assert!(self.files.remove(&file), "{file:?} is closed twice");
                    }
                    Command::Revoke { session, frames } => {
                        let (request, body) = (RequestId(self.fresh()), Request::Revoked(frames));
                        events.push_back(Event::Request { session, request, body });
                    }
                    Command::Export { .. } => {}
                }
            }
        }
    }

    /// The reply to a request, unless it waits.
    pub(super) fn request(&mut self, session: SessionId, body: Request) -> Option<Reply> {
        let request = RequestId(self.fresh());
        self.apply(Event::Request { session, request, body });
        self.replies.remove(&request)
    }

    /// The reply to a request for which there are these reasons to be refused, if it is not refused.
    pub(super) fn ask(
        &mut self,
        session: SessionId,
        body: Request,
        reasons: &[Code],
    ) -> Result<Option<Reply>, TestCaseError> {
        let asked = format!("{body:?}");
        match self.request(session, body) {
            None => Err(TestCaseError::fail(format!("{asked} waits, {reasons:?}"))),
            Some(Reply::Refused(refused)) => {
                prop_assert!(reasons.contains(&refused.code), "{asked}: {refused:?}, {reasons:?}");
                Ok(None)
            }
            Some(reply) => {
                prop_assert!(reasons.is_empty(), "{asked}: {reply:?} in spite of {reasons:?}");
                Ok(Some(reply))
            }
        }
    }
}
