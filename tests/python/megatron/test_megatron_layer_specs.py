"""with_stickbreaking, the spec object for --spec, and the command-line flags."""

import argparse
import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention, DSAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import get_mtp_layer_spec
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from support.megatron_cpu import core_attention_arguments, small_config
from support.messages import mentions

from megatron_sb.megatron import (
    CheckedMLASelfAttention,
    CheckedSelfAttention,
    StickBreakingCoreAttention,
    StickBreakingOptions,
    add_arguments,
    options_from_args,
    stickbreaking_block_spec,
    with_stickbreaking,
)
from megatron_sb.megatron.spec import stickbreaking_layer_spec

try:  # Megatron-Core 0.19
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as STOCK_STACK
except ImportError:  # 0.16
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as STOCK_STACK


def core_of(layer_spec):
    return layer_spec.submodules.self_attention.submodules.core_attention


def built_core(layer_spec) -> StickBreakingCoreAttention:
    """Build the core attention as Megatron-Core's attention does."""
    return core_of(layer_spec)(**core_attention_arguments(small_config()))


@pytest.mark.parametrize("num_experts", [None, 4], ids=["dense", "experts"])
def test_only_the_attention_of_a_layer_changes(num_experts):
    stock = get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=True)
    before = repr(stock)
    spec = with_stickbreaking(stock)

    assert repr(stock) == before and core_of(stock) is DotProductAttention
    assert isinstance(built_core(spec), StickBreakingCoreAttention)
    attention = spec.submodules.self_attention
    assert attention.module is CheckedSelfAttention
    attention.module = SelfAttention
    added = {"layers": None, "attention_layers": None, "softmax": DotProductAttention}
    assert {name: attention.params.pop(name) for name in added} == added
    attention.submodules.core_attention = DotProductAttention
    assert repr(spec) == before


def test_latent_attention():
    stock = get_gpt_layer_local_spec(multi_latent_attention=True)
    before = repr(stock)
    spec = with_stickbreaking(stock)
    assert repr(stock) == before
    again = with_stickbreaking(spec, head_norm=True)
    for layer, head_norm in ((spec, False), (again, True)):
        assert layer.submodules.self_attention.module is CheckedMLASelfAttention
        channels = {"k_channels": 24, "v_channels": 16, "softmax_scale": 0.5}
        core = core_of(layer)(**core_attention_arguments(small_config(), **channels))
        assert (core.k_channels, core.v_channels, core.scale) == (24, 16, 0.5)
        assert core.options == StickBreakingOptions(head_norm=head_norm)


def test_every_layer_of_a_block():
    config = small_config(num_layers=3, num_moe_experts=2, moe_layer_freq=[0, 1, 0], add_bias_linear=False)
    stock = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=None, pp_rank=0)
    spec = with_stickbreaking(stock)
    assert all(core_of(layer) is DotProductAttention for layer in stock.layer_specs)
    assert [type(built_core(layer)) for layer in spec.layer_specs] == [StickBreakingCoreAttention] * 3
    assert [layer.submodules.mlp for layer in spec.layer_specs] == [layer.submodules.mlp for layer in stock.layer_specs]
    assert spec.layer_norm is stock.layer_norm

    inside = with_stickbreaking(ModuleSpec(TransformerBlock, submodules=stock))
    assert isinstance(built_core(inside.submodules.layer_specs[2]), StickBreakingCoreAttention)
    assert core_of(stock.layer_specs[2]) is DotProductAttention


def test_megatrons_hybrid_stack():
    """Self-attention and latent attention change. Sparse attention raises an error only if a model builds it."""
    before = core_of(STOCK_STACK.submodules.attention_layer)
    stock, spec = STOCK_STACK.submodules, with_stickbreaking(STOCK_STACK).submodules
    names = [name for name in vars(stock) if getattr(spec, name) != getattr(stock, name)]
    assert names == [name for name in ("attention_layer", "dsa_layer", "mla_layer") if hasattr(stock, name)]
    assert isinstance(built_core(spec.attention_layer), StickBreakingCoreAttention)
    assert core_of(stock.attention_layer) is before
    if "dsa_layer" in names:
        assert issubclass(spec.dsa_layer.module, TransformerLayer)
        assert spec.dsa_layer.submodules is stock.dsa_layer.submodules
    if "mla_layer" in names:
        assert spec.mla_layer.submodules.self_attention.module is CheckedMLASelfAttention
    with pytest.raises(ValueError, match=mentions("hybrid_layer_pattern layers None")):
        with_stickbreaking(STOCK_STACK, layers=(1, 0))


def test_options_reach_the_module():
    options = {"attend_current": True, "mass_threshold": 0.5, "cp_layout": "contiguous", "packing": "whole_stream"}
    options["layers"] = (1, 0)
    spec = with_stickbreaking(get_gpt_layer_local_spec(), **options)
    assert built_core(spec).options == StickBreakingOptions(**options)
    assert built_core(with_stickbreaking(spec)).options == StickBreakingOptions()


def test_invalid_options():
    with pytest.raises(TypeError, match="unexpected keyword argument 'remainder'"):
        with_stickbreaking(get_gpt_layer_local_spec(), remainder=True)
    with pytest.raises(ValueError, match=mentions("cp_layout 'striped' 'zigzag' 'contiguous'")):
        with_stickbreaking(get_gpt_layer_local_spec(), cp_layout="striped")
    with pytest.raises(ValueError, match=mentions("packing 'tight' 'per_document' 'whole_stream'")):
        with_stickbreaking(get_gpt_layer_local_spec(), packing="tight")
    with pytest.raises(ValueError, match=mentions("logits 'cosine' 'dot' 'euclidean'")):
        with_stickbreaking(get_gpt_layer_local_spec(), logits="cosine")
    with pytest.raises(ValueError, match=mentions("forget_gate_loss 0.1")):
        with_stickbreaking(get_gpt_layer_local_spec(), forget_gate_loss=0.1)
    with pytest.raises(ValueError, match=mentions("mass_threshold 1.5")):
        with_stickbreaking(get_gpt_layer_local_spec(), mass_threshold=1.5)
    with pytest.raises(ValueError, match=mentions("scale None 0.5 config.softmax_scale")):
        with_stickbreaking(get_gpt_layer_local_spec(), scale=0.5)
    with pytest.raises(ValueError, match=mentions("layers (1, 2)")):
        with_stickbreaking(get_gpt_layer_local_spec(), layers=(1, 2))


def test_unsupported_specs():
    sparse = get_gpt_layer_local_spec(multi_latent_attention=True)
    core = ModuleSpec(DSAttention, submodules=DSAttentionSubmodules(indexer=None))
    sparse.submodules.self_attention.submodules.core_attention = core
    with pytest.raises(ValueError, match=mentions("self_attention MLASelfAttention dense DSAttention --sb-layers")):
        with_stickbreaking(sparse)
    assert with_stickbreaking(sparse, layers=(0,)).submodules is sparse.submodules


@pytest.mark.parametrize(
    ("spec", "got"),
    [
        (None, "NoneType"),
        (get_gpt_layer_local_spec, "get_gpt_layer_local_spec"),
        ([get_gpt_layer_local_spec()], "list"),
        (small_config(), "TransformerConfig"),
        (ModuleSpec(SelfAttention), "SelfAttention"),
        (get_mtp_layer_spec(get_gpt_layer_local_spec(), False), "MultiTokenPredictionLayer get_gpt_mtp_block_spec"),
    ],
    ids=["nothing", "function", "list", "config", "attention", "multi-token prediction"],
)
def test_specs_of_another_kind(spec, got):
    with pytest.raises(TypeError, match=mentions(f"spec layer get_gpt_layer_local_spec() {got}")):
        with_stickbreaking(spec)


@pytest.mark.parametrize("nothing", [IdentityOp, ModuleSpec(IdentityOp), ModuleSpec(ColumnParallelLinear)], ids=repr)
def test_layers_without_attention_do_not_change(nothing):
    block = TransformerBlockSubmodules([get_gpt_layer_local_spec(), get_gpt_layer_local_spec()])
    block.layer_specs[0].submodules.self_attention = nothing
    spec = with_stickbreaking(block)
    assert spec.layer_specs[0] == block.layer_specs[0]
    assert isinstance(built_core(spec.layer_specs[1]), StickBreakingCoreAttention)


def test_mamba_layers_do_not_change():
    mamba = ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(mixer=ModuleSpec(MambaMixer)))
    assert with_stickbreaking(mamba) == mamba
    block = with_stickbreaking(TransformerBlockSubmodules([mamba, get_gpt_layer_local_spec()]))
    assert block.layer_specs[0] == mamba and isinstance(built_core(block.layer_specs[1]), StickBreakingCoreAttention)
    stack = type(STOCK_STACK.submodules)(mamba_layer=mamba)
    assert with_stickbreaking(stack) == stack


def test_unknown_attention_is_an_error():
    """Also without a class of Megatron's: what has a core attention is an attention."""
    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.module = torch.nn.Identity
    with pytest.raises(ValueError, match=r"self_attention.*Identity"):
        with_stickbreaking(layer)


def test_megatron_finds_the_spec_object():
    spec = import_module(("megatron_sb.megatron.spec", "stickbreaking_layer_spec"))
    assert isinstance(spec, ModuleSpec)
    assert built_core(spec).options == StickBreakingOptions()


def test_the_spec_object_refuses_multi_token_prediction():
    """Megatron's scripts build those layers from their own spec, with softmax attention."""
    with pytest.raises(ValueError, match=mentions("config.mtp_num_layers 1 --mtp-num-layers launcher")):
        stickbreaking_layer_spec.submodules.self_attention.module(small_config(mtp_num_layers=1), None, 1)


@pytest.mark.parametrize("config", [None, {"num_layers": 2}, argparse.Namespace(num_layers=2)], ids=repr)
def test_block_specs_need_a_config(config):
    with pytest.raises(TypeError, match=mentions(f"config TransformerConfig {type(config).__name__}")):
        stickbreaking_block_spec(config)


def test_block_specs_refuse_multi_token_prediction_in_a_stage_without_other_layers(monkeypatch):
    """There, Megatron-Bridge takes its own spec for these layers."""
    blocks = [TransformerBlockSubmodules([get_gpt_layer_local_spec()]), TransformerBlockSubmodules([])]
    monkeypatch.setattr(gpt_layer_specs, "get_gpt_decoder_block_spec", lambda *args, **kwargs: blocks.pop(0))
    stickbreaking_block_spec(small_config(mtp_num_layers=1))
    with pytest.raises(ValueError, match=mentions("config.mtp_num_layers 1 --mtp-num-layers launcher")):
        stickbreaking_block_spec(small_config(mtp_num_layers=1))


@pytest.mark.parametrize("rank", [0, 1])
def test_block_specs_with_the_groups_of_a_provider(rank):
    """Megatron-Bridge can have groups without `parallel_state`, which is not initialised here."""
    config = small_config(num_layers=5, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    config.num_layers_in_first_pipeline_stage = 2
    config._pg_collection = SimpleNamespace(pp=SimpleNamespace(rank=lambda: rank))
    assert len(stickbreaking_block_spec(config).layer_specs) == (2, 3)[rank]


def test_block_specs_refuse_a_provider_with_layers_of_its_own():
    """Its class has another function of layer specs, for norms or attention that Megatron's layers lack."""

    def own_layers(config):
        """Stand for a function of Megatron-Bridge."""

    def provider(module: str, **default) -> TransformerConfig:
        own_layers.__module__ = f"megatron.bridge.models.{module}"
        field = ("transformer_layer_spec", object, dataclasses.field(**default))
        kind = dataclasses.make_dataclass("OwnProvider", [field], bases=(TransformerConfig,))
        config = small_config(kind)
        config._pg_collection = SimpleNamespace(pp=SimpleNamespace(rank=lambda: 0))
        return config

    stickbreaking_block_spec(provider("gpt_provider", default=own_layers))
    for default in ({"default": own_layers}, {"default_factory": lambda: functools.partial(own_layers)}):
        with pytest.raises(ValueError, match=mentions("config OwnProvider own_layers with_stickbreaking")):
            stickbreaking_block_spec(provider("gemma.gemma2_provider", **default))


def test_flags():
    parser = argparse.ArgumentParser()
    assert add_arguments(parser) is parser
    defaults = parser.parse_args([])
    assert not defaults.stick_breaking_attention
    assert StickBreakingOptions(**options_from_args(defaults)) == StickBreakingOptions()

    line = "--stick-breaking-attention --sb-attend-current --sb-mass-threshold 0 --sb-cp-layout contiguous"
    line += " --sb-remainder-bias --sb-head-norm --sb-logits euclidean --sb-forget-gate --sb-forget-gate-loss 0.5"
    line += " --sb-reach 0.5 10 --sb-cp-comm a2a"
    args = parser.parse_args([*line.split(), "--sb-packing", "whole_stream", "--sb-layers", "([1]*2+[0])*2"])
    assert args.stick_breaking_attention
    assert options_from_args(args) == {
        "attend_current": True,
        "mass_threshold": 0.0,
        "remainder_bias": True,
        "head_norm": True,
        "logits": "euclidean",
        "reach": (0.5, 10.0),
        "forget_gate": True,
        "forget_gate_loss": 0.5,
        "cp_layout": "contiguous",
        "packing": "whole_stream",
        "cp_comm": "a2a",
        "layers": (1, 1, 0, 1, 1, 0),
    }


@pytest.mark.parametrize(
    ("found", "missing"), [({}, "sb_attend_current"), ({"sb_attend_current": True}, "sb_mass_threshold")]
)
def test_arguments_without_the_flags_are_refused(found, missing):
    """Of a script that does not pass add_arguments. Layers record some options in its arguments."""
    with pytest.raises(ValueError, match=mentions(f"args add_arguments extra_args_provider {missing}")):
        options_from_args(argparse.Namespace(**found))


@pytest.mark.parametrize(
    ("loader", "layout", "packing"),
    [
        ({}, "zigzag", "per_document"),
        ({"dataloader_inter_document_masking": True}, "zigzag", "whole_stream"),
        ({"dataloader_inter_document_masking": True, "sft": True}, "zigzag", "per_document"),
        ({"cp_partition_mode": "contiguous"}, "contiguous", "per_document"),
    ],
)
def test_megatrons_flags_for_its_data_loader_are_the_defaults(loader, layout, packing):
    parser = add_arguments(argparse.ArgumentParser())
    options = options_from_args(parser.parse_args([], argparse.Namespace(**loader)))
    assert (options["cp_layout"], options["packing"]) == (layout, packing)
    chosen = ["--sb-cp-layout", "zigzag", "--sb-packing", "per_document"]
    options = options_from_args(parser.parse_args(chosen, argparse.Namespace(**loader)))
    assert (options["cp_layout"], options["packing"]) == ("zigzag", "per_document")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--sb-cp-layout", "striped"], "argument --sb-cp-layout: invalid choice: 'striped'"),
        *(
            (
                ["--sb-layers", pattern],
                f"argument --sb-layers: must be a list of layers such as ([1]*3+[0]*1)*10, got {pattern!r}",
            )
            for pattern in ("3", "[1, [0]]", "[1]*x", "[1]**2", "[1")
        ),
    ],
)
def test_invalid_flags(flags, text, capsys):
    with pytest.raises(SystemExit):
        add_arguments(argparse.ArgumentParser()).parse_args(flags)
    assert text in capsys.readouterr().err
