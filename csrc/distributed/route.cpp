#include "distributed/route.h"

#include <ATen/ATen.h>

#include "distributed/c10d_transport.h"
#include "distributed/head_exchange.h"
#include "distributed/plan_state.h"

namespace megatron_sb::distributed {
namespace {

using at::Tensor;

// Values (b, h, rows) as tensors (b, rows, h, 1) of rows, and back.
Tensor as_rows(const Tensor& x) {
    return x.transpose(1, 2).unsqueeze(-1);
}
Tensor from_rows(const Tensor& x) {
    return x.squeeze(-1).transpose(1, 2);
}

Routed exchanged_forward(const Route& route, const Tensor& q, const Tensor& k, const Tensor& v,
                         const ops::BlockOptions& options, bool keep_record, bool with_mass) {
    const HeadExchange exchange(*route.heads, *route.plan, q.size(2), k.size(2));
    const std::vector<Tensor> here = exchange.to_heads({q, k, v});
    Attended attended =
        attend_forward(route.keys.get(), *route.plan, route.comm, here[0], here[1], here[2], options, keep_record);
    Routed result{at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options()), {}, {}};
    std::vector<Tensor> made{attended.o}, home{result.o};
    if (with_mass) {
        const auto wide = q.options().dtype(ops::accumulation_type(q));
        result.mass = at::empty({q.size(0), q.size(2), q.size(1)}, wide);
        made.push_back(as_rows(attended.mass));
        home.push_back(as_rows(result.mass));
    }
    exchange.to_rows(made, home);
    result.record = {here[0], here[1], here[2], attended.mass, std::move(attended.record)};
    return result;
}

Gradients exchanged_backward(const Route& route, const Tensor& d_o, const Tensor& d_mass, int64_t num_kv_heads,
                             const Record& of, const ops::BlockOptions& options, bool with_mass) {
    const int64_t num_heads = d_o.size(2);
    const HeadExchange exchange(*route.heads, *route.plan, num_heads, num_kv_heads);
    std::vector<Tensor> sources{d_o};
    if (with_mass) {
        const auto zeros = [&] { return at::zeros({d_o.size(0), num_heads, d_o.size(1)}, of.mass.options()); };
        sources.push_back(as_rows(d_mass.defined() ? d_mass : zeros()));
    }
    const std::vector<Tensor> here = exchange.to_heads(sources);
    // Those of KV heads that several ranks have are summed, so they travel in full precision.
    const auto type = exchange.repeats_keys() ? ops::accumulation_type(of.q) : of.q.scalar_type();
    const Gradients made =
        attend_backward(route.keys.get(), *route.plan, route.comm, here[0], with_mass ? from_rows(here[1]) : Tensor(),
                        of.q, of.k, of.v, of.mass, of.groups, options, type);
    const auto empty = [&](int64_t heads, int64_t width) {
        return at::empty({d_o.size(0), d_o.size(1), heads, width}, of.q.options());
    };
    const Gradients result{empty(num_heads, of.q.size(3)), empty(num_kv_heads, of.k.size(3)),
                           empty(num_kv_heads, of.v.size(3))};
    exchange.to_rows({made.dq.to(of.q.scalar_type()), made.dk, made.dv}, {result.dq, result.dk, result.dv});
    return result;
}

// Four H200s, 12 heads of 128, forward and backward in milliseconds (a2a, all_gather, p2p): 16K rows 2.2, 3.0, 3.5; 64K
// 24, 27, 30; 128K 95, 100, 111; a2a takes the least memory too. But a kernel with one head of 16K rows has too little
// to do: 307 TFLOP/s in the forward, where 4 heads have 661.
constexpr int64_t kFewestRowsOfHeads = 32768;
constexpr int64_t kMostGatheredBytes = int64_t{1} << 30;

}  // namespace

const char* choose_comm(int ranks, const Tensor& q, const Tensor& k, const Tensor& v) {
    const int64_t heads = q.size(-2), rows = ranks * q.size(-3);
    const bool exchanges = HeadExchange::refusal(heads, k.size(-2), ranks).empty();
    if (exchanges && heads / ranks * rows >= kFewestRowsOfHeads) return "a2a";
    return gather_feed_bytes(ranks, k, v) <= kMostGatheredBytes ? "all_gather" : "p2p";
}

Route make_route(const ContextParallelPlan& plan, const RouteNames& names, c10::Device device) {
    const auto transport = [](const std::string& name) { return name.empty() ? nullptr : c10d_transport(name); };
    Route route{transport(names.heads), transport(names.keys), names.comm, nullptr};
    route.plan = plan.state().on(device, route.heads ? route.heads->size() : 1);
    return route;
}

Routed route_forward(const Route& route, const Tensor& q, const Tensor& k, const Tensor& v,
                     const ops::BlockOptions& options, bool keep_record, bool with_mass) {
    if (route.heads) return exchanged_forward(route, q, k, v, options, keep_record, with_mass);
    Attended attended = attend_forward(route.keys.get(), *route.plan, route.comm, q, k, v, options, keep_record);
    return {attended.o, attended.mass, {q, k, v, attended.mass, std::move(attended.record)}};
}

Gradients route_backward(const Route& route, const Tensor& d_o, const Tensor& d_mass, int64_t num_kv_heads,
                         const Record& of, const ops::BlockOptions& options, bool with_mass) {
    if (route.heads) return exchanged_backward(route, d_o, d_mass, num_kv_heads, of, options, with_mass);
    return attend_backward(route.keys.get(), *route.plan, route.comm, d_o, d_mass, of.q, of.k, of.v, of.mass, of.groups,
                           options, of.q.scalar_type());
}

std::vector<Tensor> flatten(const Record& record) {
    std::vector<Tensor> tensors{record.q, record.k, record.v, record.mass};
    const std::vector<Tensor> groups = flatten(record.groups);
    tensors.insert(tensors.end(), groups.begin(), groups.end());
    return tensors;
}

Record unflatten(const Route& route, const std::vector<Tensor>& tensors) {
    return {tensors[0], tensors[1], tensors[2], tensors[3],
            unflatten(*route.plan, route.comm, {tensors.begin() + 4, tensors.end()})};
}

}  // namespace megatron_sb::distributed
