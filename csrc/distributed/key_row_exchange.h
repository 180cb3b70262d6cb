// Sends key rows only to the ranks that need them, and the gradients of these rows back (KeyRowPlan). Each pair of
// ranks exchanges at most one message. Tensors have rows first: (rows, b, heads, d + d_v).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "distributed/rank_plan.h"
#include "distributed/transport.h"

namespace megatron_sb::distributed {

// A collective. `pending` is null if nothing travels.
struct RowTransfer {
    at::Tensor output;
    std::unique_ptr<Pending> pending;

    void wait() const {
        if (pending) pending->wait();
    }
};

// Returns the rows that this rank needs: those that it keeps, then the received ones in the order of the ranks. `k` and
// `v` are its shared rows.
RowTransfer send_key_rows(Transport& transport, const KeyRowPlan& rows, const at::Tensor& k, const at::Tensor& v);

// Sends the gradients of received rows back. `gradients` are those of the rows that send_key_rows() returned. The
// result is those of this rank's rows, in the order of rows.sent.
RowTransfer return_gradients(Transport& transport, const KeyRowPlan& rows, const at::Tensor& gradients);

// Returns the gradients of the shared rows: adds the result of return_gradients() to those of the kept rows, which are
// the first of `gradients`, in the order of the ranks. Other shared rows get 0.
at::Tensor sum_gradients(const KeyRowPlan& rows, const at::Tensor& gradients, const at::Tensor& returned);

}  // namespace megatron_sb::distributed
