"""Padding and packed documents in a batch of transformers.

Every key takes a part of a query's stick, so padding keys must be removed before the attention. The tokens of a batch
are packed, one document after the other, and the outputs are scattered back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from megatron_sb.ops.snapshot import Snapshot
from megatron_sb.validation import check_optional_tensors


@dataclass(frozen=True)
class Packing:
    """Indices of the tokens of a batch with queries (b, s) and keys (b, s_k).

    The queries of a document are its last tokens.

    queries: (t,), indices into the flattened queries (b * s).
    keys: (t_k,), indices into the flattened keys (b * s_k).
    cu_seqlens: int32 (documents + 1,), offsets of the documents in `queries`.
    cu_seqlens_k: the same in `keys`.
    """

    queries: Tensor
    keys: Tensor
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor

    @classmethod
    def of(cls, documents: Tensor, num_queries: int) -> Packing:
        """Find the indices of the tokens of a batch.

        Args:
            documents: int (b, s_k), 0 for padding, else the document number of a key. It increases along a row.
            num_queries: s. The last s columns belong to the queries.

        Example:
            >>> import torch
            >>> from megatron_sb.huggingface.packing import Packing
            >>> packing = Packing.of(torch.tensor([[0, 1, 1, 2, 2]]), num_queries=5)  # a padding token, two documents
            >>> packing.queries, packing.cu_seqlens
            (tensor([1, 2, 3, 4]), tensor([0, 2, 4], dtype=torch.int32))
        """
        row = torch.arange(len(documents), device=documents.device)[:, None]
        largest = documents.max() if documents.numel() else 0  # of a batch without rows
        unique_number = row * (largest + 1) + documents
        is_token = documents > 0
        is_query = torch.zeros_like(is_token)
        is_query[:, -num_queries:] = is_token[:, -num_queries:]
        _, indices, num_keys = unique_number[is_token].unique_consecutive(return_inverse=True, return_counts=True)
        num_own = torch.zeros_like(num_keys).index_add_(0, indices, is_query[is_token].to(num_keys.dtype))
        queries = is_token[:, -num_queries:].flatten().nonzero().flatten()
        return cls(queries, is_token.flatten().nonzero().flatten(), _offsets(num_own), _offsets(num_keys))

    @classmethod
    def of_rows(cls, is_token: Tensor) -> Packing:
        """Find the indices of a batch with one document in each row, for a compiled graph.

        Unlike those of `of`, the shapes do not depend on values: padding comes after the last document.

        Args:
            is_token: bool (b, s), False for padding. All keys belong to queries.

        Example:
            >>> import torch
            >>> from megatron_sb.huggingface.packing import Packing
            >>> packing = Packing.of_rows(torch.tensor([[False, True, True], [True, True, False]]))
            >>> packing.queries, packing.cu_seqlens
            (tensor([1, 2, 3, 4, 0, 5]), tensor([0, 2, 4], dtype=torch.int32))
        """
        tokens_first = (~is_token).flatten().to(torch.uint8).argsort(stable=True)
        cu_seqlens = _offsets(is_token.sum(1))
        return cls(tokens_first, tokens_first, cu_seqlens, cu_seqlens)


def check_mask_shape(mask: Tensor, batch_size: int, num_keys: int | None = None) -> None:
    """Raise ValueError unless an attention_mask fits a batch.

    Args:
        mask: must have 2 dimensions, and a row for each sequence or a single one for all.
        batch_size: number of sequences, b.
        num_keys: number of keys so far, which is the smallest number of columns. Default None: it is not checked.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface.packing import check_mask_shape
        >>> check_mask_shape(torch.ones(2, 5), 2, 8)
        Traceback (most recent call last):
            ...
        ValueError: attention_mask must have shape (2 or 1, at least 8), got (2, 5). Its columns are all keys so far.
    """
    if mask.dim() == 2 and mask.shape[0] in (1, batch_size) and (num_keys is None or mask.shape[1] >= num_keys):
        return
    columns = "keys so far" if num_keys is None else f"at least {num_keys}"
    raise ValueError(
        f"attention_mask must have shape ({batch_size} or 1, {columns}), got {tuple(mask.shape)}. Its columns are all "
        "keys so far."
    )


def check_position_shape(position_ids: Tensor | None, x: Tensor) -> None:
    """Raise ValueError unless position_ids have a row for each row of x (b, s, channels), or one for all.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface.packing import check_position_shape
        >>> check_position_shape(torch.zeros(1, 4), torch.zeros(2, 5, 32))
        Traceback (most recent call last):
            ...
        ValueError: position_ids must have shape (2 or 1, 5), got (1, 4).
    """
    rows, length = x.shape[:2]
    if position_ids is None or (
        position_ids.dim() == 2 and position_ids.shape[0] in (1, rows) and position_ids.shape[1] == length
    ):
        return
    raise ValueError(f"position_ids must have shape ({rows} or 1, {length}), got {tuple(position_ids.shape)}.")


def leftpad_of(documents: Tensor) -> Tensor | None:
    """Return the number of padding tokens of each row, int32 (b,).

    The result is None unless every row is padding on the left, followed by one document.

    Args:
        documents: int (b, s_k), as for `Packing.of`.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface.packing import leftpad_of
        >>> leftpad_of(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]))
        tensor([2, 1], dtype=torch.int32)
    """
    is_token = documents > 0
    leftpad = is_token.shape[1] - is_token.sum(1)
    after_padding = torch.arange(is_token.shape[1], device=is_token.device) >= leftpad[:, None]
    is_one_document = torch.where(after_padding, documents == documents[:, -1:], ~is_token)
    return leftpad.int() if bool((is_one_document & (is_token == after_padding)).all()) else None


def step_mask(num_keys: Tensor, padding: Tensor | None, batch_size: int) -> Tensor | None:
    """Make the mask of a decoding step of one token against a static cache.

    Its shape is the same for all steps, and no graph reads its values, so that one compiled graph serves all steps.
    transformers passes a mask with 4 dimensions to the layers as it is. No other mask of a decoding step has its last
    dimension, 1, because that is the number of keys.

    Args:
        num_keys: int (), the number of filled slots of the cache, with those of the new tokens.
        padding: bool (b or 1, at least num_keys), False for padding. Default None: no padding. A compiled graph breaks
            here if it is given, because whether padding is on the left only depends on its values.
        batch_size: b.

    Returns:
        int32 (b, 2, 1, 1): the slot where each sequence begins, and num_keys. None if padding is not on the left only.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface.packing import step_mask
        >>> step_mask(torch.tensor(3), torch.tensor([[True, True, True], [False, True, True]]), 2).flatten(1)
        tensor([[0, 3],
                [1, 3]], dtype=torch.int32)
    """
    leftpad = num_keys.new_zeros(batch_size) if padding is None else _leftpad_of_filled(num_keys, padding, batch_size)
    if leftpad is None:
        return None
    columns = [leftpad.int().expand(batch_size), num_keys.int().expand(batch_size)]
    return torch.stack(columns, dim=1)[..., None, None]


@torch.compiler.disable
def _leftpad_of_filled(num_keys: Tensor, padding: Tensor, batch_size: int) -> Tensor | None:
    length = int(num_keys)
    check_mask_shape(padding, batch_size, length)
    return leftpad_of(padding[:, :length].int())


def of_step_mask(mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """Invert `step_mask`.

    Args:
        mask: any mask.

    Returns:
        int32 (b,), the slot where each sequence begins, and int32 (b,), the number of filled slots. None if the mask is
        not that of a decoding step.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface.packing import of_step_mask, step_mask
        >>> of_step_mask(step_mask(torch.tensor(3), None, 2))
        (tensor([0, 0], dtype=torch.int32), tensor([3, 3], dtype=torch.int32))
    """
    if mask.dtype != torch.int32 or mask.shape[1:] != (2, 1, 1):
        return None
    leftpad, num_keys = mask[:, :, 0, 0].unbind(1)
    return leftpad.contiguous(), num_keys.contiguous()


def document_mask(positions: Tensor | None, bounds: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Make the mask of packed documents from position_ids or cu_seq_lens_q, in the format of `attention_mask`.

    A model passes these arguments to each of its layers. The first layer makes the mask and stores it as an attribute
    of the argument, for the other layers.

    Args:
        positions: int (b or 1, s), position_ids. A document starts where they do not increase by one.
        bounds: int (documents + 1,), cu_seq_lens_q of a single row of s tokens. Takes precedence over positions.
        shape: (b, s).

    Returns:
        The mask, or None if each row is a single document.

    Raises:
        TypeError: if bounds are no tensor of integers.
        ValueError: if bounds are not offsets of a single row of s tokens. In a compiled graph the device checks values.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface.packing import document_mask
        >>> document_mask(torch.tensor([[0, 1, 2, 0, 1]]), None, (1, 5))
        tensor([[1, 1, 1, 2, 2]], dtype=torch.int32)
    """
    check_optional_tensors({"cu_seq_lens_q": bounds})
    if bounds is not None and (bounds.is_floating_point() or bounds.dtype == torch.bool):
        raise TypeError(f"cu_seq_lens_q must have an integer dtype, got {bounds.dtype}.")
    source = positions if bounds is None else bounds
    if source is None or (bounds is None and (positions.dim() != 2 or positions.shape[1] != shape[1])):
        return None
    if torch.compiler.is_compiling() and bounds is not None:
        return _traced_documents_by_bounds(bounds, shape)
    stored = getattr(source, "_documents", None)
    if stored is not None and stored[0] == shape and stored[1].is_current(source):
        return stored[2]
    snapshot = Snapshot("position_ids" if bounds is None else "cu_seq_lens_q", source)
    by_values = _documents_by_position if bounds is None else _documents_by_bounds
    mask = by_values(snapshot.values, shape)
    source._documents = shape, snapshot, mask
    return mask


def with_documents(
    mask: Tensor | None, positions: Tensor | None, bounds: Tensor | None, shape: tuple[int, int]
) -> Tensor | None:
    """Return the mask of a batch without older keys, with its packed documents.

    Args:
        mask: as `attention_mask` of this package returns it. A static cache has a mask also where nothing is padding.
        positions: position_ids, as for `document_mask`. Ignored if the mask has padding.
        bounds: cu_seq_lens_q, as for `document_mask`.
        shape: (b, s).

    Returns:
        A mask of `document_mask`, or `mask` if there are no documents in positions and bounds.

    Raises:
        ValueError: if bounds are given and the mask has padding.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface.packing import with_documents
        >>> mask = torch.ones(1, 5, dtype=torch.int32)
        >>> mask.is_padding_only, mask.has_padding = True, False
        >>> with_documents(mask, torch.tensor([[0, 1, 2, 0, 1]]), None, (1, 5))
        tensor([[1, 1, 1, 2, 2]], dtype=torch.int32)
    """
    if mask is not None:
        if not getattr(mask, "is_padding_only", False):
            return mask
        if getattr(mask, "has_padding", True):  # a graph does not know it
            check_without_documents(bounds)
            return mask
    documents = document_mask(positions, bounds, shape)
    return mask if documents is None else documents


def check_without_documents(bounds: Tensor | None) -> None:
    """Raise ValueError if there are documents. Call it where a mask has padding. bounds: cu_seq_lens_q."""
    if bounds is not None:
        raise ValueError(
            f"cu_seq_lens_q must be None if attention_mask has padding, got the offsets of {len(bounds) - 1} documents."
        )


def _documents_by_position(positions: Tensor, shape: tuple[int, int]) -> Tensor | None:
    is_start = positions[:, 1:] != positions[:, :-1] + 1
    if not bool(is_start.any()):
        return None
    return _packed((torch.nn.functional.pad(is_start.cumsum(1), (1, 0)) + 1).expand(shape))


def _documents_by_bounds(bounds: Tensor, shape: tuple[int, int]) -> Tensor | None:
    edges = bounds.tolist()
    if shape[0] != 1 or (edges[:1], edges[-1:]) != ([0], [shape[1]]) or edges != sorted(edges):
        raise ValueError(
            f"cu_seq_lens_q must be non-decreasing offsets from 0 to {shape[1]}, of the documents of a single row, got "
            f"{edges} for {shape[0]} rows."
        )
    if len(bounds) == 2:
        return None
    at = torch.arange(shape[1], device=bounds.device)
    return _packed(torch.searchsorted(bounds[1:].contiguous(), at, right=True)[None] + 1)


def _traced_documents_by_bounds(bounds: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """Do the same without a value on the host. The device checks the last offset."""
    if shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q must be offsets of the documents of a single row, got {shape[0]} rows.")
    torch._assert_async(bounds[-1] == shape[1], "cu_seq_lens_q must end at the number of tokens")
    if len(bounds) == 2:
        return None
    mask, rows = bounds.new_ones(shape, dtype=torch.int32), torch.arange(shape[1], device=bounds.device)
    mask.packing = Packing(rows, rows, bounds.int(), bounds.int())
    return mask


def _packed(documents: Tensor) -> Tensor:
    mask = documents.int()
    mask.leftpad, mask.packing = None, Packing.of(mask, mask.shape[1])
    return mask


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def documents_of(mask_function: Callable, shape: tuple[int, int], device: torch.device) -> Tensor | None:
    """Find documents from a mask function of transformers.

    Args:
        mask_function: mask_function(batch, head, query, key) returns whether the query sees the key.
        shape: (b, s).
        device: of the result.

    Returns:
        int32 (b, s), the document number of each token, starting at 1. None if the mask is not causal within documents.

    Example:
        >>> import torch
        >>> from transformers.masking_utils import causal_mask_function
        >>> from megatron_sb.huggingface.packing import documents_of
        >>> documents_of(causal_mask_function, (1, 3), torch.device("cpu"))
        tensor([[1, 1, 1]], dtype=torch.int32)
    """
    batch, length = shape
    if mask_function is causal_mask_function:
        return torch.ones(shape, dtype=torch.int32, device=device)
    rows = torch.arange(batch, device=device)[:, None].expand(shape)
    position = torch.arange(length, device=device).expand(shape)

    def visible(query: Tensor, key: Tensor) -> Tensor:
        inside = (key >= 0) & (key < length)
        return mask_function(rows, 0, query, key.clamp(0, length - 1)) & inside

    is_start = ~visible(position, position - 1)
    documents = is_start.cumsum(1)
    first = position.where(is_start, 0).cummax(1).values  # the first token of each token's document
    is_causal = (
        visible(position, position)
        & visible(position, first)
        & ~visible(position, first - 1)
        & ~visible(position, position + 1)
    )
    return documents.int() if bool(is_causal.all()) else None
