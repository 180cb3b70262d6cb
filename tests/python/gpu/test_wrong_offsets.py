"""Offsets in GPU memory that break the rules: memory stays intact, every wait ends, and the result is defined."""

import pytest
import torch
from support.accuracy import run
from support.inputs import make_inputs
from support.offsets import corrected, wrong_offsets

from megatron_sb import stickbreaking_attention_varlen

ROWS, ROWS_K = 700, 900
KERNELS = {  # of make_inputs
    "Hopper 64": {"d": 64, "dtype": torch.bfloat16},
    "Hopper 128": {"d": 128, "dtype": torch.float16},
    "portable bf16": {"d": 40, "dtype": torch.bfloat16},
    "portable fp32": {"d": 64, "dtype": torch.float32},
}


def _offsets(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("wrong", wrong_offsets(ROWS))
def test_the_segment_table_has_the_running_maximum(wrong):
    q, k = wrong_offsets(ROWS)[wrong], wrong_offsets(ROWS_K)[wrong]
    table = torch.ops.megatron_sb.segments(_offsets(q), _offsets(k), ROWS, ROWS_K)
    q, k = _offsets(corrected(q, ROWS)), _offsets(corrected(k, ROWS_K))
    want = torch.stack([q[:-1], q.diff(), k[:-1], k.diff(), k.diff() - q.diff()], dim=1)
    assert torch.equal(table, want)


def test_the_segment_table_of_more_documents_than_a_thread_block_has_threads():
    generator = torch.Generator("cpu").manual_seed(1)
    values = torch.randint(-10, 10**6, (5000,), generator=generator, device="cpu").sort().values
    values[::7] -= 500
    table = torch.ops.megatron_sb.segments(_offsets(values.tolist()), _offsets(values.tolist()), 900_000, 950_000)
    q, k = (_offsets(corrected(values.tolist(), rows)) for rows in (900_000, 950_000))
    assert torch.equal(table, torch.stack([q[:-1], q.diff(), k[:-1], k.diff(), k.diff() - q.diff()], dim=1))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("wrong", wrong_offsets(ROWS))
def test_results_are_those_of_the_running_maximum(wrong, kernel):
    """Forward and backward are bitwise those of the corrected offsets. Those of q and k are both wrong."""
    x = make_inputs("mean -3.2", s=ROWS, s_k=ROWS_K, h=2, h_kv=1, **KERNELS[kernel]).packed()
    q, k = wrong_offsets(ROWS)[wrong], wrong_offsets(ROWS_K)[wrong]
    results = [
        run(stickbreaking_attention_varlen, x, _offsets(a), cu_seqlens_k=_offsets(b), return_mass=True)
        for a, b in ((q, k), (corrected(q, ROWS), corrected(k, ROWS_K)))
    ]
    torch.cuda.synchronize()
    for name, value in results[1].items():
        assert torch.equal(results[0][name], value), name


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_thousand_documents_that_claim_all_rows(head_dim):
    """The workspace has room for a thousand short documents, not for a thousand of 8192 rows."""
    x = make_inputs("mean -3.2", s=8192, h=1, d=head_dim, dtype=torch.bfloat16).packed()
    wrong = [0, 8192] * 512
    results = [
        run(stickbreaking_attention_varlen, x, _offsets(offsets), return_mass=True)
        for offsets in (wrong, corrected(wrong, 8192))
    ]
    torch.cuda.synchronize()
    for name, value in results[1].items():
        assert torch.equal(results[0][name], value), name
