"""Modules that stand in for those that need a GPU or Transformer Engine, and hybrid models of them.

Megatron-Core has Mamba, gated delta nets and the core of latent attention only for GPUs. A training script can name
this hybrid stack: `--spec megatron_mixers hybrid_stack_spec`.
"""

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

try:  # Megatron-Core 0.19
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    MODEL_ARGUMENTS = ("hybrid_stack_spec", "hybrid_layer_pattern")
except ImportError:  # 0.16
    from megatron.core.models.mamba.mamba_model import MambaModel as HybridModel
    from megatron.core.ssm.mamba_block import MambaStack as HybridStack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as HybridStackSubmodules

    MODEL_ARGUMENTS = ("mamba_stack_spec", "hybrid_override_pattern")


class MeanMixer(torch.nn.Module):
    """A linear layer of the mean of the hidden states so far, with the interface of a mixer of Megatron-Core."""

    def __init__(self, config: TransformerConfig, **unused):
        super().__init__()
        self.linear = torch.nn.Linear(config.hidden_size, config.hidden_size, bias=False, dtype=config.params_dtype)

    def forward(self, hidden_states: torch.Tensor, *unused, **also_unused) -> tuple[torch.Tensor, None]:
        """Mix hidden states (s, b, h)."""
        counts = torch.arange(1, len(hidden_states) + 1, device=hidden_states.device)[:, None, None]
        return self.linear((hidden_states.float().cumsum(0) / counts).to(hidden_states.dtype)), None


class LatentCoreAttention(DotProductAttention):
    """Megatron's softmax attention as the core of latent attention. Keys and values have config.kv_channels channels.

    Latent attention builds a core twice, and names the numbers of channels only the second time.
    """

    def __init__(self, *args, k_channels: int | None = None, v_channels: int | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        assert {k_channels, v_channels} <= {None, self.config.kv_channels}


def latent_layer_spec() -> ModuleSpec:
    """Return the spec of a layer with multi-latent attention."""
    spec = get_gpt_layer_local_spec(multi_latent_attention=True)
    spec.submodules.self_attention.submodules.core_attention = LatentCoreAttention
    return spec


def _hybrid_stack_spec() -> ModuleSpec:
    """Return a hybrid stack with every kind of layer. It has no final norm, which would need Transformer Engine."""
    dense, experts = get_gpt_layer_local_spec().submodules, get_gpt_layer_local_spec(num_experts=4).submodules
    norm, add = dense.input_layernorm, get_bias_dropout_add

    def layer(module: type, mixer) -> ModuleSpec:
        parts = TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=mixer,
            self_attn_bda=add,
            sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
        )
        return ModuleSpec(module, submodules=parts)

    def mlp_layer(module: type, mlp) -> ModuleSpec:
        parts = TransformerLayerSubmodules(
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=add,
            sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
        )
        return ModuleSpec(module, submodules=parts)

    mixer = ModuleSpec(MeanMixer)
    mamba = MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=add)
    layers = {
        "mamba_layer": ModuleSpec(MambaLayer, submodules=mamba),
        "gdn_layer": layer(TransformerLayer, mixer),
        "attention_layer": layer(TransformerLayer, dense.self_attention),
        "mla_layer": layer(TransformerLayer, latent_layer_spec().submodules.self_attention),
        "mlp_layer": mlp_layer(MLPLayer, dense.mlp),
        "moe_layer": mlp_layer(MoETransformerLayer, experts.mlp),
    }
    known = {name: spec for name, spec in layers.items() if hasattr(HybridStackSubmodules, name)}
    return ModuleSpec(HybridStack, params={"post_layer_norm": False}, submodules=HybridStackSubmodules(**known))


hybrid_stack_spec = _hybrid_stack_spec()


def make_hybrid_model(config: TransformerConfig, spec: ModuleSpec, pattern: str, **stage) -> HybridModel:
    """Build a hybrid model of 32 tokens and a context of 32. stage: arguments of a pipeline stage."""
    torch.manual_seed(3)
    layers = dict(zip(MODEL_ARGUMENTS, (spec, pattern), strict=True))
    return HybridModel(config=config, vocab_size=32, max_sequence_length=32, **layers, **stage)
