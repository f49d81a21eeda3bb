use std::fs;

use super::*;

#[test]
fn a_file_that_changes_while_it_is_read_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    fs::write(&path, [7; 5000]).unwrap();
    let source = Source::open(&path).unwrap();
    assert!(source.check_unchanged().is_ok());
    assert_eq!(source.read(4990, 10, "the end").unwrap(), [7; 10]);

    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(4096).unwrap();
    for result in [source.check_unchanged(), source.read(4090, 10, "the end").map(drop)] {
        let error = result.unwrap_err();
        assert!(matches!(error, ModelError::Changed { .. }), "{error}");
        assert_eq!(error.path(), path);
    }
}

#[test]
fn a_cursor_reads_across_its_windows() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let words: Vec<u8> = (0..100_000u64).flat_map(u64::to_le_bytes).collect();
    fs::write(&path, [&[1, 2, 3][..], &words].concat()).unwrap();
    let source = Source::open(&path).unwrap();
    let mut cursor = Cursor::new(&source, 1 << 30);
    assert_eq!(cursor.array::<3>("three").unwrap(), [1, 2, 3]);
    for expected in 0..99_998 {
        assert_eq!(cursor.u64("a word").unwrap(), expected);
    }
    cursor.skip(8, "a word").unwrap();
    assert_eq!(cursor.remaining(), 8);
    assert_eq!(cursor.bytes(8, "a word").unwrap(), 99_999u64.to_le_bytes());
    assert!(cursor.u32("more").is_err());
}

#[test]
fn a_cursor_stops_at_its_limit() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    fs::write(&path, [0; 100]).unwrap();
    let source = Source::open(&path).unwrap();
    let mut cursor = Cursor::new(&source, 10);
    assert_eq!(cursor.u64("a word").unwrap(), 0);
    let error = cursor.u64("a word").unwrap_err();
    let ModelError::Malformed {
        offset: 8,
        defect: Defect::OverLimit { value: 16, limit: 10, .. },
        ..
    } = error
    else {
        panic!("{error}")
    };
}
