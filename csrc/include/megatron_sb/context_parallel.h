// Stick-breaking attention over a sequence that is split over a process group, for C++ programs, without Python.
//
// A stream of seq_len rows, one document or several packed ones, is split over the ranks of a group (`layout`,
// `packing`). Each rank passes its local rows of q, k and v and receives its local rows of the output.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "megatron_sb/attention.h"

namespace megatron_sb {

// The work of a batch that needs the host: checks lengths, checks that the ranks agree, makes tables of segments. Make
// one plan for each batch; all layers and both directions share it.
class ContextParallelPlan : public torch::CustomClassHolder {
  public:
    // Collective over the group that is registered under `group_name` in torch.distributed.
    // - seq_len: rows of the whole stream; default cu_seqlens.back().
    // - cu_seqlens: the start of each packed document and the end of the last, the same on all ranks; nullopt: one
    //   document.
    // - layout: "zigzag" or "contiguous". packing: "per_document" or "whole_stream".
    // - argument_error: if not empty, every rank throws it. For a caller that has found an invalid argument itself.
    // Throws InvalidArgument (std::invalid_argument) on every rank if a length does not divide or the ranks disagree.
    ContextParallelPlan(const std::string& group_name, std::optional<int64_t> seq_len,
                        std::optional<std::vector<int64_t>> cu_seqlens, const std::string& layout = "zigzag",
                        const std::string& packing = "per_document", const std::string& argument_error = "");
    ~ContextParallelPlan() override;

    const std::string& group_name() const;
    int64_t rank() const;
    int64_t size() const;
    int64_t seq_len() const;
    int64_t local_len() const;  // rows of each rank: seq_len / size
    bool packed() const;
    std::string layout() const;
    std::string packing() const;

    class State;
    State& state() const { return *state_; }

  private:
    std::unique_ptr<State> state_;
};

struct ContextParallelOptions : AttentionOptions {
    // - "p2p": keys move around the ring.
    // - "all_gather": keys are gathered, one group of heads at a time.
    // - "a2a": ranks exchange heads for rows.
    // - "a2a+p2p": a2a in the first of `hierarchical_groups` and p2p in the second.
    // - "auto": a2a if the heads can be exchanged and heads times rows of a rank's share is at least 32768; else
    //   all_gather if at most 1 GiB of gathered keys and values is allocated at a time; else p2p.
    std::string comm = "auto";
    // For "a2a+p2p": the names of this rank's a2a group and p2p group. The rank in the plan's group must be
    // p2p rank * size of the a2a group + a2a rank.
    std::pair<std::string, std::string> hierarchical_groups = {};
    // If false, no mass is sent, and an empty tensor is returned in its place.
    bool return_mass = true;
};

// Every rank of the group makes this call.
//
// Takes local shards q (b, s_local, h, d), k (b, s_local, h_kv, d), v (b, s_local, h_kv, d_v); with a packed plan
// (t_local, heads, head_dim). Returns o (b, s_local, h, d_v) or (t_local, h, d_v) in q's dtype and mass (b, h, s_local)
// or (h, t_local) in fp32 (fp64 for fp64). Both are differentiable once. Rows of no document get o = 0, mass = 1 and
// zero gradients.
//
// The first call with new shapes or options checks that the ranks agree on them. Throws c10::ValueError, c10::TypeError
// or InvalidArgument for an invalid argument: on every rank in the first call of a plan, later only on the rank with
// the invalid argument. Throws RuntimeFailure (std::runtime_error) within the timeout of the group if a peer is lost or
// has thrown alone.
std::tuple<at::Tensor, at::Tensor> context_parallel_attention(const at::Tensor& q, const at::Tensor& k,
                                                              const at::Tensor& v,
                                                              const c10::intrusive_ptr<ContextParallelPlan>& plan,
                                                              const ContextParallelOptions& options = {});

// Returns this rank's rows of x. The backward gathers: every rank gets the gradient of the sum of all ranks' losses.
at::Tensor shard_sequence(const at::Tensor& x, const std::string& group_name, int64_t dim = 1,
                          const std::string& layout = "zigzag",
                          const std::optional<std::vector<int64_t>>& cu_seqlens = std::nullopt,
                          const std::string& packing = "per_document");

// Returns the rows of all ranks in the order of the stream. The backward sums over the ranks in fp32 (fp64 for fp64).
at::Tensor unshard_sequence(const at::Tensor& x_local, const std::string& group_name, int64_t dim = 1,
                            const std::string& layout = "zigzag",
                            const std::optional<std::vector<int64_t>>& cu_seqlens = std::nullopt,
                            const std::string& packing = "per_document");

}  // namespace megatron_sb
