"""A head has the same reach, bit for bit, in a call with all heads and in one with some of them."""

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_sb import reference, stickbreaking_attention
from megatron_sb.options import MAX_REACH, MIN_REACH, reach_and_step, reach_of_heads

bounds = st.floats(MIN_REACH, MAX_REACH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 12])
def test_heads_of_a_rank_have_the_bits_of_all_heads(dtype, ranks):
    q, k, v = (torch.randn(1, 40, 12, 16, dtype=dtype) for _ in range(3))
    local = 12 // ranks
    parts = []
    for first in range(0, 12, local):
        heads = slice(first, first + local)
        reach = reach_of_heads((0.3, 7.1), 12, heads.start, heads.stop)
        parts.append(stickbreaking_attention(*(x[:, :, heads] for x in (q, k, v)), reach=reach))
    assert torch.equal(torch.cat(parts, dim=2), stickbreaking_attention(q, k, v, reach=(0.3, 7.1)))


@given(first=bounds, last=bounds, heads=st.integers(1, 512))
def test_the_arithmetic_of_the_kernels_is_exact(first, last, heads):
    """Kernels compute a = reach + head * step in fp32. So a rank's reach and step give the same a as those of all."""
    of_first, step = reach_and_step((first, last), heads)
    exact = [of_first + head * step for head in range(heads)]
    in_fp32 = numpy.float32(of_first) + numpy.arange(heads, dtype=numpy.float32) * numpy.float32(step)
    assert [float(a) for a in in_fp32] == exact
    assert all(MIN_REACH <= a <= MAX_REACH for a in exact)
    assert abs(of_first - first) <= 2**-19
    assert heads == 1 or abs(exact[-1] - last) <= 2**-18 * (heads - 1)


@given(first=bounds, last=bounds, heads=st.integers(1, 64), data=st.data())
def test_the_reach_of_some_heads_is_that_of_all(first, last, heads, data):
    begin = data.draw(st.integers(0, heads - 1))
    end = data.draw(st.integers(begin + 1, heads))
    of_first, step = reach_and_step((first, last), heads)
    part = reach_of_heads((first, last), heads, begin, end)
    assert reach_and_step(part, end - begin) == (of_first + begin * step, step if end - begin > 1 else 0.0)


@given(first=bounds, last=bounds, heads=st.integers(1, 16))
def test_the_operator_has_the_reach_of_the_reference(first, last, heads):
    """In fp64 an error of one step of 2^-18 would be seen. Masses near 1 show the offset of a head."""
    q, k, v = (torch.zeros(1, 3, heads, 8, dtype=torch.float64) for _ in range(3))
    _, mass = stickbreaking_attention(q, k, v, reach=(first, last), mass_threshold=0.0, return_mass=True)
    _, expected = reference.stickbreaking_attention(q, k, v, reach=(first, last), return_mass=True)
    torch.testing.assert_close(1 - mass, 1 - expected, rtol=1e-9, atol=1e-15)
