// One warp scans a range of key tiles, from the newest to the oldest, as if its newest key began a full stick:
//
//   S = Q K^T,   e = exp(z),   A_k = e_k P_k (common/scan.cuh),   O += A V,   P <- P / prod (1 + e)
//
// With forget gates, e is the gated odds (common/gates.cuh). Each lane reads the gate of one key of a tile, directly
// into a register, when it requests the tile.
//
// A ring of three slots holds K and V of the tiles: while the warp multiplies one slot, two are being loaded. No other
// warp accesses the ring, so a warp waits for its own copies only.
#pragma once

#include <type_traits>

#include "kernels/common/scan.cuh"
#include "kernels/decode/products.cuh"

namespace megatron_sb::decode {

inline constexpr int kSlots = 3;

template <class T, int kDim>
struct Shape {
    static constexpr int kPitch = kDim * int(sizeof(T));
    static constexpr int kSlotBytes = kKeys * kPitch, kRingBytes = kSlots * kSlotBytes;
    static constexpr int kQueryBytes = kRows * kPitch;
    static constexpr int kBlocksPerSm = kPitch < 512 ? 512 / kPitch : 1;  // limits the registers of a thread
    static constexpr int kColumnBlocks = kDim / 8;                        // of 8 columns of O
    static constexpr int kOutputPitch =
        kDim + 8;  // floats from a row of O to the next; O is in the ring after the last tile
    static_assert(kRows * kOutputPitch * 4 <= kRingBytes, "the ring holds O of its warp");
};

// What the warps of a CTA exchange.
struct Shared {
    float mass[common::kWarps][kRows];
    int num_counted[kRows];  // how many partial results of a row contribute, from the newest
    int newest_used_up;      // the newest warp whose own keys used up all rows
    int is_last;
};

// The logits of a thread's two rows, which belong to different heads, in units of log(2).
struct RowLogits {
    float scale, offset[2];
    __device__ float operator()(float q_k, int, int r) const { return fmaf(q_k, scale, offset[r]); }
};

template <class T, int kDim, bool kGated>
class Worker {
    using S = Shape<T, kDim>;

  public:
    __device__ Worker(const Params& p, const common::Scalars& scalars, const QueryRows& rows, uint32_t queries,
                      uint32_t ring)
        : p_(p),
          scalars_(scalars),
          rows_(rows),
          queries_(queries),
          key_slot_(ring),
          value_slot_(ring + S::kSlotBytes),
          free_slot_(ring + 2 * S::kSlotBytes),
          k_(p.k, rows.kv_head, p.sizes.head_dim, int(sizeof(T))),
          v_(p.v, rows.kv_head, p.sizes.head_dim_v, int(sizeof(T))),
          logits_{scalars.scale_log2e, {}} {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = thread_row(r);
            visible_[r] = row < rows.count ? rows.visible(row) : 0;
            logits_.offset[r] = scalars.reach.offset_of(rows.head(row));
            mass_[0][r] = row < rows.count ? common::kWeightScale<T> : 0.f;
        }
    }

    // Starts to load K and V of the first tile: two groups of copies.
    __device__ void start(int newest, int count) {
        load_tile_keys(newest, count > 0, key_slot_);
        load_or_skip(value_slot_, v_, count > 0);
    }

    // Processes `count` tiles: newest, newest - 1, ... Call start() first; it begins to load the first tile. The loop
    // stops early when the keys of this warp have used up all rows, or when newer_used_up() returns true. It returns
    // true if the newer keys, which other warps process, have used up all rows.
    template <class UsedUp>
    __device__ void run(int newest, int count, UsedUp newer_used_up) {
        for (int i = 0; i < count; ++i) {
            if (newer_used_up() || !__any_sync(common::kAllLanes, live())) break;
            const bool more = i + 1 < count;
            const Gates gates = this->gates();
            load_tile_keys(newest - i - 1, more, free_slot_);
            common::wait_for_copies<2>();  // K
            __syncwarp();                  // K of all lanes has arrived
            Scores s = {};
            multiply_keys<T, S::kPitch>(s, queries_, key_slot_, k_.width, rows_.count);
            __syncwarp();  // all lanes have read K: its slot is free
            load_or_skip(key_slot_, v_, more);
            to_weights(s, newest - i, gates);
            common::wait_for_copies<2>();  // V
            __syncwarp();
            contain_values(newest - i);
            multiply_values<T, S::kPitch>(o_, s, value_slot_, rows_.count);
            __syncwarp();  // all lanes have read V
            const uint32_t read = value_slot_;
            value_slot_ = key_slot_;
            key_slot_ = free_slot_;
            free_slot_ = read;
        }
        common::wait_for_copies<0>();  // no copy writes to the ring any more
        __syncwarp();
    }

    // Returns whether a row of this thread that sees keys has mass left.
    __device__ bool live() const {
        bool live = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) live |= visible_[r] > 0 && mass_[0][r] >= scalars_.least_mass;
        return live;
    }

    // Writes O to rows of kOutputPitch floats and the masses to kRows floats.
    __device__ void write(float* o, float* mass) const {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float* const to = o + thread_row(r) * S::kOutputPitch + 2 * t;
#pragma unroll
            for (int n = 0; n < S::kColumnBlocks; ++n)
                *reinterpret_cast<float2*>(to + 8 * n) = make_float2(o_[0][n][2 * r] / common::kWeightScale<T>,
                                                                     o_[0][n][2 * r + 1] / common::kWeightScale<T>);
            if (t == 0) mass[thread_row(r)] = mass_[0][r] / common::kWeightScale<T>;
        }
    }

  private:
    using Gates = std::conditional_t<kGated, common::GateLanes, common::NoGates>;

    __device__ static int thread_row(int r) {
        return threadIdx.x % 32 / 4 + 8 * r;
    }
    // The gates of the tile that was requested last.
    __device__ Gates gates() const {
        if constexpr (kGated)
            return {common::gate_of<T>(gate_words_)};
        else
            return {};
    }

    __device__ void load_tile_keys(int tile, bool wanted, uint32_t to) {
        if (wanted) {
            const int key = tile * kKeys + threadIdx.x % 32;
            place_ = place_of(p_, rows_.batch, rows_.first_key + key, key < rows_.visible(rows_.count - 1));
            if constexpr (kGated) {
                using Words = common::GateWords<T>;
                const auto* const words = reinterpret_cast<const Words*>(k_.data + place_.in(k_) + k_.width);
                gate_words_ = place_.exists ? __ldg(words) : Words{};  // other rows may hold NaN
            }
        }
        load_or_skip(to, k_, wanted);
    }
    // Commits a group of copies, even an empty one, because wait_for_copies counts groups.
    __device__ void load_or_skip(uint32_t to, const CachedRows& from, bool wanted) const {
        if (wanted)
            load_keys<S::kPitch>(to, from, place_);
        else
            common::commit_copies();
    }

    // Replaces q . k by A, and moves the masses to the older edge of the tile.
    __device__ void to_weights(Scores& s, int tile, const Gates& gates) {
        const int begin = tile * kKeys;
        if (rows_.visible(0) < begin + kKeys) {
            common::Limits<1> limit;
#pragma unroll
            for (int r = 0; r < 2; ++r) limit[0][r] = visible_[r] - begin - threadIdx.x % 4 * (kKeys / 4);
            common::fill_hidden(s, limit, scalars_.hidden);
        }
        common::Rises<1, kKeys / 8> rises;
        common::exponentials<kGated>(s, logits_, rises, gates);
        common::weights(s, rises, mass_, [&](int m, int r, int n, float older_a, float newer_a) {
            s[m][n][2 * r] = older_a;
            s[m][n][2 * r + 1] = newer_a;
        });
    }

    // Columns `column` and `column` + 1 of the values of key `key` of the tile; `column` is even.
    __device__ uint32_t value_address(int key, int column) const {
        const int at = KeyOrder{}(key), byte = column * int(sizeof(T));
        return value_slot_ + at * S::kPitch + ((byte / 16 ^ at % 8) << 4) + byte % 16;
    }
    __device__ float2 load_values(int key, int column) const {
        const uint32_t address = value_address(key, column);
        if constexpr (sizeof(T) == 2)
            return common::unpack<T>(common::load_shared(address));
        else
            return common::load_shared_two(address);
    }
    __device__ void store_values(int key, int column, float x, float y) const {
        const uint32_t address = value_address(key, column);
        if constexpr (sizeof(T) == 2)
            common::store_shared(address, common::pack<T>(x, y));
        else
            common::store_shared(address, __float_as_uint(x), __float_as_uint(y));
    }

    // Some keys of the newest tiles are visible to the later rows only. The weight of such a key is 0 in the earlier
    // rows, and 0 times a NaN or an infinity is NaN. So these values are replaced by 0 in the ring, and added to O of
    // the rows that see them.
    __device__ void contain_values(int tile) {
        const int begin = tile * kKeys;
        const int first = max(rows_.visible(0) - begin, 0), end = min(rows_.visible(rows_.count - 1) - begin, kKeys);
        if (first >= end) return;
        bool finite = true;
        for (int key = first; key < end; ++key)
            for (int column = threadIdx.x % 32 * 2; column < kDim; column += 64) {
                const float2 x = load_values(key, column);
                finite &= isfinite(x.x) && isfinite(x.y);
            }
        if (__all_sync(common::kAllLanes, finite)) return;
        for (int key = first; key < end; ++key) move_infinities(begin + key, key);
        __syncwarp();  // all lanes see the zeros in the ring
    }
    __device__ void move_infinities(int key, int key_in_tile) {
#pragma unroll
        for (int n = 0; n < S::kColumnBlocks; ++n) {
            const int column = 8 * n + 2 * (threadIdx.x % 4);
            const float2 x = load_values(key_in_tile, column);
            const bool keep_x = isfinite(x.x), keep_y = isfinite(x.y);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (!keep_x && visible_[r] > key) o_[0][n][2 * r] += x.x;
                if (!keep_y && visible_[r] > key) o_[0][n][2 * r + 1] += x.y;
            }
            __syncwarp();  // eight lanes have read this value; all of them write the same one
            store_values(key_in_tile, column, keep_x ? x.x : 0.f, keep_y ? x.y : 0.f);
        }
    }

    const Params& p_;
    const common::Scalars& scalars_;
    const QueryRows& rows_;
    const uint32_t queries_;
    uint32_t key_slot_, value_slot_, free_slot_;  // slots of K and V of this tile, and the slot to fill next
    const CachedRows k_, v_;
    KeyPlace place_ = {};                   // of the tile that was requested last
    common::GateWords<T> gate_words_ = {};  // of this lane's key of that tile, with forget gates
    RowLogits logits_;
    int visible_[2];
    float mass_[1][2];  // multiplied by kWeightScale, at the newer edge of the next tile
    float o_[1][S::kColumnBlocks][4] = {};
};

}  // namespace megatron_sb::decode
