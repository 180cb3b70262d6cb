"""Differences between Megatron-Core 0.16.1 and 0.19.2, the releases that this package is tested with.

| | 0.16 | 0.17 and later |
| --- | --- | --- |
| a layer spec's mixture of experts, and its experts | a ModuleSpec each | a `functools.partial` of the module each |
| experts of a spec provider | `(module, submodules)` | that `functools.partial` |
| `moe_utils.te_general_gemm` without Transformer Engine | undefined, and the router raises NameError | None |
| `multi_latent_attention.HAVE_TE` without Transformer Engine | True, and building a layer raises TypeError | False |
| values of packed multi-latent attention | as they are | padded to the channels of the keys (0.19) |
| `megatron.training` | in a Megatron-LM checkout | also in the wheel |

From 0.19 on, a router multiplies its auxiliary losses by the tokens of a micro-batch on all ranks. Older routers
multiply them by the tokens on their own rank. Both releases build and call `core_attention` in the same way.
`CheckedAttention` passes on the arguments that only one of them has.
"""

from __future__ import annotations

import functools

import megatron.core
from megatron.core.extensions import transformer_engine
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

# Later releases may sum the gradient of the key channels that all heads of multi-latent attention share over
# tensor-parallel ranks, with this function (https://github.com/NVIDIA/Megatron-LM/issues/1699).
SUMS_SHARED_GRADIENT = hasattr(multi_latent_attention, "copy_to_tensor_model_parallel_region")
_VERSION = tuple(map(int, megatron.core.__version__.split(".")[:2]))
ROUTER_COUNTS_ALL_RANKS = _VERSION >= (0, 19)
INDEXES_WITHOUT_PADDING = _VERSION >= (0, 20)  # see optimizer_buckets.py


def with_experts_module(experts, module: type):
    """Replace the module in `experts`, the result of a spec provider's `grouped_mlp_modules`."""
    if isinstance(experts, tuple):
        return module, experts[1]
    return functools.partial(module, *experts.args, **experts.keywords)


def replace_experts(layer_spec, replace) -> None:
    """Replace the experts' module by `replace(module)` in a layer spec with a mixture of experts."""
    mixture = layer_spec.submodules.mlp
    submodules = mixture.keywords["submodules"] if isinstance(mixture, functools.partial) else mixture.submodules
    experts = submodules.experts
    if isinstance(experts, functools.partial):
        submodules.experts = with_experts_module(experts, replace(experts.func))
    else:
        experts.module = replace(experts.module)


def define_te_general_gemm() -> None:
    """Define the router's Transformer Engine GEMM as None, which means that it is absent."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def define_te_of_latent_attention() -> None:
    """Say in the module of multi-latent attention whether Transformer Engine is installed."""
    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE
