"""The whole job on GPUs: Megatron's checkpoints go on over other ranks and outlive a rank that is killed.

With fewer GPUs a job of four ranks runs as on several machines that share them.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from support.jobs import kill_while_it_saves
from support.launch import SEVERAL_MACHINES

TRAIN = [sys.executable, "-m", "megatron_sb.training"]
TIMEOUT_SECONDS = 240
CONFIG = """
name: small
compare: [stick_breaking]
data: {paths: [python-stdlib], validation_fraction: 0.1}
model: {num_layers: 4, hidden_size: 256, num_heads: 4, num_kv_heads: 4, ffn_hidden_size: 512, precision: PRECISION,
  make_vocab_size_divisible_by: 2}
attention: {stick_breaking: {remainder_bias: true, head_norm: true}}
parallel: {ranks: 1, device: cuda, timeout_seconds: 100}
stages:
  - {name: only, context_length: 4096, steps: 30, rows_per_step: 8, rows_per_micro_batch: 2, pad_multiple: 8,
      learning_rate: 1e-3, warmup_steps: 5, schedule: exponential}
evaluation: {windows: 2, target_tokens: 64, length_factor: 1}
checkpoint: {interval: 10, keep: 9}
report: {tensorboard: false}
"""
LAYOUTS = {
    "1": [],
    "CP4": ["parallel.ranks=4", "stages.0.context_parallel_size=4"],
    "TP2 CP2": [
        "parallel.ranks=4",
        "parallel.tensor_parallel_size=2",
        "parallel.sequence_parallel=true",
        "stages.0.context_parallel_size=2",
    ],
}
EXPERTS = ["model.moe={num_experts: 8, top_k: 2, grouped_gemm: true}", "parallel.expert_parallel_size=2"]
# fp32: the order of additions alone; bf16: rounding of activations, over 30 steps
ROUNDING = {"fp32": 1e-3, "bf16": 3e-2}


def train(out, *arguments, precision="fp32"):
    """Start a job in `out`."""
    config = out.with_suffix(".yaml")
    config.write_text(CONFIG.replace("PRECISION", precision))
    num_gpus = torch.cuda.device_count()
    shared = "parallel.ranks=4" in arguments and num_gpus < 4
    per_machine = 2 if num_gpus > 1 else 1
    command = [*([SEVERAL_MACHINES] if shared else TRAIN), config, *arguments, "--out", out]
    environment = {**os.environ, "PYTHON": sys.executable, "SECONDS_AT_MOST": str(TIMEOUT_SECONDS)}
    environment |= {"NODES": str(4 // per_machine), "RANKS_PER_NODE": str(per_machine)}
    words = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*map(str, command)], env=environment, **words)


def losses(out, *arguments, **options):
    """Run a job to its end: its training losses."""
    job = train(out, *arguments, **options)
    output, _ = job.communicate(timeout=TIMEOUT_SECONDS)
    assert job.returncode == 0, output[-8000:]
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def back_to(out, step):
    """Make `step` the newest checkpoint."""
    (out / "stick_breaking" / "checkpoints" / "latest").write_text(f"only-{step:06d}")


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "precision"), [("dense", "fp32"), ("dense", "bf16"), ("experts", "bf16")])
def test_a_checkpoint_of_one_layout_goes_on_in_others(tmp_path, model, precision):
    """TP2 CP2 to step 20, then on one GPU and in CP4: the losses of the run that never stopped."""
    experts = EXPERTS if model == "experts" else []
    out = tmp_path / "run"
    expected = losses(out, *experts, *LAYOUTS["TP2 CP2"], precision=precision)
    assert expected[-1] < expected[0] - 1
    for name in ("TP2 CP2", "CP4", "1"):
        back_to(out, 20)
        alone = ["parallel.expert_parallel_size=1"] if experts and name == "1" else []
        found = losses(out, *experts, *LAYOUTS[name], *alone, "--resume", precision=precision)
        assert found[:20] == expected[:20]
        assert found == pytest.approx(expected, abs=1e-6 if name == "TP2 CP2" else ROUNDING[precision]), name


@pytest.mark.gpu
def test_killed_while_it_saves(tmp_path):
    """SIGKILL with a distributed checkpoint half written: the one before loads."""
    out = tmp_path / "run"
    checkpoints = out / "stick_breaking" / "checkpoints"
    expected = losses(tmp_path / "straight")
    kill_while_it_saves(train(out, "checkpoint.interval=1"), checkpoints)
    assert list(checkpoints.glob(".only*.tmp"))
    assert losses(out, "checkpoint.interval=1", "--resume") == pytest.approx(expected, abs=1e-6)
