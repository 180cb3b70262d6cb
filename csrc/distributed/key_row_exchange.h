// Sends key rows only to the ranks that need them, and the gradients of these rows back (KeyRowPlan). Each pair of
// ranks exchanges at most one message.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "distributed/rank_plan.h"
#include "distributed/transport.h"

namespace megatron_sb::distributed {

// A collective with rows first, (rows, b, heads, d + d_v). `pending` is null if nothing travels.
struct RowTransfer {
    at::Tensor output;
    std::unique_ptr<Pending> pending;

    void wait() const {
        if (pending) pending->wait();
    }
};

// Returns the rows that this rank needs, in the order of the ranks that hold them. `local` are the rows of this rank.
RowTransfer send_key_rows(Transport& transport, const KeyRowPlan& rows, const at::Tensor& local);
// Sends the gradients of the rows that send_key_rows() returned to the ranks that hold them. Returns the gradients of
// this rank's rows, in the order of rows.sent.
RowTransfer return_gradients(Transport& transport, const KeyRowPlan& rows, const at::Tensor& gradients);
// Adds the result of return_gradients() to rows of the local buffer, in the order of the ranks: (local rows, ..).
at::Tensor sum_returned(const KeyRowPlan& rows, const at::Tensor& returned, int64_t num_local_rows);

}  // namespace megatron_sb::distributed
