"""Generated recall sequences: labels, rows and evaluation."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_sb.experiments.recall import RecallRule, labelled
from megatron_sb.training.config import ConfigError, load_config
from megatron_sb.training.data import rows_ahead
from megatron_sb.training.evaluate import Watch
from megatron_sb.training.task import load_task

SMALL = Path(__file__).parents[3] / "configs" / "mqrar_small.yaml"


def answers_of(tokens, num_keys):
    """Return position -> latest value of the key there, from the tokens alone."""
    latest, answers = {}, {}
    for position, token in enumerate(tokens):
        if position % 2 == 0:
            assert token < num_keys
            if token in latest:
                answers[position] = latest[token]
        else:
            assert token >= num_keys
            latest[tokens[position - 1]] = token
    return answers


def check_sequence(batch, num_keys, num_answers):
    answers = answers_of(batch.tokens.tolist(), num_keys)
    assert {int(at): int(batch.labels[at]) for at in np.flatnonzero(batch.counted)} == answers
    assert len(answers) == num_answers


@pytest.mark.parametrize(("num_pairs", "num_keys", "length"), [(1, 1, 4), (5, 9, 64), (32, 32, 66), (192, 4096, 768)])
def test_labels_are_the_latest_values(num_pairs, num_keys, length):
    rule = RecallRule(num_pairs, num_keys, 7, length)
    keys_seen, tokens_seen = set(), set()
    for seed in range(20):
        batch = rule.draw([seed])
        check_sequence(batch, num_keys, rule.num_answers)
        first = batch.tokens[: 2 * num_pairs : 2]
        assert len(set(first)) == num_pairs and not batch.counted[: 2 * num_pairs].any()
        assert set(batch.tokens[::2]) == set(first) and batch.tokens.max() < num_keys + 7
        assert batch.cu_seqlens.tolist() == [0, length]
        keys_seen.update(first.tolist())
        tokens_seen.add(tuple(batch.tokens))
    assert len(keys_seen) >= min(num_keys, 4 * num_pairs) and (num_keys == 1 or len(tokens_seen) == 20)
    assert (rule.draw([3]).tokens == rule.draw([3]).tokens).all()


def test_the_example_of_the_docstring():
    batch = labelled(np.frombuffer(b"BPEXZEBEB", dtype=np.uint8), np.array([6, 4, 3, 1, 2, 2, 1, 5, 4]))
    assert np.flatnonzero(batch.counted).tolist() == [10, 12, 14, 16]
    assert batch.labels[batch.counted].tolist() == [3, 6, 2, 1]


def test_rows_resume_and_differ_from_the_evaluation():
    config = load_config(SMALL, ["data.fewest_pairs=null"])  # so that all sequences have the same rule
    task, stage = load_task(config), config.stages[0]
    assert task.vocab_size == config.vocab_size == 64 + 16
    straight, again = task.sampler(stage, 0), task.sampler(stage, 0)
    rows = straight.next_rows(9)
    assert {row.num_tokens for row in rows} == {straight.read(row).counted.sum() for row in rows}
    state = next(rows_ahead(again, 4, 2, group=0, num_groups=1, rows_per_micro_batch=2)).sampler
    resumed = task.sampler(stage, 0)
    resumed.load_state_dict(state)
    assert [row.index for row in resumed.next_rows(5)] == [row.index for row in rows[4:]]
    other_stage = task.sampler(stage, 1)
    drawn = {tuple(straight.read(row).tokens) for row in rows}
    others = {tuple(other_stage.read(row).tokens) for row in other_stage.next_rows(9)}
    model = HalfRight()
    task.evaluate(model, stage, "none")
    assert len(set(model.seen)) == config.evaluation.windows
    assert drawn.isdisjoint(others) and (drawn | others).isdisjoint(model.seen)


def test_rows_of_fewer_pairs():
    """Rows have fewest_pairs to num_pairs pairs. Each doubling of the number of pairs has equally many rows."""
    config = load_config(SMALL, ["data.num_pairs=16", "data.fewest_pairs=2"])
    task, stage = load_task(config), config.stages[0]
    sampler = task.sampler(stage, 0)
    for _ in range(3):
        rows = sampler.next_rows(300)
        pairs = [stage.context_length // 2 - row.num_tokens for row in rows]
        assert [row.num_tokens for row in rows] == [sampler.read(row).counted.sum() for row in rows]
        counts = np.bincount(pairs, minlength=17)
        assert len(counts) == 17 and not counts[:2].any() and counts[2:].all()
        expected = 300 * np.log(np.arange(3, 18) / np.arange(2, 17)) / np.log(17 / 2)
        assert np.abs(counts[2:] - expected).max() < 4
    assert task.rule(stage).draw([0]).counted.sum() == stage.context_length // 2 - 16
    alone = load_task(load_config(SMALL, ["data.num_pairs=16", "data.fewest_pairs=null"]))
    assert {row.num_tokens for row in alone.sampler(stage, 0).next_rows(9)} == {stage.context_length // 2 - 16}
    assert task.fingerprint() != alone.fingerprint()


class HalfRight:
    """A model that answers half of the questions. The loss of a label is its index among the values.

    It keeps the sequences that it has seen.
    """

    data_parallel_rank, data_parallel_size = 0, 1

    def __init__(self):
        self.seen = []

    def window_losses(self, batch, num_windows):
        self.seen += map(tuple, np.split(batch.tokens, batch.cu_seqlens[1:-1]))
        losses = (batch.labels - 16) * batch.counted
        return torch.from_numpy(np.add.reduceat(losses, batch.cu_seqlens[:-1])).double()

    def window_hits(self, batch, num_windows):
        counts = np.add.reduceat(batch.counted.astype(int), batch.cu_seqlens[:-1])
        assert len(counts) == num_windows
        return torch.from_numpy(counts // 2).double()

    def sum_over_ranks(self, sums):
        return sums


def test_accuracy_is_the_share_of_right_answers():
    small = ["data.num_pairs=4", "data.num_keys=16", "data.num_values=4", "stages.0.context_length=48"]
    config = load_config(SMALL, [*small, "evaluation.windows=70"])
    seen = []
    (result,) = load_task(config).evaluate(HalfRight(), config.stages[0], "none", Watch(seen.append))
    assert result["accuracy"] == 0.5 and result["accuracy_standard_error"] == 0
    assert result["nll"] == pytest.approx(1.5, abs=0.1) and result["standard_error"] < 0.1
    assert (result["context"], result["windows"], seen) == (48, 70, [result])


INVALID = {
    "data.num_pairs=null": r"data\.num_pairs.*None",
    "data.num_keys=7": r"data\.num_pairs must be at most data\.num_keys = 7, got 8",
    "data.vocab_size=99": r"data\.vocab_size.*99.*recall",
    "data.paths=[a]": r"data\.paths.*\['a'\].*recall",
    "data.validation_fraction=0.2": r"data\.validation_fraction.*0\.2.*recall",
    "evaluation.length_factor=1": r"evaluation\.length_factor must .*recall.*got 1:",
    "data.kind=text": r"data\.num_pairs.*8.*text",
    "data.fewest_pairs=9": r"data\.fewest_pairs must be at most data\.num_pairs = 8, got 9",
    "stages.0.context_length=16": r"context_length must be even and more than 2 \* data\.num_pairs = 16, got 16",
    "stages.0.context_length=63": r"context_length must be even .*got 63",
    "attention.softmax_rope={evaluated_scalings: [ntk]}": r"evaluated_scalings must be .*recall.*got \['ntk'\]",
}


@pytest.mark.parametrize("override", INVALID)
def test_invalid_fields(override):
    with pytest.raises(ConfigError, match=INVALID[override]):
        load_config(SMALL, ["data.num_pairs=8", override])
