"""head_output (remainder bias and norm of each head): accuracy, torch integration, and invalid arguments."""

import pytest
import torch
from support.accuracy import accumulation_type, assert_errors
from support.cuda import captured, no_synchronisation
from support.messages import mentions
from torch import zeros, zeros_like
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_sb import head_output, stickbreaking_attention

ops = torch.ops.megatron_sb
on_devices = pytest.mark.usefixtures("device")
NAMES = ("o", "mass", "remainder_bias", "norm_weight", "norm_bias")
RESULTS = ("out", *(f"d_{name}" for name in NAMES))
# The parameters that a call gets.
PARAMETERS = {
    "bias": ("remainder_bias",),
    "norm": ("norm_weight", "norm_bias"),
    "norm without its bias": ("norm_weight",),
    "bias and norm": ("remainder_bias", "norm_weight", "norm_bias"),
    "bias and norm without its bias": ("remainder_bias", "norm_weight"),
}
parameter_sets = pytest.mark.parametrize("given", PARAMETERS.values(), ids=PARAMETERS)
ALL = PARAMETERS["bias and norm"]
EPS = 3e-4


def make_arguments(given=ALL, *, b=2, s=37, h=3, d=16, dtype=torch.float32, parameters=None, seed=0):
    """Return the arguments by name, and d_out. `parameters` is the dtype of the parameters, by default that of o.

    o has a mean, and its first row is 0.
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    o = randn(b, s, h, d) + 0.5 * randn(b, s, h, 1)
    o[:, :1] = 0  # as the output of the first query of a document
    x = {"o": o.to(dtype), "mass": torch.rand(b, h, s, generator=generator).to(accumulation_type(dtype))}
    x |= {name: (randn(h * d) + (name == "norm_weight")).to(parameters or dtype) for name in given}
    return x, randn(b, s, h, d).to(dtype)


def naive(o, mass, remainder_bias=None, norm_weight=None, norm_bias=None, *, eps=1e-5):
    """Compute the formula in the dtype of the arguments."""
    heads = o.shape[-2:]
    x = o
    if remainder_bias is not None:
        x = x + mass.transpose(-1, -2)[..., None] * remainder_bias.view(heads)
    if norm_weight is not None:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm_weight.view(heads)
    return x if norm_bias is None else x + norm_bias.view(heads)


def run(function, x, d_out, **options):
    """Return out and the gradients of all arguments. Without a remainder bias, the mass has no gradient."""
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
    out = function(**leaves, eps=EPS, **options)
    gradients = torch.autograd.grad(out, leaves.values(), d_out.to(out.dtype), allow_unused=True)
    results = {"out": out.detach()} | {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {name: value for name, value in results.items() if value is not None}


def in_type(x, d_out, dtype):
    """Return the same values in another dtype."""
    return {name: value.to(dtype) for name, value in x.items()}, d_out.to(dtype)


def assert_accurate(x, d_out):
    """Assert that each result is about as accurate as the formula in the accumulation type, rounded once."""
    actual = run(head_output, x, d_out)
    oracle = run(naive, *in_type(x, d_out, torch.float64))
    plain = run(naive, *in_type(x, d_out, accumulation_type(d_out.dtype)))
    plain = {name: value.to(actual[name].dtype) for name, value in plain.items()}
    assert actual.keys() == oracle.keys()
    for name, value in actual.items():
        assert value.dtype == (x[name.removeprefix("d_")].dtype if name != "out" else x["o"].dtype), name
    assert_errors(actual, plain, oracle, dict.fromkeys(RESULTS, 16 * torch.finfo(torch.float32).eps), tuple(actual))


@on_devices
class TestAccuracy:
    """Results and gradients are accurate against float64."""

    @parameter_sets
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_parameter_sets(self, given, dtype):
        assert_accurate(*make_arguments(given, dtype=dtype))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("d", [8, 24, 64, 120, 128, 200, 256])
    def test_head_dims(self, d, dtype):
        assert_accurate(*make_arguments(d=d, s=101, dtype=dtype))

    @pytest.mark.parametrize(("b", "s", "h"), [(1, 1, 1), (5, 1, 7), (1, 5000, 2), (300, 3, 2)], ids=str)
    def test_sizes(self, b, s, h):
        assert_accurate(*make_arguments(b=b, s=s, h=h, d=64, dtype=torch.bfloat16))

    @pytest.mark.parametrize("parameters", ["float64", "float32", "bfloat16", "float16"])
    def test_parameters_of_another_dtype(self, parameters):
        """The gradients of the parameters have the dtype of the parameters."""
        assert_accurate(*make_arguments(dtype=torch.bfloat16, parameters=getattr(torch, parameters)))

    def test_a_large_mean(self):
        """The mean is subtracted before the squares are summed. Otherwise the variance would be a rounding error."""
        x, d_out = make_arguments(("norm_weight",), d=64)
        x["o"] = x["o"] + 1000
        exact = naive(**in_type(x, d_out, torch.float64)[0], eps=EPS)
        torch.testing.assert_close(head_output(**x, eps=EPS).double()[:, 1:], exact[:, 1:], rtol=0, atol=2e-3)


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    """The results are bitwise those of fp32 for the same values, rounded at the end."""
    x, d_out = make_arguments(d=128, dtype=dtype)
    actual, in_fp32 = run(head_output, x, d_out), run(head_output, *in_type(x, d_out, torch.float32))
    for name, value in actual.items():
        assert torch.equal(value, in_fp32[name].to(value.dtype)), name


@on_devices
def test_the_norm_is_group_norm():
    """The groups are the heads, and the channels are the h * d channels of a position."""
    x, _ = make_arguments(PARAMETERS["norm"], h=4, d=24)
    rows = x["o"].reshape(-1, 4 * 24)
    expected = torch.nn.functional.group_norm(rows, 4, x["norm_weight"], x["norm_bias"], EPS).view_as(x["o"])
    torch.testing.assert_close(head_output(**x, eps=EPS), expected, rtol=1e-5, atol=1e-5)


@parameter_sets
def test_gradients_agree_with_finite_differences(given):
    x, _ = make_arguments(given, b=2, s=3, h=2, d=8, dtype=torch.float64)
    x["o"] = x["o"] + torch.linspace(-1, 1, 8, dtype=torch.float64)  # so that no row has a variance of 0
    leaves = [value.requires_grad_() for value in x.values()]
    assert torch.autograd.gradcheck(lambda *v: head_output(**dict(zip(x, v, strict=True)), eps=EPS), leaves)


STRIDES = {
    "sbhd": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "bhsd": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every second head": lambda t: t.repeat_interleave(2, dim=2)[:, :, ::2],
    "misaligned": lambda t: torch.cat([t.new_zeros(3), t.flatten()])[3:].view_as(t),
    "last stride of two": lambda t: t.repeat_interleave(2, dim=3)[..., ::2],
}


@on_devices
class TestForms:
    """Strided, packed and empty inputs, and calls under autocast, give bitwise the results of contiguous inputs."""

    @staticmethod
    def assert_same(actual, expected):
        assert actual.keys() == expected.keys()
        for name, value in actual.items():
            assert torch.equal(value, expected[name]), name

    @pytest.mark.parametrize("view", STRIDES.values(), ids=STRIDES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_strides(self, view, dtype):
        x, d_out = make_arguments(d=64, dtype=dtype)
        expected = run(head_output, x, d_out)
        x["mass"] = x["mass"].transpose(1, 2).contiguous().transpose(1, 2)
        actual = run(head_output, {**x, "o": view(x["o"])}, view(d_out))
        self.assert_same(actual, expected)
        assert actual["out"].is_contiguous() and actual["d_o"].is_contiguous() and actual["d_mass"].is_contiguous()

    def test_expanded_output_gradient(self):
        x, d_out = make_arguments()
        expected = run(head_output, x, torch.ones_like(d_out))
        self.assert_same(run(head_output, x, torch.ones(()).expand(d_out.shape)), expected)

    @parameter_sets
    def test_packed(self, given):
        x, d_out = make_arguments(given, b=1)
        expected = run(head_output, x, d_out)
        actual = run(head_output, {**x, "o": x["o"][0], "mass": x["mass"][0]}, d_out[0])
        for name in ("out", "d_o", *(["d_mass"] if "remainder_bias" in given else [])):
            expected[name] = expected[name][0]
        self.assert_same(actual, expected)

    def test_the_mass_may_be_none_without_a_remainder_bias(self):
        x, _ = make_arguments(PARAMETERS["norm"])
        assert torch.equal(head_output(**{**x, "mass": None}, eps=EPS), head_output(**x, eps=EPS))

    @pytest.mark.parametrize("sizes", [{"b": 0}, {"s": 0}], ids=str)
    def test_no_rows(self, sizes):
        results = run(head_output, *make_arguments(**sizes))
        assert results["out"].numel() == 0
        for name in ALL:
            assert not results[f"d_{name}"].any() and results[f"d_{name}"].numel() == 48

    def test_autocast_changes_nothing(self, device):
        x, _ = make_arguments(dtype=torch.bfloat16, parameters=torch.float32)
        expected = head_output(**x)
        with torch.autocast(device, dtype=torch.float16):
            assert torch.equal(head_output(**x), expected)

    @pytest.mark.parametrize("sizes", [{}, {"s": 3000, "h": 5, "d": 128}], ids=str)
    def test_repeats_bitwise(self, sizes):
        x, d_out = make_arguments(dtype=torch.bfloat16, **sizes)
        first = run(head_output, x, d_out)
        for _ in range(4):
            self.assert_same(run(head_output, x, d_out), first)


@on_devices
class TestTorch:
    """opcheck, torch.compile, meta tensors and second derivatives."""

    @parameter_sets
    def test_opcheck(self, given):
        x, d_out = make_arguments(given, dtype=torch.bfloat16, parameters=torch.float32)
        arguments = [x.get(name) for name in NAMES]
        torch.library.opcheck(ops.head_output_forward.default, (*arguments, EPS))
        torch.library.opcheck(ops.head_output_backward.default, (d_out, *arguments, EPS))
        leaves = [value if value is None else value.requires_grad_() for value in arguments]
        torch.library.opcheck(ops.head_output.default, leaves, {"eps": EPS})

    @pytest.mark.usefixtures("no_precompiled_headers")
    def test_compile(self):
        """A model with attention, head_output and pointwise operations gives the eager results, with generated code."""

        def model(q, k, v, **parameters):
            o, mass = stickbreaking_attention(q * 2, k, v, return_mass=True)
            return head_output(o, mass, **parameters).sin()

        inputs = [torch.randn(2, 40, 4, 16), torch.randn(2, 40, 2, 16), torch.randn(2, 40, 2, 16)]
        parameters = {name: torch.randn(64) for name in ALL}
        results = []
        for function in (model, torch.compile(model, fullgraph=True)):
            leaves = [t.clone().requires_grad_() for t in (*inputs, *parameters.values())]
            out = function(*leaves[:3], **dict(zip(ALL, leaves[3:], strict=True)))
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)

    def test_one_graph_for_every_length(self):
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(head_output, fullgraph=True, dynamic=True, backend=counter)
        for s in (40, 33, 65):
            x, d_out = make_arguments(s=s)
            TestForms.assert_same(run(compiled, x, d_out), run(head_output, x, d_out))
            if s == 40:
                compilations = counter.frame_count
        assert counter.frame_count == compilations

    def test_meta_tensors(self):
        o, mass = torch.empty(2, 5, 3, 8, device="meta", dtype=torch.bfloat16), torch.empty(2, 3, 5, device="meta")
        out = head_output(o, mass, torch.empty(24, device="meta"))
        assert (out.shape, out.dtype, out.device.type) == (o.shape, o.dtype, "meta")

    @pytest.mark.parametrize("which", NAMES)
    def test_a_second_derivative_raises_an_error(self, which):
        x, _ = make_arguments()
        leaves = {name: value.requires_grad_() for name, value in x.items()}
        loss = head_output(**leaves).square().sum()
        (gradient,) = torch.autograd.grad(loss, leaves[which], create_graph=True)
        with pytest.raises(NotImplementedError, match=r"no second derivative.*double backward"):
            torch.autograd.grad(gradient.sum(), list(leaves.values()))


NO_PARAMETERS = {"remainder_bias": None, "norm_weight": None, "norm_bias": None}
INVALID = {
    "o is a float": ({"o": 1.0}, TypeError, "o float"),
    "o of 2 dimensions": ({"o": zeros(6, 16)}, ValueError, "o 2"),
    "integer o": ({"o": zeros(2, 6, 4, 16).int()}, TypeError, "o Int"),
    "head_dim is no multiple of 8": ({"o": zeros(2, 6, 4, 12)}, ValueError, "o head_dim 12"),
    "head_dim above 256": ({"o": zeros(2, 6, 4, 264)}, ValueError, "o head_dim 264"),
    "2^31 rows": ({"o": zeros(1, 1, 4, 16).expand(2, 2**31, 4, 16)}, ValueError, "o 2147483648"),
    "mass of 2 dimensions": ({"mass": zeros(4, 6)}, ValueError, "mass 2 4"),
    "dtype of mass": ({"mass": zeros(2, 4, 6).double()}, TypeError, "mass Double"),
    "shape of mass": ({"mass": zeros(2, 6, 4)}, ValueError, "mass [2, 6, 4]"),
    "shape of packed mass": ({"o": zeros(6, 4, 16), "mass": zeros(6, 4)}, ValueError, "mass (4, 6) [6, 4]"),
    "device of mass": ({"mass": zeros(2, 4, 6, device="meta")}, ValueError, "mass meta cpu"),
    "remainder_bias without mass": ({"mass": None}, ValueError, "remainder_bias mass"),
    "shape of remainder_bias": ({"remainder_bias": zeros(4, 16)}, ValueError, "remainder_bias [4, 16]"),
    "norm_weight is a bool": ({"norm_weight": True}, TypeError, "norm_weight bool"),
    "norm_weight of one head": ({"norm_weight": zeros(16)}, ValueError, "norm_weight [16]"),
    "integer norm_weight": ({"norm_weight": zeros(64).int()}, TypeError, "norm_weight Int"),
    "device of norm_bias": ({"norm_bias": zeros(64, device="meta")}, ValueError, "norm_bias meta cpu"),
    "norm_bias without norm_weight": ({"norm_weight": None}, ValueError, "norm_bias norm_weight"),
    "no parameters": (NO_PARAMETERS, ValueError, "remainder_bias norm_weight"),
    "eps of 0": ({"eps": 0.0}, ValueError, "eps 0"),
    "negative eps": ({"eps": -1e-5}, ValueError, "eps -1e-05"),
    "eps is NaN": ({"eps": float("nan")}, ValueError, "eps nan"),
    "eps is infinite": ({"eps": float("inf")}, ValueError, "eps inf"),
    "eps is a string": ({"eps": "x"}, TypeError, "eps str"),
}


@pytest.mark.parametrize(("changes", "error", "words"), INVALID.values(), ids=INVALID)
def test_an_invalid_argument_raises_an_error(changes, error, words):
    valid = {"o": zeros(2, 6, 4, 16), "mass": zeros(2, 4, 6), **{name: zeros(64) for name in ALL}}
    with pytest.raises(error, match=mentions(words)):
        head_output(**{**valid, **changes})


def test_an_invalid_output_gradient_raises_an_error():
    """C++ users may call the operator of the backward directly."""
    x, d_out = make_arguments()
    arguments = [*(x[name] for name in NAMES), EPS]
    with pytest.raises(TypeError, match=mentions("d_out BFloat16 Float")):
        ops.head_output_backward(d_out.bfloat16(), *arguments)
    with pytest.raises(ValueError, match=mentions("d_out [1, 37, 3, 16] [2, 37, 3, 16]")):
        ops.head_output_backward(d_out[:1], *arguments)


@pytest.mark.gpu
def test_float64_on_a_gpu_raises_an_error():
    o = zeros(2, 6, 4, 16, dtype=torch.float64, device="cuda")
    with pytest.raises(TypeError, match=mentions("o Double GPU")):
        head_output(o, None, norm_weight=torch.ones(64, device="cuda"))


@pytest.mark.gpu
def test_many_rows_on_a_gpu():
    """Results are accurate and bitwise repeatable with several waves of thread blocks, which have many rows each."""
    with torch.device("cuda"):
        x, d_out = make_arguments(b=2, s=8192, h=12, d=128, dtype=torch.bfloat16)
        first = run(head_output, x, d_out)
        assert_accurate(x, d_out)
        for _ in range(50):
            TestForms.assert_same(run(head_output, x, d_out), first)


@pytest.mark.gpu
def test_a_call_can_be_captured_in_a_cuda_graph():
    """The call runs on the current stream and does not synchronise with the host."""
    with torch.device("cuda"):
        x, d_out = make_arguments(d=64, dtype=torch.bfloat16)
        expected = run(head_output, x, d_out)
        with no_synchronisation():
            run(head_output, x, d_out)
        static = zeros_like(x["o"])
        graph, results = captured(lambda: run(head_output, {**x, "o": static}, d_out))
        static.copy_(x["o"])
        graph.replay()
        TestForms.assert_same(results, expected)
