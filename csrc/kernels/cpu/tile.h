// Code that the forward and the backward share: a tile of 64 keys by 64 queries, with the queries along the vector
// lanes. A scan along the keys is a loop over the rows of the tile and needs no shuffles.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/params.h"
#include "kernels/cpu/levels.h"
#include "kernels/cpu/simd.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace megatron_sb::cpu::SB_CPU_LEVEL {

inline constexpr int kTile = kRestartTile;
inline constexpr int kKeysPerStep = 4;  // a quad: the forward computes one division for four scores

inline int round_up(int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// ---- element types -------------------------------------------------------------------------------------------------

struct BFloat16 {
    uint16_t bits;
    template <class T>
    explicit operator T() const {
        const uint32_t wide = uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof(value));
        return T(value);
    }
    static BFloat16 from(float value) {
        uint32_t wide;
        std::memcpy(&wide, &value, sizeof(wide));
        if (std::isnan(value)) return {uint16_t((wide >> 16) | 0x40)};
        return {uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};  // to nearest, ties to even
    }
};

template <class To, class From>
inline To convert(From value) {
    if constexpr (std::is_same_v<To, BFloat16>) {
        return BFloat16::from(float(value));
    } else {
        return To(value);
    }
}

// Calls f(Element{}) with the C++ type Element of `dtype`.
template <class F>
inline void with_element(Dtype dtype, F&& f) {
    switch (dtype) {
        case Dtype::kFloat32:
            return f(float{});
        case Dtype::kFloat64:
            return f(double{});
        case Dtype::kBFloat16:
            return f(BFloat16{});
        case Dtype::kFloat16:
            return f(_Float16{});
    }
}

// ---- rows of tensors -----------------------------------------------------------------------------------------------

template <class Pointer>
inline int64_t offset(const Rows<Pointer>& rows, int64_t batch, int64_t row, int64_t head) {
    return batch * rows.batch_stride + row * rows.row_stride + head * rows.head_stride;
}

// Copies `count` rows into an array (kTile, width) of T with rows of `pitch` values. Writes zeros after the width of
// each row, and to the following rows, up to `padded`.
template <class T>
void pack_rows(Dtype dtype, const Rows<const void*>& rows, int64_t batch, int64_t row, int64_t head, int count,
               int padded, int width, int pitch, T* out) {
    with_element(dtype, [&](auto element) {
        using Element = decltype(element);
        const Element* from = static_cast<const Element*>(rows.data) + offset(rows, batch, row, head);
        for (int r = 0; r < count; ++r) {
            for (int c = 0; c < width; ++c) out[r * pitch + c] = T(from[r * rows.row_stride + c]);
            std::fill(out + r * pitch + width, out + (r + 1) * pitch, T(0));
        }
    });
    std::fill(out + count * pitch, out + padded * pitch, T(0));
}

// Reads the forget gates of `count` key rows, which are in the columns after head_dim. Writes 1 after them, up to
// `padded`.
template <class T>
void pack_gates(Dtype dtype, const Rows<const void*>& k, int64_t batch, int64_t row, int64_t head, int count,
                int padded, int head_dim, T* out) {
    with_element(dtype, [&](auto element) {
        using Element = decltype(element);
        const Element* from = static_cast<const Element*>(k.data) + offset(k, batch, row, head) + head_dim;
        for (int r = 0; r < count; ++r, from += k.row_stride) {
            out[r] = T(0);
            for (int part = 0; part < kGateParts; ++part) out[r] += T(from[part]);
        }
    });
    std::fill(out + count, out + padded, T(1));
}

// Transposes (rows, width) with rows of `pitch` values to (width, kTile), the form with queries along the lanes.
template <class T>
void transpose(const T* from, int rows, int width, int pitch, T* to) {
    for (int c = 0; c < width; ++c)
        for (int r = 0; r < rows; ++r) to[c * kTile + r] = from[r * pitch + c];
}

// ---- matrix products -----------------------------------------------------------------------------------------------

// A matrix that is read one scalar at a time.
template <class T>
struct Scalars {
    const T* data;
    int row_stride, column_stride;
};

// Computes kRows rows and kVectors vectors of c.
template <class T, int kRows, int kVectors, bool kAdd>
inline void multiply_block(const Scalars<T>& a, const T* b, int b_pitch, int depth, T* c, int c_pitch) {
    Vec<T> sum[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) sum[r][v] = kAdd ? load(c + r * c_pitch + v * kLanes<T>) : Vec<T>{};
    for (int k = 0; k < depth; ++k) {
        Vec<T> row[kVectors];
        for (int v = 0; v < kVectors; ++v) row[v] = load(b + k * b_pitch + v * kLanes<T>);
        for (int r = 0; r < kRows; ++r) {
            const Vec<T> scalar = splat<T>(a.data[r * a.row_stride + k * a.column_stride]);
            for (int v = 0; v < kVectors; ++v) sum[r][v] += scalar * row[v];
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) store(c + r * c_pitch + v * kLanes<T>, sum[r][v]);
}

// Computes kRows rows of c.
template <class T, int kRows, bool kAdd>
inline void multiply_rows(const Scalars<T>& a, const T* b, int b_pitch, int columns, int depth, T* c, int c_pitch) {
    int n = 0;
    for (; n + 4 * kLanes<T> <= columns; n += 4 * kLanes<T>)
        multiply_block<T, kRows, 4, kAdd>(a, b + n, b_pitch, depth, c + n, c_pitch);
    for (; n + 2 * kLanes<T> <= columns; n += 2 * kLanes<T>)
        multiply_block<T, kRows, 2, kAdd>(a, b + n, b_pitch, depth, c + n, c_pitch);
    if (n < columns) multiply_block<T, kRows, 1, kAdd>(a, b + n, b_pitch, depth, c + n, c_pitch);
}

// c (rows, columns) = a b, or c += a b with kAdd, for a (rows, depth) and b (depth, columns). `rows` is a multiple of
// 4, and `columns` a multiple of kLanes. A block of 3 rows by 4 vectors needs 16 registers: its sums, and 4 vectors of
// b. AVX-512 has 32.
template <class T, bool kAdd>
inline void multiply(const Scalars<T>& a, const T* b, int b_pitch, int rows, int columns, int depth, T* c,
                     int c_pitch) {
    constexpr int kRows = SB_VECTOR_BYTES == 64 ? 4 : 3;
    const auto from = [&a](int r) { return Scalars<T>{a.data + r * a.row_stride, a.row_stride, a.column_stride}; };
    int r = 0;
    for (; (rows - r) % kRows != 0; r += 2)
        multiply_rows<T, 2, kAdd>(from(r), b, b_pitch, columns, depth, c + r * c_pitch, c_pitch);
    for (; r < rows; r += kRows)
        multiply_rows<T, kRows, kAdd>(from(r), b, b_pitch, columns, depth, c + r * c_pitch, c_pitch);
}

// ---- query tiles and key tiles -------------------------------------------------------------------------------------

// Rows [first, first + count) of Q of a segment, for one head of one batch element.
struct QueryTile {
    const Segment* segment;
    int batch, head;
    int first, count;
    int lanes;  // count rounded up to whole vectors

    // Returns how many keys of the segment row `r` of this tile sees.
    int visible(int r, bool attend_current) const {
        const int64_t keys = int64_t(first) + r + segment->q_pos_minus_k_pos + (attend_current ? 1 : 0);
        return int(std::clamp<int64_t>(keys, 0, segment->k_len));
    }
    int64_t q_row() const { return segment->q_begin + first; }
    // Returns the index of this tile's first row in an array (batch, num_heads, q_rows).
    int64_t row_index(const Sizes& sizes) const {
        return (int64_t(batch) * sizes.num_heads + head) * sizes.q_rows + q_row();
    }
};

// A task: rows [first, first + count) of Q of a segment, for one head of one batch element.
struct Task {
    const Segment* segment;
    int batch, head;
    int first, count;

    int num_query_tiles() const { return (count + kTile - 1) / kTile; }
    QueryTile query_tile(int i, int lanes) const {
        const int tile_count = std::min(kTile, count - i * kTile);
        return {segment, batch, head, first + i * kTile, tile_count, round_up(tile_count, lanes)};
    }
};

inline Task task_of(const Segments& segments, const Work& work, int64_t range, int batch, int head) {
    const RowRange& rows = work.ranges[range];
    return {&segments[rows.segment], batch, head, rows.first, rows.count};
}

// Returns the next task of the calling thread. The result is at least the number of tasks if no task is left. No thread
// orders anything by the ticket, so it can be relaxed.
inline int64_t next_task(const Work& work) {
    return __atomic_fetch_add(work.ticket, 1, __ATOMIC_RELAXED);
}

// A tile of keys. `count` is its number of keys, `keys` that number rounded up to whole quads, and `row` its first row
// in the tensors.
struct KeyTile {
    int count, keys;
    int64_t row;
};

inline KeyBlocks key_blocks(const ForwardParams& p) {
    return p.key_blocks;
}
inline KeyBlocks key_blocks(const BackwardParams&) {
    return {};
}

// Rows [row, row + count) of k and v of `batch`, which is a block if the keys are in blocks.
struct KeyRun {
    int64_t batch, row;
    int count;
};

// Returns the longest run of rows that begins at key `row`, up to `count` rows.
inline KeyRun key_run(const KeyBlocks& blocks, int batch, int64_t row, int count) {
    if (blocks.table == nullptr) return {batch, row, count};
    const int64_t in_block = row % blocks.block_size;
    return {blocks.table[row / blocks.block_size], in_block,
            int(std::min<int64_t>(count, blocks.block_size - in_block))};
}

// Loads keys [begin, begin + kTile) of the segment, for the KV head that `task` reads, into k (key, d), v (key, d_v)
// and, with forget gates, gates (key).
template <class T, class Params>
KeyTile load_key_tile(const Params& p, const Task& task, int begin, T* k, T* v, T* gates) {
    const Sizes& z = p.sizes;
    const int count = std::min(kTile, task.segment->k_len - begin), keys = round_up(count, kKeysPerStep);
    const int kv_head = task.head / (z.num_heads / z.num_kv_heads);
    const int64_t row = int64_t(task.segment->k_begin) + begin;
    for (int done = 0; done < count;) {
        const KeyRun run = key_run(key_blocks(p), task.batch, row + done, count - done);
        const int padded = done + run.count == count ? keys - done : run.count;
        pack_rows(z.dtype, p.k, run.batch, run.row, kv_head, run.count, padded, z.head_dim, z.head_dim,
                  k + done * z.head_dim);
        pack_rows(z.dtype, p.v, run.batch, run.row, kv_head, run.count, padded, z.head_dim_v, z.head_dim_v,
                  v + done * z.head_dim_v);
        if (p.options.forget_gate)
            pack_gates(z.dtype, p.k, run.batch, run.row, kv_head, run.count, padded, z.head_dim, gates + done);
        done += run.count;
    }
    return {count, keys, row};
}

inline char* scratch_of_this_thread(const Work& work) {
#if defined(_OPENMP)
    return work.scratch + omp_get_thread_num() * work.scratch_bytes;
#else
    return work.scratch;
#endif
}

// Divides the scratch of a thread into arrays that begin at multiples of 64 bytes.
class Arena {
  public:
    explicit Arena(const char* begin) : begin_(reinterpret_cast<uintptr_t>(begin)) {}

    template <class T>
    T* take(int64_t elements) {
        T* const array = reinterpret_cast<T*>(begin_ + bytes_);
        bytes_ += (elements * int64_t(sizeof(T)) + 63) / 64 * 64;
        return array;
    }
    int64_t bytes() const { return bytes_; }

  private:
    uintptr_t begin_;
    int64_t bytes_ = 0;
};

// Returns the bytes that a Scratch takes from an arena. No memory is touched.
template <class Scratch>
int64_t scratch_bytes(const Sizes& sizes) {
    Arena memory(nullptr);
    Scratch(memory, sizes);
    return memory.bytes();
}

// The logits of one head, in units of log(2): z = q . k * scale + offset.
template <class T>
struct Logits {
    T scale, offset;

    Logits(const Options& options, int head) : scale(T(options.scale * kLog2E)) {
        // long double: the exp2 and log2 of double are of glibc 2.29, which older systems lack.
        const long double a = options.reach + head * options.reach_step;
        offset = T(-std::log2(std::exp2(a) - 1));
    }
};

// Replaces q . k by 2^(z log2 e) = exp(z) for the keys [0, keys) of a tile, and by 0 if the row does not see the key.
// limit[r] is the number of keys of the tile that row r sees. Writes to `saturated`, for each vector of rows, whether
// some exp(z) is too large for quads.
template <class T>
inline void exponentials(T* scores, int keys, int lanes, const Logits<T>& logits, const T* limit, bool masked,
                         bool* saturated) {
    for (int v = 0; v * kLanes<T> < lanes; ++v) {
        const Vec<T> row_limit = load(limit + v * kLanes<T>);
        Mask<T> large{};
        for (int k = 0; k < keys; ++k) {
            T* at = scores + k * kTile + v * kLanes<T>;
            Vec<T> e = exp2_clamped<T>(load(at) * logits.scale + splat<T>(logits.offset));
            if (masked) e = splat<T>(T(k)) < row_limit ? e : Vec<T>{};
            large |= ~(e <= splat<T>(Numbers<T>::kMaxQuadE));  // NaN counts as large
            store(at, e);
        }
        saturated[v] = any<T>(large);
    }
}

// Returns the odds of f sigmoid(z) from e, the odds of sigmoid(z): f e / (1 + (1 - f) e).
template <class T>
inline Vec<T> gated(const Vec<T>& e, T f) {
    return f * e / (T(1) + (T(1) - f) * e);
}

}  // namespace megatron_sb::cpu::SB_CPU_LEVEL
