"""head_output, the remainder bias and the norm of each head: against the formula in float64, and as torch demands."""

import pytest
import torch
from support.accuracy import accumulation_type, assert_errors
from support.messages import mentions
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_sb import head_output, stickbreaking_attention

ops = torch.ops.megatron_sb
on_devices = pytest.mark.usefixtures("device")
NAMES = ("o", "mass", "remainder_bias", "norm_weight", "norm_bias")
RESULTS = ("out", *(f"d_{name}" for name in NAMES))
# Which of the arguments behind the mass are given.
PARTS = {
    "bias": ("remainder_bias",),
    "norm": ("norm_weight", "norm_bias"),
    "norm without its bias": ("norm_weight",),
    "bias and norm": ("remainder_bias", "norm_weight", "norm_bias"),
    "bias and norm without its bias": ("remainder_bias", "norm_weight"),
}
parts = pytest.mark.parametrize("given", PARTS.values(), ids=PARTS)
BOTH = PARTS["bias and norm"]
EPS = 3e-4


def make_arguments(given=BOTH, *, b=2, s=37, h=3, d=16, dtype=torch.float32, parameters=None, seed=0):
    """The arguments by name, and d_out; parameters in a dtype of their own. o has a mean, and rows of zeros."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    o = randn(b, s, h, d) + 0.5 * randn(b, s, h, 1)
    o[:, :1] = 0  # as the first query of a document has it
    x = {"o": o.to(dtype), "mass": torch.rand(b, h, s, generator=generator).to(accumulation_type(dtype))}
    x |= {name: (randn(h * d) + (name == "norm_weight")).to(parameters or dtype) for name in given}
    return x, randn(b, s, h, d).to(dtype)


def naive(o, mass, remainder_bias=None, norm_weight=None, norm_bias=None, *, eps=1e-5):
    """The formula, in whatever type the arguments have."""
    heads = o.shape[-2:]
    x = o
    if remainder_bias is not None:
        x = x + mass.transpose(-1, -2)[..., None] * remainder_bias.view(heads)
    if norm_weight is not None:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm_weight.view(heads)
    return x if norm_bias is None else x + norm_bias.view(heads)


def run(function, x, d_out, **options):
    """out and the gradients of all arguments; a mass that is not read has none."""
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
    out = function(**leaves, eps=EPS, **options)
    gradients = torch.autograd.grad(out, leaves.values(), d_out.to(out.dtype), allow_unused=True)
    results = {"out": out.detach()} | {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {name: value for name, value in results.items() if value is not None}


def in_type(x, d_out, dtype):
    """The same values in another type."""
    return {name: value.to(dtype) for name, value in x.items()}, d_out.to(dtype)


def assert_accurate(x, d_out):
    """Each result as near to float64's as a computation in the accumulation type that is rounded once."""
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
    """Against float64."""

    @parts
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_every_combination(self, given, dtype):
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
        """Their gradients come in it."""
        assert_accurate(*make_arguments(dtype=torch.bfloat16, parameters=getattr(torch, parameters)))

    def test_a_large_mean_is_taken_off_first(self):
        """A variance made of sums of squares would be rounding alone."""
        x, d_out = make_arguments(("norm_weight",), d=64)
        x["o"] = x["o"] + 1000
        exact = naive(**in_type(x, d_out, torch.float64)[0], eps=EPS)
        torch.testing.assert_close(head_output(**x, eps=EPS).double()[:, 1:], exact[:, 1:], rtol=0, atol=2e-3)


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_once(dtype):
    """Half precision gives what fp32 gives for the same values, rounded at the end."""
    x, d_out = make_arguments(d=128, dtype=dtype)
    actual, wide = run(head_output, x, d_out), run(head_output, *in_type(x, d_out, torch.float32))
    for name, value in actual.items():
        assert torch.equal(value, wide[name].to(value.dtype)), name


@on_devices
def test_the_norm_is_group_norm():
    """One group per head, over a position's h * d channels."""
    x, _ = make_arguments(PARTS["norm"], h=4, d=24)
    rows = x["o"].reshape(-1, 4 * 24)
    expected = torch.nn.functional.group_norm(rows, 4, x["norm_weight"], x["norm_bias"], EPS).view_as(x["o"])
    torch.testing.assert_close(head_output(**x, eps=EPS), expected, rtol=1e-5, atol=1e-5)


@parts
def test_gradients(given):
    """Against finite differences."""
    x, _ = make_arguments(given, b=2, s=3, h=2, d=8, dtype=torch.float64)
    x["o"] = x["o"] + torch.linspace(-1, 1, 8, dtype=torch.float64)  # no row has a variance of 0
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
    """Strides, packed rows, no rows, other dtypes under autocast: bitwise what plain inputs give."""

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

    @parts
    def test_packed(self, given):
        x, d_out = make_arguments(given, b=1)
        expected = run(head_output, x, d_out)
        actual = run(head_output, {**x, "o": x["o"][0], "mass": x["mass"][0]}, d_out[0])
        for name in ("out", "d_o", *(["d_mass"] if "remainder_bias" in given else [])):
            expected[name] = expected[name][0]
        self.assert_same(actual, expected)

    def test_the_mass_may_be_absent_without_a_bias(self):
        x, _ = make_arguments(PARTS["norm"])
        assert torch.equal(head_output(**{**x, "mass": None}, eps=EPS), head_output(**x, eps=EPS))

    @pytest.mark.parametrize("sizes", [{"b": 0}, {"s": 0}], ids=str)
    def test_no_rows(self, sizes):
        results = run(head_output, *make_arguments(**sizes))
        assert results["out"].numel() == 0
        for name in BOTH:
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
    """Schemas, fake kernels, compiled programs, one derivative only."""

    @parts
    def test_opcheck(self, given):
        x, d_out = make_arguments(given, dtype=torch.bfloat16, parameters=torch.float32)
        arguments = [x.get(name) for name in NAMES]
        torch.library.opcheck(ops.head_output_forward.default, (*arguments, EPS))
        torch.library.opcheck(ops.head_output_backward.default, (d_out, *arguments, EPS))
        leaves = [value if value is None else value.requires_grad_() for value in arguments]
        torch.library.opcheck(ops.head_output.default, leaves, {"eps": EPS})

    def test_compile(self):
        """Behind an attention, with work for the code generator after it."""

        def model(q, k, v, **parameters):
            o, mass = stickbreaking_attention(q, k, v, return_mass=True)
            return head_output(o, mass, **parameters).sin()

        shapes = [torch.randn(2, 40, 4, 16), torch.randn(2, 40, 2, 16), torch.randn(2, 40, 2, 16)]
        parameters = {name: torch.randn(64) for name in BOTH}
        results = []
        for function in (model, torch.compile(model, fullgraph=True)):
            leaves = [t.clone().requires_grad_() for t in (*shapes, *parameters.values())]
            out = function(*leaves[:3], **dict(zip(BOTH, leaves[3:], strict=True)))
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
    def test_second_derivative_is_refused(self, which):
        x, _ = make_arguments()
        leaves = {name: value.requires_grad_() for name, value in x.items()}
        loss = head_output(**leaves).square().sum()
        (gradient,) = torch.autograd.grad(loss, leaves[which], create_graph=True)
        with pytest.raises(NotImplementedError, match=r"no second derivative.*double backward"):
            torch.autograd.grad(gradient.sum(), list(leaves.values()))


def o(*shape, **options):
    return torch.zeros(*(shape or (2, 6, 4, 16)), **options)


BAD = {
    "o no tensor": ({"o": 1.0}, TypeError, "o float"),
    "weight no tensor": ({"norm_weight": True}, TypeError, "norm_weight bool"),
    "rank of o": ({"o": o(6, 16)}, ValueError, "o 2"),
    "rank of mass": (
        {"mass": torch.zeros(4, 6)},
        ValueError,
        "mass 2 4",
    ),
    "integers": ({"o": o(dtype=torch.int32)}, TypeError, "o Int"),
    "odd head_dim": ({"o": o(2, 6, 4, 12)}, ValueError, "o head_dim 12"),
    "large head_dim": ({"o": o(2, 6, 4, 264)}, ValueError, "o head_dim 264"),
    "many rows": (
        {"o": torch.zeros(1, 1, 4, 16).expand(2, 2**31, 4, 16)},
        ValueError,
        "o 2147483648",
    ),
    "dtype of mass": ({"mass": torch.zeros(2, 4, 6).double()}, TypeError, "mass Double"),
    "shape of mass": (
        {"mass": torch.zeros(2, 6, 4)},
        ValueError,
        "mass [2, 6, 4]",
    ),
    "device of mass": (
        {"mass": torch.zeros(2, 4, 6, device="meta")},
        ValueError,
        "mass meta cpu",
    ),
    "no mass": ({"mass": None}, ValueError, "remainder_bias mass"),
    "shape of bias": (
        {"remainder_bias": torch.zeros(4, 16)},
        ValueError,
        "remainder_bias [4, 16]",
    ),
    "one head's weight": ({"norm_weight": torch.zeros(16)}, ValueError, "norm_weight [16]"),
    "integer weight": (
        {"norm_weight": torch.zeros(64).int()},
        TypeError,
        "norm_weight Int",
    ),
    "device of bias": (
        {"norm_bias": torch.zeros(64, device="meta")},
        ValueError,
        "norm_bias meta cpu",
    ),
    "nothing to do": (
        {"remainder_bias": None, "norm_weight": None, "norm_bias": None},
        ValueError,
        "remainder_bias norm_weight missing",
    ),
    "bias of no norm": ({"norm_weight": None}, ValueError, "norm_bias norm_weight"),
    "eps of 0": ({"eps": 0.0}, ValueError, "eps 0"),
    "negative eps": ({"eps": -1e-5}, ValueError, "eps -1e-05"),
    "eps nan": ({"eps": float("nan")}, ValueError, "eps nan"),
    "eps as text": ({"eps": "x"}, TypeError, "eps str"),
    "eps inf": ({"eps": float("inf")}, ValueError, "eps inf"),
}


@pytest.mark.parametrize(("changes", "kind", "sentence"), BAD.values(), ids=BAD)
def test_refused(changes, kind, sentence):
    good = {"o": o(), "mass": torch.zeros(2, 4, 6), **{name: torch.zeros(64) for name in BOTH}}
    with pytest.raises(kind, match=mentions(sentence)):
        head_output(**{**good, **changes})


def test_refused_output_gradients():
    """Of the operator beneath, which C++ users may call."""
    x, d_out = make_arguments()
    arguments = [*(x[name] for name in NAMES), EPS]
    with pytest.raises(TypeError, match=mentions("d_out BFloat16 Float")):
        ops.head_output_backward(d_out.bfloat16(), *arguments)
    with pytest.raises(ValueError, match=mentions("d_out [1, 37, 3, 16] [2, 37, 3, 16]")):
        ops.head_output_backward(d_out[:1], *arguments)


@pytest.mark.gpu
def test_refused_float64_on_a_gpu():
    with pytest.raises(TypeError, match=mentions("o Double GPU")):
        head_output(o(dtype=torch.float64, device="cuda"), None, norm_weight=torch.ones(64, device="cuda"))


@pytest.mark.gpu
def test_gpu_rows_and_heads_that_fill_the_chip():
    """Accuracy where a thread block has many rows and every GPU several waves of them; the same bits each time."""
    with torch.device("cuda"):
        x, d_out = make_arguments(b=2, s=8192, h=12, d=128, dtype=torch.bfloat16)
        first = run(head_output, x, d_out)
        assert_accurate(x, d_out)
        for _ in range(50):
            TestForms.assert_same(run(head_output, x, d_out), first)


@pytest.mark.gpu
def test_gpu_graph_stream_and_synchronisation():
    """A call is captured, runs on the current stream and never waits for the host."""
    with torch.device("cuda"):
        x, d_out = make_arguments(d=64, dtype=torch.bfloat16)
        expected = run(head_output, x, d_out)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(head_output, x, d_out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        static = torch.zeros_like(x["o"])
        with torch.cuda.graph(graph):
            captured = run(head_output, {**x, "o": static}, d_out)
        static.copy_(x["o"])
        graph.replay()
        TestForms.assert_same(captured, expected)
