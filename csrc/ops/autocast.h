// Under autocast q, k and v are cast to its dtype, as torch's own attention does; cu_seqlens stay as they are, and so
// do forget gates in fp32.
#pragma once

#include <ATen/autocast_mode.h>

#include <optional>

namespace megatron_sb::ops {

// Casts while it lives, and keeps the operator that is called then from coming back to its autocast entry.
template <c10::DeviceType kDevice>
class Autocast {
  public:
    at::Tensor operator()(const at::Tensor& x) const { return at::autocast::cached_cast(type_, x, kDevice); }

    std::optional<at::Tensor> gate(const std::optional<at::Tensor>& gate) const {
        const bool stays = !gate.has_value() || gate->scalar_type() == at::kFloat;
        return stays ? gate : (*this)(*gate);
    }

  private:
    const at::ScalarType type_ = at::autocast::get_autocast_dtype(kDevice);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast_{
        at::autocast::get_autocast_dispatch_key_from_device_type(kDevice)};
};

}  // namespace megatron_sb::ops
