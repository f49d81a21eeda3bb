//! Virtual memory management inside one process.

use crate::alone::{alone, dies, reached, test_name};
use crate::api::{Location, Properties};
use crate::gpu::{FRAME, Gpu, READ, READ_WRITE, access, peek, poke, properties};

#[test]
fn sizes_are_multiples_of_the_granularity() {
    alone(test_name!(), &[("FAKE_CUDA_GRANULARITY", "64KiB")], |fake| {
        let gpu = Gpu::start(fake);
        let (mut bytes, mut address) = (0, 0);
        for option in [0, 1] {
            let code = gpu.cuMemGetAllocationGranularity(&raw mut bytes, &properties(0), option);
            assert_eq!((code, bytes), (0, 64 << 10));
        }
        assert_eq!(gpu.cuMemGetAllocationGranularity(&raw mut bytes, &properties(0), 2), 1);
        assert!(gpu.try_create(64 << 10).is_ok());
        assert_eq!([0, 1, 65_535, 65_537].map(|bytes| gpu.try_create(bytes)), [Err(1); 4]);
        assert_eq!(gpu.cuMemAddressReserve(&raw mut address, 65_537, 0, 0, 0), 1);
        assert_eq!(gpu.cuMemAddressReserve(&raw mut address, 0, 0, 0, 0), 1);
    });
}

#[test]
fn the_properties_must_be_ones_that_there_are() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let good = properties(0);
        let attempt = |properties: Properties, flags| {
            gpu.cuMemCreate(&mut 0, FRAME, &raw const properties, flags)
        };
        let at = |kind, id| Properties { location: Location { kind, id }, ..good };
        assert_eq!(attempt(good, 0), 0);
        assert_eq!(attempt(Properties { handle_types: 0, ..good }, 0), 0);
        assert_eq!(attempt(good, 1), 1, "flags");
        assert_eq!(attempt(Properties { kind: 0, ..good }, 0), 1, "not pinned");
        assert_eq!(attempt(at(2, 0), 0), 1, "host memory");
        assert_eq!(attempt(at(1, 1), 0), 101, "no such device");
        assert_eq!(attempt(at(1, -1), 0), 101, "no such device");
        assert_eq!(attempt(Properties { handle_types: 9, ..good }, 0), 800, "fabric");
        assert_eq!(attempt(Properties { handle_types: 2, ..good }, 0), 801, "Windows");
        assert_eq!(attempt(Properties { flags: [0, 0, 0, 0, 1, 0, 0, 0], ..good }, 0), 1);
        assert_eq!(gpu.cuMemCreate(std::ptr::null_mut(), FRAME, &raw const good, 0), 1);
        assert_eq!(gpu.cuMemCreate(&mut 0, FRAME, std::ptr::null(), 0), 1);
        let mut found = Properties { handle_types: 0, flags: [9; 8], ..at(0, 9) };
        let handle = gpu.create();
        assert_eq!(gpu.cuMemGetAllocationPropertiesFromHandle(&raw mut found, handle), 0);
        assert_eq!((found.kind, found.handle_types, found.location), (1, 1, good.location));
        assert_eq!(found.flags, [0; 8]);
    });
}

#[test]
fn vmm_needs_no_current_context() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        assert_eq!(gpu.cuCtxSetCurrent(0), 0);
        let address = gpu.frame();
        assert_eq!(gpu.cuMemUnmap(address, FRAME), 0);
        assert_eq!(gpu.cuMemAddressFree(address, FRAME), 0);
    });
}

#[test]
fn mapped_memory_is_memory() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let address = gpu.frame();
        assert!(address.is_multiple_of(FRAME as u64));
        gpu.write(address + 5, b"lapis");
        assert_eq!(gpu.read(address + 4, 7), b"\0lapis\0");
        // The same memory by the CPU, and at a second address.
        assert_eq!(peek(address + 5), b'l');
        poke(address + 5, b'L');
        let mut handle = 0;
        assert_eq!(gpu.cuMemRetainAllocationHandle(&raw mut handle, address + 77), 0);
        let second = gpu.reserve(FRAME);
        assert_eq!(gpu.cuMemMap(second, FRAME, 0, handle, 0), 0);
        gpu.allow(second, FRAME, READ);
        assert_eq!(gpu.read(second + 5, 5), b"Lapis");
        assert_eq!(peek(second + 6), b'a');
    });
}

#[test]
fn a_map_has_rules() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (handle, base) = (gpu.create(), gpu.reserve(4 * FRAME));
        let frame = FRAME as u64;
        let map =
            |address, bytes, offset, flags| gpu.cuMemMap(address, bytes, offset, handle, flags);
        assert_eq!(map(base, FRAME, FRAME, 0), 1, "an offset");
        assert_eq!(map(base, FRAME, 1, 0), 1, "an offset");
        assert_eq!(map(base, FRAME, 0, 1), 1, "flags");
        assert_eq!(map(base + 4096, FRAME, 0, 0), 1, "an address between");
        assert_eq!(map(base, 4096, 0, 0), 1, "a size between");
        assert_eq!(map(base, 0, 0, 0), 1, "nothing");
        assert_eq!(map(base, 2 * FRAME, 0, 0), 1, "more than the memory");
        assert_eq!(gpu.cuMemMap(base, FRAME, 0, 0xbad0, 0), 1, "no such handle");
        assert_eq!(map(frame, FRAME, 0, 0), 1, "not reserved");
        let end = base + 4 * frame;
        let large = gpu.try_create(2 * FRAME).expect("there is memory");
        assert_eq!(gpu.cuMemMap(end - frame, 2 * FRAME, 0, large, 0), 1, "over the end");
        assert_eq!(gpu.cuMemMap(base + frame, 2 * FRAME, 0, large, 0), 0);
        assert_eq!(map(base + frame, FRAME, 0, 0), 1, "mapped already");
        assert_eq!(map(base + 2 * frame, FRAME, 0, 0), 1, "mapped already, in its middle");
        assert_eq!(gpu.cuMemMap(base, 2 * FRAME, 0, large, 0), 1, "over what is mapped");
        assert_eq!(map(base, FRAME, 0, 0), 0);
        assert_eq!(map(end - frame, FRAME, 0, 0), 0, "the same handle once more");
        // A prefix of the memory.
        let prefix = gpu.reserve(FRAME);
        assert_eq!(gpu.cuMemMap(prefix, FRAME, 0, large, 0), 0);
    });
}

#[test]
fn an_unmap_takes_exactly_one_mapping() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (frame, base) = (FRAME as u64, gpu.reserve(4 * FRAME));
        let large = gpu.try_create(2 * FRAME).expect("there is memory");
        for at in [base, base + 2 * frame] {
            assert_eq!(gpu.cuMemMap(at, 2 * FRAME, 0, large, 0), 0);
        }
        assert_eq!(gpu.cuMemUnmap(base, FRAME), 1, "its first half");
        assert_eq!(gpu.cuMemUnmap(base + frame, FRAME), 1, "its second half");
        assert_eq!(gpu.cuMemUnmap(base, 4 * FRAME), 1, "two at once");
        assert_eq!(gpu.cuMemUnmap(base, 2 * FRAME), 0);
        assert_eq!(gpu.cuMemUnmap(base, 2 * FRAME), 1, "again");
        assert_eq!(gpu.cuMemAddressFree(base, 4 * FRAME), 1, "something is mapped there");
        assert_eq!(gpu.cuMemUnmap(base + 2 * frame, 2 * FRAME), 0);
        assert_eq!(gpu.cuMemAddressFree(base, 2 * FRAME), 1, "not all of it");
        assert_eq!(gpu.cuMemAddressFree(base + frame, 3 * FRAME), 1, "not its start");
        assert_eq!(gpu.cuMemAddressFree(base, 4 * FRAME), 0);
        assert_eq!(gpu.cuMemAddressFree(base, 4 * FRAME), 1, "again");
    });
}

#[test]
fn access_is_set_for_whole_mappings() {
    alone(test_name!(), &[("FAKE_CUDA_DEVICES", "2")], |fake| {
        let gpu = Gpu::start(fake);
        let (frame, base) = (FRAME as u64, gpu.reserve(4 * FRAME));
        let large = gpu.try_create(2 * FRAME).expect("there is memory");
        assert_eq!(gpu.cuMemMap(base, 2 * FRAME, 0, large, 0), 0);
        let set = |address, bytes, device, flags| {
            gpu.cuMemSetAccess(address, bytes, &access(device, flags), 1)
        };
        assert_eq!(set(base, FRAME, 0, READ_WRITE), 1, "half of a mapping");
        assert_eq!(set(base + frame, FRAME, 0, READ_WRITE), 1, "its other half");
        assert_eq!(set(base, 4 * FRAME, 0, READ_WRITE), 1, "more than is mapped");
        assert_eq!(set(base, 0, 0, READ_WRITE), 1, "nothing");
        assert_eq!(set(base, 2 * FRAME, 0, 2), 1, "no such access");
        assert_eq!(set(base, 2 * FRAME, 1, READ_WRITE), 101, "not a peer");
        assert_eq!(set(base, 2 * FRAME, 2, READ_WRITE), 101, "no such device");
        assert_eq!(gpu.cuMemSetAccess(base, 2 * FRAME, std::ptr::null(), 1), 1);
        assert_eq!(gpu.cuMemSetAccess(base, 2 * FRAME, &access(0, READ), 0), 1);
        assert_eq!(gpu.cuMemMap(base + 2 * frame, 2 * FRAME, 0, large, 0), 0);
        assert_eq!(set(base, 4 * FRAME, 0, READ_WRITE), 0, "two side by side");
        let flags = |address| {
            let (mut flags, location) = (9, Location { kind: 1, id: 0 });
            (gpu.cuMemGetAccess(&raw mut flags, &raw const location, address), flags)
        };
        assert_eq!([base + 1, base + 2 * frame].map(flags), [(0, 3); 2]);
        assert_eq!(gpu.cuMemUnmap(base, 2 * FRAME), 0);
        assert_eq!(flags(base), (1, 9));
        assert_eq!(gpu.cuMemMap(base, 2 * FRAME, 0, large, 0), 0);
        assert_eq!(flags(base), (0, 0), "a new mapping has no access");
    });
}

#[test]
fn a_touch_after_a_map_without_access_is_a_fault() {
    dies(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (handle, address) = (gpu.create(), gpu.reserve(FRAME));
        assert_eq!(gpu.cuMemMap(address, FRAME, 0, handle, 0), 0);
        reached();
        peek(address);
    });
}

#[test]
fn a_write_with_read_access_is_a_fault() {
    dies(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let address = gpu.frame();
        gpu.allow(address, FRAME, READ);
        assert_eq!(peek(address), 0);
        reached();
        poke(address, 1);
    });
}

#[test]
fn a_touch_after_an_unmap_is_a_fault() {
    dies(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let address = gpu.frame();
        assert_eq!(peek(address), 0);
        assert_eq!(gpu.cuMemUnmap(address, FRAME), 0);
        reached();
        peek(address);
    });
}

#[test]
fn the_cpu_has_no_access_when_none_is_played() {
    dies(test_name!(), &[("FAKE_CUDA_HOST_ACCESS", "0")], |fake| {
        let gpu = Gpu::start(fake);
        let address = gpu.frame();
        gpu.write(address, b"lapis");
        assert_eq!(gpu.read(address, 5), b"lapis");
        reached();
        peek(address);
    });
}

#[test]
fn a_handle_is_released_as_often_as_it_was_had() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (handle, address) = (gpu.create(), gpu.reserve(FRAME));
        assert_eq!(gpu.cuMemMap(address, FRAME, 0, handle, 0), 0);
        let mut again = 0;
        assert_eq!(gpu.cuMemRetainAllocationHandle(&raw mut again, address), 0);
        assert_eq!(again, handle);
        assert_eq!((gpu.cuMemRelease(handle), gpu.cuMemRelease(handle)), (0, 0));
        assert_eq!(gpu.cuMemRelease(handle), 1, "once too often");
        assert_eq!(gpu.cuMemMap(address, FRAME, 0, handle, 0), 1, "it is no handle any more");
        assert_eq!(gpu.cuMemRetainAllocationHandle(&raw mut again, address), 0);
        assert_eq!(gpu.cuMemRelease(again), 0, "the mapping held the memory");
        assert_eq!(gpu.cuMemUnmap(address, FRAME), 0);
        assert_eq!(gpu.cuMemRetainAllocationHandle(&raw mut again, address), 1);
    });
}

#[test]
fn memory_runs_out_and_comes_back_with_the_last_hold() {
    alone(test_name!(), &[("FAKE_CUDA_MEMORY", "8MiB")], |fake| {
        let gpu = Gpu::start(fake);
        let base = gpu.reserve(4 * FRAME);
        assert_eq!(gpu.try_create(5 * FRAME), Err(2));
        let handles = [(); 4].map(|()| gpu.create());
        assert_eq!((gpu.try_create(FRAME), gpu.free()), (Err(2), 0));
        assert_eq!(gpu.cuMemMap(base, FRAME, 0, handles[0], 0), 0);
        assert_eq!(gpu.cuMemRelease(handles[0]), 0);
        assert_eq!(gpu.free(), 0, "it is mapped");
        assert_eq!(gpu.cuMemUnmap(base, FRAME), 0);
        assert_eq!(gpu.free(), FRAME);
        assert_eq!(gpu.cuMemMap(base, FRAME, 0, handles[1], 0), 0);
        assert_eq!(gpu.cuMemUnmap(base, FRAME), 0);
        assert_eq!(gpu.free(), FRAME, "there is a handle");
        let mut address = 0;
        assert_eq!(gpu.cuMemAlloc_v2(&raw mut address, FRAME), 0);
        assert_eq!(gpu.cuMemAlloc_v2(&mut 0, 1), 2);
        assert_eq!(gpu.cuMemFree_v2(address), 0);
        assert_eq!(gpu.cuMemFree_v2(address), 1, "again");
        assert_eq!(gpu.free(), FRAME);
    });
}

#[test]
fn memory_by_address_and_by_handle_do_not_mix() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (mut address, frame, handle) = (0, gpu.frame(), gpu.create());
        assert_eq!(gpu.cuMemAlloc_v2(&raw mut address, 100), 0);
        gpu.write(address, &[7; 100]);
        assert_eq!(gpu.read(address, 100), [7; 100]);
        assert_eq!(gpu.cuMemAlloc_v2(&raw mut address, FRAME), 0);
        assert_eq!(gpu.cuMemUnmap(address, FRAME), 1);
        assert_eq!(gpu.cuMemSetAccess(address, FRAME, &access(0, READ), 1), 1);
        assert_eq!(gpu.cuMemAddressFree(address, FRAME), 1);
        assert_eq!(gpu.cuMemMap(address, FRAME, 0, handle, 0), 1);
        assert_eq!(gpu.cuMemFree_v2(frame), 1);
        assert_eq!(gpu.cuMemAlloc_v2(&mut 0, 0), 1);
        assert_eq!(gpu.cuMemFree_v2(0), 0);
        assert_eq!(gpu.cuMemAlloc(&mut 0, 100), 801, "with 32-bit addresses");
    });
}

#[test]
fn a_reservation_is_aligned_and_flags_are_refused() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let mut address = 0;
        assert_eq!(gpu.cuMemAddressReserve(&raw mut address, FRAME, 1 << 30, 0, 0), 0);
        assert!(address.is_multiple_of(1 << 30));
        assert_eq!(gpu.cuMemAddressReserve(&raw mut address, FRAME, 3, 0, 0), 1);
        assert_eq!(gpu.cuMemAddressReserve(&raw mut address, FRAME, 0, 0, 1), 1);
        assert_eq!(gpu.cuMemAddressReserve(&raw mut address, 1 << 60, 0, 0, 0), 2);
    });
}

#[test]
fn new_memory_is_zeros_or_poison() {
    alone(test_name!(), &[("FAKE_CUDA_POISON", "1")], |fake| {
        let gpu = Gpu::start(fake);
        assert_eq!(gpu.read(gpu.frame() + FRAME as u64 - 2, 2), [0xA5; 2]);
    });
}
