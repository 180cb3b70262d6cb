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

template <class T>
struct ForwardScratch {
    T *rows, *q_t, *k, *v, *scores, *weights, *o_t, *mass, *poison, *limit, *gates;

    ForwardScratch(Arena& memory, const Sizes& sizes) {
        const int d = sizes.head_dim, d_v = sizes.head_dim_v;
        const int widest = std::max(d, d_v);
        rows = memory.take<T>(kTile * widest);    // (query, d) when loaded, (query, d_v) when stored
        q_t = memory.take<T>(kTile * d);          // (d, query)
        k = memory.take<T>(kTile * d);            // (key, d)
        v = memory.take<T>(kTile * d_v);          // (key, d_v)
        scores = memory.take<T>(kTile * kTile);   // (key, query): q . k, then e
        weights = memory.take<T>(kTile * kTile);  // (key, query): A
        o_t = memory.take<T>(kTile * d_v);        // (d_v, query)
        mass = memory.take<T>(kTile);
        poison = memory.take<T>(kTile);  // NaN if the mass of the row became NaN, else 0
        limit = memory.take<T>(kTile);
        gates = memory.take<T>(kTile);  // of the keys
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
class ForwardTile {
  public:
    ForwardTile(const ForwardParams& params, ForwardScratch<T>& scratch, const QueryTile& tile)
        : p_(params), s_(scratch), tile_(tile) {}

    void run() {
        start();
        int visible = 0;
        for (int r = 0; r < tile_.count; ++r) visible = std::max(visible, tile_.visible(r, p_.options.attend_current));
        if (visible > 0) load_queries();
        for (int begin = (visible - 1) / kTile * kTile; visible > 0 && begin >= 0; begin -= kTile) {
            if (!write_restarts(std::min(begin + kTile, int(tile_.segment->k_len)))) break;
            key_tile(begin);
        }
        finish();
    }

  private:
    void start() {
        const T* mass_in = static_cast<const T*>(p_.mass_in);
        const int64_t index = tile_.row_index(p_.sizes);
        for (int r = 0; r < kTile; ++r) {
            const bool live = r < tile_.count;
            s_.mass[r] = !live ? T(0) : mass_in == nullptr ? T(1) : mass_in[index + r];
            s_.poison[r] = T(0);
            if (live) p_.restart.edge[index + r] = 0;
            if (live) static_cast<T*>(p_.restart.mass)[index + r] = T(0);
        }
        std::fill(s_.o_t, s_.o_t + kTile * p_.sizes.head_dim_v, T(0));
        contain_nan();
    }

    void load_queries() {
        const int d = p_.sizes.head_dim;
        pack_rows(p_.sizes.dtype, p_.q, tile_.batch, tile_.q_row(), tile_.head, tile_.count, kTile, d, d, s_.rows);
        transpose(s_.rows, kTile, d, d, s_.q_t);
    }

    // Writes the restart record of rows that can restart at `edge`. Returns false if no row has mass left for keys
    // before `edge`.
    bool write_restarts(int edge) {
        const T threshold = T(p_.options.mass_threshold);
        const T floor = std::max(threshold, Numbers<T>::kRestartFloor);
        const int64_t index = tile_.row_index(p_.sizes);
        bool live = false;
        for (int r = 0; r < tile_.count; ++r) {
            live |= s_.mass[r] > T(0) && s_.mass[r] >= threshold;
            if (!(s_.mass[r] >= floor)) continue;
            p_.restart.edge[index + r] = edge;
            static_cast<T*>(p_.restart.mass)[index + r] = s_.mass[r];
        }
        return live;
    }

    void key_tile(int begin) {
        const Sizes& z = p_.sizes;
        const int lanes = tile_.lanes;
        const int keys = load_key_tile(p_, tile_, begin, s_.k, s_.v, s_.gates).keys;
        multiply<T, false>({s_.k, z.head_dim, 1}, s_.q_t, kTile, keys, lanes, z.head_dim, s_.scores, kTile);

        bool saturated[kTile / kLanes<T>];
        const bool masked = set_limits(begin, keys);
        exponentials(s_.scores, keys, lanes, Logits<T>(p_.options, tile_.head), s_.limit, masked, saturated);
        if (p_.options.forget_gate) apply_gates(keys);
        for (int v = 0; v < lanes; v += kLanes<T>)
            (saturated[v / kLanes<T>] ? scan_keys<T> : scan_quads<T>)(s_.scores + v, keys, s_.weights + v, s_.mass + v);
        multiply<T, true>({s_.v, 1, z.head_dim_v}, s_.weights, kTile, z.head_dim_v, lanes, keys, s_.o_t, kTile);
        contain_nan();
    }

    // A gate never increases e, so values that are not saturated remain so.
    void apply_gates(int keys) {
        for (int k = 0; k < keys; ++k)
            for (int v = 0; v < tile_.lanes; v += kLanes<T>) {
                T* at = s_.scores + k * kTile + v;
                store(at, gated(load(at), s_.gates[k]));
            }
    }

    // Sets limit[r] to the number of keys of this tile that row r sees. Returns whether some row does not see all of
    // them.
    bool set_limits(int begin, int keys) {
        bool masked = false;
        for (int r = 0; r < kTile; ++r) {
            int limit = 0;
            if (r < tile_.count && s_.poison[r] == T(0))
                limit = std::clamp(tile_.visible(r, p_.options.attend_current) - begin, 0, keys);
            s_.limit[r] = T(limit);
            masked |= limit < keys;
        }
        return masked;
    }

    // A NaN ends its row: older keys get no weight, and mass_out of the row is NaN.
    void contain_nan() {
        for (int r = 0; r < tile_.count; ++r) {
            if (!std::isnan(s_.mass[r])) continue;
            s_.poison[r] = s_.mass[r];
            s_.mass[r] = T(0);
        }
    }

    void finish() {
        const int64_t index = tile_.row_index(p_.sizes);
        T* mass_out = static_cast<T*>(p_.mass_out) + index;
        for (int r = 0; r < tile_.count; ++r) mass_out[r] = s_.mass[r] + s_.poison[r];
        const int width = p_.sizes.head_dim_v;
        with_element(p_.o_dtype, [&](auto element) {
            using Element = decltype(element);
            Element* to = static_cast<Element*>(p_.o.data) + offset(p_.o, tile_.batch, tile_.q_row(), tile_.head);
            for (int r = 0; r < tile_.count; ++r)
                for (int c = 0; c < width; ++c) {
                    Element& out = to[r * p_.o.row_stride + c];
                    const T o = s_.o_t[c * kTile + r];
                    out = convert<Element>(p_.add_o ? T(out) + o : o);
                }
        });
    }

    const ForwardParams& p_;
    ForwardScratch<T>& s_;
    const QueryTile tile_;
};

// A task is a query tile of one head.
template <class T>
void run(const ForwardParams& params, const Work& work) {
    const int64_t heads = int64_t(params.sizes.batch) * params.sizes.num_heads, tasks = heads * work.num_tiles;
#pragma omp parallel num_threads(work.threads)
    {
        Arena memory(scratch_of_this_thread(work));
        ForwardScratch<T> scratch(memory, params.sizes);
        for (int64_t task = next_task(work); task < tasks; task = next_task(work)) {
            const int batch = int(task % heads / params.sizes.num_heads), head = int(task % params.sizes.num_heads);
            const QueryTile tile = query_tile(params.segments, work.tiles[task / heads], kLanes<T>, batch, head);
            ForwardTile<T>(params, scratch, tile).run();
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
