//! How far one operation has come: what to ask the kernel next, and what its answer means. Pure, so that every odd
//! answer can be tried.
//!
//! ```text
//!           file  ......|=======================================|......
//!   4 KiB grid    |       |       |       |       |       |       |
//!                 origin  page                            needed
//!           frame 0       shift                                   asked
//!                 [ moved ........ ]          <- what has arrived, from the origin on
//!                         [ segment: from `moved` rounded down, to `asked` ]
//! ```
//!
//! A segment always begins and ends on the grid, as direct I/O demands; what it moves twice is the same bytes.

use nix::errno::Errno;

use super::{ALIGNMENT, StoreFault, shift};

/// Answers in a row that moved nothing on, after which we give up. A file that ends inside a grid cell gives such
/// answers for ever.
const IDLE_MAX: u32 = 8;
/// The grid, as a frame offset.
const GRID: usize = 4096;
const _: () = assert!(ALIGNMENT == 4096);

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// What to ask the kernel for next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    /// First byte in the frame.
    pub(crate) frame_offset: usize,
    /// Bytes.
    pub(crate) length: usize,
    /// First byte in the file.
    pub(crate) file_offset: u64,
}

/// What an answer means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// All that is needed has moved.
    Done,
    /// Ask for the next segment.
    Again,
    /// It cannot be.
    Fault(StoreFault),
}

/// One operation's progress.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    direction: Direction,
    /// File offset of frame byte 0, on the grid.
    origin: u64,
    /// First byte of the page in the frame.
    begin: usize,
    /// Frame offset behind the last byte that must move.
    needed: usize,
    /// `needed`, rounded up to the grid.
    asked: usize,
    /// Frame bytes that have moved, from 0 on.
    moved: usize,
    idle: u32,
}

impl Progress {
    /// `length` bytes at `offset`, which need not be on the grid for a read.
    pub(crate) fn new(direction: Direction, offset: u64, length: u32) -> Self {
        let begin = usize_from(shift(offset));
        let needed = begin + usize_from(length);
        let asked = needed.next_multiple_of(GRID);
        debug_assert!(direction == Direction::Read || (begin == 0 && asked == needed));
        let origin = offset - offset % ALIGNMENT;
        Self { direction, origin, begin, needed, asked, moved: 0, idle: 0 }
    }

    pub(crate) fn direction(&self) -> Direction {
        self.direction
    }

    /// Where the page begins in the frame.
    pub(crate) fn begin(&self) -> usize {
        self.begin
    }

    /// Frame offset behind the last byte that was asked for.
    pub(crate) fn needed(&self) -> usize {
        self.needed
    }

    /// The page's first byte in the file.
    pub(crate) fn offset(&self) -> u64 {
        self.origin + u64_from(self.begin)
    }

    /// File offset behind the last byte that was asked for.
    pub(crate) fn end(&self) -> u64 {
        self.origin + u64_from(self.needed)
    }

    /// First byte and length in the file of all that may have been touched.
    pub(crate) fn range(&self) -> (u64, u64) {
        (self.origin, u64_from(self.asked))
    }

    /// What to ask for next.
    pub(crate) fn segment(&self) -> Segment {
        let start = self.moved - self.moved % GRID;
        Segment {
            frame_offset: start,
            length: self.asked - start,
            file_offset: self.origin + u64_from(start),
        }
    }

    /// Takes the kernel's answer to the current [`Progress::segment`].
    pub(crate) fn advance(&mut self, answer: Result<usize, Errno>) -> Step {
        let segment = self.segment();
        match answer {
            Ok(bytes) => {
                debug_assert!(bytes <= segment.length, "the kernel moved {bytes} of {segment:?}");
                let reached = segment.frame_offset + bytes.min(segment.length);
                if reached >= self.needed {
                    self.moved = self.needed;
                    Step::Done
                } else if reached > self.moved {
                    self.moved = reached;
                    self.idle = 0;
                    Step::Again
                } else if bytes == 0 {
                    Step::Fault(self.stuck())
                } else {
                    self.idle_or(self.stuck())
                }
            }
            Err(errno @ (Errno::EINTR | Errno::EAGAIN)) => self.idle_or(self.failed(errno)),
            Err(errno) => Step::Fault(self.failed(errno)),
        }
    }

    fn idle_or(&mut self, fault: StoreFault) -> Step {
        self.idle += 1;
        if self.idle > IDLE_MAX { Step::Fault(fault) } else { Step::Again }
    }

    /// The fault of moving nothing more.
    fn stuck(&self) -> StoreFault {
        match self.direction {
            Direction::Read => StoreFault::Truncated {
                offset: self.offset(),
                end: self.origin + u64_from(self.moved),
            },
            Direction::Write => self.failed(Errno::EIO),
        }
    }

    fn failed(&self, errno: Errno) -> StoreFault {
        let offset = self.origin + u64_from(self.segment().frame_offset.max(self.begin));
        StoreFault::Io { offset, errno }
    }
}

fn usize_from(number: u32) -> usize {
    usize::try_from(number).expect("Linux has no 16-bit machines")
}

fn u64_from(number: usize) -> u64 {
    u64::try_from(number).expect("no machine has addresses above 64 bits")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TRUNCATED: fn(u64, u64) -> Step =
        |offset, end| Step::Fault(StoreFault::Truncated { offset, end });
    const FAILED: fn(u64, Errno) -> Step =
        |offset, errno| Step::Fault(StoreFault::Io { offset, errno });

    fn segment(frame_offset: usize, length: usize, file_offset: u64) -> Segment {
        Segment { frame_offset, length, file_offset }
    }

    #[test]
    fn a_read_is_rounded_out_to_the_grid() {
        let progress = Progress::new(Direction::Read, 11_416, 2 << 20);
        assert_eq!(progress.segment(), segment(0, (2 << 20) + 4096, 8192));
        assert_eq!((progress.begin(), progress.needed()), (3224, 3224 + (2 << 20)));
        assert_eq!((progress.offset(), progress.end()), (11_416, 11_416 + (2 << 20)));
        let aligned = Progress::new(Direction::Read, 8192, 4096);
        assert_eq!(aligned.segment(), segment(0, 4096, 8192));
    }

    #[test]
    fn a_tail_that_the_file_ends_in_is_done_when_the_needed_bytes_are_there() {
        let mut progress = Progress::new(Direction::Read, 100, 50);
        assert_eq!(progress.segment(), segment(0, 4096, 0));
        assert_eq!(progress.advance(Ok(150)), Step::Done);
    }

    #[test]
    fn a_short_read_goes_on_from_the_grid() {
        let mut progress = Progress::new(Direction::Read, 0, 16_384);
        assert_eq!(progress.advance(Ok(4608)), Step::Again);
        assert_eq!(progress.segment(), segment(4096, 12_288, 4096));
        assert_eq!(progress.advance(Ok(4096)), Step::Again);
        assert_eq!(progress.segment(), segment(8192, 8192, 8192));
        assert_eq!(progress.advance(Ok(8192)), Step::Done);
    }

    #[test]
    fn nothing_before_the_needed_end_is_truncation() {
        let mut progress = Progress::new(Direction::Read, 4196, 8192);
        assert_eq!(progress.advance(Ok(0)), TRUNCATED(4196, 4096));
        let mut progress = Progress::new(Direction::Read, 0, 8192);
        assert_eq!(progress.advance(Ok(4096)), Step::Again);
        assert_eq!(progress.advance(Ok(0)), TRUNCATED(0, 4096));
    }

    #[test]
    fn a_file_that_ends_inside_a_cell_does_not_loop() {
        let mut progress = Progress::new(Direction::Read, 0, 8192);
        assert_eq!(progress.advance(Ok(5000)), Step::Again);
        for _ in 0..8 {
            assert_eq!(progress.segment(), segment(4096, 4096, 4096));
            assert_eq!(progress.advance(Ok(904)), Step::Again);
        }
        assert_eq!(progress.advance(Ok(904)), TRUNCATED(0, 5000));
    }

    #[test]
    fn interruptions_are_repeated_but_not_for_ever() {
        let mut progress = Progress::new(Direction::Read, 8192, 4096);
        for _ in 0..8 {
            assert_eq!(progress.advance(Err(Errno::EINTR)), Step::Again);
        }
        assert_eq!(progress.advance(Err(Errno::EAGAIN)), FAILED(8192, Errno::EAGAIN));
        assert_eq!(progress.advance(Err(Errno::EIO)), FAILED(8192, Errno::EIO));
    }

    #[test]
    fn a_short_write_goes_on_and_an_empty_one_fails() {
        let mut progress = Progress::new(Direction::Write, 65_536, 8192);
        assert_eq!(progress.advance(Ok(5000)), Step::Again);
        assert_eq!(progress.segment(), segment(4096, 4096, 69_632));
        assert_eq!(progress.advance(Ok(0)), FAILED(69_632, Errno::EIO));
        let mut progress = Progress::new(Direction::Write, 65_536, 8192);
        assert_eq!(progress.advance(Err(Errno::ENOSPC)), FAILED(65_536, Errno::ENOSPC));
    }

    /// A file's byte, such that no two near ones are alike.
    fn content(position: u64) -> u8 {
        u8::try_from((position ^ (position >> 8) ^ (position >> 16)) & 0xff).unwrap()
    }

    proptest! {
        /// A kernel that answers as oddly as it may: any prefix, interruptions, the file's end anywhere.
        #[test]
        fn whatever_the_kernel_answers_the_bytes_are_right_or_it_is_a_fault(
            offset in 0_u64..20_000,
            length in 0_u32..70_000,
            size in 0_u64..100_000,
            oddities in prop::collection::vec((0_u8..8, 1_usize..40_000), 0..40),
        ) {
            let mut progress = Progress::new(Direction::Read, offset, length);
            let mut frame = vec![0xEE_u8; 70_000 + 8192];
            let mut oddities = oddities.into_iter();
            let mut rounds = 0;
            let outcome = loop {
                rounds += 1;
                prop_assert!(rounds < 1000, "it does not end");
                let segment = progress.segment();
                prop_assert_eq!(segment.file_offset % 4096, 0);
                prop_assert_eq!(segment.length % 4096, 0);
                let there = usize::try_from(size.saturating_sub(segment.file_offset)).unwrap().min(segment.length);
                let answer = match oddities.next() {
                    Some((0, _)) => Err(Errno::EINTR),
                    Some((1..=5, limit)) if there > 0 => Ok(there.min(limit)),
                    _ => Ok(there),
                };
                for index in 0..answer.unwrap_or(0) {
                    let position = segment.file_offset + u64::try_from(index).unwrap();
                    frame[segment.frame_offset + index] = content(position);
                }
                match progress.advance(answer) {
                    Step::Again => {}
                    Step::Done => break Ok(()),
                    Step::Fault(fault) => break Err(fault),
                }
            };
            match outcome {
                Ok(()) => {
                    prop_assert!(length == 0 || offset + u64::from(length) <= size);
                    for index in 0..u64::from(length) {
                        let at = usize::try_from(offset % 4096 + index).unwrap();
                        prop_assert_eq!(frame[at], content(offset + index));
                    }
                }
                Err(StoreFault::Truncated { offset: at, .. }) => prop_assert_eq!(at, offset),
                Err(StoreFault::Io { errno, .. }) => prop_assert_eq!(errno, Errno::EINTR),
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
    }
}
