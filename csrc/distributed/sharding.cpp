// Splits the whole stream into the rows of each rank, and joins them again. Gradients are those of the sum of all
// ranks' losses. So the backward of shard gathers, and the backward of unshard sums over the ranks.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "distributed/agreement.h"
#include "distributed/c10d_transport.h"
#include "distributed/rank_plan.h"
#include "distributed/registration.h"
#include "ops/check.h"
#include "ops/once.h"
#include "ops/tensors.h"
#include "plan/partition.h"

namespace megatron_sb::distributed {
namespace {

using CuSeqlens = std::optional<std::vector<int64_t>>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

int64_t checked_dim(const at::Tensor& x, int64_t dim) {
    TORCH_CHECK_VALUE(x.dim() > 0, "x must have a dimension that counts the rows, got a tensor without dimensions");
    TORCH_CHECK_VALUE(dim >= -x.dim() && dim < x.dim(), "dim must be from ", -x.dim(), " to ", x.dim() - 1,
                      " for a tensor of ", x.dim(), " dimensions, got ", dim);
    return dim < 0 ? dim + x.dim() : dim;
}

// How the rows of a stream are split over a group. Both backwards need only this.
struct Split {
    std::string group_name;
    int64_t dim;             // counts the rows
    int64_t num_local_rows;  // of this rank
    GatherOrder order;

    Split(const std::string& group_name, int64_t dim, int rank, const plan::Partition& partition, c10::Device device)
        : group_name(group_name),
          dim(dim),
          num_local_rows(partition.num_local_rows(rank)),
          order(make_gather_order(partition, device)) {}

    explicit Split(AutogradContext* ctx)
        : group_name(ctx->saved_data["group_name"].toStringRef()),
          dim(ctx->saved_data["dim"].toInt()),
          num_local_rows(ctx->saved_data["num_local_rows"].toInt()) {
        const variable_list orders = ctx->get_saved_variables();
        order = {ctx->saved_data["rows"].toInt(), orders[0], orders[1]};
    }

    void save(AutogradContext* ctx) const {
        ctx->save_for_backward({order.to_stream, order.from_stream});
        ctx->saved_data["group_name"] = group_name;
        ctx->saved_data["dim"] = dim;
        ctx->saved_data["num_local_rows"] = num_local_rows;
        ctx->saved_data["rows"] = order.rows;
    }
};

// Returns the elements of a contiguous x as bytes (n,). A contiguous tensor with one element can have any strides, and
// view(-1) keeps them.
at::Tensor bytes_of(const at::Tensor& x) {
    return x.as_strided({x.numel()}, {1}).view(at::kByte);
}

// Returns the rows of x (.., local rows, ..) of all ranks in the order of the stream, (.., seq_len, ..). Rows
// travel as bytes, because backends support few dtypes.
at::Tensor gather_rows(const at::Tensor& x, const Split& split) {
    const auto transport = c10d_transport(split.group_name);
    const at::Tensor input = split.order.padded(x.resolve_conj().resolve_neg().movedim(split.dim, 0));
    std::vector<int64_t> sizes = input.sizes().vec();
    sizes.insert(sizes.begin(), transport->size());
    const at::Tensor output = at::empty(sizes, input.options());
    transport->all_gather(bytes_of(input), bytes_of(output).view({transport->size(), -1}))->wait();
    return output.flatten(0, 1).index_select(0, split.order.to_stream).movedim(0, split.dim);
}

// Sums x (.., seq_len, ..) over the ranks and returns this rank's rows of the sum.
at::Tensor scatter_rows(const at::Tensor& x, const Split& split) {
    if (x.is_complex())
        return at::view_as_complex(scatter_rows(at::view_as_real(x.resolve_conj()), split).contiguous());
    const auto transport = c10d_transport(split.group_name);
    const at::Tensor by_row = x.movedim(split.dim, 0);
    const at::Tensor rows = by_row.index_select(0, split.order.from_stream).to(ops::accumulation_type(x));
    const at::Tensor input = rows.contiguous().unflatten(0, {transport->size(), -1});
    const at::Tensor output = at::empty(input.sizes().slice(1), input.options());
    transport->reduce_scatter_sum(input, output)->wait();
    return output.narrow(0, 0, split.num_local_rows).to(x.scalar_type()).movedim(0, split.dim);
}

class Shard : public torch::autograd::Function<Shard> {
  public:
    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Split& split, int64_t rank) {
        split.save(ctx);
        const at::Tensor& from_stream = split.order.from_stream;
        return x.index_select(split.dim, from_stream.narrow(0, rank * split.order.rows, split.num_local_rows));
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        return ops::once_differentiable(grads, [&]() -> variable_list {
            return {gather_rows(grads[0], Split(ctx)), {}, {}};
        });
    }
};

class Unshard : public torch::autograd::Function<Unshard> {
  public:
    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Split& split) {
        split.save(ctx);
        return gather_rows(x, split);
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        return ops::once_differentiable(grads, [&]() -> variable_list {
            return {scatter_rows(grads[0], Split(ctx)), {}};
        });
    }
};

plan::Partition partition_of(int ranks, int64_t rows, const std::string& layout, const CuSeqlens& cu_seqlens,
                             const std::string& packing) {
    return {plan::parse_layout(layout), plan::parse_packing(packing), ranks, rows, cu_seqlens};
}

}  // namespace

at::Tensor shard_positions(int64_t ranks, int64_t seq_len, const std::string& layout, const CuSeqlens& cu_seqlens,
                           const std::string& packing) {
    if (ranks < 1 || ranks > plan::kMaxRanks)
        throw InvalidArgument(concat("ranks must be from 1 to ", plan::kMaxRanks, ", got ", ranks));
    const plan::Partition partition = partition_of(static_cast<int>(ranks), seq_len, layout, cu_seqlens, packing);
    return index_tensor(partition.gathered_positions(), at::kCPU).view({ranks, -1});
}

at::Tensor shard(const at::Tensor& x, const std::string& group_name, int64_t dim, const std::string& layout,
                 const CuSeqlens& cu_seqlens, const std::string& packing) {
    ops::check_elements("x", x);
    dim = checked_dim(x, dim);
    TORCH_CHECK_VALUE(x.size(dim) > 0, "x must have at least one row in dimension ", dim, ", got none");
    const auto transport = c10d_transport(group_name);
    const plan::Partition partition = partition_of(transport->size(), x.size(dim), layout, cu_seqlens, packing);
    return Shard::apply(x, Split(group_name, dim, transport->rank(), partition, x.device()), transport->rank());
}

at::Tensor unshard(const at::Tensor& x, const std::string& group_name, int64_t dim, const std::string& layout,
                   const CuSeqlens& cu_seqlens, const std::string& packing) {
    ops::check_elements("x", x);
    const auto transport = c10d_transport(group_name);
    std::vector<int64_t> others = x.sizes().vec();
    int64_t num_local_rows = 0;
    std::string error;
    try {
        dim = checked_dim(x, dim);
        num_local_rows = x.size(dim);
        others.erase(others.begin() + dim);
    } catch (const c10::Error& invalid) {
        error = invalid.what_without_backtrace();
    }
    const std::vector<Field> fields = {{"x's shape without its rows", concat(at::IntArrayRef(others))},
                                       {"x's dtype", concat(x.scalar_type())},
                                       {"dim", concat(dim)},
                                       {"layout", layout},
                                       {"packing", packing},
                                       {"cu_seqlens", summary(cu_seqlens)}};
    const std::vector<int64_t> rows = agree(*transport, "unshard_sequence", fields, error, num_local_rows);
    const int64_t seq_len = plan::sum_of_rows("x: number of rows", rows);
    if (seq_len == 0) throw InvalidArgument(concat("x must have a row in dimension ", dim, " on some rank, got none"));
    const plan::Partition partition = partition_of(transport->size(), seq_len, layout, cu_seqlens, packing);
    if (const int rank = partition.rank_with_other_rows(rows); rank >= 0)
        throw InvalidArgument(concat("x must have ", partition.num_local_rows(rank), " rows in dimension ", dim,
                                     " on rank ", rank, ", as the ranks have ", seq_len, " together, got ",
                                     rows[rank]));
    return Unshard::apply(x, Split(group_name, dim, transport->rank(), partition, x.device()));
}

}  // namespace megatron_sb::distributed
