"""Heads of widths without a Hopper kernel of their own: bit for bit the results of heads padded with zeros."""

import pytest
import torch
from support.accuracy import RESULTS, run
from support.blocks import run_in_blocks
from support.inputs import Inputs, make_inputs
from torch.nn.functional import pad

from megatron_sb import stickbreaking_attention, stickbreaking_attention_varlen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs the Hopper kernels"
    ),
]
WIDTHS = [(8, 8), (40, 24), (64, 8), (24, 64), (72, 72), (96, 80), (88, 16), (16, 80), (80, 128), (128, 56), (120, 112)]
WIDTHS += [(144, 128), (160, 8), (192, 72), (136, 136), (200, 64), (64, 248), (240, 256)]
widths = pytest.mark.parametrize(("d", "d_v"), WIDTHS)
EDGES = torch.tensor([0, 1, 1, 130, 700, 990], dtype=torch.int32)


def padded(x: Inputs) -> tuple[Inputs, float]:
    """Return the inputs with zeros in the columns after theirs, as wide as the kernel's tiles, and their scale."""
    d, d_v = x.q.shape[-1], x.v.shape[-1]
    kernels = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    width, width_v = next(kernel for kernel in kernels if d <= kernel[0] and d_v <= kernel[1])
    return Inputs(
        *(pad(t, (0, width - d)) for t in (x.q, x.k)), *(pad(t, (0, width_v - d_v)) for t in (x.v, x.do)), x.dmass
    ), d**-0.5


def assert_same(actual: dict, wide: dict) -> None:
    """Compare the columns that a narrow head has. In the others the wide head must have zeros."""
    for name in RESULTS:
        columns = actual[name].shape[-1]
        assert torch.equal(actual[name], wide[name][..., :columns]), name
        assert not wide[name][..., columns:].any(), name


@widths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("h", "h_kv"), [(4, 2), (8, 1)])  # with one KV head, CTAs share key tiles
def test_dense(d, d_v, dtype, h, h_kv):
    x = make_inputs("mean -6", s=1300, h=h, h_kv=h_kv, d=d, d_v=d_v, dtype=dtype)
    wide, scale = padded(x)
    assert_same(
        run(stickbreaking_attention, x, return_mass=True),
        run(stickbreaking_attention, wide, return_mass=True, scale=scale),
    )


@widths
def test_packed_with_rows_in_no_document(d, d_v):
    x = make_inputs("randn", s=1000, h=3, h_kv=3, d=d, d_v=d_v, dtype=torch.bfloat16).packed()
    wide, scale = padded(x)
    offsets = EDGES.to(x.q.device)
    assert_same(
        run(stickbreaking_attention_varlen, x, offsets, return_mass=True),
        run(stickbreaking_attention_varlen, wide, offsets, return_mass=True, scale=scale),
    )


@widths
def test_gradients_that_accumulate_in_fp32(d, d_v):
    """Blocks of keys add to fp32 gradients, and their outputs are fp32."""
    x = make_inputs("mean -3.2", s=500, h=4, h_kv=2, d=d, d_v=d_v, dtype=torch.bfloat16)
    wide, scale = padded(x)
    blocks = [run_in_blocks(inputs, [0.4], carry=True, scale=scale) for inputs in (x, wide)]
    assert_same(*blocks)
