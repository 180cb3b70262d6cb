// Memory bandwidth limits these kernels: the forward reads x once and writes x' once. kLanes neighbouring lanes own a
// row of a head, with 8 channels each, one load of 16 bytes.
#include <type_traits>

#include "kernels/common/launch.h"
#include "kernels/common/ptx.cuh"
#include "kernels/common/scalars.h"
#include "kernels/extend/extend.h"

namespace megatron_sb::extend {
namespace {

constexpr int kThreads = 256;
constexpr int kChannels = 8;  // of a lane, and columns of biases or of gates
static_assert(kGateParts == 3 && kGateColumns == kChannels);

// The row of a head and the channels that belong to a thread.
template <int kLanes>
struct Place {
    int batch, row, head, lane;
    int64_t value;  // place in a contiguous tensor (batch, rows, num_heads)
    bool exists;    // the row

    __device__ explicit Place(const Params& p) {
        value = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
        lane = threadIdx.x % kLanes;
        exists = value < int64_t(p.batch) * p.rows * p.num_heads;
        if (!exists) value = 0;
        // Divisions of 64 bits take longer than the loads and stores of the thread.
        if (value >> 32 == 0)
            locate(uint32_t(value), uint32_t(p.num_heads), uint32_t(p.rows));
        else
            locate(value, int64_t(p.num_heads), int64_t(p.rows));
    }
    template <class T, class Pointer>
    __device__ auto in(const Rows<Pointer>& tensor, int channel) const {
        using Element = std::conditional_t<std::is_same_v<Pointer, void*>, T, const T>;
        return static_cast<Element*>(tensor.data) + batch * tensor.batch_stride + row * tensor.row_stride +
               head * tensor.head_stride + channel;
    }

  private:
    template <class Integer>
    __device__ void locate(Integer index, Integer num_heads, Integer rows) {
        const Integer row_of_all = index / num_heads;
        head = int(index - row_of_all * num_heads);
        batch = int(row_of_all / rows);
        row = int(row_of_all - batch * rows);
    }
};

struct Eight {
    float x[kChannels];
};

template <class T>
__device__ Eight load(const T* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    const float2 pairs[4] = {common::unpack<T>(words.x), common::unpack<T>(words.y), common::unpack<T>(words.z),
                             common::unpack<T>(words.w)};
    return {{pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y, pairs[2].x, pairs[2].y, pairs[3].x, pairs[3].y}};
}
template <class T>
__device__ void store(T* to, const Eight& v) {
    *reinterpret_cast<uint4*>(to) = make_uint4(common::pack<T>(v.x[0], v.x[1]), common::pack<T>(v.x[2], v.x[3]),
                                               common::pack<T>(v.x[4], v.x[5]), common::pack<T>(v.x[6], v.x[7]));
}

// Writes x in kGateParts numbers of 8 bits each, in the first columns. A NaN stays NaN.
__device__ void split(float x, Eight& columns) {
#pragma unroll
    for (int i = 0; i < kGateParts; ++i) {
        const float part = __bfloat162float(__float2bfloat16_rn(x));
        columns.x[i] = part;
        x -= part;
    }
}
// Returns x in [low, high], or NaN.
__device__ float clamped(float x, float low, float high) {
    return common::min_nan(common::max_nan(x, low), high);
}

__device__ int number_column(Side side) {
    return side == Side::kQuery ? 0 : kGateParts;
}

template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads)
    append_columns(const __grid_constant__ Params p, const __grid_constant__ Rows<void*> extended) {
    const Place<kLanes> place(p);
    const int channel = place.lane * kChannels;
    const bool has_channels = place.exists && channel < p.head_dim;
    Eight x = {};
    if (has_channels) x = load(place.template in<T>(p.x, channel));
    float number = 0.f;
    if (p.norms) {
#pragma unroll
        for (float value : x.x) number = fmaf(value, value, number);
#pragma unroll
        for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) number += __shfl_xor_sync(common::kAllLanes, number, lanes);
        number = -number / p.unit;
        if (p.side == Side::kQuery)
#pragma unroll
            for (float& value : x.x) value *= 2.f;
    }
    if (has_channels) store(place.template in<T>(extended, channel), x);
    if (p.side != Side::kNone && place.exists && place.lane == 0) {
        if (p.bias != nullptr) number += p.bias[place.value] / p.scale / p.unit;
        Eight parts = {}, columns = {};
        split(clamped(number, -p.largest, p.largest), parts);
        const bool query = p.side == Side::kQuery;
#pragma unroll
        for (int i = 0; i < kGateParts; ++i) {  // an index that depends on the side would put the array into memory
            columns.x[i] = query ? parts.x[i] : p.unit;
            columns.x[kGateParts + i] = query ? p.unit : parts.x[i];
        }
        store(place.template in<T>(extended, p.head_dim), columns);
    }
    if (p.gate != nullptr && place.exists && place.lane == kLanes - 1) {
        Eight columns = {};
        split(clamped(p.gate[place.value], p.least_gate, 1.f), columns);
        store(place.template in<T>(extended, p.head_dim + (p.side == Side::kNone ? 0 : kChannels)), columns);
    }
}

// The gradient of a number is that of its first column. |x|^2 has the gradient 2x.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads)
    gradient_of_norms(const __grid_constant__ Params p, const __grid_constant__ Rows<const void*> d_extended,
                      const __grid_constant__ Rows<void*> d_x) {
    const Place<kLanes> place(p);
    const int channel = place.lane * kChannels;
    if (!place.exists || channel >= p.head_dim) return;
    const float of_norm = -float(*place.template in<T>(d_extended, p.head_dim + number_column(p.side))) / p.unit;
    const float twice = p.side == Side::kQuery ? 2.f : 1.f;
    // Rows after the last document have gradients of 0, whatever they hold: 0 times infinity would be NaN.
    Eight x = {};
    if (of_norm != 0.f) x = load(place.template in<T>(p.x, channel));
    Eight d = load(place.template in<T>(d_extended, channel));
#pragma unroll
    for (int i = 0; i < kChannels; ++i) d.x[i] = fmaf(x.x[i], of_norm * (2.f / twice), d.x[i] * twice);
    store(place.template in<T>(d_x, channel), d);
}

// Calls f(element, lanes) with the types for `p`.
template <class F>
void with_instance(const Params& p, const F& f) {
    const auto with_lanes = [&](auto element) {
        if (p.head_dim <= 64) return f(element, std::integral_constant<int, 8>{});
        if (p.head_dim <= 128) return f(element, std::integral_constant<int, 16>{});
        return f(element, std::integral_constant<int, 32>{});
    };
    p.dtype == Dtype::kBFloat16 ? with_lanes(common::BFloat16{}) : with_lanes(common::Half{});
}
int64_t blocks_of(const Params& p, int lanes) {
    return (int64_t(p.batch) * p.rows * p.num_heads * lanes + kThreads - 1) / kThreads;
}

}  // namespace

void forward(const Params& p, const Rows<void*>& extended, void* stream) {
    with_instance(p, [&](auto element, auto lanes) {
        common::launch("extend_forward", append_columns<decltype(element), lanes()>, blocks_of(p, lanes()), kThreads, 0,
                       static_cast<cudaStream_t>(stream), p, extended);
    });
}

void backward(const Params& p, const Rows<const void*>& d_extended, const Rows<void*>& d_x, void* stream) {
    with_instance(p, [&](auto element, auto lanes) {
        common::launch("extend_backward", gradient_of_norms<decltype(element), lanes()>, blocks_of(p, lanes()),
                       kThreads, 0, static_cast<cudaStream_t>(stream), p, d_extended, d_x);
    });
}

}  // namespace megatron_sb::extend
