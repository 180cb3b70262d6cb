// One table of kernels, searched from the fastest to the most general.
#pragma once

#include <string>

#include "core/params.h"

namespace megatron_sb::dispatch {

enum class Device : int8_t { kCpu, kCuda };

struct Request {
    Device device;
    int architecture;  // compute capability times ten (90 for sm_90); 0 on CPU
    Dtype dtype;
    int head_dim, head_dim_v;
    bool forget_gate = false;
};

struct Kernels {
    const char* name;
    bool (*serves)(const Request&);
    const char* description;  // of the requests that it serves
    // Workspace in bytes. A backward exceeds `limit` only if it cannot run with less.
    int64_t (*forward_workspace)(const ForwardParams&);
    int64_t (*backward_workspace)(const BackwardParams&, int64_t limit);
    void (*forward)(const ForwardParams&, void* stream);
    void (*backward)(const BackwardParams&, void* stream);
    bool narrow_gradients;  // grad_dtype can be sizes.dtype
};

const char* name_of(Dtype dtype);

// The first entry that serves the request. If none does, throws InvalidArgument with the request and the table.
const Kernels& find(const Request& request);

// Whether the decode kernel (kernels/decode) serves the request. The kernels of the table serve all other requests.
bool decode_serves(const Request& request);

// The table as text, one line for each entry, fastest first; then the decode kernel.
std::string describe();

// The instruction set that the CPU kernels use on this machine.
std::string instruction_set();

// Whether this build contains CUDA kernels.
bool built_with_cuda();

}  // namespace megatron_sb::dispatch
