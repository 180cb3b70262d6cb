"""The contenders: every attention that is measured, in the memory layout in which it is fastest.

torch contains the two softmax kernels. The two published stick-breaking packages must be on PYTHONPATH:
`stickbreaking_attention` (github.com/shawntan/stickbreaking-attention) and `fla` (PyPI: fla-core).
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import megatron_sb

# attention(q, k, v) -> o, and attention(q, k, v, cu_seqlens, longest) -> o
Dense = Callable[[Tensor, Tensor, Tensor], Tensor]
Packed = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Contender:
    """One attention.

    Attributes:
        name: its name in the tables.
        dense: attention(q, k, v) -> o.
        packed: attention(q, k, v, cu_seqlens, longest) -> o. None: not supported.
        heads_first: whether `dense` takes (b, h, s, d) rather than (b, s, h, d).
        packed_heads_first: whether `packed` takes (h, t, d) rather than (t, h, d).
        slow: whether it runs at one length only.
        missing: why it cannot run here. None: it can.
    """

    name: str
    dense: Dense | None = None
    packed: Packed | None = None
    heads_first: bool = True
    packed_heads_first: bool = True
    slow: bool = False
    missing: str | None = None

    def in_layout(self, x: Tensor) -> Tensor:
        """Copy x, (b, s, h, d) or (t, h, d), into a contiguous tensor of this contender's layout."""
        heads_first = self.heads_first if x.dim() == 4 else self.packed_heads_first
        return (x.transpose(-3, -2) if heads_first else x).detach().clone(memory_format=torch.contiguous_format)


def ours(name: str = "ours", **options) -> Contender:
    """Return this library's attention with some options set."""

    def dense(q, k, v):
        return megatron_sb.stickbreaking_attention(q, k, v, **options)

    def packed(q, k, v, cu_seqlens, longest):
        return megatron_sb.stickbreaking_attention_varlen(q, k, v, cu_seqlens, longest, **options)

    return Contender(name, dense, packed, heads_first=False, packed_heads_first=False)


def _softmax(name: str, backend: SDPBackend, packed: Packed | None) -> Contender:
    def dense(q, k, v):
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    return Contender(name, dense, packed, packed_heads_first=False)


def _flash_packed() -> Packed | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None

    def packed(q, k, v, cu_seqlens, longest):
        return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0))

    return packed


def _triton() -> Contender:
    # Its kernels read global variables. Newer versions of Triton compile that only with this variable set.
    os.environ.setdefault("TRITON_ALLOW_NON_CONSTEXPR_GLOBALS", "1")
    try:
        package = importlib.import_module("stickbreaking_attention")
    except ImportError as error:
        return Contender("Triton", missing=f"stickbreaking_attention is not on PYTHONPATH ({error})")

    def dense(q, k, v):
        return package.sb_attn(q, k, v)[0]

    def packed(q, k, v, cu_seqlens, longest):
        return package.sb_attn_varlen(q, k, v, cu_seqlens[1:], longest, zero_start=False)[0]

    return Contender("Triton", dense, packed, slow=True)


def _flash_linear_attention() -> Contender:
    try:
        attention = importlib.import_module("fla.ops.stickbreaking_attn").parallel_stickbreaking_attn
    except ImportError as error:
        return Contender("fla", missing=f"fla is not on PYTHONPATH ({error})")

    def dense(q, k, v):
        return attention(q, k, v)[0]

    def packed(q, k, v, cu_seqlens, longest):
        return attention(q[None], k[None], v[None], cu_seqlens=cu_seqlens.long())[0][0]

    return Contender("fla", dense, packed, heads_first=False, packed_heads_first=False, slow=True)


def contenders(names: list[str]) -> list[Contender]:
    """Return the named contenders, in this order."""
    makers = {
        "ours": ours,
        "cudnn": lambda: _softmax("cuDNN", SDPBackend.CUDNN_ATTENTION, None),
        "flash": lambda: _softmax("FlashAttention-2", SDPBackend.FLASH_ATTENTION, _flash_packed()),
        "triton": _triton,
        "fla": _flash_linear_attention,
    }
    return [makers[name]() for name in names]


NAMES = ("ours", "cudnn", "flash", "triton", "fla")
