"""`python -m megatron_sb.training CONFIG.yaml ...`: one rank under torchrun, otherwise a whole job on this machine."""

import argparse
import sys

from megatron_sb.processes import prepare_streams
from megatron_sb.training import main
from megatron_sb.training.arguments import add_arguments, take_overrides


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron_sb.training", description="Train a model as a YAML configuration describes."
    )
    add_arguments(parser)
    arguments, rest = parser.parse_known_args()
    take_overrides(parser, arguments, rest, sys.argv[1:])
    return arguments


# Megatron-Core's checkpoints spawn processes, which import this module under another name.
if __name__ == "__main__":
    prepare_streams()
    arguments = _arguments()
    sys.exit(
        main(arguments.config, arguments.set, out=arguments.out, resume=arguments.resume, profile=arguments.profile)
    )
