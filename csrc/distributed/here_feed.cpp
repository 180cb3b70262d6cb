// Where no keys have to come: one block, whose gradients stay.
#include <ATen/ATen.h>

#include "distributed/feed.h"
#include "ops/block.h"

namespace megatron_sb::distributed {
namespace {

class HereFeed final : public KeyFeed {
  public:
    HereFeed(const at::Tensor& k, const at::Tensor& v, at::ScalarType type) : k_(k), v_(v), type_(type) {}

    int num_groups() const override { return 1; }
    int num_steps() const override { return 1; }
    HeadRange heads(int) const override { return {0, k_.size(2)}; }
    std::vector<KeyBlock> take() override { return {{0, k_, v_}}; }

    KeyGradients gradients(size_t) override {
        // Those in the accumulation type are added to.
        const auto make = type_ == ops::accumulation_type(k_) ? zeros : empty;
        gradients_ = {make(k_, type_), make(v_, type_)};
        return gradients_;
    }
    void give() override {}
    KeyGradients home() override {
        if (!gradients_.dk.defined()) gradients_ = {zeros(k_, type_), zeros(v_, type_)};
        return gradients_;
    }

  private:
    static at::Tensor zeros(const at::Tensor& like, at::ScalarType type) {
        return at::zeros(like.sizes(), like.options().dtype(type));
    }
    static at::Tensor empty(const at::Tensor& like, at::ScalarType type) {
        return at::empty(like.sizes(), like.options().dtype(type));
    }

    const at::Tensor k_, v_;
    const at::ScalarType type_;
    KeyGradients gradients_;
};

}  // namespace

std::unique_ptr<KeyFeed> make_here_feed(const at::Tensor& k, const at::Tensor& v, at::ScalarType type) {
    return std::make_unique<HereFeed>(k, v, type);
}

}  // namespace megatron_sb::distributed
