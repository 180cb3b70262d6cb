"""The `data` section: the kinds that read documents."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import ClassVar, Literal

from megatron_sb.training.config.schema import DataConfig, StageConfig, TrainingConfig
from megatron_sb.training.config.types import Fraction, NonNegativeInt, PositiveInt, section

STANDARD_LIBRARY = "python-stdlib"
SITE_PACKAGES = "python-site-packages"
TEXT_OF_PYTHON = (STANDARD_LIBRARY, SITE_PACKAGES)  # names that data.paths accepts in place of a path
BYTE_VOCAB_SIZE = 257  # 256 bytes and the end-of-document token


@section
class DocumentDataConfig(DataConfig):
    """Base class of the kinds "text" and "indexed", which read documents."""

    task: ClassVar[str] = "megatron_sb.training.task:DocumentTask"
    paths: tuple[str, ...]
    validation_fraction: Fraction = 0.1
    index_folder: str | None = None

    def problems(self, config: TrainingConfig) -> Iterator[str]:
        """See `DataConfig.problems`."""
        if not self.paths:
            yield "data.paths must have at least one item, got []"
        if len(set(self.paths)) != len(self.paths):
            yield f"data.paths must have different items, got {list(self.paths)!r}"
        if config.evaluation.sentence_pairs:
            yield from self.problems_of_bytes("evaluation.sentence_pairs")

    def problems_of_bytes(self, needed_by: str) -> Iterator[str]:
        """Yield a sentence if the tokens of the documents are not the bytes that something needs."""
        wanted = BYTE_VOCAB_SIZE, BYTE_VOCAB_SIZE - 1
        if (self.vocab_size, self.end_of_document) != wanted:
            yield (
                f"data.vocab_size and data.end_of_document must be {wanted[0]} and {wanted[1]} for {needed_by}, whose "
                f"tokens are bytes, got {self.vocab_size} and {self.end_of_document}"
            )

    def stage_problems(self, config: TrainingConfig, stage: StageConfig, path: str) -> Iterator[str]:
        """See `DataConfig.stage_problems`."""
        longest = self.longest_evaluated(config.evaluation, stage)
        if config.evaluation.target_tokens > longest:
            yield (
                f"evaluation.target_tokens must be at most the longest evaluated context of {path}, {longest} tokens, "
                f"got {config.evaluation.target_tokens}"
            )


@section
class TextDataConfig(DocumentDataConfig):
    """Files, read as bytes."""

    kind: Literal["text"] = "text"
    paths: tuple[str, ...] = (STANDARD_LIBRARY,)
    include: tuple[str, ...] = ("*.py", "*.txt", "*.md", "*.rst")
    exclude: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, before padding."""
        return BYTE_VOCAB_SIZE

    @property
    def end_of_document(self) -> int:
        """The token that ends a document."""
        return BYTE_VOCAB_SIZE - 1


@section
class IndexedDataConfig(DocumentDataConfig):
    """Megatron's IndexedDataset: tokens in .bin/.idx pairs."""

    kind: Literal["indexed"] = "indexed"
    vocab_size: PositiveInt
    end_of_document: NonNegativeInt
    validation_paths: tuple[str, ...] = ()

    def problems(self, config: TrainingConfig) -> Iterator[str]:
        """See `DataConfig.problems`."""
        yield from super().problems(config)
        trained = {os.path.abspath(path) for path in self.paths}  # a path has several spellings
        held_out = {os.path.abspath(path) for path in self.validation_paths}
        if len(trained) < len(set(self.paths)):
            yield f"data.paths must name different data sets, got {list(self.paths)!r}"
        if len(held_out) < len(self.validation_paths):
            yield f"data.validation_paths must name different data sets, got {list(self.validation_paths)!r}"
        for path in self.validation_paths:
            if os.path.abspath(path) in trained:
                yield f"data.validation_paths must differ from data.paths, got {path!r} in both"
        for name in TEXT_OF_PYTHON:
            if name in self.paths:
                yield (
                    f"data.paths = {list(self.paths)!r} contradicts data.kind = 'indexed': it must have path prefixes "
                    "of .bin/.idx pairs"
                )
        if self.end_of_document >= self.vocab_size:
            yield (
                f"data.end_of_document must be less than data.vocab_size = {self.vocab_size}, "
                f"got {self.end_of_document}"
            )
