"""The benchmark command: it compares functions with equal results, and a small run prints all parts."""

import argparse
import re
import signal
import subprocess
import sys

import pytest
import torch
from support.messages import mentions

from megatron_sb import bench, cli, stickbreaking_attention

OPTIONS = argparse.Namespace(batch=2, heads=2, head_dim=16, device="cpu", dtype="fp32")


@pytest.mark.parametrize("kind", ["full", "randn"])
def test_compared_functions_have_equal_results(kind):
    q, k, v, do = bench.make_inputs(kind, 100, OPTIONS)
    results = []
    for attention in (stickbreaking_attention, bench.naive_attention):
        o = attention(q, k, v)
        results.append((o, *torch.autograd.grad(o, (q, k, v), do)))
    for ours, naive in zip(*results, strict=True):
        torch.testing.assert_close(ours, naive, rtol=1e-4, atol=1e-5)


def test_full_inputs_leave_most_of_the_mass():
    """With this mass no key can be skipped."""
    q, k, v, _ = bench.make_inputs("full", 2000, OPTIONS)
    _, mass = stickbreaking_attention(q, k, v, return_mass=True)
    assert mass.min() > 0.5


def test_run(tmp_path, capsys):
    """A run prints the times and their ratio, and the peak memory of a new process, and it draws the plot."""
    sizes = ["--lengths", "64", "128", "--heads", "2", "--head-dim", "16", "--repeats", "2", "--device", "cpu"]
    limits = ["--naive-max-length", "64", "--memory-length", "2048", "--dtype", "fp32", "--out", str(tmp_path)]
    assert bench.main([*sizes, *limits]) == 0
    printed = capsys.readouterr().out
    short, long = (re.search(rf"^ +{length} .*$", printed, re.MULTILINE).group() for length in (64, 128))
    assert re.search(r"\d\.\d\dx", short)
    assert "x" not in long
    peak = int(re.search(r"peak memory over the inputs at length 2048: (\d+) MiB", printed).group(1))
    assert 0 < peak < 500
    assert (tmp_path / "bench_cpu.png").stat().st_size > 1000


def test_the_plot_is_drawn_before_the_memory_is_measured(tmp_path, monkeypatch):
    """The times are not lost if the memory does not suffice."""

    def fail(*args):
        raise ValueError("--memory-length")

    monkeypatch.setattr(bench, "peak_memory_in_fresh_process", fail)
    sizes = ["--lengths", "64", "--heads", "1", "--head-dim", "16", "--repeats", "1", "--device", "cpu"]
    with pytest.raises(ValueError, match="--memory-length"):
        bench.main([*sizes, "--out", str(tmp_path)])
    assert (tmp_path / "bench_cpu.png").exists()


def test_peak_memory_is_that_of_the_tensors():
    """And not that of code and threads, which the first call of a process needs."""
    arguments = ["--heads", "8", "--head-dim", "64", "--dtype", "fp32", "--device", "cpu", "--batch", "1"]
    length = 2048
    peak = bench.peak_memory_in_fresh_process("full", length, bench.make_parser().parse_args(arguments))
    output_and_gradients = 4 * length * 8 * 64 * 4
    assert output_and_gradients / 2 < peak < 1.5 * output_and_gradients


ALLOCATES_IN_THE_BACKWARD = """
import argparse, sys
import torch
from megatron_sb import bench

class Allocates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        return q + v

    @staticmethod
    def backward(ctx, do):
        torch.ones(int(sys.argv[1]) // 4).sum()
        return do, do, do

options = argparse.Namespace(batch=1, heads=2, head_dim=16, device="cpu", dtype="fp32")
print(bench.peak_memory(Allocates.apply, bench.make_inputs("randn", 16, options)))
"""


def test_peak_memory_includes_an_allocation_of_the_backward(tmp_path):
    """In a fresh process, as its docstring demands: here, memory of earlier tests can be freed while it measures.

    The other tensors take 10 KiB. The lower limit leaves room for code that the system unloads meanwhile.
    """
    allocated = 256 * 2**20
    script = [sys.executable, "-c", ALLOCATES_IN_THE_BACKWARD, str(allocated)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 0.75 * allocated < int(done.stdout) < 1.5 * allocated


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--heads", "0"], "--heads 1 0"),
        (["--repeats", "0"], "--repeats 1 0"),
        (["--batch", "0"], "--batch 1 0"),
        (["--batch", str(2**63)], f"--batch {2**63 - 1} {2**63}"),
        (["--lengths", "8", str(2**63)], f"--lengths {2**63 - 1} {2**63}"),
        (["--memory-length", str(2**63)], f"--memory-length {2**63 - 1} {2**63}"),
        (["--head-dim", "12"], "--head-dim 8 256 12"),
        (["--head-dim", "264"], "--head-dim 8 256 264"),
        (["--lengths", "0"], "--lengths 1 0"),
        (["--lengths", "64", "-5"], "--lengths 1 -5"),
        (["--memory-length", "-1"], "--memory-length 0 -1"),
        (["--out", ""], "--out folder ''"),
    ],
)
def test_bad_options_are_rejected_before_anything_is_measured(option, words, capsys):
    with pytest.raises(SystemExit):
        bench.main(option)
    printed = capsys.readouterr()
    assert re.search(mentions(words), printed.err.splitlines()[-1]) and not printed.out


SHORT = ["bench", "--device", "cpu", "--heads", "1", "--head-dim", "8", "--repeats", "1"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lengths", str(2**50), "--memory-length", "0"], f"--lengths memory {2**50} allocate"),
        (["--lengths", str(2**62), "--memory-length", "0"], f"--lengths memory {2**62} overflowed"),
        (["--lengths", "16", "--memory-length", str(2**50)], f"--memory-length memory {2**50} allocate"),
    ],
)
def test_a_length_that_does_not_fit_the_memory_is_named(options, words, capsys):
    assert cli.main([*SHORT, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(mentions(words), line), line


def test_a_killed_or_slow_measurement_of_memory_is_named(monkeypatch, capsys):
    killed = subprocess.CompletedProcess([], -signal.SIGKILL, "", "")
    slow = subprocess.TimeoutExpired([], 1800)
    for outcome, words in ((killed, "--memory-length memory 32 killed"), (slow, "--memory-length 1800 32 0")):

        def run(*args, outcome=outcome, **kwargs):
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(bench.subprocess, "run", run)
        assert cli.main([*SHORT, "--lengths", "16", "--memory-length", "32"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(mentions(words), line), line
