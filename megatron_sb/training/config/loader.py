"""Reading and writing: YAML and dotted overrides into a `TrainingConfig`, and back.

Every value is typed by the annotation of its field. A field that does not exist and a value of the wrong type raise
`ConfigError` with the field's path, its value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from megatron_sb.training.config.checks import check
from megatron_sb.training.config.data import DataConfig
from megatron_sb.training.config.lm_engine import translate
from megatron_sb.training.config.schema import TrainingConfig
from megatron_sb.training.config.tasks import choose_data_class
from megatron_sb.training.config.types import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Read, type and check a configuration.

    path: a YAML file; lm-engine's `model_args` may stand for `model`. overrides: `dotted.field=value` with the value in
    YAML, e.g. `stages.0.steps=10`.
    Raises ConfigError naming the field, its value and what is allowed; OSError when the file cannot be read.
    """
    config = _overridden(TrainingConfig, translate(_read(path)), overrides)
    check(config)
    return config


def load_fields(cls: type, path: str | Path, overrides: Sequence[str] = ()) -> Any:
    """Another dataclass whose fields are annotated as the training configuration's; path, overrides and errors as of
    `load_config`.
    """
    return _overridden(cls, _read(path), overrides)


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


def _read(path: str | Path) -> Any:
    return _parse(Path(path).read_text(encoding="utf-8"), str(path))


def _overridden(cls: type, tree: Any, overrides: Sequence[str]) -> Any:
    for override in overrides:
        _apply_override(tree, override)
    return _build(cls, tree, "")


def _parse(text: str, source: str) -> Any:
    try:
        return _unshared(yaml.load(text, Loader=_Loader))
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{source} holds a YAML anchor inside itself: give a tree of fields") from None


def _unshared(value: Any) -> Any:
    """What a YAML anchor and its aliases stand for, each on its own: an override changes the one that it names."""
    if isinstance(value, dict):
        return {name: _unshared(child) for name, child in value.items()}
    return [_unshared(child) for child in value] if isinstance(value, list) else value


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
        if name in tree and typing.get_origin(hints[name]) is dict:
            values[name] = _add_entries(hints[name], field.default_factory(), tree[name], prefix + name)
        elif name in tree:
            values[name] = _coerce(hints[name], tree[name], prefix + name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"missing field {prefix}{name} ({_describe(hints[name])})")
    return cls(**values)


def _add_entries(hint: Any, known: dict, tree: Any, path: str) -> dict:
    """Named dataclasses of several kinds, added to those that are known from the start; what has one of their names is
    of its kind unless it says otherwise.
    """
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must be a mapping of names, got {tree!r}")
    name_hint, classes = typing.get_args(hint)
    by_kind = {cls.kind: cls for cls in typing.get_args(classes)}
    entries = dict(known)
    for name, fields in tree.items():
        at = f"{path}.{name}"
        _coerce(name_hint, name, f"the name {at}")
        if not isinstance(fields, dict):
            raise ConfigError(f"{at} must be a mapping of fields, got {fields!r}")
        kind = fields.get("kind", known[name].kind if name in known else None)
        if kind not in by_kind:
            raise ConfigError(f"{at}.kind = {kind!r}: must be one of {', '.join(map(repr, by_kind))}")
        entries[name] = _build(by_kind[kind], fields, at)
    return entries


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
    if hint is DataConfig and isinstance(value, dict):
        return _build(*choose_data_class(value), path)
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
    except (TypeError, ValueError, OverflowError):
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
