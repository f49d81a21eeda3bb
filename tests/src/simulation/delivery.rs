//! Between the daemon and its clients: sockets with delays, processes that live and die, and what a client makes of
//! what it is sent.

use lapis_proto::message::{Access, Mapped};
use lapisd::engine::event::{Event, Reply, Request};
use lapisd::engine::ids::{RequestId, SessionId, VramFrame};

use super::client::{Ask, Asked, Client, Held, Kind, Known, Message, pages_of};
use super::faults::Fault;
use super::mutant::Mutant;
use super::scenario::OUTLAWS;
use super::world::{MADE_UP, What, World};

impl World {
    pub(super) fn client_mut(&mut self, session: SessionId) -> &mut Client {
        self.clients.get_mut(&session).expect("the caller looked it up")
    }

    fn strikes(&mut self, fault: Fault) -> bool {
        self.machine.borrow_mut().faults.strikes(fault)
    }

    /// One thing happens.
    pub(super) fn happen(&mut self, what: What) {
        match what {
            What::Turn { seat } => self.turn(seat),
            What::Arrival { session, request, ask } => {
                let lost = self.clients.get(&session).is_some_and(|client| client.reset);
                if !lost {
                    self.arrived(session, request, ask);
                }
            }
            What::Hangup { session } => {
                self.apply(Event::SessionClosed { session });
                if self.machine.borrow().has(Mutant::HangupTakenForDeath) {
                    self.apply(Event::ProcessDied { session });
                }
            }
            What::End { session } => self.process_ends(session),
            What::Death { session } => self.apply(Event::ProcessDied { session }),
            What::Delivery { session, message } => {
                if self.clients.get(&session).is_some_and(|client| client.connected) {
                    self.delivered(session, message);
                }
            }
            What::AskedBack { session, frames } => self.asked_back(session, frames),
            What::GiveBack { session, frames } => self.give_back(session, &frames),
            What::Release { session, mapping } => {
                let client = self.clients.get(&session).filter(|client| client.connected);
                if client.is_some_and(|client| client.mappings.contains_key(&mapping)) {
                    self.send_unmap(session, vec![mapping]);
                }
            }
            What::Haunt { session } => {
                if self.clients.contains_key(&session) && self.steps_left > 0 {
                    self.touch_one(session);
                    let delay = self.random.between(50, 5000);
                    self.after(delay, What::Haunt { session });
                }
            }
            What::Mischief => {
                self.mischief();
                if self.steps_left > 0 {
                    let delay = self.random.between(50, 3000);
                    self.after(delay, What::Mischief);
                }
            }
        }
    }

    fn turn(&mut self, seat: usize) {
        if self.steps_left == 0 {
            return;
        }
        self.steps_left -= 1;
        let place = self.scenario.seats[seat];
        match self.seats[seat] {
            Some(session) => self.act(session),
            None => {
                self.seats[seat] = self.open_session(place.domain, place.gid, place.admin);
                if let Some(session) = self.seats[seat] {
                    self.clients.insert(session, Client::new(seat, place.kind, place.domain));
                }
            }
        }
        let usual = self.random.between(1, place.think_us);
        // Now and then long enough for a revocation to expire.
        let pause = if self.random.one_in(300) { self.random.below(3_000_000) } else { 0 };
        self.after(usual + pause, What::Turn { seat });
    }

    /// A client sends a request.
    pub(super) fn send(&mut self, session: SessionId, ask: Ask, asked: Asked) {
        let delay = self.random.between(2, 60);
        let now = self.now;
        let client = self.client_mut(session);
        client.last_request += 1;
        let request = RequestId(client.last_request);
        client.asked.insert(request, asked);
        client.up_until = client.up_until.max(now + delay);
        let time = client.up_until;
        self.at(time, What::Arrival { session, request, ask });
    }

    /// The server sends a reply.
    pub(super) fn reply(&mut self, session: SessionId, request: RequestId, reply: Reply) {
        if request.0 >= MADE_UP || self.machine.borrow_mut().errs(Mutant::ReplyDropped) {
            return;
        }
        if self.machine.borrow_mut().errs(Mutant::ReplyTwice) {
            let same = match &reply {
                Reply::Done => Reply::Done,
                Reply::Quotas(quotas) => Reply::Quotas(quotas.clone()),
                Reply::WorkingSets(sets) => Reply::WorkingSets(sets.clone()),
                Reply::Mapped(mapped) => Reply::Mapped(mapped.clone()),
                Reply::Stats(stats) => Reply::Stats(stats.clone()),
                Reply::Refused(refused) => Reply::Refused(refused.clone()),
                Reply::Allocated { allocation, pages } => {
                    Reply::Allocated { allocation: *allocation, pages: *pages }
                }
            };
            self.deliver_later(session, Message::Reply(request, same), 0);
        }
        self.deliver_later(session, Message::Reply(request, reply), 0);
    }

    fn deliver_later(&mut self, session: SessionId, message: Message, behind: u64) {
        let now = self.now;
        let Some(client) = self.clients.get_mut(&session) else { return };
        let slow = client.kind == Kind::Slow;
        let most = if slow { self.random.pick(&[60, 20_000]) } else { 60 };
        let delay = self.random.between(2, most);
        client.down_until = client.down_until.max(now + delay);
        let time = client.down_until + behind;
        self.at(time, What::Delivery { session, message });
    }

    /// The server sends frames.
    pub(super) fn export(&mut self, session: SessionId, frames: Vec<VramFrame>) {
        for frame in &frames {
            for (id, other) in &self.clients {
                let foreign = self.clients.get(&session).is_some_and(|c| c.domain != other.domain);
                let has = other.imported.contains(frame);
                assert!(!(foreign && has), "{frame:?} goes to {session:?}, and {id:?} has it");
            }
        }
        if self.strikes(Fault::ExportFailed) {
            return self.break_off(session);
        }
        let (astray, behind) = {
            let machine = &mut *self.machine.borrow_mut();
            (machine.errs(Mutant::ExportAstray), machine.has(Mutant::ExportAfterReply))
        };
        let other = self.clients.keys().copied().find(|id| *id != session);
        let target = if astray { other.unwrap_or(session) } else { session };
        self.deliver_later(target, Message::Frames(frames), if behind { 500 } else { 0 });
    }

    /// The server asks for frames, on the event socket: not in order with the replies.
    pub(super) fn revoke(&mut self, session: SessionId, frames: Vec<VramFrame>) {
        if self.machine.borrow().has(Mutant::RevokeAssumed) {
            self.report.events += 1;
            let request = RequestId(MADE_UP + self.report.events);
            let ask = Ask::Plain(Request::Revoked(frames));
            return self.after(1, What::Arrival { session, request, ask });
        }
        let delay = self.random.between(1, 300);
        self.after(delay, What::AskedBack { session, frames });
    }

    /// The server ends a session that it can't serve.
    fn break_off(&mut self, session: SessionId) {
        if self.clients.get(&session).is_some_and(|client| client.connected) {
            self.hang_up(session);
        }
    }

    fn delivered(&mut self, session: SessionId, message: Message) {
        match message {
            Message::Frames(frames) => {
                let client = self.client_mut(session);
                for frame in frames {
                    let new = client.imported.insert(frame);
                    let sense = new || !client.is_honest();
                    assert!(sense, "{session:?} is sent {frame:?}, which it has");
                }
            }
            Message::Reply(request, reply) => {
                let client = self.client_mut(session);
                let asked = client.asked.remove(&request);
                let asked = asked
                    .unwrap_or_else(|| panic!("{session:?} never asked {request:?}: {reply:?}"));
                let overtakes = client.asked.range(..request).any(|(_, asked)| !asked.waits());
                assert!(asked.waits() || !overtakes, "{reply:?} is out of order");
                self.answered(session, asked, reply);
            }
        }
    }

    fn answered(&mut self, session: SessionId, asked: Asked, reply: Reply) {
        match (asked, reply) {
            (Asked::Allocate { file }, Reply::Allocated { allocation, pages }) => {
                self.client_mut(session).allocations.insert(allocation, Known { pages, file });
            }
            (Asked::Map(ranges, access), Reply::Mapped(mapped)) => {
                let pages = pages_of(&ranges).take(mapped.frames.len()).collect();
                self.mapped(session, &mapped, pages, access);
            }
            (Asked::Map(ranges, Access::Overwrite), Reply::Refused(_)) => {
                pages_of(&ranges).take(64).for_each(|place| self.truth.end_overwrite(place));
            }
            (Asked::Free(allocation), Reply::Done) => self.truth.forget(allocation),
            (Asked::Bye, Reply::Done) => {
                if self.clients[&session].is_honest() || self.random.one_in(2) {
                    self.hang_up(session);
                }
            }
            (
                Asked::Allocate { .. }
                | Asked::Map(..)
                | Asked::Free(_)
                | Asked::Flush(_)
                | Asked::SetTier
                | Asked::Bye
                | Asked::Other,
                Reply::Refused(_),
            )
            | (Asked::Flush(_) | Asked::SetTier, Reply::Done)
            | (
                Asked::Other,
                Reply::Done | Reply::Stats(_) | Reply::Quotas(_) | Reply::WorkingSets(_),
            ) => {}
            (asked, reply) => panic!("{reply:?} answers {asked:?} of {session:?}"),
        }
    }

    fn mapped(
        &mut self,
        session: SessionId,
        mapped: &Mapped,
        pages: Vec<(lapisd::engine::ids::AllocationId, u32)>,
        access: Access,
    ) {
        let client = self.client_mut(session);
        let kind = client.kind;
        for frame in &mapped.frames {
            let has = client.imported.contains(frame) || !client.is_honest();
            assert!(has, "{session:?} maps {frame:?}, which it was never sent");
        }
        if !client.is_honest() && client.ended.contains(&mapped.mapping) {
            // It guessed the mapping's id and ended it before it was told; or tried to, before it was granted.
            let again = Request::Unmap(vec![mapped.mapping]);
            return self.send(session, Ask::Plain(again), Asked::Other);
        }
        let held = Held { pages, frames: mapped.frames.clone(), access };
        client.mappings.insert(mapped.mapping, held.clone());
        self.count_held(&held, true);
        match access {
            Access::Read => self.look(session, &held),
            Access::Write => {
                self.look(session, &held);
                self.write_some(&held);
            }
            // Every byte is written before any is read.
            Access::Overwrite => self.overwrite(&held),
        }
        if let Some(delay) = self.hold_us(kind) {
            self.after(delay, What::Release { session, mapping: mapped.mapping });
        }
    }

    /// Frames are mapped by a process, or no longer.
    pub(super) fn count_held(&mut self, held: &Held, more: bool) {
        let machine = &mut *self.machine.borrow_mut();
        let writes = held.access != Access::Read;
        for frame in &held.frames {
            let index = frame.0 as usize;
            let count = |count: u32| if more { count + 1 } else { count - 1 };
            machine.held[index] = count(machine.held[index]);
            if writes {
                machine.written[index] = count(machine.written[index]);
            }
        }
    }

    /// Compares every byte of a mapping with what it should be.
    pub(super) fn look(&mut self, session: SessionId, held: &Held) {
        if self.clients[&session].domain == OUTLAWS {
            return;
        }
        let machine = self.machine.borrow();
        for (place, frame) in held.pages.iter().zip(&held.frames) {
            self.truth.check(*place, machine.vram.bytes(frame.0));
            self.report.pages_checked += 1;
        }
    }

    /// Writes parts of some of its pages.
    pub(super) fn write_some(&mut self, held: &Held) {
        let machine = &mut *self.machine.borrow_mut();
        let page_size = machine.page_size;
        for (place, frame) in held.pages.iter().zip(&held.frames) {
            if self.random.one_in(3) {
                continue;
            }
            let start = self.random.index(page_size);
            let end = start + 1 + self.random.index(page_size - start);
            let range = if self.random.one_in(2) { 0..page_size } else { start..end };
            self.truth.write(*place, range, machine.vram.bytes_mut(frame.0));
            self.report.pages_written += 1;
        }
    }

    fn overwrite(&mut self, held: &Held) {
        let machine = &mut *self.machine.borrow_mut();
        for (place, frame) in held.pages.iter().zip(&held.frames) {
            self.truth.write(*place, 0..machine.page_size, machine.vram.bytes_mut(frame.0));
            self.truth.end_overwrite(*place);
            self.report.pages_written += 1;
        }
    }

    fn asked_back(&mut self, session: SessionId, frames: Vec<VramFrame>) {
        let Some(client) = self.clients.get(&session).filter(|client| client.connected) else {
            return;
        };
        if client.is_honest() && !client.said_bye {
            for frame in &frames {
                let has = client.imported.contains(frame);
                assert!(has, "{session:?} is asked for {frame:?}, which it has not");
                assert!(!client.holds(*frame), "{session:?} is asked for {frame:?}, which it maps");
            }
        }
        if self.strikes(Fault::RevokeIgnored) {
            return;
        }
        if self.strikes(Fault::RevokeFalse) {
            self.false_revoked(session);
        }
        let late = self.strikes(Fault::RevokeLate);
        let delay =
            if late { self.random.between(1_900_000, 4_000_000) } else { self.random.below(1000) };
        self.after(delay, What::GiveBack { session, frames });
    }

    fn give_back(&mut self, session: SessionId, frames: &[VramFrame]) {
        let Some(client) = self.clients.get(&session).filter(|client| client.connected) else {
            return;
        };
        if client.said_bye && client.is_honest() {
            return;
        }
        // One that lied may not know what it has; it gives back what it is asked for.
        let has = |frame: &VramFrame| client.imported.contains(frame) || !client.is_honest();
        let unused = |frame: &&VramFrame| has(frame) && !client.holds(**frame);
        let frames: Vec<_> = frames.iter().filter(unused).copied().collect();
        self.say_revoked(session, frames);
    }

    /// The connection goes; the process may live on, and its seat is taken by another session.
    pub(super) fn hang_up(&mut self, session: SessionId) {
        self.disconnect(session);
        let fickle = self.clients[&session].kind == Kind::Fickle && self.random.one_in(2);
        let lives = fickle || self.strikes(Fault::Zombie);
        if !lives || self.ending {
            return self.after(0, What::End { session });
        }
        if fickle {
            self.machine.borrow_mut().faults.count(Fault::Zombie);
        }
        self.after(1, What::Haunt { session });
        // Some live until the end.
        if self.scenario.calm {
            let delay = self.random.between(100, 50_000);
            self.after(delay, What::End { session });
        } else if !self.random.one_in(32) {
            let delay = self.random.pick(&[1000, 50_000, 3_000_000]);
            self.after(delay, What::End { session });
        }
    }

    /// The process is killed.
    pub(super) fn kill(&mut self, session: SessionId) {
        self.disconnect(session);
        self.process_ends(session);
    }

    fn disconnect(&mut self, session: SessionId) {
        let reset = self.strikes(Fault::ConnectionReset);
        let late = self.strikes(Fault::LateRequest);
        let delay = self.random.between(1, 100);
        let now = self.now;
        let client = self.client_mut(session);
        client.connected = false;
        client.reset = reset;
        // What was sent before arrives before, unless it is lost.
        let time = client.up_until.max(now + delay);
        client.up_until = time;
        let seat = client.seat;
        if self.seats[seat] == Some(session) {
            self.seats[seat] = None;
        }
        self.at(time, What::Hangup { session });
        if late {
            let request = RequestId(MADE_UP);
            let ask = Ask::Open { file: 0, offset: 0, length: 1 };
            self.at(time + 1, What::Arrival { session, request, ask });
        }
    }

    /// A process is gone: it touches nothing any more. The daemon sees it later.
    fn process_ends(&mut self, session: SessionId) {
        let Some(client) = self.clients.remove(&session) else { return };
        client.mappings.values().for_each(|held| self.count_held(held, false));
        for allocation in self.owned.remove(&session).unwrap_or_default() {
            self.truth.forget(allocation);
        }
        let delay = self.random.between(1, 2000);
        let hangup = client.up_until.max(self.now);
        let first = self.strikes(Fault::DeathFirst);
        let time = if first { self.now } else { hangup };
        self.at(time + delay, What::Death { session });
    }

    /// The run ends: everybody goes, in whatever way.
    pub(super) fn leave(&mut self, session: SessionId) {
        let connected = self.clients[&session].connected;
        let delay = self.random.below(3000);
        if !connected {
            self.after(delay, What::End { session });
        } else if self.random.one_in(2) {
            self.kill(session);
        } else {
            self.hang_up(session);
        }
    }
}
