"""Predict the seconds of a training step from recorded rates of kernels, memory and links.

The time of a step is a sum of four terms: matrix products at one rate, passes over memory at another rate, attention by
the model of `megatron_sb.planning.context_parallel`, and transfers that no kernel hides. The host may need more time to
start the kernels than the GPU needs to run them; the larger of both times counts. Every row is one document.

All sizes and layouts use the same rates. The rates were fitted by hand to the training records of 2026-11-22:
benchmarks/results/2026-11-22-h200-training.md, 2026-11-22-2xh200-layouts.md, 2026-11-22-2xh200-context-extension.json.
docs/planning.md lists the deviations, and a test bounds them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_sb.planning.context_parallel import MODES, Machine, Model, Shape
from megatron_sb.planning.layouts import Layout
from megatron_sb.planning.memory import WEIGHT, split_weights
from megatron_sb.training.config import ModelConfig, StageConfig, StickBreakingAttentionConfig

MANY_HEADS = 96
RECOMPUTED = 4 / 3  # operations of a layer whose forward runs twice, relative to one whose forward runs once
ALIGNMENT = 8  # elements of bf16: cuBLAS has its fast kernels for widths that are multiples of it


@dataclass(frozen=True)
class Rates:
    """One H200 of a host with NVLink, as recorded in November 2026.

    Attributes:
        product_tflops: TFLOP/s of matrix products.
        unaligned_tflops: the same where a width is not a multiple of ALIGNMENT.
        memory_tbytes: TB/s that other kernels read and write.
        host_layer: seconds that the host needs to start forward and backward of a layer for a micro-batch.
        host_context: seconds that context parallelism adds to it.
        host_step: seconds of a step in which the GPU waits for the host.
    """

    product_tflops: float = 740.0
    unaligned_tflops: float = 240.0
    memory_tbytes: float = 2.6
    host_layer: float = 4.6e-3
    host_context: float = 0.9e-3
    host_step: float = 25e-3


# head_dim that the kernels compute -> times of their tiles in microseconds, see `context_parallel.Machine`. Calls
# follow each other without a rest.
MACHINES = {
    64: Machine(forward_tile=1.1, backward_step=1.97, rest_credit=0.0),
    128: Machine(rest_credit=0.0),
}
# Times of forward and backward as multiples of those of plain attention with the same heads, by (forget_gate, whether
# logits are Euclidean). benchmarks/results/2026-11-28-h200-variants.md, at 16K.
VARIANTS = {
    64: {(True, False): (1.61, 1.33), (False, True): (1.14, 1.12), (True, True): (1.70, 1.50)},
    128: {(True, False): (1.42, 1.40), (False, True): (1.10, 1.17), (True, True): (1.49, 1.65)},
}
# Bytes that memory-bound kernels move in forward and backward, and again in the recomputed forward.
NORM_AND_RESIDUAL, NORM_AND_RESIDUAL_FORWARD = 44, 20  # for each token and channel of the hidden size
ACTIVATION, ACTIVATION_FORWARD = 16, 6  # for each token and channel of an MLP
LOSS = 50  # for each logit
ACCUMULATION = 10  # for each weight and micro-batch
UPDATE, CLEAR = 40, 8  # for each weight of the optimizer's shard; for each weight of the GPU


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on every GPU.

    Attributes:
        products: matrix products.
        attention: stick-breaking attention with its context parallelism.
        memory: other kernels.
        transfers: of tensor parallelism, and of the weights after the update.
        host: the host's time to start the kernels.
        waiting: the GPU's waits for the host between two steps.
    """

    products: float
    attention: float
    memory: float
    transfers: float
    host: float
    waiting: float

    @property
    def total(self) -> float:
        """Seconds of the step: those of the GPU, or of the host if it takes longer, and the waits."""
        return self.waiting + max(self.products + self.attention + self.memory + self.transfers, self.host)


def can_predict(model: ModelConfig) -> str | None:
    """Return why there is no rate for a model, or None if there is one."""
    if model.moe:
        return "no kernel rates of experts were recorded"
    if model.head_dim > max(MACHINES):
        return f"no kernel rates were recorded for head_dim above {max(MACHINES)}"
    if model.tokens_at_once is not None or model.offloaded_inputs:
        return "no rates were recorded for model.tokens_at_once and model.offloaded_inputs"
    return None


def predict_step(
    model: ModelConfig,
    attention: StickBreakingAttentionConfig,
    vocab_size: int,
    stage: StageConfig,
    layout: Layout,
    skipped: float = 0.0,
    rates: Rates = Rates(),
) -> StepTime:
    """Predict the time of a training step.

    Args:
        model: sizes, for which `can_predict` returns None.
        attention: the model's attention.
        vocab_size: tokens of the vocabulary, before padding.
        stage: gives the length and the number of rows.
        layout: the parallel layout.
        skipped: share of the attention's work that skipping and the ends of documents save, from 0 to less than 1.
        rates: the machine.
    """
    micro_batches = stage.rows_per_step / layout.data / layout.rows_at_once
    tokens = stage.rows_per_step * stage.context_length / layout.data / layout.context  # of a GPU, or TP group
    weights, _ = split_weights(model, attention, vocab_size, layout)
    logits = model.padded_vocab_size(vocab_size) / layout.tensor
    again = layout.recompute == "full"
    channels = model.hidden_size * (NORM_AND_RESIDUAL + NORM_AND_RESIDUAL_FORWARD * again)
    channels += model.ffn_hidden_size * (ACTIVATION + ACTIVATION_FORWARD * again)
    moved = tokens * (model.num_layers * channels / layout.tensor + LOSS * logits)
    moved += weights * (ACCUMULATION * micro_batches + CLEAR + UPDATE / (layout.data * layout.context))
    host = (rates.host_layer + rates.host_context * (layout.context > 1)) * (RECOMPUTED if again else 1.0)
    return StepTime(
        products=tokens * _product_seconds(model, logits, layout, rates),
        attention=micro_batches * model.num_layers * attention_seconds(model, attention, stage, layout, skipped),
        memory=moved / rates.memory_tbytes / 1e12,
        transfers=_transfer_seconds(model, weights, tokens, micro_batches, layout),
        host=micro_batches * model.num_layers * host,
        waiting=rates.host_step,
    )


def _product_seconds(model: ModelConfig, logits: float, layout: Layout, rates: Rates) -> float:
    """Return the seconds of the matrix products for a token. A recomputed forward adds a third."""
    hidden, heads = model.hidden_size, 2 * (model.num_heads + model.num_kv_heads)
    projections = hidden * heads * model.head_dim / layout.tensor
    width = model.ffn_hidden_size / layout.tensor
    slow = rates.product_tflops if width % ALIGNMENT == 0 else rates.unaligned_tflops
    layer = projections / rates.product_tflops + 3 * hidden * width / slow
    factor = RECOMPUTED if layout.recompute == "full" else 1.0
    return 6e-12 * (model.num_layers * layer * factor + hidden * logits / rates.product_tflops)


def attention_seconds(
    model: ModelConfig, attention: StickBreakingAttentionConfig, stage: StageConfig, layout: Layout, skipped: float
) -> float:
    """Return the seconds of a layer's attention for a micro-batch, in the fastest mode of context parallelism.

    The rows of a micro-batch count as further heads: the kernels take their tiles from one list. From MANY_HEADS on,
    the time is proportional to the rows.
    """
    columns = next(head_dim for head_dim in sorted(MACHINES) if model.head_dim <= head_dim)
    machine, variant = MACHINES[columns], (attention.forget_gate, attention.logits == "euclidean")
    forward, backward = (multiple * (1 - skipped) for multiple in VARIANTS[columns].get(variant, (1.0, 1.0)))
    tiles = {"forward_tile": forward * machine.forward_tile, "backward_step": backward * machine.backward_step}
    machine = replace(machine, **tiles)
    heads, kv_heads = model.num_heads // layout.tensor, max(1, model.num_kv_heads // layout.tensor)
    one_row = Model(machine, Shape(stage.context_length, heads, kv_heads, model.head_dim), layout.context)
    possible = [mode for mode in MODES if one_row.possible(mode)]
    rows = min(layout.rows_at_once, max(1, MANY_HEADS // heads))
    shape = Shape(stage.context_length, heads * rows, kv_heads * rows, model.head_dim)
    call = Model(machine, shape, layout.context)
    directions = ("forward", "backward", *(["forward"] if layout.recompute != "none" else []))
    fastest = min(call.time(mode, *directions) for mode in possible if mode != "p2p")
    if "p2p" in possible and call.least_ring_time(*directions) < fastest:
        fastest = min(fastest, call.time("p2p", *directions))
    return fastest / 1e6 * layout.rows_at_once / rows


def _transfer_seconds(model: ModelConfig, weights: float, tokens: float, micro_batches: float, layout: Layout) -> float:
    """Return the seconds of transfers that no kernel hides.

    Tensor parallelism gathers and scatters the hidden states twice in each direction of a layer. The update gathers the
    weights. The gradients are reduced during the backward.
    """
    machine, group = MACHINES[128], layout.data * layout.context
    seconds = 0.0
    if layout.tensor > 1:
        passes = 12 if layout.recompute == "full" else 8
        part = (layout.tensor - 1) / layout.tensor
        moved = WEIGHT * tokens * model.hidden_size * part / machine.link_gbytes / 1e9
        seconds += passes * model.num_layers * (moved + micro_batches * machine.link_latency / 1e6)
    if group > 1:
        seconds += WEIGHT * weights * (group - 1) / group / machine.link_gbytes / 1e9
    return seconds
