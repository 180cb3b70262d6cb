"""`megatron-sb train` and Megatron-LM's own pretrain_gpt.py under the launcher: the same losses on the same rows.

MEGATRON_LM names a checkout of Megatron-LM, of the release of the Megatron-Core that is installed. Every row of the
data is the same, so that the order in which each of them takes rows does not matter.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

MEGATRON_LM = os.environ.get("MEGATRON_LM")
STEPS, ROWS, LENGTH, VOCAB_SIZE, RATE = 20, 4, 512, 128, 1e-3
CONFIG = f"""
name: same
seed: 1234
compare: [stick_breaking]
data: {{kind: indexed, paths: [DATA], vocab_size: {VOCAB_SIZE}, end_of_document: 0, validation_fraction: 0.3}}
model: {{num_layers: 3, hidden_size: 256, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 512, precision: bf16}}
parallel: {{ranks: RANKS, device: cuda}}
stages:
  - {{name: only, context_length: {LENGTH}, steps: {STEPS}, rows_per_step: {ROWS}, rows_per_micro_batch: 1,
      learning_rate: {RATE}, context_parallel_size: RANKS}}
evaluation: {{windows: 1, target_tokens: 8, length_factor: 1}}
report: {{tensorboard: false}}
"""
MEGATRON = f"""
--num-layers 3 --hidden-size 256 --num-attention-heads 4 --group-query-attention --num-query-groups 2
--ffn-hidden-size 512 --swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights
--make-vocab-size-divisible-by 1 --seq-length {LENGTH} --max-position-embeddings {LENGTH} --position-embedding-type none
--attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization --seed 1234 --bf16
--micro-batch-size 1 --global-batch-size {ROWS} --train-iters {STEPS} --lr {RATE} --lr-decay-style constant
--adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --use-distributed-optimizer
--calculate-per-token-loss --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --split 100,0,0
--no-create-attention-mask-in-dataloader --transformer-impl local --no-gradient-accumulation-fusion --no-rope-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --log-interval 1 --eval-iters 0 --stick-breaking-attention
"""


def write_documents(prefix: Path, count: int) -> None:
    """Documents whose every row of LENGTH tokens and their labels is the same; they begin and end with token 0."""
    row = np.random.default_rng(0).integers(1, VOCAB_SIZE - 1, size=LENGTH)
    row[0] = 0
    document = torch.from_numpy(np.concatenate([np.tile(row, STEPS * ROWS * 2), row[:1]]))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for _ in range(count):
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")


def run(command: list, folder: Path, **environment) -> str:
    """Run in a folder to the end, as a user's shell would, and return what was said."""
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONSAFEPATH"} | environment
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def our_losses(folder: Path, ranks: int, *overrides: str) -> list[float]:
    """Those of the trainer."""
    write_documents(folder / "ours", 8)
    config = folder / "config.yaml"
    config.write_text(CONFIG.replace("DATA", str(folder / "ours")).replace("RANKS", str(ranks)))
    run([sys.executable, "-m", "megatron_sb.training", config, *overrides, "--out", folder / "run"], folder)
    return [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_the_rows_are_learned(tmp_path):
    """The trainer's half, on a CPU."""
    losses = our_losses(tmp_path, 1, "model.precision=fp32", "parallel.device=cpu", "stages.0.steps=8")
    assert losses[0] == pytest.approx(np.log(VOCAB_SIZE), abs=0.2) and losses[-1] < losses[0] - 0.5


@pytest.mark.gpu
@pytest.mark.skipif(MEGATRON_LM is None, reason="MEGATRON_LM does not name a checkout of Megatron-LM")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.multigpu)])
def test_pretrain_gpt_has_the_same_losses(tmp_path, ranks):
    """From the same weights, with one rank and with two context-parallel ones, in bf16."""
    ours = our_losses(tmp_path, ranks)
    write_documents(tmp_path / "theirs", 1)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    script = ["-m", "megatron_sb.megatron.launch", Path(MEGATRON_LM) / "pretrain_gpt.py", *MEGATRON.split()]
    script += ["--context-parallel-size", ranks, "--data-path", tmp_path / "theirs", "--data-cache-path", tmp_path]
    said = run([*torchrun, *script], Path(MEGATRON_LM), CUDA_DEVICE_MAX_CONNECTIONS="1")
    theirs = [float(loss) for loss in re.findall(r"lm loss: ([\d.E+-]+)", said)]
    assert len(ours) == len(theirs) == STEPS and ours[-1] < ours[0] - 1
    assert theirs == pytest.approx(ours, abs=2e-2)
