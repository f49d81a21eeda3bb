//! What has to be fetched ahead over one link, and whether it must begin now.

/// A backlog counts as half as large again as it is: transfers and compute are not that regular.
const MARGIN_NUMERATOR: u64 = 3;
const MARGIN_DENOMINATOR: u64 = 2;
/// What a transfer takes, nanoseconds per page.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    /// RAM to VRAM.
    pub up_ns: u64,
    /// File or spill to RAM.
    pub read_ns: u64,
}

/// Where a page that is fetched lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum From {
    /// In RAM.
    Ram,
    /// In a file or the spill, or nowhere yet.
    Below,
}

/// A page to fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fetch {
    /// By how much it is late: the more, the more urgent. Nanoseconds.
    pub late_ns: u64,
    /// For which step.
    pub step: u64,
    /// From where.
    pub from: From,
}

/// What there is to fetch ahead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Due {
    /// A page that is in RAM.
    pub up: Option<Fetch>,
    /// A page that is not.
    pub read: Option<Fetch>,
    /// Nothing else before this time, microseconds; `None`: before the session moves on.
    pub at: Option<u64>,
}

/// What has to be moved over one link, step by step.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    pages: u64,
    /// The first step that misses some.
    first: Option<u64>,
    pub(super) due: Option<u64>,
    /// The least time that is left before it is due, nanoseconds.
    pub(super) left_ns: Option<u64>,
}

impl Backlog {
    pub(super) fn add(&mut self, step: u64, pages: u64) {
        self.pages += pages;
        if self.pages > 0 {
            self.first.get_or_insert(step);
        }
    }

    pub(super) fn time_ns(&self, page_ns: u64) -> u64 {
        self.pages.saturating_mul(page_ns)
    }

    /// Whether it must begin now to be there within the slack.
    pub(super) fn judge(&mut self, page_ns: u64, slack_ns: u64) {
        if self.first.is_none() || self.due.is_some() {
            return;
        }
        let time = self.time_ns(page_ns).saturating_mul(MARGIN_NUMERATOR) / MARGIN_DENOMINATOR;
        match slack_ns.checked_sub(time) {
            None | Some(0) => self.due = Some(time - slack_ns),
            Some(left) => self.left_ns = Some(self.left_ns.map_or(left, |least| least.min(left))),
        }
    }

    pub(super) fn fetch(&self, from: From) -> Option<Fetch> {
        Some(Fetch { late_ns: self.due?, step: self.first?, from })
    }
}
