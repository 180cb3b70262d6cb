"""Types of configuration fields, each with its range in words and as a test."""

from __future__ import annotations

import math
from typing import Annotated

PositiveInt = Annotated[int, "greater than 0", lambda value: value > 0]
PositiveFloat = Annotated[float, "finite and greater than 0", lambda value: 0 < value < math.inf]
CountFromZero = Annotated[int, "0 or greater", lambda value: value >= 0]
NonNegativeFloat = Annotated[float, "finite and 0 or greater", lambda value: 0 <= value < math.inf]
BelowOne = Annotated[float, "at least 0 and less than 1", lambda value: 0 <= value < 1]
Seconds = Annotated[float, "greater than 0 and at most 1e9", lambda value: 0 < value <= 1e9]  # what torch can wait
Seed = Annotated[int, "0 or greater and less than 2**63", lambda value: 0 <= value < 2**63]  # Megatron-Core adds to it
Fraction = Annotated[float, "between 0 and 1", lambda value: 0 < value < 1]
Name = Annotated[
    str,
    "letters, digits, '_' and '-', starting with a letter (it names files)",
    lambda value: value.replace("-", "_").isidentifier(),
]


class ConfigError(ValueError):
    """A field is unknown, has a wrong type or value, or contradicts another field."""
