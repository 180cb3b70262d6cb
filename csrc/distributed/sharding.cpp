// Splits the whole stream into the rows of each rank, and back. Gradients are those of the sum of all ranks' losses.
// So the backward of shard gathers, and the backward of unshard sums over the ranks.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "distributed/agreement.h"
#include "distributed/c10d_transport.h"
#include "distributed/rank_plan.h"
#include "distributed/registration.h"
#include "ops/once.h"
#include "ops/tensors.h"
#include "plan/partition.h"

namespace megatron_sb::distributed {
namespace {

using CuSeqlens = std::optional<std::vector<int64_t>>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

int64_t checked_dim(const at::Tensor& x, int64_t dim) {
    TORCH_CHECK_VALUE(dim >= -x.dim() && dim < x.dim(), "dim must be from ", -x.dim(), " to ", x.dim() - 1,
                      " for a tensor of ", x.dim(), " dimensions, got ", dim);
    return dim < 0 ? dim + x.dim() : dim;
}

// How the rows of a stream are split over a group. Both backwards need only this.
struct Split {
    std::string group_name;
    int64_t dim;             // counts the rows
    at::Tensor from_stream;  // the stream row of each row of the concatenated local buffers

    void save(AutogradContext* ctx) const {
        ctx->save_for_backward({from_stream});
        ctx->saved_data["group_name"] = group_name;
        ctx->saved_data["dim"] = dim;
    }
    static Split load(AutogradContext* ctx) {
        return {ctx->saved_data["group_name"].toStringRef(), ctx->saved_data["dim"].toInt(),
                ctx->get_saved_variables()[0]};
    }
};

// Returns the rows of x_local (.., rows, ..) of all ranks in the order of the stream, (.., ranks * rows, ..).
at::Tensor gather_rows(const at::Tensor& x_local, const Split& split) {
    const auto transport = c10d_transport(split.group_name);
    const at::Tensor input = x_local.movedim(split.dim, 0).contiguous();
    std::vector<int64_t> sizes = input.sizes().vec();
    sizes.insert(sizes.begin(), transport->size());
    const at::Tensor output = at::empty(sizes, input.options());
    transport->all_gather(input, output)->wait();
    return output.flatten(0, 1).index_select(0, inverse_permutation(split.from_stream)).movedim(0, split.dim);
}

// Sums x (.., rows, ..) over the ranks and returns this rank's rows of the sum.
at::Tensor scatter_rows(const at::Tensor& x, const Split& split) {
    const auto transport = c10d_transport(split.group_name);
    const at::Tensor rows = x.movedim(split.dim, 0).index_select(0, split.from_stream).to(ops::accumulation_type(x));
    const at::Tensor input = rows.contiguous().unflatten(0, {transport->size(), -1});
    const at::Tensor output = at::empty(input.sizes().slice(1), input.options());
    transport->reduce_scatter_sum(input, output)->wait();
    return output.to(x.scalar_type()).movedim(0, split.dim);
}

class Shard : public torch::autograd::Function<Shard> {
  public:
    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Split& split, int64_t rank,
                              int64_t num_local_rows) {
        split.save(ctx);
        return x.index_select(split.dim, split.from_stream.narrow(0, rank * num_local_rows, num_local_rows));
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        return ops::once_differentiable(grads, [&]() -> variable_list {
            return {gather_rows(grads[0], Split::load(ctx)), {}, {}, {}};
        });
    }
};

class Unshard : public torch::autograd::Function<Unshard> {
  public:
    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_local, const Split& split) {
        split.save(ctx);
        return gather_rows(x_local, split);
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        return ops::once_differentiable(grads, [&]() -> variable_list {
            return {scatter_rows(grads[0], Split::load(ctx)), {}};
        });
    }
};

plan::Partition partition_of(int ranks, int64_t rows, const std::string& layout, const CuSeqlens& cu_seqlens,
                             const std::string& packing) {
    return {plan::parse_layout(layout), plan::parse_packing(packing), ranks, rows, cu_seqlens};
}

std::string summary(const CuSeqlens& cu_seqlens) {
    if (!cu_seqlens) return "none";
    return concat(cu_seqlens->size(), " offsets of checksum ", checksum(*cu_seqlens));
}

}  // namespace

at::Tensor shard_positions(int64_t ranks, int64_t seq_len, const std::string& layout, const CuSeqlens& cu_seqlens,
                           const std::string& packing) {
    const plan::Partition partition = partition_of(static_cast<int>(ranks), seq_len, layout, cu_seqlens, packing);
    return index_tensor(partition.gathered_positions(), at::kCPU).view({ranks, -1});
}

at::Tensor shard(const at::Tensor& x, const std::string& group_name, int64_t dim, const std::string& layout,
                 const CuSeqlens& cu_seqlens, const std::string& packing) {
    dim = checked_dim(x, dim);
    const auto transport = c10d_transport(group_name);
    const plan::Partition partition = partition_of(transport->size(), x.size(dim), layout, cu_seqlens, packing);
    const Split split{group_name, dim, index_tensor(partition.gathered_positions(), x.device())};
    return Shard::apply(x, split, transport->rank(), partition.num_local_rows());
}

at::Tensor unshard(const at::Tensor& x_local, const std::string& group_name, int64_t dim, const std::string& layout,
                   const CuSeqlens& cu_seqlens, const std::string& packing) {
    const auto transport = c10d_transport(group_name);
    std::vector<int64_t> from_stream;
    std::string error;
    try {
        dim = checked_dim(x_local, dim);
        from_stream =
            partition_of(transport->size(), x_local.size(dim) * transport->size(), layout, cu_seqlens, packing)
                .gathered_positions();
    } catch (const c10::Error& invalid) {
        error = invalid.what_without_backtrace();
    } catch (const InvalidArgument& invalid) {
        error = invalid.what();
    }
    const std::vector<Field> fields = {{"x_local's shape", concat(x_local.sizes())},
                                       {"x_local's dtype", concat(x_local.scalar_type())},
                                       {"dim", concat(dim)},
                                       {"layout", layout},
                                       {"packing", packing},
                                       {"cu_seqlens", summary(cu_seqlens)}};
    agree(*transport, "unshard_sequence", fields, error);
    return Unshard::apply(x_local, Split{group_name, dim, index_tensor(from_stream, x_local.device())});
}

}  // namespace megatron_sb::distributed
