"""Build models whose layers are not all attention, and write the findings as JSON.

Runs on two ranks, on CPUs: `megatron_layer_kinds.py OUT.json`.
"""

import argparse
import contextlib
import functools
import json
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer
from megatron_mixers import (
    MODEL_ARGUMENTS,
    HybridStackSubmodules,
    MeanMixer,
    hybrid_stack_spec,
    latent_layer_spec,
    make_hybrid_model,
)

from megatron_sb.megatron import (
    StickBreakingOptions,
    add_arguments,
    launch,
    stickbreaking_block_spec,
    with_stickbreaking,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.launch import end_worker
from support.megatron_cpu import answer_for_gpu, config_of_virtual_stages, message, small_config

VOCAB_SIZE = 32
# An attention, a no-op, an attention, a linear layer.
ATTENTIONS = ({"num_query_groups": 2}, {"no_op": True}, {"num_query_groups": 4}, {"replace_with_linear": True})


def heterogeneous_config() -> HeterogeneousTransformerConfig:
    """Return the config of a model of the layers ATTENTIONS."""
    blocks = [
        {"attention": {"num_query_groups": None, **attention}, "mlp": {"ffn_hidden_size": 64}}
        for attention in ATTENTIONS
    ]
    return small_config(
        HeterogeneousTransformerConfig,
        num_layers=len(blocks),
        heterogeneous_layers_config_encoded_json=json.dumps({"block_configs": blocks}),
    )


def make_model(config, spec, **stage) -> GPTModel:
    """Build a GPTModel with a context of 32 tokens. stage: arguments of a pipeline stage."""
    torch.manual_seed(3)
    return GPTModel(config, spec, VOCAB_SIZE, 32, position_embedding_type="none", **stage)


def cores(model: torch.nn.Module) -> list[str]:
    """Return the class of the core attention of every layer, or of its mixer or MLP if it has none."""
    found = []
    for layer in model.decoder.layers:
        mixer = layer.self_attention if isinstance(layer, TransformerLayer) else layer.mixer
        mixer = layer.mlp if isinstance(layer, (MLPLayer, MoETransformerLayer)) else mixer
        found.append(type(getattr(mixer, "core_attention", mixer)).__name__)
    return found


def step(model: torch.nn.Module) -> dict:
    """Return the loss of 32 tokens, and the names of the parameters without a finite gradient that is not 0."""
    positions = torch.arange(32)[None]
    tokens = positions * 7 % VOCAB_SIZE
    later = positions[:, None, :, None] < positions[:, None, None, :]
    loss = model(tokens, positions, later, labels=tokens.roll(-1, 1)).mean()
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    without = [name for name, grad in grads.items() if grad is None or not grad.isfinite().all() or not grad.any()]
    return {"loss": loss.item(), "without gradient": without}


def launched(options: StickBreakingOptions, build):
    """Call `build` with the patch of the launcher."""
    unpatched = TransformerLayer.__init__
    launch.replace_core_attention(options)
    try:
        return build()
    finally:
        TransformerLayer.__init__ = unpatched


def heterogeneous() -> dict:
    """Return findings about a model in which half of the layers have no attention."""
    config = heterogeneous_config()
    stock = get_gpt_heterogeneous_layer_spec(config)

    def stock_model() -> GPTModel:
        return make_model(config, stock)

    converted = make_model(config, with_stickbreaking(stock))
    under_launcher = launched(StickBreakingOptions(), stock_model)
    mixed = make_model(config, with_stickbreaking(stock, config=config, layers=(0, 1)))
    options = StickBreakingOptions(layers=(0, 1))
    found = {
        "stock": cores(stock_model()),
        "converted": cores(converted),
        "launched": cores(under_launcher),
        "mixed": cores(mixed),
        "steps": [step(model) for model in (converted, under_launcher, stock_model())],
        "step of the mixed model": step(mixed),
        "refused": {
            "without config": message(lambda: make_model(config, with_stickbreaking(stock, layers=(0, 1)))),
            "an entry for each layer": message(
                lambda: make_model(config, with_stickbreaking(stock, config=config, layers=(0, 0, 1, 0)))
            ),
            "learned positions": message(lambda: GPTModel(config, with_stickbreaking(stock), VOCAB_SIZE, 32)),
        },
    }
    encoded = config.heterogeneous_layers_config_encoded_json
    with script_with(heterogeneous_layers_config_encoded_json=encoded):
        found["mixed, launched"] = cores(launched(options, stock_model))
    return found


@contextlib.contextmanager
def script_with(**arguments):
    """Act as a training script of Megatron's with these parsed arguments."""
    name = "megatron.training.global_vars"
    before = sys.modules.get(name)
    sys.modules[name] = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(**arguments))
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def latent_config(**changes) -> MLATransformerConfig:
    """Return the config of a model with multi-latent attention."""
    sizes = {"kv_channels": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    sizes |= {"num_query_groups": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "rope_type": "rope"}
    return small_config(MLATransformerConfig, **{**sizes, **changes})


def latent_attention() -> dict:
    """Return findings about a model with a layer of Megatron's attention and one of multi-latent attention.

    Megatron's own core of latent attention needs Transformer Engine: LatentCoreAttention stands in for it.
    """
    config = latent_config()
    stock = TransformerBlockSubmodules([get_gpt_layer_local_spec(), latent_layer_spec()], layer_norm=WrappedTorchNorm)

    def convert(**options) -> GPTModel:
        return make_model(config, with_stickbreaking(stock, **options))

    def launch_stock(**options) -> GPTModel:
        return launched(StickBreakingOptions(**options), lambda: make_model(config, stock))

    found = {
        name: {str(layers): latent_findings(build(layers=layers)) for layers in (None, (1, 0), (0, 1))}
        for name, build in (("converted", convert), ("launched", launch_stock))
    }
    # Megatron-LM's own layers of a model in which every layer has multi-latent attention, and the function for --spec.
    latent = latent_config(normalization="RMSNorm", v_head_dim=24)
    found["function"] = {"None": latent_findings(make_model(latent, stickbreaking_block_spec(latent)))}
    return found


def latent_findings(model: GPTModel) -> dict:
    """Return the layers, and a step."""
    rotaries = [type(getattr(layer.self_attention, "rotary_pos_emb", None)).__name__ for layer in model.decoder.layers]
    return {"cores": cores(model), "rotaries": rotaries, "step": step(model)}


def cross_attention() -> dict[str, str]:
    """Return what the launcher says about a model whose second layer also has cross-attention."""
    crossed = get_gpt_layer_local_spec()
    crossed.submodules.cross_attention = ModuleSpec(
        CrossAttention,
        params={"attn_mask_type": AttnMaskType.padding},
        submodules=CrossAttentionSubmodules(
            linear_q=ColumnParallelLinear,
            linear_kv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )
    stock = TransformerBlockSubmodules([get_gpt_layer_local_spec(), crossed], layer_norm=WrappedTorchNorm)
    config = small_config(num_query_groups=4)  # Megatron's cross-attention has no groups
    return {
        str(layers): message(
            lambda layers=layers: launched(StickBreakingOptions(layers=layers), lambda: make_model(config, stock))
        )
        for layers in (None, (0, 1), (1, 0))
    }


def linear_attention() -> list:
    """Return the layers of a model with linear attention, as every rank of a pipeline of two stages builds them.

    Gated delta nets need a GPU: MeanMixer stands in for them.
    """
    initialize(pipeline_ranks=2)
    config = small_config(
        num_layers=6,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=3,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )
    linear = get_gpt_layer_local_spec()
    linear.submodules.self_attention = ModuleSpec(MeanMixer)
    stage = TransformerBlockSubmodules([linear, linear, get_gpt_layer_local_spec()], layer_norm=WrappedTorchNorm)
    ends = {"pre_process": dist.get_rank() == 0, "post_process": dist.get_rank() == 1}
    options = {"layers": (0, 1)}
    found = [
        cores(make_model(config, with_stickbreaking(stage, **options), **ends)),
        cores(launched(StickBreakingOptions(**options), lambda: make_model(config, stage, **ends))),
    ]
    stages = [None] * dist.get_world_size()
    dist.all_gather_object(stages, found)
    initialize()
    return stages


def block_specs() -> dict:
    """Return findings about stickbreaking_block_spec: a mixture of experts in two stages of two virtual stages."""
    config = config_of_virtual_stages(moe_layer_freq=[0, 1, 1, 0], **EXPERTS)

    def layers(make_spec) -> list[list]:
        """Return number, core attention and MLP of every layer of this rank."""
        found = []
        for stage in range(2):
            first, last = ((dist.get_rank(), stage) == end for end in ((0, 0), (1, 1)))
            spec = make_spec(config, vp_stage=stage)
            model = make_model(config, spec, pre_process=first, post_process=last, vp_stage=stage)
            found += [
                [layer.layer_number, type(layer.self_attention.core_attention).__name__, type(layer.mlp).__name__]
                for layer in model.decoder.layers
            ]
        return found

    flags = add_arguments(argparse.ArgumentParser()).parse_args(["--sb-layers", "[0,0,0,1]", "--sb-head-norm"])
    found = {"options": layers(functools.partial(stickbreaking_block_spec, layers=(1, 0, 0, 1)))}
    with script_with(**vars(flags)):
        found["flags"] = layers(stickbreaking_block_spec)
        found["options before flags"] = layers(functools.partial(stickbreaking_block_spec, layers=(1, 1, 1, 0)))
        core = stickbreaking_block_spec(config, vp_stage=0).layer_specs[0].submodules.self_attention.submodules
    stages = [None] * dist.get_world_size()
    dist.all_gather_object(stages, found)
    initialize()
    mixed = make_model(
        heterogeneous_config(), stickbreaking_block_spec(heterogeneous_config(), vp_stage=None, layers=(0, 1))
    )
    return {
        "layers": {name: sorted(layer for stage in stages for layer in stage[name]) for name in found},
        "head norm": core.core_attention.params["options"].head_norm,
        "heterogeneous": cores(mixed),
        "step": step(mixed),
        "refused": message(
            lambda: stickbreaking_block_spec(SimpleNamespace(transformer=small_config(mtp_num_layers=1)))
        ),
        "accepted": message(lambda: stickbreaking_block_spec(small_config(mtp_num_layers=1))),
    }


# Each token has all experts, so that every expert gets a gradient.
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
    "add_bias_linear": False,
}
# Every kind of layer that this release has, in two pipeline stages. Only 0.19 has gated delta nets and separators.
HAS_GATED_DELTA_NETS = hasattr(HybridStackSubmodules, "gdn_layer")
STAGES = ("M*-", "G*E" if HAS_GATED_DELTA_NETS else "M*E")
PATTERN = "".join(STAGES)


def hybrid_config(**changes) -> TransformerConfig:
    """Return the config of a hybrid model of the layers PATTERN."""
    return small_config(num_layers=len(PATTERN), **EXPERTS, **changes)


def hybrid() -> dict:
    """Return findings about a hybrid model. MeanMixer stands in for Mamba and gated delta nets."""
    config = hybrid_config()

    def stock_model():
        return make_hybrid_model(config, hybrid_stack_spec, PATTERN)

    def convert(**options):
        return make_hybrid_model(config, with_stickbreaking(hybrid_stack_spec, **options), PATTERN)

    before = repr(hybrid_stack_spec)
    models = {
        "stock": stock_model(),
        "converted": convert(),
        "launched": launched(StickBreakingOptions(), stock_model),
        "mixed": convert(layers=(0, 1), hybrid_layer_pattern=PATTERN),
    }
    with script_with(**{MODEL_ARGUMENTS[1]: PATTERN}):
        models["mixed, by the script"] = convert(layers=(0, 1))
        models["mixed, launched"] = launched(StickBreakingOptions(layers=(0, 1)), stock_model)
    return {
        "spec is unchanged": repr(hybrid_stack_spec) == before,
        "submodules alone": repr(with_stickbreaking(hybrid_stack_spec.submodules))
        == repr(with_stickbreaking(hybrid_stack_spec).submodules),
        "cores": {name: cores(model) for name, model in models.items()},
        "steps": {name: step(model) for name, model in models.items()},
        "refused": {
            "without pattern": message(lambda: convert(layers=(0, 1))),
            "an entry for each layer": message(lambda: convert(layers=(0,) * 6, hybrid_layer_pattern=PATTERN)),
        },
    }


def hybrid_latent() -> dict | None:
    """Return findings about a hybrid model with multi-latent attention, which only 0.19 has."""
    if not hasattr(HybridStackSubmodules, "mla_layer"):
        return None
    config = latent_config()

    def convert(**options):
        return make_hybrid_model(config, with_stickbreaking(hybrid_stack_spec, **options), "M+")

    def stock_model():
        return make_hybrid_model(config, hybrid_stack_spec, "M+")

    with script_with(hybrid_layer_pattern="M+"):
        built = {
            "kept": convert(layers=(0,), hybrid_layer_pattern="M+"),
            "selected": convert(layers=(1,), hybrid_layer_pattern="M+"),
            "all layers": convert(),
            "launched": launched(StickBreakingOptions(), stock_model),
        }
    found = {"cores": {name: cores(model) for name, model in built.items()}, "step": step(built["all layers"])}
    config = latent_config(mla_down_proj_fusion=True)
    found["refused"] = {
        "converted": message(convert),
        "launched": message(lambda: launched(StickBreakingOptions(), stock_model)),
    }
    return found


def hybrid_pipeline() -> list:
    """Return the layers of a hybrid model as every rank of a pipeline of two stages builds them."""
    initialize(pipeline_ranks=2)
    config = hybrid_config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    ends = {"pre_process": dist.get_rank() == 0, "post_process": dist.get_rank() == 1}
    pattern = ("|" if HAS_GATED_DELTA_NETS else "").join(STAGES)
    spec = with_stickbreaking(hybrid_stack_spec, layers=(0, 1), hybrid_layer_pattern=pattern)
    stages = [None] * dist.get_world_size()
    dist.all_gather_object(stages, cores(make_hybrid_model(config, spec, pattern, **ends)))
    initialize()
    return stages


def initialize(pipeline_ranks: int = 1) -> None:
    """Initialise Megatron's groups."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pipeline_ranks, create_gloo_process_groups=False
    )


def main(out: str) -> None:
    """Run all checks and write their findings."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    initialize()
    answer_for_gpu()
    findings = {
        "heterogeneous": heterogeneous(),
        "latent attention": latent_attention(),
        "cross-attention": cross_attention(),
        "hybrid": hybrid(),
        "hybrid, latent": hybrid_latent(),
        "hybrid, pipeline": hybrid_pipeline(),
        "block specs": block_specs(),
        "linear attention": linear_attention(),
    }
    end_worker(out, findings)


if __name__ == "__main__":
    main(*sys.argv[1:])
