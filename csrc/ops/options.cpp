#include "ops/options.h"

#include <algorithm>
#include <cmath>

#include "ops/check.h"

namespace megatron_sb::ops {
namespace {

using SavedOptions = std::tuple<double, double, bool, bool, double, double, bool>;
using OptionalNumbers = std::optional<std::vector<double>>;

// Sets the reach of the heads of q (.., heads, d). The reach of a head is a multiple of 2^-18, which is exact in fp32
// up to kMaxReach. So it has the same bits in a call with some of the heads. Also in megatron_sb/options.py.
void set_reach(BlockOptions& used, const OptionalNumbers& reach, const at::Tensor& q) {
    if (!reach.has_value()) return;
    const bool valid = reach->size() == 2 && std::all_of(reach->begin(), reach->end(), [](double a) {
                           return a >= kMinReach && a <= kMaxReach;  // not NaN
                       });
    TORCH_CHECK_VALUE(valid, "reach must be two numbers, of the first and the last head, from ", kMinReach, " to ",
                      kMaxReach, ", got ", c10::ArrayRef<double>(*reach));
    const int64_t heads = q.sym_size(-2).guard_int(__FILE__, __LINE__);
    constexpr double kMultiples = 0x1p18;
    used.reach = std::nearbyint(reach->front() * kMultiples) / kMultiples;
    // Towards 0, so that the last head stays within the bounds.
    const double step = heads > 1 ? (reach->back() - used.reach) / double(heads - 1) : 0;
    used.reach_step = std::trunc(step * kMultiples) / kMultiples;
}

}  // namespace

AttentionOptions read_query_options(const Arguments& arguments) {
    AttentionOptions options;
    options.scale = arguments.get<std::optional<double>>("scale");
    options.attend_current = arguments.get<bool>("attend_current");
    options.mass_threshold = arguments.get<double>("mass_threshold");
    options.euclidean = arguments.get_or("euclidean", false);
    options.query_bias = arguments.get_or<OptionalTensor>("query_bias", std::nullopt);
    options.reach = arguments.get_or<OptionalNumbers>("reach", std::nullopt);
    return options;
}

AttentionOptions read_attention_options(const Arguments& arguments) {
    AttentionOptions options = read_query_options(arguments);
    options.key_bias = arguments.get_or<OptionalTensor>("key_bias", std::nullopt);
    options.forget_gate = arguments.get_or<OptionalTensor>("forget_gate", std::nullopt);
    return options;
}

NamedArguments named(const AttentionOptions& options) {
    return {{"scale", options.scale},
            {"attend_current", options.attend_current},
            {"mass_threshold", options.mass_threshold},
            {"forget_gate", options.forget_gate},
            {"euclidean", options.euclidean},
            {"query_bias", options.query_bias},
            {"key_bias", options.key_bias},
            {"reach", options.reach}};
}

BlockOptions read_block_options(const Arguments& arguments) {
    BlockOptions options;
    options.scale = arguments.get<double>("scale");
    options.mass_threshold = arguments.get<double>("mass_threshold");
    options.attend_current = arguments.get<bool>("attend_current");
    options.forget_gate = arguments.get_or("forget_gate", false);
    options.reach = arguments.get_or("reach", kNoReach);
    options.reach_step = arguments.get_or("reach_step", 0.);
    options.bias_columns = arguments.get_or("bias_columns", false);
    return options;
}

NamedArguments named(const BlockOptions& options) {
    return {{"scale", options.scale},
            {"attend_current", options.attend_current},
            {"mass_threshold", options.mass_threshold},
            {"forget_gate", options.forget_gate},
            {"reach", options.reach},
            {"reach_step", options.reach_step},
            {"bias_columns", options.bias_columns}};
}

BlockOptions block_options(const AttentionOptions& options, const at::Tensor& q) {
    const auto default_scale = [&] {
        const int64_t d = q.sym_size(-1).guard_int(__FILE__, __LINE__);
        return options.euclidean ? 1 : 1 / std::sqrt(double(std::max<int64_t>(d, 1)));
    };
    BlockOptions used;
    used.scale = options.scale.has_value() ? *options.scale : default_scale();
    used.mass_threshold = options.mass_threshold;
    used.attend_current = options.attend_current;
    used.forget_gate = options.forget_gate.has_value();
    used.bias_columns = has_bias_columns(options);
    set_reach(used, options.reach, q);
    check_options(used);
    return used;
}

c10::IValue saved(const BlockOptions& options) {
    return SavedOptions{options.scale, options.mass_threshold, options.attend_current, options.forget_gate,
                        options.reach, options.reach_step,     options.bias_columns};
}

// g++ 12 takes the elements of every c10::IValue tuple for those of a short one, which is stored in another way.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Warray-bounds"
BlockOptions restored_options(const c10::IValue& value) {
    const auto [scale, mass_threshold, attend_current, forget_gate, reach, reach_step, bias_columns] =
        value.to<SavedOptions>();
    return {{scale, mass_threshold, attend_current, forget_gate, reach, reach_step}, bias_columns};
}
#pragma GCC diagnostic pop

}  // namespace megatron_sb::ops
