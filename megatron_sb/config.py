"""The training configuration: typed, read from YAML, refused by field name when it is wrong.

`load_config` turns a YAML file and dotted overrides into a `TrainingConfig`. A field that does not exist, a value of
the wrong type and fields that contradict each other each raise `ConfigError` with the field's path, its value and what
is allowed, before anything runs. Needs neither torch nor a device.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

STANDARD_LIBRARY = "python-stdlib"


# A type, what its values must be in words, and as a test.
PositiveInt = Annotated[int, "greater than 0", lambda value: value > 0]
PositiveFloat = Annotated[float, "greater than 0", lambda value: value > 0]
CountFromZero = Annotated[int, "0 or greater", lambda value: value >= 0]
NonNegativeFloat = Annotated[float, "0 or greater", lambda value: value >= 0]
BelowOne = Annotated[float, "at least 0 and less than 1", lambda value: 0 <= value < 1]
Fraction = Annotated[float, "between 0 and 1", lambda value: 0 < value < 1]
Name = Annotated[
    str,
    "letters, digits, '_' and '-', starting with a letter (it names files)",
    lambda value: value.replace("-", "_").isidentifier(),
]


class ConfigError(ValueError):
    """A field that is unknown, of the wrong type, out of range, or in contradiction to another."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the documents come from; see configs/README.md."""

    kind: Literal["text", "indexed"] = "text"
    paths: tuple[str, ...] = (STANDARD_LIBRARY,)
    include: tuple[str, ...] = ("*.py", "*.txt", "*.md", "*.rst")
    exclude: tuple[str, ...] = ()
    validation_fraction: Fraction = 0.1
    vocab_size: PositiveInt | None = None
    end_of_document: CountFromZero | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes shared by the stick-breaking model and the softmax baseline."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    ffn_hidden_size: PositiveInt
    init_std: PositiveFloat = 0.02
    precision: Literal["fp32", "bf16"] = "fp32"


@dataclasses.dataclass(frozen=True)
class StickBreakingConfig:
    """Options of stick-breaking attention."""

    attend_current: bool = False
    mass_threshold: BelowOne = 2**-24


@dataclasses.dataclass(frozen=True)
class BaselineConfig:
    """Options of the softmax baseline."""

    rotary_base: PositiveFloat = 10000.0


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Processes, devices and context parallelism."""

    ranks: PositiveInt = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: PositiveInt | None = None
    timeout_seconds: PositiveFloat = 300.0
    comm: Literal["auto", "p2p", "all_gather", "a2a"] = "auto"
    layout: Literal["zigzag", "contiguous"] = "zigzag"
    packing: Literal["per_document", "whole_stream"] = "per_document"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with gradient clipping."""

    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip_grad: PositiveFloat = 1.0


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """One stage of training: a context length, a number of steps, a learning-rate schedule."""

    name: Name
    context_length: PositiveInt
    steps: PositiveInt
    rows_per_step: PositiveInt
    learning_rate: PositiveFloat
    rows_per_micro_batch: PositiveInt | None = None
    warmup_steps: CountFromZero = 0
    schedule: Literal["constant", "power", "exponential"] = "constant"
    context_parallel_size: PositiveInt = 1


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """The negative log-likelihood of the same target tokens, seen with ever longer contexts."""

    windows: PositiveInt = 16
    target_tokens: PositiveInt = 256
    length_factor: PositiveInt = 8


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """How often to save inside a stage (its end is always saved) and how many to keep."""

    interval: PositiveInt = 100
    keep: PositiveInt = 2


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """What is written besides the checkpoints."""

    interval: PositiveInt = 1
    tensorboard: bool = True


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """A whole job; see configs/README.md for the meaning of every field."""

    name: Name
    model: ModelConfig
    stages: tuple[StageConfig, ...]
    seed: CountFromZero = 0
    compare: tuple[Literal["stick_breaking", "softmax_rope"], ...] = ("stick_breaking", "softmax_rope")
    data: DataConfig = DataConfig()
    stick_breaking: StickBreakingConfig = StickBreakingConfig()
    baseline: BaselineConfig = BaselineConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()

    def context_parallel_size(self, model: str, stage: StageConfig) -> int:
        """Ranks that share one sequence: the baseline runs without context parallelism."""
        return stage.context_parallel_size if model == "stick_breaking" else 1

    def data_parallel_size(self, model: str, stage: StageConfig) -> int:
        """Ranks (or groups of them) that work on rows of their own."""
        return self.parallel.ranks // self.context_parallel_size(model, stage)

    def pad_multiple(self, stage: StageConfig) -> int:
        """What every document's part of a row is padded to; the baseline gets the same rows."""
        if self.parallel.packing == "whole_stream" or stage.context_parallel_size == 1:
            return 1
        return stage.context_parallel_size * (2 if self.parallel.layout == "zigzag" else 1)

    def evaluation_lengths(self, stage: StageConfig) -> list[int]:
        """Context lengths, doubling from target_tokens to length_factor times the stage's."""
        longest = self.evaluation.length_factor * stage.context_length
        lengths = []
        length = self.evaluation.target_tokens
        while length < longest:
            lengths.append(length)
            length *= 2
        return [*lengths, longest]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Read, type and check a configuration.

    path: a YAML file. overrides: `dotted.field=value` with the value in YAML, e.g. `stages.0.steps=10`.
    Raises ConfigError naming the field, its value and what is allowed; OSError when the file cannot be read.
    """
    tree = _parse(Path(path).read_text(encoding="utf-8"), str(path))
    for override in overrides:
        _apply_override(tree, override)
    config = _build(TrainingConfig, tree, "")
    _check(config)
    return config


def flatten(config: TrainingConfig) -> dict[str, Any]:
    """Every leaf by its dotted path, as plain YAML values: what is saved with a run and compared on resume."""
    leaves: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, child in value.items():
                walk(child, f"{path}.{name}" if path else name)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
            for index, child in enumerate(value):
                walk(child, f"{path}.{index}")
        else:
            leaves[path] = list(value) if isinstance(value, tuple) else value

    walk(dataclasses.asdict(config), "")
    return leaves


def to_yaml(config: TrainingConfig) -> str:
    """The configuration with every default written out; `load_config` reads it back."""
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(child) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(child) for child in value]
    return value


class _Loader(yaml.SafeLoader):
    """YAML's own loader keeps the last of two fields of one name; this one refuses them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"field {name} is given twice in the mapping that starts at line {node.start_mark.line + 1}"
                )
        return super().construct_mapping(node, deep)


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error


def _apply_override(tree: Any, override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError(f"override {override!r}: write dotted.field=value, for example stages.0.steps=10")
    names = path.split(".")
    node = tree
    for depth, name in enumerate(names):
        key: Any = name
        if isinstance(node, list):
            if not name.isdigit() or int(name) >= len(node):
                raise ConfigError(
                    f"override {override!r}: {'.'.join(names[:depth])} has items 0 to {len(node) - 1}, got {name!r}"
                )
            key = int(name)
        elif not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(names[:depth])} has no fields")
        if depth == len(names) - 1:
            node[key] = _parse(text, f"override {override!r}")
        else:
            node = node[key] if isinstance(node, list) else node.setdefault(key, {})


def _build(cls: type, tree: Any, path: str) -> Any:
    """One dataclass from a mapping; every field typed by its annotation."""
    where = path or "the configuration"
    if not isinstance(tree, dict):
        raise ConfigError(f"{where} must be a mapping of fields, got {tree!r}")
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    prefix = f"{path}." if path else ""
    for name in tree:
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"unknown field {prefix}{name} = {tree[name]!r}{hint} (allowed here: {', '.join(fields)})"
            )
    values = {}
    for name, field in fields.items():
        if name in tree:
            values[name] = _coerce(hints[name], tree[name], prefix + name)
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"missing field {prefix}{name} ({_describe(hints[name])})")
    return cls(**values)


def _coerce(hint: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):  # only `X | None` occurs
        return None if value is None else _coerce(typing.get_args(hint)[0], value, path)
    if origin is Annotated:
        base, words, allowed = typing.get_args(hint)
        value = _coerce(base, value, path)
        if not allowed(value):
            raise ConfigError(f"{path} = {value!r}: must be {words}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _type_error(hint, value, path)
        return tuple(_coerce(typing.get_args(hint)[0], item, f"{path}.{index}") for index, item in enumerate(value))
    if origin is Literal:
        if value not in typing.get_args(hint):
            raise _type_error(hint, value, path)
        return value
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, path)
    if hint is float:
        return _to_float(value, path)
    if type(value) is not hint:  # `True` is an int to isinstance
        raise _type_error(hint, value, path)
    return value


def _to_float(value: Any, path: str) -> float:
    """YAML 1.1 reads 1e-3 (no dot) as a string: accept what Python reads as a number."""
    if isinstance(value, bool):
        raise _type_error(float, value, path)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _type_error(float, value, path) from None


def _type_error(hint: Any, value: Any, path: str) -> ConfigError:
    return ConfigError(f"{path} = {value!r}: must be {_describe(hint)}")


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(hint))
    if origin is Annotated:
        base, words, _ = typing.get_args(hint)
        return f"{_describe(base)}, {words}"
    if origin is tuple:
        return f"a list, each item {_describe(typing.get_args(hint)[0])}"
    if origin in (types.UnionType, typing.Union):
        return f"{_describe(typing.get_args(hint)[0])} or null"
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}.get(
        hint, "a mapping of fields"
    )


def _check(config: TrainingConfig) -> None:
    """Contradictions between fields; the first is reported."""
    for problem in (
        *_list_problems(config),
        *_model_problems(config),
        *_data_problems(config),
        *_stage_problems(config),
    ):
        raise ConfigError(problem)


def _list_problems(config: TrainingConfig) -> Iterator[str]:
    stages = [stage.name for stage in config.stages]
    for path, names in (("data.paths", config.data.paths), ("stages", stages), ("compare", config.compare)):
        if not names:
            yield f"{path} = []: at least one is needed"
        if len(set(names)) != len(names):
            yield f"{path} = {list(names)!r}: names must differ"


def _model_problems(config: TrainingConfig) -> Iterator[str]:
    model = config.model
    if model.hidden_size % model.num_heads:
        yield f"model.hidden_size = {model.hidden_size} must be a multiple of model.num_heads = {model.num_heads}"
    if model.num_heads % model.num_kv_heads:
        yield f"model.num_heads = {model.num_heads} must be a multiple of model.num_kv_heads = {model.num_kv_heads}"
    head_dim = model.hidden_size // model.num_heads
    if head_dim % 8 or head_dim > 256:
        yield (
            f"model.hidden_size / model.num_heads = {head_dim}: the head dimension must be a multiple of 8 up to 256"
        )
    if model.precision == "bf16" and config.parallel.device == "cpu":
        yield (
            "model.precision = 'bf16' contradicts parallel.device = 'cpu': bf16 training keeps fp32 "
            "master weights in Megatron's optimizer, which needs CUDA"
        )


def _data_problems(config: TrainingConfig) -> Iterator[str]:
    data = config.data
    if data.kind == "text":
        for name in ("vocab_size", "end_of_document"):
            if getattr(data, name) is not None:
                yield (
                    f"data.{name} = {getattr(data, name)} contradicts data.kind = 'text': text is read as "
                    "bytes (256 and an end-of-document token)"
                )
        return
    if STANDARD_LIBRARY in data.paths:
        yield (
            f"data.paths holds {STANDARD_LIBRARY!r}, which contradicts data.kind = 'indexed': give path "
            "prefixes of .bin/.idx pairs"
        )
    if data.vocab_size is None or data.end_of_document is None:
        yield "data.kind = 'indexed' needs data.vocab_size and data.end_of_document"
    elif data.end_of_document >= data.vocab_size:
        yield f"data.end_of_document = {data.end_of_document} must be less than data.vocab_size = {data.vocab_size}"


def _stage_problems(config: TrainingConfig) -> Iterator[str]:
    ranks = config.parallel.ranks
    for index, stage in enumerate(config.stages):
        at = f"stages.{index}"
        size = stage.context_parallel_size
        if ranks % size:
            yield f"{at}.context_parallel_size = {size} must divide parallel.ranks = {ranks}"
            return
        if stage.warmup_steps >= stage.steps:
            yield f"{at}.warmup_steps = {stage.warmup_steps} must be less than {at}.steps = {stage.steps}"
        if stage.schedule == "power" and stage.warmup_steps == 0:
            yield (
                f"{at}.schedule = 'power' contradicts {at}.warmup_steps = 0: the power law starts where "
                "the warm-up ends"
            )
        if size > 1 and "stick_breaking" not in config.compare:
            yield (
                f"{at}.context_parallel_size = {size} contradicts compare = {list(config.compare)}: only "
                "'stick_breaking' runs with context parallelism"
            )
        multiple = size * (2 if config.parallel.layout == "zigzag" else 1)
        if size > 1 and stage.context_length % multiple:
            yield (
                f"{at}.context_length = {stage.context_length} must be a multiple of {multiple}, "
                f"for {at}.context_parallel_size = {size} and parallel.layout = {config.parallel.layout!r}"
            )
        for model in config.compare:
            groups = config.data_parallel_size(model, stage)
            per_group = stage.rows_per_step // groups
            if stage.rows_per_step % groups:
                yield (
                    f"{at}.rows_per_step = {stage.rows_per_step} must be a multiple of {groups}, the "
                    f"data-parallel size of {model}"
                )
            if stage.rows_per_micro_batch is not None and per_group % stage.rows_per_micro_batch:
                yield (
                    f"{at}.rows_per_micro_batch = {stage.rows_per_micro_batch} must divide {per_group}, "
                    f"the rows of one data-parallel group of {model} ({at}.rows_per_step / {groups})"
                )
        longest = config.evaluation.length_factor * stage.context_length
        if config.evaluation.target_tokens > longest:
            yield (
                f"evaluation.target_tokens = {config.evaluation.target_tokens} exceeds the longest "
                f"evaluated context of {at}, {longest} tokens"
            )
