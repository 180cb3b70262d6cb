// Memory bandwidth limits this kernel: it reads the output of each run once and writes each result once. A thread has
// four columns of a row of a head. All threads of a row read its masses, which are in the L1 cache.
#include "kernels/common/launch.h"
#include "kernels/common/ptx.cuh"
#include "kernels/fold/fold.h"

namespace megatron_sb::fold {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 4;     // of a CTA
constexpr int kColumns = 4;  // of a thread

// A row of a head, and the first column of this thread.
struct Place {
    int batch, row, head, column;
};

template <class T>
class FoldedRow {
  public:
    __device__ FoldedRow(const Params& params, const Place& place) : p_(params), at_(place) {}

    __device__ void run() {
        fold_masses();
        fold_outputs();
    }

  private:
    __device__ bool has(int n) const {
        return n < p_.num_runs && at_.row >= p_.runs[n].row_begin &&
               at_.row < p_.runs[n].row_begin + p_.runs[n].num_rows;
    }
    __device__ int64_t in_mass(int n) const {
        const Run& run = p_.runs[n];
        return (int64_t(at_.batch) * p_.num_heads + at_.head) * run.num_rows + at_.row - run.row_begin;
    }
    // Index of this thread's columns in a tensor (batch, rows, num_heads, head_dim_v) that begins at `first_row`.
    __device__ int64_t in_o(int rows, int first_row) const {
        return ((int64_t(at_.batch) * rows + at_.row - first_row) * p_.num_heads + at_.head) * p_.head_dim_v +
               at_.column;
    }

    // Newest to oldest: the mass with which each run starts. A comparison with a NaN is false, so a NaN counts as used
    // up.
    __device__ void fold_masses() {
        float mass = 1.f;
#pragma unroll
        for (int n = 0; n < kMostRuns; ++n) {
            weights_[n] = 0.f;
            if (!has(n)) continue;
            const bool live = p_.mass_threshold > 0.f ? mass >= p_.mass_threshold : mass > 0.f;
            if (live) weights_[n] = mass;
            if (at_.column == 0 && p_.runs[n].mass_in != nullptr) p_.runs[n].mass_in[in_mass(n)] = weights_[n];
            if (live) mass *= p_.runs[n].mass[in_mass(n)];
        }
        if (at_.column == 0) p_.mass[(int64_t(at_.batch) * p_.num_heads + at_.head) * p_.rows + at_.row] = mass;
    }

    // Oldest to newest. A run with weight 0 is not read, because it may have a NaN there.
    __device__ void fold_outputs() const {
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int n = kMostRuns - 1; n >= 0; --n) {
            if (!has(n)) continue;
            const Run& run = p_.runs[n];
            const int64_t at = in_o(run.num_rows, run.row_begin);
            if (run.older_o != nullptr) *reinterpret_cast<float4*>(run.older_o + at) = sum;
            if (weights_[n] == 0.f) continue;
            const float4 o = *reinterpret_cast<const float4*>(run.o + at);
            sum = make_float4(fmaf(weights_[n], o.x, sum.x), fmaf(weights_[n], o.y, sum.y),
                              fmaf(weights_[n], o.z, sum.z), fmaf(weights_[n], o.w, sum.w));
        }
        common::store_four(static_cast<T*>(p_.o) + in_o(p_.rows, 0), sum);
    }

    const Params& p_;
    const Place at_;
    float weights_[kMostRuns];
};

// A CTA has kRows rows of a batch element, with all heads.
template <class T>
__global__ void __launch_bounds__(kThreads) fold_rows(const __grid_constant__ Params p, int blocks_of_batch) {
    const int pieces_of_head = p.head_dim_v / kColumns, pieces_of_row = p.num_heads * pieces_of_head;
    const int batch = blockIdx.x / blocks_of_batch, first_row = blockIdx.x % blocks_of_batch * kRows;
    const int rows = min(kRows, p.rows - first_row);
    for (int piece = threadIdx.x; piece < rows * pieces_of_row; piece += kThreads) {
        const int in_row = piece % pieces_of_row;
        FoldedRow<T>(
            p, {batch, first_row + piece / pieces_of_row, in_row / pieces_of_head, in_row % pieces_of_head * kColumns})
            .run();
    }
}

}  // namespace

void fold(const Params& params, void* stream) {
    const int blocks_of_batch = (params.rows + kRows - 1) / kRows;
    const auto launch = [&](auto kernel) {
        common::launch("fold of runs", kernel, int64_t(params.batch) * blocks_of_batch, kThreads, 0,
                       static_cast<cudaStream_t>(stream), params, blocks_of_batch);
    };
    if (params.o_dtype == Dtype::kFloat32)
        launch(fold_rows<float>);
    else if (params.o_dtype == Dtype::kBFloat16)
        launch(fold_rows<__nv_bfloat16>);
    else
        launch(fold_rows<__half>);
}

}  // namespace megatron_sb::fold
