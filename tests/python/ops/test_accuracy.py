"""Outputs, masses and gradients of the dense operator are accurate against the float64 oracle."""

import pytest
import torch
from support.accuracy import assert_accurate
from support.bars import DEFAULT_THRESHOLD
from support.inputs import REGIMES, make_inputs

from megatron_sb import stickbreaking_attention

pytestmark = pytest.mark.usefixtures("device")

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LENGTHS = [0, 1, 2, 3, 63, 64, 65, 127, 129, 1000]


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("regime", REGIMES)
def test_regimes(regime, dtype):
    """Skipping is disabled, so that tiny gradients must be accurate too."""
    x = make_inputs(regime, b=2, s=200, h=4, h_kv=2, d=32, dtype=dtype)
    assert_accurate(stickbreaking_attention, x, mass_threshold=0.0)


@pytest.mark.parametrize("regime", ["randn", "zeros", "mean -3.2", "saturated +5"])
def test_default_threshold(regime):
    """With skipping, outputs and gradients are as accurate as without it. A used-up mass is only known to be small."""
    x = make_inputs(regime, s=500, h=2, d=32)
    assert_accurate(stickbreaking_attention, x, names=("o", "dq", "dk", "dv"))
    _, mass = stickbreaking_attention(x.q, x.k, x.v, return_mass=True)
    _, unskipped = stickbreaking_attention(x.q, x.k, x.v, mass_threshold=0.0, return_mass=True)
    used_up = mass < DEFAULT_THRESHOLD
    assert used_up.any()
    assert ((unskipped <= mass) & (mass >= 0))[used_up].all()
    assert torch.equal(mass[~used_up], unskipped[~used_up])


@pytest.mark.parametrize("mass_threshold", [0.0, DEFAULT_THRESHOLD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("regime", ["mean -3.2", "mean -8", "mean -11"])
def test_16384_keys(regime, dtype, mass_threshold):
    """With logits near -8 and -11, the oldest keys have weight. With -3.2 the mass becomes subnormal and underflows."""
    x = make_inputs(regime, s=70, s_k=16384, h=1, d=16, dtype=dtype)
    names = ("o", "dq", "dk", "dv") if mass_threshold and regime == "mean -3.2" else ("o", "mass", "dq", "dk", "dv")
    assert_accurate(stickbreaking_attention, x, mass_threshold=mass_threshold, names=names)


def test_2000_queries_and_keys():
    """There are many tiles of queries and keys, and each gradient is a sum over up to 2000 rows."""
    assert_accurate(stickbreaking_attention, make_inputs("mean -8", s=2000, h=1, d=16), mass_threshold=0.0)


@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length, attend_current):
    """Lengths may be 0, or next to a multiple of the tile."""
    x = make_inputs("mean -3.2", s=length, h=2, d=16)
    assert_accurate(stickbreaking_attention, x, attend_current=attend_current, mass_threshold=0.0)


@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize(("s", "s_k"), [(0, 5), (1, 2), (1, 1000), (5, 64), (64, 65), (65, 129), (100, 333)])
def test_fewer_queries_than_keys(s, s_k, attend_current):
    """The queries are the last s positions of the keys."""
    x = make_inputs("mean -3.2", s=s, s_k=s_k, h=2, d=16)
    assert_accurate(stickbreaking_attention, x, attend_current=attend_current, mass_threshold=0.0)


@pytest.mark.parametrize("h_kv", [8, 4, 2, 1])
def test_grouped_heads(h_kv):
    """A KV head may have 1, 2, 4 or 8 query heads."""
    assert_accurate(stickbreaking_attention, make_inputs("mean -3.2", b=2, s=130, h=8, h_kv=h_kv, d=16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize(
    ("d", "d_v"), [(8, 8), (16, 16), (40, 40), (64, 64), (128, 128), (200, 200), (256, 256), (64, 24), (8, 256)]
)
def test_head_dims(d, d_v, dtype):
    """head_dim may be any multiple of 8 up to 256, and d_v may differ."""
    x = make_inputs("mean -3.2", s=130, h=2, h_kv=1, d=d, d_v=d_v, dtype=dtype)
    assert_accurate(stickbreaking_attention, x, mass_threshold=0.0)


def test_empty_batch():
    """A batch of size 0 gives results of size 0."""
    x = make_inputs(b=0, s=5, h=2, d=8)
    o, mass = stickbreaking_attention(x.q, x.k, x.v, return_mass=True)
    assert (o.shape, mass.shape) == ((0, 5, 2, 8), (0, 2, 5))
