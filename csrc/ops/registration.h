// The functions behind the operators of library.cpp, with the signatures of their schemas.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <tuple>

namespace megatron_sb::ops {

using Two = std::tuple<at::Tensor, at::Tensor>;
using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Five = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using OptionalTensor = std::optional<at::Tensor>;

// attention.cpp
Two attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::optional<double> scale,
              bool attend_current, double mass_threshold, const OptionalTensor& forget_gate, bool euclidean);
Two attention_varlen(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_seqlens,
                     const OptionalTensor& cu_seqlens_k, std::optional<double> scale, bool attend_current,
                     double mass_threshold, const OptionalTensor& forget_gate, bool euclidean);

// variants.cpp
Two with_variants(const at::Tensor& q, const at::Tensor& k, const OptionalTensor& forget_gate, bool euclidean);

// head_output.cpp, with its fake kernels
at::Tensor head_output(const at::Tensor& o, const OptionalTensor& mass, const OptionalTensor& remainder_bias,
                       const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, double eps);
at::Tensor head_output_forward(const at::Tensor& o, const OptionalTensor& mass, const OptionalTensor& remainder_bias,
                               const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, double eps);
Five head_output_backward(const at::Tensor& d_out, const at::Tensor& o, const OptionalTensor& mass,
                          const OptionalTensor& remainder_bias, const OptionalTensor& norm_weight,
                          const OptionalTensor& norm_bias, double eps);
at::Tensor head_output_forward_meta(const at::Tensor& o, const OptionalTensor& mass,
                                    const OptionalTensor& remainder_bias, const OptionalTensor& norm_weight,
                                    const OptionalTensor& norm_bias, double eps);
Five head_output_backward_meta(const at::Tensor& d_out, const at::Tensor& o, const OptionalTensor& mass,
                               const OptionalTensor& remainder_bias, const OptionalTensor& norm_weight,
                               const OptionalTensor& norm_bias, double eps);

// autocast.cpp
template <c10::DeviceType kDevice>
Two attention_autocast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::optional<double> scale,
                       bool attend_current, double mass_threshold, const OptionalTensor& forget_gate, bool euclidean);
template <c10::DeviceType kDevice>
Two attention_varlen_autocast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& cu_seqlens, const OptionalTensor& cu_seqlens_k,
                              std::optional<double> scale, bool attend_current, double mass_threshold,
                              const OptionalTensor& forget_gate, bool euclidean);

// block_ops.cpp
at::Tensor segments(const at::Tensor& cu_seqlens, const at::Tensor& cu_seqlens_k, c10::SymInt q_rows,
                    c10::SymInt k_rows);
Four block_forward_op(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& segments,
                      const OptionalTensor& mass_in, double scale, bool attend_current, double mass_threshold,
                      std::optional<at::ScalarType> out_dtype, bool forget_gate);
Four block_backward_op(const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const OptionalTensor& segments, const at::Tensor& restart_edge, const at::Tensor& restart_mass,
                       const OptionalTensor& mass_in, const OptionalTensor& prefix_in, double scale,
                       bool attend_current, double mass_threshold, std::optional<at::ScalarType> out_dtype,
                       bool forget_gate);
std::string describe_kernels();
std::string instruction_set();

// fake.cpp: shapes and dtypes without values
at::Tensor segments_meta(const at::Tensor& cu_seqlens, const at::Tensor& cu_seqlens_k, c10::SymInt q_rows,
                         c10::SymInt k_rows);
Four block_forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& segments,
                        const OptionalTensor& mass_in, double scale, bool attend_current, double mass_threshold,
                        std::optional<at::ScalarType> out_dtype, bool forget_gate);
Four block_backward_meta(const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const OptionalTensor& segments, const at::Tensor& restart_edge, const at::Tensor& restart_mass,
                         const OptionalTensor& mass_in, const OptionalTensor& prefix_in, double scale,
                         bool attend_current, double mass_threshold, std::optional<at::ScalarType> out_dtype,
                         bool forget_gate);

// The registered operator `name`, typed as `function` is: calls pass the dispatcher, so that tracing sees them.
template <class Function>
auto registered(const char* name, Function* function) {
    (void)function;
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

}  // namespace megatron_sb::ops
