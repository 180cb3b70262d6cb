"""Attention with a KV cache: accuracy against the float64 oracle, invalid arguments, and KVCache in a module."""

import pytest
import torch
from support.caches import CacheCase, assert_accurate, attend, valid_arguments
from support.inputs import STRIDES, strided
from support.messages import mentions

import megatron_sb as sb
from megatron_sb.nn import self_attention

pytestmark = pytest.mark.usefixtures("device")
ops = torch.ops.megatron_sb

ENDS = [300, 0, 1, 2, 70, 129]  # some sequences are shorter than s_q
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
    """Sequences may have any length, also 0. The cache holds NaN outside of them."""
    sizes = {"s_q": s_q, "block_size": block_size, "attend_current": attend_current, "capacity": 320}
    assert_accurate(CacheCase(ENDS, dtype=dtype, **sizes))


@pytest.mark.parametrize(("d", "d_v"), [(128, 128), (40, 24), (8, 256), (256, 256)])
@dtypes
def test_head_dims(dtype, d, d_v):
    assert_accurate(CacheCase([200, 77], s_q=2, d=d, d_v=d_v, dtype=dtype))


@pytest.mark.parametrize(("h", "h_kv", "s_q"), [(3, 3, 1), (8, 1, 3), (16, 2, 1), (12, 1, 7), (8, 2, 30)])
@pytest.mark.parametrize("block_size", [None, 16])
@dtypes
def test_query_rows(dtype, block_size, h, h_kv, s_q):
    """The query rows of a KV head may fill one tile of 16, several tiles, or more than the decode kernel supports."""
    assert_accurate(CacheCase([100, 45], h=h, h_kv=h_kv, s_q=s_q, d=64, dtype=dtype, block_size=block_size))


@pytest.mark.parametrize("block_size", [None, 16])
@dtypes
def test_left_padding(dtype, block_size):
    sizes = {"firsts": [0, 10, 99, 100, 64], "s_q": 3, "block_size": block_size}
    assert_accurate(CacheCase([100, 100, 100, 100, 90], dtype=dtype, **sizes))


@pytest.mark.parametrize("threshold", [0.0, 2.0**-24])
@pytest.mark.parametrize("regime", ["randn", "mean -3.2", "mean -11", "saturated +5", "saturated +30", "alternating"])
@dtypes
def test_regimes(dtype, regime, threshold):
    """Rows may be used up by the first key, by some dozens of keys, or never."""
    assert_accurate(CacheCase([700, 650], regime=regime, mass_threshold=threshold, dtype=dtype))


def test_skipping_stays_within_its_error_bound():
    case = CacheCase([700], regime="mean -3.2", mass_threshold=2.0**-4)
    (skipped, _), (exact, _) = attend(case), case.oracle()
    error = (skipped - exact).abs().max()
    assert 1e-4 < error <= 2.0**-4 * case.x.v.abs().max()  # without skipping, the error would be below 1e-4


@pytest.mark.parametrize("kind", STRIDES)
def test_strides(kind):
    """Other strides give bitwise the same results as contiguous tensors."""
    case = CacheCase([70, 70], s_q=70)
    seqlens = torch.tensor([70, 33], dtype=torch.int32)
    views = strided(kind, case.x)
    expected = sb.stickbreaking_attention_with_kvcache(case.x.q, case.x.k, case.x.v, cache_seqlens=seqlens)
    assert torch.equal(sb.stickbreaking_attention_with_kvcache(*views, cache_seqlens=seqlens), expected)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_the_operator_takes_other_last_strides(name):
    """Also with a block table, and without the public function, which makes the last stride 1."""
    shapes = {"q": (2, 1, 4, 8), "k_cache": (6, 4, 2, 8), "v_cache": (6, 4, 2, 8)}
    arguments = {key: torch.randn(shape) for key, shape in shapes.items()}
    arguments["cache_seqlens"] = torch.tensor([5, 7], dtype=torch.int32)
    arguments["block_table"] = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    operator = torch.ops.megatron_sb.kvcache_forward
    expected, _ = operator(**arguments, cache_leftpad=None, scale=0.3)
    arguments[name] = arguments[name].repeat_interleave(2, dim=-1)[..., ::2]
    assert torch.equal(operator(**arguments, cache_leftpad=None, scale=0.3)[0], expected)


@pytest.mark.parametrize("empty", [{"b": 0}, {"s_q": 0}, {"s_cache": 0}, {"blocks": 0}], ids=str)
def test_empty_inputs(empty):
    """A batch without sequences, queries, keys or blocks gives o = 0 and mass = 1."""
    b, s_q, s_cache = empty.get("b", 2), empty.get("s_q", 3), empty.get("s_cache", 9)
    q, k = torch.randn(b, s_q, 4, 16), torch.randn(b, s_cache, 2, 16)
    options = {"cache_seqlens": torch.full((b,), 0 if "b" not in empty else 5, dtype=torch.int32)}
    if "blocks" in empty:
        k, options["block_table"] = torch.randn(0, 8, 2, 16), torch.zeros(b, 0, dtype=torch.int32)
    o, mass = sb.stickbreaking_attention_with_kvcache(q, k, k, **options, return_mass=True)
    assert o.shape == q.shape and mass.shape == (b, 4, s_q)
    assert not o.any() and (mass == 1).all()


def call_with(changes, device):
    """Make a valid call with some arguments replaced."""
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in changes.items()}
    return sb.stickbreaking_attention_with_kvcache(**{**valid_arguments(), **moved})


INVALID = {
    "cache_seqlens is a list": ({"cache_seqlens": [9, 4]}, TypeError, "cache_seqlens list"),
    "int64 cache_seqlens": ({"cache_seqlens": torch.tensor([9, 4])}, TypeError, "cache_seqlens Long"),
    "q of 3 dimensions": ({"q": torch.randn(2, 4, 16)}, ValueError, "q 3 4"),
    "k of 3 dimensions": ({"k_cache": torch.randn(9, 2, 16)}, ValueError, "k_cache 3 4"),
    "k of 0 dimensions": ({"k_cache": torch.tensor(0.0)}, ValueError, "k_cache 0 4"),
    "v of 0 dimensions": ({"v_cache": torch.tensor(0.0)}, ValueError, "v_cache 0 4"),
    "dtype of v": ({"v_cache": torch.randn(2, 9, 2, 16).bfloat16()}, TypeError, "v_cache BFloat16"),
    "batch of q": ({"q": torch.randn(3, 1, 4, 16)}, ValueError, "cache_seqlens 2 q 3"),
    "head_dim of q": ({"q": torch.randn(2, 1, 4, 24)}, ValueError, "k_cache head_dim 16 q 24"),
    "heads of q": ({"q": torch.randn(2, 1, 3, 16)}, ValueError, "q 3 heads k_cache 2"),
    "rows of v": ({"v_cache": torch.randn(2, 8, 2, 16)}, ValueError, "v_cache 8 k_cache 9"),
    "scale is NaN": ({"scale": float("nan")}, ValueError, "scale nan"),
    "mass_threshold of 1": ({"mass_threshold": 1.0}, ValueError, "mass_threshold 1.0"),
    "block_table of 1 dimension": ({"block_table": torch.zeros(2, dtype=torch.int32)}, ValueError, "block_table 1"),
    "q requires a gradient": ({"q": torch.randn(2, 1, 4, 16, requires_grad=True)}, ValueError, "q gradient"),
}
INVALID_VALUES = {
    "longer than the cache": ({"cache_seqlens": [9, 10]}, "cache_seqlens sequence 1 10 9"),
    "negative length": ({"cache_seqlens": [-1, 9]}, "cache_seqlens sequence 0 -1 9"),
    "padding longer than the sequence": ({"cache_leftpad": [0, 5]}, "cache_leftpad sequence 1 5 4"),
    "no such block": ({"block_table": [[0], [2]]}, "block_table sequence 1 2 0"),
}


@pytest.mark.parametrize(("changes", "error", "words"), INVALID.values(), ids=INVALID)
def test_an_invalid_argument_raises_an_error(device, changes, error, words):
    with pytest.raises(error, match=mentions(words)):
        call_with(changes, device)


@pytest.mark.parametrize(("changes", "words"), INVALID_VALUES.values(), ids=INVALID_VALUES)
def test_invalid_values_raise_an_error_on_a_cpu_and_are_clamped_on_a_gpu(device, changes, words):
    changes = {name: torch.tensor(values, dtype=torch.int32) for name, values in changes.items()}
    if device == "cpu":
        with pytest.raises(ValueError, match=mentions(words)):
            call_with(changes, device)
    else:
        assert call_with(changes, device).isfinite().all()


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v"])
@pytest.mark.parametrize("interface", ["func", "forward_ad"])
def test_forward_mode_raises_an_error(interface, name):
    """The tangent of the result would be 0."""
    arguments = valid_arguments() | {"cache_seqlens": torch.tensor([5, 4], dtype=torch.int32)}
    arguments |= {new: arguments[f"{new}_cache"][:, :1].clone() for new in ("k", "v")}
    x = arguments[name]
    with torch.no_grad(), pytest.raises(ValueError, match=mentions(f"{name} tangent")):
        if interface == "func":
            torch.func.jvp(lambda x: sb.stickbreaking_attention_with_kvcache(**arguments | {name: x}), (x,), (x,))
        else:
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, x)
                sb.stickbreaking_attention_with_kvcache(**arguments | {name: dual})


def test_q_may_require_a_gradient_under_no_grad():
    arguments = valid_arguments()
    expected = sb.stickbreaking_attention_with_kvcache(**arguments)
    arguments["q"].requires_grad_()
    with torch.no_grad():
        assert torch.equal(sb.stickbreaking_attention_with_kvcache(**arguments), expected)


@pytest.mark.parametrize("block_size", [None, 16])
def test_opcheck(block_size):
    (q, k, v), options = CacheCase([30, 41], s_q=2, d=16, block_size=block_size, firsts=[0, 5]).arguments()
    tensors = (q, k.nan_to_num(), v.nan_to_num(), options["cache_seqlens"], options.get("block_table"))
    torch.library.opcheck(ops.attention_kvcache.default, (*tensors, options["cache_leftpad"]), {"scale": 0.3})
    torch.library.opcheck(ops.kvcache_forward.default, (*tensors, options["cache_leftpad"]), {"scale": 0.3})


def test_compile():
    """Compiled calls with two tables of lengths give the results of eager calls."""

    def model(q, k, v, cache_seqlens):
        o, mass = sb.stickbreaking_attention_with_kvcache(q * 2, k, v, cache_seqlens=cache_seqlens, return_mass=True)
        return o.sin(), mass

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    arguments = valid_arguments()
    for ends in ([9, 4], [3, 8]):
        arguments["cache_seqlens"] = torch.tensor(ends, dtype=torch.int32)
        for actual, expected in zip(compiled(*arguments.values()), model(*arguments.values()), strict=True):
            torch.testing.assert_close(actual, expected)


def test_autocast(device):
    arguments = valid_arguments()
    bf16 = {name: x.bfloat16() if x.is_floating_point() else x for name, x in arguments.items()}
    expected = sb.stickbreaking_attention_with_kvcache(**bf16)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(sb.stickbreaking_attention_with_kvcache(**arguments), expected)


class TestModule:
    """StickBreakingSelfAttention with a KVCache."""

    @pytest.mark.parametrize("switches", [{}, {"remainder_bias": True, "head_norm": True, "attend_current": True}])
    def test_steps_give_the_result_of_one_forward(self, device, switches):
        """The steps are a prompt, then several positions, then single positions."""
        module = sb.StickBreakingSelfAttention(64, 4, 2, **switches)
        x, cache = torch.randn(3, 21, 64), sb.KVCache(3, 32, 2, 16)
        with torch.no_grad():
            expected = module(x)
            steps = [module(part, cache=cache) for part in x.split([11, 4, 1, 1, 1, 3], dim=1)]
        assert cache.length == 21
        torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-4, atol=1e-5)

    def test_invalid_calls_raise_errors(self):
        module, x, cache = sb.StickBreakingSelfAttention(64, 4, 2), torch.randn(3, 5, 64), sb.KVCache(3, 8, 2, 16)
        with pytest.raises(ValueError, match=r"cache.*torch\.no_grad"):
            module(x, cache=cache)
        with torch.no_grad():
            with pytest.raises(TypeError, match=mentions("cache list")):
                module(x, cache=[])
            with pytest.raises(ValueError, match=mentions("cu_seqlens cache")):
                module(x[0], cu_seqlens=torch.tensor([0, 5], dtype=torch.int32), cache=cache)
            module.cp_group = object()
            with pytest.raises(ValueError, match=mentions("cp_group cache")):
                module(x, cache=cache)
        assert cache.length == 0

    @pytest.mark.parametrize("options", [{"forget_gate": True}, {"logits": "euclidean"}], ids=str)
    def test_the_cache_must_have_the_variants_of_the_layer(self, options):
        module, cache = sb.StickBreakingSelfAttention(64, 4, 2), sb.KVCache(3, 8, 2, 16, **options)
        ((name, value),) = options.items()
        with torch.no_grad(), pytest.raises(ValueError, match=mentions(f"cache {name} this layer {name}={value!r}")):
            module(torch.randn(3, 5, 64), cache=cache)

    @pytest.mark.parametrize(
        ("sizes", "words"),
        [
            ((2, 8, 2, 16), "cache batch_size=3 x batch_size=2"),
            ((3, 8, 4, 16), "cache num_kv_heads=2 this layer num_kv_heads=4"),
            ((3, 8, 2, 24), "cache head_dim=16 this layer head_dim=24"),
            ((3, 8, 2, 16, 24), "cache head_dim_v=16 this layer head_dim_v=24"),
            ((3, 4, 2, 16), "x 4 cache 5"),
        ],
    )
    def test_the_cache_must_have_the_sizes_of_the_layer_and_of_x(self, sizes, words):
        """The error names what the caller passed, x and cache, and nothing is computed before it."""
        module, cache = sb.StickBreakingSelfAttention(64, 4, 2).requires_grad_(False), sb.KVCache(*sizes)
        module.qkv_proj.register_forward_hook(lambda *_: pytest.fail("the projection ran"))
        with pytest.raises(ValueError, match=mentions(words)):
            module(torch.randn(3, 5, 64), cache=cache)

    def test_the_cache_must_be_on_the_device_of_x(self):
        module, cache = sb.StickBreakingSelfAttention(64, 4, 2), sb.KVCache(3, 8, 2, 16, device="meta")
        with torch.no_grad(), pytest.raises(ValueError, match=mentions("cache device meta")):
            module(torch.randn(3, 5, 64), cache=cache)

    def test_the_cache_must_have_the_dtype_of_the_keys(self):
        """The error names what the caller passed, the cache. Autocast also changes the dtype of the keys."""
        module, x, cache = sb.StickBreakingSelfAttention(64, 4, 2), torch.randn(3, 5, 64), sb.KVCache(3, 8, 2, 16)
        assert cache.dtype == torch.float32
        words = mentions("cache dtype=torch.bfloat16 dtype=torch.float32")
        with torch.no_grad():
            with torch.autocast(x.device.type, dtype=torch.bfloat16), pytest.raises(TypeError, match=words):
                module(x, cache=cache)
            with pytest.raises(TypeError, match=words):
                module.bfloat16()(x.bfloat16(), cache=cache)
        assert cache.length == 0

    def test_a_call_that_raises_appends_nothing(self, monkeypatch):
        """A call can fail because of a gradient or later. The next call gives the result that it gives without them."""
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

    def test_append(self):
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

    def test_a_cache_serves_calls_in_and_outside_of_inference_mode(self):
        """It can be made and filled in inference mode, and continued under no_grad, and in inference mode again."""
        module, x = sb.StickBreakingSelfAttention(64, 4, 2), torch.randn(3, 9, 64)
        with torch.inference_mode():
            cache = sb.KVCache(3, 16, 2, 16)
            steps = [module(x[:, :5], cache=cache)]
        with torch.no_grad():
            steps.append(module(x[:, 5:8], cache=cache))
            expected = module(x)
        with torch.inference_mode():
            steps.append(module(x[:, 8:], cache=cache))
        torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("length", [0, 1, 5])
    @pytest.mark.parametrize("crossed", [False, True])
    def test_append_from_the_cache_itself(self, length, crossed):
        """As to drop the oldest positions. Every row that is read has its value from before the call."""
        cache, k, v = sb.KVCache(2, 16, 3, 16), torch.randn(2, 12, 3, 16), torch.randn(2, 12, 3, 16)
        cache.append(k, v)
        cache.length = length
        views = [cache.k[:, 2:11], cache.v[:, 2:11]]
        cache.append(*(views[::-1] if crossed else views))
        k, v = (v, k) if crossed else (k, v)
        assert torch.equal(cache.k[:, length : length + 9], k[:, 2:11])
        assert torch.equal(cache.v[:, length : length + 9], v[:, 2:11])

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"head_dim": 7}, ValueError, "head_dim 8 256 7"),
            ({"head_dim": 264}, ValueError, "head_dim 256 264"),
            ({"head_dim_v": 12}, ValueError, "head_dim_v 8 256 12"),
            ({"head_dim": 256, "logits": "euclidean"}, ValueError, "head_dim 248 256"),
            ({"head_dim": 256, "key_bias": True}, ValueError, "head_dim 248 256"),
            ({"logits": "cosine"}, ValueError, "logits 'dot' 'euclidean' 'cosine'"),
            ({"scale": "a"}, TypeError, "scale number str"),
            ({"scale": float("inf")}, ValueError, "scale finite inf"),
            ({"scale": 0.0, "key_bias": True}, ValueError, "scale key_bias=True 0.0"),
            ({"forget_gate": 1}, TypeError, "forget_gate True False int"),
            ({"key_bias": "yes"}, TypeError, "key_bias True False str"),
            ({"dtype": torch.int32}, TypeError, "dtype torch.float16 torch.int32"),
        ],
    )
    def test_invalid_options(self, options, error, words):
        """A cache raises an error before it is filled."""
        with pytest.raises(error, match=mentions(words)):
            sb.KVCache(2, 8, 3, **{"head_dim": 16} | options)

    def test_largest_heads(self):
        assert sb.KVCache(1, 2, 1, 256, forget_gate=True).k.shape[-1] == 264
        assert sb.KVCache(1, 2, 1, 248, 256, logits="euclidean", key_bias=True, scale=-0.1).k.shape[-1] == 256
        assert sb.KVCache(1, 2, 1, 16, scale=0.0).length == 0
