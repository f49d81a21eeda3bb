//! An allocation: bytes with addresses of their own, wherever their pages are.

use std::ops::Range;
use std::sync::Arc;

use lapis_proto::ids::AllocationId;
use lapis_proto::message::{Access, Free};

use crate::client::{Client, MAP_WAIT_DEFAULT};
use crate::error::Error;
use crate::mapping::{Base, Mapping};
use crate::session::Session;

/// A contiguous range of bytes. Clones are handles to the same one; it is given up when the last of them and of its
/// mappings is dropped. In a forked child that does nothing.
#[derive(Debug, Clone)]
pub struct Allocation {
    pub(crate) owned: Arc<Owned>,
}

/// What all handles and mappings of an allocation share.
#[derive(Debug)]
pub(crate) struct Owned {
    pub(crate) session: Arc<Session>,
    pub(crate) id: AllocationId,
    pub(crate) size: u64,
    pub(crate) pages: u32,
    /// Bytes of its first page ahead of its own.
    pub(crate) shift: u64,
    pub(crate) base: Base,
}

impl Allocation {
    /// Bytes, as asked for.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.owned.size
    }

    /// Pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.owned.pages
    }

    /// Its id, as `lapisctl` shows it.
    #[must_use]
    pub fn id(&self) -> AllocationId {
        self.owned.id
    }

    /// Maps some of its bytes, waiting up to [`MAP_WAIT_DEFAULT`] for room.
    ///
    /// # Errors
    /// As [`Client::map`].
    pub fn map(&self, bytes: Range<u64>, access: Access) -> Result<Mapping, Error> {
        self.client().map(&[(self, bytes)], access, MAP_WAIT_DEFAULT)
    }

    /// Maps all of it.
    ///
    /// # Errors
    /// As [`Client::map`].
    pub fn map_all(&self, access: Access) -> Result<Mapping, Error> {
        self.map(0..self.size(), access)
    }

    /// The connection that it belongs to.
    #[must_use]
    pub fn client(&self) -> Client {
        Client::of(Arc::clone(&self.owned.session))
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if self.session.connection().is_forked() {
            return;
        }
        crate::lock(&self.session.shared.memory).remove(self.id);
        // A daemon that is gone holds no allocation either; a refusal is kept for `Client::take_refusal`.
        let _ = self.session.connection().post(&Free { allocation: self.id });
    }
}
