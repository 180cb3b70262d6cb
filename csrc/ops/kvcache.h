// Attention to a KV cache: the functions behind its operators, with the signatures of their schemas.
#pragma once

#include "ops/registration.h"

namespace megatron_sb::ops {

// kvcache.cpp
Two attention_kvcache(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                      const at::Tensor& cache_seqlens, const OptionalTensor& block_table,
                      const OptionalTensor& cache_leftpad, std::optional<double> scale, bool attend_current,
                      double mass_threshold);
Two kvcache_forward(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                    const at::Tensor& cache_seqlens, const OptionalTensor& block_table,
                    const OptionalTensor& cache_leftpad, double scale, bool attend_current, double mass_threshold);
Two kvcache_forward_meta(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                         const at::Tensor& cache_seqlens, const OptionalTensor& block_table,
                         const OptionalTensor& cache_leftpad, double scale, bool attend_current, double mass_threshold);

// autocast.cpp
template <c10::DeviceType kDevice>
Two attention_kvcache_autocast(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                               const at::Tensor& cache_seqlens, const OptionalTensor& block_table,
                               const OptionalTensor& cache_leftpad, std::optional<double> scale, bool attend_current,
                               double mass_threshold);

}  // namespace megatron_sb::ops
