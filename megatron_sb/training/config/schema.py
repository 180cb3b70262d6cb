"""The fields of a training configuration: types, ranges and defaults. configs/README.md explains them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from megatron_sb.options import COMMS, LAYOUTS, LOGITS, PACKINGS, LayerOptions
from megatron_sb.training.config.tasks import read_data_section
from megatron_sb.training.config.types import (
    BelowOne,
    Bool,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    NumLayers,
    NumRows,
    PositiveFloat,
    PositiveInt,
    Reach,
    Seconds,
    Section,
    Seed,
    section,
)

RotaryKind = Literal["none", "linear", "ntk", "yarn"]  # scaling of rotary positions in a longer context


@section
class MoEConfig(Section):
    """A mixture of experts in place of every MLP. Each expert has the model's ffn_hidden_size."""

    num_experts: PositiveInt
    top_k: PositiveInt
    dispatcher: Literal["allgather", "alltoall"] = "alltoall"
    load_balancing: Literal["none", "aux_loss"] = "aux_loss"
    aux_loss_coefficient: NonNegativeFloat = 0.01
    z_loss_coefficient: NonNegativeFloat = 0.0
    grouped_gemm: Bool = False


@section
class ModelConfig(Section):
    """Sizes of all compared models, which have RMSNorm, gated MLPs (SwiGLU) and no biases.

    head_dim defaults to hidden_size / num_heads. If that is not an integer, head_dim stays None and `check` reports it.
    """

    num_layers: NumLayers
    hidden_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    ffn_hidden_size: PositiveInt
    head_dim: PositiveInt | None = None
    moe: MoEConfig | None = None
    tie_word_embeddings: Bool = False
    make_vocab_size_divisible_by: PositiveInt = 1
    num_parameters: PositiveInt | None = None
    init_std: PositiveFloat = 0.02
    precision: Literal["fp32", "bf16"] = "fp32"
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: PositiveInt = 1
    offloaded_inputs: NonNegativeInt = 0
    tokens_at_once: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_heads == 0:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Return the rows of the embedding: vocab_size rounded up to a multiple of make_vocab_size_divisible_by."""
        multiple = self.make_vocab_size_divisible_by
        return -(-vocab_size // multiple) * multiple


@section
class StickBreakingAttentionConfig(Section):
    """Stick-breaking attention; see `megatron_sb.options.LayerOptions`."""

    kind: Literal["stick_breaking"] = "stick_breaking"
    attend_current: Bool = LayerOptions.attend_current
    mass_threshold: BelowOne = LayerOptions.mass_threshold
    remainder_bias: Bool = LayerOptions.remainder_bias
    head_norm: Bool = LayerOptions.head_norm
    logits: Literal[LOGITS] = LayerOptions.logits
    scale: PositiveFloat | None = LayerOptions.scale
    reach: tuple[Reach, Reach] | None = LayerOptions.reach
    forget_gate: Bool = LayerOptions.forget_gate
    forget_gate_loss: NonNegativeFloat = LayerOptions.forget_gate_loss


@section
class SoftmaxAttentionConfig(Section):
    """Softmax attention."""

    kind: Literal["softmax"] = "softmax"
    position: Literal["none", "rope", "alibi", "fire"] = "rope"
    window: PositiveInt | None = None
    stable_mask_gamma: NonNegativeFloat | None = None
    rotary_base: PositiveFloat = 10000.0
    evaluated_scalings: tuple[RotaryKind, ...] = ("none",)
    global_interval: PositiveInt | None = None
    dropped_in: Name | None = None
    forget_gate: Bool = False


@section
class GatedDeltaNetConfig(Section):
    """The gated delta net of flash-linear-attention, a linear attention (arXiv 2412.06464)."""

    kind: Literal["gated_delta_net"] = "gated_delta_net"
    num_heads: PositiveInt | None = None
    expand_v: PositiveFloat = 2.0

    def sizes(self, model: ModelConfig) -> tuple[int, int, int]:
        """Return the number of heads, and the channels of a head's keys and values."""
        return self.num_heads or model.num_heads, model.head_dim, round(model.head_dim * self.expand_v)


LayerAttentionConfig = StickBreakingAttentionConfig | SoftmaxAttentionConfig | GatedDeltaNetConfig


@section
class MixedAttentionConfig(Section):
    """Layers with the attention of other entries. The names repeat until every layer of the model has one."""

    kind: Literal["mixed"] = "mixed"
    layers: tuple[Name, ...]


AttentionConfig = LayerAttentionConfig | MixedAttentionConfig


def _predefined_attention() -> dict[str, AttentionConfig]:
    return {"stick_breaking": StickBreakingAttentionConfig(), "softmax_rope": SoftmaxAttentionConfig()}


def _with_predefined(value: Any) -> Any:
    """Add the predefined entries. An entry with a predefined name has the predefined kind unless it sets another."""
    if not isinstance(value, dict):
        return value
    entries: dict = _predefined_attention()
    for name, fields in value.items():
        if isinstance(fields, dict) and name in entries:
            fields = {"kind": entries[name].kind, **fields}
        entries[name] = fields
    return entries


@section
class ParallelConfig(Section):
    """Processes, devices, and the parallel layout of the model and of sequences."""

    ranks: PositiveInt = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: PositiveInt | None = None
    timeout_seconds: Seconds = 300.0
    tensor_parallel_size: PositiveInt = 1
    sequence_parallel: Bool = False
    expert_parallel_size: PositiveInt = 1
    comm: Literal[COMMS] = "auto"
    layout: Literal[LAYOUTS] = "zigzag"
    packing: Literal[PACKINGS] = "per_document"


@section
class OptimizerConfig(Section):
    """AdamW with gradient clipping."""

    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip_grad: PositiveFloat = 1.0


@section
class StageConfig(Section):
    """One stage of training."""

    name: Name
    context_length: PositiveInt
    steps: PositiveInt
    rows_per_step: NumRows
    learning_rate: PositiveFloat
    loss: Literal["tokens", "logits", "layers"] = "tokens"
    rows_per_micro_batch: PositiveInt | None = None
    warmup_steps: NonNegativeInt = 0
    warmup_start_rate: NonNegativeFloat = 0.0
    schedule: Literal["constant", "power", "exponential"] = "constant"
    power_coefficient: PositiveFloat | None = None
    pad_multiple: PositiveInt | None = None
    context_parallel_size: PositiveInt = 1
    hierarchical_context_parallel_sizes: tuple[PositiveInt, ...] = ()


@section
class EvaluationConfig(Section):
    """Evaluation of the same target tokens with longer and longer contexts."""

    windows: PositiveInt = 16
    target_tokens: PositiveInt = 256
    length_factor: PositiveInt = 8
    longest: PositiveInt | None = None
    interval: PositiveInt | None = None
    last_stage_only: Bool = False
    positions: Bool = False
    sentence_pairs: tuple[str, ...] = ()


@section
class CheckpointConfig(Section):
    """Checkpoints inside a stage and at its end."""

    interval: PositiveInt = 100
    keep: PositiveInt = 2
    stage_ends: Bool = True


@section
class ReportConfig(Section):
    """The metrics that a job writes."""

    interval: PositiveInt = 1
    attention_interval: NonNegativeInt = 10
    tensorboard: Bool = True
    wandb: Annotated[str, Field(min_length=1)] | None = None


@section
class DataConfig(Section):
    """Base class of the `data` section. A task declares its fields in a subclass, which `megatron_sb._tasks` lists.

    Every subclass also has the attributes `vocab_size` (int, before padding) and `end_of_document` (a token, or None).

    Attributes:
        kind: names the task.
        task: "module:class" of the `training.task.Task`, which is constructed from the whole configuration.
    """

    kind: str
    task: ClassVar[str]

    def problems(self, config: TrainingConfig) -> Iterator[str]:
        """Yield a sentence for each contradiction between these fields and the rest of the configuration."""
        yield from ()

    def stage_problems(self, config: TrainingConfig, stage: StageConfig, path: str) -> Iterator[str]:
        """Yield a sentence for each contradiction between these fields and a stage. path: the stage's dotted path."""
        yield from ()

    def longest_evaluated(self, evaluation: EvaluationConfig, stage: StageConfig) -> int:
        """Return the longest context, in tokens, that a model is evaluated with after `stage`."""
        multiple = evaluation.length_factor * stage.context_length
        return min(multiple, evaluation.longest or multiple)


@section
class TrainingConfig(Section):
    """The configuration of a job."""

    name: Name
    model: ModelConfig
    stages: tuple[StageConfig, ...]
    seed: Seed = 0
    compare: tuple[Name, ...] = ("stick_breaking", "softmax_rope")
    initial_checkpoint: str | None = None
    initial_attention: Literal["stick_breaking", "softmax", "mixed"] | None = None
    teacher: Name | None = None
    data: Annotated[DataConfig, BeforeValidator(read_data_section)] = dataclasses.field(
        default_factory=lambda: read_data_section({})
    )
    attention: Annotated[
        dict[Name, Annotated[AttentionConfig, Field(discriminator="kind")]], BeforeValidator(_with_predefined)
    ] = dataclasses.field(default_factory=_predefined_attention)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    report: ReportConfig = dataclasses.field(default_factory=ReportConfig)

    @property
    def is_distilled(self) -> bool:
        """Whether a stage has a loss that compares the model with the teacher."""
        return any(stage.loss != "tokens" for stage in self.stages)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, before padding."""
        return self.data.vocab_size

    def layers_of(self, model: str) -> tuple[str, ...]:
        """Return the entry of `attention` that each layer of a model has."""
        attention = self.attention[model]
        names = attention.layers if isinstance(attention, MixedAttentionConfig) else (model,)
        return tuple(itertools.islice(itertools.cycle(names), self.model.num_layers))

    def attention_of_layers(self, model: str) -> tuple[LayerAttentionConfig, ...]:
        """Return the attention of each layer of a model."""
        return tuple(self.attention[name] for name in self.layers_of(model))

    def breaks_sticks(self, model: str) -> bool:
        """Return whether all layers of a model of `compare` have the same stick-breaking attention."""
        return isinstance(self.attention[model], StickBreakingAttentionConfig)

    def has_sticks(self, model: str) -> bool:
        """Return whether a layer of a model has stick-breaking attention."""
        return any(isinstance(each, StickBreakingAttentionConfig) for each in self.attention_of_layers(model))

    def scale_of_logits(self, model: str) -> float | None:
        """Return the factor of the logits of a model, the same in all layers that have logits; None for the default."""
        layers = self.attention_of_layers(model)
        return next((each.scale for each in layers if isinstance(each, StickBreakingAttentionConfig)), None)

    def data_parallel_size(self, stage: StageConfig) -> int:
        """Return the number of ranks, or groups of ranks, that train on different rows."""
        shared = self.parallel.tensor_parallel_size * stage.context_parallel_size
        return self.parallel.ranks // shared

    def row_multiple(self, stage: StageConfig) -> int:
        """Return the number that must divide the length of a row: that of equal shards, where ranks need them."""
        parallel, size = self.parallel, stage.context_parallel_size
        if parallel.layout == "balanced" and not parallel.sequence_parallel:
            return 1
        chunks = size * (2 if size > 1 and parallel.layout == "zigzag" else 1)
        return chunks * (parallel.tensor_parallel_size if parallel.sequence_parallel else 1)

    def pad_multiple(self, stage: StageConfig) -> int:
        """Return the multiple that each document's part of a row is padded to, the same for all models."""
        return stage.pad_multiple or self.needed_pad_multiple(stage)

    def needed_pad_multiple(self, stage: StageConfig) -> int:
        """Return the smallest multiple that the stage's ranks need; 1 where they shard the packed stream as a whole."""
        whole = self.parallel.layout == "balanced" or self.parallel.packing == "whole_stream"
        return 1 if whole else self.row_multiple(stage)

    def evaluated_scalings(self, model: str) -> tuple[str, ...]:
        """Return the scalings of rotary positions to evaluate a model with; ("none",) without rotary layers."""
        attentions = self.attention_of_layers(model)
        softmax = [each for each in attentions if isinstance(each, SoftmaxAttentionConfig) and each.position == "rope"]
        return softmax[0].evaluated_scalings if softmax else ("none",)

    def longest_evaluated(self, stage: StageConfig) -> int:
        """Return the longest context, in tokens, that a model is evaluated with after `stage`."""
        return self.data.longest_evaluated(self.evaluation, stage)

    def evaluation_lengths(self, stage: StageConfig) -> list[int]:
        """Return the evaluated context lengths, which double from target_tokens to the longest."""
        longest = self.longest_evaluated(stage)
        lengths = []
        length = self.evaluation.target_tokens
        while length < longest:
            lengths.append(length)
            length *= 2
        return [*lengths, longest]
