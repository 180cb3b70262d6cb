"""Score the answers of a model to RULER's tasks.

Tokens are bytes. An answer is right if each of its bytes is the model's likeliest one after all bytes before it. Greedy
decoding would write the same bytes while they are right. Every answer after the first is scored after the right earlier
answers. The share of single right bytes shows differences between models that give no complete answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_sb.experiments.ruler.rows import encode
from megatron_sb.experiments.ruler.sample import Sample
from megatron_sb.experiments.ruler.tasks import TASKS
from megatron_sb.experiments.ruler.texts import load_texts
from megatron_sb.training.data import PackedBatch
from megatron_sb.training.documents import BYTE_END_OF_DOCUMENT
from megatron_sb.training.evaluate import mean_and_error
from megatron_sb.validation import InputError

BYTES_PER_FORWARD = 65536  # a forward has at least one sample


def samples_of(task: str, length: int, count: int) -> list[Sample]:
    """Return the samples of a task, the same for every model. Raise ValueError if `length` is too short for it."""
    seed, texts = zlib.crc32(task.encode()), load_texts().select_questions(held_out=True)
    try:
        return [TASKS[task](np.random.default_rng([seed, length, index]), length, texts) for index in range(count)]
    except InputError as error:
        raise InputError(f"--tasks {task}: {error}") from None


def scores(
    engine: Any, samples: Sequence[Sample], length: int, on_batch: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Score the answers of a model to samples of one length.

    Args:
        engine: the `Engine` with the model.
        samples: of one task.
        length: of the samples, in bytes.
        on_batch: called after each batch. An exception in it ends the call.

    Returns:
        {"accuracy": share of right answers, "standard_error": of accuracy over samples, "bytes": share of right bytes
        in answers, "samples": number of samples}.
    """
    batch_size = max(1, BYTES_PER_FORWARD // length)
    answer_shares, byte_shares = [], []
    for start in range(0, len(samples), batch_size):
        # Padded after the answers to one length: a model reads no token later than the one that it predicts from, and
        # kernels that are compiled for a shape see few shapes.
        rows = [encode(sample, length, BYTE_END_OF_DOCUMENT) for sample in samples[start : start + batch_size]]
        batch = PackedBatch.concatenate([row for row, _ in rows])
        hits = engine.likeliest_tokens(batch).numpy() == batch.labels
        for (_, spans), begin in zip(rows, batch.cu_seqlens[:-1], strict=True):
            answers = [hits[begin + first : begin + last] for first, last in spans]
            answer_shares.append(float(np.mean([answer.all() for answer in answers])))
            byte_shares.append(float(np.concatenate(answers).mean()))
        on_batch()
    accuracy, error = mean_and_error(answer_shares)
    return {
        "accuracy": accuracy,
        "standard_error": error,
        "bytes": float(np.mean(byte_shares)),
        "samples": len(samples),
    }
