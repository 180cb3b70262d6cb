"""Words, sentences and documents from the docstrings of the Python standard library: real text that is everywhere."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import zlib
from collections import Counter
from collections.abc import Iterator

import numpy as np

from megatron_sb.training.config import TextDataConfig
from megatron_sb.training.data import find_files

NOISE = (
    "Rain fell on the hills all night.",
    "A cat slept by the door.",
    "The clock in the hall struck nine.",
    "Nobody came along the road.",
)


@dataclasses.dataclass(frozen=True)
class Method:
    """A method whose name one class alone has. about: the first sentence of its docstring."""

    name: str
    owner: str
    about: str


@dataclasses.dataclass(frozen=True)
class Texts:
    """sentences: of docstrings, in order, 20 to 200 ASCII characters. words: that occur in them, lower case, sorted.
    methods: see Method. bases: the class that a class derives from. asked: the classes that questions are about.
    """

    sentences: tuple[str, ...]
    words: tuple[str, ...]
    methods: tuple[Method, ...]
    bases: dict[str, str]
    asked: frozenset[str]

    def asking(self, held_out: bool) -> Texts:
        """With questions about every fourth class alone, by its name, or about all others: what a model was asked in
        training says nothing of what it is evaluated on.
        """
        every_fourth = {name for name in self.asked if zlib.crc32(name.encode()) % 4 == 0}
        return dataclasses.replace(self, asked=frozenset(every_fourth if held_out else self.asked - every_fourth))

    def sentences_from(self, generator: np.random.Generator) -> Iterator[str]:
        """From a random place on, round and round."""
        start = int(generator.integers(len(self.sentences)))
        while True:
            yield from self.sentences[start:]
            start = 0

    def noise(self) -> Iterator[str]:
        """The same few sentences, round and round."""
        while True:
            yield from NOISE

    def draw_words(self, generator: np.random.Generator, count: int) -> list[str]:
        """Different ones."""
        return [self.words[index] for index in generator.choice(len(self.words), count, replace=False)]


@functools.cache
def load_texts() -> Texts:
    """What the library of the Python that runs has."""
    sentences: list[str] = []
    methods: list[Method] = []
    bases: dict[str, str] = {}
    classes: Counter[str] = Counter()
    for path in find_files(TextDataConfig()):
        module = ast.parse(path.read_bytes())
        sentences += _sentences(module)
        for node in module.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                sentences += _sentences(node)
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
                of_class = [child for child in node.body if isinstance(child, ast.FunctionDef)]
                told = {child.name: _sentences(child) for child in of_class}
                sentences += [sentence for about in told.values() for sentence in about]
                methods += [Method(name, node.name, about[0]) for name, about in told.items() if about]
                if node.bases and isinstance(node.bases[0], ast.Name):
                    bases[node.name] = node.bases[0].id
    named = Counter(method.name for method in methods)
    words = Counter(word for sentence in sentences for word in re.findall(r"\b[a-z]{4,10}\b", sentence))
    usable = tuple(
        method for method in methods if method.name[0] != "_" and named[method.name] == 1 and classes[method.owner] == 1
    )
    return Texts(
        tuple(dict.fromkeys(sentences)),
        tuple(sorted(words)),
        usable,
        {name: base for name, base in bases.items() if classes[name] == 1 and base != name},
        frozenset(method.owner for method in usable),
    )


def _sentences(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Of its docstring."""
    flat = " ".join((ast.get_docstring(node) or "").split())
    pieces = re.split(r"(?<=[.!?]) (?=[A-Z])", flat)
    return [piece for piece in pieces if 20 <= len(piece) <= 200 and piece[-1] in ".!?" and piece.isascii()]
