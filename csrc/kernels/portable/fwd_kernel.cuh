// block_forward for sm_80 and later. A CTA owns a tile of rows of Q of one head. It visits the tiles of 64 keys that
// these rows see, from the newest to the oldest:
//
//   S = Q K^T,   e = exp(z),   A_k = e_k P_k (scan.cuh),   O += A V,   P <- P / prod (1 + e)
//
// It stops when no row has mass left. K has two buffers and V one: V of this tile and K of the next are loaded while S
// is computed. If a row takes more than 256 bytes, K has one buffer, and the next K is loaded while O is computed. If
// it takes more than 512 bytes, Q, K and V are loaded in pieces, and nothing is loaded in advance.
#pragma once

#include "kernels/common/query_tiles.h"
#include "kernels/common/scan.cuh"
#include "kernels/portable/passes.h"
#include "kernels/portable/work.cuh"

namespace megatron_sb::portable {
namespace {

constexpr int kKeys = kRestartTile;
using KeyOrder = KeysToColumns<kKeys>;

template <class T, int kDim, bool kGated>
struct Shape {
    static constexpr int kPitch = kDim * int(sizeof(T)) < 512 ? kDim * int(sizeof(T)) : 512;
    static constexpr int kChunks = kDim * int(sizeof(T)) / kPitch;  // if above 1, Q, K and V are loaded chunk by chunk
    static constexpr int kRows = kQueryTile<T, kDim>, kWarpRows = kRows / kWarps, kTiles = kWarpRows / 16;
    static constexpr int kKeyBuffers = kPitch <= 256 ? 2 : 1;
    static constexpr int kKeyBytes = kKeys * kPitch;
    static constexpr int kTileBytes = kRows * kPitch + (kChunks > 1 ? 1 : kKeyBuffers + 1) * kKeyBytes;
    static constexpr int kGatesOfTile = kKeys * kGateBytes;  // bytes for each buffer of K, after the tiles
    static constexpr int kSharedBytes = kTileBytes + (kGated ? kKeyBuffers * kGatesOfTile : 0);
    static constexpr int kBlocksPerSm = sizeof(T) == 2 && kDim == 64 ? 3 : 2;  // limits the registers of a thread
    static constexpr int kColumnBlocks = kPitch / int(sizeof(T)) / 8;          // of 8 columns, in a chunk of O
    static_assert(kSharedBytes <= kMinSharedBytes, "every GPU from sm_80 on has this much");
};

// With kInBlocks, the keys are in blocks (params.key_blocks). It is a parameter of the template because the loads of
// such keys need more registers.
template <class T, int kDim, bool kGated, bool kInBlocks>
class ForwardTile {
    using S = Shape<T, kDim, kGated>;

  public:
    __device__ ForwardTile(const ForwardParams& params, const Scalars& scalars, const QueryTile& tile, const Head& head,
                           uint8_t* shared)
        : p_(params),
          scalars_(scalars),
          logits_(scalars.logits_of(head.query)),
          rows_{params.sizes, tile, head},
          q_tile_(shared_address(shared)),
          k_tile_(q_tile_ + S::kRows * S::kPitch),
          gates_(shared + S::kTileBytes) {
        const Sizes& z = params.sizes;
        q_ = head_rows<T>(params.q, head.batch, head.query, z.head_dim).rows_from(tile.q_row);
        const int k_row = kInBlocks ? 0 : tile.k_row;
        k_ = head_rows<T>(params.k, head.batch, head.key, z.head_dim).rows_from(k_row);
        v_ = head_rows<T>(params.v, head.batch, head.key, z.head_dim_v).rows_from(k_row);
    }

    __device__ void run() {
        start();
        const int keys = rows_.visible(rows_.tile.num_rows - 1);
        const int newest = (keys + kKeys - 1) / kKeys - 1;
        if constexpr (S::kChunks == 1) {
            if (newest >= 0) {
                load_rows<S::kRows, S::kPitch>(q_tile_, q_, rows_.tile.num_rows);
                load_k(newest);
            }
            for (int tile = newest; tile >= 0; --tile)
                if (!process_key_tile(tile)) break;
        } else {
            for (int tile = newest; tile >= 0; --tile)
                if (!process_key_tile_in_chunks(tile)) break;
        }
        finish();
    }

  private:
    // Of the four lanes that share a row, one writes its mass and restart record.
    __device__ bool writes(int row) const { return threadIdx.x % 4 == 0 && row < rows_.tile.num_rows; }

    __device__ void start() {
        const float* mass_in = static_cast<const float*>(p_.mass_in);
        rows_.for_each([&](int m, int r, int row) {
            const bool live = row < rows_.tile.num_rows;
            mass_[m][r] = !live                ? 0.f
                          : mass_in == nullptr ? kWeightScale<T>
                                               : kWeightScale<T> * mass_in[rows_.index(row)];
            if (writes(row)) write_restart(row, 0, 0.f);
        });
    }
    __device__ void write_restart(int row, int edge, float mass) const {
        p_.restart.edge[rows_.index(row)] = edge;
        static_cast<float*>(p_.restart.mass)[rows_.index(row)] = mass;
    }

    __device__ uint32_t k_buffer(int tile) const { return k_tile_ + tile % S::kKeyBuffers * S::kKeyBytes; }
    __device__ void load_keys(uint32_t to, const HeadRows& from, int64_t batch_stride, int tile) const {
        const int count = rows_.tile.k_len - tile * kKeys;
        if constexpr (kInBlocks)
            load_rows_of_blocks<kKeys, S::kPitch>(to, from, p_.key_blocks, batch_stride * int64_t(sizeof(T)),
                                                  rows_.tile.k_row + tile * kKeys, count, KeyOrder{});
        else
            load_rows<kKeys, S::kPitch>(to, from.rows_from(int64_t(tile) * kKeys), count, KeyOrder{});
        commit_copies();
    }
    __device__ void load_v(uint32_t to, const HeadRows& from, int tile) const {
        load_keys(to, from, p_.v.batch_stride, tile);
    }
    // The gates are copied together with K and share its barriers. So they can be read, and their buffer reused,
    // whenever this holds for K.
    __device__ void load_k(int tile) const {
        load_gates_of(tile);
        load_keys(k_buffer(tile), k_, p_.k.batch_stride, tile);
    }
    __device__ void load_gates_of(int tile) const {
        if constexpr (kGated) {
            const int first = tile * kKeys;
            load_gates<kKeys>(shared_address(gate_buffer(tile)), k_.width, rows_.tile.k_len - first, [&](int key) {
                if constexpr (kInBlocks)
                    return row_of_blocks(k_, p_.key_blocks, p_.k.batch_stride * int64_t(sizeof(T)),
                                         rows_.tile.k_row + first + key);
                else
                    return k_.rows_from(first + key).data;
            });
        }
    }
    __device__ uint8_t* gate_buffer(int tile) const { return gates_ + tile % S::kKeyBuffers * S::kGatesOfTile; }
    __device__ auto gates(int tile) const {
        if constexpr (kGated)
            return GateRows<T>(gate_buffer(tile));
        else
            return NoGates();
    }

    __device__ bool live() const {
        bool live = false;
        rows_.for_each([&](int m, int r, int) { live |= mass_[m][r] >= scalars_.least_mass; });
        return live;
    }
    // Returns whether a row of this warp sees keys of the tile and has mass left.
    __device__ bool takes_part(int tile) const {
        const int last = min(rows_.warp_row + S::kWarpRows, rows_.tile.num_rows) - 1;
        return last >= rows_.warp_row && rows_.visible(last) > tile * kKeys && __any_sync(kAllLanes, live());
    }

    // Returns false, without computing anything, if no row has mass left.
    __device__ bool process_key_tile(int tile) {
        const uint32_t v_tile = k_tile_ + S::kKeyBuffers * S::kKeyBytes;
        wait_for_copies<0>();  // K
        if (!__syncthreads_or(live())) return false;
        load_v(v_tile, v_, tile);
        if (S::kKeyBuffers == 2 && tile > 0) load_k(tile - 1);

        const bool active = takes_part(tile);
        float s[S::kTiles][kKeys / 8][4] = {};
        if (active) {
            multiply_rows<T, S::kPitch>(s, q_tile_ + rows_.warp_row * S::kPitch, k_buffer(tile), q_.width);
            to_weights(s, tile);
        }
        if (S::kKeyBuffers == 2 && tile > 0)
            wait_for_copies<1>();  // V
        else
            wait_for_copies<0>();
        __syncthreads();
        if (S::kKeyBuffers == 1 && tile > 0) load_k(tile - 1);
        if (active) multiply_accumulators<T, S::kPitch>(o_[0], s, v_tile);
        return true;
    }

    __device__ bool process_key_tile_in_chunks(int tile) {
        if (!__syncthreads_or(live())) return false;
        const bool active = takes_part(tile);
        float s[S::kTiles][kKeys / 8][4] = {};
        for (int chunk = 0; chunk < S::kChunks; ++chunk) {
            const int byte = chunk * S::kPitch;
            __syncthreads();
            load_rows<S::kRows, S::kPitch>(q_tile_, q_.bytes_from(byte), rows_.tile.num_rows);
            if (chunk == 0) load_gates_of(tile);
            load_keys(k_tile_, k_.bytes_from(byte), p_.k.batch_stride, tile);
            wait_for_copies<0>();
            __syncthreads();
            if (active) multiply_rows<T, S::kPitch>(s, q_tile_ + rows_.warp_row * S::kPitch, k_tile_, q_.width - byte);
        }
        if (active) to_weights(s, tile);
#pragma unroll
        for (int chunk = 0; chunk < S::kChunks; ++chunk) {
            __syncthreads();
            load_v(k_tile_, v_.bytes_from(chunk * S::kPitch), tile);
            wait_for_copies<0>();
            __syncthreads();
            if (active) multiply_accumulators<T, S::kPitch>(o_[chunk], s, k_tile_);
        }
        return true;
    }

    // Replaces q . k by A. Writes the restart record of each row that reaches its restart in this tile.
    __device__ void to_weights(float (&s)[S::kTiles][kKeys / 8][4], int tile) {
        const int begin = tile * kKeys, end = min(begin + kKeys, rows_.tile.k_len);
        if (rows_.visible(rows_.warp_row) < begin + kKeys) {
            Limits<S::kTiles> limit;
            rows_.for_each([&](int m, int r, int row) {
                limit[m][r] = rows_.visible(row) - begin - threadIdx.x % 4 * (kKeys / 4);
            });
            fill_hidden(s, limit, scalars_.hidden);
        }
        Rises<S::kTiles, kKeys / 8> rises;
        exponentials<true>(s, logits_, rises, gates(tile));
        float newer[S::kTiles][2];
        rows_.for_each([&](int m, int r, int) { newer[m][r] = mass_[m][r]; });
        weights(s, rises, mass_, [&](int m, int r, int n, float older_a, float newer_a) {
            s[m][n][2 * r] = older_a;
            s[m][n][2 * r + 1] = newer_a;
        });
        // The restart is the newer edge of the tile that uses the mass up, or of the oldest tile.
        bool oldest[S::kTiles][2], any = false;
        rows_.for_each([&](int m, int r, int) {
            oldest[m][r] =
                newer[m][r] >= scalars_.least_restart && (tile == 0 || !(mass_[m][r] >= scalars_.least_restart));
            any |= oldest[m][r];
        });
        if (!__any_sync(kAllLanes, any)) return;
        rows_.for_each([&](int m, int r, int row) {
            if (oldest[m][r] && writes(row)) write_restart(row, end, newer[m][r] / kWeightScale<T>);
        });
    }

    __device__ void finish() const {
        const Sizes& z = p_.sizes;
        const int64_t head = rows_.head.batch * p_.o.batch_stride + rows_.head.query * p_.o.head_stride;
        rows_.for_each([&](int m, int r, int row) {
            if (row >= rows_.tile.num_rows) return;
            if (writes(row)) static_cast<float*>(p_.mass_out)[rows_.index(row)] = mass_[m][r] / kWeightScale<T>;
            const int64_t at = head + (rows_.tile.q_row + row) * p_.o.row_stride + threadIdx.x % 4 * 2;
#pragma unroll
            for (int chunk = 0; chunk < S::kChunks; ++chunk)
#pragma unroll
                for (int n = 0; n < S::kColumnBlocks; ++n) {
                    const int column = (chunk * S::kColumnBlocks + n) * 8;
                    if (column >= z.head_dim_v) break;
                    write_o(at + column, o_[chunk][m][n][2 * r] / kWeightScale<T>,
                            o_[chunk][m][n][2 * r + 1] / kWeightScale<T>);
                }
        });
    }
    // Writes two neighbouring columns. With add_o it adds to them, with atomics as add_row() does: only one lane of a
    // launch adds to each value.
    __device__ void write_o(int64_t at, float x, float y) const {
        if constexpr (sizeof(T) == 2) {
            if (p_.o_dtype != Dtype::kFloat32) {
                *reinterpret_cast<uint32_t*>(static_cast<T*>(p_.o.data) + at) = pack<T>(x, y);
                return;
            }
        }
        float* const to = static_cast<float*>(p_.o.data) + at;
        if (p_.add_o) {
            atomicAdd(to, x);
            atomicAdd(to + 1, y);
        } else {
            *reinterpret_cast<float2*>(to) = make_float2(x, y);
        }
    }

    const ForwardParams& p_;
    const Scalars& scalars_;
    const HeadLogits logits_;
    const QueryRows<S::kTiles> rows_;
    HeadRows q_, k_, v_;
    const uint32_t q_tile_, k_tile_;
    uint8_t* const gates_;
    float mass_[S::kTiles][2];  // multiplied by kWeightScale, at the newer edge of the next tile
    float o_[S::kChunks][S::kTiles][S::kColumnBlocks][4] = {};
};

template <class T, int kDim, bool kGated, bool kInBlocks>
__global__ void __launch_bounds__(kThreads, Shape<T, kDim, kGated>::kBlocksPerSm)
    forward(const __grid_constant__ ForwardParams params, const __grid_constant__ Scalars scalars, int num_tiles) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const QueryTiles& tiles = *static_cast<const QueryTiles*>(params.workspace);
    const int tile = blockIdx.x % num_tiles;
    if (tile >= tiles.count) return;
    const Head head = head_of(params.sizes, blockIdx.x / num_tiles);
    ForwardTile<T, kDim, kGated, kInBlocks>(params, scalars, uniform(tiles.entries()[tile]), head, shared).run();
}

}  // namespace

template <class T>
void launch_forward(const ForwardParams& params, cudaStream_t stream) {
    with_instance<T>(params, [&](auto instance) {
        constexpr int kDim = decltype(instance)::kDim;
        constexpr bool kGated = decltype(instance)::kGated;
        using S = Shape<T, kDim, kGated>;
        const int num_tiles = int(max_query_tiles(params.sizes, params.segments, S::kRows));
        prepare_forward(params, S::kRows, stream);
        const auto launch_kernel = [&](auto kernel) {
            launch("block_forward", kernel, int64_t(num_tiles) * params.sizes.batch * params.sizes.num_heads,
                   S::kSharedBytes, stream, params, scalars_of<T>(params.options), num_tiles);
        };
        launch_kernel(params.key_blocks.table != nullptr ? forward<T, kDim, kGated, true>
                                                         : forward<T, kDim, kGated, false>);
    });
}

}  // namespace megatron_sb::portable
