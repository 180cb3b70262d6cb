"""The training configuration: what is refused, by name, and what is read."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from support.markdown import tables_of

from megatron_sb.experiments.recall import RecallDataConfig
from megatron_sb.experiments.ruler.mixture import RulerMixtureDataConfig, RulerMixtureIndexedDataConfig
from megatron_sb.training import config, rank
from megatron_sb.training.config import (
    ConfigError,
    GatedDeltaNetConfig,
    MixedAttentionConfig,
    SoftmaxAttentionConfig,
    StickBreakingAttentionConfig,
    flatten,
    load_config,
)

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = CONFIGS / "tiny_context_extension.yaml"
MIXTURE = ["model.moe={num_experts: 4, top_k: 2}"]


def test_configurations_are_read_without_torch():
    code = """
import pathlib, sys
from megatron_sb.training.config import load_config
for path in pathlib.Path(sys.argv[1]).glob("*.yaml"):
    load_config(path)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code, str(CONFIGS)], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_field_is_explained():
    text = re.sub(r"(?s)```.*?```", "", (CONFIGS / "README.md").read_text())
    explained = re.findall(r"`([^`]+)`", text)
    names = {part for path in flatten(load_config(TINY, MIXTURE)) for part in path.split(".") if not part.isdigit()}
    assert names - {part for name in explained for part in name.split(".")} == set()


# Heading and first word of the table's header -> the class, and the prefix of its fields in the table.
REFERENCE = [
    ("Top level", "field", config.TrainingConfig, ""),
    ("`data`: the task", "text", RulerMixtureDataConfig, ""),
    ("`data`: the task", "indexed", RulerMixtureIndexedDataConfig, ""),
    ("`data`: the task", "recall", RecallDataConfig, ""),
    ("`model`: sizes", "field", config.ModelConfig, ""),
    ("`model`: sizes", "field", config.MoEConfig, "moe."),
    ("`attention`: models by name", "field of `stick_breaking`", StickBreakingAttentionConfig, ""),
    ("`attention`: models by name", "field of `softmax`", SoftmaxAttentionConfig, ""),
    ("`attention`: models by name", "field of `gated_delta_net`", GatedDeltaNetConfig, ""),
    ("`attention`: models by name", "field of `mixed`", MixedAttentionConfig, ""),
    ("`parallel`: ranks and layout", "field", config.ParallelConfig, ""),
    ("`optimizer`: AdamW", "field", config.OptimizerConfig, ""),
    ("`stages`: a list", "field", config.StageConfig, ""),
    ("`evaluation`: after each stage", "field", config.EvaluationConfig, ""),
    ("`checkpoint` and `report`", "field", config.CheckpointConfig, "checkpoint."),
    ("`checkpoint` and `report`", "field", config.ReportConfig, "report."),
]
DEFAULTS_IN_WORDS = {"head_dim", "pad_multiple", "mass_threshold", "kind"}


def _documented_defaults(heading: str, table: str) -> dict[str, str]:
    """Return the column of defaults of one table. table: its first header, or a kind of data."""
    _, found, section = (CONFIGS / "README.md").read_text().partition(f"\n### {heading}\n")
    assert found, heading
    defaults = {}
    for header, *rows in tables_of(re.split(r"\n###? ", section)[0]):
        column = header.index("default") if "default" in header else None
        if column is None or table not in (header[0], *(["text", "indexed", "recall"] if "kinds" in header else [])):
            continue
        for row in rows:
            if "kinds" not in header or table in row[header.index("kinds")]:
                defaults |= dict.fromkeys(re.findall(r"`([^`]+)`", row[0]), row[column])
    return defaults


def _as_documented(field: dataclasses.Field):
    """Return a default as the reference writes it."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if default is dataclasses.MISSING:
        return "**required**"
    return "-" if default is None else list(default) if isinstance(default, tuple) else default


@pytest.mark.parametrize(("heading", "table", "cls", "prefix"), REFERENCE)
def test_the_reference_has_every_default(heading, table, cls, prefix):
    documented = _documented_defaults(heading, table)
    for field in dataclasses.fields(cls):
        expected = _as_documented(field)
        if field.name in DEFAULTS_IN_WORDS or documented.get(field.name) == "see below":
            continue
        text = documented[prefix + field.name]
        value = text if text in ("**required**", "-") else yaml.safe_load(text.strip("`"))
        assert (float(value) if isinstance(expected, float) else value) == expected, prefix + field.name


def test_fields_of_other_kinds_are_dropped_where_they_say_nothing():
    """Saved configurations of older runs hold the fields of every kind."""
    unset = ["data.num_pairs=null", "data.vocab_size=null", "data.ruler_fraction=0.0"]
    assert load_config(TINY, unset) == load_config(TINY)
    assert load_config(TINY, ["data.ruler_fraction=0.5", "stages.0.context_length=1024"]).data.ruler_fraction == 0.5


def test_renamed_classes_keep_their_old_names_for_one_release():
    for old, new in (
        ("StickBreakingConfig", StickBreakingAttentionConfig),
        ("SoftmaxConfig", SoftmaxAttentionConfig),
    ):
        with pytest.warns(DeprecationWarning, match=f"{old} is deprecated"):
            assert getattr(config, old) is new


def test_several_wrong_fields_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        load_config(TINY, ["stages.0.steps=0", "seed=x", "data.validation_fraction=2", "report.keep=1"])
    message = str(caught.value).removeprefix(f"{TINY}: ")
    assert [line.partition(" must be")[0].partition(", got")[0] for line in message.split("\n")] == [
        "stages.0.steps",
        "seed",
        "data.validation_fraction",
        "unknown field report.keep",
    ]


def test_unknown_fields_of_a_section_list_the_known_ones_once():
    """A whole section can be unknown, if the file is of another kind. Its value is shortened."""
    with pytest.raises(ConfigError) as caught:
        load_config(TINY, ["stages.0.step=7", f"stages.0.model={['x' * 100]}"])
    first, second = str(caught.value).removeprefix(f"{TINY}: ").split("\n")
    assert first == "unknown field stages.0.step, got 7. Did you mean 'steps'?"
    assert re.match(r"unknown field stages\.0\.model, got \['x{78}\.\.\. .*Known fields: name, ", second)


def test_overrides_reach_lists_and_new_mappings():
    config = load_config(
        TINY, ["stages.1.steps=21", "attention.softmax_rope.rotary_base=5e5", "compare=[stick_breaking]"]
    )
    attention = config.attention["softmax_rope"]
    assert (config.stages[1].steps, attention.rotary_base, config.compare) == (21, 5e5, ("stick_breaking",))


def test_attention_is_added_by_name():
    """Beside the two that are there from the start."""
    far = {"kind": "softmax", "position": "alibi"}
    config = load_config(TINY, [f"attention.far={far}", "attention.stick_breaking.head_norm=true"])
    assert list(config.attention) == ["stick_breaking", "softmax_rope", "far"]
    assert config.attention["far"] == SoftmaxAttentionConfig(position="alibi")
    assert config.attention["stick_breaking"] == StickBreakingAttentionConfig(head_norm=True, reach=(0.5, 10.0))
    assert config.attention["softmax_rope"] == SoftmaxAttentionConfig()


HYBRID = ["attention.hybrid={kind: mixed, layers: [stick_breaking, softmax_rope]}", "compare=[hybrid]"]


def test_mixed_layers():
    """The names repeat from the first layer to the last. Each layer has the attention of its entry."""
    config = load_config(TINY, [*HYBRID, "attention.softmax_rope.evaluated_scalings=[none, ntk]"])
    assert config.layers_of("hybrid") == ("stick_breaking", "softmax_rope") * 2
    assert config.attention_of_layers("hybrid")[1:3] == (
        SoftmaxAttentionConfig(evaluated_scalings=("none", "ntk")),
        StickBreakingAttentionConfig(reach=(0.5, 10.0)),
    )
    assert config.layers_of("softmax_rope") == ("softmax_rope",) * 4
    assert config.evaluated_scalings("hybrid") == ("none", "ntk")
    sticks = {name: (config.breaks_sticks(name), config.has_sticks(name)) for name in config.attention}
    assert sticks == {"stick_breaking": (True, True), "softmax_rope": (False, False), "hybrid": (False, True)}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("attention.hybrid={kind: mixed}", r"attention\.hybrid\.layers is required"),
        ("attention.hybrid.layers=[]", r"hybrid\.layers must have a number of items that divides .* = 4, got 0"),
        ("attention.hybrid.layers=[stick_breaking, softmax_rope, stick_breaking]", r"model\.num_layers = 4, got 3"),
        ("attention.hybrid.layers=[sticks]", r"which are \['stick_breaking', 'softmax_rope'\], got 'sticks'"),
        ("attention.hybrid.layers=[hybrid]", r"attention of other kinds, which are .*, got 'hybrid'"),
        ("attention.softmax_rope.dropped_in=a", r"attention\.softmax_rope\.dropped_in must name a stage"),
        (
            "attention.softmax_rope={window: 8, global_interval: 2}",
            r"softmax_rope\.global_interval = 2 contradicts attention\.hybrid\.layers",
        ),
        (
            "attention={far: {kind: softmax, evaluated_scalings: [ntk]}, "
            "hybrid: {kind: mixed, layers: [far, softmax_rope]}}",
            r"same in .* of attention\.hybrid\.layers, got {'far': \['ntk'\], 'softmax_rope': \['none'\]}",
        ),
        (
            "attention.stick_breaking.scale=0.1",
            r"scale must be the same in .*\.hybrid\.layers, got {'stick_breaking': 0\.1, 'softmax_rope': None}",
        ),
        (
            "data={kind: recall, num_pairs: 4, num_keys: 8, num_values: 8}",
            r"attention\.softmax_rope\.evaluated_scalings",
        ),
    ],
)
def test_mixed_layers_that_do_not_fit(override, message):
    overrides = [*HYBRID, override]
    if override.startswith("data"):
        overrides += ["attention.softmax_rope.evaluated_scalings=[ntk]", "evaluation={}"]
    with pytest.raises(ConfigError, match=message):
        load_config(TINY, overrides)


def test_an_override_changes_what_it_names_alone(tmp_path):
    """Where anchors make one mapping of several, in the file and in an override."""
    path = tmp_path / "anchors.yaml"
    near = "\nattention:\n  near: &sticks {kind: stick_breaking}\n  far: *sticks\n"
    path.write_text(TINY.read_text().replace("\nattention:\n", near))
    stage = "{context_length: 64, steps: 5, rows_per_step: 4, learning_rate: 1e-3"
    stages = f"stages=[&first {stage}, name: a}}, *first]"
    config = load_config(
        path, ["attention.far.head_norm=true", stages, "stages.1.name=b", "evaluation.target_tokens=8"]
    )
    assert [config.attention[name].head_norm for name in ("near", "far")] == [False, True]
    assert [stage.name for stage in config.stages] == ["a", "b"]


def test_merge_keys(tmp_path):
    """A mapping may take fields from others. Its own field counts first, then that of the first mapping."""
    path = tmp_path / "merged.yaml"
    text = """
name: merged
model: {num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1, ffn_hidden_size: 64}
evaluation: {target_tokens: 8}
attention:
  near: &near {kind: softmax, position: alibi}
  far: {<<: *near, position: none, window: 8}
stages:
  - &first {name: a, context_length: 64, steps: 5, rows_per_step: 4, learning_rate: 1e-3}
  - &second {<<: *first, name: b, steps: 7}
  - {<<: [*second, *first], name: c}
"""
    path.write_text(text)
    config = load_config(path, ["stages.1.rows_per_step=2"])
    assert [(stage.name, stage.steps, stage.rows_per_step) for stage in config.stages] == [
        ("a", 5, 4),
        ("b", 7, 2),
        ("c", 7, 4),
    ]
    assert [config.attention[name].position for name in ("near", "far")] == ["alibi", "none"]
    changed = load_config(
        path, ["stages.0.steps=9", "attention.near.position=fire", "attention.far={<<: {kind: softmax, window: 4}}"]
    )
    assert [(stage.steps, stage.rows_per_step) for stage in changed.stages[:2]] == [(9, 4), (7, 4)]
    assert (changed.attention["near"].position, changed.attention["far"].window) == ("fire", 4)
    path.write_text(text.replace("name: b, steps: 7", "name: b, steps: 7, steps: 8"))
    with pytest.raises(ConfigError, match="field steps is given twice in the mapping that starts at line 10"):
        load_config(path)
    path.write_text(text.replace("<<: [*second, *first]", "<<: *second, <<: *first"))
    with pytest.raises(ConfigError, match=r"field << is given twice .* Write <<: \[\*first, \*second\]"):
        load_config(path)


@pytest.mark.parametrize("text", ["", "- a"])
def test_an_override_of_a_file_without_fields(text, tmp_path):
    path = tmp_path / "no_fields.yaml"
    path.write_text(text)
    with pytest.raises(
        ConfigError, match=r"override 'name=x': the configuration has (no fields|items 0 to 0, got 'name')"
    ):
        load_config(path, ["name=x"])


@pytest.mark.parametrize("kind", ["[text]", "{text: 1}", "[softmax]"])
def test_a_kind_that_cannot_be_a_key(kind):
    for path in ("data", "attention.near", "attention.stick_breaking"):
        with pytest.raises(ConfigError, match=rf"{path}\.kind must be one of"):
            load_config(TINY, [f"{path}={{kind: {kind}}}"])


REFUSALS = {
    "stages.0.step=7": r"unknown field stages\.0\.step, got 7\. Did you mean 'steps'\? Known fields: name,",
    "optimiser.beta1=0.9": r"unknown field optimiser, got .* Did you mean 'optimizer'\?",
    "name=-run": r"name must be letters, .* starting with a letter or '_', because it names files, got '-run'",
    "stages.0.steps=1.5": r"stages\.0\.steps must be an integer, got 1\.5",
    "stages.0.steps=true": r"stages\.0\.steps must be an integer, got True",
    "stages.0.steps=0": r"stages\.0\.steps must be greater than 0, got 0",
    "stages.0.learning_rate=-1": r"stages\.0\.learning_rate must be greater than 0, got -1",
    "stages.0.schedule=cosine": r"stages\.0\.schedule must be 'constant', 'power' or 'exponential', got 'cosine'",
    "stages.0.name=a/b": r"stages\.0\.name must be letters, digits.*, got 'a/b'",
    "stages.7.steps=1": r"stages has items 0 to 1, got '7'",
    "stages.\u00b2.steps=1": "stages has items 0 to 1, got '\u00b2'",
    "stages=[]": r"stages must have at least one item, got \[\]",
    "stages.1.name=short": r"stages must have different names, got \['short', 'short'\]",
    "optimizer.beta1=1": r"optimizer\.beta1 must be less than 1, got 1",
    "optimizer.beta2=nan": r"optimizer\.beta2 must be a finite number, got 'nan'",
    "optimizer.weight_decay=.inf": r"optimizer\.weight_decay must be a finite number, got inf",
    "model.init_std=.inf": r"model\.init_std must be a finite number, got inf",
    "stages.0.learning_rate=.inf": r"stages\.0\.learning_rate must be a finite number, got inf",
    f"optimizer.clip_grad={10**400}": r"optimizer\.clip_grad must be a number, got 10+",
    "optimizer.clip_grad=true": r"optimizer\.clip_grad must be a number, got True",
    "parallel.timeout_seconds=.inf": r"parallel\.timeout_seconds must be a finite number, got inf",
    "parallel.timeout_seconds=1e300": r"parallel\.timeout_seconds must be less than or equal to 10{9}, got '1e300'",
    f"seed={2**64}": rf"seed must be less than {2**63}, got {2**64}",
    "seed=-1": r"seed must be greater than or equal to 0, got -1",
    "optimizer.eps=small": r"optimizer\.eps must be a number.*, got 'small'",
    "report.tensorboard=1": r"report\.tensorboard must be true or false, got 1",
    "report.wandb=3": r"report\.wandb must be a string, got 3",
    "report.wandb=''": r"report\.wandb must be a string that is not empty, got ''",
    "evaluation=3": r"evaluation must be a mapping of fields, got 3",
    "data.paths=python-stdlib": r"data\.paths must be a list, got 'python-stdlib'",
    "data.paths=[3]": r"data\.paths\.0 must be a string, got 3",
    "data.vocab_size=300": r"data\.vocab_size = 300 contradicts data\.kind = 'text'",
    "data={kind: indexed, paths: [python-stdlib], vocab_size: 8, end_of_document: 0}": (
        r"data\.paths = \['python-stdlib'\] contradicts data\.kind = 'indexed'"
    ),
    "data={kind: indexed, paths: [a, ./a], vocab_size: 8, end_of_document: 0}": (
        r"data\.paths must name different data sets, got \['a', '\./a'\]"
    ),
    "data={kind: indexed, paths: [a], validation_paths: [b, c/../b], vocab_size: 8, end_of_document: 0}": (
        r"data\.validation_paths must name different data sets, got \['b', 'c/\.\./b'\]"
    ),
    "data={kind: indexed, paths: [a], validation_paths: [./a], vocab_size: 8, end_of_document: 0}": (
        r"data\.validation_paths must differ from data\.paths, got '\./a' in both"
    ),
    "data.kind=recal": r"data\.kind must be one of 'text', 'indexed', 'recall', got 'recal'",
    "data.kind=indexed": r"data\.vocab_size is required\ndata\.end_of_document is required",
    f"model.num_layers={2**80}": rf"model\.num_layers must be less than or equal to {2**16}, got {2**80}",
    "model.num_kv_heads=3": r"model\.num_heads must be a multiple of model\.num_kv_heads = 3, got 4",
    "model.hidden_size=100": r"model\.head_dim must .*, got 25\. Its default is model\.hidden_size / model\.num_heads",
    "model.hidden_size=130": r"model\.hidden_size must be a multiple of model\.num_heads = 4, got 130",
    "model.head_dim=264": r"model\.head_dim must be a multiple of 8 and at most 256, got 264",
    "model.num_parameters=7": r"model\.num_parameters must be 918912, .*, got 7",
    "model.recompute=some": r"model\.recompute must be 'none', 'selective' or 'full', got 'some'",
    "model.recompute_layers=2": r"model\.recompute_layers = 2 needs model\.recompute = 'full', got 'none'",
    "model.offloaded_inputs=1": r"model\.offloaded_inputs = 1 needs model\.recompute = 'full', got 'none'",
    "model.moe={top_k: 2}": r"model\.moe\.num_experts is required",
    "initial_checkpoint=a": r"initial_checkpoint = 'a' contradicts compare = \['stick_breaking', 'softmax_rope'\]",
    "parallel.ranks=3": r"rows_per_step must be a multiple of 3, the data-parallel size, got 8",
    "stages.1.context_parallel_size=4": r"context_parallel_size must divide parallel\.ranks = 2, got 4",
    "stages.1.context_length=2046": r"stages\.1\.context_length must be a multiple of 4.*, got 2046",
    "stages.1.pad_multiple=6": r"stages\.1\.pad_multiple must be a multiple of 4.*, got 6",
    "stages.1.pad_multiple=12": r"stages\.1\.pad_multiple .* divide stages\.1\.context_length = 2048, got 12",
    "stages.1.warmup_steps=100": r"stages\.1\.warmup_steps must be less than stages\.1\.steps = 100, got 100",
    "stages.0.warmup_steps=0": r"stages\.0\.schedule = 'power' contradicts stages\.0\.warmup_steps = 0",
    f"stages.0.rows_per_step={2**21}": rf"rows_per_step must be less than or equal to {2**20}, got {2**21}",
    "stages.0.rows_per_micro_batch=3": r"rows_per_micro_batch must divide 4, .*, got 3",
    "stages.0.warmup_start_rate=1": r"stages\.0\.warmup_start_rate .* stages\.0\.learning_rate = 0\.003, got 1\.0",
    "stages.1.power_coefficient=1": r"power_coefficient = 1\.0 contradicts stages\.1\.schedule = 'exponential'",
    "stages.1.hierarchical_context_parallel_sizes=[2, 1]": r"sizes = \[2, 1\] contradicts parallel\.comm = 'auto'",
    "parallel={ranks: 2, layout: balanced, sequence_parallel: true}": r"sequence_parallel = True contradicts",
    "parallel.layout=striped": r"parallel\.layout must be 'zigzag', 'contiguous' or 'balanced', got 'striped'",
    "parallel.comm=a2a+p2p": r"'a2a\+p2p' needs stages\.1\.hierarchical_context_parallel_sizes",
    "parallel.tensor_parallel_size=3": r"parallel\.tensor_parallel_size must divide parallel\.ranks = 2, got 3",
    "parallel.tensor_parallel_size=2": r"divisible_by must be a multiple of parallel\.tensor_parallel_size = 2, got 1",
    "parallel.sequence_parallel=true": r"sequence_parallel = True contradicts parallel\.tensor_parallel_size = 1",
    "parallel.expert_parallel_size=2": r"parallel\.expert_parallel_size = 2 contradicts model\.moe = None",
    "compare=[linear]": r"compare must name entries of attention, which are \['stick_breaking', .*, got 'linear'",
    "attention=3": r"attention must be a mapping of names, got 3",
    "attention.mine=3": r"attention\.mine must be a mapping of fields, got 3",
    "attention.mine={}": r"attention\.mine\.kind is required",
    "attention.mine={kind: linear}": (
        r"mine\.kind must be one of 'stick_breaking', 'softmax', 'gated_delta_net', 'mixed', got 'linear'"
    ),
    "attention.my/own={kind: softmax}": r"the name attention\.my/own must be letters, digits.*, got 'my/own'",
    "attention.softmax_rope.head_norm=true": (
        r"unknown field attention\.softmax_rope\.head_norm, got True\. Known fields: kind, position"
    ),
    "attention.stick_breaking.logits=cosine": r"stick_breaking\.logits must be 'dot' or 'euclidean', got 'cosine'",
    "attention.stick_breaking.scale=0": r"attention\.stick_breaking\.scale must be greater than 0, got 0",
    "attention.stick_breaking.forget_gate_loss=0.1": r"forget_gate_loss = 0\.1 contradicts .*\.forget_gate = False",
    "attention.softmax_rope.window=0": r"attention\.softmax_rope\.window must be greater than 0, got 0",
    "attention.softmax_rope={position: none, evaluated_scalings: [ntk]}": r"\['ntk'\] contradicts .*position = 'none'",
    "attention.softmax_rope={position: fire, rotary_base: 5e5}": r"base = 500000\.0 contradicts .*position = 'fire'",
    "attention.softmax_rope.global_interval=4": r"global_interval = 4 contradicts .*'rope' and .*window = None",
    "attention.softmax_rope={stable_mask_gamma: 0.5, forget_gate: true}": r"gamma = 0\.5 contradicts .*gate = True",
    "attention.softmax_rope.dropped_in=short": r"dropped_in must name a stage after .*'extended'.* got 'short'",
    "attention.softmax_rope={dropped_in: extended, evaluated_scalings: [yarn]}": r"needs .*got 'rope' and \['yarn'",
    "attention.softmax_rope.evaluated_scalings=[]": r"softmax_rope\.evaluated_scalings must have at least one item",
    "evaluation.longest=255": r"target_tokens must be at most .* evaluated context of stages\.0, 255 tokens, got 256",
    "evaluation.target_tokens=5000": r"evaluation\.target_tokens must be at most the longest evaluated .*, got 5000",
    "nonsense": r"override must be dotted\.field=value, .*, got 'nonsense'",
}


@pytest.mark.parametrize("override", REFUSALS)
def test_refused_by_name(override):
    with pytest.raises(ConfigError, match=REFUSALS[override]):
        load_config(TINY, [override])


TENSOR_PARALLEL = ["parallel.tensor_parallel_size=2", "model.make_vocab_size_divisible_by=2"]
LEVELS = ["parallel.comm=a2a+p2p", "stages.1.hierarchical_context_parallel_sizes=[2, 1]"]
REFUSED_TOGETHER = [
    (["model.precision=bf16", "parallel.device=cpu"], "model.precision = 'bf16' contradicts parallel.device = 'cpu'"),
    (["model.recompute=full", "parallel.device=cpu"], "model.recompute = 'full' contradicts parallel.device = 'cpu'"),
    (
        ["model.recompute=full", "model.offloaded_inputs=3", "model.recompute_layers=2"],
        "model.offloaded_inputs must be at most the number of inputs that are kept, model.num_layers / "
        "model.recompute_layers = 2, got 3",
    ),
    ([*MIXTURE, "model.tokens_at_once=64"], "model.tokens_at_once = 64 contradicts model.moe: the balancing loss is"),
    (
        [*TENSOR_PARALLEL, "parallel.sequence_parallel=true", "model.tokens_at_once=64"],
        "model.tokens_at_once = 64 contradicts parallel.sequence_parallel: a part of the sequence is on each rank",
    ),
    ([*MIXTURE, "parallel.device=cpu"], "model.moe.num_experts = 4 contradicts parallel.device = 'cpu'"),
    (
        [*TENSOR_PARALLEL, "parallel.sequence_parallel=true", "parallel.device=cpu"],
        "parallel.sequence_parallel = True contradicts parallel.device = 'cpu'",
    ),
    (
        [*TENSOR_PARALLEL, "model.num_kv_heads=1"],
        "num_kv_heads must be a multiple of parallel.tensor_parallel_size = 2, got 1",
    ),
    (
        [*TENSOR_PARALLEL, "model.ffn_hidden_size=7"],
        "model.ffn_hidden_size must be a multiple of parallel.tensor_parallel_size = 2, got 7",
    ),
    (TENSOR_PARALLEL, "context_parallel_size must divide parallel.ranks / parallel.tensor_parallel_size = 1, got 2"),
    (
        [*TENSOR_PARALLEL, "parallel.sequence_parallel=true", "parallel.ranks=4", "stages.1.context_length=2052"],
        "context_length must be a multiple of 8, with stages.1.context_parallel_size = 2 and parallel.layout = "
        "'zigzag' and parallel.tensor_parallel_size = 2, got 2052",
    ),
    ([*MIXTURE, *TENSOR_PARALLEL], "with model.moe needs parallel.sequence_parallel = true and parallel.expert_"),
    (
        [*MIXTURE, *TENSOR_PARALLEL, "parallel.sequence_parallel=true"],
        "with model.moe needs parallel.sequence_parallel = true and parallel.expert_parallel_size > 1",
    ),
    (
        [*MIXTURE, "parallel.expert_parallel_size=3"],
        "parallel_size must divide model.moe.num_experts = 4, got 3",
    ),
    ([*MIXTURE, "parallel.expert_parallel_size=4"], "expert_parallel_size must divide parallel.ranks = 2, got 4"),
    ([*MIXTURE, "model.moe.top_k=5"], "model.moe.top_k must be at most model.moe.num_experts = 4, got 5"),
    (
        [*MIXTURE, "model.moe.load_balancing=none"],
        "model.moe.aux_loss_coefficient must be 0 with model.moe.load_balancing = 'none', got 0.01",
    ),
    (
        ["model.moe={num_experts: 4, top_k: 2, grouped_gemm: true}", "model.ffn_hidden_size=100"],
        "model.ffn_hidden_size must be a multiple of 8 with model.moe.grouped_gemm, got 100",
    ),
    (
        ["parallel.comm=a2a", "model.head_dim=16", "model.num_heads=3", "model.num_kv_heads=3"],
        "parallel.comm = 'a2a' exchanges heads between 2 ranks in stages.1: model.num_heads / "
        "parallel.tensor_parallel_size must be a multiple of 2, got 3",
    ),
    (
        [*LEVELS, "model.head_dim=16", "model.num_heads=6", "model.num_kv_heads=3"],
        "between 2 ranks in stages.1: model.num_kv_heads / parallel.tensor_parallel_size must be a multiple or a "
        "divisor of 2, got 3",
    ),
    (
        ["parallel.comm=a2a+p2p", "stages.1.hierarchical_context_parallel_sizes=[2, 2]"],
        "sizes must be the sizes of a2a and p2p, with the product stages.1.context_parallel_size = 2, got [2, 2]",
    ),
    (
        ["stages.1.warmup_steps=0", "stages.1.warmup_start_rate=1e-5"],
        "stages.1.warmup_start_rate = 1e-05 contradicts stages.1.warmup_steps = 0",
    ),
    (
        ["data={kind: indexed, paths: [a], vocab_size: 8, end_of_document: 0, exclude: [b]}"],
        "data.exclude = ['b'] contradicts data.kind = 'indexed': it is a field of 'text'",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED_TOGETHER)
def test_contradictions_of_several_fields(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(TINY, overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.recompute=full", "model.recompute = 'full' needs a GPU for each of the 2 ranks on this machine"),
        ("parallel.device=cuda", "parallel.device = 'cuda' needs a GPU for each of the 2 ranks on this machine"),
    ],
)
def test_where_a_gpu_is_missing(override, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=re.escape(message) + r".* has 1\b"):
        rank.choose_device(load_config(TINY, [override]))


ROWS = ["stages.0.rows_per_step=8", "stages.1.rows_per_step=8"]


def test_sizes_that_follow_from_others():
    config = load_config(TINY, [*TENSOR_PARALLEL, "parallel.ranks=8", "parallel.sequence_parallel=true", *ROWS])
    short, extended = config.stages
    assert config.model.head_dim == 32 and config.model.padded_vocab_size(config.vocab_size) == 258
    assert [config.data_parallel_size(stage) for stage in config.stages] == [4, 2]
    assert (config.pad_multiple(short), config.pad_multiple(extended)) == (2, 8)
    whole = load_config(TINY, ["parallel.packing=whole_stream"])
    assert (whole.row_multiple(extended), whole.pad_multiple(extended)) == (4, 1)


@pytest.mark.parametrize("comm", ["auto", "p2p", "all_gather", "a2a", "a2a+p2p"])
def test_softmax_models_have_context_parallelism(comm):
    levels = ["stages.1.hierarchical_context_parallel_sizes=[2, 1]"] if comm == "a2a+p2p" else []
    config = load_config(TINY, ["compare=[softmax_rope]", f"parallel.comm={comm}", *levels])
    assert config.stages[1].context_parallel_size == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nname: b\n", "field name is given twice in the mapping that starts at line 1"),
        ("a: 1\nname: [", r"is not valid YAML: line 2, column 8: expected the node content.*'<stream end>'$"),
        ("name: a\n\tseed: 1\n", r"is not valid YAML: line 2, column 1: found character '\\t' .*$"),
        ("name: \0", "is not valid YAML: unacceptable character #x0000: .*position 6$"),
        ("name: 2024-13-45", "not a timestamp: month must be"),
        ("name: !!int x", "not a int: invalid literal"),
        ("? [1]\n: 2", "is not valid YAML"),
        ("name: &a [*a]", "holds a YAML anchor inside itself"),
        ("name: a\n", r"model is required\nstages is required"),
        ("", "the configuration must be a mapping of fields, got None"),
    ],
)
def test_broken_files(text, message, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(path)
    assert str(error.value).startswith(f"{path}: ")


def test_a_file_in_another_encoding(tmp_path):
    path = tmp_path / "utf16.yaml"
    path.write_text("name: a", encoding="utf-16")
    with pytest.raises(ConfigError, match=rf"^{path}: the file is not text in UTF-8"):
        load_config(path)


def test_evaluation_lengths_double_up_to_the_factor():
    config = load_config(TINY, ["evaluation.target_tokens=256", "evaluation.length_factor=6"])
    assert config.evaluation_lengths(config.stages[0]) == [256, 512, 1024, 2048, 3072]
    bounded = load_config(TINY, ["evaluation.target_tokens=256", "evaluation.longest=5000"])
    assert [bounded.evaluation_lengths(stage)[-1] for stage in bounded.stages] == [4096, 5000]
