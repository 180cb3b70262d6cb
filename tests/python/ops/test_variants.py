"""Forget gates, Euclidean logits and biases: formulas, gradients, accuracy, torch integration, invalid arguments."""

import math

import pytest
import torch
from support.bounds import stick_tolerance
from support.inputs import make_inputs
from support.messages import mentions
from support.variants import (
    ALLOWED,
    BIASES,
    VARIANTS,
    assert_variant,
    errors,
    make_variant,
    packed_options,
    run_variant,
    tensors_of,
    wide_inputs,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_sb import reference, stickbreaking_attention, stickbreaking_attention_varlen

pytestmark = pytest.mark.usefixtures("device")
ops = torch.ops.megatron_sb
variants = pytest.mark.parametrize("name", VARIANTS)


def cu(*values):
    return torch.tensor(values, dtype=torch.int32)


def formula(q, k, v, scale, logits, gate, query_bias, key_bias):
    """Return the output of one head from the definition, key by key: q (s, d), k (s, d), v (s, d_v), others (s,)."""
    weights = torch.zeros(len(q), len(k), dtype=torch.float64)
    for j in range(len(q)):
        mass = 1.0
        for i in range(j - 1, -1, -1):
            z = -scale * (q[j] - k[i]).square().sum() if logits == "euclidean" else scale * q[j] @ k[i]
            beta = gate[i] * (z + query_bias[j] + key_bias[i]).sigmoid()
            weights[j, i] = beta * mass
            mass = mass * (1 - beta)
    return weights @ v


@variants
@pytest.mark.parametrize("dtype", [torch.float64])
def test_operator_and_oracle_compute_the_definition(name, dtype):
    """The default scale is 1 for Euclidean logits and d^-0.5 for dot products."""
    x, options = make_variant(name, s=9, h=1, d=8, dtype=dtype)
    options.pop("scale", None)
    scale = 1.0 if options["logits"] == "euclidean" else 8**-0.5
    gate = options.get("forget_gate", torch.ones(1, 9, 1, dtype=dtype))[0, :, 0]
    biases = [options.get(bias, torch.zeros(1, 9, 1, dtype=dtype))[0, :, 0] for bias in BIASES]
    if "reach" in options:  # one head has that of the first
        biases[0] = biases[0] - math.log(2 ** options["reach"][0] - 1)
    expected = formula(x.q[0, :, 0], x.k[0, :, 0], x.v[0, :, 0], scale, options["logits"], gate, *biases)
    for attention in (stickbreaking_attention, reference.stickbreaking_attention):
        torch.testing.assert_close(attention(x.q, x.k, x.v, **options)[0, :, 0], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("one_thread")
@variants
@pytest.mark.parametrize(("packed", "attend_current"), [(False, False), (True, True)], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float64])
def test_gradients(name, packed, attend_current, dtype):
    """Gradients of output and mass with respect to q, k, v, gates and biases agree with finite differences."""
    x, options = make_variant(name, s=7, h=2, h_kv=1, d=8, dtype=dtype)
    tensors = tensors_of(options)
    leaves = [x.q, x.k, x.v, *tensors.values()]

    def attention(q, k, v, *values):
        more = {
            "attend_current": attend_current,
            "return_mass": True,
            **options,
            **dict(zip(tensors, values, strict=True)),
        }
        if not packed:
            return stickbreaking_attention(q, k, v, **more)
        return stickbreaking_attention_varlen(q[0], k[0], v[0], cu(0, 3, 3, 6), **packed_options(more))

    assert torch.autograd.gradcheck(attention, [leaf.requires_grad_() for leaf in leaves])


@variants
@pytest.mark.parametrize("dtype", [torch.float64])
def test_gradients_across_tiles(name, dtype):
    """Gradients agree with finite differences along random directions, with several tiles of queries and keys."""
    x, options = make_variant(name, "mean -3.2", s=150, s_k=210, h=2, h_kv=1, d=8, dtype=dtype)
    tensors = tensors_of(options)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, *tensors.values())]

    def attention(q, k, v, *values):
        more = {"mass_threshold": 0.0, "return_mass": True, **options, **dict(zip(tensors, values, strict=True))}
        return stickbreaking_attention(q, k, v, **more)

    assert torch.autograd.gradcheck(attention, leaves, fast_mode=True)


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_accuracy(name, dtype, d):
    """Results are accurate with fewer queries than keys and two query heads for each KV head."""
    for regime in ("randn", "mean -6"):
        assert_variant(name, regime, s=150, s_k=300, h=2, h_kv=1, d=d, dtype=dtype)


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed(name, dtype):
    """Results are accurate for documents of 0, 1 and several tiles, rows after the last document, and d_v != d."""
    edges = [0, 1, 1, 150, 290]
    assert_variant(name, "mean -3.2", edges, attend_current=True, s=300, h=2, d=40, d_v=24, dtype=dtype)


@pytest.mark.parametrize("d", [64, 200])
def test_saturated(d):
    """Results are accurate with logits of +15 and forget gates. The odds of beta are then f / (1 - f)."""
    assert_variant("gated", "saturated +15", s=150, h=2, d=d)


@variants
def test_weights_and_mass_sum_to_one(name):
    """With v = 1 the output is the sum of the weights."""
    x, options = make_variant(name, "mean -3.2", s=1000, h=2, d=64)
    x.v.fill_(1.0)
    o, mass = stickbreaking_attention(x.q, x.k, x.v, mass_threshold=0.0, return_mass=True, **options)
    stick = o.double() + mass.double().transpose(1, 2)[..., None]
    assert (stick - 1).abs().max().item() <= stick_tolerance(1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_forget_gate_of_one_changes_nothing(dtype, device):
    x = make_inputs("mean -3.2", s=300, h=4, h_kv=2, d=40, dtype=dtype)
    gates = {"forget_gate": torch.ones(1, 300, 2)}
    gated = run_variant(stickbreaking_attention, x, gates)
    plain = run_variant(stickbreaking_attention, x, {})
    for name, value in plain.items():
        if device == "cpu":
            assert torch.equal(gated[name], value), name
        else:
            # Other kernels can serve a call without gates.
            rtol, atol = (1e-2, 1e-3) if dtype == torch.bfloat16 else (1e-4, 1e-4)
            torch.testing.assert_close(gated[name], value, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("f", [1e-2, 2.0**-63, 2.0**-66, 2.0**-100, 0.0])
def test_the_gradient_of_a_closed_gate(f, dtype):
    """The gradient has a limit for f -> 0."""
    x = make_inputs("mean -3.2", s=70, h=1, d=16, dtype=dtype)

    def gate_gradient(attention, gate_dtype):
        gates = torch.full((1, 70, 1), 0.7, dtype=gate_dtype)
        gates[0, 60] = f
        gates.requires_grad_()
        o = attention(x.q, x.k, x.v, forget_gate=gates, mass_threshold=0.0)
        (o.double() * x.do).sum().backward()
        return gates.grad.double()

    actual = gate_gradient(stickbreaking_attention, dtype)
    expected = gate_gradient(reference.stickbreaking_attention, torch.float64)
    assert expected[0, 60].abs() > 0.01
    torch.testing.assert_close(actual, expected, rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=1e-6)


def test_a_gate_outside_of_its_range_has_the_gradient_at_the_bound():
    x = make_inputs("mean -3.2", s=40, h=1, d=16)

    def gradient(gate):
        gates = torch.full((1, 40, 1), gate).requires_grad_()
        return torch.autograd.grad(stickbreaking_attention(x.q, x.k, x.v, forget_gate=gates).sum(), gates)[0]

    assert gradient(1.0).abs().max() > 1e-3
    torch.testing.assert_close(gradient(1.5), gradient(1.0))
    torch.testing.assert_close(gradient(-0.5), gradient(0.0))


def test_a_nearly_open_gate_is_not_rounded_to_one():
    """With 1 - f = 2^-20 and saturated logits, each key leaves 2^-20 of the mass. In bf16 the gate would be 1."""
    x = make_inputs("saturated +30", s=4, h=1, d=64, dtype=torch.bfloat16)
    gates = torch.full((1, 4, 1), 1 - 2.0**-20)
    _, mass = stickbreaking_attention(x.q, x.k, x.v, forget_gate=gates, mass_threshold=0.0, return_mass=True)
    expected = torch.tensor([2.0 ** (-20 * j) for j in range(4)])
    torch.testing.assert_close(mass[0, 0], expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_common_shift_of_q_and_k_changes_no_distance(dtype):
    x, options = make_variant("euclidean", s=200, h=2, d=64, dtype=torch.float32)
    q, k = ((t * 16).round().clamp(-64, 64) / 16 for t in (x.q, x.k))  # bf16 holds these and the shifted values exactly
    original, shifted = (
        stickbreaking_attention((q + shift).to(dtype), (k + shift).to(dtype), x.v.to(dtype), **options)
        for shift in (0.0, 2.0)
    )
    torch.testing.assert_close(shifted, original, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


def test_large_norms_in_fp16():
    """|q|^2 may be above 65504, the largest number of fp16."""
    x, options = make_variant("euclidean", s=40, h=1, d=64, dtype=torch.float16)
    x.q, x.k = x.q * 0.125 + 40, x.k * 0.125 + 40
    assert x.q.float().square().sum(-1).min() > 65504
    actual = stickbreaking_attention(x.q, x.k, x.v, **options)
    expected = reference.stickbreaking_attention(x.q, x.k, x.v, **options)
    assert errors({"o": actual}, {"o": expected})["o"] < 3e-2  # z is a difference of numbers near 1e5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [None, -0.2])
def test_biases_of_zero_change_little(dtype, scale):
    """The kernels then compute wider heads. The gradients of biases in q's dtype have that dtype."""
    x = make_inputs("mean -3.2", s=200, h=4, h_kv=2, d=40, dtype=dtype)
    biases = {"query_bias": torch.zeros(1, 200, 4, dtype=dtype), "key_bias": torch.zeros(1, 200, 2, dtype=dtype)}
    biased = run_variant(stickbreaking_attention, x, biases, scale=scale)
    plain = run_variant(stickbreaking_attention, x, {}, scale=scale)
    rtol, atol = {torch.float32: (1e-4, 1e-4), torch.float16: (4e-3, 1e-3), torch.bfloat16: (2e-2, 8e-3)}[dtype]
    for result, value in plain.items():
        torch.testing.assert_close(biased[result], value, rtol=rtol, atol=atol)
    assert {biased[f"d{bias}"].dtype for bias in BIASES} == {dtype}


@pytest.mark.parametrize("name", ["biased", "biased euclidean", "gated biased"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_bias_of_minus_infinity_hides_a_key(name, dtype):
    """A large negative number hides it too. Such keys take no weight, and all gradients are finite."""
    x, options = make_variant(name, "mean -3.2", s=150, h=2, h_kv=1, d=64, dtype=dtype)
    hidden = torch.arange(150) % 3 == 0
    lowest = torch.tensor([-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
    options["key_bias"][0, hidden, 0] = lowest[torch.arange(50) % 4].to(options["key_bias"].dtype)
    options["query_bias"][0, 70, 0] = -math.inf
    actual = run_variant(stickbreaking_attention, x, options, mass_threshold=0.0)
    expected = run_variant(reference.stickbreaking_attention, *wide_inputs(x, options), mass_threshold=0.0)
    found = errors(actual, expected)
    assert all(error <= ALLOWED[dtype] for error in found.values()), found  # max() would miss a NaN
    assert not any(actual[result][0, hidden].any() for result in ("dv", "dkey_bias"))
    assert not actual["o"][0, 70, 0].any() and not actual["dquery_bias"][0, 70, 0].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_bias_with_the_least_scale(dtype):
    """The columns hold bias / scale. They clamp it, and must not clamp this."""
    x, options = make_variant("biased", s=40, h=2, h_kv=1, d=16, dtype=dtype)
    options["key_bias"][0, ::3] = -math.inf
    actual = stickbreaking_attention(x.q, x.k, x.v, scale=2.0**-64, **options)
    expected = reference.stickbreaking_attention(x.q, x.k, x.v, scale=2.0**-64, **options)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=ALLOWED[dtype])
    with pytest.raises(ValueError, match=mentions("scale query_bias 5.42101e-20 2.71051e-20")):
        stickbreaking_attention(x.q, x.k, x.v, scale=2.0**-65, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", BIASES)
def test_a_bias_that_is_nan_is_not_dropped(bias, dtype):
    """It reaches its query, or all queries after its key."""
    x, options = make_variant("biased", "mean -8", s=40, h=1, d=16, dtype=dtype)
    options[bias][0, 20] = math.nan
    rows = stickbreaking_attention(x.q, x.k, x.v, **options)[0, :, 0].isnan()
    assert torch.equal(rows.all(-1), rows.any(-1))
    position = torch.arange(40)
    assert torch.equal(rows.any(-1), position == 20 if bias == "query_bias" else position > 20)


@pytest.mark.parametrize("key_bias", [-40.0, 40.0])
def test_biases_keep_24_bits_in_bf16(key_bias):
    """A large bias of the queries cancels that of the keys."""
    x, options = make_variant("biased", s=100, h=2, d=64, dtype=torch.bfloat16)
    shifted = {
        bias: value + (key_bias if bias == "key_bias" else -key_bias)
        for bias, value in options.items()
        if bias in BIASES
    }
    original = run_variant(stickbreaking_attention, x, options)
    for result, value in run_variant(stickbreaking_attention, x, options | shifted).items():
        torch.testing.assert_close(value, original[result], rtol=1e-2, atol=1e-2)


@variants
@pytest.mark.parametrize("carry", [True, False])
def test_two_blocks_of_keys_give_the_result_of_one_call(name, carry):
    """The block operators get Euclidean logits and biases as wider heads and the forget gate as a column of k."""
    x, options = make_variant(name, "mean -3.2", s=100, s_k=200, h=2, h_kv=1, d=16)
    gated, euclidean = "forget_gate" in options, options["logits"] == "euclidean"
    columns = torch.nn.functional.pad(options["forget_gate"][..., None], (0, 7)) if gated else x.k[..., :0]
    q, k, scale = x.q, x.k, options.get("scale", 0.25)
    first, last = options.get("reach", (1.0, 1.0))
    reach = {"reach": first, "reach_step": last - first}  # of two heads
    if euclidean or tensors_of(options).keys() & set(BIASES):
        ones, padding = torch.ones(1, 200, 2, 1), torch.zeros(1, 200, 2, 6)
        of_q, of_k = (
            options.get(bias, t.new_zeros(t.shape[:3]))[..., None] / scale
            - euclidean * t.square().sum(-1, keepdim=True)
            for bias, t in zip(BIASES, (q, k), strict=True)
        )
        q = torch.cat([q * (1 + euclidean), of_q, ones[:, :100], padding[:, :100]], -1)
        k = torch.cat([k, ones[:, :, :1], of_k, padding[:, :, :1]], -1)
    k = torch.cat([k, columns], -1)
    mass, o = torch.ones(1, 2, 100), 0.0
    for a, b in ((90, 200), (0, 90)):  # keys, newest first
        table = torch.tensor([[0, 100, 0, b - a, 100 - a]], dtype=torch.int32)
        block_o, block_mass, _, _ = ops.block_forward(
            q, k[:, a:b], x.v[:, a:b], table, mass if carry else None, scale=scale, forget_gate=gated, **reach
        )
        o = o + (block_o if carry else block_o * mass.transpose(1, 2)[..., None])
        mass = block_mass if carry else mass * block_mass
    expected_o, expected_mass = stickbreaking_attention(x.q, x.k, x.v, return_mass=True, **options)
    torch.testing.assert_close(o, expected_o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mass, expected_mass, rtol=1e-4, atol=1e-5)


class TestTorch:
    """opcheck, torch.compile, autocast and second derivatives."""

    @variants
    def test_opcheck(self, name):
        x, options = make_variant(name, b=2, s=5, s_k=7, h=4, h_kv=2, d=16, d_v=8)
        options["euclidean"] = options.pop("logits") == "euclidean"
        for value in tensors_of(options).values():
            value.requires_grad_()
        leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
        torch.library.opcheck(ops.attention.default, leaves, options)

    def test_opcheck_of_the_block_operators(self):
        x = make_inputs(s=70, h=4, h_kv=2, d=8)
        k = torch.cat([x.k, torch.rand_like(x.k)], -1)
        options = {"scale": 0.3, "forget_gate": True}
        torch.library.opcheck(ops.block_forward.default, (x.q, k, x.v), options)
        _, _, edge, restart = ops.block_forward(x.q, k, x.v, **options)
        torch.library.opcheck(ops.block_backward.default, (x.do, x.q, k, x.v, None, edge, restart), options)

    @variants
    @pytest.mark.parametrize("packed", [False, True])
    def test_compile(self, name, packed):
        """A compiled model gives the results and gradients of the eager one."""
        torch.compiler.reset()  # the limit of recompilations counts those of all tests here
        x, options = make_variant(name, "mean -3.2", s=90, h=4, h_kv=2, d=16)
        args = (cu(0, 30, 80),) if packed else ()
        if packed:
            x, options = x.packed(), packed_options(options)
        attention = stickbreaking_attention_varlen if packed else stickbreaking_attention

        def model(q, k, v, *offsets, **options):
            o, mass = attention(q * 2, k, v, *offsets, **options)
            return o.sin(), mass

        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        expected = run_variant(model, x, options, *args)
        assert all(expected[result].any() for result in expected)
        for result, value in run_variant(compiled, x, options, *args).items():
            torch.testing.assert_close(value, expected[result], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("name", ["gated euclidean", "gated biased"])
    def test_autocast(self, device, name):
        """q, k and v are cast, gates and biases stay in fp32, and gradients have the dtypes of the inputs."""
        x, options = make_variant(name, s=70, h=2, d=16)
        half = make_variant(name, s=70, h=2, d=16, dtype=torch.bfloat16)[0]

        def attention(*args, **options):
            with torch.autocast(device, dtype=torch.bfloat16):
                return stickbreaking_attention(*args, **options)

        expected = run_variant(stickbreaking_attention, half, options)
        actual = run_variant(attention, x, options)
        assert actual["o"].dtype == torch.bfloat16
        assert {actual[result].dtype for result in actual if result.startswith("d")} == {torch.float32}
        for result, value in expected.items():
            assert torch.equal(actual[result].to(value.dtype), value), result

    @pytest.mark.parametrize(("name", "leaf"), [("gated euclidean", None), *(("biased", bias) for bias in BIASES)])
    def test_a_second_derivative_raises_an_error(self, name, leaf):
        x, options = make_variant(name, s=5, h=1, d=8)
        of = (x.q if leaf is None else options[leaf]).requires_grad_()
        o = stickbreaking_attention(x.q, x.k, x.v, **options)
        (gradient,) = torch.autograd.grad(o.square().sum(), of, create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            gradient.sum().backward()


class TestColumns:
    """The columns that variants append, from their definition: kernels for 16 bits on a GPU, else tensor operations."""

    SIDES = pytest.mark.parametrize("side", [1, 2], ids=["queries", "keys"])
    DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
    WIDTHS = pytest.mark.parametrize("d", [8, 40, 64, 128, 248])

    @staticmethod
    def inputs(dtype, d):
        """Return x (2, 37, 3, d), a view of rows with other elements around them, gates from 0 to 1, and biases."""
        x = torch.randn(2, 37, 5, d + 16).to(dtype)[:, :, 1:4, 8 : 8 + d]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return x, torch.rand(2, 37, 3, dtype=wide), 5 * torch.randn(3, 37, 2, dtype=wide).transpose(0, 2)

    @pytest.mark.parametrize(("norms", "biased"), [(True, False), (False, True), (True, True), (False, False)])
    @SIDES
    @DTYPES
    @WIDTHS
    def test_numbers_and_gates(self, dtype, d, side, norms, biased):
        x, gate, bias = self.inputs(dtype, d)
        gate[0, :3, 0] = torch.tensor([0.0, 1.0, 1.0 - 2.0**-20])
        out = ops.extend_forward(x, bias if biased else None, gate, side, norms, scale=-0.3)
        unit = 128 if dtype == torch.float16 else 1
        parts = out[..., d:].double()
        number, ones = (parts[..., 3 * i : 3 * i + 3] for i in ((0, 1) if side == 1 else (1, 0)))
        assert out.shape == (2, 37, 3, d + 16) and torch.equal(out[..., :d], x * 2 if norms and side == 1 else x)
        terms = (-norms * x.double().square().sum(-1) / unit, biased * bias.double() / -0.3 / unit)
        exact, size = sum(terms), sum(term.abs() for term in terms)
        spacing = 2.0**-24 if dtype == torch.float16 else 0  # of the smallest fp16 numbers
        assert ((number.sum(-1) - exact).abs() <= 2.0**-20 * size + spacing).all()
        assert not parts[..., [6, 7, 11, 12, 13, 14, 15]].any()
        assert (ones == unit).all()
        least = 2.0**-24 if dtype == torch.float16 else 2.0**-64
        assert (parts[..., 8:11].sum(-1) - gate.double().clamp(least, 1)).abs().max() <= spacing

    @SIDES
    @pytest.mark.parametrize(("d", "gated"), [(40, True), (48, False)])
    def test_kernels_write_zeros_to_the_padding(self, device, side, d, gated):
        """The padding fills the last sector of a row, after the gates."""
        if device == "cpu":
            pytest.skip("tensor operations leave the padding as it is")
        x, gate, _ = self.inputs(torch.bfloat16, d)
        out = ops.extend_forward(x, None, gate if gated else None, side, True, 1.0)
        assert (out.shape[-1], out.stride(2)) == (56, 64)
        assert not out.as_strided((2, 37, 3, 8), out.stride(), 56).any()

    @pytest.mark.parametrize("side", [0, 1, 2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_torch_compile_expects_the_strides_of_the_result(self, dtype, side):
        """Inductor checks them. With 16 bits, rows with biases begin at multiples of 32 bytes."""
        x, gate = torch.randn(1, 9, 2, 64, dtype=dtype), torch.rand(1, 9, 2) if side == 0 else None
        found = ops.extend_forward(x, None, gate, side, side > 0, 1.0).stride()
        with FakeTensorMode() as mode:
            x, gate = mode.from_tensor(x), gate if gate is None else mode.from_tensor(gate)
            assert ops.extend_forward(x, None, gate, side, side > 0, 1.0).stride() == found
        row = 80 if side > 0 and dtype == torch.bfloat16 else 72
        assert found == (9 * 2 * row, 2 * row, row, 1)

    def test_gradients_are_contiguous(self):
        """As torch.compile expects, also if the given gradients have heads before rows."""
        x = torch.randn(2, 5, 3, 16)
        out = ops.extend_forward(x, None, None, 1, True, 1.0)
        gradient = torch.randn(2, 3, 5, out.shape[-1]).transpose(1, 2)
        assert ops.extend_backward(gradient, out, 1, 16).is_contiguous()

    @DTYPES
    @WIDTHS
    def test_gates_alone(self, dtype, d):
        x, gate, _ = self.inputs(dtype, d)
        out = ops.extend_forward(x, None, gate, 0)
        assert torch.equal(out[..., :d], x) and out.shape[-1] == d + 8 and not out[..., d + 3 :].any()
        spacing = 2.0**-24 if dtype == torch.float16 else 0
        assert (out[..., d : d + 3].double().sum(-1) - gate).abs().max() <= spacing

    @SIDES
    @DTYPES
    @WIDTHS
    def test_gradients(self, dtype, d, side):
        x, gate, bias = self.inputs(dtype, d)
        out = ops.extend_forward(x, bias, gate, side, True, 0.5)
        gradient = torch.randn(out.shape).to(dtype)
        unit, twice = 128 if dtype == torch.float16 else 1, 2 if side == 1 else 1
        of_norm = -gradient[..., d + (0 if side == 1 else 3)].double() / unit
        expected = gradient[..., :d].double() * twice + 2 * x.double() * of_norm[..., None]
        found = ops.extend_backward(gradient, out, side, d)
        assert found.dtype == dtype
        atol = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=atol)

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            (lambda: {"x": torch.zeros(1, 8, 2, 12)}, ValueError, "x head_dim 12"),
            (lambda: {"x": torch.zeros(8, 2, 16)}, ValueError, "x 3 4"),
            (lambda: {"bias": torch.zeros(1, 1, 1)}, ValueError, "bias 1, 8, 2 1, 1, 1"),
            (lambda: {"gate": torch.zeros(1, 8, 2, dtype=torch.float64)}, TypeError, "gate Float Double"),
            (lambda: {"side": 3}, ValueError, "side 2 3"),
            (lambda: {"side": 0, "norms": True}, ValueError, "side 1 2 norms 0"),
            (lambda: {"side": 0, "bias": torch.zeros(1, 8, 2)}, ValueError, "side 1 2 bias 0"),
        ],
    )
    def test_invalid_arguments(self, changes, error, words):
        """The changes are functions: their tensors must be on the device of the test."""
        arguments = {"x": torch.zeros(1, 8, 2, 16), "bias": None, "gate": None, "side": 1} | changes()
        with pytest.raises(error, match=mentions(words)):
            ops.extend_forward(**arguments)

    def test_a_backward_without_norms_raises_an_error(self):
        x = torch.zeros(1, 8, 2, 24)
        with pytest.raises(ValueError, match=mentions("side 1 2 0")):
            ops.extend_backward(x, x, 0, 16)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"logits": "cosine"}, ValueError, "logits 'cosine'"),
        ({"forget_gate": 0.5}, TypeError, "forget_gate float"),
        ({"query_bias": 0.5}, TypeError, "query_bias float"),
        ({"key_bias": 0.5}, TypeError, "key_bias float"),
        ({"query_bias": torch.zeros(1, 8, 4), "scale": 0.0}, ValueError, "scale query_bias 5.42101e-20 0"),
        ({"key_bias": torch.zeros(1, 8, 2), "scale": -5e-20}, ValueError, "scale key_bias 5.42101e-20 -5e-20"),
    ],
)
def test_an_invalid_variant_raises_an_error(options, error, words):
    x = make_inputs(s=8, h=4, h_kv=2, d=16)
    with pytest.raises(error, match=mentions(words)):
        stickbreaking_attention(x.q, x.k, x.v, **options)


@pytest.mark.parametrize(
    ("change", "kind", "error", "words"),
    [
        (3, {}, ValueError, "shape {shape} {given}"),
        (0, {"dtype": torch.float16}, TypeError, "Float in {like} got Half"),
        (0, {"device": "meta"}, ValueError, "meta"),
    ],
    ids=["shape", "dtype", "device"],
)
@pytest.mark.parametrize(("name", "heads"), [("forget_gate", 2), ("query_bias", 4), ("key_bias", 2)])
def test_an_invalid_gate_or_bias_raises_an_error(name, heads, change, kind, error, words):
    x = make_inputs(s=8, h=4, h_kv=2, d=16)
    like = "q" if name == "query_bias" else "k"
    words = words.format(shape=[1, 8, heads], given=[1, 8, heads + change], like=like)
    with pytest.raises(error, match=mentions(f"{name} {words}")):
        stickbreaking_attention(x.q, x.k, x.v, **{name: torch.ones(1, 8, heads + change, **kind)})


@pytest.mark.parametrize("name", ["euclidean", "query bias", "key bias", "gated biased"])
def test_the_widest_head(name):
    """Euclidean logits and biases need eight columns of a head, so head_dim is at most 248."""
    x, options = make_variant(name, s=8, h=1, d=256)
    with pytest.raises(ValueError, match=mentions("head_dim 248 256")):
        stickbreaking_attention(x.q, x.k, x.v, **options)
    x, options = make_variant(name, s=70, h=1, d=248)
    actual = run_variant(stickbreaking_attention, x, options, mass_threshold=0.0)
    expected = run_variant(reference.stickbreaking_attention, *wide_inputs(x, options), mass_threshold=0.0)
    assert all(error < 2e-5 for error in errors(actual, expected).values())
