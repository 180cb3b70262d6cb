// The key pass of block_backward: dk and dv. A CTA owns 64 keys of one KV head (and, for wide heads, 128 columns of dk
// and dv). It processes all rows of Q that see these keys in steps of 64 rows. The rows come from all segments that
// share these keys and all query heads that read this KV head:
//
//   S = Q K^T,  dP = dO V^T,  A and dz (scan.cuh) from the carries of the query pass,  dV += A^T dO,  dK += dz^T Q
//
// For S and dP, a warp has 16 rows of Q and all keys. For the sums, two warps have dV and two dK, each with all keys
// and half of the columns; they read A and dz transposed from shared memory.
#pragma once

#include "kernels/common/scan.cuh"
#include "kernels/portable/bwd.cuh"
#include "kernels/portable/passes.h"

namespace megatron_sb::portable {
namespace {

constexpr int kBlocks = kKeyTile / 8;  // blocks of 8 accumulator columns
using KeyOrder = KeysToColumns<kKeyTile>;

// A step: up to kQueryStep rows of Q of one head.
struct Step {
    int32_t q_row, head;
    int32_t visible;  // keys that the first row sees, counted from the start of the key tile; any sign, any size
    int32_t block;    // index of its carries in this chunk
    uint8_t num_rows, num_keys;  // rows of the step; keys of the tile in this segment
    bool some_absent;            // some row starts in a newer key tile, or never
    bool second;                 // in the second half of its query tile
};

struct StepList {
    Step steps[kThreads];
    int found[kWarps];  // steps that each warp found, while the list is written
};

template <class T, int kDim, bool kGated>
struct Shape {
    static constexpr int kPitch = kDim * int(sizeof(T)) < 512 ? kDim * int(sizeof(T)) : 512;
    static constexpr int kChunks = kDim * int(sizeof(T)) / kPitch;
    // Resident: K, V and dO have one tile each in shared memory, and Q has two. Otherwise there is one tile for rows of
    // keys and one for rows of queries, and each operand is loaded again before it is used.
    static constexpr bool kResident = sizeof(T) == 2 && kDim <= 128;
    static constexpr int kColumns = kDim < 128 ? kDim : 128, kSlices = kDim / kColumns;  // of dk and dv
    static constexpr int kOut = kColumns / 2 / 8;                                        // accumulator blocks of a warp
    static constexpr int kKeyBlocks = kKeyTile / 16;
    static constexpr int kTileBytes = 64 * kPitch;
    static constexpr int kScorePitch = kKeyTile * int(sizeof(T)), kScoreBytes = kQueryStep * kScorePitch;
    static constexpr int kOperandBytes = (kResident ? 5 : 2) * kTileBytes;
    static constexpr int kGatesAt = kOperandBytes + 2 * kScoreBytes, kGatesBytes = kGated ? kKeyTile * 4 : 0;
    static constexpr int kSharedBytes = kGatesAt + kGatesBytes + int(sizeof(StepList));
    static constexpr int kBlocksPerSm = 2;
    static_assert(kKeyTile == 64 && kQueryStep == 64, "one tile size");
    static_assert(kSharedBytes <= kMinSharedBytes, "every GPU from sm_80 on has this much");
};

template <class T, int kDim, bool kGated>
class KeyTilePass {
    using S = Shape<T, kDim, kGated>;
    using Block = float[1][kBlocks][4];

  public:
    __device__ KeyTilePass(const BackwardParams& params, const BackwardPlan& plan, const Scalars& scalars,
                           const KeyTile& tile, int batch, int key_head, int slice, uint8_t* shared)
        : p_(params),
          plan_(plan),
          scalars_(scalars),
          tile_(tile),
          batch_(batch),
          key_head_(key_head),
          slice_(slice),
          tiles_(shared_address(shared)),
          gates_(reinterpret_cast<float*>(shared + S::kGatesAt)),
          list_(*reinterpret_cast<StepList*>(shared + S::kSharedBytes - sizeof(StepList))) {}

    __device__ void run() {
        const Sizes& z = p_.sizes;
        const int group = z.num_heads / z.num_kv_heads;
        if constexpr (kGated) read_gates();
        for (int i = uniform(tile_.segment); i >= 0; i = uniform(plan_.next_segment[i])) {
            const Segment s = clamped(p_.segments[i], z);
            const int candidates = uniform(num_candidates(s));
            for (int first = 0; first < candidates * group; first += kThreads) {
                const int steps = collect(s, candidates, first + int(threadIdx.x));
                if (steps > 0) process_steps(steps);
            }
        }
        if (!has_steps_) return;
        finish();
        if constexpr (kGated) finish_gates();
    }

  private:
    static constexpr int kStepsOfTile = kQueryTile<T, kDim> / kQueryStep;

    __device__ int visible(const Segment& s, int row) const {
        return row + s.q_pos_minus_k_pos + (p_.options.attend_current ? 1 : 0);
    }

    // ---- the list of steps ------------------------------------------------------------------------------------------
    __device__ int first_tile(const Segment& s) const {  // the first query tile that sees a key of this tile
        return max(tile_.begin + 1 - visible(s, 0), 0) / kQueryTile<T, kDim>;
    }
    __device__ int num_candidates(const Segment& s) const {
        if (tile_.begin >= s.k_len) return 0;
        const int tiles = (s.q_len + kQueryTile<T, kDim> - 1) / kQueryTile<T, kDim>;
        return max(tiles - first_tile(s), 0) * kStepsOfTile;
    }

    __device__ bool candidate(const Segment& s, int candidates, int number, Step& step) const {
        const int group = p_.sizes.num_heads / p_.sizes.num_kv_heads;
        if (number >= candidates * group) return false;
        const int half = number % kStepsOfTile;
        const int tile_row = (first_tile(s) + number % candidates / kStepsOfTile) * kQueryTile<T, kDim>;
        const int row = tile_row + half * kQueryStep, rows = min(kQueryStep, s.q_len - row);
        if (rows <= 0 || visible(s, row + rows - 1) <= tile_.begin) return false;

        const int head = key_head_ * group + number / candidates;
        const int key_tiles = key_tiles_of(visible(s, tile_row), min(kQueryTile<T, kDim>, s.q_len - tile_row), s.k_len);
        const int64_t block = block_in_chunk(plan_, p_.sizes, plan_.first_block[s.q_begin + tile_row],
                                             batch_ * p_.sizes.num_heads + head, key_tiles);
        if (block < 0) return false;
        const Starts& starts = plan_.starts[block];
        const int key_tile = tile_.begin / kKeyTile;
        if (key_tile < starts.first[half]) return false;
        step = {s.q_begin + row,
                head,
                visible(s, row) - tile_.begin,
                int(block) + key_tile,
                uint8_t(rows),
                uint8_t(min(kKeyTile, s.k_len - tile_.begin)),
                key_tile < starts.last[half],
                half == 1};
        return true;
    }

    // Writes the steps among kThreads candidates to shared memory, in order, and returns their number.
    __device__ int collect(const Segment& s, int candidates, int number) {
        Step step;
        const bool take = candidate(s, candidates, number, step);
        const unsigned lanes = __ballot_sync(kAllLanes, take);
        const int warp = threadIdx.x / 32;
        __syncthreads();  // all threads have finished the previous steps
        list_.found[warp] = __popc(lanes);
        __syncthreads();
        int before = __popc(lanes & ((1u << threadIdx.x % 32) - 1)), all = 0;
        for (int w = 0; w < kWarps; ++w) {
            if (w < warp) before += list_.found[w];
            all += list_.found[w];
        }
        if (take) list_.steps[before] = step;
        __syncthreads();
        return uniform(all);
    }

    // ---- operands ---------------------------------------------------------------------------------------------------
    __device__ uint32_t key_operand(int i) const { return tiles_ + i * S::kTileBytes; }
    __device__ uint32_t query_operand(int i) const { return tiles_ + ((S::kResident ? 2 : 1) + i) * S::kTileBytes; }
    __device__ uint32_t weights_tile() const { return tiles_ + S::kOperandBytes; }
    __device__ uint32_t gradients_tile() const { return weights_tile() + S::kScoreBytes; }

    __device__ void load_keys(uint32_t to, const Rows<const void*>& rows, int width, int byte) const {
        const HeadRows from = head_rows<T>(rows, batch_, key_head_, width).rows_from(tile_.k_row + tile_.begin);
        load_rows<kKeyTile, S::kPitch>(to, from.bytes_from(byte), tile_.num_keys - tile_.begin, KeyOrder{});
    }
    // Absent rows are loaded as zeros: their values must not reach these keys.
    __device__ void load_queries(uint32_t to, const Rows<const void*>& rows, int width, int byte,
                                 const Step& step) const {
        const HeadRows from = head_rows<T>(rows, batch_, step.head, width).rows_from(step.q_row).bytes_from(byte);
        if (!step.some_absent) {
            load_rows<kQueryStep, S::kPitch>(to, from, step.num_rows);
        } else {
            const float* mass = carries(step);
            load_rows<kQueryStep, S::kPitch>(to, from, step.num_rows, InOrder{},
                                             [&](int row) { return mass[row] != kAbsent; });
        }
    }
    __device__ void load_q(uint32_t to, const Step& step, int chunk = 0) const {
        load_queries(to, p_.q, p_.sizes.head_dim, chunk * S::kPitch, step);
    }
    __device__ void load_do(uint32_t to, const Step& step, int chunk = 0) const {
        load_queries(to, p_.d_o, p_.sizes.head_dim_v, chunk * S::kPitch, step);
    }
    __device__ const float* carries(const Step& step) const {
        return plan_.carries + int64_t(step.block) * 2 * kQueryTile<T, kDim> + (step.second ? kQueryStep : 0);
    }

    // Loads the gates of the keys to shared memory. The barriers in collect() order this before every read.
    __device__ void read_gates() const {
        const int key = threadIdx.x;
        if (key >= kKeyTile) return;
        const bool exists = tile_.begin + key < tile_.num_keys;
        const HeadRows row = head_rows<T>(p_.k, batch_, key_head_, p_.sizes.head_dim)
                                 .rows_from(int64_t(tile_.k_row) + tile_.begin + (exists ? key : 0));
        gates_[column_of_key<kKeyTile>(key)] = exists ? read_gate<T>(row) : 1.f;
    }

    // ---- the products -----------------------------------------------------------------------------------------------
    __device__ void process_steps(int steps) {
        if constexpr (S::kResident) {
            if (!has_steps_) {
                load_keys(key_operand(0), p_.k, p_.sizes.head_dim, 0);
                load_keys(key_operand(1), p_.v, p_.sizes.head_dim_v, 0);
            }
            load_q(query_operand(0), list_.steps[0]);
            commit_copies();
            for (int i = 0; i < steps; ++i) resident_step(i, steps);
        } else {
            for (int i = 0; i < steps; ++i) lean_step(list_.steps[i]);
        }
        has_steps_ = true;
    }

    // Loads Q of the next step and dO of this one while S is computed.
    __device__ void resident_step(int i, int steps) {
        const Step step = list_.steps[i];
        const uint32_t q_tile = query_operand(i % 2), do_tile = query_operand(2), warp_rows = threadIdx.x / 32 * 16;
        wait_for_copies<0>();
        __syncthreads();
        load_do(do_tile, step);
        commit_copies();
        if (i + 1 < steps) load_q(query_operand((i + 1) % 2), list_.steps[i + 1]);
        commit_copies();
        ThreadRows rows = read_carries(step);
        Block s = {}, dp = {};
        multiply_rows<T, S::kPitch>(s, q_tile + warp_rows * S::kPitch, key_operand(0),
                                    p_.sizes.head_dim * int(sizeof(T)));
        if (rows.masked) fill_hidden(s, rows.limit, scalars_.hidden);
        wait_for_copies<1>();
        __syncthreads();
        Rises<1, kBlocks> rises;
        const HeadLogits logits = scalars_.logits_of(step.head);
        const uint32_t do_rows = do_tile + warp_rows * S::kPitch;
        const int width = p_.sizes.head_dim_v * int(sizeof(T));
        if constexpr (kGated) {
            exponentials<false>(s, logits, rises, gates());
            multiply_rows<T, S::kPitch>(dp, do_rows, key_operand(1), width);
        } else {
            multiply_rows<T, S::kPitch>(dp, do_rows, key_operand(1), width,
                                        exponentials_in_parts<S::kPitch / 32>(s, logits, rises));
        }
        to_gradients(s, dp, rises, rows);
        __syncthreads();
        add(do_tile, q_tile);
    }

    __device__ void lean_step(const Step& step) {
        const uint32_t keys = key_operand(0), queries = query_operand(0), warp_rows = threadIdx.x / 32 * 16;
        const int widths[] = {p_.sizes.head_dim * int(sizeof(T)), p_.sizes.head_dim_v * int(sizeof(T))};
        Block x[2] = {};  // S, dP
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            for (int chunk = 0; chunk < S::kChunks; ++chunk) {
                const int byte = chunk * S::kPitch;
                __syncthreads();
                i == 0 ? load_q(queries, step, chunk) : load_do(queries, step, chunk);
                load_keys(keys, i == 0 ? p_.k : p_.v, i == 0 ? p_.sizes.head_dim : p_.sizes.head_dim_v, byte);
                commit_copies();
                wait_for_copies<0>();
                __syncthreads();
                multiply_rows<T, S::kPitch>(x[i], queries + warp_rows * S::kPitch, keys, widths[i] - byte);
            }
        }
        ThreadRows rows = read_carries(step);
        if (rows.masked) fill_hidden(x[0], rows.limit, scalars_.hidden);
        Rises<1, kBlocks> rises;
        exponentials<false>(x[0], scalars_.logits_of(step.head), rises, gates());
        to_gradients(x[0], x[1], rises, rows);
        __syncthreads();
        const int chunk = S::kChunks == 1 ? 0 : slice_;
        load_do(keys, step, chunk);
        load_q(queries, step, chunk);
        commit_copies();
        wait_for_copies<0>();
        __syncthreads();
        add(keys, queries);
    }

    // The carries and limits of the rows of this thread for a step.
    struct ThreadRows {
        float mass[1][2], prefix[1][2];
        Limits<1> limit;
        bool masked;  // some row of the warp does not see all keys of the tile
    };
    __device__ ThreadRows read_carries(const Step& step) const {
        const int t = threadIdx.x % 4, warp_row = threadIdx.x / 32 * 16, row = warp_row + threadIdx.x % 32 / 4;
        const float* const carry = carries(step);
        ThreadRows rows;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rows.mass[0][r] = carry[row + 8 * r];
            rows.prefix[0][r] = carry[kQueryTile<T, kDim> + row + 8 * r];
        }
        rows.masked =
            __any_sync(kAllLanes, step.some_absent || min(step.visible + warp_row, int(step.num_keys)) < kKeyTile);
        if (rows.masked) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int seen = min(step.visible + row + 8 * r, int(step.num_keys));
                rows.limit[0][r] = rows.mass[0][r] == kAbsent ? 0 : seen - t * (kKeyTile / 4);
            }
        }
        return rows;
    }

    __device__ auto gates() const {
        if constexpr (kGated)
            return GateValues(gates_);
        else
            return NoGates();
    }

    // Computes A and dz from e and dP, writes them to shared memory, and adds df to d_gate_.
    __device__ void to_gradients(Block& e, Block& dp, const Rises<1, kBlocks>& rises, ThreadRows& rows) {
        if (rows.masked) fill_hidden(dp, rows.limit, 0.f);
        const auto sink = [&](int, int r, int n, float older_a, float newer_a) {
            dp[0][n][2 * r] *= older_a;
            dp[0][n][2 * r + 1] *= newer_a;
            store_scores(weights_tile(), r, n, kWeightScale<T> * older_a, kWeightScale<T> * newer_a);
        };
        const bool key_by_key = weights(e, rises, rows.mass, sink, gates());
        if constexpr (kGated) {
            float df[2 * kBlocks] = {};
            logit_gradients(e, dp, rows.prefix, key_by_key, gates(), [&](int r, int k, float row_df) {
                if (!rows.masked || k < rows.limit[0][r]) df[k] += row_df;  // masked values may be NaN
            });
            sum_over_rows(df, d_gate_);
        } else {
            logit_gradients(e, dp, rows.prefix, key_by_key);
        }
        if (rows.masked) fill_hidden(dp, rows.limit, 0.f);
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int n = 0; n < kBlocks; ++n)
                store_scores(gradients_tile(), r, n, dp[0][n][2 * r], dp[0][n][2 * r + 1]);
    }

    // Stores accumulator columns 8n + 2t and 8n + 2t + 1 of row r to a tile of scores.
    __device__ void store_scores(uint32_t tile, int r, int n, float x, float y) const {
        const int lane = opaque(threadIdx.x % 32), g = lane / 4, t = lane % 4;
        const int byte = 2 * t * int(sizeof(T)), row = threadIdx.x / 32 * 16 + g;
        const uint32_t at = tile + row * S::kScorePitch + ((byte / 16 ^ g) << 4) + byte % 16;
        const uint32_t to = advance(at, n * 8 * int(sizeof(T))) + r * 8 * S::kScorePitch;
        if constexpr (sizeof(T) == 2)
            store_shared(to, pack<T>(x, y));
        else
            store_shared(to, __float_as_uint(x), __float_as_uint(y));
    }

    __device__ bool makes_dv() const {
        return threadIdx.x < kThreads / 2;
    }
    // Returns the first column of this warp's sums, counted from the start of the slice.
    __device__ int warp_column() const {
        return threadIdx.x / 32 % 2 * (S::kColumns / 2);
    }

    __device__ void add(uint32_t do_tile, uint32_t q_tile) {
        const int column = (S::kChunks == 1 ? slice_ * S::kColumns : 0) + warp_column();
        multiply_columns<T, kQueryStep, S::kScorePitch, S::kPitch>(sum_, makes_dv() ? weights_tile() : gradients_tile(),
                                                                   makes_dv() ? do_tile : q_tile, column);
    }

    __device__ void finish() const {
        const Rows<void*>& rows = makes_dv() ? p_.dv : p_.dk;
        const int width = makes_dv() ? p_.sizes.head_dim_v : p_.sizes.head_dim;
        const float factor = makes_dv() ? 1.f / kWeightScale<T> : scalars_.scale;
#pragma unroll
        for (int m = 0; m < S::kKeyBlocks; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int key = key_of_column<kKeyTile>(16 * m + 8 * r + threadIdx.x % 32 / 4);
                if (tile_.begin + key >= tile_.num_keys) continue;
                add_row(gradient_row(rows, tile_.k_row + tile_.begin + key), width,
                        slice_ * S::kColumns + warp_column(), sum_[m], r, factor);
            }
    }
    // Adds the sums of the warps in a fixed order, in the memory of the gates. The last barrier of the last step comes
    // after the last read of the gates.
    __device__ void finish_gates() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int key = lane % 4 * (kKeyTile / 4) + lane / 4 * 2;
        for (int turn = 0; turn < kWarps; ++turn) {
            if (warp == turn) {
                gates_[key] = d_gate_[0] + (turn == 0 ? 0.f : gates_[key]);
                gates_[key + 1] = d_gate_[1] + (turn == 0 ? 0.f : gates_[key + 1]);
            }
            __syncthreads();
        }
        const int64_t row = int64_t(tile_.k_row) + tile_.begin + threadIdx.x;
        if (slice_ == 0 && threadIdx.x < kKeyTile && tile_.begin + int(threadIdx.x) < tile_.num_keys)
            atomicAdd(gradient_row(p_.dk, row) + p_.sizes.head_dim, gates_[threadIdx.x]);
    }
    __device__ float* gradient_row(const Rows<void*>& rows, int64_t row) const {
        return static_cast<float*>(rows.data) + batch_ * rows.batch_stride + row * rows.row_stride +
               key_head_ * rows.head_stride;
    }

    const BackwardParams& p_;
    const BackwardPlan& plan_;
    const Scalars& scalars_;
    const KeyTile tile_;
    const int batch_, key_head_, slice_;
    const uint32_t tiles_;
    float* const gates_;  // by accumulator column; finish_gates() replaces them by their gradients, by key
    StepList& list_;
    bool has_steps_ = false;
    float d_gate_[2] = {};                       // over the rows of this warp; sum_over_rows says for which keys
    float sum_[S::kKeyBlocks][S::kOut][4] = {};  // of dv, multiplied by kWeightScale, or of dk
};

template <class T, int kDim, bool kGated>
__global__ void __launch_bounds__(kThreads, Shape<T, kDim, kGated>::kBlocksPerSm)
    key_pass(const __grid_constant__ BackwardParams params, const __grid_constant__ BackwardPlan plan,
             const __grid_constant__ Scalars scalars) {
    extern __shared__ __align__(1024) uint8_t shared[];
    using S = Shape<T, kDim, kGated>;
    const Sizes& z = params.sizes;
    const int slice = blockIdx.x % S::kSlices, rest = blockIdx.x / S::kSlices;
    const int tile = rest % plan.max_key_tiles, head = rest / plan.max_key_tiles;
    if (tile >= min(plan.totals->num_key_tiles, plan.max_key_tiles)) return;
    if (plan.chunk * plan.window >= plan.totals->carry_blocks * z.batch * z.num_heads) return;
    KeyTilePass<T, kDim, kGated>(params, plan, scalars, plan.key_tiles[tile], head / z.num_kv_heads,
                                 head % z.num_kv_heads, slice, shared)
        .run();
}

}  // namespace

template <class T>
void launch_key_pass(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream) {
    const int64_t heads = int64_t(params.sizes.batch) * params.sizes.num_kv_heads;
    with_instance<T>(params, [&](auto instance) {
        constexpr int kDim = decltype(instance)::kDim;
        constexpr bool kGated = decltype(instance)::kGated;
        using S = Shape<T, kDim, kGated>;
        launch("block_backward", key_pass<T, kDim, kGated>, plan.max_key_tiles * heads * S::kSlices, S::kSharedBytes,
               stream, params, plan, scalars_of<T>(params.options));
    });
}

}  // namespace megatron_sb::portable
