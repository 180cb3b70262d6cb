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
#include "core/restart.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/tile.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace megatron_sb::cpu::SB_CPU_LEVEL {
namespace {

template <class T>
struct BackwardScratch {
    Scratch<T> memory;
    int d_pitch, d_v_pitch;  // widths padded to whole vectors
    T *q, *d_o, *q_t, *d_o_t, *k, *v, *scores, *one_minus_betas, *weights, *d_weights, *dq_t, *dkv, *mass, *prefix,
        *limit, *gates, *gate_factor, *d_gates;

    BackwardScratch(int d, int d_v) : d_pitch(round_up(d, kLanes<T>)), d_v_pitch(round_up(d_v, kLanes<T>)) {
        q = memory.take(kTile * d_pitch);              // (query, d)
        d_o = memory.take(kTile * d_v_pitch);          // (query, d_v)
        q_t = memory.take(kTile * d);                  // (d, query)
        d_o_t = memory.take(kTile * d_v);              // (d_v, query)
        k = memory.take(kTile * d);                    // (key, d)
        v = memory.take(kTile * d_v);                  // (key, d_v)
        scores = memory.take(kTile * kTile);           // (key, query): q . k, then e, then beta, then dz
        one_minus_betas = memory.take(kTile * kTile);  // (key, query): 1 - beta
        weights = memory.take(kTile * kTile);          // (key, query): A
        d_weights = memory.take(kTile * kTile);        // (key, query): dO . v
        dq_t = memory.take(kTile * d);                 // (d, query)
        dkv = memory.take(kTile * std::max(d_pitch, d_v_pitch));
        mass = memory.take(kTile);    // at the newer edge of the previous tile; 0 in rows that have not started
        prefix = memory.take(kTile);  // b
        limit = memory.take(kTile);
        gates = memory.take(kTile);                // of the keys
        gate_factor = memory.take(kTile * kTile);  // (key, query): r, with gates
        d_gates = memory.take(kTile);
        std::fill(q, q + kTile * d_pitch, T(0));
        std::fill(d_o, d_o + kTile * d_v_pitch, T(0));
    }
};

// Where one task adds its dk and dv: the tensors of the caller, or sums of its own. Both are (row, width) for one KV
// head.
template <class T>
struct KeyGradients {
    T *dk, *dv;  // with forget gates, a row of dk also has the gradient of its gate
    int64_t dk_row_stride, dv_row_stride;
};

template <class T>
class BackwardTile {
  public:
    BackwardTile(const BackwardParams& params, BackwardScratch<T>& scratch, const QueryTile& tile,
                 const KeyGradients<T>& gradients)
        : p_(params), s_(scratch), tile_(tile), gradients_(gradients) {}

    void run() {
        start();
        if (oldest_ < newest_) {
            load_queries();
            for (int begin = oldest_; begin < newest_; begin += kTile) key_tile(begin);
            write_dq();
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
        exponentials(s_.scores, keys, lanes, T(p_.options.scale * kLog2E), s_.limit, masked, saturated);
        std::fill(s_.d_gates, s_.d_gates + keys, T(0));
        for (int v = 0; v < lanes; v += kLanes<T>) scan(v, begin / kTile, keys);
        for (int r = 0; r < tile_.count; ++r)
            if (std::isnan(s_.prefix[r])) s_.prefix[r] = T(0);  // a NaN must not reach newer tiles

        multiply<T, true>({s_.k, 1, z.head_dim}, s_.scores, kTile, z.head_dim, lanes, keys, s_.dq_t, kTile);
        add_key_gradient(s_.scores, s_.q, s_.d_pitch, keys, count, z.head_dim, T(p_.options.scale),
                         gradients_.dk + row * gradients_.dk_row_stride, gradients_.dk_row_stride);
        if (p_.options.forget_gate)
            for (int k = 0; k < count; ++k)
                gradients_.dk[(row + k) * gradients_.dk_row_stride + z.head_dim] += s_.d_gates[k];
        add_key_gradient(s_.weights, s_.d_o, s_.d_v_pitch, keys, count, z.head_dim_v, T(1),
                         gradients_.dv + row * gradients_.dv_row_stride, gradients_.dv_row_stride);
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

    // to (key, width) += factor * from (key, query) rows (query, width).
    void add_key_gradient(const T* from, const T* rows, int pitch, int keys, int count, int width, T factor, T* to,
                          int64_t to_stride) {
        multiply<T, false>({from, kTile, 1}, rows, pitch, keys, pitch, tile_.count, s_.dkv, pitch);
        for (int k = 0; k < count; ++k)
            for (int c = 0; c < width; ++c) to[k * to_stride + c] += factor * s_.dkv[k * pitch + c];
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
    const KeyGradients<T> gradients_;
    const bool gated_ = p_.options.forget_gate;
    int start_[kTile];             // restart_tile() of each row
    int oldest_ = 0, newest_ = 0;  // keys [oldest_, newest_) contribute
    bool finite_[kTile];
};

// dk and dv of a KV head are sums over many query tiles. A task is one KV head of a batch element. If there are fewer
// of these than threads, the query tiles of each are divided into parts_ tasks, each with its own sums. The sums are
// added in a fixed order, so the result does not depend on which thread ran which task.
template <class T>
class BackwardTasks {
  public:
    explicit BackwardTasks(const BackwardParams& params)
        : p_(params), work_(params.segments), heads_(params.sizes.batch * params.sizes.num_kv_heads) {
#if defined(_OPENMP)
        parts_ = std::max(1, (omp_get_max_threads() + heads_ - 1) / std::max(heads_, 1));
#endif
        dk_width_ = p_.sizes.head_dim + (p_.options.forget_gate ? kGateColumns : 0);
        dk_size_ = int64_t(p_.sizes.k_rows) * dk_width_;
        dv_size_ = int64_t(p_.sizes.k_rows) * p_.sizes.head_dim_v;
        if (parts_ > 1) sums_.assign((dk_size_ + dv_size_) * heads_ * parts_, T(0));
    }

    void run() {
#pragma omp parallel
        {
            BackwardScratch<T> scratch(p_.sizes.head_dim, p_.sizes.head_dim_v);
#pragma omp for schedule(dynamic)
            for (int task = 0; task < heads_ * parts_; ++task) run_task(task / parts_, task % parts_, scratch);
#pragma omp for schedule(static)
            for (int head = 0; head < (parts_ > 1 ? heads_ : 0); ++head) add_parts(head);
        }
    }

  private:
    KeyGradients<T> in_tensors(int head) const {
        const int64_t b = head / p_.sizes.num_kv_heads, h = head % p_.sizes.num_kv_heads;
        return {static_cast<T*>(p_.dk.data) + offset(p_.dk, b, 0, h),
                static_cast<T*>(p_.dv.data) + offset(p_.dv, b, 0, h), p_.dk.row_stride, p_.dv.row_stride};
    }
    KeyGradients<T> in_sums(int head, int part) {
        T* dk = sums_.data() + (dk_size_ + dv_size_) * (int64_t(head) * parts_ + part);
        return {dk, dk + dk_size_, dk_width_, p_.sizes.head_dim_v};
    }

    void run_task(int kv_head, int part, BackwardScratch<T>& scratch) {
        const KeyGradients<T> gradients = parts_ == 1 ? in_tensors(kv_head) : in_sums(kv_head, part);
        const int batch = kv_head / p_.sizes.num_kv_heads, group = p_.sizes.num_heads / p_.sizes.num_kv_heads;
        for (int member = 0; member < group; ++member) {
            const int head = kv_head % p_.sizes.num_kv_heads * group + member;
            for (size_t i = part; i < work_.tiles.size(); i += parts_)
                BackwardTile<T>(p_, scratch, query_tile<T>(p_.segments, work_.tiles[i], batch, head), gradients).run();
        }
    }

    void add_parts(int head) {
        const KeyGradients<T> to = in_tensors(head);
        for (int part = 0; part < parts_; ++part) {
            const KeyGradients<T> from = in_sums(head, part);
            for (int row = 0; row < p_.sizes.k_rows; ++row) {
                for (int c = 0; c < dk_width_; ++c)
                    to.dk[row * to.dk_row_stride + c] += from.dk[row * from.dk_row_stride + c];
                for (int c = 0; c < p_.sizes.head_dim_v; ++c)
                    to.dv[row * to.dv_row_stride + c] += from.dv[row * from.dv_row_stride + c];
            }
        }
    }

    const BackwardParams& p_;
    const QueryTiles work_;
    const int heads_;  // KV heads of all batch elements
    int parts_ = 1;
    int64_t dk_width_, dk_size_, dv_size_;
    std::vector<T> sums_;
};

}  // namespace

void block_backward(const BackwardParams& params) {
    if (params.sizes.dtype == Dtype::kFloat64)
        BackwardTasks<double>(params).run();
    else
        BackwardTasks<float>(params).run();
}

}  // namespace megatron_sb::cpu::SB_CPU_LEVEL
