// Stick-breaking attention with the sequence spread over a process group; for C++ users, no Python needed.
//
// A stream of seq_len rows, one document or several packed ones, is cut over the ranks of a group (`layout`,
// `packing`); each rank brings its local rows of q, k and v and gets its local rows of the output.
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

// All that needs the host, made once a batch and shared by all layers and both directions: lengths checked, the ranks
// agreed, tables of segments.
class ContextParallelPlan : public torch::CustomClassHolder {
  public:
    // Collective over the group that is registered under `group_name` in torch.distributed. cu_seqlens: where each
    // packed document starts and the end of the last, the same on all ranks; none: one document. seq_len: rows of the
    // whole stream, default cu_seqlens.back(). layout "zigzag" | "contiguous", packing "per_document" | "whole_stream".
    // Throws InvalidArgument (std::invalid_argument) on every rank for lengths that do not divide and for ranks that
    // disagree, with the words of the rank that found it. argument_error: what the caller of this rank found wrong
    // before; then every rank throws.
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
    // "p2p": keys move around the ring. "all_gather": keys are gathered, a group of heads at a time. "a2a": heads are
    // exchanged for rows. "a2a+p2p": that within the first of `hierarchical_groups`, and a ring over the second.
    // "auto": a2a where the heads can be exchanged and a rank's share of them has 32768 rows or more (heads times
    // rows); else all_gather while the gathered keys and values that are alive at a time stay within 1 GiB; else p2p.
    std::string comm = "auto";
    // Names of this rank's a2a group and p2p group, for "a2a+p2p". Rank = rank in the p2p group * size of the a2a group
    // + rank in the a2a group.
    std::pair<std::string, std::string> hierarchical_groups = {};
    // Without it no mass is sent, and an empty tensor returned in its place.
    bool return_mass = true;
};

// Local shards: q (b, s_local, h, d), k (b, s_local, h_kv, d), v (b, s_local, h_kv, d_v), or (t_local, heads, head_dim)
// where the plan is packed. Returns o (b, s_local, h, d_v) or (t_local, h, d_v) in q's dtype and mass (b, h, s_local)
// or (h, t_local) in fp32 (fp64 for fp64); both differentiable, once. Rows of no document: o = 0, mass = 1, gradients
// 0. Every rank of the group calls it. The first call with new shapes makes sure that the ranks agree on them. Throws
// c10::ValueError, c10::TypeError and InvalidArgument for bad input, of any rank on every rank until a call of the plan
// has been agreed on, from then on on the rank that has it; RuntimeFailure (std::runtime_error) for a lost peer, or one
// that has thrown alone, within the group's time-out.
std::tuple<at::Tensor, at::Tensor> context_parallel_attention(const at::Tensor& q, const at::Tensor& k,
                                                              const at::Tensor& v,
                                                              const c10::intrusive_ptr<ContextParallelPlan>& plan,
                                                              const ContextParallelOptions& options = {});

// The rows of x that this rank holds. Its backward gathers: every rank gets the gradient of the sum of all ranks'
// losses.
at::Tensor shard_sequence(const at::Tensor& x, const std::string& group_name, int64_t dim = 1,
                          const std::string& layout = "zigzag",
                          const std::optional<std::vector<int64_t>>& cu_seqlens = std::nullopt,
                          const std::string& packing = "per_document");

// The whole of what the ranks hold. Its backward sums over the ranks, in fp32 (fp64): the adjoint.
at::Tensor unshard_sequence(const at::Tensor& x_local, const std::string& group_name, int64_t dim = 1,
                            const std::string& layout = "zigzag",
                            const std::optional<std::vector<int64_t>>& cu_seqlens = std::nullopt,
                            const std::string& packing = "per_document");

}  // namespace megatron_sb
