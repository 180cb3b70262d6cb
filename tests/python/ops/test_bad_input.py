"""Every rejection of the operators: the type of the error, and a message that names the argument and its value."""

import numpy as np
import pytest
import torch
from support.inputs import make_inputs
from support.messages import mentions

from megatron_sb import (
    stickbreaking_attention,
    stickbreaking_attention_varlen,
    stickbreaking_attention_with_kvcache,
)
from megatron_sb.compat import parallel_stickbreaking_attn, sb_attn, sb_attn_varlen


def dense(**changes):
    """A good call with some of its arguments replaced."""
    x = make_inputs(b=2, s=6, s_k=8, h=4, h_kv=2, d=16)
    return stickbreaking_attention(**{"q": x.q, "k": x.k, "v": x.v, **changes})


def packed(**changes):
    """A good packed call with some of its arguments replaced."""
    x = make_inputs(s=8, h=4, h_kv=2, d=16).packed()
    return stickbreaking_attention_varlen(**{"q": x.q, "k": x.k, "v": x.v, "cu_seqlens": cu([0, 3, 8]), **changes})


def from_a_cache(**changes):
    """A good call against a cache with some of its options replaced."""
    x = make_inputs(s=8, h=4, h_kv=2, d=16)
    return stickbreaking_attention_with_kvcache(x.q, x.k, x.v, cache_seqlens=cu([8]), **changes)[0]


def cu(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


def wide(d, d_v):
    """q, k, v of other head_dims."""
    return {"q": zeros(2, 6, 4, d), "k": zeros(2, 8, 2, d), "v": zeros(2, 8, 2, d_v)}


half = {"dtype": torch.bfloat16}
DENSE = {
    "rank of q": (lambda: {"q": zeros(6, 4, 16)}, ValueError, "q 3"),
    "rank of k": (lambda: {"k": zeros(2, 8, 16)}, ValueError, "k 3"),
    "rank of v": (lambda: {"v": zeros(2, 8, 2, 16, 1)}, ValueError, "v 5"),
    "q no tensor": (lambda: {"q": [1.0]}, TypeError, "q list"),
    "v no tensor": (lambda: {"v": None}, TypeError, "v NoneType"),
    "integers": (
        lambda: {name: zeros(2, 8, 2, 16, dtype=torch.int64) for name in "qkv"},
        TypeError,
        "q Long",
    ),
    "complex": (lambda: {"q": zeros(2, 6, 4, 16, dtype=torch.complex64)}, TypeError, "q ComplexFloat"),
    "mixed dtypes": (
        lambda: {"k": zeros(2, 8, 2, 16, **half)},
        TypeError,
        "k BFloat16 Float autocast",
    ),
    "mixed dtype of v": (lambda: {"v": zeros(2, 8, 2, 16).double()}, TypeError, "v Double Float"),
    "mixed devices": (
        lambda: {"k": zeros(2, 8, 2, 16, device="meta")},
        ValueError,
        "k meta cpu",
    ),
    "batch of k": (lambda: {"k": zeros(3, 8, 2, 16)}, ValueError, "batch k 3 q 2"),
    "batch of v": (lambda: {"v": zeros(1, 8, 2, 16)}, ValueError, "batch v 1 q 2"),
    "keys and values": (lambda: {"v": zeros(2, 7, 2, 16)}, ValueError, "v 7 k 8"),
    "heads of v": (lambda: {"v": zeros(2, 8, 4, 16)}, ValueError, "v 4 k 2"),
    "ungrouped heads": (
        lambda: {"q": zeros(2, 6, 3, 16)},
        ValueError,
        "q 3 k 2",
    ),
    "fewer query heads": (lambda: {"q": zeros(2, 6, 1, 16)}, ValueError, "q 1 k 2"),
    "no key heads": (
        lambda: {"k": zeros(2, 8, 0, 16), "v": zeros(2, 8, 0, 16)},
        ValueError,
        "q 4 k 0",
    ),
    "head_dim of k": (lambda: {"k": zeros(2, 8, 2, 24)}, ValueError, "head_dim k 24 q 16"),
    "odd head_dim": (lambda: wide(20, 16), ValueError, "q head_dim 20"),
    "no head_dim": (lambda: wide(0, 16), ValueError, "q head_dim 0"),
    "large head_dim": (lambda: wide(264, 16), ValueError, "q head_dim 264"),
    "odd d_v": (lambda: wide(16, 12), ValueError, "v head_dim 12"),
    "large d_v": (lambda: wide(16, 512), ValueError, "v head_dim 512"),
    "more queries than keys": (
        lambda: {"q": zeros(2, 9, 4, 16)},
        ValueError,
        "q 9 k 8",
    ),
    "scale nan": (lambda: {"scale": float("nan")}, ValueError, "scale nan"),
    "scale inf": (lambda: {"scale": float("inf")}, ValueError, "scale inf"),
    "negative threshold": (
        lambda: {"mass_threshold": -1e-3},
        ValueError,
        "mass_threshold -0.001",
    ),
    "threshold of one": (lambda: {"mass_threshold": 1.0}, ValueError, "mass_threshold 1"),
    "threshold nan": (lambda: {"mass_threshold": float("nan")}, ValueError, "mass_threshold nan"),
}
OPTIONS = {
    "learnable scale": ({"scale": torch.nn.Parameter(torch.ones(()))}, "scale Parameter"),
    "scale as text": ({"scale": "x"}, "scale str"),
    "scale a bool": ({"scale": True}, "scale bool"),
    "no threshold": ({"mass_threshold": None}, "mass_threshold NoneType"),
    "threshold a tensor": ({"mass_threshold": torch.zeros(())}, "mass_threshold Tensor"),
    "no flag": ({"attend_current": None}, "attend_current NoneType"),
    "flag a number": ({"attend_current": 1}, "attend_current int"),
}
PACKED = {
    "rank of q": (lambda: {"q": zeros(1, 8, 4, 16)}, ValueError, "q 4"),
    "rank of k": (lambda: {"k": zeros(8, 16)}, ValueError, "k 2"),
    "rank of v": (lambda: {"v": zeros(8, 16)}, ValueError, "v 2"),
    "mixed dtypes": (lambda: {"v": zeros(8, 2, 16, **half)}, TypeError, "v BFloat16 Float"),
    "ungrouped heads": (lambda: {"q": zeros(8, 3, 16)}, ValueError, "q 3 k 2"),
    "offsets no tensor": (lambda: {"cu_seqlens": [0, 8]}, TypeError, "cu_seqlens list"),
    "key offsets no tensor": (
        lambda: {"cu_seqlens_k": [0, 8]},
        TypeError,
        "cu_seqlens_k list",
    ),
    "int64 offsets": (
        lambda: {"cu_seqlens": cu([0, 8], torch.int64)},
        TypeError,
        "cu_seqlens Long",
    ),
    "offsets of rank 2": (
        lambda: {"cu_seqlens": cu([[0, 8]])},
        ValueError,
        "cu_seqlens 2",
    ),
    "no offsets": (lambda: {"cu_seqlens": cu([])}, ValueError, "cu_seqlens (documents + 1,)"),
    "start": (lambda: {"cu_seqlens": cu([1, 8])}, ValueError, "cu_seqlens start 0 1"),
    "decrease": (
        lambda: {"cu_seqlens": cu([0, 5, 3, 8])},
        ValueError,
        "cu_seqlens decrease 5 3",
    ),
    "end": (lambda: {"cu_seqlens": cu([0, 9])}, ValueError, "cu_seqlens 9 8"),
    "start of keys": (
        lambda: {"cu_seqlens_k": cu([2, 3, 8])},
        ValueError,
        "cu_seqlens_k start 0 2",
    ),
    "int64 offsets of keys": (
        lambda: {"cu_seqlens_k": cu([0, 3, 8], torch.int64)},
        TypeError,
        "cu_seqlens_k Long",
    ),
    "end of keys": (
        lambda: {"cu_seqlens_k": cu([0, 3, 12])},
        ValueError,
        "cu_seqlens_k 12 8",
    ),
    "number of documents": (
        lambda: {"cu_seqlens_k": cu([0, 8])},
        ValueError,
        "cu_seqlens 2 cu_seqlens_k 1",
    ),
    "more queries than keys in a document": (
        lambda: {"cu_seqlens_k": cu([0, 4, 8])},
        ValueError,
        "document 1 5 4",
    ),
    "other rows of keys": (
        lambda: {"k": zeros(9, 2, 16), "v": zeros(9, 2, 16)},
        ValueError,
        "q 8 k 9",
    ),
    "device of the offsets": (
        lambda: {"cu_seqlens": cu([0, 8]).to("meta")},
        ValueError,
        "cu_seqlens meta cpu",
    ),
    "max_seqlen": (
        lambda: {"max_seqlen": 4},
        ValueError,
        "max_seqlen 4 5",
    ),
    "max_seqlen as text": (lambda: {"max_seqlen": "3"}, TypeError, "max_seqlen str"),
    "max_seqlen no int": (lambda: {"max_seqlen_k": 8.0}, TypeError, "max_seqlen_k float"),
    "max_seqlen_k": (
        lambda: {"max_seqlen_k": 4},
        ValueError,
        "max_seqlen_k 4 5",
    ),
}
COMPAT = {
    "rank": (lambda: sb_attn(zeros(4, 8, 16), zeros(4, 8, 16), zeros(4, 8, 16)), "q (b, h, s, d) (4, 8, 16)"),
    "rank packed": (
        lambda: sb_attn_varlen(zeros(4, 8, 16), zeros(4, 8, 16), zeros(1, 4, 8, 16), cu([0, 8]), 8),
        "v (h, t, d) (1, 4, 8, 16)",
    ),
    "head_dim": (
        lambda: sb_attn(zeros(1, 4, 8, 257), zeros(1, 4, 8, 257), zeros(1, 4, 8, 16)),
        "q head_dim 257",
    ),
    "head_dims that padding would make equal": (
        lambda: sb_attn(zeros(1, 4, 8, 50), zeros(1, 4, 8, 51), zeros(1, 4, 8, 50)),
        "q head_dim 50 k 51",
    ),
    "fewer queries than keys": (
        lambda: parallel_stickbreaking_attn(zeros(1, 1, 4, 16), zeros(1, 8, 4, 16), zeros(1, 8, 4, 16)),
        "q k (b, t, h, d) (1, 1, 4, 16) (1, 8, 4, 16)",
    ),
    "heads": (
        lambda: parallel_stickbreaking_attn(zeros(1, 8, 3, 16), zeros(1, 8, 2, 16), zeros(1, 8, 2, 16)),
        "q 3 divisible by 2",
    ),
    "no heads": (
        lambda: parallel_stickbreaking_attn(zeros(1, 8, 2, 16), zeros(1, 8, 0, 16), zeros(1, 8, 0, 16)),
        "q 2 divisible by 0",
    ),
    "value dimension": (
        lambda: parallel_stickbreaking_attn(zeros(1, 8, 2, 16), zeros(1, 8, 2, 16), zeros(1, 8, 2, 257)),
        "v value dimension 257",
    ),
    "start": (
        lambda: sb_attn_varlen(*[zeros(4, 8, 16)] * 3, cu([3, 8]), 5),
        "cu_seqlens start 0 3",
    ),
    "too short a max_seqlens": (
        lambda: sb_attn_varlen(*[zeros(4, 8, 16)] * 3, cu([0, 8]), 5),
        "max_seqlen 5 8",
    ),
    "batch with cu_seqlens": (
        lambda: parallel_stickbreaking_attn(*[zeros(2, 8, 4, 16)] * 3, cu_seqlens=cu([0, 8])),
        "q 2 cu_seqlens batch size expected 1",
    ),
}


COMPAT_TYPES = {
    "q a list": (lambda x, c: sb_attn([1], x, x), "q list"),
    "no offsets": (lambda x, c: sb_attn_varlen(x[0], x[0], x[0], None, 8), "cu_seqlens NoneType"),
    "no ends": (lambda x, c: sb_attn_varlen(x[0], x[0], x[0], None, 8, None, False), "cu_seqlens NoneType"),
    "v a list": (lambda x, c: parallel_stickbreaking_attn(x, x, [1]), "v list"),
    "offsets a list": (lambda x, c: parallel_stickbreaking_attn(x, x, x, cu_seqlens=[0, 8]), "cu_seqlens list"),
    "inv_temp": (lambda x, c: sb_attn(x, x, x, torch.ones(())), "inv_temp Tensor"),
    "packed": (
        lambda x, c: sb_attn_varlen(x[0], x[0], x[0], c, 8, x.mean()),
        "inv_temp Tensor",
    ),
    "scale": (lambda x, c: parallel_stickbreaking_attn(x, x, x, "x"), "scale str"),
    "longest": (lambda x, c: sb_attn_varlen(x[0], x[0], x[0], c, "8"), "max_seqlen str"),
}


def table(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=cases.keys())


@table(DENSE)
def test_dense(case):
    """Of the dense operator."""
    changes, kind, message = case
    with pytest.raises(kind, match=mentions(message)):
        dense(**changes())


@table(PACKED)
def test_packed(case):
    """Of the packed operator."""
    changes, kind, message = case
    with pytest.raises(kind, match=mentions(message)):
        packed(**changes())


@table(COMPAT)
def test_compat(case):
    """Of the drop-ins."""
    call, message = case
    with pytest.raises(ValueError, match=mentions(message)):
        call()


@table(COMPAT_TYPES)
def test_types_in_compat(case):
    """Not as an attribute that something lacks."""
    call, message = case
    with pytest.raises(TypeError, match=mentions(message)):
        call(zeros(1, 8, 8, 16), cu([0, 8]))


@pytest.mark.parametrize("call", [dense, packed, from_a_cache])
@table(OPTIONS)
def test_options(call, case):
    """What all forms have in common."""
    changes, message = case
    with pytest.raises(TypeError, match=mentions(message)):
        call(**changes)


def test_the_unchanged_calls_are_accepted():
    """So that each case above is refused for its change alone; and numbers of other kinds than Python's."""
    assert dense().shape == (2, 6, 4, 16)
    assert packed().shape == from_a_cache().shape == (8, 4, 16)
    assert packed(max_seqlen=torch.tensor(5), max_seqlen_k=np.int64(5)).shape == (8, 4, 16)
    assert dense(scale=np.float32(0.5), mass_threshold=0).shape == dense(scale=1).shape == (2, 6, 4, 16)
