"""The training configuration: what is refused, by name, and what is read."""

from pathlib import Path

import pytest

from megatron_sb.config import ConfigError, flatten, load_config, to_yaml

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = CONFIGS / "tiny_context_extension.yaml"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid_and_written_back_whole(path, tmp_path):
    config = load_config(path)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


def test_every_field_is_explained():
    explained = (CONFIGS / "README.md").read_text()
    names = {part for path in flatten(load_config(TINY)) for part in path.split(".") if not part.isdigit()}
    assert {name for name in names if f"`{name}`" not in explained} == set()


def test_overrides_reach_lists_and_new_mappings():
    config = load_config(TINY, ["stages.1.steps=21", "baseline.rotary_base=5e5", "compare=[stick_breaking]"])
    assert (config.stages[1].steps, config.baseline.rotary_base, config.compare) == (21, 5e5, ("stick_breaking",))


REFUSALS = {
    "stages.0.step=7": r"unknown field stages\.0\.step = 7; did you mean 'steps'\? \(allowed here: name,",
    "optimiser.beta1=0.9": r"unknown field optimiser = .* did you mean 'optimizer'\?",
    "stages.0.steps=1.5": r"stages\.0\.steps = 1\.5: must be an integer",
    "stages.0.steps=true": r"stages\.0\.steps = True: must be an integer",
    "stages.0.steps=0": r"stages\.0\.steps = 0: must be greater than 0",
    "stages.0.schedule=cosine": r"stages\.0\.schedule = 'cosine': must be one of 'constant', 'power', 'exponential'",
    "stages.0.name=a/b": r"stages\.0\.name = 'a/b': must be letters, digits",
    "stages.7.steps=1": r"stages has items 0 to 1, got '7'",
    "stages=[]": r"stages = \[\]: at least one is needed",
    "stages.1.name=short": r"stages = \['short', 'short'\]: names must differ",
    "optimizer.beta2=nan": r"optimizer\.beta2 = nan: must be at least 0 and less than 1",
    "optimizer.eps=small": r"optimizer\.eps = 'small': must be a number",
    "evaluation=3": r"evaluation must be a mapping of fields, got 3",
    "data.paths=python-stdlib": r"data\.paths = 'python-stdlib': must be a list, each item a string",
    "data.vocab_size=300": r"data\.vocab_size = 300 contradicts data\.kind = 'text'",
    "data.kind=indexed": r"data\.paths holds 'python-stdlib', which contradicts data\.kind = 'indexed'",
    "model.num_kv_heads=3": r"model\.num_heads = 4 must be a multiple of model\.num_kv_heads = 3",
    "model.hidden_size=100": r"model\.hidden_size / model\.num_heads = 25: the head dimension must be a multiple of 8",
    "parallel.ranks=3": r"rows_per_step = 8 must be a multiple of 3, the data-parallel size of stick_breaking",
    "stages.1.context_parallel_size=4": r"context_parallel_size = 4 must divide parallel\.ranks = 2",
    "stages.1.context_length=2046": r"stages\.1\.context_length = 2046 must be a multiple of 4",
    "stages.1.warmup_steps=100": r"stages\.1\.warmup_steps = 100 must be less than stages\.1\.steps = 100",
    "stages.0.warmup_steps=0": r"stages\.0\.schedule = 'power' contradicts stages\.0\.warmup_steps = 0",
    "stages.0.rows_per_micro_batch=3": r"rows_per_micro_batch = 3 must divide 4",
    "compare=[softmax_rope]": r"stages\.1\.context_parallel_size = 2 contradicts compare = \['softmax_rope'\]",
    "evaluation.target_tokens=5000": r"evaluation\.target_tokens = 5000 exceeds the longest evaluated context",
    "nonsense": r"override 'nonsense': write dotted\.field=value",
}


@pytest.mark.parametrize("override", REFUSALS)
def test_refused_by_name(override):
    with pytest.raises(ConfigError, match=REFUSALS[override]):
        load_config(TINY, [override])


def test_bf16_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"model\.precision = 'bf16' contradicts parallel\.device = 'cpu'"):
        load_config(TINY, ["model.precision=bf16", "parallel.device=cpu"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nname: b\n", "field name is given twice in the mapping that starts at line 1"),
        ("name: [", "is not valid YAML"),
        ("name: a\n", r"missing field model \(a mapping of fields\)"),
        ("", "the configuration must be a mapping of fields, got None"),
    ],
)
def test_broken_files(text, message, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_evaluation_lengths_double_up_to_the_factor():
    config = load_config(TINY, ["evaluation.target_tokens=256", "evaluation.length_factor=6"])
    assert config.evaluation_lengths(config.stages[0]) == [256, 512, 1024, 2048, 3072]
