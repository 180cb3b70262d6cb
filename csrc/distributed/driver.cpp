// The driver of the ring and of every other mode. A KeySource brings the keys of all ranks to this rank, block by
// block, and sends the gradients of the keys back to their owners. While this rank computes on one step's blocks, the
// blocks of the next step arrive. A run is a sequence of blocks that arrive in order (plan/schedule.h).
//
//   forward:
//       for each step, for each block of the step:                   (each run gets its newest keys first)
//           mass of the run = block_forward(q, block, mass_in = mass of the run), which adds to o of the run
//       fold the runs
//
//   backward:
//       prefix of each run = mass * d_mass + dO . (output of the keys older than the run)
//       for each step, for each block of the step:                   (each run gets its oldest keys first)
//           prefix of the run = block_backward(dO, q, block, prefix_in = prefix of the run), which adds to dq
//           send the gradients of the block
//
// Both repeat this for each group of KV heads. Only all_gather has several groups. A step of a ring in zigzag may have
// two blocks. They belong to different runs, so small blocks are computed side by side. Documents that no other rank
// has (own_documents.h) are computed while the first blocks arrive. In the backward they are computed while the
// gradients are sent, because gradients have twice as many bytes as keys.
#include "distributed/driver.h"

#include <ATen/ATen.h>

#include <cmath>

#include "distributed/fold.h"
#include "distributed/key_source.h"
#include "distributed/own_documents.h"
#include "ops/side_stream.h"
#include "ops/tensors.h"

namespace megatron_sb::distributed {
namespace {

using at::Tensor;

// With kLocal, kernels compute dk and dv in `type`, in the backward in `to` if it has this type. The other modes use
// the accumulation type. `records`: those of the forward; {} in the forward.
std::unique_ptr<KeySource> make_key_source(const RankCall& call, plan::Pass pass, at::ScalarType type,
                                           const std::vector<GroupRecord>& records, const KeyGradients& to = {}) {
    if (call.comm == Comm::kRing) return make_ring_keys(*call.transport, call.plan, pass, call.k, call.v);
    if (call.comm == Comm::kLocal) return make_local_keys(call.k, call.v, type, to);
    if (!call.plan.key_rows) return make_gathered_keys(*call.transport, call.plan, call.k, call.v);
    std::vector<KeyBlock> kept;
    if (call.plan.keeps_keys(call.comm)) {
        for (const GroupRecord& record : records) kept.push_back({0, record.k, record.v});
    }
    return make_needed_keys(*call.transport, call.plan, call.k, call.v, std::move(kept));
}

// Returns the query heads of x that read a range of KV heads. `dim` is the dimension of x that counts query heads.
Tensor query_heads(const RankCall& call, const Tensor& x, int64_t dim, HeadRange kv_heads) {
    const int64_t heads_per_kv_head = call.q.size(2) / call.k.size(2);
    return x.narrow(dim, kv_heads.begin * heads_per_kv_head, kv_heads.count * heads_per_kv_head);
}

// Returns the options of these query heads.
ops::BlockOptions options_of_heads(const RankCall& call, HeadRange kv_heads) {
    return ops::from_head(call.options, kv_heads.begin * (call.q.size(2) / call.k.size(2)));
}

// Whether a single block of keys has all rows of q, so that its results are those of the rank.
bool is_one_block(const SegmentTables& tables, const Tensor& q) {
    return tables.segments.size() == 1 && is_whole(tables, q.size(1));
}

// Returns the prefix with which each run starts at its oldest block, for the query heads of one group.
std::vector<Tensor> initial_prefixes(const SegmentTables& tables, const GroupRecord& record, const Tensor& d_o,
                                     const Tensor& oldest_prefix) {
    std::vector<Tensor> prefixes;
    for (size_t run = 0; run < tables.runs.size(); ++run) {
        Tensor prefix = run_rows(oldest_prefix, 2, tables.runs[run]);
        if (record.older_o[run].defined()) {
            const Tensor d_o_rows = run_rows(d_o, 1, tables.runs[run]);
            const Tensor of_older_keys = (d_o_rows * record.older_o[run]).sum(-1).transpose(1, 2);
            // A NaN among the older keys must not reach the gradients of newer ones.
            prefix = (prefix + of_older_keys).nan_to_num(0, INFINITY, -INFINITY);
        }
        prefixes.push_back(prefix);
    }
    return prefixes;
}

// Whether the two blocks of a step of a ring are computed side by side.
bool computed_side_by_side(const RankCall& call) {
    const std::vector<plan::Run>& runs = call.plan.tables(call.comm).runs;
    return runs.size() > 1 && call.q.size(0) * call.q.size(2) * runs[0].num_rows <= call.plan.most_rows_side_by_side;
}

// Calls prepare(i) and compute(i) for each block of a step that queries of this rank see. If two blocks are computed
// side by side, both are prepared before, and compute() of the second one is second() of ops::side_by_side().
template <class Prepare, class Compute>
void compute_blocks(const RankCall& call, const std::vector<KeyBlock>& blocks, const Prepare& prepare,
                    const Compute& compute) {
    std::vector<size_t> seen;
    for (size_t i = 0; i < blocks.size(); ++i) {
        if (call.plan.tables(call.comm).segments[blocks[i].buffer].defined()) seen.push_back(i);
    }
    if (seen.size() == 2 && computed_side_by_side(call)) {
        for (const size_t i : seen) prepare(i);
        ops::side_by_side(
            call.q.device(), [&] { compute(seen[0]); }, [&] { return compute(seen[1]); });
    } else {
        for (const size_t i : seen) prepare(i), compute(i);
    }
}

// Returns a view of dq for each run. If blocks are computed side by side, the newest run gets a tensor of zeros
// instead: it is computed beside the others, which have the same rows.
std::vector<Tensor> dq_of_runs(const RankCall& call, const Tensor& dq) {
    std::vector<Tensor> parts;
    for (const plan::Run& run : call.plan.tables(call.comm).runs) parts.push_back(run_rows(dq, 1, run));
    if (computed_side_by_side(call)) parts[0] = at::zeros(parts[0].sizes(), dq.options());
    return parts;
}

RankOutput forward_with(KeySource& keys, const RankCall& call, bool keep_records) {
    const SegmentTables& tables = call.plan.tables(call.comm);
    // The output of one block is the result. The outputs of several blocks are summed in the accumulation type.
    const auto o_type = is_one_block(tables, call.q) ? call.q.scalar_type() : ops::accumulation_type(call.q);
    RankOutput result;
    std::vector<Tensor> o, mass;  // by group of KV heads
    for (int group = 0; group < keys.num_groups(); ++group) {
        const HeadRange kv_heads = keys.heads(group);
        const Tensor q = query_heads(call, call.q, 2, kv_heads);
        const ops::BlockOptions options = options_of_heads(call, kv_heads);
        GroupRecord record;
        record.restart_edge.resize(tables.segments.size());
        record.restart_mass.resize(tables.segments.size());
        std::vector<Partial> partials(tables.runs.size());
        const auto compute = [&](const KeyBlock& block) -> std::vector<Tensor> {
            const int run = tables.run_of[block.buffer];
            const Partial newer = partials[run];
            const ops::BlockOutput out =
                ops::block_forward(run_rows(q, 1, tables.runs[run]), block.k, block.v, tables.segments[block.buffer],
                                   ops::if_defined(newer.mass), options, o_type, ops::if_defined(newer.o));
            partials[run] = {out.o, out.mass};
            record.restart_edge[block.buffer] = out.restart_edge;
            record.restart_mass[block.buffer] = out.restart_mass;
            return {out.o, out.mass, out.restart_edge, out.restart_mass, newer.mass};
        };
        for (int step = 0; step < keys.num_steps(); ++step) {
            const std::vector<KeyBlock> blocks = keys.next_blocks();
            // Only modes with one block keep their keys.
            if (keep_records && call.plan.keeps_keys(call.comm)) record.k = blocks[0].k, record.v = blocks[0].v;
            compute_blocks(
                call, blocks, [](size_t) {}, [&](size_t i) { return compute(blocks[i]); });
        }
        const Partial whole =
            fold_runs(tables, partials, q, call.v.size(3), options.mass_threshold, keep_records ? &record : nullptr);
        o.push_back(whole.o.to(q.scalar_type()));
        mass.push_back(whole.mass);
        if (keep_records) result.records.push_back(std::move(record));
    }
    result.o = o.size() == 1 ? o[0] : at::cat(o, 2);
    result.mass = mass.size() == 1 ? mass[0] : at::cat(mass, 1);
    return result;
}

// Returns dq in `type`. oldest_prefix (b, h, s_local): the prefix of each row at its oldest key.
Tensor backward_with(KeySource& keys, const RankCall& call, const Tensor& d_o, const Tensor& oldest_prefix,
                     const std::vector<GroupRecord>& records, at::ScalarType type) {
    const SegmentTables& tables = call.plan.tables(call.comm);
    const bool one_block = is_one_block(tables, call.q);  // which writes dq. Several blocks add to it
    const auto dq_options = call.q.options().dtype(type);
    const Tensor dq = one_block ? at::empty(call.q.sizes(), dq_options) : at::zeros(call.q.sizes(), dq_options);
    const std::vector<Tensor> dq_of_run = dq_of_runs(call, dq);
    for (int group = 0; group < keys.num_groups(); ++group) {
        const HeadRange kv_heads = keys.heads(group);
        const ops::BlockOptions options = options_of_heads(call, kv_heads);
        const GroupRecord& record = records[group];
        const Tensor group_q = query_heads(call, call.q, 2, kv_heads), group_d_o = query_heads(call, d_o, 2, kv_heads);
        std::vector<Tensor> prefixes =
            initial_prefixes(tables, record, group_d_o, query_heads(call, oldest_prefix, 1, kv_heads));
        const auto compute = [&](const KeyBlock& block, const KeyGradients& to) -> std::vector<Tensor> {
            const int run = tables.run_of[block.buffer];
            const Tensor older = prefixes[run];
            const ops::BlockGradients gradients{query_heads(call, dq_of_run[run], 2, kv_heads), to.dk, to.dv,
                                                !one_block};
            prefixes[run] = ops::block_backward(
                run_rows(group_d_o, 1, tables.runs[run]), run_rows(group_q, 1, tables.runs[run]), block.k, block.v,
                tables.segments[block.buffer], record.restart_edge[block.buffer], record.restart_mass[block.buffer],
                ops::if_defined(record.mass_in[run]), older, options, gradients, tables.most_keys);
            return {older, prefixes[run]};
        };
        for (int step = 0; step < keys.num_steps(); ++step) {
            const std::vector<KeyBlock> blocks = keys.next_blocks();
            std::vector<KeyGradients> to(blocks.size());
            compute_blocks(
                call, blocks, [&](size_t i) { to[i] = keys.gradients(i); },
                [&](size_t i) { return compute(blocks[i], to[i]); });
            keys.finish_step();
        }
    }
    if (computed_side_by_side(call)) run_rows(dq, 1, tables.runs[0]).add_(dq_of_run[0]);
    return dq;
}

// Returns a tensor for the gradient of x. It is 0 where the modes may leave rows of dk and dv as they are.
Tensor make_gradient(const RankCall& call, const Tensor& x, at::ScalarType type) {
    const auto options = x.options().dtype(type);
    const bool some_rows = call.comm == Comm::kGather && call.plan.key_rows;
    return some_rows ? at::zeros(x.sizes(), options) : at::empty(x.sizes(), options);
}

}  // namespace

RankOutput attend_forward(const RankCall& call, bool keep_records) {
    const RankCall shared = shared_part(call);
    const auto keys = make_key_source(shared, plan::Pass::kForward, call.k.scalar_type(), {});  // starts a transfer
    if (!has_own_documents(call)) return forward_with(*keys, call, keep_records);
    const ops::BlockOutput own = own_documents_forward(call);
    RankOutput result = forward_with(*keys, shared, keep_records);
    write_shared_rows(call, own, result);
    if (keep_records) result.records.push_back(record_of_own_documents(call, own));
    return {own.o, own.mass, std::move(result.records)};
}

Gradients attend_backward(const RankCall& call, const Tensor& d_o, const Tensor& d_mass, const Tensor& mass,
                          const std::vector<GroupRecord>& records, at::ScalarType type) {
    const bool local = call.comm == Comm::kLocal;
    // The gradients of local keys are the result. The other modes sum those of several blocks or ranks.
    const auto block_type =
        local ? ops::gradient_type(call.q, call.v, call.options, type) : ops::accumulation_type(call.q);
    const RankCall shared = shared_part(call);
    KeyGradients own_keys;  // allocated early only where kernels can write them
    if (local) own_keys = {make_gradient(call, call.k, type), make_gradient(call, call.v, type)};
    const auto keys =
        make_key_source(shared, plan::Pass::kBackward, block_type, records, own_keys);  // may start a transfer
    const Tensor oldest_prefix = d_mass.defined() ? mass * d_mass : at::zeros_like(mass);
    Tensor dq;
    if (has_own_documents(call)) {
        const Tensor shared_dq = backward_with(*keys, shared, shared_rows(call, d_o),
                                               shared_row_values(call, oldest_prefix), records, block_type);
        const Gradients own = own_documents_backward(call, d_o, oldest_prefix, records.back(), type);
        write_shared_rows(call, own.dq, shared_dq);
        dq = own.dq;
        own_keys = {own.dk, own.dv};
    } else {
        dq = backward_with(*keys, shared, d_o, oldest_prefix, records, block_type).to(type);
        if (!local) own_keys = {make_gradient(call, call.k, type), make_gradient(call, call.v, type)};
    }
    keys->write_own_gradients(own_keys);
    return {dq, own_keys.dk, own_keys.dv};
}

}  // namespace megatron_sb::distributed
