// Options in the form that the GPU kernels use. All kernels share this form: a restart record must mean the same to the
// kernel that writes it and the kernel that reads it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <type_traits>

#include "core/params.h"
#include "kernels/common/ptx.cuh"

namespace megatron_sb::common {

using BFloat16 = __nv_bfloat16;
using Half = __half;

inline constexpr float kLargestE = 0x1p126f;  // bound of e in the key-by-key path; 1 / (1 + e) is still a normal number
inline constexpr double kLog2E = 1.44269504088896340736;
inline constexpr float kRestartFloor = 0x1p-64f;  // restart records have at least this mass, also without skipping
// fp16 has few bits for weights of 1e-5. The mass, and therefore every A, is multiplied by this factor; o and dv are
// divided by it at the end.
template <class T>
inline constexpr float kWeightScale = std::is_same_v<T, Half> ? 0x1p15f : 1.f;

// The logits of one head, in units of log(2): z = q . k * scale + offset.
struct HeadLogits {
    float scale, offset;
    __device__ float operator()(float q_k, int, int) const { return fmaf(q_k, scale, offset); }
};

// How far the heads reach (core/params.h).
struct Reach {
    float first, step;
    // Returns the offset of the logits of a head, in units of log(2): -log2(2^a - 1).
    __device__ float offset_of(int head) const {
        const float a = fmaf(float(head), step, first);
        return a == float(kNoReach) ? 0.f : -log2_approximate(exp2_approximate(a) - 1.f);
    }
};

// Options in fp32. Masses are multiplied by kWeightScale.
struct Scalars {
    float scale, scale_log2e;
    Reach reach;
    float hidden;         // q . k of a masked key: its e is 0, whatever the sign of the scale
    float least_mass;     // a row with less mass skips older keys
    float least_restart;  // least mass of a restart record

    __device__ HeadLogits logits_of(int head) const { return {scale_log2e, reach.offset_of(head)}; }
};
template <class T>
Scalars scalars_of(const Options& options) {
    const float threshold = float(options.mass_threshold);
    Scalars s;
    s.scale = float(options.scale);
    s.scale_log2e = float(options.scale * kLog2E);
    if (s.scale_log2e == 0.f) s.scale_log2e = FLT_MIN;  // because 0 * hidden is NaN
    s.reach = {float(options.reach), float(options.reach_step)};
    s.hidden = s.scale_log2e > 0.f ? -INFINITY : INFINITY;
    s.least_mass = kWeightScale<T> * std::max(threshold, FLT_MIN);
    s.least_restart = kWeightScale<T> * std::max(threshold, kRestartFloor);
    return s;
}

}  // namespace megatron_sb::common
