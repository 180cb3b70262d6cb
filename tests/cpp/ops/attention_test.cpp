// Tests of the public C++ interface.
#include "megatron_sb/attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>

#include "megatron_sb/context_parallel.h"
#include "messages.h"

namespace megatron_sb {
namespace {

// Operators use one thread while it lives. With several threads, the first exp() of doubles in a process is off by 3e-9
// in one of 80 processes on a busy machine (torch 2.11, after a kernel of this library has run; the cause is not
// known).
class OneThread {
  public:
    OneThread() : threads_(at::get_num_threads()) { at::set_num_threads(1); }
    ~OneThread() { at::set_num_threads(threads_); }

  private:
    const int threads_;
};

// The definition (Tan et al., eq. 1) in float64, for one head: q (s, d), k (s_k, d), v (s_k, d_v).
at::Tensor definition(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
    const OneThread one_thread;
    const at::Tensor z = at::matmul(q, k.t()) * scale;
    const int64_t offset = k.size(0) - q.size(0);
    const at::Tensor seen = at::ones_like(z).tril(offset - 1);
    const at::Tensor log_kept = -at::softplus(z) * seen;
    const at::Tensor newer = log_kept.flip(1).cumsum(1).flip(1) - log_kept;
    return at::matmul(at::exp(-at::softplus(-z) + newer) * seen, v);
}

TEST(Attention, AgreesWithTheDefinition) {
    at::manual_seed(0);
    const auto options = at::TensorOptions(at::kDouble);
    const at::Tensor q = at::randn({2, 50, 4, 16}, options), k = at::randn({2, 90, 2, 16}, options);
    const at::Tensor v = at::randn({2, 90, 2, 24}, options);
    AttentionOptions exact;
    exact.mass_threshold = 0;
    const auto [o, mass] = stickbreaking_attention(q, k, v, exact);
    ASSERT_EQ(o.sizes(), (std::vector<int64_t>{2, 50, 4, 24}));
    ASSERT_EQ(mass.sizes(), (std::vector<int64_t>{2, 4, 50}));
    for (int64_t b = 0; b < 2; ++b)
        for (int64_t h = 0; h < 4; ++h) {
            const auto head = [&](const at::Tensor& x, int64_t i) { return x.select(0, b).select(1, i); };
            const at::Tensor want = definition(head(q, h), head(k, h / 2), head(v, h / 2), 0.25);
            EXPECT_TRUE(at::allclose(head(o, h), want, 1e-12, 1e-13)) << b << ", " << h;
        }
}

TEST(Attention, APackedDocumentGivesTheResultOfTheDocumentAlone) {
    at::manual_seed(1);
    const at::Tensor q = at::randn({70, 2, 8}), k = at::randn({70, 2, 8}), v = at::randn({70, 2, 8});
    const at::Tensor cu_seqlens = at::tensor({0, 30, 30, 65}, at::kInt);
    const auto [o, mass] = stickbreaking_attention_varlen(q, k, v, cu_seqlens);
    const auto part = [](const at::Tensor& x) { return x.slice(0, 30, 65).unsqueeze(0); };
    const auto [alone, mass_alone] = stickbreaking_attention(part(q), part(k), part(v));
    EXPECT_TRUE(at::equal(o.slice(0, 30, 65), alone[0]));
    EXPECT_TRUE(at::equal(mass.slice(1, 30, 65), mass_alone[0]));
    // Rows 65 to 69 lie after the last document.
    EXPECT_TRUE(at::equal(o.slice(0, 65, 70), at::zeros({5, 2, 8})));
    EXPECT_TRUE(at::equal(mass.slice(1, 65, 70), at::ones({2, 5})));
}

TEST(Attention, ComputesGradientsOfQKV) {
    at::manual_seed(2);
    const auto leaf = [] { return at::randn({1, 40, 2, 8}, at::kDouble).requires_grad_(); };
    const at::Tensor q = leaf(), k = leaf(), v = leaf();
    const auto [o, mass] = stickbreaking_attention(q, k, v);
    (o.sum() + mass.sum()).backward();
    const double step = 1e-6;
    const at::Tensor direction = at::randn_like(k);
    const auto loss = [&](double distance) {
        const auto [o2, mass2] = stickbreaking_attention(q.detach(), k.detach() + distance * direction, v.detach());
        return (o2.sum() + mass2.sum()).item<double>();
    };
    const double slope = (loss(step) - loss(-step)) / (2 * step);
    EXPECT_NEAR((k.grad() * direction).sum().item<double>(), slope, 1e-7 * std::abs(slope) + 1e-8);
    EXPECT_GT(q.grad().abs().sum().item<double>(), 0);
    EXPECT_GT(v.grad().abs().sum().item<double>(), 0);
}

TEST(Attention, EuclideanLogitsAreNegativeSquaredDistances) {
    at::manual_seed(3);
    const auto options = at::TensorOptions(at::kDouble);
    const at::Tensor q = at::randn({1, 30, 1, 16}, options), k = at::randn({1, 30, 1, 16}, options);
    // -|q - k|^2 = 2 q.k - |q|^2 - |k|^2, written as one dot product of wider heads.
    const auto norm = [](const at::Tensor& x) { return x.square().sum(-1, true); };
    const at::Tensor wide_q = at::cat({2 * q, -norm(q), at::ones_like(norm(q))}, -1)[0].select(1, 0);
    const at::Tensor wide_k = at::cat({k, at::ones_like(norm(k)), -norm(k)}, -1)[0].select(1, 0);
    AttentionOptions euclidean;
    euclidean.euclidean = true;
    euclidean.mass_threshold = 0;
    const at::Tensor o = std::get<0>(stickbreaking_attention(q, k, k, euclidean));
    const at::Tensor want = definition(wide_q, wide_k, k[0].select(1, 0), 1);
    EXPECT_TRUE(at::allclose(o[0].select(1, 0), want, 1e-10, 1e-12));
}

TEST(Attention, ForgetGateMultipliesBeta) {
    at::manual_seed(4);
    const at::Tensor q = at::randn({1, 2, 1, 8}, at::kDouble), k = at::randn({1, 2, 1, 8}, at::kDouble);
    AttentionOptions gated;
    gated.forget_gate = at::full({1, 2, 1}, 0.25, at::kDouble).requires_grad_();
    const auto [o, mass] = stickbreaking_attention(q, k, k, gated);
    const double beta = 0.25 * at::sigmoid(at::dot(q[0][1][0], k[0][0][0]) / std::sqrt(8.0)).item<double>();
    EXPECT_NEAR(mass[0][0][1].item<double>(), 1 - beta, 1e-14);
    mass.sum().backward();
    EXPECT_NEAR(gated.forget_gate->grad()[0][0][0].item<double>(), -beta / 0.25, 1e-14);
    gated.forget_gate = at::ones({1, 2, 2}, at::kDouble);
    EXPECT_THROW(stickbreaking_attention(q, k, k, gated), c10::ValueError);
}

TEST(Attention, BiasesAreAddedToTheLogits) {
    at::manual_seed(5);
    const at::Tensor q = at::randn({1, 2, 1, 8}, at::kDouble), k = at::randn({1, 2, 1, 8}, at::kDouble);
    AttentionOptions biased;
    biased.query_bias = at::full({1, 2, 1}, 0.7, at::kDouble).requires_grad_();
    biased.key_bias = at::full({1, 2, 1}, -0.4, at::kDouble).requires_grad_();
    const auto [o, mass] = stickbreaking_attention(q, k, k, biased);
    const double logit = at::dot(q[0][1][0], k[0][0][0]).item<double>() / std::sqrt(8.0) + 0.7 - 0.4;
    const double beta = 1 / (1 + std::exp(-logit));
    EXPECT_NEAR(mass[0][0][1].item<double>(), 1 - beta, 1e-14);
    mass.sum().backward();
    EXPECT_NEAR(biased.query_bias->grad()[0][1][0].item<double>(), -beta * (1 - beta), 1e-14);
    EXPECT_NEAR(biased.key_bias->grad()[0][0][0].item<double>(), -beta * (1 - beta), 1e-14);
    biased.scale = 0;
    EXPECT_THROW(stickbreaking_attention(q, k, k, biased), c10::ValueError);
}

TEST(Attention, ErrorsNameTheArgumentAndTheValue) {
    const at::Tensor q = at::randn({1, 8, 3, 16}), k = at::randn({1, 8, 2, 16});
    try {
        stickbreaking_attention(q, k, k);
        FAIL() << "3 query heads with 2 KV heads raised no error";
    } catch (const c10::ValueError& error) {
        EXPECT_TRUE(mentions(error.what(), "q k 3 2"));
    }
    EXPECT_THROW(stickbreaking_attention(q, q, q.to(at::kHalf)), c10::TypeError);
    EXPECT_THROW(stickbreaking_attention(q, q, q, {std::nullopt, false, -1.0}), c10::ValueError);
}

TEST(Attention, UndefinedTensorsAndPlansAreErrors) {
    const at::Tensor q = at::randn({1, 8, 2, 16});
    try {
        stickbreaking_attention(q, q, at::Tensor());
        FAIL() << "an undefined tensor raised no error";
    } catch (const c10::ValueError& error) {
        EXPECT_TRUE(mentions(error.what(), "v undefined"));
    }
    EXPECT_THROW(context_parallel_attention(q, q, q, {}), c10::ValueError);
}

TEST(Attention, ErrorsNameAnUndefinedOptionalTensor) {
    const at::Tensor q = at::randn({1, 8, 2, 16}), cu_seqlens = at::tensor({0, 8}, at::kInt);
    const auto message = [](const auto& call) {
        try {
            call();
        } catch (const c10::ValueError& error) {
            return std::string(error.what());
        }
        return std::string("no error");
    };
    const std::pair<const char*, std::optional<at::Tensor> AttentionOptions::*> members[] = {
        {"forget_gate", &AttentionOptions::forget_gate},
        {"query_bias", &AttentionOptions::query_bias},
        {"key_bias", &AttentionOptions::key_bias}};
    for (const auto& [name, member] : members) {
        AttentionOptions options;
        options.*member = at::Tensor();
        const std::string got = message([&] { stickbreaking_attention(q, q, q, options); });
        EXPECT_TRUE(mentions(got, name)) << got;
        EXPECT_TRUE(mentions(got, "tensor undefined")) << got;
    }
    const auto packed = [&](const at::Tensor& offsets, const std::optional<at::Tensor>& offsets_of_keys) {
        return message([&] { stickbreaking_attention_varlen(q[0], q[0], q[0], offsets, offsets_of_keys); });
    };
    EXPECT_TRUE(mentions(packed(at::Tensor(), std::nullopt), "cu_seqlens undefined"));
    EXPECT_TRUE(mentions(packed(cu_seqlens, at::Tensor()), "cu_seqlens_k undefined"));
}

}  // namespace
}  // namespace megatron_sb
