#include "distributed/fold.h"

#include <ATen/ATen.h>

#include "ops/tensors.h"

namespace megatron_sb::distributed {
namespace {

using at::Tensor;

// Zeroes the restart records of the rows that are not `live`, in all blocks of a run. The backward of the run then
// starts these rows in no block.
void zero_restarts_except(const SegmentTables& tables, size_t run, const Tensor& live, GroupRecord& record) {
    std::vector<Tensor> edges, masses;
    for (size_t buffer = 0; buffer < tables.run_of.size(); ++buffer) {
        if (tables.run_of[buffer] != static_cast<int>(run)) continue;
        edges.push_back(record.restart_edge[buffer]);
        masses.push_back(record.restart_mass[buffer]);
    }
    at::_foreach_mul_(edges, std::vector<Tensor>(edges.size(), live.to(edges[0].scalar_type())));
    at::_foreach_mul_(masses, std::vector<Tensor>(masses.size(), live.to(masses[0].scalar_type())));
}

}  // namespace

at::Tensor run_rows(const at::Tensor& x, int64_t dim, const plan::Run& run) {
    return x.narrow(dim, run.row_begin, run.num_rows);
}

Partial fold_runs(const SegmentTables& tables, const std::vector<Partial>& partials, const Tensor& q, int64_t d_v,
                  double mass_threshold, GroupRecord* record) {
    const size_t num_runs = partials.size();
    if (num_runs == 1 && tables.runs[0].num_rows == q.size(1)) {
        if (record != nullptr) record->mass_in.resize(1), record->older_o.resize(1);
        return partials[0];
    }
    const auto options = q.options().dtype(ops::accumulation_type(q));
    const std::vector<int64_t> sizes{q.size(0), q.size(1), q.size(2), d_v};
    const bool oldest_run_writes_all_rows = num_runs > 0 && tables.runs.back().num_rows == q.size(1);
    const Partial whole{oldest_run_writes_all_rows ? at::empty(sizes, options) : at::zeros(sizes, options),
                        at::ones({q.size(0), q.size(2), q.size(1)}, options)};

    std::vector<Tensor> mass_in(num_runs);  // newest to oldest: the mass at the newer edge of each run
    for (size_t i = 0; i < num_runs; ++i) {
        const Tensor mass = run_rows(whole.mass, 2, tables.runs[i]);
        if (i > 0) {
            // Comparisons with a NaN are false, so a NaN counts as used up.
            const Tensor live = mass_threshold > 0 ? mass.ge(mass_threshold) : mass.gt(0);
            const Tensor used_up = live.logical_not();
            mass_in[i] = mass.masked_fill(used_up, 0);
            partials[i].o.masked_fill_(ops::per_row(used_up), 0);
            partials[i].mass.masked_fill_(used_up, 1);
            if (record != nullptr) zero_restarts_except(tables, i, live, *record);
        }
        mass.mul_(partials[i].mass);
    }

    if (record != nullptr) record->older_o.resize(num_runs);
    for (size_t i = num_runs; i-- > 0;) {  // oldest to newest: the sum of the weighted outputs
        Tensor o = run_rows(whole.o, 1, tables.runs[i]);
        const bool oldest = i + 1 == num_runs;
        if (record != nullptr && !oldest) record->older_o[i] = o.clone();
        if (i == 0) {
            o.add_(partials[0].o);
        } else if (oldest) {
            at::mul_out(o, partials[i].o, ops::per_row(mass_in[i]));
        } else {
            o.addcmul_(partials[i].o, ops::per_row(mass_in[i]));
        }
    }
    if (record != nullptr) record->mass_in = std::move(mass_in);
    return whole;
}

}  // namespace megatron_sb::distributed
