#include "dispatch/table.h"

#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "core/limits.h"
#include "kernels/cpu/cpu.h"

#if defined(SB_WITH_CUDA)
#include "kernels/decode/decode.h"
#include "kernels/portable/portable.h"
#endif
#if defined(SB_WITH_HOPPER)
#include "kernels/hopper/hopper.h"
#endif

namespace megatron_sb::dispatch {
namespace {

bool head_dims_fit(const Request& r) {
    return is_supported_head_dim(r.head_dim) && is_supported_head_dim(r.head_dim_v);
}

std::string supported_head_dims() {
    return concat("head_dim and head_dim_v: multiples of ", kHeadDimMultiple, " up to ", kMaxHeadDim);
}

bool cpu_serves(const Request& r) {
    return r.device == Device::kCpu && head_dims_fit(r);
}

#if defined(SB_WITH_CUDA)
bool portable_serves(const Request& r) {
    return r.device == Device::kCuda && r.architecture >= 80 && r.dtype != Dtype::kFloat64 && head_dims_fit(r);
}
#endif

#if defined(SB_WITH_HOPPER)
bool is_half(Dtype dtype) {
    return dtype == Dtype::kBFloat16 || dtype == Dtype::kFloat16;
}
bool hopper_serves(const Request& r) {
    return r.device == Device::kCuda && r.architecture == 90 && is_half(r.dtype) && head_dims_fit(r) &&
           !(r.forget_gate && hopper::is_wide(r.head_dim, r.head_dim_v, r.bias_columns)) && !r.key_blocks;
}
#endif

constexpr Kernels kTable[] = {
#if defined(SB_WITH_HOPPER)
    {"hopper", hopper_serves,
     [] {
         return concat("CUDA sm_90; bf16, fp16; head_dim and head_dim_v: multiples of ", kHeadDimMultiple, " up to ",
                       hopper::kMostColumns, ", with forget gates up to ", hopper::kMostGatedColumns, " (",
                       hopper::kMostGatedColumns + kBiasColumns, " with biases); no paged cache");
     },
     hopper::forward_workspace, hopper::backward_workspace, hopper::block_forward, hopper::block_backward, true},
#endif
#if defined(SB_WITH_CUDA)
    {"portable", portable_serves,
     [] { return concat("CUDA sm_80 and later; fp32, bf16, fp16; ", supported_head_dims()); },
     portable::forward_workspace, portable::backward_workspace, portable::block_forward, portable::block_backward,
     false},
#endif
    {"cpu", cpu_serves, [] { return concat("CPU; fp32, fp64, bf16, fp16; ", supported_head_dims()); },
     [](const ForwardParams& params) { return cpu::forward_workspace(params); },
     [](const BackwardParams& params, int64_t limit) { return cpu::backward_workspace(params, limit); },
     [](const ForwardParams& params, void*) { cpu::block_forward(params); },
     [](const BackwardParams& params, void*) { cpu::block_backward(params); }, false},
};

std::string describe(const Request& r) {
    const std::string where = r.device == Device::kCpu ? "CPU" : concat("CUDA sm_", r.architecture);
    return concat(where, ", ", name_of(r.dtype), ", head_dim ", r.head_dim, ", head_dim_v ", r.head_dim_v,
                  r.bias_columns > 0 ? " with biases" : "", r.forget_gate ? ", forget gates" : "",
                  r.key_blocks ? ", keys in blocks" : "");
}

// MEGATRON_SB_KERNELS=portable disables the Hopper and decode kernels, for comparisons and as a workaround.
bool only_portable() {
    static const bool portable = [] {
        const char* const wanted = std::getenv("MEGATRON_SB_KERNELS");
        if (wanted == nullptr || *wanted == 0) return false;
        if (std::strcmp(wanted, "portable") != 0)
            throw InvalidArgument(concat("MEGATRON_SB_KERNELS must be portable or not be set, got '", wanted, "'"));
        return true;
    }();
    return portable;
}
bool disabled(const Kernels& kernels) {
    return only_portable() && std::strcmp(kernels.name, "hopper") == 0;
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
        if (kernels.serves(request) && !disabled(kernels)) return kernels;
    const char* build = request.device == Device::kCuda && !built_with_cuda() ? " (a CPU build)" : "";
    throw InvalidArgument(
        concat("no attention kernel for ", describe(request), ". This build", build, " has:\n", describe()));
}

bool decode_serves(const Request& request) {
#if defined(SB_WITH_CUDA)
    return portable_serves(request) && !only_portable();
#else
    (void)request;
    return false;
#endif
}

std::string describe() {
    constexpr const char* kDisabled = "disabled by MEGATRON_SB_KERNELS. Otherwise: ";
    std::string text;
    for (const Kernels& kernels : kTable)
        text += concat("  ", kernels.name, ": ", disabled(kernels) ? kDisabled : "", kernels.description(), "\n");
#if defined(SB_WITH_CUDA)
    text +=
        concat("  decode: ", only_portable() ? kDisabled : "", "a KV cache on CUDA sm_80 and later; bf16, fp16, fp32; ",
               supported_head_dims(), "; at most ", decode::kMaxQueryRows,
               " query rows for each KV head. The kernels above serve all other requests.\n");
#endif
    return text;
}

std::string instruction_set() {
    return cpu::name_of(cpu::level_in_use());
}

bool built_with_cuda() {
#if defined(SB_WITH_CUDA)
    return true;
#else
    return false;
#endif
}

}  // namespace megatron_sb::dispatch
