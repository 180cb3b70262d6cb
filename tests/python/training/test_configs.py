"""The shipped configurations: valid, of the published sizes, and with the schedules they say they have."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch.utils.flop_counter import FlopCounterMode

from megatron_sb import cli
from megatron_sb.megatron import StickBreakingCoreAttention
from megatron_sb.training.config import count_parameters, load_config, to_yaml
from megatron_sb.training.engine.model import build_model
from megatron_sb.training.engine.softmax_attention import SoftmaxCoreAttention
from megatron_sb.training.schedule import learning_rate
from megatron_sb.training.throughput import model_flops

CONFIGS = Path(__file__).parents[3] / "configs"
# Weights in all and those a token meets. Table 1 of arXiv 2410.17980 has the dense ones; Table 5 has the mixtures' to
# one decimal of a billion.
PUBLISHED = {
    "dense_350m": (367_526_912, 367_526_912),
    "dense_1b": (1_208_083_968, 1_208_083_968),
    "dense_3b": (3_513_473_280, 3_513_473_280),
    "moe_6_5b": (6_497_023_488, 1_212_200_448),
    "moe_28_6b": (28_604_681_728, 5_175_299_584),
}
FEW_LAYERS = ["model.num_parameters=null", "model.moe.dispatcher=allgather", "model.num_layers=2"]
ALONE = {
    "tiny_context_extension": ["stages.1.context_parallel_size=1"],
    "moe_6_5b": FEW_LAYERS,
    "moe_28_6b": FEW_LAYERS,
}


def load(name, overrides=()):
    return load_config(CONFIGS / f"{name}.yaml", overrides)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_valid_and_written_back_whole(path, tmp_path):
    config = load_config(path)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


def test_documented_commands_are_what_the_record_was_made_with():
    text = (CONFIGS.parent / "docs" / "training.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^megatron-sb (train configs/context_extension_38m\.yaml .*compare=.*)", text, re.MULTILINE)
    record = CONFIGS.parent / "benchmarks" / "results" / "2026-11-22-2xh200-context-extension.json"
    models = json.loads(record.read_text())["models"]
    assert len(commands) == len(models) == 2
    for command, (model, recorded) in zip(commands, models.items(), strict=True):
        arguments = cli.make_parser().parse_args(shlex.split(command))
        assert {*arguments.set} == {*recorded["overrides"], f"compare=[{model}]"}
        config = load("context_extension_38m", arguments.set)
        assert config.parallel.ranks == 2 and [stage.steps for stage in config.stages] == [600, 120]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts(name):
    config = load(name)
    count = count_parameters(config.model, config.attention["stick_breaking"], config.vocab_size)
    assert (count.total, count.active) == PUBLISHED[name]
    assert config.model.num_parameters == count.total


@pytest.fixture
def one_rank():
    """Megatron-Core's parallel state of a single process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(expert_tensor_parallel_size=1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [*PUBLISHED, "tiny_context_extension"])
def test_the_model_has_as_many(name, one_rank):
    """The whole model as Megatron-Core builds it, with parameters that have a shape and no values."""
    config = load(name, ["parallel.ranks=1", "parallel.expert_parallel_size=1", *ALONE.get(name, ())])
    count = count_parameters(config.model, config.attention["stick_breaking"], config.vocab_size)
    with torch.device("meta"):
        model = build_model(config, "stick_breaking", config.stages[0], config.vocab_size)
        baseline = build_model(config, "softmax_rope", config.stages[0], config.vocab_size)
    assert sum(parameter.numel() for parameter in model.parameters()) == count.total
    heads = config.model.num_layers * config.model.num_heads * config.model.head_dim
    sticks = config.attention["stick_breaking"]
    extras = heads * (sticks.remainder_bias + 2 * sticks.head_norm)
    assert sum(parameter.numel() for parameter in baseline.parameters()) == count.total - extras


VARIANTS = {
    "sticks": {"kind": "stick_breaking", "remainder_bias": True, "head_norm": True, "attend_current": True},
    "gates and distances": {"kind": "stick_breaking", "forget_gate": True, "logits": "euclidean"},
    "rotary": {"kind": "softmax", "window": 32},
    "no positions": {"kind": "softmax", "position": "none", "stable_mask_gamma": 0.5},
    "alibi": {"kind": "softmax", "position": "alibi"},
    "forgetting": {"kind": "softmax", "position": "none", "forget_gate": True},
    "fire": {"kind": "softmax", "position": "fire"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_attention(name, one_rank):
    """Each can be trained, and has the weights that are counted."""
    chosen = f"attention={json.dumps({'mine': VARIANTS[name]})}"
    config = load("tiny_context_extension", [*ALONE["tiny_context_extension"], "compare=[mine]", chosen])
    model = build_model(config, "mine", config.stages[0], config.vocab_size)
    count = count_parameters(config.model, config.attention["mine"], config.vocab_size)
    assert sum(parameter.numel() for parameter in model.parameters()) == count.total
    tokens, bounds = torch.arange(96)[None], torch.tensor([0, 32, 96], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    model(tokens, None, None, labels=tokens, packed_seq_params=packed).mean().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize(
    ("logits", "scale", "expected"), [("dot", 0.3, 0.3), ("euclidean", 0.3, 0.3), ("dot", None, 0.25)]
)
def test_scale_of_the_logits(logits, scale, expected, one_rank):
    chosen = f"attention.stick_breaking={json.dumps({'logits': logits, 'scale': scale})}"
    config = load("tiny_context_extension", [*ALONE["tiny_context_extension"], "model.head_dim=16", chosen])
    model = build_model(config, "stick_breaking", config.stages[0], config.vocab_size)
    assert {layer.self_attention.core_attention.scale for layer in model.decoder.layers} == {expected}


def test_mixed_layers(one_rank):
    """Each layer is built from its entry, and the weights are those that are counted."""
    entries = {"kept": VARIANTS["gates and distances"], "near": VARIANTS["fire"]}
    entries["mine"] = {"kind": "mixed", "layers": ["kept", "kept", "near", "stick_breaking"]}
    chosen = [f"attention={json.dumps(entries)}", "compare=[mine]"]
    config = load("tiny_context_extension", [*ALONE["tiny_context_extension"], *chosen])
    model = build_model(config, "mine", config.stages[0], config.vocab_size)
    cores = [layer.self_attention.core_attention for layer in model.decoder.layers]
    assert [type(core) for core in cores] == [
        *(StickBreakingCoreAttention, StickBreakingCoreAttention, SoftmaxCoreAttention, StickBreakingCoreAttention)
    ]
    assert [getattr(core, "options", None) and core.options.forget_gate for core in cores] == [True, True, None, False]
    assert cores[2].attention.position == "fire"
    count = count_parameters(config.model, config.attention_of_layers("mine"), config.vocab_size)
    assert sum(parameter.numel() for parameter in model.parameters()) == count.total


def test_rope_is_dropped_from_a_stage_on(one_rank):
    config = load(
        "tiny_context_extension",
        [*ALONE["tiny_context_extension"], "attention.softmax_rope.dropped_in=extended", "compare=[softmax_rope]"],
    )
    positions = [
        {
            module.position
            for module in build_model(config, "softmax_rope", stage, 257).modules()
            if hasattr(module, "position")
        }
        for stage in config.stages
    ]
    assert positions == [{"rope"}, {"none"}]


@pytest.mark.parametrize(("tied", "head_dim"), [(False, 32), (True, 32), (True, 48)])
def test_the_arithmetic_of_a_step(tied, head_dim, one_rank):
    """model_flops counts the matrix products that torch counts, and two products of attention for each visible pair."""
    fields = [f"model.tie_word_embeddings={tied}", f"model.head_dim={head_dim}"]
    config = load("tiny_context_extension", [*ALONE["tiny_context_extension"], *fields])
    model = build_model(config, "stick_breaking", config.stages[0], config.vocab_size)
    tokens, bounds = torch.arange(96)[None], torch.tensor([0, 32, 96], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    with FlopCounterMode(display=False) as counter:
        model(tokens, None, None, labels=tokens, packed_seq_params=packed).sum().backward()
    pairs = (32**2 + 64**2) / 2
    attention = 3 * 2 * 2 * config.model.num_layers * config.model.num_heads * head_dim * pairs
    counted = counter.get_total_flops() + attention
    found = model_flops(config, "stick_breaking", config.vocab_size, [bounds.numpy()])
    assert found == pytest.approx(counted, rel=3e-3)  # norms


@pytest.mark.parametrize("size", ["1b", "3b"])
def test_context_extension_goes_on_from_the_model(size):
    base, extension = load(f"dense_{size}"), load(f"context_extension_{size}")
    assert extension.model == load(f"dense_{size}", ["model.recompute=selective"]).model
    last = base.stages[-1]
    assert extension.initial_checkpoint.endswith(f"{base.name}/stick_breaking/checkpoints/{last.name}-{last.steps:06d}")
    for stage in extension.stages:
        assert stage.context_length * stage.rows_per_step == 2**22
    assert [stage.context_length for stage in extension.stages] == [16384, 65536]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "dense_350m"])
def test_the_decay_starts_where_the_power_schedule_ends(name):
    pretrain, anneal = load(name).stages
    assert learning_rate(anneal, 0) == pytest.approx(learning_rate(pretrain, pretrain.steps - 1), rel=0.01)
    assert learning_rate(anneal, anneal.steps) == 0
