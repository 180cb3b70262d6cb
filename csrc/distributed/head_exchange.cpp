#include "distributed/head_exchange.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <numeric>

#include "core/error.h"
#include "distributed/row_messages.h"

namespace megatron_sb::distributed {
namespace {

// Returns x (b, rows, heads, width) as (b, rows, ranks, heads of a rank, width).
at::Tensor by_rank(const at::Tensor& x, int64_t ranks) {
    const int64_t heads = x.size(2);
    return (heads % ranks == 0 ? x : x.repeat_interleave(ranks / heads, 2)).unflatten(2, {ranks, -1});
}

// Returns x as elements of 16 bytes, which copy fastest.
at::Tensor as_16_bytes(const at::Tensor& x) {
    return x.view(at::kComplexDouble);
}

// Concatenates tensors (.., heads, width) of any dtypes into one contiguous tensor (.., words of four bytes).
at::Tensor pack(const std::vector<at::Tensor>& xs) {
    std::vector<at::Tensor> rows;
    for (const at::Tensor& x : xs) {
        const at::Tensor flat = x.flatten(-2);
        rows.push_back(divides_into(flat, 4) ? flat : flat.clone(at::MemoryFormat::Contiguous));
    }
    const bool wide = std::all_of(rows.begin(), rows.end(), [](const at::Tensor& x) { return divides_into(x, 16); });
    for (at::Tensor& x : rows) x = wide ? as_16_bytes(x) : x.view(at::kInt);
    return (rows.size() == 1 ? rows[0] : at::cat(rows, -1)).contiguous().view(at::kInt);
}

void copy_wide(const at::Tensor& to, const at::Tensor& from) {
    const bool wide = divides_into(to, 16) && divides_into(from, 16);
    wide ? as_16_bytes(to).copy_(as_16_bytes(from)) : to.copy_(from);
}

// What pack() forgets of a tensor (.., heads, width).
struct PartSizes {
    at::ScalarType dtype;
    int64_t heads, width;

    int64_t words() const { return heads * width * static_cast<int64_t>(at::elementSize(dtype)) / 4; }
};

std::vector<PartSizes> sizes_of(const std::vector<at::Tensor>& xs) {
    std::vector<PartSizes> sizes;
    for (const at::Tensor& x : xs) sizes.push_back({x.scalar_type(), x.size(-2), x.size(-1)});
    return sizes;
}

// Splits x (.., words), packed from tensors of these sizes, into views (.., heads, width).
std::vector<at::Tensor> unpack(const at::Tensor& x, const std::vector<PartSizes>& sizes) {
    std::vector<at::Tensor> parts;
    int64_t begin = 0;
    for (const PartSizes& part : sizes) {
        parts.push_back(x.narrow(-1, begin, part.words()).view(part.dtype).unflatten(-1, {part.heads, part.width}));
        begin += part.words();
    }
    return parts;
}

}  // namespace

void write_heads(const at::Tensor& x, const at::Tensor& by_rank) {
    const int64_t ranks = by_rank.size(2), heads = x.size(2);
    if (heads % ranks == 0) {
        copy_wide(x.unflatten(2, {ranks, -1}), by_rank);
    } else {
        x.copy_(by_rank.select(3, 0).unflatten(2, {heads, -1}).sum(3));
    }
}

HeadExchange::HeadExchange(Transport& transport, const RankPlan& plan, int64_t num_heads, int64_t num_kv_heads)
    : transport_(transport),
      plan_(plan),
      num_kv_heads_(num_kv_heads),
      num_local_rows_(plan.exchanged_rows[transport.rank()]),
      num_joint_rows_(std::accumulate(plan.exchanged_rows.begin(), plan.exchanged_rows.end(), int64_t{0})) {
    const std::string found = problem(num_heads, num_kv_heads, transport.size());
    if (!found.empty()) throw InvalidArgument(found);
}

std::string HeadExchange::problem(int64_t num_heads, int64_t num_kv_heads, int num_ranks) {
    const bool shared = num_kv_heads % num_ranks == 0, repeated = num_ranks % num_kv_heads == 0;
    if (num_heads % num_ranks == 0 && (shared || repeated)) return "";
    return concat("for heads to be exchanged between ", num_ranks,
                  " ranks, the number of heads of q must be a multiple of ", num_ranks,
                  " and that of k a multiple or a divisor of ", num_ranks, ", got ", num_heads, " and ", num_kv_heads);
}

std::vector<at::Tensor> HeadExchange::to_heads(const std::vector<at::Tensor>& xs) const {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& x : xs) parts.push_back(by_rank(x, transport_.size()).permute({2, 1, 0, 3, 4}));
    const std::vector<PartSizes> sizes = sizes_of(parts);
    at::Tensor input = pack(parts);  // (ranks, s_local, b, words)
    parts.clear();
    at::Tensor rows = at::empty({num_joint_rows_, input.size(2), input.size(3)}, input.options());
    if (sends_row_ranges()) {
        exchange(pieces_by_rank(input), pieces_of_joint(rows))->wait();
    } else {
        transport_.all_to_all(input.flatten(0, 1), local_rows_for_each(), rows, plan_.exchanged_rows)->wait();
        input.reset();  // its memory serves the sorted rows
        rows = select_rows(rows, 0, plan_.to_joint);
    }
    return unpack(rows.transpose(0, 1), sizes);
}

std::vector<at::Tensor> HeadExchange::to_rows(std::vector<at::Tensor> ys) const {
    const std::vector<PartSizes> sizes = sizes_of(ys);
    for (at::Tensor& y : ys) y = y.transpose(0, 1);
    at::Tensor rows = pack(ys);  // (joint rows, b, words)
    ys.clear();
    if (!sends_row_ranges()) rows = select_rows(rows, 0, plan_.from_joint);
    const int64_t ranks = transport_.size();
    const at::Tensor output = at::empty({ranks, num_local_rows_, rows.size(1), rows.size(2)}, rows.options());
    if (sends_row_ranges()) {
        exchange(pieces_of_joint(rows), pieces_by_rank(output))->wait();
    } else {
        transport_.all_to_all(rows, plan_.exchanged_rows, output.flatten(0, 1), local_rows_for_each())->wait();
    }
    std::vector<at::Tensor> received = unpack(output, sizes);  // each (ranks, s_local, b, heads, width)
    for (at::Tensor& x : received) x = x.permute({2, 1, 0, 3, 4});
    return received;
}

std::vector<Message> HeadExchange::pieces_by_rank(const at::Tensor& x) const {
    std::vector<Message> pieces;
    for (int rank = 0; rank < transport_.size(); ++rank) {
        add_row_messages(pieces, rank, plan_.row_ranges[transport_.rank()], &plan::RowRange::local, x[rank]);
    }
    return pieces;
}

std::vector<Message> HeadExchange::pieces_of_joint(const at::Tensor& x) const {
    std::vector<Message> pieces;
    for (int rank = 0; rank < transport_.size(); ++rank) {
        add_row_messages(pieces, rank, plan_.row_ranges[rank], &plan::RowRange::place, x);
    }
    return pieces;
}

std::unique_ptr<Pending> HeadExchange::exchange(const std::vector<Message>& from,
                                                const std::vector<Message>& to) const {
    const auto own = [this](const Message& piece) { return piece.peer == transport_.rank(); };
    std::vector<Message> own_from, own_to, sends, receives;
    std::partition_copy(from.begin(), from.end(), std::back_inserter(own_from), std::back_inserter(sends), own);
    std::partition_copy(to.begin(), to.end(), std::back_inserter(own_to), std::back_inserter(receives), own);
    std::unique_ptr<Pending> pending = transport_.exchange(sends, receives);
    for (size_t i = 0; i < own_from.size(); ++i) copy_wide(own_to[i].tensor, own_from[i].tensor);
    return pending;
}

}  // namespace megatron_sb::distributed
