"""Build a text corpus from the sources and the documentation of installed Python distributions, without network.

The corpus is split by project: a distribution is on one side, train, validation or test. The command writes data sets
for `data.kind: indexed`, as bytes and as tokens of a tokenizer that is trained on the train side, and a report:

OUT/bytes/{train,validation,test}.{bin,idx}    bytes, without an end-of-document token; it is 256
OUT/bpe/{train,validation,test}.{bin,idx}      tokens; 0 ends a document
OUT/bpe/tokenizer.json                         the tokenizer, in the format of the library `tokenizers`
OUT/report.json                                what was found, kept and dropped
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sb.experiments import sweep
from megatron_sb.experiments.deduplication import Deduplicator
from megatron_sb.training.checkpoint import write_atomically
from megatron_sb.training.config import ConfigError, TextDataConfig, load_fields
from megatron_sb.training.config.types import Fraction, PositiveInt, Section, Seed, section
from megatron_sb.training.directory import delete_unused, hold
from megatron_sb.training.documents import BYTE_END_OF_DOCUMENT
from megatron_sb.training.text_files import check_patterns, list_files, matcher
from megatron_sb.validation import InputError

SIDES = ("train", "validation", "test")
HELD_OUT_FIRST = SIDES[::-1]  # of two copies, the one on the side that comes first is kept
END_OF_DOCUMENT = "<|end|>"
LEAST_VOCAB_SIZE = 257  # the bytes and END_OF_DOCUMENT
ENCODED_AT_ONCE = 2**22  # characters
TRAINED_ON = 2**26  # bytes: more text hardly changes the tokenizer

Files = list[tuple[str, Path]]  # of a project: path within the project, and place in the file system


@section
class CorpusConfig(Section):
    """Configuration of a corpus.

    Attributes:
        distributions: names of installed distributions. Each one is a project.
        paths: files, folders, glob patterns or `python-stdlib`. Each entry is a project. Default none.
        include: patterns of the names of files to read.
        exclude: patterns of the names of files and folders to leave out. Default none.
        validation_fraction: share of the projects for validation. Default 0.05.
        test_fraction: share of the projects for the test. Default 0.05.
        seed: seed of the split. Default 0.
        vocab_size: tokens of the tokenizer, at least 257. Default None: the corpus is written as bytes only.
    """

    distributions: tuple[str, ...]
    paths: tuple[str, ...] = ()
    include: tuple[str, ...] = (
        *("*.py", "*.pyi", "*.pyx", "*.pxd"),
        *("*.h", "*.hpp", "*.cuh", "*.c", "*.cc", "*.cpp", "*.cu", "*.inl"),
        *("*.md", "*.rst", "*.txt", "METADATA"),
    )
    exclude: tuple[str, ...] = ()
    validation_fraction: Fraction = 0.05
    test_fraction: Fraction = 0.05
    seed: Seed = 0
    vocab_size: PositiveInt | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def run(options: argparse.Namespace) -> int:
    """Build the corpus and write the report. Return the exit status."""
    from megatron_sb.training.rank import silence_warnings

    silence_warnings()
    config = load_fields(CorpusConfig, options.config, options.set)
    if config.vocab_size is not None:
        check_tokenizer(config.vocab_size)
    out = sweep.output_folder(options)
    if config.vocab_size is None and (out / "bpe").exists():
        raise ConfigError(
            f"vocab_size must be given, because {out / 'bpe'} has tokens of an earlier build, which would not fit the "
            "new bytes, got null. Remove that folder, or use another one (--out)."
        )
    projects = list_projects(config)  # most errors come before anything is written
    out.mkdir(parents=True, exist_ok=True)
    with hold(out):
        try:
            _build_all(config, out, projects)
        except InputError:
            delete_unused(out)
            raise
    print(f"See {out}/report.json.")
    return 0


def _build_all(config: CorpusConfig, out: Path, projects: dict[str, Files]) -> None:
    """Write the data sets, the tokenizer and the report."""
    start = time.monotonic()
    report = build(config, out / "bytes", projects)
    _write_report(report, out)  # one of an earlier build would not fit, if the tokenizer cannot be trained
    shutil.rmtree(out / "bpe", ignore_errors=True)  # neither would its tokens
    print(f"{report['kept']['bytes']:,} of {report['found']['bytes']:,} bytes kept in {time.monotonic() - start:.0f} s")
    if config.vocab_size is not None:
        start = time.monotonic()
        report["tokens"] = train_tokenizer(out / "bytes", config.vocab_size, out / "bpe")
        print(f"{sum(report['tokens'].values()):,} tokens in {time.monotonic() - start:.0f} s")
        _write_report(report, out)


def _write_report(report: dict[str, Any], out: Path) -> None:
    write_atomically(out / "report.json", json.dumps(report, indent=1) + "\n")


def build(config: CorpusConfig, folder: Path, projects: dict[str, Files] | None = None) -> dict[str, Any]:
    """Write the corpus as bytes: one data set for each side.

    The result depends only on the content of the projects. The order of `distributions` and `paths` has no influence.

    Args:
        config: what to read.
        folder: folder of the data sets. An existing one is replaced when the new one is complete.
        projects: what `list_projects` returns for this configuration. Default None: call it here.

    Returns:
        The report: see `Deduplicator.report`, with the tables "sides", "projects" and "extensions". "projects_of" has
        the projects of every side, and "versions" the versions of the distributions.

    Raises:
        ValueError: A distribution is not installed, a name is given twice, an entry has no files, or a side has no
            text.
    """
    from megatron_sb.megatron.indexed_documents import write_documents

    projects = list_projects(config) if projects is None else projects
    projects_of = {side: [name for name in projects if side_of(name, config) == side] for side in SIDES}
    deduplicator = Deduplicator()
    with replaced_folder(folder) as new:
        for side in HELD_OUT_FIRST:
            texts = (
                np.frombuffer(kept, np.uint8)
                for name in projects_of[side]
                for path, place in projects[name]
                if (kept := deduplicator.keep(place.read_bytes(), _labels(side, name, path)))
            )
            write_documents(str(new / side), texts, np.uint8)
        report = deduplicator.report()
        if empty := [side for side in SIDES if not _has_text(report, side)]:
            raise InputError(
                f"distributions and paths must have text for every side, got none for {', '.join(empty)} from "
                f"{len(projects)} projects with seed = {config.seed}. Add projects, or change seed."
            )
    return report | {"projects_of": projects_of, "versions": _versions(config)}


def list_projects(config: CorpusConfig) -> dict[str, Files]:
    """Return the files of every project: name -> files, both sorted.

    Raises:
        ValueError: See `build`.
    """
    if config.validation_fraction + config.test_fraction >= 1:
        raise ConfigError(
            "validation_fraction + test_fraction must be less than 1, got "
            f"{config.validation_fraction} + {config.test_fraction}."
        )
    with _naming_fields():
        check_patterns(config.include, config.exclude)
    projects: dict[str, Files] = {}
    for name in config.distributions:
        if canonical_name(name) in projects:
            raise ConfigError(f"distributions must have different items, got {name!r} twice.")
        projects[canonical_name(name)] = _files_of_distribution(name, config)
    for entry in config.paths:
        name = Path(entry).name
        if name in projects:
            raise ConfigError(
                f"paths must have names that differ from each other and from distributions, got {name!r}."
            )
        projects[name] = _files_of_path(entry, config)
    return dict(sorted(projects.items()))


def canonical_name(distribution: str) -> str:
    """Return the name of a distribution as package indexes compare it.

    Example:
        >>> canonical_name("Scikit_Learn")
        'scikit-learn'
    """
    return re.sub(r"[-_.]+", "-", distribution).lower()


def side_of(project: str, config: CorpusConfig) -> str:
    """Return the side of a project. It depends on the name, the seed and the fractions only."""
    digest = hashlib.blake2b(f"{config.seed} {project}".encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "big") / 2**64
    if place < config.test_fraction:
        return "test"
    return "validation" if place < config.test_fraction + config.validation_fraction else "train"


def check_tokenizer(vocab_size: int) -> None:
    """Raise ValueError unless a tokenizer of this size can be trained here."""
    if vocab_size < LEAST_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size must be at least {LEAST_VOCAB_SIZE}, the bytes and the end of a document, got {vocab_size}."
        )
    try:
        import tokenizers  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            f"vocab_size = {vocab_size} needs the module tokenizers, which is not installed: "
            "pip install 'megatron-sb[huggingface]'. Use null for bytes only."
        ) from None


def train_tokenizer(folder: Path, vocab_size: int, out: Path) -> dict[str, int]:
    """Train a byte-level BPE tokenizer on the train side of a corpus, and encode all sides.

    A token has at most three digits. Token 0 ends each document. The text of that token in a document is encoded as
    other text is.

    Args:
        folder: what `build` wrote.
        vocab_size: number of tokens, at least 257.
        out: folder of the tokenizer and the data sets. An existing one is replaced when the new one is complete.

    Returns:
        The number of tokens of every side.

    Raises:
        ValueError: The text of the train side is too short for so many tokens. Nothing is written.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from megatron_sb.megatron.indexed_documents import write_documents

    check_tokenizer(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample_of(folder), trainer)
    if (found := tokenizer.get_vocab_size()) < vocab_size:
        raise ConfigError(
            f"vocab_size must be at most {found}, because a tokenizer of this train side has no more tokens, got "
            f"{vocab_size}. Add text, or lower vocab_size."
        )
    dtype = np.uint16 if vocab_size <= 2**16 else np.int32
    with replaced_folder(out) as new:
        tokenizer.save(str(new / "tokenizer.json"))
        tokenizer.encode_special_tokens = True  # as other text; this setting is not saved
        return {
            side: write_documents(str(new / side), _encoded(_texts(folder, side), tokenizer, dtype), dtype)
            for side in SIDES
        }


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder beside `folder`, which takes its place if the context ends without an error.

    A reader never sees a folder that is half written. After a crash it can find none; the next call writes it.
    """
    new, old = (folder.with_name(f".{folder.name}.{kind}.tmp") for kind in ("new", "old"))
    for left_over in (new, old):
        shutil.rmtree(left_over, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
    finally:
        for left_over in (new, old):
            shutil.rmtree(left_over, ignore_errors=True)


def _files_of_distribution(name: str, config: CorpusConfig) -> Files:
    try:
        listed = importlib.metadata.distribution(name).files or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"distributions must be installed, got {name!r}. Install it, or leave it out.") from None
    included, excluded = matcher(config.include), matcher(config.exclude)
    places = {
        path.as_posix(): Path(path.locate())
        for path in listed
        if included(path.name) and not any(excluded(part) for part in path.parts)
    }
    files = [(path, place) for path, place in sorted(places.items()) if place.is_file()]
    if not files:
        raise ConfigError(f"include and exclude must leave files of every distribution, got none of {name!r}.")
    return files


def _files_of_path(entry: str, config: CorpusConfig) -> Files:
    with _naming_fields():
        found = list_files(TextDataConfig(paths=(entry,), include=config.include, exclude=config.exclude))
    return [(name, Path(name)) for name in found.names]


@contextlib.contextmanager
def _naming_fields() -> Iterator[None]:
    """Give errors about fields of `data` the names of the fields here."""
    try:
        yield
    except InputError as error:
        raise ConfigError(str(error).replace("data.", "")) from error


def _labels(side: str, project: str, path: str) -> dict[str, str]:
    """Return the rows of the report's tables that count a file. The row of a file without an extension is its name."""
    extension = os.path.splitext(path)[1] or os.path.basename(path)
    return {"sides": side, "projects": project, "extensions": extension}


def _has_text(report: dict[str, Any], side: str) -> bool:
    sides = report.get("sides", {})  # absent without any project
    return side in sides and sides[side]["kept"]["documents"] > 0


def _versions(config: CorpusConfig) -> dict[str, str]:
    return {canonical_name(name): importlib.metadata.version(name) for name in sorted(config.distributions)}


def _texts(folder: Path, side: str) -> Iterator[str]:
    """Yield the texts of a side of the corpus in `folder`."""
    from megatron_sb.megatron.indexed_documents import IndexedDocuments

    documents, index = IndexedDocuments([str(folder / side)], BYTE_END_OF_DOCUMENT), 0
    for lengths in documents.measure():
        for length in lengths.tolist():
            yield documents.read(index, 0, length - 1).astype(np.uint8).tobytes().decode()
            index += 1


def _sample_of(folder: Path) -> Iterator[str]:
    """Yield texts of the train side, evenly chosen, of about TRAINED_ON bytes."""
    every = -(-(folder / "train.bin").stat().st_size // TRAINED_ON)
    return (text for index, text in enumerate(_texts(folder, "train")) if index % every == 0)


def _encoded(texts: Iterator[str], tokenizer: Any, dtype: type[np.integer]) -> Iterator[np.ndarray]:
    """Yield the tokens of each text, with the end of the document."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= ENCODED_AT_ONCE:
            yield from _encoded_batch(batch, tokenizer, dtype)
            batch, size = [], 0
    yield from _encoded_batch(batch, tokenizer, dtype)


def _encoded_batch(batch: list[str], tokenizer: Any, dtype: type[np.integer]) -> Iterator[np.ndarray]:
    for encoding in tokenizer.encode_batch_fast(batch):
        yield np.array([*encoding.ids, tokenizer.token_to_id(END_OF_DOCUMENT)], dtype)
