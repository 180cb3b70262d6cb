"""Questions whose answers are in one or two of many documents (RULER's qa_1 and qa_2; there SQuAD and HotpotQA, here
documents about the classes and methods of the Python standard library).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_sb.experiments.ruler.sample import Sample, fitted
from megatron_sb.experiments.ruler.texts import Method, Texts


def about_method(method: Method) -> str:
    """A document."""
    return f"Method {method.name} belongs to the class {method.owner}: {method.about}"


def about_class(name: str, base: str) -> str:
    """A document."""
    return f"Class {name} is derived from the class {base}."


def single_hop(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """To which class a method belongs; the other documents are about other methods."""
    asked, others = _drawn(generator, texts, texts.methods)
    question = f"To which class does the method {asked.name} belong? It belongs to the class "
    return _fitted(generator, length, map(about_method, others), [about_method(asked)], question, asked.owner)


def two_hops(generator: np.random.Generator, length: int, texts: Texts) -> Sample:
    """From which class the class of a method is derived: two documents, among others of either kind."""
    asked, others = _drawn(generator, texts, [method for method in texts.methods if method.owner in texts.bases])
    base = texts.bases[asked.owner]
    needed = [about_method(asked), about_class(asked.owner, base)]
    question = f"The class of the method {asked.name} is derived from another one. It is derived from the class "
    return _fitted(generator, length, _both_kinds(others, asked, texts), needed, question, base)


def _both_kinds(methods: list[Method], asked: Method, texts: Texts) -> Iterator[str]:
    told = {asked.owner}
    for method in methods:
        yield about_method(method)
        if method.owner not in told:
            told.add(method.owner)
            yield about_class(method.owner, texts.bases[method.owner])


def _drawn(generator: np.random.Generator, texts: Texts, methods: Sequence[Method]) -> tuple[Method, list[Method]]:
    """One to ask about, and all others, shuffled."""
    shuffled = [methods[index] for index in generator.permutation(len(methods))]
    asked = next(method for method in shuffled if method.owner in texts.asked)
    return asked, [method for method in shuffled if method is not asked]


def _fitted(
    generator: np.random.Generator, length: int, filling: Iterator[str], needed: list[str], question: str, answer: str
) -> Sample:
    """Documents that are a line each."""
    return fitted(generator, length, filling, needed, question, [answer], between="\n")
