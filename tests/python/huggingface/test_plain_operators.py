"""The operators in pure torch agree with the float64 oracle, and their memory does not grow with the square of keys."""

import subprocess
import sys

import pytest
import torch
from support.accuracy import relative_errors
from support.inputs import make_inputs
from support.messages import mentions
from support.variants import ALLOWED, GATES, WITHOUT_BIASES, errors, make_variant, run_variant, wide_inputs

from megatron_sb import reference
from megatron_sb.huggingface import operators, plain_operators
from megatron_sb.ops import kvcache

SIZES = {"b": 2, "s": 40, "h": 4, "h_kv": 2, "d": 16, "d_v": 8}
# The oracle's autograd is exact in float64 for these logits. It takes 1 - sigmoid(z) from a rounded sigmoid(z).
REGIMES = ("randn", "zeros", "mean -3.2", "saturated +5", "alternating")
KINDS = {"dot": (), **{name: (name,) for name in WITHOUT_BIASES}}


def make(kind, regime="randn", dtype=torch.float32, gates="mixed", **sizes):
    """Return inputs and options."""
    sizes = {**SIZES, **sizes, "dtype": dtype}
    return make_variant(kind, regime, gates, **sizes) if kind != "dot" else (make_inputs(regime, **sizes), {})


def assert_close(found, expected, dtype):
    assert expected["o"].abs().max() > 0
    for name, error in errors(found, expected).items():
        assert error <= ALLOWED[dtype], f"{name}: {error:.2g}"


def test_both_modules_have_the_same_functions():
    for name in operators.__all__:
        assert callable(getattr(plain_operators, name)), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dense(dtype, regime, kind):
    """Output, mass and gradients, with as many keys as queries, and with more."""
    for num_keys, attend_current in ((40, False), (57, True)):
        if kind == "gated euclidean" and regime == "alternating":
            continue  # The oracle's gradients are not accurate.
        x, options = make(kind, regime, dtype, s_k=num_keys)
        options |= {"attend_current": attend_current}
        found = run_variant(plain_operators.stickbreaking_attention, x, options)
        assert found["o"].dtype == dtype and found["mass"].dtype == torch.promote_types(dtype, torch.float32)
        assert_close(found, run_variant(reference.stickbreaking_attention, *wide_inputs(x, options)), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_packed(dtype, kind):
    """Empty documents, documents with more keys than queries, and rows after the last document."""
    x, options = make(kind, dtype=dtype, b=1, s=40, s_k=64)
    x, bounds = x.packed(), torch.tensor([0, 7, 7, 30, 36])
    options = {key: value[0] if key == "forget_gate" else value for key, value in options.items()}
    options["cu_seqlens_k"] = torch.tensor([0, 7, 9, 50, 60])
    found = run_variant(plain_operators.stickbreaking_attention_varlen, x, options, bounds)
    assert not found["o"][36:].any() and (found["mass"][:, 36:] == 1).all()
    assert_close(found, run_variant(reference.stickbreaking_attention_varlen, *wide_inputs(x, options), bounds), dtype)


@pytest.mark.parametrize("gates", GATES)
def test_gates(gates):
    x, options = make("gated", dtype=torch.float64, gates=gates)
    found = run_variant(plain_operators.stickbreaking_attention, x, options)
    expected = run_variant(reference.stickbreaking_attention, *wide_inputs(x, options))
    assert_close(found, expected, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gate", [None, 0.0, 1.0, "both"])
@pytest.mark.parametrize("logits", ["dot", "euclidean"])
def test_extreme_logits_and_gates(logits, gate, dtype):
    """Logits of up to +-1000 and gates of 0 and 1: the results of the oracle, and finite gradients."""
    x = make_inputs(dtype=dtype, **SIZES)
    x.q, options = x.q * 60, {"logits": logits, "scale": 1.0 if logits == "dot" else 0.01}
    assert 900 < torch.einsum("bqhd,bkd->bhqk", x.q, x.k[:, :, 0]).abs().max() < 2000
    if gate is not None:
        f = torch.full(x.k.shape[:3], 0.0 if gate == "both" else gate, dtype=dtype)
        f[:, ::2] = f[:, ::2] if gate != "both" else 1.0
        options["forget_gate"] = f
    found = run_variant(plain_operators.stickbreaking_attention, x, options)
    exact, wide = wide_inputs(x, options)
    o, mass = reference.stickbreaking_attention(exact.q, exact.k, exact.v, return_mass=True, **wide)
    allowed = {torch.float64: 1e-11, torch.float32: 1e-3}[dtype]  # fp32 rounds a logit of 1000 to within 6e-5
    assert relative_errors(found["o"], o)[0] <= allowed
    torch.testing.assert_close(found["mass"].double(), mass, atol=allowed, rtol=0)
    for name, tensor in found.items():
        assert tensor.isfinite().all(), name


def test_gradients_of_gates_of_0_and_1():
    """Differences of the forward agree. The oracle's autograd divides by such a gate."""
    z = torch.tensor([-30.0, -3.0, -0.1, 0.0, 0.7, 5.0], dtype=torch.float64).repeat(3, 1).requires_grad_()
    f = torch.tensor([[0.0], [0.6], [1.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(plain_operators._LogRest.apply, (z, f))
    x, options = make("gated", dtype=torch.float64)
    results = []
    for closed in (0.0, 1e-9):
        options["forget_gate"] = torch.where(torch.arange(40)[None, :, None] % 3 == 0, closed, 0.8).expand(2, 40, 2)
        options["forget_gate"] = options["forget_gate"].double()
        results.append(run_variant(plain_operators.stickbreaking_attention, x, options))
    expected = run_variant(reference.stickbreaking_attention, *wide_inputs(x, options))
    for found in results:
        assert all(error < 1e-7 for error in errors(found, expected).values())


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_queries(kind, monkeypatch):
    """A block has few weights, and the blocks together have the results of a single block."""
    x, options = make(kind, dtype=torch.float64, s_k=64)
    whole = run_variant(plain_operators.stickbreaking_attention, x, options)
    rows, sizes = plain_operators._rows, []

    def counted(q, k, *args):
        sizes.append(q.shape[:-1].numel() * k.shape[2])
        return rows(q, k, *args)

    monkeypatch.setattr(plain_operators, "_rows", counted)
    monkeypatch.setattr(plain_operators, "_MAX_WEIGHTS", 3000)
    found = run_variant(plain_operators.stickbreaking_attention, x, options)
    assert max(sizes) <= 3000 and len(sizes) == 2 * 8  # of 40 queries, in the forward and again in the backward
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-12, rtol=1e-10, msg=name)


PEAK = """
import torch
from megatron_sb.huggingface import plain_operators

def run(length):
    q, k, v = (torch.randn(1, length, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    plain_operators.stickbreaking_attention(q, k, v).sum().backward()
    # not the peak of getrusage, which starts at that of the parent process
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1])

torch.set_num_threads(1)
plain_operators._MAX_WEIGHTS = 2**18
print(-run(8) + run(3000))
"""


def test_memory():
    """A forward and backward need less memory than the weights of all queries would, in kilobytes."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout) < 4 * 3000**2 * 4 / 1024


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_stored_keys(dtype, kind):
    """A cache gives keys and gates back, and attention to its filled slots is that of the sequences."""
    x, options = make(kind, dtype=dtype, s=3, s_k=20)
    gate = options.pop("forget_gate", None)
    names = {"logits": options.get("logits", "dot"), "forget_gate": gate is not None}
    stored = plain_operators.stored_keys(x.k, logits=names["logits"], forget_gate=gate)
    assert stored.shape[-1] == plain_operators.stored_head_dim(16, **names)
    keys, gates = plain_operators.keys_and_gates(stored, 16, **names)
    assert torch.equal(keys, x.k)
    if gate is not None:
        assert gates.dtype == gate.dtype
        torch.testing.assert_close(gates, gate, atol=2.0**-25 if dtype == torch.float16 else 0, rtol=0)
    empty = [torch.cat([t, t.new_full((2, 5, *t.shape[2:]), torch.nan)], 1) for t in (stored, x.v)]
    leftpad = torch.tensor([0, 18])
    assert plain_operators.is_decoding_step(x.q, *empty)
    o, mass = plain_operators.attend_to_filled(
        x.q, *empty, num_keys=20, leftpad=leftpad, forget_gate=names["forget_gate"], return_mass=True, **options
    )
    for row, begin in enumerate(leftpad.tolist()):
        kept = max(0, begin - 17)  # queries before the first key
        assert not o[row, :kept].any() and (mass[row, :, :kept] == 1).all()
        parts = [t[row : row + 1, begin:].double() for t in (x.k, x.v)]
        more = {} if gate is None else {"forget_gate": gate[row : row + 1, begin:].double()}
        wide = x.q[row : row + 1, kept:].double()
        expected = reference.stickbreaking_attention(wide, *parts, return_mass=True, **options, **more)
        assert relative_errors(o[row : row + 1, kept:], expected[0])[0] <= ALLOWED[dtype]
        assert relative_errors(mass[row : row + 1, :, kept:], expected[1])[0] <= ALLOWED[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vectors", [("bias",), ("weight",), ("weight", "shift"), ("bias", "weight", "shift")])
def test_head_output(vectors, dtype):
    o, mass = torch.randn(2, 9, 4, 16).to(dtype), torch.rand(2, 4, 9, dtype=torch.promote_types(dtype, torch.float32))
    r, weight, shift = (torch.randn(64).to(dtype) if name in vectors else None for name in ("bias", "weight", "shift"))
    x = o.double()
    if r is not None:
        x = x + mass.double().transpose(1, 2)[..., None] * r.double().view(4, 16)
    if weight is not None:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 0.1).sqrt()
        x = x * weight.double().view(4, 16) + (0 if shift is None else shift.double().view(4, 16))
    for function in (plain_operators.head_output, operators.head_output):
        found = function(o, mass, r, weight, shift, eps=0.1)
        assert found.dtype == dtype and relative_errors(found, x)[0] <= ALLOWED[dtype]


def test_autocast_does_not_round():
    """As in the package, sums are in fp32 also under autocast."""
    x, options = make("gated euclidean")
    expected = plain_operators.stickbreaking_attention(x.q, x.k, x.v, **options)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain_operators.stickbreaking_attention(x.q, x.k, x.v, **options), expected)


def test_invalid_calls():
    x, _ = make("dot")
    with pytest.raises(ValueError, match=mentions("q k 30 40")):
        plain_operators.stickbreaking_attention(x.q, x.k[:, :30], x.v[:, :30])
    with pytest.raises(ValueError, match=mentions("heads q k 2 3")):
        plain_operators.stickbreaking_attention(x.q[:, :, :3], x.k, x.v)
    with pytest.raises(ValueError, match=mentions("logits 'dot' 'euclidean' 'cosine'")):
        plain_operators.stickbreaking_attention(x.q, x.k, x.v, logits="cosine")


def test_gates_have_as_many_bits_as_in_the_caches_of_the_package():
    gate = torch.rand(1, 100, 2)
    for module in (plain_operators, kvcache):
        stored = module.stored_keys(torch.zeros(1, 100, 2, 8, dtype=torch.bfloat16), forget_gate=gate)
        assert torch.equal(module.keys_and_gates(stored, 8, forget_gate=True)[1], gate)


def test_a_step_without_rows():
    """A static cache gives the number of keys for each row. A batch can have none."""
    q, k, num_keys = torch.randn(0, 1, 4, 16), torch.randn(0, 9, 2, 16), torch.zeros(0, dtype=torch.int32)
    assert plain_operators.attend_to_filled(q, k, k, num_keys=num_keys, leftpad=num_keys).shape == (0, 1, 4, 16)
