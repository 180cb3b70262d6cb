"""Modules of torch around the operators."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_sb.nn.gates import OPEN_GATE, forget_gate_loss, gates_of, keep_gates_open
from megatron_sb.ops import head_output, stickbreaking_attention, stickbreaking_attention_varlen
from megatron_sb.ops.context_parallel import ContextParallelPlan, _group_size, context_parallel_attention
from megatron_sb.ops.kvcache import KVCache, attend_to_filled
from megatron_sb.options import DEFAULT_MASS_THRESHOLD, check_logits, check_mass_threshold
from megatron_sb.validation import check_counts, check_finite, check_flag, check_tensor, head_dim_of

_MAX_HEAD_DIM, _HEAD_DIM_MULTIPLE = 256, 8


def _checked_head_dim(hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> int:
    """Channels of a head, where all sizes fit each other."""
    sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    check_counts(sizes if head_dim is None else sizes | {"head_dim": head_dim})
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads is {num_kv_heads}; a divisor of num_heads, {num_heads}, is allowed")
    used = head_dim_of(hidden_size, num_heads, head_dim)
    if used % _HEAD_DIM_MULTIPLE or used > _MAX_HEAD_DIM:
        source = "hidden_size / num_heads" if head_dim is None else "head_dim"
        raise ValueError(f"{source} is {used}; a multiple of {_HEAD_DIM_MULTIPLE} up to {_MAX_HEAD_DIM} is allowed")
    return used


class StickBreakingSelfAttention(nn.Module):
    """Causal self-attention by stick-breaking with its projections (Tan et al., arXiv 2410.17980); no positions needed.

    q, k, v = split(qkv_proj(x)),  o, P = attention(q, k, v),  out = out_proj(head_output(o, P))

    Args:
        hidden_size: channels of x.
        num_heads: query heads, h.
        num_kv_heads: KV heads, a divisor of num_heads; num_heads by default.
        head_dim: channels of a head, d, a multiple of 8 up to 256; hidden_size / num_heads by default.
        bias: whether the two projections have biases.
        remainder_bias: add the mass times a learnable vector per head to the attention's output (paper eq. 14): the
            parameter remainder_bias (h * d,), 0 at first.
        head_norm: group norm behind it with one group per head: norm_weight and norm_bias (h * d,), 1 and 0 at first.
        norm_eps: added to the variance.
        forget_gate: f = sigmoid(gate_proj(x)) in fp32, one for each key and KV head, for beta = f * sigmoid(z);
            gate_proj has a bias, OPEN_GATE (5) at first.
        forget_gate_loss: coefficient of the auxiliary loss mean(-log f), which keeps gates open unless closing them
            pays; its gradient joins that of the gates (`megatron_sb.nn.gates.keep_gates_open`). The attribute gate_loss
            is the mean over this rank's keys in the latest forward.
        logits, attend_current, scale, mass_threshold: as in `stickbreaking_attention`.
        cp_group: the group over which sequences are cut. Gradients of parameters are then those of this rank's rows:
            sum them over the group. The auxiliary loss is then counted once: a rank adds 1 / ranks of its own mean.
        layout, comm: as in `context_parallel_attention`; not read without cp_group or a plan.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: sizes that do not fit each other and options that no call could have, naming the
            argument, its value and what is allowed.
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
        attend_current: bool = False,
        scale: float | None = None,
        mass_threshold: float = DEFAULT_MASS_THRESHOLD,
        cp_group: dist.ProcessGroup | None = None,
        layout: str = "zigzag",
        comm: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = _checked_head_dim(hidden_size, num_heads, num_kv_heads, head_dim)
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        check_finite("norm_eps", norm_eps)
        self.norm_eps = norm_eps
        check_logits(logits)
        if scale is not None:
            check_finite("scale", scale)
        check_flag("attend_current", attend_current)
        check_mass_threshold(mass_threshold)
        check_finite("forget_gate_loss", forget_gate_loss)
        if forget_gate_loss < 0 or (forget_gate_loss > 0 and not forget_gate):
            raise ValueError(f"forget_gate_loss is {forget_gate_loss}; 0, or with forget_gate more, is allowed")
        self.forget_gate_loss, self.gate_loss = forget_gate_loss, None
        self.logits = logits
        self.attention_options = {"scale": scale, "attend_current": attend_current, "mass_threshold": mass_threshold}
        self.cp_group, self.layout, self.comm = cp_group, layout, comm
        kind = {"device": device, "dtype": dtype}
        width = num_heads * self.head_dim
        self.qkv_proj = nn.Linear(hidden_size, width + 2 * num_kv_heads * self.head_dim, bias=bias, **kind)
        self.out_proj = nn.Linear(width, hidden_size, bias=bias, **kind)
        self.gate_proj = nn.Linear(hidden_size, num_kv_heads, **kind) if forget_gate else None
        for name, wanted in (("remainder_bias", remainder_bias), ("norm_weight", head_norm), ("norm_bias", head_norm)):
            self.register_parameter(name, nn.Parameter(torch.empty(width, **kind)) if wanted else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the remainder bias and the norm's bias 0 and its weight 1, and open the gates; the projections' weights
        are their own to reset.
        """
        if self.gate_proj is not None:
            nn.init.constant_(self.gate_proj.bias, OPEN_GATE)
        for parameter, value in ((self.remainder_bias, 0.0), (self.norm_weight, 1.0), (self.norm_bias, 0.0)):
            if parameter is not None:
                nn.init.constant_(parameter, value)

    def extra_repr(self) -> str:
        """Sizes and what is switched on."""
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, remainder_bias={self.remainder_bias is not None}, "
            f"head_norm={self.norm_weight is not None}, logits={self.logits!r}, "
            f"forget_gate={self.gate_proj is not None}"
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
            x: (b, s, hidden_size), or packed (t, hidden_size), of any number of rows; with cp_group this rank's rows.
            cu_seqlens: for packed rows, int32 (documents + 1,), as in `stickbreaking_attention_varlen`; with cp_group
                global.
            plan: with context parallelism, the batch's plan, which has the cu_seqlens; cp_group and layout must agree.
            cache: keys and values of earlier positions; those of x, which follow them, are appended, and each position
                attends to all before it. Without gradients, context parallelism and cu_seqlens. As it was where
                anything is raised.

        Returns:
            A tensor of x's shape.

        Raises:
            TypeError, ValueError: naming the argument, its value and what is allowed, before anything runs.
        """
        self._check_input(x, cu_seqlens, plan)
        self._check_cache(x, cache, cu_seqlens, plan)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = (
            part.view(*x.shape[:-1], n, self.head_dim)
            for n, part in zip(heads, self.qkv_proj(x).split([n * self.head_dim for n in heads], dim=-1), strict=True)
        )
        if cache is None:
            return self._output(*self._attend(q, k, v, self._gates(x, plan), cu_seqlens, plan))
        num_filled = cache.length
        try:
            return self._output(*self._attend_to(cache, q, k, v))
        except BaseException:
            cache.length = num_filled
            raise

    def _output(self, o: Tensor, mass: Tensor | None) -> Tensor:
        """What follows the attention: o and mass as it gives them."""
        if self.remainder_bias is not None or self.norm_weight is not None:
            o = head_output(o, mass, self.remainder_bias, self.norm_weight, self.norm_bias, eps=self.norm_eps)
        return self.out_proj(o.flatten(-2))

    def _gates(self, x: Tensor, plan: ContextParallelPlan | None) -> Tensor | None:
        """f of every key and KV head, x's shape without its channels and with the heads."""
        if self.gate_proj is None:
            return None
        f = gates_of(self.gate_proj(x))
        self.gate_loss = forget_gate_loss(f.detach())
        # Ranks have as many keys each, so that the mean over all keys is that of the ranks' means.
        coefficient = self.forget_gate_loss / self._num_ranks(plan)
        return keep_gates_open(f, coefficient) if coefficient > 0 else f

    def _num_ranks(self, plan: ContextParallelPlan | None) -> int:
        """Over how many ranks the sequences are cut."""
        if plan is not None:
            return plan.size
        return 1 if self.cp_group is None else _group_size(self.cp_group)

    def _check_input(self, x: object, cu_seqlens: object, plan: object) -> None:
        check_tensor("x", x)
        if plan is not None and not isinstance(plan, ContextParallelPlan):
            raise TypeError(f"plan is {type(plan).__name__}; a ContextParallelPlan is allowed")
        packed = cu_seqlens is not None if plan is None else plan.packed
        shape = "(t, hidden_size) for packed documents" if packed else "(b, s, hidden_size) without cu_seqlens"
        if x.dim() != (2 if packed else 3) or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x has shape {tuple(x.shape)}; {shape}, hidden_size {self.hidden_size}, is allowed")

    def _check_cache(self, x: Tensor, cache: object, cu_seqlens: object, plan: object) -> None:
        if cache is None:
            return
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache is {type(cache).__name__}; a KVCache is allowed")
        for name, value in (("cp_group", self.cp_group), ("plan", plan), ("cu_seqlens", cu_seqlens)):
            if value is not None:
                raise ValueError(f"{name} is given beside a cache; None is allowed: a cache holds whole sequences")
        if self.gate_proj is not None or self.logits != "dot":
            raise ValueError("cache is given with forget gates or Euclidean logits; it is allowed without them")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *self.parameters())):
            raise ValueError("cache is given while gradients are recorded, which it has none of; use torch.no_grad()")

    def _attend_to(self, cache: KVCache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """o and mass of the positions that follow those in the cache, which are appended to it."""
        cache.append(k, v)
        return attend_to_filled(q, cache.k, cache.v, cache.length, return_mass=True, **self.attention_options)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, forget_gate: Tensor | None, cu_seqlens, plan
    ) -> tuple[Tensor, Tensor | None]:
        """o, and the mass where it is wanted."""
        options = {
            **self.attention_options,
            "logits": self.logits,
            "forget_gate": forget_gate,
            "return_mass": self.remainder_bias is not None,
        }
        if self.cp_group is not None or plan is not None:
            options |= {"cu_seqlens": cu_seqlens, "layout": self.layout, "comm": self.comm}
            result = context_parallel_attention(q, k, v, self.cp_group, plan=plan, **options)
        elif cu_seqlens is not None:
            result = stickbreaking_attention_varlen(q, k, v, cu_seqlens, **options)
        else:
            result = stickbreaking_attention(q, k, v, **options)
        return result if options["return_mass"] else (result, None)
