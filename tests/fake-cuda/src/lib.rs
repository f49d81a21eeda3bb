//! A stand-in for NVIDIA's `libcuda`, so that the daemon and its client library can be tested without a GPU. Never shipped.
//!
//! The shared library exports every function of the driver API up to CUDA 13.5. Those that deal with devices, primary contexts,
//! memory, streams and events work, between processes too, and keep the driver's rules: a test that breaks one fails here as it
//! would on a card. All others return `CUDA_ERROR_NOT_SUPPORTED`. There are no kernels.
//!
//! # Using it
//!
//! [`harness::FakeCuda`] puts it, as `libcuda.so` and `libcuda.so.1`, in a directory for `LD_LIBRARY_PATH`. Processes with the same
//! `FAKE_CUDA_DIR` share devices.
//!
//! | variable | default | what |
//! | --- | --- | --- |
//! | `FAKE_CUDA_DIR` | `/dev/shm/lapis-fake-cuda` | where the devices' memory, events, gates and faults are |
//! | `FAKE_CUDA_DEVICES` | 1 | how many devices |
//! | `FAKE_CUDA_MEMORY` | `1GiB` | memory of each |
//! | `FAKE_CUDA_GRANULARITY` | `2MiB` | allocation granularity |
//! | `FAKE_CUDA_UNIFIED` | `no` | `integrated` or `coherent`: what the device attributes say |
//! | `FAKE_CUDA_ATTRIBUTES` | | `102=0,103=0`: device attributes by number; without 102 or 103 memory is refused with 801 |
//! | `FAKE_CUDA_VERSION` | 13010 | what `cuDriverGetVersion` says |
//! | `FAKE_CUDA_POISON` | 0 | 1: new memory is full of 0xA5 and not of zeros |
//! | `FAKE_CUDA_HOST_ACCESS` | 1 | 0: device addresses are never accessible to the CPU, as on a card; 1: as `cuMemSetAccess` says |
//! | `FAKE_CUDA_FAULTS` | | `cuMemCreate:3:2,work:0:700:1`: symbol, calls that pass, code, times (1) |
//! | `CUDA_VISIBLE_DEVICES` | all | indices or UUIDs, as the driver takes it |
//!
//! # Faults and gates
//!
//! A fault makes calls of one function return a code and do nothing. The symbol `work` stands for copies and fills when they
//! run. A sticky code (700, 719, ...) breaks the context as well. Faults come from `FAKE_CUDA_FAULTS`, from the file `faults` in
//! `FAKE_CUDA_DIR` (one a line; counted by each process from when the file was written last), and from `fakeCudaFail(symbol, after, code,
//! times)`; `fakeCudaClearFaults()` forgets those of the first and the last kind.
//!
//! While the file `device-N/paused` exists, queued work of that device waits, in every process: `fakeCudaPause(device)`,
//! `fakeCudaResume(device)`, `touch`, `rm`. While the file `wedged` exists, every driver call waits.
//!
//! # What is kept to
//!
//! * 3 before `cuInit`, and in a forked child; 201 without a context on the calling thread, 709 once it is released.
//! * Sizes and addresses are multiples of the granularity; a map has offset 0, lies in one reservation, and overlaps none.
//! * Mapped memory is inaccessible until `cuMemSetAccess`: to the CPU a segmentation fault, to queued work 700.
//! * Access is set for whole mappings, side by side. One unmap takes exactly one mapping.
//! * Memory lives while any process has a handle, a mapping, or an exported descriptor; `cuMemGetInfo` counts it so, right after a
//!   `kill -9` too.
//! * An exported descriptor is not consumed by an import; two imports are two handles. A device that the importer doesn't see is 101.
//! * Work runs in order in its stream and asynchronously; the null stream and blocking streams wait for each other.
//! * Work finds its memory when it runs. Memory that was unmapped, or unregistered, in between is 700, which sticks: everything that
//!   has to do with the device returns it until the process ends.
//! * Host memory is registered once (712, 713), must be there, and a copy lies in one registration or in none.
//! * Copies to host memory that isn't registered wait; from it they are staged.
//! * Host functions must not call the driver (800), and don't run once the context is broken.
//! * An event is not opened by the process that made it (201); one whose process died before completing it never completes.
//! * Each exported name is the current ABI: `cuMemAlloc` beside `cuMemAlloc_v2` is refused with 801.
//!
//! Where the driver's documentation leaves room, the fake takes the stricter reading: an unmap of several mappings in one call, an export
//! of imported memory, and two registrations in one host page are refused.
//!
//! # What is not played
//!
//! Kernels, modules, graphs, memory pools, managed memory, `cuMemHostAlloc`, batched copies, other contexts than the primary
//! ones, per-thread default streams, peer access, MIG, the tables behind `cuGetExportTable` (so nothing that uses the CUDA
//! runtime works), time: a copy takes as long as it takes the CPU. Registered memory is made present, not locked. Memory of a
//! device is a sparse file: if the file system is full, touching it is SIGBUS.

mod abi;
mod api;
mod call;
mod code;
mod code_names;
mod config;
mod driver;
mod event;
mod faults;
mod forms;
mod gate;
pub mod harness;
mod host;
mod ledger;
mod memory;
mod space;
mod stream;
mod stubs;
mod work;
