"""A tokenizer and a dataset that need no download: the bytes of this repository's documentation."""

from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

PAGES = Path(__file__).parents[3] / "docs"


class ByteTokenizer(BaseTokenizer):
    """Number the bytes of a text from 0 to 255. 256 begins a document, and 257 ends it."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """There are no settings."""

    def __init__(self, config: Config, *, tokenizer_path: str = "") -> None:
        super().__init__()
        self.bos_id, self.eos_id = 256, 257

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Return the tokens of a text."""
        return [self.bos_id] * add_bos + list(text.encode()) + [self.eos_id] * add_eos

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens. A character that is not whole is replaced."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return 258


def _paragraphs(folder: str) -> Dataset:
    """Return the paragraphs of the Markdown files of a folder, each as a document.

    Raises:
        ValueError: If the folder has no Markdown files.
    """
    pages = [path.read_text() for path in sorted(Path(folder).glob("*.md"))]
    if not pages:  # as in a copy of this folder outside of the repository
        raise ValueError(f"dataset_path must be a folder with Markdown files (*.md), got {folder!r}.")
    return Dataset.from_dict({"text": [paragraph for page in pages for paragraph in page.split("\n\n")]})


DATASETS["paragraphs"] = DatasetConfig(
    path=str(PAGES), loader=_paragraphs, sample_processor=lambda sample: sample["text"]
)
