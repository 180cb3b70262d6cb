// The documents of a packed batch that only this rank has (KeyRowPlan::own). They need no transfer: one block call
// computes them while the keys of the other documents are sent.
#pragma once

#include <ATen/core/Tensor.h>

#include "distributed/rank_call.h"

namespace megatron_sb::distributed {

// Whether a call has such documents, which its mode computes apart from the other rows.
bool has_own_documents(const RankCall& call);

// Returns the call of the queries in the other rows, or the whole call if there are no such documents.
RankCall shared_part(const RankCall& call);

// Returns o in q's dtype. The other rows get o = 0 and mass = 1.
ops::BlockOutput own_documents_forward(const RankCall& call);

// oldest_prefix (b, h, s_local): mass * d_mass. The gradients of the other rows are 0.
Gradients own_documents_backward(const RankCall& call, const at::Tensor& d_o, const at::Tensor& oldest_prefix,
                                 const GroupRecord& record, at::ScalarType type);

// Returns what own_documents_backward needs, with as many entries as the other records of the plan.
GroupRecord record_of_own_documents(const RankCall& call, const ops::BlockOutput& own);

// Returns the other rows of x (b, s_local, ..), or of values of rows (b, h, s_local).
at::Tensor shared_rows(const RankCall& call, const at::Tensor& x);
at::Tensor shared_row_values(const RankCall& call, const at::Tensor& x);

// Write the results of the other rows, or dq of them, to those of all rows.
void write_shared_rows(const RankCall& call, const ops::BlockOutput& all, const RankOutput& shared);
void write_shared_rows(const RankCall& call, const at::Tensor& all_dq, const at::Tensor& shared_dq);

}  // namespace megatron_sb::distributed
