"""`StickBreakingForCausalLM` for vLLM: the model that `megatron-sb train` trains and `megatron-sb convert` writes.

It computes what `megatron_sb.huggingface.StickBreakingForCausalLM` computes, with vLLM's layers. Weights have the same
names. With tensor parallelism, each rank has some of the heads.
"""

from collections.abc import Iterable
from typing import ClassVar

import torch
from megatron_sb_vllm import LayerSettings, StickBreakingBackend
from torch import Tensor, nn
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.model_executor.utils import set_weight_attrs

import megatron_sb as sb
from megatron_sb.huggingface import StickBreakingConfig
from megatron_sb.nn.gates import gates_of
from megatron_sb.ops.kvcache import stored_head_dim, stored_keys
from megatron_sb.options import reach_of_heads


class StickBreakingMLP(nn.Module):
    """Compute down(silu(gate(x)) * up(x))."""

    def __init__(self, config: StickBreakingConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        sizes = config.hidden_size, [config.intermediate_size] * 2
        options = {"bias": False, "quant_config": quant_config}
        self.gate_up_proj = MergedColumnParallelLinear(*sizes, **options, prefix=f"{prefix}.gate_up_proj")
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, **options, prefix=f"{prefix}.down_proj"
        )
        self.activation = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        """x: (tokens, hidden_size)."""
        return self.down_proj(self.activation(self.gate_up_proj(x)[0]))[0]


class StickBreakingAttention(nn.Module):
    """Stick-breaking self-attention, with all options of the configuration."""

    def __init__(
        self,
        config: StickBreakingConfig,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        heads, head_dim, ranks = config.num_attention_heads, config.head_dim, get_tensor_model_parallel_world_size()
        if heads % ranks:
            raise ValueError(f"tensor_parallel_size must divide num_attention_heads, {heads}, got {ranks}.")
        self.num_heads, self.num_kv_heads = heads // ranks, max(1, config.num_key_value_heads // ranks)
        self.head_dim, self.eps, self.logits = head_dim, config.head_norm_eps, config.logits
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_dim,
            heads,
            config.num_key_value_heads,
            bias=config.qkv_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            heads * head_dim, config.hidden_size, bias=False, quant_config=quant_config, prefix=f"{prefix}.o_proj"
        )
        vectors = {
            "remainder_bias": config.remainder_bias,
            "norm_weight": config.head_norm,
            "norm_bias": config.head_norm,
        }
        for name, enabled in vectors.items():
            vector = nn.Parameter(torch.empty(self.num_heads * head_dim), requires_grad=False) if enabled else None
            self.register_parameter(name, vector)
            if vector is not None:
                set_weight_attrs(vector, {"weight_loader": sharded_weight_loader(0)})
        rank = get_tensor_model_parallel_rank()
        first, first_kv = rank * self.num_heads, rank * config.num_key_value_heads // ranks
        self.gate_proj, self.own_gates = None, slice(first_kv, first_kv + self.num_kv_heads)
        if config.forget_gate:  # every rank computes the few gates of all heads
            self.gate_proj = ReplicatedLinear(
                config.hidden_size, config.num_key_value_heads, bias=True, prefix=f"{prefix}.gate_proj"
            )
        options = {
            "attend_current": config.attend_current,
            "mass_threshold": config.mass_threshold,
            "reach": reach_of_heads(config.reach, heads, first, first + self.num_heads),
            "logits": config.logits,
        }
        default_scale = 1.0 if config.logits == "euclidean" else head_dim**-0.5
        head_output = self._head_output if any(vectors.values()) else None
        self.attn = Attention(
            self.num_heads,
            stored_head_dim(head_dim, logits=config.logits, forget_gate=config.forget_gate),
            default_scale if config.attention_multiplier is None else config.attention_multiplier,
            num_kv_heads=self.num_kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
            attn_backend=StickBreakingBackend,
            head_size_v=head_dim,
            settings=LayerSettings(options, config.forget_gate, head_dim, head_output),
        )

    def _head_output(self, o: Tensor, mass: Tensor) -> Tensor:
        vectors = (self.remainder_bias, self.norm_weight, self.norm_bias)
        return sb.head_output(o, mass, *vectors, eps=self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """x: (tokens, hidden_size)."""
        qkv, _ = self.qkv_proj(x)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(heads, dim=-2)
        gates = None if self.gate_proj is None else gates_of(self.gate_proj(x)[0][:, self.own_gates])[None]
        k = stored_keys(k[None], logits=self.logits, forget_gate=gates)[0]
        q = nn.functional.pad(q, (0, k.shape[-1] - self.head_dim))  # vLLM's layer has as many columns for both
        return self.o_proj(self.attn(q.flatten(1), k.flatten(1), v.flatten(1)))[0]


class StickBreakingDecoderLayer(nn.Module):
    """Compute x + attention(norm(x)), then the same with the MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_config, vllm_config.quant_config
        self.residual_multiplier = config.residual_multiplier
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = StickBreakingAttention(config, vllm_config.cache_config, quant_config, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = StickBreakingMLP(config, quant_config, f"{prefix}.mlp")

    def forward(self, x: Tensor) -> Tensor:
        """x: (tokens, hidden_size)."""
        x = x + self.residual_multiplier * self.self_attn(self.input_layernorm(x))
        return x + self.residual_multiplier * self.mlp(self.post_attention_layernorm(x))


class StickBreakingModel(nn.Module):
    """The decoder without its output layer."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        if config.num_experts is not None:
            raise ValueError(f"num_experts of the configuration must be None in vLLM, got {config.num_experts}.")
        self.embedding_multiplier = config.embedding_multiplier
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, quant_config=vllm_config.quant_config
        )
        names = (f"{prefix}.layers.{index}" for index in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(StickBreakingDecoderLayer(vllm_config, name) for name in names)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids: Tensor | None, inputs_embeds: Tensor | None = None) -> Tensor:
        """Return hidden states, (tokens, hidden_size)."""
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = x * self.embedding_multiplier
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class StickBreakingForCausalLM(nn.Module):
    """The decoder with its output layer, as vLLM calls it."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".mlp.gate_proj": (".mlp.gate_up_proj", 0),  # not that of forget gates
            ".mlp.up_proj": (".mlp.gate_up_proj", 1),
        }
    )
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        quant_config = vllm_config.quant_config
        self.model = StickBreakingModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, quant_config=quant_config, prefix=maybe_prefix(prefix, "lm_head")
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size, scale=1 / config.logits_scaling)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens, without the multiplier."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states, (tokens, hidden_size). Positions are not used."""
        del positions, intermediate_tensors
        return self.model(input_ids, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return the logits, on rank 0 or on all ranks."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load weights, and return the names of those that were loaded."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
