// The part of a partition that one rank's calls need, as tensors on one device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "plan/key_rows.h"
#include "plan/partition.h"
#include "plan/schedule.h"
#include "plan/segment_plan.h"

namespace megatron_sb::distributed {

// Some rows of a local buffer: a range, or a list if they are not contiguous.
struct RowSet {
    int64_t begin;
    int64_t count;
    at::Tensor list;  // int64; undefined: [begin, begin + count)

    // Returns these rows of x (b, rows, ..): a view for a range, a copy for a list.
    at::Tensor read(const at::Tensor& x) const;
    // The dtypes may differ.
    void write(const at::Tensor& x, const at::Tensor& value) const;
};

// plan::SegmentPlan with its tables on the device: int32 (num_segments, 5), undefined for a key buffer without
// segments.
struct SegmentTables {
    std::vector<plan::Run> runs;  // newest to oldest
    std::vector<int> run_of;      // by key buffer
    std::vector<at::Tensor> segments;
    int64_t most_keys = 0;  // of one segment
};

// How a rank gets the keys that its queries see.
enum class Comm : int8_t {
    kRing,    // "p2p"
    kGather,  // "all_gather"
    kLocal,   // no transfer: this rank already has them
};

// From this many rows on, two modes change how they transfer data:
// - all_gather works on one group of heads at a time. The transfer of one group overlaps the compute of another. With
//   fewer rows one head is too little work. Forward on an H200: 16K rows reach 299 TFLOP/s with one head and 686 with
//   twelve; 64K rows reach 707 and 626.
// - a2a sends each row range to its place in the joint buffer. With fewer rows the host is the bottleneck, at about
//   9 us for each message. The rows then travel as one collective and are sorted afterwards.
constexpr int64_t kRowsToSplitHeads = 32768;
// p2p computes the two blocks of a step side by side, if all heads of a batch have at most so many query rows in a
// chunk together. With more, each block fills the GPU by itself. On two H200s, with 12 heads, p2p is faster in this way
// with chunks of 4,096 rows, and not with 16,384 and 32,768 (docs/design/ring.md).
constexpr int64_t kMostRowsSideBySide = 65536;
constexpr size_t kMaxRowRanges = 8;  // the most row ranges of a rank that are sent as one message each
constexpr int64_t kMaxHeadGroups = 4;

// The key rows that a rank needs, if the ranks do not need the whole stream (plan/key_rows.h). The documents that only
// this rank has take no part in transfers.
struct KeyRowPlan {
    int64_t most_rows;  // of the key buffer of one rank
    bool fit_in_ring;   // whether no rank has more than the chunks of a ring
    at::Tensor own;     // segments of the documents that only this rank has, on local rows; undefined: none
    int64_t own_keys;   // most keys of one of these segments
    RowSet shared;      // all other local rows, whose queries see the key buffer
    int64_t num_rows;   // of the key buffer of this rank
    std::vector<plan::RowRange> kept;                         // its rows that this rank has
    std::vector<std::vector<plan::RowRange>> sent, received;  // by rank
};

// The local buffers of all ranks, one after another, each padded to `rows` rows: collectives need equal buffers.
struct GatherOrder {
    int64_t rows;            // of the largest local buffer
    at::Tensor to_stream;    // row i of the stream is row to_stream[i] of the buffers
    at::Tensor from_stream;  // row i of the buffers is row from_stream[i] of the stream, or any row if it is padding

    // Returns a local buffer (rows, ..) with the padding, contiguous.
    at::Tensor padded(const at::Tensor& local) const;
};

GatherOrder make_gather_order(const plan::Partition& partition, c10::Device device);

struct RankPlan {
    plan::Schedule schedule;
    int rank;
    SegmentTables ring;               // a key buffer is a chunk; empty, like `lanes`, if the layout has no ring
    SegmentTables gather;             // the only key buffer is the stream, or with key_rows the needed part of it,
                                      // and queries are then shared rows
    std::vector<RowSet> lanes;        // by lane: the rows of this rank's own chunk in its local buffer
    std::vector<int64_t> chunk_rows;  // by chunk of the ring: how many rows it has
    GatherOrder order;
    // The rows of each rank that exchanges heads with this one, which is among them.
    std::vector<int64_t> exchanged_rows;
    // If ranks exchange heads, the place of their rows in the joint buffer. Either to_joint is defined: row i of the
    // joint buffer is row to_joint[i] of the concatenated local buffers of these ranks, and from_joint is the inverse.
    // Or row_ranges is filled, one list for each of these ranks. `place` counts rows of the joint buffer.
    at::Tensor to_joint = {};
    at::Tensor from_joint = {};
    std::vector<std::vector<plan::RowRange>> row_ranges = {};
    std::optional<KeyRowPlan> key_rows = {};
    int64_t rows_to_split_heads;
    int64_t most_rows_side_by_side = kMostRowsSideBySide;

    // Returns every tensor above that is defined.
    std::vector<at::Tensor> tensors() const;

    int64_t seq_len() const { return order.to_stream.numel(); }
    // Returns how keys reach this rank in a mode: instead of moving around the ring, the rows that ranks need are sent
    // directly, if they take no more memory or if the layout has no ring. The answer is the same on all ranks.
    Comm transfer(Comm mode) const {
        const bool direct = lanes.empty() || (key_rows && key_rows->fit_in_ring);
        return mode == Comm::kRing && direct ? Comm::kGather : mode;
    }
    // Returns whether the forward keeps the key rows of other ranks for the backward, which then receives no keys: if
    // they take no more memory than a ring does. The answer is the same on all ranks.
    bool keeps_keys(Comm comm) const { return comm == Comm::kGather && key_rows && key_rows->fit_in_ring; }
    // The tables that serve kGather also serve kLocal.
    const SegmentTables& tables(Comm comm) const { return comm == Comm::kRing ? ring : gather; }
};

// With num_exchanging > 1, ranks [i * num_exchanging, (i + 1) * num_exchanging) exchange heads. They act as one joint
// rank i, which has all their rows. Only to_joint, from_joint and row_ranges then refer to single ranks; everything
// else describes joint ranks.
RankPlan make_rank_plan(const plan::Partition& partition, int rank, c10::Device device, int num_exchanging = 1,
                        int64_t rows_to_split_heads = kRowsToSplitHeads);

// Returns x.index_select(dim, rows), copied in units of eight bytes if x can be viewed so. `dim` is not the last
// dimension.
at::Tensor select_rows(const at::Tensor& x, int64_t dim, const at::Tensor& rows);
// Returns whether x can be viewed as elements of `bytes` bytes.
bool divides_into(const at::Tensor& x, int64_t bytes);
at::Tensor index_tensor(const std::vector<int64_t>& rows, c10::Device device);
at::Tensor inverse_permutation(const at::Tensor& permutation);

}  // namespace megatron_sb::distributed
