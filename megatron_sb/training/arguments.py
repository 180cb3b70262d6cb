"""The arguments of a job, the same for `megatron-sb train` and `python -m megatron_sb.training`."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a job, without the overrides that stand alone: `take_overrides` takes them."""
    parser.add_argument(
        "config",
        metavar="CONFIG.yaml",
        help="configuration file; with --resume also the folder of a run (required)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override a field of CONFIG.yaml, for example model.num_layers=2 (repeatable; default: none). FIELD=VALUE "
        "without --set does the same",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder of the run, a new one unless --resume is given (default: runs/NAME-TIME)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --out, or in the folder given as CONFIG.yaml; without either, the newest "
        "runs/NAME-TIME (default: off)",
    )
    parser.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        help="profile these steps of each stage with torch's profiler, for example 10:12 (default: none)",
    )


def take_overrides(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, rest: Sequence[str], argv: Sequence[str]
) -> None:
    """Add FIELD=VALUE arguments to arguments.set. End the process with a message if others remain.

    The last override of a field counts, so all of them get the order of the command line.

    Args:
        parser: the parser that `add_arguments` was called with, or its parent.
        arguments: what the parser returned.
        rest: the arguments that the parser does not know.
        argv: all arguments.
    """
    unknown = [argument for argument in rest if argument.startswith("-") or "=" not in argument]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    unplaced = Counter([*rest, *arguments.set])
    ordered = []
    for argument in argv:
        # --set=FIELD=VALUE is one argument.
        override = argument.partition("=")[2] if argument.startswith("--") else argument
        if unplaced[override]:
            unplaced[override] -= 1
            ordered.append(override)
    arguments.set = ordered
