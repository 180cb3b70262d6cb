#include "distributed/own_documents.h"

namespace megatron_sb::distributed {
namespace {

const KeyRowPlan& key_rows(const RankCall& call) {
    return *call.plan.key_rows;
}

}  // namespace

bool has_own_documents(const RankCall& call) {
    return call.comm == Comm::kGather && call.plan.key_rows && key_rows(call).own.defined();
}

RankCall shared_part(const RankCall& call) {
    if (!has_own_documents(call)) return call;
    return {call.transport, call.plan, call.comm, shared_rows(call, call.q), call.k, call.v, call.options};
}

ops::BlockOutput own_documents_forward(const RankCall& call) {
    return ops::block_forward(call.q, call.k, call.v, key_rows(call).own, std::nullopt, call.options,
                              call.q.scalar_type());
}

Gradients own_documents_backward(const RankCall& call, const at::Tensor& d_o, const at::Tensor& oldest_prefix,
                                 const GroupRecord& record, at::ScalarType type) {
    const ops::BlockGradients gradients = ops::empty_gradients(call.q, call.k, call.v, call.options, type);
    ops::block_backward(d_o, call.q, call.k, call.v, key_rows(call).own, record.restart_edge[0], record.restart_mass[0],
                        std::nullopt, oldest_prefix, call.options, gradients, key_rows(call).own_keys);
    return {gradients.dq.to(type), gradients.dk.to(type), gradients.dv.to(type)};
}

GroupRecord record_of_own_documents(const RankCall& call, const ops::BlockOutput& own) {
    const size_t num_runs = call.plan.gather.runs.size();
    return {
        {own.restart_edge}, {own.restart_mass}, std::vector<at::Tensor>(num_runs), std::vector<at::Tensor>(num_runs)};
}

at::Tensor shared_rows(const RankCall& call, const at::Tensor& x) {
    return key_rows(call).shared.read(x);
}

at::Tensor shared_row_values(const RankCall& call, const at::Tensor& x) {
    return key_rows(call).shared.read(x.transpose(1, 2)).transpose(1, 2);
}

void write_shared_rows(const RankCall& call, const ops::BlockOutput& all, const RankOutput& shared) {
    const RowSet& rows = key_rows(call).shared;
    rows.write(all.o, shared.o);
    rows.write(all.mass.transpose(1, 2), shared.mass.transpose(1, 2));
}

void write_shared_rows(const RankCall& call, const at::Tensor& all_dq, const at::Tensor& shared_dq) {
    key_rows(call).shared.write(all_dq, shared_dq);
}

}  // namespace megatron_sb::distributed
