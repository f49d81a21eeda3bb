//! `lapisctl stream`, as its user runs it.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use lapis::Code;
use lapis::model::{
    Checkpoint, Dtype, LayerMapping, NewTensor, SafetensorsOptions, pattern, write_gguf,
    write_safetensors,
};
use lapis_tests::binaries::{lapisctl, scratch};
use lapis_tests::daemon::Daemon;
use lapis_tests::device::{self, Device, device, runs_on_a_gpu, runs_on_the_fake_gpu};
use lapis_tests::fixtures::minilm;
use serde_json::Value;

fn stream(arguments: &[&str], cache: &Path) -> Output {
    Command::new(lapisctl())
        .arg("stream")
        .args(arguments)
        .env("LAPIS_CACHE", cache)
        .env("XDG_CACHE_HOME", cache)
        .env_remove("LAPIS_SOCKET")
        .env("LAPISD_DEVICE", device::name())
        .env("NO_COLOR", "1")
        .output()
        .expect("lapisctl runs")
}

fn report(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let report: Value = serde_json::from_str(&text).unwrap_or_else(|error| {
        panic!("{error}: {text}\n{}", String::from_utf8_lossy(&output.stderr))
    });
    assert_eq!(report["daemon"]["device"], device::name(), "{report}");
    report
}

/// A daemon with these tiers, and how to use it: inside the command on sim, a process of its own on a GPU.
fn with_tiers(tiers: &[&str]) -> (Option<Daemon>, Vec<String>) {
    let owned = |flags: &[&str]| flags.iter().map(|flag| (*flag).to_owned()).collect();
    if device() == Device::Sim {
        return (None, owned(&[&["--embedded"], tiers].concat()));
    }
    let daemon = Daemon::start(tiers);
    let socket = daemon.socket().display().to_string();
    (Some(daemon), owned(&["--socket", &socket]))
}

/// All bytes of a layer, wherever they are.
fn bytes_of(layer: &LayerMapping) -> Vec<u8> {
    let mut all = Vec::new();
    for (place, slice) in layer.slices().iter().enumerate() {
        let length = slice.range.end - slice.range.start;
        let mut bytes = vec![0; usize::try_from(length).expect("it is mapped")];
        layer.copy_to_host(place, 0, &mut bytes).expect("the device gives its bytes");
        all.extend(bytes);
    }
    all
}

#[test]
fn a_real_model_larger_than_vram_and_ram_streams_with_every_tensor_verified() {
    let Some(model) = minilm() else { return };
    let cache = scratch();
    let path = model.display().to_string();
    let (_daemon, target) = with_tiers(&["--vram", "16MiB", "--ram", "32MiB"]);
    let mut arguments = vec![path.as_str(), "--passes", "3", "-o", "json"];
    arguments.extend(target.iter().map(String::as_str));
    let output = stream(&arguments, cache.path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report = report(&output);
    assert_eq!(report["verified"]["tensors"], 104, "{report}");
    assert_eq!(report["verified"]["passes"], 3, "{report}");
}

#[test]
fn two_processes_and_three_clients_stream_one_model_with_the_right_bytes() {
    let directory = scratch();
    let model = directory.path().join("model.safetensors");
    let checkpoint = Checkpoint { bytes: 24 << 20, ..Checkpoint::default() };
    checkpoint.write(&model).expect("target is writable");
    let daemon = Daemon::start(&["--vram", "8MiB", "--ram", "18MiB"]);
    let socket = daemon.socket().display().to_string();
    let path = model.display().to_string();
    let clients: Vec<_> = (0..3)
        .map(|_| {
            let (socket, path, cache) = (socket.clone(), path.clone(), directory.path().to_owned());
            std::thread::spawn(move || {
                stream(&[&path, "--socket", &socket, "--passes", "2", "-o", "json"], &cache)
            })
        })
        .collect();
    for client in clients {
        let output = client.join().expect("no panic");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(report(&output)["verified"]["passes"], 2);
    }
    daemon.stop_well();
}

/// Every dtype of a format that fits, in odd sizes, empty ones first and last, and one larger than VRAM.
fn odd_tensors(fits: impl Fn(Dtype) -> bool) -> Vec<(String, Dtype, Vec<u64>, Vec<u8>)> {
    let mut tensors = vec![("empty.first".to_owned(), Dtype::F32, vec![0, 3], Vec::new())];
    for (index, dtype) in (0..).zip(Dtype::ALL.iter().copied().filter(|dtype| fits(*dtype))) {
        let elements = dtype.block().0 * (2 * index + 4);
        let length = dtype.bytes(elements).expect("whole blocks");
        let mut bytes = vec![0; usize::try_from(length).expect("it is small")];
        pattern(index, 0, &mut bytes);
        tensors.push((format!("odd.{}", dtype.name()), dtype, vec![elements], bytes));
    }
    let mut large = vec![0; (11 << 20) + 1];
    pattern(99, 0, &mut large);
    let length = large.len() as u64;
    tensors.push(("larger.than.vram".to_owned(), Dtype::I8, vec![length], large));
    tensors.push(("empty.last".to_owned(), Dtype::F32, vec![0], Vec::new()));
    tensors
}

#[test]
fn every_dtype_odd_sizes_empty_tensors_and_one_larger_than_vram_stream_right() {
    let directory = scratch();
    for format in ["model.safetensors", "model.gguf"] {
        let path = directory.path().join(format);
        let is_gguf = format.ends_with("gguf");
        let tensors = odd_tensors(|dtype| {
            if is_gguf { dtype.ggml_number().is_some() } else { dtype.to_safetensors().is_some() }
        });
        let new: Vec<_> = tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| NewTensor { name, dtype: *dtype, shape, bytes })
            .collect();
        if is_gguf {
            write_gguf(&path, 3, &[], &new).expect("target is writable");
        } else {
            // The data begin 3 bytes past a multiple of 8.
            let options = SafetensorsOptions { header_spaces: Some(3), ..Default::default() };
            write_safetensors(&path, &new, &options).expect("target is writable");
        }
        let path = path.display().to_string();
        let (_daemon, target) = with_tiers(&["--vram", "8MiB", "--ram", "18MiB"]);
        let mut arguments = vec![path.as_str(), "-o", "json"];
        arguments.extend(target.iter().map(String::as_str));
        let output = stream(&arguments, directory.path());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(report(&output)["verified"]["tensors"], tensors.len(), "{format}");
        assert!(tensors.len() > 20, "{} tensors in {format}", tensors.len());
    }
}

#[test]
fn a_model_that_changes_while_it_is_open_is_an_error_that_names_it_and_never_wrong_bytes() {
    let directory = scratch();
    let path = directory.path().join("model.safetensors");
    Checkpoint { bytes: 24 << 20, ..Checkpoint::default() }
        .write(&path)
        .expect("target is writable");
    let daemon = Daemon::start(&["--vram", "8MiB", "--ram", "18MiB"]);
    let wait = Duration::from_secs(30);
    for change in ["overwrite", "truncate"] {
        let client = daemon.connect();
        let model = client.open_model(&path).expect("it is whole");
        let first = model.map_layer(0, wait).expect("room");
        let before = bytes_of(&first);
        let file = std::fs::OpenOptions::new().write(true).open(&path).expect("it is ours");
        let code = match change {
            "overwrite" => {
                file.write_all_at(&[0xAB; 4096], 20 << 20).expect("it is ours");
                Code::FileChanged
            }
            _ => {
                file.set_len(10 << 20).expect("it is ours");
                Code::FileTruncated
            }
        };
        let last = model.layers().len() - 1;
        let error = model.map_layer(last, wait).expect_err("the bytes it had are gone");
        assert_eq!(error.code(), Some(code), "{error}");
        let text = error.to_string();
        assert!(text.contains(&path.display().to_string()) && text.contains("at byte"), "{text}");
        // What is mapped stays what it was.
        assert!(
            !before.is_empty() && before == bytes_of(&first),
            "a mapped layer changed with its file"
        );
        drop((first, model));
        let opened = client.open_model(&path);
        assert_eq!(opened.is_ok(), change == "overwrite", "{opened:?}");
    }
}

#[test]
fn what_can_not_be_done_ends_with_its_own_status_and_a_way_out() {
    let cache = scratch();
    let missing = stream(&["/nonexistent/model.safetensors", "--embedded"], cache.path());
    assert_eq!(missing.status.code(), Some(5));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("/nonexistent/model.safetensors"));
    let unreachable = stream(&["--socket", "/nonexistent/lapis.sock"], cache.path());
    assert_eq!(unreachable.status.code(), Some(3));
    let usage = stream(&["--vram", "a lot"], cache.path());
    assert_eq!(usage.status.code(), Some(2));
    let odd = stream(&["--embedded", "--page-size", "3MiB"], cache.path());
    assert_eq!(odd.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&odd.stderr).contains("power of two"));
}

#[test]
fn all_of_this_on_the_fake_gpu() {
    runs_on_the_fake_gpu();
}

#[test]
fn all_of_this_on_a_gpu() {
    runs_on_a_gpu();
}
