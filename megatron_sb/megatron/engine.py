"""Megatron-Core as the engine of a training job: parallel state, model, one training step, losses of single tokens.

Everything that training/ asks of Megatron-Core goes through `Engine`; what differs between a CPU and GPUs is in
backends.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_sb.config import StageConfig, TrainingConfig
from megatron_sb.context_parallel import shard_sequence
from megatron_sb.megatron.backends import MegatronBackend, TorchBackend
from megatron_sb.megatron.core_attention import shared_plans
from megatron_sb.megatron.softmax_rope import SoftmaxRotaryAttention
from megatron_sb.megatron.spec import with_stickbreaking


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

    model: "stick_breaking" or "softmax_rope". Every rank builds the same weights from config.seed.
    """

    def __init__(
        self, config: TrainingConfig, model: str, stage: StageConfig, vocab_size: int, device: torch.device
    ) -> None:
        self._config = config
        self._device = device
        context_parallel_size = config.context_parallel_size(model, stage)
        parallel_state.initialize_model_parallel(
            context_parallel_size=context_parallel_size,
            distributed_timeout_minutes=config.parallel.timeout_seconds / 60,
            create_gloo_process_groups=False,
        )
        self._cp_group = parallel_state.get_context_parallel_group()
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self.data_parallel_size = parallel_state.get_data_parallel_world_size()
        torch.manual_seed(config.seed)
        if device.type == "cuda":
            model_parallel_cuda_manual_seed(config.seed, force_reset_rng=True)
        longest = config.evaluation.length_factor * stage.context_length
        self._model = _build_model(config, model, context_parallel_size, vocab_size, longest).to(device)
        backend = MegatronBackend if device.type == "cuda" else TorchBackend
        self._reduce_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._backend = backend(self._model, config.optimizer, self._reduce_group)

    def train_step(self, batches: list[Batch], num_tokens: int, learning_rate: float) -> tuple[Tensor, float]:
        """One update from this data-parallel rank's micro-batches.

        num_tokens: the labels that count in the whole step, over all ranks: the gradient is that of (sum of token
        losses) / num_tokens.
        Returns this rank's share of that mean loss (a float64 scalar; the sum over ranks is the loss) and the
        gradient's norm before clipping.
        """
        self._model.train()
        share = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, batch in enumerate(batches):
            with self._backend.accumulate(last=index == len(batches) - 1):
                losses, counted, _ = self._forward(self._backend.forward, batch, batch.counted)
                loss = (losses * counted).sum() / num_tokens
                loss.backward()
            share += loss.detach()
        return share, self._backend.step(learning_rate)

    @torch.no_grad()
    def window_losses(self, batch: Batch, num_windows: int) -> Tensor:
        """This rank's share of the summed loss of every sequence in the batch: float64 (num_windows,); add them over
        the ranks that share the batch.
        """
        self._model.eval()
        window = torch.arange(num_windows).repeat_interleave(torch.from_numpy(batch.cu_seqlens).diff())
        losses, counted, window = self._forward(self._model, batch, window.numpy())
        sums = torch.zeros(num_windows, dtype=torch.float64, device=self._device)
        return sums.index_add_(0, window, (losses * counted).double())

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """The sum of every rank's values; collective."""
        values = values.to(self._device)
        dist.all_reduce(values, group=self._reduce_group)
        return values.cpu()

    def save(self, path: Path) -> None:
        """Model, optimizer and generators into an existing directory; collective."""
        self._backend.save(path)

    def load(self, path: Path) -> None:
        """What `save` wrote, under this engine's parallel layout, which may be another; collective."""
        self._backend.load(path)

    def close(self) -> None:
        """Give up the parallel state, so that the next engine can make its own."""
        del self._backend, self._model
        shared_plans.clear()
        parallel_state.destroy_model_parallel()

    def _forward(self, model, batch: Batch, extra) -> tuple[Tensor, Tensor, Tensor]:
        """Token losses, which of them count, and this rank's part of `extra`: (t / cp,) each."""
        cu_seqlens = torch.from_numpy(batch.cu_seqlens)
        columns = [torch.from_numpy(column).long() for column in (batch.tokens, batch.labels, batch.counted, extra)]
        rows = torch.stack(columns, dim=1).to(self._device)
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
        losses = model(tokens[None], None, None, labels=labels[None], packed_seq_params=packed)
        return losses[0], counted, extra


def _build_model(
    config: TrainingConfig, model: str, context_parallel_size: int, vocab_size: int, max_sequence_length: int
) -> GPTModel:
    """A decoder without position embedding of its own: stick-breaking needs none, the baseline's core attention brings
    rotations.
    """
    sizes = config.model
    dtype = torch.bfloat16 if sizes.precision == "bf16" else torch.float32
    transformer_config = TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_heads,
        num_query_groups=sizes.num_kv_heads,
        ffn_hidden_size=sizes.ffn_hidden_size,
        init_method_std=sizes.init_std,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,  # the same weights on every device
        bf16=sizes.precision == "bf16",
        params_dtype=dtype,
        context_parallel_size=context_parallel_size,
        cp_comm_type=None if context_parallel_size == 1 or config.parallel.comm == "auto" else config.parallel.comm,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    if model == "stick_breaking":
        spec = _stick_breaking_spec(spec, config)
    else:
        core_attention = ModuleSpec(module=SoftmaxRotaryAttention, params={"rotary_base": config.baseline.rotary_base})
        spec.submodules.self_attention.submodules.core_attention = core_attention
    return GPTModel(transformer_config, spec, vocab_size, max_sequence_length, position_embedding_type="none")


def _stick_breaking_spec(spec: ModuleSpec, config: TrainingConfig) -> ModuleSpec:
    options = config.stick_breaking
    return with_stickbreaking(
        spec,
        attend_current=options.attend_current,
        mass_threshold=options.mass_threshold,
        cp_layout=config.parallel.layout,
        packing=config.parallel.packing,
    )
