// What one rank's calls need of a partition, as tensors on one device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "plan/itinerary.h"
#include "plan/partition.h"
#include "plan/schedule.h"

namespace megatron_sb::distributed {

// Some rows of a local buffer: one stretch, or a list where they are not.
struct RowSet {
    int64_t begin;
    int64_t count;
    at::Tensor list;  // int64; undefined: [begin, begin + count)

    at::Tensor of(const at::Tensor& x) const;  // those rows of x (b, rows, ..), a view where it can be
    void put(const at::Tensor& x, const at::Tensor& value) const;  // writes them
};

// Rows of a rank's local buffer that stay together in the rows of several ranks.
struct Stretch {
    int64_t local;
    int64_t joint;
    int64_t count;
};

// plan::Itinerary with its tables on the device: int32 (segments, 5), undefined where there is nothing to compute.
struct Tables {
    std::vector<plan::Run> runs;  // newest to oldest
    std::vector<int> run_of;      // by key buffer
    std::vector<at::Tensor> segments;
};

// From how many rows on keys are gathered a group of heads at a time, so that one group's transfer hides under
// another's compute. Fewer rows of a single head are too little work for a device: H200, forward of 16K rows 299
// TFLOP/s with one head and 686 with twelve; of 64K 707 and 626. From there on too, ranks that exchange heads send each
// stretch of rows to its place. With fewer rows the host, which takes some 9 us a message, falls behind the device:
// they go as one collective and are sorted then.
constexpr int64_t kRowsToSplitHeads = 32768;
constexpr size_t kMostStretches = 8;  // of a rank, as messages of their own
constexpr int64_t kMaxHeadGroups = 4;

struct RankPlan {
    plan::Schedule schedule;
    int rank;
    Tables ring;                // key buffers: the chunks
    Tables gather;              // key buffer: the stream
    std::vector<RowSet> lanes;  // this rank's chunk of each lane, in its local buffer
    // Row i of the stream is row to_stream[i] of the local buffers of all ranks, one after the other; from_stream is
    // the inverse.
    at::Tensor to_stream;
    at::Tensor from_stream;
    // Where ranks exchange heads: row i of the rows that they have together is row to_joint[i] of their local buffers,
    // one after the other; from_joint is the inverse. Or undefined: then `stretches`, by rank, says the same.
    at::Tensor to_joint;
    at::Tensor from_joint;
    std::vector<std::vector<Stretch>> stretches;
    int64_t rows_to_split_heads;
};

// For a rank that exchanges heads with the others of its `num_exchanging` neighbours, itself included: ranks
// [i * num_exchanging, (i + 1) * num_exchanging) are as one rank, number i, with all their rows. All but to_joint,
// from_joint and the stretches are that one's.
RankPlan make_rank_plan(const plan::Partition& partition, int rank, c10::Device device, int num_exchanging = 1,
                        int64_t rows_to_split_heads = kRowsToSplitHeads);

// x.index_select(dim, rows), in units of eight bytes where x's last dimension, which is not `dim`, allows it.
at::Tensor select_rows(const at::Tensor& x, int64_t dim, const at::Tensor& rows);
// Whether x's memory can be seen as elements of so many bytes.
bool divides_into(const at::Tensor& x, int64_t bytes);
at::Tensor index_tensor(const std::vector<int64_t>& rows, c10::Device device);
at::Tensor inverse_permutation(const at::Tensor& permutation);

}  // namespace megatron_sb::distributed
