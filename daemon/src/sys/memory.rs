//! The RAM tier's memory: one anonymous mapping, cut into frames of a page and 4 KiB.
//!
//! The frames are grouped in chunks of at most 1 GiB, which are what io_uring and the GPU driver register; no frame
//! straddles a chunk. The chunks follow each other without a gap, so the only rounding is that of the whole to 2 MiB.
//! Everything is touched at start: afterwards memory cannot run out here.
//!
//! The pool hands out no free frames (the engine does); it only guards that a frame in use by an operation is not
//! given to a second one: [`RamPool::claim_read`], [`RamPool::claim_write`].
#![expect(unsafe_code, reason = "hands out the bytes of frames")]

use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;

use nix::errno::Errno;

use super::sync;
use crate::engine::ids::RamFrame;

pub(crate) mod budget;
pub mod claims;
#[cfg(test)]
mod claims_tests;
pub(crate) mod mapping;

use claims::{Claimed, Claims, Exclusive, Shared};
use mapping::{HUGE_PAGE, Mapping, Progress};

pub use mapping::PageKind;

/// Bytes of a frame beyond its page: what reads are rounded out by.
pub const FRAME_SLACK: u64 = 4096;
/// io_uring registers no buffer above this.
const CHUNK_BYTES_MAX: u64 = 1 << 30;
/// Left of the machine's memory for everything else.
const HEADROOM_KEPT: u64 = 64 << 20;

/// Memory cannot be had.
#[derive(Debug, Clone, thiserror::Error)]
pub enum MemoryError {
    /// The page size is no power of two between 4 KiB and 512 MiB.
    #[error(
        "a page size of {page_size} bytes cannot be: take a power of two between 4 KiB and 512 MiB"
    )]
    PageSize {
        /// As asked.
        page_size: u64,
    },
    /// Not one frame fits.
    #[error("{bytes} bytes hold no frame, which takes {frame_bytes} bytes: give the tier more")]
    TooSmall {
        /// As asked.
        bytes: u64,
        /// What one frame takes.
        frame_bytes: u64,
    },
    /// More frames than can be numbered or addressed.
    #[error(
        "{bytes} bytes are more than can be addressed: give the tier less, or take a larger page size"
    )]
    TooLarge {
        /// As asked.
        bytes: u64,
    },
    /// The machine or a cgroup would kill us later.
    #[error(
        "{asked} bytes of memory were asked for, {available} can be had ({limit}): ask for less or raise the limit"
    )]
    NoRoom {
        /// As asked.
        asked: u64,
        /// What is left.
        available: u64,
        /// What limits it.
        limit: String,
    },
    /// A system call failed.
    #[error("{call} of {bytes} bytes of memory failed: {source}")]
    Call {
        /// Which.
        call: &'static str,
        /// For how much.
        bytes: u64,
        /// Why.
        source: Errno,
    },
}

/// Refuses what the machine or a cgroup cannot give.
///
/// # Errors
/// [`MemoryError::NoRoom`].
pub(crate) fn check_budget(asked: u64) -> Result<(), MemoryError> {
    match budget::headroom() {
        Some(headroom) if asked.saturating_add(HEADROOM_KEPT) > headroom.bytes => {
            let available = headroom.bytes.saturating_sub(HEADROOM_KEPT);
            Err(MemoryError::NoRoom { asked, available, limit: headroom.limit })
        }
        _ => Ok(()),
    }
}

/// How the memory is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    page_size: u64,
    frame_bytes: usize,
    frames: u32,
    frames_per_chunk: u32,
    /// What is mapped: the frames, rounded up to 2 MiB.
    mapped: NonZeroUsize,
}

impl Layout {
    fn new(bytes: u64, page_size: u64) -> Result<Self, MemoryError> {
        if !page_size.is_power_of_two() || !(4096..=CHUNK_BYTES_MAX / 2).contains(&page_size) {
            return Err(MemoryError::PageSize { page_size });
        }
        let frame_bytes = page_size + FRAME_SLACK;
        let too_large = MemoryError::TooLarge { bytes };
        let frames = u32::try_from(bytes / frame_bytes).map_err(|_| too_large.clone())?;
        let used =
            usize::try_from(u64::from(frames) * frame_bytes).map_err(|_| too_large.clone())?;
        let mapped = used.checked_next_multiple_of(HUGE_PAGE).ok_or_else(|| too_large.clone())?;
        Ok(Self {
            page_size,
            frame_bytes: usize::try_from(frame_bytes).map_err(|_| too_large.clone())?,
            frames,
            frames_per_chunk: u32::try_from(CHUNK_BYTES_MAX / frame_bytes)
                .map_err(|_| too_large)?,
            mapped: NonZeroUsize::new(mapped)
                .ok_or(MemoryError::TooSmall { bytes, frame_bytes })?,
        })
    }

    fn chunk_bytes(&self) -> usize {
        index(self.frames_per_chunk) * self.frame_bytes
    }

    /// Offset and length of each chunk.
    fn chunks(&self) -> impl Iterator<Item = (usize, usize)> {
        let used = index(self.frames) * self.frame_bytes;
        let chunk = self.chunk_bytes();
        (0..used).step_by(chunk).map(move |start| (start, chunk.min(used - start)))
    }
}

/// A frame number as an index.
fn index(frame: u32) -> usize {
    usize::try_from(frame).expect("Linux has no 16-bit machines")
}

/// The RAM tier's frames.
#[derive(Debug)]
pub struct RamPool {
    layout: Layout,
    page_kind: PageKind,
    claims: Claims,
    mapping: Mapping,
}

/// The right to read a RAM frame.
pub type FrameRead = Shared<RamPool>;
/// The right to read and write a RAM frame.
pub type FrameWrite = Exclusive<RamPool>;

impl RamPool {
    /// Takes as many frames of `page_size` + 4096 bytes as fit in `bytes`, touched, in the largest pages to be had.
    ///
    /// # Errors
    /// [`MemoryError`]: it cannot fit, or the system said no.
    pub fn new(bytes: u64, page_size: u64) -> Result<Self, MemoryError> {
        Self::with_progress(bytes, page_size, &|_| ())
    }

    /// As [`RamPool::new`]; `progress` is told the bytes touched so far, from any thread.
    ///
    /// # Errors
    /// As [`RamPool::new`].
    pub fn with_progress(
        bytes: u64,
        page_size: u64,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Self, MemoryError> {
        let layout = Layout::new(bytes, page_size)?;
        let (mapping, page_kind) = map(layout.mapped, progress)?;
        if page_kind == PageKind::Plain && layout.mapped.get() >= 2 * HUGE_PAGE {
            tracing::warn!(
                "the RAM tier lies in 4 KiB pages, reads from disk will reach a fraction of its speed: reserve huge \
                 pages (vm.nr_hugepages) or allow transparent ones (/sys/kernel/mm/transparent_hugepage/enabled)"
            );
        }
        Ok(Self { layout, page_kind, claims: Claims::new(layout.frames), mapping })
    }

    /// Frames.
    #[must_use]
    pub fn frames(&self) -> u32 {
        self.layout.frames
    }

    /// Bytes of a page; a frame has [`FRAME_SLACK`] more.
    #[must_use]
    pub fn page_size(&self) -> u64 {
        self.layout.page_size
    }

    /// Bytes of a frame: a page and [`FRAME_SLACK`].
    #[must_use]
    pub fn frame_bytes(&self) -> usize {
        self.layout.frame_bytes
    }

    /// What the memory is made of.
    #[must_use]
    pub fn page_kind(&self) -> PageKind {
        self.page_kind
    }

    /// First byte of a frame, a multiple of 4096. To touch what lies there, hold a claim on the frame.
    ///
    /// # Panics
    /// If there is no such frame.
    #[must_use]
    pub fn frame_ptr(&self, frame: RamFrame) -> NonNull<u8> {
        assert!(frame.0 < self.layout.frames, "RAM frame {} of {}", frame.0, self.layout.frames);
        // SAFETY: the frame's number is below `frames`, and `frames * frame_bytes` is at most the mapping's length.
        unsafe { self.mapping.base().add(index(frame.0) * self.layout.frame_bytes) }
    }

    /// In which chunk a frame lies, and at which byte of it.
    ///
    /// # Panics
    /// If there is no such frame.
    #[must_use]
    pub fn chunk_of(&self, frame: RamFrame) -> (usize, usize) {
        assert!(frame.0 < self.layout.frames, "RAM frame {} of {}", frame.0, self.layout.frames);
        let per_chunk = self.layout.frames_per_chunk;
        (index(frame.0 / per_chunk), index(frame.0 % per_chunk) * self.layout.frame_bytes)
    }

    /// First byte and length of each chunk, to register; valid as long as the pool.
    pub fn chunks(&self) -> impl Iterator<Item = (NonNull<u8>, usize)> {
        self.layout.chunks().map(|(start, length)| {
            // SAFETY: `start` is below the bytes of all frames, which are inside the mapping.
            (unsafe { self.mapping.base().add(start) }, length)
        })
    }

    /// The right to read a frame, unless it is being written or does not exist.
    #[must_use]
    pub fn claim_read(self: &Arc<Self>, frame: RamFrame) -> Option<FrameRead> {
        Shared::new(self, frame.0)
    }

    /// The right to write a frame, unless it is in use or does not exist.
    #[must_use]
    pub fn claim_write(self: &Arc<Self>, frame: RamFrame) -> Option<FrameWrite> {
        Exclusive::new(self, frame.0)
    }
}

impl Claimed for RamPool {
    fn claims(&self) -> &Claims {
        &self.claims
    }
}

impl FrameRead {
    /// Which frame.
    #[must_use]
    pub fn frame(&self) -> RamFrame {
        RamFrame(self.index())
    }

    /// All its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let base = self.owner().frame_ptr(self.frame());
        // SAFETY: the frame is mapped as long as the pool, which `self` keeps; it was populated, so its bytes are
        // initialised; and nobody writes it while this claim on it lives, which the slice does not outlive.
        unsafe { std::slice::from_raw_parts(base.as_ptr(), self.owner().frame_bytes()) }
    }
}

impl FrameWrite {
    /// Which frame.
    #[must_use]
    pub fn frame(&self) -> RamFrame {
        RamFrame(self.index())
    }

    /// All its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let base = self.owner().frame_ptr(self.frame());
        // SAFETY: as in `FrameRead::bytes`; the only claim on the frame is this one, borrowed shared.
        unsafe { std::slice::from_raw_parts(base.as_ptr(), self.owner().frame_bytes()) }
    }

    /// All its bytes.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let base = self.owner().frame_ptr(self.frame());
        // SAFETY: as in `FrameRead::bytes`; the only claim on the frame is this one, borrowed mutably, so no other
        // reference to these bytes exists.
        unsafe { std::slice::from_raw_parts_mut(base.as_ptr(), self.owner().frame_bytes()) }
    }
}

/// Memory from the huge page pool if it has enough, as that was set aside before and is charged to no one; else the
/// largest pages that can be had.
fn map(length: NonZeroUsize, progress: &Progress<'_>) -> Result<(Mapping, PageKind), MemoryError> {
    if let Ok(mapping) = Mapping::hugetlb(length, progress) {
        return Ok((mapping, PageKind::Hugetlb));
    }
    let bytes = u64::try_from(length.get()).unwrap_or(u64::MAX);
    check_budget(bytes)?;
    let mapping = Mapping::private(length, progress)
        .map_err(|(call, source)| MemoryError::Call { call, bytes, source })?;
    let enough = bytes / 10 * 9;
    if mapping.huge_bytes() < enough {
        // Works even where transparent huge pages are switched off, if memory is not too fragmented.
        let _collapsed = mapping.collapse();
    }
    let kind = if mapping.huge_bytes() >= enough { PageKind::Transparent } else { PageKind::Plain };
    Ok((mapping, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn as_many_frames_as_fit_and_not_one_more() {
        let layout = Layout::new(10 * (2 * MIB + 4096), 2 * MIB).unwrap();
        assert_eq!((layout.frames, layout.mapped.get()), (10, 22 << 20));
        let layout = Layout::new(10 * (2 * MIB + 4096) - 1, 2 * MIB).unwrap();
        assert_eq!((layout.frames, layout.mapped.get()), (9, 20 << 20));
    }

    #[test]
    fn no_frame_straddles_a_chunk_and_no_chunk_exceeds_1_gib() {
        let layout = Layout::new(5368 << 20, 2 * MIB).unwrap();
        assert_eq!(layout.frames, 2678);
        assert_eq!(layout.frames_per_chunk, 511);
        let chunks: Vec<_> = layout.chunks().collect();
        assert_eq!(chunks.len(), 6);
        assert_eq!(chunks[0], (0, 1_073_737_728));
        assert_eq!(chunks[5], (5 * 1_073_737_728, 123 * 2_101_248));
    }

    #[test]
    fn impossible_sizes_are_refused() {
        assert!(matches!(Layout::new(MIB, 3000), Err(MemoryError::PageSize { page_size: 3000 })));
        assert!(matches!(Layout::new(MIB, 2048), Err(MemoryError::PageSize { page_size: 2048 })));
        assert!(matches!(Layout::new(MIB, 1 << 30), Err(MemoryError::PageSize { .. })));
        let small = Layout::new(2 * MIB, 2 * MIB);
        assert!(matches!(
            small,
            Err(MemoryError::TooSmall { bytes: 2_097_152, frame_bytes: 2_101_248 })
        ));
        assert!(matches!(Layout::new(u64::MAX, 4096), Err(MemoryError::TooLarge { .. })));
    }

    #[test]
    fn more_than_the_machine_has_is_refused_with_numbers() {
        match RamPool::new(1 << 50, 2 * MIB).unwrap_err() {
            MemoryError::NoRoom { asked, available, limit } => {
                assert!(asked > 1 << 49 && available < 1 << 46);
                assert!(limit.starts_with('/') || limit.starts_with("MemAvailable"), "{limit}");
            }
            other => panic!("{other}"),
        }
    }

    #[test]
    fn frames_are_zeroed_apart_and_writable_to_their_last_byte() {
        let pool = Arc::new(RamPool::new(8 * (64 << 10) + 8 * 4096, 64 << 10).unwrap());
        assert_eq!(pool.frames(), 8);
        for frame in 0..8_u8 {
            let mut claim = pool.claim_write(RamFrame(u32::from(frame))).unwrap();
            assert!(claim.bytes().iter().all(|&byte| byte == 0));
            claim.bytes_mut().fill(frame + 1);
            assert_eq!(claim.bytes().len(), 69_632);
        }
        for frame in 0..8_u8 {
            let claim = pool.claim_read(RamFrame(u32::from(frame))).unwrap();
            assert!(claim.bytes().iter().all(|&byte| byte == frame + 1));
            assert_eq!(claim.bytes().as_ptr(), pool.frame_ptr(RamFrame(u32::from(frame))).as_ptr());
        }
        assert!(pool.claim_read(RamFrame(8)).is_none());
    }

    #[test]
    fn a_frames_chunk_and_offset_name_its_address() {
        let pool = RamPool::new(4 << 20, 4096).unwrap();
        let chunks: Vec<_> = pool.chunks().collect();
        for frame in [0, 1, pool.frames() - 1] {
            let (chunk, offset) = pool.chunk_of(RamFrame(frame));
            let address = chunks[chunk].0.as_ptr().addr() + offset;
            assert_eq!(address, pool.frame_ptr(RamFrame(frame)).as_ptr().addr());
            assert!(offset + pool.frame_bytes() <= chunks[chunk].1);
        }
    }

    #[test]
    fn progress_ends_at_the_whole() {
        let most = std::sync::atomic::AtomicU64::new(0);
        let tell = |bytes| {
            most.fetch_max(bytes, std::sync::atomic::Ordering::Relaxed);
        };
        let pool = RamPool::with_progress(100 << 20, 2 * MIB, &tell).unwrap();
        assert_eq!(pool.frames(), 49);
        assert_eq!(most.into_inner(), 100 << 20);
    }
}
