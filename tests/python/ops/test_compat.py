"""The drop-in functions have the signatures, layouts, dtypes and results of the published packages."""

import inspect

import pytest
import torch
from support.accuracy import assert_errors, floors, plain_attention, run
from support.inputs import Inputs, make_inputs
from support.messages import mentions
from support.rounded import rounds_weights

from megatron_sb import reference
from megatron_sb.compat import parallel_stickbreaking_attn, sb_attn, sb_attn_varlen

pytestmark = pytest.mark.usefixtures("device")

HEAD_DIMS = [50, 64, 16, 1, 255]


def bhsd(x):
    """Return the inputs in the layout (b, h, s, d) of the package."""
    return Inputs(*(t.transpose(1, 2).contiguous() for t in (x.q, x.k, x.v, x.do)), x.dmass)


def in_layout_bhsd(attention):
    """Return a function of (b, h, s, d) tensors that calls an attention of (b, s, h, d) tensors."""

    def moved(q, k, v, **options):
        o, mass = attention(*(t.transpose(1, 2) for t in (q, k, v)), **options)
        return o.transpose(1, 2), mass

    return moved


def assert_accurate(actual, x, **options):
    """Compare results in the layout (b, h, s, d) with the oracle."""
    plain = run(in_layout_bhsd(plain_attention), x, **options)
    exact = Inputs(*(t.double() for t in vars(x).values()))
    oracle = run(in_layout_bhsd(reference.stickbreaking_attention), exact, return_mass=True, **options)
    assert_errors(actual, plain, oracle, floors(x.q.dtype, x.k.shape[2]))


@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_sb_attn(head_dim, attend_current):
    """head_dim need not be a multiple of 8. The default scale uses the head_dim before padding."""
    x = bhsd(make_inputs(b=2, s=70, h=3, d=head_dim))
    assert_accurate(run(sb_attn, x, attend_current=attend_current), x, attend_current=attend_current)


@pytest.mark.parametrize("function", [sb_attn, sb_attn_varlen, parallel_stickbreaking_attn])
def test_both_results_have_the_dtype_of_autocast(function):
    q, k, v = (torch.randn(20, 3, 16) if function is sb_attn_varlen else torch.randn(1, 20, 3, 16) for _ in range(3))
    packing = (torch.tensor([0, 3], dtype=torch.int32), 3) if function is sb_attn_varlen else ()
    with torch.autocast(q.device.type, dtype=torch.bfloat16):
        assert [x.dtype for x in function(q, k, v, *packing)] == [torch.bfloat16, torch.bfloat16]


def test_sb_attn_in_bf16():
    """out and rem have the dtype of q. out has the strides of q, because users call view() on it."""
    x = bhsd(make_inputs(b=2, s=70, h=3, d=50, dtype=torch.bfloat16))
    out, rem = sb_attn(x.q, x.k, x.v)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 3, 70, 50), torch.bfloat16, True)
    assert (rem.shape, rem.dtype) == ((2, 3, 70), torch.bfloat16)
    transposed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x.q, x.k, x.v)]
    out_transposed, _ = sb_attn(*transposed)
    assert out_transposed.transpose(1, 2).reshape(2, 70, 150).shape == (2, 70, 150)
    assert torch.equal(out_transposed, out)


@pytest.mark.parametrize("zero_start", [True, False])
def test_sb_attn_inv_temp_and_zero_start(zero_start):
    """inv_temp is the scale. zero_start has no effect on dense inputs."""
    x = bhsd(make_inputs(s=20, h=2, d=50))
    out, rem = sb_attn(x.q, x.k, x.v, 0.3, zero_start)
    o, mass = in_layout_bhsd(reference.stickbreaking_attention)(x.q, x.k, x.v, scale=0.3, return_mass=True)
    torch.testing.assert_close(out.double(), o, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rem.double(), mass, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
@pytest.mark.parametrize("zero_start", [True, False])
def test_sb_attn_varlen(zero_start, offsets):
    """With zero_start, cu_seqlens begins with 0. Without it, cu_seqlens holds only the ends of the documents."""
    x = make_inputs(s=60, h=3, d=50).packed()
    q, k, v = (t.transpose(0, 1) for t in (x.q, x.k, x.v))
    cu_seqlens = torch.tensor([0, 20, 21, 60], dtype=offsets)
    given = cu_seqlens if zero_start else cu_seqlens[1:]
    out, rem = sb_attn_varlen(q, k, v, given, 39, inv_temp=0.3, zero_start=zero_start)
    o, mass = reference.stickbreaking_attention_varlen(x.q, x.k, x.v, cu_seqlens, scale=0.3, return_mass=True)
    torch.testing.assert_close(out.double(), o.transpose(0, 1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rem.double(), mass, rtol=1e-5, atol=1e-6)
    assert (out.shape, rem.shape) == ((3, 60, 50), (3, 60))


@pytest.mark.parametrize("attend_current", [False, True])
def test_parallel_stickbreaking_attn(attend_current):
    """Inputs and output are (b, t, h, d), and rem is (b, t, h). Grouped heads and d_v != d are supported."""
    x = make_inputs(b=2, s=70, h=4, h_kv=2, d=50, d_v=30)
    o, rem = parallel_stickbreaking_attn(x.q, x.k, x.v, attend_current=attend_current)
    expected, mass = reference.stickbreaking_attention(x.q, x.k, x.v, attend_current=attend_current, return_mass=True)
    torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rem.double(), mass.transpose(1, 2), rtol=1e-5, atol=1e-6)
    assert (o.shape, rem.shape) == ((2, 70, 4, 30), (2, 70, 4))
    assert o.is_contiguous() and rem.is_contiguous(), "as those of the package, on which callers use view()"


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
def test_parallel_stickbreaking_attn_varlen(offsets):
    """cu_seqlens gives the documents of a batch of one."""
    x = make_inputs(s=60, h=4, h_kv=2, d=16, dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 20, 20, 60], dtype=offsets)
    o, rem = parallel_stickbreaking_attn(x.q, x.k, x.v, 0.3, cu_seqlens=cu_seqlens)
    packed = x.packed()
    expected, mass = reference.stickbreaking_attention_varlen(
        packed.q, packed.k, packed.v, cu_seqlens, scale=0.3, return_mass=True
    )
    assert (o.dtype, rem.dtype) == (torch.bfloat16, torch.bfloat16)
    rounding = 2**-6 if rounds_weights(x.q) else 2**-16  # of the weights
    torch.testing.assert_close(o[0].double(), expected, rtol=2**-8, atol=rounding)
    torch.testing.assert_close(rem[0].double(), mass.T, rtol=2**-8, atol=2**-24)


@pytest.mark.parametrize("attend_current", [False, True])
def test_packed_documents_may_attend_to_the_current_key(attend_current):
    """In both packed functions, with the default scale of a head_dim that is padded."""
    x = make_inputs(s=60, h=4, h_kv=2, d=50)
    cu_seqlens, packed = torch.tensor([0, 20, 60], dtype=torch.int32), x.packed()
    expected, mass = reference.stickbreaking_attention_varlen(
        packed.q, packed.k, packed.v, cu_seqlens, attend_current=attend_current, return_mass=True
    )
    heads_first = (t.transpose(0, 1) for t in (packed.q, packed.k, packed.v))
    out, rem = sb_attn_varlen(*heads_first, cu_seqlens, 40, attend_current=attend_current)
    torch.testing.assert_close(out.transpose(0, 1).double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rem.double(), mass, rtol=1e-5, atol=1e-6)
    o, rem = parallel_stickbreaking_attn(x.q, x.k, x.v, attend_current=attend_current, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(o[0].double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rem[0].double(), mass.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [sb_attn_varlen, parallel_stickbreaking_attn])
def test_offsets_beyond_int32_are_an_error(device, function):
    """A cast to int32 would turn 2^32 + 20 into 20."""
    if device == "cuda":
        pytest.skip("the host does not read offsets on a GPU; kernels clamp them")
    q, k, v = (torch.randn(20, 20, 16) if function is sb_attn_varlen else torch.randn(1, 20, 2, 16) for _ in range(3))
    cu_seqlens = torch.tensor([0, 2**32 + 20])
    packing = {"max_seqlens": 2**31} if function is sb_attn_varlen else {}
    with pytest.raises(ValueError, match=mentions("cu_seqlens 2147483647 20")):
        function(q, k, v, cu_seqlens=cu_seqlens, **packing)


def test_gradients_of_padded_head_dims():
    """Gradients have the shapes of the tensors before padding, and the values of the oracle."""
    x = bhsd(make_inputs("mean -3.2", s=70, h=2, d=50, d_v=30))
    assert_accurate(run(sb_attn, x), x)


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (sb_attn, "(q, k, v, inv_temp=None, zero_start=True, attend_current=False)"),
        (sb_attn_varlen, "(q, k, v, cu_seqlens, max_seqlens, inv_temp=None, zero_start=True, attend_current=False)"),
        (parallel_stickbreaking_attn, "(q, k, v, scale=None, attend_current=False, cu_seqlens=None)"),
    ],
)
def test_signatures_are_those_of_the_published_packages(function, signature):
    """Names, order and defaults of the parameters are equal, so all calls by position and by name keep working."""
    parameters = inspect.signature(function).parameters.values()
    published = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert str(inspect.Signature(published)) == signature
