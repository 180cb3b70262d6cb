// The operators of context parallelism and their plan. Schemas take a process group by its name.
#include <torch/custom_class.h>
#include <torch/library.h>

#include "distributed/registration.h"
#include "ops/autocast.h"
#include "ops/options.h"

namespace megatron_sb {

std::tuple<at::Tensor, at::Tensor> context_parallel_attention(const at::Tensor& q, const at::Tensor& k,
                                                              const at::Tensor& v,
                                                              const c10::intrusive_ptr<ContextParallelPlan>& plan,
                                                              const ContextParallelOptions& options) {
    TORCH_CHECK_VALUE(plan.defined(), "plan must be a ContextParallelPlan, got a null pointer.");
    static const ops::Operator attention("megatron_sb::context_parallel_attention");
    const ops::NamedArguments inputs = {{"q", q},
                                        {"k", k},
                                        {"v", v},
                                        {"plan", plan},
                                        {"comm", options.comm},
                                        {"heads_group", options.hierarchical_groups.first},
                                        {"keys_group", options.hierarchical_groups.second},
                                        {"return_mass", options.return_mass}};
    return ops::output_and_mass(attention.call(inputs, ops::named(options)));
}

at::Tensor shard_sequence(const at::Tensor& x, const std::string& group_name, int64_t dim, const std::string& layout,
                          const std::optional<std::vector<int64_t>>& cu_seqlens, const std::string& packing) {
    return distributed::shard(x, group_name, dim, layout, cu_seqlens, packing);
}

at::Tensor unshard_sequence(const at::Tensor& x, const std::string& group_name, int64_t dim, const std::string& layout,
                            const std::optional<std::vector<int64_t>>& cu_seqlens, const std::string& packing) {
    return distributed::unshard(x, group_name, dim, layout, cu_seqlens, packing);
}

}  // namespace megatron_sb

namespace {

using megatron_sb::ContextParallelPlan;

c10::intrusive_ptr<ContextParallelPlan> make_plan(const std::string& group_name, std::optional<int64_t> seq_len,
                                                  const std::optional<std::vector<int64_t>>& cu_seqlens,
                                                  const std::string& layout, const std::string& packing,
                                                  const std::string& argument_error, std::optional<int64_t> local_len,
                                                  bool equal_chunks) {
    return megatron_sb::ops::with_value_errors([&] {
        return c10::make_intrusive<ContextParallelPlan>(group_name, seq_len, cu_seqlens, layout, packing,
                                                        argument_error, local_len, equal_chunks);
    });
}

// The kernel of an operator from a function that may throw InvalidArgument.
template <auto function>
struct Checked;
template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Checked<function> {
    static Result call(Arguments... arguments) {
        return megatron_sb::ops::with_value_errors([&] { return function(arguments...); });
    }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(megatron_sb, m) {
    m.class_<ContextParallelPlan>("ContextParallelPlan")
        .def(torch::init(make_plan))
        .def("group_name", [](const c10::intrusive_ptr<ContextParallelPlan>& plan) { return plan->group_name(); })
        .def("rank", &ContextParallelPlan::rank)
        .def("size", &ContextParallelPlan::size)
        .def("seq_len", &ContextParallelPlan::seq_len)
        .def("local_len", &ContextParallelPlan::local_len)
        .def("key_rows", &ContextParallelPlan::key_rows)
        .def("key_rows_p2p", &ContextParallelPlan::key_rows_p2p)
        .def("packed", &ContextParallelPlan::packed)
        .def("layout", &ContextParallelPlan::layout)
        .def("packing", &ContextParallelPlan::packing);
    m.def(
        "context_parallel_attention(Tensor q, Tensor k, Tensor v, "
        "__torch__.torch.classes.megatron_sb.ContextParallelPlan plan, str comm, str heads_group, str keys_group, "
        "float? scale, bool attend_current, float mass_threshold, bool return_mass, Tensor? forget_gate=None, "
        "bool euclidean=False, Tensor? query_bias=None, Tensor? key_bias=None, float[]? reach=None) "
        "-> (Tensor o, Tensor mass)");
    m.def("shard_positions(int ranks, int seq_len, str layout, int[]? cu_seqlens, str packing) -> Tensor");
    m.def("shard_sequence(Tensor x, str group_name, int dim, str layout, int[]? cu_seqlens, str packing) -> Tensor");
    m.def(
        "unshard_sequence(Tensor x, str group_name, int dim, str layout, int[]? cu_seqlens, str packing) -> "
        "Tensor");
}

TORCH_LIBRARY_IMPL(megatron_sb, CompositeImplicitAutograd, m) {
    using namespace megatron_sb;
    m.impl("context_parallel_attention",
           torch::CppFunction::makeFromBoxedFunction<&ops::boxed_kernel<distributed::attention>>());
    m.impl("shard_positions", Checked<distributed::shard_positions>::call);
    m.impl("shard_sequence", Checked<distributed::shard>::call);
    m.impl("unshard_sequence", Checked<distributed::unshard>::call);
}

TORCH_LIBRARY_IMPL(megatron_sb, AutocastCPU, m) {
    m.impl("context_parallel_attention", torch::CppFunction::makeFromBoxedFunction<&megatron_sb::ops::autocast_cpu>());
}

TORCH_LIBRARY_IMPL(megatron_sb, AutocastCUDA, m) {
    m.impl("context_parallel_attention", torch::CppFunction::makeFromBoxedFunction<&megatron_sb::ops::autocast_cuda>());
}
