"""The plan of a packed backward: the portable kernels, which max_seqlen bounds, and groups of documents on Hopper."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from support.accuracy import relative_errors, run
from support.inputs import Inputs, make_inputs

from megatron_sb import stickbreaking_attention_varlen

ROWS, DOCUMENT = 65536, 256


def _packed(documents: int):
    """Return inputs that the portable kernels serve, and the offsets of equal documents."""
    x = make_inputs("mean -3.2", s=ROWS, h=4, d=64, dtype=torch.float32).packed()
    return x, torch.arange(0, ROWS + 1, ROWS // documents, dtype=torch.int32)


def _passes(attention, x, cu_seqlens, **options) -> tuple[int, dict[str, torch.Tensor]]:
    """Return how many times the query pass of the backward was launched, and the results."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        results = run(attention, x, cu_seqlens, return_mass=True, **options)
        torch.cuda.synchronize()
    return sum("query_pass" in event.name for event in profile.events()), results


def test_max_seqlen_saves_launches():
    """256 documents fit in one chunk. Without their length the plan has room for one document of all rows."""
    x, cu_seqlens = _packed(ROWS // DOCUMENT)
    chunks, expected = _passes(stickbreaking_attention_varlen, x, cu_seqlens)
    assert chunks > 5
    for options in ({"max_seqlen": DOCUMENT}, {"cu_seqlens_k": cu_seqlens, "max_seqlen_k": DOCUMENT + 3}):
        chunks, results = _passes(stickbreaking_attention_varlen, x, cu_seqlens, **options)
        assert chunks == 1
        for name, value in expected.items():
            assert max(relative_errors(results[name], value)) <= 1e-6, name


def test_the_plan_takes_time_in_proportion_to_the_documents():
    """Ten times as many documents of two rows take less than thirty times as long."""
    times = []
    for documents in (10_000, 100_000):
        x = make_inputs("randn", s=2 * documents, h=1, d=8, dtype=torch.float32).packed()
        cu_seqlens = torch.arange(0, 2 * documents + 1, 2, dtype=torch.int32)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for measured in (False, True):
            if measured:
                begin.record()
            run(stickbreaking_attention_varlen, x, cu_seqlens, 2, return_mass=True)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    assert times[1] < 30 * times[0], times


LONGER = """
import torch, megatron_sb
q = torch.randn(512, 1, 32, device="cuda", requires_grad=True)
cu_seqlens = torch.tensor([0, 100, 512], dtype=torch.int32, device="cuda")
megatron_sb.stickbreaking_attention_varlen(q, q, q, cu_seqlens, 100).sum().backward()
torch.cuda.synchronize()
"""


def test_a_document_longer_than_max_seqlen_is_an_error():
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    run = subprocess.run(
        [sys.executable, "-c", LONGER], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode != 0
    assert "max_seqlen_k must be" in run.stderr + run.stdout


@pytest.mark.parametrize(("h", "d"), [(12, 128), (16, 64), (9, 256)])
def test_groups_of_documents_change_no_bit(h, d):
    """The Hopper backward runs the documents of a long stream in groups. A document alone gives the same bits."""
    lengths = [3000, 700, 129, 9000, 64, 1, 5000, 2500, 4096, 1000, 8000, 333, 6000]
    x = make_inputs("mean -8", s=sum(lengths), h=h, d=d, dtype=torch.bfloat16).packed()
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    together = run(stickbreaking_attention_varlen, x, cu_seqlens, max(lengths), return_mass=True)
    for first, last in itertools.pairwise(cu_seqlens.tolist()):
        rows = Inputs(*(y[first:last] for y in (x.q, x.k, x.v, x.do)), x.dmass[:, first:last])
        offsets = torch.tensor([0, last - first], dtype=torch.int32)
        alone = run(stickbreaking_attention_varlen, rows, offsets, last - first, return_mass=True)
        for name, value in alone.items():
            dim = int(name == "mass")
            assert torch.equal(together[name].narrow(dim, first, last - first), value), (name, first, last)
