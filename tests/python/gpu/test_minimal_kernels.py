"""The minimal kernels of examples/cuda compute what the float64 reference computes."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_sb import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")]
SOURCES = Path(__file__).parents[3] / "examples/cuda"


class Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("batch", "queries", "keys", "heads", "kv_heads", "d", "d_v")]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Compile the two examples to one shared library."""
    library = tmp_path_factory.mktemp("minimal") / "minimal.so"
    major, minor = torch.cuda.get_device_capability()
    sources = [str(SOURCES / f"minimal_{name}.cu") for name in ("forward", "backward")]
    flags = ["-shared", "-Xcompiler=-fPIC", f"-arch=sm_{major}{minor}"]
    subprocess.run(["nvcc", *flags, "-o", str(library), *sources], check=True, timeout=300)
    return ctypes.CDLL(str(library))


def launch(function, sizes: Sizes, *arguments) -> None:
    """Call a minimal kernel on the current stream. Floats become C floats, tensors device pointers."""
    converted = []
    for argument in arguments:
        if isinstance(argument, float):
            converted.append(ctypes.c_float(argument))
        elif isinstance(argument, torch.Tensor):
            assert argument.is_contiguous()
            converted.append(ctypes.c_void_p(argument.data_ptr()))
        else:
            converted.append(argument)
    error = function(sizes, *converted, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
    assert error == 0


@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize("mean_logit", [-6.0, 0.0, 20.0])
def test_minimal_kernels_match_the_reference(kernels, mean_logit, attend_current):
    """Outputs and gradients are within fp32 rounding of float64: long rows, used-up rows and saturated logits."""
    batch, queries, keys, heads, kv_heads, d, d_v = 2, 200, 330, 4, 2, 64, 48
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    q, k, v = randn(batch, queries, heads, d), randn(batch, keys, kv_heads, d), randn(batch, keys, kv_heads, d_v)
    scale = d**-0.5
    q[..., 0], k[..., 0] = 1.0, mean_logit / scale
    d_o, d_mass = randn(batch, queries, heads, d_v), randn(batch, heads, queries)

    o, dq, dk, dv = torch.empty_like(d_o), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    mass, restart_mass = torch.empty_like(d_mass), torch.empty_like(d_mass)
    restart_key = torch.empty(batch, heads, queries, dtype=torch.int32, device="cuda")
    sizes = Sizes(batch, queries, keys, heads, kv_heads, d, d_v)
    record = (restart_key, restart_mass)
    launch(kernels.minimal_forward, sizes, q, k, v, scale, 0.0, int(attend_current), o, mass, *record)
    launch(
        kernels.minimal_backward,
        *(sizes, q, k, v, d_o, d_mass, scale, int(attend_current), mass, *record, dq, dk, dv),
    )

    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    o_64, mass_64 = reference.stickbreaking_attention(
        *inputs, scale=scale, attend_current=attend_current, return_mass=True
    )
    expected = torch.autograd.grad((o_64, mass_64), inputs, (d_o.double(), d_mass.double()))
    torch.testing.assert_close(mass.double(), mass_64.detach(), rtol=1e-5, atol=1e-6)
    for actual, wanted in zip((o, dq, dk, dv), (o_64.detach(), *expected), strict=True):
        error = torch.linalg.vector_norm(actual.double() - wanted) / torch.linalg.vector_norm(wanted)
        assert error < 2e-5


def test_minimal_forward_skips_within_its_bound(kernels):
    """A row that stops at mass_threshold misses at most mass_threshold * max|v| of its output."""
    batch, keys, heads, d, threshold = 1, 500, 2, 32, 2.0**-10
    q, k, v = (torch.randn(batch, keys, heads, d, device="cuda") for _ in range(3))
    o = torch.empty_like(v)
    mass, restart_mass = (torch.empty(batch, heads, keys, device="cuda") for _ in range(2))
    restart_key = torch.empty(batch, heads, keys, dtype=torch.int32, device="cuda")
    sizes = Sizes(batch, keys, keys, heads, heads, d, d)
    launch(kernels.minimal_forward, sizes, q, k, v, d**-0.5, threshold, 0, o, mass, restart_key, restart_mass)
    assert (restart_key[..., -1] > keys - 100).all(), "no row stopped early, so the bound below would hold trivially"
    expected = reference.stickbreaking_attention(q, k, v)
    assert (o - expected).abs().max() <= threshold * v.abs().max() + 1e-5
