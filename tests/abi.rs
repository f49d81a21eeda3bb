//! The C interface, from C and C++ that are compiled with gcc and g++ alone, and the same ten lines in each language.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use lapis::model::Checkpoint;
use lapis_tests::binaries::{directory, scratch};
use lapis_tests::daemon::Daemon;
use lapis_tests::device::{Device, device, runs_on_a_gpu, runs_on_the_fake_gpu, scale};

const TIERS: [&str; 8] =
    ["--vram", "2MiB", "--ram", "4MiB", "--nvme", "128MiB", "--page-size", "64KiB"];
const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-pedantic"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("it is in the workspace").to_owned()
}

/// Whether a program can be run; if not, it says aloud what is not tested.
fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("SKIPPED: there is no {program}; what needs it was not tested");
    }
    found
}

#[track_caller]
fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    said(command, &output)
}

#[track_caller]
fn said(command: &Command, output: &Output) -> String {
    let [said, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{command:?}: {}\n{said}\n{errors}", output.status);
    said.into_owned()
}

/// Where `install.sh` puts the library, once for all tests of this process.
fn installed() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let target = directory().parent().expect("a profile is in target");
        let prefix = target.join(format!("tmp/liblapis-{:?}", device()));
        let release = directory().ends_with("release");
        let profile = if release { "release" } else { "dev" };
        let mut command = Command::new(root().join("client-lib/c/install.sh"));
        command.args(["--profile", profile, "--prefix"]).arg(&prefix);
        succeeds(command.env("CARGO_TARGET_DIR", target));
        prefix
    })
}

/// How a program is linked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Linked {
    Shared,
    Static,
}

/// Compiles one file with what the installed `lapis.pc` says.
fn compile(source: &str, linked: Linked, directory: &Path) -> PathBuf {
    let program = directory.join("program");
    let pc =
        std::fs::read_to_string(installed().join("lib/pkgconfig/lapis.pc")).expect("it is UTF-8");
    let of = |key: &str| -> Vec<String> {
        let line = pc.lines().find_map(|line| line.strip_prefix(key)).expect("lapis.pc has it");
        let prefix = installed().to_str().expect("UTF-8");
        let line = line.replace("${includedir}", "${prefix}/include");
        let line = line.replace("${libdir}", &format!("{prefix}/lib")).replace("${prefix}", prefix);
        line.split_whitespace().map(str::to_owned).collect()
    };
    let (compiler, standard) =
        if source.ends_with(".cpp") { ("g++", "-std=c++17") } else { ("gcc", "-std=gnu11") };
    let mut command = Command::new(compiler);
    command.args([standard, "-O1", "-g", "-pthread"]).args(WARNINGS).args(of("Cflags: "));
    command.arg(root().join(source)).arg("-o").arg(&program);
    match linked {
        Linked::Shared => {
            command.args(of("Libs: "));
            command.arg(format!("-Wl,-rpath,{}/lib", installed().display()));
        }
        Linked::Static => {
            command.arg(installed().join("lib/liblapis.a")).args(of("Libs.private: "));
        }
    }
    succeeds(&mut command);
    program
}

fn model(directory: &Path) -> PathBuf {
    let path = directory.join("model.safetensors");
    let checkpoint = Checkpoint { bytes: (1 << 20) * scale(), ..Checkpoint::default() };
    checkpoint.write(&path).expect("target is writable");
    path
}

/// Compiles a program of `tests/abi` and lets it use a daemon, which must have nothing of it afterwards.
fn runs(source: &str, linked: Linked, expected: &str, arguments: &[&OsStr]) {
    let directory = scratch();
    let program = compile(source, linked, directory.path());
    let daemon = Daemon::start(&TIERS);
    let mut command = Command::new(&program);
    command.arg(daemon.socket()).args(arguments).env("LAPIS_SOCKET", daemon.socket());
    assert_eq!(succeeds(&mut command), expected);
    daemon.stop_well();
}

#[test]
fn the_same_ten_lines_in_rust_c_and_cpp() {
    runs("client-lib/examples/hello.c", Linked::Shared, "hello, tiers!\n", &[]);
    if has("g++") {
        runs("client-lib/examples/hello.cpp", Linked::Shared, "hello, tiers!\n", &[]);
    }
    let daemon = Daemon::start(&TIERS);
    let target = directory().parent().expect("a profile is in target");
    let mut command = Command::new(env!("CARGO"));
    command.args(["run", "--quiet", "--locked", "-p", "lapis-client", "--example", "hello"]);
    command.arg("--target-dir").arg(target).env("LAPIS_SOCKET", daemon.socket());
    assert_eq!(succeeds(&mut command), "hello, tiers!\n");
    daemon.stop_well();
}

#[test]
fn every_call_does_what_it_says_linked_either_way() {
    let directory = scratch();
    let model = model(directory.path());
    runs("tests/abi/calls.c", Linked::Shared, "all calls\n", &[model.as_os_str()]);
    runs("tests/abi/calls.c", Linked::Static, "all calls\n", &[model.as_os_str()]);
}

#[test]
fn every_misuse_is_an_error() {
    let directory = scratch();
    let model = model(directory.path());
    runs("tests/abi/misuse.c", Linked::Shared, "all misuse\n", &[model.as_os_str()]);
}

#[test]
fn the_cpp_wrapper_ends_what_it_owns() {
    if !has("g++") {
        return;
    }
    let directory = scratch();
    let model = model(directory.path());
    runs("tests/abi/wrapper.cpp", Linked::Shared, "all of it\n", &[model.as_os_str()]);
}

#[test]
fn a_hundred_thousand_maps_leak_nothing() {
    // A call of the fake driver goes through a file that processes share.
    let count = if device() == Device::Sim { "100000" } else { "5000" };
    runs("tests/abi/leaks.c", Linked::Shared, "no leaks\n", &[count.as_ref()]);
}

#[test]
fn valgrind_finds_nothing() {
    if device() != Device::Sim {
        return eprintln!(
            "SKIPPED on {:?}: valgrind is for the library, not for drivers",
            device()
        );
    }
    if !has("valgrind") {
        return;
    }
    let directory = scratch();
    let model = model(directory.path());
    let programs: [(&str, &[&OsStr]); 3] = [
        ("client-lib/examples/hello.c", &[]),
        ("tests/abi/calls.c", &[model.as_os_str()]),
        ("tests/abi/leaks.c", &["300".as_ref()]),
    ];
    for (source, arguments) in programs {
        let program = compile(source, Linked::Shared, directory.path());
        let daemon = Daemon::start(&TIERS);
        let mut command = Command::new("valgrind");
        command.args(["--quiet", "--error-exitcode=9", "--leak-check=full", "--track-fds=no"]);
        command.args(["--errors-for-leak-kinds=definite,indirect,possible"]).arg(&program);
        command.arg(daemon.socket()).args(arguments).env("LAPIS_SOCKET", daemon.socket());
        succeeds(&mut command);
        daemon.stop_well();
    }
}

#[test]
fn when_the_daemon_goes_each_call_says_so() {
    let directory = scratch();
    let program = compile("tests/abi/gone.c", Linked::Shared, directory.path());
    let daemon = Daemon::start(&TIERS);
    let mut command = Command::new(program);
    command.arg(daemon.socket()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn().expect("it was compiled");
    let mut line = String::new();
    let mut output = BufReader::new(child.stdout.take().expect("piped"));
    output.read_line(&mut line).expect("a line");
    assert_eq!(line, "mapped\n");
    daemon.kill();
    let mut input = child.stdin.take().expect("piped");
    input.write_all(b"\n").expect("it waits");
    line.clear();
    output.read_line(&mut line).expect("a line");
    let ended = child.wait_with_output().expect("it is our child");
    said(&command, &ended);
    assert_eq!(line, "gone\n");
}

/// Names of functions that a header declares.
fn declared(header: &str) -> Vec<String> {
    let mut names: Vec<String> = header
        .split(|c: char| !(c.is_alphanumeric() || c == '_' || c == '('))
        .filter_map(|word| word.split_once('('))
        .filter(|(name, _)| name.starts_with("lapis_"))
        .map(|(name, _)| name.to_owned())
        .collect();
    names.sort();
    names.dedup();
    names
}

#[test]
fn the_shared_library_has_the_headers_functions_each_with_a_version_and_no_others() {
    let library = installed().join("lib/liblapis.so");
    let symbols = succeeds(Command::new("nm").args(["-D", "--defined-only"]).arg(&library));
    let mut exported = Vec::new();
    for line in symbols.lines() {
        let (_, name) = line.rsplit_once(' ').expect("an address, a type, a name");
        match name.split_once("@@") {
            Some((name, version)) => {
                assert_eq!(version, "LAPIS_0", "{line}");
                exported.push(name.to_owned());
            }
            None => assert!(line.ends_with(" A LAPIS_0"), "{line}"),
        }
    }
    exported.sort();
    let header = std::fs::read_to_string(installed().join("include/lapis.h")).expect("UTF-8");
    let code: String =
        header.split("/*").filter_map(|part| part.split_once("*/")).map(|(_, code)| code).collect();
    assert_eq!(exported, declared(&code));
    assert!(exported.len() > 40, "{exported:?}");
    let dynamic = succeeds(Command::new("readelf").arg("-d").arg(&library));
    assert!(dynamic.contains("soname: [liblapis.so.0]"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
}

#[test]
fn pkg_config_finds_it() {
    if !has("pkg-config") {
        return;
    }
    let mut command = Command::new("pkg-config");
    command.env("PKG_CONFIG_PATH", installed().join("lib/pkgconfig"));
    let flags = succeeds(command.args(["--cflags", "--libs", "lapis"]));
    let prefix = installed().display();
    assert_eq!(flags.trim(), format!("-I{prefix}/include -L{prefix}/lib -llapis"));
    let mut command = Command::new("pkg-config");
    command.env("PKG_CONFIG_PATH", installed().join("lib/pkgconfig"));
    assert_eq!(succeeds(command.args(["--modversion", "lapis"])).trim(), env!("CARGO_PKG_VERSION"));
}

#[test]
fn all_of_this_on_the_fake_gpu() {
    runs_on_the_fake_gpu();
}

#[test]
fn all_of_this_on_a_gpu() {
    runs_on_a_gpu();
}
