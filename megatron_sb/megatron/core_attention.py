"""Stick-breaking attention as the `core_attention` module of a Megatron-Core layer."""

from __future__ import annotations

import math

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_object_for_checkpoint,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import get_pg_rank

from megatron_sb.megatron.arguments import StickBreakingOptions
from megatron_sb.megatron.gates import split_gates
from megatron_sb.megatron.max_logits import largest_logits
from megatron_sb.megatron.packed import document_bounds, is_packed
from megatron_sb.megatron.plans import hierarchical_levels, shared_plans
from megatron_sb.megatron.positions import check_learned_positions, watch_embeddings
from megatron_sb.megatron.saved_attention import record_options
from megatron_sb.megatron.settings import LOGIT_SETTINGS, MARKER, check_layer_settings, tracks_logits
from megatron_sb.ops import head_output, stickbreaking_attention, stickbreaking_attention_varlen
from megatron_sb.ops.context_parallel import (
    ContextParallelPlan,
    context_parallel_attention,
    shard_positions,
    unshard_sequence,
)
from megatron_sb.ops.kvcache import attend_to_filled, is_decoding_step, stored_keys
from megatron_sb.options import COMMS, check_head_dim, reach_of_heads
from megatron_sb.validation import check_choice, check_finite, check_number

CAUSAL_MASK_TYPES = (AttnMaskType.causal, AttnMaskType.padding_causal)

watch_embeddings()  # before a script builds a model with layers of this module


class StickBreakingCoreAttention(MegatronModule):
    """Stick-breaking attention (Tan et al., arXiv 2410.17980) as Megatron-Core's `core_attention`.

    Megatron splits heads over tensor-parallel ranks and sequences over context-parallel ranks before it calls this
    module. The module has no parameters unless `options` add them: remainder_bias, norm_weight and norm_bias, each
    (h * d,) for the local heads. They have one dimension, because Megatron applies no weight decay to such parameters.

    Settings that only concern softmax (`apply_query_key_layer_scaling`, `attention_softmax_in_fp32`,
    `masked_softmax_fusion`) are ignored.

    Args:
        config: a TransformerConfig.
        layer_number: 1-based, as Megatron counts.
        attn_mask_type: `AttnMaskType.causal` or `AttnMaskType.padding_causal`.
        attention_type: "self".
        cp_comm_type: mode of `context_parallel_attention`: "p2p", "all_gather", "a2a" or "a2a+p2p". Default None:
            "auto". "a2a+p2p" needs the groups of `--hierarchical-context-parallel-sizes`. `options.cp_comm` takes
            precedence.
        softmax_scale: factor of the logits. Default None: 1 / sqrt(k_channels), or 1 for Euclidean logits.
        pg_collection: process groups; `tp` and `cp` are used. Default None: those of `parallel_state`.
        model_comm_pgs: the name of `pg_collection` in older releases of Megatron-Core.
        options: see `StickBreakingOptions`. Default None: its defaults.
        k_channels: channels of a head's query and key, d. Multi-latent attention passes it together with v_channels.
            Default None: config.kv_channels.
        v_channels: channels of a head's value, d_v. Default None: config.kv_channels.
        unrotated: whether the layer leaves out the rotary embedding of multi-latent attention. It must be True with
            k_channels. `with_stickbreaking` sets it. Default False.

    Raises:
        ValueError: if a setting cannot be combined with stick-breaking attention, or an argument has an invalid value.
            The message names it.
        TypeError: if there is an unknown argument, or an argument has a wrong type.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> from megatron.core.transformer import TransformerConfig
        >>> from megatron.core.transformer.enums import AttnMaskType
        >>> from megatron_sb.megatron import StickBreakingCoreAttention
        >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
        >>> one_rank = SimpleNamespace(tp=None, cp=None)
        >>> attention = StickBreakingCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=one_rank)
        >>> q, k, v = (torch.randn(10, 2, 4, 8) for _ in range(3))  # (s, b, h, d)
        >>> attention(q, k, v, None).shape
        torch.Size([10, 2, 32])
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
        k_channels: int | None = None,
        v_channels: int | None = None,
        unrotated: bool = False,
        **unknown,
    ):
        super().__init__(config=config)
        check_layer_settings(config, layer_number)
        check_learned_positions(config)
        if k_channels is not None and not unrotated:
            raise ValueError(
                "core_attention of multi-latent attention (--multi-latent-attention) must be put there by "
                f"with_stickbreaking, got StickBreakingCoreAttention with k_channels={k_channels} in another layer "
                "spec: the layer would rotate q and k."
            )
        if unknown:
            raise TypeError(f"StickBreakingCoreAttention got unknown arguments: {', '.join(sorted(unknown))}.")
        if attention_type != "self":
            raise ValueError(f"attention_type must be 'self', got {attention_type!r}.")
        if attn_mask_type not in CAUSAL_MASK_TYPES:
            raise ValueError(_mask_message(attn_mask_type))
        _check_arguments(config, cp_comm_type, softmax_scale, options)

        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.options = options or StickBreakingOptions()
        self.cp_comm_type = self.options.cp_comm or cp_comm_type
        self.tracks_logits = tracks_logits(config)
        self.current_max_attn_logits = None  # Megatron reads it after a step, and resets it
        if self.tracks_logits and self.options.logits != "dot":
            name, flag = next(setting for setting in LOGIT_SETTINGS if getattr(config, setting[0], False))
            raise ValueError(
                f"config.{name} ({flag}) must be False with logits={self.options.logits!r} (--sb-logits), got True: "
                "these logits are never above 0."
            )
        record_options(self.options)
        self.is_latent = k_channels is not None
        self.k_channels = k_channels if self.is_latent else config.kv_channels
        self.v_channels = v_channels if self.is_latent else config.kv_channels
        self.scale = self._scale_of(softmax_scale)
        groups = pg_collection if pg_collection is not None else model_comm_pgs
        if groups is None:
            self.tp_group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
            self.cp_group = parallel_state.get_context_parallel_group(check_initialized=False)
        else:
            self.tp_group, self.cp_group = groups.tp, groups.cp
        heads, ranks = config.num_attention_heads, 1 if self.tp_group is None else self.tp_group.size()
        first = get_pg_rank(self.tp_group) * heads // ranks
        self.reach = reach_of_heads(self.options.reach, heads, first, first + heads // ranks)
        self.hierarchical_groups = self._find_hierarchical_groups(groups) if self.cp_comm_type == "a2a+p2p" else None
        self._add_head_vector("remainder_bias", 0.0, self.options.remainder_bias)
        self._add_head_vector("norm_weight", 1.0, self.options.head_norm)
        self._add_head_vector("norm_bias", 0.0, self.options.head_norm)

    def _scale_of(self, softmax_scale: float | None) -> float:
        """Return the factor of the logits, and check the channels of a head.

        Multi-latent attention always passes a scale, mscale^2 / sqrt(k_channels). Euclidean logits have no factor
        1 / sqrt(k_channels), so that mscale^2 remains.
        """
        euclidean = self.options.logits == "euclidean"
        if self.is_latent:
            sum_of_both = "qk_head_dim + qk_pos_emb_head_dim (--qk-head-dim, --qk-pos-emb-head-dim)"
            check_head_dim(sum_of_both, self.k_channels, extra_columns=euclidean)
            check_head_dim("v_head_dim (--v-head-dim)", self.v_channels)
        else:
            check_head_dim("config.kv_channels (--kv-channels)", self.k_channels, extra_columns=euclidean)
        if softmax_scale is None:
            return 1.0 if euclidean else 1.0 / math.sqrt(self.k_channels)
        return softmax_scale * math.sqrt(self.k_channels) if self.is_latent and euclidean else softmax_scale

    def _add_head_vector(self, name: str, value: float, enabled: bool) -> None:
        """Register a parameter (h * d_v,) of this rank's heads, or None.

        Each tensor-parallel rank has the complete gradient of its heads, also under sequence parallelism. A
        context-parallel rank has the gradient from its rows, which Megatron sums over the DP x CP group.
        """
        if not enabled:
            self.register_parameter(name, None)
            return
        config, tp_size = self.config, 1 if self.tp_group is None else self.tp_group.size()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        width = config.num_attention_heads // tp_size * self.v_channels
        parameter = torch.nn.Parameter(torch.full((width,), value, device=device, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        self.register_parameter(name, parameter)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Shard the vectors over tensor-parallel ranks, so that a checkpoint loads with other parallel sizes.

        If `metadata` contains MARKER, the state also contains a marker that softmax attention does not know. Megatron's
        loop saves the metadata and builds the state to load from them. Older checkpoints have no marker.
        """
        state = self.state_dict(prefix="", keep_vars=True)
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        sharded = make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            dict.fromkeys(state, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if metadata.get(MARKER):
            replica = (0, get_pg_rank(self.tp_group), get_pg_rank(metadata["dp_cp_group"]))
            name = prefix + MARKER
            sharded[name] = make_sharded_object_for_checkpoint(True, name, sharded_offsets, replica_id=replica)
        return sharded

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        """Load the vectors. The marker is not a parameter."""
        state_dict.pop(prefix + MARKER, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _find_hierarchical_groups(self, groups) -> tuple | None:
        """Return Megatron's a2a group and p2p group of this rank, or None without context parallelism."""
        if self.cp_group is None or self.cp_group.size() == 1:
            return None
        levels = hierarchical_levels(groups)
        if len(levels) != 2:
            raise ValueError(
                "cp_comm_type='a2a+p2p' needs two levels of context-parallel groups, got "
                f"{len(levels)}. Set --hierarchical-context-parallel-sizes A2A P2P."
            )
        return levels

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
        """Attend within each sequence or document. Sizes are those of this rank: h heads and g KV heads.

        Args:
            query: (s, b, h, d), or packed (t, h, d).
            key: (s_k, b, g, d), or packed (t, g, d); h must be a multiple of g. May be a strided view. Forget gates
                follow the d channels (see `gates.with_gates`). Without context parallelism s may be less than s_k: the
                queries are then the last s positions, as when decoding with a static cache.
            value: (s_k, b, g, d_v), or packed (t, g, d_v). May be a strided view.
            attention_mask: ignored, because the mask is causal. To save its memory, use
                `--no-create-attention-mask-in-dataloader`.
            attn_mask_type: replaces the constructor's. `no_mask` is accepted only if s < s_k.
            attention_bias: must be None.
            packed_seq_params: describes documents if its `qkv_format` is "thd". `cu_seqlens_q` is global and the same
                on all ranks. `cu_seqlens_q_padded` takes precedence: rows between the end of a document and its padded
                end are the newest tokens of that document. `cp_group` replaces the module's. `local_cp_size` 1 disables
                context parallelism.

        Returns:
            (s, b, h * d_v), or packed (t, h * d_v).

        Raises:
            ValueError: if the mask, the bias or the packing is not supported, or a length is not divisible among the
                context-parallel ranks.
        """
        packed = is_packed(packed_seq_params)
        self._check_call(query, key, value, attn_mask_type or self.attn_mask_type, attention_bias, packed)
        out, mass = self.attend(query, key, value, packed_seq_params, return_mass=self.remainder_bias is not None)
        if self.tracks_logits and self.training:
            self._track_logits(query, key, packed_seq_params)
        out = self.head_output(out, mass)
        return out.flatten(1) if packed else out.transpose(0, 1).flatten(2)

    def head_output(self, out: torch.Tensor, mass: torch.Tensor | None) -> torch.Tensor:
        """Apply remainder bias and head norm, if the module has them, to the results of `attend`."""
        if self.remainder_bias is None and self.norm_weight is None:
            return out
        eps = self.config.layernorm_epsilon
        return head_output(out, mass, self.remainder_bias, self.norm_weight, self.norm_bias, eps=eps)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_seq_params, *, return_mass: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the attention without remainder bias and head norm. Arguments are those of `forward`.

        Returns:
            The output (b, s, h, d_v), or packed (t, h, d_v), and the mass (b, h, s), or packed (h, t). Without
            return_mass the mass is None.
        """
        packed, cp_group = is_packed(packed_seq_params), self.cp_group_of(packed_seq_params)
        if not packed:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        key, variant = self.variant_of(key)
        kwargs = {**self.attention_options, **variant, "return_mass": return_mass}
        if cp_group is not None:
            plan = self._shared_plan(cp_group, query, packed_seq_params if packed else None)
            kwargs |= {"comm": self.cp_comm_type or "auto", "hierarchical_groups": self.hierarchical_groups}
            out = context_parallel_attention(query, key, value, plan=plan, **kwargs)
        elif packed:
            cu_seqlens, cu_seqlens_k = document_bounds(packed_seq_params)
            out = stickbreaking_attention_varlen(query, key, value, cu_seqlens, cu_seqlens_k=cu_seqlens_k, **kwargs)
        elif is_decoding_step(query, key, value):
            stored = stored_keys(key, **variant)  # with a variant, a copy of the cache at each step
            kwargs["forget_gate"] = variant["forget_gate"] is not None
            out = attend_to_filled(query, stored, value, **kwargs)
        else:
            out = stickbreaking_attention(query, key, value, **kwargs)
        return out if return_mass else (out, None)

    @torch.no_grad()
    def _track_logits(self, query: torch.Tensor, key: torch.Tensor, packed_seq_params) -> None:
        """Update `current_max_attn_logits`, fp32 (h,), with this rank's queries. With context parallelism, collective.

        Megatron takes the maximum over the ranks that have other rows. reach is left out: it adds constants, which
        smaller weights do not change.
        """
        key, _ = self.variant_of(key)
        cu_seqlens, positions = None, None
        if is_packed(packed_seq_params):
            query, key = query[None], key[None]
            cu_seqlens, _ = document_bounds(packed_seq_params)
        else:
            query, key = query.transpose(0, 1), key.transpose(0, 1)
        cp_group = self.cp_group_of(packed_seq_params)
        if cp_group is not None:
            shards = (self.options.cp_layout, cu_seqlens, self.options.packing)
            key = unshard_sequence(key, cp_group, 1, *shards)
            positions = shard_positions(cp_group.size(), key.shape[1], *shards)[cp_group.rank(), : query.shape[1]]
        options = {"scale": self.scale, "attend_current": self.options.attend_current}
        largest = largest_logits(query, key, positions=positions, cu_seqlens=cu_seqlens, **options)
        before = self.current_max_attn_logits
        self.current_max_attn_logits = largest if before is None else before.maximum(largest)

    @property
    def attention_options(self) -> dict:
        """Keyword arguments of the attention that are the same in every call."""
        return {
            "scale": self.scale,
            "attend_current": self.options.attend_current,
            "mass_threshold": self.options.mass_threshold,
            "reach": self.reach,
        }

    def variant_of(self, key: torch.Tensor) -> tuple[torch.Tensor, dict]:
        """Return the keys without gates, and the attention's keyword arguments `logits` and `forget_gate`."""
        key, gate = split_gates(key) if self.options.forget_gate else (key, None)
        return key, {"logits": self.options.logits, "forget_gate": gate}

    def _check_call(self, query, key, value, attn_mask_type, attention_bias, packed: bool) -> None:
        """Raise ValueError for a mask, a bias or a shape that is not supported."""
        if attention_bias is not None:
            raise ValueError(
                "attention_bias must be None with stick-breaking attention, got a tensor of shape "
                f"{tuple(attention_bias.shape)}."
            )
        if query.dim() != (3 if packed else 4):
            raise ValueError(
                "query must have shape (s, b, h, d), or (t, h, d) with packed_seq_params.qkv_format='thd', got "
                f"{tuple(query.shape)}."
            )
        if self.is_latent and value.shape[-1] != self.v_channels:
            raise ValueError(
                f"value must have {self.v_channels} channels in each head, the v_channels of this module, got "
                f"{value.shape[-1]}: this release of Megatron-Core pads the values."
            )
        follows_cache = not packed and query.shape[0] < key.shape[0]
        if attn_mask_type not in CAUSAL_MASK_TYPES and not (attn_mask_type == AttnMaskType.no_mask and follows_cache):
            raise ValueError(_mask_message(attn_mask_type))

    def cp_group_of(self, packed_seq_params) -> torch.distributed.ProcessGroup | None:
        """Return the context-parallel group of a call, or None for a single rank."""
        local_cp_size = getattr(packed_seq_params, "local_cp_size", None)
        override = getattr(packed_seq_params, "cp_group", None)
        if local_cp_size == 1:
            return None
        if local_cp_size is not None and override is None:
            raise ValueError(
                "packed_seq_params.local_cp_size must be None or 1 without packed_seq_params.cp_group, got "
                f"{local_cp_size}."
            )
        group = self.cp_group if override is None else override
        if group is not self.cp_group and self.hierarchical_groups is not None:
            raise ValueError(
                "packed_seq_params.cp_group must be None or the group of the module with cp_comm_type='a2a+p2p': the "
                "hierarchical groups are subgroups of the module's group."
            )
        return group if group is not None and group.size() > 1 else None

    def _shared_plan(self, cp_group, query, packed_seq_params) -> ContextParallelPlan:
        """Return the plan of this batch. query: (b, s_local, h, d), or (t_local, h, d) with packed_seq_params."""
        cu_seqlens, layout = None, self.options.cp_layout
        partition = getattr(packed_seq_params, "cp_partition_mode", None)
        if partition not in (None, layout):
            raise ValueError(
                f"packed_seq_params.cp_partition_mode must be {layout!r}, as --sb-cp-layout (cp_layout), got "
                f"{partition!r}."
            )
        if packed_seq_params is not None:
            cu_seqlens, cu_seqlens_k = document_bounds(packed_seq_params)
            if cu_seqlens_k is not None and not torch.equal(cu_seqlens, cu_seqlens_k):
                raise ValueError(
                    "packed_seq_params.cu_seqlens_kv must equal cu_seqlens_q with context parallelism, got different "
                    "offsets."
                )
        return shared_plans.get(
            cp_group,
            local_len=query.shape[-3],
            cu_seqlens=cu_seqlens,
            layout=layout,
            packing=self.options.packing,
        )


def _check_arguments(config, cp_comm_type, softmax_scale, options) -> None:
    """Raise for values that only some calls read: with several context-parallel ranks, or with a head norm."""
    if options is not None and not isinstance(options, StickBreakingOptions):
        raise TypeError(f"options must be a StickBreakingOptions, got {type(options).__name__}.")
    if cp_comm_type is not None:
        check_choice("cp_comm_type (--cp-comm-type)", cp_comm_type, COMMS)
    if softmax_scale is not None:
        check_finite("softmax_scale", softmax_scale)
    if options is not None and options.head_norm:
        check_number(
            "config.layernorm_epsilon (--norm-epsilon)",
            config.layernorm_epsilon,
            "a finite number of at least 1e-30 with head_norm=True (--sb-head-norm)",
            lambda x: 1e-30 <= x < math.inf,
        )


def _mask_message(attn_mask_type) -> str:
    name = getattr(attn_mask_type, "name", attn_mask_type)
    return (
        f"attn_mask_type must be 'causal' or 'padding_causal', got {name!r}. 'no_mask' is accepted only for queries "
        "that follow a cache of older keys."
    )
