// Tests of the block functions on tensors: outputs that are added, and gradients that are complete. They run on a CPU
// and, if there is one, on a GPU.
#include "ops/block.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "messages.h"
#include "ops/tensors.h"

namespace megatron_sb::ops {
namespace {

using at::Tensor;

constexpr int64_t kRows = 200, kKeys = 300;

struct BlockCase {
    Tensor q, k, v, d_o, mass_in, prefix_in;
    BlockOptions options;

    at::ScalarType wide() const { return accumulation_type(q); }
    BlockOutput forward(const std::optional<Tensor>& table, const std::optional<Tensor>& add_to = std::nullopt) const {
        return block_forward(q, k, v, table, mass_in, options, wide(), add_to);
    }
    Tensor backward(const std::optional<Tensor>& table, const BlockOutput& out, const BlockGradients& gradients) const {
        return block_backward(d_o, q, k, v, table, out.restart_edge, out.restart_mass, std::nullopt, prefix_in, options,
                              gradients);
    }
    // Returns gradient tensors of `type` that are full of NaN.
    BlockGradients unwritten(at::ScalarType type) const {
        const auto make = [type](const Tensor& x) { return at::full(x.sizes(), NAN, x.options().dtype(type)); };
        return {make(q), make(k), make(v)};
    }
};

BlockCase make_block_case(at::Device device, at::ScalarType dtype, int64_t d, bool forget_gate) {
    at::manual_seed(d);
    const auto wide = at::TensorOptions(device).dtype(dtype == at::kDouble ? at::kDouble : at::kFloat);
    const auto random = [&](int64_t rows, int64_t heads, int64_t columns) {
        return at::randn({2, rows, heads, columns}, wide).to(dtype);
    };
    BlockCase x{random(kRows, 4, d),
                random(kKeys, 2, d),
                random(kKeys, 2, d),
                random(kRows, 4, d),
                at::rand({2, 4, kRows}, wide),
                at::randn({2, 4, kRows}, wide),
                {1 / std::sqrt(double(d)), 0, false, forget_gate}};
    if (forget_gate) {  // in the first of the gates' columns
        const Tensor gates = (at::rand({2, kKeys, 2, 1}, wide) / 2 + 0.5).to(dtype);
        x.k = at::cat({x.k, at::constant_pad_nd(gates, {0, kGateColumns - 1})}, -1);
    }
    return x;
}

// The GPU cases are for the Hopper kernels and for the portable ones.
std::vector<BlockCase> make_block_cases(bool forget_gate) {
    std::vector<BlockCase> cases{make_block_case(at::kCPU, at::kDouble, 16, forget_gate),
                                 make_block_case(at::kCPU, at::kFloat, 24, forget_gate),
                                 make_block_case(at::kCPU, at::kBFloat16, 16, forget_gate)};
    if (!at::hasCUDA()) return cases;
    for (const int64_t d : {64, 72, 96, 128}) cases.push_back(make_block_case(at::kCUDA, at::kHalf, d, forget_gate));
    cases.push_back(make_block_case(at::kCUDA, at::kFloat, 64, forget_gate));
    cases.push_back(make_block_case(at::kCUDA, at::kBFloat16, 136, forget_gate));
    cases.back().options.bias_columns = true;
    cases.back().v = cases.back().v.narrow(-1, 0, 128), cases.back().d_o = cases.back().d_o.narrow(-1, 0, 128);
    return cases;
}

// A segment table, and which rows and keys have gradients of 0.
struct Table {
    std::string name;
    std::optional<std::vector<int32_t>> segments;                         // none: dense
    std::vector<std::pair<int64_t, int64_t>> rows_without, keys_without;  // [begin, end)

    std::optional<Tensor> on(const Tensor& x) const {
        if (!segments) return std::nullopt;
        return at::tensor(*segments, at::kInt).reshape({-1, kSegmentFields}).to(x.device());
    }
    bool has_pairs() const { return rows_without.empty() || rows_without[0].second < kRows; }
};

const std::vector<Table>& tables() {
    static const std::vector<Table> all{
        {"dense", std::nullopt, {}, {{kKeys - 1, kKeys}}},
        {"rows and keys in no segment",
         {{10, 50, 20, 100, 50, 80, 90, 150, 100, 20}},
         {{0, 10}, {60, 80}, {170, kRows}},
         {{0, 20}, {120, 150}, {250, kKeys}}},
        {"keys that no query sees", {{0, kRows, 0, kKeys, -50}}, {{0, 51}}, {{149, kKeys}}},
        {"no pair of a query and a key", {{0, kRows, 0, kKeys, -kRows}}, {{0, kRows}}, {{0, kKeys}}},
        {"empty segments", {{0, 50, 100, 0, 0, 60, 0, 20, 30, 0}}, {{0, kRows}}, {{0, kKeys}}},
        {"no segments", {std::vector<int32_t>{}}, {{0, kRows}}, {{0, kKeys}}},
    };
    return all;
}

// Calls check(case, table) for all of them, with and without forget gates.
template <class Check>
void for_each_block(const Check& check) {
    for (const bool forget_gate : {false, true})
        for (const BlockCase& x : make_block_cases(forget_gate))
            for (const Table& table : tables()) {
                SCOPED_TRACE(testing::Message() << table.name << ", " << x.q.device() << " " << x.q.scalar_type()
                                                << ", forget_gate " << forget_gate);
                check(x, table);
            }
}

bool is_zero(const Tensor& x, const std::vector<std::pair<int64_t, int64_t>>& rows) {
    return std::all_of(rows.begin(), rows.end(), [&](const auto& range) {
        return x.slice(1, range.first, range.second).eq(0).all().template item<bool>();
    });
}

TEST(Block, TheForwardAddsToAGivenOutput) {
    for_each_block([](const BlockCase& x, const Table& table) {
        const BlockOutput alone = x.forward(table.on(x.q));
        // A tensor with a unit last stride, not contiguous.
        const Tensor wide = at::randn({2, kRows, 4, x.v.size(3) + 8}, x.mass_in.options());
        const Tensor before = wide.clone(), o = wide.narrow(3, 8, x.v.size(3));
        const BlockOutput out = x.forward(table.on(x.q), o);
        EXPECT_TRUE(out.o.is_same(o));
        before.narrow(3, 8, x.v.size(3)).add_(alone.o);
        EXPECT_TRUE(at::equal(wide, before));
        EXPECT_TRUE(at::equal(out.mass, alone.mass));
        EXPECT_TRUE(at::equal(out.restart_edge, alone.restart_edge));
        EXPECT_TRUE(at::equal(out.restart_mass, alone.restart_mass));
    });
}

TEST(Block, TheForwardAddsOnlyInTheAccumulationType) {
    const BlockCase x = make_block_case(at::kCPU, at::kBFloat16, 16, false);
    const auto add_to = [&](const Tensor& o, at::ScalarType o_type) {
        return block_forward(x.q, x.k, x.v, std::nullopt, std::nullopt, x.options, o_type, o);
    };
    try {
        add_to(at::zeros_like(x.q), at::kBFloat16);
        FAIL() << "an output in bf16 raised no error";
    } catch (const c10::TypeError& error) {
        EXPECT_TRUE(mentions(error.what(), "add_to o_dtype Float BFloat16"));
    }
    EXPECT_THROW(add_to(at::zeros({2, kRows, 4, 8}), at::kFloat), c10::ValueError);
}

// Tensors that hold NaN before the call get all gradients, with 0 for rows and keys that take part in nothing.
TEST(Block, TheBackwardWritesEveryGradient) {
    for_each_block([](const BlockCase& x, const Table& table) {
        const BlockOutput out = x.forward(table.on(x.q));
        const auto narrow = gradient_type(x.q, x.v, x.options, x.q.scalar_type());
        for (const at::ScalarType type : {x.wide(), narrow}) {
            const BlockGradients gradients = x.unwritten(type);
            const Tensor prefix = x.backward(table.on(x.q), out, gradients);
            EXPECT_TRUE(prefix.isfinite().all().item<bool>());
            for (const Tensor& gradient : {gradients.dq, gradients.dk, gradients.dv}) {
                EXPECT_TRUE(gradient.isfinite().all().item<bool>()) << type;
                EXPECT_EQ(gradient.any().item<bool>(), table.has_pairs()) << type;
            }
            EXPECT_TRUE(is_zero(gradients.dq, table.rows_without)) << type;
            EXPECT_TRUE(is_zero(gradients.dk, table.keys_without)) << type;
            EXPECT_TRUE(is_zero(gradients.dv, table.keys_without)) << type;
            if (x.options.forget_gate) {
                EXPECT_TRUE(gradients.dk.narrow(3, x.q.size(3) + 1, kGateColumns - 1).eq(0).all().item<bool>()) << type;
            }
        }
    });
}

TEST(Block, TheBackwardAddsToDqIfAsked) {
    for_each_block([](const BlockCase& x, const Table& table) {
        const BlockOutput out = x.forward(table.on(x.q));
        const BlockGradients alone = x.unwritten(x.wide());
        BlockGradients added = x.unwritten(x.wide());
        x.backward(table.on(x.q), out, alone);
        added.add_dq = true;
        const Tensor before = at::randn_like(added.dq);
        added.dq.copy_(before);
        x.backward(table.on(x.q), out, added);
        // A CPU kernel may round only once where the sum below rounds twice.
        const double tolerance = x.wide() == at::kDouble ? 1e-14 : 1e-6;
        EXPECT_TRUE(at::allclose(added.dq, before + alone.dq, tolerance, tolerance));
        for (const auto& [begin, end] : table.rows_without)
            EXPECT_TRUE(at::equal(added.dq.slice(1, begin, end), before.slice(1, begin, end)));
        EXPECT_TRUE(at::equal(added.dk, alone.dk));
        EXPECT_TRUE(at::equal(added.dv, alone.dv));
    });
}

TEST(Block, TheBackwardAddsOnlyInTheAccumulationType) {
    const BlockCase x = make_block_case(at::kCPU, at::kBFloat16, 16, false);
    BlockGradients gradients = x.unwritten(at::kBFloat16);
    gradients.add_dq = true;
    EXPECT_THROW(x.backward(std::nullopt, x.forward(std::nullopt), gradients), c10::TypeError);
}

// Kernels on a CPU would compute INT32_MIN - 1.
TEST(Block, ANegativeRestartEdgeIsAnError) {
    const BlockCase x = make_block_case(at::kCPU, at::kFloat, 16, false);
    const BlockOutput out = x.forward(std::nullopt);
    out.restart_edge.select(2, 5).fill_(INT32_MIN);
    try {
        x.backward(std::nullopt, out, x.unwritten(at::kFloat));
        FAIL() << "a negative edge raised no error";
    } catch (const c10::ValueError& error) {
        EXPECT_TRUE(mentions(error.what(), "restart_edge 0 2147483648")) << error.what();
    }
}

// Blocks without queries, or without keys.
TEST(Block, TheBackwardWritesGradientsWithoutRowsOrKeys) {
    const BlockCase x = make_block_case(at::kCPU, at::kFloat, 16, false);
    for (const auto& [rows, keys] : {std::pair{int64_t(0), kKeys}, {kRows, int64_t(0)}}) {
        const auto first_rows = [rows = rows](const Tensor& y, int64_t dim) { return y.narrow(dim, 0, rows); };
        BlockCase part = x;
        part.q = first_rows(x.q, 1), part.d_o = first_rows(x.d_o, 1);
        part.mass_in = first_rows(x.mass_in, 2), part.prefix_in = first_rows(x.prefix_in, 2);
        part.k = x.k.narrow(1, 0, keys), part.v = x.v.narrow(1, 0, keys);
        const BlockGradients gradients = part.unwritten(at::kFloat);
        part.backward(std::nullopt, part.forward(std::nullopt), gradients);
        for (const Tensor& gradient : {gradients.dq, gradients.dk, gradients.dv})
            EXPECT_TRUE(gradient.eq(0).all().item<bool>()) << rows << " rows, " << keys << " keys";
    }
}

}  // namespace
}  // namespace megatron_sb::ops
