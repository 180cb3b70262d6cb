// One autograd function over the routes.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "core/error.h"
#include "distributed/c10d_transport.h"
#include "distributed/head_exchange.h"
#include "distributed/plan_state.h"
#include "distributed/registration.h"
#include "distributed/route.h"
#include "ops/block.h"
#include "ops/check.h"
#include "ops/once.h"
#include "ops/variants.h"

namespace megatron_sb::distributed {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kModes[] = {"auto", "p2p", "all_gather", "a2a", "a2a+p2p"};

// A call as the user made it; shapes are the user's.
struct Call {
    const at::Tensor &q, &k, &v;
    const ContextParallelPlan& plan;
    const std::string &comm, &heads_group, &keys_group;
    std::optional<double> scale;
    bool attend_current;
    double mass_threshold;
    bool return_mass;
    ops::Variants variants;
};

// What a call without faults comes to.
struct Derived {
    double scale = 0;
    int exchanging = 0;  // ranks that exchange heads; 1: none do
};

void check_comm(const std::string& comm) {
    const bool known = std::find(std::begin(kModes), std::end(kModes), comm) != std::end(kModes);
    TORCH_CHECK_VALUE(known, "comm = \"", comm,
                      "\" is unknown; allowed: \"auto\", \"p2p\", \"all_gather\", \"a2a\", \"a2a+p2p\"");
}

// The groups of "a2a+p2p" are cut out of the plan's: ranks that exchange heads are neighbours in it.
void check_hierarchy(const ContextParallelPlan& plan, const std::string& heads, const std::string& keys) {
    TORCH_CHECK_VALUE(!heads.empty() && !keys.empty(),
                      "comm = \"a2a+p2p\" needs hierarchical_groups: the a2a group and the p2p group of this rank");
    const auto a2a = c10d_transport(heads), p2p = c10d_transport(keys);
    TORCH_CHECK_VALUE(a2a->size() * p2p->size() == plan.size(), "hierarchical_groups have ", a2a->size(), " and ",
                      p2p->size(), " ranks; the product must be the size of the context-parallel group, ", plan.size());
    TORCH_CHECK_VALUE(p2p->rank() * a2a->size() + a2a->rank() == plan.rank(), "hierarchical_groups: rank ", plan.rank(),
                      " of the context-parallel group is rank ", a2a->rank(), " of ", a2a->size(),
                      " in the a2a group and rank ", p2p->rank(), " of ", p2p->size(),
                      " in the p2p group; ranks of an a2a group must be neighbours: p2p rank * ", a2a->size(),
                      " + a2a rank");
}

int exchanging_ranks(const ContextParallelPlan& plan, const std::string& comm, const std::string& heads_group) {
    if (comm == "a2a") return static_cast<int>(plan.size());
    return comm == "a2a+p2p" ? c10d_transport(heads_group)->size() : 1;
}

// Groups of one rank have nothing to exchange.
RouteNames choose_route(const ContextParallelPlan& plan, const std::string& asked, const std::string& heads_group,
                        const std::string& keys_group, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    const std::string comm = asked == "auto" ? choose_comm(static_cast<int>(plan.size()), q, k, v) : asked;
    const int exchanging = exchanging_ranks(plan, comm, heads_group);
    const std::string heads = exchanging == 1 ? "" : comm == "a2a" ? plan.group_name() : heads_group;
    if (exchanging == plan.size()) return {heads, "", Comm::kHere};
    if (comm == "a2a+p2p") return {heads, keys_group, Comm::kRing};
    return {heads, plan.group_name(), comm == "all_gather" ? Comm::kGather : Comm::kRing};
}

void check_rows(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ContextParallelPlan& plan) {
    const int64_t rank = plan.packed() ? 3 : 4;
    const char* shape =
        plan.packed() ? "(t_local, heads, head_dim), as the plan is packed" : "(b, s_local, heads, head_dim)";
    for (const auto& [name, x] : {std::pair<const char*, const at::Tensor&>{"q", q}, {"k", k}, {"v", v}}) {
        TORCH_CHECK_VALUE(x.dim() == rank, name, ": has ", x.dim(), " dimensions; ", rank, ", ", shape, ", are needed");
        const int64_t rows = x.size(rank - 3);
        TORCH_CHECK_VALUE(rows == plan.local_len(), name, ": has ", rows,
                          " local rows; the plan, seq_len = ", plan.seq_len(), " over ", plan.size(), " ranks, has ",
                          plan.local_len());
    }
}

bool wants_gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ops::Variants& variants) {
    const bool by_gate = variants.forget_gate.has_value() && variants.forget_gate->requires_grad();
    return at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad() || by_gate);
}

// What this rank can see for itself.
Derived check_call(const Call& call) {
    const auto& [q, k, v] = std::tie(call.q, call.k, call.v);
    check_comm(call.comm);
    check_rows(q, k, v, call.plan);
    const auto rank4 = [&](const at::Tensor& x) { return call.plan.packed() ? x.unsqueeze(0) : x; };
    ops::check_attention(rank4(q), rank4(k), rank4(v));
    ops::check_variants(q, k, call.variants);
    const double scale = ops::scale_of(call.scale, q, call.variants);
    ops::check_options(scale, call.mass_threshold);
    if (call.comm == "a2a+p2p") check_hierarchy(call.plan, call.heads_group, call.keys_group);
    const int exchanging = exchanging_ranks(call.plan, call.comm, call.heads_group);
    const std::string why_not = HeadExchange::refusal(q.size(-2), k.size(-2), exchanging);
    TORCH_CHECK_VALUE(why_not.empty(), "comm = \"", call.comm, "\": ", why_not);
    return {scale, exchanging};
}

std::vector<Field> call_fields(const Call& call, const Derived& derived) {
    const bool grad = wants_gradients(call.q, call.k, call.v, call.variants);
    return {{"q's shape", concat(call.q.sizes())},
            {"k's shape", concat(call.k.sizes())},
            {"v's shape", concat(call.v.sizes())},
            {"q's dtype", concat(call.q.scalar_type())},
            {"q's device type", concat(call.q.device().type())},
            {"whether gradients are wanted", grad ? "yes" : "no"},
            {"comm", call.comm},
            {"the number of ranks that exchange heads", concat(derived.exchanging)},
            {"logits", call.variants.euclidean ? "euclidean" : "dot"},
            {"whether there is a forget_gate", call.variants.forget_gate.has_value() ? "yes" : "no"},
            {"return_mass", call.return_mass ? "True" : "False"},
            {"scale", concat(std::hexfloat, derived.scale)},
            {"attend_current", call.attend_current ? "True" : "False"},
            {"mass_threshold", concat(std::hexfloat, call.mass_threshold)}};
}

// Refuses on every rank what any rank finds wrong, as far as agree_on_call() can; this rank's own finding keeps its
// type, and is what it ends with however the others fare.
Derived check_and_agree(const Call& call) {
    Derived derived;
    std::exception_ptr own;
    std::string words;
    try {
        derived = check_call(call);
    } catch (const c10::Error& error) {
        own = std::current_exception();
        words = error.what_without_backtrace();
    }
    try {
        call.plan.state().agree_on_call(call_fields(call, derived), words);
    } catch (const std::exception&) {
        if (own) std::rethrow_exception(own);
        throw;
    }
    return derived;
}

class Attend : public torch::autograd::Function<Attend> {
  public:
    static constexpr int kNumInputs = 13;

    static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const PlanPointer& plan, const std::string& heads_group, const std::string& keys_group,
                                 int64_t comm, double scale, bool attend_current, double mass_threshold,
                                 bool forget_gate, bool keep_record, bool return_mass) {
        const Route route = make_route(*plan, {heads_group, keys_group, static_cast<Comm>(comm)}, q.device());
        const Routed result = route_forward(route, q, k, v, {scale, attend_current, mass_threshold, forget_gate},
                                            keep_record, return_mass);
        ctx->save_for_backward(flatten(result.record));
        ctx->set_materialize_grads(false);
        ctx->saved_data["plan"] = plan;
        ctx->saved_data["heads_group"] = heads_group;
        ctx->saved_data["keys_group"] = keys_group;
        ctx->saved_data["comm"] = comm;
        ctx->saved_data["o_sizes"] = result.o.sizes().vec();
        ctx->saved_data["num_kv_heads"] = k.size(2);
        ctx->saved_data["scale"] = scale;
        ctx->saved_data["attend_current"] = attend_current;
        ctx->saved_data["mass_threshold"] = mass_threshold;
        ctx->saved_data["forget_gate"] = forget_gate;
        ctx->saved_data["return_mass"] = return_mass;
        return {result.o, return_mass ? result.mass : at::empty({0}, result.o.options())};
    }

    // Runs its exchanges whatever gradients came: the other ranks count on it.
    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const variable_list kept = ctx->get_saved_variables();
        auto& data = ctx->saved_data;
        variable_list sources = ops::inputs_of_running_node();  // what is kept may be exchanged heads
        sources.insert(sources.end(), grads.begin(), grads.end());
        variable_list gradients = ops::once_differentiable(sources, [&]() -> variable_list {
            const Route route = make_route(*data["plan"].toCustomClass<ContextParallelPlan>(),
                                           {data["heads_group"].toStringRef(), data["keys_group"].toStringRef(),
                                            static_cast<Comm>(data["comm"].toInt())},
                                           kept[0].device());
            const at::Tensor d_o = grads[0].defined() ? ops::unit_last_stride(grads[0])
                                                      : at::zeros(data["o_sizes"].toIntVector(), kept[0].options());
            const Gradients result =
                route_backward(route, d_o, grads[1], data["num_kv_heads"].toInt(), unflatten(route, kept),
                               {data["scale"].toDouble(), data["attend_current"].toBool(),
                                data["mass_threshold"].toDouble(), data["forget_gate"].toBool()},
                               data["return_mass"].toBool());
            return {result.dq, result.dk, result.dv};
        });
        gradients.resize(kNumInputs);
        return gradients;
    }
};

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                             const PlanPointer& plan, const std::string& comm,
                                             const std::string& heads_group, const std::string& keys_group,
                                             std::optional<double> scale, bool attend_current, double mass_threshold,
                                             bool return_mass, const std::optional<at::Tensor>& forget_gate,
                                             bool euclidean) {
    const ops::Variants variants{forget_gate, euclidean};
    const bool gated = forget_gate.has_value();
    const double used_scale = check_and_agree({q, k, v, *plan, comm, heads_group, keys_group, scale, attend_current,
                                               mass_threshold, return_mass, variants})
                                  .scale;
    const ops::Extended x = ops::extended(q, k, variants);
    const auto rank4 = [&](const at::Tensor& x) { return ops::unit_last_stride(plan->packed() ? x.unsqueeze(0) : x); };
    const RouteNames route = choose_route(*plan, comm, heads_group, keys_group, x.q, x.k, v);
    const bool keep = wants_gradients(q, k, v, variants);
    const variable_list out =
        Attend::apply(rank4(x.q), rank4(x.k), rank4(v), plan, route.heads, route.keys, static_cast<int64_t>(route.comm),
                      used_scale, attend_current, mass_threshold, gated, keep, return_mass);
    if (plan->packed()) return {out[0].squeeze(0), return_mass ? out[1].squeeze(0) : out[1]};
    return {out[0], out[1]};
}

}  // namespace megatron_sb::distributed
