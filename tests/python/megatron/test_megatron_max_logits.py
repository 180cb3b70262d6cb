"""The largest logit of each head, which Megatron's --qk-clip and --log-max-attention-logit read."""

import pytest
import torch
from support.megatron_cpu import core_attention_arguments, packed_params, small_config
from support.messages import mentions

from megatron_sb.megatron import StickBreakingCoreAttention, StickBreakingOptions, max_logits
from megatron_sb.megatron.gates import with_gates

HEADS, KV_HEADS, CHANNELS = 4, 2, 8


def make_core(*, settings: dict | None = None, **options) -> StickBreakingCoreAttention:
    config = small_config(**{"qk_clip": True, **(settings or {})})
    return StickBreakingCoreAttention(**core_attention_arguments(config), options=StickBreakingOptions(**options))


def make_qkv(*rows: int) -> list[torch.Tensor]:
    return [torch.randn(*rows, heads, CHANNELS) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def brute_force(q, k, documents, attend_current: bool) -> torch.Tensor:
    """The largest logit of each head. q, k: (b, s, heads, d); documents: pairs of offsets."""
    logits = torch.einsum("bihd,bjhd->hbij", q, k.repeat_interleave(HEADS // KV_HEADS, 2)) / CHANNELS**0.5
    visible = torch.zeros(logits.shape[-2:], dtype=torch.bool)
    for first, end in documents:
        visible[first:end, first:end] = True
    visible = visible.tril(0 if attend_current else -1)
    return logits.masked_fill(~visible, 0.0).amax((1, 2, 3))


@pytest.mark.parametrize("max_logits_of_a_block", [1, 1000, 2**27])
@pytest.mark.parametrize("attend_current", [False, True])
def test_sequences(attend_current, max_logits_of_a_block, monkeypatch):
    monkeypatch.setattr(max_logits, "MAX_LOGITS", max_logits_of_a_block)
    q, k, v = make_qkv(37, 3)
    core = make_core(attend_current=attend_current)
    core(q, k, v, None)
    expected = brute_force(q.transpose(0, 1), k.transpose(0, 1), [(0, 37)], attend_current)
    torch.testing.assert_close(core.current_max_attn_logits, expected)


@pytest.mark.parametrize("max_logits_of_a_block", [1, 1000, 2**27])
def test_documents(max_logits_of_a_block, monkeypatch):
    """Pairs of two documents do not count, and neither do rows after the last document."""
    monkeypatch.setattr(max_logits, "MAX_LOGITS", max_logits_of_a_block)
    q, k, v = make_qkv(40)
    core = make_core()
    core(q, k, v, None, packed_seq_params=packed_params(0, 5, 5, 19, 32))
    expected = brute_force(q[None], k[None], [(0, 5), (5, 19), (19, 32)], False)
    torch.testing.assert_close(core.current_max_attn_logits, expected)


def test_a_negative_scale():
    q, k, _ = (x[None] for x in make_qkv(20))
    expected = brute_force(-q, k, [(0, 20)], False)
    torch.testing.assert_close(max_logits.largest_logits(q, k, scale=-(CHANNELS**-0.5)), expected)


def test_gates_and_reach_are_left_out():
    q, k, v = make_qkv(20, 1)
    plain, core = make_core(), make_core(forget_gate=True, reach=(0.5, 6.0))
    plain(q, k, v, None)
    core(q, with_gates(k, torch.randn(20, 1, KV_HEADS)), v, None)
    assert torch.equal(plain.current_max_attn_logits, core.current_max_attn_logits)


def test_micro_batches_until_megatron_resets_it():
    core = make_core()
    batches = [make_qkv(20, 1) for _ in range(2)]
    each = []
    for batch in batches:
        core(*batch, None)
        each.append(core.current_max_attn_logits)
        core.current_max_attn_logits = None
    for batch in batches:
        core(*batch, None)
    assert torch.equal(core.current_max_attn_logits, torch.maximum(*each))
    core.eval()
    core(*(3 * x for x in batches[0]), None)
    assert torch.equal(core.current_max_attn_logits, torch.maximum(*each)), "evaluation does not count"


def test_negative_logits_give_zero():
    """Megatron divides by the value, and would change the signs of weights."""
    q, k, v = make_qkv(20, 1)
    core = make_core()
    core(q.abs(), -k.abs(), v, None)
    assert torch.equal(core.current_max_attn_logits, torch.zeros(HEADS))


def test_nothing_is_computed_without_the_settings():
    core = make_core(settings={"qk_clip": False})
    core(*make_qkv(20, 1), None)
    assert core.current_max_attn_logits is None
    core = make_core(settings={"qk_clip": False, "log_max_attention_logit": True})
    core(*make_qkv(20, 1), None)
    assert core.current_max_attn_logits.shape == (HEADS,)


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({}, {"logits": "euclidean"}, "config.qk_clip True --qk-clip --sb-logits 'euclidean'"),
        ({"cuda_graph_impl": "local"}, {}, "config.cuda_graph_impl 'local' --cuda-graph-impl 'none' --qk-clip"),
    ],
)
def test_unsupported_settings(settings, options, words):
    with pytest.raises(ValueError, match=mentions(words)):
        make_core(settings=settings, **options)


@pytest.mark.parametrize(("rows", "batch"), [(0, 2), (5, 0)])
def test_calls_without_rows(rows, batch):
    core = make_core()
    core(*make_qkv(rows, batch), None)
    assert core.current_max_attn_logits.tolist() == [0.0] * HEADS
