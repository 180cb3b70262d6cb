"""The models of a training job, built by Megatron-Core from its local layer spec."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sb.megatron import versions
from megatron_sb.megatron.spec import with_stickbreaking
from megatron_sb.megatron.stand_ins import install_stand_ins
from megatron_sb.training.config import (
    GatedDeltaNetConfig,
    LayerAttentionConfig,
    ModelConfig,
    ParallelConfig,
    SoftmaxAttentionConfig,
    StageConfig,
    StickBreakingAttentionConfig,
    TrainingConfig,
)
from megatron_sb.training.engine.linear_attention import GatedDeltaNet
from megatron_sb.training.engine.long_sequences import LongSequenceModel
from megatron_sb.training.engine.softmax_attention import GatedSelfAttention, SoftmaxCoreAttention


def build_model(
    config: TrainingConfig, model: str, stage: StageConfig, vocab_size: int, *, fused: bool = False
) -> GPTModel:
    """Build this rank's shard of a decoder on torch's default device.

    The decoder has no position embedding. Stick-breaking needs none, and softmax applies its own in the core attention.
    The weights come from torch's generator. If its state is the same on every rank, the weights do not depend on the
    parallel layout.

    Args:
        config: the job's configuration.
        model: a name in config.attention.
        stage: the stage to train.
        vocab_size: size of the vocabulary before padding.
        fused: use Megatron-Core's operators that torch.compile fuses, as Megatron's scripts do by default. For GPUs.
    """
    install_stand_ins()
    names = config.layers_of(model)
    specs = {name: _layer_spec(config, config.attention[name], stage) for name in dict.fromkeys(names)}
    built = _model_class(config.model)(
        _transformer_config(config, model, stage, fused),
        TransformerBlockSubmodules([specs[name] for name in names], layer_norm=LayerNormImpl),
        config.model.padded_vocab_size(vocab_size),
        config.longest_evaluated(stage),
        position_embedding_type="none",
        share_embeddings_and_output_weights=config.model.tie_word_embeddings,
    )
    # Megatron-Core's checkpoints join the weights of all layers, unless this is set.
    built.config.hetereogenous_dist_checkpoint = len({_names_of_weights(layer) for layer in built.decoder.layers}) > 1
    return built


def stage_fields(config: TrainingConfig, model: str, stage: StageConfig) -> dict:
    """Return what an engine of a model takes from its stage. One engine serves stages with equal fields."""
    fields = _parallel_fields(config.parallel, stage) | {"loss": stage.loss}
    fields |= {"trained_context": stage.context_length, "longest": config.longest_evaluated(stage)}
    softmax = [each for each in config.attention_of_layers(model) if isinstance(each, SoftmaxAttentionConfig)]
    return fields | {"softmax": [_softmax_fields(config, each, stage) for each in softmax]}


def _model_class(sizes: ModelConfig) -> Callable[..., GPTModel]:
    if sizes.tokens_at_once is None and not sizes.offloaded_inputs:
        return GPTModel
    return functools.partial(
        LongSequenceModel, tokens_at_once=sizes.tokens_at_once, offloaded_inputs=sizes.offloaded_inputs
    )


def _layer_spec(config: TrainingConfig, attention: LayerAttentionConfig, stage: StageConfig) -> ModuleSpec:
    moe = config.model.moe
    spec = get_gpt_layer_local_spec(
        num_experts=moe and moe.num_experts, moe_grouped_gemm=bool(moe and moe.grouped_gemm), normalization="RMSNorm"
    )
    if moe:
        versions.replace_experts(spec, _with_weights_by_index)
    if isinstance(attention, StickBreakingAttentionConfig):
        return _stick_breaking_spec(spec, attention, config.parallel)
    if isinstance(attention, GatedDeltaNetConfig):
        num_heads, *_ = attention.sizes(config.model)
        sizes = {"num_heads": num_heads, "expand_v": attention.expand_v}
        spec.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, params=sizes)
        return spec
    core_attention = ModuleSpec(module=SoftmaxCoreAttention, params=_softmax_fields(config, attention, stage))
    spec.submodules.self_attention.submodules.core_attention = core_attention
    if attention.forget_gate:
        spec.submodules.self_attention.module = GatedSelfAttention
    return spec


def _names_of_weights(layer: torch.nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in layer.named_parameters())


def _stick_breaking_spec(
    spec: ModuleSpec, attention: StickBreakingAttentionConfig, parallel: ParallelConfig
) -> ModuleSpec:
    fields = {name: value for name, value in dataclasses.asdict(attention).items() if name not in ("kind", "scale")}
    return with_stickbreaking(spec, **fields, cp_layout=parallel.layout, packing=parallel.packing)


def _softmax_fields(config: TrainingConfig, attention: SoftmaxAttentionConfig, stage: StageConfig) -> dict:
    """Return the options of a SoftmaxCoreAttention in a stage."""
    names = ("position", "window", "stable_mask_gamma", "rotary_base", "global_interval", "forget_gate")
    fields = {name: getattr(attention, name) for name in names}
    stages = [each.name for each in config.stages]
    fields |= {"cp_layout": config.parallel.layout, "packing": config.parallel.packing}
    if attention.dropped_in is not None and stages.index(stage.name) >= stages.index(attention.dropped_in):
        fields["position"] = "none"
    return fields


def _transformer_config(config: TrainingConfig, model: str, stage: StageConfig, fused: bool) -> TransformerConfig:
    sizes = config.model
    return TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_heads,
        num_query_groups=sizes.num_kv_heads,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=sizes.ffn_hidden_size,
        init_method_std=sizes.init_std,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        softmax_scale=config.scale_of_logits(model),
        use_cpu_initialization=True,  # the same weights on every device
        bf16=sizes.precision == "bf16",
        params_dtype=torch.bfloat16 if sizes.precision == "bf16" else torch.float32,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **_recompute_fields(sizes),
        **_parallel_fields(config.parallel, stage),
        **_moe_fields(sizes),
    )


def _parallel_fields(parallel: ParallelConfig, stage: StageConfig) -> dict:
    alone = stage.context_parallel_size == 1
    return {
        "tensor_model_parallel_size": parallel.tensor_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "context_parallel_size": stage.context_parallel_size,
        "cp_comm_type": None if alone or parallel.comm == "auto" else parallel.comm,
        "hierarchical_context_parallel_sizes": None if alone else [*stage.hierarchical_context_parallel_sizes] or None,
        "expert_model_parallel_size": parallel.expert_parallel_size,
        "expert_tensor_parallel_size": 1,
    }


def _recompute_fields(sizes: ModelConfig) -> dict:
    if sizes.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if sizes.recompute == "full":
        method = {"recompute_granularity": "full", "recompute_method": "uniform"}
        return method | {"recompute_num_layers": sizes.recompute_layers}
    return {}


def _moe_fields(sizes: ModelConfig) -> dict:
    moe = sizes.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": sizes.ffn_hidden_size,
        "moe_router_topk": moe.top_k,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": moe.dispatcher,
        "moe_router_load_balancing_type": moe.load_balancing,
        "moe_aux_loss_coeff": moe.aux_loss_coefficient,
        "moe_z_loss_coeff": moe.z_loss_coefficient or None,
        "moe_grouped_gemm": moe.grouped_gemm,
    }


def _with_weights_by_index(experts: type) -> type:
    """Return an experts module. The initial weights of an expert depend only on its index over all ranks.

    On a CPU, Megatron-Core's own module draws the same weights for the first expert of every rank. It also leaves the
    generator in a state that depends on the rank's number of experts.
    """

    class SeededExperts(experts):
        def __init__(self, num_local_experts: int, config: TransformerConfig, *args, pg_collection, **kwargs) -> None:
            seed = int(torch.randint(2**62, (), device="cpu"))
            with torch.random.fork_rng(devices=()):
                super().__init__(num_local_experts, config, *args, pg_collection=pg_collection, **kwargs)
                first = pg_collection.ep.rank() * num_local_experts
                for index, expert in enumerate(self.local_experts):
                    torch.manual_seed(seed + first + index)
                    with torch.no_grad():
                        config.init_method(expert.linear_fc1.weight)
                        config.output_layer_init_method(expert.linear_fc2.weight)

    return SeededExperts
