"""Needles in a haystack: sentences in a long text that state the values of keys (RULER's niah_*)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import numpy as np

from megatron_sb.experiments.ruler.sample import Sample, fill_sample
from megatron_sb.experiments.ruler.texts import Texts

NUM_KEYS = NUM_VALUES = NUM_QUERIES = 4  # as in RULER

Draw = Callable[[np.random.Generator, Texts], str]


def needle(key: str, value: str, kind: str) -> str:
    """Return the sentence that states a value. kind: "number" or "code"."""
    return f"The secret {kind} of {key} is: {value}."


def question(keys: list[str], kind: str, plural: bool) -> str:
    """Return the question for the values of keys, with the beginning of its reply."""
    if plural:
        named = ", ".join(keys)
        return f"What are all the secret {kind}s of {named}? The secret {kind}s of {named} are: "
    return f"What is the secret {kind} of {keys[0]}? The secret {kind} of {keys[0]} is: "


def draw_number(generator: np.random.Generator, texts: Texts) -> str:
    """Return seven digits."""
    return str(generator.integers(1_000_000, 10_000_000))


def draw_uuid(generator: np.random.Generator, texts: Texts) -> str:
    """Return 32 hexadecimal digits in five groups."""
    return str(uuid.UUID(bytes=generator.bytes(16), version=4))


def draw_key(generator: np.random.Generator, texts: Texts) -> str:
    """Return two words."""
    return "-".join(texts.draw_words(generator, 2))


def single_noise(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Hide one needle among a few repeated sentences."""
    return _hide_needles(generator, length, texts, texts.noise(), num_keys=1)


def single_text(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Hide one needle in real text."""
    return _hide_needles(generator, length, texts, texts.sentences_from(generator), num_keys=1)


def single_uuid(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Hide one needle in real text. Its value is a UUID."""
    return _hide_needles(generator, length, texts, texts.sentences_from(generator), num_keys=1, draw_value=draw_uuid)


def multikey_text(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Hide four needles with different keys and ask for one."""
    return _hide_needles(generator, length, texts, texts.sentences_from(generator), num_keys=NUM_KEYS)


def multikey_needles(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Hide one needle among needles with other keys."""
    return _hide_needles(
        generator, length, texts, _endless_needles(generator, texts, draw_key, draw_number), num_keys=1
    )


def multikey_uuids(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Hide one needle among other needles; keys and values are UUIDs."""
    others = _endless_needles(generator, texts, draw_uuid, draw_uuid)
    return _hide_needles(generator, length, texts, others, num_keys=1, draw_a_key=draw_uuid, draw_value=draw_uuid)


def multivalue(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Ask for the four values of one key, in the order of the text."""
    key = draw_key(generator, texts)
    values = _draw_distinct(generator, texts, draw_number, NUM_VALUES)
    needles = [needle(key, value, "number") for value in values]
    asked = question([key], "number", plural=True)
    return fill_sample(generator, length, texts.sentences_from(generator), needles, asked, values, shuffled=False)


def multiquery(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Ask for the values of four keys, in the order of the question."""
    keys = _draw_distinct(generator, texts, draw_key, NUM_QUERIES)
    values = _draw_distinct(generator, texts, draw_number, NUM_QUERIES)
    needles = [needle(key, value, "number") for key, value in zip(keys, values, strict=True)]
    asked = question(keys, "number", plural=True)
    return fill_sample(generator, length, texts.sentences_from(generator), needles, asked, values)


def _hide_needles(
    generator: np.random.Generator,
    length: int,
    texts: Texts,
    filling: Iterator[str],
    *,
    num_keys: int,
    draw_a_key: Draw = draw_key,
    draw_value: Draw = draw_number,
) -> Sample:
    """Insert num_keys needles into the filling and ask for the first key that was drawn."""
    keys = _draw_distinct(generator, texts, draw_a_key, num_keys)
    values = _draw_distinct(generator, texts, draw_value, num_keys)
    kind = _kind(draw_value)
    needles = [needle(key, value, kind) for key, value in zip(keys, values, strict=True)]
    distinct = (sentence for sentence in filling if f" of {keys[0]} is: " not in sentence)
    return fill_sample(generator, length, distinct, needles, question(keys, kind, plural=False), values[:1])


def _endless_needles(generator: np.random.Generator, texts: Texts, draw_a_key: Draw, draw_value: Draw) -> Iterator[str]:
    """Yield random needles forever."""
    while True:
        yield needle(draw_a_key(generator, texts), draw_value(generator, texts), _kind(draw_value))


def _kind(draw_value: Draw) -> str:
    return "number" if draw_value is draw_number else "code"


def _draw_distinct(generator: np.random.Generator, texts: Texts, draw: Draw, count: int) -> list[str]:
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw(generator, texts)] = None
    return list(drawn)
