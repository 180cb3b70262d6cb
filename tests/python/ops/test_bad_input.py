"""Every rejection of the operators: its type, and a sentence that names the argument, its value and what is allowed."""

import re

import numpy as np
import pytest
import torch
from support.inputs import make_inputs

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
    "rank of q": (lambda: {"q": zeros(6, 4, 16)}, ValueError, "q: has 3 dimensions; 4, (b, s, h, d), are needed"),
    "rank of k": (lambda: {"k": zeros(2, 8, 16)}, ValueError, "k: has 3 dimensions; 4, (b, s_k, h_kv, d), are needed"),
    "rank of v": (lambda: {"v": zeros(2, 8, 2, 16, 1)}, ValueError, "v: has 5 dimensions; 4, (b, s_k, h_kv, d_v)"),
    "q no tensor": (lambda: {"q": [1.0]}, TypeError, "q is list; a torch.Tensor is allowed"),
    "v no tensor": (lambda: {"v": None}, TypeError, "v is NoneType; a torch.Tensor is allowed"),
    "integers": (
        lambda: {name: zeros(2, 8, 2, 16, dtype=torch.int64) for name in "qkv"},
        TypeError,
        "q: dtype is Long; float32, float64, bfloat16 and float16 are allowed",
    ),
    "complex": (lambda: {"q": zeros(2, 6, 4, 16, dtype=torch.complex64)}, TypeError, "q: dtype is ComplexFloat"),
    "mixed dtypes": (
        lambda: {"k": zeros(2, 8, 2, 16, **half)},
        TypeError,
        "k: dtype is BFloat16 but q's is Float; q, k and v need one dtype (or autocast)",
    ),
    "mixed dtype of v": (lambda: {"v": zeros(2, 8, 2, 16).double()}, TypeError, "v: dtype is Double but q's is Float"),
    "mixed devices": (
        lambda: {"k": zeros(2, 8, 2, 16, device="meta")},
        ValueError,
        "k: device is meta but q's is cpu; q, k and v need one device",
    ),
    "batch of k": (lambda: {"k": zeros(3, 8, 2, 16)}, ValueError, "batch differs: k has 3, q has 2"),
    "batch of v": (lambda: {"v": zeros(1, 8, 2, 16)}, ValueError, "batch differs: v has 1, q has 2"),
    "keys and values": (lambda: {"v": zeros(2, 7, 2, 16)}, ValueError, "number of keys differs: v has 7, k has 8"),
    "heads of v": (lambda: {"v": zeros(2, 8, 4, 16)}, ValueError, "number of heads differs: v has 4, k has 2"),
    "ungrouped heads": (
        lambda: {"q": zeros(2, 6, 3, 16)},
        ValueError,
        "q has 3 heads and k has 2; the heads of q must be a positive multiple of those of k and v",
    ),
    "fewer query heads": (lambda: {"q": zeros(2, 6, 1, 16)}, ValueError, "q has 1 heads and k has 2"),
    "no key heads": (
        lambda: {"k": zeros(2, 8, 0, 16), "v": zeros(2, 8, 0, 16)},
        ValueError,
        "q has 4 heads and k has 0; the heads of q must be a positive multiple",
    ),
    "head_dim of k": (lambda: {"k": zeros(2, 8, 2, 24)}, ValueError, "head_dim differs: k has 24, q has 16"),
    "odd head_dim": (lambda: wide(20, 16), ValueError, "q: head_dim is 20; a multiple of 8 up to 256 is allowed"),
    "no head_dim": (lambda: wide(0, 16), ValueError, "q: head_dim is 0; a multiple of 8 up to 256"),
    "large head_dim": (lambda: wide(264, 16), ValueError, "q: head_dim is 264; a multiple of 8 up to 256"),
    "odd d_v": (lambda: wide(16, 12), ValueError, "v: head_dim is 12; a multiple of 8 up to 256"),
    "large d_v": (lambda: wide(16, 512), ValueError, "v: head_dim is 512; a multiple of 8 up to 256"),
    "more queries than keys": (
        lambda: {"q": zeros(2, 9, 4, 16)},
        ValueError,
        "q has 9 positions and k has 8; the queries are the last positions of the keys, so q may not have more",
    ),
    "scale nan": (lambda: {"scale": float("nan")}, ValueError, "scale is nan; a finite number is allowed"),
    "scale inf": (lambda: {"scale": float("inf")}, ValueError, "scale is inf; a finite number is allowed"),
    "negative threshold": (
        lambda: {"mass_threshold": -1e-3},
        ValueError,
        "mass_threshold is -0.001; 0 (no skipping) up to, not including, 1 is allowed",
    ),
    "threshold of one": (lambda: {"mass_threshold": 1.0}, ValueError, "mass_threshold is 1; 0 (no skipping) up to"),
    "threshold nan": (lambda: {"mass_threshold": float("nan")}, ValueError, "mass_threshold is nan; 0 (no skipping)"),
}
OPTIONS = {
    "learnable scale": ({"scale": torch.nn.Parameter(torch.ones(()))}, "scale is Parameter; a number is allowed"),
    "scale as text": ({"scale": "x"}, "scale is str; a number is allowed"),
    "scale a bool": ({"scale": True}, "scale is bool; a number is allowed"),
    "no threshold": ({"mass_threshold": None}, "mass_threshold is NoneType; a number is allowed"),
    "threshold a tensor": ({"mass_threshold": torch.zeros(())}, "mass_threshold is Tensor; a number is allowed"),
    "no flag": ({"attend_current": None}, "attend_current is NoneType; True or False is allowed"),
    "flag a number": ({"attend_current": 1}, "attend_current is int; True or False is allowed"),
}
PACKED = {
    "rank of q": (lambda: {"q": zeros(1, 8, 4, 16)}, ValueError, "q: has 4 dimensions; 3, (t, h, d), are needed"),
    "rank of k": (lambda: {"k": zeros(8, 16)}, ValueError, "k: has 2 dimensions; 3, (t_k, h_kv, d), are needed"),
    "rank of v": (lambda: {"v": zeros(8, 16)}, ValueError, "v: has 2 dimensions; 3, (t_k, h_kv, d_v), are needed"),
    "mixed dtypes": (lambda: {"v": zeros(8, 2, 16, **half)}, TypeError, "v: dtype is BFloat16 but q's is Float"),
    "ungrouped heads": (lambda: {"q": zeros(8, 3, 16)}, ValueError, "q has 3 heads and k has 2; the heads of q must"),
    "offsets no tensor": (lambda: {"cu_seqlens": [0, 8]}, TypeError, "cu_seqlens is list; a torch.Tensor is allowed"),
    "key offsets no tensor": (
        lambda: {"cu_seqlens_k": [0, 8]},
        TypeError,
        "cu_seqlens_k is list; a torch.Tensor is allowed",
    ),
    "int64 offsets": (
        lambda: {"cu_seqlens": cu([0, 8], torch.int64)},
        TypeError,
        "cu_seqlens: dtype is Long; int32 is allowed",
    ),
    "offsets of rank 2": (
        lambda: {"cu_seqlens": cu([[0, 8]])},
        ValueError,
        "cu_seqlens: has 2 dimensions; one, (documents + 1,), is allowed",
    ),
    "no offsets": (lambda: {"cu_seqlens": cu([])}, ValueError, "cu_seqlens: is empty; (documents + 1,) entries"),
    "start": (lambda: {"cu_seqlens": cu([1, 8])}, ValueError, "cu_seqlens: starts at 1; it must start at 0"),
    "decrease": (
        lambda: {"cu_seqlens": cu([0, 5, 3, 8])},
        ValueError,
        "cu_seqlens: decreases from 5 to 3 at document 1; offsets may not decrease",
    ),
    "end": (lambda: {"cu_seqlens": cu([0, 9])}, ValueError, "cu_seqlens: ends at 9, beyond the 8 rows there are"),
    "start of keys": (
        lambda: {"cu_seqlens_k": cu([2, 3, 8])},
        ValueError,
        "cu_seqlens_k: starts at 2; it must start at 0",
    ),
    "int64 offsets of keys": (
        lambda: {"cu_seqlens_k": cu([0, 3, 8], torch.int64)},
        TypeError,
        "cu_seqlens_k: dtype is Long; int32 is allowed",
    ),
    "end of keys": (
        lambda: {"cu_seqlens_k": cu([0, 3, 12])},
        ValueError,
        "cu_seqlens_k: ends at 12, beyond the 8 rows there are",
    ),
    "number of documents": (
        lambda: {"cu_seqlens_k": cu([0, 8])},
        ValueError,
        "cu_seqlens has 2 documents and cu_seqlens_k has 1; they must be as many",
    ),
    "more queries than keys in a document": (
        lambda: {"cu_seqlens_k": cu([0, 4, 8])},
        ValueError,
        "document 1 has 5 queries and 4 keys; the queries are the last positions of the keys, so it may not have more",
    ),
    "other rows of keys": (
        lambda: {"k": zeros(9, 2, 16), "v": zeros(9, 2, 16)},
        ValueError,
        "q has 8 rows and k has 9; where they differ, cu_seqlens_k is needed",
    ),
    "device of the offsets": (
        lambda: {"cu_seqlens": cu([0, 8]).to("meta")},
        ValueError,
        "cu_seqlens: device is meta but q's is cpu",
    ),
    "max_seqlen": (
        lambda: {"max_seqlen": 4},
        ValueError,
        "max_seqlen is 4, but the longest document has 5 positions",
    ),
    "max_seqlen as text": (lambda: {"max_seqlen": "3"}, TypeError, "max_seqlen is str; an int is allowed"),
    "max_seqlen no int": (lambda: {"max_seqlen_k": 8.0}, TypeError, "max_seqlen_k is float; an int is allowed"),
    "max_seqlen_k": (
        lambda: {"max_seqlen_k": 4},
        ValueError,
        "max_seqlen_k is 4, but the longest document has 5 positions",
    ),
}
COMPAT = {
    "rank": (lambda: sb_attn(zeros(4, 8, 16), zeros(4, 8, 16), zeros(4, 8, 16)), "q must be (b, h, s, d), but its"),
    "rank packed": (
        lambda: sb_attn_varlen(zeros(4, 8, 16), zeros(4, 8, 16), zeros(1, 4, 8, 16), cu([0, 8]), 8),
        "v must be (h, t, d), but its shape is (1, 4, 8, 16)",
    ),
    "head_dim": (
        lambda: sb_attn(zeros(1, 4, 8, 257), zeros(1, 4, 8, 257), zeros(1, 4, 8, 16)),
        "q has head_dim 257; 1 to 256 are supported",
    ),
    "head_dims that padding would make equal": (
        lambda: sb_attn(zeros(1, 4, 8, 50), zeros(1, 4, 8, 51), zeros(1, 4, 8, 50)),
        "q has head_dim 50 and k has 51; they must be equal",
    ),
    "fewer queries than keys": (
        lambda: parallel_stickbreaking_attn(zeros(1, 1, 4, 16), zeros(1, 8, 4, 16), zeros(1, 8, 4, 16)),
        "Expected q, k and v of shapes (b, t, h, d), (b, t, h_kv, d) and (b, t, h_kv, d_v); they are [(1, 1, 4, 16), ",
    ),
    "heads": (
        lambda: parallel_stickbreaking_attn(zeros(1, 8, 3, 16), zeros(1, 8, 2, 16), zeros(1, 8, 2, 16)),
        "q has 3 heads, which must be divisible by the 2 of k and v",
    ),
    "no heads": (
        lambda: parallel_stickbreaking_attn(zeros(1, 8, 2, 16), zeros(1, 8, 0, 16), zeros(1, 8, 0, 16)),
        "q has 2 heads, which must be divisible by the 0 of k and v",
    ),
    "value dimension": (
        lambda: parallel_stickbreaking_attn(zeros(1, 8, 2, 16), zeros(1, 8, 2, 16), zeros(1, 8, 2, 257)),
        "v has a value dimension of 257; 1 to 256 are supported",
    ),
    "start": (
        lambda: sb_attn_varlen(*[zeros(4, 8, 16)] * 3, cu([3, 8]), 5),
        "cu_seqlens: starts at 3; it must start at 0",
    ),
    "too short a max_seqlens": (
        lambda: sb_attn_varlen(*[zeros(4, 8, 16)] * 3, cu([0, 8]), 5),
        "max_seqlen is 5, but the longest document has 8 positions",
    ),
    "batch with cu_seqlens": (
        lambda: parallel_stickbreaking_attn(*[zeros(2, 8, 4, 16)] * 3, cu_seqlens=cu([0, 8])),
        "q has b = 2; with cu_seqlens, whose documents lie in one sequence, the batch size is expected to be 1",
    ),
}


COMPAT_TYPES = {
    "q a list": (lambda x, c: sb_attn([1], x, x), "q is list; a torch.Tensor is allowed"),
    "no offsets": (lambda x, c: sb_attn_varlen(x[0], x[0], x[0], None, 8), "cu_seqlens is NoneType; a torch.Tensor is"),
    "no ends": (lambda x, c: sb_attn_varlen(x[0], x[0], x[0], None, 8, None, False), "cu_seqlens is NoneType; a torch"),
    "v a list": (lambda x, c: parallel_stickbreaking_attn(x, x, [1]), "v is list; a torch.Tensor is allowed"),
    "offsets a list": (lambda x, c: parallel_stickbreaking_attn(x, x, x, cu_seqlens=[0, 8]), "cu_seqlens is list; a"),
    "inv_temp": (lambda x, c: sb_attn(x, x, x, torch.ones(())), "inv_temp is Tensor; a number is allowed"),
    "packed": (
        lambda x, c: sb_attn_varlen(x[0], x[0], x[0], c, 8, x.mean()),
        "inv_temp is Tensor; a number is allowed",
    ),
    "scale": (lambda x, c: parallel_stickbreaking_attn(x, x, x, "x"), "scale is str; a number is allowed"),
    "longest": (lambda x, c: sb_attn_varlen(x[0], x[0], x[0], c, "8"), "max_seqlen is str; an int is allowed"),
}


def table(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=cases.keys())


@table(DENSE)
def test_dense(case):
    """Of the dense operator."""
    changes, kind, message = case
    with pytest.raises(kind, match=re.escape(message)):
        dense(**changes())


@table(PACKED)
def test_packed(case):
    """Of the packed operator."""
    changes, kind, message = case
    with pytest.raises(kind, match=re.escape(message)):
        packed(**changes())


@table(COMPAT)
def test_compat(case):
    """Of the drop-ins."""
    call, message = case
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@table(COMPAT_TYPES)
def test_types_in_compat(case):
    """Not as an attribute that something lacks."""
    call, message = case
    with pytest.raises(TypeError, match=re.escape(message)):
        call(zeros(1, 8, 8, 16), cu([0, 8]))


@pytest.mark.parametrize("call", [dense, packed, from_a_cache])
@table(OPTIONS)
def test_options(call, case):
    """What all forms have in common."""
    changes, message = case
    with pytest.raises(TypeError, match=re.escape(message)):
        call(**changes)


def test_the_unchanged_calls_are_accepted():
    """So that each case above is refused for its change alone; and numbers of other kinds than Python's."""
    assert dense().shape == (2, 6, 4, 16)
    assert packed().shape == from_a_cache().shape == (8, 4, 16)
    assert packed(max_seqlen=torch.tensor(5), max_seqlen_k=np.int64(5)).shape == (8, 4, 16)
    assert dense(scale=np.float32(0.5), mass_threshold=0).shape == dense(scale=1).shape == (2, 6, 4, 16)
