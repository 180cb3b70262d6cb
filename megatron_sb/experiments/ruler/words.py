"""Which words of a long list occur most often (RULER's cwe and fwe)."""

from __future__ import annotations

import string

import numpy as np

from megatron_sb.experiments.ruler.sample import Sample
from megatron_sb.experiments.ruler.texts import Texts

# RULER's, but for the times that words occur: it has 30 and 3, for lists of more than 4096 tokens.
NUM_COMMON = 10
COMMON_TIMES, OTHER_TIMES = 6, 2
NUM_FREQUENT = 3
ZETA = 2.0  # the i-th word of the list takes part in proportion to i ** -ZETA


def common_words(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Ten words occur COMMON_TIMES, all others OTHER_TIMES; the answers are the ten, in alphabetical order."""
    question = f"Which {NUM_COMMON} words occur most often? In alphabetical order the most common words are: "
    words = iter(texts.draw_words(generator, len(texts.words)))
    common = sorted(next(words) for _ in range(NUM_COMMON))
    listed = common * COMMON_TIMES
    sample = _listed(listed, question, common)
    room = length - sample.num_bytes
    if room < 0:
        raise ValueError(f"length is {length}; {sample.num_bytes} bytes or more are needed by this question")
    for word in words:
        room -= OTHER_TIMES * (len(word) + 1)
        if room < 0:
            break
        listed += [word] * OTHER_TIMES
    return _listed(_shuffled(generator, listed), question, common)


def frequent_words(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Made-up words as often as the zeta distribution says; the answers are the three most frequent, in that order."""
    question = f"Which {NUM_FREQUENT} words occur most often? The most frequent words, the first of them first, are: "
    letters = list(string.ascii_lowercase)
    made_up: dict[str, None] = {}
    while len(made_up) < 50:
        made_up["".join(generator.choice(letters, 6))] = None
    words = list(made_up)
    room = length - _listed([], question, words[:NUM_FREQUENT]).num_bytes
    total = max(0, room) // len(words[0] + " ")
    shares = np.arange(1, len(words) + 1) ** -ZETA
    counts = np.floor(total * shares / shares.sum()).astype(int)
    if not counts[NUM_FREQUENT - 1] > counts[NUM_FREQUENT] or len(set(counts[:NUM_FREQUENT])) < NUM_FREQUENT:
        raise ValueError(f"length is {length}; too short for {NUM_FREQUENT} words of different frequency")
    listed = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    return _listed(_shuffled(generator, listed), question, words[:NUM_FREQUENT])


def _listed(words: list[str], question: str, answers: list[str]) -> Sample:
    return Sample(f"{' '.join(words)}. ", question, tuple(answers))


def _shuffled(generator: np.random.Generator, words: list[str]) -> list[str]:
    return [words[index] for index in generator.permutation(len(words))]
