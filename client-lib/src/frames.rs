//! The VRAM frames this client has imported: a descriptor each, by the daemon's index.
//!
//! Invariant: each descriptor is a memory file of exactly one page that can't shrink, so that no access to a mapped
//! page can raise `SIGBUS`.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use lapis_proto::ids::VramFrame;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::stat::fstat;

use crate::error::ProtocolError;
use crate::lock;

/// Frames by index, filled by whichever thread reads the socket.
#[derive(Debug)]
pub(crate) struct FrameTable {
    page_size: u64,
    frames_max: u32,
    open: Mutex<HashMap<u32, Arc<OwnedFd>>>,
}

impl FrameTable {
    pub(crate) fn new(page_size: u64, frames_max: u32) -> FrameTable {
        FrameTable { page_size, frames_max, open: Mutex::default() }
    }

    /// Takes in the descriptors of `frames`, one each.
    pub(crate) fn import(
        &self,
        frames: &[VramFrame],
        fds: Vec<OwnedFd>,
    ) -> Result<(), ProtocolError> {
        if frames.len() != fds.len() {
            return Err(ProtocolError::FrameCount { found: frames.len(), expected: fds.len() });
        }
        for (&VramFrame(frame), fd) in frames.iter().zip(fds) {
            let bad = |what| ProtocolError::Frames { frame, what };
            if frame >= self.frames_max {
                return Err(bad("is outside the VRAM tier"));
            }
            self.check(&fd).map_err(bad)?;
            if lock(&self.open).insert(frame, Arc::new(fd)).is_some() {
                return Err(bad("was sent twice"));
            }
        }
        Ok(())
    }

    /// The frame's descriptor.
    pub(crate) fn get(&self, frame: VramFrame) -> Result<Arc<OwnedFd>, ProtocolError> {
        let found = lock(&self.open).get(&frame.0).cloned();
        found.ok_or(ProtocolError::Frames { frame: frame.0, what: "was never sent" })
    }

    /// Closes these.
    pub(crate) fn close(&self, frames: &[VramFrame]) {
        let mut open = lock(&self.open);
        for frame in frames {
            open.remove(&frame.0);
        }
    }

    /// Closes all.
    pub(crate) fn close_all(&self) {
        lock(&self.open).clear();
    }

    fn check(&self, fd: &OwnedFd) -> Result<(), &'static str> {
        let status = fstat(fd).map_err(|_| "can't be examined")?;
        if u64::try_from(status.st_size) != Ok(self.page_size) {
            return Err("isn't of page size");
        }
        let seals = fcntl(fd, FcntlArg::F_GET_SEALS).map_err(|_| "isn't a memory file")?;
        if !SealFlag::from_bits_retain(seals).contains(SealFlag::F_SEAL_SHRINK) {
            return Err("isn't sealed against shrinking");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::unistd::ftruncate;

    use super::*;
    use crate::testing::sealed_memfd;

    fn message(result: Result<(), ProtocolError>) -> String {
        result.expect_err("a protocol error").to_string()
    }

    #[test]
    fn only_sealed_memory_files_of_page_size_are_taken() {
        let table = FrameTable::new(65536, 4);
        table.import(&[VramFrame(3)], vec![sealed_memfd(65536)]).expect("a good frame");
        table.get(VramFrame(3)).expect("there now");

        let take = |frame, fd| message(table.import(&[VramFrame(frame)], vec![fd]));
        assert_eq!(take(3, sealed_memfd(65536)), "frame 3 was sent twice");
        assert_eq!(take(4, sealed_memfd(65536)), "frame 4 is outside the VRAM tier");
        assert_eq!(take(0, sealed_memfd(4096)), "frame 0 isn't of page size");
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let open = memfd_create("frame", flags).expect("a memfd");
        ftruncate(&open, 65536).expect("sized");
        assert_eq!(take(0, open), "frame 0 isn't sealed against shrinking");
        let file = tempfile::tempfile_in(".").expect("a file");
        file.set_len(65536).expect("sized");
        assert_eq!(take(0, file.into()), "frame 0 isn't a memory file");
        assert_eq!(
            message(table.import(&[VramFrame(1), VramFrame(2)], vec![sealed_memfd(65536)])),
            "2 frames where 1 belong"
        );
        assert_eq!(message(table.get(VramFrame(0)).map(drop)), "frame 0 was never sent");
    }
}
