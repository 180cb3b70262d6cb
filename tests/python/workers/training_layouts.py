"""Two ranks: a few steps of the same rows under several layouts. Rank 0 writes what came out to the file argv[1]."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sb.config import load_config
from megatron_sb.megatron.engine import Engine
from megatron_sb.training.data import PackedBatch, RowSampler, load_corpus, split_rows

TINY = Path(__file__).parents[3] / "configs" / "tiny_context_extension.yaml"
SIZES = ["model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=1"]
LAYOUTS = {
    "data parallel": (1, None, "zigzag"),
    "micro-batches": (1, 1, "zigzag"),
    "context parallel": (2, None, "zigzag"),
    "context parallel, contiguous, micro-batches": (2, 2, "contiguous"),
}


def train(context_parallel_size: int, rows_per_micro_batch: int | None, layout: str) -> dict:
    """Losses and gradient norms of 5 steps, then the loss of every row of one more, in one layout."""
    config = load_config(TINY, [*SIZES, f"parallel.layout={layout}"])
    stage = dataclasses.replace(
        config.stages[0], context_length=64, rows_per_step=8, context_parallel_size=context_parallel_size
    )
    corpus = load_corpus(config)
    # The same rows in every layout: padded for the one that asks for most.
    sampler = RowSampler(corpus.train, stage.context_length, 4, corpus.end_of_document, [1])
    engine = Engine(config, "stick_breaking", stage, corpus.vocab_size, torch.device("cpu"))
    losses, norms, counted = [], [], []
    for _ in range(5):
        rows = sampler.next_rows(stage.rows_per_step)
        # Uneven on purpose: the first rows count few of their labels.
        rows = [
            dataclasses.replace(row, counted=row.counted & (row.labels % (2 + i) > 0)) for i, row in enumerate(rows)
        ]
        num_tokens = int(sum(row.counted.sum() for row in rows))
        mine = split_rows(rows, engine.data_parallel_rank, engine.data_parallel_size, rows_per_micro_batch)
        counted.append(int(sum(batch.counted.sum() for batch in mine)))
        share, norm = engine.train_step(mine, num_tokens, 1e-2)
        losses.append(engine.sum_over_ranks(share).item())
        norms.append(norm)
    rows = [dataclasses.replace(row, cu_seqlens=row.cu_seqlens[[0, -1]]) for row in sampler.next_rows(4)]
    mine = rows[engine.data_parallel_rank :: engine.data_parallel_size]
    sums = torch.zeros(4, dtype=torch.float64)
    sums[engine.data_parallel_rank :: engine.data_parallel_size] = engine.window_losses(
        PackedBatch.concatenate(mine), len(mine)
    )
    windows = engine.sum_over_ranks(sums).tolist()
    engine.close()
    everywhere: list = [None, None]
    dist.all_gather_object(everywhere, counted[0])
    return {"losses": losses, "norms": norms, "windows": windows, "counted": everywhere}


dist.init_process_group("gloo")
torch.set_num_threads(1)
results = {name: train(*layout) for name, layout in LAYOUTS.items()}
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
