"""Train students of a softmax model with each loss, and write losses, errors and what changed as JSON.

    distillation.py OUT.json [cpu|megatron]

With megatron, the CPU uses Megatron-Core's own gradients, optimizer and checkpoints, as GPUs do.
"""

import json
import sys
import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import log_softmax

from megatron_sb.training.config import load_config
from megatron_sb.training.data import PackedBatch
from megatron_sb.training.engine import engine as engine_module
from megatron_sb.training.engine.backends import MegatronBackend
from megatron_sb.training.engine.distillation import recorded
from megatron_sb.training.engine.engine import Engine

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import megatron_cpu
from support.launch import end_worker

TINY = Path(__file__).parents[3] / "configs" / "tiny_context_extension.yaml"
SIZES = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.ffn_hidden_size": 48,
    "model.init_std": 0.1,
    "model.tie_word_embeddings": True,
    "attention.stick_breaking.reach": None,
    "data.paths": [sysconfig.get_paths()["stdlib"] + "/json"],
    "parallel.ranks": 1,
    "optimizer.weight_decay": 0.5,
}
STAGE = {"name": "a", "context_length": 64, "steps": 9, "rows_per_step": 4, "learning_rate": 1e-2}


def engine_of(model: str, loss: str, teacher: Path | None, start: Path | None = None) -> Engine:
    """Return an engine as a job makes it.

    Args:
        model: entry of attention.
        loss: of the stage.
        teacher: checkpoint of the teacher, which the run starts from. None: new weights.
        start: checkpoint to load. Default None: `teacher`.
    """
    fields = SIZES | {"compare": [model], "stages": [STAGE | {"loss": loss}]}
    if teacher is not None:
        fields |= {"initial_checkpoint": str(teacher), "initial_attention": "softmax"}
    if loss != "tokens":
        fields["teacher"] = "softmax_rope"
    config = load_config(TINY, [f"{name}={json.dumps(value)}" for name, value in fields.items()])
    engine = Engine(config, model, config.stages[0], config.vocab_size, torch.device("cpu"))
    if teacher is not None:
        engine.load(start or teacher)
    return engine


def batches() -> list[PackedBatch]:
    """Return two micro-batches of two documents. Half of the labels count in one, fewer in the other."""
    tokens = np.random.default_rng(5).integers(0, 257, (2, 128))
    bounds = np.array([0, 48, 128], dtype=np.int32)
    return [PackedBatch(row, np.roll(row, -1), row % (2 + i) == 0, bounds) for i, row in enumerate(tokens)]


COUNTED = int(sum(batch.counted.sum() for batch in batches()))


def steps(engine: Engine, count: int) -> list[float]:
    """Train some steps on the same rows and return their losses."""
    return [engine.train_step(batches(), COUNTED, 1e-2)[0].item() for _ in range(count)]


def saved(engine: Engine, folder: Path) -> Path:
    """Save a checkpoint, and return its folder."""
    folder.mkdir(parents=True)
    engine.save(folder)
    return folder


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Return copies of the weights by name."""
    return {name: weight.detach().clone() for name, weight in engine._model.named_parameters()}


def make_teacher(folder: Path) -> tuple[Path, list, list]:
    """Train a softmax model. Return its checkpoint, its logits, and the calls of its attentions, by micro-batch."""
    engine = engine_of("softmax_rope", "tokens", None)
    steps(engine, 3)
    logits, calls = [], []
    for batch in batches():
        with recorded(engine._model) as found:
            logits.append(engine.logits(batch).double())
        calls.append(found)
    path = saved(engine, folder / "teacher")
    engine.close()
    return path, logits, calls


def divergence(engine: Engine, expected: list) -> float:
    """Return the KL divergence from the teacher's distributions in fp64."""
    total = 0.0
    for batch, logits in zip(batches(), expected, strict=True):
        teacher, student = (log_softmax(each, -1) for each in (logits, engine.logits(batch).double()))
        total += ((teacher.exp() * (teacher - student)).sum(-1) * torch.from_numpy(batch.counted)).sum().item()
    return total / COUNTED


@torch.no_grad()
def layer_error(engine: Engine, expected: list) -> float:
    """Return the mean error of the layers, each alone with the teacher's input. expected: its calls."""
    total = 0.0
    for batch, calls in zip(batches(), expected, strict=True):
        with recorded(engine._model) as own:
            for layer, (hidden, _) in zip(engine._model.decoder.layers, calls, strict=True):
                packed = engine_module.PackedSeqParams(
                    qkv_format="thd",
                    cu_seqlens_q=torch.from_numpy(batch.cu_seqlens),
                    cu_seqlens_kv=torch.from_numpy(batch.cu_seqlens),
                    max_seqlen_q=80,
                    max_seqlen_kv=80,
                )
                layer.self_attention(hidden, attention_mask=None, packed_seq_params=packed)
        errors = [
            ((found - wanted).double().norm() / wanted.double().norm()).item() ** 2
            for (_, found), (_, wanted) in zip(own, calls, strict=True)
        ]
        total += sum(errors) / len(errors) * int(batch.counted.sum())
    return total / COUNTED


def train_layers(folder: Path, start: Path, calls: list) -> dict:
    """Train layer by layer, save and go on; then train the tokens from the last checkpoint."""
    engine = engine_of("stick_breaking", "layers", start)
    before = weights(engine)
    result = {"expected": layer_error(engine, calls), "losses": steps(engine, 3)}
    middle = saved(engine, folder / "middle")
    result["losses"] += steps(engine, 3)
    result["changed"] = [name for name, weight in weights(engine).items() if not torch.equal(weight, before[name])]
    result["all"] = list(before)
    end, last = saved(engine, folder / "end"), weights(engine)
    engine.close()
    engine = engine_of("stick_breaking", "layers", start, middle)
    result["resumed"] = steps(engine, 3)
    engine.close()
    engine = engine_of("stick_breaking", "tokens", start, end)
    result["kept"] = all(torch.equal(weight, last[name]) for name, weight in weights(engine).items())
    result["then"] = steps(engine, 2)
    middle = saved(engine, folder / "tokens")
    result["then"] += steps(engine, 2)
    engine.close()
    engine = engine_of("stick_breaking", "tokens", start, middle)
    result["then resumed"] = steps(engine, 2)
    engine.close()
    return result


def main(out: str, kind: str = "cpu") -> None:
    """Train and write {what: results}."""
    torch.set_num_threads(1)
    megatron_cpu.answer_for_gpu()
    megatron_cpu.answer_for_streams()
    if kind == "megatron":
        engine_module.TorchBackend = MegatronBackend
        megatron_cpu.TensorsOnTheCpu().__enter__()
    dist.init_process_group("gloo")
    folder = Path(out).parent / kind
    start, logits, calls = make_teacher(folder)
    results = {}
    for loss in ("logits", "layers"):
        engine = engine_of("softmax_rope", loss, start)
        results[f"same attention, {loss}"] = steps(engine, 1)[0]
        engine.close()
    engine = engine_of("stick_breaking", "logits", start)
    before = weights(engine)
    results["logits"] = {"expected": divergence(engine, logits), "losses": steps(engine, 6)}
    results["logits"]["changed"] = [
        name for name, weight in weights(engine).items() if not torch.equal(weight, before[name])
    ]
    engine.close()
    results["layers"] = train_layers(folder, start, calls)
    end_worker(out, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
