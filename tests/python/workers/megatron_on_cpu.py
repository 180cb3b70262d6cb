"""Runs a Megatron training script under the launcher on CPUs, over gloo: torchrun megatron_on_cpu.py SCRIPT.py FLAGS..

Give `--num-workers 0`: workers of a data loader would look for the GPU.
"""

import sys
from pathlib import Path


def main() -> None:
    """Answer for the GPU, do what the launcher does, and end the rank."""
    # In place of this file's own folder; the script's folder decides which Megatron is meant, as under the launcher.
    sys.path[:1] = [str(Path(sys.argv[1]).resolve().parent), str(Path(__file__).parents[1])]
    from megatron.training import initialize
    from support import megatron_cpu
    from support.launch import end_rank

    from megatron_sb.megatron import launch

    megatron_cpu.answer_for_gpu()
    megatron_cpu.answer_for_streams()
    megatron_cpu.answer_for_training()
    initialize._warmup_jit_function = lambda *args, **kwargs: None  # it draws from the generator that weights come from
    with megatron_cpu.TensorsOnTheCpu():
        launch.main()
    end_rank()


if __name__ == "__main__":
    main()
