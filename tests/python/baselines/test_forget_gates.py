"""Forget gates of SoftmaxAttention, compared with the definition of the forgetting transformer in float64."""

import math

import pytest
import torch
from support.softmax import cu_seqlens_of, make_inputs

from megatron_sb.baselines.softmax import SoftmaxAttention


def forgetting(q, k, v, log_gates):
    """Return softmax attention with forget gates in one document by loops, q (s, h, d), k, v (s, h_kv, d), float64."""
    group = q.shape[1] // k.shape[1]
    rows = []
    for j in range(len(q)):
        heads = []
        for head in range(q.shape[1]):
            own = head // group
            scores = [
                q[j, head] @ k[i, own] / math.sqrt(q.shape[2]) + log_gates[i + 1 : j + 1, own].sum()
                for i in range(j + 1)
            ]
            heads.append(torch.stack(scores).softmax(0) @ v[: j + 1, own])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


GATED = {
    "fp64": (torch.float64, 1e-10),
    "fp32": (torch.float32, 2e-5),
    "bf16": (torch.bfloat16, 3e-2),
    "fp16": (torch.float16, 4e-3),
}


@pytest.mark.parametrize("lengths", [(12,), (5, 1, 6), (4, 4, 4)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), GATED.values(), ids=GATED)
def test_forget_gates(dtype, tolerance, lengths):
    """The forgetting transformer, with the gradients of the gates. Some gates are nearly closed."""
    inputs = make_inputs(12, dtype=dtype)
    gates = torch.nn.functional.logsigmoid(4 * torch.randn(12, 2, dtype=torch.float64)).requires_grad_()
    given = gates.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    o = SoftmaxAttention(4, 8, position="none")(*inputs, cu_seqlens_of(*lengths), given)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    documents = zip(*(x.split(lengths) for x in (*wide, gates)), strict=True)
    right = torch.cat([forgetting(*document) for document in documents])
    assert o.dtype == dtype
    torch.testing.assert_close(o.double(), right, rtol=tolerance, atol=tolerance)
    direction = torch.randn_like(right)
    found = torch.autograd.grad((o.double() * direction).sum(), [*inputs, given])
    wanted = torch.autograd.grad((right * direction).sum(), [*wide, gates])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("closed", [-math.inf, -1e30, -1e6])
@pytest.mark.parametrize(("dtype", "tolerance"), GATED.values(), ids=GATED)
def test_a_closed_gate_hides_the_older_keys(dtype, tolerance, closed):
    """The newer keys keep their weights: a large sum of the gates would leave no digits of q . k."""
    q, k, v = make_inputs(12, dtype=dtype)
    gates = torch.zeros(12, 2, dtype=torch.promote_types(dtype, torch.float32))
    gates[[4, 7]] = closed
    gates.requires_grad_()
    module = SoftmaxAttention(4, 8, position="none")
    o = module(q, k, v, cu_seqlens_of(12), gates)
    right = module(q, k, v, cu_seqlens_of(4, 3, 5))
    torch.testing.assert_close(o, right, rtol=20 * tolerance, atol=20 * tolerance)
    (gradient,) = torch.autograd.grad(o.float().square().sum(), gates)
    assert gradient.isfinite().all() and not gradient[[4, 7]].any()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(300,), (100, 7, 193), (100, 100, 100)], ids=str)
def test_forget_gates_on_a_gpu(lengths):
    """In bf16, against the same module in float64 on the CPU, which test_forget_gates compares with its definition."""
    inputs = make_inputs(300, dim=64, dtype=torch.bfloat16, device="cuda")
    gates = torch.nn.functional.logsigmoid(4 + torch.randn(300, 2, device="cuda")).requires_grad_()
    module, bounds = SoftmaxAttention(4, 64, position="none"), cu_seqlens_of(*lengths)
    o = module(*inputs, bounds, gates)
    direction = torch.randn(o.shape, dtype=torch.float64)
    wide = [x.detach().cpu().double().requires_grad_() for x in (*inputs, gates)]
    right = module(*wide[:3], bounds, wide[3])
    torch.testing.assert_close(o.cpu().double(), right, rtol=0, atol=3e-2)
    found = torch.autograd.grad((o.cpu().double() * direction).sum(), [*inputs, gates])
    wanted = torch.autograd.grad((right * direction).sum(), wide)
    for one, other in zip(found, wanted, strict=True):
        assert (one.cpu().double() - other).norm() < 3e-2 * other.norm()


def test_closed_forget_gates_cut_the_text():
    """Open gates change nothing. No query sees a key from before a closed gate."""
    q, k, v = make_inputs(2, 9)
    gates = torch.zeros(2, 9, 2, dtype=torch.float64)
    plain = SoftmaxAttention(4, 8, position="rope")
    torch.testing.assert_close(plain(q, k, v, None, gates), plain(q, k, v), rtol=0, atol=1e-12)
    gates[:, 4] = -1e4  # no query from row 4 on sees an older key
    parts = [plain(*(x[:, rows] for x in (q, k, v))) for rows in (slice(0, 4), slice(4, 9))]
    torch.testing.assert_close(plain(q, k, v, None, gates), torch.cat(parts, dim=1), rtol=0, atol=1e-9)


def test_bf16_keeps_the_sums_of_many_gates():
    """The sum of 30,000 gates is in the thousands. Its error must not grow with it."""
    length, gate = 30_000, -0.3
    q = torch.zeros(1, length, 1, 16, dtype=torch.bfloat16)
    v = torch.zeros_like(q)
    v[0, -4, 0] = 1.0
    gates = torch.full((1, length, 1), gate)
    o = SoftmaxAttention(1, 16, position="none")(q, q, v, None, gates)[0, -1, 0, 0]
    assert o.item() == pytest.approx(math.exp(3 * gate) * (1 - math.exp(gate)), rel=1e-2)


def test_fp16_keeps_sums_above_its_largest_number():
    """The channels of the keys hold sums / scale, here up to 2e5. The largest number of fp16 is 65,504."""
    q, k, v = make_inputs(1, 96, dim=16, dtype=torch.float16)
    gates = torch.full((1, 96, 2), -400.0)
    gates[:, -8:] = -0.3
    gates.requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, gates)]
    o = SoftmaxAttention(4, 16, position="none")(q, k, v, None, gates)
    right = SoftmaxAttention(4, 16, position="none")(*wide[:3], None, wide[3])
    torch.testing.assert_close(o.double(), right, rtol=0, atol=2e-2)
    direction = torch.randn_like(right)
    found = torch.autograd.grad((o.double() * direction).sum(), [q, k, v, gates])
    wanted = torch.autograd.grad((right * direction).sum(), wide)
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() < 2e-2 * other.norm()


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        (torch.zeros(1, 6, 4), r"log_gates must have the shape \(1, 6, 2\) of k, got \(1, 6, 4\)"),
        (torch.zeros(1, 6, 2, dtype=torch.bfloat16), "log_gates must be torch.float32 .* got torch.bfloat16"),
        (0.5, "log_gates must be a torch.Tensor, got float"),
    ],
)
def test_invalid_gates(gates, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SoftmaxAttention(4, 8)(*make_inputs(1, 6, dtype=torch.float32), None, gates)


def test_stable_mask_has_no_gates():
    """The kernels leave out the shift that gates give to all scores of a row, which StableMask would have to know."""
    module = SoftmaxAttention(4, 8, stable_mask_gamma=0.5)
    gates = torch.full((1, 6, 2), -0.5)
    with pytest.raises(ValueError, match=r"log_gates must be None with stable_mask_gamma, \(0\.5, 0\.5, 0\.5, 0\.5\)"):
        module(*make_inputs(1, 6, dtype=torch.float32), None, gates)
