"""Time the forward and backward of one layer's attention in several cases, by turns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

PASSES = ("forward", "backward")
_MIN_SECONDS = 2e-3  # of one measurement; in a shorter one, waking up the device would dominate
_MIN_ROUNDS = 5


def time_cases(
    cases: Sequence[tuple[Any, Any, dict[str, Any]]], value: Any, bounds: Any, seconds: float
) -> dict[str, list[float]]:
    """Return the median milliseconds of the forward and the backward of each case.

    The gradient of the output is normally distributed and the same for all cases.

    Args:
        cases: query (t, h, d), key (t, g, d) and keyword arguments of the attention.
        value: (t, g, d_v), the same for all cases.
        bounds: cu_seqlens of the documents.
        seconds: duration of the measurement of each pass.

    Returns:
        A list by case for each of PASSES.
    """
    import torch

    from megatron_sb.ops import stickbreaking_attention_varlen

    generator = torch.Generator(device=value.device).manual_seed(0)
    shape = (*cases[0][0].shape[:-1], value.shape[-1])
    d_o = torch.randn(shape, generator=generator, device=value.device, dtype=value.dtype)
    calls: dict[str, list[Callable[[], Any]]] = {name: [] for name in PASSES}
    for query, key, settings in cases:
        tensors = [x.detach().clone().requires_grad_() for x in (query, key, value)]
        forward = functools.partial(stickbreaking_attention_varlen, *tensors, bounds, **settings)
        with torch.enable_grad():
            o = forward()
        calls["forward"].append(torch.no_grad()(forward))
        calls["backward"].append(functools.partial(torch.autograd.grad, o, tensors, d_o, retain_graph=True))
    return {name: _median_ms(calls[name], seconds) for name in PASSES}


def _median_ms(calls: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Return the median milliseconds of each call. The calls alternate, so that other load affects each equally."""
    import torch
    from torch.utils.benchmark import Timer

    timers = [Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads()) for call in calls]
    first = [timer.timeit(2).mean for timer in timers]
    repeats = max(1, int(_MIN_SECONDS / max(first)))
    rounds = max(_MIN_ROUNDS, int(seconds / (repeats * max(first))))
    measured = [[timer.timeit(repeats).mean for timer in timers] for _ in range(rounds)]
    return (1e3 * np.median(measured, axis=0)).tolist()
