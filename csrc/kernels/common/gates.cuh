// Forget gates (core/params.h): beta = f sigmoid(z). The odds of beta are e' = f e / (1 + (1 - f) e), where e = exp(z).
// With r = 1 / (1 + (1 - f) e) and sigma = e / (1 + e),
//
//   1 - beta = (1 - sigma) / r,   dz = (1 - sigma) g - f sigma r b,   df = g / f - e r b
//
// and nothing cancels. A kernel gets the gates of a key tile as one of the types below. A thread reads the gates of its
// keys (scan.cuh) in quads of neighbouring keys. In shared memory a gate is at the accumulator column of its key.
#pragma once

#include <type_traits>

#include "kernels/common/ptx.cuh"
#include "kernels/common/scalars.h"
#include "kernels/common/tile.cuh"

namespace megatron_sb::common {

// No gates: f = 1 for every key.
struct NoGates {
    static constexpr bool kGated = false;
    struct Quad {
        __device__ float odds(float e, int) const { return e; }
    };
    __device__ Quad quad(int) const { return {}; }
};

// The gates of four neighbouring keys. Key k of the quad has the gate f[k]; e is exp(z) of that key.
struct GateQuad {
    float f[4];
    __device__ float r(float e, int k) const { return reciprocal(fmaf(1.f - f[k], e, 1.f)); }
    __device__ float odds(float e, int k) const { return f[k] * e * r(e, k); }
};

// Returns the accumulator column of a thread's key k, minus that of its key 0.
__device__ inline int column_offset(int k) {
    return 8 * (k / 2) + k % 2;
}

// Gates as the rows of k store them: the first kGateBytes after each key. The first kGateParts values sum to the gate.
inline constexpr int kGateBytes = 16;

// The words after a key that hold its gate, and the gate that they hold.
template <class T>
using GateWords = std::conditional_t<sizeof(T) == 2, uint2, float4>;
template <class T>
__device__ inline float gate_of(const GateWords<T>& words) {
    if constexpr (sizeof(T) == 2) {
        const float2 parts = unpack<T>(words.x);
        return parts.x + parts.y + unpack<T>(words.y).x;
    } else {
        return words.x + words.y + words.z;
    }
}

template <class T>
struct GateRows {
    static constexpr bool kGated = true;
    using Quad = GateQuad;
    const uint8_t* first;  // of this thread's keys

    __device__ explicit GateRows(const uint8_t* tile) : first(tile + threadIdx.x % 4 * 2 * kGateBytes) {}
    __device__ GateQuad quad(int i) const {
        GateQuad gates;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint8_t* const at = first + column_offset(4 * i + k) * kGateBytes;
            gates.f[k] = gate_of<T>(*reinterpret_cast<const GateWords<T>*>(at));
        }
        return gates;
    }
};

// Gates as fp32 values.
struct GateValues {
    static constexpr bool kGated = true;
    using Quad = GateQuad;
    const float* first;

    __device__ explicit GateValues(const float* tile) : first(tile + threadIdx.x % 4 * 2) {}
    __device__ GateQuad quad(int i) const {
        GateQuad gates;
#pragma unroll
        for (int k = 0; k < 4; ++k) gates.f[k] = first[column_offset(4 * i + k)];
        return gates;
    }
};

// The gates of a warp's tile of 32 keys: lane i has the gate of key i. All lanes call quad() together.
struct GateLanes {
    static constexpr bool kGated = true;
    using Quad = GateQuad;
    float of_lane;

    __device__ GateQuad quad(int i) const {
        GateQuad gates;
#pragma unroll
        for (int k = 0; k < 4; ++k) gates.f[k] = __shfl_sync(kAllLanes, of_lane, threadIdx.x % 4 * 8 + 4 * i + k);
        return gates;
    }
};

// Starts to copy the gates of kGroup keys for GateRows. row_of(key) returns the row of a key; keys from num_keys on get
// 0.
template <int kGroup, class RowOf>
__device__ inline void load_gates(uint32_t to, int width, int num_keys, RowOf row_of) {
    const int key = threadIdx.x;
    if (key >= kGroup) return;
    const char* const row = row_of(key < num_keys ? key : 0);
    copy_async(to + column_of_key<kGroup>(key) * kGateBytes, row + width, key < num_keys);
}
template <int kGroup>
__device__ inline void load_gates(uint32_t to, const HeadRows& keys, int num_keys) {
    load_gates<kGroup>(to, keys.width, num_keys, [&](int key) { return keys.data + key * keys.stride; });
}

// Returns one gate, read from the columns after its key in global memory.
template <class T>
__device__ inline float read_gate(const HeadRows& key) {
    const T* const parts = reinterpret_cast<const T*>(key.data + key.width);
    return float(parts[0]) + float(parts[1]) + float(parts[2]);
}

// Adds the values of pairs of lanes. A lane keeps the sums of one half of the first 2 kHalf values, its partner those
// of the other half.
template <int kHalf>
__device__ inline void add_halves(float (&x)[16]) {
    const bool upper = threadIdx.x & (2 * kHalf);
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
        const float other = __shfl_xor_sync(kAllLanes, upper ? x[k] : x[k + kHalf], 2 * kHalf);
        x[k] = (upper ? x[k + kHalf] : x[k]) + other;
    }
}
// Sums x, one value for each of this thread's keys, over the rows of the warp. Lane 4g + t adds the results of its keys
// 2g and 2g + 1 to `sum`.
__device__ inline void sum_over_rows(float (&x)[16], float (&sum)[2]) {
    add_halves<8>(x);
    add_halves<4>(x);
    add_halves<2>(x);
    sum[0] += x[0];
    sum[1] += x[1];
}

static_assert(kGateParts == 3, "gate_of(), quad() and read_gate() add three parts");

}  // namespace megatron_sb::common
