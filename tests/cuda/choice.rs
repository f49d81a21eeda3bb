//! Which device a daemon takes, and what it says of one that it can't.

use crate::process::Machine;

const NOWHERE: [&str; 2] = ["--libcuda", "/nowhere/libcuda.so.1"];
/// Of the fake's first and second device.
const UUIDS: [&str; 2] =
    ["GPU-6c617069-732d-6661-6b65-2d0000000000", "GPU-6c617069-732d-6661-6b65-2d0000000001"];

#[test]
fn auto_takes_a_gpu_if_there_is_one_and_gives_its_memory_back() {
    let machine = Machine::new(&[]);
    let daemon = machine.start(&[]);
    assert!(daemon.said.contains("device 0 (Lapis fake GPU 0, GPU-6c617069"), "{}", daemon.said);
    assert!(daemon.status().contains("cuda device"));
    assert_eq!(machine.memory_used(), 16 << 20);
    daemon.stop();
    assert_eq!(machine.memory_used(), 0);
}

#[test]
fn without_a_driver_auto_simulates_and_says_why_and_cuda_does_not_start() {
    let machine = Machine::new(&[]);
    let daemon = machine.start(&NOWHERE);
    let why = "device auto: VRAM is simulated in host memory, for /nowhere/libcuda.so.1 can't be loaded: ";
    assert_eq!(daemon.said.matches(why).count(), 1, "{}", daemon.said);
    assert!(daemon.status().contains("sim device"));
    daemon.stop();
    let cuda = [&NOWHERE[..], &["--device", "cuda"]].concat();
    let error = machine.refused(&cuda, 1);
    let start = "error: cannot make the VRAM tier: /nowhere/libcuda.so.1 can't be loaded: ";
    assert!(error.starts_with(start), "{error}");
    // There is no GPU's memory to take a share of.
    let share = [&NOWHERE[..], &["--vram", "50%"]].concat();
    assert!(machine.refused(&share, 2).ends_with("fix: give vram as a size, such as 8GiB"));
}

#[test]
fn a_driver_that_does_not_start_is_told_with_what_to_do() {
    let cases = [
        ("cuInit:0:34", "stub: take its `stubs` directory off LD_LIBRARY_PATH"),
        ("cuInit:0:100", "look whether `nvidia-smi` shows the GPU"),
        ("cuInit:0:803", "restart the machine"),
        ("cuInit:0:999", "load the kernel module"),
        (
            "cuInit:0:1234",
            "failed with 1234 (a code that this driver has no name for); look whether",
        ),
    ];
    for (fault, fix) in cases {
        let machine = Machine::new(&[("FAKE_CUDA_FAULTS", fault)]);
        let error = machine.refused(&["--device", "cuda"], 1);
        assert!(error.contains("the CUDA driver does not start: cuInit failed with"), "{error}");
        assert!(error.contains(fix), "{error}");
        let daemon = machine.start(&["--device", "auto"]);
        assert!(daemon.said.contains(fix), "{}", daemon.said);
        daemon.stop();
    }
}

#[test]
fn every_call_of_the_start_may_fail_with_a_code_that_nobody_knows() {
    for call in [
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetUuid_v2",
        "cuDeviceGetName",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemRelease",
        "cuMemGetInfo_v2",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemHostRegister_v2",
        "cuStreamCreate",
        "cuEventCreate",
    ] {
        let fault = format!("{call}:0:1234");
        let machine = Machine::new(&[("FAKE_CUDA_FAULTS", &fault)]);
        let error = machine.refused(&["--device", "cuda"], 1);
        let text = format!("{call} failed with 1234 (a code that this driver has no name for); ");
        assert!(error.contains(&text), "{error}");
        assert_eq!(machine.memory_used(), 0, "{call}");
    }
    // Only asked for to be told.
    let machine = Machine::new(&[("FAKE_CUDA_FAULTS", "cuDeviceGetAttribute:0:1234:9")]);
    machine.start(&["--device", "cuda"]).stop();
}

#[test]
fn another_library_is_not_called() {
    let candidates = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/libc.so.6", "/usr/lib/libc.so.6"];
    let libc = candidates.into_iter().find(|path| std::path::Path::new(path).exists());
    let Some(libc) = libc else { return eprintln!("SKIPPED: where is libc?") };
    let machine = Machine::new(&[]);
    let error = machine.refused(&["--device", "cuda", "--libcuda", libc], 1);
    assert!(error.contains("has no cuInit"), "{error}");
    let daemon = machine.start(&["--libcuda", libc]);
    assert!(daemon.said.contains("device auto: VRAM is simulated"), "{}", daemon.said);
    daemon.stop();
}

#[test]
fn a_library_without_one_of_the_functions_is_not_used() {
    let machine = Machine::new(&[]);
    let library = std::fs::read(machine.fake.library()).unwrap();
    for symbol in ["cuInit", "cuMemExportToShareableHandle", "cuEventSynchronize"] {
        // The name in the table, with another first letter: nobody finds it there.
        let name = [b"\0", symbol.as_bytes(), b"\0"].concat();
        let mut without = library.clone();
        let places = without.windows(name.len()).enumerate();
        let places: Vec<usize> =
            places.filter(|(_, bytes)| *bytes == name).map(|(at, _)| at + 1).collect();
        assert!(!places.is_empty(), "{symbol} is not in the library");
        for at in places {
            without[at] = b'q';
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("libcuda.so.1");
        std::fs::write(&path, without).unwrap();
        let path = path.display().to_string();
        let error = machine.refused(&["--device", "cuda", "--libcuda", &path], 1);
        let text = format!("the CUDA driver has no {symbol}: it is too old; update it");
        assert!(error.contains(&text), "{error}");
        let daemon = machine.start(&["--libcuda", &path]);
        assert!(daemon.said.contains("VRAM is simulated"), "{}", daemon.said);
        assert!(daemon.said.contains(&text), "{}", daemon.said);
        daemon.stop();
    }
}

#[test]
fn a_gpu_is_chosen_by_number_or_uuid() {
    let machine = Machine::new(&[("FAKE_CUDA_DEVICES", "2")]);
    for gpu in ["1", UUIDS[1]] {
        let daemon = machine.start(&["--gpu", gpu]);
        assert!(daemon.said.contains("device 1 (Lapis fake GPU 1, "), "{}", daemon.said);
        assert_eq!(machine.fake.memory_used(1).unwrap(), 16 << 20);
        daemon.stop();
    }
    let error = machine.refused(&["--device", "cuda", "--gpu", "2"], 1);
    let seen = format!("there is no GPU 2 here, but 0 ({}), 1 ({}): ", UUIDS[0], UUIDS[1]);
    assert!(error.contains(&seen), "{error}");
}

#[test]
fn a_gpu_that_is_hidden_is_not_there() {
    // Ordinals are of what is seen: the second card is number 0 here.
    let settings = [("FAKE_CUDA_DEVICES", "2"), ("CUDA_VISIBLE_DEVICES", "1")];
    let machine = Machine::new(&settings);
    let error = machine.refused(&["--device", "cuda", "--gpu", UUIDS[0]], 1);
    assert!(error.contains(&format!("there is no GPU {} here, but 0 ({})", UUIDS[0], UUIDS[1])));
    let daemon = machine.start(&["--gpu", "0"]);
    assert!(daemon.said.contains(&format!("device 0 (Lapis fake GPU 1, {})", UUIDS[1])));
    daemon.stop();
    let machine = Machine::new(&[("CUDA_VISIBLE_DEVICES", "")]);
    let error = machine.refused(&["--device", "cuda"], 1);
    assert!(error.contains("look whether `nvidia-smi` shows the GPU"), "{error}");
}

#[test]
fn what_can_be_exported_is_found_out_by_exporting() {
    let machine = Machine::new(&[("FAKE_CUDA_ATTRIBUTES", "103=0")]);
    let error = machine.refused(&["--device", "cuda"], 1);
    let text = "memory that other processes can map can't be had: ";
    assert!(error.contains(text) && error.contains("801 (CUDA_ERROR_NOT_SUPPORTED)"), "{error}");
    let daemon = machine.start(&[]);
    assert!(daemon.said.contains("device auto: VRAM is simulated"), "{}", daemon.said);
    daemon.stop();
    // Attributes may also deny what can be done.
    let machine = Machine::new(&[("FAKE_CUDA_FAULTS", "cuMemExportToShareableHandle:0:101")]);
    let error = machine.refused(&["--device", "cuda"], 1);
    assert!(error.contains("it is WSL"), "{error}");
    assert_eq!(machine.memory_used(), 0);
}

#[test]
fn pages_and_tiers_that_the_gpu_cannot_hold_are_refused_with_the_fix() {
    let machine = Machine::new(&[("FAKE_CUDA_MEMORY", "64MiB")]);
    // Also with auto: a GPU that could be used is not passed over in silence.
    for device in ["auto", "cuda"] {
        let error = machine.refused(&["--device", device, "--page-size", "1MiB"], 1);
        assert!(error.contains("page_size is 1MiB, but memory of GPU 0 "), "{error}");
        assert!(error.ends_with("set page_size to 2MiB or a multiple of it, or device to sim"));
        let error = machine.refused(&["--device", device, "--vram", "66MiB"], 1);
        assert!(error.contains("vram is 66MiB, but GPU 0 "), "{error}");
        assert!(error.contains(" has 64MiB free of 64MiB: lower vram"), "{error}");
    }
    machine.start(&["--page-size", "4MiB", "--ram", "64MiB"]).stop();
    machine.start(&["--device", "sim", "--page-size", "1MiB"]).stop();
}

#[test]
fn a_share_of_vram_is_of_what_the_gpu_has_free() {
    let machine = Machine::new(&[("FAKE_CUDA_MEMORY", "101MiB")]);
    let daemon = machine.start(&["--vram", "50%"]);
    assert!(daemon.said.contains("vram is 50% of the GPU's free memory vram=50MiB"));
    assert!(daemon.said.contains("ram (32MiB) is smaller than vram (50MiB)"), "{}", daemon.said);
    assert_eq!(machine.memory_used(), 50 << 20);
    daemon.stop();
    // Without touching the device, which isn't there.
    let flags = [&NOWHERE[..], &["--device", "cuda", "--vram", "50%", "--check"]].concat();
    let output = machine.command(&flags).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("vram = \"50%\"\n"), "{text}");
    assert!(!text.contains("nvme"), "{text}");
}

#[test]
fn a_gpu_that_shares_the_hosts_memory_is_used_like_any_other_and_the_log_says_so() {
    for (unified, how) in [("integrated", "the GPU is integrated"), ("coherent", "coherent")] {
        let machine = Machine::new(&[("FAKE_CUDA_UNIFIED", unified)]);
        let daemon = machine.start(&["--device", "cuda"]);
        assert!(daemon.said.contains(how), "{}", daemon.said);
        assert!(daemon.said.contains("ram_frames=15"), "{}", daemon.said);
        daemon.stop();
    }
}
