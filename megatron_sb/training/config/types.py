"""Types of configuration fields, and the base class of every section of a configuration."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from megatron_sb.options import MAX_REACH, MIN_REACH
from megatron_sb.validation import InputError


def _to_float(value: Any) -> Any:
    """Reject booleans, and integers that overflow. pydantic itself parses strings, such as 1e-3 in YAML 1.1."""
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "a number")
    if isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            raise PydanticCustomError("float_type", "a number") from None
    return value


def _to_name(value: str) -> str:
    if value.startswith("-") or not value.replace("-", "_").isidentifier():
        raise PydanticCustomError(
            "name", "letters, digits, '_' and '-', starting with a letter or '_', because it names files"
        )
    return value


Int = Annotated[int, Strict()]  # a bool is not an int
Float = Annotated[float, BeforeValidator(_to_float), Field(allow_inf_nan=False)]
Bool = Annotated[bool, Strict()]
PositiveInt = Annotated[Int, Field(gt=0)]
NumLayers = Annotated[Int, Field(gt=0, le=2**16)]  # a list of the layers must fit into memory
NumRows = Annotated[Int, Field(gt=0, le=2**20)]  # a list of the rows of a step must fit into memory
NonNegativeInt = Annotated[Int, Field(ge=0)]
Seed = Annotated[Int, Field(ge=0, lt=2**63)]  # Megatron-Core adds to it
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
BelowOne = Annotated[Float, Field(ge=0, lt=1)]
Fraction = Annotated[Float, Field(gt=0, lt=1)]
Reach = Annotated[Float, Field(ge=MIN_REACH, le=MAX_REACH)]
Seconds = Annotated[Float, Field(gt=0, le=1e9)]  # torch rejects longer timeouts
Name = Annotated[str, AfterValidator(_to_name)]

section = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))  # decorates subclasses of Section


class ConfigError(InputError):
    """A field is unknown, has a wrong type or value, or contradicts another field."""


@section
class Section:
    """Base class of every mapping of fields. Instances are frozen; unknown fields are an error."""

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, values: Any) -> Any:
        """Report unknown fields together with the known ones, which pydantic's own error does not list."""
        known = [field.name for field in dataclasses.fields(cls)]
        if isinstance(values, dict) and not values.keys() <= set(known):
            unknown = {name: value for name, value in values.items() if name not in known}
            raise PydanticCustomError("unknown_fields", "known fields", {"unknown": unknown, "known": known})
        return values
