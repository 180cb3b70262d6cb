"""Build models whose layers are not all attention, and write the findings as JSON.

Runs on two ranks, on CPUs: `megatron_layer_kinds.py OUT.json`.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_sb.megatron import StickBreakingOptions, launch, with_stickbreaking

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.launch import end_worker
from support.megatron_cpu import answer_for_gpu, small_config

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


def heterogeneous_model(convert: bool = True) -> GPTModel:
    """Build a heterogeneous model on one rank, of Megatron's own spec or of the converted one."""
    config = heterogeneous_config()
    spec = get_gpt_heterogeneous_layer_spec(config)
    spec = with_stickbreaking(spec) if convert else spec
    torch.manual_seed(3)
    return GPTModel(config, spec, VOCAB_SIZE, 32, position_embedding_type="none")


def cores(model: torch.nn.Module) -> list[str]:
    """Return the class of the core attention of every layer, or of its mixer if it has none."""
    found = []
    for layer in model.decoder.layers:
        mixer = layer.self_attention if isinstance(layer, TransformerLayer) else layer.mixer
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
    converted = heterogeneous_model()
    under_launcher = launched(StickBreakingOptions(), lambda: heterogeneous_model(convert=False))
    return {
        "stock": cores(heterogeneous_model(convert=False)),
        "converted": cores(converted),
        "launched": cores(under_launcher),
        "steps": [step(model) for model in (converted, under_launcher, heterogeneous_model(convert=False))],
    }


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
    findings = {"heterogeneous": heterogeneous()}
    end_worker(out, findings)


if __name__ == "__main__":
    main(*sys.argv[1:])
