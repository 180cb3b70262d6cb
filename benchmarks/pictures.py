"""What benchmarks share that record on many ranks and draw anywhere: two commands, and the library for pictures."""

import argparse
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def pyplot_for_files() -> ModuleType:
    """matplotlib.pyplot without a screen; where records are made it need not be installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def record_or_draw(about: str, record: Callable, draw: Callable) -> tuple[argparse.ArgumentParser, ...]:
    """The parser, and those of its commands `record OUT.json ..` and `draw OUT.json OUT.png ..`; options.run is one."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record", help="on the GPUs of a host, under torchrun")
    recording.add_argument("json", type=Path)
    recording.set_defaults(run=record)
    drawing = commands.add_parser("draw", help="anywhere")
    drawing.add_argument("json", type=Path)
    drawing.add_argument("picture", type=Path)
    drawing.set_defaults(run=draw)
    return parser, recording, drawing
