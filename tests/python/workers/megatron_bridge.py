"""Take a Llama through Megatron-Bridge on one CPU process: in, a few steps, out. Write the findings as JSON.

`megatron_bridge.py OUT.json`. Megatron-Bridge cannot be imported without Transformer Engine, so that its own modules
get a stand-in with empty classes here. Megatron-Core does not see it, and uses its local layers.
"""

import builtins
import json
import sys
import types
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_sb import checkpoints, reference
from megatron_sb.huggingface import attention
from megatron_sb.megatron.spec import stickbreaking_block_spec

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.megatron_cpu import answer_for_gpu, answer_for_streams

VOCABULARY, STEPS = 128, 4
# What Megatron-Core needs without Transformer Engine and Apex.
LOCAL = {
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    **dict.fromkeys(
        (
            "gradient_accumulation_fusion",
            "apply_rope_fusion",
            "persist_layer_norm",
            "bias_activation_fusion",
            "bias_dropout_fusion",
        ),
        False,
    ),
}


class EmptyClass(type):
    """A class that has an empty class for every attribute."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return EmptyClass(name, (torch.nn.Module,), {})


class EmptyModule(types.ModuleType):
    """A module that has an empty class for every name, the same one each time."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, EmptyClass(name, (torch.nn.Module,), {}))
        return self.__dict__[name]


def import_bridge() -> type:
    """Return Megatron-Bridge's AutoBridge, imported with stand-ins for Transformer Engine."""
    root = EmptyModule("transformer_engine")
    root.pytorch = EmptyModule("transformer_engine.pytorch")
    stand_ins = {module.__name__: module for module in (root, root.pytorch)}
    real = builtins.__import__

    def of_bridge(name, globals=None, locals=None, fromlist=(), level=0):
        importer = str((globals or {}).get("__name__", ""))
        if level or not importer.startswith("megatron.bridge") or name.split(".")[0] != "transformer_engine":
            return real(name, globals, locals, fromlist, level)
        return stand_ins.setdefault(name, EmptyModule(name)) if fromlist else root

    with mock.patch.object(builtins, "__import__", of_bridge):
        from megatron.bridge import AutoBridge
    return AutoBridge


def save_llama(folder: Path) -> None:
    """Save a small Llama with grouped heads, and a tokenizer, which Megatron-Bridge copies."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.2, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = models.WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)


def make_model(bridge):
    """Return a Megatron model of the Llama's sizes and weights with stick-breaking attention, as a user makes it."""
    provider = bridge.to_megatron_provider()
    provider.transformer_layer_spec = stickbreaking_block_spec
    provider.position_embedding_type = "none"
    provider.attention_dropout = 0.0
    for name, value in LOCAL.items():
        setattr(provider, name, value)
    provider.finalize()
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    return model


def error(logits: torch.Tensor, folder: Path, ids: torch.Tensor) -> float:
    """Return how far logits are from those of a folder's weights with the float64 reference, relative to the latter."""
    model = checkpoints.load(folder, swap_attention=True).double()
    with mock.patch.object(attention, "stickbreaking_attention", reference.stickbreaking_attention), torch.no_grad():
        exact = model(ids).logits
    return ((logits.double() - exact).abs().max() / exact.abs().max()).item()


def main(out: Path) -> None:
    """Take the Llama through, and write the findings."""
    source, target = out.with_name("llama"), out.with_name("exported")
    save_llama(source)
    bridge = import_bridge().from_hf_pretrained(str(source), torch_dtype=torch.float32)
    model, ids = make_model(bridge), torch.randint(VOCABULARY, (2, 48))
    with torch.no_grad():
        findings = {"before": error(model(ids, None, None), source, ids)}
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        logits = model(ids, None, None)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    bridge.save_hf_pretrained([model], str(target), show_progress=False)
    with torch.no_grad():
        findings["after"] = error(model(ids, None, None), target, ids)
    findings |= {"losses": losses, "layer": type(model.decoder.layers[0].self_attention.core_attention).__name__}
    out.write_text(json.dumps(findings))


if __name__ == "__main__":
    answer_for_gpu()
    answer_for_streams()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    main(Path(sys.argv[1]))
