// Options as the GPU kernels use them, all of them alike: a restart that one kernel records has to mean the same to the
// one that reads it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <type_traits>

#include "core/params.h"

namespace megatron_sb::portable {

using BFloat16 = __nv_bfloat16;
using Half = __half;

inline constexpr float kLargestE = 0x1p126f;  // of a key that is taken by itself; 1 / (1 + e) is still a normal number
inline constexpr double kLog2E = 1.44269504088896340736;
inline constexpr float kRestartFloor = 0x1p-64f;
// fp16 has few bits left for weights of 1e-5: the mass, and so every A, is carried times this, and o and dv are divided
// by it in the end.
template <class T>
inline constexpr float kWeightScale = std::is_same_v<T, Half> ? 0x1p15f : 1.f;

// Options as a kernel uses them: in fp32, masses times kWeightScale.
struct Scalars {
    float scale, scale_log2e;
    float hidden;         // q . k of a key that a row does not see: its e is 0, whatever the sign of the scale
    float least_mass;     // a row with less is used up
    float least_restart;  // no restart with less
};
template <class T>
Scalars scalars_of(const Options& options) {
    const float threshold = float(options.mass_threshold);
    Scalars s;
    s.scale = float(options.scale);
    s.scale_log2e = float(options.scale * kLog2E);
    if (s.scale_log2e == 0.f) s.scale_log2e = FLT_MIN;  // `hidden` times this stays infinite
    s.hidden = s.scale_log2e > 0.f ? -INFINITY : INFINITY;
    s.least_mass = kWeightScale<T> * std::max(threshold, FLT_MIN);
    s.least_restart = kWeightScale<T> * std::max(threshold, kRestartFloor);
    return s;
}

}  // namespace megatron_sb::portable
