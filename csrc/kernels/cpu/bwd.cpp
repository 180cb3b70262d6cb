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

// A query tile, and what it keeps from one key tile to the next.
template <class T>
struct BackwardQueries {
    T *q, *d_o, *q_t, *d_o_t, *dq_t, *mass, *prefix;
    QueryTile tile;
    int start[kTile];    // restart_tile() of each row
    int oldest, newest;  // keys [oldest, newest) contribute
    bool finite[kTile];
};

template <class T>
struct BackwardScratch {
    int d_pitch, d_v_pitch;  // widths padded to whole vectors
    T *k, *v, *scores, *one_minus_betas, *weights, *d_weights, *dk, *dv, *limit, *gates, *gate_factor, *d_gates;
    BackwardQueries<T> queries[kMostQueryTiles];

    BackwardScratch(Arena& memory, const Sizes& sizes)
        : d_pitch(round_up(sizes.head_dim, kLanes<T>)), d_v_pitch(round_up(sizes.head_dim_v, kLanes<T>)) {
        const int d = sizes.head_dim, d_v = sizes.head_dim_v;
        k = memory.take<T>(kTile * d);                    // (key, d)
        v = memory.take<T>(kTile * d_v);                  // (key, d_v)
        scores = memory.take<T>(kTile * kTile);           // (key, query): q . k, then e, then beta, then dz
        one_minus_betas = memory.take<T>(kTile * kTile);  // (key, query): 1 - beta
        weights = memory.take<T>(kTile * kTile);          // (key, query): A
        d_weights = memory.take<T>(kTile * kTile);        // (key, query): dO . v
        dk = memory.take<T>(kTile * d_pitch);             // (key, d)
        dv = memory.take<T>(kTile * d_v_pitch);           // (key, d_v)
        limit = memory.take<T>(kTile);
        gates = memory.take<T>(kTile);                // of the keys
        gate_factor = memory.take<T>(kTile * kTile);  // (key, query): r, with gates
        d_gates = memory.take<T>(kTile);
        for (BackwardQueries<T>& tile : queries) {
            tile.q = memory.take<T>(kTile * d_pitch);      // (query, d)
            tile.d_o = memory.take<T>(kTile * d_v_pitch);  // (query, d_v)
            tile.q_t = memory.take<T>(kTile * d);          // (d, query)
            tile.d_o_t = memory.take<T>(kTile * d_v);      // (d_v, query)
            tile.dq_t = memory.take<T>(kTile * d);         // (d, query)
            tile.mass = memory.take<T>(kTile);             // at the last newer edge; 0 in rows that have not started
            tile.prefix = memory.take<T>(kTile);           // b
        }
    }
};

// The turn of a task to add to dk and dv of its KV head. All tasks of a KV head have a position. At each key tile they
// take turns in the order of their positions. So the sums have the same order with any number of threads, and no thread
// needs sums of its own.
//
// Hand-over: progress[c] is the first key row to which position c may still add. The thread of position c stores it
// with release after its additions to older rows. Threads of later positions load it with acquire before theirs.
//
// The wait is bounded: threads take positions in increasing order, so every earlier position has been taken, and a
// thread waits for earlier positions only. The earliest one that runs waits for none.
class Turn {
  public:
    Turn(const Work& work, const Segments& segments, int64_t kv_head, int64_t position, int group)
        : ranges_(work.ranges),
          segments_(segments),
          progress_(work.progress + kv_head * work.num_ranges * group),
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

    int32_t k_begin(int64_t position) const { return segments_[ranges_[position / group_].segment].k_begin; }

    const RowRange* ranges_;
    const Segments& segments_;
    int32_t* progress_;
    int64_t* num_ended_;
    const int64_t position_;
    const int group_;
    const int32_t k_begin_;
    int64_t first_;  // all positions before it have ended
};

template <class T>
class BackwardTask {
  public:
    BackwardTask(const BackwardParams& params, BackwardScratch<T>& scratch, const Turn& turn)
        : p_(params), s_(scratch), turn_(turn) {}

    // Computes the query tiles of a task. Each key tile is loaded once for all of them, and they add to dk and dv
    // together.
    void run(const Task& task) {
        const int num_tiles = task.num_query_tiles();
        int oldest = task.segment->k_len, newest = 0;
        for (int i = 0; i < num_tiles; ++i) {
            start(s_.queries[i], task.query_tile(i, kLanes<T>));
            if (s_.queries[i].oldest >= s_.queries[i].newest) continue;
            oldest = std::min(oldest, s_.queries[i].oldest);
            newest = std::max(newest, s_.queries[i].newest);
        }
        if (oldest < newest) turn_.pass(task.segment->k_begin + oldest);
        for (int begin = oldest; begin < newest; begin += kTile) key_tile(task, begin);
        turn_.end();
        for (int i = 0; i < num_tiles; ++i) finish(s_.queries[i]);
    }

  private:
    void start(BackwardQueries<T>& queries, const QueryTile& tile) {
        const int64_t index = tile.row_index(p_.sizes);
        const T* prefix_in = static_cast<const T*>(p_.prefix_in);
        const int key_tiles = (tile.segment->k_len + kTile - 1) / kTile;
        queries.tile = tile;
        queries.oldest = tile.segment->k_len;
        queries.newest = 0;
        for (int r = 0; r < kTile; ++r) {
            queries.mass[r] = T(0);
            queries.prefix[r] = r < tile.count && prefix_in != nullptr ? prefix_in[index + r] : T(0);
            int& start = queries.start[r];
            start = r < tile.count ? restart_tile<T>(p_, index + r, key_tiles) : kNeverStarts;
            if (start == kNeverStarts) continue;
            if (start == kBeforeAllKeys) queries.mass[r] = restart_mass<T>(p_, index + r);
            queries.oldest = std::min(queries.oldest, std::max(start, 0) * kTile);
            queries.newest = std::max(queries.newest, tile.visible(r, p_.options.attend_current));
        }
        if (queries.oldest < queries.newest) load_queries(queries);
    }

    void load_queries(BackwardQueries<T>& queries) {
        const Sizes& z = p_.sizes;
        const QueryTile& tile = queries.tile;
        const int d = z.head_dim, d_v = z.head_dim_v;
        pack_rows(z.dtype, p_.q, tile.batch, tile.q_row(), tile.head, tile.count, kTile, d, s_.d_pitch, queries.q);
        pack_rows(z.dtype, p_.d_o, tile.batch, tile.q_row(), tile.head, tile.count, kTile, d_v, s_.d_v_pitch,
                  queries.d_o);
        transpose(queries.q, kTile, d, s_.d_pitch, queries.q_t);
        transpose(queries.d_o, kTile, d_v, s_.d_v_pitch, queries.d_o_t);
        std::fill(queries.dq_t, queries.dq_t + kTile * d, T(0));
        for (int r = 0; r < tile.count; ++r) queries.finite[r] = row_is_finite(queries, r);
        for (int r = 0; r < tile.count; ++r)
            if (queries.start[r] != kBeforeAllKeys) clear_unless_finite(queries, r);
    }

    bool row_is_finite(const BackwardQueries<T>& queries, int r) const {
        const auto finite = [](T x) { return std::isfinite(x); };
        const T *q = queries.q + r * s_.d_pitch, *d_o = queries.d_o + r * s_.d_v_pitch;
        return std::all_of(q, q + p_.sizes.head_dim, finite) && std::all_of(d_o, d_o + p_.sizes.head_dim_v, finite);
    }

    // A row with a NaN or an infinity is cleared until it starts, because 0 * NaN is NaN.
    void clear_unless_finite(BackwardQueries<T>& queries, int r) {
        if (queries.finite[r]) return;
        std::fill_n(queries.q + r * s_.d_pitch, p_.sizes.head_dim, T(0));
        std::fill_n(queries.d_o + r * s_.d_v_pitch, p_.sizes.head_dim_v, T(0));
    }
    void restore_unless_finite(BackwardQueries<T>& queries, int r) {
        if (queries.finite[r]) return;
        for (int c = 0; c < p_.sizes.head_dim; ++c) queries.q[r * s_.d_pitch + c] = queries.q_t[c * kTile + r];
        for (int c = 0; c < p_.sizes.head_dim_v; ++c) queries.d_o[r * s_.d_v_pitch + c] = queries.d_o_t[c * kTile + r];
    }

    void key_tile(const Task& task, int begin) {
        KeyTile keys = {};
        for (int i = 0; i < task.num_query_tiles(); ++i) {
            BackwardQueries<T>& queries = s_.queries[i];
            if (begin < queries.oldest || begin >= queries.newest) continue;
            if (keys.count == 0) {
                keys = load_key_tile(p_, task, begin, s_.k, s_.v, s_.gates);
                std::fill(s_.dk, s_.dk + keys.keys * s_.d_pitch, T(0));
                std::fill(s_.dv, s_.dv + keys.keys * s_.d_v_pitch, T(0));
                std::fill(s_.d_gates, s_.d_gates + keys.keys, T(0));
            }
            attend(queries, begin, keys.keys);
        }
        if (keys.count > 0) add_key_gradients(task, keys);
    }

    // Computes what a query tile and the loaded key tile, whose first key is `begin`, add to dq, dk and dv.
    void attend(BackwardQueries<T>& queries, int begin, int keys) {
        const Sizes& z = p_.sizes;
        const int lanes = queries.tile.lanes, count = queries.tile.count;
        multiply<T, false>({s_.k, z.head_dim, 1}, queries.q_t, kTile, keys, lanes, z.head_dim, s_.scores, kTile);
        multiply<T, false>({s_.v, z.head_dim_v, 1}, queries.d_o_t, kTile, keys, lanes, z.head_dim_v, s_.d_weights,
                           kTile);

        bool saturated[kTile / kLanes<T>];  // unused: this direction processes every e in the same way
        const bool masked = set_limits(queries, begin, keys);
        exponentials(s_.scores, keys, lanes, Logits<T>(p_.options, queries.tile.head), s_.limit, masked, saturated);
        for (int v = 0; v < lanes; v += kLanes<T>) scan(queries, v, begin / kTile, keys);
        for (int r = 0; r < count; ++r)
            if (std::isnan(queries.prefix[r])) queries.prefix[r] = T(0);  // a NaN must not reach newer tiles

        multiply<T, true>({s_.k, 1, z.head_dim}, s_.scores, kTile, z.head_dim, lanes, keys, queries.dq_t, kTile);
        multiply<T, true>({s_.scores, kTile, 1}, queries.q, s_.d_pitch, keys, s_.d_pitch, count, s_.dk, s_.d_pitch);
        multiply<T, true>({s_.weights, kTile, 1}, queries.d_o, s_.d_v_pitch, keys, s_.d_v_pitch, count, s_.dv,
                          s_.d_v_pitch);
    }

    void add_key_gradients(const Task& task, const KeyTile& keys) {
        const Sizes& z = p_.sizes;
        const int kv_head = task.head / (z.num_heads / z.num_kv_heads);
        T* const dk = static_cast<T*>(p_.dk.data) + offset(p_.dk, task.batch, keys.row, kv_head);
        T* const dv = static_cast<T*>(p_.dv.data) + offset(p_.dv, task.batch, keys.row, kv_head);
        turn_.wait(int32_t(keys.row + keys.count));
        add_rows(s_.dk, s_.d_pitch, keys.count, z.head_dim, T(p_.options.scale), dk, p_.dk.row_stride);
        add_rows(s_.dv, s_.d_v_pitch, keys.count, z.head_dim_v, T(1), dv, p_.dv.row_stride);
        if (gated_)
            for (int k = 0; k < keys.count; ++k) dk[k * p_.dk.row_stride + z.head_dim] += s_.d_gates[k];
        turn_.pass(int32_t(keys.row + keys.count));
    }

    static void add_rows(const T* from, int pitch, int count, int width, T factor, T* to, int64_t to_stride) {
        for (int k = 0; k < count; ++k)
            for (int c = 0; c < width; ++c) to[k * to_stride + c] += factor * from[k * pitch + c];
    }

    // Sets limit[r] to the number of keys of this tile that row r sees, 0 before the row has started. Returns whether
    // some row does not see all of them.
    bool set_limits(BackwardQueries<T>& queries, int begin, int keys) {
        bool masked = false;
        for (int r = 0; r < kTile; ++r) {
            int limit = 0;
            const int start = queries.start[r];
            const bool started = start <= begin / kTile;
            if (started) limit = std::clamp(queries.tile.visible(r, p_.options.attend_current) - begin, 0, keys);
            if (start == begin / kTile) restore_unless_finite(queries, r);
            s_.limit[r] = T(limit);
            masked |= limit < keys;
        }
        return masked;
    }

    // Returns the mass at the newer edge of this tile for the vector of rows that begins at row v. `risen` is this mass
    // for rows that started in older tiles.
    Vec<T> mass_at_newer_edge(BackwardQueries<T>& queries, int v, int tile, const Vec<T>& risen) {
        const int64_t index = queries.tile.row_index(p_.sizes);
        for (int lane = 0; lane < kLanes<T>; ++lane) {
            const int r = v + lane, start = queries.start[r];
            if (start <= tile) queries.mass[r] = start == tile ? restart_mass<T>(p_, index + r) : risen[lane];
        }
        return load(queries.mass + v);
    }

    // Replaces e by dz in `scores` and writes A to `weights`, for the vector of rows that begins at row v. Moves the
    // prefix to the newer edge of the tile.
    void scan(BackwardQueries<T>& queries, int v, int tile, int keys) {
        T *scores = s_.scores + v, *one_minus_betas = s_.one_minus_betas + v, *weights = s_.weights + v;
        const T* d_weights = s_.d_weights + v;
        Vec<T> risen = load(queries.mass + v);
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
        Vec<T> p = mass_at_newer_edge(queries, v, tile, risen);
        for (int k = keys - 1; k >= 0; --k) {
            store(weights + k * kTile, p * load(scores + k * kTile));
            p = p * load(one_minus_betas + k * kTile);
        }
        Vec<T> b = load(queries.prefix + v);
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
        store(queries.prefix + v, b);
    }

    // Returns dz from dy, and adds this key's part of df to d_gates.
    Vec<T> through_gate(int k, const Vec<T>& dy, const Vec<T>& one_minus_beta, const Vec<T>& gate_factor) {
        const Vec<T> df = dy / one_minus_beta / std::max(s_.gates[k], T(kLeastGate));
        for (int lane = 0; lane < kLanes<T>; ++lane) s_.d_gates[k] += df[lane];
        return dy * gate_factor;
    }

    void finish(const BackwardQueries<T>& queries) {
        const QueryTile& tile = queries.tile;
        if (queries.oldest < queries.newest) {
            T* to = static_cast<T*>(p_.dq.data) + offset(p_.dq, tile.batch, tile.q_row(), tile.head);
            for (int r = 0; r < tile.count; ++r)
                for (int c = 0; c < p_.sizes.head_dim; ++c)
                    to[r * p_.dq.row_stride + c] += T(p_.options.scale) * queries.dq_t[c * kTile + r];
        }
        if (p_.prefix_out != nullptr)
            std::copy_n(queries.prefix, tile.count, static_cast<T*>(p_.prefix_out) + tile.row_index(p_.sizes));
    }

    const BackwardParams& p_;
    BackwardScratch<T>& s_;
    Turn turn_;
    const bool gated_ = p_.options.forget_gate;
};

// Neighbouring tasks are of different KV heads, so they seldom wait for each other.
template <class T>
void run(const BackwardParams& params, const Work& work) {
    const Sizes& z = params.sizes;
    const int group = z.num_heads / z.num_kv_heads;
    const int64_t kv_heads = int64_t(z.batch) * z.num_kv_heads, tasks = kv_heads * group * work.num_ranges;
#pragma omp parallel num_threads(work.threads)
    {
        Arena memory(scratch_of_this_thread(work));
        BackwardScratch<T> scratch(memory, z);
        for (int64_t i = next_task(work); i < tasks; i = next_task(work)) {
            const int64_t kv_head = i % kv_heads, position = i / kv_heads;
            const int batch = int(kv_head / z.num_kv_heads);
            const int head = int(kv_head % z.num_kv_heads) * group + int(position % group);
            const Task task = task_of(params.segments, work, position / group, batch, head);
            BackwardTask<T>(params, scratch, Turn(work, params.segments, kv_head, position, group)).run(task);
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
