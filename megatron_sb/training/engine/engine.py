"""Megatron-Core as the engine of a training job: parallel state, model, training step, losses of single tokens.

The trainer uses Megatron-Core only through `Engine`. backends.py holds the differences between CPUs and GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megatron_sb.baselines.softmax import RotaryScaling
from megatron_sb.megatron import versions
from megatron_sb.megatron.core_attention import shared_plans
from megatron_sb.megatron.gates import GateLossScale
from megatron_sb.megatron.statistics import (
    AttentionCounts,
    AttentionInputs,
    captured,
    observed,
    stick_breaking_layers,
    watched,
)
from megatron_sb.megatron.weights import HEADS, has_optimizer_of_attention, write_attention_kind
from megatron_sb.ops.context_parallel import shard_sequence
from megatron_sb.training.config import StageConfig, TrainingConfig
from megatron_sb.training.engine.backends import MegatronBackend, TorchBackend
from megatron_sb.training.engine.distillation import compared, divergence, freeze_all_but_attention, recorded
from megatron_sb.training.engine.groups import destroy_groups_except, process_groups
from megatron_sb.training.engine.model import build_model, stage_fields
from megatron_sb.training.engine.softmax_attention import set_rotary_scaling


class Batch(Protocol):
    """Packed sequences, the same on every context-parallel rank, before the ranks shard them.

    Attributes:
        tokens: int64 (t,).
        labels: int64 (t,).
        counted: bool (t,), true where the label's loss counts.
        cu_seqlens: int32 (n + 1,), from 0 to t.
    """

    tokens: np.ndarray
    labels: np.ndarray
    counted: np.ndarray
    cu_seqlens: np.ndarray


class Engine:
    """A GPTModel and its optimizer under the parallel layout of one stage.

    The default process group must exist. Only one engine may exist at a time. Every rank builds the same weights from
    config.seed. If the constructor raises an error, it leaves no process groups, so another engine can be created.

    Args:
        config: the job's configuration.
        model: a name in config.attention.
        stage: the stage to train.
        vocab_size: size of the vocabulary before padding.
        device: this rank's device.
    """

    def __init__(
        self, config: TrainingConfig, model: str, stage: StageConfig, vocab_size: int, device: torch.device
    ) -> None:
        self._config = config
        self._name = model
        self._stage = stage
        self._teacher: torch.nn.Module | None = None  # built in the first step that needs it
        self._stage_fields = stage_fields(config, model, stage)
        self._device = device
        self._vocab_size = vocab_size
        self._trained_context = stage.context_length
        self._attention_kind = config.attention[model].kind
        self._earlier_groups = process_groups()
        try:
            self._create_groups(stage)
            self._create_model(model, stage)
        except BaseException:
            # Without a barrier: this rank may be the only one that fails.
            self._destroy_parallel_state()
            raise

    def _create_groups(self, stage: StageConfig) -> None:
        parallel, context_parallel_size = self._config.parallel, stage.context_parallel_size
        levels = stage.hierarchical_context_parallel_sizes if context_parallel_size > 1 else ()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_parallel_size,
            context_parallel_size=context_parallel_size,
            hierarchical_context_parallel_sizes=[*levels] or None,
            expert_model_parallel_size=parallel.expert_parallel_size,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=parallel.timeout_seconds / 60,
            create_gloo_process_groups=False,
        )
        self._cp_group = parallel_state.get_context_parallel_group()
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self.data_parallel_size = parallel_state.get_data_parallel_world_size()

    def _create_model(self, model: str, stage: StageConfig) -> None:
        config, on_gpu = self._config, self._device.type == "cuda"
        torch.manual_seed(config.seed)
        if on_gpu:
            model_parallel_cuda_manual_seed(config.seed, force_reset_rng=True)
        self._model = build_model(config, model, stage, self._vocab_size, fused=on_gpu)
        # The dtype is that of the norms too, as in Megatron's scripts.
        self._model.to(device=self._device, dtype=self._model.config.params_dtype)
        self.attention_counts = AttentionCounts.zeros(len(stick_breaking_layers(self._model)), self._device)
        if stage.loss == "layers":
            freeze_all_but_attention(self._model)
        backend = MegatronBackend if on_gpu else TorchBackend
        self._backend = backend(self._model, config.optimizer)

    def _create_teacher(self) -> torch.nn.Module:
        """Return the teacher, with the weights of initial_checkpoint."""
        config, on_gpu = self._config, self._device.type == "cuda"
        teacher = build_model(config, config.teacher, self._stage, self._vocab_size, fused=on_gpu)
        teacher.to(device=self._device, dtype=teacher.config.params_dtype).eval().requires_grad_(False)
        self._backend.load_weights(teacher, Path(config.initial_checkpoint))
        return teacher

    def fits(self, stage: StageConfig) -> bool:
        """Return whether this engine can train the model in another stage, too."""
        return stage_fields(self._config, self._name, stage) == self._stage_fields

    def train_step(
        self,
        batches: list[Batch],
        num_tokens: int,
        learning_rate: float,
        *,
        num_inputs: int | None = None,
        observe: bool = False,
    ) -> tuple[Tensor, float]:
        """Update the weights once. Collective.

        Args:
            batches: this data-parallel rank's micro-batches.
            num_tokens: labels that count in the step, over all ranks. The loss is the sum of token losses over
                num_tokens.
            learning_rate: learning rate of this step.
            num_inputs: tokens of the step's rows over all ranks, also those whose labels do not count. The auxiliary
                losses are means over them. Default None: num_tokens.
            observe: measure the attention of the first micro-batch. `attention_counts` keeps the result until the next
                measurement.

        Returns:
            This rank's share of the loss of the stage (a float64 scalar, which `sum_over_ranks` sums to the loss), and
            the norm of the gradient before clipping.
        """
        if self._teacher is None and self._stage.loss != "tokens":
            self._teacher = self._create_teacher()
        self._model.train()
        self._scale_auxiliary_losses(num_inputs or num_tokens)
        share = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, batch in enumerate(batches):
            with self._backend.accumulate(last=index == len(batches) - 1):
                with observed(self._model, self._device) if observe and index == 0 else nullcontext() as found:
                    losses, counted = self._training_losses(batch)
                loss = (losses * counted).sum() / num_tokens
                loss.backward()
            share += loss.detach()
            self.attention_counts = found or self.attention_counts
        return share, self._backend.step(learning_rate)

    def _training_losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the stage's losses of the tokens, (t,) or a scalar for all of them, and which tokens count, (t,)."""
        if self._stage.loss == "tokens":
            losses, counted, _ = self._forward(self._backend.forward, batch, batch.counted)
        elif self._stage.loss == "logits":
            with torch.no_grad():
                expected, _, _ = self._forward(self._teacher, batch, batch.counted, "logits")
            logits, counted, _ = self._forward(self._backend.forward, batch, batch.counted, "logits")
            losses = divergence(logits, expected)
        else:
            with torch.no_grad(), recorded(self._teacher) as calls:
                self._forward(self._teacher, batch, batch.counted)
            with compared(self._model, calls) as errors:
                _, counted, _ = self._forward(self._backend.forward, batch, batch.counted)
            losses = torch.stack(errors).mean()
        return losses, counted

    @torch.no_grad()
    def window_losses(self, batch: Batch, num_windows: int) -> Tensor:
        """Return this rank's share of the summed loss of each sequence in the batch: float64 (num_windows,).

        The sum over the ranks that share the batch is the loss.
        """
        return self._sum_windows(batch, num_windows, "losses")

    @torch.no_grad()
    def window_hits(self, batch: Batch, num_windows: int) -> Tensor:
        """Return this rank's share of the number of labels that are the likeliest token; see `window_losses`."""
        return self._sum_windows(batch, num_windows, "hits")

    @torch.no_grad()
    def likeliest_tokens(self, batch: Batch) -> Tensor:
        """Return the likeliest next token of each token in this rank's shard of the batch: int64 (t,), on the CPU."""
        self._model.eval()
        likeliest, _, _ = self._forward(self._model, batch, batch.counted, "likeliest")
        return likeliest.cpu()

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of the next token of each token in this rank's shard: (t, vocab_size), on the CPU."""
        self._model.eval()
        logits, _, _ = self._forward(self._model, batch, batch.counted, "logits")
        return logits.cpu()

    def attention_inputs(self, batch: Batch) -> list[AttentionInputs]:
        """Return the inputs of every stick-breaking attention, by layer, for this rank's tokens and heads.

        Raises:
            ValueError: The model has no stick-breaking layers.
        """
        with captured(self._model) as inputs:
            self.likeliest_tokens(batch)
        return inputs

    def watch_attention(self, batch: Batch, look: Callable[..., None]) -> None:
        """Run a forward without gradients that calls `look` in every stick-breaking layer; see `statistics.watched`."""
        with watched(self._model, look):
            self.likeliest_tokens(batch)

    def set_mass_threshold(self, threshold: float) -> None:
        """Set the `mass_threshold`, in [0, 1), of every stick-breaking layer. A checkpoint does not keep it."""
        for core in stick_breaking_layers(self._model):
            core.options = dataclasses.replace(core.options, mass_threshold=threshold)

    def scale_positions(self, kind: str, factor: float) -> None:
        """Set how rotary positions are scaled; see `megatron_sb.baselines.softmax.RotaryScaling`."""
        set_rotary_scaling(self._model, RotaryScaling(kind, factor, self._trained_context))

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of the values over ranks. Collective.

        Tensor-parallel ranks see the same tokens, so each set of them counts once.
        """
        values = values.to(self._device)
        dist.all_reduce(values)
        return values.cpu() / self._config.parallel.tensor_parallel_size

    def save(self, path: Path) -> None:
        """Write model and optimizer into an existing directory. Collective. Training has no random state to save."""
        self._backend.save(path)
        if dist.get_rank() == 0:
            heads = {name: getattr(self._config.model, name) for name in HEADS}
            write_attention_kind(path, self._attention_kind, heads=heads)

    def load(self, path: Path) -> None:
        """Read what `save` wrote, possibly under another parallel layout. Collective.

        A stage with `loss: layers` has optimizer state of attention only. The optimizer then starts without state
        before it and after it.
        """
        trains_attention = self._stage.loss == "layers"
        self._backend.load(path, with_optimizer=has_optimizer_of_attention(path) == trains_attention)

    def close(self) -> None:
        """Destroy the parallel state and its process groups, so that another engine can be created. Collective."""
        del self._backend, self._model, self._teacher, self._cp_group
        dist.barrier()  # keeps a rank from closing its connections while another rank still receives
        self._destroy_parallel_state()

    def _destroy_parallel_state(self) -> None:
        shared_plans.clear()
        GateLossScale.per_token = None
        parallel_state.destroy_model_parallel()
        destroy_groups_except(self._earlier_groups)

    def _sum_windows(self, batch: Batch, num_windows: int, wanted: str) -> Tensor:
        self._model.eval()
        window = torch.arange(num_windows).repeat_interleave(torch.from_numpy(batch.cu_seqlens).diff())
        scores, counted, window = self._forward(self._model, batch, window.numpy(), wanted)
        sums = torch.zeros(num_windows, dtype=torch.float64, device=self._device)
        return sums.index_add_(0, window, (scores * counted).double())

    def _scale_auxiliary_losses(self, num_inputs: int) -> None:
        """Weight the auxiliary losses of a micro-batch by its tokens' share of the step's `num_inputs` tokens.

        Megatron-Core before 0.19 multiplies them by the tokens of the rank: those of the micro-batch divided by the
        ranks that share it.
        """
        shared = parallel_state.get_context_parallel_world_size()
        if self._config.parallel.sequence_parallel:
            shared *= self._config.parallel.tensor_parallel_size
        if versions.ROUTER_COUNTS_ALL_RANKS:
            shared = 1
        GateLossScale.per_token = 1 / num_inputs
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(shared / num_inputs, device=self._device))

    def _forward(self, model, batch: Batch, extra, wanted: str = "losses") -> tuple[Tensor, Tensor, Tensor]:
        """Run the model on this rank's shard of a batch.

        Args:
            model: the model, or its data-parallel wrapper.
            batch: the batch.
            extra: (t,), sharded as the tokens are.
            wanted: "losses" of the tokens, "logits" of the next tokens, "likeliest": the likeliest next tokens, or
                "hits": whether these are the labels.

        Returns:
            The wanted values, which tokens count, and the shard of `extra`: (t / context-parallel size,) each. Logits
            have a second dimension, of vocab_size.
        """
        cu_seqlens = torch.from_numpy(batch.cu_seqlens)
        # NumPy stacks in this thread. torch would wake its threads, which took milliseconds while the GPU waited.
        columns = np.stack([batch.tokens, batch.labels, batch.counted, extra], axis=1)
        rows = torch.from_numpy(columns).to(self._device)
        cu_seqlens_here = cu_seqlens.to(self._device)
        if dist.get_world_size(self._cp_group) > 1:
            parallel = self._config.parallel
            rows = shard_sequence(
                rows,
                self._cp_group,
                dim=0,
                layout=parallel.layout,
                cu_seqlens=cu_seqlens_here,
                packing=parallel.packing,
            )
        tokens, labels, counted, extra = rows.unbind(dim=1)
        longest = int(cu_seqlens.diff().max())
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens_here,
            cu_seqlens_kv=cu_seqlens_here,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        if wanted == "losses":
            losses = model(tokens[None], None, None, labels=labels[None], packed_seq_params=packed)
            return losses[0], counted, extra
        logits = model(tokens[None], None, None, packed_seq_params=packed)[0]
        logits = gather_from_tensor_model_parallel_region(logits)[:, : self._vocab_size]
        if wanted == "logits":
            return logits, counted, extra
        likeliest = logits.argmax(dim=-1)
        return likeliest == labels if wanted == "hits" else likeliest, counted, extra
