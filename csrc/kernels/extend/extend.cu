// Memory bandwidth limits these kernels: the forward reads x once and writes x' once. kLanes neighbouring lanes own a
// row of a head, with 8 channels each, one load of 16 bytes. A thread has several rows, so that several loads are in
// flight: kRows if it loads x alone, half of that if it loads two tensors. More rows are slower.
#include <type_traits>

#include "kernels/common/launch.h"
#include "kernels/common/ptx.cuh"
#include "kernels/common/scalars.h"
#include "kernels/extend/extend.h"

namespace megatron_sb::extend {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 4, kRowsOfTwo = 2;  // of a thread
constexpr int kChannels = 8;              // of a lane, and columns of biases or of gates
static_assert(kGateParts == 3 && kGateColumns == kChannels);

// A row of a head and the channels that belong to a thread.
template <int kLanes>
struct Place {
    int batch, row, head, lane;
    int64_t value;  // place in a contiguous tensor (batch, rows, num_heads)
    bool exists;    // the row

    Place() = default;
    // Row i of the `rows` of the thread. Neighbouring threads have neighbouring rows.
    __device__ Place(const Params& p, int rows, int i) {
        value = ((int64_t(blockIdx.x) * rows + i) * kThreads + threadIdx.x) / kLanes;
        lane = threadIdx.x % kLanes;
        exists = value < int64_t(p.batch) * p.rows * p.num_heads;
        if (!exists) value = 0;
        // Divisions of 64 bits take longer than the loads and stores of the thread.
        if (value >> 32 == 0)
            locate(uint32_t(value), uint32_t(p.num_heads), uint32_t(p.rows));
        else
            locate(value, int64_t(p.num_heads), int64_t(p.rows));
    }
    __device__ int channel() const { return lane * kChannels; }  // the first one
    __device__ bool has(const Params& p) const { return exists && channel() < p.head_dim; }
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
__device__ uint4 load(const T* from) {
    return *reinterpret_cast<const uint4*>(from);
}
template <class T>
__device__ Eight unpacked(const uint4& words) {
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

// Writes the row of x' at `place`. `x` has the channels of this thread.
template <class T, int kLanes>
__device__ void append_to_row(const Params& p, const Rows<void*>& extended, const Place<kLanes>& place, Eight x) {
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
    if (place.has(p)) store(place.template in<T>(extended, place.channel()), x);
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
        const int end = p.head_dim + (p.gate != nullptr ? 2 : 1) * kChannels;  // another lane writes the gates
        if (p.padded) store(place.template in<T>(extended, end), Eight{});
    }
    if (p.gate != nullptr && place.exists && place.lane == kLanes - 1) {
        Eight columns = {};
        split(clamped(p.gate[place.value], p.least_gate, 1.f), columns);
        store(place.template in<T>(extended, p.head_dim + (p.side == Side::kNone ? 0 : kChannels)), columns);
    }
}

template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads)
    append_columns(const __grid_constant__ Params p, const __grid_constant__ Rows<void*> extended) {
    Place<kLanes> places[kRows];
    uint4 rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        places[i] = Place<kLanes>(p, kRows, i);
        rows[i] = places[i].has(p) ? load(places[i].template in<T>(p.x, places[i].channel())) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) append_to_row<T>(p, extended, places[i], unpacked<T>(rows[i]));
}

// The gradient of a number is that of its first column. |x|^2 has the gradient 2x.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads)
    gradient_of_norms(const __grid_constant__ Params p, const __grid_constant__ Rows<const void*> d_extended,
                      const __grid_constant__ Rows<void*> d_x) {
    Place<kLanes> places[kRowsOfTwo];
    float of_norms[kRowsOfTwo];
    uint4 x[kRowsOfTwo], d[kRowsOfTwo];
#pragma unroll
    for (int i = 0; i < kRowsOfTwo; ++i) {
        const Place<kLanes>& place = places[i] = Place<kLanes>(p, kRowsOfTwo, i);
        if (!place.has(p)) continue;
        of_norms[i] = -float(*place.template in<T>(d_extended, p.head_dim + number_column(p.side))) / p.unit;
        x[i] = load(place.template in<T>(p.x, place.channel()));
        d[i] = load(place.template in<T>(d_extended, place.channel()));
    }
    const float twice = p.side == Side::kQuery ? 2.f : 1.f;
#pragma unroll
    for (int i = 0; i < kRowsOfTwo; ++i) {
        if (!places[i].has(p)) continue;
        // Rows after the last document have gradients of 0, whatever they hold: 0 times infinity would be NaN.
        const Eight of_x = of_norms[i] != 0.f ? unpacked<T>(x[i]) : Eight{};
        Eight sum = unpacked<T>(d[i]);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) sum.x[c] = fmaf(of_x.x[c], of_norms[i] * (2.f / twice), sum.x[c] * twice);
        store(places[i].template in<T>(d_x, places[i].channel()), sum);
    }
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
int64_t blocks_of(const Params& p, int lanes, int rows_of_thread) {
    const int64_t threads = int64_t(kThreads) * rows_of_thread;
    return (int64_t(p.batch) * p.rows * p.num_heads * lanes + threads - 1) / threads;
}

}  // namespace

void forward(const Params& p, const Rows<void*>& extended, void* stream) {
    with_instance(p, [&](auto element, auto lanes) {
        common::launch("extend_forward", append_columns<decltype(element), lanes()>, blocks_of(p, lanes(), kRows),
                       kThreads, 0, static_cast<cudaStream_t>(stream), p, extended);
    });
}

void backward(const Params& p, const Rows<const void*>& d_extended, const Rows<void*>& d_x, void* stream) {
    with_instance(p, [&](auto element, auto lanes) {
        common::launch("extend_backward", gradient_of_norms<decltype(element), lanes()>,
                       blocks_of(p, lanes(), kRowsOfTwo), kThreads, 0, static_cast<cudaStream_t>(stream), p, d_extended,
                       d_x);
    });
}

}  // namespace megatron_sb::extend
