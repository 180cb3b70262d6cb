"""The evaluation by context length, with an engine that only adds up labels."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_sb.training import documents
from megatron_sb.training import evaluate as evaluation
from megatron_sb.training.config import load_config
from megatron_sb.training.evaluate import Watch, choose_windows, evaluate, read_result, result_path
from megatron_sb.training.report import Report
from megatron_sb.validation import InputError

TINY = Path(__file__).parents[3] / "configs" / "tiny_context_extension.yaml"


def test_every_evaluation_has_a_file_of_its_own():
    """Models and stages may have hyphens in their names."""
    (stage, _) = load_config(TINY).stages
    names = {
        result_path(Path("run"), model, dataclasses.replace(stage, name=name), scaling).name
        for model, name in (("a", "b-c"), ("a-b", "c"), ("a-b-c", "ntk"), ("a", "b"))
        for scaling in ("none", "ntk")
    }
    assert len(names) == 8 and {"a.b-c.json", "a-b.c.ntk.json"} < names


@pytest.mark.parametrize(("text", "message"), [('{"nll": 1', "is damaged: "), ("[]", "must hold a JSON object")])
def test_a_damaged_result_is_named(text, message, tmp_path):
    (stage, _) = load_config(TINY).stages
    path = result_path(tmp_path, "stick_breaking", stage, "none")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(InputError, match=f"{path} {message}"):
        read_result(tmp_path, "stick_breaking", stage, "none")


@pytest.mark.parametrize("chunk", [3, 2**16])
def test_windows_are_spread_over_all_documents(chunk, monkeypatch):
    """Data sets keep the files of a project together: the first documents would all be of one project."""
    monkeypatch.setattr(evaluation, "CHUNK", chunk)
    monkeypatch.setattr(documents, "CHUNK", chunk)
    config = load_config(TINY, ["evaluation.windows=4", "evaluation.longest=8", "evaluation.target_tokens=4"])
    read: list[tuple] = []

    def windows_of(*lengths):
        read.clear()
        validation = SimpleNamespace(lengths=np.array(lengths), read=lambda *place: read.append(place))
        choose_windows(SimpleNamespace(validation=validation), config)
        return read

    assert windows_of(*[9] * 20) == [(document, 0, 9) for document in (0, 5, 10, 15)]
    assert windows_of(*[8, 9, 20] * 5) == [(document, 0, 9) for document in (1, 4, 8, 11)], "8 tokens are too few"
    # Two documents are long enough. Both give their starts, then both their second parts.
    assert windows_of(5, 40, 5, 17) == [(1, 0, 9), (3, 0, 9), (1, 8, 17), (3, 8, 17)]
    assert windows_of(5, 40, 5) == [(1, start, start + 9) for start in (0, 8, 16, 24)]
    assert windows_of(17, 17, 17) == [(0, 0, 9), (1, 0, 9), (2, 0, 9), (0, 8, 17)]
    with pytest.raises(InputError, match="the longest validation document must have 9 tokens, got 8"):
        windows_of(8, 8)


class Adder:
    """Ranks one after the other; a sequence's "loss" is the sum of its labels that count."""

    def __init__(self, num_groups: int) -> None:
        self.data_parallel_rank, self.data_parallel_size = 0, num_groups
        self.calls: list[list[tuple]] = [[] for _ in range(num_groups)]
        self.totals: dict[int, torch.Tensor] = {}

    def scale_positions(self, kind, factor): ...

    def window_losses(self, batch, num_windows):
        self.calls[self.data_parallel_rank].append((num_windows, len(batch.tokens)))
        parts = np.split(batch.labels * batch.counted, batch.cu_seqlens[1:-1])
        return torch.tensor([part.sum() for part in parts], dtype=torch.float64)

    def sum_over_ranks(self, sums):
        self.turn += 1
        self.totals[self.turn] = self.totals.get(self.turn, 0) + sums
        return self.totals[self.turn]


@pytest.mark.parametrize("num_windows", [2, 5, 6])
@pytest.mark.parametrize("packing", ["per_document", "whole_stream"])
def test_groups_score_as_many_windows_each(num_windows, packing):
    """Three groups: the same calls on all, or experts that they share would wait for ever; rows that ranks can cut."""
    config = load_config(TINY, ["evaluation.target_tokens=10", f"parallel.packing={packing}"])
    stage = config.stages[1]
    generator = np.random.default_rng(0)
    windows = [generator.integers(256, size=config.longest_evaluated(stage) + 1) for _ in range(num_windows)]
    engine, corpus, batches = Adder(num_groups=3), SimpleNamespace(end_of_document=256, vocab_size=257), []
    watch = Watch(on_batch=lambda: batches.append(1))
    for engine.data_parallel_rank in range(3):
        engine.turn = 0
        results = evaluate(engine, corpus, windows, config, stage, watch=watch)
    assert len(batches) == sum(map(len, engine.calls)), "a stop is heard after each"
    assert engine.calls[0] == engine.calls[1] == engine.calls[2]
    assert all(length % config.row_multiple(stage) == 0 for _, length in engine.calls[0])
    assert [result["context"] for result in results] == config.evaluation_lengths(stage)
    means = [window[-10:].mean() for window in windows]
    for result in results:
        assert result["nll"] == pytest.approx(np.mean(means)) and result["windows"] == num_windows
        assert result["standard_error"] == pytest.approx(np.std(means, ddof=1) / num_windows**0.5)


@pytest.mark.parametrize(("vocab_size", "at_once"), [(257, 64), (100_000, 2)])
def test_short_windows_share_a_forward(vocab_size, at_once):
    """As many as the tokens and the logits of a forward allow, also if no window is longer than the others."""
    overrides = ["evaluation.target_tokens=1024", "evaluation.longest=1024", "evaluation.positions=true"]
    config = load_config(TINY, [*overrides, "stages.1.context_length=1024"])
    windows = [np.arange(1025) + index for index in range(64)]
    engine, corpus = Adder(num_groups=1), SimpleNamespace(end_of_document=256, vocab_size=vocab_size)
    engine.turn = 0
    (result,) = evaluate(engine, corpus, windows, config, config.stages[1])
    forwards = 1 + len(result["by_position"])
    assert engine.calls[0] == [(at_once, at_once * 1024)] * (64 // at_once * forwards)
    assert result["nll"] == pytest.approx(np.mean([window[1:].mean() for window in windows]))
    # The label of position i in window n is i + 1 + n.
    entries = result["by_position"]
    assert [entry["begin"] for entry in entries] == [0, 16, 32, 64, 128, 256, 512]
    assert [entry["end"] for entry in entries] == [16, 32, 64, 128, 256, 512, 1024]
    expected = [(entry["begin"] + entry["end"] + 1) / 2 + 31.5 for entry in entries]
    assert [entry["nll"] for entry in entries] == pytest.approx(expected)


def test_an_evaluation_of_another_step_does_not_count(tmp_path):
    """It belongs to other weights. The report writes the step, and lists only evaluations of the last one."""
    config = load_config(TINY, ["report.tensorboard=false", "compare=[stick_breaking]"])
    stage = config.stages[0]
    written = Report(tmp_path, config, "a CPU")
    written.evaluation("stick_breaking", stage, stage.steps, "none", [{"context": 8, "nll": 1.0}])
    path = result_path(tmp_path, "stick_breaking", stage, "none")
    entry = json.loads(path.read_text())
    assert entry["step"] == stage.steps and written.evaluations() == [entry]
    path.write_text(json.dumps(entry | {"step": stage.steps - 1}))
    assert written.evaluations() == []


def test_a_likelihood_that_is_not_a_number(tmp_path):
    """As of a model that has diverged: the file is JSON, which has no NaN, and the report shows what it has read."""
    config = load_config(TINY, ["report.tensorboard=false", "compare=[stick_breaking]"])
    stage = config.stages[0]
    written = Report(tmp_path, config, "a CPU")
    results = [{"context": 8, "nll": math.nan, "standard_error": math.nan, "windows": 2}]
    written.evaluation("stick_breaking", stage, stage.steps, "none", results)
    text = result_path(tmp_path, "stick_breaking", stage, "none").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["results"][0]["nll"] is None
    (result,) = read_result(tmp_path, "stick_breaking", stage, "none")["results"]
    assert math.isnan(result["nll"]) and result["standard_error"] is None
    assert "nan" in written.table()
    written.draw()
    assert (tmp_path / "nll_by_length.png").exists()
