use lapis_proto::message::DeviceKind;

use super::*;
use crate::testing::{access_at, sealed_memfd};

fn table(frames: u32) -> FrameTable {
    let table = FrameTable::new(65536, frames, DeviceKind::Sim);
    for frame in 0..frames {
        table.import(&[VramFrame(frame)], vec![sealed_memfd(65536)]).expect("good frames");
    }
    table
}

fn access(space: &Space) -> Vec<String> {
    let base = space.base().as_ptr().cast_const();
    let at = |page: usize| access_at(base.wrapping_add(page * 65536)).expect("reserved");
    (0..space.places.len()).map(at).collect()
}

fn hold(
    space: &mut Space,
    pages: Range<usize>,
    frames: &[u32],
    write: bool,
    table: &FrameTable,
) -> Result<(), Error> {
    let frames: Vec<VramFrame> = frames.iter().copied().map(VramFrame).collect();
    space.hold(pages, &frames, write, table)
}

#[test]
fn reservations_are_aligned_and_impossible_ones_are_errors() {
    for page_size in [4096_u64, 65536, 2 << 20, 4 << 20] {
        let space = Space::reserve(3, page_size, None).expect("reserved");
        let alignment = usize::try_from(page_size.min(2 << 20)).expect("small");
        assert_eq!(space.base().as_ptr().addr() % alignment, 0);
        assert_eq!(access_at(space.base().as_ptr()).as_deref(), Some("---p"));
    }
    for (pages, page_size) in [(0, 4096), (u32::MAX, 1 << 30), (u32::MAX, 1 << 32)] {
        assert!(matches!(
            Space::reserve(pages, page_size, None),
            Err(Error::Io { call: "mmap", .. })
        ));
    }
}

#[test]
fn frames_stay_closed_where_they_were_and_open_again() {
    let table = table(4);
    let mut space = Space::reserve(4, 65536, None).expect("reserved");
    hold(&mut space, 1..3, &[2, 0], false, &table).expect("held");
    assert_eq!(access(&space), ["---p", "r--s", "r--s", "---p"]);
    space.release(1..3, false, false).expect("released");
    assert_eq!(access(&space), ["---p", "---s", "---s", "---p"]);
    // Without a table that has the frames: they are there already.
    hold(&mut space, 1..3, &[2, 0], true, &FrameTable::new(65536, 4, DeviceKind::Sim))
        .expect("held");
    assert_eq!(access(&space), ["---p", "rw-s", "rw-s", "---p"]);
    assert_eq!(space.framed(), 2);
    space.release(1..3, true, false).expect("released");
    hold(&mut space, 1..2, &[3], false, &table).expect("another frame");
    assert_eq!((space.places[1].frame, space.framed()), (Some(VramFrame(3)), 2));
}

#[test]
fn pages_given_up_lose_their_frame_unless_another_mapping_holds_them() {
    let table = table(4);
    let mut space = Space::reserve(4, 65536, None).expect("reserved");
    hold(&mut space, 0..4, &[0, 1, 2, 3], false, &table).expect("held");
    hold(&mut space, 2..3, &[2], true, &table).expect("held");
    assert_eq!(access(&space), ["r--s", "r--s", "rw-s", "r--s"]);
    space.release(0..4, false, true).expect("released");
    assert_eq!(access(&space), ["---p", "---p", "rw-s", "---p"]);
    assert_eq!(space.framed(), 1);
}

#[test]
fn a_hold_that_fails_holds_nothing() {
    let table = table(2);
    let mut space = Space::reserve(4, 65536, None).expect("reserved");
    let error = hold(&mut space, 0..3, &[0, 1, 9], false, &table).expect_err("no frame 9");
    assert!(matches!(error, Error::Protocol(ProtocolError::Frames { frame: 9, .. })));
    assert!(access(&space).iter().all(|access| access.starts_with("---")));
    assert!(space.places.iter().all(|place| !place.is_held()));

    hold(&mut space, 0..2, &[0, 1], false, &table).expect("held");
    let error = hold(&mut space, 0..2, &[0, 0], false, &table).expect_err("page 1 is at frame 1");
    assert!(matches!(error, Error::Protocol(ProtocolError::Moved { page: 1, held: 1, found: 0 })));
    assert_eq!(access(&space), ["r--s", "r--s", "---p", "---p"]);
    assert_eq!((space.places[0].readers, space.places[1].readers), (1, 1));
    for (pages, frames) in [(0..2, vec![0]), (3..5, vec![0, 1])] {
        let error = hold(&mut space, pages, &frames, false, &table).expect_err("wrong count");
        assert!(matches!(error, Error::Protocol(ProtocolError::FrameCount { .. })));
    }
}

#[test]
fn revoked_frames_leave_every_place_that_nobody_holds() {
    let table = table(3);
    let mut space = Space::reserve(5, 65536, None).expect("reserved");
    // One frame at two places, as after its page moved on.
    hold(&mut space, 0..1, &[0], false, &table).expect("held");
    space.release(0..1, false, false).expect("released");
    hold(&mut space, 1..4, &[0, 1, 2], false, &table).expect("held");
    space.release(1..2, false, false).expect("released");
    let asked = HashSet::from([VramFrame(0), VramFrame(1)]);
    let mut held = HashSet::new();
    space.revoke(&asked, &mut held).expect("revoked");
    assert_eq!(held, HashSet::from([VramFrame(1)]));
    assert_eq!(access(&space), ["---p", "---p", "r--s", "r--s", "---p"]);
    assert_eq!(space.framed(), 2);
}

#[test]
fn runs_are_the_longest() {
    let found = runs(&[1, 1, 0, 1, 0, 0], |item| *item == 1);
    assert_eq!(found, [0..2, 3..4]);
    assert!(runs(&[], |item: &u8| *item == 1).is_empty());
}
