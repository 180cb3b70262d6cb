"""SoftmaxAttention: outputs and gradients compared with formulas in float64, state between calls, and errors."""

import math
import warnings

import pytest
import torch
from support.fake_gpu import OnFakeGpu, on_fake_gpu
from support.memory import quiet
from support.messages import mentions
from support.softmax import cu_seqlens_of, make_inputs
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.func import functional_call
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megatron_sb.baselines.softmax import RotaryScaling, SoftmaxAttention, kernels, offsets

ALIBI_SLOPES = [2**-2, 2**-4, 2**-6, 2**-8]  # of four heads, as the paper prints them
LINEAR, NTK = RotaryScaling("linear", 4.0), RotaryScaling("ntk", 2.5)
# With 8 channels and the default base, pairs 0 and 1 are kept, 2 is half and 3 is wholly stretched.
YARN = RotaryScaling("yarn", 8.0, trained_context=3000)
# Name: options of the module, and the scaling that is assigned afterwards.
VARIANTS = {
    "none": ({"position": "none"}, None),
    "rope": ({"position": "rope"}, None),
    "rope linear": ({"rotary_base": 100.0}, LINEAR),
    "rope ntk": ({"rotary_base": 100.0}, NTK),
    "rope yarn": ({}, YARN),
    "alibi": ({"position": "alibi", "scale": 0.7}, None),
    "fire": ({"position": "fire", "fire_threshold": 4.7}, None),
    "window": ({"position": "none", "window": 3}, None),
    "window 1": ({"position": "rope", "window": 1}, None),
    "rope window": ({"window": 4}, NTK),
    "alibi window": ({"position": "alibi", "window": 5}, None),
    "fire window": ({"position": "fire", "window": 4, "fire_threshold": 2.3, "fire_c": 0.6}, None),
    "stable": ({"position": "none", "stable_mask_gamma": 0.5}, None),
    "stable 0": ({"position": "none", "stable_mask_gamma": 0}, None),
    "stable rope": ({"stable_mask_gamma": 0.03}, LINEAR),
    "stable alibi": ({"position": "alibi", "stable_mask_gamma": [0.5, 0.0, 0.02, 1.5]}, None),
    "stable fire": ({"position": "fire", "stable_mask_gamma": 0.1, "fire_threshold": 4.7}, None),
    "stable window": ({"position": "none", "stable_mask_gamma": 0.2, "window": 3}, None),
    "stable alibi window": ({"position": "alibi", "stable_mask_gamma": 0.2, "window": 4}, None),
}
variants = pytest.mark.parametrize(("options", "scaling"), VARIANTS.values(), ids=VARIANTS)


def make_module(options, scaling=None, heads=4, dim=8, **others):
    """Make a module with parameters that differ from their initial values."""
    module = SoftmaxAttention(heads, dim, **options, **others)
    if scaling is not None:
        module.scaling = scaling
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand_like(parameter), alpha=0.3)
    return module


def rotated(x, base, scaling):
    """Return x (s, d) as s x d / 2 complex numbers, each rotated by its angle."""
    length, half = len(x), x.shape[1] // 2
    factor = scaling.factor if scaling.kind == "linear" else 1
    if scaling.kind == "ntk":
        base = base * scaling.factor ** (2 * half / (2 * half - 2))
    rates = [base ** (-pair / half) for pair in range(half)]
    if scaling.kind == "yarn":
        rates = yarn_rates(rates, scaling)
        x = x * (1 + math.log(scaling.factor) / 10)
    angles = [[j / factor * rate for rate in rates] for j in range(length)]
    return torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * torch.tensor(angles, dtype=torch.float64))


def yarn_rates(rates, scaling):
    """Return the angles from one position to the next (Peng et al., arXiv 2309.00071, blended as in their code)."""
    turns = [scaling.trained_context * rate / math.tau for rate in rates]
    ratio = math.log(rates[0] / rates[1])  # of the turns of neighbours
    low = math.floor(math.log(turns[0] / 32) / ratio)
    high = math.ceil(math.log(turns[0]) / ratio)
    stretched = [min(max((pair - low) / (high - low), 0), 1) for pair in range(len(rates))]
    assert stretched == [0, 0, 0.5, 1]
    return [rate * (1 - x) + rate / scaling.factor * x for rate, x in zip(rates, stretched, strict=True)]


def fire_bias(weights, length, head, threshold):
    """Return FIRE's bias (s, s) of one head. Row j is query j, and column i is key i. Entries with i > j are unused."""
    c, longest = weights["fire.c"].abs(), (weights["fire.threshold_factor"] * threshold).abs()
    first, first_bias = weights["fire.hidden.weight"][:, 0], weights["fire.hidden.bias"]
    rows = []
    for j in range(length):
        distance = torch.tensor([max(j - i, 0) for i in range(length)], dtype=torch.float64)
        normalizer = torch.log(c * torch.maximum(longest, torch.tensor(float(j), dtype=torch.float64)) + 1)
        hidden = torch.relu(torch.outer(torch.log(c * distance + 1) / (normalizer + 1e-6), first) + first_bias)
        rows.append(hidden @ weights["fire.out.weight"][head] + weights["fire.out.bias"][head])
    return torch.stack(rows)


def expected_head(q, k, v, head, weights, options, scaling):
    """Compute the attention of one head in one document, q, k, v (s, d)."""
    length, position = len(q), options.get("position", "rope")
    if position == "rope":
        base = options.get("rotary_base", 10000.0)
        scores = (rotated(q, base, scaling) @ rotated(k, base, scaling).conj().T).real
    else:
        scores = q @ k.T
    scores = scores * options.get("scale", 1 / math.sqrt(q.shape[1]))
    if position == "alibi":
        scores = scores - ALIBI_SLOPES[head] * torch.tensor([[j - i for i in range(length)] for j in range(length)])
    if position == "fire":
        scores = scores + fire_bias(weights, length, head, options.get("fire_threshold", 512.0))
    gamma = options.get("stable_mask_gamma")
    gamma = gamma[head] if isinstance(gamma, list) else gamma
    window = options.get("window", length)
    hidden = torch.tensor([[i > j or j - i >= window for i in range(length)] for j in range(length)])
    scores = scores.masked_fill(hidden, -math.inf)
    if gamma is not None:  # above the diagonal, column i (counted from 1) has the pseudo score -(i - 1) gamma
        pseudo = [[-i * gamma for i in range(length)]] * length
        above = torch.ones(length, length).triu(1).bool()
        scores = torch.where(above, torch.tensor(pseudo, dtype=torch.float64), scores)
    return scores.softmax(1).masked_fill(hidden, 0) @ v


def expected(q, k, v, weights, options, scaling=None):
    """Compute the attention in one document in float64, q (s, h, d), k and v (s, h_kv, d)."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    heads = [
        expected_head(q[:, h], k[:, h // group], v[:, h // group], h, weights, options, scaling or RotaryScaling())
        for h in range(q.shape[1])
    ]
    return torch.stack(heads, dim=1)


def expected_packed(q, k, v, weights, options, scaling=None, *, lengths):
    documents = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([expected(*document, weights, options, scaling) for document in documents if len(document[0])])


def expected_dense(q, k, v, weights, options, scaling=None):
    return torch.stack([expected(*one, weights, options, scaling) for one in zip(q, k, v, strict=True)])


def doubles(module):
    """Return the parameters of a module in float64. They require gradients."""
    return {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}


def assert_same(module, inputs, oracle, cu_seqlens=None, tolerance=1e-10):
    """Compare outputs, and gradients of a random loss with respect to inputs and parameters, with the oracle's."""
    weights, wide = doubles(module), [x.detach().double().requires_grad_() for x in inputs]
    o, right = module(*inputs, cu_seqlens), oracle(*wide, weights)
    assert (o.shape, o.dtype) == (inputs[0].shape, inputs[0].dtype)
    loss_weight = torch.randn_like(right)
    parameters = [*inputs, *module.parameters()]
    grads = torch.autograd.grad((o.double() * loss_weight).sum(), parameters)
    right_grads = torch.autograd.grad((right * loss_weight).sum(), [*wide, *weights.values()])
    names = ["o", "q", "k", "v", *weights]
    for name, x, y in zip(names, (o, *grads), (right, *right_grads), strict=True):
        assert (x.double() - y).norm() <= tolerance * y.norm().clamp(min=1), name


@variants
class TestAgainstFormulas:
    """Outputs and gradients equal those of the formulas."""

    def test_dense(self, options, scaling):
        module = make_module(options, scaling, dtype=torch.float64)
        assert_same(module, make_inputs(2, 6), lambda *args: expected_dense(*args, options, scaling))

    def test_packed(self, options, scaling):
        """Documents may have any length, also 0 and 1."""
        lengths = [4, 1, 0, 7]
        module = make_module(options, scaling, dtype=torch.float64)
        oracle = lambda *args: expected_packed(*args, options, scaling, lengths=lengths)  # noqa: E731
        assert_same(module, make_inputs(12), oracle, cu_seqlens_of(*lengths))

    def test_in_blocks(self, options, scaling, monkeypatch):
        """Blocks of rows are computed again in the backward."""
        monkeypatch.setattr(kernels, "MAX_WEIGHTS_PER_BLOCK", 100)
        module = make_module(options, scaling, dtype=torch.float64)
        assert_same(module, make_inputs(1, 9), lambda *args: expected_dense(*args, options, scaling))

    def test_gradcheck(self, options, scaling):
        options = options | {"fire_hidden_size": 3}
        if isinstance(options.get("stable_mask_gamma"), list):
            options["stable_mask_gamma"] = options["stable_mask_gamma"][:2]
        module = make_module(options, scaling, heads=2, dim=4, dtype=torch.float64)
        names = [name for name, _ in module.named_parameters()]

        def function(q, k, v, *parameters):
            return functional_call(module, dict(zip(names, parameters, strict=True)), (q, k, v, cu_seqlens_of(2, 3)))

        inputs = make_inputs(5, heads=2, kv_heads=1, dim=4)
        assert torch.autograd.gradcheck(function, (*inputs, *module.parameters()), fast_mode=True)

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str)
    def test_dtypes(self, options, scaling, dtype, tolerance):
        """Parameters are fp32, also with bf16 inputs."""
        module = make_module(options, scaling, dtype=torch.float32)
        oracle = lambda *args: expected_packed(*args, options, scaling, lengths=[4, 6])  # noqa: E731
        assert_same(module, make_inputs(10, dtype=dtype), oracle, cu_seqlens_of(4, 6), tolerance)


def grads_of(o, inputs, module):
    return torch.autograd.grad(o.float().square().sum(), [*inputs, *module.parameters()])


@variants
def test_autocast(options, scaling, monkeypatch):
    """Autocast equals casting q, k and v, bit for bit; gradients keep the dtypes of their tensors; fp64 is not cast."""
    monkeypatch.setattr(kernels, "MAX_WEIGHTS_PER_BLOCK", 200)  # several blocks of rows
    module, inputs = make_module(options, scaling), make_inputs(20, dtype=torch.float32)
    narrow = [x.detach().bfloat16().requires_grad_() for x in inputs]
    for mixed in (inputs, [narrow[0], *inputs[1:]]):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o = module(*mixed, cu_seqlens_of(13, 7))
        right = module(*narrow, cu_seqlens_of(13, 7))
        assert o.dtype == torch.bfloat16
        assert torch.equal(o, right)
        grads, right_grads = grads_of(o, mixed, module), grads_of(right, narrow, module)
        for x, y, owner in zip(grads, right_grads, [*mixed, *module.parameters()], strict=True):
            assert x.dtype == owner.dtype
            assert torch.equal(x, y.to(x.dtype))
    wide = [x.double() for x in inputs]
    right = module(*wide, cu_seqlens_of(13, 7))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(*wide, cu_seqlens_of(13, 7)), right)


@pytest.mark.parametrize("position", ["none", "rope", "alibi", "fire"])
def test_compile(position):
    """torch.compile makes one graph, with and without autocast, and meta tensors work."""
    module, inputs = make_module({"position": position}), make_inputs(1, 6, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            torch.testing.assert_close(compiled(*inputs), module(*inputs), rtol=1e-6, atol=1e-6)
    on_meta = make_module({"position": position}, device="meta")(*(x.detach().to("meta") for x in inputs))
    assert (on_meta.shape, on_meta.device.type) == (inputs[0].shape, "meta")


def flex(*args, **kwargs):
    """flex_attention without torch.compile, without its warning about that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return flex_attention(*args, **kwargs)


WITHOUT_FIRE = {name: variant for name, variant in VARIANTS.items() if variant[0].get("position") != "fire"}


@pytest.mark.parametrize(("options", "scaling"), WITHOUT_FIRE.values(), ids=WITHOUT_FIRE)
def test_flex_attention_without_compiler(options, scaling, monkeypatch):
    """FlexAttention's masks and biases, which GPUs use, equal the plain kernel. It has no gradients on CPUs."""
    module = make_module(options, scaling)
    inputs = [x.detach() for x in make_inputs(2, 15, dtype=torch.float32)]
    packed = [x.flatten(0, 1) for x in inputs]
    right = module(*inputs), module(*packed, cu_seqlens_of(5, 1, 24))
    calls = []
    monkeypatch.setattr(kernels, "_fused_flex", lambda *args, **kwargs: calls.append(1) or flex(*args, **kwargs))
    monkeypatch.setattr(kernels, "has_flex_kernel", lambda q, scores: True)
    o = module(*inputs), module(*packed, cu_seqlens_of(5, 1, 24))
    torch.testing.assert_close(o, right, rtol=1e-5, atol=1e-5)
    plain = options.keys() <= {"position", "rotary_base"} and options.get("position") != "alibi"
    assert len(calls) == (1 if plain else 2)


def test_equal_documents_are_a_batch():
    """Packed documents of one length equal a dense batch."""
    for options, scaling in VARIANTS.values():
        module, inputs = make_module(options, scaling, dtype=torch.float64), make_inputs(3, 6)
        packed = module(*(x.flatten(0, 1) for x in inputs), cu_seqlens_of(6, 6, 6))
        torch.testing.assert_close(packed, module(*inputs).flatten(0, 1), rtol=1e-12, atol=1e-12)


def test_documents_padded_to_one_length(monkeypatch):
    """GPUs pad documents of similar length to one length. This test does the same on a CPU."""
    batches_by_length, sizes = kernels.batches_by_length, []

    def padded(lengths, wanted, device):
        batches, places = batches_by_length(lengths, True, device)
        sizes.append(sorted(rows.shape for rows in batches))
        return batches, places

    monkeypatch.setattr(kernels, "batches_by_length", padded)
    for options, scaling in (VARIANTS["fire"], VARIANTS["alibi window"], VARIANTS["fire window"]):
        module, inputs = make_module(options, scaling, dtype=torch.float64), make_inputs(25)
        assert_same(
            module,
            inputs,
            lambda *args, options=options: expected_packed(*args, options, lengths=(9, 1, 3, 4, 8)),
            cu_seqlens_of(9, 1, 3, 4, 8),
        )
    assert sizes == [[(1, 1), (1, 8), (1, 9), (2, 4)]] * 3


@pytest.mark.parametrize("lengths", [(9, 1, 3, 4, 8), (4, 4, 4), (5, 3)], ids=str)
def test_batches_hold_every_row_once(lengths):
    for padded in (False, True):
        batches, places = offsets.batches_by_length(lengths, padded, torch.device("cpu"))
        assert torch.cat([rows.flatten() for rows in batches])[places].tolist() == list(range(sum(lengths)))
        assert padded or not any((rows == sum(lengths)).any() for rows in batches)


def test_half_precision():
    options = {"position": "alibi", "window": 3, "stable_mask_gamma": 0.2}
    inputs = make_inputs(1, 6, dtype=torch.float16)
    assert_same(make_module(options), inputs, lambda *args: expected_dense(*args, options), tolerance=3e-3)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads(kv_heads):
    options, inputs = {"position": "alibi", "window": 3}, make_inputs(1, 6, kv_heads=kv_heads)
    assert_same(make_module(options), inputs, lambda *args: expected_dense(*args, options))


def test_fire_in_bfloat16_distinguishes_positions():
    module = make_module({"position": "fire"}).bfloat16()
    bias = module.fire(torch.tensor([3000.0]), torch.arange(3001.0))
    assert bias.dtype == torch.float32
    assert bias[0].unique().numel() > 2500
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module.fire(torch.tensor([3000.0]), torch.arange(3001.0)), bias)


def test_stable_mask_share_of_real_keys_grows_to_one():
    """With values of 1 the output is the weight on real keys."""
    q, k, v = (torch.zeros(1, 9, 1, 8), torch.zeros(1, 9, 1, 8), torch.ones(1, 9, 1, 8))
    share = SoftmaxAttention(1, 8, position="none", stable_mask_gamma=0.3)(q, k, v)[0, :, 0, 0]
    assert share[-1] == 1
    assert (share.diff() > 0).all()
    pseudo = sum(math.exp(-0.3 * i) for i in range(1, 9))
    assert share[0].item() == pytest.approx(1 / (1 + pseudo), rel=1e-6)


def test_stable_mask_in_a_long_document():
    """Pseudo scores that underflow in exp change nothing, also in bfloat16."""
    q, k, v = make_inputs(1, 3000, heads=1, kv_heads=1, dtype=torch.bfloat16)
    module = SoftmaxAttention(1, 8, window=4, stable_mask_gamma=2.0)
    o = module(q, k, v)
    o.float().sum().backward()
    for x in (o, q.grad, k.grad, v.grad):
        assert x.isfinite().all()
    module.stable_mask_gamma = None
    torch.testing.assert_close(o[:, 100:], module(q, k, v)[:, 100:])


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
@pytest.mark.parametrize("lengths", [(384,), (500,), (100, 28, 3, 256), (1, 130, 200, 127)], ids=str)
def test_block_mask(lengths, window):
    """The blocks equal those of torch's create_block_mask, which evaluates every pair."""
    mask = offsets.document_block_mask(lengths, window, torch.device("cpu"))
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))

    def visible(_, head, query, key):
        near = key <= query if window is None else (key <= query) & (query - key < window)
        return near & (document[query] == document[key])

    right = create_block_mask(visible, 1, 1, sum(lengths), sum(lengths), device="cpu")
    assert mask.shape == right.shape
    assert torch.equal(mask.to_dense(), right.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(right, name)), name


class TestBetweenCalls:
    """A call uses its own scaling and offsets, although modules cache values for the next call."""

    def test_scaling_is_assigned(self):
        module, inputs = make_module({}), make_inputs(1, 6)
        for scaling in (RotaryScaling(), LINEAR, NTK, RotaryScaling()):
            module.scaling = scaling
            right = expected_dense(*inputs, {}, {}, scaling)
            torch.testing.assert_close(module(*inputs), right, rtol=1e-10, atol=1e-10)

    def test_offsets_are_overwritten(self):
        module, inputs, cu_seqlens = make_module({"position": "none"}), make_inputs(6), cu_seqlens_of(2, 4)
        for lengths in ([2, 4], [3, 3], [5, 1]):
            cu_seqlens.copy_(cu_seqlens_of(*lengths))
            right = expected_packed(*inputs, {}, {"position": "none"}, lengths=lengths)
            torch.testing.assert_close(module(*inputs, cu_seqlens), right, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("through", [torch.Tensor.numpy, lambda x: x.data], ids=["numpy", "data"])
    def test_offsets_are_overwritten_without_a_version_change(self, through):
        """Some writes, for example by collectives, do not change torch's version counter."""
        module, inputs, cu_seqlens = make_module({"position": "none"}), make_inputs(6), cu_seqlens_of(2, 4)
        module(*inputs, cu_seqlens)
        version = cu_seqlens._version
        through(cu_seqlens)[1] = 5
        assert cu_seqlens._version == version
        right = expected_packed(*inputs, {}, {"position": "none"}, lengths=[5, 1])
        torch.testing.assert_close(module(*inputs, cu_seqlens), right, rtol=1e-10, atol=1e-10)

    def test_offsets_on_a_gpu_are_read_once(self):
        """They are read again after a counted write, or if it is another tensor. Inference tensors have no count."""
        last = offsets.LastOffsets()
        first, second = on_fake_gpu(cu_seqlens_of(2, 4)), on_fake_gpu(cu_seqlens_of(5, 1))
        with torch.inference_mode():
            third = on_fake_gpu(cu_seqlens_of(6))
        for cu_seqlens, lengths, num_reads in (
            (first, (2, 4), 1),
            (first, (2, 4), 1),
            (second, (5, 1), 2),
            (third, (6,), 3),
            (third, (6,), 4),
            (first, (2, 4), 5),
        ):
            assert (last.lengths(cu_seqlens, 6), OnFakeGpu.reads) == (lengths, num_reads)
        first[1] = 3
        assert (last.lengths(first, 6), OnFakeGpu.reads) == ((3, 3), 6)

    def test_offsets_of_another_thread(self, monkeypatch):
        """Another thread reads its own offsets while this one compares those that it read before."""
        last, mine, other = offsets.LastOffsets(), cu_seqlens_of(2, 4), cu_seqlens_of(5, 1)
        last.lengths(mine, 6)
        monkeypatch.setattr(offsets.Snapshot, "is_current", lambda self, x: bool(last.lengths(other, 6)))
        assert last.lengths(mine, 6) == (2, 4)

    def test_offsets_on_a_gpu_are_overwritten_without_a_version_change(self):
        """The device compares the values and stops with an error. On this fake GPU, the comparison raises at once."""
        last, cu_seqlens = offsets.LastOffsets(), on_fake_gpu(cu_seqlens_of(2, 4))
        last.lengths(cu_seqlens, 6)
        cu_seqlens.data[1] = 3
        with pytest.raises(RuntimeError, match=mentions("cu_seqlens changed")):
            last.lengths(cu_seqlens, 6)

    @variants
    def test_training_after_inference(self, options, scaling):
        """Inference fills the caches. A training step with the same lengths must still get gradients."""
        module, lengths = make_module(options, scaling), (6, 11)
        with torch.inference_mode():
            module(*make_inputs(17), cu_seqlens_of(*lengths))
        inputs = make_inputs(17)
        module(*inputs, cu_seqlens_of(*lengths)).sum().backward()
        assert all(x.grad.isfinite().all() for x in inputs)

    @variants
    def test_fake_tensors_between_real_ones(self, options, scaling):
        """Calls with fake tensors, as to estimate memory, and real calls with the same lengths share no cache."""
        module, inputs = make_module(options, scaling), make_inputs(1, 19)
        make_gates = (lambda: None) if "stable_mask_gamma" in options else (lambda: torch.zeros(1, 19, 2))
        gates = make_gates()
        for _ in range(2):
            with FakeTensorMode(allow_non_fake_inputs=options.get("position") == "fire"):
                assert is_fake(module(*make_inputs(1, 19), None, make_gates()))
            o = module(*inputs, None, gates)
            assert not is_fake(o) and o.isfinite().all()


def test_repr():
    text = repr(SoftmaxAttention(2, 8, position="alibi", window=3, stable_mask_gamma=0.5))
    assert "num_heads=2, head_dim=8, position='alibi', window=3, stable_mask_gamma=(0.5, 0.5)" in text


INVALID_MODULES = {
    "heads": ((0, 8), {}, "num_heads.* 0"),
    "head_dim a float": ((4, 8.0), {}, r"head_dim.* 8\.0"),
    "window 0": ((4, 8), {"window": 0}, "window.* 0"),
    "window a bool": ((4, 8), {"window": True}, "window.* True"),
    "hidden size": ((4, 8), {"fire_hidden_size": 0}, "fire_hidden_size.* 0"),
    "position": ((4, 8), {"position": "t5"}, "position .*'none', 'rope', 'alibi', 'fire'.* 't5'"),
    "odd head_dim": ((4, 7), {}, "head_dim .*even.* at least 4 .*'rope'.* 7"),
    "head_dim of one pair": ((4, 2), {}, "head_dim .*even.* at least 4 .*'rope'.* 2"),
    "base": ((4, 8), {"rotary_base": 0.0}, r"rotary_base.* 0\.0"),
    "c": ((4, 8), {"fire_c": -1}, "fire_c.* -1"),
    "threshold": ((4, 8), {"fire_threshold": 0}, "fire_threshold.* 0"),
    "gamma": ((4, 8), {"stable_mask_gamma": -0.1}, r"stable_mask_gamma.* -0\.1"),
    "gammas": ((4, 8), {"stable_mask_gamma": [1, 2]}, r"stable_mask_gamma.* 4 .*\[1, 2\]"),
}


INVALID_MODULES |= {
    f"{name} {value}": ((4, 8), {name: value}, f"{name}.* {word}")
    for name in ("scale", "rotary_base", "fire_c", "fire_threshold", "stable_mask_gamma")
    for value, word in (("x", "str"), (torch.ones(4), "Tensor"), (True, "bool"), (math.inf, "inf"), (math.nan, "nan"))
}
INVALID_MODULES |= {f"scale {x}": ((4, 8), {"scale": x}, f"scale .* above 0, got {x}") for x in (0, -0.5)}
INVALID_MODULES["gammas as text"] = ((4, 8), {"stable_mask_gamma": ["a"] * 4}, "stable_mask_gamma.* str")


@pytest.mark.parametrize(("sizes", "options", "message"), INVALID_MODULES.values(), ids=INVALID_MODULES)
def test_invalid_module_arguments(sizes, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SoftmaxAttention(*sizes, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dynamic", 2.0), "kind .*'none', 'linear', 'ntk', 'yarn'.* 'dynamic'"),
        (("yarn", 2.0), "trained_context must be an int of at least 1, got None"),
        (("ntk", 0.5), r"factor.* 0\.5"),
        (("ntk", "2"), "factor.* str"),
    ],
)
def test_invalid_scaling(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        RotaryScaling(*arguments)


def test_scaling_of_another_type():
    """It is an error where it is assigned, not in the next call."""
    module = SoftmaxAttention(4, 8)
    with pytest.raises(TypeError, match=r"scaling must be a RotaryScaling, got float"):
        module.scaling = 2.0
    assert module.scaling == RotaryScaling()


Q, KV = torch.zeros(1, 6, 4, 8), torch.zeros(1, 6, 2, 8)
INVALID_CALLS = {
    "q is a list": (([1.0], KV, KV), TypeError, "q .*list"),
    "offsets are a list": ((Q[0], KV[0], KV[0], [0, 6]), TypeError, "cu_seqlens.* list"),
    "packed without offsets": (
        (Q[0], KV[0], KV[0]),
        ValueError,
        r"q must .*\(b, s, h, d\) without cu_seqlens.* h = 4, d = 8 .*\(6, 4, 8\)",
    ),
    "dense with offsets": (
        (Q, KV, KV, cu_seqlens_of(6)),
        ValueError,
        r"q must .*\(t, h, d\) with cu_seqlens.* h = 4, d = 8 .*\(1, 6, 4, 8\)",
    ),
    "heads of q": ((KV, KV, KV), ValueError, r"q must .*\(b, s, h, d\).* \(1, 6, 2, 8\)"),
    "no token": ((Q[:, :0], KV[:, :0], KV[:, :0]), ValueError, r"q must .*\(b, s, h, d\).* \(1, 0, 4, 8\)"),
    "rows of k": (
        (Q, KV[:, :5], KV),
        ValueError,
        r"k must .*q's shape \(1, 6, 4, 8\).* \(1, 5, 2, 8\)",
    ),
    "heads of k": ((Q, Q[:, :, :3], Q[:, :, :3]), ValueError, "k must .*heads .*divides 4, got 3"),
    "no heads of k": ((Q, KV[:, :, :0], KV), ValueError, "k must .*heads .*divides 4, got 0"),
    "v": ((Q, KV, Q), ValueError, r"v must .*k's shape \(1, 6, 2, 8\).* \(1, 6, 4, 8\)"),
    "dtype of q": (
        (Q.int(), KV, KV),
        TypeError,
        "q must .*torch.float32, torch.float64, torch.bfloat16, torch.float16.* torch.int32",
    ),
    "dtype of v": (
        (Q, KV, KV.double()),
        TypeError,
        "v must .*torch.float32 on cpu.* torch.float64 on cpu",
    ),
    "offsets in int64": (
        (Q[0], KV[0], KV[0], cu_seqlens_of(6).long()),
        ValueError,
        r"cu_seqlens must .*torch.int32 of shape \(documents \+ 1,\).* torch.int64 of shape \(2,\)",
    ),
    "one offset": (
        (Q[0], KV[0], KV[0], cu_seqlens_of()),
        ValueError,
        r"cu_seqlens must .*torch.int32 of shape \(documents \+ 1,\).* torch.int32 of shape \(1,\)",
    ),
    "offsets that end early": (
        (Q[0], KV[0], KV[0], cu_seqlens_of(2, 3)),
        ValueError,
        r"cu_seqlens must .*0 to 6.* \[0, 2, 5\]",
    ),
    "offsets that start late": (
        (Q[0], KV[0], KV[0], cu_seqlens_of(6)[1:].repeat(2)),
        ValueError,
        r"cu_seqlens must .* \[6, 6\]",
    ),
    "offsets that fall": (
        (Q[0], KV[0], KV[0], cu_seqlens_of(4, -1, 3)),
        ValueError,
        r"cu_seqlens must .* \[0, 4, 3, 6\]",
    ),
}


@pytest.mark.parametrize(("args", "kind", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_invalid_calls(args, kind, message):
    with pytest.raises(kind, match=message):
        make_module({})(*args)


@quiet
@pytest.mark.gpu
@variants
def test_on_a_gpu(options, scaling):
    """Outputs and all gradients equal those of float64 on the CPU."""
    module = make_module(options, scaling, dim=32, dtype=torch.float64)
    on_gpu = make_module(options, scaling, dim=32, dtype=torch.float64, device="cuda")
    on_gpu.load_state_dict(module.state_dict())
    packed, dense = ((300,), cu_seqlens_of(100, 3, 197)), ((2, 300), None)
    cases = [(torch.float64, 1e-10, packed), (torch.float32, 1e-3, packed), (torch.bfloat16, 0.03, dense)]
    for dtype, tolerance, (rows, cu_seqlens) in cases:
        inputs = [x.detach().to(dtype) for x in make_inputs(*rows, dim=32)]
        wide, narrow = [x.double().requires_grad_() for x in inputs], [x.cuda().requires_grad_() for x in inputs]
        right = module(*wide, cu_seqlens)
        with torch._dynamo.config.patch(recompile_limit=64):  # the variants of this test exceed the default
            o = on_gpu(*narrow, cu_seqlens if cu_seqlens is None else cu_seqlens.cuda())
        assert (o.shape, o.dtype, o.device.type) == (right.shape, dtype, "cuda")
        loss_weight = torch.randn_like(right)
        grads = torch.autograd.grad((o.double() * loss_weight.cuda()).sum(), [*narrow, *on_gpu.parameters()])
        right_grads = torch.autograd.grad((right * loss_weight).sum(), [*wide, *module.parameters()])
        for x, y in zip((o, *grads), (right, *right_grads), strict=True):
            assert (x.cpu().double() - y).norm() <= tolerance * y.norm().clamp(min=1), dtype
