"""The shell command: megatron-sb info | check | bench | train | experiment | convert."""

import argparse
import platform
import sys

import torch

import megatron_sb
from megatron_sb.ops import library

# Optional modules -> the extra of pyproject.toml that brings them.
EXTRAS = {
    **dict.fromkeys(("matplotlib", "megatron", "pandas", "psutil", "pydantic", "scipy"), "train"),
    **dict.fromkeys(("tabulate", "tensorboard", "tqdm", "yaml"), "train"),
    **dict.fromkeys(("safetensors", "transformers"), "huggingface"),
}


def info(arguments: argparse.Namespace) -> int:
    """Print the build, the devices, and the kernels for each head_dim."""
    if arguments.cmake_prefix:
        print(library.library_path().parents[1])
        return 0
    build = library.build_info()
    print(f"megatron_sb   {build['version']}, {library.library_path()}")
    if build["cuda"] is None:
        print("build         CPU BUILD without GPU kernels. For these, build with nvcc and a CUDA build of torch.")
    else:
        print(f"build         CUDA {build['cuda']}")
    print(f"compiler      {build['compiler']}")
    print(f"torch         {torch.__version__} (built with {build['torch']})")
    print(f"python        {platform.python_version()} on {platform.machine()}")
    print(f"cpu           {torch.ops.megatron_sb.instruction_set()}, {torch.get_num_threads()} threads")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        print(f"cuda:{index}        {torch.cuda.get_device_name(index)}, sm_{major}{minor}")
    if count == 0:
        print("cuda          no device")
    print("kernels, fastest first")
    print(torch.ops.megatron_sb.describe_kernels(), end="")
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


def _experiment(arguments: argparse.Namespace) -> int:
    from megatron_sb import experiments

    return experiments.main(arguments.rest)


def _convert(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from megatron_sb import checkpoints

    source = checkpoints.format_of(Path(arguments.source))
    checkpoints.check_target(arguments.out, arguments.to)
    model = checkpoints.load(arguments.source, arguments.config)
    checkpoints.save(model, arguments.out, arguments.to)
    print(f"{arguments.source} ({source}) -> {arguments.out} ({arguments.to}): {model.num_parameters():,} parameters")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-sb", description=megatron_sb.__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("info", help="print the build, the devices, and the kernel for each head_dim")
    command.add_argument("--cmake-prefix", action="store_true", help="print only the folder for CMAKE_PREFIX_PATH")
    command.set_defaults(run=info)

    command = commands.add_parser("check", help="test this machine against a float64 oracle (at most a minute)")
    command.set_defaults(run=_check)

    command = commands.add_parser("bench", help="compare speed with torch's softmax attention (see bench --help)")
    command.add_argument("rest", nargs=argparse.REMAINDER)
    command.set_defaults(run=_bench)

    command = commands.add_parser("train", help="train from a YAML file; starts its own ranks, or runs under torchrun")
    command.add_argument("config", metavar="CONFIG.yaml")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override a field of the file, such as model.num_layers=2; repeatable",
    )
    command.add_argument("--out", metavar="DIR", help="new folder for the run (default: runs/NAME-TIME)")
    command.add_argument("--resume", action="store_true", help="resume the run in --out (default: the newest run)")
    command.add_argument(
        "--profile", metavar="FIRST:LAST", help="profile these steps of each stage, such as 10:12 (default: none)"
    )
    command.set_defaults(run=_train)

    command = commands.add_parser(
        "experiment", help="train models and print a table and a plot (see experiment --help)"
    )
    command.add_argument("rest", nargs=argparse.REMAINDER)
    command.set_defaults(run=_experiment)

    command = commands.add_parser("convert", help="convert a checkpoint to another format without changing a weight")
    command.add_argument("source", metavar="SOURCE", help="checkpoint folder; its format is detected")
    command.add_argument("out", metavar="OUT", help="new folder")
    command.add_argument("--to", required=True, choices=("huggingface", "megatron", "dolomite", "fla"))
    command.add_argument(
        "--config",
        metavar="FILE",
        help="for a Megatron checkpoint: its training configuration, or a config.json with the same sizes",
    )
    command.set_defaults(run=_convert)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    Invalid arguments and missing optional modules print one line to standard error and return 2.
    """
    argv = sys.argv[1:] if argv is None else argv
    own_options = {"bench": _bench, "experiment": _experiment}  # --help included
    run = own_options.get(argv[0]) if argv else None
    arguments = argparse.Namespace(rest=argv[1:]) if run else _parser().parse_args(argv)
    try:
        return (run or arguments.run)(arguments)
    except (ValueError, TypeError, FileNotFoundError) as error:
        print(f"megatron-sb: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRAS:
            raise
        print(
            f"megatron-sb: {argv[0]} needs the module {name}, which is not installed: pip install '.[{EXTRAS[name]}]' "
            "in the sources of megatron_sb",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
