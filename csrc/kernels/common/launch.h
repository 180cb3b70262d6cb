// Launches, and checked calls of the CUDA runtime.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace megatron_sb::common {

// Throws RuntimeFailure if `error`, the result of `call`, is an error. `what` names the kernels that need the call.
// Also resets the last error of this thread. Otherwise the next check_launch() would report it for another launch. If a
// wait of a kernel has expired (expired_wait.h), the message says so.
void check(const char* what, const char* call, cudaError_t error);

// Throws RuntimeFailure if the last launch of this thread failed. The message begins with `what`.
void check_launch(const char* what);

int current_device();

// Return properties of the current device, and of a kernel on it: the number of CTAs that a multiprocessor holds. The
// driver is asked once for each device and kernel, so `threads` and `shared_bytes` of a kernel must not change.
int num_multiprocessors();
int max_shared_bytes_per_block();
int resident_blocks(const char* what, const void* kernel, int threads, int shared_bytes);

// Launches `kernel` with `blocks` CTAs and `shared_bytes` of dynamic shared memory on the current device. All launches
// of a kernel on a device must have the same shared_bytes. `arguments` are pointers to the arguments of the kernel.
// Does nothing for 0 CTAs. Throws RuntimeFailure with the name `what` if there are too many CTAs for one launch, or if
// the launch fails. With kBeforeEnd its CTAs may start before the kernel before it in the stream has ended, if that
// kernel allows it (programmatic dependent launch).
enum class Start { kInOrder, kBeforeEnd };
void launch_with(const char* what, const void* kernel, int64_t blocks, dim3 threads, int shared_bytes,
                 cudaStream_t stream, void** arguments, Start start = Start::kInOrder);

template <Start kStart = Start::kInOrder, class... Parameters, class... Arguments>
void launch(const char* what, void (*kernel)(Parameters...), int64_t blocks, dim3 threads, int shared_bytes,
            cudaStream_t stream, const Arguments&... arguments) {
    const auto with_converted = [&](Parameters... converted) {
        void* pointers[] = {&converted...};
        launch_with(what, reinterpret_cast<const void*>(kernel), blocks, threads, shared_bytes, stream, pointers,
                    kStart);
    };
    with_converted(arguments...);
}

}  // namespace megatron_sb::common
