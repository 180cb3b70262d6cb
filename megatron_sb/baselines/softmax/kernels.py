"""The kernels of causal softmax attention. `attend` takes the first kernel of this table that serves a call.

| kernel | serves | memory for s tokens |
| --- | --- | --- |
| `sdpa_varlen` | several documents without bias, window or StableMask, in bf16 and fp16 on GPUs | O(s) |
| `flex` | biases, windows, StableMask and several documents on GPUs, except FIRE, fp64 and head_dim < 16 | O(s) |
| `sdpa` | attention without bias, window or StableMask; one call for each document | O(s) on GPUs |
| `plain` | all other calls | O(s) for each row of a block of rows |

FlexAttention cannot serve all calls. On CPUs it has no gradients. It sums in fp32, and its heads have at least 16
channels. It cannot differentiate the network inside FIRE's bias.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from megatron_sb.baselines.softmax.compiled import compiled
from megatron_sb.baselines.softmax.offsets import batches_by_length, document_block_mask, make_cu_seqlens
from megatron_sb.baselines.softmax.positions import FireBias, alibi_slope_tensor
from megatron_sb.baselines.softmax.stable_mask import real_share
from megatron_sb.torch_version import from_torch, major_minor

# Fastest first. EFFICIENT_ATTENTION serves fp32 with O(s) memory.
CUDA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
FLEX_MIN_HEAD_DIM = 16
# Largest number of attention weights in memory at a time: 128 MiB for each copy in fp32. Autograd holds about ten
# copies.
MAX_WEIGHTS_PER_BLOCK = 2**25


@dataclass(frozen=True)
class Scores:
    """How scores are computed from q and k.

    Attributes:
        scale: factor of q . k.
        alibi_slopes: ALiBi's slope of each head, or None without ALiBi.
        fire: the module of FIRE's bias, or None.
        window: number of newest keys that a row sees, including its own. None for all.
        stable_mask_gammas: gamma of each head, or None without StableMask.
        fire_heads: first head and end of the heads of `fire` that the scores have. None for all.
    """

    scale: float
    alibi_slopes: tuple[float, ...] | None
    fire: FireBias | None
    window: int | None
    stable_mask_gammas: tuple[float, ...] | None
    fire_heads: tuple[int, int] | None = None

    @property
    def is_dot_product(self) -> bool:
        """Whether the scores are only scale * q . k under a causal mask."""
        biased = self.alibi_slopes is not None or self.fire is not None
        return not biased and self.window is None and self.stable_mask_gammas is None

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """FIRE's parameters that are trained."""
        return () if self.fire is None else tuple(x for x in self.fire.parameters() if x.requires_grad)

    def of_heads(self, begin: int, end: int) -> Scores:
        """Return the scores of the heads from `begin` to `end`."""
        slopes, gammas = (x and x[begin:end] for x in (self.alibi_slopes, self.stable_mask_gammas))
        return replace(self, alibi_slopes=slopes, stable_mask_gammas=gammas, fire_heads=(begin, end))


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scores: Scores) -> Tensor:
    """Compute the attention with the fastest kernel that serves it.

    Args:
        q: (b, h, s, d).
        k: (b, h_kv, s, d).
        v: (b, h_kv, s, d).
        lengths: lengths of the documents along s, the same in each row of b. b is 1 if there are several documents.
        scores: how the scores are computed.

    Returns:
        (b, h, s, d) in q's dtype.
    """
    several = len(lengths) > 1
    use_varlen = scores.is_dot_product and several and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    if has_flex_kernel(q, scores) and (several or not scores.is_dot_product) and not use_varlen:
        return flex(q, k, v, lengths, scores)
    groups = q.shape[1] // k.shape[1]
    # repeat_interleave copies even for one group.
    k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
    if use_varlen:
        return sdpa_varlen(q, k, v, lengths, scores.scale)
    if scores.is_dot_product:
        documents = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        return _joined([sdpa(*document, scores.scale) for document in documents])
    return plain(q, k, v, lengths, scores)


def has_flex_kernel(q: Tensor, scores: Scores) -> bool:
    """Return whether FlexAttention serves these scores on q's device."""
    wide = q.shape[-1] >= FLEX_MIN_HEAD_DIM
    return q.is_cuda and q.dtype != torch.float64 and wide and scores.fire is None


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute one document, q, k, v (b, h, s, d), with torch's scaled_dot_product_attention."""
    with sdpa_kernel(CUDA_BACKENDS, set_priority=True) if q.is_cuda else contextlib.nullcontext():
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def sdpa_varlen(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    """Compute several documents, q, k, v (1, h, t, d), with torch's varlen_attn (FlashAttention-2)."""
    varlen_attn = from_torch("torch.nn.attention.varlen", "varlen_attn", "2.11")
    cu_seqlens, longest = make_cu_seqlens(lengths, q.device), max(lengths)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    causal = (-1, 0)
    o = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=causal)
    return o.transpose(0, 1)[None]


# fullgraph makes it an error to exceed the limit of recompilations. Without fullgraph torch would silently build an
# s x s matrix.
_fused_flex = compiled(flex_attention, fullgraph=True)
# torch 2.8 has the argument return_lse instead.
_AuxRequest = (
    from_torch("torch.nn.attention.flex_attention", "AuxRequest", "2.9")
    if major_minor(torch.__version__) >= (2, 9)
    else None
)


def _flex_with_lse(with_lse: bool, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Call torch's flex_attention. Return the output, and the log of each row's sum of exponentials if `with_lse`."""
    if _AuxRequest is not None:
        o, aux = _fused_flex(*args, **options, return_aux=_AuxRequest(lse=with_lse))
        return o, aux.lse
    result = _fused_flex(*args, **options, return_lse=with_lse)
    return result if with_lse else (result, None)


def flex(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scores: Scores) -> Tensor:
    """Compute q (b, h, s, d), k and v (b, h_kv, s, d), with torch's flex_attention."""
    score_mod = None
    if scores.alibi_slopes is not None:
        slopes = alibi_slope_tensor(scores.alibi_slopes, torch.float32, q.device)

        def score_mod(score, _, head, query, key):
            return score - slopes[head] * (query - key)

    gammas = scores.stable_mask_gammas
    o, lse = _flex_with_lse(
        gammas is not None,
        q,
        k,
        v,
        score_mod,
        document_block_mask(lengths, scores.window, q.device),
        scores.scale,
        enable_gqa=True,
    )
    return o if gammas is None else (o * real_share(gammas, lse, lengths)).to(q.dtype)


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scores: Scores) -> Tensor:
    """Compute q, k, v (b, h, s, d) with matrix products. Documents of one length are computed together."""
    if len(lengths) == 1:
        return _plain_document(q, k, v, scores)
    # StableMask depends on where a document ends, so documents cannot be padded with it.
    padded = q.is_cuda and scores.stable_mask_gammas is None
    batches, places = batches_by_length(lengths, padded, q.device)
    sources = [pad(x[0], (0, 0, 0, 1)) for x in (q, k, v)]
    outputs = []
    for rows in batches:
        batch = (x.index_select(1, rows.flatten()).unflatten(1, rows.shape).transpose(0, 1) for x in sources)
        outputs.append(_plain_document(*batch, scores).transpose(0, 1).flatten(1, 2))
    return torch.cat(outputs, dim=1).index_select(1, places)[None]


def _plain_document(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Compute q, k, v (b, h, s, d), one document in each row of b, in blocks of rows that bound the memory."""
    batch, heads, length, _ = q.shape
    width = batch * heads
    if scores.fire is not None and not q.is_cuda:
        width = max(width, scores.fire.hidden.out_features)
    rows = max(1, MAX_WEIGHTS_PER_BLOCK // (width * length))
    if rows >= length:
        return _plain_rows(q, k, v, 0, 0, length, scores)
    outputs = []
    for begin in range(0, length, rows):
        end = min(begin + rows, length)
        oldest = 0 if scores.window is None else max(0, begin + 1 - scores.window)
        block = (q[:, :, begin:end], k[:, :, oldest:end], v[:, :, oldest:end], begin, oldest, length, scores)
        # Autograd keeps only the inputs of a block, and computes the block again in the backward.
        outputs.append(checkpoint(_plain_rows, *block, use_reentrant=False, preserve_rng_state=False))
    return _joined(outputs)


def _plain_rows(q: Tensor, k: Tensor, v: Tensor, first_row: int, first_key: int, length: int, scores: Scores) -> Tensor:
    """Compute the rows q (b, h, r, d) from first_row and the keys k, v (b, h, n, d) from first_key of a document.

    length: length of the document.
    """
    z = masked_scores(q, k, first_row, first_key, scores)
    o = z.softmax(-1) @ v.to(z.dtype)
    if scores.stable_mask_gammas is not None:
        o = o * real_share(scores.stable_mask_gammas, z.logsumexp(-1), (length,), first_row)
    return o.to(q.dtype)


def masked_scores(q: Tensor, k: Tensor, first_row: int, first_key: int, scores: Scores) -> Tensor:
    """Return the scores of rows and keys of one document, -inf where a row does not see a key.

    Args:
        q: (b, h, r, d).
        k: (b, h, n, d).
        first_row: position of the first row in the document.
        first_key: position of the first key in the document.
        scores: how the scores are computed.

    Returns:
        (b, h, r, n) in fp32 (fp64 for fp64).
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    query = torch.arange(first_row, first_row + q.shape[2], device=q.device)
    key = torch.arange(first_key, first_key + k.shape[2], device=q.device)
    distance = query[:, None] - key
    z = scores.scale * q.to(dtype) @ k.to(dtype).transpose(2, 3)
    if scores.alibi_slopes is not None:
        z = z - alibi_slope_tensor(scores.alibi_slopes, dtype, q.device)[:, None, None] * distance
    if scores.fire is not None:
        z = z + scores.fire(query.to(dtype), key.to(dtype), scores.fire_heads)
    hidden = distance < 0 if scores.window is None else (distance < 0) | (distance >= scores.window)
    return z.masked_fill(hidden, -torch.inf)


def _joined(outputs: list[Tensor]) -> Tensor:
    """Concatenate the rows of (b, h, s, d). torch.cat copies even a single tensor."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
