// Forget gates: beta = f sigmoid(z) (core/params.h). fwd_gated_scan.cuh says how the forward computes weights from f.
// The backward uses the odds of beta. With E = 1 / e = 2^(-scale log2(e) q . k) and c = (1 - f) / f, these are
//
//     e' = f e / (1 + (1 - f) e) = 1 / (E + c (1 + E))
//
// so nothing cancels. All that its scans say about e holds for e'. The gradients of z and f are
//
//     dz = n w     df = sum of n over the rows / f     n = g - e' b     w = 1 / (1 + e) = E / (1 + E)
//
// f is read from the columns after each key. In the forward a warp of the producers writes it to shared memory; in the
// backward the warpgroup that scans the keys writes c there.
#pragma once

#include "kernels/common/gates.cuh"
#include "kernels/hopper/ptx.cuh"
#include "kernels/hopper/tile_copy.cuh"

namespace megatron_sb::hopper {

// The forget gate of a key as c.
struct Gate {
    // Lower bound, for f = 1. With c = 0, c (1 + E) would be NaN if E is infinite, as for hidden keys.
    static constexpr float kLeastC = 0x1p-126f;

    // The words in which the gate of a key is stored. The key begins `offset` bytes after the start of k.
    __device__ __forceinline__ static uint2 words(const Rows<const void*>& k, int64_t offset, int head_dim) {
        return *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(k.data) + offset + 2 * head_dim);
    }
    template <class Element>
    __device__ __forceinline__ static float c_of(uint2 words) {
        static_assert(kGateParts == 3);
        const float2 parts = common::unpack<Element>(words.x);
        const float third = common::unpack<Element>(words.y).x;
        const float f = parts.x + parts.y + third, one_minus_f = 1.f - parts.x - parts.y - third;
        return common::max_nan(one_minus_f / f, kLeastC);
    }
    // Returns 1 / f, or 1 / kLeastGate if f is less.
    __device__ __forceinline__ static float inverse(float c) { return fminf(1.f + c, 1.f / kLeastGate); }
    // Returns e'. In the form c (1 + E), ptxas would keep 1 + E in registers from one pass of a scan to the next.
    __device__ __forceinline__ static float odds(float c, float inverse_e) {
        return reciprocal(fmaf(c, inverse_e, inverse_e + c));
    }
};

// Writes the gradient of a gate to the first column of dk after its key, and zeros to the other ones.
template <class Element>
__device__ __forceinline__ void write_gate_columns(Element* to, float gradient) {
    static_assert(kGateColumns * sizeof(Element) == sizeof(uint4));
    *reinterpret_cast<uint4*>(to) = make_uint4(pack<Element>(gradient, 0.f), 0, 0, 0);
}
__device__ __forceinline__ void write_gate_columns(float* to, float gradient) {
    static_assert(kGateColumns * sizeof(float) == 2 * sizeof(float4));
    reinterpret_cast<float4*>(to)[0] = make_float4(gradient, 0.f, 0.f, 0.f);
    reinterpret_cast<float4*>(to)[1] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// A number for each key that a quad of threads scans: f in the forward, c in the backward. Thread t has kKeys / 4
// neighbouring keys. The threads of a quad read the same four of their keys at once, so these 16 numbers lie next to
// each other.
template <int kKeys>
struct GateTile {
    float4 numbers[kKeys / 4];

    __device__ __forceinline__ float& operator[](int key) {
        constexpr int kKeysPerThread = kKeys / 4;
        const int t = key / kKeysPerThread, i = key % kKeysPerThread;
        return reinterpret_cast<float*>(numbers)[(i / 4 * 4 + t) * 4 + i % 4];
    }
    // Returns the numbers of the keys 4i to 4i + 3 of thread t. Volatile, because the compiler would otherwise read all
    // of them early and run out of registers.
    __device__ __forceinline__ float4 quad(int t, int i) const {
        float4 x;
        asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                     : "r"(shared_address(numbers + 4 * i + t)));
        return x;
    }
    // The same for two keys, from the even key k of the thread on.
    __device__ __forceinline__ float2 pair(int t, int k) const {
        float2 x;
        asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(x.x), "=f"(x.y)
                     : "r"(shared_address(numbers + k / 4 * 4 + t) + k % 4 * 4));
        return x;
    }
};

__device__ __forceinline__ float component(const float4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

}  // namespace megatron_sb::hopper
