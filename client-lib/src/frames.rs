//! The VRAM frames this client has imported, by the daemon's index.
//!
//! A frame of a simulated device is a descriptor, which is kept. Invariant: it is a memory file of exactly one page that
//! can't shrink, so that no access to a mapped page can raise `SIGBUS`.
//!
//! A frame of a CUDA device comes as a descriptor, which is exchanged for the driver's handle when the frame is mapped
//! first; the handle is kept. What else than a page of the daemon's device comes is refused by the driver, then or when
//! it is mapped.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use lapis_proto::ids::VramFrame;
use lapis_proto::message::DeviceKind;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::stat::fstat;

use crate::cuda::gpu::{DeviceFrame, Gpu};
use crate::error::{Error, ProtocolError};
use crate::lock;

/// One frame.
#[derive(Debug)]
enum Frame {
    /// As it came.
    Descriptor(Arc<OwnedFd>),
    /// As the driver knows it.
    Imported(Arc<DeviceFrame>),
}

/// Frames by index, filled by whichever thread reads the socket.
#[derive(Debug)]
pub(crate) struct FrameTable {
    page_size: u64,
    frames_max: u32,
    device: DeviceKind,
    open: Mutex<HashMap<u32, Frame>>,
}

impl FrameTable {
    pub(crate) fn new(page_size: u64, frames_max: u32, device: DeviceKind) -> FrameTable {
        FrameTable { page_size, frames_max, device, open: Mutex::default() }
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
            match self.device {
                DeviceKind::Sim => self.check(&fd).map_err(bad)?,
                DeviceKind::Cuda => {}
            }
            let entry = Frame::Descriptor(Arc::new(fd));
            if lock(&self.open).insert(frame, entry).is_some() {
                return Err(bad("was sent twice"));
            }
        }
        Ok(())
    }

    /// The frame's descriptor.
    pub(crate) fn get(&self, frame: VramFrame) -> Result<Arc<OwnedFd>, ProtocolError> {
        match lock(&self.open).get(&frame.0) {
            Some(Frame::Descriptor(fd)) => Ok(Arc::clone(fd)),
            Some(Frame::Imported(_)) | None => Err(never_sent(frame)),
        }
    }

    /// The frame as the driver knows it. Imports it if this is the first time.
    pub(crate) fn device_frame(
        &self,
        frame: VramFrame,
        gpu: &Arc<Gpu>,
    ) -> Result<Arc<DeviceFrame>, Error> {
        let mut open = lock(&self.open);
        let found = open.get_mut(&frame.0).ok_or_else(|| never_sent(frame))?;
        match found {
            Frame::Imported(imported) => Ok(Arc::clone(imported)),
            Frame::Descriptor(fd) => {
                let imported = Arc::new(gpu.import(fd)?);
                // Closes the descriptor.
                *found = Frame::Imported(Arc::clone(&imported));
                Ok(imported)
            }
        }
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

fn never_sent(VramFrame(frame): VramFrame) -> ProtocolError {
    ProtocolError::Frames { frame, what: "was never sent" }
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
        let table = FrameTable::new(65536, 4, DeviceKind::Sim);
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
