use std::os::unix::net::UnixStream;

use super::*;
use crate::codec::encode;
use crate::ids::{AllocationId, RequestId, VramFrame};
use crate::message::{Done, Frames, Free, Hello, Kind, OpenFile, Revoked};

fn descriptors(count: usize) -> Vec<OwnedFd> {
    (0..count).map(|_| OwnedFd::from(UnixStream::pair().expect("a socket pair").0)).collect()
}

fn free(id: u64, out: &mut Vec<u8>) {
    encode(RequestId(id), &Free { allocation: AllocationId(id) }, 0, out).expect("encodes");
}

#[test]
fn frames_are_cut_at_every_byte_boundary() {
    let mut bytes = Vec::new();
    free(1, &mut bytes);
    encode(RequestId(2), &Done {}, 0, &mut bytes).expect("encodes");
    let with_fds = bytes.len();
    encode(RequestId(3), &Frames { frames: vec![VramFrame(5), VramFrame(6)] }, 2, &mut bytes)
        .expect("encodes");
    free(4, &mut bytes);

    for cut in 0..=bytes.len() {
        let mut reader = FrameReader::new();
        let mut seen = Vec::new();
        let mut fds = descriptors(2);
        for part in [0..cut, cut..bytes.len()] {
            // Descriptors arrive with the byte they were sent with.
            let fds = if part.contains(&with_fds) { std::mem::take(&mut fds) } else { Vec::new() };
            assert_eq!(reader.push(&bytes[part.clone()], fds), part.len());
            while let Some(frame) = reader.next_frame().expect("well-formed") {
                seen.push((frame.header.request.0, frame.body.len(), frame.fds.len()));
            }
        }
        assert_eq!(seen, [(1, 8, 0), (2, 0, 0), (3, 16, 2), (4, 8, 0)], "cut at {cut}");
        assert_eq!(reader.buffered(), 0);
    }
}

#[test]
fn bodies_are_read_as_their_own_kind_only() {
    let mut bytes = Vec::new();
    free(9, &mut bytes);
    let mut reader = FrameReader::new();
    reader.push(&bytes, []);
    let frame = reader.next_frame().expect("well-formed").expect("whole");
    assert_eq!(frame.decode::<Free>().expect("a Free"), Free { allocation: AllocationId(9) });
    assert!(matches!(
        frame.decode::<Done>(),
        Err(CodecError::Unexpected { expected: Kind::Done, found: Kind::Free })
    ));
}

#[test]
fn thousands_of_small_frames_pass_through_a_bounded_buffer() {
    let mut bytes = Vec::new();
    for id in 0..10_000 {
        free(id, &mut bytes);
    }
    let mut reader = FrameReader::new();
    let (mut sent, mut next) = (0, 0);
    while sent < bytes.len() {
        let end = bytes.len().min(sent + 1000);
        sent += reader.push(&bytes[sent..end], []);
        while let Some(frame) = reader.next_frame().expect("well-formed") {
            assert_eq!(frame.header.request.0, next);
            next += 1;
        }
        assert_eq!(reader.buffer.len(), BUFFER_BYTES);
    }
    assert_eq!(next, 10_000);
}

#[test]
fn the_longest_frame_fits_and_its_memory_is_given_back() {
    let mut bytes = Vec::new();
    encode(RequestId(1), &Revoked { frames: vec![VramFrame(1); 262_142] }, 0, &mut bytes)
        .expect("encodes");
    free(2, &mut bytes);
    let mut reader = FrameReader::new();
    let mut sent = 0;
    let mut seen = Vec::new();
    while sent < bytes.len() {
        let end = bytes.len().min(sent + 50_000);
        sent += reader.push(&bytes[sent..end], []);
        while let Some(frame) = reader.next_frame().expect("well-formed") {
            seen.push((frame.header.request.0, frame.body.len()));
        }
        assert!(reader.buffer.len() <= 24 + 1_048_576);
    }
    assert_eq!(seen, [(1, 1_048_576), (2, 8)]);
    assert_eq!(reader.buffer.len(), BUFFER_BYTES);
}

#[test]
fn a_reader_that_is_not_drained_stops_taking_bytes() {
    let mut reader = FrameReader::new();
    let mut bytes = Vec::new();
    free(1, &mut bytes);
    let taken: usize = (0..40_000).map(|_| reader.push(&bytes, [])).sum();
    assert_eq!(taken, 24 + 1_048_576);
}

#[test]
fn long_claims_are_refused_from_the_header_alone() {
    let mut bytes = Vec::new();
    free(1, &mut bytes);
    bytes[8..12].copy_from_slice(&(1_u32 << 21).to_le_bytes());
    let mut reader = FrameReader::new();
    reader.push(&bytes[..24], []);
    assert!(matches!(
        reader.next_frame().map(|_| ()),
        Err(FrameError::Header(HeaderError::BodyTooLong { found: 2_097_152, .. }))
    ));
    assert_eq!(reader.buffer.len(), BUFFER_BYTES);
}

#[test]
fn descriptors_must_be_claimed() {
    let unclaimed = |bytes: &[u8], count| {
        let mut reader = FrameReader::new();
        reader.push(bytes, descriptors(count));
        loop {
            match reader.next_frame() {
                Ok(Some(_)) => {}
                Ok(None) => return None,
                Err(FrameError::FdsUnclaimed { found, expected }) => {
                    return Some((found, expected));
                }
                Err(error) => panic!("{error}"),
            }
        }
    };
    let mut plain = Vec::new();
    free(1, &mut plain);
    let mut open = Vec::new();
    encode(RequestId(2), &OpenFile { offset: 0, length: 1 }, 1, &mut open).expect("encodes");

    assert_eq!(unclaimed(&plain, 1), Some((1, 0)));
    assert_eq!(unclaimed(&plain[..30], 1), Some((1, 0)));
    assert_eq!(unclaimed(&open, 2), Some((1, 0)));
    assert_eq!(unclaimed(&open[..30], 2), Some((2, 1)));
    assert_eq!(unclaimed(&open[..30], 1), None);
    assert_eq!(unclaimed(&open[..10], 254), Some((254, 253)));
    assert_eq!(unclaimed(&open[..10], 253), None);
}

#[test]
fn a_frame_without_its_descriptors_is_refused() {
    let mut bytes = Vec::new();
    encode(RequestId(2), &OpenFile { offset: 0, length: 1 }, 1, &mut bytes).expect("encodes");
    let mut reader = FrameReader::new();
    reader.push(&bytes, []);
    assert!(matches!(
        reader.next_frame().map(|_| ()),
        Err(FrameError::FdsMissing { header: Header { kind: Kind::OpenFile, .. }, found: 0 })
    ));
}

#[test]
fn a_later_versions_hello_can_be_read() {
    let mut bytes = Vec::new();
    let hello = Hello { version_min: 2, version_max: 9, features: 1, client_name: "new".into() };
    encode(RequestId(1), &hello, 0, &mut bytes).expect("encodes");
    let mut reader = FrameReader::new();
    reader.push(&bytes, []);
    let frame = reader.next_frame().expect("well-formed").expect("whole");
    assert_eq!(frame.decode::<Hello>().expect("a Hello"), hello);
}
