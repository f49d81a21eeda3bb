//! `client-lib/include/lapis.h` is what the sources say. `LAPIS_WRITE_HEADER=1 cargo test -p lapis-c` makes it so.

use std::fs;
use std::path::Path;

#[test]
fn the_header_is_current() {
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config =
        cbindgen::Config::from_file(crate_directory.join("cbindgen.toml")).expect("it is TOML");
    let order = [
        "lib",
        "code",
        "last",
        "arguments",
        "client",
        "allocation",
        "mapping",
        "advice",
        "plan",
        "model",
        "stats",
    ];
    let mut builder = cbindgen::Builder::new().with_config(config);
    for file in order {
        builder = builder.with_src(crate_directory.join(format!("src/{file}.rs")));
    }
    let mut made = Vec::new();
    builder.generate().expect("the sources can be read").write(&mut made);
    let made = String::from_utf8(made).expect("UTF-8");
    let path = crate_directory.join("../include/lapis.h");
    if std::env::var_os("LAPIS_WRITE_HEADER").is_some() {
        fs::write(&path, &made).expect("it is writable");
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == made,
        "lapis.h is not what the sources say: LAPIS_WRITE_HEADER=1 cargo test -p lapis-c"
    );
    for file in fs::read_dir(crate_directory.join("src")).expect("it is there") {
        let path = file.expect("it is there").path();
        let source = fs::read_to_string(&path).expect("UTF-8");
        for name in source.split("extern \"C\" fn ").skip(1) {
            let name = name.split('(').next().expect("there is a first");
            assert!(!name.starts_with("lapis_") || made.contains(&format!("{name}(")), "{name}");
        }
    }
}
