// Joins the runs of a forward (plan/schedule.h): (o, mass) of a newer run and (o', mass') of the next older one give
// (o + mass * o', mass * mass'), in the accumulation type.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "distributed/group_record.h"
#include "distributed/rank_plan.h"

namespace megatron_sb::distributed {

// The result of some keys for some rows.
struct Partial {
    at::Tensor o;     // (b, rows, h, d_v)
    at::Tensor mass;  // (b, h, rows)
};

// Folds `partials`, one for each run of `tables`, newest first, for each row of q. Overwrites the partials. d_v: the
// head_dim of v. If `record` is not null, fills its mass_in and older_o.
//
// A row whose mass falls below mass_threshold ends there, as it does in a kernel: older runs contribute nothing to it.
// This keeps a NaN among the older keys out of the row.
Partial fold_runs(const SegmentTables& tables, const std::vector<Partial>& partials, const at::Tensor& q, int64_t d_v,
                  double mass_threshold, GroupRecord* record);

// The rows of `run`; `dim` is the dimension of x that counts the local rows.
at::Tensor run_rows(const at::Tensor& x, int64_t dim, const plan::Run& run);

}  // namespace megatron_sb::distributed
