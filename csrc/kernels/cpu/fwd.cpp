// block_forward on the CPU. A tile of rows of Q visits its key tiles from the newest to the oldest:
//
//   e = 2^(scale log2(e) q . k),  1 - beta = 1 / (1 + e),  A_k = e_k * (mass after key k)
//
// It processes keys in quads of neighbours with one division for four scores. Key 1 of a quad is the newest:
//
//   P4 = P / ((1+e1)(1+e2)(1+e3)(1+e4));  A4 = e4 P4;  P3 = P4 + A4;  A3 = e3 P3;  ...
//
// The product is computed as 1 + (e1 + e2 + e1 e2 + ...), and P is divided by it. Products of numbers next to 1, and
// their reciprocals, lie on a coarse grid and would drift over many keys. If an e is so large that the product would
// overflow, the keys are processed one by one. The loop over key tiles ends when all rows of the tile are used up.
//
// With forget gates, e is replaced by f e / (1 + (1 - f) e), the odds of f sigmoid(z).
#include "kernels/cpu/tile.h"

namespace megatron_sb::cpu::SB_CPU_LEVEL {
namespace {

// A query tile, and what it keeps from one key tile to the next.
template <class T>
struct ForwardQueries {
    T *q_t, *o_t, *mass, *poison;
    QueryTile tile;
    int num_visible;  // keys of the segment that some row sees
    bool used_up;     // no row has mass left for older keys
};

template <class T>
struct ForwardScratch {
    T *rows, *k, *v, *scores, *weights, *limit, *gates;
    ForwardQueries<T> queries[kMostQueryTiles];

    ForwardScratch(Arena& memory, const Sizes& sizes) {
        const int d = sizes.head_dim, d_v = sizes.head_dim_v;
        rows = memory.take<T>(kTile * d);         // (query, d)
        k = memory.take<T>(kTile * d);            // (key, d)
        v = memory.take<T>(kTile * d_v);          // (key, d_v)
        scores = memory.take<T>(kTile * kTile);   // (key, query): q . k, then e
        weights = memory.take<T>(kTile * kTile);  // (key, query): A
        limit = memory.take<T>(kTile);
        gates = memory.take<T>(kTile);  // of the keys
        for (ForwardQueries<T>& tile : queries) {
            tile.q_t = memory.take<T>(kTile * d);    // (d, query)
            tile.o_t = memory.take<T>(kTile * d_v);  // (d_v, query)
            tile.mass = memory.take<T>(kTile);
            tile.poison = memory.take<T>(kTile);  // NaN if the mass of the row became NaN, else 0
        }
    }
};

// Computes A of `keys` keys for one vector of rows, newest key first, and moves `mass` to the older side of the keys.
// `keys` is a multiple of 4.
template <class T>
void scan_quads(const T* e, int keys, T* weights, T* mass) {
    Vec<T> p = load(mass);
    for (int k = keys - kKeysPerStep; k >= 0; k -= kKeysPerStep) {
        const Vec<T> e1 = load(e + (k + 3) * kTile), e2 = load(e + (k + 2) * kTile);
        const Vec<T> e3 = load(e + (k + 1) * kTile), e4 = load(e + k * kTile);
        const Vec<T> e12 = e1 * e2 + (e1 + e2), e34 = e3 * e4 + (e3 + e4);
        const Vec<T> p4 = p / (T(1) + (e12 * e34 + (e12 + e34))), a4 = e4 * p4;
        const Vec<T> p3 = p4 + a4, a3 = e3 * p3;
        const Vec<T> p2 = p3 + a3, a2 = e2 * p2;
        const Vec<T> p1 = p2 + a2, a1 = e1 * p1;
        store(weights + (k + 3) * kTile, a1);
        store(weights + (k + 2) * kTile, a2);
        store(weights + (k + 1) * kTile, a3);
        store(weights + k * kTile, a4);
        p = p4;
    }
    store(mass, p);
}

// Does the same for every finite e, one key at a time.
template <class T>
void scan_keys(const T* e, int keys, T* weights, T* mass) {
    Vec<T> p = load(mass);
    for (int k = keys - 1; k >= 0; --k) {
        const Vec<T> e_k = load(e + k * kTile), inv = T(1) / (T(1) + e_k);
        store(weights + k * kTile, p * (e_k * inv));
        p = p * inv;
    }
    store(mass, p);
}

template <class T>
class ForwardTask {
  public:
    ForwardTask(const ForwardParams& params, ForwardScratch<T>& scratch) : p_(params), s_(scratch) {}

    // Computes the query tiles of a task. Each key tile is loaded once for all of them.
    void run(const Task& task) {
        int newest = 0;
        const int num_tiles = task.num_query_tiles();
        for (int i = 0; i < num_tiles; ++i) {
            start(s_.queries[i], task.query_tile(i, kLanes<T>));
            newest = std::max(newest, s_.queries[i].num_visible);
        }
        for (int begin = (newest - 1) / kTile * kTile; newest > 0 && begin >= 0; begin -= kTile) {
            KeyTile keys = {};
            for (int i = 0; i < num_tiles; ++i) {
                ForwardQueries<T>& queries = s_.queries[i];
                if (begin >= queries.num_visible || queries.used_up) continue;
                queries.used_up = !write_restarts(queries, std::min(begin + kTile, int(task.segment->k_len)));
                if (queries.used_up) continue;
                if (keys.count == 0) keys = load_key_tile(p_, task, begin, s_.k, s_.v, s_.gates);
                attend(queries, begin, keys.keys);
            }
            if (keys.count == 0) break;
        }
        for (int i = 0; i < num_tiles; ++i) finish(s_.queries[i]);
    }

  private:
    void start(ForwardQueries<T>& queries, const QueryTile& tile) {
        const T* mass_in = static_cast<const T*>(p_.mass_in);
        const int64_t index = tile.row_index(p_.sizes);
        queries.tile = tile;
        queries.num_visible = 0;
        queries.used_up = false;
        for (int r = 0; r < kTile; ++r) {
            const bool live = r < tile.count;
            queries.mass[r] = !live ? T(0) : mass_in == nullptr ? T(1) : mass_in[index + r];
            queries.poison[r] = T(0);
            if (!live) continue;
            p_.restart.edge[index + r] = 0;
            static_cast<T*>(p_.restart.mass)[index + r] = T(0);
            queries.num_visible = std::max(queries.num_visible, tile.visible(r, p_.options.attend_current));
        }
        std::fill(queries.o_t, queries.o_t + kTile * p_.sizes.head_dim_v, T(0));
        contain_nan(queries);
        if (queries.num_visible == 0) return;
        const int d = p_.sizes.head_dim;
        pack_rows(p_.sizes.dtype, p_.q, tile.batch, tile.q_row(), tile.head, tile.count, kTile, d, d, s_.rows);
        transpose(s_.rows, kTile, d, d, queries.q_t);
    }

    // Writes the restart record of rows that can restart at `edge`. Returns false if no row has mass left for keys
    // before `edge`.
    bool write_restarts(const ForwardQueries<T>& queries, int edge) {
        const T threshold = T(p_.options.mass_threshold);
        const T floor = std::max(threshold, Numbers<T>::kRestartFloor);
        const int64_t index = queries.tile.row_index(p_.sizes);
        bool live = false;
        for (int r = 0; r < queries.tile.count; ++r) {
            live |= queries.mass[r] > T(0) && queries.mass[r] >= threshold;
            if (!(queries.mass[r] >= floor)) continue;
            p_.restart.edge[index + r] = edge;
            static_cast<T*>(p_.restart.mass)[index + r] = queries.mass[r];
        }
        return live;
    }

    // Attends to the loaded key tile, whose first key is `begin`.
    void attend(ForwardQueries<T>& queries, int begin, int keys) {
        const Sizes& z = p_.sizes;
        const int lanes = queries.tile.lanes;
        multiply<T, false>({s_.k, z.head_dim, 1}, queries.q_t, kTile, keys, lanes, z.head_dim, s_.scores, kTile);

        bool saturated[kTile / kLanes<T>];
        const bool masked = set_limits(queries, begin, keys);
        exponentials(s_.scores, keys, lanes, Logits<T>(p_.options, queries.tile.head), s_.limit, masked, saturated);
        if (p_.options.forget_gate) apply_gates(keys, lanes);
        for (int v = 0; v < lanes; v += kLanes<T>)
            (saturated[v / kLanes<T>] ? scan_keys<T> : scan_quads<T>)(s_.scores + v, keys, s_.weights + v,
                                                                      queries.mass + v);
        multiply<T, true>({s_.v, 1, z.head_dim_v}, s_.weights, kTile, z.head_dim_v, lanes, keys, queries.o_t, kTile);
        contain_nan(queries);
    }

    // A gate never increases e, so values that are not saturated remain so.
    void apply_gates(int keys, int lanes) {
        for (int k = 0; k < keys; ++k)
            for (int v = 0; v < lanes; v += kLanes<T>) {
                T* at = s_.scores + k * kTile + v;
                store(at, gated(load(at), s_.gates[k]));
            }
    }

    // Sets limit[r] to the number of keys of this tile that row r sees. Returns whether some row does not see all of
    // them.
    bool set_limits(const ForwardQueries<T>& queries, int begin, int keys) {
        bool masked = false;
        for (int r = 0; r < kTile; ++r) {
            int limit = 0;
            if (r < queries.tile.count && queries.poison[r] == T(0))
                limit = std::clamp(queries.tile.visible(r, p_.options.attend_current) - begin, 0, keys);
            s_.limit[r] = T(limit);
            masked |= limit < keys;
        }
        return masked;
    }

    // A NaN ends its row: older keys get no weight, and mass_out of the row is NaN.
    void contain_nan(ForwardQueries<T>& queries) {
        for (int r = 0; r < queries.tile.count; ++r) {
            if (!std::isnan(queries.mass[r])) continue;
            queries.poison[r] = queries.mass[r];
            queries.mass[r] = T(0);
        }
    }

    void finish(const ForwardQueries<T>& queries) {
        const QueryTile& tile = queries.tile;
        T* mass_out = static_cast<T*>(p_.mass_out) + tile.row_index(p_.sizes);
        for (int r = 0; r < tile.count; ++r) mass_out[r] = queries.mass[r] + queries.poison[r];
        const int width = p_.sizes.head_dim_v;
        with_element(p_.o_dtype, [&](auto element) {
            using Element = decltype(element);
            Element* to = static_cast<Element*>(p_.o.data) + offset(p_.o, tile.batch, tile.q_row(), tile.head);
            for (int r = 0; r < tile.count; ++r)
                for (int c = 0; c < width; ++c) {
                    Element& out = to[r * p_.o.row_stride + c];
                    const T o = queries.o_t[c * kTile + r];
                    out = convert<Element>(p_.add_o ? T(out) + o : o);
                }
        });
    }

    const ForwardParams& p_;
    ForwardScratch<T>& s_;
};

template <class T>
void run(const ForwardParams& params, const Work& work) {
    const int64_t heads = int64_t(params.sizes.batch) * params.sizes.num_heads, tasks = heads * work.num_ranges;
#pragma omp parallel num_threads(work.threads)
    {
        Arena memory(scratch_of_this_thread(work));
        ForwardScratch<T> scratch(memory, params.sizes);
        for (int64_t i = next_task(work); i < tasks; i = next_task(work)) {
            const int batch = int(i % heads / params.sizes.num_heads), head = int(i % params.sizes.num_heads);
            ForwardTask<T>(params, scratch).run(task_of(params.segments, work, i / heads, batch, head));
        }
    }
}

}  // namespace

void forward(const ForwardParams& params, const Work& work) {
    params.sizes.dtype == Dtype::kFloat64 ? run<double>(params, work) : run<float>(params, work);
}

int64_t forward_scratch(const Sizes& sizes) {
    return sizes.dtype == Dtype::kFloat64 ? scratch_bytes<ForwardScratch<double>>(sizes)
                                          : scratch_bytes<ForwardScratch<float>>(sizes);
}

}  // namespace megatron_sb::cpu::SB_CPU_LEVEL
