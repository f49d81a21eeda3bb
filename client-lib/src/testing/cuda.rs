//! A daemon whose frames are on the fake CUDA driver, and processes for it: the driver's state is that of its process, so
//! each test runs in one of its own.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::OsStr;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemLocation, CUmemLocationType,
};
use lapis_fake_cuda::harness::FakeCuda;
use lapis_proto::ids::VramFrame;
use lapis_proto::message::{DeviceKind, Welcome};
use tempfile::TempDir;

use super::{Daemon, FrameMemory, PAGE_BYTES, Paging, Peer, Seen, listening, welcome};
use crate::cuda::driver::{CUcontext, CUstream, CUuuid, DevicePtr, Driver, MemHandle};
use crate::{Client, ConnectOptions, Error};

/// In the child: which test it is.
const TEST: &str = "LAPIS_TEST";
/// In the child: where the machine is.
const DIRECTORY: &str = "LAPIS_TEST_DIRECTORY";
/// Longest that a test may take, on a machine that is busy with much else.
const SECONDS_MAX: u32 = 120;

/// The path of the test that it is written in.
macro_rules! test_name {
    () => {{
        fn here() {}
        let path = std::any::type_name_of_val(&here);
        path.split_once("::").and_then(|(_, path)| path.strip_suffix("::here")).expect("a path")
    }};
}
pub(crate) use test_name;

/// Runs the body in a process of its own, on a machine of its own, whose pages are as small as the tests'.
pub(crate) fn alone(test: &str, settings: &[(&str, &str)], body: impl FnOnce(&FakeCuda)) {
    if std::env::var_os(TEST).as_deref() == Some(OsStr::new(test)) {
        // SAFETY: takes no pointers. A driver that waits for ever ends the process.
        unsafe { libc::alarm(SECONDS_MAX) };
        body(&machine());
        std::fs::write(directory().join("reached"), "").expect("the directory is there");
        return;
    }
    let directory = directory_in_memory();
    let fake = FakeCuda::new(directory.path()).expect("the directory is new");
    let mut child = this_test(test);
    child.env(TEST, test).env(DIRECTORY, directory.path());
    child.envs(fake.environment()).env("FAKE_CUDA_GRANULARITY", "64KiB");
    let output = child.envs(settings.iter().copied()).output().expect("it can be run again");
    // By way of the test's own output, which is shown when it fails.
    print!("{}", String::from_utf8_lossy(&output.stdout));
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{test}: {}", output.status);
    // A wrong name would run no test at all, and succeed.
    assert!(directory.path().join("reached").exists(), "{test} didn't come to its end");
}

/// Starts a test that does nothing unless it is started so, in another process on the same machine.
pub(crate) fn spawn(test: &str, settings: &[(&str, &str)]) -> Child {
    let mut child = this_test(test);
    child.env(TEST, test).envs(settings.iter().copied());
    child.spawn().expect("it can be run again")
}

/// Whether this process was started by [`spawn`] for `test`.
pub(crate) fn is_spawned(test: &str) -> bool {
    // SAFETY: takes no pointers.
    unsafe { libc::alarm(SECONDS_MAX) };
    std::env::var_os(TEST).as_deref() == Some(OsStr::new(test))
}

/// The machine of this process.
pub(crate) fn machine() -> FakeCuda {
    FakeCuda::open(&directory())
}

/// A place for sockets of this test.
pub(crate) fn directory() -> PathBuf {
    std::env::var_os(DIRECTORY).expect("set by the parent").into()
}

fn directory_in_memory() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a directory can be made")
}

fn this_test(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a test has an executable"));
    command.args([test, "--exact", "--nocapture", "--include-ignored"]);
    command
}

/// Returns when it is so; the process is ended if it never is.
pub(crate) fn eventually(mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < Duration::from_secs(u64::from(SECONDS_MAX)), "it never is");
        std::thread::yield_now();
    }
}

/// The driver as the tests use it by themselves, with the context current to the thread that made it.
#[derive(Clone, Copy)]
pub(crate) struct Raw {
    pub(crate) driver: Driver,
}

impl Raw {
    pub(crate) fn start(fake: &FakeCuda) -> Raw {
        let driver = Driver::start(Some(&fake.library())).expect("it is there");
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: device 0 exists; the pointer is to a context's handle.
        unsafe { driver.primary_context_retain(&raw mut context, 0) }.expect("a context");
        // SAFETY: retained above.
        unsafe { driver.context_set(context) }.expect("current");
        Raw { driver }
    }

    pub(crate) fn uuid(&self) -> [u8; 16] {
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: device 0 exists; the pointer is to a UUID.
        unsafe { self.driver.device_uuid(&raw mut uuid, 0) }.expect("a UUID");
        uuid.bytes.map(|byte| byte.to_ne_bytes()[0])
    }

    /// A stream that waits for no other.
    pub(crate) fn stream(&self) -> CUstream {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the pointer is to a stream's handle.
        unsafe { self.driver.stream_create(&raw mut stream, 1) }.expect("a stream");
        stream
    }

    /// Queues work that writes `count` bytes.
    pub(crate) fn fill(&self, stream: CUstream, target: u64, byte: u8, count: usize) {
        // SAFETY: whether the target may be written is what the tests find out.
        unsafe { self.driver.fill(target, byte, count, stream) }.expect("queued");
    }

    /// The code of waiting for everything: 0, or the sticky one.
    pub(crate) fn outcome(&self) -> u32 {
        // SAFETY: takes nothing.
        unsafe { self.driver.context_synchronize() }.map_or_else(|failed| failed.code, |()| 0)
    }
}

/// A daemon's frame: memory with a handle, mapped at an address of the daemon's.
struct DeviceMemory {
    driver: Driver,
    handle: MemHandle,
    address: DevicePtr,
}

impl DeviceMemory {
    fn new(raw: &Raw) -> DeviceMemory {
        let location =
            CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
        // SAFETY: a structure of numbers and a pointer, for which zeros stand for none.
        let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes =
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        properties.location = location;
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = CUmemAccessDesc { location, flags };
        let driver = raw.driver;
        let (mut handle, mut address) = (0, 0);
        // SAFETY: pointers to what is written and read; the handle and address are those just made.
        let made = unsafe {
            driver
                .mem_create(&raw mut handle, PAGE_BYTES, &raw const properties, 0)
                .and_then(|()| driver.address_reserve(&raw mut address, PAGE_BYTES, 0, 0, 0))
                .and_then(|()| driver.mem_map(address, PAGE_BYTES, 0, handle, 0))
                .and_then(|()| driver.mem_set_access(address, PAGE_BYTES, &raw const access, 1))
        };
        made.expect("there is memory");
        DeviceMemory { driver, handle, address }
    }
}

impl FrameMemory for DeviceMemory {
    fn save(&self, bytes: &mut [u8]) {
        let target = bytes.as_mut_ptr().cast();
        // SAFETY: the page is mapped, and as long as the bytes.
        unsafe { self.driver.copy_down_now(target, self.address, bytes.len()) }.expect("saved");
    }

    fn load(&self, bytes: &[u8]) {
        let source = bytes.as_ptr().cast();
        // SAFETY: the page is mapped, and as long as the bytes.
        unsafe { self.driver.copy_up_now(self.address, source, bytes.len()) }.expect("loaded");
    }

    fn export(&self) -> OwnedFd {
        let mut fd = -1;
        // SAFETY: the pointer is to a descriptor's number, and the handle is live.
        unsafe { self.driver.mem_export((&raw mut fd).cast(), self.handle, 1, 0) }.expect("a fd");
        // SAFETY: made above, for this alone.
        unsafe { OwnedFd::from_raw_fd(fd) }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Fails in a broken context, which some tests make.
        // SAFETY: mapped, reserved and created by `new`, and nothing uses it any more.
        let _ = unsafe {
            self.driver
                .mem_unmap(self.address, PAGE_BYTES)
                .and_then(|()| self.driver.address_free(self.address, PAGE_BYTES))
                .and_then(|()| self.driver.mem_release(self.handle))
        };
    }
}

/// A welcome to frames of the first device.
pub(crate) fn cuda_welcome(fake: &FakeCuda, frames: u32) -> Welcome {
    let device_uuid = Raw::start(fake).uuid();
    Welcome { device: DeviceKind::Cuda, device_uuid, ..welcome(frames) }
}

/// Connects, with the fake driver.
pub(crate) fn connect(fake: &FakeCuda, path: &Path) -> Result<Client, Error> {
    let (socket, libcuda) = (Some(path.into()), Some(fake.library()));
    ConnectOptions { socket, libcuda, ..ConnectOptions::default() }.connect()
}

/// Serves one client with frames on the first device.
pub(crate) fn serve(fake: &FakeCuda, frames: u32, peer: Peer, events: &UnixStream) -> Seen {
    let (sender, revoked) = sync_channel(16);
    let seen = pages(fake, frames, sender).serve(peer, events);
    drop(revoked);
    seen
}

fn pages(fake: &FakeCuda, frames: u32, revoked: SyncSender<Vec<VramFrame>>) -> Paging {
    let raw = Raw::start(fake);
    let memory = |_| Box::new(DeviceMemory::new(&raw)) as Box<dyn FrameMemory>;
    Paging::new((0..frames).map(memory).collect(), revoked)
}

impl Daemon {
    /// A daemon with frames on the first device, for a client in this process.
    pub(crate) fn on_cuda(fake: &FakeCuda, frames: u32) -> Daemon {
        let path = directory().join("s");
        let (sender, revoked) = sync_channel(16);
        let thread = listening(&path, cuda_welcome(fake, frames), move |peer, events| {
            pages(&machine(), frames, sender).serve(peer, &events)
        });
        Daemon { client: connect(fake, &path).expect("connected"), revoked, thread }
    }
}
