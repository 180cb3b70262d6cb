"""Self-attention as a module: projections, stick-breaking attention, remainder and head norm."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sb.nn.gates import OPEN_GATE, GateProjection, forget_gate_loss, gates_of, keep_gates_open
from megatron_sb.ops import head_output, stickbreaking_attention, stickbreaking_attention_varlen
from megatron_sb.ops.context_parallel import ContextParallelPlan, context_parallel_attention
from megatron_sb.ops.groups import Group, check_group_type
from megatron_sb.ops.kvcache import KVCache, attend_to_filled
from megatron_sb.ops.shared_sequence import shared_plan
from megatron_sb.options import COMMS, DEFAULT_MASS_THRESHOLD, LAYOUTS, LayerOptions, check_head_dim
from megatron_sb.validation import (
    check_choice,
    check_counts,
    check_flag,
    check_number,
    check_tensor,
    head_dim_of,
    python_number,
)

_COMMS = tuple(comm for comm in COMMS if comm != "a2a+p2p")  # which needs groups that a layer does not have

_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that autocast converts


def _checked_head_dim(
    hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int | None, euclidean: bool
) -> int:
    """Return head_dim. Raise ValueError if the sizes do not fit each other."""
    sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    check_counts(sizes if head_dim is None else sizes | {"head_dim": head_dim})
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must be a divisor of num_heads, {num_heads}, got {num_kv_heads}.")
    used = head_dim_of(hidden_size, num_heads, head_dim)
    check_head_dim("hidden_size / num_heads" if head_dim is None else "head_dim", used, extra_columns=euclidean)
    return used


class StickBreakingSelfAttention(nn.Module):
    """Apply causal stick-breaking self-attention with its projections (Tan et al., arXiv 2410.17980).

    q, k, v = split(qkv_proj(x)),  o, P = attention(q, k, v),  out = out_proj(head_output(o, P))

    The module needs no position embedding, because the weights depend on the order of the keys.

    Args:
        hidden_size: channels of x.
        num_heads: query heads, h.
        num_kv_heads: KV heads, a divisor of num_heads. Default: num_heads.
        head_dim: channels of a head, d, a multiple of 8 and at most 256, with Euclidean logits at most 248. Default:
            hidden_size / num_heads.
        bias: whether the two projections have biases. Default: False.
        remainder_bias: whether to add the mass times a learnable vector for each head to the attention's output (paper
            eq. 14). The parameter remainder_bias (h * d,) starts at 0. Default: False.
        head_norm: whether to normalise each head's output after the remainder: group norm with one group for each
            head. The parameters norm_weight and norm_bias (h * d,) start at 1 and 0. Default: False.
        norm_eps: number that the norm adds to the variance, at least 1e-30. Default: 1e-5.
        forget_gate: whether to multiply beta by f = sigmoid(gate_proj(x)), one for each key and KV head. The sigmoid is
            computed in fp32. The bias of gate_proj starts at OPEN_GATE (5). Default: False.
        forget_gate_loss: coefficient of the auxiliary loss mean(-log f), which pushes gates towards open. The backward
            adds its gradient (`megatron_sb.nn.gates.keep_gates_open`). A factor of the main loss, such as that of a
            GradScaler, does not change this gradient: if you scale the main loss, scale the coefficient equally. After
            a forward, the attribute gate_loss is the mean over this rank's keys. Default: 0.0.
        logits: "dot" or "euclidean", see `stickbreaking_attention`. Default: "dot".
        reach: see `stickbreaking_attention`. (0.5, 10.0) is recommended for contexts from about 1000 on. Default: None.
        attend_current: see `stickbreaking_attention`. Default: False.
        scale: see `stickbreaking_attention`. Default: 1 / sqrt(d), and 1 for Euclidean logits.
        mass_threshold: see `stickbreaking_attention`. Default: 2^-24.
        cp_group: context-parallel process group, or a `DeviceMesh` with one dimension. Its ranks share each sequence.
            The parameter gradients of a rank then come only from its own rows, so sum them over the group. The
            auxiliary loss of a rank is weighted by its share of the rows. copy.deepcopy shares the group. Default:
            None, no context parallelism.
        layout: see `context_parallel_attention`. Not used without cp_group or a plan. Default: "zigzag".
        comm: "auto", "p2p", "all_gather" or "a2a", see `context_parallel_attention`. Not used without cp_group or a
            plan. Default: "auto".
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If sizes contradict each other, or an option has an invalid value.

    Example:
        >>> import torch
        >>> import megatron_sb as sb
        >>> attention = sb.StickBreakingSelfAttention(256, num_heads=8, num_kv_heads=2, remainder_bias=True)
        >>> attention(torch.randn(2, 100, 256)).shape
        torch.Size([2, 100, 256])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        remainder_bias: bool = False,
        head_norm: bool = False,
        norm_eps: float = 1e-5,
        forget_gate: bool = False,
        forget_gate_loss: float = 0.0,
        logits: str = "dot",
        reach: tuple[float, float] | None = None,
        attend_current: bool = False,
        scale: float | None = None,
        mass_threshold: float = DEFAULT_MASS_THRESHOLD,
        cp_group: Group | None = None,
        layout: str = "zigzag",
        comm: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = hidden_size, num_heads, num_heads if num_kv_heads is None else num_kv_heads, head_dim
        hidden_size, num_heads, num_kv_heads, head_dim = map(python_number, sizes)
        self.head_dim = _checked_head_dim(hidden_size, num_heads, num_kv_heads, head_dim, logits == "euclidean")
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        # As head_output does when it is called.
        check_number("norm_eps", norm_eps, "a finite number of at least 1e-30", lambda x: 1e-30 <= x < math.inf)
        self.norm_eps = float(norm_eps)
        self.options = LayerOptions(
            scale=scale,
            attend_current=attend_current,
            mass_threshold=mass_threshold,
            logits=logits,
            reach=reach,
            remainder_bias=remainder_bias,
            head_norm=head_norm,
            forget_gate=forget_gate,
            forget_gate_loss=forget_gate_loss,
        )
        check_flag("bias", bias)
        check_choice("layout", layout, LAYOUTS)
        check_choice("comm", comm, _COMMS)
        if cp_group is not None:
            check_group_type(cp_group)
        self.gate_loss: Tensor | None = None
        self.cp_group, self.layout, self.comm = cp_group, layout, comm
        kind = {"device": device, "dtype": dtype}
        width = num_heads * self.head_dim
        self.qkv_proj = nn.Linear(hidden_size, width + 2 * num_kv_heads * self.head_dim, bias=bias, **kind)
        self.out_proj = nn.Linear(width, hidden_size, bias=bias, **kind)
        self.gate_proj = GateProjection(hidden_size, num_kv_heads, **kind) if forget_gate else None
        for name, wanted in (("remainder_bias", remainder_bias), ("norm_weight", head_norm), ("norm_bias", head_norm)):
            self.register_parameter(name, nn.Parameter(torch.empty(width, **kind)) if wanted else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the head parameters to 0 (remainder bias, norm bias) and 1 (norm weight), and open the gates.

        The weights of the projections are not changed. They have their own `reset_parameters`.
        """
        if self.gate_proj is not None:
            nn.init.constant_(self.gate_proj.bias, OPEN_GATE)
        for parameter, value in ((self.remainder_bias, 0.0), (self.norm_weight, 1.0), (self.norm_bias, 0.0)):
            if parameter is not None:
                nn.init.constant_(parameter, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> StickBreakingSelfAttention:
        """Copy the module. The copy shares cp_group: a process group is a connection, which cannot be copied."""
        copied = type(self).__new__(type(self))
        memo |= {id(self): copied, id(self.cp_group): self.cp_group}
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def extra_repr(self) -> str:
        """Return the sizes and options that `print(module)` shows."""
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, remainder_bias={self.options.remainder_bias}, "
            f"head_norm={self.options.head_norm}, logits={self.options.logits!r}, "
            f"forget_gate={self.options.forget_gate}, reach={self.options.reach}"
        )

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        plan: ContextParallelPlan | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attend within each sequence or document.

        Args:
            x: (b, s, hidden_size), or packed (t, hidden_size). With context parallelism, this rank's rows.
            cu_seqlens: int32, (documents + 1,), for packed rows, as in `stickbreaking_attention_varlen`. With cp_group
                it describes the whole sequence, not this rank's rows. Default: None.
            plan: the batch's plan for context parallelism. It holds cu_seqlens, cp_group and layout; cu_seqlens must be
                None, and cp_group and layout must agree with the plan. Default: None.
            cache: keys and values of earlier positions. The keys and values of x are appended, and each position
                attends to all positions before it. It must have this layer's logits and forget_gate. Not valid with
                gradients, context parallelism or cu_seqlens. If an error is raised, the cache is unchanged. Default:
                None.

        Returns:
            A tensor with x's shape.

        Raises:
            TypeError: If an argument has a wrong type, or the cache another dtype than the projected keys.
            ValueError: If an argument has a wrong shape or value, or in `shared_sequence`, if the module has a cp_group
                or gets another plan. Nothing is computed in either case, except the projections if the cache's dtype
                or cu_seqlens is wrong.

        Example:
            >>> import torch
            >>> import megatron_sb as sb
            >>> attention, cache = sb.StickBreakingSelfAttention(64, 4), sb.KVCache(1, 32, 4, 16)
            >>> with torch.no_grad():
            ...     prompt = attention(torch.randn(1, 10, 64), cache=cache)
            ...     token = attention(torch.randn(1, 1, 64), cache=cache)
            >>> token.shape, cache.length
            (torch.Size([1, 1, 64]), 11)
        """
        self._check_input(x, cu_seqlens, plan)
        self._check_cache(x, cache, cu_seqlens, plan)
        if self.cp_group is not None and plan is None:
            plan = ContextParallelPlan(self.cp_group, None, cu_seqlens, self.layout, local_len=x.shape[-2])
            cu_seqlens = None  # the plan holds them
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = (
            part.view(*x.shape[:-1], n, self.head_dim)
            for n, part in zip(heads, self._projected(x).split([n * self.head_dim for n in heads], dim=-1), strict=True)
        )
        gates = self._gates(x, plan)
        if cache is None:
            return self._output(*self._attend(q, k, v, gates, cu_seqlens, plan))
        num_filled = cache.length
        try:
            return self._output(*self._attend_to(cache, q, k, v, gates))
        except BaseException:
            cache.length = num_filled
            raise

    def _projected(self, x: Tensor) -> Tensor:
        """Return the rows of q, k and v. If qkv_proj rejects the dtype or device of x, say what it must be."""
        if torch.compiler.is_compiling():
            return self.qkv_proj(x)
        try:
            return self.qkv_proj(x)
        except RuntimeError as error:
            weight = getattr(self.qkv_proj, "weight", None)
            if not isinstance(weight, Tensor):  # another module took the place of the projection
                raise
            if x.device != weight.device:
                raise ValueError(f"x must be on {weight.device}, as the parameters, got {x.device}.") from error
            cast = x.dtype in _AUTOCAST and torch.is_autocast_enabled(x.device.type)
            if x.dtype == weight.dtype or cast:
                raise
            raise TypeError(
                f"x must have dtype {weight.dtype}, as the parameters, got {x.dtype}. Convert it with "
                f"x.to({weight.dtype})."
            ) from error

    def _output(self, o: Tensor, mass: Tensor | None) -> Tensor:
        """Apply remainder, norm and output projection."""
        if self.remainder_bias is not None or self.norm_weight is not None:
            o = head_output(o, mass, self.remainder_bias, self.norm_weight, self.norm_bias, eps=self.norm_eps)
        return self.out_proj(o.flatten(-2))

    def _gates(self, x: Tensor, plan: ContextParallelPlan | None) -> Tensor | None:
        """Return f, (b, s, h_kv) or (t, h_kv)."""
        if self.gate_proj is None:
            return None
        f = gates_of(self.gate_proj(x))
        self.gate_loss = forget_gate_loss(f.detach())
        # Ranks can have different numbers of keys. With these shares, the sum over the ranks is the mean over all keys.
        plan = shared_plan() if plan is None else plan
        share = 1 if plan is None else plan.local_len / plan.seq_len
        coefficient = self.options.forget_gate_loss * share
        return keep_gates_open(f, coefficient) if coefficient > 0 else f

    def _check_input(self, x: object, cu_seqlens: object, plan: object) -> None:
        check_tensor("x", x)
        if plan is not None and not isinstance(plan, ContextParallelPlan):
            raise TypeError(f"plan must be a ContextParallelPlan, got {type(plan).__name__}.")
        name, own = ("cp_group", self.cp_group) if plan is None else ("plan", plan)
        if own is not None and shared_plan() not in (None, plan):
            raise ValueError(
                f"{name} must be None in shared_sequence, whose plan has the group and the documents, got {own}."
            )
        packed = cu_seqlens is not None if plan is None else plan.packed
        if x.dim() != (2 if packed else 3) or x.shape[-1] != self.hidden_size:
            dims = "t" if packed else "b, s"
            raise ValueError(
                f"x must have shape ({dims}, {self.hidden_size}) {'with' if packed else 'without'} cu_seqlens, "
                f"got {tuple(x.shape)}."
            )

    def _check_cache(self, x: Tensor, cache: object, cu_seqlens: object, plan: object) -> None:
        if cache is None:
            return
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be a KVCache, got {type(cache).__name__}.")
        for name, value in (("cp_group", self.cp_group), ("plan", plan), ("cu_seqlens", cu_seqlens)):
            if value is not None:
                raise ValueError(f"{name} must be None with a cache, which holds whole sequences, got {value}.")
        wanted = {"logits": self.options.logits, "forget_gate": self.options.forget_gate, "key_bias": False}
        wanted |= {"batch_size": x.shape[0], "num_kv_heads": self.num_kv_heads, "device": x.device}
        wanted |= {"head_dim": self.head_dim, "head_dim_v": self.head_dim}
        for name, value in wanted.items():
            if value != (got := getattr(cache, name)):
                raise ValueError(
                    f"cache must have {name}={value!r}, as this layer and x, got a cache with {name}={got!r}."
                )
        if x.shape[1] > cache.num_free:
            raise ValueError(
                f"x must have at most {cache.num_free} positions, the free ones in the cache, got {x.shape[1]}."
            )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *self.parameters())):
            raise ValueError("cache must be None while gradients are recorded. Call the module under torch.no_grad().")

    def _attend_to(
        self, cache: KVCache, q: Tensor, k: Tensor, v: Tensor, forget_gate: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Append k, v and the gates to the cache. Return o and mass of the new positions."""
        if k.dtype != cache.dtype:  # not checked before: autocast, or a quantized projection, chooses the dtype of k
            raise TypeError(f"cache must have dtype={k.dtype}, that of the projected keys, got dtype={cache.dtype}.")
        cache.append(k, v, forget_gate)
        options = self.options.attention_options() | {"forget_gate": cache.forget_gate, "return_mass": True}
        return attend_to_filled(q, cache.k, cache.v, cache.length, **options)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, forget_gate: Tensor | None, cu_seqlens, plan
    ) -> tuple[Tensor, Tensor | None]:
        """Return o, and the mass if there is a remainder bias, else None."""
        return_mass = self.remainder_bias is not None
        options = self.options.attention_options() | {"forget_gate": forget_gate, "return_mass": return_mass}
        if plan is not None:
            options |= {"cu_seqlens": cu_seqlens, "layout": self.layout, "comm": self.comm}
            result = context_parallel_attention(q, k, v, self.cp_group, plan=plan, **options)
        elif cu_seqlens is not None:
            result = stickbreaking_attention_varlen(q, k, v, cu_seqlens, **options)
        else:
            result = stickbreaking_attention(q, k, v, **options)
        return result if return_mass else (result, None)
