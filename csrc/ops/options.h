// The options of an attention call, from the schema to the kernels. A new option needs
//   1. a field of AttentionOptions (megatron_sb/attention.h) and its argument in the schemas (library.cpp);
//   2. a line in each of the two functions on AttentionOptions below;
//   3. if kernels read it: a field of Options (core/params.h), its argument in the schemas of the block operators, a
//      line in each of the functions on BlockOptions below, and the kernels.
// In context parallelism, agreed_fields() (distributed/attention.cpp) also compares it between the ranks.
#pragma once

#include <algorithm>

#include "core/params.h"
#include "megatron_sb/attention.h"
#include "ops/arguments.h"

namespace megatron_sb::ops {

// What a block operator is called with: the options of the kernels, and whether q and k have bias columns.
struct BlockOptions : Options {
    bool bias_columns = false;
};

AttentionOptions read_attention_options(const Arguments& arguments);
// The same without the tensors that belong to keys. With a cache they are in the stored keys, and the arguments
// key_bias and forget_gate are bools.
AttentionOptions read_query_options(const Arguments& arguments);
NamedArguments named(const AttentionOptions& options);

BlockOptions read_block_options(const Arguments& arguments);
NamedArguments named(const BlockOptions& options);

// Whether the queries and keys of a call have bias columns (core/params.h).
inline bool has_bias_columns(const AttentionOptions& options) {
    return options.euclidean || options.query_bias.has_value() || options.key_bias.has_value();
}

// Returns the options of the block contract for queries q (.., d), and checks their values.
BlockOptions block_options(const AttentionOptions& options, const at::Tensor& q);

// Returns the options of a call for the heads from head `first` on: their reach depends on the head. In a block call
// any step is possible, and rounding must not take the reach beyond its bounds.
inline BlockOptions from_head(BlockOptions options, int64_t first) {
    options.reach = std::clamp(options.reach + double(first) * options.reach_step, kMinReach, kMaxReach);
    return options;
}

// Converts options to one value, which autograd can save for the backward, and back.
c10::IValue saved(const BlockOptions& options);
BlockOptions restored_options(const c10::IValue& value);

}  // namespace megatron_sb::ops
