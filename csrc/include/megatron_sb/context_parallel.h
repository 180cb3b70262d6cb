// Stick-breaking attention over a sequence that is split over a process group, for C++ programs, without Python.
//
//   const auto plan = c10::make_intrusive<megatron_sb::ContextParallelPlan>(group_name, seq_len, std::nullopt);
//   const auto [o, mass] = megatron_sb::context_parallel_attention(q, k, v, plan);
//
// A stream of seq_len rows is one sequence or several packed documents. `layout` and `packing` determine how it is
// split over the ranks of the group. Each rank passes its local rows of q, k and v and receives its local rows of the
// output.
//
// Groups are passed by the name under which torch.distributed has registered them; an unknown name throws c10::Error. A
// collective function must be called by every rank of the group. It throws std::runtime_error within the timeout of the
// group if a peer is lost.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "megatron_sb/attention.h"

namespace megatron_sb {

// The work of a batch that needs the host: it checks lengths, checks that the ranks agree, and makes tables of
// segments. Make one plan for each batch. All layers share it, in the forward and in the backward.
class ContextParallelPlan : public torch::CustomClassHolder {
  public:
    // Collective.
    //
    // - seq_len: rows of the whole stream, of any number. Default: cu_seqlens.back(); required without cu_seqlens.
    // - cu_seqlens: the start of each packed document and the end of the last one, equal on all ranks. Default: each
    //   batch element is one sequence.
    // - layout: "zigzag" splits a length into 2 * ranks chunks, "contiguous" into as many chunks as ranks. "balanced"
    //   splits the stream at any row, so that ranks have nearly equal work. In every layout the rows of two ranks
    //   differ by at most one.
    // - packing: "per_document" splits each document, "whole_stream" the stream as a whole. Not used with layout
    //   "balanced".
    // - argument_error: if not empty on some rank, every rank throws std::invalid_argument with this text. A caller
    //   that finds an invalid argument on its rank passes the message here, so that the other ranks do not wait for
    //   this rank.
    // - local_len: rows of this rank. If it is given and seq_len is not, seq_len is the sum over the ranks.
    // - equal_chunks: if true, a length that does not divide into equal chunks is invalid: that of the stream, and with
    //   "per_document" that of each document.
    //
    // Throws std::invalid_argument on every rank if an argument is invalid on any rank or if the ranks disagree.
    ContextParallelPlan(const std::string& group_name, std::optional<int64_t> seq_len,
                        std::optional<std::vector<int64_t>> cu_seqlens, const std::string& layout = "zigzag",
                        const std::string& packing = "per_document", const std::string& argument_error = "",
                        std::optional<int64_t> local_len = std::nullopt, bool equal_chunks = false);
    ~ContextParallelPlan() override;

    const std::string& group_name() const;
    int64_t rank() const;       // of this process in the group
    int64_t size() const;       // ranks of the group
    int64_t seq_len() const;    // rows of the whole stream
    int64_t local_len() const;  // rows of this rank: seq_len / size, on some ranks one more
    int64_t key_rows() const;   // rows of keys that this rank has with all_gather, its own among them
    // The same with p2p: seq_len if chunks of keys move around the ring.
    int64_t key_rows_p2p() const;
    bool packed() const;  // whether the plan has cu_seqlens
    std::string layout() const;
    std::string packing() const;

    // For the library itself.
    class State;
    State& state() const { return *state_; }

  private:
    std::unique_ptr<State> state_;
};

struct ContextParallelOptions : AttentionOptions {
    // - "p2p": keys move around the ring. If each rank needs few keys, only these are sent, directly.
    // - "all_gather": each rank gathers the keys of all ranks, one group of heads at a time.
    // - "a2a": ranks exchange heads for rows, so that each rank has all rows of its share of the heads. With n ranks,
    //   h must be a multiple of n, and h_kv a multiple or a divisor of n.
    // - "a2a+p2p": a2a in the first of `hierarchical_groups` and p2p in the second.
    // - "auto": all_gather if the layout is balanced and each rank needs so few keys that it receives at most 9/8 of
    //   what it would receive with a2a; else a2a if the heads can be exchanged and heads times rows of a rank's share
    //   is at least 32768; else all_gather if at most 1 GiB of gathered keys and values is allocated at a time, or if
    //   the layout is balanced; else p2p.
    // With the layout "balanced" there is no ring, and "p2p" does the same as "all_gather".
    std::string comm = "auto";
    // For "a2a+p2p": the names of this rank's a2a group and p2p group. The rank in the plan's group must be
    // p2p rank * size of the a2a group + a2a rank.
    std::pair<std::string, std::string> hierarchical_groups = {};
    // If false, no mass is sent, and the returned mass has no elements.
    bool return_mass = true;
};

// Computes the attention of the whole stream. Collective, and so is its backward.
//
// - q (b, s_local, h, d), k (b, s_local, h_kv, d), v (b, s_local, h_kv, d_v) with s_local = plan->local_len(). With a
//   packed plan q (t_local, h, d), k (t_local, h_kv, d), v (t_local, h_kv, d_v) with t_local = plan->local_len().
//   Dtypes and limits as in stickbreaking_attention.
// - options.forget_gate and options.key_bias: of the local keys, (b, s_local, h_kv) or (t_local, h_kv).
// - options.query_bias: of the local queries, (b, s_local, h) or (t_local, h).
//
// Returns (o, mass): o (b, s_local, h, d_v) or (t_local, h, d_v) in q's dtype; mass (b, h, s_local) or (h, t_local) in
// fp32 (fp64 if q is fp64). Both can be differentiated once. Rows of no document get o = 0, mass = 1 and zero
// gradients.
//
// The first call of a group with new shapes or options checks that the ranks agree on them. Throws c10::TypeError or
// c10::ValueError if an argument is invalid or the ranks disagree. Ranks for which the call is new throw at once. A
// rank for which it is known waits for data: on a CPU, it throws after the timeout of the group.
std::tuple<at::Tensor, at::Tensor> context_parallel_attention(const at::Tensor& q, const at::Tensor& k,
                                                              const at::Tensor& v,
                                                              const c10::intrusive_ptr<ContextParallelPlan>& plan,
                                                              const ContextParallelOptions& options = {});

// Returns this rank's rows of x (.., seq_len, ..), of shape (.., local rows, ..). `dim` is the dimension of the
// rows; x can have any dtype. `layout`, `cu_seqlens` and `packing` are those of ContextParallelPlan.
//
// The forward sends nothing. The backward is collective: it gathers the gradients of all ranks, so every rank gets the
// gradient of the sum of all ranks' losses.
//
// Throws c10::ValueError if x has no dimension `dim` or no rows there, c10::TypeError if x holds no elements (a
// FakeTensor), and std::invalid_argument for other invalid arguments.
at::Tensor shard_sequence(const at::Tensor& x, const std::string& group_name, int64_t dim = 1,
                          const std::string& layout = "zigzag",
                          const std::optional<std::vector<int64_t>>& cu_seqlens = std::nullopt,
                          const std::string& packing = "per_document");

// Returns the rows of all ranks in the order of the stream: (.., seq_len, ..) from x (.., local rows, ..).
// The arguments are those of shard_sequence. Collective, and so is its backward, which sums the gradients of all ranks
// in fp32 (fp64 if x is fp64).
//
// Throws std::invalid_argument on every rank if an argument is invalid on any rank or if the ranks disagree.
at::Tensor unshard_sequence(const at::Tensor& x, const std::string& group_name, int64_t dim = 1,
                            const std::string& layout = "zigzag",
                            const std::optional<std::vector<int64_t>>& cu_seqlens = std::nullopt,
                            const std::string& packing = "per_document");

}  // namespace megatron_sb
