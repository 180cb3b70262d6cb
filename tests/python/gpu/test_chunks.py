"""Queries that are a part of their sequence, as in context parallelism: blocks give the results of one call.

In these blocks, newer tiles also add to the last rows of a key tile, and several ranges of tiles share the device. A
CTA that has finished must not hold a resource that other CTAs wait for.
"""

import pytest
import torch
from support.accuracy import relative_errors
from support.inputs import make_inputs

from megatron_sb import stickbreaking_attention, stickbreaking_attention_varlen

OPTIONS = {"attend_current": False, "mass_threshold": 2.0**-24}
# Multiples of 4; 65536 tokens in total.
DOCUMENTS = [1252, 5024, 156, 196, 476, 2532, 1216, 9660, 1020, 2512, 592, 772, 112, 236, 444, 1404, 3504, 5908, 224]
DOCUMENTS += [420, 3228, 10632, 756, 8624, 848, 1676, 2112]


def zigzag(lengths: list[int], rank: int, ranks: int) -> tuple[torch.Tensor, list[tuple]]:
    """Return the rows of the stream that a rank holds, and its segments over the keys of the whole stream."""
    rows, segments, start, begin = [], [], 0, 0
    for length in lengths:
        part = length // (2 * ranks)
        for chunk in (rank, 2 * ranks - 1 - rank):
            position = chunk * part
            rows.append(torch.arange(start + position, start + position + part))
            segments.append((begin, part, start, position + part, position))
            begin += part
        start += length
    return torch.cat(rows), segments


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "d"),
    [
        (DOCUMENTS, 3, 3, 128),
        (DOCUMENTS, 4, 4, 64),
        ([16384], 2, 2, 128),
        ([4096], 16, 16, 128),
        ([1024] * 8, 6, 6, 64),
        ([8192], 8, 1, 128),
        ([4096, 4096], 4, 2, 64),
    ],
    ids=["documents 128", "documents 64", "one of 16K", "one of 4K", "eight of 1K", "8 heads on 1", "4 heads on 2"],
)
def test_blocks_of_two_ranks_give_the_results_of_one_call(lengths, heads, kv_heads, d):
    """The rows of each rank attend to all keys. o and dq are equal, and so are the sums of dk and dv over the ranks."""
    x = make_inputs("mean -11", s=sum(lengths), h=heads, h_kv=kv_heads, d=d, dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q, k, v = (t[0].requires_grad_() for t in (x.q, x.k, x.v))
    o = stickbreaking_attention_varlen(q, k, v, cu_seqlens)
    whole = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), x.do[0]), strict=True)) | {"o": o}
    options = {"scale": d**-0.5, **OPTIONS}
    sums = {name: torch.zeros(x.k.shape, dtype=torch.float32) for name in ("dk", "dv")}
    for rank in range(2):
        rows, segments = zigzag(lengths, rank, 2)
        table = torch.tensor(segments, dtype=torch.int32)
        local, do = x.q[:, rows].contiguous(), x.do[:, rows].contiguous()
        forward, backward = torch.ops.megatron_sb.block_forward, torch.ops.megatron_sb.block_backward
        for _ in range(5):
            o, _, edge, mass = forward(local, x.k, x.v, table, None, out_dtype=torch.bfloat16, **options)
            dq, dk, dv, _ = backward(do, local, x.k, x.v, table, edge, mass, None, None, **options)
        assert max(relative_errors(o[0], whole["o"][rows])) <= 2**-7
        assert max(relative_errors(dq[0], whole["dq"][rows])) <= 2**-7
        sums["dk"] += dk
        sums["dv"] += dv
    for name, total in sums.items():
        assert max(relative_errors(total[0], whole[name])) <= 2**-7, name


@pytest.mark.parametrize("d", [64, 128])
def test_the_last_quarter_of_the_queries(d):
    """Queries at the end of a sequence, as in a prefill against a cache, give the results of the whole sequence."""
    s, s_k = 4096, 16384
    x = make_inputs("mean -11", b=2, s=s_k, h=12, d=d, dtype=torch.bfloat16)
    x.do[:, :-s] = 0
    whole = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    o = stickbreaking_attention(*whole)
    expected = torch.autograd.grad(o, whole, x.do)
    part = [t.detach().clone().requires_grad_() for t in (x.q[:, -s:], x.k, x.v)]
    for _ in range(5):
        o_part = stickbreaking_attention(*part)
        actual = torch.autograd.grad(o_part, part, x.do[:, -s:])
    assert max(relative_errors(o_part, o[:, -s:])) <= 2**-7
    for name, a, e in zip(("dq", "dk", "dv"), actual, (expected[0][:, -s:], *expected[1:]), strict=True):
        assert max(relative_errors(a, e)) <= 2**-7, name
