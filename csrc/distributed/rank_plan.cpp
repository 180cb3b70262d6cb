#include "distributed/rank_plan.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace megatron_sb::distributed {
namespace {

int64_t most_keys(const std::vector<Segment>& segments) {
    int32_t most = 0;
    for (const Segment& segment : segments) most = std::max(most, segment.k_len);
    return most;
}

// Returns the table of the segments, undefined if there are none.
at::Tensor make_table(const std::vector<Segment>& segments, c10::Device device) {
    if (segments.empty()) return {};
    const auto* fields = reinterpret_cast<const int32_t*>(segments.data());
    const auto rows = static_cast<int64_t>(segments.size());
    return at::from_blob(const_cast<int32_t*>(fields), {rows, kSegmentFields}, at::kInt).clone().to(device);
}

SegmentTables make_tables(const plan::SegmentPlan& segment_plan, c10::Device device) {
    SegmentTables tables;
    tables.runs = segment_plan.runs;
    for (const plan::BufferSegments& buffer : segment_plan.buffers) {
        tables.run_of.push_back(buffer.run);
        tables.segments.push_back(make_table(buffer.segments, device));
        tables.most_keys = std::max(tables.most_keys, most_keys(buffer.segments));
    }
    return tables;
}

RowSet make_row_set(const std::vector<int64_t>& rows, c10::Device device) {
    if (rows.empty()) return {0, 0, {}};
    const auto count = static_cast<int64_t>(rows.size());
    const bool contiguous = rows.back() - rows.front() + 1 == count;  // rows increase
    return {rows.front(), count, contiguous ? at::Tensor() : index_tensor(rows, device)};
}

KeyRowPlan make_key_row_plan(const plan::KeyRows& rows, const plan::KeyRowCounts& counts,
                             const plan::Partition& partition, c10::Device device) {
    return {.most_rows = counts.needed,
            .fit_in_ring = counts.fit_in_ring(partition),
            .own = make_table(rows.own, device),
            .own_keys = most_keys(rows.own),
            .shared = make_row_set(rows.shared_rows, device),
            .num_rows = rows.num_rows,
            .kept = rows.kept,
            .sent = rows.sent,
            .received = rows.received};
}

// Returns the row in the joint buffer of each row of the concatenated local buffers of the exchanging ranks.
std::vector<int64_t> joint_order(const plan::Partition& partition, const plan::Partition& joint, int joint_rank) {
    std::vector<int64_t> joint_row(partition.num_rows()), order;
    const std::vector<int64_t> joint_rows = joint.local_positions(joint_rank);
    for (size_t i = 0; i < joint_rows.size(); ++i) joint_row[joint_rows[i]] = static_cast<int64_t>(i);
    const int num_exchanging = partition.size() / joint.size();
    for (int i = 0; i < num_exchanging; ++i) {
        for (const int64_t row : partition.local_positions(joint_rank * num_exchanging + i)) {
            order.push_back(joint_row[row]);
        }
    }
    return order;
}

// Returns the row ranges of each rank. `order` is the result of joint_order(), `rows` has the rows of each rank.
std::vector<std::vector<plan::RowRange>> find_row_ranges(const std::vector<int64_t>& order,
                                                         const std::vector<int64_t>& rows) {
    std::vector<std::vector<plan::RowRange>> ranges;
    auto next = order.begin();
    for (const int64_t rows_of_rank : rows) {
        std::vector<plan::RowRange>& of_rank = ranges.emplace_back();
        for (int64_t i = 0; i < rows_of_rank; ++i, ++next) {
            const bool extends_last = i > 0 && *next == *(next - 1) + 1;
            extends_last ? void(++of_rank.back().count) : of_rank.push_back({i, *next, 1});
        }
    }
    return ranges;
}

void place_joint_rows(RankPlan& plan, const std::vector<int64_t>& order, c10::Device device) {
    plan.row_ranges = find_row_ranges(order, plan.exchanged_rows);
    const auto few = [](const std::vector<plan::RowRange>& of_rank) { return of_rank.size() <= kMaxRowRanges; };
    const bool many_rows = static_cast<int64_t>(order.size()) >= plan.rows_to_split_heads;
    if (many_rows && std::all_of(plan.row_ranges.begin(), plan.row_ranges.end(), few)) return;
    plan.row_ranges.clear();
    plan.from_joint = index_tensor(order, device);
    plan.to_joint = inverse_permutation(plan.from_joint);
}

}  // namespace

at::Tensor RowSet::read(const at::Tensor& x) const {
    return list.defined() ? select_rows(x, 1, list) : x.narrow(1, begin, count);
}

void RowSet::write(const at::Tensor& x, const at::Tensor& value) const {
    list.defined() ? x.index_copy_(1, list, value.to(x.scalar_type())) : x.narrow(1, begin, count).copy_(value);
}

at::Tensor GatherOrder::padded(const at::Tensor& local) const {
    const int64_t padding = rows - local.size(0);
    if (padding == 0) return local.contiguous();
    std::vector<int64_t> sizes = local.sizes().vec();
    sizes[0] = padding;
    return at::cat({local, at::zeros(sizes, local.options())});
}

GatherOrder make_gather_order(const plan::Partition& partition, c10::Device device) {
    std::vector<int64_t> from_stream = partition.gathered_positions(), to_stream(partition.num_rows());
    for (size_t i = 0; i < from_stream.size(); ++i) {
        if (from_stream[i] == plan::kNoRow) {
            from_stream[i] = 0;
        } else {
            to_stream[from_stream[i]] = static_cast<int64_t>(i);
        }
    }
    return {partition.max_local_rows(), index_tensor(to_stream, device), index_tensor(from_stream, device)};
}

std::vector<at::Tensor> RankPlan::tensors() const {
    std::vector<at::Tensor> all{order.to_stream, order.from_stream, to_joint, from_joint};
    for (const SegmentTables* tables : {&ring, &gather}) {
        all.insert(all.end(), tables->segments.begin(), tables->segments.end());
    }
    for (const RowSet& lane : lanes) all.push_back(lane.list);
    if (key_rows) {
        all.insert(all.end(), {key_rows->own, key_rows->shared.list});
    }
    std::erase_if(all, [](const at::Tensor& tensor) { return !tensor.defined(); });
    return all;
}

bool divides_into(const at::Tensor& x, int64_t bytes) {
    const auto whole = [&](int64_t elements) { return elements * x.element_size() % bytes == 0; };
    const auto strides = x.strides().slice(0, x.dim() - 1);
    return x.stride(-1) == 1 && whole(x.size(-1)) && whole(x.storage_offset()) &&
           std::all_of(strides.begin(), strides.end(), whole);
}

at::Tensor select_rows(const at::Tensor& x, int64_t dim, const at::Tensor& rows) {
    if (!divides_into(x, 8)) return x.index_select(dim, rows);
    return x.view(at::kLong).index_select(dim, rows).view(x.scalar_type());
}

at::Tensor index_tensor(const std::vector<int64_t>& rows, c10::Device device) {
    return at::tensor(rows, at::kLong).to(device);
}

at::Tensor inverse_permutation(const at::Tensor& permutation) {
    return at::empty_like(permutation)
        .index_put_({permutation}, at::arange(permutation.numel(), permutation.options()));
}

RankPlan make_rank_plan(const plan::Partition& partition, int rank, c10::Device device, int num_exchanging,
                        int64_t rows_to_split_heads) {
    const int joint_rank = rank / num_exchanging;
    const plan::Partition joint = partition.over(partition.size() / num_exchanging);
    std::vector<RowSet> lanes;
    std::vector<int64_t> chunk_rows, exchanged_rows;
    plan::SegmentPlan ring;
    if (joint.has_ring()) {
        ring = plan::ring_segments(joint, joint_rank);
        for (const int chunk : joint.chunks_of(joint_rank)) {
            lanes.push_back(make_row_set(joint.chunk_rows(joint_rank, chunk), device));
        }
        for (int chunk = 0; chunk < joint.num_chunks(); ++chunk) chunk_rows.push_back(joint.num_chunk_rows(chunk));
    }
    for (int i = 0; i < num_exchanging; ++i) {
        exchanged_rows.push_back(partition.num_local_rows(joint_rank * num_exchanging + i));
    }
    plan::SegmentPlan gather;
    std::optional<KeyRowPlan> key_rows;
    if (const auto counts = plan::count_if_few(joint)) {
        const plan::KeyRows rows = plan::key_rows(joint, joint_rank);
        gather = plan::gather_segments(joint, rows);
        key_rows = make_key_row_plan(rows, *counts, joint, device);
    } else {
        gather = plan::gather_segments(joint, joint_rank);
    }
    RankPlan plan{.schedule = plan::Schedule(joint.layout(), joint.size()),
                  .rank = joint_rank,
                  .ring = make_tables(ring, device),
                  .gather = make_tables(gather, device),
                  .lanes = std::move(lanes),
                  .chunk_rows = std::move(chunk_rows),
                  .order = make_gather_order(joint, device),
                  .exchanged_rows = std::move(exchanged_rows),
                  .key_rows = std::move(key_rows),
                  .rows_to_split_heads = rows_to_split_heads};
    if (num_exchanging > 1) {
        place_joint_rows(plan, joint_order(partition, joint, joint_rank), device);
    }
    return plan;
}

}  // namespace megatron_sb::distributed
