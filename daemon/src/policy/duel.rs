//! Several policies, and the cache follows the one that does best: LIRS, the learned plan with the index, and LRU.
//!
//! Each of them runs as a directory of its own. The cache *imitates the leader*: room is made with units that the
//! leader let go, the one that it let go first going first. Each miss of a policy is work that it would have made. When the leader
//! has made more work than another by what it costs to fetch what the other has and the cache hasn't, the other leads.
//! That cost is what keeps two good policies with different contents from taking turns for ever.

use super::gap::Gap;
use super::held::Held;
use super::learned::Learned;
use super::lirs::Lirs;
use super::list::{Links, List};
use super::lru::Lru;
use super::{Directory, Slot};

/// The least lead that another policy must have, as a divisor of the capacity.
const LEAD_SHARE: u64 = 32;
/// The least lead as a divisor of the units known: all of them are looked at when another leads.
const KNOWN_SHARE: u64 = 256;
/// Accesses between two cuts of what work is remembered, as a divisor of the capacity.
const CUT_SHARE: u64 = 8;
/// Policies there are.
const EXPERTS: usize = 3;

/// A policy that can lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leader {
    /// Units used at short distances stay. The best to begin with where layers are used in a cycle.
    Lirs = 0,
    /// What is used next stays, as far as that can be told. The best to begin with for KV caches and experts.
    Gap = 1,
    /// What was used last stays.
    Lru = 2,
}

/// What is known of a unit.
#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    weight: u32,
    /// By policy: whether it holds the unit.
    holders: u8,
}

/// A directory that does what the best of several does.
#[derive(Debug)]
pub struct Duel {
    lirs: Lirs,
    gap: Gap,
    lru: Lru,
    leader: Leader,
    /// Pages that each would have fetched, less what all would have, and cut.
    work: [u64; EXPERTS],
    /// Pages that each holds and the cache doesn't.
    missing: [u64; EXPERTS],
    /// Accesses since work was cut.
    since: u64,
    held: Held,
    entries: Vec<Entry>,
    links: Links,
    /// Held here and by the leader, least recently used first.
    kept: List,
    /// Held here and not by the leader, what it let go first first.
    spare: List,
    /// What the leader let go and took on the last access.
    let_go: Vec<Slot>,
    taken: Vec<Slot>,
    scratch: Vec<Slot>,
}

impl Duel {
    /// An empty one of so many pages.
    #[must_use]
    pub fn new(capacity: u64, leader: Leader) -> Self {
        Self {
            lirs: Lirs::new(capacity),
            gap: Gap::new(capacity),
            lru: Lru::new(capacity),
            leader,
            work: [0; EXPERTS],
            missing: [0; EXPERTS],
            since: 0,
            held: Held::new(capacity),
            entries: Vec::new(),
            links: Links::default(),
            kept: List::default(),
            spare: List::default(),
            let_go: Vec::new(),
            taken: Vec::new(),
            scratch: Vec::new(),
        }
    }

    /// Who leads.
    #[must_use]
    pub fn leader(&self) -> Leader {
        self.leader
    }

    /// The learned plan.
    #[must_use]
    pub fn learned(&self) -> &Learned {
        self.gap.learned()
    }

    /// Units that the leader had and has no longer since the last call, best to be evicted first.
    #[must_use]
    pub fn let_go(&self) -> &[Slot] {
        &self.let_go
    }

    /// Units that the leader has and had not before the last call.
    #[must_use]
    pub fn taken(&self) -> &[Slot] {
        &self.taken
    }

    /// Whether the leader has a unit.
    #[must_use]
    pub fn leader_has(&self, slot: Slot) -> bool {
        self.has(self.leader, slot)
    }

    fn expert(&mut self, expert: Leader) -> &mut dyn Directory {
        match expert {
            Leader::Lirs => &mut self.lirs,
            Leader::Gap => &mut self.gap,
            Leader::Lru => &mut self.lru,
        }
    }

    fn has(&self, expert: Leader, slot: Slot) -> bool {
        self.entries.get(slot as usize).is_some_and(|entry| entry.holders & bit(expert) != 0)
    }

    /// Takes a unit out of the list that it is in, if it is held.
    fn unlist(&mut self, slot: Slot) {
        if self.held.contains(slot) {
            let kept = self.has(self.leader, slot);
            let list = if kept { &mut self.kept } else { &mut self.spare };
            list.remove(&mut self.links, slot);
        }
    }

    /// Puts a unit at the end of the list that it belongs in, if it is held.
    fn list(&mut self, slot: Slot) {
        if self.held.contains(slot) {
            let kept = self.has(self.leader, slot);
            let list = if kept { &mut self.kept } else { &mut self.spare };
            list.push_back(&mut self.links, slot);
        }
    }

    /// A policy lets units go.
    fn lets_go(&mut self, expert: Leader, slots: &[Slot]) {
        for slot in slots {
            let leads = expert == self.leader;
            if leads {
                self.unlist(*slot);
            }
            let entry = &mut self.entries[*slot as usize];
            entry.holders &= !bit(expert);
            if !self.held.contains(*slot) {
                self.missing[expert as usize] -= u64::from(entry.weight);
            }
            if leads {
                self.list(*slot);
                self.let_go.push(*slot);
            }
        }
    }

    /// The cache itself lets a unit go.
    fn evict(&mut self, slot: Slot) {
        self.unlist(slot);
        self.held.remove(slot);
        let entry = self.entries[slot as usize];
        for expert in ALL {
            if entry.holders & bit(expert) != 0 {
                self.missing[expert as usize] += u64::from(entry.weight);
            }
        }
    }

    fn shrink(&mut self, out: &mut Vec<Slot>) {
        while self.held.is_over() {
            let Some(victim) = self.spare.front().or(self.kept.front()) else { break };
            self.evict(victim);
            out.push(victim);
        }
    }

    /// All policies see an access to a unit that is held here, in no list, and of this weight already.
    fn ask_all(&mut self, slot: Slot, weight: u32) {
        let mut out = std::mem::take(&mut self.scratch);
        for expert in ALL {
            out.clear();
            let hit = self.expert(expert).access(slot, weight, &mut out);
            if !hit {
                self.work[expert as usize] += u64::from(weight);
            }
            let entry = &mut self.entries[slot as usize];
            if expert == self.leader && entry.holders & bit(expert) == 0 {
                self.taken.push(slot);
            }
            entry.holders |= bit(expert);
            if expert == self.leader {
                self.list(slot);
            }
            self.lets_go(expert, &out);
        }
        self.scratch = out;
    }

    /// Forgets work that all have done, and more than it costs to fetch all.
    fn cut(&mut self) {
        self.since += 1;
        if self.since > self.held.capacity() / CUT_SHARE {
            self.since = 0;
            let least = self.work.iter().copied().min().unwrap_or(0);
            for work in &mut self.work {
                *work = (*work - least).min(self.held.capacity());
            }
        }
    }

    /// Follows another policy if that is worth it.
    fn judge(&mut self) {
        let looks = self.entries.len() as u64 / KNOWN_SHARE;
        let least = (self.held.capacity() / LEAD_SHARE).max(looks).max(1);
        let lead = |expert: Leader| {
            let lead = self.work[self.leader as usize].saturating_sub(self.work[expert as usize]);
            (lead >= self.missing[expert as usize].max(least)).then_some(lead)
        };
        let best = ALL.into_iter().filter(|expert| *expert != self.leader);
        let best = best.filter_map(|expert| Some((lead(expert)?, expert)));
        if let Some((_, expert)) = best.max_by_key(|best| best.0) {
            self.switch(expert);
        }
    }

    fn switch(&mut self, leader: Leader) {
        let old = std::mem::replace(&mut self.leader, leader);
        let (mut kept, mut spare) = (List::default(), List::default());
        std::mem::swap(&mut kept, &mut self.kept);
        std::mem::swap(&mut spare, &mut self.spare);
        // What was the old leader's before this call, which has changed a few units already.
        let (taken, let_go) = (std::mem::take(&mut self.taken), std::mem::take(&mut self.let_go));
        let before = |duel: &Self, slot| {
            !taken.contains(&slot) && (let_go.contains(&slot) || duel.has(old, slot))
        };
        // Those that were spare go on being first.
        for list in [&mut spare, &mut kept] {
            while let Some(slot) = list.pop_front(&mut self.links) {
                self.list(slot);
                if before(self, slot) && !self.has(leader, slot) {
                    self.let_go.push(slot);
                }
            }
        }
        for slot in 0..Slot::try_from(self.entries.len()).unwrap_or(Slot::MAX) {
            match (before(self, slot), self.has(leader, slot)) {
                (true, false) if !self.held.contains(slot) => self.let_go.push(slot),
                (false, true) => self.taken.push(slot),
                (_, _) => {}
            }
        }
    }
}

const ALL: [Leader; EXPERTS] = [Leader::Lirs, Leader::Gap, Leader::Lru];

fn bit(expert: Leader) -> u8 {
    1 << expert as u8
}

impl Directory for Duel {
    fn access(&mut self, slot: Slot, weight: u32, out: &mut Vec<Slot>) -> bool {
        let weight = weight.max(1);
        self.let_go.clear();
        self.taken.clear();
        if self.entries.len() <= slot as usize {
            self.entries.resize(slot as usize + 1, Entry::default());
        }
        let hit = self.held.contains(slot);
        self.unlist(slot);
        let entry = &mut self.entries[slot as usize];
        let old = u64::from(std::mem::replace(&mut entry.weight, weight));
        let holders = entry.holders;
        if !hit {
            for expert in ALL.into_iter().filter(|expert| holders & bit(*expert) != 0) {
                self.missing[expert as usize] -= old;
            }
        }
        self.held.set(slot, weight);
        self.ask_all(slot, weight);
        self.cut();
        self.judge();
        self.shrink(out);
        hit
    }

    fn contains(&self, slot: Slot) -> bool {
        self.held.contains(slot)
    }

    fn forget(&mut self, slot: Slot) {
        self.let_go.clear();
        self.taken.clear();
        if self.entries.len() <= slot as usize {
            return;
        }
        if self.held.contains(slot) {
            self.evict(slot);
        }
        let entry = std::mem::take(&mut self.entries[slot as usize]);
        for expert in ALL {
            self.expert(expert).forget(slot);
            if entry.holders & bit(expert) != 0 {
                self.missing[expert as usize] -= u64::from(entry.weight);
            }
        }
    }

    fn resize(&mut self, capacity: u64, out: &mut Vec<Slot>) {
        self.let_go.clear();
        self.taken.clear();
        self.held.set_capacity(capacity);
        let mut gone = std::mem::take(&mut self.scratch);
        for expert in ALL {
            gone.clear();
            self.expert(expert).resize(capacity, &mut gone);
            self.lets_go(expert, &gone);
        }
        self.scratch = gone;
        self.shrink(out);
    }

    fn used(&self) -> u64 {
        self.held.used()
    }
}
