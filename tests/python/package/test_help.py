"""The help of every option of `megatron-sb` contains its default, or says that the option is required."""

import argparse
from collections.abc import Iterator

import pytest

from megatron_sb import bench, cli


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Yield (name of the command, option) for a parser and its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)
        elif action.dest not in ("help", "rest") and action.help != argparse.SUPPRESS:
            yield f"{parser.prog} {'/'.join(action.option_strings) or action.metavar}", action


def _assert_complete(parser: argparse.ArgumentParser, least: int) -> None:
    options = dict(_options(parser))
    assert len(options) >= least
    for name, action in options.items():
        expected = "(required)" if action.required else "default: "
        assert expected in (action.help or ""), f"{name}: {action.help!r} does not contain {expected!r}"


def test_commands():
    _assert_complete(cli.make_parser(), 9)


def test_bench():
    _assert_complete(bench.make_parser(), 10)


def test_experiments():
    for package in ("pydantic", "yaml", "tqdm", "matplotlib", "megatron.core"):
        pytest.importorskip(package)
    from megatron_sb import experiments

    _assert_complete(experiments._parser(), 20)


def test_flags_of_megatron():
    from megatron_sb.megatron.arguments import add_arguments

    _assert_complete(add_arguments(argparse.ArgumentParser()), 11)
