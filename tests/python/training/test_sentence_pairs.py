"""Accuracy on pairs of sentences: which sentence is preferred, and files that hold no pairs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_sb.training.config import ConfigError, load_config
from megatron_sb.training.sentence_pairs import accuracy_on_pairs, load_pairs
from megatron_sb.training.task import load_task
from megatron_sb.validation import InputError

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = str(CONFIGS / "tiny_context_extension.yaml")


def write_pairs(path: Path, pairs) -> str:
    lines = (json.dumps({"sentence_good": good, "sentence_bad": bad, "UID": path.stem}) for good, bad in pairs)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


class CountsWords:
    """Ranks one after the other. The "loss" of a sentence is the number of its spaces, of labels that count."""

    def __init__(self, num_groups: int) -> None:
        self.data_parallel_rank, self.data_parallel_size = 0, num_groups
        self.batches, self.total = [], 0

    def window_losses(self, batch, num_windows):
        self.batches.append(batch)
        parts = np.split((batch.labels == ord(" ")) & batch.counted, batch.cu_seqlens[1:-1])
        assert len(parts) == num_windows
        return torch.tensor([part.sum() for part in parts], dtype=torch.float64)

    def sum_over_ranks(self, sums):
        self.total = self.total + sums
        return self.total


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_the_likelier_sentence_is_preferred(tmp_path, num_groups):
    """Equal likelihoods count as wrong; files count alike; errors are binomial within a file."""
    easy = [("é", "a b"), ("a", "a b c"), ("a b c", "a b c d"), ("a b", "a")]
    hard = [("a b", "c d"), ("a", "a b")]
    pairs = load_pairs([write_pairs(tmp_path / "easy.jsonl", easy), write_pairs(tmp_path / "hard.jsonl", hard)])
    assert pairs == {"easy": easy, "hard": hard}
    config = load_config(TINY)
    engine = CountsWords(num_groups)
    for engine.data_parallel_rank in range(num_groups):
        found = accuracy_on_pairs(engine, pairs, config, config.stages[1])
    assert found["by_file"] == {"easy": 0.75, "hard": 0.5} and found["pairs"] == 6
    assert found["accuracy"] == 0.625
    assert found["standard_error"] == pytest.approx((0.75 * 0.25 / 3 + 0.5 * 0.5 / 1) ** 0.5 / 2)
    multiple = config.row_multiple(config.stages[1])
    assert {length % multiple for batch in engine.batches for length in np.diff(batch.cu_seqlens)} == {0}


def test_one_pair_of_a_file_has_no_standard_error(tmp_path):
    """Nor has a mean with it: the error of one pair is not 0."""
    files = {"one": [("a", "a b")], "more": [("a", "a b"), ("a b", "a")]}
    config = load_config(TINY)
    for names in (("one",), ("one", "more")):
        pairs = load_pairs([write_pairs(tmp_path / f"{name}.jsonl", files[name]) for name in names])
        found = accuracy_on_pairs(CountsWords(1), pairs, config, config.stages[1])
        assert found["by_file"]["one"] == 1.0 and found["standard_error"] is None


def test_every_byte_of_a_sentence_is_scored(tmp_path):
    pairs = load_pairs([write_pairs(tmp_path / "one.jsonl", [("Ünd so", "x")])])
    config, engine = load_config(TINY), CountsWords(1)
    accuracy_on_pairs(engine, pairs, config, config.stages[1])
    (batch,) = engine.batches
    good, _ = np.split(np.arange(len(batch.tokens)), batch.cu_seqlens[1:-1])
    counted = good[batch.counted[good]]
    assert bytes(batch.labels[counted].astype(np.uint8)) == "Ünd so".encode()
    assert bytes(batch.tokens[counted].astype(np.uint8)) == "\nÜnd s".encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have files with pairs, got the empty file"),
        ("[1]\n", r"line 1 of .*must be a JSON object with the sentences sentence_good and sentence_bad, got b'\[1\]'"),
        ('{"sentence_good": "a"}\n', "line 1 of .*must be a JSON object"),
        ('{"sentence_good": "a", "sentence_bad": ""}\n', "line 1 of .*must be a JSON object"),
        ('{"sentence_good": "a\\ud800", "sentence_bad": "b"}\n', "line 1 of .*must be a JSON object"),  # half a pair
        ('{"sentence_good": "a", "sentence_bad": "b"}\n{"sentence_good": 1, "sentence_bad": "b"}\n', "line 2 of "),
        ('{"sentence_good": "a", "sentence_bad": "b"}\nnot JSON\n', "line 2 of .*got b'not JSON'"),
    ],
)
def test_files_without_pairs(tmp_path, text, message):
    path = tmp_path / "pairs.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_pairs([str(path)])


def test_the_pairs_belong_to_the_data_of_a_run(tmp_path):
    """A run is not resumed with others: its evaluations could not be compared."""
    (tmp_path / "text").mkdir()
    for index in range(20):
        (tmp_path / "text" / f"{index}.txt").write_text("text " * 20)
    small = [
        f"data.paths=[{tmp_path / 'text'}]",
        "evaluation={target_tokens: 16, longest: 32}",
        "stages.0.context_length=64",
    ]
    small += [
        "data.validation_fraction=0.5",
        "stages.1.context_length=64",
        f"evaluation.sentence_pairs=[{tmp_path}/a.jsonl]",
    ]
    config, found = load_config(TINY, small), []
    for pairs in ([("a", "b")], [("a", "b")], [("a", "c")]):
        write_pairs(tmp_path / "a.jsonl", pairs)
        found.append(load_task(config).fingerprint())
    assert found[0] == found[1] != found[2]
    without = load_task(load_config(TINY, [*small, "evaluation.sentence_pairs=[]"])).fingerprint()
    assert without.items() < found[0].items()  # that of a run of an older version


def test_missing_and_equal_names(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"sentence_pairs must be files, got '.*/none\.jsonl', which is none"):
        load_pairs([str(tmp_path / "none.jsonl")])
    (tmp_path / "other").mkdir()
    paths = [write_pairs(folder / "a.jsonl", [("a", "b")]) for folder in (tmp_path, tmp_path / "other")]
    with pytest.raises(InputError, match="files with different names, got two 'a'"):
        load_pairs(paths)


def test_only_for_bytes():
    overrides = ["data={kind: indexed, paths: [a], vocab_size: 50000, end_of_document: 0}"]
    with pytest.raises(ConfigError, match=r"must be 257 and 256 for evaluation\.sentence_pairs.*got 50000 and 0"):
        load_config(TINY, [*overrides, "evaluation.sentence_pairs=[pairs.jsonl]"])
    with pytest.raises(ConfigError, match=r"evaluation\.sentence_pairs must keep its default \(\) for data\.kind"):
        load_config(str(CONFIGS / "mqrar_small.yaml"), ["evaluation.sentence_pairs=[pairs.jsonl]"])
