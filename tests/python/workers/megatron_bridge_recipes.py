"""Build small models of Megatron-Bridge's recipes for pretraining Llama and Qwen, with stick-breaking layers, on a CPU.

`megatron_bridge_recipes.py OUT.json`. A recipe would download the configuration of its model. It gets a small one of
the same family in its place, and keeps its other settings, except those that need GPUs, several ranks or Transformer
Engine. Writes the class of the core attention of each recipe's model, or the message of the error.
"""

import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import megatron_cpu
from workers import megatron_bridge

from megatron_sb.megatron.spec import stickbreaking_block_spec

SIZES = {
    "vocab_size": megatron_bridge.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Parts of names of models, and the kind of configuration in transformers: the first match counts.
FAMILIES = {"llama": "llama", "qwen3-next": None, "-a3b": "qwen3_moe", "-a22b": "qwen3_moe", "qwen3": "qwen3"}
ONE_RANK = {
    **dict.fromkeys(
        (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        ),
        1,
    ),
    "sequence_parallel": False,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_dtype": None,
    "pipeline_model_parallel_layout": None,
    "moe_token_dispatcher_type": "alltoall",
    "moe_permute_fusion": False,  # this and the next one need Transformer Engine
    "moe_router_fusion": False,
    "cross_entropy_loss_fusion": False,
    "params_dtype": torch.float32,
    "bf16": False,
}


def recipes() -> Iterator[tuple[str, Callable]]:
    """Yield the recipes for pretraining by name."""
    families = ("megatron.bridge.recipes.llama.h100", "megatron.bridge.recipes.qwen.h100")
    for package in map(importlib.import_module, families):
        for found in pkgutil.iter_modules(package.__path__):
            yield from _recipes_of(importlib.import_module(f"{package.__name__}.{found.name}"))


def _recipes_of(module: ModuleType) -> Iterator[tuple[str, Callable]]:
    for name, recipe in vars(module).items():
        is_own = getattr(recipe, "__module__", None) == module.__name__ and not name.startswith("_")
        if is_own and "_pretrain_" in name and name.endswith("_config"):
            yield name, recipe


def save_config(name: str, folder: Path) -> str:
    """Save a small configuration of the family of a model, and return its folder."""
    kind = next((kind for part, kind in FAMILIES.items() if part in name.lower()), "qwen2")
    if kind is None:
        raise ValueError(f"{name} is not a Llama or a plain Qwen.")
    config = AutoConfig.for_model(kind, **SIZES, **(EXPERTS if kind == "qwen3_moe" else {}))
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    config.save_pretrained(folder / kind)
    return str(folder / kind)


def attention_of(recipe: Callable, bridge: type, folder: Path) -> str:
    """Return the class of the core attention of a recipe's model, after a forward."""
    original = bridge.from_hf_pretrained
    with mock.patch.object(bridge, "from_hf_pretrained", lambda name, **_: original(save_config(name, folder))):
        provider = recipe().model
    provider.transformer_layer_spec = stickbreaking_block_spec
    provider.position_embedding_type, provider.attention_dropout = "none", 0.0
    for name, value in {**megatron_bridge.LOCAL, **ONE_RANK}.items():
        setattr(provider, name, value)
    provider.num_layers = SIZES["num_hidden_layers"]
    provider.finalize()
    with megatron_cpu.TensorsOnTheCpu():
        (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    model(torch.randint(megatron_bridge.VOCABULARY, (1, 16)), None, None)
    return type(model.decoder.layers[0].self_attention.core_attention).__name__


def main(out: Path) -> None:
    """Build the model of every recipe, and write what it is."""
    with megatron_bridge.stand_in_for_transformer_engine():
        from megatron.bridge import AutoBridge

        found = dict(recipes())
    results = {}
    for name, recipe in found.items():
        try:
            results[name] = attention_of(recipe, AutoBridge, out.parent)
        except ValueError as error:
            results[name] = str(error)
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    megatron_cpu.answer_for_gpu()
    megatron_cpu.answer_for_streams()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    main(Path(sys.argv[1]))
