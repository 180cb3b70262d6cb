"""The engine: the same training on any layout, and the softmax baseline's attention against its definition."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sb.megatron.softmax_rope import SoftmaxRotaryAttention

WORKER = Path(__file__).parents[1] / "workers" / "training_layouts.py"


def test_layouts_and_micro_batches_give_the_same_training(tmp_path):
    """Two ranks as two data-parallel groups, as one context-parallel group, and in micro-batches; padding uneven."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", WORKER]
    done = subprocess.run(
        [*map(str, command), str(tmp_path / "out.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    runs = json.loads((tmp_path / "out.json").read_text())
    expected = runs.pop("data parallel")
    assert len(runs) == 3
    assert expected["losses"][-1] < expected["losses"][0] - 0.3
    assert len(set(expected["counted"])) > 1, "ranks must count different numbers of tokens for this to say anything"
    for name, run in runs.items():
        assert run["losses"] == pytest.approx(expected["losses"], abs=2e-5), name
        assert run["norms"] == pytest.approx(expected["norms"], rel=1e-4), name
        assert run["windows"] == pytest.approx(expected["windows"], rel=1e-5), name


def softmax_attention(num_heads, num_kv_heads, head_dim=16, **fields):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=num_heads * head_dim,
        num_attention_heads=num_heads,
        num_query_groups=num_kv_heads,
        **{"attention_dropout": 0.0, **fields},
    )
    return SoftmaxRotaryAttention(config, 1, None, "self", rotary_base=100.0)


def naive_rotary_softmax(query, key, value, bounds, base):
    """By complex numbers and an explicit mask, float64."""
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[2]
    outputs = []
    for start, end in bounds:
        position = torch.arange(end - start, dtype=torch.float64)
        angle = position[:, None] * base ** (-torch.arange(dim // 2, dtype=torch.float64) * 2 / dim)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        q, k = (torch.complex(*x[start:end].double().chunk(2, dim=-1)) * turn for x in (query, key))
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, value[start:end].double()))
        logits = torch.einsum("qhd,khd->hqk", q, k.conj()).real / dim**0.5
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        weights = logits.masked_fill(future, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs).flatten(1)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_softmax_baseline_is_rotary_softmax_attention_per_document(num_kv_heads):
    cu_seqlens = torch.tensor([0, 5, 6, 40], dtype=torch.int32)
    query = torch.randn(40, 4, 16)
    key, value = (torch.randn(40, num_kv_heads, 16) for _ in range(2))
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    out = softmax_attention(4, num_kv_heads)(query, key, value, None, packed_seq_params=packed)
    expected = naive_rotary_softmax(query, key, value, [(0, 5), (5, 6), (6, 40)], 100.0)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)


def test_softmax_baseline_refuses_what_it_does_not_do():
    with pytest.raises(ValueError, match="context_parallel_size = 2"):
        softmax_attention(4, 4, context_parallel_size=2)
    with pytest.raises(ValueError, match=r"attention_dropout = 0\.1"):
        softmax_attention(4, 4, attention_dropout=0.1)
    with pytest.raises(ValueError, match="packed_seq_params = None"):
        softmax_attention(4, 4)(*(torch.randn(8, 4, 16) for _ in range(3)), None)
