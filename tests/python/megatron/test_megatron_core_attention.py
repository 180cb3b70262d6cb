"""StickBreakingCoreAttention on one rank: outputs, strided inputs, parameters, errors and the cache of plans."""

import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig
from support.megatron_cpu import core_attention_arguments, packed_params, small_config
from support.messages import mentions

from megatron_sb import reference
from megatron_sb.megatron import StickBreakingCoreAttention, StickBreakingOptions, core_attention, plans

HEADS, KV_HEADS, CHANNELS = 4, 2, 8
DEFAULTS = {
    "attend_current": False,
    "mass_threshold": 2**-24,
    "return_mass": False,
    "logits": "dot",
    "forget_gate": None,
    "reach": None,
}


def make_core(config=None, **changes) -> StickBreakingCoreAttention:
    return StickBreakingCoreAttention(**core_attention_arguments(config or small_config(), **changes))


def make_qkv(*rows: int) -> list[torch.Tensor]:
    """Make q (*rows, h, d) and k, v (*rows, g, d) as Megatron does: k and v are views of the fused projection."""
    group_channels = (HEADS // KV_HEADS + 2) * CHANNELS
    fused = 2 * torch.randn(*rows, KV_HEADS, group_channels)
    q, k, v = fused.split([HEADS // KV_HEADS * CHANNELS, CHANNELS, CHANNELS], dim=-1)
    return [q.reshape(*rows, HEADS, CHANNELS), k, v]


def expected(q, k, v, **options) -> torch.Tensor:
    """The reference output for sbhd tensors, in Megatron's output shape."""
    out = reference.stickbreaking_attention(*(x.transpose(0, 1) for x in (q, k, v)), **options)
    return out.transpose(0, 1).flatten(2)


def assert_close(out: torch.Tensor, oracle: torch.Tensor) -> None:
    assert out.shape == oracle.shape
    torch.testing.assert_close(out.double(), oracle.double(), rtol=0, atol=1e-5)


def test_sbhd_equals_the_reference():
    q, k, v = make_qkv(33, 3)
    out = make_core()(q, k, v, None, attn_mask_type=AttnMaskType.causal, attention_bias=None, packed_seq_params=None)
    assert_close(out, expected(q, k, v))


def test_thd_equals_the_reference():
    q, k, v = make_qkv(30)
    params = packed_params(0, 7, 7, 28)
    out = make_core()(q, k, v, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=params)
    assert_close(out, reference.stickbreaking_attention_varlen(q, k, v, params.cu_seqlens_q).flatten(1))
    assert out.reshape(30, 1, -1).shape == (30, 1, HEADS * CHANNELS)
    assert not out[28:].any(), "rows after the last document must be 0"


def test_padded_offsets_bound_the_documents():
    q, k, v = make_qkv(12)
    bounds = torch.tensor([0, 8, 12], dtype=torch.int32)
    params = packed_params(0, 5, 8, cu_seqlens_q_padded=bounds, cu_seqlens_kv_padded=bounds)
    out = make_core()(q, k, v, None, packed_seq_params=params)
    for first, last in ((0, 5), (8, 11)):
        alone = expected(*(x[first:last, None] for x in (q, k, v)))
        assert_close(out[first:last], alone[:, 0])


def test_backward_reaches_the_fused_projection():
    grads = []
    for attend in (lambda *qkv: make_core()(*qkv, None), expected):
        torch.manual_seed(1)
        fused = torch.randn(9, 2, KV_HEADS, 4 * CHANNELS, requires_grad=True)
        q, k, v = fused.split([2 * CHANNELS, CHANNELS, CHANNELS], dim=-1)
        attend(q.reshape(9, 2, HEADS, CHANNELS), k, v).square().sum().backward()
        grads.append(fused.grad)
    assert_close(*grads)


@pytest.mark.parametrize("rows", [(16, 2), (16,)], ids=["sbhd", "thd"])
def test_key_and_value_are_read_in_place(rows, monkeypatch):
    seen = []
    name = "stickbreaking_attention" if len(rows) == 2 else "stickbreaking_attention_varlen"
    operator = getattr(core_attention, name)

    def watched_operator(q, k, v, *args, **kwargs):
        seen.extend((k, v))
        return operator(q, k, v, *args, **kwargs)

    monkeypatch.setattr(core_attention, name, watched_operator)
    q, k, v = make_qkv(*rows)
    make_core()(q, k, v, None, packed_seq_params=packed_params(0, 16) if len(rows) == 1 else None)
    assert [x.data_ptr() for x in seen] == [k.data_ptr(), v.data_ptr()]
    assert not any(x.is_contiguous() for x in seen)


@pytest.mark.parametrize("logits", ["dot", "euclidean"])
def test_decoding_steps_equal_the_whole_sequence(logits):
    """Static inference: queries are the newest positions of the cache. Megatron runs single steps without a mask."""
    q, k, v = make_qkv(12, 2)
    core = make_core(options=StickBreakingOptions(logits=logits))
    whole = core(q, k, v, None)
    steps = [core(q[:9], k[:9], v[:9], None)]
    for n in range(10, 13):
        steps.append(core(q[n - 1 : n], k[:n], v[:n], None, attn_mask_type=AttnMaskType.no_mask))
    torch.testing.assert_close(torch.cat(steps), whole, rtol=0, atol=1e-6)


def test_scale_and_options_reach_the_operator(monkeypatch):
    q, k, v = make_qkv(20, 1)
    options = StickBreakingOptions(attend_current=True, mass_threshold=0.0)
    core = make_core(small_config(softmax_scale=0.7), options=options)
    assert_close(core(q, k, v, None), expected(q, k, v, scale=0.7, attend_current=True))

    seen = {}
    monkeypatch.setattr(core_attention, "stickbreaking_attention", lambda q, *rest, **kwargs: seen.update(kwargs) or q)
    core(q, k, v, None)
    assert seen == {**DEFAULTS, "scale": 0.7, "attend_current": True, "mass_threshold": 0.0}
    make_core()(q, k, v, None)
    assert seen == {"scale": pytest.approx(CHANNELS**-0.5), **DEFAULTS}


def test_groups_of_older_releases():
    arguments = core_attention_arguments(small_config())
    groups = arguments.pop("pg_collection")
    assert StickBreakingCoreAttention(**arguments, model_comm_pgs=groups).cp_group is None
    assert StickBreakingCoreAttention(**arguments).cp_group is None  # of parallel_state, which is not initialised


HEAD_VECTORS = {
    "remainder bias": {"remainder_bias": ("remainder_bias",)},
    "head norm": {"head_norm": ("norm_weight", "norm_bias")},
    "both": {"remainder_bias": ("remainder_bias",), "head_norm": ("norm_weight", "norm_bias")},
}
head_vectors = pytest.mark.parametrize("wanted", HEAD_VECTORS.values(), ids=HEAD_VECTORS)


class TestHeadVectors:
    """Remainder bias and head norm: outputs and parameters."""

    @staticmethod
    def make(wanted, config=None, **changes):
        return make_core(config, options=StickBreakingOptions(**dict.fromkeys(wanted, True)), **changes)

    @staticmethod
    def with_head_vectors(o, mass, core):
        """Apply the formula in float64; o: (..., rows, h, d), mass: (..., h, rows)."""
        heads = (HEADS, CHANNELS)
        if core.remainder_bias is not None:
            o = o + mass.transpose(-1, -2)[..., None] * core.remainder_bias.detach().double().view(heads)
        if core.norm_weight is not None:
            variance = o.var(-1, correction=0, keepdim=True)
            o = (o - o.mean(-1, keepdim=True)) / (variance + core.config.layernorm_epsilon).sqrt()
            o = o * core.norm_weight.detach().double().view(heads) + core.norm_bias.detach().double().view(heads)
        return o

    @head_vectors
    @pytest.mark.parametrize("packed", [False, True], ids=["sbhd", "thd"])
    def test_answers(self, wanted, packed):
        core = self.make(wanted, small_config(layernorm_epsilon=1e-2))
        with torch.no_grad():
            for parameter in core.parameters():
                parameter.add_(torch.randn_like(parameter))
        q, k, v = make_qkv(*((30,) if packed else (33, 3)))
        params = packed_params(0, 7, 7, 28) if packed else None
        out = core(q, k, v, None, packed_seq_params=params)
        if packed:
            o, mass = reference.stickbreaking_attention_varlen(q, k, v, params.cu_seqlens_q, return_mass=True)
            assert_close(out, self.with_head_vectors(o, mass, core).flatten(1))
        else:
            o, mass = reference.stickbreaking_attention(*(x.transpose(0, 1) for x in (q, k, v)), return_mass=True)
            assert_close(out, self.with_head_vectors(o, mass, core).transpose(0, 1).flatten(2))
        out.square().sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in core.parameters())

    @head_vectors
    def test_parameters(self, wanted):
        """Parameters have one dimension, the config's dtype, and the attributes of a tensor-parallel shard."""
        core = self.make(wanted, small_config(params_dtype=torch.bfloat16))
        start = {"remainder_bias": 0.0, "norm_weight": 1.0, "norm_bias": 0.0}
        names = [name for group in wanted.values() for name in group]
        assert [name for name, _ in core.named_parameters()] == names
        for name, parameter in core.named_parameters():
            assert torch.equal(parameter, torch.full((HEADS * CHANNELS,), start[name], dtype=torch.bfloat16))
            assert (parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride) == (
                True,
                0,
                1,
            )
            assert not getattr(parameter, "sequence_parallel", False)

    def test_local_heads(self):
        """Each of two tensor-parallel ranks has half of the heads, whose width is config.kv_channels."""
        groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2), cp=None)
        core = self.make(("remainder_bias",), small_config(kv_channels=24), pg_collection=groups)
        assert core.remainder_bias.shape == (HEADS // 2 * 24,)

    def test_device(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
        assert self.make(("head_norm",), small_config(use_cpu_initialization=False)).norm_weight.is_meta
        assert self.make(("head_norm",)).norm_weight.device.type == "cpu"

    def test_mass_is_computed_only_for_the_remainder_bias(self, monkeypatch):
        seen = {}
        real = core_attention.stickbreaking_attention
        monkeypatch.setattr(
            core_attention,
            "stickbreaking_attention",
            lambda *qkv, **kwargs: seen.update(kwargs) or real(*qkv, **kwargs),
        )
        self.make(("head_norm",))(*make_qkv(8, 1), None)
        assert not seen["return_mass"]
        self.make(("remainder_bias",))(*make_qkv(8, 1), None)
        assert seen["return_mass"]

    def test_no_parameters_by_default(self):
        assert not list(make_core().parameters())


UNSUPPORTED_SETTINGS = {
    "attention_dropout": (
        {"attention_dropout": 0.1},
        "config.attention_dropout 0.1 --attention-dropout 0.0",
    ),
    "window_size": ({"window_size": (64, 0)}, "config.window_size (64, 0) --window-size None"),
    "softmax off-by-one": (
        {"softmax_type": "off-by-one"},
        "config.softmax_type 'off-by-one' --softmax-type 'vanilla'",
    ),
    "softmax learnable": ({"softmax_type": "learnable"}, "config.softmax_type 'learnable'"),
    "fp8 dot product": (
        {"fp8_dot_product_attention": True},
        "config.fp8_dot_product_attention True --fp8-dot-product-attention False",
    ),
    "fp8 multi head": ({"fp8_multi_head_attention": True}, "config.fp8_multi_head_attention True"),
    "flash_decode": ({"flash_decode": True}, "config.flash_decode True --flash-decode softmax"),
    "kv_channels": ({"kv_channels": 20}, "config.kv_channels --kv-channels 8 256 20"),
}


@pytest.mark.parametrize(("changes", "words"), UNSUPPORTED_SETTINGS.values(), ids=UNSUPPORTED_SETTINGS)
def test_unsupported_settings(changes, words):
    with pytest.raises(ValueError, match=mentions(words)):
        make_core(small_config(**changes))


def test_channels_of_euclidean_logits():
    options = StickBreakingOptions(logits="euclidean")
    with pytest.raises(ValueError, match=mentions("config.kv_channels --kv-channels 8 248 256")):
        make_core(small_config(kv_channels=256), options=options)


def test_latent_attention():
    """In a layer that was not converted, Megatron would rotate q and k."""
    config = MLATransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    make_core(config)
    make_core(config, k_channels=8, v_channels=8, unrotated=True)
    with pytest.raises(
        ValueError, match=mentions("core_attention --multi-latent-attention k_channels=8 with_stickbreaking")
    ):
        make_core(config, k_channels=8, v_channels=8)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"cp_comm_type": "ring"}, ValueError, "cp_comm_type --cp-comm-type 'p2p' 'a2a' 'ring'"),
        ({"cp_comm_type": ["p2p"]}, ValueError, "cp_comm_type 'p2p' ['p2p']"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale finite nan"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale number str"),
        ({"options": {"head_norm": True}}, TypeError, "options StickBreakingOptions dict"),
    ],
)
def test_values_that_only_some_calls_read_are_checked_before_a_call(changes, error, words):
    """One rank does not communicate, and a layer without a call reads no scale."""
    with pytest.raises(error, match=mentions(words)):
        make_core(**changes)
    make_core(cp_comm_type="auto", softmax_scale=0.5)


def test_the_epsilon_of_a_head_norm_is_checked_before_a_call():
    make_core(small_config(layernorm_epsilon=0.0))  # without a norm, the module does not read it
    with pytest.raises(ValueError, match=mentions("config.layernorm_epsilon --norm-epsilon 1e-30 0.0")):
        make_core(small_config(layernorm_epsilon=0.0), options=StickBreakingOptions(head_norm=True))


@pytest.mark.parametrize(("layers", "got"), [(5, "5"), ("11", "'11'"), ({1: 0}, "{1: 0}")])
def test_layers_of_a_wrong_type(layers, got):
    with pytest.raises(TypeError, match=mentions(f"layers --sb-layers {got}")):
        StickBreakingOptions(layers=layers)


def test_layers_with_a_wrong_entry():
    with pytest.raises(ValueError, match=mentions("layers --sb-layers 0 1 [[1], 0]")):
        StickBreakingOptions(layers=[[1], 0])


@pytest.mark.parametrize("kind", ["rope", "learned_absolute"])
def test_unsupported_position_embedding_of_a_config(kind):
    config = small_config()
    config.position_embedding_type = kind
    with pytest.raises(ValueError, match=mentions(f"config.position_embedding_type '{kind}' 'none'")):
        make_core(config)


def test_no_rope_freq_without_an_entry_for_a_layer():
    """Megatron-Core 0.16 numbers the layers of multi-token prediction after the others."""
    config = small_config(no_rope_freq=[1, 1])
    make_core(config, layer_number=2)
    with pytest.raises(ValueError, match=mentions("config.no_rope_freq --no-rope-freq 3 2 --mtp-num-layers")):
        make_core(config, layer_number=3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"position_embedding_type": "rope"}, "args.position_embedding_type 'rope' --position-embedding-type"),
        (
            {"reset_attention_mask": True},
            "args.reset_attention_mask True --reset-attention-mask False",
        ),
    ],
)
def test_unsupported_flags_of_a_training_script(flags, words, monkeypatch):
    """Flags that never reach TransformerConfig."""
    accepted = {"position_embedding_type": "none", "reset_attention_mask": False}
    args = SimpleNamespace(**accepted)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=args))
    make_core()
    vars(args).update(flags)
    with pytest.raises(ValueError, match=mentions(words)):
        make_core()


@pytest.mark.parametrize("mask_type", ["arbitrary", "padding", "no_mask", "causal_bottom_right"])
def test_unsupported_masks(mask_type):
    words = f"attn_mask_type '{mask_type}' 'causal' 'padding_causal'"
    with pytest.raises(ValueError, match=mentions(words)):
        make_core(attn_mask_type=AttnMaskType[mask_type])
    with pytest.raises(ValueError, match=mentions(words)):
        make_core()(*make_qkv(8, 1), None, attn_mask_type=AttnMaskType[mask_type])


def test_unsupported_arguments():
    with pytest.raises(ValueError, match=mentions("attention_type 'cross' 'self'")):
        make_core(attention_type="cross")
    with pytest.raises(TypeError, match="sinks"):
        make_core(sinks=1)
    with pytest.raises(ValueError, match=mentions("attention_bias (1, 4, 8, 8) None")):
        make_core()(*make_qkv(8, 1), None, attention_bias=torch.zeros(1, 4, 8, 8))
    with pytest.raises(ValueError, match=mentions("query (8, 4, 8) (s, b, h, d) (t, h, d)")):
        make_core()(*make_qkv(8), None)
    with pytest.raises(ValueError, match=mentions("cu_seqlens_q None 'thd'")):
        make_core()(*make_qkv(8), None, packed_seq_params=packed_params(0, 8, cu_seqlens_q=None))
    with pytest.raises(ValueError, match=mentions("packed_seq_params.qkv_format 'thd' 'sbhd' 'bshd'")):
        make_core()(*make_qkv(8, 1), None, packed_seq_params=PackedSeqParams(qkv_format="bshd"))


OFFSETS, FEWER = (torch.tensor(offsets, dtype=torch.int32) for offsets in ([0, 4, 8], [0, 8]))


@pytest.mark.parametrize(
    ("rows", "batch", "words"),
    [
        ((8, 1), {"cu_seqlens_q": OFFSETS}, "packed_seq_params.qkv_format 'thd' cu_seqlens_q None"),
        ((8, 1), {"cu_seqlens_q_padded": OFFSETS}, "packed_seq_params.qkv_format 'thd' cu_seqlens_q_padded None"),
        (
            (8,),
            {"qkv_format": "thd", "cu_seqlens_q": OFFSETS, "cu_seqlens_q_padded": FEWER},
            "packed_seq_params.cu_seqlens_q_padded cu_seqlens_q 3 2",
        ),
        (
            (8,),
            {"qkv_format": "thd", "cu_seqlens_q": OFFSETS, "cu_seqlens_kv_padded": OFFSETS},
            "packed_seq_params.cu_seqlens_q_padded cu_seqlens_kv_padded None",
        ),
    ],
)
def test_offsets_that_would_be_ignored(rows, batch, words):
    """Otherwise documents would attend to each other, or padding would move them."""
    with pytest.raises(ValueError, match=mentions(words)):
        make_core()(*make_qkv(*rows), None, packed_seq_params=PackedSeqParams(**batch))


class TestPlanCache:
    """Which calls share a plan. Groups and plans are fakes, because the cache compares identities only."""

    @pytest.fixture
    def groups(self):
        return [SimpleNamespace(size=lambda: 1) for _ in range(2)]

    @pytest.fixture
    def get(self, monkeypatch, groups):
        monkeypatch.setattr(plans, "ContextParallelPlan", lambda *args, **kwargs: object())
        cache = plans.PlanCache(capacity=2)

        def get(group=groups[0], **changes):
            key = {"local_len": 8, "cu_seqlens": None, "layout": "zigzag", "packing": "per_document"}
            return cache.get(group, **{**key, **changes})

        get.clear = cache.clear
        return get

    def test_one_batch_shares_a_plan(self, get):
        offsets = torch.tensor([0, 8], dtype=torch.int32)
        assert get() is get()
        assert get(cu_seqlens=offsets) is get(cu_seqlens=offsets)

    def test_other_batches_get_another_plan(self, get, groups):
        offsets = torch.tensor([0, 8], dtype=torch.int32)
        plan = get(cu_seqlens=offsets)
        assert get(cu_seqlens=offsets.clone()) is not plan
        plan = get(cu_seqlens=offsets)
        offsets[1] = 4
        assert get(cu_seqlens=offsets) is not plan
        plan = get()
        for other in ({"local_len": 16}, {"layout": "contiguous"}, {"packing": "whole_stream"}, {"group": groups[1]}):
            assert get(**other) is not plan

    def test_writes_that_torch_does_not_count(self, get):
        """On a CPU the values of cu_seqlens are compared."""
        offsets = torch.tensor([0, 8], dtype=torch.int32)
        plan = get(cu_seqlens=offsets)
        offsets.numpy()[1] = 4
        assert get(cu_seqlens=offsets) is not plan

    def test_inference_tensors_get_a_plan_each_call(self, get):
        """torch does not count writes to them. Training with the same values still shares a plan."""
        with torch.inference_mode():
            offsets = torch.tensor([0, 8], dtype=torch.int32)
            assert get(cu_seqlens=offsets) is not get(cu_seqlens=offsets)
            assert get() is get()
        counted = offsets.clone()
        assert get(cu_seqlens=counted) is get(cu_seqlens=counted)

    def test_oldest_plan_is_evicted_first(self, get):
        first, second = get(), get(local_len=16)
        assert get() is first
        get(local_len=24)
        assert get() is first
        assert get(local_len=16) is not second

    def test_clear_forgets(self, get):
        plan = get()
        get.clear()
        assert get() is not plan


def test_the_option_for_communication_takes_precedence():
    assert make_core(cp_comm_type="p2p").cp_comm_type == "p2p"
    assert make_core(cp_comm_type="p2p", options=StickBreakingOptions(cp_comm="a2a")).cp_comm_type == "a2a"
    with pytest.raises(ValueError, match=mentions("cp_comm 'ring' 'auto' 'a2a'")):
        StickBreakingOptions(cp_comm="ring")


def test_a_batch_with_another_partition_is_refused():
    """Newer releases of Megatron-Core say in a batch how the data loader has sharded it."""
    batch = packed_params(0, 8)
    batch.cp_partition_mode = "contiguous"
    with pytest.raises(ValueError, match=mentions("packed_seq_params.cp_partition_mode 'zigzag' 'contiguous'")):
        make_core()._shared_plan(None, torch.zeros(8, 4, 8), batch)
