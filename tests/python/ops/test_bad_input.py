"""Invalid arguments of the operators raise ValueError or TypeError with the argument and its value."""

import numpy as np
import pytest
import torch
from support.inputs import make_inputs
from support.messages import mentions
from torch import zeros
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_sb import (
    KVCache,
    StickBreakingSelfAttention,
    stickbreaking_attention,
    stickbreaking_attention_varlen,
    stickbreaking_attention_with_kvcache,
)
from megatron_sb.compat import parallel_stickbreaking_attn, sb_attn, sb_attn_varlen
from megatron_sb.options import LayerOptions, reach_of_heads


def cu(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def dense(**changes):
    """Make a valid dense call with some arguments replaced."""
    x = make_inputs(b=2, s=6, s_k=8, h=4, h_kv=2, d=16)
    return stickbreaking_attention(**{"q": x.q, "k": x.k, "v": x.v, **changes})


def packed(**changes):
    """Make a valid packed call with some arguments replaced."""
    x = make_inputs(s=8, h=4, h_kv=2, d=16).packed()
    return stickbreaking_attention_varlen(**{"q": x.q, "k": x.k, "v": x.v, "cu_seqlens": cu([0, 3, 8]), **changes})


def kvcache(**changes):
    """Make a valid call with a KV cache with some arguments replaced."""
    x = make_inputs(s=8, h=4, h_kv=2, d=16)
    return stickbreaking_attention_with_kvcache(x.q, x.k, x.v, cache_seqlens=cu([8]), **changes)[0]


def of_head_dims(d, d_v):
    """Return q, k and v for `dense` with these head_dims."""
    return {"q": zeros(2, 6, 4, d), "k": zeros(2, 8, 2, d), "v": zeros(2, 8, 2, d_v)}


def nested(**options):
    """Return documents of 6 and 4 rows of q as one tensor."""
    return torch.nested.nested_tensor([zeros(6, 4, 16), zeros(4, 4, 16)], **options)


NAN, INF = float("nan"), float("inf")
BF16, INT64, META = {"dtype": torch.bfloat16}, {"dtype": torch.int64}, {"device": "meta"}
# The changed arguments, the type of the error, and words that its message must contain.
DENSE = {
    "q of 3 dimensions": ({"q": zeros(6, 4, 16)}, ValueError, "q 3"),
    "k of 3 dimensions": ({"k": zeros(2, 8, 16)}, ValueError, "k 3"),
    "v of 5 dimensions": ({"v": zeros(2, 8, 2, 16, 1)}, ValueError, "v 5"),
    "q is a list": ({"q": [1.0]}, TypeError, "q list"),
    "v is None": ({"v": None}, TypeError, "v NoneType"),
    "sparse k": ({"k": zeros(2, 8, 2, 16).to_sparse()}, TypeError, "k dense torch.strided torch.sparse_coo"),
    "nested q": ({"q": nested()}, TypeError, "q dense torch.strided nested tensor"),
    "nested q of another layout": ({"q": nested(layout=torch.jagged)}, TypeError, "q dense nested tensor"),
    "integers": ({name: zeros(2, 8, 2, 16, **INT64) for name in "qkv"}, TypeError, "q Long"),
    "complex q": ({"q": zeros(2, 6, 4, 16, dtype=torch.complex64)}, TypeError, "q ComplexFloat"),
    "dtype of k": ({"k": zeros(2, 8, 2, 16, **BF16)}, TypeError, "k BFloat16 Float autocast"),
    "dtype of v": ({"v": zeros(2, 8, 2, 16).double()}, TypeError, "v Double Float"),
    "device of k": ({"k": zeros(2, 8, 2, 16, **META)}, ValueError, "k meta cpu"),
    "batch of k": ({"k": zeros(3, 8, 2, 16)}, ValueError, "batch k 3 q 2"),
    "batch of v": ({"v": zeros(1, 8, 2, 16)}, ValueError, "batch v 1 q 2"),
    "rows of v": ({"v": zeros(2, 7, 2, 16)}, ValueError, "v 7 k 8"),
    "heads of v": ({"v": zeros(2, 8, 4, 16)}, ValueError, "v 4 k 2"),
    "heads of q are no multiple": ({"q": zeros(2, 6, 3, 16)}, ValueError, "q 3 k 2"),
    "fewer heads of q than of k": ({"q": zeros(2, 6, 1, 16)}, ValueError, "q 1 k 2"),
    "no KV heads": ({"k": zeros(2, 8, 0, 16), "v": zeros(2, 8, 0, 16)}, ValueError, "q 4 k 0"),
    "head_dim of k": ({"k": zeros(2, 8, 2, 24)}, ValueError, "head_dim k 24 q 16"),
    "head_dim is no multiple of 8": (of_head_dims(20, 16), ValueError, "q head_dim 20"),
    "head_dim of 0": (of_head_dims(0, 16), ValueError, "q head_dim 0"),
    "head_dim above 256": (of_head_dims(264, 16), ValueError, "q head_dim 264"),
    "head_dim of v is no multiple of 8": (of_head_dims(16, 12), ValueError, "v head_dim 12"),
    "head_dim of v above 256": (of_head_dims(16, 512), ValueError, "v head_dim 512"),
    "more queries than keys": ({"q": zeros(2, 9, 4, 16)}, ValueError, "q 9 k 8"),
    "scale is NaN": ({"scale": NAN}, ValueError, "scale nan"),
    "scale is infinite": ({"scale": INF}, ValueError, "scale inf"),
    "negative mass_threshold": ({"mass_threshold": -1e-3}, ValueError, "mass_threshold -0.001"),
    "mass_threshold of 1": ({"mass_threshold": 1.0}, ValueError, "mass_threshold 1"),
    "mass_threshold is NaN": ({"mass_threshold": NAN}, ValueError, "mass_threshold nan"),
    "reach of 0": ({"reach": (0.0, 8.0)}, ValueError, "reach 0.015625 64 (0.0, 8.0)"),
    "reach above 64": ({"reach": (0.5, 65)}, ValueError, "reach 64 (0.5, 65)"),
    "reach is NaN": ({"reach": (NAN, 8.0)}, ValueError, "reach nan"),
    "reach of three heads": ({"reach": (0.5, 4.0, 8.0)}, ValueError, "reach two (0.5, 4.0, 8.0)"),
    "reach is a number": ({"reach": 8.0}, TypeError, "reach two float"),
}
PACKED = {
    "q of 4 dimensions": ({"q": zeros(1, 8, 4, 16)}, ValueError, "q 4"),
    "k of 2 dimensions": ({"k": zeros(8, 16)}, ValueError, "k 2"),
    "v of 2 dimensions": ({"v": zeros(8, 16)}, ValueError, "v 2"),
    "dtype of v": ({"v": zeros(8, 2, 16, **BF16)}, TypeError, "v BFloat16 Float"),
    "heads of q are no multiple": ({"q": zeros(8, 3, 16)}, ValueError, "q 3 k 2"),
    "cu_seqlens is a list": ({"cu_seqlens": [0, 8]}, TypeError, "cu_seqlens list"),
    "cu_seqlens_k is a list": ({"cu_seqlens_k": [0, 8]}, TypeError, "cu_seqlens_k list"),
    "int64 cu_seqlens": ({"cu_seqlens": cu([0, 8], torch.int64)}, TypeError, "cu_seqlens Long"),
    "int64 cu_seqlens_k": ({"cu_seqlens_k": cu([0, 3, 8], torch.int64)}, TypeError, "cu_seqlens_k Long"),
    "complex cu_seqlens": (
        {"cu_seqlens": cu([0, 8], torch.complex64), "max_seqlen": 8},
        TypeError,
        "cu_seqlens ComplexFloat",
    ),
    "cu_seqlens of 2 dimensions": ({"cu_seqlens": cu([[0, 8]])}, ValueError, "cu_seqlens 2"),
    "empty cu_seqlens": ({"cu_seqlens": cu([])}, ValueError, "cu_seqlens documents + 1"),
    "first of cu_seqlens": ({"cu_seqlens": cu([1, 8])}, ValueError, "cu_seqlens start 0 1"),
    "first of cu_seqlens_k": ({"cu_seqlens_k": cu([2, 3, 8])}, ValueError, "cu_seqlens_k start 0 2"),
    "decreasing cu_seqlens": ({"cu_seqlens": cu([0, 5, 3, 8])}, ValueError, "cu_seqlens decrease 5 3"),
    "last of cu_seqlens": ({"cu_seqlens": cu([0, 9])}, ValueError, "cu_seqlens 9 8"),
    "last of cu_seqlens_k": ({"cu_seqlens_k": cu([0, 3, 12])}, ValueError, "cu_seqlens_k 12 8"),
    "device of cu_seqlens": ({"cu_seqlens": cu([0, 8]).to("meta")}, ValueError, "cu_seqlens meta cpu"),
    "number of documents": ({"cu_seqlens_k": cu([0, 8])}, ValueError, "cu_seqlens 2 cu_seqlens_k 1"),
    "more queries than keys in a document": ({"cu_seqlens_k": cu([0, 4, 8])}, ValueError, "document 1 5 4"),
    "more keys than queries without cu_seqlens_k": (
        {"k": zeros(9, 2, 16), "v": zeros(9, 2, 16)},
        ValueError,
        "q 8 k 9",
    ),
    "query_bias of other rows": ({"query_bias": zeros(7, 4)}, ValueError, "query_bias [8, 4] [7, 4]"),
    "key_bias of one dimension": ({"key_bias": zeros(8)}, ValueError, "key_bias [8, 2] [8]"),
    "forget_gate with a batch": ({"forget_gate": zeros(1, 8, 2)}, ValueError, "forget_gate [8, 2] [1, 8, 2]"),
    "max_seqlen is too small": ({"max_seqlen": 4}, ValueError, "max_seqlen 4 5"),
    "max_seqlen_k is too small": ({"max_seqlen_k": 4}, ValueError, "max_seqlen_k 4 5"),
    "max_seqlen_k is too small for the keys": (
        {"k": zeros(12, 2, 16), "v": zeros(12, 2, 16), "cu_seqlens_k": cu([0, 5, 12]), "max_seqlen_k": 6},
        ValueError,
        "max_seqlen_k 6 7",
    ),
    "max_seqlen is a string": ({"max_seqlen": "3"}, TypeError, "max_seqlen str"),
    "max_seqlen_k is a float": ({"max_seqlen_k": 8.0}, TypeError, "max_seqlen_k float"),
    "max_seqlen of each document": ({"max_seqlen": torch.tensor([3, 5])}, ValueError, "max_seqlen one (2,)"),
}
# Options that all operators have.
OPTIONS = {
    "scale is a parameter": ({"scale": torch.nn.Parameter(torch.ones(()))}, TypeError, "scale Parameter"),
    "scale is a string": ({"scale": "x"}, TypeError, "scale str"),
    "scale is a bool": ({"scale": True}, TypeError, "scale bool"),
    "mass_threshold is None": ({"mass_threshold": None}, TypeError, "mass_threshold NoneType"),
    "mass_threshold is a tensor": ({"mass_threshold": zeros(())}, TypeError, "mass_threshold Tensor"),
    "attend_current is None": ({"attend_current": None}, TypeError, "attend_current NoneType"),
    "attend_current is an int": ({"attend_current": 1}, TypeError, "attend_current int"),
    "attend_current is of numpy": (
        {"attend_current": np.bool_(True)},
        TypeError,
        "attend_current True False numpy.bool",
    ),
    "return_mass is an int": ({"return_mass": 1}, TypeError, "return_mass True False int"),
    "return_mass is a string": ({"return_mass": "no"}, TypeError, "return_mass True False str"),
    "scale is larger than any float": ({"scale": 10**400}, ValueError, "scale finite 1" + "0" * 400),
    "logits are an array": ({"logits": np.array(["dot", "dot"])}, ValueError, "logits 'dot' 'euclidean' array"),
}
# The drop-in functions: function, arguments, type of the error, words of its message.
X, CU, NAMED_CU = zeros(1, 8, 8, 16), cu([0, 8]), {"cu_seqlens": cu([0, 8])}
COMPAT = {
    "sb_attn: dimensions": (sb_attn, [X[0]] * 3, {}, ValueError, "q (b, h, s, d) (8, 8, 16)"),
    "sb_attn: head_dim": (sb_attn, [zeros(1, 4, 8, 257)] * 2 + [X], {}, ValueError, "q head_dim 257"),
    "sb_attn: head_dims that are equal after padding": (
        sb_attn,
        [zeros(1, 4, 8, 50), zeros(1, 4, 8, 51), zeros(1, 4, 8, 50)],
        {},
        ValueError,
        "q head_dim 50 k 51",
    ),
    "sb_attn: q is a list": (sb_attn, [[1], X, X], {}, TypeError, "q list"),
    "sb_attn: inv_temp is a tensor": (sb_attn, [X] * 3, {"inv_temp": torch.ones(())}, TypeError, "inv_temp Tensor"),
    "sb_attn: inv_temp is infinite": (sb_attn, [X] * 3, {"inv_temp": INF}, ValueError, "inv_temp finite inf"),
    "sb_attn_varlen: an end without dimension": (
        sb_attn_varlen,
        [*[X[0]] * 3, cu(8), 8],
        {"zero_start": False},
        ValueError,
        "cu_seqlens 1 dimension ()",
    ),
    "sb_attn_varlen: dimensions": (sb_attn_varlen, [X[0], X[0], X, CU, 8], {}, ValueError, "v (h, t, d) (1, 8, 8, 16)"),
    "sb_attn_varlen: first offset": (
        sb_attn_varlen,
        [*[X[0]] * 3, cu([3, 8]), 5],
        {},
        ValueError,
        "cu_seqlens start 0 3",
    ),
    "sb_attn_varlen: max_seqlens": (sb_attn_varlen, [*[X[0]] * 3, CU, 5], {}, ValueError, "max_seqlens 5 8"),
    "sb_attn_varlen: an offset that a cast to int32 would wrap to 8": (
        sb_attn_varlen,
        [*[X[0]] * 3, cu([0, 2**32 + 8], torch.int64), 2**32],
        {},
        ValueError,
        "cu_seqlens number of rows 8",
    ),
    "sb_attn_varlen: max_seqlens is a string": (
        sb_attn_varlen,
        [*[X[0]] * 3, CU, "8"],
        {},
        TypeError,
        "max_seqlens str",
    ),
    "sb_attn_varlen: no offsets": (sb_attn_varlen, [*[X[0]] * 3, None, 8], {}, TypeError, "cu_seqlens NoneType"),
    "sb_attn_varlen: no ends": (
        sb_attn_varlen,
        [*[X[0]] * 3, None, 8],
        {"zero_start": False},
        TypeError,
        "cu_seqlens NoneType",
    ),
    "sb_attn_varlen: inv_temp is a tensor": (
        sb_attn_varlen,
        [*[X[0]] * 3, CU, 8],
        {"inv_temp": torch.ones(())},
        TypeError,
        "inv_temp Tensor",
    ),
    "parallel: fewer queries than keys": (
        parallel_stickbreaking_attn,
        [X[:, :1], X, X],
        {},
        ValueError,
        "q k (b, t, h, d) (1, 1, 8, 16) (1, 8, 8, 16)",
    ),
    "parallel: heads of q are no multiple": (
        parallel_stickbreaking_attn,
        [X[:, :, :3], X[:, :, :2], X[:, :, :2]],
        {},
        ValueError,
        "q 3 divisible by 2",
    ),
    "parallel: no KV heads": (
        parallel_stickbreaking_attn,
        [X[:, :, :2], X[:, :, :0], X[:, :, :0]],
        {},
        ValueError,
        "q 2 divisible by 0",
    ),
    "parallel: head_dim of v": (
        parallel_stickbreaking_attn,
        [X, X, zeros(1, 8, 8, 257)],
        {},
        ValueError,
        "v value dimension 257",
    ),
    "parallel: batch with cu_seqlens": (
        parallel_stickbreaking_attn,
        [zeros(2, 8, 4, 16)] * 3,
        NAMED_CU,
        ValueError,
        "q 2 cu_seqlens batch size expected 1",
    ),
    "parallel: v is a list": (parallel_stickbreaking_attn, [X, X, [1]], {}, TypeError, "v list"),
    "parallel: cu_seqlens is a list": (
        parallel_stickbreaking_attn,
        [X] * 3,
        {"cu_seqlens": [0, 8]},
        TypeError,
        "cu_seqlens list",
    ),
    "parallel: offsets that a cast to int32 would wrap to 0 and 8": (
        parallel_stickbreaking_attn,
        [X] * 3,
        {"cu_seqlens": cu([-(2**32), 8], torch.int64)},
        ValueError,
        "cu_seqlens start 0",
    ),
    "parallel: scale is a string": (parallel_stickbreaking_attn, [X] * 3, {"scale": "x"}, TypeError, "scale str"),
}
CASES = [
    pytest.param(call, changes, error, words, id=f"{call.__name__}: {name}")
    for calls, table in (([dense], DENSE), ([packed], PACKED), ([dense, packed, kvcache], OPTIONS))
    for call in calls
    for name, (changes, error, words) in table.items()
]


ops = torch.ops.megatron_sb
# Sizes of q that do not fit the kernels, and words of the error. No memory is allocated: the tensors are meta tensors.
HUGE = {
    "rows": ((1, 2**31, 1, 8), "number of rows 2147483648"),
    "batch elements": ((2**33, 1, 1, 8), "batch size 8589934592"),
    "heads": ((1, 1, 2**32 + 4, 8), "number of heads 4294967300"),
    "heads of all batch elements": ((2**16, 1, 2**16, 8), "batch size number of heads 4294967296"),
}


def huge_kvcache(q):
    lengths = torch.empty(q.shape[0], dtype=torch.int32, device="meta")
    cache = q.new_empty(q.shape[0], 16, 1, 8)
    return ops.kvcache_forward(q, cache, cache, lengths, None, None, scale=1.0)


HUGE_CALLS = {
    "attention": lambda q: stickbreaking_attention(q, q, q),
    "block_forward": lambda q: ops.block_forward(q, q, q, scale=1.0),
    "block_backward": lambda q: ops.block_backward(q, q, q, q, None, q[..., 0], q[..., 0], scale=1.0),
    "kvcache": huge_kvcache,
    "head_output": lambda o: ops.head_output_forward(o, None, None, o.new_empty(o.shape[2] * 8), None, 1e-5),
}


@pytest.mark.parametrize(("shape", "words"), HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("call", HUGE_CALLS.values(), ids=HUGE_CALLS)
def test_sizes_that_int32_cannot_count_raise_an_error(call, shape, words):
    """They were cut to 32 bits. 2^32 + 4 heads became 4."""
    name = "o" if call is HUGE_CALLS["head_output"] else "q"
    with pytest.raises(ValueError, match=mentions(f"{name} {words}")):
        call(torch.empty(shape, device="meta"))


def test_too_many_packed_rows_raise_an_error_that_names_q():
    """It named q_rows, an argument of an operator inside."""
    q = zeros(1, 1, 8).expand(2**31, 1, 8)
    with pytest.raises(ValueError, match=mentions("q number of rows 2147483648")):
        stickbreaking_attention_varlen(q, q, q, cu([0, 8]))


def test_more_segments_and_blocks_than_an_int32_counts_raise_an_error():
    q = torch.empty(1, 8, 1, 8, device="meta")
    with pytest.raises(ValueError, match=mentions("segments number 4294967296")):
        ops.block_forward(q, q, q, torch.empty(2**32, 5, dtype=torch.int32, device="meta"), scale=1.0)
    cache, lengths = q.new_empty(2**32, 1, 1, 8), torch.empty(1, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=mentions("k_cache number of blocks 4294967296")):
        ops.kvcache_forward(q, cache, cache, lengths, lengths[:, None], None, scale=1.0)


@pytest.mark.parametrize(
    ("blocks", "block_size", "words"),
    [(2**32, 2**32, "k_cache block_size 4294967296"), (2**32, 16, "block_table number of blocks 4294967296")],
)
def test_sizes_of_a_paged_cache_whose_product_overflows_raise_an_error(blocks, block_size, words):
    """The number of positions is their product. With 2^32 for both it wrapped to 0, and no error was raised."""
    q, table = torch.empty(1, 8, 1, 8, device="meta"), torch.empty(1, blocks, dtype=torch.int32, device="meta")
    cache = q.new_empty(1, block_size, 1, 8)
    with pytest.raises(ValueError, match=mentions(words)):
        ops.kvcache_forward(q, cache, cache, table[:, 0], table, None, scale=1.0)


@pytest.mark.parametrize("rows", [-1, 2**31, 2**32])
@pytest.mark.parametrize("name", ["q_rows", "k_rows"])
def test_counts_of_rows_of_a_segment_table(name, rows):
    with pytest.raises(ValueError, match=mentions(f"{name} {rows}")):
        ops.segments(cu([0, 8]), cu([0, 8]), **{"q_rows": 8, "k_rows": 8, name: rows})


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["q", "k", "v", "do", "restart_edge", "restart_mass"])
def test_tensors_of_another_rank_in_a_block_raise_an_error(name, where):
    """Every tensor is checked by name before a size of it is read, also without data."""
    x = {key: zeros(1, 8, 2, 16, device=where, dtype=torch.bfloat16) for key in ("q", "k", "v", "do")}
    x |= {"restart_edge": zeros(1, 2, 8, device=where).int(), "restart_mass": zeros(1, 2, 8, device=where)}
    x[name] = x[name][0]
    words = f"{name} {x[name].dim()}" if name in ("q", "k", "v", "do") else f"{name} [2, 8]"
    options = {"scale": 1.0, "out_dtype": torch.bfloat16}
    with pytest.raises(ValueError, match=mentions(words)):
        ops.block_backward(segments=None, **x, **options)
    if name in ("q", "k", "v"):
        with pytest.raises(ValueError, match=mentions(words)):
            ops.block_forward(x["q"], x["k"], x["v"], **options)


@pytest.mark.parametrize(("call", "changes", "error", "words"), CASES)
def test_an_invalid_argument_raises_an_error(call, changes, error, words):
    with pytest.raises(error, match=mentions(words)):
        call(**changes)


@pytest.mark.parametrize(("function", "arguments", "options", "error", "words"), COMPAT.values(), ids=COMPAT)
def test_an_invalid_argument_of_a_drop_in_function_raises_an_error(function, arguments, options, error, words):
    with pytest.raises(error, match=mentions(words)):
        function(*arguments, **options)


@pytest.mark.parametrize("value", [-1, -(2**70)])
@pytest.mark.parametrize("name", ["max_seqlen", "max_seqlen_k"])
def test_a_negative_length_without_values_of_cu_seqlens(name, value):
    """The error names the argument of the caller also where the offsets cannot be read, as on a GPU."""
    with FakeTensorMode(), pytest.raises(ValueError, match=mentions(f"{name} at least 0 {value}")):
        stickbreaking_attention_varlen(*[zeros(8, 4, 16)] * 3, torch.empty(3, dtype=torch.int32), **{name: value})


def test_the_calls_without_changes_are_valid():
    """So each error above is caused by the change."""
    assert dense().shape == (2, 6, 4, 16)
    assert packed().shape == kvcache().shape == (8, 4, 16)


@pytest.mark.filterwarnings("error")  # numpy's comparisons warn if a number does not fit a narrow type
def test_numbers_of_numpy_and_torch_are_accepted():
    assert packed(max_seqlen=torch.tensor(5), max_seqlen_k=np.int64(5)).shape == (8, 4, 16)
    assert packed(max_seqlen=2**70, max_seqlen_k=2**40).shape == (8, 4, 16)
    assert dense(scale=np.float32(0.5), mass_threshold=0).shape == dense(scale=1).shape == (2, 6, 4, 16)


def test_numbers_of_numpy_become_those_of_python():
    """JSON and Megatron's checkpoints, which contain the options, do not store numbers of numpy."""
    options = LayerOptions(
        np.int64(2), mass_threshold=np.float32(0.5), reach=[np.int32(1), 8.0], forget_gate=True, forget_gate_loss=0.1
    )
    values = options.scale, options.mass_threshold, *options.reach
    assert list(map(repr, values)) == ["2", "0.5", "1", "8.0"]
    cache = KVCache(np.int64(2), np.int64(8), np.int32(1), np.int16(16))
    assert cache.k.shape == cache.v.shape == (2, 8, 1, 16) and type(cache.head_dim) is int
    layer = StickBreakingSelfAttention(np.int64(32), np.int64(4), head_dim=np.int64(16))
    assert layer(torch.zeros(1, 5, 32)).shape == (1, 5, 32) and type(layer.num_kv_heads) is int


@pytest.mark.parametrize("reach", [(0.0, 8.0), (0.5, 65.0), (NAN, 8.0), (0.5, 4.0, 8.0)], ids=str)
def test_reach_of_heads_checks_the_reach(reach):
    """It limited the reach to what the kernels accept, so another one than the caller's was used."""
    with pytest.raises(ValueError, match=r"reach must be two numbers from 0\.015625 to 64") as caught:
        reach_of_heads(reach, 8, 0, 4)
    assert str(reach) in str(caught.value)
