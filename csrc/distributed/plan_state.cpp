#include "distributed/plan_state.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/error.h"
#include "distributed/c10d_transport.h"

namespace megatron_sb {
namespace {

using distributed::Field;
using distributed::Transport;
using CuSeqlens = std::optional<std::vector<int64_t>>;

// The arguments of a plan, equal on all ranks except for local_len.
struct PlanArguments {
    std::optional<int64_t> seq_len, local_len;
    CuSeqlens cu_seqlens;
    std::string layout, packing;
    bool equal_chunks;

    std::string seq_len_text() const {
        if (seq_len) return concat(*seq_len);
        return local_len ? "the sum of the local rows" : "that of cu_seqlens";
    }
};

// Describes the first difference between the lists of the ranks, which have equal lengths. Collective.
std::string first_difference(Transport& transport, const std::vector<int64_t>& cu_seqlens) {
    const c10::Device device = transport.control_device();
    const at::Tensor mine = distributed::index_tensor(cu_seqlens, device);
    at::Tensor all = at::empty({transport.size(), mine.numel()}, mine.options());
    transport.all_gather(mine, all)->wait();
    all = all.cpu();
    for (int64_t i = 0; i < mine.numel(); ++i) {
        for (int rank = 1; rank < transport.size(); ++rank) {
            const auto on_rank_0 = all[0][i].item<int64_t>(), on_rank = all[rank][i].item<int64_t>();
            if (on_rank == on_rank_0) continue;
            return concat("the ranks disagree on cu_seqlens of the plan: cu_seqlens[", i, "] is ", on_rank_0,
                          " on rank 0 and ", on_rank, " on rank ", rank);
        }
    }
    return "the ranks disagree on cu_seqlens of the plan";
}

// Returns the local_len of each rank, 0 if it is not given. Collective.
std::vector<int64_t> agree_on_plan(Transport& transport, const PlanArguments& plan, const std::string& error) {
    const std::vector<int64_t> bounds = plan.cu_seqlens.value_or(std::vector<int64_t>());
    const std::vector<Field> fields = {
        {"seq_len", plan.seq_len_text()},
        {"layout", plan.layout},
        {"packing", plan.cu_seqlens ? plan.packing : "no packing"},
        {"the length of cu_seqlens", concat(bounds.size())},
        {"cu_seqlens", concat(distributed::checksum(bounds))},
        {"equal_chunks", plan.equal_chunks ? "True" : "False"},
    };
    try {
        return agree(transport, "the plan", fields, error, plan.local_len.value_or(0));
    } catch (const distributed::Disagreement& disagreement) {
        if (disagreement.field() != "cu_seqlens") throw;
        throw InvalidArgument(first_difference(transport, bounds));
    }
}

// Returns the rows of the whole stream.
int64_t stream_rows(const PlanArguments& plan, const std::vector<int64_t>& local_lens) {
    if (plan.seq_len) return *plan.seq_len;
    if (plan.local_len) return plan::sum_of_rows("local_len", local_lens);
    if (!plan.cu_seqlens) throw InvalidArgument("seq_len must be given if cu_seqlens is not, got neither");
    return plan.cu_seqlens->empty() ? 0 : plan.cu_seqlens->back();
}

// Returns the error of an unknown layout or packing, or "".
std::string name_error(const PlanArguments& plan) {
    try {
        plan::parse_layout(plan.layout);
        plan::parse_packing(plan.packing);
    } catch (const InvalidArgument& error) {
        return error.what();
    }
    return "";
}

// Throws InvalidArgument if a rank has another number of rows than the layout gives it.
void check_local_lens(const std::vector<int64_t>& local_lens, const plan::Partition& partition) {
    const int rank = partition.rank_with_other_rows(local_lens);
    if (rank < 0) return;
    throw InvalidArgument(concat("local_len, or the rows of q in a call without a plan, must be ",
                                 partition.num_local_rows(rank), " on rank ", rank, ", as the ranks have ",
                                 partition.num_rows(), " rows together, got ", local_lens[rank]));
}

// Throws InvalidArgument if a document that is cut by itself, or the stream, does not divide into equal chunks.
void check_equal_chunks(const PlanArguments& plan, plan::Packing cut, const plan::Partition& partition) {
    const int chunks = partition.num_chunks();
    const auto pieces =
        concat(chunks, " equal chunks (layout '", plan.layout, "', ", partition.size(), " ranks), got ");
    const bool by_document = cut == plan::Packing::kPerDocument && partition.has_ring();
    for (size_t i = 1; by_document && plan.cu_seqlens && i < plan.cu_seqlens->size(); ++i) {
        const int64_t begin = plan.cu_seqlens->at(i - 1), end = plan.cu_seqlens->at(i);
        if ((end - begin) % chunks == 0) continue;
        throw InvalidArgument(concat("The length of document ", i - 1, " (cu_seqlens ", begin, " to ", end,
                                     ") must be a multiple of ", chunks,
                                     ", because the data loader cuts each document into ", pieces, end - begin));
    }
    if (partition.num_rows() % chunks == 0) return;
    throw InvalidArgument(concat("seq_len must be a multiple of ", chunks, ", because the data loader cuts it into ",
                                 pieces, partition.num_rows()));
}

}  // namespace

ContextParallelPlan::State::State(std::string group_name, std::shared_ptr<distributed::CallAgreement> agreement,
                                  int rank, plan::Partition partition, plan::Packing packing, bool packed,
                                  std::string documents)
    : group_name(std::move(group_name)),
      agreement(std::move(agreement)),
      rank(rank),
      partition(std::move(partition)),
      packing(packing),
      packed(packed),
      documents(std::move(documents)),
      key_rows_without_ring(this->partition.has_ring() ? std::nullopt : plan::count_if_few(this->partition)) {}

std::shared_ptr<const distributed::RankPlan> ContextParallelPlan::State::rank_plan(c10::Device device,
                                                                                   int num_exchanging) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Tables& tables = tables_[{device.str(), num_exchanging}];
    const bool has_streams = !device.is_cpu();
    const c10::impl::VirtualGuardImpl streams(device.type());
    if (!tables.plan) {
        tables.plan = std::make_shared<const distributed::RankPlan>(
            distributed::make_rank_plan(partition, rank, device, num_exchanging));
        // A wait of the host, not an event: a stream that is captured in a CUDA graph cannot wait for an event from
        // outside the capture.
        if (has_streams) streams.getStream(device).synchronize();
    }
    if (has_streams && tables.streams.insert(streams.getStream(device)).second) {
        for (const at::Tensor& table : tables.plan->tensors()) table.record_stream(streams.getStream(device));
    }
    return tables.plan;
}

ContextParallelPlan::ContextParallelPlan(const std::string& group_name, std::optional<int64_t> seq_len,
                                         CuSeqlens cu_seqlens, const std::string& layout, const std::string& packing,
                                         const std::string& argument_error, std::optional<int64_t> local_len,
                                         bool equal_chunks) {
    const std::unique_ptr<Transport> transport = distributed::c10d_transport(group_name);
    const PlanArguments arguments{seq_len, local_len, std::move(cu_seqlens), layout, packing, equal_chunks};
    const std::string error = argument_error.empty() ? name_error(arguments) : argument_error;
    const std::vector<int64_t> local_lens = agree_on_plan(*transport, arguments, error);
    // Its first call for a group is a collective too, of another size than that of unshard_sequence, which another rank
    // may call in place of making a plan. So it comes second.
    auto agreement = distributed::CallAgreement::of_group(group_name);
    // The ranks agree on everything from here on, so an error is raised on every rank.
    const plan::Packing cut = plan::parse_packing(packing);
    plan::Partition partition(plan::parse_layout(layout), cut, transport->size(), stream_rows(arguments, local_lens),
                              arguments.cu_seqlens);
    if (!seq_len && local_len) check_local_lens(local_lens, partition);
    if (equal_chunks) check_equal_chunks(arguments, cut, partition);
    state_ = std::make_unique<State>(group_name, std::move(agreement), transport->rank(), std::move(partition), cut,
                                     arguments.cu_seqlens.has_value(), distributed::summary(arguments.cu_seqlens));
}

ContextParallelPlan::~ContextParallelPlan() = default;

const std::string& ContextParallelPlan::group_name() const {
    return state_->group_name;
}
int64_t ContextParallelPlan::rank() const {
    return state_->rank;
}
int64_t ContextParallelPlan::size() const {
    return state_->partition.size();
}
int64_t ContextParallelPlan::seq_len() const {
    return state_->partition.num_rows();
}
int64_t ContextParallelPlan::local_len() const {
    return state_->partition.num_local_rows(state_->rank);
}
int64_t ContextParallelPlan::key_rows() const {
    if (!plan::count_if_few(state_->partition)) return seq_len();
    const plan::KeyRows rows = plan::key_rows(state_->partition, state_->rank);
    int64_t num_rows = 0;
    for (const Segment& document : rows.own) num_rows += document.k_len;
    for (const plan::Piece& piece : rows.pieces) num_rows += piece.length;
    return num_rows;
}
int64_t ContextParallelPlan::key_rows_p2p() const {
    const plan::Partition& partition = state_->partition;
    const auto counts = plan::count_if_few(partition);
    const bool fit = counts && counts->fit_in_ring(partition);
    return fit || !partition.has_ring() ? key_rows() : seq_len();
}
bool ContextParallelPlan::packed() const {
    return state_->packed;
}
std::string ContextParallelPlan::layout() const {
    return plan::name_of(state_->partition.layout());
}
std::string ContextParallelPlan::packing() const {
    return plan::name_of(state_->packing);
}

}  // namespace megatron_sb
