// Folds the runs of a forward (plan/schedule.h). With (o, mass) of a newer run and (o', mass')
// of the next older one, the result is (o + mass * o', mass * mass').
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "distributed/group_record.h"
#include "distributed/rank_plan.h"

namespace megatron_sb::distributed {

// The result of attending to a part of the keys.
struct Partial {
    at::Tensor o;     // (b, rows, h, d_v)
    at::Tensor mass;  // (b, h, rows)
};

// Whether there is one run that has all `rows` of q. Its result is then that of the fold.
bool is_whole(const SegmentTables& tables, int64_t rows);

// Folds `partials`, one for each run of `tables`, newest first, for each row of q. The partials and the sums are in the
// accumulation type, the output is in this type or in q's dtype; if is_whole(), in that of the partial. May overwrite
// the partials. d_v: the head_dim of v. If `record` is not null, fills its mass_in and older_o.
//
// When the mass of a row falls below mass_threshold, older runs contribute nothing to the row, as in a kernel. This
// also keeps a NaN among the older keys out of the row.
Partial fold_runs(const SegmentTables& tables, const std::vector<Partial>& partials, const at::Tensor& q, int64_t d_v,
                  double mass_threshold, GroupRecord* record);

// Returns the rows of `run`; `dim` is the dimension of x that counts the local rows.
at::Tensor run_rows(const at::Tensor& x, int64_t dim, const plan::Run& run);

}  // namespace megatron_sb::distributed
