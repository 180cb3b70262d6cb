"""Train one step on one row in several forms that need less memory, and write what was computed as JSON.

    long_sequences.py OUT.json [cpu|cuda] [LENGTH]

The forms are those of FORMS. On CPUs the model is small and in fp32. On a GPU it is in bf16.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_sb.training.config import load_config
from megatron_sb.training.data import PackedBatch
from megatron_sb.training.engine.engine import Engine

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import megatron_cpu
from support.launch import end_worker

TINY = Path(__file__).parents[3] / "configs" / "tiny_context_extension.yaml"
VOCABULARY = 50_000
SIZES = {
    "model.num_layers": 4,
    "model.hidden_size": 64,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.ffn_hidden_size": 256,
    "compare": ["stick_breaking"],
    "data": {"kind": "indexed", "paths": ["unused"], "vocab_size": VOCABULARY, "end_of_document": 0},
}
FULL = {"model.recompute": "full"}
FORMS = {
    "as usual": {},
    "in parts": {"model.tokens_at_once": 100},
    "recomputed": FULL,
    "recomputed, in parts": FULL | {"model.tokens_at_once": 100},
    "pairs of layers": FULL | {"model.tokens_at_once": 64, "model.recompute_layers": 2},
    "offloaded": FULL | {"model.tokens_at_once": 100, "model.offloaded_inputs": 3},
}


def config_of(form: dict, on_gpu: bool):
    """Return the configuration of a form."""
    stage = {"name": "a", "context_length": 1024, "steps": 1, "rows_per_step": 1, "learning_rate": 1e-2}
    gpu = {"model.precision": "bf16", "parallel.device": "cuda", "model.hidden_size": 512, "model.num_heads": 8}
    gpu |= {"model.num_kv_heads": 8, "model.ffn_hidden_size": 2048, "model.init_std": 0.05}
    fields = SIZES | {"parallel.ranks": dist.get_world_size(), "stages": [stage]} | (gpu if on_gpu else {}) | form
    if on_gpu and "model.tokens_at_once" in form:
        fields["model.tokens_at_once"] = 32 * form["model.tokens_at_once"]
    return load_config(TINY, [f"{name}={json.dumps(value)}" for name, value in fields.items()])


def largest_products(model: torch.nn.Module) -> dict[str, int]:
    """Watch the rows of the first product of an MLP, and of logits. The growing results are the largest so far."""
    largest = {"mlp": 0, "logits": 0}

    def watch(name: str, module: torch.nn.Module) -> None:
        product = module._forward_impl

        def watched(*args, **arguments):
            result = product(*args, **arguments)
            largest[name] = max(largest[name], len(result))
            return result

        module._forward_impl = watched

    watch("mlp", model.decoder.layers[0].mlp.linear_fc1)
    watch("logits", model.output_layer)
    return largest


def train(form: dict, length: int, device: torch.device) -> dict:
    """Return what one step computes: loss, norm of the gradient, sums of the new weights, losses of two windows."""
    on_gpu = device.type == "cuda"
    config = config_of(form, on_gpu)
    engine = Engine(config, "stick_breaking", config.stages[0], VOCABULARY, device)
    drawn = np.random.default_rng(0).integers(VOCABULARY, size=length + 1)
    batch = PackedBatch(
        drawn[:-1], drawn[1:], np.arange(length) % 3 > 0, np.array([0, length // 3, length], dtype=np.int32)
    )
    largest = largest_products(engine._model)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    share, norm = engine.train_step([batch], int(batch.counted.sum()), 1e-2)
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    windows = engine.window_losses(batch, 2)
    weights = [parameter.detach().double().abs().sum().item() for parameter in engine._model.parameters()]
    engine.close()
    result = {"loss": share.item(), "norm": float(norm), "windows": windows.tolist(), "weights": weights}
    return result | {"largest": largest, "peak": peak}


def main(out: str, kind: str = "cpu", length: str = "250") -> None:
    """Train every form and write {form: results}."""
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        megatron_cpu.answer_for_gpu()
        megatron_cpu.answer_for_streams()
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    forms = {name: form for name, form in FORMS.items() if kind == "cuda" or "model.offloaded_inputs" not in form}
    end_worker(out, {name: train(form, int(length), device) for name, form in forms.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
