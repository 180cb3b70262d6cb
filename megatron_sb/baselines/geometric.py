"""Geometric attention of the Neural Data Router, for encoders. Nearer keys take their part of the stick first.

Csordás, Irie and Schmidhuber, The Neural Data Router, arXiv 2110.07732, eq. 7. For query i and keys j != i:

    z_ij = scale * q_i . k_j + (right_i if j > i else left_i)       P_ij = sigmoid(z_ij)
    A_ij = P_ij * prod_{n in S_ij} (1 - P_in)                       o_i = sum_j A_ij v_j

S_ij contains the positions nearer to i than j, without i and j. Of two keys at the same distance the right one is
nearer: |i - n| < |i - j| if j > i, and |i - n| <= |i - j| if j < i. No position attends to itself. This is
stick-breaking attention with keys on both sides, ordered by distance instead of newest first.

The order and the logits were checked against the authors' code, github.com/RobertCsordas/ndr. That code has two
features that the formula and this file do not have. One is dropout on the keys of the content logits. The other divides
each row of A by its sum; the authors' configurations of the data router disable it. Rows of A here sum to at most 1.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid, pad

from megatron_sb.baselines.autocast import without_autocast
from megatron_sb.validation import check_counts, check_finite, check_tensor, head_dim_of

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Largest number of attention weights in memory at a time: 32 MiB for each copy in fp32. The backward holds about ten
# copies.
_MAX_WEIGHTS_PER_CHUNK = 2**23


def geometric_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend to the keys on both sides, nearest first (arXiv 2110.07732, eq. 7).

    The function is differentiable once. Memory is O(s): query rows are computed in chunks, and again in the backward.
    bf16 and fp16 are computed in fp32.

    Args:
        q: (b, s, h, d), in bf16, fp16, fp32 or fp64.
        k: (b, s, h, d), in q's dtype.
        v: (b, s, h, d_v), in q's dtype.
        left: (b, s, h), in any of these dtypes. Added to query i's logits of all keys j < i; -inf hides those keys.
        right: (b, s, h), in any of these dtypes. The same for keys j > i.
        key_padding_mask: bool (b, s), True at padded positions. The values of these positions are not read, their
            weights are 0, and their output and gradients are 0. The distances of other positions do not change. Default
            None: no padding.
        scale: factor of the content logits. Default None: 1 / sqrt(d).

    Returns:
        o (b, s, h, d_v) in q's dtype. Gradients have the dtypes of their arguments.

    Raises:
        TypeError: if an argument has the wrong type or dtype.
        ValueError: if an argument has the wrong shape, device or value.

    Example:
        >>> q, k, v = (torch.randn(2, 16, 4, 32) for _ in range(3))
        >>> left = right = torch.zeros(2, 16, 4)
        >>> geometric_attention(q, k, v, left, right).shape
        torch.Size([2, 16, 4, 32])
    """
    _check_tensors(q, k, v, left, right)
    _check_mask(key_padding_mask, q.shape[:2], q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    check_finite("scale", scale)
    # Before the autograd function: torch.compile (torch 2.11) fails if a size becomes a constant inside it.
    chunks = _chunks(q.shape[0] * q.shape[2], q.shape[1])
    return _GeometricAttention.apply(q, k, v, left, right, key_padding_mask, scale, chunks)


class GeometricAttention(nn.Module):
    """Geometric self-attention with its projections (arXiv 2110.07732). It needs no position encoding.

    q, k, v = split(qkv_proj(x)),  D_left, D_right = split(direction_proj(x)),  out = out_proj(attention)
    z_ij = alpha * (q_i + b_q) . k_j + beta * (D_right_i if j > i else D_left_i) + gamma,  P_ij = sigmoid(z_ij)

    This is the paper's direction encoding: the query's state determines, for each head, a logit for each side.
    direction_proj holds W_RL, b_RL (keys to the left) and W_LR, b_LR (keys to the right). q_bias is b_q (h * d,).
    content_scale, direction_scale and logit_bias are alpha, beta and gamma, (1,), shared by the heads. Only
    direction_proj has biases, as in the authors' code. Projections are initialised as torch.nn.Linear.

    Args:
        hidden_size: channels of x.
        num_heads: h.
        head_dim: channels of a head, d. Default None: hidden_size / num_heads.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: if a size is not a positive int, or hidden_size is not a multiple of num_heads without head_dim.

    Example:
        >>> attention = GeometricAttention(hidden_size=64, num_heads=4)
        >>> attention(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads}
        check_counts(sizes if head_dim is None else sizes | {"head_dim": head_dim})
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_dim = head_dim_of(hidden_size, num_heads, head_dim)
        kind = {"device": device, "dtype": dtype}
        width = num_heads * self.head_dim
        self.qkv_proj = nn.Linear(hidden_size, 3 * width, bias=False, **kind)
        self.direction_proj = nn.Linear(hidden_size, 2 * num_heads, **kind)
        self.out_proj = nn.Linear(width, hidden_size, bias=False, **kind)
        self.q_bias = nn.Parameter(torch.empty(width, **kind))
        self.content_scale = nn.Parameter(torch.empty(1, **kind))
        self.direction_scale = nn.Parameter(torch.empty(1, **kind))
        self.logit_bias = nn.Parameter(torch.empty(1, **kind))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set alpha to 1 / sqrt(d), beta to 1, gamma and b_q to 0. The projections reset themselves."""
        nn.init.zeros_(self.q_bias)
        nn.init.constant_(self.content_scale, self.head_dim**-0.5)
        nn.init.ones_(self.direction_scale)
        nn.init.zeros_(self.logit_bias)

    def extra_repr(self) -> str:
        """Describe the sizes."""
        return f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, head_dim={self.head_dim}"

    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attend within each sequence, on both sides.

        Args:
            x: (b, s, hidden_size).
            key_padding_mask: as in `geometric_attention`.

        Returns:
            (b, s, hidden_size), 0 at padded positions.

        Raises:
            TypeError: if x or the mask has the wrong type or dtype.
            ValueError: if x or the mask has the wrong shape or device.
        """
        check_tensor("x", x)
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x must have shape (b, s, {self.hidden_size}), got {tuple(x.shape)}.")
        _check_mask(key_padding_mask, x.shape[:2], x.device)
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        # Under autocast the parameters have more bits than q. Round once, after bias and scale.
        q = ((q + self.q_bias) * self.content_scale).to(k.dtype)
        q, k, v = (part.view(*x.shape[:2], self.num_heads, self.head_dim) for part in (q, k, v))
        left, right = (self.direction_scale * self.direction_proj(x) + self.logit_bias).chunk(2, dim=-1)
        o = geometric_attention(q, k, v, left, right, key_padding_mask=key_padding_mask, scale=1.0)
        return self.out_proj(o.flatten(-2))


class _GeometricAttention(torch.autograd.Function):
    """The autograd function of `geometric_attention`. It saves only its inputs."""

    @staticmethod
    def forward(ctx, q, k, v, left, right, padding, scale, chunks) -> Tensor:
        ctx.save_for_backward(q, k, v, left, right, padding)
        ctx.scale, ctx.chunks = scale, chunks
        batch, length, heads = q.shape[:3]
        o = q.new_empty(batch, length, heads, v.shape[-1])
        with without_autocast(q):
            q, k, v, left, right = _widened(q, k, v, left, right, padding=padding)
            for begin, end in chunks:
                _, weights, order = _weights_by_distance(scale * q[:, :, begin:end], k, left, right, padding, begin)
                o[:, begin:end] = (_by_key(weights, order) @ v).transpose(1, 2)
        # Not in place: torch.compile (torch 2.11) would then return gradients of 0.
        return o if padding is None else o.masked_fill(padding[..., None, None], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o):
        q, k, v, left, right, padding = ctx.saved_tensors
        dtypes = [x.dtype for x in (q, k, v, left, right)]
        with without_autocast(q):
            q, k, v, left, right, grad_o = _widened(q, k, v, left, right, grad_o, padding=padding)
            grad_q, grad_k, grad_v, grad_left, grad_right = grads = [
                torch.zeros_like(x) for x in (q, k, v, left, right)
            ]
            for begin, end in ctx.chunks:
                q_rows, grad_rows = ctx.scale * q[:, :, begin:end], grad_o[:, :, begin:end]
                z, weights, order = _weights_by_distance(q_rows, k, left, right, padding, begin)
                grad_v += _by_key(weights, order).transpose(-1, -2) @ grad_rows
                grad_log = weights * (grad_rows @ v.transpose(-1, -2)).gather(-1, order.expand_as(z))
                # log A_ij contains log P_ij. log(1 - P_ij) is in log A of all keys that come later in the order.
                grad_later = _sum_before(grad_log.flip(-1)).flip(-1)
                grad_z = _by_key(torch.sigmoid(-z) * grad_log - torch.sigmoid(z) * grad_later, order)
                grad_q[:, :, begin:end] = ctx.scale * (grad_z @ k)
                grad_k += grad_z.transpose(-1, -2) @ q_rows
                grad_left[:, :, begin:end] = grad_z.tril(begin - 1).sum(-1)
                grad_right[:, :, begin:end] = grad_z.triu(begin + 1).sum(-1)
        return *(grad.transpose(1, 2).to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)), None, None, None


def _weights_by_distance(
    q_rows: Tensor, k: Tensor, left: Tensor, right: Tensor, padding: Tensor | None, begin: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits and weights (b, h, rows, s) of the rows from `begin`, and the order of their keys, by distance."""
    end, num_keys = begin + q_rows.shape[2], k.shape[2]
    query = torch.arange(begin, end, device=k.device)[:, None]
    key = torch.arange(num_keys, device=k.device)
    z = q_rows @ k.transpose(-1, -2)
    z += torch.where(key > query, right[:, :, begin:end, None], left[:, :, begin:end, None])
    z.masked_fill_(key == query, -torch.inf)
    if padding is not None:
        z.masked_fill_(padding[:, None, None], -torch.inf)
    order = _keys_by_distance(query, num_keys)
    z = z.gather(-1, order.expand_as(z))
    # The sum runs from the query outwards over terms of one sign. The difference of two sums along the row would lose
    # the small terms of near keys next to the large terms of far keys.
    return z, (logsigmoid(z) + _sum_before(logsigmoid(-z))).exp_(), order


def _keys_by_distance(query: Tensor, num_keys: int) -> Tensor:
    """Order the keys for each query (rows, 1): itself, then by distance, right before left. Returns (rows, s)."""
    last = num_keys - 1
    step = torch.arange(num_keys, device=query.device)
    on_both_sides = torch.where(step % 2 == 1, query + (step + 1) // 2, query - step // 2)
    on_one_side = torch.where(2 * query <= last, step, last - step)
    return torch.where(step <= 2 * torch.minimum(query, last - query), on_both_sides, on_one_side)


def _by_key(x: Tensor, order: Tensor) -> Tensor:
    """Reorder the last dimension of (b, h, rows, s), which is by distance, to the order of the keys."""
    return torch.empty_like(x).scatter_(-1, order.expand_as(x), x)


def _sum_before(x: Tensor) -> Tensor:
    """Sum all entries before each entry along the last dimension. Subtracting the entry from cumsum loses digits."""
    return pad(x.cumsum(-1)[..., :-1], (1, 0))


def _widened(q: Tensor, *others: Tensor, padding: Tensor | None) -> list[Tensor]:
    """Convert each (b, s, h, ...) to (b, h, s, ...) in the dtype of the computation, with 0 at padded positions."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    wide = [x.to(dtype) for x in (q, *others)]
    if padding is not None:
        wide = [x.masked_fill(padding[(...,) + (None,) * (x.dim() - 2)], 0.0) for x in wide]
    return [x.transpose(1, 2) for x in wide]


def _chunks(num_rows: int, length: int) -> list[tuple[int, int]]:
    """Split the query rows of num_rows sequences into chunks (begin, end)."""
    rows = max(1, _MAX_WEIGHTS_PER_CHUNK // max(1, num_rows * length))
    return [(begin, min(begin + rows, length)) for begin in range(0, length, rows)]


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, left: Tensor, right: Tensor) -> None:
    tensors = {"q": q, "k": k, "v": v, "left": left, "right": right}
    for name, value in tensors.items():
        check_tensor(name, value)
        if value.dtype not in _DTYPES:
            raise TypeError(f"{name} must have one of the dtypes {', '.join(map(str, _DTYPES))}, got {value.dtype}.")
        if name in "kv" and value.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {value.dtype}.")
        if value.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {value.device}.")
    if q.dim() != 4 or q.shape[-1] == 0:
        raise ValueError(f"q must have shape (b, s, h, d) with d at least 1, got {tuple(q.shape)}.")
    if k.shape != q.shape:
        raise ValueError(f"k must have q's shape {tuple(q.shape)}, got {tuple(k.shape)}.")
    rows = tuple(q.shape[:3])
    if v.dim() != 4 or v.shape[:3] != rows:
        raise ValueError(f"v must have shape (b, s, h, d_v) with (b, s, h) = {rows} as q, got {tuple(v.shape)}.")
    for name in ("left", "right"):
        if tensors[name].shape != rows:
            raise ValueError(f"{name} must have shape (b, s, h) = {rows} as q, got {tuple(tensors[name].shape)}.")


def _check_mask(mask: object, rows: torch.Size, device: torch.device) -> None:
    if mask is None:
        return
    check_tensor("key_padding_mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask must have dtype torch.bool, got {mask.dtype}.")
    if mask.shape != rows:
        raise ValueError(f"key_padding_mask must have shape (b, s) = {tuple(rows)}, got {tuple(mask.shape)}.")
    if mask.device != device:
        raise ValueError(f"key_padding_mask must be on {device} as the sequences, got {mask.device}.")
