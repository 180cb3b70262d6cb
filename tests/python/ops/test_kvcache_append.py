"""Attention to a KV cache that first appends new keys and values."""

import pytest
import torch
from support.caches import CacheCase, assert_accurate, attend, valid_arguments
from support.messages import mentions

import megatron_sb as sb

pytestmark = pytest.mark.usefixtures("device")
ops = torch.ops.megatron_sb
NEW = 3
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])


def without_last_keys(case: CacheCase) -> tuple[tuple, dict, list[torch.Tensor]]:
    """Return the arguments that append the last NEW keys of each sequence, and the caches that should result.

    The caches hold NaN at these positions.
    """
    (q, *caches), options = case.arguments()
    expected = [cache.clone() for cache in caches]
    size = case.block_size or case.capacity
    blocks = options.get("block_table", torch.arange(len(case.ends), dtype=torch.int32)[:, None])
    for new_name, cache, whole in zip(("k", "v"), caches, (case.x.k, case.x.v), strict=True):
        new = []
        for i, end in enumerate(case.ends):
            new.append(whole[i, end - NEW : end])
            for position in range(end - NEW, end):
                cache[blocks[i, position // size], position % size] = torch.nan
        options[new_name] = torch.stack(new)
    options["cache_seqlens"] = options["cache_seqlens"] - NEW
    return (q, *caches), options, expected


@pytest.mark.parametrize("block_size", [None, 16, 7], ids=lambda size: f"blocks {size}" if size else "contiguous")
@pytest.mark.parametrize("s_q", [1, 3, 5])  # as many queries as new keys, fewer, or more
@dtypes
def test_appends_and_attends(dtype, s_q, block_size):
    """The results and the caches are bitwise those of keys that are in the cache before the call."""
    case = CacheCase([40, 3, 21], s_q=s_q, capacity=48, dtype=dtype, block_size=block_size, firsts=[2, 0, 0])
    expected = attend(case)
    tensors, options, caches = without_last_keys(case)
    actual = sb.stickbreaking_attention_with_kvcache(*tensors, **options, return_mass=True)
    for ours, theirs in zip((*actual, *tensors[1:]), (*expected, *caches), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert_accurate(case)


def valid_appends():
    """Return the arguments of a call that appends NEW keys to each sequence."""
    new = {"k": torch.randn(2, NEW, 2, 16), "v": torch.randn(2, NEW, 2, 24)}
    return valid_arguments(ends=(6, 4), d_v=24) | new


@pytest.mark.parametrize("view", ["longer", "heads first"])
def test_writes_into_views(view):
    """The keys are written into the caller's memory, whatever its strides are."""
    arguments = valid_appends()
    expected = dict(arguments, k_cache=arguments["k_cache"].clone(), v_cache=arguments["v_cache"].clone())
    o = sb.stickbreaking_attention_with_kvcache(**expected)
    for name in ("k_cache", "v_cache"):
        cache = arguments[name]
        if view == "longer":
            arguments[name] = torch.zeros(2, 20, *cache.shape[2:])[:, :9].copy_(cache)
        else:
            arguments[name] = cache.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(sb.stickbreaking_attention_with_kvcache(**arguments), o, rtol=1e-5, atol=1e-6)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(arguments[name], expected[name])
        assert torch.equal(arguments[name][0, 6:9], arguments[name[0]][0])
        assert torch.equal(arguments[name][1, 4:7], arguments[name[0]][1])


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize("block_size", [None, 4])
def test_new_keys_from_the_cache(block_size, cache):
    """Keys that lie in the memory of a cache, where others are written, are read before."""
    arguments = valid_appends()
    arguments["v_cache"] = arguments["v_cache"][..., :16].clone()
    if block_size is not None:
        blocks = torch.arange(6, dtype=torch.int32, device=arguments["q"].device).view(2, 3)
        arguments["block_table"] = blocks
        for name in ("k_cache", "v_cache"):
            padded = torch.nn.functional.pad(arguments[name], (0, 0, 0, 0, 0, 3))
            arguments[name] = padded.view(6, block_size, *padded.shape[2:])
    arguments["cache_seqlens"] = torch.tensor([1, 1], dtype=torch.int32, device=arguments["q"].device)
    expected = {name: x.clone() for name, x in arguments.items()}
    for call in (arguments, expected):
        rows = call[cache][::3] if block_size else call[cache]
        call["k"] = call["v"] = rows[:, :NEW]  # positions 0 to 2 go to 1 to 3
    expected |= {name: expected[name].clone() for name in "kv"}
    o, wanted = (sb.stickbreaking_attention_with_kvcache(**call) for call in (arguments, expected))
    assert torch.equal(o, wanted)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(arguments[name], expected[name])


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_autograd_notices_a_write(name):
    """A backward that saved a cache raises an error instead of computing a gradient from the new keys."""
    arguments = valid_appends()
    weight = torch.ones((), requires_grad=True)
    product = (weight * arguments[name]).sum()
    sb.stickbreaking_attention_with_kvcache(**arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_expanded_caches(name, dimension):
    """Each key would be written to the place of others. Calls that only read take such a cache."""
    arguments = valid_appends()
    cache = arguments[name]
    arguments[name] = cache.narrow(dimension, 0, 1).expand_as(cache)
    with pytest.raises(ValueError, match=mentions(f"{name}: stride dimension {dimension} 0 append")):
        sb.stickbreaking_attention_with_kvcache(**arguments)
    read = {name: x for name, x in arguments.items() if name not in "kv"}
    copied = read | {name: read[name].contiguous()}
    assert torch.equal(*(sb.stickbreaking_attention_with_kvcache(**call) for call in (read, copied)))


INVALID = {
    "k without v": ({"v": None}, ValueError, "v k None"),
    "v without k": ({"k": None}, ValueError, "k v None"),
    "k is a list": ({"k": [1]}, TypeError, "k list"),
    "k of 3 dimensions": ({"k": torch.randn(3, 2, 16)}, ValueError, "k 3 4"),
    "batch of k": ({"k": torch.randn(3, 3, 2, 16)}, ValueError, "k: batch 2 cache_seqlens 3"),
    "heads of k": ({"k": torch.randn(2, 3, 4, 16)}, ValueError, "k heads 4 k_cache 2"),
    "head_dim of k": ({"k": torch.randn(2, 3, 2, 24)}, ValueError, "k: head_dim 16 k_cache 24"),
    "positions of v": ({"v": torch.randn(2, 2, 2, 24)}, ValueError, "v 2 k 3"),
    "head_dim of v": ({"v": torch.randn(2, 3, 2, 16)}, ValueError, "v head_dim 16 v_cache 24"),
    "dtype of k": ({"k": torch.randn(2, 3, 2, 16).bfloat16()}, TypeError, "k: Float k_cache BFloat16"),
    "dtype of v": ({"v": torch.randn(2, 3, 2, 24).bfloat16()}, TypeError, "v: Float k_cache BFloat16"),
    "k requires a gradient": ({"k": torch.randn(2, 3, 2, 16, requires_grad=True)}, ValueError, "k gradient"),
    "head_dim of q": ({"q": torch.randn(2, 1, 4, 24)}, ValueError, "k_cache head_dim 16 q 24"),
    "strides of k_cache": (
        {"k_cache": torch.zeros(2, 2, 16, 9).permute(0, 3, 1, 2)},
        ValueError,
        "k_cache: last stride 1 append 9",
    ),
    "strides of v_cache": (
        {"v_cache": torch.zeros(2, 2, 24, 9).permute(0, 3, 1, 2)},
        ValueError,
        "v_cache: last stride 1 append 9",
    ),
    "mass_threshold of 1": ({"mass_threshold": 1.0}, ValueError, "mass_threshold 1.0"),
}
INVALID_VALUES = {
    "too short": ({"cache_seqlens": [7, 4]}, "k sequence 0 3 2"),
    "negative length": ({"cache_seqlens": [-1, 4]}, "cache_seqlens sequence 0 -1"),
    "longer than the cache": ({"cache_seqlens": [6, 10]}, "cache_seqlens sequence 1 capacity 9 10"),
    "padding longer than the sequence": ({"cache_leftpad": [0, 8]}, "cache_leftpad sequence 1 8 7"),
    "no such block": ({"block_table": [[0], [2]]}, "block_table sequence 1 2 0"),
}


def assert_raises(changes, error, words):
    """Assert that the call raises an error and leaves the caches as they are."""
    arguments = {**valid_appends(), **changes}
    before = [arguments[name].clone() for name in ("k_cache", "v_cache")]
    with pytest.raises(error, match=mentions(words)):
        sb.stickbreaking_attention_with_kvcache(**arguments)
    assert torch.equal(arguments["k_cache"], before[0]) and torch.equal(arguments["v_cache"], before[1])


@pytest.mark.parametrize(("changes", "error", "words"), INVALID.values(), ids=INVALID)
def test_an_invalid_argument_changes_no_cache(device, changes, error, words):
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in changes.items()}
    assert_raises(moved, error, words)


def test_the_operator_names_its_own_arguments(device):
    """kvcache_append has no q."""
    caches = {"k_cache": torch.zeros(3, 4, 2, 8, device=device), "v_cache": torch.zeros(3, 4, 2, 8, device=device)}
    new = {name: torch.randn(2, 1, 2, 8, device=device) for name in "kv"}
    lengths = torch.tensor([0, 1], dtype=torch.int32, device=device)
    append = torch.ops.megatron_sb.kvcache_append
    with pytest.raises(ValueError, match=mentions("k_cache: batch 2 as in k 3")):
        append(**caches, **new, cache_seqlens=lengths)
    table = torch.zeros(3, 2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=mentions("block_table: batch 2 as in k 3")):
        append(**caches, **new, cache_seqlens=lengths, block_table=table)


@pytest.mark.parametrize(("changes", "words"), INVALID_VALUES.values(), ids=INVALID_VALUES)
def test_invalid_values_raise_an_error_on_a_cpu(device, changes, words):
    changes = {name: torch.tensor(values, dtype=torch.int32) for name, values in changes.items()}
    if device == "cpu":
        assert_raises(changes, ValueError, words)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("paged", [False, True])
def test_a_gpu_writes_nothing_out_of_place(device, paged):
    """Only positions in the cache, and blocks that exist, are written. Guards around the caches keep their values."""
    arguments = valid_appends()
    guarded = {name: torch.full((4, 9, 2, arguments[name].shape[-1]), 7.0) for name in ("k_cache", "v_cache")}
    for name, cache in guarded.items():
        arguments[name] = cache[1:3].zero_()
    arguments["cache_seqlens"] = torch.tensor([8, -1], dtype=torch.int32)
    if paged:
        arguments["block_table"] = torch.tensor([[0], [5]], dtype=torch.int32)
    sb.stickbreaking_attention_with_kvcache(**arguments)
    for name, cache in guarded.items():
        new = arguments[name[0]]
        expected = torch.full_like(cache, 7.0)
        expected[1:3] = 0
        expected[1, 8] = new[0, 0]
        if not paged:
            expected[2, :2] = new[1, 1:]
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("block_size", [None, 16])
def test_opcheck(block_size):
    case = CacheCase([30, 41], s_q=2, d=16, block_size=block_size, capacity=48)
    (q, k_cache, v_cache), options, _ = without_last_keys(case)
    caches, new = (k_cache.nan_to_num(), v_cache.nan_to_num()), {"k": options["k"], "v": options["v"]}
    table = options.get("block_table")
    table = None if table is None else table.clamp(max=k_cache.shape[0] - 1)
    arguments = (q, *caches, options["cache_seqlens"], table)
    torch.library.opcheck(ops.attention_kvcache.default, arguments, {"scale": 0.3, **new})
    torch.library.opcheck(ops.kvcache_append.default, (*caches, *new.values(), options["cache_seqlens"], table))


def test_compile():
    """A compiled function changes the caches and gives the results of the eager one."""

    def model(arguments):
        o, mass = sb.stickbreaking_attention_with_kvcache(**arguments, return_mass=True)
        return o.sin(), mass, arguments["k_cache"].sum()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ours = valid_appends()
    theirs = {name: x.clone() for name, x in ours.items()}
    for _ in range(2):
        for actual, expected in zip(compiled(ours), model(theirs), strict=True):
            torch.testing.assert_close(actual, expected)
        for name in ("k_cache", "v_cache"):
            assert torch.equal(ours[name], theirs[name])
        for arguments in (ours, theirs):
            arguments["cache_seqlens"] = torch.tensor([0, 5], dtype=torch.int32, device=ours["q"].device)


def test_autocast(device):
    """q, k and v are cast. The caches are not, because the call writes to them."""
    arguments = valid_appends()
    bf16 = {name: x.bfloat16() if x.is_floating_point() else x for name, x in arguments.items()}
    caches = {name: bf16[name].clone() for name in ("k_cache", "v_cache")}
    expected = sb.stickbreaking_attention_with_kvcache(**bf16)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(sb.stickbreaking_attention_with_kvcache(**{**arguments, **caches}), expected)
        with pytest.raises(TypeError, match=mentions("k_cache dtype BFloat16 Float autocast")):
            sb.stickbreaking_attention_with_kvcache(**arguments)
    for name in caches:
        assert torch.equal(caches[name], bf16[name])
