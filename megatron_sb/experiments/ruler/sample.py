"""A long text with a question at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_sb.validation import InputError

SEPARATOR = ", "


@dataclasses.dataclass(frozen=True)
class Sample:
    """A text, a question with the beginning of its reply, and the answers that continue the reply.

    The answers follow in this order, joined by SEPARATOR.
    """

    text: str
    question: str
    answers: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """Text and question."""
        return self.text + self.question

    @property
    def num_bytes(self) -> int:
        """Number of bytes of prompt and answers."""
        return len(self.prompt.encode()) + len(SEPARATOR.join(self.answers).encode())


def fill_sample(
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
    """Return a sample of at most `length` bytes.

    Args:
        generator: draws the places of the inserted sentences.
        length: largest length in bytes, including question and answers.
        filling: sentences, possibly endless. They are added until one does not fit.
        inserted: sentences that are inserted at random places.
        question: the question, with the beginning of its reply.
        answers: in the order of the reply.
        shuffled: whether the inserted sentences are shuffled.
        between: follows every sentence.

    Raises:
        ValueError: the sample is longer than `length` without any filling.
    """
    room = length - join(inserted, question, answers, between).num_bytes
    if room < 0:
        raise InputError(f"length must be at least {length - room} bytes for this question, got {length}.")
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
    return join(sentences, question, answers, between)


def join(sentences: Sequence[str], question: str, answers: Sequence[str], between: str) -> Sample:
    """Return a sample of exactly these sentences."""
    return Sample("".join(sentence + between for sentence in sentences), question, tuple(answers))
