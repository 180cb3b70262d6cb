"""Accuracy on pairs of sentences, as in BLiMP (arXiv 1912.00582): a pair is right if the model gives the acceptable
sentence the larger probability.

The sentences are short, so this measures what a model knows of the language, not how it uses a long context. Tokens are
bytes. A sentence is scored as a line of text: each of its bytes, after a newline and the bytes before it. lm-eval's
tasks `blimp_*` do the same after an end-of-document token, which byte-level models of this trainer never read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sb.training.config import StageConfig, TrainingConfig
from megatron_sb.training.data import PackedBatch, pack
from megatron_sb.training.documents import BYTE_END_OF_DOCUMENT
from megatron_sb.training.evaluate import (
    UNWATCHED,
    Watch,
    error_of_mean,
    mean_and_error,
    score_windows,
    windows_at_once,
)
from megatron_sb.validation import InputError, MissingFileError

FIELDS = ("sentence_good", "sentence_bad")  # of BLiMP's files
Pairs = dict[str, list[tuple[str, str]]]  # file without its folder and suffix -> (acceptable, unacceptable) sentences


def load_pairs(paths: Sequence[str]) -> Pairs:
    """Read the files of evaluation.sentence_pairs: JSON Lines with the fields `sentence_good` and `sentence_bad`.

    Raises:
        ValueError: a file is missing or holds no pairs, a line is not such an object, or two files have the same name.
    """
    pairs: Pairs = {}
    for path in map(Path, paths):
        if path.stem in pairs:
            raise InputError(f"evaluation.sentence_pairs must have files with different names, got two {path.stem!r}.")
        if not path.is_file():
            raise MissingFileError(f"evaluation.sentence_pairs must be files, got {str(path)!r}, which is none.")
        lines = path.read_bytes().splitlines()
        pairs[path.stem] = [_pair(path, number, line) for number, line in enumerate(lines, start=1)]
        if not lines:
            raise InputError(f"evaluation.sentence_pairs must have files with pairs, got the empty file {str(path)!r}.")
    return pairs


def _pair(path: Path, number: int, line: bytes) -> tuple[str, str]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    sentences = [found.get(name) for name in FIELDS] if isinstance(found, dict) else []
    if not sentences or not all(map(_is_sentence, sentences)):
        raise InputError(
            f"line {number} of {path}, a file of evaluation.sentence_pairs, must be a JSON object with the sentences "
            f"{' and '.join(FIELDS)}, got {line[:80]!r}."
        )
    return sentences[0], sentences[1]


def _is_sentence(found: Any) -> bool:
    """Return whether a value is a text with bytes. Half of a surrogate pair, which JSON can escape, has none."""
    return isinstance(found, str) and found != "" and not any("\ud800" <= letter <= "\udfff" for letter in found)


def accuracy_on_pairs(
    engine: Any, pairs: Pairs, config: TrainingConfig, stage: StageConfig, watch: Watch = UNWATCHED
) -> dict[str, Any]:
    """Score a model on all pairs. Collective.

    Args:
        engine: the `Engine` with the model.
        pairs: from `load_pairs`.
        config: the job's configuration.
        stage: the stage that the model was trained in.
        watch: callbacks.

    Returns:
        {"accuracy": mean over the files of the share of right pairs, "standard_error": over pairs (None if a file
        has one pair), "by_file": file -> share of right pairs, "pairs": number of pairs}. Equal probabilities count as
        wrong.
    """
    parts = [_tokens(sentence) for found in pairs.values() for pair in found for sentence in pair]
    # All sentences are padded to one length, because kernels that are compiled for a shape should see few shapes.
    longest, multiple = max(map(len, parts)) - 1, config.row_multiple(stage)
    length = -(-longest // multiple) * multiple

    def batch_of(indices: Sequence[int]) -> PackedBatch:
        return pack([parts[index] for index in indices], length, BYTE_END_OF_DOCUMENT)

    at_once = windows_at_once(length, stage.context_length, config.data.vocab_size)
    (losses,) = score_windows(engine, [engine.window_losses], batch_of, len(parts), at_once, watch)
    good, bad = losses.numpy().reshape(-1, 2).T
    by_file = np.split(good < bad, np.cumsum([len(found) for found in pairs.values()])[:-1])
    shares, errors = zip(*(mean_and_error(right.tolist()) for right in by_file), strict=True)
    return {
        "accuracy": math.fsum(shares) / len(shares),
        "standard_error": error_of_mean(errors),
        "by_file": dict(zip(pairs, shares, strict=True)),
        "pairs": len(good),
    }


def _tokens(sentence: str) -> np.ndarray:
    return np.frombuffer(b"\n" + sentence.encode(), dtype=np.uint8).astype(np.int64)
