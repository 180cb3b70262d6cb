// block_backward on Hopper: one pass over the keys with five products, deterministic, in O(L) memory.
//
//     e = 2^(scale log2(e) q . k)     A = e P_after     g = A (dO . v)     b = sum of g over older keys + P dP
//     dz = (g - e b) / (1 + e)        dQ += dz K        dK += dz^T Q       dV += A^T dO
//
// A CTA owns a tile of 128 keys, or 64 of a wide head. It processes the query rows that see the tile in steps of 64
// rows, from the newest rows to the oldest. The scan along the keys needs two numbers for each row at the older edge of
// the tile: the mass P and the prefix b. Together they are the carry of the row. The CTA that owns the next older key
// tile sends it. dK and dV are summed in registers, also over the query heads of a KV head. dQ is summed in global
// memory, oldest key tile first. If there are too few key tiles for all CTAs, several CTAs share a tile (bwd_parts.h).
//
// Warpgroup 0: one warp loads Q, dO, K and V (bwd_step_loader.cuh), two warps exchange carries with other CTAs
// (bwd_carries.cuh), and one orders the additions to dQ (bwd_additions.cuh). The other warpgroups compute: two at
// head_dim 128 (bwd_consumer_d128.cuh), three at head_dim 64 and for wide heads (bwd_scan_warpgroup.cuh,
// bwd_consumer_d64.cuh, bwd_consumer_wide.cuh). README.md has drawings and a list of the barriers.
#pragma once

#include <algorithm>

#include "kernels/common/launch.h"
#include "kernels/hopper/bwd_carries.cuh"
#include "kernels/hopper/bwd_consumer_d128.cuh"
#include "kernels/hopper/bwd_consumer_d64.cuh"
#include "kernels/hopper/bwd_consumer_wide.cuh"
#include "kernels/hopper/bwd_step_loader.cuh"
#include "kernels/hopper/instances.cuh"

namespace megatron_sb::hopper {

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) backward(const __grid_constant__ BackwardArguments arguments) {
    extern __shared__ __align__(1024) uint8_t memory[];
    auto& shared = *reinterpret_cast<typename T::Shared*>(memory);
    // The shuffle shows the compiler that all lanes have the same value. The compiler then keeps this value, and values
    // derived from it, in uniform registers.
    const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) shared.control.init();
    wait_for_previous_kernel();  // plan_starts, which ends after plan_work
    // write_dq may then start, on the multiprocessors of CTAs that have no more work. It reads the plan, too.
    if (threadIdx.x == 0) allow_next_kernel();
    if constexpr (T::kBiases > 0) clear_shared(shared.zeros);
    __syncthreads();
    if (warpgroup == 0) {
        set_registers<T::kProducerRegisters, T::kLaunchRegisters>();
        const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
        if (warp == 0) StepLoader<T>(shared, arguments).run();
        if (warp == 1) CarryReader<T>(shared.control, arguments).run();
        using Dq = std::conditional_t<T::kAddsDqInBulk, BulkAdder<T>, TurnThread<T>>;
        if (warp == 2 && lane == 0) Dq(shared, arguments).run();
        if (warp == 3) Publisher<T>(shared.control, arguments).run();
    } else if (T::kSumWarpgroups > 0 && warpgroup > T::kHalves) {
        set_registers<T::kSumRegisters, T::kLaunchRegisters>();
        if constexpr (T::kWide)
            warpgroup == 2 ? WideSumWarpgroup<T, true>(shared, arguments).run()
                           : WideSumWarpgroup<T, false>(shared, arguments).run();
        else if constexpr (T::kSumWarpgroups > 0)
            SumWarpgroup<T>(shared, arguments).run();
    } else {
        set_registers<T::kConsumerRegisters, T::kLaunchRegisters>();
        if constexpr (T::kSumWarpgroups > 0)
            ScanWarpgroup<T>(shared, arguments, warpgroup - 1).run();
        else
            BackwardConsumer<T>(shared, arguments, warpgroup - 1).run();
    }
}

template <class Element, int kColumns, int kHeadDimV, bool kGated>
void launch_backward(const BackwardParams& p, cudaStream_t stream) {
    using T = BackwardTraits<Element, kColumns, kHeadDimV, kGated>;
    const Sizes& z = p.sizes;
    BackwardArguments a;
    a.params = p;
    plan_backward(p, &a.plan);
    launch_plan(p, a.plan, stream);
    a.q = make_query_map(p.q, z, z.head_dim, kStepRows);
    a.d_o = make_query_map(p.d_o, z, z.head_dim_v, kStepRows);
    a.k = make_key_map(p.k, z, z.head_dim, kHalfTileKeys);
    a.v = make_key_map(p.v, z, z.head_dim_v, kHalfTileKeys);
    if constexpr (T::kBiases > 0) {
        a.q_biases = make_query_map(p.q, z, z.head_dim, kStepRows, T::kBiases);
        a.k_biases = make_key_map(p.k, z, z.head_dim, kHalfTileKeys, T::kBiases);
    }
    const common::Scalars scalars = common::scalars_of<Element>(p.options);
    a.scale = scalars.scale;
    a.scale_log2 = scalars.scale_log2e;
    a.reach = scalars.reach;
    a.wait_record = common::wait_record();
    const int64_t num_tickets = int64_t(a.plan.max_key_tiles) * a.plan.num_kv_heads * a.plan.parts.count();
    common::launch<common::Start::kBeforeEnd>("hopper backward", backward<T>,
                                              std::min<int64_t>(common::num_multiprocessors(), num_tickets),
                                              T::kThreads, sizeof(typename T::Shared), stream, a);
    finish_gradients(p, a.plan, a.scale, stream);
}

}  // namespace megatron_sb::hopper
