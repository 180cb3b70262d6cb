// The table of all kernels that implement block_forward and block_backward. A search goes from the fastest kernels to
// the most general ones.
#pragma once

#include <string>

#include "core/params.h"

namespace megatron_sb::dispatch {

enum class Device : int8_t { kCpu, kCuda };

// The properties of a call that determine its kernels.
struct Request {
    Device device;
    int architecture;  // compute capability times ten (90 for sm_90); 0 on CPU
    Dtype dtype;
    int head_dim, head_dim_v;
    bool forget_gate = false;
    bool key_blocks = false;  // a forward whose keys are in blocks
    int bias_columns = 0;     // Sizes::bias_columns
};

struct Kernels {
    const char* name;
    bool (*serves)(const Request&);
    std::string (*description)();  // of the requests that they serve
    // Size of the workspace in bytes. The backward exceeds `limit` only if it cannot run with less.
    int64_t (*forward_workspace)(const ForwardParams&);
    int64_t (*backward_workspace)(const BackwardParams&, int64_t limit);
    void (*forward)(const ForwardParams&, void* stream);
    void (*backward)(const BackwardParams&, void* stream);
    bool writes_gradients;  // the backward overwrites gradients, in either type (BackwardParams)
};

// Returns "fp32", "fp64", "bf16" or "fp16".
const char* name_of(Dtype dtype);

// Returns the first entry that serves the request. Throws InvalidArgument with the request and the table if none does.
const Kernels& find(const Request& request);

// Returns whether the decode kernel (kernels/decode) serves a call with a KV cache. block_forward serves all others.
bool decode_serves(const Request& request);

// Returns the table as text: one line for each entry, fastest first, then one for the decode kernel.
std::string describe();

// Returns the instruction set that the CPU kernels use on this machine.
std::string instruction_set();

// Returns whether this build contains CUDA kernels.
bool built_with_cuda();

}  // namespace megatron_sb::dispatch
