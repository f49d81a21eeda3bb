//! What the source must not do, here and in the client library: a driver may return anything, and a daemon that falls
//! over it takes all clients along.

use std::path::Path;

/// Words that end a thread, and what each is allowed for.
const FORBIDDEN: [&str; 8] = [
    ".unwrap()",
    ".expect(",
    "panic!",
    "unreachable!",
    "todo!",
    "unimplemented!",
    "process::exit",
    "abort()",
];

/// Lines that may have one of them, or an index, and why.
const ARGUED: [(&str, &str); 3] = [
    (
        "pool.claim_read(source).expect(OWNED)",
        "not of the driver: two owners of a frame are a bug of the engine",
    ),
    ("pool.claim_write(target).expect(OWNED)", "as above"),
    (
        "&source.bytes()[*shift..][..bytes]",
        "not of the driver: a RAM frame has room for a page at any shift",
    ),
];

/// Whether a line of code takes an element or a part of something by brackets.
fn indexes(code: &str) -> bool {
    let bytes = code.as_bytes();
    let opens = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'[');
    opens.map(|(at, _)| at).any(|at| {
        let before = at.checked_sub(1).and_then(|at| bytes.get(at)).copied().unwrap_or(b' ');
        before.is_ascii_alphanumeric() || matches!(before, b'_' | b')' | b']')
    })
}

fn wrong_lines(text: &str) -> Vec<String> {
    let code = text.lines().take_while(|line| *line != "#[cfg(test)]");
    let code = code.filter(|line| !line.trim_start().starts_with("//"));
    let wrong =
        code.filter(|line| FORBIDDEN.iter().any(|word| line.contains(word)) || indexes(line));
    let wrong = wrong.filter(|line| !ARGUED.iter().any(|(part, _)| line.contains(part)));
    wrong.map(|line| line.trim().to_owned()).collect()
}

#[test]
fn nothing_the_driver_says_ends_a_thread() {
    let ours = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directories = [ours.join("src/device/cuda"), ours.join("../client-lib/src/cuda")];
    let (mut files, mut argued) = (0, String::new());
    for entry in directories.iter().flat_map(|directory| std::fs::read_dir(directory).unwrap()) {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "rs") || path.ends_with("tests.rs")
        {
            continue;
        }
        files += 1;
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(wrong_lines(&text), Vec::<String>::new(), "{}", path.display());
        argued.push_str(&text);
    }
    assert!(files >= 10, "{files} files were looked at");
    for (part, _) in ARGUED {
        assert!(argued.contains(part), "nothing needs this any more: {part}");
    }
}

#[test]
fn the_scan_finds_what_it_looks_for() {
    let found = |line: &str| !wrong_lines(line).is_empty();
    for line in ["a().unwrap();", "x.expect(\"so\")", "panic!(\"no\")", "names[0]", "f()[1..]"] {
        assert!(found(line), "{line}");
    }
    for line in
        ["// x.unwrap()", "#[derive(Debug)]", "let a = [0; 4];", "for x in [1, 2]", "a: [u8; 16]"]
    {
        assert!(!found(line), "{line}");
    }
}
