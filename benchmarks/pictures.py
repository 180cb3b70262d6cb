"""The command line of benchmarks that record on many ranks and draw on any machine."""

import argparse
from collections.abc import Callable
from types import ModuleType

from arguments import record_file
from report import output_file


def pyplot_for_files() -> ModuleType:
    """Import and return matplotlib.pyplot for a machine without a screen. Recording does not need matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def record_or_draw(
    about: str, record: Callable, draw: Callable, measured: str = "rows"
) -> tuple[argparse.ArgumentParser, ...]:
    """Make a parser with two commands, `record OUT.json ...` and `draw OUT.json OUT.png ...`.

    Args:
        about: docstring of the benchmark. Its first line is the description in --help.
        record: function of the parsed options that writes options.json.
        draw: function of the parsed options that writes options.picture.
        measured: name of the measurements in the record.

    Returns:
        The parser, the parser of `record` and the parser of `draw`. The parsed `options.run` is the function to call.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record", help="measure on the GPUs of a host")
    recording.add_argument("json", type=output_file, help="file to write")
    recording.set_defaults(run=record)
    drawing = commands.add_parser("draw", help="draw a record, on any machine")
    drawing.add_argument("json", type=record_file("machine", measured), help="file that `record` wrote")
    drawing.add_argument("picture", type=output_file, help="picture to write")
    drawing.set_defaults(run=draw)
    return parser, recording, drawing
