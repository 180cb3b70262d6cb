// block_forward on Hopper. A warpgroup owns 64 query rows and reads key tiles of 128 (64 at head_dim 256) from the
// newest to the oldest:
//
//     S = Q K^T     e_k = 2^(scale log2(e) S_k)     P_after_k = P_before_k / (1 + e_k)
//     A_k = e_k P_after_k     O += A V
//
// Warpgroup 0 loads. Its warp 0 takes work tiles and issues TMA loads (fwd_producer.cuh). Its warps 1 and 2 load the
// tiles in which a segment ends (fwd_tail_loader.cuh). Warp 3 loads forget gates, or exits. The other two (at
// head_dim 64, three) warpgroups consume: each computes its rows with wgmma (fwd_consumer.cuh, fwd_scan.cuh).
// The CTAs are persistent. They take work tiles from a list, those with the most keys first. README.md draws the CTA
// and the permutation of keys.
#pragma once

#include <algorithm>

#include "kernels/common/launch.h"
#include "kernels/hopper/fwd_consumer.cuh"
#include "kernels/hopper/fwd_tail_loader.cuh"
#include "kernels/hopper/instances.cuh"

namespace megatron_sb::hopper {

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) forward(const __grid_constant__ ForwardArguments arguments) {
    extern __shared__ __align__(1024) uint8_t memory[];
    auto& shared = *reinterpret_cast<typename T::Shared*>(memory);
    // The shuffle shows the compiler that all lanes have the same value. The compiler then keeps this value, and values
    // derived from it, in uniform registers.
    const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0);
    auto& c = shared.control;
    if (threadIdx.x == 0) {
        for (auto& numbers : c.used_up_work)
            for (int32_t& number : numbers) number = -1;
        c.init();
    }
    if constexpr (T::kBiases > 0) clear_shared(shared.zeros);
    __syncthreads();
    if (warpgroup == 0) {
        set_registers<T::kProducerRegisters, T::kLaunchRegisters>();
        const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
        if (warp == 0) ForwardProducer<T>(shared, arguments).run();
        const ForwardParams& p = arguments.params;
        if (warp == 1) TailLoader<T>(shared, 0, p.k, p.sizes.head_dim).template run<T::kBiases>(shared.k, c.k.full);
        if (warp == 2) TailLoader<T>(shared, 1, p.v, p.sizes.head_dim_v).template run<0>(shared.v, c.v.full);
        if constexpr (T::kGated)
            if (warp == 3) TailLoader<T>(shared, kGateLoader, p.k, p.sizes.head_dim).load_gates();
    } else {
        set_registers<T::kConsumerRegisters, T::kLaunchRegisters>();
        ForwardConsumer<T>(shared, arguments, warpgroup - 1).run();
        c.finished.arrive({});
    }
}

// Number of query heads to process together. It is so small that their K and V stay in the L2 cache. But if a head has
// few work tiles, as on a rank of context parallelism, there are enough heads for two work tiles of each CTA: the long
// ones then begin first, and no CTA is left with one at the end. All groups have nearly the same size, so the last
// group still fills the GPU. `tiles`: query tiles of a head.
inline int heads_in_flight(const Sizes& z, int64_t tiles) {
    constexpr int64_t kCacheBytes = 32 << 20;
    const int64_t kv_head_bytes = std::max<int64_t>(1, int64_t(z.k_rows) * (z.head_dim + z.head_dim_v) * 2);
    const int64_t cached_heads = std::max<int64_t>(1, kCacheBytes / kv_head_bytes) * (z.num_heads / z.num_kv_heads);
    const int64_t filling_heads = (2 * common::num_multiprocessors() + tiles - 1) / tiles;
    const int64_t heads = int64_t(z.batch) * z.num_heads, most = std::max(cached_heads, filling_heads);
    const int64_t groups = (heads + most - 1) / most;
    return int((heads + groups - 1) / groups);
}

template <class Element, int kColumns, int kHeadDimV, bool kGated>
void launch_forward(const ForwardParams& p, cudaStream_t stream) {
    using T = ForwardTraits<Element, kColumns, kHeadDimV, kGated>;
    const Sizes& z = p.sizes;
    const int tile_rows = common::choose_tile_rows(p, T::kQueryTile, common::num_multiprocessors());
    common::prepare_forward(p, tile_rows, stream);
    if (p.segments.size == 0) return;

    ForwardArguments a;
    a.params = p;
    a.tiles = static_cast<QueryTiles*>(p.workspace);
    a.q = make_query_map(p.q, z, z.head_dim, T::kQueryTile);
    a.k = make_key_map(p.k, z, z.head_dim, T::kKeyTile);
    a.v = make_key_map(p.v, z, z.head_dim_v, T::kKeyTile);
    if constexpr (T::kBiases > 0) {
        a.q_biases = make_query_map(p.q, z, z.head_dim, T::kQueryTile, T::kBiases);
        a.k_biases = make_key_map(p.k, z, z.head_dim, T::kKeyTile, T::kBiases);
    }
    const int64_t tiles = common::max_query_tiles(z, p.segments, tile_rows);
    a.heads_in_flight = heads_in_flight(z, tiles);
    const common::Scalars scalars = common::scalars_of<Element>(p.options);
    a.scale_log2 = scalars.scale_log2e;
    a.reach = scalars.reach;
    a.min_mass = scalars.least_mass;
    a.restart_floor = scalars.least_restart;
    a.wait_record = common::wait_record();

    const int64_t num_work_tiles = tiles * z.batch * z.num_heads;
    common::launch<common::Start::kBeforeEnd>("hopper forward", forward<T>,
                                              std::min<int64_t>(common::num_multiprocessors(), num_work_tiles),
                                              T::kThreads, sizeof(typename T::Shared), stream, a);
}

}  // namespace megatron_sb::hopper
