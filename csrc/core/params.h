// The block contract: the two entry points every floor above stands on, as plain structs.
//
//   block_forward   (q, k, v, segments, mass_in)                             -> o, mass_out, restart
//   block_backward  (q, k, v, do, segments, restart, mass_in, prefix_in)     -> dq, dk, dv, prefix_out
//
// Letters as in the paper: z logit, beta = sigmoid(z), A weights, P mass (the stick that is left), g = A * (dO . v).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SB_HOST_DEVICE __host__ __device__
#else
#define SB_HOST_DEVICE
#endif

namespace megatron_sb {

enum class Dtype : int8_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

// A run of query rows that sees a run of key rows. Rows count from the start of the local buffers of one batch
// element. Key row i (from k_begin) is visible to query row j (from q_begin) when
//     i < j + q_pos_minus_k_pos        (or <= where a query attends to its own position).
// A query row stands in at most one segment of a table; rows in none get o = 0 and mass_out = mass_in. The key rows of
// two segments are disjoint or begin at the same row: the tiles of keys, counted from k_begin, are then one grid.
struct Segment {
    int32_t q_begin;
    int32_t q_len;
    int32_t k_begin;
    int32_t k_len;
    int32_t q_pos_minus_k_pos;
};
inline constexpr int kSegmentFields = 5;

// The table of a call, applied to every batch element: `size` entries at `data`, in memory that the kernel reads, or
// the one entry `whole`, which travels by value (a dense call has nothing to copy to a device). `data` is null in the
// second case, and may be where there are no entries.
struct Segments {
    const Segment* data = nullptr;
    int32_t size = 1;
    Segment whole = {};
    SB_HOST_DEVICE bool by_value() const { return data == nullptr && size == 1; }
    SB_HOST_DEVICE const Segment& operator[](int32_t i) const { return data == nullptr ? whole : data[i]; }
};

// A tensor (batch, row, head, head_dim) whose last stride is one. Strides are in elements, not bytes.
template <class Pointer>
struct Rows {
    Pointer data = nullptr;
    int64_t batch_stride = 0;
    int64_t row_stride = 0;
    int64_t head_stride = 0;
};

struct Sizes {
    Dtype dtype;  // of q, k, v and do; accumulation is in fp64 for kFloat64 and in fp32 for all others
    int32_t batch;
    int32_t num_heads;
    int32_t num_kv_heads;  // divides num_heads; query head h reads key head h / (num_heads / num_kv_heads)
    int32_t q_rows;
    int32_t k_rows;
    int32_t head_dim;    // of q and k
    int32_t head_dim_v;  // of v and o
};

struct Options {
    double scale;              // z = scale * q . k
    double mass_threshold;     // a row whose mass is below this is used up; 0 keeps all that can contribute
    bool attend_current;       // keys i <= j instead of i < j
    bool forget_gate = false;  // the rows of k go on with their gates (below)
};

// With forget gates, beta = f sigmoid(z), where f in [0, 1] is the key's. A row of k is then head_dim + kGateColumns
// wide: f is the sum of the first kGateParts columns behind the head_dim, so that 16-bit types hold 24 bits of it, and
// 1 - f of a gate that is nearly open; the other columns are not read. So a gate goes wherever its key goes. A row of
// dk is as wide, and the gradient of f is added to the first column behind the head_dim.
inline constexpr int kGateColumns = 8;  // 16 bytes of a 16-bit type: rows stay aligned
inline constexpr int kGateParts = 3;
inline constexpr float kLeastGate = 0x1p-64f;  // g / f of a gate with less is taken as if it had so much

// Where the backward starts, for each query row: the keys [0, edge) of its segment still meet `mass` at their newer
// edge, and that is the oldest tile edge at which this mass is at least max(mass_threshold, the kernel's floor).
// The backward walks from the tile that ends at `edge` to newer keys. edge = 0: from the first key on, which has `mass`
// at its older edge; that is for a kernel to write whose backward gains by it. mass = 0: no key contributes.
// Edges are multiples of kRestartTile, or the segment's k_len: one grid for all kernels, so that any of their backwards
// reads what any of their forwards wrote.
inline constexpr int kRestartTile = 64;
struct Restart {
    int32_t* edge = nullptr;  // (batch, num_heads, q_rows), contiguous
    void* mass = nullptr;     // (batch, num_heads, q_rows), contiguous, accumulation type
};

struct ForwardParams {
    Sizes sizes;
    Options options;
    Segments segments;
    Rows<const void*> q, k, v;
    Rows<void*> o;                  // of type o_dtype
    Dtype o_dtype;                  // the accumulation type or sizes.dtype
    const void* mass_in = nullptr;  // (batch, num_heads, q_rows), accumulation type; null: a full stick, 1
    void* mass_out = nullptr;       // same shape
    Restart restart;
    void* workspace = nullptr;  // what the kernel asked for, in bytes, aligned to 256
};

struct BackwardParams {
    Sizes sizes;
    Options options;
    Segments segments;
    Rows<const void*> q, k, v, d_o;
    Rows<void*> dq, dk, dv;
    Dtype grad_dtype;  // of them: the accumulation type, and they are added to; or sizes.dtype, and all are written
    Restart restart;   // read only
    const void* mass_in = nullptr;    // scales a restart that was made before its carry was known; null: 1
    const void* prefix_in = nullptr;  // sum of g over all older keys, plus P * dP at the oldest end; null: 0
    void* prefix_out = nullptr;       // prefix_in plus this block's g; (batch, num_heads, q_rows)
    void* workspace = nullptr;        // workspace_bytes, aligned to 256
    int64_t workspace_bytes = 0;
};

}  // namespace megatron_sb
