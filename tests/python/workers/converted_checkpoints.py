"""Train and save a Megatron-Core checkpoint, convert it to transformers and back, and write the losses as JSON.

Runs on 2 CPU ranks: `converted_checkpoints.py OUT.json dense|experts|gates`.
"""

import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from training_layouts import EXPERT, ROW_LENGTH, SEQUENCE, TENSOR, load

from megatron_sb import checkpoints
from megatron_sb.megatron.weights import has_optimizer, read_weights
from megatron_sb.training import config as configuration
from megatron_sb.training.data import PackedBatch, RowSampler
from megatron_sb.training.documents import load_corpus
from megatron_sb.training.engine import engine as engine_module
from megatron_sb.training.engine.backends import MegatronBackend
from megatron_sb.training.engine.engine import Engine

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import megatron_cpu
from support.launch import end_worker

GATES = {"attention.stick_breaking.forget_gate": True, "attention.stick_breaking.logits": "euclidean"}
KINDS = {  # kind -> family, its options, the layout of the ranks that save
    "dense": ("dense", {}, TENSOR),
    "experts": ("mixture, no auxiliary loss", {}, SEQUENCE | EXPERT),
    "gates": ("dense", GATES, TENSOR),
}


def losses_of(model, rows: list[PackedBatch]) -> list[float]:
    """Return the sum of the losses of each row, computed with a transformers model."""
    sums = []
    for row in rows:
        logits = model(torch.from_numpy(row.tokens)[None]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(row.labels), reduction="none")
        sums.append(losses[torch.from_numpy(row.counted)].sum().item())
    return sums


def window_losses(engine: Engine, rows: list[PackedBatch]) -> list[float]:
    """Return the sum of the losses of each row, computed with an engine. Its data-parallel ranks share the rows."""
    sums = torch.zeros(len(rows), dtype=torch.float64)
    mine = range(engine.data_parallel_rank, len(rows), engine.data_parallel_size)
    sums[list(mine)] = engine.window_losses(PackedBatch.concatenate([rows[i] for i in mine]), len(mine)).cpu()
    return engine.sum_over_ranks(sums).tolist()


def main(out: str, kind: str) -> None:
    """Train, save, convert, convert back, load in another layout and resume. Write losses of the same rows."""
    torch.set_num_threads(1)
    megatron_cpu.answer_for_gpu()
    megatron_cpu.answer_for_streams()
    engine_module.TorchBackend = MegatronBackend
    megatron_cpu.TensorsOnTheCpu().__enter__()
    dist.init_process_group("gloo")
    family, options, layout = KINDS[kind]
    config = load(family, options | layout)
    (stage,) = config.stages
    run = Path(out).parent / "run"
    saved, back = run / "stick_breaking" / "checkpoints" / "a-000002", run / "back"
    corpus = load_corpus(config)
    sampler = RowSampler(corpus.train, ROW_LENGTH, 8, corpus.end_of_document, [1])
    rows = [sampler.read(row) for row in sampler.next_rows(4)]
    rows = [dataclasses.replace(row, cu_seqlens=row.cu_seqlens[[0, -1]]) for row in rows]
    num_tokens = int(sum(row.counted.sum() for row in rows))
    engine = Engine(config, "stick_breaking", stage, corpus.vocab_size, torch.device("cpu"))

    def step(engine: Engine, learning_rate: float) -> None:
        mine = rows[engine.data_parallel_rank :: engine.data_parallel_size]
        engine.train_step([PackedBatch.concatenate(mine)], num_tokens, learning_rate)

    for _ in range(2):
        step(engine, 1e-2)
    found = {"trained": window_losses(engine, rows)}
    if dist.get_rank() == 0:
        saved.mkdir(parents=True)
        (run / "config.yaml").write_text(configuration.to_yaml(config))
    dist.barrier()
    engine.save(saved)
    engine.close()
    if dist.get_rank() == 0:
        model = checkpoints.load(saved)
        with torch.no_grad():
            found["transformers"] = losses_of(model, rows)
        checkpoints.save(model, back, "megatron")
        before, after = read_weights(saved), read_weights(back / "release")
        found["names"] = [sorted(before), sorted(after)]
        found["equal"] = all(torch.equal(before[name], after[name]) for name in before)
        found["optimizers"] = [has_optimizer(saved), has_optimizer(back / "release")]
    dist.barrier()
    config = load(family, options)
    engine = Engine(config, "stick_breaking", config.stages[0], corpus.vocab_size, torch.device("cpu"))
    engine.load(back / "release")
    found["loaded"] = window_losses(engine, rows)
    step(engine, 0.0)  # the optimizer must update the weights that were loaded
    found["after a step of rate 0"] = window_losses(engine, rows)
    step(engine, 1e-4)
    found["after a step"] = window_losses(engine, rows)
    engine.close()
    end_worker(out, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
