#include <string>
#include <utility>

#include "core/error.h"
#include "core/limits.h"
#include "core/once_per_key.h"
#include "kernels/common/expired_wait.h"
#include "kernels/common/launch.h"

namespace megatron_sb::common {
namespace {

int attribute_of_device(cudaDeviceAttr attribute) {
    static OncePerKey<std::pair<int, cudaDeviceAttr>, int> values;
    const int device = current_device();
    return values.get({device, attribute}, [&] {
        int value = 0;
        check("current device", "cudaDeviceGetAttribute", cudaDeviceGetAttribute(&value, attribute, device));
        return value;
    });
}

// Without this, a launch with more than 48 KiB of shared memory fails. The static shared memory of the kernel counts
// too.
void allow_shared_memory(const char* what, const void* kernel, int bytes) {
    static OncePerKey<std::pair<int, const void*>, int> allowed;
    if (bytes == 0) return;
    allowed.get({current_device(), kernel}, [&] {
        check(what, "cudaFuncSetAttribute",
              cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        return bytes;
    });
}

// Says what to do if the driver can load neither machine code nor PTX.
const char* advice(cudaError_t error) {
    switch (error) {
        case cudaErrorNoKernelImageForDevice:
        case cudaErrorUnsupportedPtxVersion:  // the driver is older than nvcc
        case cudaErrorJitCompilerNotFound:
        case cudaErrorJitCompilationDisabled:
            return ". The kernels need sm_80 or later, and this build has no code that this GPU and driver can load. "
                   "Build with SB_CUDA_ARCHITECTURES=all, or with the number of the GPU, such as 120 for sm_120";
        default:
            return "";
    }
}

}  // namespace

void check(const char* what, const char* call, cudaError_t error) {
    if (error == cudaSuccess) return;
    cudaGetLastError();
    const std::string expired = describe_expired_waits();
    throw RuntimeFailure(concat(what, ": ", call, " failed: ", cudaGetErrorName(error), ", ", cudaGetErrorString(error),
                                advice(error), expired.empty() ? "" : ". ", expired));
}

void check_launch(const char* what) {
    check(what, "launch", cudaGetLastError());
}

int current_device() {
    int device = 0;
    check("current device", "cudaGetDevice", cudaGetDevice(&device));
    return device;
}

int num_multiprocessors() {
    return attribute_of_device(cudaDevAttrMultiProcessorCount);
}

int max_shared_bytes_per_block() {
    return attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

int resident_blocks(const char* what, const void* kernel, int threads, int shared_bytes) {
    static OncePerKey<std::pair<int, const void*>, int> values;
    return values.get({current_device(), kernel}, [&] {
        allow_shared_memory(what, kernel, shared_bytes);
        int blocks = 0;
        check(what, "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
              cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, size_t(shared_bytes)));
        return blocks;
    });
}

void launch_with(const char* what, const void* kernel, int64_t blocks, dim3 threads, int shared_bytes,
                 cudaStream_t stream, void** arguments, Start start) {
    if (blocks == 0) return;
    if (blocks > kMaxThreadBlocks)
        throw RuntimeFailure(concat(what, ": the launch needs ", blocks, " CTAs, and CUDA launches at most ",
                                    kMaxThreadBlocks, ". Split the batch or the heads."));
    allow_shared_memory(what, kernel, shared_bytes);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = threads;
    config.dynamicSmemBytes = size_t(shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = start == Start::kBeforeEnd ? 1 : 0;
    check(what, "launch", cudaLaunchKernelExC(&config, kernel, arguments));
}

}  // namespace megatron_sb::common
