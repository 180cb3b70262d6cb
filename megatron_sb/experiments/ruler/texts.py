"""Words, sentences and documents from the docstrings of the Python standard library, which every machine has."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_sb.processes import garbage_collection_paused
from megatron_sb.training.config import TextDataConfig
from megatron_sb.training.text_files import list_files

NOISE = (
    "Rain fell on the hills all night.",
    "A cat slept by the door.",
    "The clock in the hall struck nine.",
    "Nobody came along the road.",
)


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of a class. Its name is unique among all classes. about: first sentence of its docstring."""

    name: str
    owner: str
    about: str


@dataclasses.dataclass(frozen=True)
class Texts:
    """The source of all tasks.

    Attributes:
        sentences: sentences of docstrings in their order, 20 to 200 ASCII characters each.
        words: lower-case words of the sentences, sorted.
        methods: see `Method`.
        bases: class -> its base class.
        asked: classes that questions may ask about.
    """

    sentences: tuple[str, ...]
    words: tuple[str, ...]
    methods: tuple[Method, ...]
    bases: dict[str, str]
    asked: frozenset[str]

    def select_questions(self, held_out: bool) -> Texts:
        """Return texts with questions about one fourth of the classes (held out) or about all others.

        The split depends only on the class names. Training questions therefore do not reveal evaluation answers.
        """
        every_fourth = {name for name in self.asked if zlib.crc32(name.encode()) % 4 == 0}
        return dataclasses.replace(self, asked=frozenset(every_fourth if held_out else self.asked - every_fourth))

    def sentences_from(self, generator: np.random.Generator) -> Iterator[str]:
        """Yield all sentences cyclically, starting at a random one."""
        start = int(generator.integers(len(self.sentences)))
        while True:
            yield from self.sentences[start:]
            start = 0

    def noise(self) -> Iterator[str]:
        """Yield the same few sentences cyclically."""
        while True:
            yield from NOISE

    def draw_words(self, generator: np.random.Generator, count: int) -> list[str]:
        """Return different random words."""
        return [self.words[index] for index in generator.choice(len(self.words), count, replace=False)]


@functools.cache
def load_texts() -> Texts:
    """Read the standard library of the running Python."""
    sentences: list[str] = []
    methods: list[Method] = []
    bases: dict[str, str] = {}
    class_counts: Counter[str] = Counter()
    for name in list_files(TextDataConfig()).names:
        with garbage_collection_paused():  # a syntax tree has no cycles
            module = ast.parse(Path(name).read_bytes())
        sentences += _sentences(module)
        for node in module.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                sentences += _sentences(node)
            if isinstance(node, ast.ClassDef):
                class_counts[node.name] += 1
                functions = [child for child in node.body if isinstance(child, ast.FunctionDef)]
                sentences_by_method = {child.name: _sentences(child) for child in functions}
                sentences += [sentence for of_method in sentences_by_method.values() for sentence in of_method]
                methods += [
                    Method(name, node.name, of_method[0])
                    for name, of_method in sentences_by_method.items()
                    if of_method
                ]
                if node.bases and isinstance(node.bases[0], ast.Name):
                    bases[node.name] = node.bases[0].id
    name_counts = Counter(method.name for method in methods)
    words = Counter(word for sentence in sentences for word in re.findall(r"\b[a-z]{4,10}\b", sentence))
    usable = tuple(
        method
        for method in methods
        if method.name[0] != "_" and name_counts[method.name] == 1 and class_counts[method.owner] == 1
    )
    return Texts(
        tuple(dict.fromkeys(sentences)),
        tuple(sorted(words)),
        usable,
        {name: base for name, base in bases.items() if class_counts[name] == 1 and base != name},
        frozenset(method.owner for method in usable),
    )


def _sentences(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Return the usable sentences of a docstring."""
    flat = " ".join((ast.get_docstring(node) or "").split())
    pieces = re.split(r"(?<=[.!?]) (?=[A-Z])", flat)
    return [piece for piece in pieces if 20 <= len(piece) <= 200 and piece[-1] in ".!?" and piece.isascii()]
