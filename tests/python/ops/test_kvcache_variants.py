"""KV caches of keys with forget gates, Euclidean logits and biases, which store wider keys."""

import itertools

import pytest
import torch
from support.caches import VariantCase, valid_arguments
from support.messages import mentions
from support.variants import VARIANTS, WITHOUT_BIASES, make_variant, reach_of

import megatron_sb as sb
from megatron_sb.ops.kvcache import attend_to_filled, keys_and_gates, stored_head_dim, stored_keys

pytestmark = pytest.mark.usefixtures("device")
ops = torch.ops.megatron_sb
variants = pytest.mark.parametrize("name", VARIANTS)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=["fp32", "fp64", "bf16", "fp16"]
)
ENDS = [300, 0, 1, 2, 70, 129]  # some sequences are shorter than the number of queries


@pytest.mark.parametrize("block_size", [None, 16, 7], ids=lambda size: f"blocks {size}" if size else "contiguous")
@pytest.mark.parametrize("s_q", [1, 5, 40])  # 40 queries of two heads are more rows than the decode kernel supports
@variants
@dtypes
def test_ragged_lengths(name, dtype, s_q, block_size):
    """Sequences may have any length, also 0. The cache holds NaN outside of them, also in place of gates."""
    VariantCase(name, ENDS, s_q=s_q, block_size=block_size, dtype=dtype, capacity=320).assert_accurate()


@pytest.mark.parametrize(("d", "d_v"), [(128, 128), (40, 24), (8, 256), (200, 64)])
@pytest.mark.parametrize("block_size", [None, 16])
@variants
@dtypes
def test_head_dims(name, dtype, d, d_v, block_size):
    VariantCase(name, [200, 77], s_q=2, d=d, d_v=d_v, dtype=dtype, block_size=block_size).assert_accurate()


@pytest.mark.parametrize("regime", ["randn", "mean -3.2", "saturated +15"])
@dtypes
def test_regimes_of_gates(dtype, regime):
    """With logits of +15 the odds of beta are f / (1 - f), and no row is used up at its first key."""
    sizes = {"firsts": [0, 64], "attend_current": True, "h": 8, "h_kv": 1}
    VariantCase("gated", [700, 650], regime, dtype=dtype, **sizes).assert_accurate()


@pytest.mark.parametrize("block_size", [None, 16])
@variants
def test_appending_stored_keys(name, block_size):
    """New keys that the call appends give the results and caches of keys that were there before."""
    case = VariantCase(name, [40, 21], s_q=3, capacity=48, block_size=block_size)
    (q, k_cache, v_cache), options = case.arguments()
    expected = sb.stickbreaking_attention_with_kvcache(q, k_cache, v_cache, **options)
    new = [torch.stack([x[i, end - 3 : end] for i, end in enumerate([40, 21])]) for x in (case.caches.x.k, case.x.v)]
    caches = [k_cache.clone(), v_cache.clone()]
    for cache in caches:
        for i, end in enumerate([40, 21]):
            for row in range(end - 3, end):
                block, slot = (i, row) if block_size is None else (options["block_table"][i, row // 16], row % 16)
                cache[block, slot] = torch.nan
    options |= {"cache_seqlens": options["cache_seqlens"] - 3, "k": new[0], "v": new[1]}
    assert torch.equal(sb.stickbreaking_attention_with_kvcache(q, *caches, **options), expected)
    for cache, whole in zip(caches, (k_cache, v_cache), strict=True):
        torch.testing.assert_close(cache, whole, rtol=0, atol=0, equal_nan=True)


@dtypes
def test_stored_keys_keep_24_bits_of_a_gate(dtype):
    """The gates of a cache are those that were stored, and so is the distance of a nearly open gate from 1."""
    k = torch.randn(2, 5, 3, 16, dtype=dtype)
    gate = (1 - torch.logspace(-6, -0.1, 30, dtype=torch.float64)).view(2, 5, 3).float()
    given = gate.double() if dtype == torch.float64 else gate
    keys, gates = keys_and_gates(stored_keys(k, forget_gate=given), 16, forget_gate=True)
    assert torch.equal(keys, k)
    smallest = 2.0**-24 if dtype == torch.float16 else 0.0  # the smallest positive fp16 number
    assert (gates.float() - gate).abs().max() <= smallest
    assert keys_and_gates(k, 16)[1] is None
    with pytest.raises(ValueError, match=mentions("stored 24 16")):
        keys_and_gates(k, 16, forget_gate=True)


def test_widths():
    """Biases and Euclidean logits share their columns."""
    k, values = torch.randn(1, 2, 3, 16), torch.ones(1, 2, 3)
    for logits, gated, biased in itertools.product(("dot", "euclidean"), (False, True), (False, True)):
        columns = 8 * (gated + (biased or logits == "euclidean"))
        options = {"logits": logits, "forget_gate": gated, "key_bias": biased}
        assert stored_head_dim(64, **options) == 64 + columns
        tensors = {name: values if options[name] else None for name in ("forget_gate", "key_bias")}
        stored = stored_keys(k, logits=logits, **tensors)
        assert stored.shape[-1] == 16 + columns
        keys, gates = keys_and_gates(stored, 16, **options)
        assert torch.equal(keys, k) and (torch.equal(gates, values) if gated else gates is None)
    assert stored_keys(k) is k
    with pytest.raises(TypeError, match=mentions("head_dim integer NoneType")):
        stored_head_dim(None)
    for head_dim in (0, -8, 12.5):
        with pytest.raises(ValueError, match=mentions(f"head_dim integer 1 {head_dim}")):
            stored_head_dim(head_dim)
    with pytest.raises(TypeError, match=mentions("stored torch.Tensor list")):
        keys_and_gates([1.0], 16)


@pytest.mark.parametrize("name", ["biased", "biased euclidean", "gated biased"])
def test_steps_give_the_result_of_one_forward(name):
    """A KVCache stores the bias of a key for its scale, without its gradient. That of a query belongs to the call."""
    x, options = make_variant(name, b=2, s=12, h=4, h_kv=2, d=16, d_v=8)
    options["scale"] = 0.3
    expected, expected_mass = sb.stickbreaking_attention(x.q, x.k, x.v, return_mass=True, **options)
    query_bias, key_bias, gate = (options.pop(tensor, None) for tensor in ("query_bias", "key_bias", "forget_gate"))
    key_bias.requires_grad_()
    of_cache = {"forget_gate": gate is not None, "key_bias": True}
    cache = sb.KVCache(2, 16, 2, 16, 8, **of_cache, **options)
    for begin, end in itertools.pairwise((0, 7, 8, 12)):
        cache.append(*(t if t is None else t[:, begin:end] for t in (x.k, x.v, gate, key_bias)))
        o, mass = attend_to_filled(
            x.q[:, begin:end], cache.k, cache.v, end, query_bias=query_bias[:, begin:end], return_mass=True,
            **of_cache, **options,
        )  # fmt: skip
        torch.testing.assert_close(o, expected[:, begin:end], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mass, expected_mass[:, :, begin:end], rtol=1e-4, atol=1e-5)


WITH_COLUMNS = {"key_bias": True, "k_cache": torch.randn(2, 9, 2, 24)}
INVALID = {
    "cache without gates": ({"forget_gate": True}, ValueError, "k_cache 24 stored_keys 16"),
    "cache without norms": ({"logits": "euclidean"}, ValueError, "k_cache 24 stored_keys 16"),
    "new keys without gates": (
        {"forget_gate": True, "k_cache": torch.randn(2, 9, 2, 24), "k": torch.randn(2, 1, 2, 16),
         "v": torch.randn(2, 1, 2, 16)},
        ValueError, "k 24 stored_keys 16",
    ),
    "cache with gates": ({"k_cache": torch.randn(2, 9, 2, 24)}, ValueError, "k_cache head_dim 16 24"),
    "cache without biases": ({"key_bias": True}, ValueError, "k_cache 24 stored_keys 16"),
    "a query_bias without columns": ({"query_bias": torch.ones(2, 1, 4)}, ValueError, "key_bias True query_bias False"),
    "shape of query_bias": (
        {"query_bias": torch.ones(2, 1, 2), **WITH_COLUMNS}, ValueError, "query_bias [2, 1, 4] [2, 1, 2]"
    ),
    "dtype of query_bias": (
        {"query_bias": torch.ones(2, 1, 4).half(), **WITH_COLUMNS}, TypeError, "query_bias Float Half"
    ),
    "a query_bias that requires a gradient": (
        {"query_bias": torch.ones(2, 1, 4).requires_grad_(), **WITH_COLUMNS}, ValueError, "query_bias gradient"
    ),
    "no scale": ({"scale": 0.0, **WITH_COLUMNS}, ValueError, "scale key_bias 0"),
    "a gate is a tensor": ({"forget_gate": torch.ones(2, 9, 2)}, TypeError, "forget_gate Tensor"),
    "a key_bias is a tensor": ({"key_bias": torch.ones(2, 9, 2)}, TypeError, "key_bias Tensor"),
    "query_bias is a flag": ({"query_bias": True}, TypeError, "query_bias bool"),
    "unknown logits": ({"logits": "cosine"}, ValueError, "logits cosine"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), INVALID.values(), ids=INVALID)
def test_an_invalid_argument_raises_an_error(device, changes, error, words):
    changes = {
        name: x.to(device).detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for name, x in changes.items()
    }
    with pytest.raises(error, match=mentions(words)):
        sb.stickbreaking_attention_with_kvcache(**{**valid_arguments(), **changes})


@pytest.mark.parametrize("flags", [{"key_bias": True}, {"logits": "euclidean"}], ids=str)
def test_autocast_of_stored_numbers(flags, device):
    """The columns of a number have another unit in fp16. bf16 and fp32 have the same."""
    q, k, v = (torch.randn(1, 24, 2, 16, device=device) for _ in range(3))
    bias = torch.randn(1, 24, 2, device=device) if "key_bias" in flags else None
    filled = {"cache_seqlens": torch.tensor([24], dtype=torch.int32, device=device)} | flags
    stored = stored_keys(k, key_bias=bias, logits=flags.get("logits", "dot"))
    expected = sb.stickbreaking_attention_with_kvcache(q, stored, v, **filled)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = sb.stickbreaking_attention_with_kvcache(q, stored, v, **filled)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.1)
    with (
        torch.autocast(device, dtype=torch.float16),
        pytest.raises(TypeError, match=mentions("k_cache dtype autocast Half stored keys biases Float")),
    ):
        sb.stickbreaking_attention_with_kvcache(q, stored, v, **filled)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_stored_keys_under_autocast(dtype, device):
    """Keys are stored in their own dtype, whatever that of autocast is."""
    k, of_key = torch.randn(2, 9, 2, 16, dtype=torch.bfloat16), torch.rand(2, 9, 2)
    for options in ({"forget_gate": of_key}, {"key_bias": of_key}, {"logits": "euclidean", "forget_gate": of_key}):
        with torch.autocast(device, dtype=dtype):
            stored = stored_keys(k, **options)
        assert stored.dtype == k.dtype and torch.equal(stored, stored_keys(k, **options))


@variants
def test_opcheck(name):
    (q, k, v), options = VariantCase(name, [30, 41], s_q=2, d=16).arguments()
    euclidean = options["logits"] == "euclidean"
    flags = {"forget_gate": options["forget_gate"], "key_bias": options["key_bias"]}
    of_query = {"query_bias": options["query_bias"], "euclidean": euclidean}
    tensors = (q, k.nan_to_num(), v.nan_to_num(), options["cache_seqlens"])
    torch.library.opcheck(ops.attention_kvcache.default, tensors, flags | of_query)
    of_keys = {tensor: torch.rand(2, 1, 2) if stored else None for tensor, stored in flags.items()}
    key = q[:, :1, :2].contiguous()
    torch.library.opcheck(ops.keys_for_blocks.default, (key,), {"euclidean": euclidean, "scale": 0.3, **of_keys})
    torch.library.opcheck(ops.queries_for_blocks.default, (q,), of_query)


class TestModule:
    """StickBreakingSelfAttention with a KVCache."""

    @pytest.mark.parametrize("name", WITHOUT_BIASES)
    def test_steps_give_the_result_of_one_forward(self, name):
        """The steps are a prompt, then several positions, then single positions."""
        logits, gated = WITHOUT_BIASES[name][0], bool(WITHOUT_BIASES[name][1])
        module = sb.StickBreakingSelfAttention(64, 4, 2, logits=logits, forget_gate=gated, scale=0.3, **reach_of(name))
        if gated:
            torch.nn.init.normal_(module.gate_proj.bias)  # gates of all sizes
        cache = sb.KVCache(3, 32, 2, 16, logits=logits, forget_gate=gated)
        x = torch.randn(3, 21, 64)
        with torch.no_grad():
            expected = module(x)
            steps = [module(part, cache=cache) for part in x.split([11, 4, 1, 1, 1, 3], dim=1)]
        assert cache.length == 21
        torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("option", [{"forget_gate": True}, {"logits": "euclidean"}], ids=str)
    def test_a_cache_of_another_variant_raises_an_error(self, option):
        x, (name,) = torch.randn(3, 5, 64), option
        plain, variant = sb.StickBreakingSelfAttention(64, 4, 2), sb.StickBreakingSelfAttention(64, 4, 2, **option)
        with torch.no_grad():
            for module, cache in ((plain, sb.KVCache(3, 8, 2, 16, **option)), (variant, sb.KVCache(3, 8, 2, 16))):
                with pytest.raises(ValueError, match=mentions(f"cache {name}")):
                    module(x, cache=cache)
                assert cache.length == 0

    def test_a_cache_of_biases_raises_an_error(self):
        """A layer has no biases."""
        module, cache = sb.StickBreakingSelfAttention(64, 4, 2), sb.KVCache(3, 8, 2, 16, key_bias=True)
        with (
            torch.no_grad(),
            pytest.raises(ValueError, match=mentions("cache key_bias=False this layer key_bias=True")),
        ):
            module(torch.randn(3, 5, 64), cache=cache)
        assert cache.length == 0

    @pytest.mark.parametrize("name", ["forget_gate", "key_bias"])
    def test_append_needs_the_gates_and_biases(self, name):
        k = torch.randn(2, 5, 3, 16)
        cache = sb.KVCache(2, 8, 3, 16, **{name: True})
        with pytest.raises(ValueError, match=mentions(f"{name} tensor None")):
            cache.append(k, k)
        with pytest.raises(ValueError, match=mentions(f"{name} 5 3 4")):
            cache.append(k, k, **{name: torch.rand(2, 5, 4)})
        with pytest.raises(ValueError, match=mentions(f"{name} None tensor")):
            sb.KVCache(2, 8, 3, 16).append(k, k, **{name: torch.rand(2, 5, 3)})
        assert cache.length == 0


INVALID_KEYS = {
    "head_dim": ({"k": torch.randn(1, 2, 3, 12)}, ValueError, "k head_dim 12 8"),
    "dimensions": ({"k": torch.randn(16)}, ValueError, "k 1 4"),
    "integers": ({"k": torch.ones(1, 2, 3, 16, dtype=torch.int32)}, TypeError, "k Int"),
    "shape of the gates": ({"forget_gate": torch.rand(1, 2, 4)}, ValueError, "forget_gate [1, 2, 3] [1, 2, 4]"),
    "dtype of the gates": ({"forget_gate": torch.rand(1, 2, 3).double()}, TypeError, "forget_gate Double"),
    "gates are no tensor": ({"forget_gate": 0.5}, TypeError, "forget_gate float"),
    "shape of the biases": ({"key_bias": torch.rand(1, 2, 4)}, ValueError, "key_bias [1, 2, 3] [1, 2, 4]"),
    "dtype of the biases": ({"key_bias": torch.rand(1, 2, 3).double()}, TypeError, "key_bias Double"),
    "biases are no tensor": ({"key_bias": True}, TypeError, "key_bias bool"),
    "no scale": ({"key_bias": torch.rand(1, 2, 3), "scale": 0}, ValueError, "scale 0"),
    "logits": ({"logits": "cosine"}, ValueError, "logits cosine"),
    "too wide": ({"k": torch.randn(1, 2, 3, 256), "logits": "euclidean"}, ValueError, "k head_dim 248 256"),
    "too wide with biases": (
        {"k": torch.randn(1, 2, 3, 256), "key_bias": torch.rand(1, 2, 3)},
        ValueError,
        "k head_dim 248 256",
    ),
}


@pytest.mark.parametrize(("changes", "error", "words"), INVALID_KEYS.values(), ids=INVALID_KEYS)
def test_stored_keys_reject_invalid_arguments(device, changes, error, words):
    arguments = {"k": torch.randn(1, 2, 3, 16), **changes}
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with pytest.raises(error, match=mentions(words)):
        stored_keys(**moved)
