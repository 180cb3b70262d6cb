"""Stick-breaking attention as the `core_attention` module of a Megatron-Core layer."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from megatron_sb.megatron.arguments import StickBreakingOptions
from megatron_sb.megatron.gates import split_gates
from megatron_sb.ops import head_output, stickbreaking_attention, stickbreaking_attention_varlen
from megatron_sb.ops.context_parallel import ContextParallelPlan, context_parallel_attention
from megatron_sb.ops.kvcache import attend_to_filled, is_decoding_step

PLAIN_LOGITS = {"logits": "dot", "forget_gate": None}
CAUSAL_MASK_TYPES = (AttnMaskType.causal, AttnMaskType.padding_causal)

# (field of TransformerConfig, flag, the value it must have, why). A core without the field has that value.
CONFIG_REFUSALS = (
    ("attention_dropout", "--attention-dropout", 0.0, "there is no dropout on stick-breaking weights"),
    ("multi_latent_attention", "--multi-latent-attention", False, "latent attention has its own core attention"),
    ("experimental_attention_variant", "--experimental-attention-variant", None, "it is another attention"),
    ("window_size", "--window-size", None, "a query sees every older key"),
    ("softmax_type", "--softmax-type", "vanilla", "there is no softmax to vary"),
    ("fp8_dot_product_attention", "--fp8-dot-product-attention", False, "there is no fp8 stick-breaking kernel"),
    ("fp8_multi_head_attention", "--fp8-multi-head-attention", False, "there is no fp8 stick-breaking kernel"),
    ("qk_clip", "--qk-clip", False, "the kernels do not report the largest logit"),
    ("log_max_attention_logit", "--log-max-attention-logit", False, "the kernels do not report the largest logit"),
    ("flash_decode", "--flash-decode", False, "it bypasses core_attention and would silently run softmax"),
)
# Flags that Megatron's scripts keep for themselves: (attribute of args, flag, the value it must have, why).
SCRIPT_REFUSALS = (
    (
        "reset_attention_mask",
        "--reset-attention-mask",
        False,
        "masks are not read; pack documents (thd) instead",
    ),
)


def refuse_settings(settings: object, source: str, refusals: tuple) -> None:
    """Raise a ValueError that names the first setting stick-breaking attention cannot honour."""
    for name, flag, required, reason in refusals:
        value = getattr(settings, name, required)
        if value != required:
            raise ValueError(
                f"stick-breaking attention cannot run with {source}.{name}={value!r} ({flag}): {reason}; "
                f"it must be {required!r}"
            )


def refuse_position_embedding(settings: object, source: str, no_rope: bool) -> None:
    """Raise a ValueError for an embedding that reaches stick-breaking layers; no_rope: `--no-rope-freq` spares them."""
    kind = getattr(settings, "position_embedding_type", "none")
    if kind != "none" and not (kind == "rope" and no_rope):
        raise ValueError(
            f"stick-breaking attention cannot run with {source}.position_embedding_type={kind!r} "
            "(--position-embedding-type): the order of the stick tells positions; it must be 'none', or 'rope' with "
            "every stick-breaking layer in --no-rope-freq"
        )


def without_rope(config: object, layer_number: int) -> bool:
    """Whether Megatron keeps rotary embeddings from this layer (1-based): `--no-rope-freq`."""
    return bool(config.no_rope_freq) and bool(config.no_rope_freq[layer_number - 1])


def _script_args() -> object | None:
    """The parsed arguments of a Megatron training script, where one runs in this process."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


class PlanCache:
    """The latest context-parallel plans, so that all layers of a model share the one of their batch.

    An entry serves as long as group, sequence length, layout and packing are the same and `cu_seqlens` is the same
    tensor object, not modified in place since as far as torch counts (on a GPU collectives and `.data` are not seen; on
    a CPU the values are compared). It leaves when `capacity` newer plans have been made: a batch's plan outlives its
    layers, recomputation and the micro-batches a pipeline has in flight; where it does not, it is made again. Of
    inference tensors torch counts no writes: each call with one makes its plan. Ranks of a group run the same layers on
    the same batches, so they agree on when a plan is made, which is a collective. `clear()` drops all of them, and with
    them the references to process groups and `cu_seqlens`.
    """

    def __init__(self, capacity: int = 16):
        self.capacity = capacity
        self._plans: OrderedDict[tuple, tuple] = OrderedDict()

    def get(
        self,
        cp_group: torch.distributed.ProcessGroup,
        *,
        seq_len: int,
        cu_seqlens: torch.Tensor | None,
        layout: str,
        packing: str,
    ) -> ContextParallelPlan:
        """The plan for these arguments of `ContextParallelPlan`; made, by all ranks of the group, if need be."""
        arguments = {"seq_len": seq_len, "cu_seqlens": cu_seqlens, "layout": layout, "packing": packing}
        if cu_seqlens is not None and cu_seqlens.is_inference():
            return ContextParallelPlan(cp_group, **arguments)
        version, on_cpu = None if cu_seqlens is None else cu_seqlens._version, ()
        if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
            on_cpu = tuple(cu_seqlens.flatten().tolist())
        key = (id(cp_group), seq_len, id(cu_seqlens), version, on_cpu, layout, packing)
        if key in self._plans:
            self._plans.move_to_end(key)
        else:
            # An id is only unique among living objects: keep them alive as long as the entry.
            self._plans[key] = (ContextParallelPlan(cp_group, **arguments), cp_group, cu_seqlens)
            while len(self._plans) > self.capacity:
                self._plans.popitem(last=False)
        return self._plans[key][0]

    def clear(self) -> None:
        """Forget every plan; for use before process groups are destroyed."""
        self._plans.clear()


shared_plans = PlanCache()


class StickBreakingCoreAttention(MegatronModule):
    """Stick-breaking attention with the contract of Megatron-Core's `core_attention` (Tan et al., arXiv 2410.17980).

    Heads are split by tensor parallelism before they get here, sequences by context parallelism: where the
    context-parallel group has more than one rank, `cp_comm_type` is the mode of `context_parallel_attention` (None:
    "auto"). It has no parameters, unless `options` ask for them: remainder_bias, norm_weight and norm_bias, each one
    vector per local head in one dimension, (h * d,), to which Megatron applies no weight decay. Softmax-only settings
    that mean nothing here and change nothing (`apply_query_key_layer_scaling`, `attention_softmax_in_fp32`,
    `masked_softmax_fusion`) are ignored.

    Args:
        config: a TransformerConfig.
        layer_number: 1-based, as Megatron counts.
        attn_mask_type: `AttnMaskType.causal` or `padding_causal`.
        attention_type: "self".
        cp_comm_type: None, "p2p", "all_gather", "a2a" or "a2a+p2p"; the last with the groups of
            `--hierarchical-context-parallel-sizes` (the a2a level, the p2p level).
        softmax_scale: what logits are multiplied by; None means 1/sqrt(config.kv_channels), and 1 for Euclidean ones.
        pg_collection: process groups (`tp` and `cp` are read); None means those of `parallel_state`.
        model_comm_pgs: what older cores call `pg_collection`.
        options: see `StickBreakingOptions`.

    Raises:
        ValueError: a setting that stick-breaking attention cannot honour, by name.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection=None,
        model_comm_pgs=None,
        options: StickBreakingOptions | None = None,
        **unknown,
    ):
        super().__init__(config=config)
        refuse_settings(config, "config", CONFIG_REFUSALS)
        refuse_settings(_script_args(), "args", SCRIPT_REFUSALS)
        for settings, source in ((config, "config"), (_script_args(), "args")):
            refuse_position_embedding(settings, source, without_rope(config, layer_number))
        if unknown:
            raise TypeError(f"StickBreakingCoreAttention takes no {', '.join(sorted(unknown))}")
        if attention_type != "self":
            raise ValueError(f"attention_type={attention_type!r} is not supported; stick-breaking allows only 'self'")
        if attn_mask_type not in CAUSAL_MASK_TYPES:
            raise ValueError(_mask_sentence(attn_mask_type))

        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.cp_comm_type = cp_comm_type
        self.options = options or StickBreakingOptions()
        default_scale = 1.0 if self.options.logits == "euclidean" else 1.0 / math.sqrt(config.kv_channels)
        self.scale = default_scale if softmax_scale is None else softmax_scale
        groups = pg_collection if pg_collection is not None else model_comm_pgs
        if groups is None:
            self.tp_group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
            self.cp_group = parallel_state.get_context_parallel_group(check_initialized=False)
        else:
            self.tp_group, self.cp_group = groups.tp, groups.cp
        self.hierarchical_groups = self._hierarchy(groups) if cp_comm_type == "a2a+p2p" else None
        self._add_head_vector("remainder_bias", 0.0, self.options.remainder_bias)
        self._add_head_vector("norm_weight", 1.0, self.options.head_norm)
        self._add_head_vector("norm_bias", 0.0, self.options.head_norm)

    def _add_head_vector(self, name: str, value: float, wanted: bool) -> None:
        """Register a parameter (h * d,) of this rank's heads, or None.

        Heads are split over tensor-parallel ranks, so its gradient is whole on each, with sequence parallelism too.
        Over context-parallel ranks it is that of this rank's rows; Megatron sums it with all others over DP x CP.
        """
        if not wanted:
            self.register_parameter(name, None)
            return
        config, tp_size = self.config, 1 if self.tp_group is None else self.tp_group.size()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        width = config.num_attention_heads // tp_size * config.kv_channels
        parameter = torch.nn.Parameter(torch.full((width,), value, device=device, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        self.register_parameter(name, parameter)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """As Megatron's own, with the vectors cut over tensor-parallel ranks: a checkpoint loads on other layouts."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            dict.fromkeys(state, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def _hierarchy(self, groups) -> tuple | None:
        """The a2a and the p2p group of this rank, as Megatron makes them; None where there is one rank."""
        if self.cp_group is None or self.cp_group.size() == 1:
            return None
        made = getattr(groups, "hcp", None)
        if made is None:
            made = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
        if made is None or len(made) != 2:
            raise ValueError(
                f"cp_comm_type='a2a+p2p' needs two levels of context-parallel groups, there are {len(made or ())}; "
                "use --hierarchical-context-parallel-sizes A2A P2P"
            )
        return tuple(made)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params=None,
    ) -> torch.Tensor:
        """Attend. Lengths are this rank's; h and g are its heads and KV heads; k and v may be strided views.

        Args:
            query: (s, b, h, d), or packed (t, h, d).
            key: (s_k, b, g, d) or (t, g, d), h % g == 0; with forget gates they stand behind the d channels, as
                `gates.with_gates` puts them; s < s_k (without context parallelism) means that the queries are the last
                s positions, as when decoding against a static cache.
            value: shaped as `key` without gates.
            attention_mask: not read; the mask is causal. Save its memory with
                `--no-create-attention-mask-in-dataloader`.
            attn_mask_type: overrides the constructor's; `no_mask` only with s < s_k.
            attention_bias: must be None.
            packed_seq_params: with `qkv_format` "thd" the documents: `cu_seqlens_q`, global and the same on all ranks,
                or where given `cu_seqlens_q_padded`; rows between a document's end and its padded end belong to it as
                its newest tokens. `cp_group` overrides the module's, `local_cp_size` 1 turns context parallelism off.

        Returns:
            (s, b, h * d) or packed (t, h * d).

        Raises:
            ValueError: a mask, bias or packing that stick-breaking attention cannot honour; a length that does not
                divide over the context-parallel ranks.
        """
        packed = is_packed(packed_seq_params)
        self._check_call(query, key, attn_mask_type or self.attn_mask_type, attention_bias, packed)
        out, mass = self.attend(query, key, value, packed_seq_params, return_mass=self.remainder_bias is not None)
        if self.remainder_bias is not None or self.norm_weight is not None:
            eps = self.config.layernorm_epsilon
            out = head_output(out, mass, self.remainder_bias, self.norm_weight, self.norm_bias, eps=eps)
        return out.flatten(1) if packed else out.transpose(0, 1).flatten(2)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_seq_params, *, return_mass: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The attention alone; arguments as in `forward`.

        Returns:
            (b, s, h, d), or packed (t, h, d); and (b, h, s), or packed (h, t), the mass that is left, or None.
        """
        packed, cp_group = is_packed(packed_seq_params), self.cp_group_of(packed_seq_params)
        if not packed:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        key, variant = self.variant_of(key)
        kwargs = {**self.attention_options, **variant, "return_mass": return_mass}
        if cp_group is not None:
            plan = self._plan(cp_group, query, packed_seq_params if packed else None)
            kwargs |= {"comm": self.cp_comm_type or "auto", "hierarchical_groups": self.hierarchical_groups}
            out = context_parallel_attention(query, key, value, plan=plan, **kwargs)
        elif packed:
            cu_seqlens, cu_seqlens_k = document_bounds(packed_seq_params)
            out = stickbreaking_attention_varlen(query, key, value, cu_seqlens, cu_seqlens_k=cu_seqlens_k, **kwargs)
        elif variant == PLAIN_LOGITS and is_decoding_step(query, key, value):
            out = attend_to_filled(query, key, value, **self.attention_options, return_mass=return_mass)
        else:
            out = stickbreaking_attention(query, key, value, **kwargs)
        return out if return_mass else (out, None)

    @property
    def attention_options(self) -> dict:
        """Keywords of the attention that are the same at every call."""
        return {
            "scale": self.scale,
            "attend_current": self.options.attend_current,
            "mass_threshold": self.options.mass_threshold,
        }

    def variant_of(self, key: torch.Tensor) -> tuple[torch.Tensor, dict]:
        """The keys alone, and the attention's keywords for the variant of the logit: its kind, and the gates."""
        key, gate = split_gates(key) if self.options.forget_gate else (key, None)
        return key, {"logits": self.options.logits, "forget_gate": gate}

    def _check_call(self, query, key, attn_mask_type, attention_bias, packed: bool) -> None:
        """Refuse what can only be seen in a call."""
        if attention_bias is not None:
            raise ValueError(
                f"attention_bias of shape {tuple(attention_bias.shape)} is not supported by stick-breaking attention; "
                "it must be None"
            )
        if query.dim() != (3 if packed else 4):
            raise ValueError(
                f"query has shape {tuple(query.shape)}; allowed: (s, b, h, d), or (t, h, d) with "
                "packed_seq_params.qkv_format='thd'"
            )
        against_cache = not packed and query.shape[0] < key.shape[0]
        if attn_mask_type not in CAUSAL_MASK_TYPES and not (attn_mask_type == AttnMaskType.no_mask and against_cache):
            raise ValueError(_mask_sentence(attn_mask_type))

    def cp_group_of(self, packed_seq_params) -> torch.distributed.ProcessGroup | None:
        """The group this call runs over, None for one rank."""
        local_cp_size = getattr(packed_seq_params, "local_cp_size", None)
        override = getattr(packed_seq_params, "cp_group", None)
        if local_cp_size == 1:
            return None
        if local_cp_size is not None and override is None:
            raise ValueError(
                f"packed_seq_params.local_cp_size={local_cp_size} needs packed_seq_params.cp_group; "
                "without one only 1 (no context parallelism) is allowed"
            )
        group = self.cp_group if override is None else override
        if group is not self.cp_group and self.hierarchical_groups is not None:
            raise ValueError(
                "packed_seq_params.cp_group is another group than the module's, which cp_comm_type='a2a+p2p' does not "
                "allow: its groups are parts of the module's"
            )
        return group if group is not None and group.size() > 1 else None

    def _plan(self, cp_group, query, packed_seq_params) -> ContextParallelPlan:
        """The plan all layers share. query: (b, s_local, h, d), or packed (t_local, h, d) with its parameters."""
        cu_seqlens = None
        if packed_seq_params is not None:
            cu_seqlens, cu_seqlens_k = document_bounds(packed_seq_params)
            if cu_seqlens_k is not None and not torch.equal(cu_seqlens, cu_seqlens_k):
                raise ValueError(
                    "packed_seq_params.cu_seqlens_kv differs from cu_seqlens_q; context parallelism needs them equal"
                )
        return shared_plans.get(
            cp_group,
            seq_len=query.shape[-3] * cp_group.size(),
            cu_seqlens=cu_seqlens,
            layout=self.options.cp_layout,
            packing=self.options.packing,
        )


def is_packed(packed_seq_params) -> bool:
    """Whether a call's tensors are (t, h, d), documents one after the other."""
    return packed_seq_params is not None and packed_seq_params.qkv_format == "thd"


def document_bounds(packed_seq_params) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Offsets of the documents' rows for queries and, where they are another tensor, for keys."""
    params = packed_seq_params
    padded = params.cu_seqlens_q_padded is not None
    queries = params.cu_seqlens_q_padded if padded else params.cu_seqlens_q
    keys = params.cu_seqlens_kv_padded if padded else params.cu_seqlens_kv
    if queries is None:
        raise ValueError("packed_seq_params.cu_seqlens_q is None; qkv_format='thd' needs the documents' offsets")
    return queries, None if keys is queries else keys


def _mask_sentence(attn_mask_type) -> str:
    name = getattr(attn_mask_type, "name", attn_mask_type)
    return (
        f"attn_mask_type={name!r} is not supported; stick-breaking attention allows 'causal' and 'padding_causal', and "
        "'no_mask' for queries that follow a cache of older keys"
    )
