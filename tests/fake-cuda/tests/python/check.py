"""Memory, streams and events of the driver by NVIDIA's own bindings, in two processes.

The bindings look each function up with cuGetProcAddress, build the structures as cuda.h lays them out, and turn what
comes back into their own types: a wrong name, signature or layout does not get through here.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys

from cuda.bindings import driver as cu

FRAME = 2 << 20


def ok(result):
    """The values of a call that must succeed."""
    code, *values = result
    assert code == cu.CUresult.CUDA_SUCCESS, code
    return values[0] if len(values) == 1 else values


def refused(result, code):
    assert result[0] == code, result


def start(ordinal=0):
    ok(cu.cuInit(0))
    device = ok(cu.cuDeviceGet(ordinal))
    context = ok(cu.cuDevicePrimaryCtxRetain(device))
    ok(cu.cuCtxSetCurrent(context))
    return device


def properties(device):
    made = cu.CUmemAllocationProp()
    made.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = int(device)
    made.requestedHandleTypes = POSIX
    return made


POSIX = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def place(handle, device):
    """Maps a handle at an address of its own."""
    address = ok(cu.cuMemAddressReserve(FRAME, 0, 0, 0))
    ok(cu.cuMemMap(address, FRAME, 0, handle, 0))
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = int(device)
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(cu.cuMemSetAccess(address, FRAME, [access], 1))
    return address


def displace(address):
    ok(cu.cuMemUnmap(address, FRAME))
    ok(cu.cuMemAddressFree(address, FRAME))


def read(address, count):
    found = bytearray(count)
    ok(cu.cuMemcpyDtoH(found, address, count))
    return bytes(found)


def check_devices(device):
    assert ok(cu.cuDriverGetVersion()) == 13010
    assert ok(cu.cuDeviceGetCount()) == 2
    assert ok(cu.cuDeviceGetName(32, device)).startswith(b"Lapis fake GPU 0\0")
    assert ok(cu.cuDeviceGetUuid(device)).bytes == b"lapis-fake-\0\0\0\0\0"
    assert ok(cu.cuDeviceTotalMem(device)) == 64 << 20
    attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    assert ok(cu.cuDeviceGetAttribute(attribute, device)) == 1
    assert ok(cu.cuMemGetInfo()) == [64 << 20, 64 << 20]
    name = ok(cu.cuGetErrorName(cu.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS))
    assert name == b"CUDA_ERROR_ILLEGAL_ADDRESS", name
    refused(cu.cuDeviceGet(7), cu.CUresult.CUDA_ERROR_INVALID_DEVICE)


def check_memory(device):
    made = properties(device)
    minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    assert ok(cu.cuMemGetAllocationGranularity(made, minimum)) == FRAME
    refused(cu.cuMemCreate(1000, made, 0), cu.CUresult.CUDA_ERROR_INVALID_VALUE)
    handle = ok(cu.cuMemCreate(FRAME, made, 0))
    found = ok(cu.cuMemGetAllocationPropertiesFromHandle(handle))
    assert found.location.id == 0 and found.requestedHandleTypes == POSIX
    assert ok(cu.cuMemGetInfo()) == [62 << 20, 64 << 20]
    address = place(handle, device)
    location = cu.CUmemLocation()
    location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = int(device)
    assert ok(cu.cuMemGetAccess(location, address)) == 3
    assert int(ok(cu.cuMemRetainAllocationHandle(int(address)))) == int(handle)
    ok(cu.cuMemRelease(handle))
    ok(cu.cuMemcpyHtoD(address, b"lapis", 5))
    assert read(address, 6) == b"lapis\0"
    ok(cu.cuMemsetD32(int(address) + 8, 0x01020304, 1))
    assert read(int(address) + 8, 5) == b"\4\3\2\1\0"
    allocated = ok(cu.cuMemAlloc(100))
    ok(cu.cuMemcpyDtoD(allocated, address, 5))
    assert read(allocated, 5) == b"lapis"
    ok(cu.cuMemFree(allocated))
    refused(cu.cuMemUnmap(address, 4096), cu.CUresult.CUDA_ERROR_INVALID_VALUE)
    displace(address)
    ok(cu.cuMemRelease(handle))
    refused(cu.cuMemRelease(handle), cu.CUresult.CUDA_ERROR_INVALID_VALUE)


def check_streams(device):
    address = place(handle := ok(cu.cuMemCreate(FRAME, properties(device), 0)), device)
    stream = ok(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
    second = ok(cu.cuStreamCreate(0))
    start_, end = (ok(cu.cuEventCreate(0)) for _ in range(2))
    host = (ctypes.c_char * 8192).from_buffer(bytearray(8192))
    pointer = ctypes.addressof(host)
    ok(cu.cuMemHostRegister(pointer, 8192, cu.CU_MEMHOSTREGISTER_DEVICEMAP))
    assert int(ok(cu.cuMemHostGetDevicePointer(pointer, 0))) == pointer
    host[:4] = b"host"
    ok(cu.cuEventRecord(start_, stream))
    ok(cu.cuMemcpyHtoDAsync(address, pointer, 4096, stream))
    ok(cu.cuMemsetD8Async(int(address) + 1, ord("O"), 1, stream))
    ok(cu.cuEventRecord(end, stream))
    ok(cu.cuStreamWaitEvent(second, end, 0))
    ok(cu.cuMemcpyDtoHAsync(pointer + 4096, address, 4096, second))
    ok(cu.cuStreamSynchronize(second))
    assert host[4096:4100] == b"hOst"
    ok(cu.cuEventSynchronize(end))
    ok(cu.cuEventQuery(end))
    ok(cu.cuStreamQuery(stream))
    assert ok(cu.cuEventElapsedTime(start_, end)) >= 0
    ok(cu.cuMemHostUnregister(pointer))
    refused(cu.cuMemHostUnregister(pointer), cu.CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
    for event in (start_, end):
        ok(cu.cuEventDestroy(event))
    for stream in (stream, second):
        ok(cu.cuStreamDestroy(stream))
    ok(cu.cuCtxSynchronize())
    displace(address)
    ok(cu.cuMemRelease(handle))


def check_sharing(device):
    handle = ok(cu.cuMemCreate(FRAME, properties(device), 0))
    address = place(handle, device)
    ok(cu.cuMemcpyHtoD(address, b"lapis", 5))
    flags = cu.CUevent_flags
    event = ok(cu.cuEventCreate(flags.CU_EVENT_INTERPROCESS | flags.CU_EVENT_DISABLE_TIMING))
    shared_event = ok(cu.cuIpcGetEventHandle(event))
    descriptor = ok(cu.cuMemExportToShareableHandle(handle, POSIX, 0))
    ours, theirs = socket.socketpair()
    child = subprocess.Popen([sys.executable, __file__, "child"], stdin=theirs)
    theirs.close()
    event_bytes = ctypes.string_at(shared_event.getPtr(), 64)
    socket.send_fds(ours, [event_bytes], [descriptor])
    os.close(descriptor)
    assert ours.recv(1) == b"r", "the other process recorded the event"
    ok(cu.cuEventSynchronize(event))
    assert read(address, 5) == b"LAPIS"
    ours.close()
    assert child.wait() == 0
    ok(cu.cuEventDestroy(event))
    displace(address)
    ok(cu.cuMemRelease(handle))


def child():
    device = start()
    theirs = socket.socket(fileno=0)
    event_bytes, descriptors, _, _ = socket.recv_fds(theirs, 64, 1)
    handle = ok(cu.cuMemImportFromShareableHandle(descriptors[0], POSIX))
    os.close(descriptors[0])
    address = place(handle, device)
    ok(cu.cuMemRelease(handle))
    assert read(address, 5) == b"lapis"
    shared_event = cu.CUipcEventHandle()
    ctypes.memmove(shared_event.getPtr(), event_bytes, 64)
    event = ok(cu.cuIpcOpenEventHandle(shared_event))
    stream = ok(cu.cuStreamCreate(0))
    ok(cu.cuMemcpyHtoDAsync(address, b"LAPIS", 5, stream))
    ok(cu.cuEventRecord(event, stream))
    theirs.sendall(b"r")
    assert theirs.recv(1) == b""
    ok(cu.cuStreamSynchronize(stream))
    displace(address)


def main():
    device = start()
    check_devices(device)
    check_memory(device)
    check_streams(device)
    check_sharing(device)
    refused(cu.cuModuleLoadData(b"no kernels here"), cu.CUresult.CUDA_ERROR_NOT_SUPPORTED)
    assert ok(cu.cuMemGetInfo()) == [64 << 20, 64 << 20]
    ok(cu.cuDevicePrimaryCtxRelease(device))
    print("checked")


if __name__ == "__main__":
    signal.alarm(120)
    child() if sys.argv[1:] == ["child"] else main()
