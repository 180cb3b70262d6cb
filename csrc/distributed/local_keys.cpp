// This rank has all keys that its queries see: one block, no transfer.
#include <ATen/ATen.h>

#include "distributed/key_source.h"
#include "ops/tensors.h"

namespace megatron_sb::distributed {
namespace {

class LocalKeys final : public KeySource {
  public:
    LocalKeys(const at::Tensor& k, const at::Tensor& v, at::ScalarType type) : k_(k), v_(v), type_(type) {}

    int num_groups() const override { return 1; }
    int num_steps() const override { return 1; }
    HeadRange heads(int) const override { return {0, k_.size(2)}; }
    std::vector<KeyBlock> next_blocks() override { return {{0, k_, v_}}; }

    KeyGradients gradients(size_t) override {
        // Kernels add to gradients in the accumulation type, so they start at 0.
        const auto make = type_ == ops::accumulation_type(k_) ? zeros : empty;
        gradients_ = {make(k_, type_), make(v_, type_)};
        return gradients_;
    }
    void finish_step() override {}
    KeyGradients own_gradients() override {
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

std::unique_ptr<KeySource> make_local_keys(const at::Tensor& k, const at::Tensor& v, at::ScalarType type) {
    return std::make_unique<LocalKeys>(k, v, type);
}

}  // namespace megatron_sb::distributed
