#include "distributed/fold.h"

#include <ATen/ATen.h>

#include "ops/tensors.h"

#if defined(SB_WITH_CUDA)
#include "kernels/fold/fold.h"
#include "ops/device.h"
#endif

namespace megatron_sb::distributed {
namespace {

using at::Tensor;

#if defined(SB_WITH_CUDA)
// With one pass over the outputs. The tensor operations of fold_on_cpu() take several, and many launches.
Partial fold_on_gpu(const SegmentTables& tables, const std::vector<Partial>& partials, const Tensor& q, int64_t d_v,
                    double mass_threshold, GroupRecord* record) {
    const ops::DeviceScope scope(q.device());
    const auto options = q.options().dtype(at::kFloat);
    const Partial whole{at::empty({q.size(0), q.size(1), q.size(2), d_v}, q.options()),
                        at::empty({q.size(0), q.size(2), q.size(1)}, options)};
    fold::Params params{.batch = int32_t(q.size(0)),
                        .rows = int32_t(q.size(1)),
                        .num_heads = int32_t(q.size(2)),
                        .head_dim_v = int32_t(d_v),
                        .mass_threshold = float(mass_threshold),
                        .num_runs = int32_t(partials.size()),
                        .runs = {},
                        .o_dtype = ops::dtype_of(q.scalar_type()),
                        .o = whole.o.data_ptr(),
                        .mass = whole.mass.data_ptr<float>()};
    if (record != nullptr) record->mass_in.resize(partials.size()), record->older_o.resize(partials.size());
    for (size_t i = 0; i < partials.size(); ++i) {
        fold::Run& run = params.runs[i];
        run = {tables.runs[i].row_begin, tables.runs[i].num_rows, partials[i].o.const_data_ptr<float>(),
               partials[i].mass.const_data_ptr<float>()};
        if (record == nullptr) continue;
        if (i > 0) run.mass_in = (record->mass_in[i] = at::empty_like(partials[i].mass)).data_ptr<float>();
        if (i + 1 < partials.size())
            run.older_o = (record->older_o[i] = at::empty_like(partials[i].o)).data_ptr<float>();
    }
    fold::fold(params, scope.stream());
    return whole;
}
#endif

// Overwrites the partials.
Partial fold_on_cpu(const SegmentTables& tables, const std::vector<Partial>& partials, const Tensor& q, int64_t d_v,
                    double mass_threshold, GroupRecord* record) {
    const size_t num_runs = partials.size();
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
            const Tensor used_up = (mass_threshold > 0 ? mass.ge(mass_threshold) : mass.gt(0)).logical_not();
            mass_in[i] = mass.masked_fill(used_up, 0);
            partials[i].o.masked_fill_(ops::per_row(used_up), 0);
            partials[i].mass.masked_fill_(used_up, 1);
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

}  // namespace

at::Tensor run_rows(const at::Tensor& x, int64_t dim, const plan::Run& run) {
    return x.narrow(dim, run.row_begin, run.num_rows);
}

bool is_whole(const SegmentTables& tables, int64_t rows) {
    return tables.runs.size() == 1 && tables.runs[0].num_rows == rows;
}

Partial fold_runs(const SegmentTables& tables, const std::vector<Partial>& partials, const Tensor& q, int64_t d_v,
                  double mass_threshold, GroupRecord* record) {
    if (is_whole(tables, q.size(1))) {
        if (record != nullptr) record->mass_in.resize(1), record->older_o.resize(1);
        return partials[0];
    }
#if defined(SB_WITH_CUDA)
    if (q.is_cuda()) return fold_on_gpu(tables, partials, q, d_v, mass_threshold, record);
#endif
    return fold_on_cpu(tables, partials, q, d_v, mass_threshold, record);
}

}  // namespace megatron_sb::distributed
