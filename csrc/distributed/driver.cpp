// The forward meets the keys of each run newest to oldest and carries (o, mass) on; runs are joined at the end by the
// fold (O, m) o (O', m') = (O + m O', m m'), or (O, m) where m is used up: as a kernel's walk, that of a row ends
// there, and what its older keys hold, be it NaN, does not reach it. The backward meets them oldest to newest and
// carries the prefix sum of g on, which starts at mass * d_mass plus, for a run with older keys, dO . (their output).
#include "distributed/driver.h"

#include <ATen/ATen.h>

#include <cmath>

namespace megatron_sb::distributed {
namespace {

using at::Tensor;

struct Carry {
    Tensor o;     // (b, rows, h, d_v)
    Tensor mass;  // (b, h, rows)
};

const Tables& tables_of(const RankPlan& plan, Comm comm) {
    return comm == Comm::kRing ? plan.ring : plan.gather;
}

// `type`: that of gradients.
std::unique_ptr<KeyFeed> make_feed(Transport* transport, const RankPlan& plan, Comm comm, plan::Pass pass,
                                   const Tensor& k, const Tensor& v, at::ScalarType type) {
    if (comm == Comm::kRing) return make_ring_feed(*transport, plan, pass, k, v);
    if (comm == Comm::kGather) return make_gather_feed(*transport, plan, k, v);
    return make_here_feed(k, v, type);
}

Tensor rows_of(const Tensor& x, int64_t dim, const plan::Run& run) {
    return x.narrow(dim, run.row_begin, run.num_rows);
}

// A value (b, h, rows) for each row of (b, rows, h, d).
Tensor beside_rows(const Tensor& value) {
    return value.transpose(1, 2).unsqueeze(-1);
}

Tensor nan_as_zero(const Tensor& x) {
    return x.nan_to_num(0, INFINITY, -INFINITY);
}

std::optional<Tensor> if_defined(const Tensor& x) {
    return x.defined() ? std::optional<Tensor>(x) : std::nullopt;
}

// The query heads that read a range of KV heads; dim is that of the heads.
Tensor query_heads(const Tensor& x, int64_t dim, HeadRange heads, int64_t heads_per_kv_head) {
    return x.narrow(dim, heads.begin * heads_per_kv_head, heads.count * heads_per_kv_head);
}

// Takes the other rows out of a run's backward: they start in none of its blocks.
void keep_rows(const Tables& tables, size_t run, const Tensor& live, GroupRecord& record) {
    std::vector<Tensor> edges, masses;
    for (size_t buffer = 0; buffer < tables.run_of.size(); ++buffer) {
        if (tables.run_of[buffer] != static_cast<int>(run)) continue;
        edges.push_back(record.restart_edge[buffer]);
        masses.push_back(record.restart_mass[buffer]);
    }
    at::_foreach_mul_(edges, std::vector<Tensor>(edges.size(), live.to(edges[0].scalar_type())));
    at::_foreach_mul_(masses, std::vector<Tensor>(masses.size(), live.to(masses[0].scalar_type())));
}

// Joins what the runs gave to each row of q; fills the record's mass_in and older_o.
Carry fold(const Tables& tables, const std::vector<Carry>& carries, const Tensor& q, int64_t d_v, double mass_threshold,
           GroupRecord* record) {
    if (carries.size() == 1 && tables.runs[0].num_rows == q.size(1)) {
        if (record != nullptr) record->mass_in.resize(1), record->older_o.resize(1);
        return carries[0];
    }
    const auto options = q.options().dtype(ops::accumulation_type(q));
    const std::vector<int64_t> sizes{q.size(0), q.size(1), q.size(2), d_v};
    // The oldest run writes them.
    const bool all_rows = !tables.runs.empty() && tables.runs.back().num_rows == q.size(1);
    const Carry whole{all_rows ? at::empty(sizes, options) : at::zeros(sizes, options),
                      at::ones({q.size(0), q.size(2), q.size(1)}, options)};
    std::vector<Tensor> mass_in(carries.size());
    for (size_t i = 0; i < carries.size(); ++i) {
        const Tensor mass = rows_of(whole.mass, 2, tables.runs[i]);
        if (i > 0) {
            const Tensor live = mass_threshold > 0 ? mass.ge(mass_threshold) : mass.gt(0);  // not where it is NaN
            const Tensor ended = live.logical_not();
            mass_in[i] = mass.masked_fill(ended, 0);
            carries[i].o.masked_fill_(beside_rows(ended), 0);
            carries[i].mass.masked_fill_(ended, 1);
            if (record != nullptr) keep_rows(tables, i, live, *record);
        }
        mass.mul_(carries[i].mass);
    }
    if (record != nullptr) record->older_o.resize(carries.size());
    for (size_t i = carries.size(); i-- > 0;) {
        Tensor o = rows_of(whole.o, 1, tables.runs[i]);
        const bool oldest = i + 1 == carries.size();
        if (record != nullptr && !oldest) record->older_o[i] = o.clone();
        if (i == 0) {
            o.add_(carries[0].o);
        } else if (oldest) {
            at::mul_out(o, carries[i].o, beside_rows(mass_in[i]));
        } else {
            o.addcmul_(carries[i].o, beside_rows(mass_in[i]));
        }
    }
    if (record != nullptr) record->mass_in = std::move(mass_in);
    return whole;
}

}  // namespace

Attended attend_forward(Transport* transport, const RankPlan& plan, Comm comm, const Tensor& q, const Tensor& k,
                        const Tensor& v, const ops::BlockOptions& options, bool keep_record) {
    const Tables& tables = tables_of(plan, comm);
    const auto feed = make_feed(transport, plan, comm, plan::Pass::kForward, k, v, k.scalar_type());
    // Where all keys come as one block, what it gives is the result; else it is a part, which takes full precision.
    const auto o_type = tables.segments.size() == 1 ? q.scalar_type() : ops::accumulation_type(q);
    Attended result;
    std::vector<Tensor> o, mass;
    for (int group = 0; group < feed->num_groups(); ++group) {
        const Tensor q_group = query_heads(q, 2, feed->heads(group), q.size(2) / k.size(2));
        GroupRecord record{
            std::vector<Tensor>(tables.segments.size()), std::vector<Tensor>(tables.segments.size()), {}, {}};
        std::vector<Carry> carries(tables.runs.size());
        for (int step = 0; step < feed->num_steps(); ++step) {
            for (const KeyBlock& block : feed->take()) {
                if (!tables.segments[block.buffer].defined()) continue;
                const int run = tables.run_of[block.buffer];
                Carry& carry = carries[run];
                const ops::BlockOutput out =
                    ops::block_forward(rows_of(q_group, 1, tables.runs[run]), block.k, block.v,
                                       tables.segments[block.buffer], if_defined(carry.mass), options, o_type);
                record.restart_edge[block.buffer] = out.restart_edge;
                record.restart_mass[block.buffer] = out.restart_mass;
                carry = {carry.o.defined() ? carry.o.add_(out.o) : out.o, out.mass};
            }
        }
        const Carry whole =
            fold(tables, carries, q_group, v.size(3), options.mass_threshold, keep_record ? &record : nullptr);
        o.push_back(whole.o.to(q.scalar_type()));
        mass.push_back(whole.mass);
        if (keep_record) result.record.push_back(std::move(record));
    }
    result.o = o.size() == 1 ? o[0] : at::cat(o, 2);
    result.mass = mass.size() == 1 ? mass[0] : at::cat(mass, 1);
    return result;
}

Gradients attend_backward(Transport* transport, const RankPlan& plan, Comm comm, const Tensor& d_o,
                          const Tensor& d_mass, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mass,
                          const std::vector<GroupRecord>& record, const ops::BlockOptions& options,
                          at::ScalarType type) {
    const Tables& tables = tables_of(plan, comm);
    // A single block's gradients are the result, which kernels may write in its type; else they add up.
    const bool written = comm == Comm::kHere && type == q.scalar_type() && ops::narrow_gradients(q, v, options) &&
                         tables.segments[0].defined();
    const auto own_type = written ? type : ops::accumulation_type(q);
    const auto feed = make_feed(transport, plan, comm, plan::Pass::kBackward, k, v, own_type);
    const int64_t heads_per_kv_head = q.size(2) / k.size(2);
    const auto dq_options = q.options().dtype(own_type);
    const Tensor dq = written ? at::empty(q.sizes(), dq_options) : at::zeros(q.sizes(), dq_options);
    const Tensor oldest_prefix = d_mass.defined() ? mass * d_mass : at::zeros_like(mass);
    for (int group = 0; group < feed->num_groups(); ++group) {
        const HeadRange heads = feed->heads(group);
        const GroupRecord& kept = record[group];
        const auto rows = [&](const Tensor& x, const plan::Run& run) {
            return rows_of(query_heads(x, 2, heads, heads_per_kv_head), 1, run);
        };
        std::vector<Tensor> prefix;  // by run
        for (size_t i = 0; i < tables.runs.size(); ++i) {
            prefix.push_back(rows_of(query_heads(oldest_prefix, 1, heads, heads_per_kv_head), 2, tables.runs[i]));
            if (!kept.older_o[i].defined()) continue;
            const Tensor of_older = (rows(d_o, tables.runs[i]) * kept.older_o[i]).sum(-1).transpose(1, 2);
            prefix[i] = nan_as_zero(prefix[i] + of_older);  // what is newer than a NaN's tile stays clean
        }
        for (int step = 0; step < feed->num_steps(); ++step) {
            const std::vector<KeyBlock> blocks = feed->take();
            for (size_t i = 0; i < blocks.size(); ++i) {
                const int buffer = blocks[i].buffer, run = tables.run_of[buffer];
                if (!tables.segments[buffer].defined()) continue;
                const KeyGradients gradients = feed->gradients(i);
                prefix[run] = ops::block_backward(rows(d_o, tables.runs[run]), rows(q, tables.runs[run]), blocks[i].k,
                                                  blocks[i].v, tables.segments[buffer], kept.restart_edge[buffer],
                                                  kept.restart_mass[buffer], if_defined(kept.mass_in[run]), prefix[run],
                                                  options, {rows(dq, tables.runs[run]), gradients.dk, gradients.dv});
            }
            feed->give();
        }
    }
    const KeyGradients own = feed->home();
    return {dq.to(type), own.dk.to(type), own.dv.to(type)};
}

std::vector<Tensor> flatten(const std::vector<GroupRecord>& record) {
    std::vector<Tensor> tensors;
    for (const GroupRecord& group : record) {
        for (const auto* part : {&group.restart_edge, &group.restart_mass, &group.mass_in, &group.older_o}) {
            tensors.insert(tensors.end(), part->begin(), part->end());
        }
    }
    return tensors;
}

std::vector<GroupRecord> unflatten(const RankPlan& plan, Comm comm, const std::vector<Tensor>& tensors) {
    const Tables& tables = tables_of(plan, comm);
    std::vector<GroupRecord> record;
    for (auto at = tensors.begin(); at != tensors.end();) {
        const auto take = [&at](size_t count) {
            at += static_cast<std::ptrdiff_t>(count);
            return std::vector<Tensor>(at - static_cast<std::ptrdiff_t>(count), at);
        };
        GroupRecord group;
        group.restart_edge = take(tables.segments.size());
        group.restart_mass = take(tables.segments.size());
        group.mass_in = take(tables.runs.size());
        group.older_o = take(tables.runs.size());
        record.push_back(std::move(group));
    }
    return record;
}

}  // namespace megatron_sb::distributed
