"""A question at the end of a long text, and how the text is filled up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

SEPARATOR = ", "


@dataclasses.dataclass(frozen=True)
class Sample:
    """question: with the beginning of its reply. answers: what goes on from there, in this order, with SEPARATOR
    between them.
    """

    text: str
    question: str
    answers: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """The text and the question."""
        return self.text + self.question

    @property
    def num_bytes(self) -> int:
        """Of prompt and answers."""
        return len(self.prompt.encode()) + len(SEPARATOR.join(self.answers).encode())


def fitted(
    generator: np.random.Generator,
    length: int,
    filling: Iterable[str],
    inserted: Sequence[str],
    question: str,
    answers: Sequence[str],
    *,
    shuffled: bool = True,
    between: str = " ",
) -> Sample:
    """As much of the filling as fits into `length` bytes, what is inserted at random places of it, shuffled or in its
    own order; the question after that.

    filling: sentences, without end or with one; the first that does not fit ends it. Raises ValueError where the rest
    alone is longer than `length`.
    """
    room = length - joined(inserted, question, answers, between).num_bytes
    if room < 0:
        raise ValueError(f"length is {length}; {length - room} bytes or more are needed by this question")
    sentences = []
    for sentence in filling:
        room -= len(sentence.encode()) + len(between)
        if room < 0:
            break
        sentences.append(sentence)
    order = generator.permutation(len(inserted)) if shuffled else range(len(inserted))
    places = np.sort(generator.integers(len(sentences) + 1, size=len(inserted)))
    for place, index in reversed(list(zip(places, order, strict=True))):
        sentences.insert(int(place), inserted[index])
    return joined(sentences, question, answers, between)


def joined(sentences: Sequence[str], question: str, answers: Sequence[str], between: str) -> Sample:
    """These sentences alone."""
    return Sample("".join(sentence + between for sentence in sentences), question, tuple(answers))
