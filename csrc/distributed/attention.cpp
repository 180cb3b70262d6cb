// One autograd function over the driver.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "core/error.h"
#include "distributed/c10d_transport.h"
#include "distributed/driver.h"
#include "distributed/plan_state.h"
#include "distributed/registration.h"
#include "ops/block.h"
#include "ops/check.h"
#include "ops/once.h"

namespace megatron_sb::distributed {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kMostGatheredBytes = int64_t{1} << 30;

Comm choose_comm(const std::string& comm, int64_t ranks, const at::Tensor& k, const at::Tensor& v) {
    if (comm == "p2p") return Comm::kRing;
    if (comm == "all_gather") return Comm::kGather;
    return gather_feed_bytes(static_cast<int>(ranks), k, v) <= kMostGatheredBytes ? Comm::kGather : Comm::kRing;
}

void check_comm(const std::string& comm) {
    const bool known = comm == "auto" || comm == "p2p" || comm == "all_gather";
    TORCH_CHECK_VALUE(known || comm == "a2a" || comm == "a2a+p2p", "comm = \"", comm,
                      "\" is unknown; allowed: \"auto\", \"p2p\", \"all_gather\"");
    TORCH_CHECK_VALUE(known, "comm = \"", comm, "\" is not available yet; \"auto\", \"p2p\" and \"all_gather\" are");
}

// What this rank can see for itself; shapes as the caller gave them.
void check_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ContextParallelPlan& plan) {
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

std::vector<Field> call_fields(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::string& comm,
                               const ops::BlockOptions& options) {
    const bool grad = at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
    return {{"q's shape", concat(q.sizes())},
            {"k's shape", concat(k.sizes())},
            {"v's shape", concat(v.sizes())},
            {"q's dtype", concat(q.scalar_type())},
            {"q's device type", concat(q.device().type())},
            {"whether gradients are wanted", grad ? "yes" : "no"},
            {"comm", comm},
            {"scale", concat(std::hexfloat, options.scale)},
            {"attend_current", options.attend_current ? "True" : "False"},
            {"mass_threshold", concat(std::hexfloat, options.mass_threshold)}};
}

// Refuses on every rank what any rank finds wrong; this rank's own finding keeps its type.
void check_and_agree(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ContextParallelPlan& plan,
                     const std::string& comm, const ops::BlockOptions& options) {
    std::exception_ptr own;
    std::string words;
    try {
        check_comm(comm);
        check_call(q, k, v, plan);
        const auto rank4 = [&](const at::Tensor& x) { return plan.packed() ? x.unsqueeze(0) : x; };
        ops::check_attention(rank4(q), rank4(k), rank4(v));
        ops::check_options(options.scale, options.mass_threshold);
    } catch (const c10::Error& error) {
        own = std::current_exception();
        words = error.what_without_backtrace();
    }
    try {
        plan.state().agree_on_call(call_fields(q, k, v, comm, options), words);
    } catch (const InvalidArgument&) {
        if (own) std::rethrow_exception(own);
        throw;
    }
}

class Attend : public torch::autograd::Function<Attend> {
  public:
    static constexpr int kNumInputs = 9;

    static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const PlanPointer& plan, bool gather, double scale, bool attend_current,
                                 double mass_threshold, bool keep_record) {
        const Comm comm = gather ? Comm::kGather : Comm::kRing;
        const auto tables = plan->state().on(q.device());
        const Attended result = attend_forward(*c10d_transport(plan->group_name()), *tables, comm, q, k, v,
                                               {scale, attend_current, mass_threshold}, keep_record);
        variable_list kept = flatten(result.record);
        kept.insert(kept.begin(), {q, k, v, result.mass});
        ctx->save_for_backward(std::move(kept));
        ctx->set_materialize_grads(false);
        ctx->saved_data["plan"] = plan;
        ctx->saved_data["gather"] = gather;
        ctx->saved_data["scale"] = scale;
        ctx->saved_data["attend_current"] = attend_current;
        ctx->saved_data["mass_threshold"] = mass_threshold;
        return {result.o, result.mass};
    }

    // Runs its exchanges whatever gradients came: the other ranks count on it.
    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const variable_list kept = ctx->get_saved_variables();
        const at::Tensor &q = kept[0], &k = kept[1], &v = kept[2], &mass = kept[3];
        variable_list gradients = ops::once_differentiable({grads[0], grads[1], q, k, v}, [&]() -> variable_list {
            const auto plan = ctx->saved_data["plan"].toCustomClass<ContextParallelPlan>();
            const Comm comm = ctx->saved_data["gather"].toBool() ? Comm::kGather : Comm::kRing;
            const auto tables = plan->state().on(q.device());
            const at::Tensor d_o = grads[0].defined()
                                       ? ops::unit_last_stride(grads[0])
                                       : at::zeros({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
            const Gradients result =
                attend_backward(*c10d_transport(plan->group_name()), *tables, comm, d_o, grads[1], q, k, v, mass,
                                unflatten(*tables, comm, {kept.begin() + 4, kept.end()}),
                                {ctx->saved_data["scale"].toDouble(), ctx->saved_data["attend_current"].toBool(),
                                 ctx->saved_data["mass_threshold"].toDouble()});
            return {result.dq, result.dk, result.dv};
        });
        gradients.resize(kNumInputs);
        return gradients;
    }
};

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                             const PlanPointer& plan, const std::string& comm, double scale,
                                             bool attend_current, double mass_threshold) {
    check_and_agree(q, k, v, *plan, comm, {scale, attend_current, mass_threshold});
    const auto rank4 = [&](const at::Tensor& x) { return ops::unit_last_stride(plan->packed() ? x.unsqueeze(0) : x); };
    const bool gather = choose_comm(comm, plan->size(), k, v) == Comm::kGather;
    const bool keep = at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
    const variable_list out =
        Attend::apply(rank4(q), rank4(k), rank4(v), plan, gather, scale, attend_current, mass_threshold, keep);
    if (plan->packed()) return {out[0].squeeze(0), out[1].squeeze(0)};
    return {out[0], out[1]};
}

}  // namespace megatron_sb::distributed
