"""Autocast in the baselines, which choose the dtype of their sums by themselves."""

import contextlib

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Disable autocast on x's device. The meta device has no autocast."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
