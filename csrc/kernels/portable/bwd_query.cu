// The query pass of block_backward: dq, prefix_out, and the carries of each row and key tile (bwd.cuh). A thread block
// owns a tile of query rows of one head and walks its keys from the oldest that counts to the newest, in units of 32
// keys, two a key tile:
//
//   S = Q K^T,  dP = dO V^T,  A (scan.cuh),  g = A dP,  dz = (1 - beta) g - beta b,  dQ += dz K
//
// The mass at a unit's newer edge is P + P * rise, from the mass P at its older edge: never from a total, and not by a
// division by prod 1 / (1 + e), which drifts. Where a row starts it is the restart's at the newer edge of the key tile,
// so the tile's newer unit is looked at first, for the mass between the two.
#include "kernels/portable/bwd.cuh"
#include "kernels/portable/scan.cuh"

namespace megatron_sb::portable {
namespace {

constexpr int kUnit = kKeyTile / 2;
constexpr int kBlocks = kUnit / 8;  // of accumulator columns
using KeyOrder = KeysToColumns<kUnit>;

template <class T, int kDim>
struct Shape {
    static constexpr int kRows = kQueryTile<T, kDim>, kWarpRows = kRows / kWarps, kTiles = kWarpRows / 16;
    static constexpr int kPitch = kDim * int(sizeof(T)) < 512 ? kDim * int(sizeof(T)) : 512;
    static constexpr int kChunks = kDim * int(sizeof(T)) / kPitch;  // above 1, all operands pass through chunk by chunk
    static constexpr int kStages = kPitch <= 256 ? 2 : 1;           // of K and V; 2: the next unit is loaded ahead
    static constexpr int kRowBytes = kRows * kPitch, kKeyBytes = kUnit * kPitch;
    static constexpr int kSharedBytes = 2 * kRowBytes + kStages * 2 * kKeyBytes;
    static constexpr int kColumnBlocks = kPitch / int(sizeof(T)) / 8;
    static constexpr int kBlocksPerSm = sizeof(T) == 2 && kDim == 64 ? 3 : 2;
    static_assert(kSharedBytes <= kLeastSharedBytes - 1024, "fits every GPU from sm_80 on");
};

struct Unit {
    int tile, half;
    bool only_mass;  // a first look at the newer half of a tile in which rows may start
};

template <class T, int kDim>
class QueryTilePass {
    using S = Shape<T, kDim>;
    using Block = float[S::kTiles][kBlocks][4];

  public:
    __device__ QueryTilePass(const BackwardParams& params, const BackwardPlan& plan, const Scalars& scalars,
                             const QueryTile& tile, const Head& head, int64_t block, uint32_t shared)
        : p_(params),
          scalars_(scalars),
          rows_{params.sizes, tile, head},
          starts_(plan.starts + block),
          carries_(plan.carries + block * 2 * S::kRows),
          q_tile_(shared),
          do_tile_(shared + S::kRowBytes),
          key_tiles_(shared + 2 * S::kRowBytes) {
        const Sizes& z = params.sizes;
        q_ = head_rows<T>(params.q, head.batch, head.query, z.head_dim).rows_from(tile.q_row);
        do_ = head_rows<T>(params.d_o, head.batch, head.query, z.head_dim_v).rows_from(tile.q_row);
        k_ = head_rows<T>(params.k, head.batch, head.key, z.head_dim).rows_from(tile.k_row);
        v_ = head_rows<T>(params.v, head.batch, head.key, z.head_dim_v).rows_from(tile.k_row);
        num_tiles_ = key_tiles_of(tile.visible, tile.num_rows, tile.k_len);
    }

    __device__ void run() {
        find_starts();
        if (oldest_ == kNever) return;
        rows_.for_each([&](int m, int r, int row) {
            const float* prefix_in = static_cast<const float*>(p_.prefix_in);
            const bool there = row < rows_.tile.num_rows;
            mass_[m][r] = there ? kAbsent : 0.f;
            prefix_[m][r] = there && prefix_in != nullptr ? prefix_in[rows_.index(row)] : 0.f;
        });
        const int units = 3 * (newest_ - oldest_ + 1) + 2 * (num_tiles_ - 1 - newest_);
        if constexpr (S::kChunks == 1) {
            load_rows<S::kRows, S::kPitch>(q_tile_, q_, rows_.tile.num_rows);
            load_rows<S::kRows, S::kPitch>(do_tile_, do_, rows_.tile.num_rows);
            if (S::kStages == 2) load_unit(0, 0);
        }
        for (int n = 0; n < units; ++n) {
            if constexpr (S::kChunks == 1)
                unit(n, units);
            else
                unit_in_chunks(n);
        }
        finish();
    }

  private:
    // The key tile in which a row starts. Rows that are not there have no mass, and need no mask: they have always
    // started.
    __device__ int start_tile(int row) const {
        if (row >= rows_.tile.num_rows) return -1;
        const int edge = p_.restart.edge[rows_.index(row)], tile = (edge - 1) / kKeyTile;
        return edge > 0 && tile < num_tiles_ ? tile : kNever;
    }
    __device__ float restart_mass(int row) const {
        const float mass = static_cast<const float*>(p_.restart.mass)[rows_.index(row)];
        return p_.mass_in == nullptr ? mass : mass * static_cast<const float*>(p_.mass_in)[rows_.index(row)];
    }

    // Where rows start: of this warp, of the query tile, and for the key pass by kQueryStep rows.
    __device__ void find_starts() {
        __shared__ int first[kWarps], last[kWarps], newest[kWarps];
        int warp_first = kNever, warp_newest = -1;
        warp_last_ = -1;
        rows_.for_each([&](int, int, int row) {
            const int tile = start_tile(row);
            if (tile >= 0) warp_first = min(warp_first, tile);
            warp_last_ = max(warp_last_, tile);
            if (tile != kNever) warp_newest = max(warp_newest, tile);
        });
        warp_first_ = __reduce_min_sync(kAllLanes, warp_first);
        warp_last_ = __reduce_max_sync(kAllLanes, warp_last_);
        warp_newest = __reduce_max_sync(kAllLanes, warp_newest);
        const int warp = threadIdx.x / 32;
        first[warp] = warp_first_;
        last[warp] = warp_last_;
        newest[warp] = warp_newest;
        __syncthreads();
        oldest_ = kNever, newest_ = -1;
        Starts starts = {{kNever, kNever}, {-1, -1}};
        for (int w = 0; w < kWarps; ++w) {
            const int step = w * S::kWarpRows / kQueryStep;
            oldest_ = min(oldest_, first[w]);
            newest_ = max(newest_, newest[w]);
            starts.first[step] = min(starts.first[step], first[w]);
            starts.last[step] = max(starts.last[step], last[w]);
        }
        if (threadIdx.x == 0) *starts_ = starts;
    }

    __device__ Unit unit_at(int n) const {
        const int among_starts = 3 * (newest_ - oldest_ + 1);
        if (n < among_starts) return {oldest_ + n / 3, n % 3 != 1, n % 3 == 0};
        return {newest_ + 1 + (n - among_starts) / 2, (n - among_starts) % 2, false};
    }

    __device__ uint32_t k_buffer(int n) const { return key_tiles_ + n % S::kStages * 2 * S::kKeyBytes; }
    __device__ void load_keys(uint32_t to, const HeadRows& from, const Unit& u) const {
        const int begin = u.tile * kKeyTile + u.half * kUnit;
        load_rows<kUnit, S::kPitch>(to, from.rows_from(begin), rows_.tile.k_len - begin, KeyOrder{});
    }
    __device__ void load_unit(int n, int byte) const {
        const Unit u = unit_at(n);
        load_keys(k_buffer(n), k_.bytes_from(byte), u);
        load_keys(k_buffer(n) + S::kKeyBytes, v_.bytes_from(byte), u);
        commit_copies();
    }

    // Whether a unit matters to this warp: rows start here or have started, and see some of it.
    __device__ bool takes_part(const Unit& u) const {
        const int begin = u.tile * kKeyTile + u.half * kUnit;
        return u.tile >= warp_first_ &&
               (u.tile <= warp_last_ || rows_.visible(rows_.warp_row + S::kWarpRows - 1) > begin);
    }

    __device__ void unit(int n, int units) {
        if (S::kStages == 1) {
            __syncthreads();
            load_unit(n, 0);
        }
        wait_for_copies<0>();
        __syncthreads();
        if (S::kStages == 2 && n + 1 < units) load_unit(n + 1, 0);
        const Unit u = unit_at(n);
        const uint32_t k_tile = k_buffer(n);
        const bool active = takes_part(u);
        if (active) {
            Block s = {}, dp = {};
            multiply_rows<T, S::kPitch>(s, q_tile_ + rows_.warp_row * S::kPitch, k_tile, q_.width);
            if (!u.only_mass)
                multiply_rows<T, S::kPitch>(dp, do_tile_ + rows_.warp_row * S::kPitch, k_tile + S::kKeyBytes,
                                            do_.width);
            to_gradients(s, dp, u);
            if (!u.only_mass) multiply_accumulators<T, S::kPitch>(dq_[0], dp, k_tile);
        }
        if (!u.only_mass && !active) write_carries(u);
    }

    __device__ void unit_in_chunks(int n) {
        const Unit u = unit_at(n);
        const bool active = takes_part(u);
        Block s = {}, dp = {};
        for (int chunk = 0; chunk < S::kChunks; ++chunk) {
            const int byte = chunk * S::kPitch;
            __syncthreads();
            load_rows<S::kRows, S::kPitch>(q_tile_, q_.bytes_from(byte), rows_.tile.num_rows);
            load_rows<S::kRows, S::kPitch>(do_tile_, do_.bytes_from(byte), rows_.tile.num_rows);
            load_unit(n, byte);
            wait_for_copies<0>();
            __syncthreads();
            if (!active) continue;
            multiply_rows<T, S::kPitch>(s, q_tile_ + rows_.warp_row * S::kPitch, key_tiles_, q_.width - byte);
            multiply_rows<T, S::kPitch>(dp, do_tile_ + rows_.warp_row * S::kPitch, key_tiles_ + S::kKeyBytes,
                                        do_.width - byte);
        }
        if (active) to_gradients(s, dp, u);
        if (u.only_mass) return;
        if (!active) write_carries(u);
#pragma unroll
        for (int chunk = 0; chunk < S::kChunks; ++chunk) {
            __syncthreads();
            load_unit(n, chunk * S::kPitch);
            wait_for_copies<0>();
            __syncthreads();
            if (active) multiply_accumulators<T, S::kPitch>(dq_[chunk], dp, key_tiles_);
        }
    }

    // The prefix at a tile's older edge goes out before its older unit changes it, the mass at its newer edge after its
    // newer unit has made it.
    __device__ void write_carries(const Unit& u) const {
        if (threadIdx.x % 4 != 0) return;
        float* const to = carries_ + int64_t(u.tile) * 2 * S::kRows;
        rows_.for_each([&](int m, int r, int row) {
            if (u.half == 0)
                to[S::kRows + row] = prefix_[m][r];
            else
                to[row] = mass_[m][r];
        });
    }

    // S -> e and dP -> dz; mass and prefix to the newer edge. With only_mass, the mass of rows that start here to the
    // older edge, and nothing else.
    __device__ void to_gradients(Block& s, Block& dp, const Unit& u) {
        const int begin = u.tile * kKeyTile + u.half * kUnit;
        const bool starting = u.tile <= warp_last_;
        const bool masked = starting || rows_.visible(rows_.warp_row) < begin + kUnit;
        int start[S::kTiles][2];
        rows_.for_each([&](int m, int r, int row) { start[m][r] = starting ? start_tile(row) : -1; });
        Limits<S::kTiles> limit;
        if (masked) {
            rows_.for_each([&](int m, int r, int row) {
                const int seen = rows_.visible(row) - begin - int(threadIdx.x % 4) * (kUnit / 4);
                limit[m][r] = start[m][r] <= u.tile ? seen : 0;
            });
            fill_hidden(s, limit, scalars_.hidden);
            fill_hidden(dp, limit, 0.f);
        }
        Rises<S::kTiles, kBlocks> rises;
        exponentials(s, scalars_.scale_log2e, rises);
        float newer[S::kTiles][2], older[S::kTiles][2];
        rows_.for_each([&](int m, int r, int row) {
            const float risen = fmaf(mass_[m][r], quad_join(rises.all[m][r]), mass_[m][r]);
            newer[m][r] = start[m][r] < u.tile ? risen : mass_[m][r];
            if (start[m][r] == u.tile && u.half == 1) newer[m][r] = restart_mass(row);
            older[m][r] = newer[m][r];
        });
        const bool key_by_key = weights(s, rises, older, [&](int m, int r, int n, float older_a, float newer_a) {
            dp[m][n][2 * r] *= older_a;
            dp[m][n][2 * r + 1] *= newer_a;
        });
        rows_.for_each([&](int m, int r, int) {
            if (!u.only_mass)
                mass_[m][r] = newer[m][r];
            else if (start[m][r] == u.tile)
                mass_[m][r] = older[m][r];
        });
        if (u.only_mass) return;
        write_carries(u);
        logit_gradients(s, dp, prefix_, key_by_key);
        if (masked) fill_hidden(dp, limit, 0.f);
        rows_.for_each([&](int m, int r, int) {
            if (isnan(prefix_[m][r])) prefix_[m][r] = 0.f;  // what is newer than a NaN's unit stays clean
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
    const QueryRows<S::kTiles> rows_;
    Starts* const starts_;
    float* const carries_;
    HeadRows q_, do_, k_, v_;
    const uint32_t q_tile_, do_tile_, key_tiles_;
    int num_tiles_;               // key tiles
    int oldest_, newest_;         // key tiles in which the first and the last row start
    int warp_first_, warp_last_;  // the same of this warp; warp_last_ is kNever where a row never starts
    float mass_[S::kTiles][2];    // at the newer edge of the unit before; kAbsent before the row starts
    float prefix_[S::kTiles][2];  // b there
    float dq_[S::kChunks][S::kTiles][S::kColumnBlocks][4] = {};
};

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, Shape<T, kDim>::kBlocksPerSm)
    query_pass(const __grid_constant__ BackwardParams params, const __grid_constant__ BackwardPlan plan,
               const __grid_constant__ Scalars scalars) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const int index = blockIdx.x % plan.max_query_tiles;
    if (index >= plan.query_tiles->count) return;
    const QueryTile tile = plan.query_tiles->entries()[index];
    const int key_tiles = key_tiles_of(tile.visible, tile.num_rows, tile.k_len);
    if (key_tiles == 0) return;
    const int head = blockIdx.x / plan.max_query_tiles;
    const int64_t block = block_in_chunk(plan, params.sizes, plan.first_block[tile.q_row], head, key_tiles);
    if (block < 0) return;
    QueryTilePass<T, kDim>(params, plan, scalars, tile, head_of(params.sizes, head), block, shared_address(shared))
        .run();
}

}  // namespace

void launch_query_pass(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream) {
    const int64_t heads = int64_t(params.sizes.batch) * params.sizes.num_heads;
    with_kind(params.sizes, [&](auto kind) {
        using T = typename decltype(kind)::Element;
        constexpr int kDim = decltype(kind)::kDim;
        using S = Shape<T, kDim>;
        launch("block_backward", query_pass<T, kDim>, plan.max_query_tiles * heads, S::kSharedBytes, stream, params,
               plan, scalars_of<T>(params.options));
    });
}

}  // namespace megatron_sb::portable
