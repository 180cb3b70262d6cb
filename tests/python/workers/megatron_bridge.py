"""Take a Llama through Megatron-Bridge in one process: in, a few steps, out. Write the findings as JSON.

`megatron_bridge.py OUT.json [LENGTH]`. With a length, one row of so many tokens is trained in bf16 on a GPU with the
layers of Transformer Engine. Without one, it runs on the CPU in fp32. Megatron-Bridge cannot be imported without
Transformer Engine, so that its own modules then get a stand-in with empty classes. Megatron-Core does not see it, and
uses its local layers.
"""

import builtins
import contextlib
import json
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
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


@contextlib.contextmanager
def stand_in_for_transformer_engine() -> Iterator[None]:
    """Let Megatron-Bridge import Transformer Engine: empty classes."""
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
        yield


def import_bridge(device: str) -> type:
    """Return Megatron-Bridge's AutoBridge. On the CPU it is imported with stand-ins for Transformer Engine."""
    with stand_in_for_transformer_engine() if device == "cpu" else contextlib.nullcontext():
        from megatron.bridge import AutoBridge
    return AutoBridge


@dataclass
class Run:
    """How the Llama is trained."""

    device: str
    dtype: torch.dtype
    options: dict  # of the provider
    sizes: dict  # of the Llama
    rows: int
    length: int  # of a row
    repeated: int  # tokens, which a row repeats
    learning_rate: float

    @classmethod
    def on_cpu(cls) -> "Run":
        """Return a run in fp32 with Megatron-Core's local layers."""
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "initializer_range": 0.2}
        return cls("cpu", torch.float32, LOCAL, sizes, rows=2, length=48, repeated=48, learning_rate=0.1)

    @classmethod
    def on_gpu(cls, length: int) -> "Run":
        """Return a run in bf16 with Transformer Engine, on one row of `length` tokens."""
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "initializer_range": 0.1}
        options = {"bf16": True, "params_dtype": torch.bfloat16, "seq_length": length}
        options["gradient_accumulation_fusion"] = False  # needs Apex
        return cls("cuda", torch.bfloat16, options, sizes, rows=1, length=length, repeated=100, learning_rate=0.5)

    def draw_ids(self) -> torch.Tensor:
        """Return random tokens, (rows, length)."""
        ids = torch.randint(VOCABULARY, (self.rows, self.repeated))
        return ids.repeat(1, self.length // self.repeated + 1)[:, : self.length].to(self.device)


def save_llama(folder: Path, sizes: dict) -> None:
    """Save a small Llama with grouped heads, and a tokenizer, which Megatron-Bridge copies."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = models.WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)


def make_model(bridge, run: Run):
    """Return a Megatron model of the Llama's sizes and weights with stick-breaking attention, as a user makes it."""
    provider = bridge.to_megatron_provider()
    provider.transformer_layer_spec = stickbreaking_block_spec
    provider.position_embedding_type = "none"
    provider.attention_dropout = 0.0
    for name, value in run.options.items():
        setattr(provider, name, value)
    provider.finalize()
    on_cpu = run.device == "cpu"
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=on_cpu)
    return model


def error(logits: torch.Tensor, folder: Path, run: Run, ids: torch.Tensor) -> float:
    """Return how far logits are from those of a folder's weights, relative to the latter.

    On the CPU, these are computed with the float64 reference, and the largest difference counts. On a GPU, where that
    would not fit into memory, they are those of this library's Llama in fp32, whose attention has other kernels than
    that of the Megatron model. There the norm counts, because bf16 rounds single logits by much more than the others.
    """
    model = checkpoints.load(folder, swap_attention=True).to(run.device)
    if run.device == "cpu":
        with mock.patch.object(attention, "stickbreaking_attention", reference.stickbreaking_attention):
            exact = model.double()(ids).logits
    else:
        exact = model.float()(ids).logits
    order = math.inf if run.device == "cpu" else 2
    difference, exact = logits.double() - exact.double(), exact.double()
    return (difference.flatten().norm(order) / exact.flatten().norm(order)).item()


def main(out: Path, run: Run) -> None:
    """Take the Llama through, and write the findings."""
    source, target = out.with_name("llama"), out.with_name("exported")
    save_llama(source, run.sizes)
    bridge = import_bridge(run.device).from_hf_pretrained(str(source), torch_dtype=run.dtype)
    model, ids = make_model(bridge, run), run.draw_ids()
    with torch.no_grad():
        findings = {"before": error(model(ids, None, None), source, run, ids)}
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=run.learning_rate), []
    for _ in range(STEPS):
        logits = model(ids, None, None)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    bridge.save_hf_pretrained([model], str(target), show_progress=False)
    with torch.no_grad():
        findings["after"] = error(model(ids, None, None), target, run, ids)
    module = model.module if run.dtype == torch.bfloat16 else model
    attention_layer = module.decoder.layers[0].self_attention
    findings |= {"losses": losses, "layer": type(attention_layer.core_attention).__name__}
    findings["linear"] = type(attention_layer.linear_qkv).__name__
    out.write_text(json.dumps(findings))


if __name__ == "__main__":
    length = int(sys.argv[2]) if len(sys.argv) > 2 else None
    if length is None:
        answer_for_gpu()
        answer_for_streams()
    backend = "gloo" if length is None else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if length is not None:
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    main(Path(sys.argv[1]), Run.on_cpu() if length is None else Run.on_gpu(length))
