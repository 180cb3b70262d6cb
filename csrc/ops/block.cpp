#include "ops/block.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "core/environment.h"
#include "core/error.h"
#include "core/limits.h"
#include "dispatch/table.h"
#include "ops/check.h"
#include "ops/device.h"
#include "ops/tensors.h"

namespace megatron_sb::ops {
namespace {

void check_rows(const char* name, const at::Tensor& x) {
    check_rank(name, x, 4, "(batch, rows, heads, head_dim)");
    TORCH_CHECK_VALUE(x.sym_stride(3) == 1 || x.sym_size(3) <= 1 || x.sym_numel() == 0, name,
                      ": last stride must be 1, got ", x.sym_stride(3));
}

int8_t bias_columns_of(const BlockOptions& options) {
    return options.bias_columns ? kBiasColumns : 0;
}

Sizes sizes_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t k_rows,
               const BlockOptions& options) {
    return {dtype_of(q.scalar_type()), bias_columns_of(options), int32_t(q.size(0)),
            int32_t(q.size(2)),        int32_t(k.size(2)),       int32_t(q.size(1)),
            int32_t(k_rows),           int32_t(q.size(3)),       int32_t(v.size(3))};
}

// The segments of a call: the caller's table, or one segment over all rows, which this object holds.
class SegmentTable {
  public:
    SegmentTable(const std::optional<at::Tensor>& segments, const at::Tensor& q, int64_t k_rows) : k_rows_(k_rows) {
        if (!segments.has_value()) {
            const int32_t s = int32_t(q.size(1)), s_k = int32_t(k_rows);
            segments_.whole = {0, s, 0, s_k, s_k - s};
            return;
        }
        table_ = segments->contiguous();
        segments_.data = reinterpret_cast<const Segment*>(table_.const_data_ptr<int32_t>());
        segments_.size = int32_t(table_.size(0));
        if (table_.is_cpu()) check_values(q.size(1), k_rows);
    }

    const Segments& segments() const { return segments_; }
    bool empty() const { return segments_.size == 0; }
    int64_t k_rows() const { return k_rows_; }

    // Whether a CPU table leaves a query row in no segment. GPU kernels find such rows themselves.
    bool leaves_rows(int64_t q_rows) const {
        if (segments_.by_value() || !table_.is_cpu()) return false;
        int64_t covered = 0;
        for (int32_t i = 0; i < segments_.size; ++i) covered += segments_[i].q_len;
        return covered < q_rows;
    }

  private:
    void check_values(int64_t q_rows, int64_t k_rows) const {
        std::vector<std::pair<int32_t, int32_t>> q_ranges, k_ranges;  // {begin, end}
        for (int32_t i = 0; i < segments_.size; ++i) {
            const Segment& s = segments_[i];
            const bool inside = s.q_begin >= 0 && s.q_len >= 0 && int64_t(s.q_begin) + s.q_len <= q_rows &&
                                s.k_begin >= 0 && s.k_len >= 0 && int64_t(s.k_begin) + s.k_len <= k_rows;
            TORCH_CHECK_VALUE(inside, "segments: row ", i, " must stay within the ", q_rows, " query rows and ", k_rows,
                              " key rows, got (", s.q_begin, ", ", s.q_len, ", ", s.k_begin, ", ", s.k_len, ", ",
                              s.q_pos_minus_k_pos, ")");
            if (s.q_len > 0) q_ranges.emplace_back(s.q_begin, s.q_begin + s.q_len);
            if (s.q_len > 0 && s.k_len > 0) k_ranges.emplace_back(s.k_begin, s.k_begin + s.k_len);
        }
        std::sort(q_ranges.begin(), q_ranges.end());
        for (size_t i = 1; i < q_ranges.size(); ++i)
            TORCH_CHECK_VALUE(q_ranges[i - 1].second <= q_ranges[i].first,
                              "segments: a query row must be in at most one segment, got row ", q_ranges[i].first,
                              " in two");
        std::sort(k_ranges.begin(), k_ranges.end());
        for (size_t i = 1; i < k_ranges.size(); ++i)
            TORCH_CHECK_VALUE(k_ranges[i].first == k_ranges[i - 1].first || k_ranges[i - 1].second <= k_ranges[i].first,
                              "segments: the key rows of two segments must be disjoint or begin at the same row, got "
                              "overlapping key rows that begin at ",
                              k_ranges[i - 1].first, " and ", k_ranges[i].first);
    }

    const int64_t k_rows_;
    at::Tensor table_;
    Segments segments_;
};

const dispatch::Kernels& kernels_for(const at::Tensor& q, const at::Tensor& v, const BlockOptions& options,
                                     bool key_blocks = false) {
    const bool on_cpu = q.is_cpu();
    TORCH_CHECK_VALUE(on_cpu || q.is_cuda(), "q: device must be cpu or cuda, got ", q.device());
    const dispatch::Request request = {on_cpu ? dispatch::Device::kCpu : dispatch::Device::kCuda,
                                       on_cpu ? 0 : device_architecture(q.device()),
                                       dtype_of(q.scalar_type()),
                                       int(q.size(3)),
                                       int(v.size(3)),
                                       options.forget_gate,
                                       key_blocks,
                                       bias_columns_of(options)};
    return with_value_errors([&]() -> const dispatch::Kernels& { return dispatch::find(request); });
}

// The most bytes of workspace for a backward: 256 MiB, or MEGATRON_SB_WORKSPACE_MIB, which is read once.
int64_t workspace_limit() {
    static const int64_t mib = integer_of_environment("MEGATRON_SB_WORKSPACE_MIB", 256, 1, 1 << 20);
    return mib << 20;
}

const void* data_or_null(const std::optional<at::Tensor>& x) {
    return x.has_value() ? x->const_data_ptr() : nullptr;
}

// The fields that ForwardParams and BackwardParams share.
template <class Params>
Params with_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const SegmentTable& table,
                   const BlockOptions& options, const std::optional<at::Tensor>& mass_in) {
    Params params;
    params.sizes = sizes_of(q, k, v, table.k_rows(), options);
    params.options = options;
    params.segments = table.segments();
    params.q = strided_rows<const void*>(q);
    params.k = strided_rows<const void*>(k);
    params.v = strided_rows<const void*>(v);
    params.mass_in = data_or_null(mass_in);
    return params;
}

// The checked arguments of a forward.
struct ForwardCall {
    at::Tensor q, k, v;
    std::optional<at::Tensor> block_table;
    SegmentTable table;
    std::optional<at::Tensor> mass_in;
    BlockOptions options;
    std::optional<at::Tensor> add_to = std::nullopt;
};

BlockOutput run_forward(const ForwardCall& in, at::ScalarType o_type) {
    const DeviceScope scope(in.q.device());
    const at::Tensor q = aligned(in.q), k = aligned(in.k), v = aligned(in.v);
    const dispatch::Kernels& kernels = kernels_for(q, v, in.options, in.block_table.has_value());
    const at::ScalarType wide = accumulation_type(q);

    const std::vector<int64_t> rows = {q.size(0), q.size(2), q.size(1)};
    BlockOutput out;
    const bool add = in.add_to.has_value();
    out.o = add ? *in.add_to : at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options().dtype(o_type));
    out.mass = at::empty(rows, q.options().dtype(wide));
    out.restart_edge = at::empty(rows, q.options().dtype(at::kInt));
    out.restart_mass = at::empty(rows, q.options().dtype(wide));
    if (in.table.leaves_rows(q.size(1))) {
        if (!add) out.o.zero_();
        in.mass_in.has_value() ? out.mass.copy_(*in.mass_in) : out.mass.fill_(1);
        out.restart_edge.zero_();
        out.restart_mass.zero_();
    }
    auto params = with_inputs<ForwardParams>(q, k, v, in.table, in.options, in.mass_in);
    if (in.block_table.has_value())
        params.key_blocks = {in.block_table->const_data_ptr<int32_t>(), int32_t(k.size(1)), int32_t(k.size(0))};
    params.o = strided_rows<void*>(out.o);
    params.o_dtype = dtype_of(o_type);
    params.add_o = add;
    params.mass_out = out.mass.data_ptr();
    params.restart = {out.restart_edge.data_ptr<int32_t>(), out.restart_mass.data_ptr()};
    const at::Tensor workspace = empty_workspace(kernels.forward_workspace(params), q);
    params.workspace = workspace.data_ptr();
    kernels.forward(params, scope.stream());
    return out;
}

void check_add_to(const at::Tensor& add_to, const at::Tensor& q, const at::Tensor& v, at::ScalarType o_type) {
    const at::ScalarType wide = accumulation_type(q);
    TORCH_CHECK_TYPE(add_to.scalar_type() == wide && o_type == wide, "add_to: dtype and o_dtype must be ", wide,
                     ", got ", add_to.scalar_type(), " and ", o_type);
    const std::vector<int64_t> shape = {q.size(0), q.size(1), q.size(2), v.size(3)};
    TORCH_CHECK_VALUE(add_to.sizes() == at::IntArrayRef(shape), "add_to: shape must be that of the output, ",
                      at::IntArrayRef(shape), ", got ", add_to.sizes());
    check_rows("add_to", add_to);
}

// Checks the values of a CPU tensor, as SegmentTable does.
void check_edges(const at::Tensor& restart_edge) {
    if (!restart_edge.is_cpu() || restart_edge.numel() == 0) return;
    const auto least = restart_edge.min().item<int32_t>();
    TORCH_CHECK_VALUE(least >= 0, "restart_edge must be at least 0, got ", least);
}

// Clears the gradients that the kernels do not write (BackwardParams).
void clear_gradients(const BlockGradients& gradients) {
    gradients.dk.zero_();
    gradients.dv.zero_();
    if (!gradients.add_dq) gradients.dq.zero_();
}

}  // namespace

void check_block(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const std::optional<at::Tensor>& segments, const std::optional<at::Tensor>& mass_in,
                 const BlockOptions& options) {
    check_rows("q", q);
    check_rows("k", k);
    check_rows("v", v);
    check_attention(q, k, v, options.forget_gate);
    check_options(options);
    TORCH_CHECK_VALUE(!options.bias_columns || q.sym_size(3) > int64_t(kBiasColumns),
                      "q: head_dim must be more than the ", kBiasColumns, " columns of biases, got ", q.sym_size(3));
    if (segments.has_value()) {
        check_defined("segments", *segments);
        TORCH_CHECK_TYPE(segments->scalar_type() == at::kInt, "segments: dtype must be int32, got ",
                         segments->scalar_type());
        TORCH_CHECK_VALUE(segments->dim() == 2 && segments->sym_size(1) == kSegmentFields,
                          "segments: shape must be (n, ", kSegmentFields, "), got ", segments->sym_sizes());
        check_device("segments", *segments, q, "q");
        check_at_most("segments", "number of segments", segments->sym_size(0), kMaxSegments);
    }
    if (mass_in.has_value()) check_row_values("mass_in", *mass_in, q, "q", accumulation_type(q));
}

void check_block_backward(const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& segments, const at::Tensor& restart_edge,
                          const at::Tensor& restart_mass, const std::optional<at::Tensor>& mass_in,
                          const std::optional<at::Tensor>& prefix_in, const BlockOptions& options) {
    check_block(q, k, v, segments, mass_in, options);
    check_rows("do", d_o);
    check_same_dtype("do", d_o, q, "q");
    check_device("do", d_o, q, "q");
    const std::vector<c10::SymInt> shape = {q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)};
    TORCH_CHECK_VALUE(d_o.sym_sizes() == c10::SymIntArrayRef(shape), "do: shape must be that of the output, ",
                      c10::SymIntArrayRef(shape), ", got ", d_o.sym_sizes());
    const at::ScalarType wide = accumulation_type(q);
    check_row_values("restart_edge", restart_edge, q, "q", at::kInt);
    check_row_values("restart_mass", restart_mass, q, "q", wide);
    if (prefix_in.has_value()) check_row_values("prefix_in", *prefix_in, q, "q", wide);
}

void check_out_dtype(at::ScalarType type, const at::Tensor& q) {
    const at::ScalarType wide = accumulation_type(q);
    TORCH_CHECK_TYPE(type == wide || type == q.scalar_type(), "out_dtype must be ", wide, " or q's dtype ",
                     q.scalar_type(), ", got ", type);
}

at::ScalarType gradient_type(const at::Tensor& q, const at::Tensor& v, const BlockOptions& options,
                             at::ScalarType wanted) {
    return kernels_for(q, v, options).writes_gradients ? wanted : accumulation_type(q);
}

BlockGradients empty_gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const BlockOptions& options, at::ScalarType wanted) {
    const at::ScalarType type = gradient_type(q, v, options, wanted);
    const auto empty = [type](const at::Tensor& x) { return at::empty(x.sizes(), x.options().dtype(type)); };
    return {empty(q), empty(k), empty(v)};
}

BlockOutput block_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& segments, const std::optional<at::Tensor>& mass_in,
                          const BlockOptions& options, std::optional<at::ScalarType> o_dtype,
                          const std::optional<at::Tensor>& add_to) {
    check_block(q, k, v, segments, mass_in, options);
    const at::ScalarType o_type = o_dtype.value_or(accumulation_type(q));
    check_out_dtype(o_type, q);
    if (add_to.has_value()) check_add_to(*add_to, q, v, o_type);
    const SegmentTable table(segments, q, k.size(1));
    return run_forward({q, k, v, std::nullopt, table, contiguous(mass_in), options, add_to}, o_type);
}

BlockOutput block_forward_paged(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const at::Tensor& block_table, const at::Tensor& segments, const BlockOptions& options,
                                at::ScalarType o_dtype) {
    const SegmentTable table(segments, q, block_table.numel() * k.size(1));
    return run_forward({q, k, v, block_table, table, std::nullopt, options}, o_dtype);
}

at::Tensor block_backward(const at::Tensor& d_o_given, const at::Tensor& q_given, const at::Tensor& k_given,
                          const at::Tensor& v_given, const std::optional<at::Tensor>& segments,
                          const at::Tensor& restart_edge, const at::Tensor& restart_mass,
                          const std::optional<at::Tensor>& mass_in, const std::optional<at::Tensor>& prefix_in,
                          const BlockOptions& options, const BlockGradients& gradients,
                          std::optional<int64_t> max_seqlen_k) {
    check_block_backward(d_o_given, q_given, k_given, v_given, segments, restart_edge, restart_mass, mass_in, prefix_in,
                         options);
    check_edges(restart_edge);
    const DeviceScope scope(q_given.device());
    const at::Tensor q = aligned(q_given), k = aligned(k_given), v = aligned(v_given), d_o = aligned(d_o_given);
    const dispatch::Kernels& kernels = kernels_for(q, v, options);
    const SegmentTable table(segments, q, k.size(1));
    TORCH_CHECK_TYPE(!gradients.add_dq || gradients.dq.scalar_type() == accumulation_type(q), "dq: dtype must be ",
                     accumulation_type(q), " to add to it, got ", gradients.dq.scalar_type());
    const bool has_work = q.numel() > 0 && k.numel() > 0 && !table.empty();
    if (!kernels.writes_gradients || !has_work) clear_gradients(gradients);
    const std::optional<at::Tensor> carry = contiguous(mass_in), prefix = contiguous(prefix_in);
    const at::Tensor edge = restart_edge.contiguous(), mass = restart_mass.contiguous();

    const at::Tensor prefix_out = prefix.has_value() ? prefix->clone() : at::zeros_like(mass);
    auto params = with_inputs<BackwardParams>(q, k, v, table, options, carry);
    if (max_seqlen_k) params.segments.max_keys = int32_t(std::clamp<int64_t>(*max_seqlen_k, 1, kMaxRows));
    params.d_o = strided_rows<const void*>(d_o);
    params.dq = strided_rows<void*>(gradients.dq);
    params.dk = strided_rows<void*>(gradients.dk);
    params.dv = strided_rows<void*>(gradients.dv);
    params.grad_dtype = dtype_of(gradients.dq.scalar_type());
    params.add_dq = gradients.add_dq;
    params.restart = {edge.data_ptr<int32_t>(), mass.data_ptr()};
    params.prefix_in = data_or_null(prefix);
    params.prefix_out = prefix_out.data_ptr();
    params.workspace_bytes = kernels.backward_workspace(params, workspace_limit());
    const at::Tensor workspace = empty_workspace(params.workspace_bytes, q);
    params.workspace = workspace.data_ptr();
    kernels.backward(params, scope.stream());
    return prefix_out;
}

}  // namespace megatron_sb::ops
