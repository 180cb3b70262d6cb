"""`python -m megatron_sb.training CONFIG.yaml ...`: one rank under torchrun, otherwise a whole job on this machine."""

import argparse
import sys

from megatron_sb.training import main


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron_sb.training", description="Train a model as a YAML configuration describes."
    )
    parser.add_argument(
        "config_path", metavar="config", help="YAML file; configs/README.md explains its fields (required)"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="field=value",
        help="override of a field, such as stages.0.steps=10 (default: none)",
    )
    parser.add_argument(
        "--out", help="directory of the run (default: a new runs/NAME-TIME; with --resume the newest runs/NAME-TIME)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue a run from its newest checkpoint (default: start a new run)"
    )
    parser.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        help="profile these steps of each stage with torch's profiler, such as 10:12 (default: none)",
    )
    return parser.parse_intermixed_args()


# Megatron-Core's checkpoints spawn processes, which import this module under another name.
if __name__ == "__main__":
    arguments = _arguments()
    sys.exit(main(**vars(arguments)))
