"""The syntax of `--sb-layers`, which is that of Megatron's `--moe-layer-freq` and `--no-rope-freq`."""

from __future__ import annotations

import argparse
import ast


def layer_pattern(text: str) -> tuple[int, ...]:
    """Evaluate a list that is written with integers, lists, `+` and `*`.

    Raises:
        argparse.ArgumentTypeError: if `text` is anything else.

    Example:
        >>> from megatron_sb.megatron.layer_pattern import layer_pattern
        >>> layer_pattern("([1]*2+[0])*2")
        (1, 1, 0, 1, 1, 0)
    """
    try:
        entries = _evaluate(ast.parse(text.strip(), mode="eval").body)
        if isinstance(entries, list) and all(isinstance(entry, int) for entry in entries):
            return tuple(entries)
    except (MemoryError, OverflowError, SyntaxError, TypeError, ValueError):
        pass
    raise argparse.ArgumentTypeError(f"must be a list of layers such as ([1]*3+[0]*1)*10, got {text!r}.")


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
    raise ValueError(f"A list of layers cannot contain {type(node).__name__}.")
