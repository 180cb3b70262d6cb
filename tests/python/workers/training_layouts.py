"""Train a few steps on the same rows in several parallel layouts, and write losses and gradient norms as JSON.

    training_layouts.py OUT.json [cpu|cuda|megatron]

- One rank computes the reference of each family of models.
- Four CPU ranks (cpu) or two GPUs (cuda) train all layouts of each family.
- With megatron, four CPU ranks use Megatron-Core's own gradients, optimizer and checkpoints, as GPUs do.
"""

import dataclasses
import json
import os
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from megatron_sb.training.config import load_config
from megatron_sb.training.data import PackedBatch, RowSampler, split_rows
from megatron_sb.training.documents import load_corpus
from megatron_sb.training.engine import engine as engine_module
from megatron_sb.training.engine.backends import MegatronBackend
from megatron_sb.training.engine.engine import Engine
from megatron_sb.training.engine.groups import process_groups

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
    "model.make_vocab_size_divisible_by": 4,
    "compare": ["stick_breaking"],
    "data.paths": [sysconfig.get_paths()["stdlib"] + "/" + name for name in ("json", "email")],
}
ROW_LENGTH = 64
OTHER_ROW_LENGTHS = {"odd rows": 61}  # which does not divide among the ranks
# The largest multiple that a layout of the family needs, so that all layouts have the same rows.
PAD_MULTIPLE, OTHER_PAD_MULTIPLES = 8, {"no padding": 1, "odd rows": 1}
NUM_STEPS = 5

MIXTURE = {"model.moe": {"num_experts": 4, "top_k": 2, "dispatcher": "allgather", "grouped_gemm": True}}
MIXED = {  # layers with other names of weights
    "compare": ["mixed"],
    "attention.mixed": {"kind": "mixed", "layers": ["normed", "near"]},
    "attention.normed": {"kind": "stick_breaking", "head_norm": True},
    "attention.near": {"kind": "softmax", "position": "alibi", "window": 21},
}
FAMILIES = {
    "dense": {
        "model.tie_word_embeddings": True,
        "attention.stick_breaking.remainder_bias": True,
        "attention.stick_breaking.head_norm": True,
    },
    "softmax": {"compare": ["softmax_rope"]},
    "mixed": MIXED,
    "no padding": MIXED | {"attention.near": {"kind": "softmax", "window": 21}},
    "odd rows": {},
    "mixture": MIXTURE,
    "mixture, no auxiliary loss": {
        **MIXTURE,
        "model.moe.load_balancing": "none",
        "model.moe.aux_loss_coefficient": 0,
        "model.moe.grouped_gemm": False,
    },
}


def context_parallel(size, **fields):
    return {"stages.0.context_parallel_size": size} | {f"stages.0.{name}": value for name, value in fields.items()}


TENSOR = {"parallel.tensor_parallel_size": 2}
SEQUENCE = {**TENSOR, "parallel.sequence_parallel": True}
BALANCED = {"parallel.layout": "balanced"}
EXPERT = {"parallel.expert_parallel_size": 2}
ALL_TO_ALL = {"model.moe.dispatcher": "alltoall"}
LAYOUTS = {
    "dense": {
        "data parallel, micro-batches": {"stages.0.rows_per_micro_batch": 1},
        "CP2": context_parallel(2),
        "CP2 contiguous, micro-batches, recompute selective": {
            **context_parallel(2, rows_per_micro_batch=2),
            "parallel.layout": "contiguous",
            "model.recompute": "selective",
        },
        "CP4 a2a+p2p": {
            **context_parallel(4, hierarchical_context_parallel_sizes=[2, 2]),
            "parallel.comm": "a2a+p2p",
        },
        "TP2": TENSOR,
        "TP2 CP2": TENSOR | context_parallel(2),
        "TP2 CP2 sequence parallel": SEQUENCE | context_parallel(2),
        "TP2 CP2, recompute full": TENSOR | context_parallel(2) | {"model.recompute": "full"},
        "TP2 CP2, in parts": TENSOR | context_parallel(2) | {"model.tokens_at_once": 24},
    },
    "softmax": {
        "TP2": TENSOR,
        "CP4": context_parallel(4),
        "CP2, whole stream, contiguous, all_gather": {
            **context_parallel(2),
            "parallel.packing": "whole_stream",
            "parallel.layout": "contiguous",
            "parallel.comm": "all_gather",
        },
        "TP2 CP2 p2p": TENSOR | context_parallel(2) | {"parallel.comm": "p2p"},
        "CP4 a2a+p2p": {
            **context_parallel(4, hierarchical_context_parallel_sizes=[2, 2]),
            "parallel.comm": "a2a+p2p",
        },
    },
    "mixed": {"CP2": context_parallel(2), "CP4 p2p": context_parallel(4) | {"parallel.comm": "p2p"}},
    "no padding": {
        "CP2 balanced, micro-batches": BALANCED | context_parallel(2, rows_per_micro_batch=1),
        "TP2 CP2 balanced": BALANCED | TENSOR | context_parallel(2),
        "CP4, whole stream, p2p": {
            **context_parallel(4),
            "parallel.packing": "whole_stream",
            "parallel.comm": "p2p",
        },
    },
    "odd rows": {
        "CP2 balanced, odd rows": BALANCED | context_parallel(2, rows_per_micro_batch=1),
        "CP4 balanced, all_gather": BALANCED | context_parallel(4) | {"parallel.comm": "all_gather"},
    },
    # The auxiliary loss depends on the micro-batch. In these layouts the micro-batch is that of the reference.
    "mixture": {
        "CP4 EP2": EXPERT | context_parallel(4),
        "TP2 CP2 EP2 alltoall": SEQUENCE | EXPERT | ALL_TO_ALL | context_parallel(2),
    },
    "mixture, no auxiliary loss": {
        "EP2 alltoall": EXPERT | ALL_TO_ALL,
        "CP2 EP4": {"parallel.expert_parallel_size": 4} | context_parallel(2),
    },
}
GPU_LAYOUTS = {
    "dense": {
        "CP2, recompute full": context_parallel(2) | {"model.recompute": "full"},
        "CP2, in parts, offloaded": context_parallel(2)
        | {"model.recompute": "full", "model.tokens_at_once": 24, "model.offloaded_inputs": 2},
        "TP2 sequence parallel, recompute selective": SEQUENCE | {"model.recompute": "selective"},
    },
    "softmax": {
        "TP2": TENSOR,
        "CP2 p2p": context_parallel(2) | {"parallel.comm": "p2p"},
        "CP2 all_gather": context_parallel(2) | {"parallel.comm": "all_gather"},
    },
    "mixed": {"CP2": context_parallel(2)},
    "mixture": {
        "CP2 EP2 alltoall": EXPERT | ALL_TO_ALL | context_parallel(2),
        "TP2 EP2": SEQUENCE | EXPERT,
        "TP2 EP2 alltoall": SEQUENCE | EXPERT | ALL_TO_ALL,
    },
    "mixture, no auxiliary loss": {"EP2 alltoall": EXPERT | ALL_TO_ALL},
}
MEGATRON_LAYOUTS = {
    "dense": {"TP2 CP2 sequence parallel": SEQUENCE | context_parallel(2), "CP4": context_parallel(4)},
    "softmax": {"TP2": TENSOR},
    "mixed": {"CP2": context_parallel(2)},
    "mixture": {"TP2 CP2 EP2 alltoall": SEQUENCE | EXPERT | ALL_TO_ALL | context_parallel(2)},
    "mixture, no auxiliary loss": {"CP2 EP4": {"parallel.expert_parallel_size": 4} | context_parallel(2)},
}
# Layouts that save a checkpoint before the last step, and the layout that loads it and makes that step. With torch's
# own checkpoints (cpu) both are equal, because each rank saves only its own shard.
CHECKPOINTED = {
    name: LAYOUTS[family][name]
    for family, name in (("dense", "TP2 CP2, recompute full"), ("mixture", "TP2 CP2 EP2 alltoall"))
}
GPU_CHECKPOINTED = {
    "TP2 sequence parallel, recompute selective": context_parallel(2),
    "TP2 EP2 alltoall": EXPERT | ALL_TO_ALL | context_parallel(2),
    "TP2": {},
}
MEGATRON_CHECKPOINTED = {
    "TP2 CP2 sequence parallel": context_parallel(4),
    "CP4": {},
    "CP2": context_parallel(4),
    "TP2": {},
    "TP2 CP2 EP2 alltoall": {"parallel.expert_parallel_size": 4} | ALL_TO_ALL | context_parallel(4),
    "CP2 EP4": {},  # in the layout that loads, experts and other weights share one optimizer
}


def load(family: str, layout: dict):
    """Return the configuration of a family of models in a layout."""
    length = OTHER_ROW_LENGTHS.get(family, ROW_LENGTH)
    stage = {"name": "a", "context_length": length, "steps": 9, "rows_per_step": 8, "learning_rate": 1e-2}
    fields = (
        SIZES
        | {"attention.stick_breaking.reach": None}
        | FAMILIES[family]
        | {"parallel.ranks": dist.get_world_size(), "stages": [stage]}
        | layout
    )
    return load_config(TINY, [f"{name}={json.dumps(value)}" for name, value in fields.items()])


def train(family: str, layout: dict, device: torch.device, checkpoint: Path, last: dict | None) -> dict:
    """Train NUM_STEPS steps in a layout. Return losses and gradient norms, and then losses and hits of four more rows.

    If `last` is given, the engine saves a checkpoint in the folder `checkpoint` before the last step. A new engine with
    the layout `last` loads it and makes the last step.
    """
    config = load(family, layout)
    (stage,), (model,) = config.stages, config.compare
    corpus = load_corpus(config)
    multiple = OTHER_PAD_MULTIPLES.get(family, PAD_MULTIPLE)
    sampler = RowSampler(corpus.train, stage.context_length, multiple, corpus.end_of_document, [1])
    engine = Engine(config, model, stage, corpus.vocab_size, device)
    group, num_groups = engine.data_parallel_rank, engine.data_parallel_size
    losses, norms, counted = [], [], []
    for step in range(NUM_STEPS):
        if last is not None and step == NUM_STEPS - 1:
            checkpoint.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            engine.save(checkpoint)
            engine.close()
            config = load(family, last)
            (stage,) = config.stages
            engine = Engine(config, model, stage, corpus.vocab_size, device)
            group, num_groups = engine.data_parallel_rank, engine.data_parallel_size
            engine.load(checkpoint)
        rows = [sampler.read(row) for row in sampler.next_rows(stage.rows_per_step)]
        # Count a different share of the labels in each row, so that ranks have different numbers of tokens.
        rows = [
            dataclasses.replace(row, counted=row.counted & (row.labels % (2 + i) > 0)) for i, row in enumerate(rows)
        ]
        num_tokens = int(sum(row.counted.sum() for row in rows))
        shares = split_rows(rows, group, num_groups, stage.rows_per_micro_batch)
        mine = [PackedBatch.concatenate(share) for share in shares]
        counted.append(int(sum(batch.counted.sum() for batch in mine)))
        share, norm = engine.train_step(mine, num_tokens, stage.learning_rate)
        losses.append(engine.sum_over_ranks(share).item())
        norms.append(norm)
    rows = [sampler.read(row) for row in sampler.next_rows(4)]
    rows = [dataclasses.replace(row, cu_seqlens=row.cu_seqlens[[0, -1]]) for row in rows]
    sums = torch.zeros(2, 4, dtype=torch.float64)
    mine = rows[group::num_groups]
    for row, measure in zip(sums, (engine.window_losses, engine.window_hits), strict=True):
        row[group::num_groups] = measure(PackedBatch.concatenate(mine), len(mine)).cpu()
    windows, hits = engine.sum_over_ranks(sums).tolist()
    engine.close()
    by_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, counted[0])
    return {"losses": losses, "norms": norms, "windows": windows, "hits": hits, "counted": by_rank}


def refused_checkpoint(folder: Path) -> str:
    """Return the message of the error when two tensor-parallel ranks load the checkpoint of four."""
    folder.mkdir(exist_ok=True)
    for size in (4, 2):
        config = load("dense", {"model.num_kv_heads": 4, "parallel.tensor_parallel_size": size})
        engine = Engine(config, "stick_breaking", config.stages[0], config.vocab_size, torch.device("cpu"))
        if size == 4:
            engine.save(folder)
        else:
            error = megatron_cpu.message(lambda engine=engine: engine.load(folder))
        engine.close()
    return error


def groups_after_a_failed_engine() -> int:
    """Return the number of process groups after a constructor that runs out of memory."""
    config = load("dense", TENSOR)
    with mock.patch.object(engine_module, "TorchBackend", side_effect=MemoryError), suppress(MemoryError):
        Engine(config, "stick_breaking", config.stages[0], config.vocab_size, torch.device("cpu"))
    return len(process_groups())


def main(out: str, kind: str = "cpu") -> None:
    """Train and write {family: {layout: results}}."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        megatron_cpu.answer_for_gpu()
        megatron_cpu.answer_for_streams()
    if kind == "megatron":
        engine_module.TorchBackend = MegatronBackend
        megatron_cpu.TensorsOnTheCpu().__enter__()
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    checkpoint = Path(out).parent / "checkpoint"
    layouts, last = {
        "cpu": (LAYOUTS, CHECKPOINTED),
        "cuda": (GPU_LAYOUTS, GPU_CHECKPOINTED),
        "megatron": (MEGATRON_LAYOUTS, MEGATRON_CHECKPOINTED),
    }[kind]
    layouts = layouts if dist.get_world_size() > 1 else {family: {"one rank": {}} for family in FAMILIES}
    results = {}
    for family, named in layouts.items():
        results[family] = {
            name: train(family, layout, device, checkpoint / name, last.get(name)) for name, layout in named.items()
        }
    if kind == "cpu" and dist.get_world_size() > 1:
        results["process groups after a failure"] = groups_after_a_failed_engine()
        results["refused checkpoint"] = refused_checkpoint(checkpoint)
        results["process groups"] = len(process_groups())
    end_worker(out, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
