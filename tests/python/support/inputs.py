"""Random inputs of attention with a given distribution of the logits."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Regime:
    """Mean and standard deviation of the logits, at the default scale."""

    mean: float
    spread: float = 1.0


REGIMES = {
    "randn": Regime(0.0),
    "zeros": Regime(0.0, 0.0),
    "mean -3.2": Regime(-3.2),
    "mean -6": Regime(-6.0),
    "mean -8": Regime(-8.0, 2.0),
    "mean -11": Regime(-11.0),
    "saturated +5": Regime(5.0),
    "saturated +15": Regime(15.0, 2.0),
    "saturated +30": Regime(30.0, 2.0),
    "alternating": Regime(12.0, 13.0),
}


@dataclass
class Inputs:
    """Inputs of an attention, and gradients of its results.

    Dense: q (b, s, h, d), k (b, s_k, h_kv, d), v (b, s_k, h_kv, d_v), do (b, s, h, d_v), dmass (b, h, s).
    Packed: q (t, h, d), k (t_k, h_kv, d), v (t_k, h_kv, d_v), do (t, h, d_v), dmass (h, t).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dmass: Tensor

    def packed(self) -> "Inputs":
        """Return a batch of one as one stream of packed rows."""
        return Inputs(*(x[0] for x in (self.q, self.k, self.v, self.do, self.dmass)))


def make_inputs(
    regime: str = "randn",
    *,
    b: int = 1,
    s: int = 64,
    s_k: int | None = None,
    h: int = 2,
    h_kv: int | None = None,
    d: int = 16,
    d_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Inputs:
    """Return inputs of a regime on torch's default device. s_k defaults to s, h_kv to h, d_v to d.

    The same seed gives the same numbers in any dtype, up to rounding.
    """
    s_k, h_kv, d_v = s if s_k is None else s_k, h_kv or h, d_v or d
    device = torch.get_default_device()
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    mean, spread = REGIMES[regime].mean, REGIMES[regime].spread
    q, k, v = randn(b, s, h, d), randn(b, s_k, h_kv, d), randn(b, s_k, h_kv, d_v)
    q *= spread
    if mean:  # the first component of q and k gives the logits their mean, the others their spread
        root = (abs(mean) * d**0.5) ** 0.5
        q[..., 0], k[..., 0] = root, math.copysign(root, mean)
    rest = randn(b, s, h, d_v), randn(b, h, s)
    q, k, v, do = (x.to(dtype) for x in (q, k, v, rest[0]))
    return Inputs(q, k, v, do, rest[1].to(torch.float64 if dtype == torch.float64 else torch.float32))


def strided(kind: str, x: Inputs) -> list[Tensor]:
    """Return q, k and v of dense inputs with the same values and other strides."""
    if kind == "sbhd transpose":
        return [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x.q, x.k, x.v)]
    if kind == "bhsd transpose":
        return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x.q, x.k, x.v)]
    if kind == "fused qkv":
        return list(torch.cat([x.q, x.k, x.v], dim=2).split([x.q.shape[2], x.k.shape[2], x.v.shape[2]], dim=2))
    if kind == "fused kv in head_dim":
        return [x.q, *torch.cat([x.k, x.v], dim=3).split([x.k.shape[3], x.v.shape[3]], dim=3)]
    if kind == "every second row and head":
        return [t.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)[:, ::2, ::2] for t in (x.q, x.k, x.v)]
    if kind == "misaligned":
        return [torch.cat([t.new_zeros(3), t.flatten()])[3:].view_as(t) for t in (x.q, x.k, x.v)]
    if kind == "last stride of two":
        return [t.repeat_interleave(2, dim=3)[..., ::2] for t in (x.q, x.k, x.v)]
    if kind == "last dimension transposed":
        return [t.transpose(1, 3).contiguous().transpose(1, 3) for t in (x.q, x.k, x.v)]
    raise AssertionError(kind)


STRIDES = (
    "sbhd transpose",
    "bhsd transpose",
    "fused qkv",
    "fused kv in head_dim",
    "every second row and head",
    "misaligned",
    "last stride of two",
    "last dimension transposed",
)
