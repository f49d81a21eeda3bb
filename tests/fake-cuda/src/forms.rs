//! Since which version of CUDA a function has a later form: `cuGetProcAddress` gives the form of the version that it is asked for.

/// Later forms that came after CUDA 4.1, from `cudaTypedefs.h` of CUDA 13.5. Older ones are the only forms that anybody asks for.
#[rustfmt::skip]
const LATER: &[(&str, i32)] = &[
    ("cuCtxCreate_v3", 11_040),
    ("cuCtxCreate_v4", 12_050),
    ("cuCtxGetDevice_v2", 13_000),
    ("cuCtxSynchronize_v2", 13_000),
    ("cuDeviceGetUuid_v2", 11_040),
    ("cuDevicePrimaryCtxRelease_v2", 11_000),
    ("cuDevicePrimaryCtxReset_v2", 11_000),
    ("cuDevicePrimaryCtxSetFlags_v2", 11_000),
    ("cuEventElapsedTime_v2", 12_080),
    ("cuGetProcAddress_v2", 12_000),
    ("cuGraphAddDependencies_v2", 12_030),
    ("cuGraphAddKernelNode_v2", 12_000),
    ("cuGraphAddNode_v2", 12_030),
    ("cuGraphAddNode_v3", 13_040),
    ("cuGraphExecKernelNodeSetParams_v2", 12_000),
    ("cuGraphExecUpdate_v2", 12_000),
    ("cuGraphGetEdges_v2", 12_030),
    ("cuGraphInstantiate_v2", 11_000),
    ("cuGraphKernelNodeGetParams_v2", 12_000),
    ("cuGraphKernelNodeSetParams_v2", 12_000),
    ("cuGraphNodeGetDependencies_v2", 12_030),
    ("cuGraphNodeGetDependentNodes_v2", 12_030),
    ("cuGraphNodeSetParams_v2", 13_040),
    ("cuGraphRemoveDependencies_v2", 12_030),
    ("cuGraphicsResourceSetMapFlags_v2", 6_050),
    ("cuIpcOpenMemHandle_v2", 11_000),
    ("cuLaunchHostFunc_v2", 13_010),
    ("cuLinkAddData_v2", 6_050),
    ("cuLinkAddFile_v2", 6_050),
    ("cuLinkCreate_v2", 6_050),
    ("cuMemAdvise_v2", 12_020),
    ("cuMemHostRegister_v2", 6_050),
    ("cuMemPrefetchAsync_v2", 12_020),
    ("cuMemcpy3DBatchAsync_v2", 13_000),
    ("cuMemcpyBatchAsync_v2", 13_000),
    ("cuMulticastBindAddr_v2", 13_010),
    ("cuMulticastBindMem_v2", 13_010),
    ("cuStreamBatchMemOp_v2", 11_070),
    ("cuStreamBeginCapture_v2", 10_010),
    ("cuStreamGetCaptureInfo_v2", 11_030),
    ("cuStreamGetCaptureInfo_v3", 12_030),
    ("cuStreamGetCtx_v2", 12_050),
    ("cuStreamUpdateCaptureDependencies_v2", 12_030),
    ("cuStreamWaitValue32_v2", 11_070),
    ("cuStreamWaitValue64_v2", 11_070),
    ("cuStreamWriteValue32_v2", 11_070),
    ("cuStreamWriteValue64_v2", 11_070),
];

/// Whether a program of that version gets the form.
pub(crate) fn is_known_to(form: &str, version: i32) -> bool {
    LATER.iter().find(|(later, _)| *later == form).is_none_or(|(_, since)| *since <= version)
}
