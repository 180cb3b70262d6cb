#include "distributed/key_row_exchange.h"

#include <ATen/ATen.h>

#include <numeric>

namespace megatron_sb::distributed {
namespace {

// Exchanges slices of rows: `input` has the slices for each rank, the result those from each rank, one after another.
RowTransfer exchange_slices(Transport& transport, const at::Tensor& input, const std::vector<int64_t>& counts,
                            const std::vector<int64_t>& result_counts) {
    std::vector<int64_t> sizes = input.sizes().vec();
    sizes[0] = std::accumulate(result_counts.begin(), result_counts.end(), int64_t{0});
    const at::Tensor output = at::empty(sizes, input.options());
    const std::vector<at::Tensor> from = input.split_with_sizes(counts), to = output.split_with_sizes(result_counts);
    std::vector<Message> sends, receives;
    for (int rank = 0; rank < transport.size(); ++rank) {
        if (rank == transport.rank()) {
            to[rank].copy_(from[rank]);
            continue;
        }
        sends.push_back({rank, from[rank]});
        receives.push_back({rank, to[rank]});
    }
    return {output, transport.exchange(sends, receives)};
}

}  // namespace

RowTransfer send_key_rows(Transport& transport, const KeyRowPlan& rows, const at::Tensor& local) {
    return exchange_slices(transport, select_rows(local, 0, rows.sent), rows.num_sent, rows.num_received);
}

RowTransfer return_gradients(Transport& transport, const KeyRowPlan& rows, const at::Tensor& gradients) {
    return exchange_slices(transport, gradients, rows.num_received, rows.num_sent);
}

at::Tensor sum_returned(const KeyRowPlan& rows, const at::Tensor& returned, int64_t num_local_rows) {
    std::vector<int64_t> sizes = returned.sizes().vec();
    sizes[0] = num_local_rows;
    at::Tensor sum = at::zeros(sizes, returned.options());
    const std::vector<at::Tensor> parts = returned.split_with_sizes(rows.num_sent);
    const std::vector<at::Tensor> places = rows.sent.split_with_sizes(rows.num_sent);
    for (size_t rank = 0; rank < parts.size(); ++rank) sum.index_add_(0, places[rank], parts[rank]);
    return sum;
}

}  // namespace megatron_sb::distributed
