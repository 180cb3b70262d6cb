#include "ops/autocast.h"

#include "ops/kvcache.h"
#include "ops/registration.h"

namespace megatron_sb::ops {

template <c10::DeviceType kDevice>
Two attention_autocast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::optional<double> scale,
                       bool attend_current, double mass_threshold, const OptionalTensor& forget_gate, bool euclidean) {
    const Autocast<kDevice> cast;
    static const auto op = registered("megatron_sb::attention", attention);
    return op.call(cast(q), cast(k), cast(v), scale, attend_current, mass_threshold, cast.gate(forget_gate), euclidean);
}

template <c10::DeviceType kDevice>
Two attention_varlen_autocast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& cu_seqlens, const OptionalTensor& cu_seqlens_k,
                              std::optional<double> scale, bool attend_current, double mass_threshold,
                              const OptionalTensor& forget_gate, bool euclidean) {
    const Autocast<kDevice> cast;
    static const auto op = registered("megatron_sb::attention_varlen", attention_varlen);
    return op.call(cast(q), cast(k), cast(v), cu_seqlens, cu_seqlens_k, scale, attend_current, mass_threshold,
                   cast.gate(forget_gate), euclidean);
}

template <c10::DeviceType kDevice>
Two attention_kvcache_autocast(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                               const at::Tensor& cache_seqlens, const OptionalTensor& block_table,
                               const OptionalTensor& cache_leftpad, std::optional<double> scale, bool attend_current,
                               double mass_threshold) {
    const Autocast<kDevice> cast;
    static const auto op = registered("megatron_sb::attention_kvcache", attention_kvcache);
    return op.call(cast(q), cast(k_cache), cast(v_cache), cache_seqlens, block_table, cache_leftpad, scale,
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
