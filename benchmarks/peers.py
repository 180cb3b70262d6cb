"""The contenders: every attention that is measured, in the memory layout in which it is fastest.

torch contains cuDNN and FlashAttention-2. The other packages are optional. Python must find them: FlashAttention-4 as
`flash_attn.cute` (PyPI: flash-attn-4), and the two published stick-breaking kernels as `stickbreaking_attention`
(github.com/shawntan/stickbreaking-attention) and `fla` (PyPI: fla-core).

This library's gradients are bitwise repeatable. FlashAttention-4 has a deterministic mode with the same property, so
compare with that mode. Without it, the order in which its backward adds the gradients can change from run to run.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from report import FLASH_4, FLASH_4_DETERMINISTIC
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


def _installed(name: str, module: str, make: Callable[[ModuleType], Contender]) -> Contender:
    """Return make(module), or a contender that names the module as missing."""
    try:
        package = importlib.import_module(module)
    except Exception as error:  # a package that loads a compiler can also raise other errors
        return Contender(name, missing=f"Python cannot import {module} ({type(error).__name__}: {error})")
    return make(package)


def _flash_4(package: ModuleType, name: str, deterministic: bool) -> Contender:
    # Both functions return (o, log-sum-exp).
    def dense(q, k, v):
        return package.flash_attn_func(q, k, v, causal=True, deterministic=deterministic)[0]

    def packed(q, k, v, cu_seqlens, longest):
        offsets = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        bounds = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        options = {**offsets, **bounds, "causal": True, "deterministic": deterministic}
        return package.flash_attn_varlen_func(q, k, v, **options)[0]

    return Contender(name, dense, packed, heads_first=False, packed_heads_first=False)


def _triton(package: ModuleType) -> Contender:
    def dense(q, k, v):
        return package.sb_attn(q, k, v)[0]

    def packed(q, k, v, cu_seqlens, longest):
        return package.sb_attn_varlen(q, k, v, cu_seqlens[1:], longest, zero_start=False)[0]

    return Contender("Triton", dense, packed, slow=True)


def _flash_linear_attention(package: ModuleType) -> Contender:
    attention = package.parallel_stickbreaking_attn

    def dense(q, k, v):
        return attention(q, k, v)[0]

    def packed(q, k, v, cu_seqlens, longest):
        return attention(q[None], k[None], v[None], cu_seqlens=cu_seqlens.long())[0][0]

    return Contender("fla", dense, packed, heads_first=False, packed_heads_first=False, slow=True)


def _installed_flash_4(name: str, deterministic: bool) -> Contender:
    return _installed(name, "flash_attn.cute", lambda package: _flash_4(package, name, deterministic))


def _installed_triton() -> Contender:
    # Its kernels read global variables. Newer versions of Triton compile that only with this variable set.
    os.environ.setdefault("TRITON_ALLOW_NON_CONSTEXPR_GLOBALS", "1")
    return _installed("Triton", "stickbreaking_attention", _triton)


# Makers by the name on the command line, in the order of the tables.
_MAKERS = {
    "ours": ours,
    "cudnn": lambda: _softmax("cuDNN", SDPBackend.CUDNN_ATTENTION, None),
    "flash": lambda: _softmax("FlashAttention-2", SDPBackend.FLASH_ATTENTION, _flash_packed()),
    "flash4": lambda: _installed_flash_4(FLASH_4, deterministic=False),
    "flash4-deterministic": lambda: _installed_flash_4(FLASH_4_DETERMINISTIC, deterministic=True),
    "triton": _installed_triton,
    "fla": lambda: _installed("fla", "fla.ops.stickbreaking_attn", _flash_linear_attention),
}
NAMES = tuple(_MAKERS)


def contenders(names: list[str]) -> list[Contender]:
    """Return the named contenders, in this order."""
    return [_MAKERS[name]() for name in names]
