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
