// context_parallel_attention: checks the call, agrees with the other ranks, chooses a route and runs it in one autograd
// function.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string_view>

#include "core/error.h"
#include "distributed/c10d_transport.h"
#include "distributed/head_exchange.h"
#include "distributed/plan_state.h"
#include "distributed/registration.h"
#include "distributed/route.h"
#include "ops/check.h"
#include "ops/once.h"
#include "ops/options.h"
#include "ops/tensors.h"
#include "ops/variants.h"

namespace megatron_sb::distributed {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kModes[] = {"auto", "p2p", "all_gather", "a2a", "a2a+p2p"};

using PlanPointer = c10::intrusive_ptr<ContextParallelPlan>;

// A call of context_parallel_attention, with the shapes of the caller.
struct ContextParallelCall {
    at::Tensor q, k, v;
    PlanPointer plan;
    std::string comm, heads_group, keys_group;
    bool return_mass;
    AttentionOptions options;

    explicit ContextParallelCall(const ops::Arguments& arguments)
        : q(arguments.tensor("q")),
          k(arguments.tensor("k")),
          v(arguments.tensor("v")),
          plan(arguments.get<PlanPointer>("plan")),
          comm(arguments.get<std::string>("comm")),
          heads_group(arguments.get<std::string>("heads_group")),
          keys_group(arguments.get<std::string>("keys_group")),
          return_mass(arguments.get<bool>("return_mass")),
          options(ops::read_attention_options(arguments)) {}

    // Returns x as (b, rows, heads, head_dim). With a packed plan, b is 1.
    at::Tensor batched(const at::Tensor& x) const { return plan->packed() ? x.unsqueeze(0) : x; }

    // The tensors of the options, by their names.
    std::array<std::pair<const char*, const ops::OptionalTensor*>, 3> variants() const {
        return {{{"forget_gate", &options.forget_gate},
                 {"query_bias", &options.query_bias},
                 {"key_bias", &options.key_bias}}};
    }

    bool wants_gradients() const {
        bool wanted = q.requires_grad() || k.requires_grad() || v.requires_grad();
        for (const auto& [name, x] : variants()) wanted = wanted || (x->has_value() && (*x)->requires_grad());
        return wanted && at::GradMode::is_enabled();
    }
};

// The values that the checks of a call compute.
struct CheckedCall {
    ops::BlockOptions options = {};
    int num_exchanging = 0;  // how many ranks exchange heads; 1 means none
    CallPointer agreed = {};
};

void check_comm(const std::string& comm) {
    const bool known = std::find(std::begin(kModes), std::end(kModes), comm) != std::end(kModes);
    TORCH_CHECK_VALUE(known, "comm must be \"auto\", \"p2p\", \"all_gather\", \"a2a\" or \"a2a+p2p\", got \"", comm,
                      "\"");
}

// The groups of "a2a+p2p" must be subgroups of the plan's group, and the ranks of an a2a group neighbours in it.
void check_hierarchy(const ContextParallelPlan& plan, const std::string& heads, const std::string& keys) {
    TORCH_CHECK_VALUE(!heads.empty() && !keys.empty(),
                      "hierarchical_groups must be the a2a group and the p2p group of this rank with "
                      "comm = \"a2a+p2p\", got none");
    const auto a2a = c10d_transport(heads), p2p = c10d_transport(keys);
    TORCH_CHECK_VALUE(
        a2a->size() * p2p->size() == plan.size(),
        "hierarchical_groups: the product of their sizes must be the size of the context-parallel group, ", plan.size(),
        ", got ", a2a->size(), " and ", p2p->size());
    TORCH_CHECK_VALUE(p2p->rank() * a2a->size() + a2a->rank() == plan.rank(),
                      "hierarchical_groups: the rank in the context-parallel group must be p2p rank * ", a2a->size(),
                      " + a2a rank, so that the ranks of an a2a group are neighbours, got rank ", plan.rank(),
                      ", p2p rank ", p2p->rank(), " of ", p2p->size(), " and a2a rank ", a2a->rank(), " of ",
                      a2a->size());
}

// The number of ranks that exchange heads.
int exchanging_ranks(const ContextParallelCall& call, const std::string& comm) {
    if (comm == "a2a") return static_cast<int>(call.plan->size());
    return comm == "a2a+p2p" ? c10d_transport(call.heads_group)->size() : 1;
}

// q and k include the columns of the variants. A group of one rank exchanges nothing.
RouteNames choose_route(const ContextParallelCall& call, const at::Tensor& q, const at::Tensor& k) {
    const ContextParallelPlan& plan = *call.plan;
    const ContextParallelPlan::State& state = plan.state();
    const std::string comm =
        call.comm == "auto" ? choose_comm(state.partition, state.key_rows_without_ring, q, k, call.v) : call.comm;
    const int num_exchanging = exchanging_ranks(call, comm);
    const std::string heads = num_exchanging == 1 ? "" : comm == "a2a" ? plan.group_name() : call.heads_group;
    if (num_exchanging == plan.size()) return {heads, "", Comm::kLocal};
    if (comm == "a2a+p2p") return {heads, call.keys_group, Comm::kRing};
    return {heads, plan.group_name(), comm == "all_gather" ? Comm::kGather : Comm::kRing};
}

void check_rows(const ContextParallelCall& call) {
    const ContextParallelPlan& plan = *call.plan;
    const int64_t rank = plan.packed() ? 3 : 4;
    const char* shape =
        plan.packed() ? "(t_local, heads, head_dim), as the plan is packed" : "(b, s_local, heads, head_dim)";
    for (const auto& [name, x] :
         {std::pair<const char*, const at::Tensor&>{"q", call.q}, {"k", call.k}, {"v", call.v}}) {
        ops::check_elements(name, x);
        ops::check_rank(name, x, rank, shape);
        const int64_t rows = x.size(rank - 3);
        TORCH_CHECK_VALUE(rows == plan.local_len(), name, " must have ", plan.local_len(),
                          " local rows, as the plan has seq_len = ", plan.seq_len(), " and this is rank ", plan.rank(),
                          " of ", plan.size(), ", got ", rows);
    }
}

// The checks that need no other rank.
CheckedCall check_call(const ContextParallelCall& call) {
    check_comm(call.comm);
    check_rows(call);
    ops::check_attention(call.batched(call.q), call.batched(call.k), call.batched(call.v));
    ops::check_variants(call.q, call.k, call.options);
    for (const auto& [name, x] : call.variants())
        if (x->has_value()) ops::check_elements(name, **x);
    CheckedCall checked;
    checked.options = ops::block_options(call.options, call.q);
    if (call.comm == "a2a+p2p") check_hierarchy(*call.plan, call.heads_group, call.keys_group);
    checked.num_exchanging = exchanging_ranks(call, call.comm);
    const std::string problem = HeadExchange::problem(call.q.size(-2), call.k.size(-2), checked.num_exchanging);
    TORCH_CHECK_VALUE(problem.empty(), "comm = \"", call.comm, "\": ", problem);
    return checked;
}

// Every call writes the agreed fields, so the two functions below avoid concat(), which takes a microsecond.
// The local rows are left out: they differ between ranks, and the plan determines them.
std::string text_of(at::IntArrayRef sizes) {
    const size_t rows = sizes.size() < 3 ? sizes.size() : sizes.size() - 3;
    std::string text = "[";
    for (size_t i = 0; i < sizes.size(); ++i) {
        text += (i > 0 ? ", " : "") + (i == rows ? "local rows" : std::to_string(sizes[i]));
    }
    return text + "]";
}

// With 17 digits, other numbers have other texts.
std::string text_of(double value) {
    char text[32];  // the longest number has 24 characters
    std::snprintf(text, sizeof(text), "%.17g", value);
    return text;
}

constexpr const char *kPass = "the pass", *kDocuments = "the plan's cu_seqlens";  // names of fields

Call agreed_fields(const ContextParallelCall& call, const CheckedCall& checked) {
    const auto yes_or_no = [](bool value) { return value ? "yes" : "no"; };
    const auto flag = [](bool value) { return value ? "True" : "False"; };
    return {{kPass, "forward"},
            {"the plan's seq_len", std::to_string(call.plan->seq_len())},
            {"the plan's layout", call.plan->layout()},
            {"the plan's packing", call.plan->packed() ? call.plan->packing() : "no packing"},
            {kDocuments, call.plan->state().documents, true},
            {"q's shape", text_of(call.q.sizes())},
            {"k's shape", text_of(call.k.sizes())},
            {"v's shape", text_of(call.v.sizes())},
            {"q's dtype", c10::toString(call.q.scalar_type())},
            {"q's device type", c10::DeviceTypeName(call.q.device().type(), true)},
            {"whether gradients are wanted", yes_or_no(call.wants_gradients())},
            {"comm", call.comm},
            {"the number of ranks that exchange heads", std::to_string(checked.num_exchanging)},
            {"logits", call.options.euclidean ? "euclidean" : "dot"},
            {"whether there is a forget_gate", yes_or_no(call.options.forget_gate.has_value())},
            {"whether there is a query_bias", yes_or_no(call.options.query_bias.has_value())},
            {"whether there is a key_bias", yes_or_no(call.options.key_bias.has_value())},
            {"return_mass", flag(call.return_mass)},
            {"scale", text_of(checked.options.scale)},
            {"reach", text_of(checked.options.reach)},
            {"the step of reach", text_of(checked.options.reach_step)},
            {"attend_current", flag(call.options.attend_current)},
            {"mass_threshold", text_of(call.options.mass_threshold)}};
}

// Checks the call and that all ranks make the same call. A rank with an invalid argument throws its own error, which
// keeps its type. The other ranks throw an error that quotes it: if the call is new there, at once, and if it is known
// there, when their wait for data fails.
CheckedCall check_and_agree(const ContextParallelCall& call) {
    CheckedCall checked;
    std::exception_ptr own_error;
    std::string message;
    try {
        checked = check_call(call);
    } catch (const c10::Error& error) {
        own_error = std::current_exception();
        message = error.what_without_backtrace();
    }
    try {
        checked.agreed = call.plan->state().agreement->agree(agreed_fields(call, checked), message);
    } catch (const std::exception&) {
        if (own_error) std::rethrow_exception(own_error);
        throw;
    }
    return checked;
}

void check_group(const ContextParallelPlan& plan) {
    plan.state().agreement->check_group(plan.group_name());
}

// Runs `transfer`, which waits for data of other ranks. If it fails because another rank makes another call, throws an
// error that names what differs.
template <class Transfer>
auto explain_failure(const ContextParallelPlan& plan, const AgreedCall& agreed, const char* pass,
                     const Transfer& transfer) {
    try {
        return transfer();
    } catch (const RuntimeFailure& failure) {
        Call call = agreed.fields;
        for (auto& [name, value, is_of_batch] : call) {
            if (std::string_view(name) == kPass) value = pass;
            if (std::string_view(name) == kDocuments) value = plan.state().documents;
        }
        plan.state().agreement->explain_failure(call, failure.what());
        throw;
    }
}

// Returns x with its elements in memory as kernels and transfers read them. They do not see the bit of a view, such as
// x.conj().imag, that says that its elements are negated.
at::Tensor in_memory(const at::Tensor& x) {
    return ops::unit_last_stride(x.resolve_neg());
}

// The operators that a pass calls skip the layers of autograd, which would record nothing here. A pass of p2p calls
// hundreds of them, most of them views, and at 16K rows on four GPUs the host limits it.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// What the backward needs of a call, except for tensors.
struct SavedCall : torch::CustomClassHolder {
    PlanPointer plan;
    CallPointer agreed;
    RouteNames route;
    ops::BlockOptions options;
    std::vector<int64_t> o_sizes;
    int64_t num_kv_heads;
    bool return_mass;
};
using SavedCallPointer = c10::intrusive_ptr<SavedCall>;

class Attend : public torch::autograd::Function<Attend> {
  public:
    static constexpr int kNumInputs = 5;

    // Writes o_sizes and num_kv_heads of `call`.
    static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const SavedCallPointer& call, bool keep_record) {
        const BelowAutograd below_autograd;
        const Route route = make_route(*call->plan, call->route, q.device());
        const RouteOutput result = route_forward(route, q, k, v, call->options, keep_record, call->return_mass);
        call->o_sizes = result.o.sizes().vec();
        call->num_kv_heads = k.size(2);
        ctx->save_for_backward(flatten(result.record));
        ctx->set_materialize_grads(false);
        ctx->saved_data["call"] = c10::IValue::make_capsule(call);
        return {result.o, call->return_mass ? result.mass : at::empty({0}, result.o.options())};
    }

    // Communicates even if this rank has no gradient of o, because the other ranks wait for it.
    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const variable_list saved = ctx->get_saved_variables();
        const auto call = c10::static_intrusive_pointer_cast<SavedCall>(ctx->saved_data["call"].toCapsule());
        // The saved tensors may be exchanged heads, which have no autograd history. The inputs of the node have it.
        variable_list sources = ops::inputs_of_running_node();
        sources.insert(sources.end(), grads.begin(), grads.end());
        variable_list gradients = ops::once_differentiable(sources, [&]() -> variable_list {
            const BelowAutograd below_autograd;
            check_group(*call->plan);
            const Route route = make_route(*call->plan, call->route, saved[0].device());
            const at::Tensor d_o =
                grads[0].defined() ? in_memory(grads[0]) : at::zeros(call->o_sizes, saved[0].options());
            const at::Tensor d_mass = grads[1].defined() ? grads[1].resolve_neg() : grads[1];
            const Gradients result = explain_failure(*call->plan, *call->agreed, "backward", [&] {
                return route_backward(route, d_o, d_mass, call->num_kv_heads, unflatten(route, saved), call->options,
                                      call->return_mass);
            });
            return {result.dq, result.dk, result.dv};
        });
        gradients.resize(kNumInputs);
        return gradients;
    }
};

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention(const ops::Arguments& arguments) {
    const ContextParallelCall call(arguments);
    check_group(*call.plan);
    const CheckedCall checked = check_and_agree(call);
    const ops::BiasColumns columns = ops::bias_columns(call.options, checked.options.scale);
    const at::Tensor q = ops::extended_queries(call.q, call.options.query_bias, columns);
    const at::Tensor k = ops::extended_keys(call.k, call.options.key_bias, call.options.forget_gate, columns);
    const auto saved_call = c10::make_intrusive<SavedCall>();
    saved_call->plan = call.plan;
    saved_call->agreed = checked.agreed;
    saved_call->route = choose_route(call, q, k);
    saved_call->options = checked.options;
    saved_call->return_mass = call.return_mass;
    const auto input = [&call](const at::Tensor& x) { return in_memory(call.batched(x)); };
    const variable_list out = explain_failure(*call.plan, *checked.agreed, "forward", [&] {
        return Attend::apply(input(q), input(k), input(call.v), saved_call, call.wants_gradients());
    });
    call.plan->state().agreement->count(*checked.agreed, call.plan->state().documents);
    if (!call.plan->packed()) return {out[0], out[1]};
    return {out[0].squeeze(0), call.return_mass ? out[1].squeeze(0) : out[1]};
}

}  // namespace megatron_sb::distributed
