// This rank has all keys that its queries attend to: one block, no transfer.
#include <ATen/ATen.h>

#include "distributed/key_source.h"

namespace megatron_sb::distributed {
namespace {

class LocalKeys final : public KeySource {
  public:
    LocalKeys(const at::Tensor& k, const at::Tensor& v, at::ScalarType type, const KeyGradients& to)
        : k_(k), v_(v), type_(type), to_(to) {}

    int num_groups() const override { return 1; }
    int num_steps() const override { return 1; }
    HeadRange heads(int) const override { return {0, k_.size(2)}; }
    std::vector<KeyBlock> next_blocks() override { return {{0, k_, v_}}; }

    KeyGradients gradients(size_t) override {
        const auto make = [&](const at::Tensor& to) {
            return to.scalar_type() == type_ ? to : at::empty(to.sizes(), to.options().dtype(type_));
        };
        gradients_ = {make(to_.dk), make(to_.dv)};
        return gradients_;
    }
    void finish_step() override {}
    void write_own_gradients(const KeyGradients& to) override {
        const auto write = [](const at::Tensor& x, const at::Tensor& gradient) {
            if (!gradient.defined())
                x.zero_();
            else if (!x.is_same(gradient))
                x.copy_(gradient);
        };
        write(to.dk, gradients_.dk);
        write(to.dv, gradients_.dv);
    }

  private:
    const at::Tensor k_, v_;
    const at::ScalarType type_;
    const KeyGradients to_;
    KeyGradients gradients_;  // undefined: of no block
};

}  // namespace

std::unique_ptr<KeySource> make_local_keys(const at::Tensor& k, const at::Tensor& v, at::ScalarType type,
                                           const KeyGradients& to) {
    return std::make_unique<LocalKeys>(k, v, type, to);
}

}  // namespace megatron_sb::distributed
