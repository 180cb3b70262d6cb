// Which kernels serve what: one table, searched from the fastest to the most general.
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
    const char* what;  // `serves` in words
    // Bytes that a forward needs; bytes that a backward can use, at most `limit` where it can do with so little.
    int64_t (*forward_workspace)(const ForwardParams&);
    int64_t (*backward_workspace)(const BackwardParams&, int64_t limit);
    void (*forward)(const ForwardParams&, void* stream);
    void (*backward)(const BackwardParams&, void* stream);
    bool narrow_gradients;  // grad_dtype may be sizes.dtype
};

const char* name_of(Dtype dtype);

// The first entry that serves the request. Throws InvalidArgument that says what was asked and what there is.
const Kernels& find(const Request& request);

// Whether the decode kernel (kernels/decode) serves the request; what it does not serve goes through the table.
bool decode_serves(const Request& request);

// The table in words, a line an entry, fastest first; then what the decode kernel serves.
std::string describe();

// The instruction set that the CPU kernels use here.
std::string instruction_set();

// True when this build holds CUDA code at all.
bool built_with_cuda();

}  // namespace megatron_sb::dispatch
