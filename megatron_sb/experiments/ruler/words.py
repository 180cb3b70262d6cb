"""The most frequent words of a long list (RULER's cwe and fwe)."""

from __future__ import annotations

import string

import numpy as np

from megatron_sb.experiments.ruler.sample import Sample
from megatron_sb.experiments.ruler.texts import Texts
from megatron_sb.validation import InputError

# As in RULER, except COMMON_TIMES and OTHER_TIMES: RULER uses 30 and 3, for lists of more than 4096 tokens.
NUM_COMMON = 10
COMMON_TIMES, OTHER_TIMES = 6, 2
NUM_FREQUENT = 3
ZETA = 2.0  # the frequency of the i-th word is proportional to i ** -ZETA


def common_words(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Ask for the ten words that occur COMMON_TIMES times, in alphabetical order. Others occur OTHER_TIMES times."""
    question = f"Which {NUM_COMMON} words occur most often? In alphabetical order the most common words are: "
    words = iter(texts.draw_words(generator, len(texts.words)))
    common = sorted(next(words) for _ in range(NUM_COMMON))
    listed = common * COMMON_TIMES
    sample = _sample_of_words(listed, question, common)
    room = length - sample.num_bytes
    if room < 0:
        raise InputError(f"length must be at least {sample.num_bytes} bytes for this question, got {length}.")
    for word in words:
        room -= OTHER_TIMES * (len(word) + 1)
        if room < 0:
            break
        listed += [word] * OTHER_TIMES
    return _sample_of_words(_shuffled(generator, listed), question, common)


def frequent_words(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Ask for the three most frequent of random words, in that order. Frequencies follow the zeta distribution."""
    question = f"Which {NUM_FREQUENT} words occur most often? The most frequent words, the first of them first, are: "
    letters = list(string.ascii_lowercase)
    made_up: dict[str, None] = {}
    while len(made_up) < 50:
        made_up["".join(generator.choice(letters, 6))] = None
    words = list(made_up)
    room = length - _sample_of_words([], question, words[:NUM_FREQUENT]).num_bytes
    total = max(0, room) // len(words[0] + " ")
    shares = np.arange(1, len(words) + 1) ** -ZETA
    counts = np.floor(total * shares / shares.sum()).astype(int)
    if not counts[NUM_FREQUENT - 1] > counts[NUM_FREQUENT] or len(set(counts[:NUM_FREQUENT])) < NUM_FREQUENT:
        raise InputError(f"length must be larger for {NUM_FREQUENT} words of different frequencies, got {length}.")
    listed = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    return _sample_of_words(_shuffled(generator, listed), question, words[:NUM_FREQUENT])


def _sample_of_words(words: list[str], question: str, answers: list[str]) -> Sample:
    return Sample(f"{' '.join(words)}. ", question, tuple(answers))


def _shuffled(generator: np.random.Generator, words: list[str]) -> list[str]:
    return [words[index] for index in generator.permutation(len(words))]
