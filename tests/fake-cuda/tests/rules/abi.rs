//! The layouts and names, against a binding that was generated from `cuda.h`.

use std::mem::{offset_of, size_of};

use cudarc::driver::sys;

use crate::alone::{alone, test_name};
use crate::api::{Access, IpcEvent, Library, Location, Properties};
use crate::gpu::Gpu;

#[test]
fn structures_are_laid_out_as_in_the_header() {
    assert_eq!(size_of::<Location>(), size_of::<sys::CUmemLocation>());
    assert_eq!(offset_of!(Location, id), offset_of!(sys::CUmemLocation, id));
    assert_eq!(size_of::<Properties>(), size_of::<sys::CUmemAllocationProp>());
    let ours = [
        offset_of!(Properties, handle_types),
        offset_of!(Properties, location),
        offset_of!(Properties, win32),
        offset_of!(Properties, flags),
    ];
    let theirs = [
        offset_of!(sys::CUmemAllocationProp, requestedHandleTypes),
        offset_of!(sys::CUmemAllocationProp, location),
        offset_of!(sys::CUmemAllocationProp, win32HandleMetaData),
        offset_of!(sys::CUmemAllocationProp, allocFlags),
    ];
    assert_eq!(ours, theirs);
    assert_eq!(size_of::<Access>(), size_of::<sys::CUmemAccessDesc>());
    assert_eq!(offset_of!(Access, flags), offset_of!(sys::CUmemAccessDesc, flags));
    assert_eq!(size_of::<IpcEvent>(), size_of::<sys::CUipcEventHandle>());
}

#[test]
fn constants_are_those_of_the_header() {
    use sys::{CUmemAccess_flags as Access, CUmemAllocationHandleType as HandleType};
    assert_eq!(Access::CU_MEM_ACCESS_FLAGS_PROT_READ as u32, 1);
    assert_eq!(Access::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32, 3);
    assert_eq!(HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0, 1);
    assert_eq!(HandleType::CU_MEM_HANDLE_TYPE_FABRIC.0, 8);
    assert_eq!(sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32, 1);
    assert_eq!(sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32, 1);
    assert_eq!(sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32, 1);
    assert_eq!(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32, 2);
    assert_eq!(sys::CUevent_flags::CU_EVENT_INTERPROCESS as u32, 4);
    assert_eq!(sys::CU_MEMHOSTREGISTER_DEVICEMAP, 2);
    assert_eq!(sys::CU_MEMHOSTREGISTER_READ_ONLY, 8);
    use sys::CUdevice_attribute as Attribute;
    let attributes = [
        Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED,
        Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
        Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
        Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        Attribute::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
    ];
    assert_eq!(attributes.map(|attribute| attribute as u32), [18, 88, 100, 102, 103, 125]);
    use sys::cudaError_enum as Code;
    let codes = [
        Code::CUDA_ERROR_OPERATING_SYSTEM,
        Code::CUDA_ERROR_ILLEGAL_ADDRESS,
        Code::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        Code::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
        Code::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
    ];
    assert_eq!(codes.map(|code| code as u32), [304, 700, 709, 712, 713]);
}

#[test]
fn a_function_that_does_nothing_says_so() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        assert_eq!(gpu.cuModuleLoadData(&mut 0, std::ptr::null()), 801);
        let library = Library::open(&fake.library());
        // Old, new, of graphs, of per-thread streams.
        for name in [
            "cuMemFree",
            "cuMulticastCreate",
            "cuGraphInstantiateWithParams",
            "cuStreamBeginCapture_ptsz",
            "cuGetExportTable",
            "cuProfilerStart",
        ] {
            library.symbol(name);
        }
    });
}

#[test]
fn cudarc_finds_it_and_copies() {
    alone(test_name!(), &[], |_| {
        let context = cudarc::driver::CudaContext::new(0).expect("it is on the loader's path");
        assert_eq!(context.name().expect("it has one"), "Lapis fake GPU 0");
        let stream = context.default_stream();
        let device = stream.clone_htod(&[1u32, 2, 3]).expect("there is memory");
        assert_eq!(stream.clone_dtoh(&device).expect("it was copied there"), [1, 2, 3]);
    });
}
