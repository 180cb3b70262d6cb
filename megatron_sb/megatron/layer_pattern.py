"""The language of `--sb-layers`: that of Megatron's `--moe-layer-freq` and `--no-rope-freq`."""

from __future__ import annotations

import argparse
import ast


def layer_pattern(text: str) -> tuple[int, ...]:
    """The entries of a list written with numbers, `+` and `*`: "([1]*2+[0])*2" gives (1, 1, 0, 1, 1, 0).

    Raises argparse.ArgumentTypeError for anything else.
    """
    try:
        entries = _evaluate(ast.parse(text.strip(), mode="eval").body)
        if isinstance(entries, list) and all(isinstance(entry, int) for entry in entries):
            return tuple(entries)
    except (SyntaxError, TypeError, ValueError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers such as ([1]*3+[0]*1)*10")


def _evaluate(node: ast.AST) -> int | list:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.List(elts=entries):
            return [_evaluate(entry) for entry in entries]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate(left) + _evaluate(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _evaluate(left) * _evaluate(right)
    raise ValueError(f"{type(node).__name__} has no place in a list of layers")
