"""Attention to a KV cache on a GPU: graphs, synchronisation, determinism, long caches, early exit."""

import math

import pytest
import torch
from support.caches import CacheCase, assert_accurate, attend
from support.cuda import captured, no_synchronisation

from megatron_sb import stickbreaking_attention_with_kvcache

pytestmark = pytest.mark.gpu

every_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
paged = pytest.mark.parametrize("block_size", [None, 64], ids=["contiguous", "paged"])
LONG = 65536


def assert_same(actual, expected) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("threshold", [0.0, 2.0**-24])
@pytest.mark.parametrize("regime", ["mean -11", "mean -8", "mean -3.2", "randn"])
@paged
@every_dtype
def test_many_splits(dtype, block_size, regime, threshold):
    """64K keys of one sequence and few heads use the maximum number of splits."""
    sizes = {"h": 2, "h_kv": 1, "d": 128, "block_size": block_size, "mass_threshold": threshold}
    assert_accurate(CacheCase([LONG - 37], capacity=LONG, regime=regime, dtype=dtype, **sizes))


@pytest.mark.parametrize(("h", "h_kv", "d"), [(32, 32, 128), (12, 12, 128), (32, 8, 128), (24, 24, 64), (8, 1, 256)])
@every_dtype
def test_shapes_of_models(dtype, h, h_kv, d):
    """Sequences of different lengths in a batch, 4K keys."""
    assert_accurate(CacheCase([4096, 3001, 64, 17], h=h, h_kv=h_kv, d=d, regime="mean -8", dtype=dtype))


@pytest.mark.parametrize("ends", [[LONG], [9000, 200, 9000]], ids=["one", "three"])
@pytest.mark.parametrize("regime", ["mean -11", "mean -6", "randn", "alternating"])
@paged
@every_dtype
def test_bitwise_deterministic(dtype, block_size, regime, ends):
    """Ten runs with early exit are bitwise equal while another stream works: timing does not affect the result."""
    case = CacheCase(ends, h=4, h_kv=2, d=128, regime=regime, dtype=dtype, block_size=block_size, mass_threshold=2**-24)
    tensors, options = case.arguments()
    first = stickbreaking_attention_with_kvcache(*tensors, **options, return_mass=True)
    noise, other = torch.randn(2048, 2048), torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(other):
            torch.mm(noise, noise)
        assert_same(stickbreaking_attention_with_kvcache(*tensors, **options, return_mass=True), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@paged
def test_graph(dtype, block_size):
    """A captured call can be replayed while the sequences grow."""
    case = CacheCase([5000, 700], s_q=2, d=128, dtype=dtype, block_size=block_size, capacity=5120)
    (q, k, v), options = case.arguments()
    k, v = k.nan_to_num(), v.nan_to_num()
    if block_size is not None:
        options["block_table"] = options["block_table"].clamp(max=k.shape[0] - 1)

    def call():
        return stickbreaking_attention_with_kvcache(q, k, v, **options, return_mass=True)

    graph, results = captured(call)
    for ends in ([5000, 700], [5001, 701], [0, 5120], [1, 33]):
        options["cache_seqlens"].copy_(torch.tensor(ends, dtype=torch.int32))
        q.copy_(torch.randn_like(q))
        graph.replay()
        assert_same(results, call())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@paged
def test_no_synchronisation(dtype, block_size):
    """No call synchronises with the device."""
    tensors, options = CacheCase([500, 30], dtype=dtype, block_size=block_size, firsts=[3, 0]).arguments()
    stickbreaking_attention_with_kvcache(*tensors, **options)
    with no_synchronisation():
        stickbreaking_attention_with_kvcache(*tensors, **options)


@every_dtype
def test_batch_elements_are_independent(dtype):
    """A sequence full of NaN does not change the results of the other sequences."""
    case = CacheCase([3000, 2000, 3000], h=8, h_kv=2, d=64, dtype=dtype)
    (q, k, v), options = case.arguments()
    expected = stickbreaking_attention_with_kvcache(q, k, v, **options, return_mass=True)
    q[1], k[1], v[1] = torch.nan, torch.nan, torch.nan
    actual = stickbreaking_attention_with_kvcache(q, k, v, **options, return_mass=True)
    assert actual[0][1].isnan().all()
    assert_same((x[::2] for x in actual), (x[::2] for x in expected))


@pytest.mark.parametrize("later", [1, 3, 5])
@pytest.mark.parametrize(("name", "value"), [("k", math.nan), ("v", math.nan), ("v", math.inf), ("v", -math.inf)])
@pytest.mark.parametrize("d", [64, 128, 256])
@paged
@every_dtype
def test_keys_that_a_query_does_not_see(dtype, block_size, d, name, value, later):
    """A NaN or an infinity in the key of a later query changes no earlier query, not even within a tile of 32 keys."""
    sizes = {"s_q": 6, "h": 4, "h_kv": 2, "d": d, "attend_current": True, "block_size": block_size}
    case = CacheCase([200, 65, 6], dtype=dtype, **sizes)
    expected = attend(case)
    for i, end in enumerate(case.ends):
        getattr(case.x, name)[i, end - 6 + later] = value
    o, mass = attend(case)
    torch.testing.assert_close(o[:, :later], expected[0][:, :later])
    torch.testing.assert_close(mass[..., :later], expected[1][..., :later], rtol=1e-4, atol=1e-6)
    assert not o[:, later:].isfinite().any()


@every_dtype
def test_used_up_rows_do_not_read_older_keys(dtype):
    """NaN in keys older than one that takes the whole stick has no effect, for every number of splits."""
    case = CacheCase([LONG], h=2, h_kv=1, d=128, regime="mean -11", dtype=dtype, mass_threshold=2.0**-24)
    (q, k, v), options = case.arguments()
    k[0, LONG - 200, :, 0] *= -4  # a logit of 44
    k[0, : LONG - 4096], v[0, : LONG - 4096] = torch.nan, torch.nan
    o, mass = stickbreaking_attention_with_kvcache(q, k, v, **options, return_mass=True)
    assert o.isfinite().all() and (mass <= 2.0**-24).all()


@every_dtype
def test_views_of_a_fused_cache(dtype):
    """Keys and values interleaved in one tensor, heads before rows, give bitwise the results of contiguous ones."""
    case = CacheCase([900, 800], h=8, h_kv=2, d=64, dtype=dtype)
    q, k, v = case.x.q, case.x.k, case.x.v
    seqlens = torch.tensor([900, 800], dtype=torch.int32)
    expected = stickbreaking_attention_with_kvcache(q, k, v, cache_seqlens=seqlens, return_mass=True)
    fused = torch.stack([k, v], dim=3).transpose(1, 2).contiguous().transpose(1, 2)
    views = (q, fused[..., 0, :], fused[..., 1, :])
    assert_same(stickbreaking_attention_with_kvcache(*views, cache_seqlens=seqlens, return_mass=True), expected)


def test_other_stream():
    """All work, including the reset of the counters, is on the current stream: two streams do not interfere."""
    cases = [CacheCase([30000], h=4, h_kv=2, d=128, dtype=torch.bfloat16, seed=seed) for seed in (0, 1)]
    expected = [attend(case) for case in cases]
    arguments = [case.arguments() for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, (tensors, options) in zip(streams, arguments, strict=True):
            with torch.cuda.stream(stream):
                found.append(stickbreaking_attention_with_kvcache(*tensors, **options, return_mass=True))
        torch.cuda.synchronize()
        for actual, wanted in zip(found, expected, strict=True):
            assert_same(actual, wanted)
