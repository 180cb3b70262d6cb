// The query pass of block_backward: dq, prefix_out, and the carries of each row and key tile (bwd.cuh). A CTA owns a
// tile of rows of Q of one head. It visits the keys that these rows see, from the restart to the newest, in units of 32
// keys. A key tile has two units:
//
//   S = Q K^T,  dP = dO V^T,  A (scan.cuh),  g = A dP,  dz = (1 - beta) g - beta b,  dQ += dz K
//
// The mass at the newer edge of a unit is P + P rise, from the mass P at its older edge. It is never derived from a
// total mass, and never divided by prod 1 / (1 + e), because that product drifts. A row that starts in a key tile has
// the mass of its restart record at the newer edge of that tile. The newer unit of such a tile is therefore visited
// first, to compute the mass between the two units, and then again in order.
#pragma once

#include "kernels/common/scan.cuh"
#include "kernels/portable/bwd.cuh"
#include "kernels/portable/passes.h"

namespace megatron_sb::portable {
namespace {

constexpr int kUnit = kKeyTile / 2;
constexpr int kBlocks = kUnit / 8;  // blocks of 8 accumulator columns
using KeyOrder = KeysToColumns<kUnit>;

template <class T, int kDim, bool kGated>
struct Shape {
    static constexpr int kRows = kQueryTile<T, kDim>, kWarpRows = kRows / kWarps, kTiles = kWarpRows / 16;
    static constexpr int kPitch = kDim * int(sizeof(T)) < 512 ? kDim * int(sizeof(T)) : 512;
    static constexpr int kChunks = kDim * int(sizeof(T)) / kPitch;  // if above 1, operands are loaded chunk by chunk
    static constexpr int kStages = kPitch <= 256 ? 2 : 1;           // of K and V; with 2 the next unit is prefetched
    static constexpr int kRowBytes = kRows * kPitch, kKeyBytes = kUnit * kPitch;
    static constexpr int kTileBytes = 2 * kRowBytes + kStages * 2 * kKeyBytes;
    static constexpr int kGatesOfUnit = kUnit * kGateBytes;  // bytes for each stage, after the tiles
    static constexpr int kSharedBytes = kTileBytes + (kGated ? kStages * kGatesOfUnit : 0);
    static constexpr int kColumnBlocks = kPitch / int(sizeof(T)) / 8;
    static constexpr int kBlocksPerSm = 2;
    // 1024 bytes remain for the static __shared__ variables of the kernel.
    static_assert(kSharedBytes <= kMinSharedBytes - 1024, "every GPU from sm_80 on has this much");
};

struct Unit {
    int tile, half;
    bool only_mass;  // the first visit of the newer unit of a tile in which rows may start
};

// The rows of K and V. They are in shared memory to save registers.
struct KeyRows {
    HeadRows k, v;
};

template <class T, int kDim, bool kGated>
class QueryTilePass {
    using S = Shape<T, kDim, kGated>;
    using Block = float[S::kTiles][kBlocks][4];

  public:
    __device__ QueryTilePass(const BackwardParams& params, const BackwardPlan& plan, const Scalars& scalars,
                             const QueryTile& tile, const Head& head, int64_t block, KeyRows& keys, uint8_t* shared)
        : p_(params),
          scalars_(scalars),
          logits_(scalars.logits_of(head.query)),
          rows_{params.sizes, tile, head},
          starts_(plan.starts + block),
          carries_(plan.carries + block * 2 * S::kRows),
          keys_(keys),
          q_tile_(shared_address(shared)),
          do_tile_(q_tile_ + S::kRowBytes),
          key_tiles_(q_tile_ + 2 * S::kRowBytes),
          gates_(shared + S::kTileBytes) {
        const Sizes& z = params.sizes;
        q_ = head_rows<T>(params.q, head.batch, head.query, z.head_dim).rows_from(tile.q_row);
        do_ = head_rows<T>(params.d_o, head.batch, head.query, z.head_dim_v).rows_from(tile.q_row);
        if (threadIdx.x == 0) {
            keys_.k = head_rows<T>(params.k, head.batch, head.key, z.head_dim).rows_from(tile.k_row);
            keys_.v = head_rows<T>(params.v, head.batch, head.key, z.head_dim_v).rows_from(tile.k_row);
        }
        num_tiles_ = key_tiles_of(tile.visible, tile.num_rows, tile.k_len);
    }

    __device__ void run() {
        find_starts();
        if (oldest_ == kNeverStarts) return;
        rows_.for_each([&](int m, int r, int row) {
            const float* prefix_in = static_cast<const float*>(p_.prefix_in);
            const bool exists = row < rows_.tile.num_rows;
            mass_[m][r] = !exists ? 0.f : start_tile(row) < 0 ? start_mass(row) : kAbsent;
            prefix_[m][r] = exists && prefix_in != nullptr ? prefix_in[rows_.index(row)] : 0.f;
        });
        const bool starts = oldest_ <= newest_;  // some row starts in the first tile
        Unit u = {oldest_, starts, starts};
        if constexpr (S::kChunks == 1) {
            load_rows<S::kRows, S::kPitch>(q_tile_, q_, rows_.tile.num_rows);
            load_rows<S::kRows, S::kPitch>(do_tile_, do_, rows_.tile.num_rows);
            if (S::kStages == 2) load_unit(u, 0);
        }
        for (int n = 0; u.tile < num_tiles_; ++n) {
            const Unit next = after(u);
            if constexpr (S::kChunks == 1)
                process_unit(u, next, n);
            else
                process_unit_in_chunks(u);
            u = next;
        }
        finish();
    }

  private:
    // Returns the key tile in which a row starts. Rows beyond the query tile have no mass and need no mask, so they
    // count as started before all keys.
    __device__ int start_tile(int row) const {
        return row < rows_.tile.num_rows ? restart_tile<float>(p_, rows_.index(row), num_tiles_) : kBeforeAllKeys;
    }
    __device__ float start_mass(int row) const { return restart_mass<float>(p_, rows_.index(row)); }

    // Computes in which key tiles rows start: the rows of this warp, of the query tile, and, for the key pass, of each
    // kQueryStep rows.
    __device__ void find_starts() {
        __shared__ int first[kWarps], last[kWarps], newest[kWarps];
        int warp_first = kNeverStarts, warp_newest = -1;
        warp_last_ = -1;
        rows_.for_each([&](int, int, int row) {
            const int tile = start_tile(row);
            if (row < rows_.tile.num_rows) warp_first = min(warp_first, max(tile, 0));
            warp_last_ = max(warp_last_, tile);
            if (tile != kNeverStarts) warp_newest = max(warp_newest, tile);
        });
        warp_first_ = __reduce_min_sync(kAllLanes, warp_first);
        warp_last_ = __reduce_max_sync(kAllLanes, warp_last_);
        warp_newest = __reduce_max_sync(kAllLanes, warp_newest);
        const int warp = threadIdx.x / 32;
        first[warp] = warp_first_;
        last[warp] = warp_last_;
        newest[warp] = warp_newest;
        __syncthreads();
        oldest_ = kNeverStarts, newest_ = -1;
        Starts starts = {{kNeverStarts, kNeverStarts}, {-1, -1}};
        for (int w = 0; w < kWarps; ++w) {
            const int step = w * S::kWarpRows / kQueryStep;
            oldest_ = min(oldest_, first[w]);
            newest_ = max(newest_, newest[w]);
            starts.first[step] = min(starts.first[step], first[w]);
            starts.last[step] = max(starts.last[step], last[w]);
        }
        oldest_ = uniform(oldest_);
        newest_ = uniform(newest_);
        if (threadIdx.x == 0) *starts_ = starts;
    }

    __device__ Unit after(const Unit& u) const {
        if (u.only_mass) return {u.tile, 0, false};
        if (u.half == 0) return {u.tile, 1, false};
        const bool starts = u.tile < newest_;
        return {u.tile + 1, starts, starts};
    }

    __device__ uint32_t key_buffer(int n) const { return key_tiles_ + n % S::kStages * 2 * S::kKeyBytes; }
    __device__ void load_keys(uint32_t to, const HeadRows& from, const Unit& u) const {
        const int begin = u.tile * kKeyTile + u.half * kUnit;
        load_rows<kUnit, S::kPitch>(to, from.rows_from(begin), rows_.tile.k_len - begin, KeyOrder{});
    }
    // Starts the copies of K, V and the gates of the n-th unit.
    __device__ void load_unit(const Unit& u, int n, int byte = 0) const {
        load_keys(key_buffer(n), keys_.k.bytes_from(byte), u);
        load_keys(key_buffer(n) + S::kKeyBytes, keys_.v.bytes_from(byte), u);
        if constexpr (kGated) {
            const int begin = u.tile * kKeyTile + u.half * kUnit;
            load_gates<kUnit>(shared_address(gate_buffer(n)), keys_.k.rows_from(begin), rows_.tile.k_len - begin);
        }
        commit_copies();
    }
    __device__ uint8_t* gate_buffer(int n) const { return gates_ + n % S::kStages * S::kGatesOfUnit; }
    __device__ auto gates(int n) const {
        if constexpr (kGated)
            return GateRows<T>(gate_buffer(n));
        else
            return NoGates();
    }

    // Returns whether this warp must process a unit: some of its rows start in it, or have started and see some of its
    // keys.
    __device__ bool takes_part(const Unit& u) const {
        const int begin = u.tile * kKeyTile + u.half * kUnit;
        return u.tile >= warp_first_ &&
               (u.tile <= warp_last_ || rows_.visible(rows_.warp_row + S::kWarpRows - 1) > begin);
    }

    __device__ void process_unit(const Unit& u, const Unit& next, int n) {
        const uint32_t k_tile = key_buffer(n);
        if (S::kStages == 1) {
            __syncthreads();
            load_unit(u, n);
        }
        wait_for_copies<0>();
        __syncthreads();
        if (S::kStages == 2 && next.tile < num_tiles_) load_unit(next, n + 1);
        const bool active = takes_part(u);
        if (active) {
            Block s = {}, dp = {};
            Rises<S::kTiles, kBlocks> rises;
            multiply_rows<T, S::kPitch>(s, q_tile_ + rows_.warp_row * S::kPitch, k_tile, q_.width);
            hide(s, scalars_.hidden, u);
            const uint32_t do_rows = do_tile_ + rows_.warp_row * S::kPitch;
            if (kGated || u.only_mass) exponentials<false>(s, logits_, rises, gates(n));
            if constexpr (kGated) {
                if (!u.only_mass) multiply_rows<T, S::kPitch>(dp, do_rows, k_tile + S::kKeyBytes, do_.width);
            } else if (!u.only_mass) {
                multiply_rows<T, S::kPitch>(dp, do_rows, k_tile + S::kKeyBytes, do_.width,
                                            exponentials_in_parts<S::kPitch / 32>(s, logits_, rises));
            }
            to_gradients(s, dp, rises, u, gates(n));
            if (!u.only_mass) multiply_accumulators<T, S::kPitch>(dq_[0], dp, k_tile);
        }
        if (!u.only_mass && !active) write_carries(u);
    }

    __device__ void process_unit_in_chunks(const Unit& u) {
        const bool active = takes_part(u);
        Block s = {}, dp = {};
        for (int chunk = 0; chunk < S::kChunks; ++chunk) {
            const int byte = chunk * S::kPitch;
            __syncthreads();
            load_rows<S::kRows, S::kPitch>(q_tile_, q_.bytes_from(byte), rows_.tile.num_rows);
            load_rows<S::kRows, S::kPitch>(do_tile_, do_.bytes_from(byte), rows_.tile.num_rows);
            load_unit(u, 0, byte);
            wait_for_copies<0>();
            __syncthreads();
            if (!active) continue;
            multiply_rows<T, S::kPitch>(s, q_tile_ + rows_.warp_row * S::kPitch, key_tiles_, q_.width - byte);
            multiply_rows<T, S::kPitch>(dp, do_tile_ + rows_.warp_row * S::kPitch, key_tiles_ + S::kKeyBytes,
                                        do_.width - byte);
        }
        if (active) {
            Rises<S::kTiles, kBlocks> rises;
            hide(s, scalars_.hidden, u);
            exponentials<false>(s, logits_, rises, gates(0));
            to_gradients(s, dp, rises, u, gates(0));
        }
        if (u.only_mass) return;
        if (!active) write_carries(u);
#pragma unroll
        for (int chunk = 0; chunk < S::kChunks; ++chunk) {
            __syncthreads();
            load_unit(u, 0, chunk * S::kPitch);
            wait_for_copies<0>();
            __syncthreads();
            if (active) multiply_accumulators<T, S::kPitch>(dq_[chunk], dp, key_tiles_);
        }
    }

    // The carry of a tile has the prefix at its older edge and the mass at its newer edge. The prefix is written before
    // the older unit changes it, the mass after the newer unit has computed it.
    __device__ void write_carries(const Unit& u) const {
        if (threadIdx.x % 4 != 0) return;
        float* const to = carries_ + int64_t(u.tile) * 2 * S::kRows + rows_.warp_row + threadIdx.x % 32 / 4;
#pragma unroll
        for (int m = 0; m < S::kTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (u.half == 0)
                    to[S::kRows + 16 * m + 8 * r] = prefix_[m][r];
                else
                    to[16 * m + 8 * r] = mass_[m][r];
            }
    }

    // Returns whether some row of this warp starts in this key tile or in a newer one.
    __device__ bool starting(const Unit& u) const {
        return u.tile <= warp_last_;
    }
    // Returns whether some row of this warp does not use all keys of the unit.
    __device__ bool masked(const Unit& u) const {
        return starting(u) || rows_.visible(rows_.warp_row) < u.tile * kKeyTile + (u.half + 1) * kUnit;
    }
    // Writes `value` for keys that a row does not see, or that are older than its start. The limits are computed again
    // in this rare branch; keeping them would cost registers.
    __device__ void hide(Block& x, float value, const Unit& u) const {
        if (!masked(u)) return;
        Limits<S::kTiles> limit;
        rows_.for_each([&](int m, int r, int row) {
            const int begin = u.tile * kKeyTile + u.half * kUnit + int(threadIdx.x % 4) * (kUnit / 4);
            limit[m][r] = starting(u) && start_tile(row) > u.tile ? 0 : rows_.visible(row) - begin;
        });
        fill_hidden(x, limit, value);
    }

    // Replaces dP by dz and keeps e. Moves mass and prefix to the newer edge of the unit. With only_mass, it only moves
    // the mass of rows that start in this tile to the older edge of the unit.
    template <class Gates>
    __device__ void to_gradients(Block& e, Block& dp, const Rises<S::kTiles, kBlocks>& rises, const Unit& u,
                                 const Gates& gates) {
        hide(dp, 0.f, u);
        float newer[S::kTiles][2], older[S::kTiles][2], oldest[S::kTiles][2];
        rows_.for_each([&](int m, int r, int) {
            newer[m][r] = mass_[m][r];
            oldest[m][r] = ascend(rises.all[m][r], newer[m][r]);
        });
        if (starting(u)) {
            rows_.for_each([&](int m, int r, int row) {
                const int start = start_tile(row);
                if (start >= u.tile) newer[m][r] = start == u.tile && u.half == 1 ? start_mass(row) : mass_[m][r];
                older[m][r] = newer[m][r];
                const float from_newer = descend(rises.all[m][r], older[m][r]);
                if (start >= u.tile) oldest[m][r] = from_newer;
            });
        }
        const auto sink = [&](int m, int r, int n, float older_a, float newer_a) {
            dp[m][n][2 * r] *= older_a;
            dp[m][n][2 * r + 1] *= newer_a;
        };
        const bool key_by_key = saturated(rises);
        if (key_by_key) {
            rows_.for_each([&](int m, int r, int) { older[m][r] = newer[m][r]; });
            weights_key_by_key(e, older, sink, gates);
        } else {
            weights_upwards(e, rises, oldest, sink, gates);
        }
        if (u.only_mass) {
            rows_.for_each([&](int m, int r, int row) {
                if (start_tile(row) == u.tile) mass_[m][r] = older[m][r];
            });
            return;
        }
        rows_.for_each([&](int m, int r, int) { mass_[m][r] = newer[m][r]; });
        write_carries(u);
        logit_gradients(e, dp, prefix_, key_by_key, gates);
        hide(dp, 0.f, u);
        rows_.for_each([&](int m, int r, int) {
            if (isnan(prefix_[m][r])) prefix_[m][r] = 0.f;  // a NaN must not reach newer units
        });
    }

    __device__ void finish() const {
        const Sizes& z = p_.sizes;
        const int64_t head = rows_.head.batch * p_.dq.batch_stride + rows_.head.query * p_.dq.head_stride;
        rows_.for_each([&](int m, int r, int row) {
            if (row >= rows_.tile.num_rows) return;
            if (threadIdx.x % 4 == 0) static_cast<float*>(p_.prefix_out)[rows_.index(row)] = prefix_[m][r];
            float* const to = static_cast<float*>(p_.dq.data) + head + (rows_.tile.q_row + row) * p_.dq.row_stride;
#pragma unroll
            for (int chunk = 0; chunk < S::kChunks; ++chunk)
                add_row(to, z.head_dim, chunk * S::kColumnBlocks * 8, dq_[chunk][m], r, scalars_.scale);
        });
    }

    const BackwardParams& p_;
    const Scalars& scalars_;
    const HeadLogits logits_;
    const QueryRows<S::kTiles> rows_;
    Starts* const starts_;
    float* const carries_;
    KeyRows& keys_;
    HeadRows q_, do_;
    const uint32_t q_tile_, do_tile_, key_tiles_;
    uint8_t* const gates_;
    int num_tiles_;               // key tiles that the query tile sees
    int oldest_, newest_;         // the oldest and the newest key tile in which a row of the query tile starts
    int warp_first_, warp_last_;  // the same for this warp; warp_last_ is kNeverStarts if some row never starts
    float mass_[S::kTiles][2];    // at the newer edge of the previous unit; kAbsent before the row starts
    float prefix_[S::kTiles][2];  // b at the same edge
    float dq_[S::kChunks][S::kTiles][S::kColumnBlocks][4] = {};
};

template <class T, int kDim, bool kGated>
__global__ void __launch_bounds__(kThreads, Shape<T, kDim, kGated>::kBlocksPerSm)
    query_pass(const __grid_constant__ BackwardParams params, const __grid_constant__ BackwardPlan plan,
               const __grid_constant__ Scalars scalars) {
    extern __shared__ __align__(1024) uint8_t shared[];
    // The host launches as many chunks as a segment table of this size can need. Chunks without work return here.
    const int64_t heads = int64_t(params.sizes.batch) * params.sizes.num_heads;
    if (plan.chunk * plan.window >= plan.totals->carry_blocks * heads) return;
    const int index = blockIdx.x % plan.max_query_tiles;
    if (index >= plan.query_tiles->count) return;
    const QueryTile tile = uniform(plan.query_tiles->entries()[index]);
    const int key_tiles = key_tiles_of(tile.visible, tile.num_rows, tile.k_len);
    if (key_tiles == 0) return;
    const int head = blockIdx.x / plan.max_query_tiles;
    const int64_t block = block_in_chunk(plan, params.sizes, plan.first_block[tile.q_row], head, key_tiles);
    if (block < 0) return;
    __shared__ KeyRows keys;
    QueryTilePass<T, kDim, kGated>(params, plan, scalars, tile, head_of(params.sizes, head), block, keys, shared).run();
}

}  // namespace

template <class T>
void launch_query_pass(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream) {
    const int64_t heads = int64_t(params.sizes.batch) * params.sizes.num_heads;
    with_instance<T>(params, [&](auto instance) {
        constexpr int kDim = decltype(instance)::kDim;
        constexpr bool kGated = decltype(instance)::kGated;
        using S = Shape<T, kDim, kGated>;
        launch("block_backward", query_pass<T, kDim, kGated>, plan.max_query_tiles * heads, S::kSharedBytes, stream,
               params, plan, scalars_of<T>(params.options));
    });
}

}  // namespace megatron_sb::portable
