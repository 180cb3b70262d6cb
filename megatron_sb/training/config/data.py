"""The `data` section: a base class for every kind of task, and the kinds that read documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from megatron_sb.training.config.types import Fraction, NonNegativeInt, PositiveInt, Section, section

if TYPE_CHECKING:
    from megatron_sb.training.config.schema import EvaluationConfig, StageConfig, TrainingConfig

STANDARD_LIBRARY = "python-stdlib"
SITE_PACKAGES = "python-site-packages"
TEXT_OF_PYTHON = (STANDARD_LIBRARY, SITE_PACKAGES)  # names that data.paths accepts in place of a path
BYTE_VOCAB_SIZE = 257  # 256 bytes and the end-of-document token


@section
class DataConfig(Section):
    """Base class of the `data` section. A task declares its fields in a subclass, which `megatron_sb._tasks` lists.

    Every subclass also has the attributes `vocab_size` (int, before padding) and `end_of_document` (a token, or None).

    Attributes:
        kind: Names the task.
        task: "module:class" of the `training.task.Task`, which is constructed from the whole configuration.
    """

    kind: str
    task: ClassVar[str]

    def problems(self, config: TrainingConfig) -> Iterator[str]:
        """Yield a sentence for each contradiction between these fields and the rest of the configuration."""
        yield from ()

    def stage_problems(self, config: TrainingConfig, stage: StageConfig, path: str) -> Iterator[str]:
        """Yield a sentence for each contradiction between these fields and a stage. path: the stage's dotted path."""
        yield from ()

    def longest_evaluated(self, evaluation: EvaluationConfig, stage: StageConfig) -> int:
        """Return the longest context, in tokens, that a model is evaluated with after `stage`."""
        multiple = evaluation.length_factor * stage.context_length
        return min(multiple, evaluation.longest or multiple)


@section
class DocumentDataConfig(DataConfig):
    """Base class of the kinds "text" and "indexed", which read documents."""

    task: ClassVar[str] = "megatron_sb.training.task:DocumentTask"
    paths: tuple[str, ...]
    validation_fraction: Fraction = 0.1

    def problems(self, config: TrainingConfig) -> Iterator[str]:
        """See `DataConfig.problems`."""
        if not self.paths:
            yield "data.paths must have at least one item, got []"
        if len(set(self.paths)) != len(self.paths):
            yield f"data.paths must have different items, got {list(self.paths)!r}"

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

    def problems(self, config: TrainingConfig) -> Iterator[str]:
        """See `DataConfig.problems`."""
        yield from super().problems(config)
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
