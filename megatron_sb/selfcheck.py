"""Compare outputs, masses and gradients on this machine's devices with the float64 oracle (`megatron-sb check`)."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sb import reference
from megatron_sb.ops import stickbreaking_attention_varlen

# Bound of the relative error: one rounding of the operands and one of the result to this dtype, with a margin.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    """A call with packed documents."""

    dtype: torch.dtype
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    mean_logit: float
    attend_current: bool

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        current = ", attend_current" if self.attend_current else ""
        return (
            f"{name:8s} {len(self.lengths)} documents, {sum(self.lengths):5d} positions, heads {self.heads}:"
            f"{self.kv_heads}, head_dim {self.head_dim}, mean logit {self.mean_logit:g}{current}"
        )


CASES = tuple(
    Case(dtype, (700, 1, 0, 323), 4, kv_heads, head_dim, mean_logit, attend_current)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for kv_heads, head_dim, mean_logit, attend_current in (
        (4, 64, 0.0, False),
        (1, 128, -8.0, False),
        (2, 40, 5.0, True),
    )
)


def _inputs(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = sum(case.lengths)
    shift = (abs(case.mean_logit) * case.head_dim**0.5) ** 0.5
    tensors = []
    for heads, first in (
        (case.heads, shift),
        (case.kv_heads, shift if case.mean_logit > 0 else -shift),
        (case.kv_heads, 0),
    ):
        x = torch.randn(rows, heads, case.head_dim, generator=generator)
        x[..., 0] += first
        tensors.append(x.to(device, case.dtype))
    offsets = torch.tensor((0, *case.lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return (*tensors, offsets.to(device))


def _run(attention, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, attend_current: bool) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    o, mass = attention(*leaves, cu_seqlens, attend_current=attend_current, return_mass=True)
    generator = torch.Generator().manual_seed(1)
    d_o = torch.randn(o.shape, generator=generator).to(q)
    d_mass = torch.randn(mass.shape, generator=generator).to(mass)
    return [o, mass, *torch.autograd.grad((o, mass), leaves, (d_o.to(o.dtype), d_mass))]


def relative_errors(case: Case, device: torch.device) -> dict[str, float]:
    """Return the relative error of o, mass, dq, dk and dv against the oracle, in the Frobenius norm."""
    *qkv, cu_seqlens = _inputs(case, device)
    ours = _run(stickbreaking_attention_varlen, *qkv, cu_seqlens, case.attend_current)
    wide = [x.cpu().double() for x in qkv]
    exact = _run(reference.stickbreaking_attention_varlen, *wide, cu_seqlens.cpu(), case.attend_current)
    errors = {}
    for name, got, want in zip(("o", "mass", "dq", "dk", "dv"), ours, exact, strict=True):
        got, want = got.detach().cpu().double(), want.detach()
        errors[name] = float((got - want).norm() / want.norm().clamp_min(1e-300))
    return errors


def main() -> int:
    """Print one line for each case. Return 0 if every error is within its bound, else 1."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available() and "cuda" in torch.ops.megatron_sb.describe_kernels().lower():
        devices.append(torch.device("cuda"))
    failed = 0
    for device in devices:
        for case in CASES:
            start = time.perf_counter()
            errors = relative_errors(case, device)
            # Without the first key, a NaN is above no number.
            worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
            ok = all(error <= _TOLERANCE[case.dtype] for error in errors.values())
            failed += not ok
            print(
                f"{'ok  ' if ok else 'FAIL'} {device.type:4s} {case}: worst {worst} {errors[worst]:.1e}, bound "
                f"{_TOLERANCE[case.dtype]:.0e} ({time.perf_counter() - start:.1f} s)"
            )
    print("all cases pass" if not failed else f"{failed} cases FAILED")
    return 1 if failed else 0
