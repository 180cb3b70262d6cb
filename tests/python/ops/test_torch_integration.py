"""The operators in torch: opcheck, torch.compile, autocast, strides, determinism, autograd, meta and fake tensors."""

import pytest
import torch
from support.accuracy import run
from support.inputs import STRIDES, make_inputs, strided
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_sb import (
    stickbreaking_attention,
    stickbreaking_attention_varlen,
    stickbreaking_attention_with_kvcache,
)
from megatron_sb.compat import sb_attn_varlen

pytestmark = pytest.mark.usefixtures("device")
ops = torch.ops.megatron_sb
SAME = ("o", "mass", "dq", "dk", "dv")


def cu(*values):
    return torch.tensor(values, dtype=torch.int32)


def block_arguments():
    """Return arguments of block_backward, from a call of block_forward."""
    x = make_inputs(s=70, h=4, h_kv=2, d=8)
    segments = torch.tensor([[0, 40, 0, 40, 0]], dtype=torch.int32)
    _, mass, edge, restart = ops.block_forward(x.q, x.k, x.v, segments, scale=0.3)
    return x.do, x.q, x.k, x.v, segments, edge, restart, torch.rand_like(mass), torch.rand_like(mass)


class TestOpcheck:
    """torch.library.opcheck accepts the schemas, the fake kernels and the autograd registration."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_attention(self, dtype):
        x = make_inputs(b=2, s=5, s_k=7, h=4, h_kv=2, d=16, d_v=8, dtype=dtype)
        arguments = [t.requires_grad_() for t in (x.q, x.k, x.v)]
        torch.library.opcheck(ops.attention.default, arguments, {"scale": 0.5, "attend_current": True})

    def test_attention_varlen(self):
        x = make_inputs(s=9, h=4, h_kv=2, d=16).packed()
        arguments = [t.requires_grad_() for t in (x.q, x.k, x.v)]
        torch.library.opcheck(ops.attention_varlen.default, [*arguments, cu(0, 4, 9)])

    def test_segments(self):
        torch.library.opcheck(ops.segments.default, (cu(0, 3, 10), cu(0, 5, 14), 12, 14))

    @pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
    def test_block_forward(self, out_dtype):
        x = make_inputs(s=5, s_k=7, h=4, h_kv=2, d=16, d_v=8, dtype=torch.bfloat16)
        carry = torch.rand(1, 4, 5)
        torch.library.opcheck(
            ops.block_forward.default, (x.q, x.k, x.v, None, carry), {"scale": 1.0, "out_dtype": out_dtype}
        )

    def test_block_backward(self):
        torch.library.opcheck(ops.block_backward.default, block_arguments(), {"scale": 0.3})


class TestCompile:
    """Models compiled with fullgraph=True give the results and gradients of eager ones.

    These tests do not generate code. TestTorch.test_compile in test_head_output.py does, for both operators.
    """

    @staticmethod
    def assert_same(compiled, eager, x, *args):
        expected = run(eager, x, *args)
        actual = run(compiled, x, *args)
        for name in SAME:
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-6, atol=1e-6)

    def test_dense(self):
        """The model is compiled once for all lengths."""

        def model(q, k, v):
            o, mass = stickbreaking_attention(q * 2, k, v, return_mass=True)
            return o + v.repeat_interleave(2, dim=2), mass.square()

        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
        self.assert_same(compiled, model, make_inputs("mean -3.2", b=2, s=70, h=4, h_kv=2, d=16))
        compilations = counter.frame_count
        for length in (33, 129):
            self.assert_same(compiled, model, make_inputs("mean -3.2", b=2, s=length, h=4, h_kv=2, d=16))
        assert counter.frame_count == compilations

    def test_packed(self):
        def model(q, k, v, cu_seqlens):
            o, mass = stickbreaking_attention_varlen(q, k, v, cu_seqlens, 50, return_mass=True)
            return o.sin(), mass

        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        self.assert_same(compiled, model, make_inputs(s=90, h=2, d=16).packed(), cu(0, 30, 30, 80))

    def test_options_are_arguments(self):
        """The checks of options do not break the graph when torch.compile passes symbolic values."""

        def model(q, k, v, cu_seqlens, max_seqlen, scale):
            options = {"scale": scale, "mass_threshold": scale / 2**24, "return_mass": True}
            return stickbreaking_attention_varlen(q, k, v, cu_seqlens, max_seqlen, **options)

        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
        for max_seqlen, scale in ((50, 0.3), (60, 0.4)):
            x = make_inputs(s=90, h=2, d=16).packed()
            self.assert_same(compiled, model, x, cu(0, 30, 30, 80), max_seqlen, scale)


@pytest.mark.usefixtures("no_precompiled_headers")
def test_ahead_of_time_compilation(device, tmp_path):
    """A package of AOTInductor gives the results of the eager operator in each dtype, for other lengths too."""
    if device != "cpu":
        pytest.skip("AOTInductor passes the same arguments to the operators on every device")
    dtypes = (torch.bfloat16, torch.float16, torch.float32)

    class Model(torch.nn.Module):
        def forward(self, calls):  # One package for all dtypes: g++ needs as long for it as for one of them.
            return [stickbreaking_attention(*call) * 2 for call in calls]

    def arguments(length):
        inputs = [make_inputs(s=length, h=4, h_kv=2, d=16, dtype=dtype) for dtype in dtypes]
        return ([(x.q, x.k, x.v) for x in inputs],)

    rows = {1: torch.export.Dim("rows", min=2, max=1024)}
    program = torch.export.export(Model(), arguments(20), dynamic_shapes=([(rows, rows, rows)] * len(dtypes),))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    compiled = torch._inductor.aoti_load_package(path)
    for length in (20, 33):
        expected, actual = Model()(*arguments(length)), compiled(*arguments(length))
        assert [o.dtype for o in actual] == [*dtypes]
        for o, eager in zip(actual, expected, strict=True):
            torch.testing.assert_close(o, eager)


class TestDecomposedProgram:
    """A program of torch.export calls the operators without autograd itself, once it is decomposed."""

    @staticmethod
    def decomposed(model, *arguments):
        with torch.no_grad():
            return torch.export.export(model, arguments).run_decompositions().module()

    def test_tensors_that_require_gradients(self, device):
        """Its results are those of the model, also while gradients are recorded."""

        class Model(torch.nn.Module):
            def forward(self, x, gates, bias):
                options = {"forget_gate": gates, "key_bias": bias, "logits": "euclidean", "mass_threshold": 0.0}
                return stickbreaking_attention(x, x, x, **options)

        arguments = torch.randn(1, 9, 2, 16), torch.rand(1, 9, 2), torch.randn(1, 9, 2)
        program = self.decomposed(Model(), *arguments)
        recorded = program(*(x.clone().requires_grad_() for x in arguments))
        assert torch.equal(recorded.detach(), Model()(*arguments))

    def test_caches_stay_without_gradients(self, device):
        """Appended keys that require gradients leave no graph in a cache, which would grow with each step."""

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("cache", torch.zeros(1, 8, 2, 16))

            def forward(self, x, cache_seqlens):
                keys = {"cache_seqlens": cache_seqlens, "k": x, "v": x}
                return stickbreaking_attention_with_kvcache(x, self.cache, self.cache.clone(), **keys)

        x = torch.randn(1, 1, 2, 16)
        program = self.decomposed(Model(), x, cu(3))
        program(x.clone().requires_grad_(), cu(3))
        assert torch.equal(program.cache[0, 3], x[0, 0])
        assert not program.cache.requires_grad


class TestAutocast:
    """q, k and v are cast to autocast's dtype, as torch's own attention casts them."""

    def test_dense(self, device):
        x = make_inputs(b=2, s=70, h=4, h_kv=2, d=16)
        expected = stickbreaking_attention(x.q.bfloat16(), x.k.bfloat16(), x.v.bfloat16(), return_mass=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            o, mass = stickbreaking_attention(x.q, x.k, x.v, return_mass=True)
            mixed = stickbreaking_attention(x.q.bfloat16(), x.k, x.v)
        assert (o.dtype, mass.dtype) == (torch.bfloat16, torch.float32)
        for actual in (o, mixed):
            assert torch.equal(actual, expected[0])
        assert torch.equal(mass, expected[1])

    def test_packed(self, device):
        x = make_inputs(s=70, h=2, d=16).packed()
        expected = stickbreaking_attention_varlen(x.q.bfloat16(), x.k.bfloat16(), x.v.bfloat16(), cu(0, 30, 70))
        with torch.autocast(device, dtype=torch.bfloat16):
            assert torch.equal(stickbreaking_attention_varlen(x.q, x.k, x.v, cu(0, 30, 70)), expected)

    def test_gradients_come_back_in_the_inputs_dtype(self, device):
        x = make_inputs(s=70, h=2, d=16)

        def attention(q, k, v):
            with torch.autocast(device, dtype=torch.bfloat16):
                return stickbreaking_attention(q, k, v, return_mass=True)

        results = run(attention, x)
        expected = run(stickbreaking_attention, make_inputs(s=70, h=2, d=16, dtype=torch.bfloat16), return_mass=True)
        for name in ("dq", "dk", "dv"):
            assert results[name].dtype == torch.float32
            assert torch.equal(results[name], expected[name].float())


@pytest.mark.parametrize("kind", STRIDES)
def test_strides(kind):
    """Other strides give bitwise the results and gradients of contiguous inputs."""
    x = make_inputs("mean -3.2", b=2, s=70, h=4, h_kv=2, d=16)
    views = strided(kind, x)
    assert not all(view.is_contiguous() for view in views) or kind == "misaligned"
    leaves = [view.detach().requires_grad_() for view in views]
    o, mass = stickbreaking_attention(*leaves, return_mass=True)
    gradients = torch.autograd.grad((o, mass), leaves, (x.do, x.dmass))
    expected = run(stickbreaking_attention, x, return_mass=True)
    for name, actual in zip(SAME, (o, mass, *gradients), strict=True):
        assert torch.equal(actual, expected[name]), name


@pytest.mark.parametrize("kind", STRIDES)
def test_gradients_are_contiguous(kind):
    """Gradients are contiguous for all strides of the inputs, as the fake kernel promises to compiled programs."""
    x = make_inputs(b=2, s=70, h=4, h_kv=2, d=64, dtype=torch.bfloat16)
    leaves = [view.detach().requires_grad_() for view in strided(kind, x)]
    gradients = torch.autograd.grad(stickbreaking_attention(*leaves), leaves, x.do)
    assert all(gradient.is_contiguous() for gradient in gradients)


def test_strided_and_expanded_output_gradients():
    """The gradient of the output may be transposed, or expanded from one number as in the backward of sum()."""
    x = make_inputs(s=70, h=2, d=16)
    expected = run(stickbreaking_attention, x, return_mass=True)
    x.do = x.do.transpose(1, 3).contiguous().transpose(1, 3)
    x.dmass = x.dmass.transpose(1, 2).contiguous().transpose(1, 2)
    transposed = run(stickbreaking_attention, x, return_mass=True)
    for name in SAME:
        assert torch.equal(transposed[name], expected[name])
    x.do, x.dmass = torch.ones(()).expand(x.do.shape), torch.ones(()).expand(x.dmass.shape)
    expanded = run(stickbreaking_attention, x, return_mass=True)
    x.do, x.dmass = x.do.contiguous(), x.dmass.contiguous()
    dense = run(stickbreaking_attention, x, return_mass=True)
    for name in SAME:
        assert torch.equal(expanded[name], dense[name])


@pytest.mark.parametrize("sizes", [{"h": 1}, {"h": 8, "h_kv": 2}, {"b": 3, "h": 2}], ids=str)
def test_bitwise_deterministic(sizes):
    """All runs give the same bits, although threads share the work differently."""
    x = make_inputs("mean -3.2", **{"s": 600, "d": 16, **sizes})
    first = run(stickbreaking_attention, x, return_mass=True)
    for _ in range(4):
        again = run(stickbreaking_attention, x, return_mass=True)
        for name in SAME:
            assert torch.equal(again[name], first[name]), name


@pytest.mark.parametrize("packed", [False, True])
def test_saved_tensors_can_be_offloaded(packed):
    """All tensors for the backward pass through saved-tensor hooks, which may move them to another device and back."""
    x = make_inputs("mean -3.2", s=150, h=4, h_kv=2, d=16)
    x = x.packed() if packed else x
    offloaded = []

    def attention(q, k, v):
        if packed:
            return stickbreaking_attention_varlen(q, k, v, cu(0, 70, 150), return_mass=True)
        return stickbreaking_attention(q, k, v, return_mass=True)

    def offload(tensor):
        offloaded.append(tensor.shape)
        return tensor.device, tensor.to("cpu", copy=True)

    expected = run(attention, x)
    with torch.autograd.graph.saved_tensors_hooks(offload, lambda saved: saved[1].to(saved[0])):
        actual = run(attention, x)
    assert len(offloaded) >= 6  # q, k, v, the mass, and edge and mass of the restart records
    for name in SAME:
        assert torch.equal(actual[name], expected[name]), name


def test_one_thread_gives_the_results_of_several(device):
    """dk and dv agree up to rounding, because several threads may share a sum over queries."""
    if device == "cuda":
        pytest.skip("tests the threads of the CPU kernels")
    x = make_inputs("mean -3.2", s=600, h=1, d=16)
    threads = torch.get_num_threads()
    several = run(stickbreaking_attention, x, return_mass=True)
    try:
        torch.set_num_threads(1)
        one = run(stickbreaking_attention, x, return_mass=True)
    finally:
        torch.set_num_threads(threads)
    for name in ("o", "mass", "dq"):
        assert torch.equal(several[name], one[name]), name
    for name in ("dk", "dv"):
        torch.testing.assert_close(several[name], one[name], rtol=1e-5, atol=1e-5)


class TestSecondDerivative:
    """A second derivative raises an error. create_graph=True alone does not."""

    LOSSES = pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["output", "mass", "both"])

    def first_derivative(self, used, create_graph=True):
        x = make_inputs(s=5, h=1, d=8)
        leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
        results = stickbreaking_attention(*leaves, return_mass=True)
        loss = sum(results[i].square().sum() for i in used)
        return leaves, torch.autograd.grad(loss, leaves, create_graph=create_graph)

    @LOSSES
    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_raises_an_error(self, which, used):
        leaves, gradients = self.first_derivative(used)
        with pytest.raises(NotImplementedError, match=r"no second derivative.*double backward"):
            torch.autograd.grad(gradients[which].sum(), leaves, allow_unused=True)

    @LOSSES
    def test_create_graph_changes_no_gradient(self, used):
        _, with_graph = self.first_derivative(used)
        _, without = self.first_derivative(used, create_graph=False)
        for a, b in zip(with_graph, without, strict=True):
            assert torch.equal(a, b)

    def test_a_gradient_can_be_changed_in_place(self):
        _, gradients = self.first_derivative([0])
        before = [gradient.detach().clone() for gradient in gradients]
        for gradient, value in zip(gradients, before, strict=True):
            assert torch.equal(gradient.mul_(2), 2 * value)


class TestAutograd:
    """Gradients of some inputs, no gradients, in-place changes, and one tensor as several inputs."""

    @pytest.mark.parametrize("wanted", ["q", "k", "v"])
    def test_gradient_of_one_input(self, wanted):
        x = make_inputs(s=70, h=2, d=16)
        expected = run(stickbreaking_attention, x, mass_in_loss=False, return_mass=True)
        leaf = getattr(x, wanted).requires_grad_()
        (gradient,) = torch.autograd.grad(stickbreaking_attention(x.q, x.k, x.v), leaf, x.do)
        assert torch.equal(gradient, expected[f"d{wanted}"])

    def test_no_gradient(self):
        x = make_inputs(s=5, h=1, d=8)
        assert not stickbreaking_attention(x.q, x.k, x.v).requires_grad
        x.q.requires_grad_()
        with torch.no_grad():
            assert not stickbreaking_attention(x.q, x.k, x.v).requires_grad

    def test_an_input_changed_in_place_raises_an_error(self):
        x = make_inputs(s=5, h=1, d=8)
        q = x.q.requires_grad_()
        k = x.k.clone()
        o = stickbreaking_attention(q, k, x.v)
        k.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()

    def test_one_tensor_as_q_k_and_v(self):
        x = make_inputs(s=70, h=2, d=16)
        y = x.q.clone().requires_grad_()
        separate = run(stickbreaking_attention, type(x)(y, y, y, x.do, x.dmass), return_mass=True)
        o, mass = stickbreaking_attention(y, y, y, return_mass=True)
        (gradient,) = torch.autograd.grad((o, mass), y, (x.do, x.dmass))
        torch.testing.assert_close(gradient, separate["dq"] + separate["dk"] + separate["dv"], rtol=1e-5, atol=1e-5)


def test_meta_tensors():
    """Meta tensors give the shapes and dtypes of the results."""
    q, k, v = (
        torch.empty(shape, device="meta", dtype=torch.bfloat16)
        for shape in ((2, 6, 4, 16), (2, 8, 2, 16), (2, 8, 2, 24))
    )
    o, mass = stickbreaking_attention(q, k, v, return_mass=True)
    assert (o.shape, o.dtype, o.device.type) == ((2, 6, 4, 24), torch.bfloat16, "meta")
    assert (mass.shape, mass.dtype) == ((2, 4, 6), torch.float32)


def test_fake_tensors():
    """Fake tensors give the shapes and dtypes of packed calls. max_seqlen cannot be checked without values."""
    with FakeTensorMode():
        q, v = torch.empty(8, 4, 16, dtype=torch.bfloat16), torch.empty(8, 4, 24, dtype=torch.bfloat16)
        offsets = torch.empty(3, dtype=torch.int32)
        o, mass = stickbreaking_attention_varlen(
            q, q, v, offsets, 5, cu_seqlens_k=offsets, max_seqlen_k=5, return_mass=True
        )
        out, rem = sb_attn_varlen(*(x.transpose(0, 1) for x in (q, q, v)), offsets, 5)
    assert (o.shape, o.dtype, mass.shape, mass.dtype) == ((8, 4, 24), torch.bfloat16, (4, 8), torch.float32)
    assert (out.shape, out.dtype, rem.shape, rem.dtype) == ((4, 8, 24), torch.bfloat16, (4, 8), torch.bfloat16)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap():
    """torch.vmap maps dense and packed calls. It hides the values of offsets, so max_seqlen is not checked."""
    x = make_inputs(s=9, h=2, d=8, b=3)
    inputs = (x.q, x.k, x.v)
    assert torch.equal(
        torch.vmap(stickbreaking_attention)(*(t[:, None] for t in inputs))[:, 0], stickbreaking_attention(*inputs)
    )
    offsets = torch.tensor([[0, 3, 9], [0, 0, 9], [0, 9, 9]], dtype=torch.int32)
    mapped = torch.vmap(lambda q, k, v, cu_seqlens: stickbreaking_attention_varlen(q, k, v, cu_seqlens, 9))
    each = [stickbreaking_attention_varlen(*(t[i] for t in inputs), offsets[i], 9) for i in range(3)]
    assert torch.equal(mapped(*inputs, offsets), torch.stack(each))
