"""Long sequences within the memory of a GPU: MLPs and losses in parts, inputs of layers in the memory of the host.

With a million tokens, the logits of a vocabulary of 50,000 would take 100 GB, and the inputs of 40 layers of 1,536
channels 129 GB. A decoder of this module never has all logits, nor the hidden channels of an MLP for all tokens: it
computes them for some tokens at a time, and computes them again in the backward. The results are the same. What full
recomputation keeps, the input of each recomputed layer, it can copy to the host until the backward needs it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# The layers have no dropout, so the backward need not restore the state of torch's generator.
recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class LongSequenceModel(GPTModel):
    """A decoder that needs less memory for long sequences.

    Args:
        *args, **arguments: of GPTModel, for dense MLPs without biases, and without sequence parallelism.
        tokens_at_once: tokens of a rank whose MLP, or whose logits and losses, are computed together. None: all.
        offloaded_inputs: how many of the inputs that full recomputation keeps are copied to the host, the first ones.
    """

    def __init__(self, *args: Any, tokens_at_once: int | None, offloaded_inputs: int, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self._tokens_at_once, self._has_labels = tokens_at_once, False
        # Megatron-Core builds these modules itself, so their forwards are replaced.
        if tokens_at_once is not None:
            for layer in self.decoder.layers:
                layer.mlp.forward = functools.partial(_mlp_in_parts, layer.mlp.forward, tokens_at_once)
            self.output_layer.forward = functools.partial(self._project, self.output_layer.forward)
        if offloaded_inputs:
            self.decoder.forward = functools.partial(_forward_with_offload, self.decoder.forward, offloaded_inputs)

    def forward(self, *args: Any, labels: Tensor | None = None, **arguments: Any) -> Tensor:
        """Return the losses of the labels, or logits without them, as GPTModel does."""
        self._has_labels = labels is not None
        return super().forward(*args, labels=labels, **arguments)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor | _Projection) -> Tensor:
        """Return the losses of the labels: fp32 (b, s)."""
        if not isinstance(logits, _Projection):
            return super().compute_language_model_loss(labels, logits)
        parts = zip(logits.hidden.split(self._tokens_at_once), labels.split(self._tokens_at_once, 1), strict=True)
        return torch.cat([recomputed(self._losses_of_part, logits.project, *part) for part in parts], dim=1)

    def _project(self, forward: Callable, hidden: Tensor, **arguments: Any) -> tuple[Tensor | _Projection, None]:
        """Stand in for the forward of the output layer: with labels, leave the product to the loss."""
        if self._has_labels and len(hidden) > self._tokens_at_once:
            return _Projection(hidden, functools.partial(forward, **arguments)), None
        return forward(hidden, **arguments)

    def _losses_of_part(self, project: Callable, hidden: Tensor, labels: Tensor) -> Tensor:
        logits, _ = project(hidden)
        return super().compute_language_model_loss(labels, logits)


@dataclasses.dataclass
class _Projection:
    """Logits that are not computed yet.

    Attributes:
        hidden: (s, b, h), the input of the output layer.
        project: hidden (n, b, h) -> (logits (n, b, vocabulary of the rank), None).
    """

    hidden: Tensor
    project: Callable[[Tensor], tuple[Tensor, None]]


def _mlp_in_parts(forward: Callable, tokens_at_once: int, hidden: Tensor, *args: Any, **arguments: Any):
    """Stand in for the forward of an MLP: hidden (s, b, h) -> (output (s, b, h), None)."""
    if len(hidden) <= tokens_at_once:
        return forward(hidden, *args, **arguments)
    parts = [recomputed(forward, part, *args, **arguments)[0] for part in hidden.split(tokens_at_once)]
    return torch.cat(parts), None


def _forward_with_offload(forward: Callable, count: int, *args: Any, **arguments: Any):
    """Stand in for the forward of the decoder. What the backward computes again is not offloaded: it runs later."""
    with OffloadedTensors(count):
        return forward(*args, **arguments)


class OffloadedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Keep floating-point tensors that are saved for the backward in pinned memory of the host.

    Copies run on the current stream, in order with the kernels that write and read the tensors.

    Args:
        count: number of tensors, the first ones that are saved on a GPU. Others stay where they are.
    """

    # torch rounds sizes of pinned memory up to a power of two, so a large tensor is stored in pieces.
    PIECE_BYTES = 2**28

    def __init__(self, count: int) -> None:
        super().__init__(self._pack, self._unpack)
        self.left = count

    def _pack(self, tensor: Tensor) -> Tensor | _OnHost:
        if not (self.left and tensor.is_cuda and tensor.is_floating_point()):
            return tensor
        self.left -= 1
        pieces = tensor.reshape(-1).split(self.PIECE_BYTES // tensor.element_size())
        on_host = [torch.empty(len(piece), dtype=piece.dtype, pin_memory=True) for piece in pieces]
        for host, piece in zip(on_host, pieces, strict=True):
            host.copy_(piece, non_blocking=True)
        return _OnHost(on_host, tensor.shape, tensor.device)

    @staticmethod
    def _unpack(packed: Tensor | _OnHost) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor = torch.empty(packed.shape, dtype=packed.pieces[0].dtype, device=packed.device)
        begin = 0
        for piece in packed.pieces:
            tensor.view(-1)[begin : begin + len(piece)].copy_(piece, non_blocking=True)
            begin += len(piece)
        return tensor


@dataclasses.dataclass
class _OnHost:
    """A tensor of a GPU in the memory of the host: its elements in pieces, its shape, its device."""

    pieces: list[Tensor]
    shape: torch.Size
    device: torch.device
