"""What differs between the Megatron-Core releases this package is tested with: 0.16.1 (Python 3.11), 0.19.2 (3.12).

| | 0.16 | 0.17 and later |
| --- | --- | --- |
| a layer spec's experts | `(module, submodules)` | a `functools.partial` of the module |
| `moe_utils.te_general_gemm` without Transformer Engine | a NameError where the router asks for it | None |
| `megatron.training` | in a Megatron-LM checkout | in the wheel, too |

`core_attention` is built and called alike in both, and `CheckedSelfAttention` passes on what either adds.
"""

from __future__ import annotations

import functools

from megatron.core.transformer.moe import moe_utils


def with_experts_module(experts, module: type):
    """What `grouped_mlp_modules` of a spec provider returned, with another module in the place of its own."""
    if isinstance(experts, tuple):
        return module, experts[1]
    return functools.partial(module, *experts.args, **experts.keywords)


def define_te_general_gemm() -> None:
    """Give the router the None that it takes for the absence of Transformer Engine's GEMM."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
