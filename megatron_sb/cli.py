"""The shell command: megatron-sb info | check | bench | train | plan | generate | eval | experiment | convert."""

import argparse
import select
import signal
import sys

from megatron_sb.processes import DISK_FULL, discard, prepare_streams
from megatron_sb.training.arguments import add_arguments, take_overrides
from megatron_sb.validation import InputError

# Optional module -> the extra in pyproject.toml that installs it.
EXTRAS = {
    **dict.fromkeys(("matplotlib", "megatron", "pandas", "psutil", "pydantic", "scipy"), "train"),
    **dict.fromkeys(("tabulate", "tensorboard", "tqdm", "yaml"), "train"),
    **dict.fromkeys(("safetensors", "transformers"), "huggingface"),
}


def info(arguments: argparse.Namespace) -> int:
    """Print the build, the devices and the kernels."""
    from megatron_sb import info as report
    from megatron_sb.ops import library

    if arguments.cmake_prefix:
        print(library.library_path().parents[2])
        return 0
    facts = report.collect()
    print(report.to_json(facts) if arguments.json else report.to_text(facts))
    return 0


def _check(_: argparse.Namespace) -> int:
    from megatron_sb import selfcheck

    return selfcheck.main()


def _bench(arguments: argparse.Namespace) -> int:
    from megatron_sb import bench

    return bench.main(arguments.rest)


def _train(arguments: argparse.Namespace) -> int:
    from megatron_sb import training

    return training.main(
        arguments.config, arguments.set, out=arguments.out, resume=arguments.resume, profile=arguments.profile
    )


def _plan(arguments: argparse.Namespace) -> int:
    from megatron_sb.planning import command

    return command.main(arguments)


def _generate(arguments: argparse.Namespace) -> int:
    from megatron_sb import generation

    return generation.main(arguments)


def _eval(arguments: argparse.Namespace) -> int:
    from megatron_sb import lm_evaluation

    return lm_evaluation.main(arguments)


def _experiment(arguments: argparse.Namespace) -> int:
    from megatron_sb import experiments

    return experiments.main(arguments.rest)


def _convert(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from megatron_sb import checkpoints
    from megatron_sb.checkpoints import multipliers
    from megatron_sb.checkpoints.runs import find_checkpoint

    source = Path(arguments.source)
    source_format = checkpoints.format_of(source)
    checkpoints.check_target(arguments.out, arguments.to)
    source = find_checkpoint(source) or source
    model = checkpoints.load(source, arguments.config, arguments.swap_attention, arguments.kv_heads)
    checkpoints.save(model, arguments.out, arguments.to, tokenizer=arguments.source)
    print(f"{source} ({source_format}) -> {arguments.out} ({arguments.to}): {model.num_parameters():,} parameters")
    folded = [f"{name} {value:g}" for name, value in multipliers.folded(model.config, arguments.to).items()]
    if folded:
        print(f"Folded into the weights, each rounded once: {', '.join(folded)}")
    return 0


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="configuration of megatron-sb train (required)")
    parser.add_argument("--gpus", required=True, type=int, help="number of GPUs (required)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override a field of FILE (repeatable; default: none)",
    )
    parser.add_argument("--stage", metavar="NAME", help="a stage (default: the one with the longest context)")
    parser.add_argument("--model", metavar="NAME", help="a stick-breaking model (default: the first one of compare)")
    parser.add_argument("--memory", type=float, default=140, help="GiB of a GPU (default: %(default)s, an H200)")
    parser.add_argument(
        "--skipped",
        type=float,
        default=0.0,
        help="share of the attention's work that skipping and the ends of documents save, from 0 to 0.999 (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="print every size of micro-batches, with and without recomputation (default: the best of each layout)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON (default: off)")


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="RUN", help="folder of a run of megatron-sb train, finished or not (required)"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="beginning of the text (required)")
    parser.add_argument("--model", metavar="NAME", help="a model of the run (default: the first one of compare)")
    parser.add_argument("--tokens", type=int, default=200, help="largest number of new tokens (default: %(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="divisor of the logits; 0 takes the likeliest tokens (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers (default: %(default)s)")
    _add_device_argument(parser)
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json of the run's data, if they are not bytes (default: none)",
    )


def _add_device_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (default: %(default)s)"
    )


def _add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="what convert accepts as SOURCE (required)")
    parser.add_argument(
        "--tasks",
        required=True,
        nargs="+",
        metavar="TASK",
        help="tasks, groups or tags of lm-eval, or patterns such as 'mmlu_*' (required)",
    )
    parser.add_argument(
        "--include-path",
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder with task files of your own (repeatable; default: none)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="folder with the model's tokenizer (default: the one next to the weights, or bytes for a model that was "
        "trained on bytes)",
    )
    parser.add_argument("--out", metavar="FILE", help="new file for the results, as JSON (default: none)")
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --out (default: off)")
    parser.add_argument("--batch-size", default="1", help="sequences in a batch, or 'auto' (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="largest number of examples of each task (default: all)")
    parser.add_argument("--num-fewshot", type=int, help="examples in each prompt (default: what the task says)")
    parser.add_argument(
        "--max-length",
        type=int,
        help="tokens at which lm-eval truncates a text on the left (default: max_position_embeddings of the model, or "
        "more if max_seq_lengths is longer)",
    )
    _add_device_argument(parser)
    parser.add_argument(
        "--metadata",
        default="{}",
        metavar="JSON",
        help="object for tasks that generate their data, such as '{\"max_seq_lengths\": [4096, 8192]}' for RULER "
        "(default: none)",
    )
    _add_reading_arguments(parser)


def _add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `checkpoints.load`."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="for a Megatron checkpoint: its training configuration (YAML), or the config.json or folder of a Hugging "
        "Face model with the same sizes (default: config.yaml of the run that contains SOURCE)",
    )
    parser.add_argument(
        "--swap-attention",
        action="store_true",
        help="read a model with softmax attention (Llama of transformers, or a run) as one with stick-breaking "
        "attention; it then needs training (default: off)",
    )
    parser.add_argument(
        "--kv-heads",
        choices=("grouped", "tiled"),
        help="for a Dolomite model with more than one KV head and fewer than query heads: query head n reads KV head "
        "n // (heads / KV heads) (grouped) or n %% KV heads (tiled) (default: what config.json records, else required)",
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. bench and experiment parse their own options."""
    parser = argparse.ArgumentParser(
        prog="megatron-sb",
        description="Stick-breaking attention for long-context training. COMMAND --help prints its options.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("info", help="print the build, the devices and the kernels")
    form = command.add_mutually_exclusive_group()
    form.add_argument(
        "--cmake-prefix", action="store_true", help="print only the folder for CMAKE_PREFIX_PATH (default: off)"
    )
    form.add_argument("--json", action="store_true", help="print JSON, for bug reports (default: off)")
    command.set_defaults(run=info)

    command = commands.add_parser("check", help="compare the kernels with a float64 reference, at most a minute")
    command.set_defaults(run=_check)

    command = commands.add_parser("bench", help="compare the speed with torch's softmax attention")
    command.add_argument("rest", nargs=argparse.REMAINDER)
    command.set_defaults(run=_bench)

    command = commands.add_parser("train", help="train models from a YAML file")
    add_arguments(command)
    command.set_defaults(run=_train)

    command = commands.add_parser("plan", help="predict memory and tokens/s of each parallel layout")
    _add_plan_arguments(command)
    command.set_defaults(run=_plan)

    command = commands.add_parser("generate", help="print text that a model of a run continues")
    _add_generate_arguments(command)
    command.set_defaults(run=_generate)

    command = commands.add_parser("eval", help="evaluate a model with lm-eval, such as on RULER")
    _add_eval_arguments(command)
    command.set_defaults(run=_eval)

    command = commands.add_parser(
        "experiment", help="run an experiment of the paper: train models, write a table and a picture"
    )
    command.add_argument("rest", nargs=argparse.REMAINDER)
    command.set_defaults(run=_experiment)

    command = commands.add_parser("convert", help="convert a checkpoint to another format")
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="folder of a checkpoint, or of a run, or of one of its models (required); its format is detected",
    )
    command.add_argument("out", metavar="OUT", help="new folder (required)")
    formats = ("huggingface", "megatron", "dolomite", "fla")
    command.add_argument("--to", required=True, choices=formats, help="format of OUT (required)")
    _add_reading_arguments(command)
    command.set_defaults(run=_convert)
    return parser


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    if arguments.run is _train:
        take_overrides(parser, arguments, rest, argv)
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def _run(argv: list[str]) -> int:
    own_options = {"bench": _bench, "experiment": _experiment}  # including --help
    run = own_options.get(argv[0]) if argv else None
    try:
        arguments = argparse.Namespace(rest=argv[1:]) if run else _parse(argv)
        return (run or arguments.run)(arguments)
    finally:
        sys.stdout.flush()  # also after --help: an error of standard output is raised here, not when the process exits


def _is_reader_gone() -> bool:
    """Return whether standard output is a pipe that nobody reads."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status. argv: arguments. Default: those of the process.

    `InputError`, a variable MEGATRON_SB_* that the operators reject, a file that the system cannot open or write, a
    missing optional module and a library that does not fit the installed torch print one line to standard error and
    return 2. If the reader of standard output is gone, as with `megatron-sb info | head -1`, the command ends silently.
    Ctrl-C is one line, too, and returns 130. Every other error is a defect of the program and keeps its traceback.
    """
    argv = sys.argv[1:] if argv is None else argv
    prepare_streams()
    try:
        return _run(argv)
    except ValueError as error:
        names_variable = str(error).startswith("MEGATRON_SB_")
        if not (isinstance(error, InputError) or names_variable):
            raise
        print(f"megatron-sb: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_reader_gone():
            discard(sys.stdout)
            return 128 + signal.SIGPIPE
        if error.filename is None and error.errno not in DISK_FULL:
            raise
        if error.filename is None:  # all files of megatron_sb have a name: see validation.naming
            discard(sys.stdout)
        print(f"megatron-sb: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRAS:
            raise
        print(
            f"megatron-sb: {argv[0]} needs the module {name}, which is not installed: "
            f"pip install 'megatron-sb[{EXTRAS[name]}]'",
            file=sys.stderr,
        )
        return 2
    except ImportError as error:
        if not str(error).startswith("megatron_sb"):  # as the errors of megatron_sb.ops.library do
            raise
        print(f"megatron-sb: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megatron-sb: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
