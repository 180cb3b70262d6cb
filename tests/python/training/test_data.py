"""Documents, their split and the rows packed from them."""

import dataclasses
import itertools
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

from megatron_sb.megatron.indexed_documents import write_documents
from megatron_sb.training import loop
from megatron_sb.training.checkpoint import Progress
from megatron_sb.training.config import IndexedDataConfig, TextDataConfig, load_config
from megatron_sb.training.data import PackedBatch, RowSampler, pack, rows_ahead, split_rows
from megatron_sb.training.documents import BYTE_END_OF_DOCUMENT, CHECKED_BYTES, _dtype_for, load_corpus
from megatron_sb.training.evaluate import choose_windows
from megatron_sb.training.loop import Job
from megatron_sb.training.task import load_task
from megatron_sb.training.text_files import list_files

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = load_config(CONFIGS / "tiny_context_extension.yaml")


def with_data(**fields):
    cls = IndexedDataConfig if fields.get("kind") == "indexed" else TextDataConfig
    return dataclasses.replace(TINY, data=cls(**fields))


@pytest.fixture
def text_folder(tmp_path):
    """40 files of 1 to 3004 random bytes, an empty one, and one that is not asked for."""
    generator = np.random.default_rng(7)
    for index in range(40):
        folder = tmp_path / f"part{index % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{index:02d}.txt").write_bytes(generator.integers(0, 256, 1 + 77 * index, dtype=np.uint8).tobytes())
    (tmp_path / "empty.txt").touch()
    (tmp_path / "part0" / "image.png").write_bytes(b"not text")
    return tmp_path


def whole(side, index):
    """One document."""
    return side.read(index, 0, int(side.lengths[index]))


def test_a_text_file_that_becomes_shorter_is_an_error(text_folder):
    """Its rows would have fewer tokens than the ranks and the loss expect."""
    corpus = load_corpus(with_data(paths=(str(text_folder),), validation_fraction=0.3))
    index = int(corpus.train.lengths.argmax())
    length = int(corpus.train.lengths[index])
    (name,) = [path for path in text_folder.rglob("*.txt") if path.stat().st_size == length - 1]
    os.truncate(name, 10)
    assert len(corpus.train.read(index, 0, 10)) == 10
    message = rf"{name} must have {length - 1} bytes, as when the job started, got 10\. Do not change the files"
    for start, stop in ((0, 11), (5, length), (100, length)):
        with pytest.raises(ValueError, match=message):
            corpus.train.read(index, start, stop)


def test_text_folder_is_split_by_file_and_nothing_is_lost(text_folder):
    config = with_data(paths=(str(text_folder),), validation_fraction=0.3)
    corpus, again = load_corpus(config), load_corpus(config)
    assert len(corpus.train) + len(corpus.validation) == 40
    assert 4 <= len(corpus.validation) <= 20
    assert corpus.fingerprint() == again.fingerprint()
    texts = Counter(path.read_bytes() for path in text_folder.rglob("*.txt") if path.stat().st_size)
    read = Counter()
    for side in (corpus.train, corpus.validation):
        for index, length in enumerate(side.lengths):
            tokens = whole(side, index)
            assert len(tokens) == length and tokens[-1] == BYTE_END_OF_DOCUMENT
            read[tokens[:-1].astype(np.uint8).tobytes()] += 1
    assert read == texts


def test_documents_that_change_are_told_apart(text_folder):
    """By their contents, too: one byte, at either end of a long file or anywhere in another."""
    config = with_data(paths=(str(text_folder),), validation_fraction=0.3)
    file, long = text_folder / "part1" / "37.txt", text_folder / "long.txt"
    long.write_bytes(bytes(3 * CHECKED_BYTES))
    seen = {load_corpus(config).fingerprint()["checksum"]}
    for path, place in ((file, 1500), (long, 0), (long, 3 * CHECKED_BYTES - 1)):
        text = bytearray(path.read_bytes())
        text[place] ^= 1
        path.write_bytes(text)
        seen.add(load_corpus(config).fingerprint()["checksum"])
    assert len(seen) == 4


def small_job(text_folder, out, *fields):
    overrides = [f"data.paths=[{text_folder}]", "data.validation_fraction=0.3", "compare=[stick_breaking]"]
    overrides += [
        "stages.0.context_length=64",
        "stages.1.context_length=64",
        "evaluation={target_tokens: 16, longest: 64}",
        *fields,
    ]
    return Job(load_config(CONFIGS / "tiny_context_extension.yaml", overrides), out, torch.device("cpu"), None)


@pytest.mark.parametrize("key", ["checksum", "train_tokens"])
def test_a_job_does_not_go_on_with_other_documents(key, text_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "StopRequest", lambda: None)
    corpus = small_job(text_folder, tmp_path)._task.fingerprint()

    def saved(corpus):
        checkpoint = tmp_path / "stick_breaking" / "checkpoints" / "short-000001"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint.parent / "latest").write_text(checkpoint.name)
        (checkpoint / "progress.json").write_text(json.dumps(dataclasses.asdict(Progress("short", 1, 1, {}, corpus))))

    saved(corpus)
    small_job(text_folder, tmp_path)
    saved({**corpus, key: 7})
    with pytest.raises(ValueError, match=rf"^the data changed after .*short-000001 was saved: .* must be .*'{key}': 7"):
        small_job(text_folder, tmp_path)
    del corpus["checksum"]  # as runs had it before
    saved(corpus)
    small_job(text_folder, tmp_path)


def test_a_finished_model_without_a_checkpoint_is_not_compared_on_other_documents(text_folder, tmp_path, monkeypatch):
    """With checkpoint.stage_ends = false, a model leaves results. The next one was trained on what the files hold."""
    monkeypatch.setattr(loop, "StopRequest", lambda: None)
    out = tmp_path / "run"
    (out / "evaluation").mkdir(parents=True)

    def job():
        return small_job(text_folder, out, "checkpoint.stage_ends=false")

    record = {"fingerprint": job().fingerprint()}
    (out / "data.json").write_text(json.dumps(record))
    (out / "evaluation" / "stick_breaking.extended.json").write_text("{}")
    job()
    record["fingerprint"]["checksum"] += 1
    (out / "data.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"^the data changed after stick_breaking was trained in {out}: .*'checksum'"):
        job()
    (out / "evaluation" / "stick_breaking.extended.json").unlink()  # nothing is left of the other documents
    job()


def test_paths_may_be_files_patterns_and_the_standard_library(text_folder):
    single, pattern = str(text_folder / "part0" / "00.txt"), str(text_folder / "part1" / "*.txt")
    corpus = load_corpus(with_data(paths=(single, pattern, single), validation_fraction=0.3))
    assert len(corpus.train) + len(corpus.validation) == 1 + 13
    library = load_corpus(TINY)
    assert library.train.lengths.sum() > 3_000_000
    windows = choose_windows(library, TINY)
    assert len(windows) == TINY.evaluation.windows and {len(window) for window in windows} == {16385}
    some = load_corpus(with_data(include=("a*.py",), validation_fraction=0.3))
    assert 10 < len(some.train) + len(some.validation) < len(library.train) / 4
    with pytest.raises(ValueError, match=r"data\.include must match .*'python-stdlib', got \['\*\.txt'\]"):
        load_corpus(with_data(include=("*.txt",)))
    packages = load_corpus(with_data(paths=("python-site-packages",), include=("*.py",)))
    assert packages.train.lengths.sum() > library.train.lengths.sum(), "torch's sources alone are more"


def test_a_file_is_read_once_however_its_path_is_written(text_folder, monkeypatch):
    """Else one copy could be held out and the other one trained on."""
    monkeypatch.chdir(text_folder)
    absolute, relative = list_files(TextDataConfig(paths=(str(text_folder),))), list_files(TextDataConfig(paths=(".",)))
    both = list_files(TextDataConfig(paths=(".", str(text_folder), "part0/../part1")))
    assert both.names == relative.names and len(both.names) == len(both.sizes) == len(absolute.names)


def test_files_that_are_left_out_are_counted(text_folder):
    """By reason, in the sentence that the log and the run's record have."""
    (text_folder / "part1" / "cache").mkdir()
    (text_folder / "part1" / "cache" / "1.txt").write_text("excluded with its directory")
    (text_folder / "notes.md").write_text("excluded")
    (text_folder / "table.json").write_text("{}")
    data = TextDataConfig(paths=(str(text_folder),), validation_fraction=0.3, exclude=("cache", "*.md"))
    evaluation = dataclasses.replace(TINY.evaluation, target_tokens=16, longest=64)
    task = load_task(dataclasses.replace(TINY, data=data, evaluation=evaluation))
    assert "; left out: 2 by data.exclude, 2 by data.include, 1 empty; " in task.describe()
    fingerprint = task.fingerprint()
    assert fingerprint["train_documents"] + fingerprint["validation_documents"] == 40


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"include": ("*.html",)}, r"data\.include must .*'\*\.html'.* match none of the 42 files"),
        ({"exclude": ("part?", "*.txt")}, r"data\.exclude must leave files in .*'part\?'"),
        ({"exclude": ("part1/",)}, r"data\.exclude must have patterns of names, without '/', got 'part1/'"),
        ({"include": ("*.txt", "part1/*.md")}, r"data\.include must have patterns of names, .* got 'part1/\*\.md'"),
    ],
)
def test_patterns_that_leave_no_file_or_match_no_name_are_named(fields, message, text_folder):
    """The folder is not empty, and the message does not say so."""
    with pytest.raises(ValueError, match=message):
        load_corpus(with_data(paths=(str(text_folder),), **fields))


def test_exclude_applies_to_files_and_glob_patterns(text_folder, monkeypatch):
    """They silently read what it names. The folders that a pattern names are not compared with it."""
    monkeypatch.chdir(text_folder)

    def read(*paths, exclude):
        return list_files(TextDataConfig(paths=paths, exclude=exclude))

    assert len(read("part1/*.txt", exclude=()).names) == 13
    assert len(read("./part1/*.txt", str(text_folder / "part1" / "*.txt"), exclude=("part1", "0?.txt")).names) == 10
    some = read("**/*.txt", "part1/01.txt", exclude=("part?",))
    assert some.names == ["part1/01.txt"] and some.left_out == {"empty": 1, "by data.exclude": 40}
    assert read("part0/*.png", "part1/01.txt", exclude=("part1",)).names == ["part0/image.png", "part1/01.txt"]
    for entry in ("part1/*.txt", "part1/01.txt"):
        with pytest.raises(ValueError, match=rf"data\.exclude must leave files in .*{re.escape(entry)}"):
            read(entry, exclude=("*.txt",))


def test_links_and_folders_that_cannot_be_read(text_folder, monkeypatch):
    """A linked file is read, a linked folder is not. A folder that cannot be read is an error, not empty."""
    (text_folder / "link.txt").symlink_to(text_folder / "part1" / "37.txt")
    (text_folder / "loop").symlink_to(text_folder)
    data = TextDataConfig(paths=(str(text_folder),))
    assert len(list_files(data).names) == 41
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("part1"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="part1"):
        list_files(data)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("/nowhere/*.txt",), "data.paths .* got '/nowhere/\\*.txt'"),
        (("{}/part0/00.txt",), "data.paths must hold at least one .* got [01] and [01] of 1 documents"),
    ],
)
def test_paths_that_give_nothing_are_refused(paths, message, text_folder):
    with pytest.raises(ValueError, match=message):
        load_corpus(with_data(paths=tuple(path.format(text_folder) for path in paths)))


def test_too_short_for_the_evaluation_is_refused(text_folder):
    config = with_data(paths=(str(text_folder),), validation_fraction=0.3)
    with pytest.raises(ValueError, match="must have 16385 tokens, got 2697"):
        choose_windows(load_corpus(config), config)


def test_indexed_dataset_gives_the_same_documents(text_folder, tmp_path):
    """Documents of several sequences, some without the end-of-document token."""
    text = load_corpus(with_data(paths=(str(text_folder),)))
    builder = IndexedDatasetBuilder(get_bin_path(str(tmp_path / "set")), dtype=np.uint16)
    for index in range(len(text.train)):
        tokens = whole(text.train, index)[: None if index % 2 else -1]
        for piece in np.array_split(tokens, 1 + min(index % 3, len(tokens) - 1)):
            builder.add_item(torch.from_numpy(piece))
        builder.end_document()
    builder.finalize(get_idx_path(str(tmp_path / "set")))
    fields = {"kind": "indexed", "paths": (str(tmp_path / "set"),), "vocab_size": 300, "end_of_document": 256}
    corpus = load_corpus(with_data(**fields, validation_fraction=0.4))
    read = Counter(
        tuple(whole(side, i).tolist()) for side in (corpus.train, corpus.validation) for i in range(len(side))
    )
    assert read == Counter(tuple(whole(text.train, index).tolist()) for index in range(len(text.train)))
    assert corpus.vocab_size == 300
    narrow = load_corpus(with_data(**{**fields, "vocab_size": 257, "end_of_document": 250}))
    assert max(whole(narrow.train, index).max() for index in range(len(narrow.train))) == 256
    narrow = load_corpus(with_data(**{**fields, "vocab_size": 256, "end_of_document": 250}))
    with pytest.raises(
        ValueError, match=r"token \d+ of document \d+ of .*set in data\.paths must be .* = 255, got 256"
    ):
        [whole(narrow.train, index) for index in range(len(narrow.train))]
    write_documents(str(tmp_path / "held_out"), [np.array([0, 1]), np.array([0, 256, 1])], np.uint16)
    fields |= {"vocab_size": 256, "end_of_document": 250, "validation_paths": (str(tmp_path / "held_out"),)}
    with pytest.raises(ValueError, match=r"token 1 of document 1 of .*held_out in data\.validation_paths must be"):
        whole(load_corpus(with_data(**fields)).validation, 1)
    with pytest.raises(ValueError, match=r"data\.paths must be prefixes of an IndexedDataset"):
        load_corpus(with_data(**{**fields, "paths": (str(tmp_path / "other"),)}))
    with pytest.raises(ValueError, match=r"data\.validation_paths must be prefixes of an IndexedDataset, got .*other"):
        load_corpus(with_data(**{**fields, "validation_paths": (str(tmp_path / "other"),)}))


@pytest.mark.parametrize(
    ("dtype", "documents", "message"),
    [
        (np.float32, [np.array([1.5, 2.0], np.float32)], "data sets of integers, got .*set', which holds float32"),
        (np.int32, [np.empty(0, np.int32)], r"data sets with tokens, got .*set', whose \.bin file is empty"),
    ],
)
def test_an_indexed_dataset_without_integers_is_refused(dtype, documents, message, tmp_path):
    """Numbers were cut to integers, and an empty data set was called damaged."""
    write_documents(str(tmp_path / "set"), documents, dtype)
    fields = {"kind": "indexed", "paths": (str(tmp_path / "set"),), "vocab_size": 300, "end_of_document": 256}
    with pytest.raises(ValueError, match=rf"data\.paths must be {message}"):
        load_corpus(with_data(**fields))


def test_documents_of_one_token_are_left_out_and_tokens_below_0_are_an_error(tmp_path):
    """A document of one token has no label."""
    lengths = 3 * [1, 5, 1, 9, 3, 1, 4]
    documents = [np.arange(length, dtype=np.int32) for length in lengths]
    for document in documents:
        document[-1] = 250
    write_documents(str(tmp_path / "set"), documents, np.int32)
    fields = {"kind": "indexed", "paths": (str(tmp_path / "set"),), "vocab_size": 256, "end_of_document": 250}
    corpus = load_corpus(with_data(**fields, validation_fraction=0.5))
    assert sorted([*corpus.train.lengths.tolist(), *corpus.validation.lengths.tolist()]) == sorted(3 * [3, 4, 5, 9])
    assert corpus.left_out == {"empty": 9}
    write_documents(str(tmp_path / "held_out"), [np.array([7, -2, 250], dtype=np.int32)], np.int32)
    corpus = load_corpus(with_data(**fields, validation_paths=(str(tmp_path / "held_out"),)))
    with pytest.raises(ValueError, match=r"token 1 of document 0 of .*held_out .* must be from 0 to .*, got -2"):
        whole(corpus.validation, 0)


def next_row(sampler):
    """Read; what was known of it before is true."""
    (row,) = sampler.next_rows(1)
    read = sampler.read(row)
    np.testing.assert_array_equal(read.cu_seqlens, row.cu_seqlens)
    assert row.num_tokens == read.counted.sum()
    return read


@pytest.mark.parametrize("pad_multiple", [1, 4])
def test_an_epoch_of_rows_holds_every_label_once(text_folder, pad_multiple):
    corpus = load_corpus(with_data(paths=(str(text_folder),)))
    labels_there = Counter()
    for index in range(len(corpus.train)):
        labels_there.update(whole(corpus.train, index)[1:].tolist())
    sampler = RowSampler(corpus.train, 128, pad_multiple, corpus.end_of_document, [3, 1])
    seen = Counter()
    row = next_row(sampler)
    while sampler.state_dict()["epoch"] == 0:
        assert len(row.tokens) == len(row.labels) == len(row.counted) == 128
        bounds = row.cu_seqlens
        assert bounds[0] == 0 and bounds[-1] == 128 and (np.diff(bounds) % pad_multiple == 0).all()
        for start, end in itertools.pairwise(bounds):
            real = int(row.counted[start:end].sum())
            assert row.counted[start : start + real].all() and end - start - real < pad_multiple
            assert (row.tokens[start + 1 : start + real] == row.labels[start : start + real - 1]).all()
        seen.update(row.labels[row.counted].tolist())
        row = next_row(sampler)
    assert sampler.state_dict() == {"epoch": 1, "first": 0, "taken": 1}
    assert sum((seen - labels_there).values()) == 0
    assert 0 < sum((labels_there - seen).values()) < 128  # less than a row is dropped


def test_consecutive_rows_come_from_different_places(text_folder):
    corpus = load_corpus(with_data(paths=(str(text_folder),)))
    sampler = RowSampler(corpus.train, 64, 1, corpus.end_of_document, [3, 1])
    rows = [next_row(sampler) for _ in range(200)]
    follows = sum(before.labels[-1] == after.tokens[0] for before, after in itertools.pairwise(rows))
    assert follows < 20


def documents_of(task, config, index):
    """Return the documents of a stage's rows, by epoch."""
    stage, found = config.stages[index], {}
    sampler = task.sampler(stage, index)
    for _ in range(stage.steps * stage.rows_per_step):
        (row,) = sampler.next_rows(1)
        found.setdefault(sampler.state_dict()["epoch"], set()).update(document for document, _, _ in row.parts)
    return found


def test_the_order_of_documents_continues_over_stages(text_folder):
    """With other lengths of rows. No document is seen twice before all but the ends of the stages were seen once."""
    config = with_data(paths=(str(text_folder),), validation_fraction=0.3)
    tokens = int(load_corpus(config).train.lengths.sum())
    half = [
        dataclasses.replace(
            stage, context_length=length, context_parallel_size=1, rows_per_step=1, steps=tokens // 2 // length - 3
        )
        for stage, length in zip(config.stages, (64, 96), strict=True)
    ]
    evaluation = dataclasses.replace(config.evaluation, target_tokens=16, longest=64)
    again = dataclasses.replace(half[0], name="again")
    stages = (*half, again, dataclasses.replace(again, name="last", steps=again.steps // 2))
    config = dataclasses.replace(config, stages=stages, evaluation=evaluation)
    task = load_task(config)
    first, second, third, last = (documents_of(task, config, index) for index in range(4))
    assert first.keys() == second.keys() == {0} and third.keys() == {0, 1} and last.keys() == {1}
    assert not first[0] & second[0] and not (first[0] | second[0]) & third[0]
    num_documents = len(load_corpus(config).train)
    assert num_documents - 3 <= len(first[0] | second[0] | third[0]) <= num_documents
    assert len(third[1]) > num_documents / 4 and not third[1] & last[1]

    sampler, other = (task.sampler(config.stages[2], 2) for _ in range(2))
    sampler.next_rows(config.stages[2].steps - 5)
    other.load_state_dict(sampler.state_dict())
    assert [row.parts for row in other.next_rows(5)] == [row.parts for row in sampler.next_rows(5)]
    with pytest.raises(ValueError, match="position in the data must have epoch, first and taken"):
        sampler.load_state_dict({"epoch": 0, "taken": 3})


@pytest.fixture
def equal_documents(tmp_path):
    """20 training documents of 32 inputs."""
    for name, count in (("set", 20), ("held_out", 1)):
        documents = [np.append(np.arange(32) + index, 99) for index in range(count)]
        write_documents(str(tmp_path / name), documents, np.uint16)
    fields = {"paths": (str(tmp_path / "set"),), "validation_paths": (str(tmp_path / "held_out"),)}
    return load_corpus(with_data(kind="indexed", **fields, vocab_size=100, end_of_document=99)).train


@pytest.mark.parametrize(("row_length", "num_rows", "end"), [(64, 3, (0, 6)), (48, 1, (0, 2)), (64, 13, (1, 6))])
def test_the_end_of_a_number_of_rows(row_length, num_rows, end, equal_documents):
    """It is the first document that no row uses, also if a row ends with a document. The position stays."""
    sampler, other = (RowSampler(equal_documents, row_length, 1, 99, [3, 1], num_rows=num_rows) for _ in range(2))
    assert sampler.end() == end
    assert [sampler.next_rows(1)[0].parts for _ in range(num_rows)] == [row.parts for row in other.next_rows(num_rows)]
    assert sampler.end() == end and sampler.state_dict() == other.state_dict()


def test_a_row_has_inputs_and_a_document_one_token_more(equal_documents):
    """660 tokens do not fill a row of 650 inputs."""
    RowSampler(equal_documents, 640, 1, 99, [3, 1])
    with pytest.raises(ValueError, match="must fill a row of 650 tokens, got 660 tokens"):
        RowSampler(equal_documents, 650, 1, 99, [3, 1])


def test_numbers_of_the_index_fit_their_type():
    """A document may have more than 2^31 tokens."""
    assert np.iinfo(_dtype_for(2**31 - 1)).max == 2**31 - 1 and np.iinfo(_dtype_for(2**31)).max > 2**31


def test_less_than_a_row_is_refused(text_folder):
    corpus = load_corpus(with_data(paths=(str(text_folder),)))
    with pytest.raises(ValueError, match="must fill a row of 1000000 tokens, got"):
        RowSampler(corpus.train, 1_000_000, 1, corpus.end_of_document, [3, 1])


def test_a_later_stage_that_cannot_be_filled_is_refused_first(text_folder):
    config = with_data(paths=(str(text_folder),), validation_fraction=0.3)
    first, second = config.stages
    stages = (dataclasses.replace(first, context_length=64), dataclasses.replace(second, context_length=1_000_000))
    evaluation = dataclasses.replace(config.evaluation, target_tokens=16, longest=64)
    config = dataclasses.replace(config, stages=stages, evaluation=evaluation)
    with pytest.raises(
        ValueError,
        match=r"stages\.1\.context_length: the training documents must fill a row of 1000000 tokens, got \d+",
    ):
        load_task(config)
    load_task(dataclasses.replace(config, stages=stages[:1]))


def test_the_sampler_goes_on_where_it_stood(text_folder):
    corpus = load_corpus(with_data(paths=(str(text_folder),)))

    def sampler():
        return RowSampler(corpus.train, 96, 4, corpus.end_of_document, [3, 1])

    straight, first, second = sampler(), sampler(), sampler()
    expected = [next_row(straight) for _ in range(900)]
    assert straight.state_dict()["epoch"] >= 1
    first.next_rows(600)
    second.load_state_dict(first.state_dict())
    for other in expected[600:]:
        row = next_row(second)
        for field in dataclasses.fields(row):
            np.testing.assert_array_equal(getattr(row, field.name), getattr(other, field.name))


def test_a_step_reads_its_group_s_rows_ahead(text_folder):
    """The sampler's state is that after the step, not after what was read since; nothing is read for no steps."""
    corpus = load_corpus(with_data(paths=(str(text_folder),), validation_fraction=0.3))
    ahead, straight = (RowSampler(corpus.train, 96, 4, corpus.end_of_document, [3, 1]) for _ in range(2))
    for step in rows_ahead(ahead, 8, 7, group=1, num_groups=2, rows_per_micro_batch=2):
        expected = [next_row(straight) for _ in range(8)]
        assert step.sampler == straight.state_dict()
        assert sum(row.num_tokens for row in step.rows) == sum(row.counted.sum() for row in expected)
        assert len(step.micro_batches) == 2
        tokens = np.concatenate([batch.tokens for batch in step.micro_batches])
        np.testing.assert_array_equal(tokens, np.concatenate([row.tokens for row in expected[4:]]))
    assert ahead.state_dict() == straight.state_dict()
    assert list(rows_ahead(ahead, 8, 0, 0, 1, None)) == [] and ahead.state_dict() == straight.state_dict()


def test_a_document_that_cannot_be_read_is_an_error(text_folder):
    """Of the step that needs it, though a thread reads it."""
    corpus = load_corpus(with_data(paths=(str(text_folder),), validation_fraction=0.3))
    sampler = RowSampler(corpus.train, 96, 4, corpus.end_of_document, [3, 1])
    shutil.rmtree(text_folder)
    with pytest.raises(FileNotFoundError):
        next(rows_ahead(sampler, 5, 7, 0, 1, None))


def test_groups_and_micro_batches_share_out_the_rows():
    assert [split_rows(range(8), group, 2, 2) for group in (0, 1)] == [
        [range(2), range(2, 4)],
        [range(4, 6), range(6, 8)],
    ]
    assert split_rows(range(8), 1, 2, None) == [range(4, 8)]


def test_concatenated_rows():
    rows = [pack([np.arange(start, start + 9)], 4, 0) for start in (0, 10)]
    batch = PackedBatch.concatenate(rows)
    np.testing.assert_array_equal(batch.cu_seqlens, [0, 8, 16])
    np.testing.assert_array_equal(batch.tokens, np.concatenate([row.tokens for row in rows]))


def test_padding_and_targets():
    batch = pack([np.array([5, 6, 7, 8]), np.array([1, 2])], pad_multiple=2, pad_token=9, num_targets=1)
    np.testing.assert_array_equal(batch.tokens, [5, 6, 7, 9, 1, 9])
    np.testing.assert_array_equal(batch.labels, [6, 7, 8, 9, 2, 9])
    np.testing.assert_array_equal(batch.counted, [False, False, True, False, True, False])
    np.testing.assert_array_equal(batch.cu_seqlens, [0, 4, 6])
