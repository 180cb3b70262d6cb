#include "distributed/route.h"

#include <ATen/ATen.h>

#include "distributed/c10d_transport.h"
#include "distributed/head_exchange.h"
#include "distributed/key_source.h"
#include "distributed/plan_state.h"
#include "ops/tensors.h"

namespace megatron_sb::distributed {
namespace {

using at::Tensor;

// The inverse of ops::per_row().
Tensor from_rows(const Tensor& x) {
    return x.squeeze(-1).transpose(1, 2);
}

// The call of this rank. If heads are exchanged, q (b, rows, heads, d) has the rank's share of them.
RankCall rank_call(const Route& route, const Tensor& q, const Tensor& k, const Tensor& v,
                   const ops::BlockOptions& options) {
    const int64_t first_head = route.heads ? route.heads->rank() * q.size(2) : 0;
    return {route.keys.get(), *route.plan, route.comm, q, k, v, ops::from_head(options, first_head)};
}

RouteOutput exchanged_forward(const Route& route, const Tensor& q, const Tensor& k, const Tensor& v,
                              const ops::BlockOptions& options, bool keep_record, bool with_mass) {
    const HeadExchange exchange(*route.heads, *route.plan, q.size(2), k.size(2));
    std::vector<Tensor> joint = exchange.to_heads({q, k, v});
    RankOutput attended = attend_forward(rank_call(route, joint[0], joint[1], joint[2], options), keep_record);
    if (!keep_record) joint.assign(3, Tensor());  // nothing reads them any more
    std::vector<Tensor> sources{std::move(attended.o)};
    if (with_mass) sources.push_back(ops::per_row(attended.mass));
    const std::vector<Tensor> by_rank = exchange.to_rows(std::move(sources));
    RouteOutput result;
    result.o = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
    write_heads(result.o, by_rank[0]);
    if (with_mass) {
        const auto wide = q.options().dtype(ops::accumulation_type(q));
        result.mass = at::empty({q.size(0), q.size(2), q.size(1)}, wide);
        write_heads(ops::per_row(result.mass), by_rank[1]);
    }
    result.record = {joint[0], joint[1], joint[2], attended.mass, std::move(attended.records)};
    return result;
}

// Returns the gradients of the heads of this rank, as tensors that can be exchanged.
std::vector<Tensor> gradients_of_heads(const Route& route, const HeadExchange& exchange, const Tensor& d_o,
                                       const Tensor& d_mass, const RouteRecord& record,
                                       const ops::BlockOptions& options, bool with_mass) {
    const auto& [q, k, v, mass, groups] = record;
    std::vector<Tensor> sources{d_o};
    if (with_mass) {
        const Tensor d_mass_or_zero =
            d_mass.defined() ? d_mass : at::zeros({d_o.size(0), d_o.size(2), d_o.size(1)}, mass.options());
        sources.push_back(ops::per_row(d_mass_or_zero));
    }
    const std::vector<Tensor> joint = exchange.to_heads(sources);
    // The gradients of a KV head that several ranks have are summed, so they are sent in the accumulation type.
    const auto type = exchange.repeats_keys() ? ops::accumulation_type(q) : q.scalar_type();
    const Gradients of_heads = attend_backward(rank_call(route, q, k, v, options), joint[0],
                                               with_mass ? from_rows(joint[1]) : Tensor(), mass, groups, type);
    return {of_heads.dq.to(q.scalar_type()), of_heads.dk, of_heads.dv};
}

Gradients exchanged_backward(const Route& route, const Tensor& d_o, const Tensor& d_mass, int64_t num_kv_heads,
                             const RouteRecord& record, const ops::BlockOptions& options, bool with_mass) {
    const int64_t num_heads = d_o.size(2);
    const HeadExchange exchange(*route.heads, *route.plan, num_heads, num_kv_heads);
    const std::vector<Tensor> by_rank =
        exchange.to_rows(gradients_of_heads(route, exchange, d_o, d_mass, record, options, with_mass));
    const auto written = [&](const Tensor& of_ranks, int64_t heads) {
        const Tensor x = at::empty({d_o.size(0), d_o.size(1), heads, of_ranks.size(-1)}, record.q.options());
        write_heads(x, of_ranks);
        return x;
    };
    return {written(by_rank[0], num_heads), written(by_rank[1], num_kv_heads), written(by_rank[2], num_kv_heads)};
}

// Four H200s, 12 heads of 128, forward and backward in milliseconds:
//   rows   a2a  all_gather  p2p
//    16K   2.2         3.0  3.5
//    64K    24          27   30
//   128K    95         100  111
// a2a also needs the least memory. But one head of 16K rows is too little work for a kernel: 307 TFLOP/s in the
// forward, against 661 with 4 heads.
constexpr int64_t kMinRowsTimesHeads = 32768;
constexpr int64_t kMaxGatheredBytes = int64_t{1} << 30;

// Whether a rank that gets only the key rows that it needs receives at most 9/8 of what it receives if ranks exchange
// heads: part of the key rows travels while the rank computes, heads do not. Other layouts than the balanced one would
// leave ranks with unequal work.
//
// An exchange of heads receives (n - 1) / n of the local rows: q, k, v and the gradient of o, then o and the gradients
// of q, k and v. Key rows are counted twice, although the backward may still have them, and their gradients are fp32.
// H100s, 64K tokens in 27 documents, 12 heads of 128, forward and backward in milliseconds, two ranks with earlier
// kernels:
//   ranks   rows that a rank receives   exchange of heads   key rows
//       2                0.31 of local               9.29       6.57
//       4                0.77 of local               4.43       4.21
bool key_rows_are_cheaper(const plan::Partition& partition, const std::optional<plan::KeyRowCounts>& key_rows,
                          int64_t heads, int64_t num_kv_heads) {
    if (partition.layout() != plan::Layout::kBalanced || !key_rows) return false;
    const int64_t ranks = partition.size();
    return 8 * (2 * num_kv_heads * key_rows->received * ranks) <
           9 * ((heads + num_kv_heads) * partition.num_rows() / ranks * (ranks - 1));
}

}  // namespace

const char* choose_comm(const plan::Partition& partition, const std::optional<plan::KeyRowCounts>& key_rows,
                        const Tensor& q, const Tensor& k, const Tensor& v) {
    const int ranks = partition.size();
    const int64_t heads = q.size(-2), rows = partition.num_rows();
    if (key_rows_are_cheaper(partition, key_rows, heads, k.size(-2))) return "all_gather";
    const bool exchanges = HeadExchange::problem(heads, k.size(-2), ranks).empty();
    if (exchanges && heads / ranks * rows >= kMinRowsTimesHeads) return "a2a";
    return !partition.has_ring() || gathered_bytes(rows, k, v) <= kMaxGatheredBytes ? "all_gather" : "p2p";
}

Route make_route(const ContextParallelPlan& plan, const RouteNames& names, c10::Device device) {
    const auto transport = [device](const std::string& name) -> std::unique_ptr<Transport> {
        if (name.empty()) return nullptr;
        connect(name, device);
        return c10d_transport(name);
    };
    Route route{transport(names.heads), transport(names.keys), names.comm, nullptr};
    route.plan = plan.state().rank_plan(device, route.heads ? route.heads->size() : 1);
    route.comm = route.plan->transfer(names.comm);
    return route;
}

RouteOutput route_forward(const Route& route, const Tensor& q, const Tensor& k, const Tensor& v,
                          const ops::BlockOptions& options, bool keep_record, bool with_mass) {
    if (route.heads) return exchanged_forward(route, q, k, v, options, keep_record, with_mass);
    RankOutput attended = attend_forward(rank_call(route, q, k, v, options), keep_record);
    return {attended.o, attended.mass, {q, k, v, attended.mass, std::move(attended.records)}};
}

Gradients route_backward(const Route& route, const Tensor& d_o, const Tensor& d_mass, int64_t num_kv_heads,
                         const RouteRecord& record, const ops::BlockOptions& options, bool with_mass) {
    if (route.heads) return exchanged_backward(route, d_o, d_mass, num_kv_heads, record, options, with_mass);
    return attend_backward(rank_call(route, record.q, record.k, record.v, options), d_o, d_mass, record.mass,
                           record.groups, record.q.scalar_type());
}

std::vector<Tensor> flatten(const RouteRecord& record) {
    std::vector<Tensor> tensors{record.q, record.k, record.v, record.mass};
    const std::vector<Tensor> groups = flatten(record.groups);
    tensors.insert(tensors.end(), groups.begin(), groups.end());
    return tensors;
}

RouteRecord unflatten(const Route& route, const std::vector<Tensor>& tensors) {
    const SegmentTables& tables = route.plan->tables(route.comm);
    return {tensors[0], tensors[1], tensors[2], tensors[3],
            unflatten(tables, std::vector<Tensor>(tensors.begin() + 4, tensors.end()))};
}

}  // namespace megatron_sb::distributed
