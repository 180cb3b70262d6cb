#include "dispatch/table.h"

#include "core/error.h"
#include "kernels/cpu/cpu.h"

namespace megatron_sb::dispatch {
namespace {

constexpr int kMaxHeadDim = 256;

bool cpu_serves(const Request& r) {
    return r.device == Device::kCpu && r.head_dim % 8 == 0 && r.head_dim_v % 8 == 0 && r.head_dim <= kMaxHeadDim &&
           r.head_dim_v <= kMaxHeadDim;
}

constexpr Kernels kTable[] = {
    {"cpu", cpu_serves, "CPU; fp32, fp64, bf16, fp16; head_dim and head_dim_v: multiples of 8 up to 256",
     [](const ForwardParams& params, void*) { cpu::block_forward(params); },
     [](const BackwardParams& params, void*) { cpu::block_backward(params); }},
};

std::string describe(const Request& r) {
    const std::string where = r.device == Device::kCpu ? "CPU" : concat("CUDA sm_", r.architecture);
    return concat(where, ", ", name_of(r.dtype), ", head_dim ", r.head_dim, ", head_dim_v ", r.head_dim_v);
}

}  // namespace

const char* name_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::kFloat32:
            return "fp32";
        case Dtype::kFloat64:
            return "fp64";
        case Dtype::kBFloat16:
            return "bf16";
        case Dtype::kFloat16:
            return "fp16";
    }
    return "unknown dtype";
}

const Kernels& find(const Request& request) {
    for (const Kernels& kernels : kTable)
        if (kernels.serves(request)) return kernels;
    const char* build = request.device == Device::kCuda && !built_with_cuda() ? " (a CPU build)" : "";
    throw InvalidArgument(
        concat("no attention kernel for ", describe(request), ". This build", build, " has:\n", describe()));
}

std::string describe() {
    std::string text;
    for (const Kernels& kernels : kTable) text += concat("  ", kernels.name, ": ", kernels.what, "\n");
    return text;
}

std::string instruction_set() {
    return cpu::instruction_set();
}

bool built_with_cuda() {
#if defined(SB_WITH_CUDA)
    return true;
#else
    return false;
#endif
}

}  // namespace megatron_sb::dispatch
