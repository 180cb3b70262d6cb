"""Experiments on the trainer: `megatron-sb experiment NAME CONFIG.yaml`, each one command, one configuration, one table
and one picture.

An experiment is a module with `add_arguments(parser)` and `run(options) -> int` (the exit status), whose docstring
begins with what it shows. `sweep` trains what it needs, `tables` writes what it found.
"""

from __future__ import annotations

import argparse
import importlib
import sys

# Name on the command line -> module.
EXPERIMENTS: dict[str, str] = {
    "attention-picture": "megatron_sb.experiments.attention_picture",
    "extrapolation": "megatron_sb.experiments.extrapolation",
    "mqrar": "megatron_sb.experiments.mqrar",
    "needles": "megatron_sb.experiments.needles",
    "skipping": "megatron_sb.experiments.skipping",
    "stolen-attention": "megatron_sb.experiments.stolen_attention",
}


def main(argv: list[str]) -> int:
    """Run the experiment that the command line names; its exit status.

    options of `run` have `config` (the file's path), `set` (overrides, dotted.field=value), `out` (the folder of its
    runs and results, one that is there is gone on with; None: runs/NAME-CONFIG), and those of the experiment.
    """
    from megatron_sb.experiments import sweep

    options = _parser().parse_args(argv)
    sweep.output_folder(options)  # refused before anything is done
    try:
        return options.run(options)
    except sweep.SweepStopped as stop:
        print(f"megatron-sb experiment: {stop}", file=sys.stderr)
        return stop.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-sb experiment", description="An experiment on the trainer.")
    names = parser.add_subparsers(required=True, metavar="NAME")
    for name, path in EXPERIMENTS.items():
        module = importlib.import_module(path)
        about = module.__doc__.partition("\n\n")[0].replace("\n", " ")
        command = names.add_parser(name, help=about.replace("%", "%%"), description=about)
        command.add_argument("config", metavar="CONFIG.yaml")
        command.add_argument(
            "--set", action="append", default=[], metavar="FIELD=VALUE", help="over the file's, as model.num_layers=2"
        )
        command.add_argument(
            "--out", metavar="FOLDER", help="of its runs and results, gone on with if it is there; runs/NAME-CONFIG"
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, experiment=name)
    return parser
