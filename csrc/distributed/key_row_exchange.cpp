#include "distributed/key_row_exchange.h"

#include <ATen/ATen.h>

#include <numeric>

namespace megatron_sb::distributed {
namespace {

int64_t sum(const std::vector<int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Exchanges slices of rows: `input` has the slices for each rank, `output` gets those from each rank, one after
// another.
std::unique_ptr<Pending> exchange_slices(Transport& transport, const at::Tensor& input,
                                         const std::vector<int64_t>& counts, const at::Tensor& output,
                                         const std::vector<int64_t>& output_counts) {
    const std::vector<at::Tensor> from = input.split_with_sizes(counts), to = output.split_with_sizes(output_counts);
    std::vector<Message> sends, receives;
    for (int rank = 0; rank < transport.size(); ++rank) {
        if (rank == transport.rank()) continue;
        sends.push_back({rank, from[rank]});
        receives.push_back({rank, to[rank]});
    }
    return transport.exchange(sends, receives);
}

}  // namespace

RowTransfer send_key_rows(Transport& transport, const KeyRowPlan& rows, const at::Tensor& k, const at::Tensor& v) {
    const int64_t num_received = sum(rows.num_received);
    at::Tensor output =
        at::empty({rows.num_kept + num_received, k.size(1), k.size(2), k.size(3) + v.size(3)}, k.options());
    at::Tensor kept = output.narrow(0, 0, rows.num_kept);
    at::cat_out(kept, {k.narrow(0, 0, rows.num_kept), v.narrow(0, 0, rows.num_kept)}, -1);
    auto pending = exchange_slices(transport, select_rows(kept, 0, rows.sent), rows.num_sent,
                                   output.narrow(0, rows.num_kept, num_received), rows.num_received);
    return {output, std::move(pending)};
}

RowTransfer return_gradients(Transport& transport, const KeyRowPlan& rows, const at::Tensor& gradients) {
    const at::Tensor received = gradients.narrow(0, rows.num_kept, sum(rows.num_received));
    std::vector<int64_t> sizes = gradients.sizes().vec();
    sizes[0] = sum(rows.num_sent);
    const at::Tensor output = at::empty(sizes, gradients.options());
    return {output, exchange_slices(transport, received, rows.num_received, output, rows.num_sent)};
}

at::Tensor sum_gradients(const KeyRowPlan& rows, const at::Tensor& gradients, const at::Tensor& returned) {
    at::Tensor own = gradients.narrow(0, 0, rows.num_kept);
    if (rows.num_kept < rows.shared.count) {
        std::vector<int64_t> sizes = own.sizes().vec();
        sizes[0] = rows.shared.count - rows.num_kept;
        own = at::cat({own, at::zeros(sizes, own.options())});
    }
    const std::vector<at::Tensor> parts = returned.split_with_sizes(rows.num_sent);
    const std::vector<at::Tensor> places = rows.sent.split_with_sizes(rows.num_sent);
    for (size_t rank = 0; rank < parts.size(); ++rank) own.index_add_(0, places[rank], parts[rank]);
    return own;
}

}  // namespace megatron_sb::distributed
