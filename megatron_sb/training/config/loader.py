"""Reading and writing a configuration: YAML and `dotted.field=value` overrides."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_sb.training.config.checks import check
from megatron_sb.training.config.errors import describe
from megatron_sb.training.config.lm_engine import translate
from megatron_sb.training.config.schema import ParallelConfig, TrainingConfig
from megatron_sb.training.config.types import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = (), *, any_layout: bool = False) -> TrainingConfig:
    """Read a training configuration and check it.

    Args:
        path: a YAML file. lm-engine's `model_args` may stand in place of `model`.
        overrides: `dotted.field=value` with the value in YAML.
        any_layout: check the configuration as on one rank, because its parallel layout will be replaced. Default False.

    Raises:
        ConfigError: The name of the file, then one line for each wrong field, with its path, what it must be, and its
            value.
        OSError: The file cannot be read.

    Example:
        >>> config = load_config("configs/tiny_context_extension.yaml", ["stages.0.steps=50"])
        >>> config.stages[0].steps
        50
    """
    with _naming(path):
        config = _validated(TrainingConfig, _overridden(translate(_read(path)), overrides))
        kept = ("device", "layout", "packing")
        check(without_parallelism(config, kept, rows_per_micro_batch=None) if any_layout else config)
    return config


def without_parallelism(config: TrainingConfig, kept: Sequence[str], **of_stages: Any) -> TrainingConfig:
    """Return a configuration for one rank.

    Args:
        config: the configuration.
        kept: fields of `parallel` that stay. The others get their defaults.
        of_stages: further changes of every stage.
    """
    changes = {"context_parallel_size": 1, "hierarchical_context_parallel_sizes": (), **of_stages}
    stages = tuple(dataclasses.replace(stage, **changes) for stage in config.stages)
    parallel = ParallelConfig(**{name: getattr(config.parallel, name) for name in kept})
    return dataclasses.replace(config, parallel=parallel, stages=stages)


def load_fields(cls: type, path: str | Path, overrides: Sequence[str] = ()) -> Any:
    """Read a YAML file into another `Section`. For the arguments and errors, see `load_config`."""
    with _naming(path):
        return _validated(cls, _overridden(_read(path), overrides))


@contextlib.contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    """Begin the message of a ConfigError with the name of the file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error.__cause__


def flatten(config: TrainingConfig) -> dict[str, Any]:
    """Return the leaves of a configuration: dotted path -> plain YAML value."""
    leaves: dict[str, Any] = {}

    def add(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, child in value.items():
                add(child, f"{path}.{name}" if path else name)
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
            for index, child in enumerate(value):
                add(child, f"{path}.{index}")
        else:
            leaves[path] = list(value) if isinstance(value, tuple) else value

    add(dataclasses.asdict(config), "")
    return leaves


def to_yaml(config: TrainingConfig) -> str:
    """Return the configuration with every default written out. `load_config` reads it back."""
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False)


def _validated(cls: type, tree: Any) -> Any:
    try:
        return TypeAdapter(cls).validate_python(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(describe(error))) from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(child) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(child) for child in value]
    return value


class _Loader(yaml.SafeLoader):
    """A YAML loader that rejects a field given twice. YAML's own loader keeps the last one.

    A field may also be in a mapping that a merge key (`<<: *name`) adds. The mapping's own field then counts.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._checked: set[yaml.MappingNode] = set()

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node. PyYAML raises errors without a line for dates such as 2024-13-45."""
        try:
            return super().construct_object(node, deep)
        except ConfigError:
            raise
        except (ValueError, AttributeError, KeyError) as error:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(None, None, f"not a {kind}: {error}", node.start_mark) from error

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace merge keys by the fields that they add. YAML calls this again for mappings that it has flattened."""
        if node not in self._checked:
            self._checked.add(node)
            self._refuse_repeated(node)
        super().flatten_mapping(node)

    def _refuse_repeated(self, node: yaml.MappingNode) -> None:
        names = [
            "<<" if key.tag == "tag:yaml.org,2002:merge" else self.construct_object(key, deep=True)
            for key, _ in node.value
        ]
        for name in names:
            if names.count(name) > 1:
                hint = " Write <<: [*first, *second] to add several mappings." if name == "<<" else ""
                raise ConfigError(
                    f"field {name} is given twice in the mapping that starts at line {node.start_mark.line + 1}.{hint}"
                )


def _read(path: str | Path) -> Any:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file is not text in UTF-8: {error}") from error
    return _parse(text, "the file")


def _parse(text: str, source: str) -> Any:
    try:
        return _unshared(yaml.load(text, Loader=_Loader))
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {_in_one_line(error)}") from error
    except RecursionError:
        raise ConfigError(f"{source} holds a YAML anchor inside itself. It must be a tree of fields.") from None


def _in_one_line(error: yaml.YAMLError) -> str:
    """Return where the YAML is wrong and why, without the lines of text around it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _unshared(value: Any) -> Any:
    """Copy values that a YAML anchor and its aliases share. An override then changes only the field that it names."""
    if isinstance(value, dict):
        return {name: _unshared(child) for name, child in value.items()}
    return [_unshared(child) for child in value] if isinstance(value, list) else value


def _overridden(tree: Any, overrides: Sequence[str]) -> Any:
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _apply_override(tree: Any, override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError(f"override must be dotted.field=value, such as stages.0.steps=10, got {override!r}")
    names = path.split(".")
    node = tree
    for depth, name in enumerate(names):
        key: Any = name
        parent = ".".join(names[:depth]) or "the configuration"
        if isinstance(node, list):
            if not name.isdecimal() or int(name) >= len(node):
                raise ConfigError(f"override {override!r}: {parent} has items 0 to {len(node) - 1}, got {name!r}")
            key = int(name)
        elif not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {parent} has no fields")
        if depth == len(names) - 1:
            node[key] = _parse(text, f"override {override!r}")
        else:
            node = node[key] if isinstance(node, list) else node.setdefault(key, {})
