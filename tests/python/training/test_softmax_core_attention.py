"""The softmax baseline's attention against its definition."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sb.baselines.softmax import RotaryScaling
from megatron_sb.megatron.gates import with_gates
from megatron_sb.training.engine.softmax_attention import SoftmaxCoreAttention, set_rotary_scaling


def softmax_attention(num_heads, num_kv_heads, head_dim=16, layer=1, options=None, **fields):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=num_heads * head_dim,
        num_attention_heads=num_heads,
        num_query_groups=num_kv_heads,
        **{"attention_dropout": 0.0, **fields},
    )
    return SoftmaxCoreAttention(config, layer, None, "self", **{"rotary_base": 100.0, **(options or {})})


GROUPS = SimpleNamespace(cp=SimpleNamespace(size=lambda: 2))  # of two context-parallel ranks


def naive_rotary_softmax(query, key, value, bounds, base, stretch=1.0):
    """By complex numbers and an explicit mask, float64."""
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[2]
    outputs = []
    for start, end in bounds:
        position = torch.arange(end - start, dtype=torch.float64) / stretch
        angle = position[:, None] * base ** (-torch.arange(dim // 2, dtype=torch.float64) * 2 / dim)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        q, k = (torch.complex(*x[start:end].double().chunk(2, dim=-1)) * turn for x in (query, key))
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, value[start:end].double()))
        logits = torch.einsum("qhd,khd->hqk", q, k.conj()).real / dim**0.5
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        weights = logits.masked_fill(future, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs).flatten(1)


def assert_rotary_softmax(attention, num_kv_heads, bounds, device="cpu", dtype=torch.float32, atol=2e-6, **expected):
    """On random q, k, v of 40 rows: `attention`, and the definition with base 100 unless `expected` says otherwise."""
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    inputs = [torch.randn(40, heads, 16, device=device, dtype=dtype) for heads in (4, *[num_kv_heads] * 2)]
    inputs = [x.requires_grad_() for x in inputs]
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    out = attention.to(device)(*inputs, None, packed_seq_params=packed)
    documents = list(itertools.pairwise(bounds))
    definition = [x.detach().cpu().double().requires_grad_() for x in inputs]
    wanted = naive_rotary_softmax(*definition, documents, **{"base": 100.0, **expected})
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=0, atol=atol)
    weights = torch.randn(wanted.shape, dtype=dtype)
    out.backward(weights.to(device))
    wanted.backward(weights.double())
    for x, x_of_definition in zip(inputs, definition, strict=True):
        torch.testing.assert_close(x.grad.cpu().double(), x_of_definition.grad, rtol=0, atol=4 * atol)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("bounds", [[0, 5, 6, 40], [0, 10, 20, 30, 40], [0, 40]])
def test_rotary_softmax_per_document(num_kv_heads, bounds):
    assert_rotary_softmax(softmax_attention(4, num_kv_heads), num_kv_heads, bounds)


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [[0, 40], [0, 10, 20, 30, 40], [0, 5, 6, 40]])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_rotary_softmax_on_a_gpu(bounds, dtype, atol):
    assert_rotary_softmax(softmax_attention(4, 2), 2, bounds, "cuda", dtype, atol)


def test_scaled_positions():
    """One batch after the other: nothing of the last one's angles may stay."""
    attention = softmax_attention(4, 4)
    for _ in range(2):
        set_rotary_scaling(attention, RotaryScaling("linear", 4.0))
        assert_rotary_softmax(attention, 4, [0, 40], stretch=4.0)
        set_rotary_scaling(attention, RotaryScaling("ntk", 4.0))
        assert_rotary_softmax(attention, 4, [0, 7, 40], base=100.0 * 4.0 ** (16 / 14))
        set_rotary_scaling(attention, RotaryScaling())
        assert_rotary_softmax(attention, 4, [0, 7, 40])


def test_every_so_many_layers_one_has_neither_window_nor_positions():
    """Three layers with RoPE and a window of 8, then one over all keys."""
    options = {"window": 8, "global_interval": 4}
    layers = [softmax_attention(4, 4, layer=layer, options=options).attention for layer in range(1, 9)]
    assert [(layer.position, layer.window) for layer in layers] == [*[("rope", 8)] * 3, ("none", None)] * 2
    attention = softmax_attention(4, 4, layer=4, options=options)
    q, k, v = (torch.randn(40, 4, 16) for _ in range(3))
    bounds = torch.tensor([0, 7, 40], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    wanted = naive_rotary_softmax(q, k, v, [(0, 7), (7, 40)], stretch=math.inf, base=1.0)
    torch.testing.assert_close(attention(q, k, v, None, packed_seq_params=packed).double(), wanted, rtol=0, atol=2e-6)


def test_forget_gates_are_the_last_channels_of_the_keys():
    q, k, v = (torch.randn(40, heads, 16) for heads in (4, 2, 2))
    logits, bounds = 3 + torch.randn(40, 2), torch.tensor([0, 7, 40], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    core = softmax_attention(4, 2, options={"forget_gate": True})
    o = core(q, with_gates(k, logits), v, None, packed_seq_params=packed)
    log_gates = torch.nn.functional.logsigmoid(logits)
    torch.testing.assert_close(o, core.attention(q, k, v, bounds, log_gates).flatten(1), rtol=0, atol=1e-6)
    assert not torch.allclose(o, core.attention(q, k, v, bounds).flatten(1), atol=1e-3)


def test_what_it_does_not_do_is_refused():
    with pytest.raises(ValueError, match=r"'a2a\+p2p' .* hierarchical_context_parallel_sizes, got 0"):
        softmax_attention(4, 4, options={"cp_comm_type": "a2a+p2p", "pg_collection": GROUPS}, context_parallel_size=2)
    with pytest.raises(ValueError, match=r"attention_dropout must be 0, got 0\.1"):
        softmax_attention(4, 4, attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"packed_seq_params .* got None"):
        softmax_attention(4, 4)(*(torch.randn(8, 4, 16) for _ in range(3)), None)
    with pytest.raises(ValueError, match=r"kind must be .* got 'dynamic'"):
        RotaryScaling("dynamic")
    with pytest.raises(ValueError, match=r"factor must be .* at least 1, got 0\.5"):
        RotaryScaling("linear", 0.5)
