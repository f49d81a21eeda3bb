//! Initialisation, devices and contexts.

use std::ffi::{CStr, CString, c_char, c_void};
use std::thread;

use crate::alone::{alone, test_name};
use crate::api::Api;
use crate::gpu::{FRAME, Gpu, properties};

#[test]
fn nothing_works_before_init() {
    alone(test_name!(), &[], |fake| {
        let api = Api::load(&fake.library());
        let (mut number, mut handle) = (0, 0);
        assert_eq!(api.cuDeviceGetCount(&raw mut number), 3);
        assert_eq!(api.cuMemCreate(&raw mut handle, FRAME, &properties(0), 0), 3);
        assert_eq!(api.cuCtxSetCurrent(0), 3);
        assert_eq!(api.cuDriverGetVersion(&raw mut number), 0);
        assert_eq!(number, 13_010);
        assert_eq!(api.cuInit(1), 1);
        assert_eq!((api.cuInit(0), api.cuInit(0)), (0, 0));
        assert_eq!((api.cuDeviceGetCount(&raw mut number), number), (0, 1));
    });
}

#[test]
fn a_wrong_setting_is_no_success() {
    alone(test_name!(), &[("FAKE_CUDA_MEMORY", "much")], |fake| {
        assert_eq!(Api::load(&fake.library()).cuInit(0), 999);
    });
}

#[test]
fn the_devices_are_those_asked_for() {
    let settings = [("FAKE_CUDA_DEVICES", "3"), ("FAKE_CUDA_MEMORY", "64MiB")];
    alone(test_name!(), &settings, |fake| {
        let api = Gpu::start(fake).api;
        let mut uuids = Vec::new();
        for device in 0..3 {
            let (mut found, mut bytes, mut uuid, mut name) = (0, 0, [0; 16], [1; 18]);
            assert_eq!((api.cuDeviceGet(&raw mut found, device), found), (0, device));
            assert_eq!((api.cuDeviceTotalMem_v2(&raw mut bytes, device), bytes), (0, 64 << 20));
            assert_eq!(api.cuDeviceGetUuid_v2(&raw mut uuid, device), 0);
            uuids.push(uuid);
            assert_eq!(api.cuDeviceGetName(name.as_mut_ptr(), 18, device), 0);
            assert_eq!(&name, format!("Lapis fake GPU {device}\0\u{1}").as_bytes());
            assert_eq!(api.cuDeviceGetName(name.as_mut_ptr(), 6, device), 0);
            assert_eq!(&name[..6], b"Lapis\0");
            let mut text = [0; 13];
            assert_eq!(api.cuDeviceGetPCIBusId(text.as_mut_ptr(), 13, device), 0);
            let text = CStr::from_bytes_with_nul(&text).expect("13 characters");
            assert_eq!(
                (api.cuDeviceGetByPCIBusId(&raw mut found, text.as_ptr()), found),
                (0, device)
            );
        }
        uuids.sort_unstable();
        uuids.dedup();
        assert_eq!(uuids.len(), 3);
        let mut none = 0;
        assert_eq!(api.cuDeviceGet(&raw mut none, 3), 101);
        assert_eq!(api.cuDeviceGet(&raw mut none, -1), 101);
        assert_eq!(api.cuDeviceGet(std::ptr::null_mut(), 0), 1);
    });
}

#[test]
fn the_visible_devices_are_renumbered() {
    let settings = [
        ("FAKE_CUDA_DEVICES", "4"),
        ("CUDA_VISIBLE_DEVICES", "3,GPU-6c617069-732d-6661-6b65-2d0000000001,9,0"),
    ];
    alone(test_name!(), &settings, |fake| {
        let api = Gpu::start(fake).api;
        let (mut count, mut uuid) = (0, [0; 16]);
        assert_eq!((api.cuDeviceGetCount(&raw mut count), count), (0, 2));
        let mut last = |device| {
            assert_eq!(api.cuDeviceGetUuid_v2(&raw mut uuid, device), 0);
            uuid[15]
        };
        assert_eq!((last(0), last(1)), (3, 1));
    });
}

#[test]
fn no_visible_device_is_an_error_of_init() {
    alone(test_name!(), &[("CUDA_VISIBLE_DEVICES", "")], |fake| {
        assert_eq!(Api::load(&fake.library()).cuInit(0), 100);
    });
}

#[test]
fn attributes_say_what_is_played() {
    let settings = [("FAKE_CUDA_UNIFIED", "integrated"), ("FAKE_CUDA_ATTRIBUTES", "110=1,102=0")];
    alone(test_name!(), &settings, |fake| {
        let gpu = Gpu::start(fake);
        let attribute = |number| {
            let mut value = -1;
            (gpu.cuDeviceGetAttribute(&raw mut value, number, 0), value)
        };
        // INTEGRATED, PAGEABLE_MEMORY_ACCESS, UNIFIED_ADDRESSING, GPU_DIRECT_RDMA..., POSIX_FILE_DESCRIPTOR.
        assert_eq!([18, 88, 41, 110, 103].map(attribute), [(0, 1); 5]);
        assert_eq!(attribute(102), (0, 0));
        assert_eq!([0, 162, 100_000].map(attribute), [(1, -1); 3]);
        assert_eq!(gpu.try_create(FRAME), Err(801), "without virtual memory management");
    });
}

#[test]
fn a_context_is_current_to_one_thread() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let Gpu { api, context } = gpu;
        let (mut current, mut address) = (1, 0);
        assert_eq!((api.cuCtxGetCurrent(&raw mut current), current), (0, context));
        thread::spawn(move || {
            let (mut current, mut address) = (1, 0);
            assert_eq!((api.cuCtxGetCurrent(&raw mut current), current), (0, 0));
            assert_eq!(api.cuMemAlloc_v2(&raw mut address, 4096), 201);
            assert_eq!(api.cuCtxSynchronize(), 201);
            assert_eq!(api.cuCtxPopCurrent_v2(&raw mut current), 201);
            assert_eq!(api.cuCtxPushCurrent_v2(context), 0);
            assert_eq!(api.cuMemAlloc_v2(&raw mut address, 4096), 0);
            assert_eq!((api.cuCtxPopCurrent_v2(&raw mut current), current), (0, context));
            assert_eq!(api.cuMemFree_v2(address), 201);
        })
        .join()
        .expect("its assertions hold");
        assert_eq!(api.cuMemAlloc_v2(&raw mut address, 4096), 0);
        assert_eq!(api.cuCtxSetCurrent(0), 0);
        assert_eq!(api.cuMemFree_v2(address), 201);
        assert_eq!(api.cuCtxSetCurrent(0xbad), 201);
    });
}

#[test]
fn contexts_stack() {
    alone(test_name!(), &[("FAKE_CUDA_DEVICES", "2")], |fake| {
        let Gpu { api, context } = Gpu::start(fake);
        let (mut second, mut device, mut popped) = (0, -1, 0);
        assert_eq!(api.cuDevicePrimaryCtxRetain(&raw mut second, 1), 0);
        assert_ne!(second, context);
        assert_eq!(api.cuCtxPushCurrent_v2(second), 0);
        assert_eq!((api.cuCtxGetDevice(&raw mut device), device), (0, 1));
        assert_eq!((api.cuCtxPopCurrent_v2(&raw mut popped), popped), (0, second));
        assert_eq!((api.cuCtxGetDevice(&raw mut device), device), (0, 0));
        assert_eq!(api.cuCtxPopCurrent_v2(&raw mut popped), 0);
        assert_eq!(api.cuCtxGetDevice(&raw mut device), 201);
    });
}

#[test]
fn a_released_context_is_destroyed_with_all_that_is_its_own() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (mut context, mut flags, mut active, mut address) = (0, 0, 0, 0);
        assert_eq!(gpu.cuMemAlloc_v2(&raw mut address, FRAME), 0);
        let (stream, event) = (gpu.stream(0), gpu.event(0));
        assert_eq!(gpu.cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(gpu.cuDevicePrimaryCtxRelease_v2(0), 0);
        assert_eq!(gpu.cuStreamSynchronize(stream), 0, "retained once more");
        assert_eq!(gpu.cuDevicePrimaryCtxRelease_v2(0), 0);
        assert_eq!(gpu.cuCtxSynchronize(), 709);
        assert_eq!(gpu.cuCtxSetCurrent(context), 709);
        assert_eq!(gpu.cuDevicePrimaryCtxRelease_v2(0), 201);
        assert_eq!(gpu.cuDevicePrimaryCtxGetState(0, &raw mut flags, &raw mut active), 0);
        assert_eq!(active, 0);
        assert_eq!(fake.memory_used(0).expect("it can be read"), 0);
        assert_eq!(gpu.cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(gpu.cuStreamSynchronize(stream), 400);
        assert_eq!(gpu.cuEventQuery(event), 400);
        assert_eq!(gpu.cuMemFree_v2(address), 1);
    });
}

#[test]
fn errors_have_names() {
    alone(test_name!(), &[], |fake| {
        let api = Api::load(&fake.library());
        let mut text: *const c_char = std::ptr::null();
        assert_eq!(api.cuGetErrorName(700, &raw mut text), 0);
        assert_eq!(string(text), c"CUDA_ERROR_ILLEGAL_ADDRESS");
        assert_eq!(api.cuGetErrorString(2, &raw mut text), 0);
        assert_eq!(string(text), c"out of memory");
        for unlisted in [12, 12_345] {
            assert_eq!(api.cuGetErrorName(unlisted, &raw mut text), 1);
            assert!(text.is_null());
        }
    });
}

#[expect(unsafe_code, reason = "reads a C string")]
fn string(text: *const c_char) -> &'static CStr {
    // SAFETY: the driver's texts are constants of a library that stays loaded.
    unsafe { CStr::from_ptr(text) }
}

#[test]
fn functions_are_found_by_name_and_version() {
    alone(test_name!(), &[], |fake| {
        let api = Api::load(&fake.library());
        let library = crate::api::Library::open(&fake.library());
        let find = |name: &str, version| {
            let name = CString::new(name).expect("no zero in it");
            let (mut found, mut status): (*mut c_void, u32) = (std::ptr::null_mut(), 9);
            let code =
                api.cuGetProcAddress_v2(name.as_ptr(), &raw mut found, version, 0, &raw mut status);
            (code, status, found)
        };
        assert_eq!(find("cuMemAlloc", 12_000), (0, 0, library.symbol("cuMemAlloc_v2")));
        assert_eq!(find("cuMemMap", 12_000), (0, 0, library.symbol("cuMemMap")));
        let (first, second) =
            (library.symbol("cuDeviceGetUuid"), library.symbol("cuDeviceGetUuid_v2"));
        assert_ne!(first, second);
        assert_eq!(find("cuDeviceGetUuid", 11_000), (0, 0, first));
        assert_eq!(find("cuDeviceGetUuid", 11_040), (0, 0, second));
        assert_eq!(find("cuCtxSynchronize", 12_090), (0, 0, library.symbol("cuCtxSynchronize")));
        assert_eq!(find("cuCtxSynchronize", 13_000), (0, 0, library.symbol("cuCtxSynchronize_v2")));
        assert_eq!(find("cuNoSuchThing", 12_000), (500, 1, std::ptr::null_mut()));
        assert_eq!(find("fakeCudaFail", 12_000), (500, 1, std::ptr::null_mut()));
    });
}
