"""Megatron-Core as the engine of a training job: parallel state, model, one training step, losses of single tokens.

Everything that training/ asks of Megatron-Core goes through `Engine`; what differs between a CPU and GPUs is in
backends.py.
"""

from __future__ import annotations

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
from megatron_sb.megatron.statistics import AttentionCounts, AttentionInputs, captured, observed, watched
from megatron_sb.ops.context_parallel import shard_sequence
from megatron_sb.training.config import StageConfig, TrainingConfig
from megatron_sb.training.engine.backends import MegatronBackend, TorchBackend
from megatron_sb.training.engine.model import build_model
from megatron_sb.training.engine.softmax_attention import set_rotary_scaling


class Batch(Protocol):
    """Packed sequences, the same on every context-parallel rank, before they are cut between those.

    tokens, labels: int64 (t,). counted: bool (t,), true where the label's loss counts. cu_seqlens: int32 (n + 1,),
    from 0 to t.
    """

    tokens: np.ndarray
    labels: np.ndarray
    counted: np.ndarray
    cu_seqlens: np.ndarray


class Engine:
    """A GPTModel and its optimizer under one stage's parallel layout. The default process group must exist; one engine
    at a time.

    model: a name in config.attention. Every rank builds the same weights from config.seed.
    """

    def __init__(
        self, config: TrainingConfig, model: str, stage: StageConfig, vocab_size: int, device: torch.device
    ) -> None:
        self._config = config
        self._device = device
        self._vocab_size = vocab_size
        self.attention_counts = AttentionCounts.zeros(device)
        parallel, context_parallel_size = config.parallel, config.context_parallel_size(model, stage)
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
        torch.manual_seed(config.seed)
        if device.type == "cuda":
            model_parallel_cuda_manual_seed(config.seed, force_reset_rng=True)
        self._model = build_model(config, model, stage, vocab_size, fused=device.type == "cuda")
        self._model.to(device=device, dtype=self._model.config.params_dtype)  # norms too, as Megatron's scripts do
        backend = MegatronBackend if device.type == "cuda" else TorchBackend
        self._backend = backend(self._model, config.optimizer)

    def train_step(
        self, batches: list[Batch], num_tokens: int, learning_rate: float, *, observe: bool = False
    ) -> tuple[Tensor, float]:
        """One update from this data-parallel rank's micro-batches.

        num_tokens: the labels that count in the whole step, over all ranks: the gradient is that of (sum of token
        losses) / num_tokens. observe: count in the first micro-batch what `statistics.AttentionCounts` says, into
        `attention_counts`, which stays until the next time.
        Returns this rank's share of that mean loss (a float64 scalar; `sum_over_ranks` makes it the loss) and the
        gradient's norm before clipping.
        """
        self._model.train()
        self._scale_auxiliary_losses(num_tokens)
        share = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, batch in enumerate(batches):
            with self._backend.accumulate(last=index == len(batches) - 1):
                with observed(self._model, self._device) if observe and index == 0 else nullcontext([]) as found:
                    losses, counted, _ = self._forward(self._backend.forward, batch, batch.counted)
                loss = (losses * counted).sum() / num_tokens
                loss.backward()
            share += loss.detach()
            self.attention_counts = found[0] if found else self.attention_counts
        return share, self._backend.step(learning_rate)

    @torch.no_grad()
    def window_losses(self, batch: Batch, num_windows: int) -> Tensor:
        """This rank's share of the summed loss of every sequence in the batch: float64 (num_windows,); add them over
        the ranks that share the batch.
        """
        return self._sum_windows(batch, num_windows, "losses")

    @torch.no_grad()
    def window_hits(self, batch: Batch, num_windows: int) -> Tensor:
        """As `window_losses`, how many of the labels that count are the likeliest token."""
        return self._sum_windows(batch, num_windows, "hits")

    @torch.no_grad()
    def likeliest_tokens(self, batch: Batch) -> Tensor:
        """The likeliest token after each token: int64 (t,), on the CPU. Of this rank's part of the batch."""
        self._model.eval()
        likeliest, _, _ = self._forward(self._model, batch, batch.counted, "likeliest")
        return likeliest.cpu()

    def attention_inputs(self, batch: Batch) -> list[AttentionInputs]:
        """What every stick-breaking layer attends with, in the order of the layers. Of this rank's part of the batch
        and of the heads. Raises ValueError for a model without such layers.
        """
        with captured(self._model) as inputs:
            self.likeliest_tokens(batch)
        return inputs

    def watch_attention(self, batch: Batch, look: Callable[..., None]) -> None:
        """A forward without gradients that calls `look` as `statistics.watched` says, in every stick-breaking layer."""
        with watched(self._model, look):
            self.likeliest_tokens(batch)

    def scale_positions(self, kind: str, factor: float) -> None:
        """How rotary positions are scaled from now on: `megatron_sb.baselines.softmax.RotaryScaling`."""
        set_rotary_scaling(self._model, RotaryScaling(kind, factor))

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """The sum of every rank's values, each set of tensor-parallel ranks, which see the same tokens, counting once;
        collective.
        """
        values = values.to(self._device)
        dist.all_reduce(values)
        return values.cpu() / self._config.parallel.tensor_parallel_size

    def save(self, path: Path) -> None:
        """Model and optimizer into an existing directory; collective. Once weights are made nothing draws at random."""
        self._backend.save(path)

    def load(self, path: Path) -> None:
        """What `save` wrote, under this engine's parallel layout, which may be another; collective."""
        self._backend.load(path)

    def close(self) -> None:
        """Give up the parallel state, so that the next engine can make its own."""
        del self._backend, self._model
        shared_plans.clear()
        GateLossScale.per_token = None
        parallel_state.destroy_model_parallel()

    def _sum_windows(self, batch: Batch, num_windows: int, wanted: str) -> Tensor:
        self._model.eval()
        window = torch.arange(num_windows).repeat_interleave(torch.from_numpy(batch.cu_seqlens).diff())
        scores, counted, window = self._forward(self._model, batch, window.numpy(), wanted)
        sums = torch.zeros(num_windows, dtype=torch.float64, device=self._device)
        return sums.index_add_(0, window, (scores * counted).double())

    def _scale_auxiliary_losses(self, num_tokens: int) -> None:
        """Weigh the losses of routers and gates in a micro-batch as its tokens' share of the step.

        Megatron-Core before 0.19 multiplies a rank's part of them by the rank's tokens, which are the micro-batch's
        divided by the ranks that share it.
        """
        shared = parallel_state.get_context_parallel_world_size()
        if self._config.parallel.sequence_parallel:
            shared *= self._config.parallel.tensor_parallel_size
        if versions.ROUTER_COUNTS_ALL_RANKS:
            shared = 1
        GateLossScale.per_token = 1 / num_tokens
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(shared / num_tokens, device=self._device))

    def _forward(self, model, batch: Batch, extra, wanted: str = "losses") -> tuple[Tensor, Tensor, Tensor]:
        """What is wanted of each token, which of them count, and this rank's part of `extra`: (t / cp,) each.

        wanted: its "losses", the "likeliest" token after it, or "hits", whether that is its label.
        """
        cu_seqlens = torch.from_numpy(batch.cu_seqlens)
        # NumPy's one thread: torch's threads, which have to be woken, took milliseconds of a GPU's time.
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
        likeliest = gather_from_tensor_model_parallel_region(logits)[:, : self._vocab_size].argmax(dim=-1)
        return likeliest == labels if wanted == "hits" else likeliest, counted, extra
