#include "distributed/head_exchange.h"

#include <ATen/ATen.h>

#include "core/error.h"

namespace megatron_sb::distributed {
namespace {

// x (b, rows, heads, width) as (b, rows, ranks, heads of each, width).
at::Tensor by_rank(const at::Tensor& x, int64_t ranks) {
    const int64_t heads = x.size(2);
    return (heads % ranks == 0 ? x : x.repeat_interleave(ranks / heads, 2)).unflatten(2, {ranks, -1});
}

// The part of dimension `dim` that belongs to a group.
at::Tensor part_of(const at::Tensor& x, int64_t dim, int group, int num_groups) {
    const int64_t count = x.size(dim) / num_groups;
    return x.narrow(dim, count * group, count);
}

// x (.., heads, width) as (.., words): tensors of any dtypes side by side.
at::Tensor as_words(const at::Tensor& x) {
    const at::Tensor flat = x.flatten(-2);
    return (divides_into(flat, 4) ? flat : flat.clone(at::MemoryFormat::Contiguous)).view(at::kInt);
}

}  // namespace

HeadExchange::HeadExchange(Transport& transport, const RankPlan& plan, int64_t num_heads, int64_t num_kv_heads)
    : transport_(transport), plan_(plan), num_kv_heads_(num_kv_heads) {
    const std::string why_not = refusal(num_heads, num_kv_heads, transport.size());
    if (!why_not.empty()) throw InvalidArgument(why_not);
    if (plan.to_joint.numel() < plan.rows_to_split_heads) return;
    const int64_t share = std::max<int64_t>(1, num_kv_heads / transport.size());
    for (int groups = 2; groups <= kMaxHeadGroups; ++groups) {
        if (share % groups == 0) num_groups_ = groups;
    }
}

std::string HeadExchange::refusal(int64_t num_heads, int64_t num_kv_heads, int num_ranks) {
    const bool shared = num_kv_heads % num_ranks == 0, repeated = num_ranks % num_kv_heads == 0;
    if (num_heads % num_ranks == 0 && (shared || repeated)) return "";
    return concat("q has ", num_heads, " heads and k has ", num_kv_heads, ", to be exchanged between ", num_ranks,
                  " ranks: q's must be a multiple of the ranks, and k's a multiple or a divisor");
}

std::vector<at::Tensor> HeadExchange::Delivery::arrive() {
    pending_->wait();
    at::Tensor rows = output_;
    if (order_.defined()) rows = select_rows(rows.flatten(0, 1), 0, order_).transpose(0, 1);
    std::vector<at::Tensor> arrived;
    int64_t at = 0;
    for (const Part& part : parts_) {
        const auto words = part.heads * part.width * static_cast<int64_t>(at::elementSize(part.type)) / 4;
        const at::Tensor one = rows.narrow(-1, at, words).view(part.type);
        arrived.push_back(one.unflatten(-1, {part.heads, part.width}));
        at += words;
    }
    return arrived;
}

HeadExchange::Delivery HeadExchange::to_heads(const std::vector<at::Tensor>& xs, int group) {
    Delivery delivery;
    std::vector<at::Tensor> words;
    for (const at::Tensor& x : xs) {
        const at::Tensor part = part_of(by_rank(x, transport_.size()), 3, group, num_groups_);
        delivery.parts_.push_back({x.scalar_type(), part.size(3), part.size(4)});
        words.push_back(as_words(part.permute({2, 1, 0, 3, 4})));
    }
    const at::Tensor input = at::cat(words, 3).contiguous();
    delivery.order_ = plan_.to_joint;
    delivery.output_ = at::empty_like(input);
    delivery.pending_ = transport_.all_to_all(input, delivery.output_);
    return delivery;
}

HeadExchange::Delivery HeadExchange::to_rows(const std::vector<at::Tensor>& ys) {
    Delivery delivery;
    std::vector<at::Tensor> words;
    for (const at::Tensor& y : ys) {
        delivery.parts_.push_back({y.scalar_type(), y.size(2), y.size(3)});
        words.push_back(as_words(y.transpose(0, 1)));
    }
    const at::Tensor rows = words.size() == 1 ? words[0] : at::cat(words, 2);
    const at::Tensor input = select_rows(rows, 0, plan_.from_joint).unflatten(0, {transport_.size(), -1});
    delivery.output_ = at::empty_like(input);
    delivery.pending_ = transport_.all_to_all(input, delivery.output_);
    return delivery;
}

void HeadExchange::put(const at::Tensor& x, const at::Tensor& arrived, int group) const {
    const at::Tensor by_head = arrived.permute({2, 1, 0, 3, 4});  // (b, s_local, ranks, heads, width)
    const int64_t ranks = transport_.size(), heads = x.size(2);
    if (heads % ranks == 0) {
        part_of(x.unflatten(2, {ranks, -1}), 3, group, num_groups_).copy_(by_head);
    } else {
        x.copy_(by_head.select(3, 0).unflatten(2, {heads, -1}).sum(3));
    }
}

}  // namespace megatron_sb::distributed
