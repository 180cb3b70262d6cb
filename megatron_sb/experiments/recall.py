"""Multi-query repeated associative recall (Tan et al., arXiv 2410.17980, section 5.1): sequences made by rule.

    input    B 6 P 4 E 3 X 1 Z 2 E 2 B 1 E 5 B 4
    labels                       3   6   2   1

Keys and values by turns, each value assigned to the key before it. num_pairs keys are assigned once each, one after the
other; then keys are drawn from those again and again, uniformly. Where a key is met again, the label is the value that
it had last, while the token that follows is the new one: so nothing but the answer is asked for, and only the latest
assignment counts. Labels count there alone.

With fewest_pairs the rows that are trained on have from that many pairs to num_pairs, by turns and as many of them per
doubling; what is evaluated has num_pairs. Rows of few pairs teach what those of many take long to begin with (Arora et
al., arXiv 2312.04927, train on a mixture, too).
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
HELD_OUT = 0  # second number of the seeds of evaluated rows; training rows have 1 and up, by stage


@section
class RecallDataConfig(DataConfig):
    """The `data` section of kind "recall"."""

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
        for name in ("target_tokens", "length_factor", "longest"):
            value = getattr(config.evaluation, name)
            if value != getattr(EvaluationConfig, name):
                yield (
                    f"evaluation.{name} = {value!r} contradicts data.kind = 'recall': held-out rows are as long as the "
                    "stage's"
                )
        for name in config.compare:
            attention = config.attention[name]
            if isinstance(attention, SoftmaxAttentionConfig) and attention.evaluated_scalings != ("none",):
                yield (
                    f"attention.{name}.evaluated_scalings = {list(attention.evaluated_scalings)} contradicts data.kind "
                    "= 'recall': no context is longer than the stage's; give [none]"
                )

    def stage_problems(self, config: TrainingConfig, stage: StageConfig, path: str) -> Iterator[str]:
        """See `DataConfig.stage_problems`."""
        if stage.context_length % 2 or stage.context_length <= 2 * self.num_pairs:
            yield (
                f"{path}.context_length must be even and more than 2 * data.num_pairs = {2 * self.num_pairs}, because "
                f"keys and values alternate and every key is assigned before the first answer, "
                f"got {stage.context_length}"
            )

    def longest_evaluated(self, evaluation: EvaluationConfig, stage: StageConfig) -> int:
        """Return the stage's own context length."""
        return stage.context_length


@dataclasses.dataclass(frozen=True)
class RecallRule:
    """Tokens 0 to num_keys - 1 are keys, the num_values after them values; length: tokens of a sequence, even."""

    num_pairs: int
    num_keys: int
    num_values: int
    length: int

    @property
    def num_answers(self) -> int:
        """Labels that count in a sequence."""
        return self.length // 2 - self.num_pairs

    def draw(self, seed: Sequence[int]) -> PackedBatch:
        """One sequence, a pure function of the seed."""
        generator = np.random.default_rng([*seed])
        keys = generator.permutation(self.num_keys)[: self.num_pairs]
        keys = np.concatenate([keys, generator.choice(keys, self.num_answers)])
        return labelled(keys, self.num_keys + generator.integers(self.num_values, size=len(keys)))


def labelled(keys: np.ndarray, values: np.ndarray) -> PackedBatch:
    """The sequence of these assignments, (n,) each, 2 n tokens with their labels."""
    tokens = np.stack([keys, values], axis=1).reshape(-1).astype(np.int64)
    labels, counted = np.zeros_like(tokens), np.zeros(len(tokens), dtype=bool)
    by_key = np.argsort(keys, kind="stable")  # assignments of one key side by side, in their order
    before, after = by_key[:-1], by_key[1:]
    same = keys[before] == keys[after]
    labels[2 * after[same]] = values[before[same]]
    counted[2 * after[same]] = True
    return PackedBatch(tokens, labels, counted, np.array([0, len(tokens)], dtype=np.int32))


@dataclasses.dataclass(frozen=True)
class RecallRow(Row):
    """A row before it is made. index: which of its stage. rule: its own."""

    index: int
    rule: RecallRule


class RecallSampler:
    """Rows of one rule, with from fewest_pairs to its num_pairs pairs; `task.Sampler`."""

    def __init__(self, rule: RecallRule, seed: Sequence[int], fewest_pairs: int | None = None) -> None:
        self._rule = rule
        self._fewest_pairs = fewest_pairs or rule.num_pairs
        self._seed = list(seed)
        self._taken = 0

    def state_dict(self) -> dict[str, int]:
        """How many rows have been taken."""
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was taken."""
        self._taken = state["taken"]

    def next_rows(self, count: int) -> list[RecallRow]:
        """The next `count` rows."""
        bounds = np.array([0, self._rule.length], dtype=np.int32)
        first, self._taken = self._taken, self._taken + count
        rules = ((index, self._rule_of(index)) for index in range(first, self._taken))
        return [RecallRow([], rule.num_answers, bounds, index, rule) for index, rule in rules]

    def read(self, row: RecallRow) -> PackedBatch:
        """A row's tokens."""
        return row.rule.draw([*self._seed, row.index])

    def _rule_of(self, index: int) -> RecallRule:
        # Multiples of the golden ratio fill [0, 1) evenly: any stretch of rows has the whole mixture.
        share = index * GOLDEN_RATIO % 1
        num_pairs = self._fewest_pairs * ((self._rule.num_pairs + 1) / self._fewest_pairs) ** share
        return dataclasses.replace(self._rule, num_pairs=int(num_pairs))


class RecallTask:
    """config.data of kind "recall" as a `task.Task`: evaluated on held-out sequences of the stage's own length, by the
    share of answers where the likeliest token is the right one.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self.vocab_size = config.vocab_size

    def fingerprint(self) -> dict[str, int]:
        """As `Task.fingerprint`."""
        data = self._config.data
        names = ("num_pairs", "fewest_pairs", "num_keys", "num_values")
        return {name: getattr(data, name) for name in names if getattr(data, name) is not None}

    def describe(self) -> str:
        """As `Task.describe`."""
        data = self._config.data
        return (
            f"recall of {data.num_pairs} pairs out of {data.num_keys} keys and {data.num_values} values; evaluation on "
            f"{self._config.evaluation.windows} sequences"
        )

    def rule(self, stage: StageConfig) -> RecallRule:
        """What a stage's sequences are made by."""
        data = self._config.data
        return RecallRule(data.num_pairs, data.num_keys, data.num_values, stage.context_length)

    def sampler(self, stage: StageConfig, index: int) -> RecallSampler:
        """As `Task.sampler`."""
        return RecallSampler(self.rule(stage), (self._config.seed, 1 + index), self._config.data.fewest_pairs)

    def evaluate(self, engine: Any, stage: StageConfig, scaling: str, watch: Watch = UNWATCHED) -> list[dict[str, Any]]:
        """As `Task.evaluate`, with "accuracy". One entry, of the stage's own length: no positions are scaled."""
        rule, windows = self.rule(stage), self._config.evaluation.windows

        def batch_of(indices: Sequence[int]) -> PackedBatch:
            return PackedBatch.concatenate([rule.draw([self._config.seed, HELD_OUT, index]) for index in indices])

        at_once = stage.rows_per_micro_batch or stage.rows_per_step // engine.data_parallel_size
        measures = [engine.window_losses, engine.window_hits]
        losses, hits = score_windows(engine, measures, batch_of, windows, at_once, watch) / rule.num_answers
        nll, error = mean_and_error(losses.tolist())
        accuracy, accuracy_error = mean_and_error(hits.tolist())
        result = {"context": rule.length, "nll": nll, "standard_error": error, "windows": windows}
        result |= {"accuracy": accuracy, "accuracy_standard_error": accuracy_error}
        watch.on_length(result)
        return [result]
