// The block contract: the two functions that every kernel implements, and their parameters as plain structs.
//
//   block_forward   (q, k, v, segments, mass_in)                             -> o, mass_out, restart
//   block_backward  (q, k, v, do, segments, restart, mass_in, prefix_in)     -> dq, dk, dv, prefix_out
//
// Letters as in the paper: z is the logit, beta = sigmoid(z), A the weight, P the mass (the part of the stick that is
// left). In the backward, g = A (dO . v).
#pragma once

#include <cstdint>
#include <limits>

#if defined(__CUDACC__)
#define SB_HOST_DEVICE __host__ __device__
#else
#define SB_HOST_DEVICE
#endif

namespace megatron_sb {

enum class Dtype : int8_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

// A range of rows of q that attends to a range of rows of k. Rows are counted from the first row of q and k of a batch
// element. Key row i (from k_begin) is visible to query row j (from q_begin) if
//     i < j + q_pos_minus_k_pos        (<= with attend_current).
// Each row of q is in at most one segment of a table. Rows in no segment get o = 0 and mass_out = mass_in. The key
// ranges of two segments are disjoint or begin at the same row, so one grid of key tiles, counted from k_begin, serves
// both.
struct Segment {
    int32_t q_begin;
    int32_t q_len;
    int32_t k_begin;
    int32_t k_len;
    int32_t q_pos_minus_k_pos;
};
inline constexpr int kSegmentFields = 5;

// The segment table of a call; it applies to every batch element. The table has `size` entries at `data`, in memory
// that the kernel can read. A dense call has the one entry `whole` instead, which is passed by value, and `data` is
// null. `data` can also be null if the table is empty.
struct Segments {
    const Segment* data = nullptr;
    int32_t size = 1;
    Segment whole = {};
    // No segment has more keys. The host uses it to plan, because it cannot read the table.
    int32_t max_keys = std::numeric_limits<int32_t>::max();
    SB_HOST_DEVICE bool by_value() const { return data == nullptr && size == 1; }
    SB_HOST_DEVICE const Segment& operator[](int32_t i) const { return data == nullptr ? whole : data[i]; }
};

// A tensor (batch, row, head, head_dim). The last stride is 1; the other strides are in elements, not bytes.
template <class Pointer>
struct Rows {
    Pointer data = nullptr;
    int64_t batch_stride = 0;
    int64_t row_stride = 0;
    int64_t head_stride = 0;
};

// A cache of keys in blocks. Row r of k and v is row r % block_size of block table[r / block_size]. The batch stride of
// k and v is the stride from block to block, and sizes.batch is 1. GPU kernels clamp the entries of the table to
// [0, num_blocks), because the host does not read them there.
struct KeyBlocks {
    const int32_t* table = nullptr;  // (k_rows / block_size,); null: k and v are not in blocks
    int32_t block_size = 0;
    int32_t num_blocks = 0;
};

struct Sizes {
    Dtype dtype;          // of q, k, v and do. The accumulation type is fp64 for kFloat64 and fp32 for all others
    int8_t bias_columns;  // of head_dim: kBiasColumns, or 0
    int32_t batch;
    int32_t num_heads;
    int32_t num_kv_heads;  // divides num_heads; query head h reads KV head h / (num_heads / num_kv_heads)
    int32_t q_rows;
    int32_t k_rows;
    int32_t head_dim;    // of q and k
    int32_t head_dim_v;  // of v and o
};

// With bias columns, the last kBiasColumns of the head_dim columns of q and k hold biases, so that q . k contains them:
//     q    the number of the query in kGateParts columns, then kGateParts ones, then zeros
//     k    kGateParts ones, then the number of the key in kGateParts columns, then zeros
// The value of a one is bias_unit(), and a number is stored divided by it. In dq and dk, the gradient of a number is in
// its first column. Nothing reads the other bias columns of dq and dk, so a kernel does not need to compute them. A
// kernel can also treat bias columns like all other columns.
inline constexpr int kBiasColumns = 8;
SB_HOST_DEVICE inline float bias_unit(Dtype dtype) {
    return dtype == Dtype::kFloat16 ? 128.f : 1.f;  // a number can exceed 65504, the largest of fp16
}

inline constexpr double kNoReach = 1, kMinReach = 0x1p-6, kMaxReach = 64;
struct Options {
    double scale;              // z = scale * q . k + the offset of the head
    double mass_threshold;     // a row with less mass skips older keys; 0 disables skipping
    bool attend_current;       // a query sees its own position: keys i <= j instead of i < j
    bool forget_gate = false;  // rows of k contain their gates (below)
    // The reach of head h is a = reach + h * reach_step, a > 0. Its logits have an offset: beta is 2^-a if q . k = 0.
    // The default has no offset.
    double reach = kNoReach, reach_step = 0;
};

// With forget gates, beta = f sigmoid(z), where f in [0, 1] belongs to the key. A row of k then has head_dim +
// kGateColumns columns. f is the sum of the first kGateParts columns after head_dim. With several columns, 16-bit
// types represent 24 bits of f, and of 1 - f for a gate that is nearly open. The other columns are not read. A gate is
// therefore sent and sharded with its key. A row of dk is as wide; the gradient of f is added to its first column after
// head_dim.
inline constexpr int kGateColumns = 8;  // 16 bytes of a 16-bit type: rows stay aligned
inline constexpr int kGateParts = 3;
inline constexpr float kLeastGate = 0x1p-64f;  // the backward computes g / max(f, kLeastGate)

// The restart record: where the backward starts each query row. The row has `mass` at the boundary between the keys
// edge - 1 and edge of its segment. Of all tile edges at which the mass is at least max(mass_threshold, the kernel's
// floor), this is the oldest one. The backward starts with the tile that ends at `edge` and continues to newer keys.
// Older tiles contribute nothing.
//
// If edge = 0 and mass > 0, the row starts at the first key and has `mass` at the older side of that key. A kernel
// writes this form only if its backward is then faster. If mass = 0, no key contributes.
//
// Edges are multiples of kRestartTile, or the k_len of the segment. All kernels share this grid, so every backward can
// read the record of every forward. core/restart.h decodes it.
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
    KeyBlocks key_blocks;           // only if the kernel serves requests with blocks (dispatch/table.h)
    Rows<void*> o;                  // of type o_dtype
    Dtype o_dtype;                  // the accumulation type or sizes.dtype
    bool add_o = false;             // add to o, in the accumulation type. Rows in no segment keep their o
    const void* mass_in = nullptr;  // (batch, num_heads, q_rows), accumulation type; null: 1, a full stick
    void* mass_out = nullptr;       // same shape and type
    Restart restart;
    void* workspace = nullptr;  // as many bytes as the kernel requires, aligned to kWorkspaceAlignment
};

struct BackwardParams {
    Sizes sizes;
    Options options;
    Segments segments;
    Rows<const void*> q, k, v, d_o;
    // Kernels with `writes_gradients` (dispatch/table.h) write every row, 0 where there is no gradient. Their rows
    // begin at multiples of 16 bytes. Other kernels add to gradients in the accumulation type, which the caller has
    // cleared. The caller also clears gradients if there are no rows, keys or segments: kernels then do nothing.
    Rows<void*> dq, dk, dv;
    Dtype grad_dtype;     // of dq, dk, dv: the accumulation type, or sizes.dtype if the kernel writes gradients
    bool add_dq = false;  // add to dq, in the accumulation type. Rows in no segment keep their dq
    Restart restart;      // the kernel only reads it
    // The next three: (batch, num_heads, q_rows), accumulation type.
    const void* mass_in = nullptr;    // scales restart.mass if the forward did not know mass_in; a row with 0 never
                                      // starts; null: 1
    const void* prefix_in = nullptr;  // sum of g over all older keys, plus P dP with the final mass P; null: 0
    void* prefix_out = nullptr;       // prefix_in plus the sum of g over the keys of this block
    void* workspace = nullptr;        // workspace_bytes bytes, aligned to kWorkspaceAlignment
    int64_t workspace_bytes = 0;
};

}  // namespace megatron_sb
