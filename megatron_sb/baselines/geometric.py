"""Geometric attention of the Neural Data Router, for encoders: the nearest match takes its share of the stick first.

After Csordás, Irie and Schmidhuber, The Neural Data Router, arXiv 2110.07732, eq. 7. For query i and keys j != i:

    z_ij = scale * q_i . k_j + (right_i if j > i else left_i)       P_ij = sigmoid(z_ij)
    A_ij = P_ij * prod_{n in S_ij} (1 - P_in)                       o_i = sum_j A_ij v_j

S_ij are the positions, without i and j themselves, that are nearer to i than j is; of two at one distance the right one
counts as the nearer: |i - n| < |i - j| where j > i, |i - n| <= |i - j| where j < i. No position attends to itself. That
is stick-breaking attention with the keys in order of distance, on both sides, instead of newest first.

The order and the logits were checked against the authors' code, github.com/RobertCsordas/ndr. Two things of that code
are not in the formula and not here: dropout on the keys of the content logits, and dividing each row of A by its sum, a
default that its configurations of the data router switch off. Rows of A here sum to at most 1.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid, pad

from megatron_sb.validation import check_counts, check_finite, check_tensor, head_dim_of

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MAX_WEIGHTS_PER_CHUNK = 2**23  # weights alive at a time: 32 MiB a copy in fp32, and the backward holds some ten


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
    """Attend by breaking a stick over the keys on both sides, nearest first (arXiv 2110.07732, eq. 7).

    Differentiable once. Memory is O(s): query rows are computed chunk by chunk, and again in the backward. Half types
    are computed in fp32 throughout.

    Args:
        q: (b, s, h, d), in bf16, fp16, fp32 or fp64.
        k: (b, s, h, d).
        v: (b, s, h, d_v).
        left: (b, s, h), added to query i's logits of all keys j < i; -inf hides them. Of any of these dtypes, as right.
        right: (b, s, h), the same for j > i.
        key_padding_mask: bool (b, s), True at padded positions. They are not read, take nothing of a stick, and get
            o = 0 and gradients 0; the others keep their distances.
        scale: factor of the content logits; 1 / sqrt(d) by default.

    Returns:
        o (b, s, h, d_v) in q's dtype. Gradients come in each argument's dtype.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed, before anything runs.
    """
    _check_tensors(q, k, v, left, right)
    _check_mask(key_padding_mask, q.shape[:2], q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    check_finite("scale", scale)
    return _GeometricAttention.apply(q, k, v, left, right, key_padding_mask, scale)


class GeometricAttention(nn.Module):
    """Self-attention to the nearest match with its projections (arXiv 2110.07732); no positions needed.

    q, k, v = split(qkv_proj(x)),  D_left, D_right = split(direction_proj(x)),  out = out_proj(attention)
    z_ij = alpha * (q_i + b_q) . k_j + beta * (D_right_i if j > i else D_left_i) + gamma,  P_ij = sigmoid(z_ij)

    This is the paper's direction encoding: the query's own state says for each head how much it leans to either side.
    direction_proj is W_RL, b_RL (keys to the left) and W_LR, b_LR (keys to the right), q_bias is b_q (h * d,), and
    alpha, beta and gamma are content_scale, direction_scale and logit_bias (1,), shared by the heads. Only
    direction_proj has biases of its own, as in the authors' code. Projections start as torch.nn.Linear does.

    Args:
        hidden_size: channels of x.
        num_heads: h.
        head_dim: channels of a head, d; hidden_size / num_heads by default.
        device, dtype: of the parameters.

    Raises:
        ValueError: sizes that do not fit each other, naming the argument, its value and what is allowed.
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
        """Make alpha 1 / sqrt(d), beta 1, gamma and b_q 0; the projections reset their own."""
        nn.init.zeros_(self.q_bias)
        nn.init.constant_(self.content_scale, self.head_dim**-0.5)
        nn.init.ones_(self.direction_scale)
        nn.init.zeros_(self.logit_bias)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, head_dim={self.head_dim}"

    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attend within each sequence, to both sides.

        Args:
            x: (b, s, hidden_size).
            key_padding_mask: as in `geometric_attention`.

        Returns:
            A tensor of x's shape, 0 at padded positions.

        Raises:
            TypeError, ValueError: naming the argument, its value and what is allowed, before anything runs.
        """
        check_tensor("x", x)
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; (b, s, hidden_size), hidden_size {self.hidden_size}, is allowed"
            )
        _check_mask(key_padding_mask, x.shape[:2], x.device)
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        # Under autocast the parameters are wider than q: it is rounded once, after bias and scale.
        q = ((q + self.q_bias) * self.content_scale).to(k.dtype)
        q, k, v = (part.view(*x.shape[:2], self.num_heads, self.head_dim) for part in (q, k, v))
        left, right = (self.direction_scale * self.direction_proj(x) + self.logit_bias).chunk(2, dim=-1)
        o = geometric_attention(q, k, v, left, right, key_padding_mask=key_padding_mask, scale=1.0)
        return self.out_proj(o.flatten(-2))


class _GeometricAttention(torch.autograd.Function):
    """The operator behind `geometric_attention`: keeps its inputs alone."""

    @staticmethod
    def forward(ctx, q, k, v, left, right, padding, scale) -> Tensor:
        ctx.save_for_backward(q, k, v, left, right, padding)
        ctx.scale = scale
        batch, length, heads = q.shape[:3]
        o = q.new_empty(batch, length, heads, v.shape[-1])
        with torch.autocast(q.device.type, enabled=False):
            q, k, v, left, right = _widened(q, k, v, left, right, padding=padding)
            for begin, end in _chunks(batch * heads, length):
                _, weights, order = _visit(scale * q[:, :, begin:end], k, left, right, padding, begin)
                o[:, begin:end] = (_by_key(weights, order) @ v).transpose(1, 2)
        # In place, torch.compile (torch 2.11) would return gradients of 0 for everything.
        return o if padding is None else o.masked_fill(padding[..., None, None], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o):
        q, k, v, left, right, padding = ctx.saved_tensors
        dtypes = [x.dtype for x in (q, k, v, left, right)]
        batch, length, heads = q.shape[:3]
        with torch.autocast(q.device.type, enabled=False):
            q, k, v, left, right, grad_o = _widened(q, k, v, left, right, grad_o, padding=padding)
            grad_q, grad_k, grad_v, grad_left, grad_right = grads = [
                torch.zeros_like(x) for x in (q, k, v, left, right)
            ]
            for begin, end in _chunks(batch * heads, length):
                q_rows, grad_rows = ctx.scale * q[:, :, begin:end], grad_o[:, :, begin:end]
                z, weights, order = _visit(q_rows, k, left, right, padding, begin)
                grad_v += _by_key(weights, order).transpose(-1, -2) @ grad_rows
                grad_log = weights * (grad_rows @ v.transpose(-1, -2)).gather(-1, order.expand_as(z))
                # log A_ij has log P_ij, and log(1 - P_ij) is in those of all keys visited later.
                later = _sum_before(grad_log.flip(-1)).flip(-1)
                grad_z = _by_key(torch.sigmoid(-z) * grad_log - torch.sigmoid(z) * later, order)
                grad_q[:, :, begin:end] = ctx.scale * (grad_z @ k)
                grad_k += grad_z.transpose(-1, -2) @ q_rows
                grad_left[:, :, begin:end] = grad_z.tril(begin - 1).sum(-1)
                grad_right[:, :, begin:end] = grad_z.triu(begin + 1).sum(-1)
        return *(grad.transpose(1, 2).to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)), None, None


def _visit(
    q_rows: Tensor, k: Tensor, left: Tensor, right: Tensor, padding: Tensor | None, begin: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and weights of the query rows from begin on, (b, h, rows, s) in the order of visit, and that order."""
    end, num_keys = begin + q_rows.shape[2], k.shape[2]
    query = torch.arange(begin, end, device=k.device)[:, None]
    key = torch.arange(num_keys, device=k.device)
    z = q_rows @ k.transpose(-1, -2)
    z += torch.where(key > query, right[:, :, begin:end, None], left[:, :, begin:end, None])
    z.masked_fill_(key == query, -torch.inf)
    if padding is not None:
        z.masked_fill_(padding[:, None, None], -torch.inf)
    order = _visiting_order(query, num_keys)
    z = z.gather(-1, order.expand_as(z))
    # Summed from the query outwards, all of one sign: the difference of two sums along the row would lose the small
    # terms of near keys beside the large ones of far keys.
    return z, (logsigmoid(z) + _sum_before(logsigmoid(-z))).exp_(), order


def _visiting_order(query: Tensor, num_keys: int) -> Tensor:
    """The keys as each query (rows, 1) visits them, (rows, s): itself, then the nearest, the right before the left."""
    last = num_keys - 1
    step = torch.arange(num_keys, device=query.device)
    on_both_sides = torch.where(step % 2 == 1, query + (step + 1) // 2, query - step // 2)
    on_one_side = torch.where(2 * query <= last, step, last - step)
    return torch.where(step <= 2 * torch.minimum(query, last - query), on_both_sides, on_one_side)


def _by_key(x: Tensor, order: Tensor) -> Tensor:
    """Rows in the order of visit (b, h, rows, s), put back into the order of the keys."""
    return torch.empty_like(x).scatter_(-1, order.expand_as(x), x)


def _sum_before(x: Tensor) -> Tensor:
    """What comes before each entry along the last dimension, summed. A sum less its own term would lose digits."""
    return pad(x.cumsum(-1)[..., :-1], (1, 0))


def _widened(q: Tensor, *others: Tensor, padding: Tensor | None) -> list[Tensor]:
    """Each (b, s, h, ...) as (b, h, s, ...) in the dtype to compute in, 0 at padded positions."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    wide = [x.to(dtype) for x in (q, *others)]
    if padding is not None:
        wide = [x.masked_fill(padding[(...,) + (None,) * (x.dim() - 2)], 0.0) for x in wide]
    return [x.transpose(1, 2) for x in wide]


def _chunks(num_rows: int, length: int) -> list[tuple[int, int]]:
    """(begin, end) of the query rows to compute at a time, num_rows sequences of that length beside each other."""
    rows = max(1, _MAX_WEIGHTS_PER_CHUNK // max(1, num_rows * length))
    return [(begin, min(begin + rows, length)) for begin in range(0, length, rows)]


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, left: Tensor, right: Tensor) -> None:
    tensors = {"q": q, "k": k, "v": v, "left": left, "right": right}
    for name, value in tensors.items():
        check_tensor(name, value)
        if value.dtype not in _DTYPES:
            raise TypeError(f"{name} has dtype {value.dtype}; {', '.join(map(str, _DTYPES))} are allowed")
        if name in "kv" and value.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {value.dtype}; that of q, {q.dtype}, is allowed")
        if value.device != q.device:
            raise ValueError(f"{name} is on {value.device}; the device of q, {q.device}, is allowed")
    if q.dim() != 4 or q.shape[-1] == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}; (b, s, h, d), d of 1 or more, is allowed")
    if k.shape != q.shape:
        raise ValueError(f"k has shape {tuple(k.shape)}; that of q, {tuple(q.shape)}, is allowed")
    rows = tuple(q.shape[:3])
    if v.dim() != 4 or v.shape[:3] != rows:
        raise ValueError(f"v has shape {tuple(v.shape)}; (b, s, h, d_v), (b, s, h) that of q, {rows}, is allowed")
    for name in ("left", "right"):
        if tensors[name].shape != rows:
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}; (b, s, h) of q, {rows}, is allowed")


def _check_mask(mask: object, rows: torch.Size, device: torch.device) -> None:
    if mask is None:
        return
    check_tensor("key_padding_mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask has dtype {mask.dtype}; torch.bool is allowed")
    if mask.shape != rows:
        raise ValueError(f"key_padding_mask has shape {tuple(mask.shape)}; (b, s), {tuple(rows)}, is allowed")
    if mask.device != device:
        raise ValueError(f"key_padding_mask is on {mask.device}; {device}, where the sequences are, is allowed")
