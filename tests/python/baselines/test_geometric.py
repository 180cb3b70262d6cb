"""Geometric attention: outputs and gradients against the formula, order of keys, padding, memory, errors."""

import math

import pytest
import torch
from support.messages import mentions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_sb import reference
from megatron_sb.baselines import geometric
from megatron_sb.baselines.geometric import GeometricAttention, geometric_attention

NAMES = ("q", "k", "v", "left", "right")


def make_inputs(b=2, s=9, h=2, d=3, d_v=None, *, dtype=torch.float64, gain=1.5, **options):
    """Draw q, k, v, left and right that require gradients."""
    shapes = [(b, s, h, d), (b, s, h, d), (b, s, h, d_v or d), (b, s, h), (b, s, h)]
    return [(gain * torch.randn(shape, dtype=dtype, **options)).requires_grad_() for shape in shapes]


def nearer(i, j, s):
    """Return S_ij of the paper: the positions nearer to i than j. At the same distance, the right one is nearer."""
    if i < j:
        return [n for n in range(s) if n not in (i, j) and abs(i - n) < abs(i - j)]
    return [n for n in range(s) if n not in (i, j) and abs(i - n) <= abs(i - j)]


def written_out(q, k, v, left, right, *, key_padding_mask=None, scale=None, nearer=nearer):
    """Compute the formula in float64, weight by weight, with autograd."""
    q, k, v, left, right = (x.double() for x in (q, k, v, left, right))
    b, s, h, d = q.shape
    scale = d**-0.5 if scale is None else scale
    padded = torch.zeros(b, s, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    zero = q.new_zeros(b, h)
    rows = []
    for i in range(s):
        z = [scale * (q[:, i] * k[:, j]).sum(-1) + (right if j > i else left)[:, i] for j in range(s)]
        taken = [zero.where(padded[:, j, None], torch.sigmoid(z[j])) for j in range(s)]
        passed = [(zero + 1).where(padded[:, j, None], torch.sigmoid(-z[j])) for j in range(s)]
        o = 0.0 * v[:, i]
        for j in range(s):
            if j != i:
                weight = taken[j]
                for n in nearer(i, j, s):
                    weight = weight * passed[n]
                o = o + weight[..., None] * v[:, j]
        rows.append(o.masked_fill(padded[:, i, None, None], 0.0))
    return torch.stack(rows, dim=1)


def assert_same(found, expected, inputs, tolerance=1e-12):
    """Compare outputs, and gradients of all inputs."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(expected)
    both = (torch.autograd.grad(o, inputs, grad, materialize_grads=True) for o in (found, expected))
    for name, a, b in zip(NAMES, *both, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def weights_of(left, right):
    """Return A (s, s) of one head with the logits left and right only. Each is (s,) or a number."""
    s = 9
    left, right = (torch.as_tensor(x, dtype=torch.float64).expand(s).view(1, s, 1) for x in (left, right))
    q = torch.zeros(1, s, 1, 1, dtype=torch.float64)
    return geometric_attention(q, q, torch.eye(s, dtype=torch.float64).view(1, s, 1, s), left, right)[0, :, 0]


def weights_for(logits):
    """Return A (s, s) of one head with the given logits (s, s)."""
    s = len(logits)
    q, eye = (x.double().view(1, s, 1, s) for x in (logits, torch.eye(s)))
    zero = torch.zeros(1, s, 1, dtype=torch.float64)
    return geometric_attention(q, eye, eye, zero, zero, scale=1.0)[0, :, 0]


class TestAgainstFormula:
    """Outputs and gradients equal those of the formula in float64."""

    @pytest.mark.parametrize("s", [1, 2, 3, 8, 9])
    def test_lengths(self, s):
        inputs = make_inputs(s=s, d_v=5)
        assert_same(geometric_attention(*inputs), written_out(*inputs), inputs)

    def test_scale(self):
        inputs = make_inputs()
        assert_same(geometric_attention(*inputs, scale=-0.7), written_out(*inputs, scale=-0.7), inputs)

    def test_strides(self):
        """Inputs may be views, and the gradient may be expanded."""
        whole = torch.randn(2, 7, 2, 11, dtype=torch.float64, requires_grad=True)
        q, k, v, sides = whole.split([3, 3, 3, 2], dim=-1)
        found, expected = (f(q, k, v, *sides.unbind(-1)) for f in (geometric_attention, written_out))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        a, b = (torch.autograd.grad(o.sum(), whole)[0] for o in (found, expected))
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    def test_gradcheck(self):
        mask = torch.tensor([[False, False, True, False, False]])
        inputs = make_inputs(b=1, s=5, h=1, d=2)
        assert torch.autograd.gradcheck(lambda *x: geometric_attention(*x, key_padding_mask=mask), inputs)

    def test_empty(self):
        for b, s in ((0, 4), (2, 0)):
            inputs = make_inputs(b=b, s=s)
            o = geometric_attention(*inputs)
            assert o.shape == (b, s, 2, 3)
            o.sum().backward()
            assert inputs[0].grad.shape == (b, s, 2, 3)

    @pytest.mark.parametrize("weights", [1, 100, 130])
    def test_chunks(self, monkeypatch, weights):
        """Chunks of one row, and chunks that do and do not divide the sequence."""
        inputs = make_inputs(s=11)
        mask = torch.zeros(2, 11, dtype=torch.bool)
        mask[1, 7:] = True
        whole = geometric_attention(*inputs, key_padding_mask=mask)
        monkeypatch.setattr(geometric, "_MAX_WEIGHTS_PER_CHUNK", weights)
        assert len(geometric._chunks(4, 11)) == {1: 11, 100: 6, 130: 6}[weights]
        chunked = geometric_attention(*inputs, key_padding_mask=mask)
        assert_same(chunked, written_out(*inputs, key_padding_mask=mask), inputs)
        torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-12)

    def test_differentiable_once(self):
        inputs = make_inputs()
        (grad,) = torch.autograd.grad(geometric_attention(*inputs).square().sum(), inputs[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


class TestNumbers:
    """Large and small logits, and half-precision dtypes."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_saturated(self, dtype):
        """Logits of +-80 next to others in one row."""
        inputs = make_inputs(dtype=dtype, gain=1.0)
        with torch.no_grad():
            for x in inputs[3:]:
                x.copy_(80.0 * x.sign() * (torch.rand_like(x) > 0.3))
        found = geometric_attention(*inputs)
        assert_same(found.double(), written_out(*inputs), inputs, 1e-5 if dtype == torch.float32 else 1e-12)

    def test_near_keys_next_to_far_keys_with_large_logits(self):
        """In float32, far keys do not cost digits of near keys with small logits."""
        q, k, v, left, right = make_inputs(b=1, s=600, h=1, d=4, dtype=torch.float32)
        with torch.no_grad():
            k[:, :300, :, 0], q[..., 0] = 160.0, 1.0
            left.fill_(-9.0)
            right.fill_(-9.0)
        inputs = [q, k, v, left, right]
        wide = [x.detach().double().requires_grad_() for x in inputs]
        found, exact = geometric_attention(*inputs), geometric_attention(*wide)
        torch.testing.assert_close(found.double()[:, 300:], exact[:, 300:], rtol=1e-4, atol=1e-6)
        both = (torch.autograd.grad(o[:, 300:].sum(), x) for o, x in ((found, inputs), (exact, wide)))
        for name, a, b in zip(NAMES, *both, strict=True):
            assert (a.double() - b).norm() < 1e-5 * b.norm(), name

    def test_many_keys_that_take_little(self):
        """With P = 1e-3 for 2047 keys, the mass is (1 - P)^2047."""
        zero, one = torch.zeros(1, 2048, 1, 1), torch.ones(1, 2048, 1, 1)
        logit = torch.full((1, 2048, 1), math.log(1e-3 / (1 - 1e-3)))
        o = geometric_attention(zero, zero, one, logit, logit)
        torch.testing.assert_close(o, torch.full_like(o, 1 - (1 - 1e-3) ** 2047), rtol=1e-5, atol=0.0)

    @pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
    def test_half_types(self, dtype, bound):
        """Sums are in float32, so that the error is the rounding of the output."""
        inputs = make_inputs(s=40, d=8, dtype=dtype, gain=1.0)
        wide = [x.detach().double().requires_grad_() for x in inputs]
        found, expected = geometric_attention(*inputs), geometric_attention(*wide)
        assert found.dtype == dtype
        assert (found.double() - expected).norm() < bound * expected.norm()
        grad = torch.randn_like(found)
        grads = torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, wide, grad.double())
        for name, a, b in zip(NAMES, *grads, strict=True):
            assert a.dtype == dtype
            assert (a.double() - b).norm() < bound * b.norm(), name

    def test_direction_in_another_dtype(self):
        """left and right may have another dtype than q, and gradients have the dtypes of their tensors."""
        inputs = make_inputs(dtype=torch.bfloat16)
        inputs[3:] = [x.detach().float().requires_grad_() for x in inputs[3:]]
        grads = torch.autograd.grad(geometric_attention(*inputs).sum(), inputs)
        assert [x.dtype for x in grads] == [torch.bfloat16] * 3 + [torch.float32] * 2

    def test_autocast_does_not_change_the_sums(self):
        inputs = make_inputs(dtype=torch.float32)
        o = geometric_attention(*inputs)
        grads = torch.autograd.grad(o.sum(), inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            again = geometric_attention(*inputs)
            assert torch.equal(again, o)
            assert all(map(torch.equal, torch.autograd.grad(again.sum(), inputs), grads))


class TestOrder:
    """Properties of single weights."""

    def test_weights_are_a_stick(self):
        """Weights of a row sum to at most 1, and the diagonal is 0."""
        weights = weights_for(3 * torch.randn(9, 9))
        assert weights.min() >= 0
        assert weights.sum(-1).max() <= 1 + 1e-12
        assert weights.diagonal().tolist() == [0.0] * 9
        assert weights_of(80.0, 80.0).sum(-1).tolist() == pytest.approx([1.0] * 9)

    @pytest.mark.parametrize("match", [1, 3, 5, 8])
    def test_nearest_match_hides_everything_farther(self, match):
        """A match takes all of the mass, however large the logits of farther keys are."""
        logits = torch.full((9, 9), -80.0)
        logits[4, match] = 80.0
        logits[4, [j for j in range(9) if abs(j - 4) > abs(match - 4)]] = 80.0
        expected = torch.zeros(9, dtype=torch.float64)
        expected[match] = 1.0
        torch.testing.assert_close(weights_for(logits)[4], expected, rtol=0.0, atol=1e-15)

    def test_ties_go_to_the_right(self):
        """Of two keys at the same distance, the right one takes its share first."""
        both = weights_of(80.0, 80.0)
        assert both.argmax(-1).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 7]
        row = weights_of(0.0, 0.0)[4]
        halves = {5: 1, 3: 2, 6: 3, 2: 4, 7: 5, 1: 6, 8: 7, 0: 8}
        assert row.tolist() == pytest.approx([2.0 ** -halves[j] if j != 4 else 0.0 for j in range(9)], rel=1e-14)

    def test_mirrored(self):
        """Reversing the sequence and exchanging left and right changes only ties, which then go to the left."""

        def nearer_to_the_left(i, j, s):
            return [s - 1 - n for n in nearer(s - 1 - i, s - 1 - j, s)]

        q, k, v, left, right = make_inputs()
        mirrored = geometric_attention(*(x.flip(1) for x in (q, k, v, right, left))).flip(1)
        expected = written_out(q, k, v, left, right, nearer=nearer_to_the_left)
        assert_same(mirrored, expected, [q, k, v, left, right])
        assert (mirrored - geometric_attention(q, k, v, left, right)).abs().max() > 1e-3

    @pytest.mark.parametrize("hidden", ["left", "right"])
    def test_one_side_is_stick_breaking_attention(self, hidden):
        """With one side at -inf it equals stick-breaking attention, on the sequence or its reverse."""
        q, k, v, zero, _ = make_inputs(s=20, d=8)
        zero = torch.zeros_like(zero)
        sides = {"left": zero, "right": zero, hidden: torch.full_like(zero, -torch.inf)}
        found = geometric_attention(q, k, v, **sides)
        back = (lambda x: x.flip(1)) if hidden == "left" else (lambda x: x)
        expected = back(reference.stickbreaking_attention(*map(back, (q, k, v))))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        a, b = (torch.autograd.grad(o.square().sum(), [q, k, v]) for o in (found, expected))
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class TestPadding:
    """Padded keys take no mass, and padded queries have output 0."""

    def test_like_a_shorter_sequence(self):
        inputs = make_inputs(b=1)
        mask = (torch.arange(9) >= 6)[None]
        short = [x[:, :6].detach().requires_grad_() for x in inputs]
        found, expected = geometric_attention(*inputs, key_padding_mask=mask), geometric_attention(*short)
        torch.testing.assert_close(found[:, :6], expected, rtol=1e-12, atol=1e-12)
        assert found[:, 6:].abs().max() == 0
        a, b = (torch.autograd.grad(o.square().sum(), x) for o, x in ((found, inputs), (expected, short)))
        for name, x, y in zip(NAMES, a, b, strict=True):
            torch.testing.assert_close(x[:, :6], y, rtol=1e-12, atol=1e-12)
            assert x[:, 6:].abs().max() == 0, name

    def test_anywhere(self):
        """With padding inside a sequence, the other positions keep their distances."""
        inputs = make_inputs(b=3)
        mask = torch.rand(3, 9) < 0.4
        mask[2] = True
        options = {"key_padding_mask": mask}
        assert mask.any(1).all()
        assert_same(geometric_attention(*inputs, **options), written_out(*inputs, **options), inputs)

    def test_not_read(self):
        """Values at padded positions, also NaN, have no effect."""
        inputs = make_inputs()
        mask = torch.zeros(2, 9, dtype=torch.bool)
        mask[0, 2:4] = mask[1, 8:] = True
        dirty = [x.detach().clone().masked_fill_(_like(mask, x), torch.nan).requires_grad_() for x in inputs]
        grad = torch.randn_like(inputs[2])
        results = []
        for tensors in (inputs, dirty):
            o = geometric_attention(*tensors, key_padding_mask=mask)
            results.append([o, *torch.autograd.grad(o, tensors, grad)])
            grad = grad.masked_fill(_like(mask, grad), torch.nan)
        assert all(map(torch.equal, *results))


class TestMemory:
    """Memory is O(s)."""

    def test_saved_tensors(self):
        """Autograd saves only the inputs."""
        kept = {}
        for s in (512, 4096):
            inputs = make_inputs(1, s, 1, 4, dtype=torch.float32)
            sizes = []
            with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):  # noqa: B023
                geometric_attention(*inputs)
            assert sum(sizes) == sum(x.nbytes for x in inputs)
            kept[s] = sum(sizes)
        assert kept[4096] == 8 * kept[512]

    def test_largest_tensor(self, monkeypatch):
        """No tensor of the forward or backward is larger than the weights of a chunk."""
        chunk = 2**15
        monkeypatch.setattr(geometric, "_MAX_WEIGHTS_PER_CHUNK", chunk)
        inputs = make_inputs(1, 1024, 1, 4, dtype=torch.float32)
        with LargestTensor() as seen:
            geometric_attention(*inputs).sum().backward()
        assert seen.numel == chunk

    def test_of_the_module(self):
        """What the module saves grows linearly with s."""
        module, kept = GeometricAttention(8, 2), []
        for s in (256, 1024):
            sizes = []
            with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):  # noqa: B023
                module(torch.randn(1, s, 8))
            kept.append(sum(sizes))
        assert kept[1] <= 4 * kept[0]


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def _like(mask, x):
    """Reshape the mask (b, s) to broadcast to x (b, s, ...)."""
    return mask.view(*mask.shape, *[1] * (x.dim() - 2))


def make_module(*sizes, **options):
    """Make a module with parameters that differ from their initial values."""
    module = GeometricAttention(*(sizes or (12, 3)), **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return module


def module_written_out(module, x, mask=None):
    """Compute the module's output in float64 from the direction encoding and `written_out`."""
    h, d = module.num_heads, module.head_dim
    w = {name: parameter.double() for name, parameter in module.named_parameters()}
    x = x.double()
    q, k, v = ((x @ rows.T).view(*x.shape[:2], h, d) for rows in w["qkv_proj.weight"].split(h * d))
    q = q + w["q_bias"].view(h, d)
    w_rl, w_lr = w["direction_proj.weight"].split(h)
    b_rl, b_lr = w["direction_proj.bias"].split(h)
    alpha, beta, gamma = (w[name] for name in ("content_scale", "direction_scale", "logit_bias"))
    left, right = beta * (x @ w_rl.T + b_rl) + gamma, beta * (x @ w_lr.T + b_lr) + gamma
    o = written_out(alpha * q, k, v, left, right, key_padding_mask=mask, scale=1.0)
    return o.flatten(-2) @ w["out_proj.weight"].T


class TestModule:
    """GeometricAttention: results against the formula, initial parameters, dtypes and torch.compile."""

    @pytest.mark.parametrize("sizes", [(12, 3), (10, 2, 3)])
    def test_results(self, sizes):
        """The output and the gradients of x and all parameters equal those of the formula."""
        module, x = make_module(*sizes, dtype=torch.float64), torch.randn(2, 7, sizes[0], dtype=torch.float64)
        x.requires_grad_()
        mask = torch.zeros(2, 7, dtype=torch.bool)
        mask[1, 5:] = True
        found, expected = module(x, key_padding_mask=mask), module_written_out(module, x, mask)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert found[mask].abs().max() == 0
        names, tensors = zip(("x", x), *module.named_parameters(), strict=True)
        assert len(names) == 9
        grad = torch.randn_like(found)
        for name, a, b in zip(names, *(torch.autograd.grad(o, tensors, grad) for o in (found, expected)), strict=True):
            assert b.abs().max() > 1e-3, name
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")

    def test_initial_parameters(self):
        """Initially alpha is 1 / sqrt(d), beta is 1, and gamma and b_q are 0."""
        module = GeometricAttention(12, 3, dtype=torch.float64)
        assert {p.dtype for p in module.parameters()} == {torch.float64}
        scalars = ("q_bias", "content_scale", "direction_scale", "logit_bias")
        assert [getattr(module, name).unique().tolist() for name in scalars] == [[0.0], [0.5], [1.0], [0.0]]
        shapes = {name: tuple(p.shape) for name, p in GeometricAttention(12, 3, 8, device="meta").named_parameters()}
        assert shapes == {
            "q_bias": (24,),
            "content_scale": (1,),
            "direction_scale": (1,),
            "logit_bias": (1,),
            "qkv_proj.weight": (72, 12),
            "direction_proj.weight": (6, 12),
            "direction_proj.bias": (6,),
            "out_proj.weight": (12, 24),
        }
        assert "hidden_size=12, num_heads=3, head_dim=4" in repr(module)

    def test_on_meta(self):
        """Tensors on the meta device give the shapes of outputs and gradients, as in `SoftmaxAttention`."""
        attention, x = GeometricAttention(12, 3, device="meta"), torch.empty(2, 5, 12, device="meta")
        out = attention(x, key_padding_mask=torch.empty(2, 5, dtype=torch.bool, device="meta"))
        out.sum().backward()
        assert (out.shape, out.device.type) == (x.shape, "meta")
        assert all(p.grad.shape == p.shape for p in attention.parameters())

    def test_order_matters_without_positions(self):
        """The output depends on the order of the sequence without a position encoding."""
        module, x = make_module(), torch.randn(1, 6, 12)
        order = torch.tensor([0, 1, 5, 3, 4, 2])
        assert (module(x[:, order]) - module(x)[:, order]).abs().max() > 1e-3

    def test_bfloat16(self):
        module, x = make_module(64, 4, dtype=torch.bfloat16), torch.randn(2, 20, 64, dtype=torch.bfloat16)
        out, exact = module(x), module_written_out(module, x)
        assert out.dtype == torch.bfloat16
        assert (out.double() - exact).norm() < 0.03 * exact.norm()

    def test_autocast(self):
        """With fp32 parameters, the output under autocast is bfloat16, and gradients are fp32."""
        module, x = make_module(64, 4), torch.randn(2, 20, 64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(x)
        assert out.dtype == torch.bfloat16
        assert (out - module(x)).norm() < 0.03 * module(x).norm()
        out.float().sum().backward()
        assert {p.grad.dtype for p in module.parameters()} == {torch.float32}

    @pytest.mark.parametrize("padded", [False, True])
    def test_compile(self, monkeypatch, padded):
        """The compiled module gives the eager outputs and gradients, in several chunks."""
        monkeypatch.setattr(geometric, "_MAX_WEIGHTS_PER_CHUNK", 600)
        module, x = make_module(), torch.randn(2, 12, 12, requires_grad=True)
        mask = torch.arange(12) >= torch.tensor([[12], [8]]) if padded else None
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        a, b = (f(x, key_padding_mask=mask) for f in (compiled, module))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        grads = (torch.autograd.grad(o.square().sum(), [x, *module.parameters()]) for o in (a, b))
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)

    def test_compile_with_dynamic_sizes(self):
        """Batch size and length may both be symbolic, as after a batch of another size and length."""
        x = torch.randn(2, 7, 12, requires_grad=True)
        module = make_module()
        compiled = torch.compile(module, dynamic=True, backend="aot_eager")
        grads = [torch.autograd.grad(f(x).square().sum(), [x, *module.parameters()]) for f in (compiled, module)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


INVALID_CALLS = {
    "q is a list": ({"q": [1.0]}, TypeError, "q list"),
    "right is None": ({"right": None}, TypeError, "right NoneType"),
    "integers": (
        {"q": zeros(2, 6, 4, 8, dtype=torch.int64)},
        TypeError,
        "q torch.int64",
    ),
    "integer left": ({"left": zeros(2, 6, 4, dtype=torch.int32)}, TypeError, "left torch.int32"),
    "mixed dtypes": (
        {"k": zeros(2, 6, 4, 8, dtype=torch.bfloat16)},
        TypeError,
        "k torch.bfloat16",
    ),
    "mixed dtype of v": ({"v": zeros(2, 6, 4, 8).double()}, TypeError, "v torch.float64"),
    "mixed devices": (
        {"left": zeros(2, 6, 4, device="meta")},
        ValueError,
        "left meta",
    ),
    "rank of q": (
        {"q": zeros(6, 4, 8)},
        ValueError,
        "q (6, 4, 8)",
    ),
    "no channels": ({"q": zeros(2, 6, 4, 0)}, ValueError, "q (2, 6, 4, 0)"),
    "keys": ({"k": zeros(2, 7, 4, 8)}, ValueError, "k (2, 7, 4, 8)"),
    "grouped heads": ({"k": zeros(2, 6, 2, 8)}, ValueError, "k (2, 6, 2, 8)"),
    "values": (
        {"v": zeros(2, 5, 4, 8)},
        ValueError,
        "v (2, 5, 4, 8)",
    ),
    "rank of v": ({"v": zeros(2, 6, 4)}, ValueError, "v (2, 6, 4)"),
    "left": ({"left": zeros(2, 6)}, ValueError, "left (2, 6)"),
    "right": ({"right": zeros(2, 6, 4, 1)}, ValueError, "right (2, 6, 4, 1)"),
    "mask is a list": ({"key_padding_mask": [6, 3]}, TypeError, "key_padding_mask list"),
    "lengths": (
        {"key_padding_mask": torch.tensor([6, 3])},
        TypeError,
        "key_padding_mask torch.int64",
    ),
    "shape of mask": (
        {"key_padding_mask": zeros(6, 2, dtype=torch.bool)},
        ValueError,
        "key_padding_mask (6, 2)",
    ),
    "device of mask": (
        {"key_padding_mask": zeros(2, 6, dtype=torch.bool, device="meta")},
        ValueError,
        "key_padding_mask meta",
    ),
    "scale nan": ({"scale": float("nan")}, ValueError, "scale nan"),
    "scale is a string": ({"scale": "1"}, TypeError, "scale str"),
}


@pytest.mark.parametrize(("changes", "kind", "words"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_invalid_calls(changes, kind, words):
    good = {name: zeros(2, 6, 4, 8) for name in "qkv"} | {name: zeros(2, 6, 4) for name in ("left", "right")}
    with pytest.raises(kind, match=mentions(words)):
        geometric_attention(**good | changes)


INVALID_SIZES = {
    "no width": ((0, 4), "hidden_size 0"),
    "heads a float": ((64, 4.0), "num_heads 4.0"),
    "head_dim a bool": ((64, 4, True), "head_dim True"),
    "heads that do not divide": ((66, 4), "hidden_size 66"),
}


@pytest.mark.parametrize(("sizes", "words"), INVALID_SIZES.values(), ids=INVALID_SIZES)
def test_invalid_sizes(sizes, words):
    with pytest.raises(ValueError, match=mentions(words)):
        GeometricAttention(*sizes)


INVALID_MODULE_CALLS = {
    "x is a list": ([1.0], {}, TypeError, "x list"),
    "rank of x": (
        zeros(6, 12),
        {},
        ValueError,
        "x (6, 12)",
    ),
    "width of x": (zeros(1, 6, 8), {}, ValueError, "x (1, 6, 8)"),
    "mask": (
        zeros(1, 6, 12),
        {"key_padding_mask": zeros(1, 5, dtype=torch.bool)},
        ValueError,
        "key_padding_mask (1, 5)",
    ),
}


@pytest.mark.parametrize(("x", "options", "kind", "words"), INVALID_MODULE_CALLS.values(), ids=INVALID_MODULE_CALLS)
def test_invalid_module_calls(x, options, kind, words):
    with pytest.raises(kind, match=mentions(words)):
        make_module()(x, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_on_a_gpu(monkeypatch, dtype, bound):
    """Outputs and gradients equal those on the CPU in float64, in several chunks and with padding."""
    monkeypatch.setattr(geometric, "_MAX_WEIGHTS_PER_CHUNK", 2**16)
    inputs = make_inputs(2, 150, 3, 16, dtype=dtype, device="cuda")
    mask = torch.arange(150) >= torch.tensor([[150], [97]])
    wide = [x.detach().cpu().double().requires_grad_() for x in inputs]
    found = geometric_attention(*inputs, key_padding_mask=mask.cuda())
    expected = geometric_attention(*wide, key_padding_mask=mask)
    grad = torch.randn_like(found)
    grads = torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, wide, grad.cpu().double())
    for name, a, b in zip(("o", *NAMES), (found, *grads[0]), (expected, *grads[1]), strict=True):
        assert (a.cpu().double() - b).norm() < bound * b.norm(), name
