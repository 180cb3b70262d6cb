"""Messages for the errors that pydantic finds: field, what it must be, value."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

# Types of pydantic's errors -> what the field must be. Only the types for which pydantic's own words do not fit YAML.
EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a mapping of fields",
    "dict_type": "a mapping of names",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_type": "an integer",
    "model_attributes_type": "a mapping of fields",
    "string_too_short": "a string that is not empty",
    "string_type": "a string",
    "tuple_type": "a list",
}

LONGEST_VALUE = 80  # characters of the value of an unknown field, which can be a whole section


def describe(error: ValidationError) -> Iterator[str]:
    """Yield one line for each wrong field."""
    for details in error.errors(include_url=False):
        yield from _describe(details)


def _describe(details: dict[str, Any]) -> Iterator[str]:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    location = [str(name) for name in details["loc"]]
    if location[:1] == ["attention"] and len(location) > 2 and location[2] != "[key]":
        del location[2]  # pydantic's tag of the union
    key = location[-1:] == ["[key]"]
    path = ".".join(location[:-1] if key else location)
    if kind == "value_error":
        yield str(context["error"])
    elif kind == "unknown_fields":
        yield from _unknown_fields(path, context["unknown"], context["known"])
    elif kind == "missing":
        yield f"{path} is required"
    elif kind == "union_tag_not_found":
        yield f"{path}.kind is required"
    elif kind == "union_tag_invalid":
        yield f"{path}.kind must be one of {context['expected_tags']}, got {context['tag']!r}"
    else:
        expected = EXPECTED.get(kind) or details["msg"].removeprefix("Input should be ")
        where = f"the name {path}" if key else path or "the configuration"
        yield f"{where} must be {expected}, got {value!r}"


def _unknown_fields(path: str, unknown: dict[str, Any], known: list[str]) -> Iterator[str]:
    """Yield one line for each unknown field of a section. The last one lists the known fields."""
    lines = []
    for name, value in unknown.items():
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        lines.append(f"unknown field {path}{'.' if path else ''}{name}, {_got(value)}{hint}")
    yield from lines[:-1]
    yield f"{lines[-1]} Known fields: {', '.join(known)}"


def _got(value: Any) -> str:
    text = repr(value)
    return f"got {text}." if len(text) <= LONGEST_VALUE else f"got {text[:LONGEST_VALUE]}..."
