"""The decoder of torchtitan's Llama 3 with stick-breaking attention and without position embedding."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.module import Module

import megatron_sb as sb
from megatron_sb.options import reach_of_heads

# The layout of this library that has the rows of each load balancer of torchtitan.
LAYOUTS = {"headtail": "zigzag", None: "contiguous"}


@dataclass(frozen=True)
class Documents:
    """Where the documents of a batch begin. torchtitan passes it to every layer as `attention_masks`.

    Args:
        cu_seqlens: int32, (documents + 1,), offsets in the rows of the batch, one row after the other. Set if this rank
            has whole sequences.
        plans: the plan of each row of the batch. Set if ranks share the sequences.
    """

    cu_seqlens: Tensor | None = None
    plans: tuple[sb.ContextParallelPlan, ...] = ()


class StickBreakingInnerAttention(Module):
    """Attend to older keys of the same document. This takes the place of torchtitan's FlexAttention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Settings of the attention.

        Args:
            n_heads: query heads of the layer, on all ranks.
            reach: how far the first and the last head reach at the start, see `sb.stickbreaking_attention`.
        """

        n_heads: int
        reach: tuple[float, float] | None = (0.5, 10.0)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.reach = config.reach
        self.n_heads = config.n_heads

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Take the reach of the heads of this tensor-parallel rank."""
        mesh = parallel_dims.get_optional_mesh("tp")
        if mesh is not None:
            heads = self.n_heads // mesh.size()
            first = mesh.get_local_rank() * heads
            self.reach = reach_of_heads(self.reach, self.n_heads, first, first + heads)
        Module.parallelize(self, parallel_dims)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Documents,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the outputs of the local heads, (batch, local rows, heads, head_dim) as q.

        Args:
            q, k, v: (batch, local rows, heads, head_dim), k and v with the KV heads.
            attention_masks: the documents.
            scale: factor of the logits. Default: 1 / sqrt(head_dim).
            enable_gqa: not used. The numbers of heads say it.
        """
        options = {"scale": scale, "reach": self.reach}
        if attention_masks.plans:
            rows = [
                sb.context_parallel_attention(*(x[row] for x in (q, k, v)), plan=plan, **options)
                for row, plan in enumerate(attention_masks.plans)
            ]
            return torch.stack(rows)
        packed = (x.flatten(0, 1) for x in (q, k, v))
        return sb.stickbreaking_attention_varlen(*packed, attention_masks.cu_seqlens, **options).view_as(q)


class NoPositions(Module):
    """Leave queries and keys as they are. This takes the place of torchtitan's rotary embedding."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """torchtitan sets max_seq_len to the length of the sequences, and checks it before. Nothing depends on it."""

        max_seq_len: int = 2**31 - 1

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return q and k."""
        return q, k


class StickBreakingModel(Llama3Model):
    """Llama 3 whose layers have `StickBreakingInnerAttention` and `NoPositions`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        """Settings of the model.

        Args:
            layout: the rows of each context-parallel rank, see `sb.ContextParallelPlan`. The trainer's load balancer
                sets it.
        """

        layout: str = "zigzag"

        def update_from_config(self, *, config, **kwargs) -> None:
            """Take what the trainer's configuration says about the parallelism.

            Raises:
                ValueError: If the attention cannot work with an option of the parallelism, of torch.compile or of type
                    checking.
            """
            parallelism = config.parallelism
            if parallelism.spmd_backend != "spmd_types":
                raise ValueError(f"parallelism.spmd_backend must be spmd_types, got {parallelism.spmd_backend}.")
            if parallelism.context_parallel_load_balancer not in LAYOUTS:
                raise ValueError(
                    "parallelism.context_parallel_load_balancer must be headtail or None, got "
                    f"{parallelism.context_parallel_load_balancer}."
                )
            if config.debug.spmd_typechecking:
                raise ValueError(
                    "debug.spmd_typechecking must be false, got true. The operators have no rules for type checking."
                )
            ranks = parallelism.context_parallel_degree
            if ranks > 1 and config.compile.enable and "model" in config.compile.components:
                raise ValueError(
                    f"compile.enable must be false with parallelism.context_parallel_degree = {ranks}, got true. "
                    "torchtitan compiles a layer as one graph, and this attention breaks the graph."
                )
            self.layout = LAYOUTS[parallelism.context_parallel_load_balancer]
            Llama3Model.Config.update_from_config(self, config=config, **kwargs)
            for layer in self.layers:
                # torchtitan would gather the keys of all context-parallel ranks here.
                layer.attention.inner_attention.sharding_config = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layout = config.layout
        self.cp_mesh: DeviceMesh | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Take the ranks that share a sequence, then parallelize every module."""
        self.cp_mesh = parallel_dims.get_optional_mesh("cp")
        Llama3Model.parallelize(self, parallel_dims)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits, or the states of the last layer if the loss has the head.

        Args:
            tokens: (batch, local rows).
            positions: (batch, local rows), 0 at the start of each document. Default: each row is one document.
        """
        return super().forward(tokens, positions, self._documents(tokens, positions))

    @torch.no_grad()
    def _documents(self, tokens: Tensor, positions: Tensor | None) -> Documents:
        """Return the documents. Where ranks share the sequences, this is a collective."""
        starts = torch.zeros_like(tokens, dtype=torch.bool) if positions is None else positions == 0
        if self.cp_mesh is not None:
            starts = sb.unshard_sequence(starts.int(), self.cp_mesh, layout=self.layout) > 0
        starts[:, 0] = True
        if self.cp_mesh is None:
            return Documents(_offsets(starts.flatten()))
        return Documents(
            plans=tuple(
                sb.ContextParallelPlan(
                    self.cp_mesh, cu_seqlens=_offsets(row), layout=self.layout, packing="whole_stream"
                )
                for row in starts
            )
        )


def _offsets(starts: Tensor) -> Tensor:
    """Return the indices of the true elements of a vector, and its length, in int32."""
    return torch.cat([starts.nonzero()[:, 0], starts.new_tensor([starts.numel()], dtype=torch.long)]).int()
