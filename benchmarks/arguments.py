"""Types and an option of argparse that benchmarks share. A type raises argparse.ArgumentTypeError for a wrong value."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path


def add_modes(parser: argparse.ArgumentParser, modes: Sequence[str]) -> None:
    """Add the option --modes: values of comm, some of `modes` and auto. The default is all of `modes`."""
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=[*modes, "auto"],
        default=list(modes),
        help="values of comm (default: %(default)s)",
    )


def whole_number(least: int, multiple: int = 1) -> Callable[[str], int]:
    """Return a type for whole numbers from `least` on that are multiples of `multiple`."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < least or number % multiple:
            kind = "whole number" if multiple == 1 else f"multiple of {multiple}"
            raise argparse.ArgumentTypeError(f"must be a {kind} and at least {least}, got {text}")
        return number

    return convert


def at_least_0(text: str) -> float:
    """Return a finite number that is at least 0."""
    return _number(text, lambda number: 0 <= number < math.inf, "finite and at least 0")


seconds = at_least_0


def at_most_0(text: str) -> float:
    """Return a finite number that is at most 0."""
    return _number(text, lambda number: -math.inf < number <= 0, "finite and at most 0")


def input_file(text: str) -> Path:
    """Return the path of a file that can be read."""
    try:
        with open(text, "rb"):
            return Path(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"must be a file that can be read, got {text!r}: {error.strerror}") from error


def record_file(*names: str) -> Callable[[str], Path]:
    """Return a type for JSON files with an object that has these names, such as the records of a benchmark."""

    def convert(text: str) -> Path:
        path = input_file(text)
        try:
            found = json.loads(path.read_bytes())
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be a JSON file, got {text!r}: {error}") from error
        missing = [name for name in names if not isinstance(found, dict) or name not in found]
        if missing or not isinstance(found, dict):
            has = f" with {' and '.join(map(repr, names))}" if names else ""
            raise argparse.ArgumentTypeError(f"must be a JSON file of an object{has}, got {text!r}")
        return path

    return convert


def input_folder(text: str) -> Path:
    """Return the path of a folder that exists."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, got {text!r}")
    return Path(text)


def part(text: str) -> str:
    """Return K/N, the K-th of N parts."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f"must be K/N, the K-th of N parts, such as 2/4, got {text!r}")
    return text


def output_folder(text: str) -> Path:
    """Return the path of a folder, and create it."""
    if not text:  # as of a shell's variable that is not set; Path("") is the current folder
        raise argparse.ArgumentTypeError("must be a folder that can be created, got ''")
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"must be a folder that can be created, got {text!r}: {error.strerror}"
        ) from error
    return Path(text)


def _number(text: str, is_good: Callable[[float], bool], expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not is_good(number):
        raise argparse.ArgumentTypeError(f"must be {expected}, got {text}")
    return number
