//! The kinds of messages: their numbers, and how many descriptors each carries.

use std::ops::RangeInclusive;

use bincode::{Decode, Encode};

use crate::fds::FDS_PER_MESSAGE_MAX;
use crate::message::{
    Advise, Allocate, Allocated, Bye, CancelPrefetch, Done, Flush, Frames, Free, Hello, ListQuotas,
    Map, Mapped, OpenFile, Prefetch, Quotas, Refused, Revoke, Revoked, SetPlan, SetQuota, SetTier,
    Stat, Stats, Unmap, Welcome, WorkingSet, WorkingSets,
};

/// Message kinds. Numbers are never reused; a retired one stays here with its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Kind {
    /// Client's first message: [`Hello`]. At most one descriptor: the event socket.
    Hello = 1,
    /// Daemon's answer: [`Welcome`].
    Welcome = 2,
    /// [`Allocate`].
    Allocate = 16,
    /// [`OpenFile`], with exactly one descriptor: the file.
    OpenFile = 17,
    /// [`Free`].
    Free = 18,
    /// [`Map`].
    Map = 19,
    /// [`Unmap`].
    Unmap = 20,
    /// [`Prefetch`].
    Prefetch = 21,
    /// [`Stat`].
    Stat = 22,
    /// [`Bye`].
    Bye = 23,
    /// [`Revoked`].
    Revoked = 24,
    /// [`CancelPrefetch`].
    CancelPrefetch = 25,
    /// [`Advise`].
    Advise = 26,
    /// [`Flush`].
    Flush = 27,
    /// [`SetTier`].
    SetTier = 28,
    /// [`SetQuota`].
    SetQuota = 29,
    /// [`ListQuotas`].
    ListQuotas = 30,
    /// [`SetPlan`].
    SetPlan = 31,
    /// [`WorkingSet`].
    WorkingSet = 32,
    /// [`Refused`].
    Refused = 64,
    /// [`Allocated`].
    Allocated = 65,
    /// [`Done`].
    Done = 66,
    /// [`Mapped`].
    Mapped = 67,
    /// [`Stats`].
    Stats = 68,
    /// [`Quotas`].
    Quotas = 69,
    /// [`WorkingSets`].
    WorkingSets = 70,
    /// [`Frames`], with one descriptor per frame.
    Frames = 96,
    /// [`Revoke`].
    Revoke = 97,
}

/// A body with a kind of its own.
pub trait Message: Encode + Decode<()> {
    /// Its number in the header.
    const KIND: Kind;
}

/// Ties each message to its kind, and lists the kinds once.
macro_rules! messages {
    ($($name:ident),* $(,)?) => {
        $(impl Message for $name {
            const KIND: Kind = Kind::$name;
        })*

        impl Kind {
            /// Every kind.
            pub const ALL: &[Kind] = &[$(Kind::$name),*];

            /// The kind with this number, if there is one.
            #[must_use]
            pub fn from_u16(number: u16) -> Option<Kind> {
                $(if number == Kind::$name.number() {
                    return Some(Kind::$name);
                })*
                None
            }
        }
    };
}

messages!(
    Hello,
    Welcome,
    Allocate,
    OpenFile,
    Free,
    Map,
    Unmap,
    Prefetch,
    Stat,
    Bye,
    Revoked,
    CancelPrefetch,
    Advise,
    Flush,
    SetTier,
    SetQuota,
    ListQuotas,
    SetPlan,
    WorkingSet,
    Refused,
    Allocated,
    Done,
    Mapped,
    Stats,
    Quotas,
    WorkingSets,
    Frames,
    Revoke,
);

impl Kind {
    /// Its number in the header.
    #[must_use]
    pub const fn number(self) -> u16 {
        self as u16
    }

    /// How many descriptors a message of this kind carries.
    #[must_use]
    pub const fn fds(self) -> RangeInclusive<u16> {
        match self {
            Kind::Hello => 0..=1,
            Kind::OpenFile => 1..=1,
            Kind::Frames => 1..=FDS_PER_MESSAGE_MAX,
            Kind::Welcome
            | Kind::Allocate
            | Kind::Free
            | Kind::Map
            | Kind::Unmap
            | Kind::Prefetch
            | Kind::Stat
            | Kind::Bye
            | Kind::Revoked
            | Kind::CancelPrefetch
            | Kind::Advise
            | Kind::Flush
            | Kind::SetTier
            | Kind::SetQuota
            | Kind::ListQuotas
            | Kind::SetPlan
            | Kind::WorkingSet
            | Kind::WorkingSets
            | Kind::Quotas
            | Kind::Refused
            | Kind::Allocated
            | Kind::Done
            | Kind::Mapped
            | Kind::Stats
            | Kind::Revoke => 0..=0,
        }
    }

    /// Whether it can be part of the handshake. Such kinds always carry header version 1, so that peers of any
    /// two versions can read each other's.
    #[must_use]
    pub const fn is_handshake(self) -> bool {
        matches!(self, Kind::Hello | Kind::Welcome | Kind::Refused)
    }
}
