#include "distributed/rank_plan.h"

#include <ATen/ATen.h>

namespace megatron_sb::distributed {
namespace {

Tables make_tables(const plan::Itinerary& itinerary, c10::Device device) {
    Tables tables;
    tables.runs = itinerary.runs;
    for (const plan::Visit& visit : itinerary.visits) {
        tables.run_of.push_back(visit.run);
        at::Tensor table;
        if (!visit.segments.empty()) {
            const auto* fields = reinterpret_cast<const int32_t*>(visit.segments.data());
            const auto rows = static_cast<int64_t>(visit.segments.size());
            table = at::from_blob(const_cast<int32_t*>(fields), {rows, kSegmentFields}, at::kInt).clone().to(device);
        }
        tables.segments.push_back(table);
    }
    return tables;
}

RowSet make_row_set(const std::vector<int64_t>& rows, c10::Device device) {
    const auto count = static_cast<int64_t>(rows.size());
    const bool stretch = rows.back() - rows.front() + 1 == count;  // they increase
    return {rows.front(), count, stretch ? at::Tensor() : index_tensor(rows, device)};
}

}  // namespace

at::Tensor RowSet::of(const at::Tensor& x) const {
    return list.defined() ? x.index_select(1, list) : x.narrow(1, begin, count);
}

void RowSet::put(const at::Tensor& x, const at::Tensor& value) const {
    list.defined() ? x.index_copy_(1, list, value) : x.narrow(1, begin, count).copy_(value);
}

at::Tensor index_tensor(const std::vector<int64_t>& rows, c10::Device device) {
    return at::tensor(rows, at::kLong).to(device);
}

at::Tensor inverse_permutation(const at::Tensor& permutation) {
    return at::empty_like(permutation)
        .index_put_({permutation}, at::arange(permutation.numel(), permutation.options()));
}

RankPlan make_rank_plan(const plan::Partition& partition, int rank, c10::Device device) {
    std::vector<RowSet> lanes;
    for (const int chunk : partition.chunks_of(rank)) {
        lanes.push_back(make_row_set(partition.chunk_rows(rank, chunk), device));
    }
    const at::Tensor from_stream = index_tensor(partition.gathered_positions(), device);
    return {plan::Schedule(partition.layout(), partition.size()),
            rank,
            make_tables(plan::ring_itinerary(partition, rank), device),
            make_tables(plan::gather_itinerary(partition, rank), device),
            std::move(lanes),
            inverse_permutation(from_stream),
            from_stream};
}

}  // namespace megatron_sb::distributed
