"""Experiments with the trainer: `megatron-sb experiment NAME CONFIG.yaml` writes one table and one picture.

An experiment is a module with `add_arguments(parser)` and `run(options) -> int`, which returns the exit status. The
first paragraph of its docstring is its help text. `sweep` trains models, `tables` writes results.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from megatron_sb.processes import outliving_readers

# Name on the command line -> module.
EXPERIMENTS: dict[str, str] = {
    "attention-picture": "megatron_sb.experiments.attention_picture",
    "corpus": "megatron_sb.experiments.corpus",
    "extrapolation": "megatron_sb.experiments.extrapolation",
    "mqrar": "megatron_sb.experiments.mqrar",
    "needles": "megatron_sb.experiments.needles",
    "skipping": "megatron_sb.experiments.skipping",
    "stolen-attention": "megatron_sb.experiments.stolen_attention",
    "swap": "megatron_sb.experiments.swap",
    "verdict": "megatron_sb.experiments.verdict",
}


def main(argv: list[str]) -> int:
    """Run the experiment that the command line names.

    The `run` of the experiment receives the options `config` (path of the file), `set` (list of overrides,
    dotted.field=value), `out` (folder of runs and results; None: runs/NAME-CONFIG) and the experiment's own options.

    Args:
        argv: arguments after `megatron-sb experiment`.

    Returns:
        The exit status: 0 on success, 128 + N after signal N, otherwise the status of the run that failed.

    Raises:
        ValueError: the configuration or an option is invalid.

    Example:
        >>> from megatron_sb import experiments
        >>> experiments.main(["mqrar", "configs/mqrar_small.yaml", "--pairs", "16", "--jobs", "2"])  # doctest: +SKIP
        0
    """
    from megatron_sb.experiments import sweep

    options = _parser().parse_args(argv)
    sweep.output_folder(options)  # check --out before anything runs
    with outliving_readers():
        try:
            return options.run(options)
        except sweep.SweepStopped as stop:
            print(f"megatron-sb experiment: {stop}", file=sys.stderr)
            return stop.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-sb experiment", description="Train what an experiment needs and write its table and picture."
    )
    names = parser.add_subparsers(required=True, metavar="NAME")
    for name, path in EXPERIMENTS.items():
        module = importlib.import_module(path)
        about = module.__doc__.partition("\n\n")[0].replace("\n", " ")
        command = names.add_parser(name, help=about.replace("%", "%%"), description=about)
        command.add_argument("config", metavar="CONFIG.yaml", help="configuration file (required)")
        command.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="FIELD=VALUE",
            help="override a field of CONFIG.yaml, for example model.num_layers=2 (repeatable; default: none)",
        )
        command.add_argument(
            "--out",
            metavar="FOLDER",
            help="folder of runs and results; an existing one is resumed (default: runs/NAME-CONFIG)",
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, experiment=name)
    return parser
