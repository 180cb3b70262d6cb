"""Attention to a KV cache against the float64 oracle; what it refuses; KVCache in a module."""

import pytest
import torch
from support.caches import CacheCase, assert_accurate, attend
from support.inputs import STRIDES, strided
from support.messages import mentions

import megatron_sb as sb
from megatron_sb.nn import self_attention

pytestmark = pytest.mark.usefixtures("device")
ops = torch.ops.megatron_sb

ENDS = [300, 0, 1, 2, 70, 129]  # shorter than s_q too
dtypes = pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)


@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize("block_size", [None, 16, 7], ids=lambda size: f"blocks {size}" if size else "contiguous")
@pytest.mark.parametrize("s_q", [1, 5])
@dtypes
def test_ragged_lengths(dtype, s_q, block_size, attend_current):
    """Sequences of all lengths, empty ones too, in a cache that holds NaN wherever no key is."""
    sizes = {"s_q": s_q, "block_size": block_size, "attend_current": attend_current, "capacity": 320}
    assert_accurate(CacheCase(ENDS, dtype=dtype, **sizes))


@pytest.mark.parametrize(("d", "d_v"), [(128, 128), (40, 24), (8, 256), (256, 256)])
@dtypes
def test_head_dims(dtype, d, d_v):
    assert_accurate(CacheCase([200, 77], s_q=2, d=d, d_v=d_v, dtype=dtype))


@pytest.mark.parametrize(("h", "h_kv", "s_q"), [(3, 3, 1), (8, 1, 3), (16, 2, 1), (12, 1, 7), (8, 2, 30)])
@dtypes
def test_query_rows(dtype, h, h_kv, s_q):
    """Query rows of a KV head in one tile of 16, in several, and more than a decode kernel takes."""
    assert_accurate(CacheCase([100, 45], h=h, h_kv=h_kv, s_q=s_q, d=64, dtype=dtype))


@pytest.mark.parametrize("block_size", [None, 16])
@dtypes
def test_left_padding(dtype, block_size):
    sizes = {"firsts": [0, 10, 99, 100, 64], "s_q": 3, "block_size": block_size}
    assert_accurate(CacheCase([100, 100, 100, 100, 90], dtype=dtype, **sizes))


@pytest.mark.parametrize("threshold", [0.0, 2.0**-24])
@pytest.mark.parametrize("regime", ["randn", "mean -3.2", "mean -11", "saturated +5", "saturated +30", "alternating"])
@dtypes
def test_regimes(dtype, regime, threshold):
    """Sticks that end at once, after some dozens of keys, and never."""
    assert_accurate(CacheCase([700, 650], regime=regime, mass_threshold=threshold, dtype=dtype))


def test_skipping_changes_what_the_threshold_allows():
    case = CacheCase([700], regime="mean -3.2", mass_threshold=2.0**-4)
    skipped, (whole, _) = attend(case)[0], case.oracle()
    assert (skipped - whole).abs().max() <= 2.0**-4 * case.x.v.abs().max()


@pytest.mark.parametrize("kind", STRIDES)
def test_strides(kind):
    """Bitwise what contiguous tensors give."""
    case = CacheCase([70, 70], s_q=70)
    seqlens = torch.tensor([70, 33], dtype=torch.int32)
    views = strided(kind, case.x)
    expected = sb.stickbreaking_attention_with_kvcache(case.x.q, case.x.k, case.x.v, cache_seqlens=seqlens)
    assert torch.equal(sb.stickbreaking_attention_with_kvcache(*views, cache_seqlens=seqlens), expected)


@pytest.mark.parametrize("empty", [{"b": 0}, {"s_q": 0}, {"s_cache": 0}, {"blocks": 0}], ids=str)
def test_nothing_to_do(empty):
    """No sequences, no queries, no keys, no blocks."""
    b, s_q, s_cache = empty.get("b", 2), empty.get("s_q", 3), empty.get("s_cache", 9)
    q, k = torch.randn(b, s_q, 4, 16), torch.randn(b, s_cache, 2, 16)
    options = {"cache_seqlens": torch.full((b,), 0 if "b" not in empty else 5, dtype=torch.int32)}
    if "blocks" in empty:
        k, options["block_table"] = torch.randn(0, 8, 2, 16), torch.zeros(b, 0, dtype=torch.int32)
    o, mass = sb.stickbreaking_attention_with_kvcache(q, k, k, **options, return_mass=True)
    assert o.shape == q.shape and mass.shape == (b, 4, s_q)
    assert not o.any() and (mass == 1).all()


def arguments(**changed):
    """Of a call that works, with changes."""
    taken = {
        "q": torch.randn(2, 1, 4, 16),
        "k_cache": torch.randn(2, 9, 2, 16),
        "v_cache": torch.randn(2, 9, 2, 16),
        "cache_seqlens": torch.tensor([9, 4], dtype=torch.int32),
    }
    return taken | changed


WRONG = {
    "a list": ({"cache_seqlens": [9, 4]}, TypeError, "cache_seqlens list"),
    "rank of q": ({"q": torch.randn(2, 4, 16)}, ValueError, "q 3 4"),
    "rank of k": ({"k_cache": torch.randn(9, 2, 16)}, ValueError, "k_cache 3 4"),
    "k without dimensions": ({"k_cache": torch.tensor(0.0)}, ValueError, "k_cache 0 4"),
    "v without dimensions": ({"v_cache": torch.tensor(0.0)}, ValueError, "v_cache 0 4"),
    "dtype": ({"v_cache": torch.randn(2, 9, 2, 16).bfloat16()}, TypeError, "v_cache BFloat16"),
    "batch": ({"q": torch.randn(3, 1, 4, 16)}, ValueError, "cache_seqlens 2 q 3"),
    "head_dim": ({"q": torch.randn(2, 1, 4, 24)}, ValueError, "k_cache head_dim 16 q 24"),
    "heads": ({"q": torch.randn(2, 1, 3, 16)}, ValueError, "q 3 heads k_cache 2"),
    "v": ({"v_cache": torch.randn(2, 8, 2, 16)}, ValueError, "v_cache 8 k_cache 9"),
    "int64": ({"cache_seqlens": torch.tensor([9, 4])}, TypeError, "cache_seqlens Long"),
    "scale": ({"scale": float("nan")}, ValueError, "scale nan"),
    "threshold": ({"mass_threshold": 1.0}, ValueError, "mass_threshold 1.0"),
    "table's rank": ({"block_table": torch.zeros(2, dtype=torch.int32)}, ValueError, "block_table 1"),
    "gradient": ({"q": torch.randn(2, 1, 4, 16, requires_grad=True)}, ValueError, "q gradient"),
}
WRONG_VALUES = {
    "too long": ({"cache_seqlens": torch.tensor([9, 10], dtype=torch.int32)}, "cache_seqlens sequence 1 10 9"),
    "negative": ({"cache_seqlens": torch.tensor([-1, 9], dtype=torch.int32)}, "cache_seqlens sequence 0 -1 9"),
    "padding": ({"cache_leftpad": torch.tensor([0, 5], dtype=torch.int32)}, "cache_leftpad sequence 1 5 4"),
    "block": (
        {"block_table": torch.tensor([[0], [2]], dtype=torch.int32)},
        "block_table sequence 1 2 0",
    ),
}


@pytest.mark.parametrize(("changed", "error", "words"), WRONG.values(), ids=WRONG)
def test_refused(device, changed, error, words):
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in changed.items()}
    with pytest.raises(error, match=mentions(words)):
        sb.stickbreaking_attention_with_kvcache(**arguments(**there))


@pytest.mark.parametrize(("changed", "words"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_values(device, changed, words):
    """Refused on a CPU; on a GPU clamped, without a look."""
    there = {name: x.to(device) for name, x in changed.items()}
    if device == "cpu":
        with pytest.raises(ValueError, match=mentions(words)):
            sb.stickbreaking_attention_with_kvcache(**arguments(**there))
    else:
        assert sb.stickbreaking_attention_with_kvcache(**arguments(**there)).isfinite().all()


def test_gradients_where_none_are_recorded():
    taken = arguments()
    expected = sb.stickbreaking_attention_with_kvcache(**taken)
    taken["q"].requires_grad_()
    with torch.no_grad():
        assert torch.equal(sb.stickbreaking_attention_with_kvcache(**taken), expected)


@pytest.mark.parametrize("block_size", [None, 16])
def test_opcheck(block_size):
    (q, k, v), options = CacheCase([30, 41], s_q=2, d=16, block_size=block_size, firsts=[0, 5]).arguments()
    tensors = (q, k.nan_to_num(), v.nan_to_num(), options["cache_seqlens"], options.get("block_table"))
    torch.library.opcheck(ops.attention_kvcache.default, (*tensors, options["cache_leftpad"]), {"scale": 0.3})
    torch.library.opcheck(ops.kvcache_forward.default, (*tensors, options["cache_leftpad"]), {"scale": 0.3})


def test_compile():
    """One graph for growing lengths."""

    def model(q, k, v, cache_seqlens):
        o, mass = sb.stickbreaking_attention_with_kvcache(q * 2, k, v, cache_seqlens=cache_seqlens, return_mass=True)
        return o.sin(), mass

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    taken = arguments()
    for ends in ([9, 4], [3, 8]):
        taken["cache_seqlens"] = torch.tensor(ends, dtype=torch.int32)
        for actual, expected in zip(compiled(*taken.values()), model(*taken.values()), strict=True):
            torch.testing.assert_close(actual, expected)


def test_autocast(device):
    taken = arguments()
    narrow = {name: x.bfloat16() if x.is_floating_point() else x for name, x in taken.items()}
    expected = sb.stickbreaking_attention_with_kvcache(**narrow)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(sb.stickbreaking_attention_with_kvcache(**taken), expected)


class TestModule:
    """StickBreakingSelfAttention with a KVCache."""

    @pytest.mark.parametrize("switches", [{}, {"remainder_bias": True, "head_norm": True, "attend_current": True}])
    def test_steps_are_the_whole(self, device, switches):
        """A prompt, some positions at once, and single ones give what one forward gives."""
        module = sb.StickBreakingSelfAttention(64, 4, 2, **switches)
        x, cache = torch.randn(3, 21, 64), sb.KVCache(3, 32, 2, 16)
        with torch.no_grad():
            expected = module(x)
            steps = [module(part, cache=cache) for part in x.split([11, 4, 1, 1, 1, 3], dim=1)]
        assert cache.length == 21
        torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-4, atol=1e-5)

    def test_refused(self):
        module, x, cache = sb.StickBreakingSelfAttention(64, 4, 2), torch.randn(3, 5, 64), sb.KVCache(3, 8, 2, 16)
        with pytest.raises(ValueError, match=r"cache.*torch\.no_grad"):
            module(x, cache=cache)
        with torch.no_grad():
            with pytest.raises(TypeError, match=mentions("cache list")):
                module(x, cache=[])
            with pytest.raises(ValueError, match=mentions("cu_seqlens cache")):
                module(x[0], cu_seqlens=torch.tensor([0, 5], dtype=torch.int32), cache=cache)
            for variant in ({"forget_gate": True}, {"logits": "euclidean"}):
                with pytest.raises(ValueError, match=r"cache.*forget.*logits"):
                    sb.StickBreakingSelfAttention(64, 4, 2, **variant)(x, cache=cache)
            module.cp_group = object()
            with pytest.raises(ValueError, match=mentions("cp_group cache")):
                module(x, cache=cache)
        assert cache.length == 0

    def test_a_call_that_raises_appends_nothing(self, monkeypatch):
        """One whose input wants a gradient, others that fail half-way; a call after them is as without them."""
        module, x, cache = sb.StickBreakingSelfAttention(64, 4, 2), torch.randn(3, 5, 64), sb.KVCache(3, 8, 2, 16)
        module.requires_grad_(False)
        module(x[:, :3], cache=cache)
        with pytest.raises(ValueError, match=r"cache.*torch\.no_grad"):
            module(x[:, 3:].clone().requires_grad_(), cache=cache)
        for part, name in ((self_attention, "attend_to_filled"), (module.out_proj, "forward")):
            with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(part, name, lambda *args, **options: 1 / 0)
                module(x[:, 3:], cache=cache)
        assert cache.length == 3
        torch.testing.assert_close(module(x[:, 3:], cache=cache), module(x)[:, 3:], rtol=1e-4, atol=1e-5)

    def test_cache(self):
        cache, k = sb.KVCache(2, 8, 3, 16, 24, dtype=torch.bfloat16), torch.randn(2, 5, 3, 16).bfloat16()
        v = torch.randn(2, 5, 3, 24).bfloat16()
        cache.append(k, v)
        assert torch.equal(cache.k[:, :5], k) and torch.equal(cache.v[:, :5], v) and cache.length == 5
        with pytest.raises(ValueError, match=mentions("k 5 3")):
            cache.append(k, v)
        with pytest.raises(ValueError, match=mentions("v (2, 5, 3, 16)")):
            cache.append(k, k)
        with pytest.raises(TypeError, match=mentions("k torch.float32 torch.bfloat16")):
            cache.append(k.float(), v)
        with pytest.raises(ValueError, match=mentions("v 4 5")):
            cache.append(k, v[:, :4])
        with pytest.raises(ValueError, match=mentions("max_len 0")):
            sb.KVCache(2, 0, 3, 16)
