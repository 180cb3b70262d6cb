"""Position encodings: RoPE with linear, NTK and YaRN scaling, ALiBi and FIRE."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from megatron_sb.baselines.autocast import without_autocast
from megatron_sb.baselines.softmax.compiled import compiled
from megatron_sb.baselines.softmax.offsets import row_positions, shared_by_layers
from megatron_sb.validation import check_choice, check_counts, check_number, check_tensor

RotaryKind = Literal["none", "linear", "ntk", "yarn"]

# YaRN keeps the pairs that turn YARN_FAST times or more in the trained context, stretches those that turn YARN_SLOW
# times or less, and blends the pairs in between by their index.
YARN_SLOW, YARN_FAST = 1.0, 32.0
_FIRE_EPS = 1e-6


@dataclass(frozen=True)
class RotaryScaling:
    """Scale rotary positions so that a longer context looks like the trained one.

    Args:
        kind: "none"; "linear", which divides positions by `factor` (Chen et al., arXiv 2306.15595); "ntk", which
            multiplies the base by factor ** (d / (d - 2)); or "yarn" (Peng et al., arXiv 2309.00071). NTK scaling
            stretches the longest wavelength by `factor` and keeps the shortest. YaRN stretches the wavelengths that
            are long for the trained context by `factor`, keeps the short ones, and multiplies q and k by
            0.1 log(factor) + 1. It blends those in between by the index of the pair, as the authors' code and
            transformers do. The paper's equation 18 blends them by their turns. Default "none".
        factor: new context divided by trained context, at least 1. Default 1.
        trained_context: tokens. Only "yarn" reads it, and needs it. Default None.

    Raises:
        ValueError: if `kind` is unknown, `factor` is below 1 or not finite, or "yarn" has no trained_context.
        TypeError: if `factor` is not a number.

    Example:
        >>> from megatron_sb.baselines.softmax import RotaryScaling, SoftmaxAttention
        >>> attention = SoftmaxAttention(num_heads=4, head_dim=32)
        >>> attention.scaling = RotaryScaling("ntk", factor=4.0)
    """

    kind: RotaryKind = "none"
    factor: float = 1.0
    trained_context: int | None = None

    def __post_init__(self):
        """Validate the fields."""
        check_choice("kind", self.kind, get_args(RotaryKind))
        check_number("factor", self.factor, "a finite number of at least 1", lambda x: 1 <= x < math.inf)
        if self.kind == "yarn":
            check_counts({"trained_context": self.trained_context})


@shared_by_layers
def rotary_cos_sin(
    lengths: tuple[int, ...],
    head_dim: int,
    base: float,
    scaling: RotaryScaling,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every row's angles, (s, 1, d / 2) each, times YaRN's factor of q and k.

    They are computed in float64.
    """
    position = row_positions(lengths, device).double()
    if scaling.kind == "linear":
        position = position / scaling.factor
    if scaling.kind == "ntk":
        base = base * scaling.factor ** (head_dim / (head_dim - 2))
    inverse_wavelengths = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    amplitude = 1.0
    if scaling.kind == "yarn":
        stretched = _yarn_stretched(head_dim, base, scaling.trained_context).to(device)
        inverse_wavelengths = inverse_wavelengths * (1 - stretched + stretched / scaling.factor)
        amplitude = 0.1 * math.log(scaling.factor) + 1
    angle = position[:, None, None] * inverse_wavelengths
    return (amplitude * angle.cos()).to(dtype), (amplitude * angle.sin()).to(dtype)


def _yarn_stretched(head_dim: int, base: float, trained_context: int) -> Tensor:
    """Return how much YaRN stretches each pair (d / 2,), from 0, kept, to 1, stretched by the whole factor."""

    def pair_with(turns: float) -> float:
        return head_dim * math.log(trained_context / (2 * math.pi * turns)) / (2 * math.log(base))

    # The authors' code rounds both ends away from each other, so that no pair in between is left out.
    last_kept = max(math.floor(pair_with(YARN_FAST)), 0)
    first_stretched = min(math.ceil(pair_with(YARN_SLOW)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    return ((pairs - last_kept) / max(first_stretched - last_kept, 1e-3)).clamp(0, 1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


_compiled_rotate = compiled(_rotate)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + d / 2]) of x (b, s, h, d)."""
    return (_compiled_rotate if x.is_cuda else _rotate)(x, cos, sin)


def alibi_slopes(num_heads: int) -> list[float]:
    """Return ALiBi's slope of each head (Press et al., arXiv 2108.12409, section 3).

    The slopes of n heads are the geometric sequence 2^(-8 / n), 2^(-16 / n), ... If n is not a power of two, the slopes
    are those of the next lower power of two, followed by every second slope of the next higher power of two, as in the
    authors' code.

    Args:
        num_heads: h, at least 1.

    Returns:
        h slopes.

    Raises:
        ValueError: if num_heads is not an int of at least 1.

    Example:
        >>> alibi_slopes(4)
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    check_counts({"num_heads": num_heads})
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * (num_heads - power), 2)]


@shared_by_layers
def alibi_slope_tensor(slopes: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the slopes of h heads as a tensor (h,)."""
    return torch.tensor(slopes, dtype=dtype, device=device)


class FireBias(nn.Module):
    """Compute FIRE's bias (Li et al., arXiv 2310.04418), a learned function of the relative distance.

    b(i, j) = f(psi(j - i) / (psi(max(L, j)) + 1e-6)),  psi(x) = log(c x + 1),  f(x) = W_2 relu(W_1 x + b_1) + b_2

    Widths, initial values, the 1e-6, positions from 0, c = |parameter| and L = |factor * threshold| follow the listing
    in the paper's appendix. L is learned through its factor, which is near 1 and learns as fast as other parameters.

    Args:
        num_heads: h, the number of outputs of f.
        hidden_size: width of the hidden layer of f. Default 32.
        c: initial value of c. Default 0.1.
        threshold: initial value of L, in tokens. Queries at positions up to L share one scale. Default 512.
        device: device of the parameters c, threshold_factor, hidden.* and out.*.
        dtype: dtype of the parameters.

    Raises:
        TypeError: if c or threshold is not a number.
        ValueError: if a size is not an int of at least 1, or c or threshold is not finite and above 0.

    Example:
        >>> bias = FireBias(num_heads=4)
        >>> bias(torch.arange(8.0), torch.arange(8.0)).shape
        torch.Size([4, 8, 8])
    """

    def __init__(
        self,
        num_heads: int,
        hidden_size: int = 32,
        c: float = 0.1,
        threshold: float = 512.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts({"num_heads": num_heads, "hidden_size": hidden_size})
        for name, value in (("c", c), ("threshold", threshold)):
            check_number(name, value, "a finite number above 0", lambda x: 0 < x < math.inf)
        kind = {"device": device, "dtype": dtype}
        self.initial_c, self.threshold = c, threshold
        self.c = nn.Parameter(torch.empty((), **kind))
        self.threshold_factor = nn.Parameter(torch.empty((), **kind))
        self.hidden = nn.Linear(1, hidden_size, **kind)
        self.out = nn.Linear(hidden_size, num_heads, **kind)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset c and the factor of L. The linear layers reset themselves."""
        nn.init.constant_(self.c, self.initial_c)
        nn.init.constant_(self.threshold_factor, 1.0)

    def forward(self, query_position: Tensor, key_position: Tensor, heads: tuple[int, int] | None = None) -> Tensor:
        """Compute the bias of every pair of query and key.

        Args:
            query_position: (r,), floating point. Parameters are converted to its dtype, and autocast is ignored: in
                bfloat16 neighbouring positions would be equal.
            key_position: (n,), in the dtype of query_position.
            heads: first head and end of the heads to compute. Default None: all.

        Returns:
            (h, r, n) in the dtype of query_position, h the number of these heads. Entries of keys after the query have
            no meaning.

        Raises:
            TypeError: if positions are no tensors of one floating-point dtype.
            ValueError: if positions do not have one dimension.
        """
        for name, x in (("query_position", query_position), ("key_position", key_position)):
            check_tensor(name, x)
            if x.dim() != 1:
                raise ValueError(f"{name} must have one dimension, got shape {tuple(x.shape)}.")
        if not query_position.is_floating_point():
            raise TypeError(f"query_position must have a floating-point dtype, got {query_position.dtype}.")
        if key_position.dtype != query_position.dtype:
            raise TypeError(
                f"key_position must have the dtype of query_position, {query_position.dtype}, got {key_position.dtype}."
            )
        with without_autocast(query_position):
            return self._bias(query_position, key_position, slice(*heads or (None,)))

    def _bias(self, query_position: Tensor, key_position: Tensor, heads: slice) -> Tensor:
        dtype = query_position.dtype
        c, threshold = self.c.abs().to(dtype), (self.threshold_factor * self.threshold).abs().to(dtype)
        # The mask removes future keys later. Without the clamp their logarithm is NaN, which reaches the gradients.
        distance = (query_position[:, None] - key_position).clamp(min=0)
        normalizer = torch.log1p(c * torch.maximum(query_position, threshold)) + _FIRE_EPS
        x = torch.log1p(c * distance) / normalizer[:, None]
        network = _fused_fire_network if x.is_cuda else _fire_network
        hidden, out = self.hidden, self.out
        parameters = (hidden.weight, hidden.bias, out.weight[heads], out.bias[heads])
        return network(x, *(p.to(dtype) for p in parameters))


def _fire_network(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor) -> Tensor:
    """Apply f to x (r, n) -> (h, r, n)."""
    return linear(linear(x[..., None], weight, bias).relu(), out_weight, out_bias).permute(2, 0, 1)


@functools.partial(compiled, dynamic=True)
def _fused_fire_network(x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor) -> Tensor:
    """Compute `_fire_network` as sums. The compiler fuses them, so memory never holds the hidden layer."""
    hidden = (x[..., None] * weight[:, 0] + bias).relu()
    return (hidden * out_weight[:, None, None]).sum(-1) + out_bias[:, None, None]
