// block_backward on the CPU. A tile of rows of Q visits its key tiles from the restart to the newest:
//
//   g_k = A_k (dO . v_k),   b_k = sum of g over keys older than k,   dz_k = (1 - beta_k) g_k - beta_k b_k
//   dq = scale sum_k dz_k k_k,   dk_k = scale sum_j dz_jk q_j,   dv_k = sum_j A_jk dO_j
//
// In the tile where a row starts, the mass at the newer edge comes from its restart record. In all later tiles it is
// P_newer = P_older + e P_older, key by key. It is never derived from a total mass, and never from
// P_older / prod (1 - beta): factors next to 1 lie on a coarse grid and their product drifts. dk of 16K keys with mean
// logit -11 would have an error of 7e-5 instead of 4e-6. 1 - beta is computed as 1 / (1 + e).
//
// With forget gates, e' = f e / (1 + (1 - f) e) takes the place of e, and y = log e' the place of z. Let
// r = 1 / (1 + (1 - f) e) and dy_k = (1 - beta_k) g_k - beta_k b_k. Then
//
//   dz_k = r dy_k,   df_k = dy_k / (f (1 - beta_k)),
//
// because y = log f + z + log r and 1 - beta = (1 + (1 - f) e) / (1 + e).
#include <sched.h>

#include "core/restart.h"
#include "kernels/cpu/tile.h"

namespace megatron_sb::cpu::SB_CPU_LEVEL {
namespace {

template <class T>
struct BackwardScratch {
    int d_pitch, d_v_pitch;  // widths padded to whole vectors
    T *q, *d_o, *q_t, *d_o_t, *k, *v, *scores, *one_minus_betas, *weights, *d_weights, *dq_t, *dk, *dv, *mass, *prefix,
        *limit, *gates, *gate_factor, *d_gates;

    BackwardScratch(Arena& memory, const Sizes& sizes)
        : d_pitch(round_up(sizes.head_dim, kLanes<T>)), d_v_pitch(round_up(sizes.head_dim_v, kLanes<T>)) {
        const int d = sizes.head_dim, d_v = sizes.head_dim_v;
        q = memory.take<T>(kTile * d_pitch);              // (query, d)
        d_o = memory.take<T>(kTile * d_v_pitch);          // (query, d_v)
        q_t = memory.take<T>(kTile * d);                  // (d, query)
        d_o_t = memory.take<T>(kTile * d_v);              // (d_v, query)
        k = memory.take<T>(kTile * d);                    // (key, d)
        v = memory.take<T>(kTile * d_v);                  // (key, d_v)
        scores = memory.take<T>(kTile * kTile);           // (key, query): q . k, then e, then beta, then dz
        one_minus_betas = memory.take<T>(kTile * kTile);  // (key, query): 1 - beta
        weights = memory.take<T>(kTile * kTile);          // (key, query): A
        d_weights = memory.take<T>(kTile * kTile);        // (key, query): dO . v
        dq_t = memory.take<T>(kTile * d);                 // (d, query)
        dk = memory.take<T>(kTile * d_pitch);             // (key, d)
        dv = memory.take<T>(kTile * d_v_pitch);           // (key, d_v)
        mass = memory.take<T>(kTile);    // at the newer edge of the previous tile; 0 in rows that have not started
        prefix = memory.take<T>(kTile);  // b
        limit = memory.take<T>(kTile);
        gates = memory.take<T>(kTile);                // of the keys
        gate_factor = memory.take<T>(kTile * kTile);  // (key, query): r, with gates
        d_gates = memory.take<T>(kTile);
    }

    // Clears the columns between the head dimension and the pitch, which the products read.
    void clear_padding() {
        std::fill(q, q + kTile * d_pitch, T(0));
        std::fill(d_o, d_o + kTile * d_v_pitch, T(0));
    }
};

// The turn of a query tile to add to dk and dv of its KV head. All query tiles of a KV head have a position. At each
// key tile they take turns in the order of their positions. So the sums have the same order with any number of threads,
// and no thread needs sums of its own.
//
// Hand-over: progress[c] is the first key row to which position c may still add. The thread of position c stores it
// with release after its additions to older rows. Threads of later positions load it with acquire before theirs.
//
// The wait is bounded: threads take positions in increasing order, so every earlier position has been taken, and a
// thread waits for earlier positions only. The earliest one that runs waits for none.
class Turn {
  public:
    Turn(const Work& work, const Segments& segments, int64_t kv_head, int64_t position, int group)
        : tiles_(work.tiles),
          segments_(segments),
          progress_(work.progress + kv_head * work.num_tiles * group),
          num_ended_(work.num_ended + kv_head),
          position_(position),
          group_(group),
          k_begin_(k_begin(position)),
          first_(__atomic_load_n(num_ended_, __ATOMIC_ACQUIRE)) {}

    // Returns when all earlier positions have passed the key rows before `row`.
    void wait(int32_t row) {
        for (int64_t c = first_; c < position_; ++c) {
            int32_t reached = __atomic_load_n(progress_ + c, __ATOMIC_ACQUIRE);
            while (reached < row && k_begin(c) == k_begin_) {  // other segments have other keys
                sched_yield();
                reached = __atomic_load_n(progress_ + c, __ATOMIC_ACQUIRE);
            }
            if (c == first_ && reached == kAllRows) ++first_;
        }
    }

    void pass(int32_t row) { __atomic_store_n(progress_ + position_, row, __ATOMIC_RELEASE); }

    // Also tells later positions which earlier ones they need not look at. They acquire what this thread acquired.
    void end() {
        pass(kAllRows);
        __atomic_store_n(num_ended_, first_, __ATOMIC_RELEASE);
    }

  private:
    static constexpr int32_t kAllRows = INT32_MAX;

    int32_t k_begin(int64_t position) const { return segments_[tiles_[position / group_].segment].k_begin; }

    const TileIndex* tiles_;
    const Segments& segments_;
    int32_t* progress_;
    int64_t* num_ended_;
    const int64_t position_;
    const int group_;
    const int32_t k_begin_;
    int64_t first_;  // all positions before it have ended
};

template <class T>
class BackwardTile {
  public:
    BackwardTile(const BackwardParams& params, BackwardScratch<T>& scratch, const QueryTile& tile, const Turn& turn)
        : p_(params), s_(scratch), tile_(tile), turn_(turn) {}

    void run() {
        start();
        if (oldest_ < newest_) {
            turn_.pass(tile_.segment->k_begin + oldest_);
            load_queries();
            for (int begin = oldest_; begin < newest_; begin += kTile) key_tile(begin);
            turn_.end();
            write_dq();
        } else {
            turn_.end();
        }
        if (p_.prefix_out != nullptr)
            std::copy_n(s_.prefix, tile_.count, static_cast<T*>(p_.prefix_out) + tile_.row_index(p_.sizes));
    }

  private:
    void start() {
        const int64_t index = tile_.row_index(p_.sizes);
        const T* prefix_in = static_cast<const T*>(p_.prefix_in);
        const int key_tiles = (tile_.segment->k_len + kTile - 1) / kTile;
        oldest_ = tile_.segment->k_len;
        for (int r = 0; r < kTile; ++r) {
            s_.mass[r] = T(0);
            s_.prefix[r] = r < tile_.count && prefix_in != nullptr ? prefix_in[index + r] : T(0);
            start_[r] = r < tile_.count ? restart_tile<T>(p_, index + r, key_tiles) : kNeverStarts;
            if (start_[r] == kNeverStarts) continue;
            if (start_[r] == kBeforeAllKeys) s_.mass[r] = restart_mass<T>(p_, index + r);
            oldest_ = std::min(oldest_, std::max(start_[r], 0) * kTile);
            newest_ = std::max(newest_, tile_.visible(r, p_.options.attend_current));
        }
    }

    void load_queries() {
        const Sizes& z = p_.sizes;
        const int d = z.head_dim, d_v = z.head_dim_v;
        pack_rows(z.dtype, p_.q, tile_.batch, tile_.q_row(), tile_.head, tile_.count, kTile, d, s_.d_pitch, s_.q);
        pack_rows(z.dtype, p_.d_o, tile_.batch, tile_.q_row(), tile_.head, tile_.count, kTile, d_v, s_.d_v_pitch,
                  s_.d_o);
        transpose(s_.q, kTile, d, s_.d_pitch, s_.q_t);
        transpose(s_.d_o, kTile, d_v, s_.d_v_pitch, s_.d_o_t);
        std::fill(s_.dq_t, s_.dq_t + kTile * d, T(0));
        for (int r = 0; r < tile_.count; ++r) finite_[r] = row_is_finite(r);
        for (int r = 0; r < tile_.count; ++r)
            if (start_[r] != kBeforeAllKeys) clear_unless_finite(r);
    }

    bool row_is_finite(int r) const {
        const auto finite = [](T x) { return std::isfinite(x); };
        return std::all_of(s_.q + r * s_.d_pitch, s_.q + r * s_.d_pitch + p_.sizes.head_dim, finite) &&
               std::all_of(s_.d_o + r * s_.d_v_pitch, s_.d_o + r * s_.d_v_pitch + p_.sizes.head_dim_v, finite);
    }

    // A row with a NaN or an infinity is cleared until it starts, because 0 * NaN is NaN.
    void clear_unless_finite(int r) {
        if (finite_[r]) return;
        std::fill_n(s_.q + r * s_.d_pitch, p_.sizes.head_dim, T(0));
        std::fill_n(s_.d_o + r * s_.d_v_pitch, p_.sizes.head_dim_v, T(0));
    }
    void restore_unless_finite(int r) {
        if (finite_[r]) return;
        for (int c = 0; c < p_.sizes.head_dim; ++c) s_.q[r * s_.d_pitch + c] = s_.q_t[c * kTile + r];
        for (int c = 0; c < p_.sizes.head_dim_v; ++c) s_.d_o[r * s_.d_v_pitch + c] = s_.d_o_t[c * kTile + r];
    }

    void key_tile(int begin) {
        const Sizes& z = p_.sizes;
        const int lanes = tile_.lanes;
        const auto [count, keys, row] = load_key_tile(p_, tile_, begin, s_.k, s_.v, s_.gates);
        multiply<T, false>({s_.k, z.head_dim, 1}, s_.q_t, kTile, keys, lanes, z.head_dim, s_.scores, kTile);
        multiply<T, false>({s_.v, z.head_dim_v, 1}, s_.d_o_t, kTile, keys, lanes, z.head_dim_v, s_.d_weights, kTile);

        bool saturated[kTile / kLanes<T>];  // unused: this direction processes every e in the same way
        const bool masked = set_limits(begin, keys);
        exponentials(s_.scores, keys, lanes, Logits<T>(p_.options, tile_.head), s_.limit, masked, saturated);
        std::fill(s_.d_gates, s_.d_gates + keys, T(0));
        for (int v = 0; v < lanes; v += kLanes<T>) scan(v, begin / kTile, keys);
        for (int r = 0; r < tile_.count; ++r)
            if (std::isnan(s_.prefix[r])) s_.prefix[r] = T(0);  // a NaN must not reach newer tiles

        multiply<T, true>({s_.k, 1, z.head_dim}, s_.scores, kTile, z.head_dim, lanes, keys, s_.dq_t, kTile);
        add_key_gradients(row, keys, count);
    }

    void add_key_gradients(int64_t row, int keys, int count) {
        const Sizes& z = p_.sizes;
        const int kv_head = tile_.head / (z.num_heads / z.num_kv_heads);
        T* const dk = static_cast<T*>(p_.dk.data) + offset(p_.dk, tile_.batch, row, kv_head);
        T* const dv = static_cast<T*>(p_.dv.data) + offset(p_.dv, tile_.batch, row, kv_head);
        multiply<T, false>({s_.scores, kTile, 1}, s_.q, s_.d_pitch, keys, s_.d_pitch, tile_.count, s_.dk, s_.d_pitch);
        multiply<T, false>({s_.weights, kTile, 1}, s_.d_o, s_.d_v_pitch, keys, s_.d_v_pitch, tile_.count, s_.dv,
                           s_.d_v_pitch);
        turn_.wait(int32_t(row + count));
        add_rows(s_.dk, s_.d_pitch, count, z.head_dim, T(p_.options.scale), dk, p_.dk.row_stride);
        add_rows(s_.dv, s_.d_v_pitch, count, z.head_dim_v, T(1), dv, p_.dv.row_stride);
        if (gated_)
            for (int k = 0; k < count; ++k) dk[k * p_.dk.row_stride + z.head_dim] += s_.d_gates[k];
        turn_.pass(int32_t(row + count));
    }

    static void add_rows(const T* from, int pitch, int count, int width, T factor, T* to, int64_t to_stride) {
        for (int k = 0; k < count; ++k)
            for (int c = 0; c < width; ++c) to[k * to_stride + c] += factor * from[k * pitch + c];
    }

    // Sets limit[r] to the number of keys of this tile that row r sees, 0 before the row has started. Returns whether
    // some row does not see all of them.
    bool set_limits(int begin, int keys) {
        bool masked = false;
        for (int r = 0; r < kTile; ++r) {
            int limit = 0;
            const bool started = start_[r] <= begin / kTile;
            if (started) limit = std::clamp(tile_.visible(r, p_.options.attend_current) - begin, 0, keys);
            if (start_[r] == begin / kTile) restore_unless_finite(r);
            s_.limit[r] = T(limit);
            masked |= limit < keys;
        }
        return masked;
    }

    // Returns the mass at the newer edge of this tile for the vector of rows that begins at row v. `risen` is this mass
    // for rows that started in older tiles.
    Vec<T> mass_at_newer_edge(int v, int tile, const Vec<T>& risen) {
        const int64_t index = tile_.row_index(p_.sizes);
        for (int lane = 0; lane < kLanes<T>; ++lane) {
            const int r = v + lane;
            if (start_[r] <= tile) s_.mass[r] = start_[r] == tile ? restart_mass<T>(p_, index + r) : risen[lane];
        }
        return load(s_.mass + v);
    }

    // Replaces e by dz in `scores` and writes A to `weights`, for the vector of rows that begins at row v. Moves the
    // prefix to the newer edge of the tile.
    void scan(int v, int tile, int keys) {
        T *scores = s_.scores + v, *one_minus_betas = s_.one_minus_betas + v, *weights = s_.weights + v;
        const T* d_weights = s_.d_weights + v;
        Vec<T> risen = load(s_.mass + v);
        for (int k = 0; k < keys; ++k) {
            Vec<T> e = load(scores + k * kTile);
            if (gated_) {
                store(s_.gate_factor + v + k * kTile, T(1) / (T(1) + (T(1) - s_.gates[k]) * e));
                e = gated(e, s_.gates[k]);
            }
            const Vec<T> one_minus_beta = T(1) / (T(1) + e);
            store(one_minus_betas + k * kTile, one_minus_beta);
            store(scores + k * kTile, e * one_minus_beta);
            risen = risen + e * risen;
        }
        Vec<T> p = mass_at_newer_edge(v, tile, risen);
        for (int k = keys - 1; k >= 0; --k) {
            store(weights + k * kTile, p * load(scores + k * kTile));
            p = p * load(one_minus_betas + k * kTile);
        }
        Vec<T> b = load(s_.prefix + v);
        const Vec<T> limit = load(s_.limit + v);
        for (int k = 0; k < keys; ++k) {
            const Mask<T> seen = splat<T>(T(k)) < limit;  // 0 * NaN is NaN: dO . v can be NaN where A is 0
            const Vec<T> g = seen ? load(weights + k * kTile) * load(d_weights + k * kTile) : Vec<T>{};
            Vec<T> dz = load(one_minus_betas + k * kTile) * g - load(scores + k * kTile) * b;
            dz = seen ? dz : Vec<T>{};
            if (gated_)
                dz = through_gate(k, dz, load(one_minus_betas + k * kTile), load(s_.gate_factor + v + k * kTile));
            store(scores + k * kTile, dz);
            b = b + g;
        }
        store(s_.prefix + v, b);
    }

    // Returns dz from dy, and adds this key's part of df to d_gates.
    Vec<T> through_gate(int k, const Vec<T>& dy, const Vec<T>& one_minus_beta, const Vec<T>& gate_factor) {
        const Vec<T> df = dy / one_minus_beta / std::max(s_.gates[k], T(kLeastGate));
        for (int lane = 0; lane < kLanes<T>; ++lane) s_.d_gates[k] += df[lane];
        return dy * gate_factor;
    }

    void write_dq() {
        T* to = static_cast<T*>(p_.dq.data) + offset(p_.dq, tile_.batch, tile_.q_row(), tile_.head);
        for (int r = 0; r < tile_.count; ++r)
            for (int c = 0; c < p_.sizes.head_dim; ++c)
                to[r * p_.dq.row_stride + c] += T(p_.options.scale) * s_.dq_t[c * kTile + r];
    }

    const BackwardParams& p_;
    BackwardScratch<T>& s_;
    const QueryTile tile_;
    Turn turn_;
    const bool gated_ = p_.options.forget_gate;
    int start_[kTile];             // restart_tile() of each row
    int oldest_ = 0, newest_ = 0;  // keys [oldest_, newest_) contribute
    bool finite_[kTile];
};

// A task is a query tile of one head. Neighbouring tasks are of different KV heads, so they seldom wait for each other.
template <class T>
void run(const BackwardParams& params, const Work& work) {
    const Sizes& z = params.sizes;
    const int group = z.num_heads / z.num_kv_heads;
    const int64_t kv_heads = int64_t(z.batch) * z.num_kv_heads, tasks = kv_heads * group * work.num_tiles;
#pragma omp parallel num_threads(work.threads)
    {
        Arena memory(scratch_of_this_thread(work));
        BackwardScratch<T> scratch(memory, z);
        scratch.clear_padding();
        for (int64_t task = next_task(work); task < tasks; task = next_task(work)) {
            const int64_t kv_head = task % kv_heads, position = task / kv_heads;
            const int batch = int(kv_head / z.num_kv_heads);
            const int head = int(kv_head % z.num_kv_heads) * group + int(position % group);
            const QueryTile tile = query_tile(params.segments, work.tiles[position / group], kLanes<T>, batch, head);
            BackwardTile<T>(params, scratch, tile, Turn(work, params.segments, kv_head, position, group)).run();
        }
    }
}

}  // namespace

void backward(const BackwardParams& params, const Work& work) {
    params.sizes.dtype == Dtype::kFloat64 ? run<double>(params, work) : run<float>(params, work);
}

int64_t backward_scratch(const Sizes& sizes) {
    return sizes.dtype == Dtype::kFloat64 ? scratch_bytes<BackwardScratch<double>>(sizes)
                                          : scratch_bytes<BackwardScratch<float>>(sizes);
}

}  // namespace megatron_sb::cpu::SB_CPU_LEVEL
