//! Memory by descriptor, inside one process.
#![expect(unsafe_code, reason = "closes descriptors of the driver's")]

use std::os::fd::AsRawFd;

use crate::alone::{alone, test_name};
use crate::gpu::{FRAME, Gpu, READ_WRITE, properties};

#[test]
fn a_descriptor_is_imported_and_stays_the_callers() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (handle, base) = (gpu.create(), gpu.reserve(3 * FRAME));
        let descriptor = gpu.export(handle);
        let imports = [gpu.import(descriptor), gpu.import(descriptor)].map(Result::unwrap);
        assert_ne!(imports[0], imports[1]);
        assert!(!imports.contains(&handle));
        close(descriptor);
        let frame = FRAME as u64;
        for (index, handle) in (0..).zip([handle, imports[0], imports[1]]) {
            assert_eq!(gpu.cuMemMap(base + index * frame, FRAME, 0, handle, 0), 0);
        }
        gpu.allow(base, 3 * FRAME, READ_WRITE);
        gpu.write(base, b"lapis");
        assert_eq!(gpu.read(base + frame, 5), b"lapis");
        gpu.write(base + 2 * frame, b"L");
        assert_eq!(gpu.read(base, 5), b"Lapis");
    });
}

#[test]
fn a_descriptor_holds_memory() {
    alone(test_name!(), &[("FAKE_CUDA_MEMORY", "2MiB")], |fake| {
        let gpu = Gpu::start(fake);
        let handle = gpu.create();
        let descriptor = gpu.export(handle);
        assert_eq!(gpu.cuMemRelease(handle), 0);
        assert_eq!((gpu.free(), gpu.try_create(FRAME)), (0, Err(2)));
        let handle = gpu.import(descriptor).expect("the memory is alive");
        close(descriptor);
        assert_eq!((gpu.free(), gpu.try_create(FRAME)), (0, Err(2)));
        assert_eq!(gpu.cuMemRelease(handle), 0);
        assert_eq!(gpu.free(), FRAME);
        assert!(gpu.try_create(FRAME).is_ok());
        assert_eq!(gpu.import(descriptor), Err(1), "it is closed");
    });
}

#[test]
fn memory_is_exported_only_as_it_was_made_to_be() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (handle, mut own) = (gpu.create(), 0);
        let mut private = properties(0);
        private.handle_types = 0;
        assert_eq!(gpu.cuMemCreate(&raw mut own, FRAME, &raw const private, 0), 0);
        let export =
            |handle, kind, flags| gpu.cuMemExportToShareableHandle(&mut -1, handle, kind, flags);
        assert_eq!(export(own, 1, 0), 1, "not made for it");
        assert_eq!(export(handle, 1, 1), 1, "flags");
        assert_eq!(export(handle, 8, 0), 1, "another kind");
        assert_eq!(export(0xbad0, 1, 0), 1, "no such handle");
        let imported = gpu.import(gpu.export(handle)).expect("the memory is alive");
        assert_eq!(export(imported, 1, 0), 1, "imported");
        assert_eq!(gpu.cuMemRelease(handle), 0);
        assert_eq!(export(handle, 1, 0), 1, "released");
    });
}

#[test]
fn what_is_no_memory_is_not_imported() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let file = tempfile::tempfile().expect("a file can be made");
        let descriptor = gpu.export(gpu.create());
        assert_eq!(gpu.import(file.as_raw_fd()), Err(1));
        assert_eq!(gpu.import(9999), Err(1), "not open");
        // What looks like another machine's memory.
        let directory = tempfile::tempdir().expect("a directory can be made");
        std::fs::create_dir(directory.path().join("device-0")).expect("it is new");
        let path = directory.path().join("device-0/memory-1-0");
        std::fs::write(&path, [0; 4096]).expect("it is new");
        let other = std::fs::File::options().read(true).write(true).open(path);
        assert_eq!(gpu.import(other.expect("it is there").as_raw_fd()), Err(1));
        let shareable = usize::try_from(descriptor).expect("a descriptor");
        assert_eq!(gpu.cuMemImportFromShareableHandle(&mut 0, shareable, 8), 1, "another kind");
        let pointer = (&raw const descriptor) as usize;
        assert_eq!(gpu.cuMemImportFromShareableHandle(&mut 0, pointer, 1), 1, "by address");
    });
}

#[test]
fn memory_takes_no_descriptors_until_it_is_exported() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let open = || std::fs::read_dir("/proc/self/fd").expect("there is /proc").count();
        let before = open();
        let (handles, base) = ([(); 100].map(|()| gpu.create()), gpu.reserve(100 * FRAME));
        for (index, handle) in (0..).zip(handles) {
            assert_eq!(gpu.cuMemMap(base + index * FRAME as u64, FRAME, 0, handle, 0), 0);
        }
        assert_eq!(open(), before);
        let descriptor = gpu.export(handles[0]);
        assert_eq!(open(), before + 1);
        let limit = limit_descriptors(3);
        let code = gpu.cuMemExportToShareableHandle(&mut -1, handles[1], 1, 0);
        limit_descriptors(limit);
        assert_eq!(code, 304, "no more descriptors");
        close(descriptor);
    });
}

/// Sets how many descriptors this process may have. Returns how many it might.
fn limit_descriptors(most: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes the structure.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    let before = std::mem::replace(&mut limit.rlim_cur, most);
    // SAFETY: reads the structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    before
}

fn close(descriptor: i32) {
    // SAFETY: the test's own, from the driver, and not used after.
    assert_eq!(unsafe { libc::close(descriptor) }, 0);
}
