"""Inputs of softmax attention."""

import torch


def make_inputs(*rows, heads=4, kv_heads=2, dim=8, dtype=torch.float64, device=None):
    """Draw q, k and v that require gradients."""
    shapes = [(*rows, heads, dim), (*rows, kv_heads, dim), (*rows, kv_heads, dim)]
    return [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]


def cu_seqlens_of(*lengths):
    """Return the offsets of documents with these lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
