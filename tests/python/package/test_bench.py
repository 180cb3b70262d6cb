"""The benchmark: what it compares computes the same thing, and one small run prints every part."""

import argparse
import re

import pytest
import torch

from megatron_sb import bench, stickbreaking_attention

OPTIONS = argparse.Namespace(batch=2, heads=2, head_dim=16, device="cpu", dtype="fp32")


@pytest.mark.parametrize("kind", ["full", "randn"])
def test_contenders_agree(kind):
    """A comparison of speed is one of equal results."""
    q, k, v, do = bench.make_inputs(kind, 100, OPTIONS)
    results = []
    for attention in (stickbreaking_attention, bench.naive_attention):
        o = attention(q, k, v)
        results.append((o, *torch.autograd.grad(o, (q, k, v), do)))
    for ours, naive in zip(*results, strict=True):
        torch.testing.assert_close(ours, naive, rtol=1e-4, atol=1e-5)


def test_full_inputs_leave_most_of_the_stick():
    """So that nothing can be skipped in them."""
    q, k, v, _ = bench.make_inputs("full", 2000, OPTIONS)
    _, mass = stickbreaking_attention(q, k, v, return_mass=True)
    assert mass.min() > 0.5


def test_run(tmp_path, capsys):
    """The whole of it at a small size: table, ratio, memory by a process of its own, and the plot."""
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


def test_peak_memory_sees_an_allocation():
    """A known amount of memory held in the backward pass is found; earlier peaks may only add to it."""
    megabytes = 256

    class Hog(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return q + v

        @staticmethod
        def backward(ctx, do):
            torch.ones(megabytes * 2**18).sum()
            return do, do, do

    options = argparse.Namespace(**{**vars(OPTIONS), "batch": 1})
    peak = bench.peak_memory(Hog.apply, bench.make_inputs("randn", 16, options))
    assert peak > (megabytes - 1) * 2**20  # the system counts pages in batches, some 100 KiB off


@pytest.mark.parametrize("flag", ["--heads", "--repeats", "--batch", "--lengths"])
def test_bad_options(flag, capsys):
    """Refused by name."""
    with pytest.raises(SystemExit):
        bench.main([flag, "0"])
    assert f"{flag} must be at least 1, got 0." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "refusal"),
    [
        (["--lengths", "64", "-5"], "--lengths must be at least 1, got -5."),
        (["--memory-length", "-1"], "--memory-length must be at least 0, got -1."),
    ],
)
def test_bad_lengths_are_refused_before_anything_is_measured(option, refusal, capsys):
    with pytest.raises(SystemExit):
        bench.main(option)
    printed = capsys.readouterr()
    assert refusal in printed.err and not printed.out
