"""What a student learns from a teacher: a model with other attention, and the weights that the student started from.

`divergence` compares next-token distributions. `recorded` and `compared` compare attention layer by layer: every
attention of the student gets the input that the teacher's attention of the same layer had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

Call = tuple[Tensor, Tensor]  # hidden states and output of a layer's attention, (t, 1, hidden_size) each


def attention_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the self-attention of each layer of a GPTModel: the projections and the attention between them."""
    return [layer.self_attention for layer in model.decoder.layers]


def freeze_all_but_attention(model: torch.nn.Module) -> None:
    """Let only the weights of `attention_blocks` have gradients. Call this before an optimizer is built.

    An optimizer leaves out weights without gradients, so that weight decay does not change them.
    """
    model.requires_grad_(False)
    for block in attention_blocks(model):
        block.requires_grad_(True)


def divergence(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the KL divergence of the student's distribution from the teacher's, in nats: fp32 (t,).

    Args:
        logits: of the student, (t, vocab_size).
        expected: logits of the teacher, (t, vocab_size).

    Example:
        >>> import torch
        >>> from megatron_sb.training.engine.distillation import divergence
        >>> certain, even = torch.tensor([[100.0, 0.0]]), torch.zeros(1, 2)
        >>> divergence(even, certain)
        tensor([0.6931])
    """
    distributions = (log_softmax(values.float(), dim=-1) for values in (logits, expected))
    return kl_div(*distributions, reduction="none", log_target=True).sum(dim=-1)


@contextlib.contextmanager
def recorded(model: torch.nn.Module) -> Iterator[list[Call]]:
    """Collect the hidden states and the output of every attention in the block, one entry for each layer."""
    calls: list[Call] = []

    def after(block: torch.nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
        # In eval mode without gradients, Megatron-Core adds the residual to the output in place.
        calls.append((args[0], output[0].clone()))

    hooks = [block.register_forward_hook(after, with_kwargs=True) for block in attention_blocks(model)]
    with _removed(hooks):
        yield calls


@contextlib.contextmanager
def compared(model: torch.nn.Module, calls: list[Call]) -> Iterator[list[Tensor]]:
    """Give every attention the input of a recorded call, and compare the outputs, in one forward in the block.

    The layers go on with the recorded output, which has no gradient.

    Args:
        model: the student.
        calls: of the teacher, one for each layer; see `recorded`.

    Yields:
        The error of each layer: the mean squared difference to the recorded output, divided by the mean square of that
        output. An fp32 scalar with gradient.
    """
    errors: list[Tensor] = []

    def before(block: torch.nn.Module, args: tuple) -> tuple:
        hidden, _ = calls[len(errors)]
        return hidden, *args[1:]

    def after(block: torch.nn.Module, args: tuple, output: tuple) -> tuple:
        _, expected = calls[len(errors)]
        difference = output[0].float() - expected.float()
        errors.append(difference.square().mean() / expected.float().square().mean())
        return expected, *output[1:]

    blocks = attention_blocks(model)
    hooks = [block.register_forward_pre_hook(before) for block in blocks]
    hooks += [block.register_forward_hook(after) for block in blocks]
    with _removed(hooks):
        yield errors


@contextlib.contextmanager
def _removed(hooks: list) -> Iterator[None]:
    """Remove the hooks at the end of the block."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
