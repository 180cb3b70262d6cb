// Memory bandwidth limits these kernels. The forward reads o once and writes out once. The backward reads o and d_out,
// writes d_o, and computes mean and deviation again. kLanes neighbouring lanes own a row of a head, with 8 channels
// each. A CTA has rows of one head, so a thread keeps its channels of r, w and c in registers, and sums their gradients
// there. Each CTA writes its sums to the workspace, and a second launch adds them in a fixed order.
//
//   x^ = (x - mean) / sqrt(var + eps),  g = d_out w,  dx = (g - mean(g) - x^ mean(g x^)) / sqrt(var + eps)
//   d_o = dx,  dP = sum over channels of dx r;   over rows:  dr = sum P dx,  dw = sum d_out x^,  dc = sum d_out
#include <algorithm>

#include "kernels/common/launch.h"
#include "kernels/common/ptx.cuh"
#include "kernels/head_output/head_output.h"

namespace megatron_sb::head_output {
namespace {

using common::kAllLanes;
using common::launch;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kChannels = 8;         // of a lane
constexpr int kThreadBlocks = 2048;  // in a launch, about: several waves on every GPU, but few partial sums
constexpr int kRowsAtOnce = 2;       // rows of a thread with loads in flight at the same time
constexpr int kSumColumns = 32, kSumSlices = 32;  // shape of a CTA of sum_partials
enum Partial { kRemainderBias, kNormWeight, kNormBias, kPartials };

// ---- rows and channels of a thread ----------------------------------------------------------------------------------
// How the threads of a CTA cover rows with elements of type T.
template <class Element, int kLanesOfRow>
struct RowLayout {
    using T = Element;
    static constexpr int kLanes = kLanesOfRow;
    static constexpr int kGroups = kThreads / kLanes;     // groups of lanes, each with one row
    static constexpr int kRound = kGroups * kRowsAtOnce;  // rows of a CTA in one iteration of its loop
};

// Returns f(RowLayout<..>{}) with the layout for the dtype and the head_dim of `in`.
template <class F>
auto with_row_layout(const Inputs& in, const F& f) {
    const auto with_lanes = [&](auto element) {
        using T = decltype(element);
        if (in.head_dim <= 64) return f(RowLayout<T, 8>{});
        if (in.head_dim <= 128) return f(RowLayout<T, 16>{});
        return f(RowLayout<T, 32>{});
    };
    if (in.dtype == Dtype::kBFloat16) return with_lanes(__nv_bfloat16{});
    if (in.dtype == Dtype::kFloat16) return with_lanes(__half{});
    return with_lanes(float{});
}

// The rows of a batch element are divided into chunks. A CTA has a chunk of one head.
struct Chunks {
    int32_t rows, count;  // rows in a chunk; chunks in a batch element
};

template <class Layout>
Chunks chunks_of(Layout, const Inputs& in) {
    constexpr int64_t kRound = Layout::kRound;
    const int64_t wanted = std::max<int64_t>(1, kThreadBlocks / (int64_t(in.batch) * in.num_heads));
    const int64_t rows = (in.rows + wanted * kRound - 1) / (wanted * kRound) * kRound;
    return {int32_t(rows), int32_t((in.rows + rows - 1) / rows)};
}

// The chunk of a CTA, and the place of this thread in it.
template <class Layout>
struct Place {
    int32_t head, batch;
    int32_t chunk;       // counted over all batch elements
    int32_t first, end;  // the rows of the chunk
    int32_t group;       // the group of lanes of this thread
    int32_t channel;     // the first of this thread's kChannels
    bool has_channels;   // channel < head_dim
    float per_channel;   // 1 / head_dim

    __device__ Place(const Inputs& in, const Chunks& chunks)
        : head(blockIdx.x % in.num_heads),
          batch(blockIdx.x / in.num_heads / chunks.count),
          chunk(blockIdx.x / in.num_heads),
          first(chunk % chunks.count * chunks.rows),
          end(first + min(chunks.rows, in.rows - first)),  // the sum of both could exceed int32
          group(threadIdx.x / Layout::kLanes),
          channel(threadIdx.x % Layout::kLanes * kChannels),
          has_channels(channel < in.head_dim),
          per_channel(1.f / in.head_dim) {}

    // Returns this thread's i-th row of the round that begins at `first`.
    __device__ int32_t row(int32_t first, int i) const { return first + i * Layout::kGroups + group; }
    template <class Pointer>
    __device__ int64_t in_tensor(const Rows<Pointer>& x, int32_t row) const {
        return batch * x.batch_stride + row * x.row_stride + head * x.head_stride + channel;
    }
    __device__ int64_t in_mass(const Inputs& in, int32_t row) const {
        return (int64_t(batch) * in.num_heads + head) * in.rows + row;
    }
};

// ---- a lane's channels ----------------------------------------------------------------------------------------------
using Values = float[kChannels];

template <class T>
struct Packed {
    uint32_t words[kChannels * sizeof(T) / 4];
};

template <class T>
__device__ Packed<T> load(const void* data, int64_t at, bool valid) {
    Packed<T> packed = {};
    if (!valid) return packed;
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const T*>(data) + at);
#pragma unroll
    for (int i = 0; i < int(sizeof(packed)) / 4; i += 4) {
        const uint4 four = from[i / 4];
        packed.words[i] = four.x;
        packed.words[i + 1] = four.y;
        packed.words[i + 2] = four.z;
        packed.words[i + 3] = four.w;
    }
    return packed;
}

template <class T>
__device__ void unpack(const Packed<T>& packed, Values& x) {
    const T* values = reinterpret_cast<const T*>(packed.words);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) x[c] = float(values[c]);
}

// The compiler would split a plain store into four.
__device__ void store_16_bytes(uint4* to, const uint32_t* words) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}

template <class T>
__device__ void store(void* data, int64_t at, const Values& x) {
    Packed<T> packed;
#pragma unroll
    for (int i = 0; i < int(sizeof(packed)) / 4; ++i) {
        if constexpr (sizeof(T) == 2)
            packed.words[i] = common::pack<T>(x[2 * i], x[2 * i + 1]);
        else
            packed.words[i] = __float_as_uint(x[i]);
    }
    uint4* to = reinterpret_cast<uint4*>(static_cast<T*>(data) + at);
#pragma unroll
    for (int i = 0; i < int(sizeof(packed)) / 4; i += 4) store_16_bytes(to + i / 4, packed.words + i);
}

template <class Element>
__device__ void read_at(const void* data, int64_t at, Values& x) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) x[c] = float(static_cast<const Element*>(data)[at + c]);
}

__device__ void write_at(const HeadVectors<void*>& vectors, int64_t at, float x) {
    switch (vectors.dtype) {
        case Dtype::kFloat64:
            static_cast<double*>(vectors.data)[at] = x;
            break;
        case Dtype::kBFloat16:
            static_cast<__nv_bfloat16*>(vectors.data)[at] = __nv_bfloat16(x);
            break;
        case Dtype::kFloat16:
            static_cast<__half*>(vectors.data)[at] = __half(x);
            break;
        case Dtype::kFloat32:
            static_cast<float*>(vectors.data)[at] = x;
    }
}

// Reads this thread's channels of a vector for each head, or `absent` if there is none.
template <class Layout>
__device__ void read_vector(const HeadVectors<const void*>& vectors, const Inputs& in, const Place<Layout>& place,
                            float absent, Values& x) {
    const int64_t at = int64_t(place.head) * in.head_dim + place.channel;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) x[c] = absent;
    if (vectors.data == nullptr || !place.has_channels) return;
    switch (vectors.dtype) {
        case Dtype::kFloat32:
            return read_at<float>(vectors.data, at, x);
        case Dtype::kFloat64:
            return read_at<double>(vectors.data, at, x);
        case Dtype::kBFloat16:
            return read_at<__nv_bfloat16>(vectors.data, at, x);
        case Dtype::kFloat16:
            return read_at<__half>(vectors.data, at, x);
    }
}

// The inputs of one row. Beyond the chunk they are zeros: the lanes of such a row still take part in the shuffles.
template <class Layout>
struct RowInputs {
    Packed<typename Layout::T> o;
    float mass;  // 0 without remainder_bias

    __device__ void read(const Inputs& in, const Place<Layout>& place, int32_t row) {
        const bool exists = row < place.end;
        o = load<typename Layout::T>(in.o.data, place.in_tensor(in.o, row), exists && place.has_channels);
        mass = exists && in.mass != nullptr ? in.mass[place.in_mass(in, row)] : 0.f;
    }
    // o + P r
    __device__ void biased(const Values& r, Values& x) const {
        unpack(o, x);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) x[c] += mass * r[c];
    }
};

// ---- the norm -------------------------------------------------------------------------------------------------------
template <class Layout>
__device__ float sum_over_row(float x) {
#pragma unroll
    for (int lanes = Layout::kLanes / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
    return x;
}

// Replaces x by x^ and returns 1 / sqrt(var + eps). Lanes without channels keep x = 0.
template <class Layout>
__device__ float normalise(const Place<Layout>& place, float eps, Values& x) {
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) sum += x[c];
    const float mean = sum_over_row<Layout>(sum) * place.per_channel, shift = place.has_channels ? mean : 0.f;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
        x[c] -= shift;
        squares += x[c] * x[c];
    }
    const float rstd = rsqrtf(sum_over_row<Layout>(squares) * place.per_channel + eps);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) x[c] *= rstd;
    return rstd;
}

using Sums = Values[kPartials];

// Replaces d, the gradient of out, by dx, and adds this row's part of dw and dc.
template <class Layout>
__device__ void normalise_backward(const Place<Layout>& place, float rstd, const Values& normalised, const Values& w,
                                   Values& d, Sums& sums) {
    float sum = 0.f, product = 0.f;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
        sums[kNormWeight][c] += d[c] * normalised[c];
        sums[kNormBias][c] += d[c];
        d[c] *= w[c];
        sum += d[c];
        product += d[c] * normalised[c];
    }
    const float factor = rstd * place.per_channel;
    const float mean = sum_over_row<Layout>(sum) * factor, slope = sum_over_row<Layout>(product) * factor;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) d[c] = d[c] * rstd - mean - normalised[c] * slope;
}

// ---- kernels --------------------------------------------------------------------------------------------------------
template <class Layout>
__global__ void __launch_bounds__(kThreads)
    forward_rows(const __grid_constant__ Inputs in, const __grid_constant__ Rows<void*> out, Chunks chunks) {
    const Place<Layout> place(in, chunks);
    Values r, w, b;
    read_vector(in.remainder_bias, in, place, 0.f, r);
    read_vector(in.norm_weight, in, place, 1.f, w);
    read_vector(in.norm_bias, in, place, 0.f, b);
    for (int32_t first = place.first; first < place.end; first += Layout::kRound) {
        RowInputs<Layout> inputs[kRowsAtOnce];
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) inputs[i].read(in, place, place.row(first, i));
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            const int32_t row = place.row(first, i);
            Values x;
            inputs[i].biased(r, x);
            if (in.norm_weight.data != nullptr) {
                normalise(place, in.eps, x);
#pragma unroll
                for (int c = 0; c < kChannels; ++c) x[c] = x[c] * w[c] + b[c];
            }
            if (row < place.end && place.has_channels)
                store<typename Layout::T>(out.data, place.in_tensor(out, row), x);
        }
    }
}

// Writes the sums of this CTA over its rows to the workspace, which is (chunk, kPartials, num_heads, head_dim).
template <class Layout>
__device__ void write_partials(const Inputs& in, const Place<Layout>& place, Sums& sums, float* workspace) {
    __shared__ float warp_sums[kPartials][kWarps][Layout::kLanes * kChannels];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < kPartials; ++p)
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
            for (int lanes = Layout::kLanes; lanes < 32; lanes *= 2)
                sums[p][c] += __shfl_xor_sync(kAllLanes, sums[p][c], lanes);
            if (lane < Layout::kLanes) warp_sums[p][warp][place.channel + c] = sums[p][c];
        }
    __syncthreads();
    for (int i = threadIdx.x; i < kPartials * in.head_dim; i += kThreads) {
        const int p = i / in.head_dim, channel = i % in.head_dim;
        float sum = 0.f;
        for (int w = 0; w < kWarps; ++w) sum += warp_sums[p][w][channel];
        const int64_t vector = (int64_t(place.chunk) * kPartials + p) * in.num_heads + place.head;
        workspace[vector * in.head_dim + channel] = sum;
    }
}

template <class Layout>
__global__ void __launch_bounds__(kThreads)
    backward_rows(const __grid_constant__ Inputs in, const __grid_constant__ Gradients gradients, Chunks chunks) {
    using T = typename Layout::T;
    const Place<Layout> place(in, chunks);
    Values r, w;
    read_vector(in.remainder_bias, in, place, 0.f, r);
    read_vector(in.norm_weight, in, place, 1.f, w);
    Sums sums = {};
    for (int32_t first = place.first; first < place.end; first += Layout::kRound) {
        RowInputs<Layout> inputs[kRowsAtOnce];
        Packed<T> d_out[kRowsAtOnce];
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            const int32_t row = place.row(first, i);
            inputs[i].read(in, place, row);
            d_out[i] = load<T>(gradients.d_out.data, place.in_tensor(gradients.d_out, row),
                               row < place.end && place.has_channels);
        }
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            const int32_t row = place.row(first, i);
            Values x, d;
            unpack(d_out[i], d);
            if (in.norm_weight.data != nullptr) {
                inputs[i].biased(r, x);
                const float rstd = normalise(place, in.eps, x);
                normalise_backward(place, rstd, x, w, d, sums);
            }
            if (row < place.end && place.has_channels)
                store<T>(gradients.d_o.data, place.in_tensor(gradients.d_o, row), d);
            if (in.mass == nullptr) continue;
            float d_mass = 0.f;
#pragma unroll
            for (int c = 0; c < kChannels; ++c) {
                sums[kRemainderBias][c] += inputs[i].mass * d[c];
                d_mass += d[c] * r[c];
            }
            d_mass = sum_over_row<Layout>(d_mass);
            if (row < place.end && place.channel == 0) gradients.d_mass[place.in_mass(in, row)] = d_mass;
        }
    }
    write_partials(in, place, sums, static_cast<float*>(gradients.workspace));
}

struct ParameterGradients {
    HeadVectors<void*> of[kPartials];
};

// Adds the partial sums of all chunks. A CTA adds those of kSumColumns channels of one parameter. Thread row y adds
// every kSumSlices-th chunk from y on, and row 0 then adds the results in a fixed order.
__global__ void __launch_bounds__(kSumColumns* kSumSlices)
    sum_partials(const float* partials, int32_t chunks, int64_t channels,
                 const __grid_constant__ ParameterGradients gradients) {
    __shared__ float slices[kSumSlices][kSumColumns];
    const int p = blockIdx.x % kPartials;
    if (gradients.of[p].data == nullptr) return;
    const int64_t channel = int64_t(blockIdx.x / kPartials) * kSumColumns + threadIdx.x;
    float sum = 0.f;
    if (channel < channels)
        for (int32_t chunk = threadIdx.y; chunk < chunks; chunk += kSumSlices)
            sum += partials[(int64_t(chunk) * kPartials + p) * channels + channel];
    slices[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || channel >= channels) return;
    for (int slice = 1; slice < kSumSlices; ++slice) sum += slices[slice][threadIdx.x];
    write_at(gradients.of[p], channel, sum);
}

}  // namespace

int64_t backward_workspace(const Inputs& in) {
    const int64_t chunks = with_row_layout(in, [&](auto layout) { return chunks_of(layout, in).count; });
    return in.batch * chunks * kPartials * in.num_heads * in.head_dim * int64_t(sizeof(float));
}

void forward(const Inputs& in, const Rows<void*>& out, void* stream_handle) {
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    with_row_layout(in, [&](auto layout) {
        const Chunks chunks = chunks_of(layout, in);
        launch("head_output forward", forward_rows<decltype(layout)>, int64_t(in.batch) * chunks.count * in.num_heads,
               kThreads, 0, stream, in, out, chunks);
    });
}

void backward(const Inputs& in, const Gradients& gradients, void* stream_handle) {
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    const int32_t num_partials = with_row_layout(in, [&](auto layout) {
        const Chunks chunks = chunks_of(layout, in);
        launch("head_output backward", backward_rows<decltype(layout)>, int64_t(in.batch) * chunks.count * in.num_heads,
               kThreads, 0, stream, in, gradients, chunks);
        return in.batch * chunks.count;
    });
    const int64_t channels = int64_t(in.num_heads) * in.head_dim;
    const int64_t columns = (channels + kSumColumns - 1) / kSumColumns;
    const ParameterGradients parameters = {
        {gradients.d_remainder_bias, gradients.d_norm_weight, gradients.d_norm_bias}};
    launch("head_output backward: sums over the chunks", sum_partials, columns * kPartials,
           dim3(kSumColumns, kSumSlices), 0, stream, static_cast<const float*>(gradients.workspace), num_partials,
           channels, parameters);
}

}  // namespace megatron_sb::head_output
