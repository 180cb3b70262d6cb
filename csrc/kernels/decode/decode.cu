// Attention of a few queries to a long cache, limited by memory bandwidth. So the device has as many keys in flight as
// it can hold, and reads each key once for all query heads of its KV head.
//
// A CTA owns 16 rows of Q of a KV head and a split of the keys that they see; split 0 has the newest. Each warp scans a
// range of the split as if its newest key began a full stick (worker.cuh). The results of the ranges, and then those of
// the splits, are folded from the newest to the oldest:
//
//   O = sum_i (prod_{j newer than i} P_j) O_i,     P = prod_i P_i
//
// A row is used up where that product falls below mass_threshold. Older results are ignored, whether they were computed
// or not. A warp can therefore stop as soon as it learns that newer keys have used up all rows. When it learns this
// affects the time but no bit of the result.
#include <algorithm>
#include <climits>

#include "core/limits.h"
#include "kernels/common/launch.h"
#include "kernels/decode/decode.h"
#include "kernels/decode/worker.cuh"

namespace megatron_sb::decode {
namespace {

using common::kWarps;

constexpr const char* kName = "attention_kvcache";
constexpr int kMaxSplits = 128;
constexpr int kMinTilesPerWarp = 2;  // of a split: the least number of tiles for each of its warps

// What the splits exchange, in the workspace. A unit is 16 rows of Q of a KV head and batch element.
struct Exchange {
    int* arrived;  // (units,) number of splits that have written their results; 0 before the launch
    int* used_up;  // (units,) splits - i for the newest split i that alone used up all rows; 0 before the launch
    float* mass;   // (units, splits, kRows)
    float* o;      // (units, splits, kRows, head_dim_v)
};

int64_t units_of(const Params& p, const Plan& plan) {
    return int64_t(p.sizes.batch) * p.sizes.num_kv_heads * plan.row_tiles;
}

int64_t counters_bytes(int64_t units) {
    return align_workspace(2 * units * int64_t(sizeof(int)));
}

Exchange exchange_of(const Params& p, const Plan& plan) {
    const int64_t units = units_of(p, plan);
    if (plan.splits == 1) return {};
    int* const counters = static_cast<int*>(p.workspace);
    float* const mass = reinterpret_cast<float*>(static_cast<char*>(p.workspace) + counters_bytes(units));
    return {counters, counters + units, mass, mass + units * plan.splits * kRows};
}

// Folds the masses of a row: partial results 0 (the newest) to count - 1, with a stride of kRows floats. Replaces each
// mass by the weight of its partial result. Returns the mass that is left. Sets `num_counted` to the number of partial
// results that contribute.
__device__ float fold_masses(float* masses, int count, float least_mass, int& num_counted) {
    float left = 1.f;
    int i = 0;
    for (; i < count && left >= least_mass; ++i) {
        const float mass = masses[i * kRows];
        masses[i * kRows] = left;
        left *= mass;
    }
    num_counted = i;
    return left;
}

template <class T>
__device__ void write_output(const Params& p, const QueryRows& rows, int row, int column, const float4& x) {
    T* const to = static_cast<T*>(p.o.data) + rows.batch * p.o.batch_stride + rows.query(row) * p.o.row_stride +
                  rows.head(row) * p.o.head_stride + column;
    common::store_four(to, x);
}

__device__ void write_mass(const Params& p, const QueryRows& rows, int row, float mass) {
    const Sizes& z = p.sizes;
    p.mass[(int64_t(rows.batch) * z.num_heads + rows.head(row)) * z.q_rows + rows.query(row)] = mass;
}

// Returns the sum over i < count of weights[i * kRows] * of(i). of(i) returns a float4.
template <class Of>
__device__ float4 weighted_sum(const float* weights, int count, Of of) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
        const float4 x = of(i);
        const float weight = weights[i * kRows];
        sum.x = fmaf(weight, x.x, sum.x);
        sum.y = fmaf(weight, x.y, sum.y);
        sum.z = fmaf(weight, x.z, sum.z);
        sum.w = fmaf(weight, x.w, sum.w);
    }
    return sum;
}

// The whole CTA calls f(row, column) once for every fourth column of the rows that exist.
template <class F>
__device__ void for_each_quad(const Params& p, const QueryRows& rows, F f) {
    const int quads = p.sizes.head_dim_v / 4;
    for (int i = threadIdx.x; i < rows.count * quads; i += blockDim.x) f(i / quads, i % quads * 4);
}

// Folds the results of the splits of a unit. The CTA that arrived last calls this, after all splits have written
// theirs.
template <class T>
__device__ void fold_splits(const Params& p, const QueryRows& rows, const Exchange& exchange, int64_t unit, int splits,
                            float least_mass, float* masses, Shared& shared) {
    const float* const mass = exchange.mass + unit * splits * kRows;
    for (int i = threadIdx.x; i < splits * kRows; i += blockDim.x) masses[i] = __ldcg(mass + i);
    __syncthreads();
    const int row = threadIdx.x;
    if (row < rows.count)
        write_mass(p, rows, row, fold_masses(masses + row, splits, least_mass, shared.num_counted[row]));
    __syncthreads();
    const int width = p.sizes.head_dim_v;
    for_each_quad(p, rows, [&](int row, int column) {
        const float* const o = exchange.o + (unit * splits * kRows + row) * width + column;
        const float4 sum = weighted_sum(masses + row, shared.num_counted[row], [&](int i) {
            return __ldcg(reinterpret_cast<const float4*>(o + int64_t(i) * kRows * width));
        });
        write_output<T>(p, rows, row, column, sum);
    });
}

// Folds the results of the warps, which are in `rings`. With one split, writes o and mass. With several, writes the
// result of the split to `exchange`. Returns true in the last CTA of a unit to do that; it must then fold the splits.
template <class T, int kDim>
__device__ bool fold_warps(const Params& p, const QueryRows& rows, const Exchange& exchange, int64_t unit, int split,
                           int splits, float least_mass, const uint8_t* rings, Shared& shared) {
    using S = Shape<T, kDim>;
    const int warps = blockDim.x / 32, row = threadIdx.x;
    bool used_up = true;
    if (row < rows.count) {
        const float left = fold_masses(&shared.mass[0][row], warps, least_mass, shared.num_counted[row]);
        used_up = left < least_mass || rows.visible(row) == 0;
        if (splits == 1)
            write_mass(p, rows, row, left);
        else
            exchange.mass[(unit * splits + split) * kRows + row] = left;
    } else if (row < kRows && splits > 1) {
        exchange.mass[(unit * splits + split) * kRows + row] = 0.f;
    }
    used_up = __syncthreads_and(used_up);
    if (splits > 1 && threadIdx.x == 0 && used_up) atomicMax(exchange.used_up + unit, splits - split);
    for_each_quad(p, rows, [&](int row, int column) {
        const float4 sum = weighted_sum(&shared.mass[0][row], shared.num_counted[row], [&](int warp) {
            const float* const o = reinterpret_cast<const float*>(rings + warp * S::kRingBytes);
            return *reinterpret_cast<const float4*>(o + row * S::kOutputPitch + column);
        });
        if (splits == 1)
            write_output<T>(p, rows, row, column, sum);
        else
            *reinterpret_cast<float4*>(exchange.o + ((unit * splits + split) * kRows + row) * p.sizes.head_dim_v +
                                       column) = sum;
    });
    if (splits == 1) return false;
    // Every split publishes its result before it counts its arrival: the fence orders the writes of each thread before
    // the atomicAdd of thread 0. The last split to arrive has seen all arrivals, so it can read all results. It uses
    // __ldcg, because its L1 could be stale.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) shared.is_last = atomicAdd(exchange.arrived + unit, 1) == splits - 1;
    __syncthreads();
    __threadfence();
    return shared.is_last;
}

template <class T, int kDim, bool kGated>
__global__ void __launch_bounds__(kWarps * 32, Shape<T, kDim>::kBlocksPerSm)
    attend(const __grid_constant__ Params p, const __grid_constant__ common::Scalars scalars,
           const __grid_constant__ Exchange exchange, int units, int splits, int row_tiles) {
    using S = Shape<T, kDim>;
    extern __shared__ __align__(1024) uint8_t memory[];
    const int warps = blockDim.x / 32, warp = common::uniform(threadIdx.x / 32);
    uint8_t* const rings = memory + S::kQueryBytes;
    Shared& shared = *reinterpret_cast<Shared*>(rings + warps * S::kRingBytes);
    const int unit = blockIdx.x % units, split = blockIdx.x / units;  // the newest keys of all units start first
    const QueryRows rows(p, unit, row_tiles);
    const uint32_t queries = common::shared_address(memory);

    const int tiles = (rows.visible(rows.count - 1) + kKeys - 1) / kKeys;
    const int64_t share = int64_t(split) * warps + warp, shares = int64_t(splits) * warps;
    const int begin = int(tiles * share / shares), count = int(tiles * (share + 1) / shares) - begin;
    Worker<T, kDim, kGated> worker(p, scalars, rows, queries, common::shared_address(rings + warp * S::kRingBytes));
    if (threadIdx.x == 0) shared.newest_used_up = INT_MAX;
    load_queries<T, S::kPitch>(queries, p, rows);
    worker.start(tiles - 1 - begin, count);
    common::wait_for_copies<2>();  // Q
    __syncthreads();

    // A warp may stop when a newer warp of this split, or a newer split, has used up all rows. Each of the two numbers
    // that say so is valid on its own, so the reads need no order. used_up_before uses exchange.used_up one tile after
    // it was read, so no warp waits for that read.
    const volatile int* const used_up = exchange.used_up + unit;
    int newest_used_up_split = 0;
    worker.run(tiles - 1 - begin, count, [&] {
        bool used_up_before = newest_used_up_split > splits - split;
        if (warp > 0 && threadIdx.x % 32 == 0) used_up_before |= atomicMin(&shared.newest_used_up, INT_MAX) < warp;
        if (split > 0) newest_used_up_split = *used_up;
        return bool(__any_sync(common::kAllLanes, used_up_before));
    });
    if (!__any_sync(common::kAllLanes, worker.live()) && threadIdx.x % 32 == 0) atomicMin(&shared.newest_used_up, warp);
    worker.write(reinterpret_cast<float*>(rings + warp * S::kRingBytes), shared.mass[warp]);
    __syncthreads();  // all warps have written their results

    const float least_mass = scalars.least_mass / common::kWeightScale<T>;
    if (!fold_warps<T, kDim>(p, rows, exchange, unit, split, splits, least_mass, rings, shared)) return;
    static_assert(kMaxSplits * kRows * 4 <= S::kRingBytes, "a ring holds the masses of the splits");
    fold_splits<T>(p, rows, exchange, unit, splits, least_mass, reinterpret_cast<float*>(rings), shared);
}

// An instance of the kernel and what its launch needs.
struct Kernel {
    const void* function;
    int query_bytes, ring_bytes;
    common::Scalars scalars;

    int shared_bytes(int warps) const { return query_bytes + warps * ring_bytes + int(sizeof(Shared)); }
};

template <class T, bool kGated>
Kernel kernel_with(const Params& p) {
    const auto of = [&](auto function, auto shape) {
        using S = decltype(shape);
        return Kernel{reinterpret_cast<const void*>(function), S::kQueryBytes, S::kRingBytes,
                      common::scalars_of<T>(p.options)};
    };
    const int widest = std::max(p.sizes.head_dim, p.sizes.head_dim_v);
    if (widest <= 64) return of(attend<T, 64, kGated>, Shape<T, 64>{});
    if (widest <= 128) return of(attend<T, 128, kGated>, Shape<T, 128>{});
    return of(attend<T, int(kMaxHeadDim), kGated>, Shape<T, int(kMaxHeadDim)>{});
}
template <class T>
Kernel kernel_of_type(const Params& p) {
    return p.options.forget_gate ? kernel_with<T, true>(p) : kernel_with<T, false>(p);
}

Kernel kernel_for(const Params& p) {
    switch (p.sizes.dtype) {
        case Dtype::kBFloat16:
            return kernel_of_type<common::BFloat16>(p);
        case Dtype::kFloat16:
            return kernel_of_type<common::Half>(p);
        default:
            return kernel_of_type<float>(p);
    }
}

// Returns the number of splits. The CTAs run in waves of `slots`, the number of CTAs that the device holds. The result
// is the smallest number that fills its waves nearly as well as the best number does.
int splits_for(int64_t units, int64_t slots, int most) {
    const auto efficiency = [&](int splits) {
        const int64_t blocks = units * splits, rounds = (blocks + slots - 1) / slots;
        return double(blocks) / double(rounds * slots);
    };
    double best = 0;
    for (int splits = 1; splits <= most; ++splits) best = std::max(best, efficiency(splits));
    int splits = 1;
    while (efficiency(splits) < 0.95 * best) ++splits;
    return splits;
}

}  // namespace

int least_shared_bytes(const Sizes& sizes) {
    Params p = {};
    p.sizes = sizes;
    return kernel_for(p).shared_bytes(1);
}

bool fits_device(const Sizes& sizes) {
    return least_shared_bytes(sizes) <= common::max_shared_bytes_per_block();
}

Plan plan_for(const Params& p) {
    const Kernel kernel = kernel_for(p);
    const int most_bytes = common::max_shared_bytes_per_block();
    Plan plan = {kWarps, 1, (p.sizes.q_rows * (p.sizes.num_heads / p.sizes.num_kv_heads) + kRows - 1) / kRows};
    while (plan.warps > 1 && kernel.shared_bytes(plan.warps) > most_bytes) plan.warps /= 2;
    const int resident =
        common::resident_blocks(kName, kernel.function, plan.warps * 32, kernel.shared_bytes(plan.warps));
    const int64_t slots = int64_t(std::max(resident, 1)) * common::num_multiprocessors();
    const int64_t tiles = (int64_t(p.sizes.k_rows) + kKeys - 1) / kKeys;
    const int64_t most = std::min<int64_t>(kMaxSplits, tiles / (plan.warps * kMinTilesPerWarp));
    if (units_of(p, plan) > 0 && most > 1) plan.splits = splits_for(units_of(p, plan), slots, int(most));
    return plan;
}

int64_t workspace_bytes(const Params& p, const Plan& plan) {
    if (plan.splits == 1) return 0;
    const int64_t units = units_of(p, plan);
    return counters_bytes(units) + units * plan.splits * kRows * (1 + p.sizes.head_dim_v) * int64_t(sizeof(float));
}

void forward(const Params& p, const Plan& plan, void* stream_handle) {
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    const int64_t units = units_of(p, plan), blocks = units * plan.splits;
    if (blocks == 0 || p.sizes.q_rows == 0) return;
    const Kernel kernel = kernel_for(p);
    const Exchange exchange = exchange_of(p, plan);
    if (plan.splits > 1)
        common::check(kName, "cudaMemsetAsync",
                      cudaMemsetAsync(exchange.arrived, 0, size_t(counters_bytes(units)), stream));
    int num_units = int(units), splits = plan.splits, row_tiles = plan.row_tiles;
    void* arguments[] = {const_cast<Params*>(&p),
                         const_cast<common::Scalars*>(&kernel.scalars),
                         const_cast<Exchange*>(&exchange),
                         &num_units,
                         &splits,
                         &row_tiles};
    common::launch_with(kName, kernel.function, blocks, unsigned(plan.warps) * 32, kernel.shared_bytes(plan.warps),
                        stream, arguments);
}

}  // namespace megatron_sb::decode
