//! Requests, counted when they are answered, by what they asked for and by the answer.

use std::collections::BTreeMap;

use lapis_proto::code::Code;
use lapis_proto::ids::{RequestId, SessionId};
use lapis_proto::message::Kind;

/// Kinds of requests have numbers from 16 to 63.
const KINDS: std::ops::Range<u16> = 16..64;
/// Codes, and the answer that is none.
const ANSWERS: usize = Code::ALL.len() + 1;

/// Requests answered so far.
#[derive(Debug, Clone)]
pub struct RequestCounts {
    /// By kind; the last row is of messages that are no requests.
    counts: Vec<[u64; ANSWERS]>,
}

impl Default for RequestCounts {
    fn default() -> Self {
        Self { counts: vec![[0; ANSWERS]; KINDS.len() + 1] }
    }
}

/// The row of a kind.
fn row(kind: Kind) -> usize {
    let number = kind.number();
    usize::from(if KINDS.contains(&number) { number } else { KINDS.end } - KINDS.start)
}

/// `FileChanged` as `file_changed`.
fn snake_case(name: &str) -> String {
    let mut text = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.extend(letter.to_lowercase());
    }
    text
}

impl RequestCounts {
    /// One more; `None`: it was granted.
    pub fn add(&mut self, kind: Kind, code: Option<Code>) {
        let place = |code| Code::ALL.iter().position(|known| *known == code);
        // A code that is not in the list of all can't be.
        let answer = code.and_then(place).map_or(0, |place| place + 1);
        self.counts[row(kind)][answer] += 1;
    }

    /// Each kind of request with each answer, and how many there were.
    pub fn iter(&self) -> impl Iterator<Item = (String, String, u64)> {
        let requests = Kind::ALL.iter().filter(|kind| KINDS.contains(&kind.number()));
        let ops = requests.map(|kind| (snake_case(&format!("{kind:?}")), row(*kind)));
        let ops = ops.chain([("none".to_owned(), KINDS.len())]);
        ops.flat_map(|(op, row)| {
            let refusals = Code::ALL.iter().map(|code| snake_case(&format!("{code:?}")));
            let answers = ["ok".to_owned()].into_iter().chain(refusals);
            answers.zip(self.counts[row]).map(move |(code, count)| (op.clone(), code, count))
        })
    }
}

/// What the requests asked for that are not answered yet. Most are answered at once and never come here.
#[derive(Debug, Default)]
pub struct Unanswered {
    /// The one being handled.
    current: Option<(SessionId, RequestId, Kind)>,
    /// A client may give two requests one number.
    waiting: BTreeMap<(SessionId, RequestId, u16), (Kind, u32)>,
}

impl Unanswered {
    /// A request begins to be handled.
    pub fn begin(&mut self, session: SessionId, request: RequestId, kind: Kind) {
        self.current = Some((session, request, kind));
    }

    /// It has been handled: what is not answered by now will be later.
    pub fn end(&mut self) {
        if let Some((session, request, kind)) = self.current.take() {
            self.waiting.entry((session, request, kind.number())).or_insert((kind, 0)).1 += 1;
        }
    }

    /// A request is answered: what did it ask for?
    pub fn answered(&mut self, session: SessionId, request: RequestId) -> Option<Kind> {
        if let Some((_, _, kind)) =
            self.current.take_if(|current| (current.0, current.1) == (session, request))
        {
            return Some(kind);
        }
        let range = (session, request, 0)..=(session, request, u16::MAX);
        let (key, entry) = self.waiting.range_mut(range).next()?;
        let (key, kind) = (*key, entry.0);
        entry.1 -= 1;
        if entry.1 == 0 {
            self.waiting.remove(&key);
        }
        Some(kind)
    }

    /// A session is gone, and with it what it waited for.
    pub fn forget(&mut self, session: SessionId) {
        let from = (session, RequestId(0), 0);
        let mut rest = self.waiting.split_off(&from);
        let mut others = rest.split_off(&(SessionId(session.0 + 1), RequestId(0), 0));
        self.waiting.append(&mut others);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(counts: &RequestCounts, op: &str, code: &str) -> u64 {
        let found: Vec<_> = counts.iter().filter(|(o, c, _)| o == op && c == code).collect();
        assert_eq!(found.len(), 1, "{op} {code}");
        found[0].2
    }

    #[test]
    fn each_request_is_counted_under_its_name_and_its_answer() {
        let mut counts = RequestCounts::default();
        counts.add(Kind::OpenFile, Some(Code::NotAFile));
        counts.add(Kind::Map, None);
        counts.add(Kind::Map, None);
        counts.add(Kind::Welcome, Some(Code::BadRequest));
        assert_eq!(count(&counts, "open_file", "not_a_file"), 1);
        assert_eq!(count(&counts, "map", "ok"), 2);
        assert_eq!(count(&counts, "none", "bad_request"), 1);
        assert_eq!(counts.iter().map(|(_, _, count)| count).sum::<u64>(), 4);
    }

    #[test]
    fn answers_find_their_requests_whatever_the_order() {
        let (one, two) = (SessionId(1), SessionId(2));
        let mut open = Unanswered::default();
        for (session, request, kind) in [
            (one, 7, Kind::Map),
            (one, 7, Kind::Flush),
            (one, 7, Kind::Map),
            (two, 7, Kind::SetTier),
            (two, 8, Kind::Map),
        ] {
            open.begin(session, RequestId(request), kind);
            open.end();
        }
        open.begin(two, RequestId(9), Kind::Stat);
        // Another one's answer comes while this one is handled.
        assert_eq!(open.answered(two, RequestId(8)), Some(Kind::Map));
        assert_eq!(open.answered(two, RequestId(9)), Some(Kind::Stat));
        open.end();
        let kinds = [(); 4].map(|()| open.answered(one, RequestId(7)));
        assert_eq!(kinds, [Some(Kind::Map), Some(Kind::Map), Some(Kind::Flush), None]);
        open.begin(one, RequestId(1), Kind::Map);
        open.end();
        open.forget(one);
        assert_eq!(open.answered(one, RequestId(1)), None);
        assert_eq!(open.answered(two, RequestId(7)), Some(Kind::SetTier));
        assert!(open.waiting.is_empty());
    }
}
