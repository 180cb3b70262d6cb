"""Questions about facts in one or two of many documents (RULER's qa_1 and qa_2).

RULER uses SQuAD and HotpotQA. Here the documents describe classes and methods of the Python standard library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_sb.experiments.ruler.sample import Sample, fill_sample
from megatron_sb.experiments.ruler.texts import Method, Texts


def method_document(method: Method) -> str:
    """Return the document about a method."""
    return f"Method {method.name} belongs to the class {method.owner}: {method.about}"


def class_document(name: str, base: str) -> str:
    """Return the document about a class."""
    return f"Class {name} is derived from the class {base}."


def single_hop(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Ask for the class of a method. The other documents describe other methods."""
    asked, others = _draw_question(generator, texts, texts.methods)
    question = f"To which class does the method {asked.name} belong? It belongs to the class "
    return _fill_with_lines(
        generator, length, map(method_document, others), [method_document(asked)], question, asked.owner
    )


def two_hops(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """Ask for the base class of a method's class. The answer needs two documents, about the method and the class."""
    asked, others = _draw_question(
        generator, texts, [method for method in texts.methods if method.owner in texts.bases]
    )
    base = texts.bases[asked.owner]
    needed = [method_document(asked), class_document(asked.owner, base)]
    question = f"The class of the method {asked.name} is derived from another one. It is derived from the class "
    return _fill_with_lines(
        generator, length, _method_and_class_documents(others, asked, texts), needed, question, base
    )


def _method_and_class_documents(methods: list[Method], asked: Method, texts: Texts) -> Iterator[str]:
    described = {asked.owner}
    for method in methods:
        yield method_document(method)
        if method.owner not in described:
            described.add(method.owner)
            yield class_document(method.owner, texts.bases[method.owner])


def _draw_question(
    generator: np.random.Generator, texts: Texts, methods: Sequence[Method]
) -> tuple[Method, list[Method]]:
    """Return the method to ask about, and all other methods in random order."""
    shuffled = [methods[index] for index in generator.permutation(len(methods))]
    asked = next(method for method in shuffled if method.owner in texts.asked)
    return asked, [method for method in shuffled if method is not asked]


def _fill_with_lines(
    generator: np.random.Generator, length: int, filling: Iterator[str], needed: list[str], question: str, answer: str
) -> Sample:
    """Return a sample with one document per line."""
    return fill_sample(generator, length, filling, needed, question, [answer], between="\n")
