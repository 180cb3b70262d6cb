#include "ops/side_stream.h"

#if defined(SB_WITH_CUDA)
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <exception>
#include <mutex>
#include <unordered_map>

#include "kernels/common/launch.h"
#endif

namespace megatron_sb::ops {
namespace {

#if defined(SB_WITH_CUDA)
using c10::cuda::CUDAStream;

// Returns the side stream of `main`. It exists until the process ends. It does not come from torch's pool of streams,
// because other code can use the streams of the pool.
CUDAStream side_of(const CUDAStream& main) {
    static std::mutex mutex;
    static std::unordered_map<CUDAStream, CUDAStream> sides;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto known = sides.find(main);
    if (known != sides.end()) return known->second;
    const c10::cuda::CUDAGuard guard(main.device());
    cudaStream_t stream = nullptr;
    common::check("two streams", "cudaStreamCreateWithFlags",
                  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return sides.emplace(main, c10::cuda::getStreamFromExternal(stream, main.device_index())).first->second;
}

void side_by_side_on_gpu(c10::Device device, c10::function_ref<void()> first,
                         c10::function_ref<std::vector<at::Tensor>()> second) {
    const CUDAStream main = c10::cuda::getCurrentCUDAStream(device.index()), side = side_of(main);
    at::cuda::CUDAEvent begin, end;
    begin.record(main);
    first();
    begin.block(side);
    std::vector<at::Tensor> tensors;
    std::exception_ptr error;
    try {
        const c10::cuda::CUDAStreamGuard guard(side);
        tensors = second();
    } catch (...) {
        error = std::current_exception();  // `main` waits even then: what second() has queued still runs
    }
    end.record(side);
    end.block(main);
    if (error) std::rethrow_exception(error);
    // The allocator gives memory of the side stream to later calls of second(). They must not overwrite what `main`
    // still reads.
    for (const at::Tensor& tensor : tensors) {
        if (tensor.defined()) tensor.record_stream(main);
    }
}
#endif

}  // namespace

void side_by_side([[maybe_unused]] c10::Device device, c10::function_ref<void()> first,
                  c10::function_ref<std::vector<at::Tensor>()> second) {
#if defined(SB_WITH_CUDA)
    if (device.is_cuda()) return side_by_side_on_gpu(device, first, second);
#endif
    first();
    second();
}

}  // namespace megatron_sb::ops
