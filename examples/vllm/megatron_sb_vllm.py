"""An attention backend of vLLM that computes stick-breaking attention with megatron_sb.

vLLM calls `register` in each of its processes. Users choose the backend with `--attention-backend CUSTOM`.

Shapes: query (tokens, heads, head_size), key and value (tokens, KV heads, head_size), of the requests of a step one
after the other. A KV cache has the shape (blocks, KV heads, block size, 2 * head_size): each row is a key and a value.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.models import ModelRegistry
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpecKind

import megatron_sb as sb
from megatron_sb.huggingface import attention
from megatron_sb.ops.kvcache import keys_and_gates
from megatron_sb.options import DEFAULT_MASS_THRESHOLD, HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, AttentionOptions


def register() -> None:
    """Register the backend and `StickBreakingForCausalLM`, and let vLLM load transformers models without positions."""
    ModelRegistry.register_model("StickBreakingForCausalLM", "megatron_sb_vllm_model:StickBreakingForCausalLM")
    register_backend(AttentionBackendEnum.CUSTOM, f"{StickBreakingBackend.__module__}.{StickBreakingBackend.__name__}")
    for rope_type in (attention.NO_ROTATION, attention.NO_ROTATION_0_1):
        ROPE_INIT_FUNCTIONS[rope_type] = _no_rotation


def _no_rotation(config, device=None, seq_len=None, layer_type=None):
    """Return rotary frequencies of 0. Raise ValueError if vLLM would compute another attention."""
    if config._attn_implementation == "vllm":
        chosen = get_current_vllm_config().attention_config
        backend = chosen.backend_per_kind.get(KVCacheSpecKind.FULL_ATTENTION.value, chosen.backend)
        if backend is not AttentionBackendEnum.CUSTOM:
            raise ValueError(
                "A model without positions needs the attention backend CUSTOM, got "
                f"{backend.name if backend else 'none'}. Start vLLM with --attention-backend CUSTOM."
            )
        config = copy.copy(config)
        config._attn_implementation = attention.NAME
    return attention._no_rotation(config, device, seq_len, layer_type)


def _check_layer_types(config) -> None:
    """Raise ValueError for kinds of layers that vLLM would compute as if they attended to all keys."""
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:  # vLLM itself passes sliding_window for layers with sliding windows
        raise ValueError(
            "layer_types of the configuration must be 'full_attention' with stick-breaking attention, got "
            f"{', '.join(sorted(map(repr, others)))}."
        )


@dataclass
class Prompts:
    """The requests of a step that have several queries. All of their keys are read.

    Attributes:
        first: the first row of their queries.
        cu_seqlens, max_seqlen: int32, (prompts + 1,), offsets of queries; the most queries of a prompt.
        cu_seqlens_k, max_seqlen_k: the same of keys. None: as many keys as queries.
        blocks, rows: (keys,), the block of each key in the cache, and its row there. None: keys are those of the step.
    """

    first: int
    cu_seqlens: Tensor
    max_seqlen: int
    cu_seqlens_k: Tensor | None = None
    max_seqlen_k: int | None = None
    blocks: Tensor | None = None
    rows: Tensor | None = None


@dataclass
class StickBreakingMetadata(AttentionMetadata):
    """What all layers need in a step.

    Attributes:
        num_tokens: number of tokens, without padding.
        num_decodes: number of requests with one query. They come first.
        seq_lens, block_table: int32, of these requests: number of keys, blocks.
        blocks, rows: (num_tokens,), where new keys and values are written.
        prompts: the other requests, or None.
    """

    num_tokens: int
    num_decodes: int
    seq_lens: Tensor
    block_table: Tensor
    blocks: Tensor
    rows: Tensor
    prompts: Prompts | None


class StickBreakingMetadataBuilder(AttentionMetadataBuilder[StickBreakingMetadata]):
    """Makes the metadata of a step once for all layers."""

    reorder_batch_threshold = 1  # vLLM moves requests with one query to the front

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size
        speculative = vllm_config.speculative_config
        if speculative is not None:
            raise ValueError(f"speculative_config must be None with stick-breaking attention, got {speculative!r}.")

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StickBreakingMetadata:
        """Return the metadata. The host waits for the GPU only if vLLM does not know the lengths of prompts."""
        del common_prefix_len, fast_build
        common = common_attn_metadata
        num_decodes, num_prompts, first, _ = split_decodes_and_prefills(common, self.reorder_batch_threshold)
        # -1, as in runs without requests, means that nothing is stored. Block 0 is never read.
        slots = common.slot_mapping[: common.num_actual_tokens].long().clamp(min=0)
        return StickBreakingMetadata(
            num_tokens=common.num_actual_tokens,
            num_decodes=num_decodes,
            seq_lens=common.seq_lens[:num_decodes].int(),
            block_table=common.block_table_tensor[:num_decodes].int(),
            blocks=slots // self.block_size,
            rows=slots % self.block_size,
            prompts=self._prompts(common, num_decodes, first) if num_prompts else None,
        )

    def _prompts(self, common: CommonAttentionMetadata, num_decodes: int, first: int) -> Prompts:
        device = common.query_start_loc.device
        starts = common.query_start_loc_cpu[num_decodes : common.num_reqs + 1]
        queries = starts.diff()
        known = common.seq_lens_cpu_upper_bound
        keys = (common.seq_lens.cpu() if known is None else known)[num_decodes : common.num_reqs]
        cu_seqlens = (starts - starts[0]).int().to(device)
        prompts = Prompts(first, cu_seqlens, int(queries.max()))
        if torch.equal(keys.long(), queries.long()):
            return prompts
        table = common.block_table_tensor[num_decodes : common.num_reqs]
        ends = torch.zeros(len(keys) + 1, dtype=torch.int32)
        ends[1:] = keys.cumsum(0)
        total, of_request, ends_there = int(ends[-1]), keys.long().to(device), ends.to(device)
        request = torch.repeat_interleave(torch.arange(len(keys), device=device), of_request, output_size=total)
        position = torch.arange(total, device=device) - ends_there.long()[request]
        prompts.cu_seqlens_k, prompts.max_seqlen_k = ends_there, int(keys.max())
        prompts.blocks = table[request, position // self.block_size].long()
        prompts.rows = position % self.block_size
        return prompts


@dataclass
class LayerSettings:
    """What a layer's model chooses.

    Attributes:
        options: `attend_current`, `mass_threshold`, `reach` and `logits` of the attention functions.
        forget_gate: whether keys have forget gates.
        head_dim: channels of queries and keys. Keys are stored with the columns of their norms and gates, and queries
            have as many columns, which are not used. None: as many channels as columns.
        head_output: computes the output of the heads from the attention's output and mass. None: it is the output.
    """

    options: dict = field(default_factory=dict)
    forget_gate: bool = False
    head_dim: int | None = None
    head_output: Callable[[Tensor, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        AttentionOptions(**self.options)  # checks them now; otherwise the first request would end the engine

    @classmethod
    def of_decoder(cls, config) -> "LayerSettings":
        """Return those of a decoder of transformers. Raise ValueError if it has positions or other options."""
        attention.check_positions(SimpleNamespace(config=config))  # no layer tells here whether it rotates
        attention.check_options(config)
        _check_layer_types(config)
        return cls(
            {
                "attend_current": getattr(config, "attend_current", False),
                "mass_threshold": getattr(config, "mass_threshold", DEFAULT_MASS_THRESHOLD),
            }
        )


class StickBreakingImpl(AttentionImpl[StickBreakingMetadata]):
    """Computes the attention of one layer. Without `settings`, the layer is one of a decoder of transformers."""

    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        settings: LayerSettings | None = None,
        **others,
    ) -> None:
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap or None,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            **others,
        }
        for name, value in unsupported.items():
            if value is not None:
                raise ValueError(f"{name} must be None with stick-breaking attention, got {value!r}.")
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"attn_type must be {AttentionType.DECODER.value!r}, got {attn_type!r}.")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads or num_heads, head_size
        self.kv_cache_dtype = kv_cache_dtype
        self.scale = float(scale)  # vLLM replaces it in each forward of a model that has another scale
        if settings is None:
            settings = LayerSettings.of_decoder(get_current_vllm_config().model_config.hf_text_config)
        self.options, self.forget_gate = settings.options, settings.forget_gate
        self.head_dim, self.head_output = settings.head_dim or head_size, settings.head_output
        if self.head_dim != head_size and kv_cache_dtype != "auto":  # the columns of a key are for its dtype
            raise ValueError(
                "kv_cache_dtype must be 'auto' with forget gates or Euclidean logits, which add columns to keys, got "
                f"{kv_cache_dtype!r}."
            )

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StickBreakingMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write keys and values to the cache, attend, and write the result to output."""
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("output_scale and output_block_scale must be None with stick-breaking attention.")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        step, cache = attn_metadata, kv_cache.transpose(1, 2)  # (blocks, block size, KV heads, key and value)
        num_tokens, num_decodes = step.num_tokens, step.num_decodes
        query, key, value = (x.to(cache.dtype) for x in (query, key, value))  # it can differ from that of the model
        cache[step.blocks, step.rows] = torch.cat((key[:num_tokens], value[:num_tokens]), dim=-1)
        query = query[..., : self.head_dim]
        if num_decodes:
            out = sb.stickbreaking_attention_with_kvcache(
                query[:num_decodes, None],
                *self._keys_and_values(cache),
                cache_seqlens=step.seq_lens,
                block_table=step.block_table,
                forget_gate=self.forget_gate,
                scale=self.scale,
                return_mass=self.head_output is not None,
                **self.options,
            )
            output[:num_decodes] = self._of_heads(out)[:, 0]
        if step.prompts is not None:
            rows = slice(step.prompts.first, num_tokens)
            output[rows] = self._prompts(step.prompts, query[rows], key[rows], value[rows], cache)
        return output

    def _prompts(self, prompts: Prompts, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        if prompts.blocks is not None:  # a copy of their keys, which the kernels for long sequences need
            key, value = self._keys_and_values(cache[prompts.blocks, prompts.rows])
        key, gates = keys_and_gates(
            key, self.head_dim, logits=self.options.get("logits", "dot"), forget_gate=self.forget_gate
        )
        out = sb.stickbreaking_attention_varlen(
            query,
            key,
            value,
            prompts.cu_seqlens,
            prompts.max_seqlen,
            cu_seqlens_k=prompts.cu_seqlens_k,
            max_seqlen_k=prompts.max_seqlen_k,
            forget_gate=gates,
            scale=self.scale,
            return_mass=self.head_output is not None,
            **self.options,
        )
        return self._of_heads(out)

    def _keys_and_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[..., : self.head_size], rows[..., self.head_size :]

    def _of_heads(self, out: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        return out if self.head_output is None else self.head_output(*out)


class StickBreakingBackend(AttentionBackend):
    """What vLLM asks before it builds a model."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's list of backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[StickBreakingImpl]:
        """Return the class that computes."""
        return StickBreakingImpl

    @staticmethod
    def get_builder_cls() -> type[StickBreakingMetadataBuilder]:
        """Return the class that makes the metadata."""
        return StickBreakingMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape of a cache, for vLLM 0.26. Newer versions always use this shape."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the order in memory, for vLLM 0.26: blocks, layers, rows of a block, KV heads, channels."""
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple:
        """Return the same order, and that with several layers in a tensor, for versions from 0.33 on."""
        from vllm.v1.kv_cache_interface import KVCacheLayout  # 0.26 has none

        return KVCacheLayout.LBNHC, KVCacheLayout.BLNHC

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the multiples of 8 up to 256."""
        return list(range(HEAD_DIM_MULTIPLE, MAX_HEAD_DIM + 1, HEAD_DIM_MULTIPLE))

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        """Return whether the GPU has kernels: sm_80 and later."""
        return capability is None or capability.major >= 8
