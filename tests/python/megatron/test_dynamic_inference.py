"""Megatron-Core's dynamic inference: the attention of a step, and requests that Megatron's own context serves."""

import re

import pytest
import torch
from support.launch import run_worker
from support.messages import mentions

from megatron_sb import reference
from megatron_sb.megatron.dynamic_inference import Requests, attend_to_blocks

HEADS, KV_HEADS, CHANNELS, VALUE_CHANNELS, BLOCK = 4, 2, 8, 16, 4
# Queries and keys of each request: how many requests decode, queries of each, and prompts as (queries, keys).
STEPS = {
    "decode": (1, (5, 12, 1), ()),
    "decode several tokens": (3, (5, 12, 3), ()),
    "prompts": (1, (), ((7, 7), (1, 1), (4, 13))),  # the last one is the second chunk of its prompt
    "both": (1, (9, 30), ((7, 7), (3, 17))),
    "both, several tokens": (3, (9, 30), ((7, 7), (3, 17))),
}
OPTIONS = {"scale": 0.7, "attend_current": True, "reach": (0.5, 6.0)}
GENERATED = {"0": 9, "1": 14, "2": 6, "3": 5, "4": 1, "5": 4}  # REQUESTS of the worker


def make_blocks(keys_of: list[int]) -> tuple[list, list, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys and values of each request, the blocks that hold them, and the block table."""
    counts = [-(-length // BLOCK) for length in keys_of]
    order = torch.randperm(sum(counts) + 3).to(torch.int32).split([*counts, 3])
    table = torch.full((len(keys_of), max(counts) + 2), -1, dtype=torch.int32)
    blocks = [torch.full((sum(counts) + 3, BLOCK, KV_HEADS, d), torch.nan) for d in (CHANNELS, VALUE_CHANNELS)]
    rows = [[torch.randn(length, KV_HEADS, x.shape[-1]).double() for length in keys_of] for x in blocks]
    blocks = [x.double() for x in blocks]
    for request, length in enumerate(keys_of):
        table[request, : counts[request]] = order[request]
        for position in range(length):
            block = order[request][position // BLOCK]
            for x, written in zip(blocks, rows, strict=True):
                x[block, position % BLOCK] = written[request][position]
    return *rows, *blocks, table


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_equals_the_reference(step, options):
    """Also with requests and rows that only fill up the batch. Unused rows of blocks hold NaN."""
    queries_to_decode, decoding, prompts = STEPS[step]
    queries = [*[queries_to_decode] * len(decoding), *(count for count, _ in prompts)]
    lengths = [*decoding, *(length for _, length in prompts)]
    keys, values, key_blocks, value_blocks, table = make_blocks(lengths)
    fill = 2 if prompts else 0
    query = torch.randn(sum(queries) + 5 * bool(prompts), HEADS, CHANNELS).double()
    offsets = torch.tensor([0, *queries, *[0] * fill]).cumsum(0).to(torch.int32)
    requests = Requests(
        num_decoding=len(decoding),
        queries_to_decode=queries_to_decode,
        cu_seqlens_q=offsets,
        seqlens_k=torch.tensor([*lengths, *[0] * fill], dtype=torch.int32),
        block_table=torch.cat([table, torch.full((fill, table.shape[1]), -1, dtype=torch.int32)]),
        max_seqlen_q=max(queries),
        max_seqlen_k=max(lengths),
    )
    out, mass = attend_to_blocks(query, key_blocks, value_blocks, requests, **options)
    assert out.shape == (len(query), HEADS, VALUE_CHANNELS) and mass.shape == (HEADS, len(query))
    for request, (k, v) in enumerate(zip(keys, values, strict=True)):
        rows = slice(offsets[request], offsets[request + 1])
        exact, exact_mass = reference.stickbreaking_attention(
            query[None, rows], k[None], v[None], return_mass=True, **options
        )
        torch.testing.assert_close(out[rows], exact[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(mass[:, rows], exact_mass[0], rtol=0, atol=1e-12)
    assert not out[sum(queries) :].any() and (mass[:, sum(queries) :] == 1).all()


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict:
    return run_worker("megatron_dynamic_inference.py", 1, tmp_path_factory.mktemp("dynamic") / "findings.json")


@pytest.mark.parametrize("model", ["plain", "options"])
def test_requests_get_the_logits_of_their_whole_text(model, findings):
    """In steps with prompts, with a prompt in two chunks, while other requests decode. The oracle is float64."""
    steps, errors = findings[model]["steps"], findings[model]["errors"]
    assert {"0 decode, 2 prompts", "3 decode, 2 prompts", "4 decode, 1 prompts", "4 decode, 0 prompts"} <= set(steps)
    assert errors.keys() == GENERATED.keys()
    assert all(error < 1e-12 for error in errors.values()), errors


def test_what_is_not_supported_raises(findings):
    expected = {
        "forget gates": "inference_context static forget_gate=True --sb-forget-gate",
        "euclidean": "inference_context static logits='euclidean' --sb-logits",
        "latent": "inference_context static --multi-latent-attention",
        "graph of prompts": "use_cuda_graphs_for_non_decode_steps False --decode-only-cuda-graphs",
    }
    assert findings["refusals"].keys() == expected.keys()
    wrong = {name: said for name, said in findings["refusals"].items() if not re.search(mentions(expected[name]), said)}
    assert wrong == {}
