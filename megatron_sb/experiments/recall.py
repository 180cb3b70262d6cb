"""Multi-query repeated associative recall (Tan et al., arXiv 2410.17980, section 5.1): generated sequences.

    input    B 6 P 4 E 3 X 1 Z 2 E 2 B 1 E 5 B 4
    labels                       3   6   2   1

Keys and values alternate. Each value is assigned to the key before it. First, num_pairs keys are assigned once each.
Then keys are drawn from these uniformly. The label of a repeated key is its latest value. The token that follows is its
new value. Only the labels of repeated keys count in the loss.

If fewest_pairs is set, training rows have from fewest_pairs to num_pairs pairs, with equally many rows per doubling.
Evaluation rows always have num_pairs. Rows with few pairs speed up learning (Arora et al., arXiv 2312.04927, also train
on a mixture).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from megatron_sb.training.config import (
    DataConfig,
    EvaluationConfig,
    SoftmaxAttentionConfig,
    StageConfig,
    TrainingConfig,
)
from megatron_sb.training.config.types import PositiveInt, section
from megatron_sb.training.data import PackedBatch, Row
from megatron_sb.training.evaluate import UNWATCHED, Watch, mean_and_error, score_windows

GOLDEN_RATIO = (5**0.5 - 1) / 2
EVALUATION_SEED = 0  # second number of the seed of evaluation rows; training rows of stage i have 1 + i


@section
class RecallDataConfig(DataConfig):
    """The `data` section of kind "recall".

    Attributes:
        num_pairs: key-value pairs of a sequence. Required.
        num_keys: different keys in the vocabulary. Required.
        num_values: different values in the vocabulary. Required.
        fewest_pairs: smallest number of pairs in training rows; None: num_pairs.
    """

    task: ClassVar[str] = "megatron_sb.experiments.recall:RecallTask"
    kind: Literal["recall"] = "recall"
    num_pairs: PositiveInt
    num_keys: PositiveInt
    num_values: PositiveInt
    fewest_pairs: PositiveInt | None = None

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, before padding."""
        return self.num_keys + self.num_values

    @property
    def end_of_document(self) -> None:
        """No token ends a sequence."""

    def problems(self, config: TrainingConfig) -> Iterator[str]:
        """See `DataConfig.problems`."""
        if self.num_pairs > self.num_keys:
            yield f"data.num_pairs must be at most data.num_keys = {self.num_keys}, got {self.num_pairs}"
        elif self.fewest_pairs is not None and self.fewest_pairs > self.num_pairs:
            yield f"data.fewest_pairs must be at most data.num_pairs = {self.num_pairs}, got {self.fewest_pairs}"
        for name in ("target_tokens", "length_factor", "longest", "positions", "sentence_pairs"):
            value, default = getattr(config.evaluation, name), getattr(EvaluationConfig, name)
            if value != default:
                yield (
                    f"evaluation.{name} must keep its default {default!r} for data.kind = 'recall', got {value!r}: "
                    "evaluation rows have the stage's context length"
                )
        for name in dict.fromkeys(entry for model in config.compare for entry in config.layers_of(model)):
            attention = config.attention[name]
            if isinstance(attention, SoftmaxAttentionConfig) and attention.evaluated_scalings != ("none",):
                yield (
                    f"attention.{name}.evaluated_scalings must be [none] for data.kind = 'recall', got "
                    f"{list(attention.evaluated_scalings)}: evaluation rows have the stage's context length"
                )

    def stage_problems(self, config: TrainingConfig, stage: StageConfig, path: str) -> Iterator[str]:
        """See `DataConfig.stage_problems`."""
        if stage.context_length % 2 or stage.context_length <= 2 * self.num_pairs:
            yield (
                f"{path}.context_length must be even and more than 2 * data.num_pairs = {2 * self.num_pairs}, got "
                f"{stage.context_length}: keys and values alternate, and every key is assigned before one is repeated"
            )

    def longest_evaluated(self, evaluation: EvaluationConfig, stage: StageConfig) -> int:
        """Return the stage's own context length."""
        return stage.context_length


@dataclasses.dataclass(frozen=True)
class RecallRule:
    """Parameters of generated sequences.

    Tokens 0 to num_keys - 1 are keys; the next num_values tokens are values. length: even number of tokens.
    """

    num_pairs: int
    num_keys: int
    num_values: int
    length: int

    @property
    def num_answers(self) -> int:
        """Number of labels that count in a sequence."""
        return self.length // 2 - self.num_pairs

    def draw(self, seed: Sequence[int]) -> PackedBatch:
        """Generate one sequence as a pure function of the seed."""
        generator = np.random.default_rng([*seed])
        keys = generator.permutation(self.num_keys)[: self.num_pairs]
        keys = np.concatenate([keys, generator.choice(keys, self.num_answers)])
        return labelled(keys, self.num_keys + generator.integers(self.num_values, size=len(keys)))


def labelled(keys: np.ndarray, values: np.ndarray) -> PackedBatch:
    """Return the sequence of n assignments, 2 n tokens, with its labels. keys, values: tokens (n,)."""
    tokens = np.stack([keys, values], axis=1).reshape(-1).astype(np.int64)
    labels, counted = np.zeros_like(tokens), np.zeros(len(tokens), dtype=bool)
    by_key = np.argsort(keys, kind="stable")  # groups the assignments by key and keeps their order
    previous, current = by_key[:-1], by_key[1:]
    same = keys[previous] == keys[current]
    labels[2 * current[same]] = values[previous[same]]
    counted[2 * current[same]] = True
    return PackedBatch(tokens, labels, counted, np.array([0, len(tokens)], dtype=np.int32))


@dataclasses.dataclass(frozen=True)
class RecallRow(Row):
    """A row before its tokens are generated.

    Attributes:
        index: index of the row in its stage, from 0.
        rule: parameters of this row.
    """

    index: int
    rule: RecallRule


class RecallSampler:
    """A `task.Sampler` of rows with fewest_pairs to rule.num_pairs pairs."""

    def __init__(self, rule: RecallRule, seed: Sequence[int], fewest_pairs: int | None = None) -> None:
        self._rule = rule
        self._fewest_pairs = fewest_pairs or rule.num_pairs
        self._seed = list(seed)
        self._taken = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of rows taken."""
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from a `state_dict`."""
        self._taken = state["taken"]

    def next_rows(self, count: int) -> list[RecallRow]:
        """Return the next `count` rows."""
        bounds = np.array([0, self._rule.length], dtype=np.int32)
        first, self._taken = self._taken, self._taken + count
        rules = ((index, self._rule_of(index)) for index in range(first, self._taken))
        return [RecallRow([], rule.num_answers, bounds, index, rule) for index, rule in rules]

    def read(self, row: RecallRow) -> PackedBatch:
        """Generate the tokens of a row."""
        return row.rule.draw([*self._seed, row.index])

    def _rule_of(self, index: int) -> RecallRule:
        # Multiples of the golden ratio fill [0, 1) evenly, so any range of rows contains the whole mixture.
        share = index * GOLDEN_RATIO % 1
        num_pairs = self._fewest_pairs * ((self._rule.num_pairs + 1) / self._fewest_pairs) ** share
        return dataclasses.replace(self._rule, num_pairs=int(num_pairs))


class RecallTask:
    """The `task.Task` of kind "recall". Its accuracy is the share of right answers.

    Evaluation uses held-out sequences of the stage's context length.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self.vocab_size = config.vocab_size

    def fingerprint(self) -> dict[str, int]:
        """See `Task.fingerprint`."""
        data = self._config.data
        names = ("num_pairs", "fewest_pairs", "num_keys", "num_values")
        return {name: getattr(data, name) for name in names if getattr(data, name) is not None}

    def describe(self) -> str:
        """See `Task.describe`."""
        data = self._config.data
        return (
            f"recall of {data.num_pairs} pairs out of {data.num_keys} keys and {data.num_values} values; evaluation on "
            f"{self._config.evaluation.windows} sequences"
        )

    def rule(self, stage: StageConfig) -> RecallRule:
        """Return the parameters of a stage's sequences."""
        data = self._config.data
        return RecallRule(data.num_pairs, data.num_keys, data.num_values, stage.context_length)

    def sampler(self, stage: StageConfig, index: int) -> RecallSampler:
        """See `Task.sampler`."""
        return RecallSampler(self.rule(stage), (self._config.seed, 1 + index), self._config.data.fewest_pairs)

    def evaluate(self, engine: Any, stage: StageConfig, scaling: str, watch: Watch = UNWATCHED) -> list[dict[str, Any]]:
        """See `Task.evaluate`. Return one entry, of the stage's context length, with "accuracy"."""
        rule, windows = self.rule(stage), self._config.evaluation.windows

        def batch_of(indices: Sequence[int]) -> PackedBatch:
            return PackedBatch.concatenate(
                [rule.draw([self._config.seed, EVALUATION_SEED, index]) for index in indices]
            )

        batch_size = stage.rows_per_micro_batch or stage.rows_per_step // engine.data_parallel_size
        measures = [engine.window_losses, engine.window_hits]
        losses, hits = score_windows(engine, measures, batch_of, windows, batch_size, watch) / rule.num_answers
        nll, error = mean_and_error(losses.tolist())
        accuracy, accuracy_error = mean_and_error(hits.tolist())
        result = {"context": rule.length, "nll": nll, "standard_error": error, "windows": windows}
        result |= {"accuracy": accuracy, "accuracy_standard_error": accuracy_error}
        watch.on_length(result)
        return [result]
