"""`megatron-sb train` and Megatron-LM's own pretrain_gpt.py under the launcher: the same losses on the same rows.

MEGATRON_LM names a checkout of Megatron-LM, of the release of the Megatron-Core that is installed. Every row of the
data is the same, so that the order in which each of them takes rows does not matter.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from support.launch import megatron_losses, run_ranks, run_torchrun

MEGATRON_LM = os.environ.get("MEGATRON_LM")
STEPS, ROWS, LENGTH, VOCAB_SIZE, RATE = 20, 4, 512, 128, 1e-3
PRECISION = {"cpu": "fp32", "cuda": "bf16"}
ROUNDING = {"fp32": 1e-4, "bf16": 2e-2}  # of losses; Megatron logs six digits
CONFIG = f"""
name: same
seed: 1234
compare: [stick_breaking]
data: {{kind: indexed, paths: [DATA], vocab_size: {VOCAB_SIZE}, end_of_document: 0, validation_fraction: 0.3}}
model: {{num_layers: 3, hidden_size: 256, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 512, precision: PRECISION}}
parallel: {{ranks: RANKS, device: DEVICE}}
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
--attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization --seed 1234
--micro-batch-size 1 --global-batch-size {ROWS} --train-iters {STEPS} --lr {RATE} --lr-decay-style constant
--adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --use-distributed-optimizer
--calculate-per-token-loss --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --split 100,0,0
--no-create-attention-mask-in-dataloader --transformer-impl local --no-gradient-accumulation-fusion --no-rope-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --log-interval 1 --eval-iters 0 --eval-interval 1000 --num-workers 0
--stick-breaking-attention
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


def our_losses(folder: Path, device: str, ranks: int, steps: int = STEPS) -> list[float]:
    """Those of the trainer, in bf16 on a GPU."""
    write_documents(folder / "ours", 8)
    config = folder / "config.yaml"
    words = {"DATA": folder / "ours", "RANKS": ranks, "DEVICE": device, "PRECISION": PRECISION[device]}
    text = CONFIG
    for name, word in words.items():
        text = text.replace(name, str(word))
    config.write_text(text)
    out = folder / "run"
    run = run_ranks if device == "cpu" else run_torchrun
    run(ranks, ["-m", "megatron_sb.training", config, f"stages.0.steps={steps}", "--out", out], 300)
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_the_rows_are_learned(tmp_path):
    """The trainer's half, on a CPU."""
    losses = our_losses(tmp_path, "cpu", 1, steps=8)
    assert losses[0] == pytest.approx(np.log(VOCAB_SIZE), abs=0.2) and losses[-1] < losses[0] - 0.5


@pytest.mark.skipif(MEGATRON_LM is None, reason="MEGATRON_LM does not name a checkout of Megatron-LM")
@pytest.mark.parametrize(
    ("device", "ranks"),
    [
        ("cpu", 1),
        ("cpu", 2),
        pytest.param("cuda", 1, marks=pytest.mark.gpu),
        pytest.param("cuda", 2, marks=pytest.mark.multigpu),
    ],
)
def test_pretrain_gpt_has_the_same_losses(tmp_path, device, ranks):
    """From the same weights, with one rank and with two context-parallel ones."""
    ours = our_losses(tmp_path, device, ranks)
    write_documents(tmp_path / "theirs", 1)
    flags = [*MEGATRON.split(), *(["--bf16"] if PRECISION[device] == "bf16" else [])]
    flags += ["--context-parallel-size", ranks, "--data-path", tmp_path / "theirs", "--data-cache-path", tmp_path]
    theirs = megatron_losses(Path(MEGATRON_LM).resolve() / "pretrain_gpt.py", ranks, *flags, device=device)
    theirs[1] = 2 * theirs[1] - theirs[0]  # 0.19 logs the mean of the first two there
    assert len(ours) == len(theirs) == STEPS and ours[-1] < ours[0] - 1
    assert theirs == pytest.approx(ours, abs=ROUNDING[PRECISION[device]])
