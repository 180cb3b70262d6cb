"""The index of a data set: built once, by one process, and read without the memory that the whole data need."""

import dataclasses
import fcntl
import itertools
import os
import re
import shutil
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_sb.megatron.indexed_documents import IDX_HEADER_BYTES, IndexedDocuments
from megatron_sb.training import documents
from megatron_sb.training.config import IndexedDataConfig, TextDataConfig, load_config
from megatron_sb.training.data import RowSampler
from megatron_sb.training.documents import load_corpus
from megatron_sb.training.index import FileIndex, MemoryIndex
from megatron_sb.training.task import load_task
from megatron_sb.validation import InputError

TINY = Path(__file__).parents[3] / "configs" / "tiny_context_extension.yaml"
END_OF_DOCUMENT = 7


def write_set(prefix, num_documents, tokens_of):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for index in range(num_documents):
        builder.add_item(torch.from_numpy(tokens_of(index)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.fixture
def config(tmp_path):
    """Two data sets of 2,000 documents of 1 to 40 tokens, half of them without an end-of-document token."""
    generator = np.random.default_rng(3)

    def tokens_of(index):
        tokens = generator.integers(0, 7, generator.integers(1, 40))
        return np.append(tokens, END_OF_DOCUMENT) if index % 2 else tokens

    prefixes = [str(tmp_path / name) for name in ("first", "second")]
    for prefix in prefixes:
        write_set(prefix, 2000, tokens_of)
    return configured(prefixes)


def configured(prefixes):
    data = IndexedDataConfig(paths=tuple(prefixes), vocab_size=8, end_of_document=END_OF_DOCUMENT)
    fields = ["stages.0.context_length=64", "stages.1.context_length=64", "evaluation={target_tokens: 8, longest: 16}"]
    return dataclasses.replace(load_config(TINY, fields), data=data)


def start(config):
    """Return what a job reads first: its fingerprint, the windows, and the rows of both stages."""
    task, rows = load_task(config), []
    for index, stage in enumerate(config.stages):
        sampler = task.sampler(stage, index)
        rows += [(row.parts, sampler.read(row).tokens.tolist()) for row in sampler.next_rows(20)]
    return task.fingerprint(), [window.tolist() for window in task._windows], rows


def test_the_second_start_reads_no_document_to_measure_it(config, tmp_path, monkeypatch):
    """The first one reads the last token of each. In files, the orders are those in memory."""
    first = start(config)
    folder = tmp_path / "megatron_sb_index"
    built = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert built and not list(folder.glob(".*.tmp"))
    with monkeypatch.context() as context:
        context.setattr(IndexedDocuments, "measure", lambda self: pytest.fail("the documents are measured again"))
        assert start(config) == first
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == built
    other = tmp_path / "elsewhere"
    assert start(dataclasses.replace(config, data=dataclasses.replace(config.data, index_folder=str(other)))) == first
    assert len(list(other.glob("documents-*"))) == 1


def test_the_order_of_rows_is_the_permutation_of_one_generator(config):
    corpus = load_corpus(config)
    generator = np.random.default_rng([3, 1, 0])
    documents = generator.permutation(len(corpus.train))
    starts = np.concatenate([[0], np.cumsum(-(-(corpus.train.lengths[documents].astype(int) - 1) // 4) * 4)])
    rows = generator.permutation(starts[-1] // 96)
    sampler = RowSampler(corpus.train, 96, 4, END_OF_DOCUMENT, [3, 1])
    for place, row in zip(rows * 96, sampler.next_rows(len(rows)), strict=True):
        inside = np.flatnonzero((starts[:-1] < place + 96) & (starts[1:] > place))
        assert [document for document, _, _ in row.parts] == documents[inside].tolist()


def test_an_index_serves_jobs_with_other_settings(config, monkeypatch):
    """Each job gets its own split and its own orders, which are those in memory, whatever was built before."""

    def rows_of(seed=config.seed, fraction=config.data.validation_fraction, order=(3, 1), pad=4, num_rows=None):
        data = dataclasses.replace(config.data, validation_fraction=fraction)
        corpus = load_corpus(dataclasses.replace(config, seed=seed, data=data))
        sampler = RowSampler(corpus.train, 96, pad, END_OF_DOCUMENT, order, num_rows=num_rows)
        rows = sampler.next_rows(5)
        while num_rows is None and sampler.state_dict()["epoch"] == 0:
            rows = sampler.next_rows(5)
        return corpus.fingerprint(), corpus.validation.lengths.tolist(), [row.parts for row in rows]

    changes = [{}, {"seed": 1}, {"fraction": 0.3}, {"order": (3, 2)}, {"pad": 8}, {"num_rows": 6}, {"num_rows": 7}]
    found = [rows_of(**change) for change in changes]
    monkeypatch.setattr(documents, "FileIndex", lambda folder, wait_seconds: MemoryIndex())
    assert found == [rows_of(**change) for change in changes]
    assert len({str(each) for each in found}) == len(found)


def test_documents_of_validation_paths_are_for_validation(config):
    """The others are for training, whatever validation_fraction is."""
    first, second = config.data.paths
    data = dataclasses.replace(config.data, paths=(first,), validation_paths=(second,), validation_fraction=0.5)
    corpus = load_corpus(dataclasses.replace(config, data=data))
    for side, prefix in ((corpus.train, first), (corpus.validation, second)):
        alone = IndexedDocuments([prefix], END_OF_DOCUMENT)
        lengths = [length for some in alone.measure() for length in some.tolist()]
        kept = [index for index, length in enumerate(lengths) if length > 1]
        assert side.lengths.tolist() == [lengths[index] for index in kept] and len(kept) > 1000
        for index in (0, len(kept) - 1):
            assert side.read(index, 0, 2).tolist() == alone.read(kept[index], 0, 2).tolist()


def test_validation_paths_without_documents_are_named(config, tmp_path):
    """validation_fraction has no effect then, so it is not named."""
    write_set(tmp_path / "empty", 3, lambda index: np.array([END_OF_DOCUMENT]))
    data = dataclasses.replace(config.data, paths=config.data.paths[:1], validation_paths=(str(tmp_path / "empty"),))
    with pytest.raises(InputError) as error:
        load_corpus(dataclasses.replace(config, data=data))
    message = str(error.value)
    assert re.match(r"data\.paths and data\.validation_paths must hold at least one .* and 0 of 2003 .*empty'", message)
    assert re.search(r"; left out: \d+ empty$", message) and "fraction" not in message


def test_changed_data_have_another_index(config, tmp_path):
    before = load_corpus(config).fingerprint()
    with (tmp_path / "second.bin").open("r+b") as file:
        file.seek(500)
        file.write(b"\x01\x00")
    assert load_corpus(config).fingerprint()["checksum"] != before["checksum"]
    assert len(list((tmp_path / "megatron_sb_index").glob("documents-*"))) == 2


def test_a_start_needs_no_memory_for_documents_that_it_does_not_read(tmp_path):
    """Before, a document took 151 bytes on every rank."""
    num_documents = 200_000
    write_set(tmp_path / "set", num_documents, lambda index: np.array([1, 2, 3, END_OF_DOCUMENT]))
    config = configured([str(tmp_path / "set")])
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, target_tokens=1, longest=2))
    start(config)
    tracemalloc.start()
    start(config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * num_documents


def numbers(new):
    new("numbers", np.int32).append(np.arange(5))
    return {"count": 5}


def test_of_several_processes_one_builds(tmp_path):
    builds = []

    def build(new):
        builds.append(1)
        time.sleep(0.3)
        return numbers(new)

    indexes = [FileIndex(tmp_path / "index", 20.0) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:  # flock also excludes open files of the same process
        entries = list(pool.map(lambda index: index.entry("test", [1], build), indexes))
    assert len(builds) == 1
    for entry in entries:
        assert entry.arrays["numbers"].tolist() == [0, 1, 2, 3, 4] and entry.facts == {"count": 5}


def test_an_entry_that_appears_meanwhile_is_used(tmp_path):
    """On a file system without locks, another process may build the same entry. Other users may read an entry."""
    FileIndex(tmp_path / "other", 20.0).entry("test", [1], numbers)
    (built,) = (tmp_path / "other").glob("test-*")
    assert built.stat().st_mode & 0o777 == 0o755

    def build(new):
        shutil.copytree(built, tmp_path / "index" / built.name)
        return numbers(new)

    entry = FileIndex(tmp_path / "index", 20.0).entry("test", [1], build)
    assert entry.facts == {"count": 5} and not list((tmp_path / "index").glob(".*.tmp"))


def test_an_incomplete_entry_is_built_again(tmp_path):
    """One that a crash cut off, and what a builder that was killed has left."""
    index = FileIndex(tmp_path, 20.0)
    entry = index.entry("test", [1], numbers)
    path = tmp_path / entry.key
    os.truncate(path / "numbers.bin", 8)
    left_over = tmp_path / f".{entry.key}.abc.tmp"
    left_over.mkdir()
    assert index.entry("test", [1], numbers).arrays["numbers"].tolist() == [0, 1, 2, 3, 4]
    assert not left_over.exists()
    (path / "entry.json").write_text("{")
    assert index.entry("test", [1], numbers).facts == {"count": 5}

    def fail(new):
        new("numbers", np.int32).append(np.arange(5))
        raise ValueError("no such token")

    with pytest.raises(ValueError, match="no such token"):
        index.entry("test", [2], fail)
    assert not list(tmp_path.glob(".*.tmp"))


def test_the_wait_for_a_builder_that_hangs_has_a_bound(tmp_path):
    """The builder holds the lock and writes nothing."""
    entry = FileIndex(tmp_path, 20.0).entry("test", [1], numbers)
    (tmp_path / entry.key / "entry.json").unlink()
    with (tmp_path / f".{entry.key}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            ValueError, match=r"data\.index_folder: .*test-\w+ must .* parallel\.timeout_seconds = 0\.3 s"
        ):
            FileIndex(tmp_path, 0.3).entry("test", [1], numbers)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, config):
    (tmp_path / "file").touch()
    data = dataclasses.replace(config.data, index_folder=str(tmp_path / "file" / "index"))
    with pytest.raises(
        ValueError, match=r"data\.index_folder must be a folder .* got '.*/file/index': Not a directory"
    ):
        load_corpus(dataclasses.replace(config, data=data))


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_data_set_that_is_cut_off_is_refused(suffix, tmp_path, config):
    path = tmp_path / f"second.{suffix}"
    os.truncate(path, path.stat().st_size - 20)
    with pytest.raises(ValueError, match=r"second\.bin must have \d+ bytes or more, .* got \d+|second\.idx .* damaged"):
        load_corpus(config)


@pytest.mark.parametrize("size", [0, 12, 30, 60])
def test_an_idx_file_that_is_cut_off_anywhere_is_refused(size, tmp_path, config):
    os.truncate(tmp_path / "second.idx", size)
    with pytest.raises(ValueError, match=r"second\.idx .* damaged"):
        load_corpus(config)


@pytest.mark.parametrize(
    "array, value, message",
    [
        ("lengths", -5, r"every sequence must be within the \d+ tokens of .*second\.bin, got one of -5 tokens from"),
        ("lengths", 2**30, r"every sequence must be within .* got one of 1073741824 tokens from token \d+ on"),
        ("places", 2**40, r"every sequence must be within .* from token 549755813888 on"),
        ("places", -16, r"every sequence must be within .* from token -8 on"),
        ("documents", 100, r"every document must begin where .* within 2000 sequences\. Documents 0 to 1999 do not"),
        ("documents", 5000, "every document must begin where the document before it ends"),
        ("documents", -3, "every document must begin where the document before it ends"),
    ],
)
def test_an_idx_file_with_wrong_numbers_is_refused(array, value, message, tmp_path, config):
    """A number in the middle, which the size of the files does not show. Tokens would be lost or read twice."""
    places = IDX_HEADER_BYTES + 4 * 2000
    offset, dtype = {
        "lengths": (IDX_HEADER_BYTES + 4 * 5, np.int32),
        "places": (places + 8 * 5, np.int64),
        "documents": (places + 8 * (2000 + 5), np.int64),
    }[array]
    with (tmp_path / "second.idx").open("r+b") as file:
        file.seek(offset)
        file.write(dtype(value).tobytes())
    with pytest.raises(InputError, match=rf"second\.idx is damaged: {message}"):
        load_corpus(config)


def test_bytes_after_the_last_sequence_are_ignored(tmp_path, config):
    """Also half a token, with which NumPy does not map a file."""
    before = start(config)
    with (tmp_path / "second.bin").open("ab") as file:
        file.write(b"x")
    after = start(config)
    assert after[1:] == before[1:] and after[0] == before[0] | {"checksum": after[0]["checksum"]}


def test_text_has_an_index_if_a_folder_is_named(tmp_path, capsys):
    """It is built again when a file changes."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(30):
        (texts / f"{index}.txt").write_text("text " * (index + 1))
    data = TextDataConfig(paths=(str(texts),), validation_fraction=0.3)
    config = dataclasses.replace(load_config(TINY), data=data)
    indexed = dataclasses.replace(config, data=dataclasses.replace(data, index_folder=str(tmp_path / "index")))
    expected = load_corpus(config).fingerprint()
    assert capsys.readouterr().err == ""
    assert [load_corpus(indexed).fingerprint() for _ in range(2)] == [expected] * 2
    assert capsys.readouterr().err.count("building") == 2  # the lengths and the split
    (texts / "3.txt").write_text("Text " * 4)
    assert load_corpus(indexed).fingerprint()["checksum"] != expected["checksum"]


def test_a_builder_that_reads_many_files_shows_that_it_makes_progress(tmp_path, monkeypatch):
    """To read all of them can take longer than the other processes wait for one that does nothing."""
    texts, events = tmp_path / "texts", []
    texts.mkdir()
    for index in range(300):
        (texts / f"{index}.txt").write_text("text " * (index + 1))
    data = TextDataConfig(paths=(str(texts),), index_folder=str(tmp_path / "index"))
    monkeypatch.setattr(os, "utime", lambda *_: events.append("progress"))

    def open_and_note(*arguments):
        events.append("file")
        return open(*arguments)

    monkeypatch.setattr(documents, "open", open_and_note, raising=False)
    load_corpus(dataclasses.replace(load_config(TINY), data=data))
    runs = [len([*group]) for event, group in itertools.groupby(events) if event == "file"]
    assert sum(runs) == 300 and max(runs) <= documents.FILES_PER_SIGN < 100
