"""Checks of the lengths of a plan. They return messages, because the ranks agree on errors before one raises."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


def offsets_of(cu_seqlens: object) -> tuple[list[int] | None, str]:
    """Return cu_seqlens as a list, and an error message or "". A GPU tensor is copied to the host."""
    if cu_seqlens is None:
        return None, ""
    if not isinstance(cu_seqlens, Tensor):
        return None, f"cu_seqlens must be an int32 torch.Tensor, got {type(cu_seqlens).__name__}."
    if cu_seqlens.dtype != torch.int32:
        return None, f"cu_seqlens must have dtype torch.int32, got {cu_seqlens.dtype}."
    if cu_seqlens.dim() != 1:
        return None, f"cu_seqlens must have shape (documents + 1,), got {cu_seqlens.dim()} dimensions."
    if cu_seqlens.layout is not torch.strided or cu_seqlens.is_meta or is_fake(cu_seqlens):
        got = f"{type(cu_seqlens).__name__} on {cu_seqlens.device} with layout {cu_seqlens.layout}"
        return None, f"cu_seqlens must be a dense tensor that holds its values, got {got}."
    return cu_seqlens.tolist(), ""


def _length_error(name: str, value: object, smallest: int) -> str:
    """Return an error message if a length has a wrong type or is out of range, or ""."""
    if value is None:
        return ""
    if not isinstance(value, int) or isinstance(value, bool):
        return f"{name} must be an int, got {value!r}."
    return "" if smallest <= value < 2**31 else f"{name} must be from {smallest} to 2^31 - 1, got {value}."


def lengths_error(seq_len: object, local_len: object, offsets: list[int] | None) -> str:
    """Return an error message if the lengths of a plan are invalid or contradict each other, or ""."""
    if error := _length_error("seq_len", seq_len, 1) or _length_error("local_len", local_len, 0):
        return error
    if seq_len is not None and local_len is not None:
        return f"local_len must be None if seq_len is given, got {local_len} and seq_len {seq_len}."
    if offsets is None:
        return ""
    if not offsets:
        return "cu_seqlens must have documents + 1 entries, got none."
    if seq_len is None and local_len is None and offsets[-1] < 1:
        return f"cu_seqlens must end at 1 or later if seq_len is not given, got cu_seqlens[-1] = {offsets[-1]}."
    return ""
