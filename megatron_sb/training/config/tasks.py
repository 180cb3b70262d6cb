"""Choice of the class of the `data` section by `data.kind`."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import TypeAdapter

from megatron_sb._tasks import TASKS, find_tasks, import_object
from megatron_sb.training.config.types import ConfigError, Section


def read_data_section(section: Any) -> Any:
    """Construct the class that `choose_data_class` returns. Return a value that is not a mapping as it is.

    pydantic then reports such a value.
    """
    if not isinstance(section, dict):
        return section
    cls, fields = choose_data_class(section)
    return TypeAdapter(cls).validate_python(fields)


def choose_data_class(section: dict) -> tuple[type[Section], dict]:
    """Return the class of a `data` section, and the fields to construct it from.

    A field of another kind is dropped if it is null or has its default, because saved configurations of older runs hold
    the fields of every kind.

    Raises:
        ConfigError: The kind is unknown, or a field of another kind has a value.
    """
    kind = section.get("kind", "text")
    tasks = TASKS if str(kind) in TASKS else find_tasks()
    if str(kind) not in tasks:
        raise ConfigError(f"data.kind must be one of {', '.join(map(repr, tasks))}, got {kind!r}")
    chosen, fields = import_object(tasks[kind][0]), {}
    for name, value in section.items():
        if name in _fields_of(chosen):
            fields[name] = value
            continue
        owners = _owners(name)
        if not owners:
            fields[name] = value  # reported as an unknown field
        elif value is None or any(value == _default(cls, name) for cls in owners.values()):
            continue
        elif kind in owners:
            chosen, fields[name] = owners[kind], value
        else:
            others = " or ".join(map(repr, owners))
            raise ConfigError(f"data.{name} = {value!r} contradicts data.kind = {kind!r}: it is a field of {others}")
    return chosen, fields


def _fields_of(cls: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(cls)}


def _owners(name: str) -> dict[str, type[Section]]:
    """Return the classes that have the field, by kind."""
    classes = ((kind, import_object(text)) for kind, texts in find_tasks().items() for text in texts)
    return {kind: cls for kind, cls in classes if name in _fields_of(cls)}


def _default(cls: type, name: str) -> Any:
    """Return the default of a field as YAML reads it."""
    default = _fields_of(cls)[name].default
    return list(default) if isinstance(default, tuple) else default
