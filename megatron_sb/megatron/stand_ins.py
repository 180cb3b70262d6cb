"""Plain torch replacements for modules that Megatron-Core has only with Transformer Engine or Apex.

`install_stand_ins` installs them for layer specs of the "local" kind. The launcher calls it. In your own script, call
it before you build a model. It changes six places in Megatron-Core, for the whole process. Only the last change affects
models that use Transformer Engine.

- `WrappedTorchNorm` makes a `TorchNorm`, which supports sequence parallelism (`--sequence-parallel`).
- Local layer specs with `--moe-grouped-gemm` get `GroupedExperts`.
- `moe_utils.te_general_gemm` is None if it is undefined (Megatron-Core 0.16), so that routers use torch.
- `multi_latent_attention.HAVE_TE` tells whether Transformer Engine is installed (its value is wrong in Megatron-Core
  0.16).
- `DistributedOptimizer` loads the step count of torch's AdamW from its checkpoints (see optimizer_steps.py).
- `DistributedOptimizer` saves models with several buckets of gradients without errors (see optimizer_buckets.py).
  Megatron-Core before 0.20 needs this with and without Transformer Engine.
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
from megatron_sb.megatron.optimizer_buckets import index_without_padding
from megatron_sb.megatron.optimizer_steps import load_step_counts

# Rows of a grouped product must start at multiples of 16 bytes: 8 numbers of 16 bits.
GROUPED_MULTIPLE = 8
# (field of TransformerConfig, flag, required value). A missing field passes the check.
GROUPED_REQUIREMENTS = (
    ("add_bias_linear", "--disable-bias-linear", False),
    ("fp8", "--fp8-format", None),
    ("fp4", "--fp4-format", None),
    ("moe_apply_probs_on_input", "--moe-apply-probs-on-input", False),
    ("activation_func_clamp_value", "--activation-func-clamp-value", None),
    ("glu_linear_offset", "--glu-linear-offset", 0.0),
)


@functools.cache
def install_stand_ins() -> None:
    """Install the replacements listed above. Further calls have no effect.

    Example:
        >>> from megatron_sb.megatron import install_stand_ins
        >>> install_stand_ins()  # before the model is built
    """
    versions.define_te_general_gemm()
    versions.define_te_of_latent_attention()
    load_step_counts()
    index_without_padding()
    WrappedTorchNorm.__new__ = TorchNorm.__new__
    stock = LocalSpecProvider.grouped_mlp_modules

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *legacy):
        experts = stock(self, False, *legacy)
        return versions.with_experts_module(experts, GroupedExperts) if moe_use_grouped_gemm else experts

    LocalSpecProvider.grouped_mlp_modules = grouped_mlp_modules


class TorchNorm:
    """Make torch's LayerNorm or RMSNorm, as `config.normalization` selects, for use with sequence parallelism.

    Under sequence parallelism every tensor-parallel rank normalises its shard of a sequence. Megatron sums the
    gradients of parameters with the attribute `sequence_parallel` over those ranks. `config.persist_layer_norm` has no
    effect.

    Raises:
        ValueError: if config selects another normalization, zero-centred weights or `memory_efficient_layer_norm`.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **unused) -> torch.nn.Module:
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in kinds:
            raise ValueError(
                f"config.normalization (--normalization) must be one of {', '.join(map(repr, kinds))} without "
                f"Transformer Engine, got {config.normalization!r}."
            )
        for name, flag in (
            ("layernorm_zero_centered_gamma", "--apply-layernorm-1p"),
            ("memory_efficient_layer_norm", "--memory-efficient-layer-norm"),
        ):
            if getattr(config, name):
                raise ValueError(f"config.{name} ({flag}) must be False without Transformer Engine or Apex, got True.")
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class GroupedExperts(SequentialMLP):
    """Megatron's `SequentialMLP`, computed as two grouped products over all local experts (torch's `grouped_mm`).

    Parameters, checkpoints and resharding are those of `SequentialMLP`. `grouped_mm` has a bf16 kernel for sm_90 and
    later; elsewhere it multiplies expert by expert. The weights of the experts are separate tensors. The
    forward and the backward each copy them into one tensor, which is freed in between.

    Raises:
        ValueError: if a size is not a multiple of 8, or a setting is not supported.
    """

    def __init__(self, num_local_experts, config, submodules, **kwargs):
        _check_config(config)
        super().__init__(num_local_experts, config, submodules, **kwargs)
        hidden, intermediate = self.local_experts[0].linear_fc2.weight.shape
        if hidden % GROUPED_MULTIPLE or intermediate % GROUPED_MULTIPLE:
            raise ValueError(
                "hidden_size and moe_ffn_hidden_size on a rank must be multiples of "
                f"{GROUPED_MULTIPLE} with --moe-grouped-gemm, got {hidden} and {intermediate}."
            )

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Apply to each row the expert that it belongs to, and multiply by the probability of the row.

        Args:
            permuted_local_hidden_states: (t, hidden), the rows of expert 0, then those of expert 1, and so on.
            tokens_per_expert: (num_local_experts,) integers that add up to t, on any device.
            permuted_probs: (t,).

        Returns:
            (t, hidden), and None for the bias.
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
    """Multiply rows of x (t, k) by their weight (n, k): (t, n). Weight i has the rows ends[i - 1] to ends[i] - 1."""

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


def _check_config(config) -> None:
    for name, flag, required in GROUPED_REQUIREMENTS:
        value = getattr(config, name, required)
        if value != required:
            raise ValueError(
                f"config.{name} ({flag}) must be {required!r} with --moe-grouped-gemm without Transformer Engine, got "
                f"{value!r}."
            )
    if config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules:
        raise ValueError(
            "config.recompute_modules (--recompute-modules) must not contain moe_act with --moe-grouped-gemm without "
            f"Transformer Engine, got {config.recompute_modules!r}."
        )
