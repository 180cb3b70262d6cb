// Under autocast q, k and v are cast to its dtype, as torch's own attention does; cu_seqlens stay as they are, and so
// do forget gates in fp32.
#include <ATen/autocast_mode.h>

#include "ops/kvcache.h"
#include "ops/registration.h"

namespace megatron_sb::ops {

using at::autocast::cached_cast;

namespace {

template <c10::DeviceType kDevice>
OptionalTensor cast_gate(const OptionalTensor& gate) {
    if (!gate.has_value() || gate->scalar_type() == at::kFloat) return gate;
    return cached_cast(at::autocast::get_autocast_dtype(kDevice), *gate, kDevice);
}

}  // namespace

template <c10::DeviceType kDevice>
Two attention_autocast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::optional<double> scale,
                       bool attend_current, double mass_threshold, const OptionalTensor& forget_gate, bool euclidean) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
    const at::ScalarType type = at::autocast::get_autocast_dtype(kDevice);
    static const auto op = registered("megatron_sb::attention", attention);
    return op.call(cached_cast(type, q, kDevice), cached_cast(type, k, kDevice), cached_cast(type, v, kDevice), scale,
                   attend_current, mass_threshold, cast_gate<kDevice>(forget_gate), euclidean);
}

template <c10::DeviceType kDevice>
Two attention_varlen_autocast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& cu_seqlens, const OptionalTensor& cu_seqlens_k,
                              std::optional<double> scale, bool attend_current, double mass_threshold,
                              const OptionalTensor& forget_gate, bool euclidean) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
    const at::ScalarType type = at::autocast::get_autocast_dtype(kDevice);
    static const auto op = registered("megatron_sb::attention_varlen", attention_varlen);
    return op.call(cached_cast(type, q, kDevice), cached_cast(type, k, kDevice), cached_cast(type, v, kDevice),
                   cu_seqlens, cu_seqlens_k, scale, attend_current, mass_threshold, cast_gate<kDevice>(forget_gate),
                   euclidean);
}

template <c10::DeviceType kDevice>
Two attention_kvcache_autocast(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                               const at::Tensor& cache_seqlens, const OptionalTensor& block_table,
                               const OptionalTensor& cache_leftpad, std::optional<double> scale, bool attend_current,
                               double mass_threshold) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
    const at::ScalarType type = at::autocast::get_autocast_dtype(kDevice);
    static const auto op = registered("megatron_sb::attention_kvcache", attention_kvcache);
    return op.call(cached_cast(type, q, kDevice), cached_cast(type, k_cache, kDevice),
                   cached_cast(type, v_cache, kDevice), cache_seqlens, block_table, cache_leftpad, scale,
                   attend_current, mass_threshold);
}

template Two attention_autocast<c10::DeviceType::CPU>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                      std::optional<double>, bool, double, const OptionalTensor&, bool);
template Two attention_autocast<c10::DeviceType::CUDA>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                       std::optional<double>, bool, double, const OptionalTensor&,
                                                       bool);
template Two attention_varlen_autocast<c10::DeviceType::CPU>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                             const at::Tensor&, const OptionalTensor&,
                                                             std::optional<double>, bool, double, const OptionalTensor&,
                                                             bool);
template Two attention_varlen_autocast<c10::DeviceType::CUDA>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                              const at::Tensor&, const OptionalTensor&,
                                                              std::optional<double>, bool, double,
                                                              const OptionalTensor&, bool);
template Two attention_kvcache_autocast<c10::DeviceType::CPU>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                              const at::Tensor&, const OptionalTensor&,
                                                              const OptionalTensor&, std::optional<double>, bool,
                                                              double);
template Two attention_kvcache_autocast<c10::DeviceType::CUDA>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                               const at::Tensor&, const OptionalTensor&,
                                                               const OptionalTensor&, std::optional<double>, bool,
                                                               double);

}  // namespace megatron_sb::ops
