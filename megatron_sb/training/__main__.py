"""One rank of a job, started by `main` or by torchrun: `python -m megatron_sb.training CONFIG.yaml ...`; or all."""

import argparse
import sys

from megatron_sb.training import main


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megatron_sb.training", description="Train as a YAML configuration says.")
    parser.add_argument("config_path", metavar="config", help="a YAML file; see configs/README.md")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="overrides, such as stages.0.steps=10")
    parser.add_argument("--out", help="directory of the run (default: runs/NAME-TIME)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, or with the newest one")
    parser.add_argument("--profile", metavar="FIRST:LAST", help="steps of each stage to run under torch's profiler")
    return parser.parse_intermixed_args()


# Megatron-Core's checkpoints spawn processes, which import this module again under another name.
if __name__ == "__main__":
    arguments = _arguments()
    sys.exit(main(**vars(arguments)))
