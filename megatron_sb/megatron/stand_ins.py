"""Plain torch for what Megatron-Core has only with Transformer Engine or Apex, for layer specs of the "local" kind.

`install_stand_ins` puts them where Megatron-Core looks; the launcher calls it, scripts of one's own may. It changes
three places, for the whole process, and nothing in a model built with Transformer Engine:

- `WrappedTorchNorm` makes a `TorchNorm`, which allows sequence parallelism (`--sequence-parallel`).
- Local layer specs with `--moe-grouped-gemm` get `GroupedExperts`.
- `moe_utils.te_general_gemm` is None where it has no value (Megatron-Core 0.16): routers multiply by torch.
"""

from __future__ import annotations

import functools

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor
from torch.nn.functional import grouped_mm

from megatron_sb.megatron import versions

# Rows of a grouped product begin at multiples of 16 bytes: 8 numbers of 16 bits.
GROUPED_MULTIPLE = 8
# (field of TransformerConfig, flag, the value GroupedExperts needs). A core without the field has that value.
GROUPED_REFUSALS = (
    ("add_bias_linear", "--disable-bias-linear", False),
    ("fp8", "--fp8-format", None),
    ("fp4", "--fp4-format", None),
    ("moe_apply_probs_on_input", "--moe-apply-probs-on-input", False),
    ("activation_func_clamp_value", "--activation-func-clamp-value", None),
    ("glu_linear_offset", "--glu-linear-offset", 0.0),
)


@functools.cache
def install_stand_ins() -> None:
    """See the module; a second call does nothing."""
    versions.define_te_general_gemm()
    WrappedTorchNorm.__new__ = TorchNorm.__new__
    stock = LocalSpecProvider.grouped_mlp_modules

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *legacy):
        experts = stock(self, False, *legacy)
        return versions.with_experts_module(experts, GroupedExperts) if moe_use_grouped_gemm else experts

    LocalSpecProvider.grouped_mlp_modules = grouped_mlp_modules


class TorchNorm:
    """torch's LayerNorm or RMSNorm, by `config.normalization`, with weights that the trainer knows how to reduce.

    Under sequence parallelism every tensor-parallel rank normalises its part of a sequence, and Megatron sums the
    gradients of parameters that carry `sequence_parallel` over those ranks. Whether a kernel is persistent
    (`config.persist_layer_norm`) makes no difference here.

    Raises ValueError for another normalization, for zero-centred weights and for `memory_efficient_layer_norm`.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **unused) -> torch.nn.Module:
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in kinds:
            raise ValueError(
                f"config.normalization={config.normalization!r} (--normalization) needs Transformer Engine; without it "
                f"allowed: {', '.join(map(repr, kinds))}"
            )
        for name, flag in (
            ("layernorm_zero_centered_gamma", "--apply-layernorm-1p"),
            ("memory_efficient_layer_norm", "--memory-efficient-layer-norm"),
        ):
            if getattr(config, name):
                raise ValueError(f"config.{name}=True ({flag}) needs Transformer Engine or Apex; it must be False")
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class GroupedExperts(SequentialMLP):
    """Megatron's `SequentialMLP` with all local experts in two grouped products (torch's `grouped_mm`).

    Parameters, checkpoints and their resharding are those of `SequentialMLP`. `grouped_mm` has a kernel for bf16 from
    sm_90 on and multiplies expert by expert elsewhere. The experts' weights are separate tensors and are copied into
    one, in the forward and in the backward, and not kept between the two.

    Raises ValueError for sizes that are no multiple of 8 and for a setting that it cannot honour, by name.
    """

    def __init__(self, num_local_experts, config, submodules, **kwargs):
        _refuse_grouped(config)
        super().__init__(num_local_experts, config, submodules, **kwargs)
        hidden, intermediate = self.local_experts[0].linear_fc2.weight.shape
        if hidden % GROUPED_MULTIPLE or intermediate % GROUPED_MULTIPLE:
            raise ValueError(
                f"--moe-grouped-gemm with hidden_size={hidden} and {intermediate} of moe_ffn_hidden_size on a rank: "
                f"both must be multiples of {GROUPED_MULTIPLE}"
            )

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Every row through its expert, times its probability.

        Args:
            permuted_local_hidden_states: (t, hidden), the rows of expert 0 first, then those of expert 1, and so on.
            tokens_per_expert: (num_local_experts,) integers that add up to t, on any device.
            permuted_probs: (t,).

        Returns:
            (t, hidden) and no bias.
        """
        rows = permuted_local_hidden_states
        ends = tokens_per_expert.to(rows.device).cumsum(0, dtype=torch.int32)
        inner = _GroupedLinear.apply(rows, ends, *(expert.linear_fc1.weight for expert in self.local_experts))
        if self.config.gated_linear_unit:
            gate, inner = inner.chunk(2, dim=-1)
            inner = self.config.activation_func(gate) * inner
        else:
            inner = self.config.activation_func(inner)
        inner = (inner * permuted_probs[:, None]).to(rows.dtype)
        return _GroupedLinear.apply(inner, ends, *(expert.linear_fc2.weight for expert in self.local_experts)), None


class _GroupedLinear(torch.autograd.Function):
    """x: (t, k), the rows of each weight (n, k) up to its entry of `ends` -> (t, n)."""

    @staticmethod
    def forward(ctx, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        x, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grouped_mm(grad, torch.stack(weights), offs=ends)
        return grad_x, None, *grouped_mm(grad.t(), x, offs=ends).unbind()


def _refuse_grouped(config) -> None:
    for name, flag, required in GROUPED_REFUSALS:
        value = getattr(config, name, required)
        if value != required:
            raise ValueError(
                f"--moe-grouped-gemm without Transformer Engine cannot run with config.{name}={value!r} ({flag}); "
                f"it must be {required!r}"
            )
    if config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules:
        raise ValueError(
            f"--moe-grouped-gemm without Transformer Engine cannot run with config.recompute_modules="
            f"{config.recompute_modules!r} (--recompute-modules): moe_act is not allowed"
        )
