"""What a batch of transformers holds: which of its tokens are padding, and which documents the others belong to.

Stick-breaking attention breaks a query's stick over its keys, newest first, so a key that is padding must not be there
at all: rows of a batch are packed, document after document, and what came out is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a batch of q (b, s) and keys (b, s_k) are; the queries of a document are its last tokens.

    queries (t,), keys (t_k,): indices into the flattened (b * s) and (b * s_k). cu_seqlens, cu_seqlens_k: int32
    (documents + 1,), a document's bounds in them.
    """

    queries: Tensor
    keys: Tensor
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor

    @classmethod
    def of(cls, documents: Tensor, num_queries: int) -> Packing:
        """documents: int (b, s_k), 0 for padding and else the number of a key's document, growing along a row; the last
        num_queries columns are the queries' own.
        """
        row = torch.arange(len(documents), device=documents.device)[:, None]
        name = row * (documents.max() + 1) + documents
        here = documents > 0
        is_query = torch.zeros_like(here)
        is_query[:, -num_queries:] = here[:, -num_queries:]
        _, numbers, num_keys = name[here].unique_consecutive(return_inverse=True, return_counts=True)
        num_own = torch.zeros_like(num_keys).index_add_(0, numbers, is_query[here].to(num_keys.dtype))
        queries = here[:, -num_queries:].flatten().nonzero().flatten()
        return cls(queries, here.flatten().nonzero().flatten(), _bounds(num_own), _bounds(num_keys))


def leftpad_of(documents: Tensor) -> Tensor | None:
    """Where each row's tokens begin, int32 (b,), where they are one document that reaches to the row's end; else None.

    documents: int (b, s_k), as for `Packing.of`.
    """
    here = documents > 0
    leftpad = here.shape[1] - here.sum(1)
    at = torch.arange(here.shape[1], device=here.device)
    whole = torch.where(at >= leftpad[:, None], documents == documents[:, -1:], ~here)
    return leftpad.int() if bool((whole & (here == (at >= leftpad[:, None]))).all()) else None


def document_mask(positions: Tensor | None, bounds: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """The mask of the packed documents that a call names beside its mask, as `attention_mask` makes it; None: of none.

    positions: int (b or 1, s), as position_ids: a document begins where they do not go on by one. bounds: int
    (documents + 1,), as cu_seq_lens_q, of one row of s tokens. shape: (b, s).
    A model hands both to each of its layers: the first one makes the mask, and its tensor keeps it for the others.
    """
    source = positions if bounds is None else bounds
    if source is None or (bounds is None and (positions.dim() != 2 or positions.shape[1] != shape[1])):
        return None
    version = None if source.is_inference() else source._version  # nothing tells whether those were written to
    made = getattr(source, "_documents", None)
    if made is not None and version is not None and made[:2] == (version, shape):
        return made[2]
    mask = _documents_by_position(positions, shape) if bounds is None else _documents_by_bounds(bounds, shape)
    source._documents = version, shape, mask
    return mask


def _documents_by_position(positions: Tensor, shape: tuple[int, int]) -> Tensor | None:
    begins = positions[:, 1:] != positions[:, :-1] + 1
    if not bool(begins.any()):
        return None
    return _packed((torch.nn.functional.pad(begins.cumsum(1), (1, 0)) + 1).expand(shape))


def _documents_by_bounds(bounds: Tensor, shape: tuple[int, int]) -> Tensor | None:
    if shape[0] != 1 or int(bounds[-1]) != shape[1]:
        raise ValueError(
            f"cu_seq_lens_q ends at {int(bounds[-1])}; it bounds the documents of one row, {shape[1]} here"
        )
    if len(bounds) == 2:
        return None
    at = torch.arange(shape[1], device=bounds.device)
    return _packed(torch.searchsorted(bounds[1:].contiguous(), at, right=True)[None] + 1)


def _packed(documents: Tensor) -> Tensor:
    mask = documents.int()
    mask.leftpad, mask.packing = None, Packing.of(mask, mask.shape[1])
    return mask


def _bounds(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def documents_of(mask_function: Callable, shape: tuple[int, int], device: torch.device) -> Tensor | None:
    """The number of the document of each token, int32 (b, s), from 1 on, as a mask function of transformers has it.

    mask_function(batch, head, query, key): whether the query sees the key.
    None where the mask is anything but causal within documents (windows, chunks, prefixes).
    """
    batch, length = shape
    if mask_function is causal_mask_function:
        return torch.ones(shape, dtype=torch.int32, device=device)
    rows = torch.arange(batch, device=device)[:, None].expand(shape)
    at = torch.arange(length, device=device).expand(shape)

    def seen(query: Tensor, key: Tensor) -> Tensor:
        inside = (key >= 0) & (key < length)
        return mask_function(rows, 0, query, key.clamp(0, length - 1)) & inside

    begins = ~seen(at, at - 1)
    documents = begins.cumsum(1)
    first = at.where(begins, 0).cummax(1).values  # of each token's document
    whole = seen(at, at) & seen(at, first) & ~seen(at, first - 1) & ~seen(at, at + 1)
    return documents.int() if bool(whole.all()) else None
