//! The client: allocations and mappings over one connection.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lapis_proto::ids::SessionId;
use lapis_proto::message::{
    Access, Allocate, Allocated, Free, Map, Mapped, OpenFile, PAGES_PER_MAP_MAX, PageRange,
    RANGES_PER_REQUEST_MAX, Refused, Stat, Stats, Welcome, WorkingSet, WorkingSets,
};

use crate::allocation::{Allocation, Owned};
use crate::connect::ConnectOptions;
use crate::error::{Error, ProtocolError};
use crate::lock;
use crate::mapping::{MapStats, Mapping, Space, View};
use crate::memory::{Claim, Held};
use crate::plan::record;
use crate::session::Session;

/// How long a map waits for room when it isn't told: long enough for other mappings to end, short enough to notice
/// that none does.
pub const MAP_WAIT_DEFAULT: Duration = Duration::from_secs(60);

/// What a file's offset is a multiple of on a unified device.
const UNIFIED_ALIGNMENT: u64 = 4096;

/// A connection to `lapisd`. Clones share it. It is closed when the last clone, allocation and mapping is dropped.
///
/// After a fork only the parent may use it: in the child every call fails with [`Error::Forked`], and the addresses
/// of its allocations don't exist.
#[derive(Debug, Clone)]
pub struct Client {
    pub(crate) session: Arc<Session>,
}

impl Client {
    /// Connects to the daemon at `socket`, with default options.
    ///
    /// # Errors
    /// As [`ConnectOptions::connect`].
    pub fn connect(socket: impl Into<PathBuf>) -> Result<Client, Error> {
        ConnectOptions { socket: Some(socket.into()), ..ConnectOptions::default() }.connect()
    }

    /// Connects to the daemon at [`crate::default_socket`].
    ///
    /// # Errors
    /// As [`ConnectOptions::connect`].
    pub fn connect_default() -> Result<Client, Error> {
        ConnectOptions::default().connect()
    }

    pub(crate) fn of(session: Arc<Session>) -> Client {
        Client { session }
    }

    /// Bytes of a page: the unit in which bytes are in VRAM or not.
    #[must_use]
    pub fn page_size(&self) -> u64 {
        self.session.welcome.page_size
    }

    /// What the daemon said of itself when this client connected.
    #[must_use]
    pub fn welcome(&self) -> &Welcome {
        &self.session.welcome
    }

    /// The daemon's counters, as of now.
    ///
    /// # Errors
    /// [`Error::Disconnected`], [`Error::Forked`].
    pub fn stats(&self) -> Result<Stats, Error> {
        self.session.connection().call(&Stat {}, None)
    }

    /// The working sets of the sessions that this user may see, or of one of them; none if it isn't there.
    ///
    /// # Errors
    /// [`Error::Disconnected`], [`Error::Forked`].
    pub fn working_sets(&self, session: Option<SessionId>) -> Result<WorkingSets, Error> {
        self.session.connection().call(&WorkingSet { session }, None)
    }

    /// The first refusal since the last call of this that came after a [`Mapping`] or [`Allocation`] was dropped,
    /// when nobody waited for it. There is none unless client and daemon disagree about what exists.
    #[must_use]
    pub fn take_refusal(&self) -> Option<Refused> {
        self.session.connection().take_refused_unread()
    }

    /// Reserves `size` bytes, which start as zeros. If the daemon's device is a CUDA device, the first allocation of a
    /// client starts the driver in this process.
    ///
    /// # Errors
    /// [`Error::Refused`], e.g. with [`crate::Code::OutOfMemory`] when the tiers can't hold it; [`Error::Cuda`] if this
    /// process can't use the daemon's GPU.
    pub fn allocate(&self, size: u64) -> Result<Allocation, Error> {
        self.session.start_gpu()?;
        let allocated = self.session.connection().call(&Allocate { size }, None)?;
        self.take_over(&allocated, size, 0)
    }

    /// Makes `length` bytes of an open file, from `offset` on, an allocation that can be read. Clients of one user
    /// that open the same file share its bytes in VRAM. The daemon reads through this descriptor.
    ///
    /// # Errors
    /// [`Error::Refused`], e.g. with [`crate::Code::NotAFile`], or [`crate::Code::OutOfRange`] past the file's end.
    pub fn open_file(
        &self,
        file: impl AsFd,
        offset: u64,
        length: u64,
    ) -> Result<Allocation, Error> {
        self.session.start_gpu()?;
        // Where VRAM is what the file is read into, pages begin where the disk's blocks do.
        let unified = self.session.welcome.unified;
        let shift = if unified && length > 0 { offset % UNIFIED_ALIGNMENT } else { 0 };
        let request = OpenFile { offset: offset - shift, length: length.saturating_add(shift) };
        let allocated = self.session.connection().call(&request, Some(file.as_fd()))?;
        self.take_over(&allocated, length, shift)
    }

    /// Opens a file for [`Self::open_file`], past the page cache where the file system can.
    ///
    /// # Errors
    /// [`Error::Open`], else as [`Self::open_file`].
    pub fn open_path(
        &self,
        path: impl AsRef<Path>,
        offset: u64,
        length: u64,
    ) -> Result<Allocation, Error> {
        let path = path.as_ref();
        let file =
            open_direct(path).map_err(|source| Error::Open { path: path.to_path_buf(), source })?;
        self.open_file(file, offset, length)
    }

    /// Brings ranges of bytes to VRAM, all or none of them, and keeps them there until the mapping is dropped.
    ///
    /// Whole pages are brought and held; the mapping gives exactly the bytes asked for. Ranges may be of several
    /// allocations, overlap, share pages or be empty. With [`Access::Overwrite`] all bytes of the ranges must be
    /// written before any is read. Waits up to `wait` for other mappings to make room; with 0 only as long as the
    /// transfers take.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::TooLarge`]; [`Error::Conflict`] when a live mapping of this process has some
    /// of the bytes and one of the two writes; [`Error::Refused`], e.g. with [`crate::Code::TimedOut`];
    /// [`Error::Cuda`] if a frame can't be mapped on the GPU.
    pub fn map(
        &self,
        ranges: &[(&Allocation, Range<u64>)],
        access: Access,
        wait: Duration,
    ) -> Result<Mapping, Error> {
        if self.session.connection().is_forked() {
            return Err(Error::Forked);
        }
        self.check(ranges)?;
        let pages = self.pages_in_order(ranges);
        let request = Map {
            ranges: page_ranges(&pages)?,
            access: self.access_of(ranges, access),
            wait_us: micros(wait),
        };
        record(&self.session.recorders, &pages, request.access);
        let mut mapping = self.claim(ranges, access != Access::Read)?;
        if !pages.is_empty() {
            self.establish(&request, pages, &mut mapping)?;
        }
        mapping.in_use = true;
        Ok(mapping)
    }

    /// Reserves addresses for a new allocation, or gives it back.
    fn take_over(&self, allocated: &Allocated, size: u64, shift: u64) -> Result<Allocation, Error> {
        let Allocated { allocation: id, pages } = *allocated;
        let expected = size.saturating_add(shift).div_ceil(self.page_size());
        if u64::from(pages) != expected {
            return Err(self
                .session
                .connection()
                .fail(ProtocolError::Pages { found: pages, expected }));
        }
        match Space::reserve(pages, self.page_size(), self.session.gpu()) {
            Ok(space) => {
                let base = space.base();
                lock(&self.session.shared.memory).insert(id, space);
                let session = Arc::clone(&self.session);
                Ok(Allocation { owned: Arc::new(Owned { session, id, size, pages, shift, base }) })
            }
            Err(error) => {
                self.session.connection().post(&Free { allocation: id })?;
                Err(error)
            }
        }
    }

    /// Refuses ranges of other clients and outside of their allocation.
    pub(crate) fn check(&self, ranges: &[(&Allocation, Range<u64>)]) -> Result<(), Error> {
        for (allocation, Range { start, end }) in ranges {
            if !Arc::ptr_eq(&allocation.owned.session, &self.session) {
                return Err(Error::Foreign { allocation: allocation.id().0 });
            }
            let size = allocation.size();
            if start > end || *end > size {
                return Err(Error::OutOfRange { start: *start, end: *end, size });
            }
        }
        Ok(())
    }

    /// The pages that ranges of bytes touch, each once, by address.
    pub(crate) fn pages_in_order(&self, ranges: &[(&Allocation, Range<u64>)]) -> Vec<Held> {
        let mut pages: Vec<Held> = ranges.iter().filter_map(|range| self.pages_of(range)).collect();
        pages.sort_by_key(|held| (held.allocation.id, held.pages.start));
        merge(&mut pages);
        pages
    }

    /// The pages that a range of bytes touches; `None` for no bytes.
    pub(crate) fn pages_of(&self, (allocation, bytes): &(&Allocation, Range<u64>)) -> Option<Held> {
        if bytes.is_empty() {
            return None;
        }
        let shift = allocation.owned.shift;
        let first = usize::try_from((bytes.start + shift) / self.page_size()).ok()?;
        let end = usize::try_from((bytes.end + shift).div_ceil(self.page_size())).ok()?;
        Some(Held { allocation: Arc::clone(&allocation.owned), pages: first..end })
    }

    /// The bytes around a range in its first and last page must survive: they make `Overwrite` a `Write`.
    pub(crate) fn access_of(&self, ranges: &[(&Allocation, Range<u64>)], access: Access) -> Access {
        let page_size = self.page_size();
        let whole = |(allocation, bytes): &(&Allocation, Range<u64>)| {
            bytes.start.is_multiple_of(page_size)
                && (bytes.end.is_multiple_of(page_size) || bytes.end == allocation.size())
        };
        match access {
            Access::Overwrite if !ranges.iter().all(whole) => Access::Write,
            Access::Read | Access::Write | Access::Overwrite => access,
        }
    }

    /// A mapping that has its bytes claimed within this process, and no pages yet.
    fn claim(&self, ranges: &[(&Allocation, Range<u64>)], write: bool) -> Result<Mapping, Error> {
        let claims: Vec<Claim> = ranges
            .iter()
            .filter(|(_, bytes)| !bytes.is_empty())
            .map(|(allocation, bytes)| Claim { allocation: allocation.id(), bytes: bytes.clone() })
            .collect();
        lock(&self.session.shared.memory).claim(&claims, write)?;
        Ok(Mapping {
            session: Arc::clone(&self.session),
            id: None,
            held: Vec::new(),
            claims,
            views: ranges.iter().map(|(a, bytes)| View::new(&a.owned, bytes)).collect(),
            write,
            in_use: false,
            stats: MapStats::default(),
        })
    }

    /// Has the daemon grant the pages, and maps them. If that fails, dropping `mapping` takes all back.
    fn establish(
        &self,
        request: &Map,
        pages: Vec<Held>,
        mapping: &mut Mapping,
    ) -> Result<(), Error> {
        let connection = self.session.connection();
        let mapped: Mapped = connection.call(request, None)?;
        mapping.id = Some(mapped.mapping);
        let expected: usize = pages.iter().map(|held| held.pages.len()).sum();
        if mapped.frames.len() != expected {
            let found = mapped.frames.len();
            return Err(connection.fail(ProtocolError::FrameCount { found, expected }));
        }
        mapping.stats = MapStats {
            hits_vram: mapped.hits_vram,
            hits_ram: mapped.hits_ram,
            pages: u32::try_from(expected).unwrap_or(u32::MAX),
            waited: Duration::from_micros(mapped.waited_us),
        };
        let mut memory = lock(&self.session.shared.memory);
        let mut frames = mapped.frames.as_slice();
        for held in pages {
            let (these, rest) = frames.split_at(held.pages.len());
            frames = rest;
            let id = held.allocation.id;
            match memory.hold(id, held.pages.clone(), these, mapping.write, connection.frames()) {
                Ok(()) => mapping.held.push(held),
                Err(error) => {
                    // `held` and `mapping` take this lock when they are dropped.
                    drop(memory);
                    return Err(match error {
                        Error::Protocol(error) => connection.fail(error),
                        other => other,
                    });
                }
            }
        }
        Ok(())
    }
}

/// Joins neighbours that overlap or follow each other within an allocation.
pub(crate) fn merge(pages: &mut Vec<Held>) {
    pages.dedup_by(|next, held| {
        let joins = next.allocation.id == held.allocation.id
            && (held.pages.start..=held.pages.end).contains(&next.pages.start);
        if joins {
            held.pages.end = held.pages.end.max(next.pages.end);
        }
        joins
    });
}

pub(crate) fn page_range(held: &Held) -> Result<PageRange, Error> {
    let fit = |count: usize| {
        u32::try_from(count).map_err(|_| too_large(count, "pages", PAGES_PER_MAP_MAX.into()))
    };
    let (first, count) = (fit(held.pages.start)?, fit(held.pages.len())?);
    Ok(PageRange { allocation: held.allocation.id, first, count })
}

/// The ranges of one request, if it can carry them.
fn page_ranges(pages: &[Held]) -> Result<Vec<PageRange>, Error> {
    if pages.len() > RANGES_PER_REQUEST_MAX {
        return Err(too_large(
            pages.len(),
            "separate ranges of pages",
            RANGES_PER_REQUEST_MAX as u64,
        ));
    }
    let total: usize = pages.iter().map(|held| held.pages.len()).sum();
    if u32::try_from(total).map_or(true, |total| total > PAGES_PER_MAP_MAX) {
        return Err(too_large(total, "pages", PAGES_PER_MAP_MAX.into()));
    }
    pages.iter().map(page_range).collect()
}

/// A time as the protocol has it.
pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn too_large(asked: usize, unit: &'static str, limit: u64) -> Error {
    Error::TooLarge { asked: u64::try_from(asked).unwrap_or(u64::MAX), unit, limit }
}

/// Opens read-only with `O_DIRECT`, or without where the file system refuses that.
pub(crate) fn open_direct(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    match options.custom_flags(libc::O_DIRECT).open(path) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            options.custom_flags(0).open(path)
        }
        result => result,
    }
}

#[cfg(test)]
mod tests;
