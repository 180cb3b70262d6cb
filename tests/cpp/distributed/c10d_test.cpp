// Tests of the public C++ interface to context parallelism, on process groups of c10d and without Python. Ranks are
// threads. Each rank registers its process group under its own name, because the registry is shared by the process.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "core/error.h"
#include "megatron_sb/context_parallel.h"
#include "messages.h"
#include "ranks.h"

namespace megatron_sb::distributed {
namespace {

using at::Tensor;

// A c10d backend over the in-process transport.
class ThreadWork final : public c10d::Work {
  public:
    explicit ThreadWork(std::shared_ptr<Pending> pending) : pending_(std::move(pending)) {}
    bool wait(std::chrono::milliseconds) override {
        pending_->wait();
        return true;
    }

  private:
    std::shared_ptr<Pending> pending_;
};

class ThreadBackend final : public c10d::Backend {
  public:
    explicit ThreadBackend(Transport& transport) : Backend(transport.rank(), transport.size()), transport_(transport) {}

    const std::string getBackendName() const override { return "threads"; }

    c10::intrusive_ptr<c10d::Work> send(std::vector<Tensor>& tensors, int to, int) override {
        return work(transport_.exchange({{to, tensors[0]}}, {}));
    }
    c10::intrusive_ptr<c10d::Work> recv(std::vector<Tensor>& tensors, int from, int) override {
        return work(transport_.exchange({}, {{from, tensors[0]}}));
    }
    c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& output, Tensor& input,
                                                   const c10d::AllgatherOptions&) override {
        return work(transport_.all_gather(input, output.unflatten(0, {getSize(), -1})));
    }
    c10::intrusive_ptr<c10d::Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_rows,
                                                 std::vector<int64_t>& input_rows,
                                                 const c10d::AllToAllOptions&) override {
        return work(
            transport_.all_to_all(input, rows_by_rank(input, input_rows), output, rows_by_rank(output, output_rows)));
    }
    c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                                        const c10d::ReduceScatterOptions&) override {
        return work(transport_.reduce_scatter_sum(input.unflatten(0, {getSize(), -1}), output));
    }

  private:
    // c10d passes no rows if all ranks have as many.
    std::vector<int64_t> rows_by_rank(const Tensor& x, const std::vector<int64_t>& rows) const {
        return rows.empty() ? std::vector<int64_t>(getSize(), x.size(0) / getSize()) : rows;
    }
    static c10::intrusive_ptr<c10d::Work> work(std::unique_ptr<Pending> pending) {
        return c10::make_intrusive<ThreadWork>(std::move(pending));
    }
    Transport& transport_;
};

// Runs `function` on every rank with the name of that rank's group.
void run_groups(int size, const std::function<void(const std::string&)>& function) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    run_ranks_or_throw(size, [&](Transport& transport) {
        const int rank = transport.rank();
        const std::string name = concat("cp_of_", size, "_rank_", rank);
        const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
        group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::CUSTOM,
                          c10::make_intrusive<ThreadBackend>(transport));
        c10d::register_process_group(name, group);
        function(name);
        c10d::unregister_process_group(name);
    });
}

TEST(ContextParallel, GivesTheResultsAndGradientsOfOneRank) {
    constexpr int64_t kRows = 47;
    const Tensor q = at::randn({2, kRows, 4, 8}, at::kDouble), k = at::randn({2, kRows, 2, 8}, at::kDouble);
    const Tensor v = at::randn({2, kRows, 2, 8}, at::kDouble);
    const AttentionOptions whole{std::nullopt, true, 0};
    std::vector<Tensor> leaves{q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()};
    const auto [o, mass] = stickbreaking_attention(leaves[0], leaves[1], leaves[2], whole);
    const std::vector<Tensor> expected = torch::autograd::grad({o.square().sum() + mass.sum()}, leaves);

    for (const std::string comm : {"p2p", "all_gather", "a2a", "auto"}) {
        run_groups(comm == "a2a" ? 2 : 3, [&, o = o](const std::string& group) {
            const auto plan = c10::make_intrusive<ContextParallelPlan>(group, kRows, std::nullopt);
            std::vector<Tensor> local;
            for (const Tensor& x : {q, k, v}) local.push_back(shard_sequence(x, group).requires_grad_());
            ContextParallelOptions options{whole, comm};
            const auto [o_local, mass_local] = context_parallel_attention(local[0], local[1], local[2], plan, options);
            const auto gradients = torch::autograd::grad({o_local.square().sum() + mass_local.sum()}, local);
            EXPECT_TRUE(at::allclose(unshard_sequence(o_local.detach(), group), o, 1e-10, 1e-12)) << comm;
            for (size_t i = 0; i < gradients.size(); ++i) {
                EXPECT_TRUE(at::allclose(unshard_sequence(gradients[i], group), expected[i], 1e-10, 1e-12))
                    << comm << ", gradient " << i;
            }
        });
    }
}

TEST(ContextParallel, InvalidCuSeqlensRaiseAnErrorOnEveryRank) {
    std::atomic<int> num_errors = 0;
    run_groups(2, [&](const std::string& group) {
        try {
            c10::make_intrusive<ContextParallelPlan>(group, std::nullopt, std::vector<int64_t>{0, 8, 5});
        } catch (const InvalidArgument& error) {
            EXPECT_TRUE(mentions(error.what(), "cu_seqlens decrease 8 5"));
            ++num_errors;
        }
    });
    EXPECT_EQ(num_errors, 2);
}

}  // namespace
}  // namespace megatron_sb::distributed
